/* A program that uses a GPU and knows nothing of moeserve: tenant WAY BYTES allocates once, having looked the
   driver's function up that WAY, and prints its result. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Alloc(unsigned long long *, size_t);
typedef int AllocAsync(unsigned long long *, size_t, void *);
typedef int Create(unsigned long long *, size_t, const void *, unsigned long long);
typedef int GetProc(const char *, void **, int, uint64_t, int *);
int cuMemAlloc_v2(unsigned long long *, size_t);

int main(int argc, char **argv) {
  if (argc != 3) return 2;
  size_t n = strtoull(argv[2], NULL, 10);
  unsigned long long p;
  int result = -1, prop[8] = {1, 0, 1, 0};
  void *f = NULL, *library = dlopen("libcuda.so.1", RTLD_NOW);
  if (!strcmp(argv[1], "linked")) {
    result = cuMemAlloc_v2(&p, n);
  } else if (!strcmp(argv[1], "dlsym")) {
    result = ((Alloc *)dlsym(library, "cuMemAlloc_v2"))(&p, n);
  } else if (!strcmp(argv[1], "create")) {
    result = ((Create *)dlsym(library, "cuMemCreate"))(&p, n, prop, 0);
  } else {
    /* As the CUDA runtime does: cuGetProcAddress looks up itself, too. */
    GetProc *get = (GetProc *)dlsym(library, "cuGetProcAddress_v2");
    if (!get || get("cuGetProcAddress", &f, 12000, 0, NULL)) return 3;
    get = (GetProc *)f;
    if (!strcmp(argv[1], "runtime")) {
      if (get("cuMemAlloc", &f, 3020, 0, NULL)) return 3;
      result = ((Alloc *)f)(&p, n);
    } else {
      if (get("cuMemAllocAsync", &f, 11020, 0, NULL)) return 3;
      result = ((AllocAsync *)f)(&p, n, NULL);
    }
  }
  printf("%d\n", result);
  return 0;
}
