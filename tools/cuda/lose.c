/* Preloaded into a program that uses a GPU (LD_PRELOAD), this runs a kernel that writes where no memory
   is as soon as the file named in LOSE_AT is there: the program's CUDA context ends with a sticky error,
   as after a fault of its own. Nothing outside of that process is touched. Part of gpu.py. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static const char code[] =
    ".version 7.0\n.target sm_80\n.address_size 64\n"
    ".visible .entry write(.param .u64 to) {\n .reg .b64 %at;\n .reg .b32 %value;\n"
    " ld.param.u64 %at, [to];\n mov.u32 %value, 1;\n st.global.u32 [%at], %value;\n ret;\n}\n";

static void fail(const char *what, int code) {
  fprintf(stderr, "lose: %s: %d\n", what, code);
  _exit(99);
}

static void *lose(void *file) {
  void *driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (!driver) fail(dlerror(), 0);
#define CALL(name, types, ...) \
  do { \
    int(*f) types = (int(*) types)dlsym(driver, #name); \
    int result = f ? f(__VA_ARGS__) : -1; \
    if (result) fail(#name, result); \
  } while (0)
#define LAUNCH() \
  CALL(cuLaunchKernel, (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **), write, 1, 1, \
       1, 1, 1, 1, 0, NULL, arguments, NULL)
  int device = 0;
  void *context, *module, *write, *arguments[1];
  unsigned long long place, nowhere = 1024;
  CALL(cuInit, (unsigned), 0);
  CALL(cuDeviceGet, (int *, int), &device, 0);
  CALL(cuDevicePrimaryCtxRetain, (void **, int), &context, device);
  CALL(cuCtxSetCurrent, (void *), context);
  CALL(cuModuleLoadData, (void **, const void *), &module, code);
  CALL(cuModuleGetFunction, (void **, void *, const char *), &write, module, "write");
  CALL(cuMemAlloc_v2, (unsigned long long *, size_t), &place, 4);
  /* Code is loaded now: later the driver would wait for the device to be idle, and let nobody enqueue. */
  arguments[0] = &place;
  LAUNCH();
  CALL(cuCtxSynchronize, (void));
  while (access(file, F_OK) != 0) usleep(1000);
  arguments[0] = &nowhere;
  LAUNCH();
  return NULL;
}

__attribute__((constructor)) static void start(void) {
  static pthread_t thread;
  char *file = getenv("LOSE_AT");
  if (file && pthread_create(&thread, NULL, lose, file)) fail("no thread", 0);
}
