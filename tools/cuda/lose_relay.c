/* libmoeserve-multipath.so with a fault, for multipath.py: as soon as the file named in LOSE_AT is there, a kernel
   writes where no memory is, in the context that the library has on its first relay. The context ends with a
   sticky error, as after a failure of that GPU; the contexts of the program are not touched. Compiled with the
   sources of preload/multipath. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "../../preload/multipath/state.h"

static const char code[] =
    ".version 7.0\n.target sm_80\n.address_size 64\n"
    ".visible .entry write(.param .u64 to) {\n .reg .b64 %at;\n .reg .b32 %value;\n"
    " ld.param.u64 %at, [to];\n mov.u32 %value, 1;\n st.global.u32 [%at], %value;\n ret;\n}\n";

static void fail(const char *what, int code) {
  fprintf(stderr, "lose_relay: %s: %d\n", what, code);
  _exit(99);
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
  Relay *r = first_relay();
  if (own.cuCtxPushCurrent_v2(r->context)) fail("cuCtxPushCurrent", 0);
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
