/* Stands in for libcuda.so.1 in the tests of multipath.c: devices whose memory is the host's. Streams are
   threads, so copies, events and words run beside the host and in the order that CUDA promises, default
   streams included. It refuses what a driver would refuse or what would be slow in a real one: memory of
   another device without peer access, host memory that another context has registered for itself, streams
   and events of another context, operations in a stream that is being captured.

   STANDIN_DEVICES (2), STANDIN_MEMORY (bytes of each device, 1 GiB), STANDIN_RATE (bytes a second that a copy
   takes at most; 0: no limit), STANDIN_RELAY_US (by which a copy takes longer in a context that is not a primary
   one), STANDIN_UNRANGED (1: the range of host memory is not told), STANDIN_STUCK (1: a context in error is not popped),
   STANDIN_SHARED (1: calls in all contexts return the error of one, as CUDA has it for most faults, while the streams of
   the others go on). fake_* are for the test program. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef unsigned long long address;
enum { OK, INVALID = 1, NO_MEMORY = 2, NOT_INITIALIZED = 3, NO_CONTEXT = 201, BAD_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, ENABLED = 704, CAPTURING = 900, IMPLICIT = 906 };
enum { MAX_DEVICES = 8 };

typedef struct stream stream;
typedef struct context {
  int device, primary, alive, broken, references;
  int told; /* the error of another context that calls in this one return */
  unsigned reach; /* devices whose memory it may access */
  stream *legacy, *streams;
} context;
typedef struct event {
  context *of;
  uint64_t recorded, passed;
  double at;
} event;
typedef struct op {
  enum { COPY, WAIT_EVENT, RECORD, WAIT_VALUE, WRITE_VALUE, HOST, AFTER } kind;
  address to, from;
  size_t bytes;
  event *e;
  uint64_t count; /* the recording; or the operations of the stream to be waited for */
  stream *after;
  uint32_t value;
  void (*f)(void *);
  void *data;
  struct op *next;
} op;
struct stream {
  context *of;
  int blocking, capturing;
  unsigned long long id;
  uint64_t pushed, done;
  op *first, **last;
  stream *next;
};
typedef struct region {
  address at;
  size_t bytes;
  enum { PINNED, REGISTERED, PLAIN, MANAGED, POOL, MAPPED } kind;
  int device;
  unsigned rights; /* devices that mapped memory is for */
  context *of;
  struct region *next;
} region;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static context primaries[MAX_DEVICES];
static region *regions;
static size_t used[MAX_DEVICES], memory_bytes;
static int devices, rate, relay_us, unranged, stuck, shared, captures;
static pid_t owner;
static unsigned long long ids, relayed, native, copies, calls;
static __thread context *stack[8];
static __thread int depth;
static __thread stream *of_thread;
static struct {
  char call[64];
  int code, skip, device;
} fault;

#define current (depth ? stack[depth - 1] : NULL)

static int number(const char *name, int otherwise) {
  const char *v = getenv(name);
  return v ? atoi(v) : otherwise;
}

__attribute__((constructor)) static void start(void) {
  devices = number("STANDIN_DEVICES", 2);
  memory_bytes = getenv("STANDIN_MEMORY") ? strtoull(getenv("STANDIN_MEMORY"), NULL, 10) : 8ull << 30;
  rate = number("STANDIN_RATE", 0);
  relay_us = number("STANDIN_RELAY_US", 0);
  unranged = number("STANDIN_UNRANGED", 0);
  stuck = number("STANDIN_STUCK", 0);
  shared = number("STANDIN_SHARED", 0);
  for (int i = 0; i < MAX_DEVICES; i++) primaries[i].device = i, primaries[i].primary = 1;
}

/* What tests ask and do. */
unsigned long long fake_relayed(void) { return __atomic_load_n(&relayed, __ATOMIC_SEQ_CST); }
unsigned long long fake_native(void) { return __atomic_load_n(&native, __ATOMIC_SEQ_CST); }
unsigned long long fake_copies(void) { return __atomic_load_n(&copies, __ATOMIC_SEQ_CST); }
unsigned long long fake_calls(void) { return __atomic_load_n(&calls, __ATOMIC_SEQ_CST); }
static void called(void) { __atomic_fetch_add(&calls, 1, __ATOMIC_SEQ_CST); }
static int error_of(const context *c) { return c->broken ? c->broken : c->told; }
static context *others[64];
static int other_count;
void fake_break(int device) {
  pthread_mutex_lock(&lock);
  for (int i = 0; i < other_count; i++)
    if (others[i]->device == device) others[i]->broken = 700;
  for (int i = 0; i < MAX_DEVICES && shared; i++) primaries[i].told = 700;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
}
void fake_fail(const char *call, int code, int skip, int device) {
  pthread_mutex_lock(&lock);
  snprintf(fault.call, sizeof fault.call, "%s", call);
  fault.code = code, fault.skip = skip, fault.device = device;
  pthread_mutex_unlock(&lock);
}
static int struck(const char *call) {
  if (!fault.code || strcmp(call, fault.call) || !current || current->device != fault.device || fault.skip-- > 0) return OK;
  int code = fault.code;
  fault.code = 0;
  return code;
}

#define BEGIN                                               \
  called();                                                 \
  pthread_mutex_lock(&lock);                                \
  {                                                         \
    int r_ = !current ? NO_CONTEXT : error_of(current) ? error_of(current) : struck(__func__); \
    if (r_) return pthread_mutex_unlock(&lock), r_;         \
  }
#define END(r)                    \
  do {                            \
    int end_ = (r);               \
    pthread_mutex_unlock(&lock);  \
    return end_;                  \
  } while (0)

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e3 + t.tv_nsec * 1e-6;
}

/* ---- streams ---- */

static void run(stream *s, op *o) {
  context *c = s->of;
  switch (c->broken ? -1 : (int)o->kind) {
    case COPY:
      pthread_mutex_unlock(&lock);
      if (rate) usleep(o->bytes / (rate / 1000000 + 1));
      if (relay_us && !c->primary) usleep(relay_us);
      memmove((void *)o->to, (void *)o->from, o->bytes);
      pthread_mutex_lock(&lock);
      break;
    case WAIT_EVENT:
      while (o->e->passed < o->count && !c->broken) pthread_cond_wait(&changed, &lock);
      break;
    case RECORD:
      if (o->e->passed < o->count) o->e->passed = o->count, o->e->at = now();
      break;
    case WAIT_VALUE:
      while ((int32_t)(__atomic_load_n((uint32_t *)o->to, __ATOMIC_ACQUIRE) - o->value) < 0 && !c->broken) {
        pthread_mutex_unlock(&lock);
        usleep(20);
        pthread_mutex_lock(&lock);
      }
      break;
    case WRITE_VALUE: __atomic_store_n((uint32_t *)o->to, o->value, __ATOMIC_RELEASE); break;
    case HOST:
      pthread_mutex_unlock(&lock);
      o->f(o->data);
      pthread_mutex_lock(&lock);
      break;
    case AFTER:
      while (o->after->done < o->count && !c->broken) pthread_cond_wait(&changed, &lock);
      break;
  }
  s->done++;
  pthread_cond_broadcast(&changed);
}
static void *serve(void *arg) {
  stream *s = arg;
  pthread_mutex_lock(&lock);
  for (;;) {
    while (!s->first) pthread_cond_wait(&changed, &lock);
    op *o = s->first;
    if (!(s->first = o->next)) s->last = &s->first;
    run(s, o);
    free(o);
  }
  return NULL;
}
static stream *new_stream(context *c, int blocking) {
  stream *s = calloc(1, sizeof *s);
  s->of = c, s->blocking = blocking, s->last = &s->first, s->id = ++ids;
  s->next = c->streams, c->streams = s;
  pthread_t t;
  pthread_create(&t, NULL, serve, s);
  pthread_detach(t);
  return s;
}
static void append(stream *s, op o) {
  op *n = malloc(sizeof *n);
  *n = o;
  n->next = NULL;
  *s->last = n, s->last = &n->next;
  s->pushed++;
}
static int push(stream *s, op o) {
  if (s->capturing) return o.kind == COPY || o.kind == HOST ? OK : CAPTURING;
  if (s->of->broken) return s->of->broken;
  /* The legacy stream comes after all blocking ones, and these after it. */
  if (s == s->of->legacy) {
    for (stream *b = s->of->streams; b; b = b->next)
      if (b != s && b->blocking && b->done < b->pushed) append(s, (op){.kind = AFTER, .after = b, .count = b->pushed});
  } else if (s->blocking && s->of->legacy && s->of->legacy->done < s->of->legacy->pushed) {
    append(s, (op){.kind = AFTER, .after = s->of->legacy, .count = s->of->legacy->pushed});
  }
  append(s, o);
  pthread_cond_broadcast(&changed);
  return OK;
}
static stream *stream_of(void *handle) {
  context *c = current;
  if ((uintptr_t)handle > 2) return handle;
  if ((uintptr_t)handle == 2) return of_thread && of_thread->of == c ? of_thread : (of_thread = new_stream(c, 1));
  return c->legacy ? c->legacy : (c->legacy = new_stream(c, 1));
}
static void drain(stream *s) {
  uint64_t until = s->pushed;
  while (s->done < until && !error_of(s->of)) pthread_cond_wait(&changed, &lock);
}

int cuStreamCreate(stream **s, unsigned flags) {
  BEGIN
  *s = new_stream(current, !(flags & 1));
  END(OK);
}
int cuStreamDestroy_v2(stream *s) { return s ? OK : BAD_HANDLE; }
int cuStreamQuery(void *h) {
  BEGIN
  stream *s = stream_of(h);
  END(s->of->broken ? s->of->broken : s->done < s->pushed ? NOT_READY : OK);
}
int cuStreamSynchronize(void *h) {
  called();
  pthread_mutex_lock(&lock);
  stream *s = stream_of(h);
  drain(s);
  END(error_of(s->of));
}
int cuStreamWaitEvent(void *h, event *e, unsigned flags) {
  BEGIN
  END(flags ? INVALID : push(stream_of(h), (op){.kind = WAIT_EVENT, .e = e, .count = e->recorded}));
}
int cuStreamGetCtx(void *h, context **c) {
  BEGIN
  *c = (uintptr_t)h > 2 ? ((stream *)h)->of : current;
  END(OK);
}
int cuStreamGetId(void *h, unsigned long long *id) {
  BEGIN
  *id = stream_of(h)->id;
  END(OK);
}
int cuStreamIsCapturing(void *h, int *status) {
  BEGIN
  if ((uintptr_t)h < 2 && captures) END(IMPLICIT);
  *status = stream_of(h)->capturing;
  END(OK);
}
int cuStreamBeginCapture_v2(stream *s, int mode) {
  BEGIN
  (void)mode;
  s->capturing = 1, captures++;
  END(OK);
}
int cuStreamEndCapture(stream *s, void **graph) {
  BEGIN
  *graph = NULL;
  s->capturing = 0, captures--;
  END(OK);
}
int cuThreadExchangeStreamCaptureMode(int *mode) { return *mode = 0, OK; }
int cuLaunchHostFunc(void *h, void (*f)(void *), void *data) {
  BEGIN
  END(push(stream_of(h), (op){.kind = HOST, .f = f, .data = data}));
}

int cuEventCreate(event **e, unsigned flags) {
  BEGIN
  (void)flags;
  *e = calloc(1, sizeof **e);
  (*e)->of = current;
  END(OK);
}
int cuEventDestroy_v2(event *e) { return e ? OK : BAD_HANDLE; }
int cuEventRecord(event *e, void *h) {
  BEGIN
  stream *s = stream_of(h);
  if (e->of != s->of) END(BAD_HANDLE);
  int r = push(s, (op){.kind = RECORD, .e = e, .count = e->recorded + 1});
  if (!r) e->recorded++;
  END(r);
}
int cuEventQuery(event *e) {
  BEGIN
  END(e->of->broken ? e->of->broken : e->passed < e->recorded ? NOT_READY : OK);
}
int cuEventElapsedTime(float *ms, event *a, event *b) {
  BEGIN
  *ms = b->at - a->at;
  END(a->of == b->of && a->of == current ? OK : BAD_HANDLE);
}

/* ---- contexts ---- */

int cuInit(unsigned flags) { return flags ? INVALID : (owner = getpid(), OK); }
int cuDeviceGet(int *d, int i) { return i < devices ? (*d = i, OK) : INVALID; }
int cuDeviceGetCount(int *n) { return *n = devices, OK; }
int cuDeviceGetUuid(unsigned char *id, int d) { return memset(id, d + 1, 16), OK; }
int cuDeviceCanAccessPeer(int *can, int a, int b) { return *can = a != b && !getenv("STANDIN_ALONE"), OK; }
int cuDeviceGetP2PAttribute(int *v, int a, int from, int to) { return *v = a == 3 && from != to && !getenv("STANDIN_PCIE"), OK; }
int cuDevicePrimaryCtxGetState(int d, unsigned *flags, int *active) {
  pthread_mutex_lock(&lock);
  *flags = 0, *active = primaries[d].references > 0;
  END(OK);
}
int cuDevicePrimaryCtxRetain(context **c, int d) {
  pthread_mutex_lock(&lock);
  *c = &primaries[d];
  if (!(*c)->references++) (*c)->alive = 1, (*c)->broken = 0;
  END(OK);
}
int cuDevicePrimaryCtxRelease_v2(int d) {
  pthread_mutex_lock(&lock);
  primaries[d].references--;
  END(OK);
}
int cuDevicePrimaryCtxReset_v2(int d) {
  pthread_mutex_lock(&lock);
  primaries[d].references = 0;
  primaries[d].legacy = primaries[d].streams = NULL;
  for (int i = 0; i < other_count; i++) others[i]->reach &= ~(1u << d);
  END(OK);
}
int cuCtxCreate_v2(context **c, unsigned flags, int d) {
  pthread_mutex_lock(&lock);
  if (flags || other_count == 64) END(INVALID);
  *c = calloc(1, sizeof **c);
  (*c)->device = d, (*c)->alive = 1;
  others[other_count++] = *c;
  stack[depth++] = *c;
  END(OK);
}
int cuCtxDestroy_v2(context *c) {
  pthread_mutex_lock(&lock);
  c->alive = 0;
  for (region **r = &regions; *r;)
    if ((*r)->of == c && (*r)->kind == PLAIN) {
      region *gone = *r;
      used[gone->device] -= gone->bytes;
      *r = gone->next;
      free(gone);
    } else {
      r = &(*r)->next;
    }
  END(OK);
}
int cuCtxGetCurrent(context **c) { return called(), *c = current, OK; }
int cuCtxSetCurrent(context *c) {
  called();
  if (c && !c->alive) return NO_CONTEXT;
  if (depth) depth--;
  if (c) stack[depth++] = c;
  return OK;
}
int cuCtxPushCurrent_v2(context *c) { return called(), c && c->alive ? (stack[depth++] = c, OK) : NO_CONTEXT; }
int cuCtxPopCurrent_v2(context **c) { return called(), stuck && depth && current->broken ? current->broken : depth ? (*c = stack[--depth], OK) : NO_CONTEXT; }
int cuCtxGetDevice(int *d) { return current ? (*d = current->device, OK) : NO_CONTEXT; }
int cuCtxSynchronize(void) {
  BEGIN
  for (stream *s = current->streams; s; s = s->next) drain(s);
  END(OK);
}
int cuCtxEnablePeerAccess(context *to, unsigned flags) {
  BEGIN
  unsigned bit = 1u << to->device;
  if (flags || to->device == current->device) END(INVALID);
  if (current->reach & bit) END(ENABLED);
  current->reach |= bit;
  END(OK);
}

/* ---- memory ---- */

static region *find(address at) {
  for (region *r = regions; r; r = r->next)
    if (r->at <= at && at - r->at < r->bytes) return r;
  return NULL;
}
static region *add(void *p, size_t n, int kind) {
  region *r = malloc(sizeof *r);
  *r = (region){(address)(uintptr_t)p, n, kind, current->device, 0, current, regions};
  return regions = r;
}
static int allocate(address *p, size_t n, int kind) {
  BEGIN
  if (used[current->device] + n > memory_bytes) END(NO_MEMORY);
  used[current->device] += n;
  *p = add(aligned_alloc(4096, (n + 4095) / 4096 * 4096), n, kind)->at;
  END(OK);
}
int cuMemAlloc_v2(address *p, size_t n) { return allocate(p, n, PLAIN); }
int cuMemAllocManaged(address *p, size_t n, unsigned flags) { return (void)flags, allocate(p, n, MANAGED); }
int cuMemAllocAsync(address *p, size_t n, void *s) { return (void)s, allocate(p, n, POOL); }
/* In place of cuMemAddressReserve, cuMemCreate and cuMemMap: two mappings side by side. */
int fake_map(address *p, size_t n) {
  int r = allocate(p, n, MAPPED);
  if (r) return r;
  pthread_mutex_lock(&lock);
  find(*p)->bytes = n / 2;
  add((char *)(uintptr_t)*p + n / 2, n / 2, MAPPED);
  END(OK);
}
typedef struct {
  int type, device, flags;
} access_right;
int cuMemSetAccess(address at, size_t n, const access_right *rights, size_t count) {
  BEGIN
  for (address end = at + n; at < end;) {
    region *r = find(at);
    if (!r || r->kind != MAPPED) END(INVALID);
    for (size_t i = 0; i < count; i++) {
      if (rights[i].type != 1) END(INVALID);
      r->rights &= ~(1u << rights[i].device);
      if (rights[i].flags == 3) r->rights |= 1u << rights[i].device;
    }
    at = r->at + r->bytes;
  }
  END(OK);
}
int cuMemGetInfo_v2(size_t *unused, size_t *total) {
  BEGIN
  *total = memory_bytes, *unused = memory_bytes - used[current->device];
  END(OK);
}
int cuMemHostAlloc(void **p, size_t n, unsigned flags) {
  BEGIN
  (void)flags;
  *p = aligned_alloc(4096, (n + 4095) / 4096 * 4096);
  add(*p, n, PINNED);
  END(OK);
}
int cuMemHostRegister_v2(void *p, size_t n, unsigned flags) {
  BEGIN
  add(p, n, flags & 1 ? PINNED : REGISTERED);
  END(OK);
}

int cuPointerGetAttribute(void *data, int a, address at) {
  BEGIN
  region *r = find(at);
  if (!r) END(INVALID);
  switch (a) {
    case 3:
      if (r->kind == REGISTERED && r->of != current) END(INVALID);
      *(address *)data = at;
      END(OK);
    case 6: END((*(unsigned *)data = 0, OK));
    case 7: END((*(unsigned long long *)data = r->kind <= REGISTERED ? r->at >> 12 : 0, OK));
    case 10: END((*(unsigned *)data = r->kind == PLAIN, OK));
    case 16: END((*(unsigned *)data = r->kind == MAPPED && r->rights >> current->device & 1 ? 3 : 0, OK));
    case 18: END((*(unsigned long long *)data = r->bytes, OK));
    case 19: END((*(address *)data = r->at, OK));
  }
  END(INVALID);
}
int cuPointerGetAttributes(unsigned n, int *attributes, void **data, address at) {
  BEGIN
  region *r = find(at);
  for (unsigned i = 0; i < n; i++) switch (attributes[i]) {
      case 2: *(unsigned *)data[i] = !r ? 0 : r->kind <= REGISTERED ? 1 : 2; break;
      case 8: *(unsigned *)data[i] = r && r->kind == MANAGED; break;
      case 9: *(int *)data[i] = r ? r->device : -2; break;
      case 11: *(address *)data[i] = r && !(unranged && r->kind <= REGISTERED) ? r->at : 0; break;
      /* Of mapped memory the range is what was reserved. */
      case 12: *(unsigned long long *)data[i] = !r || (unranged && r->kind <= REGISTERED) ? 0 : r->kind == MAPPED ? 2 * r->bytes : r->bytes; break;
      default: END(INVALID);
    }
  END(OK);
}

/* ---- words and copies ---- */

static int breaks_at_wait;
void fake_break_at_wait(int device) { breaks_at_wait = device; }
int cuStreamWaitValue32_v2(void *h, address at, uint32_t value, unsigned flags) {
  if (breaks_at_wait) fake_break(breaks_at_wait), breaks_at_wait = 0;
  BEGIN
  END(flags || !find(at) ? INVALID : push(stream_of(h), (op){.kind = WAIT_VALUE, .to = at, .value = value}));
}
int cuStreamWriteValue32_v2(void *h, address at, uint32_t value, unsigned flags) {
  BEGIN
  END(flags || !find(at) ? INVALID : push(stream_of(h), (op){.kind = WRITE_VALUE, .to = at, .value = value}));
}

/* enqueue enqueues a copy; the lock is held. */
static int enqueue(address to, address from, size_t n, void *h) {
  stream *s = stream_of(h);
  if (s->of != current) return BAD_HANDLE;
  for (int i = 0; i < 2; i++) {
    address at = i ? to : from;
    region *r = find(at);
    if (!r) continue; /* pageable */
    if (r->kind == MAPPED) {
      for (address end = at + n, a = at; a < end; a = r->at + r->bytes)
        if (!(r = find(a)) || r->kind != MAPPED || !(r->rights >> s->of->device & 1)) return INVALID;
      continue;
    }
    if (at - r->at + n > r->bytes) return INVALID;
    if (r->kind >= PLAIN && r->device != s->of->device && !(r->kind == PLAIN && s->of->reach >> r->device & 1)) return INVALID;
    if (r->kind == REGISTERED && r->of != s->of) return INVALID; /* it would hold up the host */
  }
  copies++;
  if (s->of->primary) native += n;
  else relayed += n;
  return push(s, (op){.kind = COPY, .to = to, .from = from, .bytes = n});
}
static int copy(const char *call, address to, address from, size_t n, void *h, int synchronous) {
  called();
  if (getpid() != owner) return NOT_INITIALIZED;
  pthread_mutex_lock(&lock);
  int r = !current ? NO_CONTEXT : error_of(current) ? error_of(current) : struck(call);
  if (!r) r = enqueue(to, from, n, h);
  if (!r && (synchronous || !find(to) || !find(from))) drain(stream_of(h));
  END(r);
}
#define SYNC(name, to_type, from_type, h) \
  int name(to_type to, from_type from, size_t n) { return copy(__func__, (address)(uintptr_t)to, (address)(uintptr_t)from, n, (void *)h, 1); }
#define ASYNC(name, to_type, from_type, h) \
  int name(to_type to, from_type from, size_t n, void *s) { return copy(__func__, (address)(uintptr_t)to, (address)(uintptr_t)from, n, s ? s : (void *)h, 0); }
SYNC(cuMemcpy, address, address, 1)
SYNC(cuMemcpy_ptds, address, address, 2)
SYNC(cuMemcpyHtoD_v2, address, const void *, 1)
SYNC(cuMemcpyHtoD_v2_ptds, address, const void *, 2)
SYNC(cuMemcpyDtoH_v2, void *, address, 1)
SYNC(cuMemcpyDtoH_v2_ptds, void *, address, 2)
ASYNC(cuMemcpyAsync, address, address, 1)
ASYNC(cuMemcpyAsync_ptsz, address, address, 2)
ASYNC(cuMemcpyHtoDAsync_v2, address, const void *, 1)
ASYNC(cuMemcpyHtoDAsync_v2_ptsz, address, const void *, 2)
ASYNC(cuMemcpyDtoHAsync_v2, void *, address, 1)
ASYNC(cuMemcpyDtoHAsync_v2_ptsz, void *, address, 2)
#define NOTHING(name) \
  int name(const void *shape, void *s) { return (void)s, shape ? OK : INVALID; }
NOTHING(cuMemcpy2D_v2)
NOTHING(cuMemcpy2DAsync_v2)
NOTHING(cuMemcpy3D_v2)
NOTHING(cuMemcpy3DAsync_v2)

/* ---- looking up ---- */

int cuGetProcAddress_v2(const char *symbol, void **f, int version, uint64_t flags, int *status);
int cuGetProcAddress(const char *symbol, void **f, int version, uint64_t flags) { return cuGetProcAddress_v2(symbol, f, version, flags, NULL); }
int cuGetProcAddress_v2(const char *symbol, void **f, int version, uint64_t flags, int *status) {
  static const struct {
    const char *name;
    void *legacy, *per_thread;
  } all[] = {
#define ROW(name) {#name, (void *)name, (void *)name}
#define VERSIONED(name) {#name, (void *)name##_v2, (void *)name##_v2}
#define THREAD(name, legacy, per_thread) {#name, (void *)legacy, (void *)per_thread}
      THREAD(cuMemcpy, cuMemcpy, cuMemcpy_ptds),
      THREAD(cuMemcpyHtoD, cuMemcpyHtoD_v2, cuMemcpyHtoD_v2_ptds),
      THREAD(cuMemcpyDtoH, cuMemcpyDtoH_v2, cuMemcpyDtoH_v2_ptds),
      THREAD(cuMemcpyAsync, cuMemcpyAsync, cuMemcpyAsync_ptsz),
      THREAD(cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2, cuMemcpyHtoDAsync_v2_ptsz),
      THREAD(cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2, cuMemcpyDtoHAsync_v2_ptsz),
      VERSIONED(cuMemAlloc),
      VERSIONED(cuMemcpy2D),
      ROW(cuInit),
      ROW(cuDevicePrimaryCtxRetain),
      VERSIONED(cuDevicePrimaryCtxRelease),
      VERSIONED(cuDevicePrimaryCtxReset),
  };
  if (status) *status = 0;
  *f = !strcmp(symbol, "cuGetProcAddress") ? (version >= 12000 ? (void *)cuGetProcAddress_v2 : (void *)cuGetProcAddress) : NULL;
  for (size_t i = 0; !*f && i < sizeof all / sizeof *all; i++)
    if (!strcmp(symbol, all[i].name)) *f = flags >> 1 & 1 ? all[i].per_thread : all[i].legacy;
  return *f ? OK : NOT_FOUND;
}
