/* The part of a preloaded library that stands where programs look up the driver's functions: dlsym and
   cuGetProcAddress (the CUDA runtime, and so PyTorch, use both). What a program links against libcuda by
   name, the dynamic linker binds to the wrappers itself.

   A source file includes this at its end, after it has defined its wrappers, each NAME with a pointer
   own_NAME to the driver's function, and listed them in WRAPPED_ROWS: ROW(NAME, BASE, PER_THREAD), BASE being
   what cuGetProcAddress calls it, PER_THREAD whether it is for default streams of the thread. */
#include <string.h>

#include "driver.h"

typedef CUresult GetProc(const char *, void **, int, uint64_t);
typedef CUresult GetProc2(const char *, void **, int, uint64_t, void *);
EXPORT CUresult cuGetProcAddress(const char *, void **, int, uint64_t);
EXPORT CUresult cuGetProcAddress_v2(const char *, void **, int, uint64_t, void *);
EXPORT void *dlsym(void *library, const char *name);
static GetProc *own_get;
static GetProc2 *own_get2;

/* Wrapped functions by the driver's names, and by those that cuGetProcAddress knows. */
static const struct {
  const char *name, *base;
  void *wrapper, **own;
  int per_thread; /* for streams of the thread */
} wrapped[] = {
#define ROW(name, base, per_thread) {#name, base, (void *)name, (void **)&own_##name, per_thread},
    WRAPPED_ROWS
#undef ROW
    {"cuGetProcAddress", "", (void *)cuGetProcAddress, (void **)&own_get, 0},
    {"cuGetProcAddress_v2", "", (void *)cuGetProcAddress_v2, (void **)&own_get2, 0},
};
#define WRAPPED (sizeof wrapped / sizeof *wrapped)

/* wrap replaces a function that cuGetProcAddress has found. */
static void wrap(const char *symbol, void **f, int version, uint64_t flags) {
  if (!f || !*f || !symbol) return;
  if (!strcmp(symbol, "cuGetProcAddress")) { /* itself, which has had another signature since CUDA 12.0 */
    if (version >= 12000) {
      if (*f != (void *)cuGetProcAddress_v2) own_get2 = (GetProc2 *)*f;
      *f = (void *)cuGetProcAddress_v2;
    } else {
      if (*f != (void *)cuGetProcAddress) own_get = (GetProc *)*f;
      *f = (void *)cuGetProcAddress;
    }
    return;
  }
  if (version < 3020) return; /* with sizes of 32 bits */
  int per_thread = flags >> 1 & 1; /* CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM */
  for (int pass = per_thread; pass >= 0; pass--)
    for (size_t i = 0; i < WRAPPED; i++)
      if (!strcmp(symbol, wrapped[i].base) && wrapped[i].per_thread == pass) {
        if (*f != wrapped[i].wrapper) *wrapped[i].own = *f;
        *f = wrapped[i].wrapper;
        return;
      }
}

EXPORT CUresult cuGetProcAddress(const char *symbol, void **f, int version, uint64_t flags) {
  if (!own_get) own_get = (GetProc *)driver("cuGetProcAddress");
  if (!own_get) return NOT_FOUND;
  CUresult result = own_get(symbol, f, version, flags);
  if (result == SUCCESS) wrap(symbol, f, version, flags);
  return result;
}

EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **f, int version, uint64_t flags, void *status) {
  if (!own_get2) own_get2 = (GetProc2 *)driver("cuGetProcAddress_v2");
  if (!own_get2) return NOT_FOUND;
  CUresult result = own_get2(symbol, f, version, flags, status);
  if (result == SUCCESS) wrap(symbol, f, version, flags);
  return result;
}

/* dlsym returns the wrapped functions where the driver has them. All else goes on by a jump, since
   RTLD_NEXT depends on the caller: build with optimization. */
EXPORT void *dlsym(void *library, const char *name) {
  Dlsym *next = next_dlsym();
  if (name[0] == 'c' && name[1] == 'u')
    for (size_t i = 0; i < WRAPPED; i++)
      if (!strcmp(name, wrapped[i].name)) {
        void *f = next(library, name);
        if (!f || f == wrapped[i].wrapper) return f;
        *wrapped[i].own = f;
        return wrapped[i].wrapper;
      }
  return next(library, name);
}
