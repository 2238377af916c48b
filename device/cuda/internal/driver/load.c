//go:build cuda

#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>

#include "load.h"
#include "table.h"

#define HIDDEN __attribute__((visibility("hidden")))

static int not_loaded(void) { return 3; /* CUDA_ERROR_NOT_INITIALIZED */ }
static int not_found(void) { return 500; /* CUDA_ERROR_NOT_FOUND */ }

/* One slot for each trampoline. */
HIDDEN void *driver_table[DRIVER_CALLS] = {[0 ... DRIVER_CALLS - 1] = (void *)not_loaded};

static void *library;

/* Calls that a newer header renames without changing what they do: a driver that is older than the
   header has them under their first name. */
static const char *const renamed[][2] = {
    {"cuEventElapsedTime_v2", "cuEventElapsedTime"},
    {"cuDeviceGetUuid_v2", "cuDeviceGetUuid"},
};

static void *find(void *in, const char *name) {
  void *p = dlsym(in, name);
  for (size_t i = 0; !p && i < sizeof renamed / sizeof renamed[0]; i++) {
    const char *a = name, *b = renamed[i][0];
    while (*a && *a == *b) a++, b++;
    if (*a == *b) p = dlsym(in, renamed[i][1]);
  }
  return p;
}

/* What package cu calls while the program starts; see doc.go. */
HIDDEN int cuInit(unsigned flags) {
  (void)flags;
  return 0;
}

int driver_open(const char *path, char *why, size_t n) {
  void *l = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!l) {
    snprintf(why, n, "%s", dlerror());
    return -1;
  }
  if (!dlsym(l, "cuInit")) {
    snprintf(why, n, "%s: has no cuInit, so it is no CUDA driver", path);
    dlclose(l);
    return -1;
  }
  library = l;
  for (size_t i = 0; i < DRIVER_CALLS; i++) {
    void *p = find(l, driver_names[i]);
    driver_table[i] = p ? p : (void *)not_found;
  }
  return 0;
}

int driver_init(void) {
  if (!library) return not_loaded();
  return ((int (*)(unsigned))dlsym(library, "cuInit"))(0);
}

int driver_missing(char *out, size_t n) {
  int missing = 0;
  size_t at = 0;
  out[0] = 0;
  for (size_t i = 0; i < DRIVER_CALLS; i++) {
    if (driver_table[i] != (void *)not_found) continue;
    missing++;
    int w = snprintf(out + at, n - at, "%s ", driver_names[i]);
    if (w > 0 && (size_t)w < n - at) at += (size_t)w;
  }
  return missing;
}

void *driver_symbol(const char *name) { return library ? dlsym(library, name) : NULL; }
