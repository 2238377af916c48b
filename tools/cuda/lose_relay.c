/* libmoeserve-multipath.so with a fault, for multipath.py: as soon as the file named in LOSE_AT is there, the library's
   first relay is lost. LOSE_BY says how:

     calls  (default) of the next copy the relay makes five more operations, and none after these; then the driver's
            calls for its context fail. The driver itself is not touched, so all else works as before.
     fault  a kernel writes where no memory is, in the library's context. CUDA documents of such an error that it leaves
            the process, not the context, in an inconsistent state.

   Compiled with the sources of preload/multipath. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../../preload/multipath/state.h"

static const char code[] =
    ".version 7.0\n.target sm_80\n.address_size 64\n"
    ".visible .entry write(.param .u64 to) {\n .reg .b64 %at;\n .reg .b32 %value;\n"
    " ld.param.u64 %at, [to];\n mov.u32 %value, 1;\n st.global.u32 [%at], %value;\n ret;\n}\n";

static struct Calls real;
static Relay *victim;
static volatile int losing;
static struct timespec since; /* the loss was first asked about */
static int left = 5; /* operations before none is made; the library enqueues those of a relay under its lock */

static void fail(const char *what, int code) {
  fprintf(stderr, "lose_relay: %s: %d\n", what, code);
  _exit(99);
}

static int there(void) {
  Opaque context = NULL;
  return losing && real.cuCtxGetCurrent(&context) == SUCCESS && context == victim->context;
}

static CUresult copy_or_not(CUdeviceptr to, CUdeviceptr from, size_t bytes, Opaque stream) {
  if (there() && (left <= 0 || left-- <= 0)) return SUCCESS;
  return real.cuMemcpyAsync(to, from, bytes, stream);
}

static CUresult write_or_not(Opaque stream, CUdeviceptr at, uint32_t value, unsigned flags) {
  return there() && left <= 0 ? SUCCESS : real.cuStreamWriteValue32_v2(stream, at, value, flags);
}

/* What the relay was given before the loss takes microseconds: a context that is lost writes no more. Its streams
   are not asked whether it has ended, since some wait for copies behind the one that is not completed. */
static CUresult query(Opaque stream) {
  struct timespec now;
  if (!there() || left > 0) return real.cuStreamQuery(stream);
  clock_gettime(CLOCK_MONOTONIC, &now);
  if (!since.tv_sec) since = now;
  return (now.tv_sec - since.tv_sec) * 1000 + (now.tv_nsec - since.tv_nsec) / 1000000 < 100 ? NOT_READY : 719;
}

static Relay *first_relay(void) {
  for (;; nap(1000000)) {
    pthread_mutex_lock(&lock);
    for (int d = 0; d < MAX_DEVICES; d++)
      if (relays[d].state == READY) return pthread_mutex_unlock(&lock), &relays[d];
    pthread_mutex_unlock(&lock);
  }
}

static void *lose(void *file) {
#define RUN(name, types, ...)                                  \
  do {                                                         \
    CUresult(*f) types = (CUresult(*) types)driver(#name);     \
    int result = f ? f(__VA_ARGS__) : -1;                      \
    if (result) fail(#name, result);                           \
  } while (0)
  void *module, *write, *arguments[1];
  CUdeviceptr place, nowhere = 1024;
  const char *how = getenv("LOSE_BY");
  victim = first_relay();
  if (!how || strcmp(how, "fault")) {
    while (access(file, F_OK) != 0) nap(1000000);
    pthread_mutex_lock(&lock);
    real = own;
    own.cuMemcpyAsync = copy_or_not, own.cuStreamWriteValue32_v2 = write_or_not, own.cuStreamQuery = query;
    losing = 1;
    pthread_mutex_unlock(&lock);
    return NULL;
  }
  if (own.cuCtxSetCurrent(victim->context)) fail("cuCtxSetCurrent", 0);
  RUN(cuModuleLoadData, (void **, const void *), &module, code);
  RUN(cuModuleGetFunction, (void **, void *, const char *), &write, module, "write");
  if (own.cuMemAlloc_v2(&place, 4)) fail("cuMemAlloc", 0);
  /* Code is loaded before copies wait for it. */
  for (int i = 0; i < 2; i++) {
    while (i && access(file, F_OK) != 0) nap(1000000);
    arguments[0] = i ? &nowhere : &place;
    RUN(cuLaunchKernel, (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **), write, 1, 1, 1, 1, 1, 1,
        0, NULL, arguments, NULL);
  }
  return NULL;
}

__attribute__((constructor)) static void begin(void) {
  static pthread_t sabotage;
  char *file = getenv("LOSE_AT");
  if (file && pthread_create(&sabotage, NULL, lose, file)) fail("no thread", 0);
}
