/* Copies over several PCIe links for a program that knows nothing of it.

   A copy has a direct part, which the driver makes in the program's own stream, and one part for each relay:

     stream of the program   begin | direct part ........................ | wait for words | last bytes
     relay, 1st stream       wait for begin | host to buffer | buffer to GPU | ...       | write the word
     relay, 2nd stream       wait for begin | host to buffer | buffer to GPU | ...

   All of it is enqueued before the program's call returns, in an order in which everything waits only for
   what was enqueued before, so that the copy ends without the host: a program may hold locks of the driver,
   load a kernel, free memory or end at any time. An engine that decides on the host which link takes the next
   chunk cannot promise that: the stream would wait for a word that depends on calls yet to be made, and the
   driver lets such calls wait while it waits itself for the device to be idle.

   So links do not pull: the parts are sized by the rates that earlier copies had. The last bytes are the
   program's own call, behind the wait: order, errors and (for calls that return when the copy is done) the
   end are the driver's. A relay has a context of its own, so that its streams share no queue of the hardware
   with the program's, and nothing that the program does to the relay's primary context reaches it. The
   buffers of one set serve one stream of the program at a time: a copy never waits for one of another stream.

   A thread opens relays, measures, and finishes the parts of a relay that is lost directly. Only then does a
   stream wait for the host. It sleeps while no relayed copy is in progress, and a copy below the threshold does not
   come here. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "state.h"

const char *const reason_names[REASONS] = {"relayed", "small",  "pageable", "managed", "device-to-device", "range",    "memory", "context",
                                           "capture", "shape",  "access",   "starting", "no-relay",        "busy",     "refused"};

/* Attributes of pointers. */
enum { TYPE = 2, DEVICE_POINTER, SYNC_MEMOPS = 6, BUFFER_ID, IS_MANAGED, ORDINAL, PLAIN, BEGIN, SIZE, ACCESS_FLAGS = 16, MAPPING_SIZE = 18, MAPPING_BEGIN };

/* inspect asks the driver for the memory of some bytes. */
static CUresult inspect(CUdeviceptr at, size_t bytes, Memory *m) {
  unsigned type = 0, managed = 0, sync = 0, plain = 0;
  int ordinal = -1;
  unsigned long long size = 0, first = 0, last = 0;
  CUdeviceptr begin = 0;
  int names[] = {TYPE, IS_MANAGED, ORDINAL, BEGIN, SIZE};
  void *values[] = {&type, &managed, &ordinal, &begin, &size};
  CUresult result = own.cuPointerGetAttributes(5, names, values, at);
  if (result == SUCCESS && type == 2) {
    /* Memory of cuMemAlloc, which a context with peer access can access as a whole, is known by this. */
    own.cuPointerGetAttribute(&plain, PLAIN, at);
    if (own.cuPointerGetAttribute(&sync, SYNC_MEMOPS, at) != SUCCESS) sync = 1;
  }
  /* Where the driver does not tell the range, bytes of one allocation have one number. */
  if (result == SUCCESS && type && !size && own.cuPointerGetAttribute(&first, BUFFER_ID, at) == SUCCESS &&
      own.cuPointerGetAttribute(&last, BUFFER_ID, at + bytes - 1) == SUCCESS && first && first == last)
    begin = at, size = bytes;
  *m = (Memory){.host = type == 1, .device = type == 2, .managed = managed & 1, .plain = plain & 1, .synchronous = sync & 1,
                .ordinal = ordinal, .begin = begin, .size = size};
  return result;
}

Reason decide(const Copy *c, const Facts *f) {
  if (f->capturing) return CAPTURED;
  if (f->to.managed || f->from.managed) return MANAGED;
  int to_device = f->to.device && !f->from.device, to_host = f->from.device && !f->to.device;
  if (!to_device && !to_host) return DEVICE;
  const Memory *device = to_device ? &f->to : &f->from, *host = to_device ? &f->from : &f->to;
  if (!host->host) return PAGEABLE;
  for (int i = 0; i < 2; i++) {
    const Memory *m = i ? &f->to : &f->from;
    CUdeviceptr at = i ? c->to : c->from;
    if (at < m->begin || c->bytes > m->size || at - m->begin > m->size - c->bytes) return RANGE;
  }
  if (device->synchronous) return MEMORY;
  if (!f->stream_there || device->ordinal != f->device) return CONTEXT;
  return RELAYED;
}

/* has_pinned says whether the current context has pinned memory of the host at the same address. */
static int has_pinned(CUdeviceptr at) {
  CUdeviceptr there = 0;
  return own.cuPointerGetAttribute(&there, DEVICE_POINTER, at) == SUCCESS && there == at;
}

/* has_mapped says whether the device of the current context may read and write memory that the program has
   mapped in pieces, each with rights of its own. */
static int has_mapped(CUdeviceptr at, size_t bytes) {
  for (CUdeviceptr end = at + bytes; at < end;) {
    unsigned rights = 0;
    CUdeviceptr begin = 0;
    unsigned long long size = 0;
    if (own.cuPointerGetAttribute(&rights, ACCESS_FLAGS, at) != SUCCESS || rights != 3) return 0;
    if (own.cuPointerGetAttribute(&begin, MAPPING_BEGIN, at) != SUCCESS || own.cuPointerGetAttribute(&size, MAPPING_SIZE, at) != SUCCESS) return 0;
    if (begin > at || begin + size <= at) return 0;
    at = begin + size;
  }
  return 1;
}

/* has says whether a relay, whose context is current, has both sides of a copy. */
static Reason has(const Copy *c, const Facts *f) {
  int to_device = f->to.device;
  CUdeviceptr host = to_device ? c->from : c->to, device = to_device ? c->to : c->from;
  if (!has_pinned(host) || !has_pinned(host + c->bytes - 1)) return ACCESS;
  return (to_device ? f->to.plain : f->from.plain) || has_mapped(device, c->bytes) ? RELAYED : MEMORY;
}

/* pick returns a set of a relay's buffers for a stream: its own, or one that nobody uses. */
static Set *pick(Relay *r, unsigned long long user, size_t chunks) {
  Set *unused = NULL;
  for (int i = 0; i < sets; i++) {
    Set *s = &r->sets[i];
    if (reached(s, s->issued) && !s->reserved) {
      unused = s;
      continue;
    }
    if (s->user != user) continue;
    /* What waits in the hardware's queues is bounded, or the call would wait for room there. */
    for (int d = 0; d < MAX_DEVICES; d++)
      for (int k = 0; targets[d] && k < MAX_PENDING; k++) {
        Pending *f = &targets[d]->copies[k];
        for (int n = 0; f->state == PENDING && n < f->parts; n++)
          if (f->part[n].set == s && !reached(s, f->part[n].value)) chunks += f->part[n].chunks;
      }
    return chunks <= MAX_CHUNKS ? s : NULL;
  }
  return unused;
}

static size_t chunk_bytes(size_t part) {
  size_t chunk = (part / 8 + LEAST_CHUNK - 1) / LEAST_CHUNK * LEAST_CHUNK;
  return chunk < LEAST_CHUNK ? LEAST_CHUNK : chunk > BUFFER ? BUFFER : chunk;
}

/* divide sizes the parts by the rates of their paths, and returns the bytes of the direct one. */
static size_t divide(Target *t, Pending *f, size_t bytes) {
  double rates[MAX_PARTS + 1], known = 0, sum = 0;
  for (int i = 0; i <= f->parts; i++) {
    rates[i] = i < f->parts ? t->over[f->part[i].relay->device][f->kind] : t->rate[f->kind];
    if (rates[i] > known) known = rates[i];
  }
  for (int i = 0; i <= f->parts; i++) {
    /* A path that is not known yet counts as the best; a slow one gets a little, to be measured again. */
    if (rates[i] <= 0) rates[i] = known > 0 ? known : 1;
    if (rates[i] < known / 32) rates[i] = known / 32;
    sum += rates[i];
  }
  size_t direct = bytes;
  for (int i = 0; i < f->parts; i++) {
    f->part[i].bytes = (size_t)(bytes * (rates[i] / sum)) & ~(size_t)4095;
    direct -= f->part[i].bytes;
  }
  return direct;
}

/* enqueue_part enqueues a part on the streams of its relay, whose context is current. */
static CUresult enqueue_part(Pending *f, Part *p, size_t chunk) {
  Set *s = p->set;
  CUresult result = SUCCESS;
  p->timed = !s->timing && p->relay->state == READY;
  for (int i = 0; i < 2 && result == SUCCESS; i++) result = own.cuStreamWaitEvent(s->stream[i], f->begin, 0);
  if (p->timed && result == SUCCESS) result = own.cuEventRecord(s->begun, s->stream[0]);
  for (size_t at = 0, i = 0; at < p->bytes && result == SUCCESS; at += chunk, i++) {
    size_t n = p->bytes - at < chunk ? p->bytes - at : chunk;
    Opaque stream = s->stream[i % 2];
    result = own.cuMemcpyAsync(s->buffer[i % 2], p->from + at, n, stream);
    if (result == SUCCESS) result = own.cuMemcpyAsync(p->to + at, s->buffer[i % 2], n, stream);
  }
  if (result == SUCCESS) result = own.cuEventRecord(s->joined, s->stream[1]);
  if (result == SUCCESS) result = own.cuStreamWaitEvent(s->stream[0], s->joined, 0);
  if (p->timed && result == SUCCESS) result = own.cuEventRecord(s->ended, s->stream[0]);
  /* A fence of the whole system goes before the write: who sees the word sees the bytes. */
  if (result == SUCCESS) result = own.cuStreamWriteValue32_v2(s->stream[0], (CUdeviceptr)(uintptr_t)s->word, p->value, 0);
  s->timing |= p->timed;
  return result;
}

/* give_up marks the relay of a part that could not be enqueued as lost. What was enqueued of it must not write
   later: its streams run out, unless they are lost, too. Copies before it keep their values of the word. */
static void give_up(Part *p, CUresult result) {
  p->relay->state = LOST, p->relay->what = "enqueueing", p->relay->code = result;
  for (int i = 0; i < 2; i++) own.cuStreamSynchronize(p->set->stream[i]);
  p->set->issued--;
  p->value = *p->set->word; /* nothing to wait for */
  p->bytes = 0;
}

/* choose_parts finds relays for a copy, and reserves buffers of theirs. */
static Reason choose_parts(Target *t, Pending *f, const Copy *c, const Facts *facts, unsigned long long user) {
  size_t most = c->bytes / LEAST_PART;
  Reason why = NO_RELAY;
  Opaque before;
  most = most < 2 ? 1 : most - 1 > MAX_PARTS ? MAX_PARTS : most - 1;
  f->parts = 0;
  for (int d = 0; d < MAX_DEVICES && f->parts < (int)most; d++) {
    Relay *r = &relays[d];
    if (d == t->device || r->state != READY || !(r->reaches >> t->device & 1)) continue;
    /* At most half of the copy is expected to go over one relay. */
    Set *s = pick(r, user, c->bytes / 2 / chunk_bytes(c->bytes / 2) + 1);
    if (!s) {
      why = BUSY;
      continue;
    }
    if (enter(r->context, &before) != SUCCESS) continue;
    Reason can = has(c, facts);
    leave(before);
    if (can != RELAYED) {
      why = can;
      continue;
    }
    s->user = user, s->reserved++;
    f->part[f->parts++] = (Part){.relay = r, .set = s};
  }
  return f->parts ? RELAYED : why;
}

/* unreserve frees a copy that was not enqueued; the lock is held. */
static void unreserve(Pending *f) {
  for (int i = 0; i < f->parts; i++) f->part[i].set->reserved--;
  f->state = UNUSED;
}

/* enqueue_parts enqueues what relays copy, from byte at on, and returns the first byte behind it. The lock is
   held, so that the words of a set are written in the order of their values. */
static size_t enqueue_parts(Pending *f, Copy *c, size_t at) {
  Opaque before;
  for (int i = 0; i < f->parts; i++) {
    Part *p = &f->part[i];
    size_t chunk = chunk_bytes(p->bytes);
    p->to = c->to + at, p->from = c->from + at, p->chunks = (p->bytes + chunk - 1) / chunk;
    at += p->bytes;
    p->value = ++p->set->issued;
    p->set->reserved--;
    CUresult result = enter(p->relay->context, &before);
    if (result == SUCCESS) {
      result = enqueue_part(f, p, chunk);
      leave(before);
    }
    if (result == SUCCESS) continue;
    size_t bytes = p->bytes;
    give_up(p, result);
    if (c->result == SUCCESS) c->result = own.cuMemcpyAsync(p->to, p->from, bytes, c->stream);
  }
  f->state = PENDING, f->ended = 0;
  pending++;
  pthread_cond_broadcast(&changed);
  return at;
}

/* enqueue_copy enqueues all but the last bytes of a copy, and returns how many. The lock is not held: a call on the
   program's stream may wait for the program. */
static size_t enqueue_copy(Pending *f, Copy *c) {
  size_t at = f->direct;
  c->result = own.cuEventRecord(f->begin, c->stream);
  if (c->result == SUCCESS && at) c->result = own.cuMemcpyAsync(c->to, c->from, at, c->stream);
  if (c->result == SUCCESS) own.cuEventRecord(f->middle, c->stream); /* for the rate alone */
  pthread_mutex_lock(&lock);
  if (c->result == SUCCESS)
    at = enqueue_parts(f, c, at);
  else
    unreserve(f), at = 0;
  pthread_mutex_unlock(&lock);
  if (!at) return 0;
  for (int i = 0; i < f->parts; i++) {
    Part *p = &f->part[i];
    CUresult result = own.cuStreamWaitValue32_v2(c->stream, (CUdeviceptr)(uintptr_t)p->set->word, p->value, 0);
    /* Refused, the host waits in the stream's place: for a part that a lost relay leaves to it, but not in a context
       that is in error, where what follows in the stream is refused, too. */
    for (int errors = 0; result != SUCCESS && !reached(p->set, p->value) && errors < CONFIRMED; nap(100000))
      errors = works(own.cuStreamQuery(c->stream)) ? 0 : errors + 1;
  }
  c->pending = f;
  return at;
}

/* target_of returns the target of a device, and asks for it to be opened; the lock is held. */
static Target *target_of(CUdevice device) {
  Target *t = targets[device];
  if (!t) {
    if (!(t = calloc(1, sizeof *t))) return NULL;
    t->device = device, targets[device] = t;
  }
  if (t->state == CLOSED || (t->state == REFUSES && now() >= t->retry)) {
    if (!start()) return NULL;
    t->state = ASKED;
    asked++;
    pthread_cond_broadcast(&changed);
  }
  return t;
}

/* reserve reserves what a copy needs; the lock is held. */
static Reason reserve(const Copy *c, const Facts *facts, Opaque context, unsigned long long user, Pending **pending) {
  Target *t = target_of(facts->device);
  if (!t || t->state != OPEN) return t && t->state == ASKED ? STARTING : NO_RELAY;
  if (t->context != context) return CONTEXT;
  for (int i = 0; i < MAX_PENDING; i++) {
    Pending *f = &t->copies[i];
    if (f->state != UNUSED) continue;
    f->to_device = facts->to.device, f->bytes = c->bytes;
    f->kind = (f->to_device ? KINDS / 2 : 0) + (c->bytes >= 64 * MIB) + (c->bytes >= 256 * MIB);
    Reason why = choose_parts(t, f, c, facts, user);
    if (why != RELAYED) return why;
    f->state = RESERVED, f->errors = 0;
    f->direct = divide(t, f, c->bytes - LAST_BYTES);
    *pending = f;
    return RELAYED;
  }
  return BUSY;
}

/* gather collects the facts of a copy. */
static Reason gather(const Copy *c, Facts *f, Opaque *context, unsigned long long *user) {
  Opaque of_stream = NULL;
  int capturing = 0;
  f->capturing = own.cuStreamIsCapturing(c->stream, &capturing) != SUCCESS || capturing;
  if (f->capturing) return CAPTURED;
  if (own.cuCtxGetCurrent(context) != SUCCESS || !*context || own.cuCtxGetDevice(&f->device) != SUCCESS) return CONTEXT;
  if (inspect(c->to, c->bytes, &f->to) != SUCCESS || inspect(c->from, c->bytes, &f->from) != SUCCESS) return PAGEABLE;
  f->stream_there = own.cuStreamGetCtx(c->stream, &of_stream) == SUCCESS && of_stream == *context && own.cuStreamGetId(c->stream, user) == SUCCESS;
  return f->device >= 0 && f->device < MAX_DEVICES ? decide(c, f) : CONTEXT;
}

size_t relay_begin(Copy *c, Reason *why) {
  Opaque context = NULL;
  Facts facts = {.device = -1};
  unsigned long long user = 0;
  Pending *f = NULL;
  size_t done = 0;
  c->pending = NULL, c->result = SUCCESS;
  pthread_mutex_lock(&lock);
  used = 1;
  int usable = load() && chosen && !ending;
  pthread_mutex_unlock(&lock);
  *why = NO_RELAY;
  if (!usable || (*why = gather(c, &facts, &context, &user)) != RELAYED) return 0;
  pthread_mutex_lock(&lock);
  *why = reserve(c, &facts, context, user, &f);
  pthread_mutex_unlock(&lock);
  if (f && !(done = enqueue_copy(f, c))) *why = REFUSED, c->result = SUCCESS; /* the program's call shows what is wrong */
  return done;
}

void relay_end(Copy *c) {
  Pending *f = c->pending;
  own.cuEventRecord(f->end, c->stream);
  pthread_mutex_lock(&lock);
  f->ended = 1;
  pthread_mutex_unlock(&lock);
}

void relay_share(CUdeviceptr at, size_t bytes, CUdevice device) {
  pthread_mutex_lock(&lock);
  int usable = load();
  pthread_mutex_unlock(&lock);
  for (int d = 0; usable && d < MAX_DEVICES; d++) {
    int can = 0;
    if (d == device || !(chosen >> d & 1) || own.cuDeviceCanAccessPeer(&can, d, device) != SUCCESS || !can) continue;
    AccessRight right = {.type = 1, .device = d, .flags = 3};
    own.cuMemSetAccess(at, bytes, &right, 1); /* refused, it is no relay for this memory */
  }
}

void relay_forget(CUdevice device) {
  if (device < 0 || device >= MAX_DEVICES) return;
  pthread_mutex_lock(&lock);
  Target *t = targets[device];
  if (t && !ending) {
    while (opening || t->state == ASKED) pthread_cond_wait(&changed, &lock);
    time_t end = now() + FORGET_SECONDS;
    for (int i = 0; i < MAX_PENDING; i++)
      while (t->copies[i].state != UNUSED && t->copies[i].errors < CONFIRMED && now() < end) {
        pthread_mutex_unlock(&lock);
        nap(500000);
        pthread_mutex_lock(&lock);
      }
    /* What is left then, because the context is in error or its streams wait for the program, ends with it. */
    for (int i = 0; i < MAX_PENDING; i++)
      if (t->copies[i].state == PENDING) release(&t->copies[i]);
    if (t->state == OPEN) close_target(t);
    t->state = CLOSED, t->told = 0;
    for (int d = 0; d < MAX_DEVICES; d++) relays[d].reaches &= ~(1ull << device);
  }
  pthread_mutex_unlock(&lock);
}
