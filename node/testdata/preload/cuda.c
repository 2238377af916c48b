/* Stands in for libcuda.so.1: a GPU whose memory the test has. An allocation is a line with its bytes on
   the socket STUB_SOCKET, which answers with the driver's result. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static int allocate(unsigned long long bytes) {
  struct sockaddr_un to = {.sun_family = AF_UNIX};
  char text[32] = "";
  int s = socket(AF_UNIX, SOCK_STREAM, 0), result = 999;
  strcpy(to.sun_path, getenv("STUB_SOCKET"));
  int n = sprintf(text, "%llu\n", bytes);
  if (!connect(s, (struct sockaddr *)&to, sizeof to) && write(s, text, n) == n && read(s, text, sizeof text - 1) > 0) result = atoi(text);
  close(s);
  return result;
}

int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuDeviceGetUuid(unsigned char id[16], int device) {
  (void)device;
  for (int i = 0; i < 16; i++) id[i] = i + 1;
  return 0;
}
int cuMemAlloc_v2(unsigned long long *p, size_t n) { *p = 4096; return allocate(n); }
int cuMemAllocAsync(unsigned long long *p, size_t n, void *stream) { (void)stream; *p = 4096; return allocate(n); }
int cuMemCreate(unsigned long long *h, size_t n, const void *prop, unsigned long long flags) { (void)prop, (void)flags; *h = 1; return allocate(n); }

int cuGetProcAddress_v2(const char *symbol, void **f, int version, uint64_t flags, int *status) {
  (void)version, (void)flags;
  if (status) *status = 0;
  *f = !strcmp(symbol, "cuMemAlloc")         ? (void *)cuMemAlloc_v2
       : !strcmp(symbol, "cuMemAllocAsync")  ? (void *)cuMemAllocAsync
       : !strcmp(symbol, "cuMemCreate")      ? (void *)cuMemCreate
       : !strcmp(symbol, "cuGetProcAddress") ? (void *)cuGetProcAddress_v2
                                             : NULL;
  return *f ? 0 : 500;
}
