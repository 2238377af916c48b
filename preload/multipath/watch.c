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

/* finish_directly copies a part of a lost relay once the stream has come to the copy. */
static void finish_directly(Pending *f, Part *p) {
  Target *t = f->target;
  Opaque unused;
  if (own.cuCtxPushCurrent_v2(t->context) != SUCCESS) return;
  CUresult begun = own.cuEventQuery(f->begin);
  if (begun == SUCCESS) {
    CUresult result = own.cuMemcpyAsync(p->to, p->from, p->bytes, t->direct);
    if (result == SUCCESS) result = own.cuStreamSynchronize(t->direct);
    if (result != SUCCESS && own.cuEventQuery(f->begin) == SUCCESS) {
      /* The target is there, and its bytes are not: the program must not go on with what it has not got. */
      fprintf(stderr, "moeserve-multipath: GPU %d, which relayed a copy, is lost, and the copy cannot be made directly (error %d): the program ends here\n",
              p->relay->device, result);
      abort();
    }
  }
  own.cuCtxPopCurrent_v2(&unused);
  /* If the target itself is lost, the program learns it from the driver. */
  if (begun != NOT_READY) __atomic_store_n(p->set->word, p->value, __ATOMIC_RELEASE);
}

/* dead asks the driver whether the context of a relay is lost. A relay that was given up because an operation was
   refused may still copy what was enqueued before: whoever finished that directly would have it written again
   later. */
static int dead(Part *p) {
  Relay *r = p->relay;
  Opaque unused;
  if (own.cuCtxPushCurrent_v2(r->context) != SUCCESS) return r->state == LOST;
  CUresult result = own.cuStreamQuery(p->set->stream[0]);
  own.cuCtxPopCurrent_v2(&unused);
  if (result == SUCCESS || result == NOT_READY || result == 4 /* the process ends */) return 0;
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
  Opaque unused;
  float ms;
  if (own.cuCtxPushCurrent_v2(t->context) == SUCCESS) {
    if (own.cuEventElapsedTime(&ms, f->begin, f->end) == SUCCESS) seconds += ms / 1e3, measured += f->bytes;
    if (own.cuEventElapsedTime(&ms, f->begin, f->middle) == SUCCESS) average(&t->rate[f->kind], f->direct, ms);
    own.cuCtxPopCurrent_v2(&unused);
  }
  for (int i = 0; i < f->parts; i++) {
    Part *p = &f->part[i];
    p->relay->bytes += p->bytes;
    if (!p->timed) continue;
    p->set->timing = 0;
    if (p->relay->state != READY || own.cuCtxPushCurrent_v2(p->relay->context) != SUCCESS) continue;
    if (own.cuEventElapsedTime(&ms, p->set->begun, p->set->ended) == SUCCESS) average(&t->over[p->relay->device][f->kind], p->bytes, ms);
    own.cuCtxPopCurrent_v2(&unused);
  }
}

/* advance looks at a copy in progress: its relays may be lost, it may have ended. */
static void advance(Pending *f) {
  int left = 0;
  for (int i = 0; i < f->parts; i++) {
    Part *p = &f->part[i];
    if (reached(p->set, p->value)) continue;
    /* The word goes up by one at a time: it speaks for copies before this one, too. */
    if (dead(p) && p->value == *p->set->word + 1) finish_directly(f, p);
    left |= !reached(p->set, p->value);
  }
  if (left || !f->ended) return;
  Opaque unused;
  CUresult result = own.cuCtxPushCurrent_v2(f->target->context);
  if (result == SUCCESS) {
    result = own.cuEventQuery(f->end);
    own.cuCtxPopCurrent_v2(&unused);
  }
  if (result == NOT_READY) return;
  measure(f);
  f->state = UNUSED;
  pending--;
  pthread_cond_broadcast(&changed);
}

static void *watch(void *unused) {
  int relaxed = 2; /* what this thread calls must not end a capture of another */
  own.cuThreadExchangeStreamCaptureMode(&relaxed);
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
