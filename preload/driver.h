/* The CUDA driver as the preloaded libraries see it: its types, of which they know no more than the sizes,
   and how they look its functions up. They link against nothing but libc. */
#ifndef MOESERVE_PRELOAD_DRIVER_H
#define MOESERVE_PRELOAD_DRIVER_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <unistd.h>

/* What a library exports means its own function inside of it, also where another preloaded one exports the same. */
#define EXPORT __attribute__((visibility("protected")))

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef void *Opaque; /* contexts, streams, events, pools, handles */
typedef struct { unsigned char bytes[16]; } CUuuid;
enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_FOUND = 500, NOT_READY = 600, PEER_ACCESS_ALREADY_ENABLED = 704 };

typedef void *Dlsym(void *, const char *);

/* libc_dlsym is the C library's dlsym. It cannot be looked up by itself, since these libraries have one of
   their own; its version depends on the architecture and on glibc. */
static inline Dlsym *libc_dlsym(void) {
  static Dlsym *f;
  if (!f) {
    static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.2.5", "GLIBC_2.17", "GLIBC_2.27"};
    for (size_t i = 0; !f && i < sizeof versions / sizeof *versions; i++) f = (Dlsym *)dlvsym(RTLD_NEXT, "dlsym", versions[i]);
    if (!f) {
      static const char message[] = "moeserve: a preloaded library finds no dlsym in this C library\n";
      if (write(2, message, sizeof message - 1)) {}
      _exit(127);
    }
  }
  return f;
}

/* next_dlsym is the dlsym of the next preloaded library that has one, else the C library's: so two of these
   libraries work in one process. */
static inline Dlsym *next_dlsym(void) {
  static Dlsym *f;
  if (!f) {
    Dlsym *next = (Dlsym *)libc_dlsym()(RTLD_NEXT, "dlsym");
    f = next ? next : libc_dlsym();
  }
  return f;
}

static inline void *driver_library(void) {
  static void *library;
  if (!library) library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (!library) library = dlopen("libcuda.so.1", RTLD_LAZY);
  return library;
}

/* driver looks up a function of the driver, which the program has loaded by then; a preloaded library behind
   this one may stand before it. */
static inline void *driver(const char *name) {
  void *library = driver_library();
  return library ? next_dlsym()(library, name) : NULL;
}

#endif
