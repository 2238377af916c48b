/* A stand-in for libcuda.so.1: devices whose memory is the host's, for machines without a GPU.

   It lets tests run everything between Go and the driver. Streams are threads, so they do run beside the
   host and wait for events and 32-bit words as a GPU's do; memory is accounted, must be mapped and given
   rights, and copies check that they stay inside of it. Times mean nothing. A module is a text that begins
   with "standin", and its kernels are those at the end of this file.

   Environment, read at cuInit: STANDIN_DEVICES (2; 0 is an error as of no device), STANDIN_CAPABILITY (90),
   STANDIN_VERSION (13000), STANDIN_PEERS (1), STANDIN_IDLE_ALLOC (0; 1: allocating pinned memory waits until
   no stream has work, and nobody enqueues any meanwhile, as CUDA permits drivers to), STANDIN_SHARED_QUEUES
   (0; 1: streams whose first operations are enqueued at once, by several threads, work one operation after
   the other, in the order in which they were enqueued). */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

typedef uint64_t address;

enum {
  OK = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  NO_DEVICE = 100,
  INVALID_DEVICE = 101,
  INVALID_IMAGE = 200,
  INVALID_CONTEXT = 201,
  INVALID_HANDLE = 400,
  NOT_FOUND = 500,
  NOT_READY = 600,
  ILLEGAL_ADDRESS = 700,
  PEER_ACCESS_ALREADY_ENABLED = 704,
  CAPTURE_UNSUPPORTED = 900
};

#define MAX_DEVICES 8
#define CAPACITY ((size_t)1 << 30)
#define CONTEXT_BYTES ((size_t)64 << 20)
#define GRANULE ((size_t)2 << 20)
#define EXPORT __attribute__((visibility("default")))

typedef struct {
  int number, references, broken;
  int contexts; /* that have ended; a stream's work ends with its context */
  size_t allocated;
  unsigned peers;
} device;

static device devices[MAX_DEVICES];
static int device_count, capability, version, peers, idle_alloc, shared_queues;
static int pending; /* operations that streams have, or do */
static int idling;  /* whether somebody waits for none to be left */
static __thread device *current;

/* One lock for everything; streams release it while they work. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

static int from_environment(const char *name, int otherwise) {
  const char *v = getenv(name);
  return v ? atoi(v) : otherwise;
}

/* Faults that a test asked for. */
static struct {
  char call[64];
  int code, skip;
} fault;

EXPORT void standin_fail(const char *call, int code, int skip) {
  pthread_mutex_lock(&lock);
  snprintf(fault.call, sizeof fault.call, "%s", call);
  fault.code = code;
  fault.skip = skip;
  pthread_mutex_unlock(&lock);
}

static int struck(const char *call) {
  if (!fault.code || strcmp(call, fault.call)) return OK;
  if (fault.skip-- > 0) return OK;
  int code = fault.code;
  fault.code = 0;
  return code;
}

/* Whether a result ends the context. */
static int sticky(int code) { return code == 700 || code == 702 || code == 710 || (code >= 714 && code < 720); }

/* Begins a call on the current context; the lock is held after it. */
#define BEGIN                                                  \
  pthread_mutex_lock(&lock);                                   \
  int result = current ? current->broken : INVALID_CONTEXT;    \
  if (!result) result = struck(__func__);                      \
  if (current && sticky(result)) current->broken = result;     \
  if (result) {                                                \
    pthread_mutex_unlock(&lock);                               \
    return result;                                             \
  }
#define END(r)                         \
  do {                                 \
    int end_ = (r);                    \
    pthread_mutex_unlock(&lock);       \
    return end_;                       \
  } while (0)

EXPORT int cuInit(unsigned flags) {
  device_count = from_environment("STANDIN_DEVICES", 2);
  capability = from_environment("STANDIN_CAPABILITY", 90);
  version = from_environment("STANDIN_VERSION", 13000);
  peers = from_environment("STANDIN_PEERS", 1);
  idle_alloc = from_environment("STANDIN_IDLE_ALLOC", 0);
  shared_queues = from_environment("STANDIN_SHARED_QUEUES", 0);
  for (int i = 0; i < MAX_DEVICES; i++) devices[i].number = i;
  return flags ? INVALID_VALUE : device_count ? OK : NO_DEVICE;
}
EXPORT int cuDriverGetVersion(int *v) { return *v = version, OK; }
EXPORT int cuGetErrorName(int code, const char **name) {
  switch (code) {
#define NAME(c) case c: return *name = "CUDA_ERROR_" #c, OK;
    NAME(INVALID_VALUE)
    NAME(OUT_OF_MEMORY)
    NAME(NO_DEVICE)
    NAME(INVALID_IMAGE)
    NAME(INVALID_CONTEXT)
    NAME(NOT_FOUND)
    NAME(ILLEGAL_ADDRESS)
  }
  return INVALID_VALUE;
}

EXPORT int cuDeviceGetCount(int *n) { return *n = device_count, OK; }
EXPORT int cuDeviceGet(int *d, int i) { return i < device_count ? (*d = i, OK) : INVALID_DEVICE; }
EXPORT int cuDeviceGetName(char *s, int n, int d) { return snprintf(s, n, "Stand-in %d", d), OK; }
EXPORT int cuDeviceGetUuid_v2(unsigned char *u, int d) { return memset(u, d + 1, 16), OK; }
EXPORT int cuDeviceGetUuid(unsigned char *u, int d) { return cuDeviceGetUuid_v2(u, d); }
EXPORT int cuDeviceTotalMem_v2(size_t *n, int d) { return *n = CAPACITY, OK; }
EXPORT int cuDeviceGetAttribute(int *v, int a, int d) {
  switch (a) {
    case 13: *v = 1000000; break;      /* clock rate, kHz */
    case 16: *v = 100; break;          /* multiprocessors */
    case 33: *v = d + 1; break;        /* PCI bus */
    case 36: *v = 2000000; break;      /* memory clock, kHz */
    case 37: *v = 4096; break;         /* memory bus, bits */
    case 75: *v = capability / 10; break;
    case 76: *v = capability % 10; break;
    case 91: *v = 1; break;            /* registered host memory keeps its address */
    case 97: *v = 232448; break;       /* shared memory a block may ask for */
    case 102: *v = 1; break;           /* virtual memory management */
    default: *v = 0;
  }
  return OK;
}
EXPORT int cuDeviceCanAccessPeer(int *can, int a, int b) { return *can = peers && a != b, OK; }

EXPORT int cuDevicePrimaryCtxRetain(device **c, int d) {
  pthread_mutex_lock(&lock);
  int r = struck("cuDevicePrimaryCtxRetain");
  if (!r) devices[d].references++;
  *c = &devices[d];
  END(r);
}
EXPORT int cuDevicePrimaryCtxRelease_v2(int d) {
  pthread_mutex_lock(&lock);
  if (!devices[d].references) END(INVALID_CONTEXT);
  if (!--devices[d].references) devices[d].broken = 0, devices[d].peers = 0, devices[d].contexts++;
  END(OK);
}
EXPORT int cuCtxSetCurrent(device *c) { return current = c, OK; }
EXPORT int cuCtxGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, OK; }
EXPORT int cuCtxEnablePeerAccess(device *to, unsigned flags) {
  BEGIN
  unsigned bit = 1u << to->number;
  if (current->peers & bit) END(PEER_ACCESS_ALREADY_ENABLED);
  current->peers |= bit;
  END(OK);
}

/* Memory. */
typedef struct allocation {
  size_t bytes;
  device *of;
  int references;
} allocation;
typedef struct region {
  address at;
  size_t bytes;
  allocation *memory; /* NULL for the host's */
  int rights;         /* one bit a device */
  struct region *next;
} region;
static region *regions;
static int reserved;

static region **region_at(address at, size_t bytes) {
  for (region **r = &regions; *r; r = &(*r)->next)
    if ((*r)->at <= at && at - (*r)->at + bytes <= (*r)->bytes) return r;
  return NULL;
}
static region *add_region(address at, size_t bytes, allocation *memory) {
  region *r = calloc(1, sizeof *r);
  *r = (region){at, bytes, memory, 0, regions};
  return regions = r;
}
static void drop_region(region **r) {
  region *gone = *r;
  *r = gone->next;
  free(gone);
}
static void release(allocation *m) {
  if (--m->references) return;
  m->of->allocated -= m->bytes;
  free(m);
}

EXPORT int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
  BEGIN
  *total = CAPACITY;
  *free_bytes = CAPACITY - CONTEXT_BYTES - current->allocated;
  END(OK);
}
EXPORT int cuMemGetAllocationGranularity(size_t *n, const void *prop, int option) { return *n = GRANULE, OK; }
typedef struct {
  int type, handles, location_type, location;
} properties;
EXPORT int cuMemCreate(allocation **m, size_t bytes, const properties *p, unsigned long long flags) {
  BEGIN
  device *d = &devices[p->location];
  if (p->type != 1 || p->location_type != 1 || !bytes || bytes % GRANULE) END(INVALID_VALUE);
  if (d->allocated + bytes + CONTEXT_BYTES > CAPACITY) END(OUT_OF_MEMORY);
  d->allocated += bytes;
  *m = calloc(1, sizeof **m);
  **m = (allocation){bytes, d, 1};
  END(OK);
}
EXPORT int cuMemRelease(allocation *m) {
  pthread_mutex_lock(&lock);
  release(m);
  END(OK);
}
EXPORT int cuMemAddressReserve(address *at, size_t bytes, size_t alignment, address hint, unsigned long long flags) {
  BEGIN
  if (!bytes || bytes % GRANULE) END(INVALID_VALUE);
  char *p = mmap(NULL, bytes + GRANULE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) END(OUT_OF_MEMORY);
  char *aligned = (char *)(((uintptr_t)p + GRANULE - 1) / GRANULE * GRANULE);
  if (aligned > p) munmap(p, aligned - p);
  munmap(aligned + bytes, p + GRANULE - aligned);
  *at = (address)aligned;
  reserved++;
  END(OK);
}
EXPORT int cuMemAddressFree(address at, size_t bytes) {
  pthread_mutex_lock(&lock);
  if (region_at(at, bytes)) END(INVALID_VALUE);
  munmap((void *)at, bytes);
  reserved--;
  END(OK);
}
EXPORT int cuMemMap(address at, size_t bytes, size_t offset, allocation *m, unsigned long long flags) {
  BEGIN
  if (bytes != m->bytes || offset || region_at(at, 1)) END(INVALID_VALUE);
  m->references++;
  add_region(at, bytes, m);
  END(OK);
}
EXPORT int cuMemUnmap(address at, size_t bytes) {
  BEGIN
  region **r = region_at(at, bytes);
  if (!r || (*r)->at != at || (*r)->bytes != bytes || !(*r)->memory) END(INVALID_VALUE);
  madvise((void *)at, bytes, MADV_DONTNEED);
  mprotect((void *)at, bytes, PROT_NONE);
  release((*r)->memory);
  drop_region(r);
  END(OK);
}
typedef struct {
  int location_type, location, flags;
} access_right;
EXPORT int cuMemSetAccess(address at, size_t bytes, const access_right *rights, size_t n) {
  BEGIN
  region **r = region_at(at, bytes);
  if (!r || !n) END(INVALID_VALUE);
  for (size_t i = 0; i < n; i++) {
    if (rights[i].location_type != 1 || rights[i].flags != 3) END(INVALID_VALUE);
    (*r)->rights |= 1 << rights[i].location;
  }
  mprotect((void *)at, bytes, PROT_READ | PROT_WRITE);
  END(OK);
}
EXPORT int cuMemHostAlloc(void **p, size_t bytes, unsigned flags) {
  BEGIN
  if (idle_alloc) {
    idling++;
    while (pending) pthread_cond_wait(&changed, &lock);
    idling--;
    pthread_cond_broadcast(&changed);
  }
  *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (*p == MAP_FAILED) END(OUT_OF_MEMORY);
  add_region((address)*p, bytes, NULL);
  END(flags & 1 ? OK : INVALID_VALUE);
}
EXPORT int cuMemFreeHost(void *p) {
  BEGIN
  region **r = region_at((address)p, 1);
  if (!r || (*r)->at != (address)p || (*r)->memory) END(INVALID_VALUE);
  munmap(p, (*r)->bytes);
  drop_region(r);
  END(OK);
}
EXPORT int cuMemHostRegister_v2(void *p, size_t bytes, unsigned flags) {
  BEGIN
  if (region_at((address)p, 1)) END(INVALID_VALUE);
  add_region((address)p, bytes, NULL);
  END(flags & 1 ? OK : INVALID_VALUE);
}
EXPORT int cuMemHostGetDevicePointer_v2(address *at, void *p, unsigned flags) {
  BEGIN
  region **r = region_at((address)p, 1);
  if (!r || (*r)->memory || flags) END(INVALID_VALUE);
  *at = (address)p;
  END(OK);
}
EXPORT int cuMemHostUnregister(void *p) {
  BEGIN
  region **r = region_at((address)p, 1);
  if (!r || (*r)->at != (address)p || (*r)->memory) END(INVALID_VALUE);
  drop_region(r);
  END(OK);
}

/* Streams and events. */
typedef struct {
  uint64_t recorded, passed;
  double at; /* ms */
  int timed, references;
  device *of;
} event;
typedef struct {
  unsigned grid[3], block[3], shared;
} shape;
typedef void kernel(device *d, const unsigned char *args, const shape *s);
typedef struct op {
  enum { COPY, WAIT_EVENT, RECORD, WAIT_VALUE, WRITE_VALUE, LAUNCH, HOST } kind;
  address to, from;
  size_t bytes;
  event *e;
  uint64_t generation;
  uint32_t value;
  kernel *run;
  shape s;
  unsigned char args[4096];
  void (*host)(void *);
  void *data;
  uint64_t number; /* in the order of all */
  struct op *next;
} op;
typedef struct graph {
  op *first, **last;
  size_t nodes;
} graph;
typedef struct stream {
  device *of;
  op *first, **last;
  int busy, ended, context;
  graph *capture;
  /* With STANDIN_SHARED_QUEUES: the streams of one queue are a ring. doing is the number of the operation
     that is done. */
  struct stream *beside;
  int begun;
  uint64_t doing;
} stream;
static int live_streams, live_events, live_graphs, live_modules;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e3 + t.tv_nsec * 1e-6;
}
static void forget(event *e) {
  if (!--e->references) free(e);
}

/* Does one operation; the lock is held, and released meanwhile. */
static void run(stream *s, op *o) {
  device *d = s->of;
  switch (d->broken || s->context != d->contexts ? -1 : (int)o->kind) {
    case COPY:
      pthread_mutex_unlock(&lock);
      memmove((void *)o->to, (void *)o->from, o->bytes);
      pthread_mutex_lock(&lock);
      break;
    case WAIT_EVENT:
      while (o->e->passed < o->generation && !d->broken && !o->e->of->broken) pthread_cond_wait(&changed, &lock);
      break;
    case RECORD:
      /* A later record, on another stream, may have come first. */
      if (o->e->passed < o->generation) o->e->at = now(), o->e->passed = o->generation;
      break;
    case WAIT_VALUE:
      while ((int32_t)(__atomic_load_n((uint32_t *)o->to, __ATOMIC_ACQUIRE) - o->value) < 0 && !d->broken) {
        pthread_mutex_unlock(&lock);
        usleep(20);
        pthread_mutex_lock(&lock);
      }
      break;
    case WRITE_VALUE:
      __atomic_store_n((uint32_t *)o->to, o->value, __ATOMIC_RELEASE);
      break;
    case LAUNCH:
      pthread_mutex_unlock(&lock);
      o->run(d, o->args, &o->s);
      pthread_mutex_lock(&lock);
      break;
    case HOST:
      pthread_mutex_unlock(&lock);
      o->host(o->data);
      pthread_mutex_lock(&lock);
      break;
  }
  if (o->e) forget(o->e);
  pthread_cond_broadcast(&changed);
}
/* Whether another stream of the queue has an operation that was enqueued before this one. */
static int behind(stream *s, uint64_t number) {
  for (stream *o = s->beside; o != s; o = o->beside)
    if ((o->busy && o->doing < number) || (o->first && o->first->number < number)) return 1;
  return 0;
}
static void leave_queue(stream *s) {
  stream *o = s;
  while (o->beside != s) o = o->beside;
  o->beside = s->beside;
}
/* The stream whose first operation is on its way to the driver. */
static stream *beginning;
static void enter_queue(stream *s) {
  if (!shared_queues) return;
  pthread_mutex_lock(&lock);
  int first = !s->begun;
  if (first && beginning && beginning != s) { /* rings that are not one become one */
    stream *o = s->beside;
    while (o != s && o != beginning) o = o->beside;
    if (o == s) o = s->beside, s->beside = beginning->beside, beginning->beside = o;
  }
  if (first) beginning = s;
  pthread_mutex_unlock(&lock);
  if (!first) return;
  usleep(100);
  pthread_mutex_lock(&lock);
  s->begun = 1;
  if (beginning == s) beginning = NULL;
  pthread_mutex_unlock(&lock);
}
static void *serve(void *arg) {
  stream *s = arg;
  pthread_mutex_lock(&lock);
  for (;;) {
    while (!s->first && !s->ended) pthread_cond_wait(&changed, &lock);
    if (!s->first) break;
    op *o = s->first;
    while (behind(s, o->number) && !s->of->broken) pthread_cond_wait(&changed, &lock);
    if (!(s->first = o->next)) s->last = &s->first;
    s->busy = 1;
    s->doing = o->number;
    run(s, o);
    s->busy = 0;
    pending--;
    free(o);
    if (idling || s->beside != s) pthread_cond_broadcast(&changed);
  }
  leave_queue(s);
  free(s);
  live_streams--;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
  return NULL;
}
static int push(stream *s, const op *o) {
  if (s->of != current && o->kind != COPY && o->kind != LAUNCH) return INVALID_CONTEXT;
  op *n = malloc(sizeof *n);
  *n = *o;
  n->next = NULL;
  if (s->capture) {
    if (o->kind == RECORD || o->kind == WAIT_EVENT) return free(n), CAPTURE_UNSUPPORTED;
    *s->capture->last = n;
    s->capture->last = &n->next;
    s->capture->nodes++;
    return OK;
  }
  while (idling) pthread_cond_wait(&changed, &lock);
  pending++;
  static uint64_t number;
  n->number = ++number;
  if (n->e) n->e->references++;
  *s->last = n;
  s->last = &n->next;
  pthread_cond_broadcast(&changed);
  return OK;
}

EXPORT int cuStreamCreateWithPriority(stream **out, unsigned flags, int priority) {
  BEGIN
  if (priority > 0 || priority < -5) END(INVALID_VALUE);
  stream *s = calloc(1, sizeof *s);
  s->of = current;
  s->context = current->contexts;
  s->last = &s->first;
  s->beside = s;
  pthread_t t;
  pthread_attr_t a;
  pthread_attr_init(&a);
  pthread_attr_setdetachstate(&a, PTHREAD_CREATE_DETACHED);
  pthread_attr_setstacksize(&a, 256 << 10);
  if (pthread_create(&t, &a, serve, s)) END(OUT_OF_MEMORY);
  pthread_attr_destroy(&a);
  live_streams++;
  *out = s;
  END(OK);
}
EXPORT int cuStreamCreate(stream **out, unsigned flags) { return cuStreamCreateWithPriority(out, flags, 0); }
EXPORT int cuStreamDestroy_v2(stream *s) {
  BEGIN
  s->ended = 1;
  pthread_cond_broadcast(&changed);
  END(OK);
}
EXPORT int cuStreamQuery(stream *s) {
  BEGIN
  if (s->capture) END(CAPTURE_UNSUPPORTED);
  END(s->first || s->busy ? NOT_READY : OK);
}
EXPORT int cuStreamWaitEvent(stream *s, event *e, unsigned flags) {
  enter_queue(s);
  BEGIN
  END(push(s, &(op){.kind = WAIT_EVENT, .e = e, .generation = e->recorded}));
}
EXPORT int cuStreamWaitValue32_v2(stream *s, address at, uint32_t value, unsigned flags) {
  enter_queue(s);
  BEGIN
  if (flags || !region_at(at, 4)) END(INVALID_VALUE);
  END(push(s, &(op){.kind = WAIT_VALUE, .to = at, .value = value}));
}
EXPORT int cuStreamWriteValue32_v2(stream *s, address at, uint32_t value, unsigned flags) {
  enter_queue(s);
  BEGIN
  if (flags || !region_at(at, 4)) END(INVALID_VALUE);
  END(push(s, &(op){.kind = WRITE_VALUE, .to = at, .value = value}));
}
EXPORT int cuLaunchHostFunc(stream *s, void (*f)(void *), void *data) {
  enter_queue(s);
  BEGIN
  END(push(s, &(op){.kind = HOST, .host = f, .data = data}));
}

EXPORT int cuEventCreate(event **out, unsigned flags) {
  BEGIN
  *out = calloc(1, sizeof **out);
  **out = (event){.of = current, .timed = !(flags & 2), .references = 1};
  live_events++;
  END(OK);
}
EXPORT int cuEventDestroy_v2(event *e) {
  BEGIN
  live_events--;
  forget(e);
  END(OK);
}
EXPORT int cuEventRecord(event *e, stream *s) {
  enter_queue(s);
  BEGIN
  if (e->of != s->of) END(INVALID_HANDLE);
  int r = push(s, &(op){.kind = RECORD, .e = e, .generation = e->recorded + 1});
  if (!r) e->recorded++;
  END(r);
}
EXPORT int cuEventQuery(event *e) {
  BEGIN
  END(e->passed < e->recorded ? NOT_READY : OK);
}
EXPORT int cuEventSynchronize(event *e) {
  BEGIN
  while (e->passed < e->recorded && !e->of->broken) pthread_cond_wait(&changed, &lock);
  END(e->of->broken);
}
EXPORT int cuEventElapsedTime(float *ms, event *a, event *b) {
  BEGIN
  if (!a->timed || !b->timed || !a->recorded || !b->recorded) END(INVALID_HANDLE);
  *ms = (float)(b->at - a->at);
  END(a->passed < a->recorded || b->passed < b->recorded ? NOT_READY : OK);
}

/* Copies: each side must lie in one region, and where it is a device's, the stream's device must have
   rights to it. */
static int copy(stream *s, address to, address from, size_t bytes) {
  region **a = region_at(to, bytes), **b = region_at(from, bytes);
  if (!a || !b) return INVALID_VALUE;
  for (int i = 0; i < 2; i++) {
    region *r = i ? *b : *a;
    if (r->memory && !(r->rights & 1 << s->of->number)) return INVALID_VALUE;
  }
  if (!(*a)->memory && !(*b)->memory) return INVALID_VALUE; /* would hold up the host */
  return push(s, &(op){.kind = COPY, .to = to, .from = from, .bytes = bytes});
}
EXPORT int cuMemcpyAsync(address to, address from, size_t bytes, stream *s) {
  enter_queue(s);
  BEGIN
  END(copy(s, to, from, bytes));
}
EXPORT int cuMemcpyBatchAsync(address *to, address *from, size_t *bytes, size_t n, const int *attributes, size_t *first, size_t kinds,
                              size_t *failed, stream *s) {
  enter_queue(s);
  BEGIN
  if (!n || kinds != 1 || *first != 0 || *attributes != 1 || attributes[5] != 0) END(INVALID_VALUE);
  for (size_t i = 0; i < n; i++) {
    int r = copy(s, to[i], from[i], bytes[i]);
    if (r) END((*failed = i, r));
  }
  END(OK);
}
EXPORT int cuMemcpyPeerAsync(address to, device *in, address from, device *of, size_t bytes, stream *s) {
  BEGIN
  region **a = region_at(to, bytes), **b = region_at(from, bytes);
  if (!a || !b || !(*a)->memory || !(*b)->memory || (*a)->memory->of != in || (*b)->memory->of != of) END(INVALID_VALUE);
  END(copy(s, to, from, bytes));
}

/* Modules and launches. */
typedef struct {
  const char *name;
  kernel *run;
  const char *parameters; /* the size of each, a digit */
} function;

static void fill(device *d, const unsigned char *args, const shape *s) {
  uint32_t *to = *(uint32_t **)args, value = *(uint32_t *)(args + 8), n = *(uint32_t *)(args + 12);
  for (uint32_t i = 0; i < n; i++) to[i] = value;
}
static void mixed(device *d, const unsigned char *args, const shape *s) {
  /* (uint32 a, uint64 *to, float b, uint64 c, int32 e) */
  uint64_t *to = *(uint64_t **)(args + 8);
  to[0] = *(uint32_t *)args;
  to[1] = (uint64_t)(*(float *)(args + 16) * 4);
  to[2] = *(uint64_t *)(args + 24);
  to[3] = (uint64_t)(int64_t) * (int32_t *)(args + 32);
  to[4] = (uint64_t)s->grid[0] * 1000000 + s->block[0] * 1000 + s->grid[1];
}
static void trap(device *d, const unsigned char *args, const shape *s) {
  pthread_mutex_lock(&lock);
  d->broken = from_environment("STANDIN_FAULT", ILLEGAL_ADDRESS);
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
}
static const function kernels[] = {{"fill", fill, "844"}, {"mixed", mixed, "48484"}, {"trap", trap, ""}};

/* What the kernels of a module share, as a fresh one has it. */
static uint32_t variable[4];
static int allowed;

EXPORT int cuModuleLoadData(void **m, const char *image) {
  BEGIN
  if (strncmp(image, "standin", 7)) END(INVALID_IMAGE);
  allowed = 49152;
  *m = malloc(1);
  live_modules++;
  END(OK);
}
EXPORT int cuModuleUnload(void *m) {
  BEGIN
  free(m);
  live_modules--;
  END(OK);
}
EXPORT int cuModuleGetFunction(function **f, void *m, const char *name) {
  BEGIN
  for (size_t i = 0; i < sizeof kernels / sizeof kernels[0]; i++)
    if (!strcmp(name, kernels[i].name)) {
      *f = (function *)&kernels[i];
      END(OK);
    }
  END(NOT_FOUND);
}
EXPORT int cuModuleGetGlobal_v2(address *at, size_t *bytes, void *m, const char *name) {
  BEGIN
  if (strcmp(name, "variable")) END(NOT_FOUND);
  *at = (address)variable;
  *bytes = sizeof variable;
  END(OK);
}
EXPORT int cuFuncGetAttribute(int *v, int a, function *f) {
  BEGIN
  *v = a == 0 ? 1024 : a == 4 ? 32 : a == 8 ? allowed : 0;
  END(OK);
}
EXPORT int cuFuncSetAttribute(function *f, int a, int v) {
  BEGIN
  if (a == 9 && v == 100) END(OK); /* the preferred share of shared memory */
  if (a != 8 || v > 232448) END(INVALID_VALUE);
  allowed = v;
  END(OK);
}
EXPORT int cuTensorMapEncodeTiled(void *map, int type, unsigned rank, address at, const uint64_t *size, const uint64_t *strides, const unsigned *box,
                                  const unsigned *steps, int interleave, int swizzle, int promotion, int fill) {
  BEGIN
  /* Of the driver's demands those on where a matrix lies and on its tiles, for 16-bit numbers in two dimensions. */
  if ((uintptr_t)map % 64 || type != 1 || rank != 2 || at % 16 || strides[0] % 16 || strides[0] >> 40) END(INVALID_VALUE);
  if (box[0] * 2 != 128 || box[1] < 1 || box[1] > 256 || steps[0] != 1 || steps[1] != 1 || interleave || swizzle != 3 || fill) END(INVALID_VALUE);
  if (size[0] < 1 || size[1] < 1 || (size[0] - 1) >> 32 || (size[1] - 1) >> 32) END(INVALID_VALUE);
  memset(map, 0, 128);
  memcpy(map, &at, sizeof at);
  END(OK);
}
typedef struct {
  unsigned grid[3], block[3], shared;
  stream *s;
  struct {
    int id, pad, on;
  } *attributes;
  unsigned count;
} launch_config;

/* An operation starts when the one in front has ended, also where a launch would do with less. */
EXPORT int cuLaunchKernelEx(const launch_config *c, function *f, void **params, void **extra) {
  enter_queue(c->s);
  BEGIN
  op o = {.kind = LAUNCH, .run = f->run, .s = {{c->grid[0], c->grid[1], c->grid[2]}, {c->block[0], c->block[1], c->block[2]}, c->shared}};
  if (extra || c->count > 1 || (c->count == 1 && (c->attributes->id != 6 || !c->attributes->on))) END(INVALID_VALUE);
  /* One after the other, each at a multiple of its size. */
  size_t at = 0;
  for (const char *size = f->parameters; *size; size++) {
    size_t n = *size - '0';
    at = (at + n - 1) / n * n;
    memcpy(o.args + at, *params++, n);
    at += n;
  }
  END(push(c->s, &o));
}

/* Graphs. */
EXPORT int cuStreamBeginCapture_v2(stream *s, int mode) {
  BEGIN
  if (s->capture) END(INVALID_VALUE);
  s->capture = calloc(1, sizeof *s->capture);
  s->capture->last = &s->capture->first;
  live_graphs++;
  END(OK);
}
EXPORT int cuStreamEndCapture(stream *s, graph **g) {
  BEGIN
  *g = s->capture;
  s->capture = NULL;
  END(*g ? OK : INVALID_VALUE);
}
EXPORT int cuGraphGetNodes(graph *g, void *nodes, size_t *n) { return *n = g->nodes, nodes ? INVALID_VALUE : OK; }
static void free_graph(graph *g) {
  for (op *o = g->first, *next; o; o = next) next = o->next, free(o);
  free(g);
  live_graphs--;
}
EXPORT int cuGraphDestroy(graph *g) {
  BEGIN
  free_graph(g);
  END(OK);
}
EXPORT int cuGraphInstantiateWithFlags(graph **exec, graph *g, unsigned long long flags) {
  BEGIN
  graph *e = calloc(1, sizeof *e);
  e->last = &e->first;
  for (op *o = g->first; o; o = o->next) {
    op *n = malloc(sizeof *n);
    *n = *o;
    n->next = NULL;
    *e->last = n;
    e->last = &n->next;
    e->nodes++;
  }
  live_graphs++;
  *exec = e;
  END(OK);
}
EXPORT int cuGraphUpload(graph *e, stream *s) { return OK; }
EXPORT int cuGraphLaunch(graph *e, stream *s) {
  enter_queue(s);
  BEGIN
  int r = OK;
  for (op *o = e->first; o && !r; o = o->next) r = push(s, o);
  END(r);
}
EXPORT int cuGraphExecDestroy(graph *e) {
  BEGIN
  free_graph(e);
  END(OK);
}

/* What is alive, in words; empty if nothing is. */
EXPORT void standin_alive(char *out, size_t n) {
  pthread_mutex_lock(&lock);
  int mapped = 0, pinned = 0, contexts = 0;
  for (region *r = regions; r; r = r->next) r->memory ? mapped++ : pinned++;
  for (int i = 0; i < MAX_DEVICES; i++) contexts += devices[i].references;
  out[0] = 0;
  if (mapped + pinned + contexts + reserved + live_streams + live_events + live_graphs + live_modules)
    snprintf(out, n, "%d mapped, %d pinned, %d reserved, %d streams, %d events, %d graphs, %d modules, %d contexts", mapped,
             pinned, reserved, live_streams, live_events, live_graphs, live_modules, contexts);
  pthread_mutex_unlock(&lock);
}
