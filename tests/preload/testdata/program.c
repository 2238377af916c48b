/* A program that copies between host memory and GPUs and knows nothing of relays: program CASE [ARGUMENTS].
   It ends with 0, or says what does not hold. fake_* tell it what its copies were made of. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

typedef unsigned long long address;
#define MIB ((size_t)1 << 20)
#define N (8 * MIB)

int cuInit(unsigned);
int cuCtxCreate_v2(void **, unsigned, int);
int cuCtxGetCurrent(void **);
int cuCtxSetCurrent(void *);
int cuCtxSynchronize(void);
int cuDevicePrimaryCtxRetain(void **, int);
int cuDevicePrimaryCtxRelease_v2(int);
int cuDevicePrimaryCtxReset_v2(int);
int cuMemAlloc_v2(address *, size_t);
int cuMemAllocManaged(address *, size_t, unsigned);
int cuMemAllocAsync(address *, size_t, void *);
int cuMemHostAlloc(void **, size_t, unsigned);
int cuMemHostRegister_v2(void *, size_t, unsigned);
int cuStreamCreate(void **, unsigned);
int cuStreamSynchronize(void *);
int cuStreamBeginCapture_v2(void *, int);
int cuStreamEndCapture(void *, void **);
int cuLaunchHostFunc(void *, void (*)(void *), void *);
int cuMemcpyHtoD_v2(address, const void *, size_t);
int cuMemcpyDtoH_v2(void *, address, size_t);
int cuMemcpyAsync(address, address, size_t, void *);
int cuMemcpyHtoDAsync_v2(address, const void *, size_t, void *);
int cuMemcpyHtoDAsync_v2_ptsz(address, const void *, size_t, void *);
int cuMemcpyDtoHAsync_v2(void *, address, size_t, void *);
int cuMemcpy2D_v2(const void *, void *);
int cuMemcpy3DAsync_v2(const void *, void *);
unsigned long long fake_relayed(void), fake_native(void), fake_copies(void), fake_calls(void);
typedef struct {
  int type, device, flags;
} Right;
int cuMemSetAccess(address, size_t, const Right *, size_t), fake_map(address *, size_t);
void fake_break(int), fake_break_at_wait(int), fake_fail(const char *, int, int, int);

static void fail(const char *what, long long got) {
  printf("%s: %lld\n", what, got);
  fflush(stdout);
  _exit(1);
}
#define OK(call)                     \
  do {                               \
    int r_ = (call);                 \
    if (r_) fail(#call, r_);         \
  } while (0)
#define CHECK(what)              \
  do {                           \
    if (!(what)) fail(#what, 0); \
  } while (0)

static void *context;
static unsigned char *host;
static address gpu;

static void fill(unsigned char *p, size_t n, unsigned seed) {
  for (size_t i = 0; i + 8 <= n; i += 8) {
    uint64_t v = (i + 1) * 0x9e3779b97f4a7c15u + seed * 0x2545f4914f6cdd1du;
    memcpy(p + i, &v, 8);
  }
}
static long long differs(const unsigned char *p, size_t n, unsigned seed) {
  for (size_t i = 0; i + 8 <= n; i += 8) {
    uint64_t v = (i + 1) * 0x9e3779b97f4a7c15u + seed * 0x2545f4914f6cdd1du;
    if (memcmp(p + i, &v, 8)) return i;
  }
  return -1;
}
/* The memory of the stand-in's devices is the host's. */
static unsigned char *seen(address at) { return (unsigned char *)(uintptr_t)at; }

static void begin(void) {
  OK(cuInit(0));
  OK(cuDevicePrimaryCtxRetain(&context, 0));
  OK(cuCtxSetCurrent(context));
  OK(cuMemHostAlloc((void **)&host, 2 * N, 0));
  OK(cuMemAlloc_v2(&gpu, 2 * N));
}
/* warm waits until relays are open. */
static void warm(void) {
  for (int i = 0; i < 5000 && !fake_relayed(); i++) {
    OK(cuMemcpyHtoD_v2(gpu, host, N));
    usleep(1000);
  }
  CHECK(fake_relayed() > 0);
}

typedef struct {
  unsigned char *at;
  size_t n;
  unsigned seed;
  long long bad;
  int ms;
} Kernel;
static void write_kernel(void *p) {
  Kernel *k = p;
  usleep(1000 * k->ms);
  fill(k->at, k->n, k->seed);
}
static void read_kernel(void *p) {
  Kernel *k = p;
  k->bad = differs(k->at, k->n, k->seed);
}
static volatile int gate;
static void wait_gate(void *unused) {
  (void)unused;
  while (!gate) usleep(100);
}

/* ---- cases ---- */

/* Each function, however it was looked up, makes the copy over relays. */
static void *look_up(const char *way, const char *symbol) {
  char base[64];
  void *library = dlopen("libcuda.so.1", RTLD_NOW), *f = NULL;
  int per_thread = strstr(symbol, "_pt") != NULL;
  if (!strcmp(way, "dlsym")) return dlsym(library, symbol);
  if (!strcmp(way, "linked")) return dlsym(RTLD_DEFAULT, symbol);
  snprintf(base, sizeof base, "%s", symbol);
  char *end = strstr(base, "_v2");
  if (!end) end = strstr(base, "_pt");
  if (end) *end = 0;
  if (!strcmp(way, "runtime")) { /* which asks cuGetProcAddress for itself */
    int (*get)(const char *, void **, int, uint64_t, int *) = (int (*)(const char *, void **, int, uint64_t, int *))dlsym(library, "cuGetProcAddress_v2");
    OK(get("cuGetProcAddress", &f, 12000, 0, NULL));
    get = (int (*)(const char *, void **, int, uint64_t, int *))f;
    OK(get(base, &f, per_thread ? 7000 : 4000, per_thread ? 2 : 1, NULL));
    return f;
  }
  int (*get)(const char *, void **, int, uint64_t) = (int (*)(const char *, void **, int, uint64_t))dlsym(library, "cuGetProcAddress");
  OK(get("cuGetProcAddress", &f, 11030, 0));
  OK(((int (*)(const char *, void **, int, uint64_t))f)(base, &f, per_thread ? 7000 : 4000, per_thread ? 2 : 1));
  return f;
}
static void reach_symbol(const char *way, const char *symbol) {
  int asynchronous = strstr(symbol, "Async") != NULL;
  void *f = look_up(way, symbol), *stream = NULL;
  if (!f) fail(symbol, 0);
  for (int to_device = 1; to_device >= 0; to_device--) {
    if (strstr(symbol, to_device ? "DtoH" : "HtoD")) continue;
    address to = to_device ? gpu : (address)(uintptr_t)host, from = to_device ? (address)(uintptr_t)host : gpu;
    fill(seen(from), N, 3 + to_device);
    memset(seen(to), 0, N);
    unsigned long long before = fake_relayed(), all = before + fake_native();
    OK(asynchronous ? ((int (*)(address, address, size_t, void *))f)(to, from, N, stream) : ((int (*)(address, address, size_t))f)(to, from, N));
    if (asynchronous) OK(cuStreamSynchronize(strstr(symbol, "_ptsz") ? (void *)2 : stream));
    if (differs(seen(to), N, 3 + to_device) >= 0) fail(symbol, differs(seen(to), N, 3 + to_device));
    /* What is relayed is copied twice, all else once. */
    if (fake_relayed() == before || fake_relayed() + fake_native() - all != N + (fake_relayed() - before) / 2) fail(symbol, fake_relayed() - before);
  }
}
static void reach(const char *way) {
  static const char *const symbols[] = {
      "cuMemcpy",      "cuMemcpy_ptds",      "cuMemcpyHtoD_v2",      "cuMemcpyHtoD_v2_ptds",      "cuMemcpyDtoH_v2",      "cuMemcpyDtoH_v2_ptds",
      "cuMemcpyAsync", "cuMemcpyAsync_ptsz", "cuMemcpyHtoDAsync_v2", "cuMemcpyHtoDAsync_v2_ptsz", "cuMemcpyDtoHAsync_v2", "cuMemcpyDtoHAsync_v2_ptsz"};
  warm();
  for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) reach_symbol(way, symbols[i]);
}

/* Work before a copy in its stream is done before it begins, and work behind it begins when it has ended. */
static void order(const char *kind) {
  void *stream = NULL, *before = NULL, *behind = NULL, *null = NULL;
  warm();
  if (!strcmp(kind, "blocking")) OK(cuStreamCreate(&stream, 0));
  if (!strcmp(kind, "nonblocking")) OK(cuStreamCreate(&stream, 1));
  if (!strcmp(kind, "thread")) stream = (void *)2;
  before = behind = stream;
  /* The legacy stream is in order with blocking ones without being told. */
  if (!strcmp(kind, "legacy-between")) {
    OK(cuStreamCreate(&before, 0));
    OK(cuStreamCreate(&behind, 0));
  }
  for (unsigned round = 0; round < 10; round++) {
    size_t n = N - 4096 * (round % 7);
    int to_device = round % 2;
    unsigned char *from = to_device ? host : seen(gpu), *to = to_device ? seen(gpu) : host;
    Kernel make = {from, n, 2 * round, 0, 3}, again = {from, n, 2 * round + 1, 0, 0}, look = {to, n, 2 * round, -2, 0};
    unsigned long long relayed = fake_relayed();
    OK(cuLaunchHostFunc(before, write_kernel, &make));
    OK(to_device ? cuMemcpyHtoDAsync_v2(gpu, host, n, stream) : cuMemcpyDtoHAsync_v2(host, gpu, n, stream));
    OK(cuLaunchHostFunc(behind, read_kernel, &look));
    /* What comes behind may overwrite the source. */
    OK(cuLaunchHostFunc(behind, write_kernel, &again));
    OK(cuStreamSynchronize(behind));
    if (look.bad != -1) fail("wrong byte", look.bad);
    CHECK(fake_relayed() > relayed);
  }
  OK(cuStreamSynchronize(null));
}

/* A copy that cannot begin holds up none of another stream. */
static void independent(void) {
  enum { STREAMS = 12 };
  void *streams[STREAMS], *last;
  warm();
  for (int i = 0; i < STREAMS; i++) {
    OK(cuStreamCreate(&streams[i], 1));
    OK(cuLaunchHostFunc(streams[i], wait_gate, NULL));
    OK(cuMemcpyHtoDAsync_v2(gpu, host, N, streams[i]));
  }
  OK(cuStreamCreate(&last, 1));
  fill(host + N, N, 9);
  OK(cuMemcpyHtoDAsync_v2(gpu + N, host + N, N, last));
  OK(cuStreamSynchronize(last));
  CHECK(differs(seen(gpu + N), N, 9) < 0);
  gate = 1;
  for (int i = 0; i < STREAMS; i++) OK(cuStreamSynchronize(streams[i]));
}

/* Many copies of one stream that cannot begin: calls return, and what is relayed is bounded. */
static void many(void) {
  void *stream;
  warm();
  OK(cuStreamCreate(&stream, 1));
  OK(cuLaunchHostFunc(stream, wait_gate, NULL));
  for (int i = 0; i < 140; i++) OK(cuMemcpyHtoDAsync_v2(gpu, host, 2 * N, stream));
  fill(host, 2 * N, 5);
  gate = 1;
  OK(cuStreamSynchronize(stream));
  CHECK(differs(seen(gpu), 2 * N, 5) < 0);
}

/* What is left alone, once each. */
static void reasons(void) {
  void *stream, *other, *graph, *pageable = malloc(N), *registered = aligned_alloc(4096, N);
  address managed, pool, there;
  warm();
  OK(cuStreamCreate(&stream, 1));
  OK(cuMemAllocManaged(&managed, N, 1));
  OK(cuMemAllocAsync(&pool, N, NULL));
  OK(cuMemHostRegister_v2(registered, N, 0));
  memset(pageable, 1, N);
  unsigned long long relayed = fake_relayed();
  OK(cuMemcpyHtoD_v2(gpu, host, MIB / 2));                                 /* small */
  OK(cuMemcpyHtoD_v2(gpu, pageable, N));                                   /* pageable */
  OK(cuMemcpyHtoD_v2(managed, host, N));                                   /* managed */
  OK(cuMemcpyHtoD_v2(pool, host, N));                                      /* memory */
  OK(cuMemcpyHtoDAsync_v2(gpu, registered, N, stream));                    /* access */
  OK(cuMemcpyAsync(gpu, gpu + N, N, stream));                              /* device-to-device */
  OK(cuMemcpyAsync((address)(uintptr_t)host, (address)(uintptr_t)(host + N), N, stream)); /* the same, within the host */
  if (!cuMemcpyHtoD_v2(gpu + N, host, 2 * N)) fail("past the end", 0);     /* range */
  OK(cuStreamBeginCapture_v2(stream, 0));
  unsigned long long copies = fake_copies();
  OK(cuMemcpyHtoDAsync_v2(gpu, host, N, stream));                          /* capture */
  OK(cuMemcpyDtoHAsync_v2(host, gpu, N, stream));                          /* capture */
  CHECK(fake_copies() - copies == 2);
  OK(cuStreamEndCapture(stream, &graph));
  size_t two[16] = {[14] = 4 * MIB, 2}, three[25] = {[22] = MIB, 2, 4};
  OK(cuMemcpy2D_v2(two, NULL));                                            /* shape */
  OK(cuMemcpy3DAsync_v2(three, NULL));                                     /* shape */
  OK(cuCtxSynchronize());
  OK(cuCtxCreate_v2(&other, 0, 0));
  OK(cuMemAlloc_v2(&there, N));
  OK(cuMemcpyHtoD_v2(there, host, N));                                     /* context */
  relayed = fake_relayed() - relayed;
  CHECK(relayed == N); /* of the other context, which the stand-in counts as one that relays */
  OK(cuCtxSetCurrent(context));
}

/* Memory that the program has mapped itself. */
static void mapped(void) {
  address at;
  warm();
  OK(fake_map(&at, 2 * N));
  OK(cuMemSetAccess(at, 2 * N, &(Right){1, 0, 3}, 1));
  fill(host, 2 * N, 6);
  OK(cuMemcpyHtoD_v2(at, host, 2 * N));
  CHECK(differs(seen(at), 2 * N, 6) < 0);
  /* Half of it is not for the relay. */
  OK(cuMemSetAccess(at + N, N, &(Right){1, 1, 0}, 1));
  memset(seen(at), 0, 2 * N);
  OK(cuMemcpyHtoD_v2(at, host, 2 * N));
  CHECK(differs(seen(at), 2 * N, 6) < 0);
}

/* A relay is lost in mid-copy: the bytes come all the same, in order, and later copies too. */
static void loss(const char *how) {
  void *stream;
  Kernel look[3];
  warm();
  OK(cuStreamCreate(&stream, 1));
  fill(host, N, 7);
  fill(host + N, N, 8);
  OK(cuLaunchHostFunc(stream, wait_gate, NULL));
  if (!strcmp(how, "refused")) fake_fail("cuMemcpyAsync", 700, 5, 1);
  if (!strcmp(how, "first-refused")) fake_fail("cuStreamWaitEvent", 700, 0, 1);
  for (int i = 0; i < 3; i++) {
    int half = i % 2;
    look[i] = (Kernel){seen(gpu + half * N), N, 7 + half, -2, 0};
    if (!strcmp(how, "refused") || !strcmp(how, "first-refused")) gate = 1;
    OK(cuMemcpyHtoDAsync_v2(gpu + half * N, host + half * N, N, stream));
    OK(cuLaunchHostFunc(stream, read_kernel, &look[i]));
  }
  if (!strcmp(how, "before") || !strcmp(how, "told-once")) fake_break(1);
  /* A call for the program's GPU returns the error of the other, once. */
  if (!strcmp(how, "told-once")) fake_fail("cuEventQuery", 700, 0, 0), usleep(20000);
  gate = 1;
  if (!strcmp(how, "during")) usleep(2000), fake_break(1);
  OK(cuStreamSynchronize(stream));
  for (int i = 0; i < 3; i++)
    if (look[i].bad != -1) fail("wrong byte", look[i].bad);
  memset(seen(gpu), 0, N);
  OK(cuMemcpyHtoD_v2(gpu, host, N));
  CHECK(differs(seen(gpu), N, 7) < 0);
}

/* A synchronous copy during which the relay is lost returns with all bytes. */
static void *breaker(void *relayed) {
  /* Before, the relay would be left alone, as it cannot be asked what memory it has. */
  for (int i = 0; i < 100000 && fake_relayed() == *(unsigned long long *)relayed; i++) usleep(100);
  fake_break(1);
  return NULL;
}
static void loss_synchronous(void) {
  pthread_t t;
  warm();
  unsigned long long relayed = fake_relayed();
  fill(seen(gpu), 2 * N, 4);
  OK(pthread_create(&t, NULL, breaker, &relayed));
  OK(cuMemcpyDtoH_v2(host, gpu, 2 * N));
  CHECK(differs(host, 2 * N, 4) < 0);
  pthread_join(t, NULL);
}

/* A relay refuses one stream's copy while it makes another's: nothing is written after that one has ended. */
static void loss_beside(void) {
  void *streams[2];
  warm();
  fill(host, N, 7);
  fill(host + N, N, 8);
  for (int i = 0; i < 2; i++) OK(cuStreamCreate(&streams[i], 1));
  OK(cuMemcpyHtoDAsync_v2(gpu, host, N, streams[0]));
  fake_fail("cuMemcpyAsync", 700, 0, 1);
  OK(cuMemcpyHtoDAsync_v2(gpu + N, host + N, N, streams[1]));
  OK(cuStreamSynchronize(streams[0]));
  CHECK(differs(seen(gpu), N, 7) < 0);
  fill(seen(gpu), N, 9);
  OK(cuStreamSynchronize(streams[1]));
  CHECK(differs(seen(gpu + N), N, 8) < 0);
  usleep(500000);
  CHECK(differs(seen(gpu), N, 9) < 0);
}

/* Of a relay's fault the driver tells the program, too, whose stream has not got all bytes then: nothing behind the copy
   begins, and the program's calls return the error. */
static void loss_shared(void) {
  void *stream;
  Kernel look = {seen(gpu), N, 7, -2, 0};
  warm();
  OK(cuStreamCreate(&stream, 1));
  fill(host, N, 7);
  OK(cuLaunchHostFunc(stream, wait_gate, NULL));
  OK(cuMemcpyHtoDAsync_v2(gpu, host, N, stream));
  OK(cuLaunchHostFunc(stream, read_kernel, &look));
  fake_break(1);
  gate = 1;
  int r = cuStreamSynchronize(stream);
  if (r != 700) fail("cuStreamSynchronize", r);
  usleep(200000);
  if (look.bad != -2) fail("work behind the copy began, wrong byte", look.bad);
  r = cuMemcpyHtoD_v2(gpu, host, N);
  if (r != 700) fail("cuMemcpyHtoD", r);
  /* And the context ends without waiting for what cannot come. */
  OK(cuDevicePrimaryCtxReset_v2(0));
}

/* The same error comes while a copy is being enqueued: the call returns, with the error. */
static void loss_enqueued(void) {
  warm();
  fill(host, N, 7);
  fake_break_at_wait(1);
  int r = cuMemcpyHtoDAsync_v2(gpu, host, N, NULL);
  if (r != 700) fail("cuMemcpyHtoDAsync", r);
}

/* A relay whose query fails once is not lost, and nobody writes what it still copies. */
static void loss_doubted(void) {
  void *stream;
  warm();
  OK(cuStreamCreate(&stream, 1));
  fill(host, N, 7);
  OK(cuMemcpyHtoDAsync_v2(gpu, host, N, stream));
  fake_fail("cuStreamQuery", 700, 0, 1);
  OK(cuStreamSynchronize(stream));
  CHECK(differs(seen(gpu), N, 7) < 0);
  fill(seen(gpu), N, 9);
  usleep(500000);
  CHECK(differs(seen(gpu), N, 9) < 0);
  unsigned long long relayed = fake_relayed();
  OK(cuMemcpyHtoD_v2(gpu, host, N));
  CHECK(fake_relayed() > relayed);
}

/* The program's context stays current, also if the driver does not pop that of a relay. */
static void stays(void) {
  void *now;
  warm();
  OK(cuCtxSynchronize());
  usleep(50000);
  fake_break(1);
  for (int i = 0; i < 3; i++) {
    fill(host, N, i);
    OK(cuMemcpyHtoD_v2(gpu, host, N));
    CHECK(differs(seen(gpu), N, i) < 0);
    OK(cuCtxGetCurrent(&now));
    CHECK(now == context);
  }
}

/* While no relayed copy is in progress the library calls nothing, and a copy below the threshold is one call. */
static void quiet(void) {
  unsigned long long before = 0;
  for (int i = 0; i < 10 && fake_calls() != before; i++) {
    before = fake_calls();
    usleep(200000);
  }
  CHECK(fake_calls() == before);
}
static void sleeps(void) {
  void *stream;
  OK(cuStreamCreate(&stream, 1));
  unsigned long long before = fake_calls();
  OK(cuMemcpyHtoDAsync_v2(gpu, host, MIB - 8, stream));
  if (fake_calls() - before != 1) fail("calls of a copy before any large one", fake_calls() - before);
  warm();
  for (int i = 0; i < 20; i++) OK(cuMemcpyHtoDAsync_v2(gpu, host, N, stream));
  OK(cuStreamSynchronize(stream));
  quiet();
  for (size_t n = 8; n < MIB; n *= 4) {
    before = fake_calls();
    OK(cuMemcpyHtoDAsync_v2(gpu, host, n, stream));
    OK(cuMemcpyDtoHAsync_v2(host, gpu, n, NULL));
    OK(cuMemcpyHtoD_v2(gpu, host, n));
    OK(cuMemcpyDtoH_v2(host, gpu, n));
    OK(cuStreamSynchronize(stream));
    if (fake_calls() - before != 5) fail("calls of four copies and a wait", fake_calls() - before);
  }
  quiet();
  unsigned long long relayed = fake_relayed();
  OK(cuMemcpyHtoD_v2(gpu, host, N));
  CHECK(fake_relayed() > relayed);
  quiet();
}

/* Copies at random from several threads, each in a stream of its own and in memory of its own. */
static void *worker(void *arg) {
  unsigned seed = (unsigned)(uintptr_t)arg;
  unsigned char *from;
  address at;
  void *stream;
  OK(cuCtxSetCurrent(context));
  OK(cuMemHostAlloc((void **)&from, N, 0));
  OK(cuMemAlloc_v2(&at, N));
  OK(cuStreamCreate(&stream, seed & 1));
  for (unsigned i = 0; i < 15; i++) {
    size_t n = (rand_r(&seed) % (N / 8 - 1) + 1) * 8, off = rand_r(&seed) % (N - n + 1) / 8 * 8;
    unsigned what = rand_r(&seed);
    fill(from + off, n, what);
    if (what % 3) {
      OK(cuMemcpyHtoDAsync_v2(at + off, from + off, n, stream));
      OK(cuStreamSynchronize(stream));
    } else if (seed & 2) {
      OK(cuMemcpyHtoDAsync_v2_ptsz(at + off, from + off, n, NULL));
      OK(cuStreamSynchronize((void *)2));
    } else {
      OK(cuMemcpyHtoD_v2(at + off, from + off, n));
    }
    memset(from + off, 0, n);
    OK(cuMemcpyDtoHAsync_v2(from + off, at + off, n, stream));
    OK(cuStreamSynchronize(stream));
    if (differs(from + off, n, what) >= 0) fail("differs at", differs(from + off, n, what));
  }
  return NULL;
}
static void threads(void) {
  pthread_t all[8];
  warm();
  for (size_t i = 0; i < 8; i++) OK(pthread_create(&all[i], NULL, worker, (void *)(i * 7919 + 1)));
  for (size_t i = 0; i < 8; i++) pthread_join(all[i], NULL);
}

/* A forked process gets the driver's answer and makes no report. */
static void forks(void) {
  int status;
  warm();
  pid_t child = fork();
  if (!child) exit(cuMemcpyHtoD_v2(gpu, host, N) == 3 ? 0 : 1);
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  fill(host, N, 2);
  OK(cuMemcpyHtoD_v2(gpu, host, N));
  CHECK(differs(seen(gpu), N, 2) < 0);
}

/* A process that is forked before CUDA is used is like any other. */
static void forks_first(void) {
  int status;
  pid_t child = fork();
  if (child) {
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(status == 0);
    return;
  }
  begin();
  warm();
}

static void wait_for_ever(void *unused) {
  (void)unused;
  for (;;) sleep(1);
}
/* A program may end while copies are in flight, or cannot begin. */
static void leaves(void) {
  void *stream;
  warm();
  OK(cuStreamCreate(&stream, 1));
  OK(cuMemcpyHtoDAsync_v2(gpu, host, N, stream));
  OK(cuLaunchHostFunc(stream, wait_for_ever, NULL));
  OK(cuMemcpyHtoDAsync_v2(gpu, host, N, stream));
}

/* The primary context ends and comes again; releases that do not end it change nothing. */
static void resets(void) {
  warm();
  void *again;
  OK(cuDevicePrimaryCtxRetain(&again, 0));
  OK(cuDevicePrimaryCtxRelease_v2(0));
  unsigned long long relayed = fake_relayed();
  OK(cuMemcpyHtoD_v2(gpu, host, N));
  CHECK(fake_relayed() > relayed);
  OK(cuDevicePrimaryCtxReset_v2(0));
  OK(cuDevicePrimaryCtxRetain(&context, 0));
  OK(cuCtxSetCurrent(context));
  OK(cuMemAlloc_v2(&gpu, N));
  relayed = fake_relayed();
  for (int i = 0; i < 5000 && fake_relayed() == relayed; i++) {
    fill(host, N, i);
    OK(cuMemcpyHtoD_v2(gpu, host, N));
    CHECK(differs(seen(gpu), N, i) < 0);
    usleep(1000);
  }
  CHECK(fake_relayed() > relayed);
}

/* Without relays the copies are made all the same. */
static void alone(void) {
  for (int i = 0; i < 6; i++) {
    fill(host, N, i);
    OK(cuMemcpyHtoD_v2(gpu, host, N));
    CHECK(differs(seen(gpu), N, i) < 0);
    usleep(10000);
  }
  if (fake_relayed()) fail("relayed", fake_relayed());
}

/* A relay that is slow gets less of later copies, and never nothing. */
static void adapts(void) {
  unsigned long long last = 0;
  warm();
  for (int i = 0; i < 12; i++) {
    unsigned long long before = fake_relayed();
    OK(cuMemcpyHtoD_v2(gpu, host, 2 * N));
    last = fake_relayed() - before;
    usleep(3000); /* for the copy to be measured */
  }
  /* Half of it would be relayed, which counts twice. */
  if (!last || last > 2 * N * 2 / 3) fail("relayed at last", last);
}

/* Beside a library that gets memory back: each stands before what it wraps. */
static void both(void) {
  address at;
  int r = ((int (*)(address *, size_t))look_up("runtime", "cuMemAlloc"))(&at, 1ull << 40);
  if (r != 2) fail("result", r);
  reach("runtime");
}

/* A copy that the driver refuses is refused. */
static void refused(void) {
  warm();
  fake_fail("cuMemcpyHtoDAsync_v2", 2, 0, 0);
  int r = cuMemcpyHtoDAsync_v2(gpu, host, N, NULL);
  if (r != 2) fail("result", r);
  OK(cuCtxSynchronize());
  fake_fail("cuMemcpyAsync", 2, 0, 0); /* the direct part */
  OK(cuMemcpyHtoDAsync_v2(gpu, host, N, NULL));
  OK(cuCtxSynchronize());
}

int main(int argc, char **argv) {
  const char *name = argc > 1 ? argv[1] : "";
  if (!strcmp(name, "forks-first")) return forks_first(), 0;
  begin();
  if (!strcmp(name, "reach") && argc == 3) reach(argv[2]);
  else if (!strcmp(name, "order") && argc == 3) order(argv[2]);
  else if (!strcmp(name, "independent")) independent();
  else if (!strcmp(name, "many")) many();
  else if (!strcmp(name, "reasons")) reasons();
  else if (!strcmp(name, "mapped")) mapped();
  else if (!strcmp(name, "loss") && argc == 3) loss(argv[2]);
  else if (!strcmp(name, "loss-synchronous")) loss_synchronous();
  else if (!strcmp(name, "threads")) threads();
  else if (!strcmp(name, "forks")) forks();
  else if (!strcmp(name, "leaves")) leaves();
  else if (!strcmp(name, "resets")) resets();
  else if (!strcmp(name, "loss-beside")) loss_beside();
  else if (!strcmp(name, "loss-shared")) loss_shared();
  else if (!strcmp(name, "loss-enqueued")) loss_enqueued();
  else if (!strcmp(name, "loss-doubted")) loss_doubted();
  else if (!strcmp(name, "stays")) stays();
  else if (!strcmp(name, "sleeps")) sleeps();
  else if (!strcmp(name, "alone")) alone();
  else if (!strcmp(name, "both")) both();
  else if (!strcmp(name, "adapts")) adapts();
  else if (!strcmp(name, "refused")) refused();
  else return 2;
  return 0;
}
