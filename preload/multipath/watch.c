/* The thread of the library: it opens relays, measures copies that have ended, and finishes the parts of a
   relay that is lost directly. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdlib.h>

#include "state.h"

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
int asked, pending, opening, ending, used;
double seconds;
unsigned long long measured;
static pthread_t thread;
static int running;

/* finish_directly copies a part of a lost relay once the stream has come to the copy, and writes the word. Without the
   bytes there is no word, and nothing behind the copy begins: if the target's context is in error, too, the program
   learns it from its own calls, and if an error was another context's, the next attempt succeeds. It returns what the
   target's context has. */
static CUresult finish_directly(Pending *f, Part *p) {
  Target *t = f->target;
  Opaque before;
  CUresult result = enter(t->context, &before), begun = result;
  if (result == SUCCESS) {
    result = begun = own.cuEventQuery(f->begin);
    if (result == SUCCESS) result = own.cuMemcpyAsync(p->to, p->from, p->bytes, t->direct);
    if (result == SUCCESS) result = own.cuStreamSynchronize(t->direct);
    if (begun == SUCCESS && result == SUCCESS) __atomic_store_n(p->set->word, p->value, __ATOMIC_RELEASE);
    if (!works(result)) begun = own.cuEventQuery(f->begin);
    leave(before);
  }
  p->refusals = works(result) ? 0 : p->refusals + works(begun);
  if (p->refusals == REFUSALS) {
    /* The target is there, and its bytes are not: the program would wait for ever. */
    fprintf(stderr, "moeserve-multipath: GPU %d, which relayed a copy, is lost, and the copy cannot be made directly (error %d): the program ends here\n",
            p->relay->device, result);
    abort();
  }
  return begun;
}

/* dead asks the driver whether the context of a relay is lost. A relay that was given up because an operation was
   refused may still copy what was enqueued before, and so may one whose query returns the error of another context, once:
   whoever finished that directly would have it written again later. */
static int dead(Part *p) {
  Relay *r = p->relay;
  Opaque before;
  CUresult result = enter(r->context, &before);
  if (result == SUCCESS) {
    result = own.cuStreamQuery(p->set->stream[0]);
    leave(before);
  }
  p->errors = works(result) ? 0 : p->errors + 1;
  if (p->errors < CONFIRMED) return 0;
  if (r->state != LOST) r->state = LOST, r->what = "cuStreamQuery", r->code = result;
  return 1;
}

static void average(double *rate, size_t bytes, float ms) {
  if (bytes < LEAST_CHUNK || ms <= 0) return;
  double now = bytes / (ms / 1e3);
  *rate = *rate > 0 ? (*rate + now) / 2 : now;
}

/* measure takes the rates of a copy that has ended. */
static void measure(Pending *f) {
  Target *t = f->target;
  Opaque before;
  float ms;
  if (enter(t->context, &before) == SUCCESS) {
    if (own.cuEventElapsedTime(&ms, f->begin, f->end) == SUCCESS) seconds += ms / 1e3, measured += f->bytes;
    if (own.cuEventElapsedTime(&ms, f->begin, f->middle) == SUCCESS) average(&t->rate[f->kind], f->direct, ms);
    leave(before);
  }
  for (int i = 0; i < f->parts; i++) {
    Part *p = &f->part[i];
    p->relay->bytes += p->bytes;
    if (!p->timed) continue;
    if (p->relay->state != READY || enter(p->relay->context, &before) != SUCCESS) continue;
    if (own.cuEventElapsedTime(&ms, p->set->begun, p->set->ended) == SUCCESS) average(&t->over[p->relay->device][f->kind], p->bytes, ms);
    leave(before);
  }
}

/* advance looks at a copy in progress: its relays may be lost, it may have ended. */
static void advance(Pending *f) {
  int left = 0;
  CUresult target = SUCCESS;
  for (int i = 0; i < f->parts; i++) {
    Part *p = &f->part[i];
    if (reached(p->set, p->value)) continue;
    /* The word goes up by one at a time: it speaks for copies before this one, too. */
    if (dead(p) && p->value == *p->set->word + 1) {
      CUresult now = finish_directly(f, p);
      if (!works(now)) target = now;
    }
    left |= !reached(p->set, p->value);
  }
  f->errors = works(target) ? 0 : f->errors + 1;
  if (f->errors == CONFIRMED && !f->target->told) {
    f->target->told = 1;
    fprintf(stderr, "moeserve-multipath: a GPU that relayed a copy is lost, and CUDA reports error %d for GPU %d, too: the copy is not completed\n",
            target, f->target->device);
  }
  if (left && f->errors >= HOPELESS) release(f);
  if (left || !f->ended) return;
  Opaque before;
  CUresult result = enter(f->target->context, &before);
  if (result == SUCCESS) {
    result = own.cuEventQuery(f->end);
    leave(before);
  }
  if (result == NOT_READY) return;
  measure(f);
  release(f);
}

static void *watch(void *unused) {
  int relaxed = 2; /* what this thread calls must not end a capture of another */
  own.cuThreadExchangeStreamCaptureMode(&relaxed);
  pthread_setname_np(pthread_self(), "moeserve-copies");
  pthread_mutex_lock(&lock);
  while (!ending) {
    if (!asked && !pending) {
      pthread_cond_wait(&changed, &lock);
      continue;
    }
    for (int d = 0; d < MAX_DEVICES && asked; d++) {
      Target *t = targets[d];
      if (!t || t->state != ASKED) continue;
      opening = 1;
      pthread_mutex_unlock(&lock);
      int open = open_target(t);
      pthread_mutex_lock(&lock);
      t->state = open ? OPEN : REFUSES;
      t->retry = now() + RETRY_SECONDS;
      opening = 0, asked--;
      pthread_cond_broadcast(&changed);
    }
    for (int d = 0; d < MAX_DEVICES && pending; d++)
      for (int i = 0; targets[d] && i < MAX_PENDING; i++)
        if (targets[d]->copies[i].state == PENDING) advance(&targets[d]->copies[i]);
    pthread_mutex_unlock(&lock);
    nap(500000);
    pthread_mutex_lock(&lock);
  }
  pthread_mutex_unlock(&lock);
  return unused;
}

/* lock_soon takes the lock, unless a call of the driver does not return under it: a process must end. */
static int lock_soon(void) {
  struct timespec limit;
  clock_gettime(CLOCK_REALTIME, &limit);
  limit.tv_sec += 2;
  return !pthread_mutex_timedlock(&lock, &limit);
}

/* stop ends the thread before the driver ends. What is in progress needs it no more. */
static void stop(void) {
  struct timespec limit;
  if (!running || !lock_soon()) return; /* not running: this is a forked process */
  ending = 1;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
  clock_gettime(CLOCK_REALTIME, &limit);
  limit.tv_sec += 5;
  pthread_timedjoin_np(thread, NULL, &limit);
}

int start(void) {
  if (running) return 1;
  /* The program's signals are handled on its own threads. */
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  running = !pthread_create(&thread, NULL, watch, NULL);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (running) atexit(stop);
  return running;
}

int relay_child(void) {
  running = 0;
  return used;
}

void relay_report(FILE *out) {
  if (!lock_soon()) return;
  if (seconds > 0) fprintf(out, "; %.1f GB/s", measured / seconds / 1e9);
  for (int d = 0; d < MAX_DEVICES; d++) {
    Relay *r = &relays[d];
    if (r->state == READY)
      fprintf(out, "; over GPU %d: %llu bytes", d, r->bytes);
    else if (r->what)
      fprintf(out, "; GPU %d %s: %s: error %d, %llu bytes before", d, r->state == LOST ? "is lost" : "cannot be a relay", r->what, r->code, r->bytes);
  }
  pthread_mutex_unlock(&lock);
}
