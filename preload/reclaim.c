/* Preloaded into a program that uses GPUs (LD_PRELOAD), this gets memory back that moeserve has borrowed:
   when the driver refuses an allocation for lack of memory, it asks the moeserve processes of the machine
   for what is missing on that GPU, waits until they have answered, and tries again, until the memory is
   there or a deadline has passed. The program need not know of it, and nothing happens before a refusal.

     make preload
     LD_PRELOAD=$PWD/libmoeserve-reclaim.so python train.py

   MOESERVE_RUNTIME_DIR           the directory of moeserve's sockets, as its --runtime-dir
                                  (default: $XDG_RUNTIME_DIR/moeserve, else /tmp/moeserve-UID)
   MOESERVE_RECLAIM_DEADLINE_MS   the time that an allocation may take longer (default: 500; 0: disabled)
   MOESERVE_RECLAIM_VERBOSE       if set, each request is a line on standard error

   It stands between the program and the driver where programs look up the driver's functions: dlsym and
   cuGetProcAddress (the CUDA runtime, and so PyTorch, use both), and by name where they link against
   libcuda. Wrapped are cuMemAlloc, cuMemAllocPitch, cuMemCreate, cuMemAllocAsync and
   cuMemAllocFromPoolAsync. It links against nothing but libc, and knows the driver's types by size only.
   The protocol is that of moeserve's package harvest/reclaim. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "driver.h"

/* The head of CUmemAllocationProp. */
typedef struct {
  int type, handle_types, location_type, location_id;
} AllocationProp;

/* ---- requests ---- */

static long long now_ms(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000LL + t.tv_nsec / 1000000;
}

static long long deadline_ms(void) {
  const char *text = getenv("MOESERVE_RECLAIM_DEADLINE_MS");
  return text && *text ? atoll(text) : 500;
}

static void say(const char *format, ...) {
  if (!getenv("MOESERVE_RECLAIM_VERBOSE")) return;
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  int n = vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  if (n > 0) fprintf(stderr, "moeserve-reclaim[%d]: %s\n", (int)getpid(), text);
}

/* socket_dir writes the directory of the sockets; 0 where it must not be used. */
static int socket_dir(char *path, size_t size) {
  const char *set = getenv("MOESERVE_RUNTIME_DIR"), *session = getenv("XDG_RUNTIME_DIR");
  if (set && *set && strcmp(set, "auto")) return strcmp(set, "none") && (size_t)snprintf(path, size, "%s", set) < size;
  int n = session && *session == '/' ? snprintf(path, size, "%s/moeserve", session) : snprintf(path, size, "/tmp/moeserve-%d", (int)getuid());
  /* The default is this user's alone: in a directory of others anybody could listen. */
  struct stat s;
  return (size_t)n < size && !lstat(path, &s) && S_ISDIR(s.st_mode) && s.st_uid == getuid() && !(s.st_mode & 077);
}

/* number finds "key": N in an answer; -1 where there is none. */
static long long number(const char *text, const char *key) {
  const char *at = strstr(text, key);
  if (!at || !(at = strchr(at, ':'))) return -1;
  return atoll(at + 1);
}

/* ask sends one request, and returns what the process has released, or -1. */
static long long ask(const char *path, const char *device, unsigned long long bytes, long long end) {
  struct sockaddr_un to = {.sun_family = AF_UNIX};
  if (strlen(path) >= sizeof to.sun_path) return -1;
  strcpy(to.sun_path, path);
  int s = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (s < 0) return -1;
  char body[256], text[4096];
  long long freed = -1, left = end - now_ms();
  if (left < 1) left = 1;
  int length = snprintf(body, sizeof body, "{\"device\": \"%s\", \"bytes\": %llu, \"deadline_ms\": %lld}", device, bytes, left);
  int n = snprintf(text, sizeof text,
                   "POST /harvest/reclaim HTTP/1.0\r\nHost: moeserve\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", length, body);
  struct timeval limit = {.tv_sec = left / 1000, .tv_usec = left % 1000 * 1000};
  setsockopt(s, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  if (!connect(s, (struct sockaddr *)&to, sizeof to) && send(s, text, n, MSG_NOSIGNAL) == n) {
    size_t got = 0;
    for (;;) {
      struct pollfd p = {.fd = s, .events = POLLIN};
      /* The answer may be a little late. */
      long long wait = end + 100 - now_ms();
      if (wait <= 0) break;
      int ready = poll(&p, 1, (int)wait);
      if (ready < 0 && errno == EINTR) continue;
      if (ready <= 0) break;
      ssize_t part = got < sizeof text - 1 ? recv(s, text + got, sizeof text - 1 - got, 0) : 0;
      if (part < 0 && errno == EINTR) continue;
      if (part <= 0) break;
      got += part;
    }
    text[got] = 0;
    if (got > 12 && !strncmp(text + 9, "200", 3)) freed = number(text, "\"freed_bytes\"");
  }
  close(s);
  return freed;
}

/* ask_all asks every process, each for what is still missing, so that none borrows what another has
   released. It returns what they have released; -1 where none has answered. */
static long long ask_all(const char *device, unsigned long long bytes, long long end) {
  char dir[512], path[1024];
  if (!socket_dir(dir, sizeof dir)) return -1;
  DIR *d = opendir(dir);
  if (!d) return -1;
  long long all = -1;
  char self[32];
  int n = snprintf(self, sizeof self, "%d-", (int)getpid());
  for (struct dirent *e; (e = readdir(d));) {
    size_t length = strlen(e->d_name);
    if (length < 6 || strcmp(e->d_name + length - 5, ".sock") || !strncmp(e->d_name, self, n)) continue;
    if ((size_t)snprintf(path, sizeof path, "%s/%s", dir, e->d_name) >= sizeof path) continue;
    long long freed = ask(path, device, bytes, end);
    if (freed >= 0) all = (all < 0 ? 0 : all) + freed;
  }
  closedir(d);
  return all;
}

/* uuid writes the UUID of a device as NVML has it; 0 where the driver does not tell it. */
static int uuid(CUdevice device, char *text) {
  CUresult (*get)(CUuuid *, CUdevice) = (CUresult(*)(CUuuid *, CUdevice))driver("cuDeviceGetUuid_v2");
  const char *prefix = "MIG";
  CUuuid id;
  if (!get) get = (CUresult(*)(CUuuid *, CUdevice))driver("cuDeviceGetUuid");
  if (!get || get(&id, device) != SUCCESS) return 0;
  /* The first version has the whole GPU's, the second that of a MIG instance where it is one. */
  CUuuid whole;
  CUresult (*first)(CUuuid *, CUdevice) = (CUresult(*)(CUuuid *, CUdevice))driver("cuDeviceGetUuid");
  if (!first || first(&whole, device) != SUCCESS || !memcmp(&whole, &id, sizeof id)) prefix = "GPU";
  int n = sprintf(text, "%s-", prefix);
  for (int i = 0; i < 16; i++) n += sprintf(text + n, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", id.bytes[i]);
  return 1;
}

/* Reclaim is an allocation that was refused. */
typedef struct {
  long long begin, end;
  char device[64];
  int tries;
} Reclaim;

/* What an allocation takes beside its bytes, at the first try: the driver's granularity. */
#define SLACK (2ULL << 20)

/* again decides whether an allocation with that result is to be tried again, and gets the memory that it
   needs. device is -1 for that of the current context. */
static int again(Reclaim *r, CUresult result, size_t bytes, CUdevice device) {
  if (result != OUT_OF_MEMORY) {
    if (r->tries) say("%zu bytes on %s after %lld ms and %d tries: result %d", bytes, r->device, now_ms() - r->begin, r->tries, result);
    return 0;
  }
  int saved = errno, retry = 0;
  if (!r->tries) {
    long long limit = deadline_ms();
    r->begin = now_ms();
    r->end = r->begin + limit;
    CUresult (*current)(CUdevice *) = (CUresult(*)(CUdevice *))driver("cuCtxGetDevice");
    if (limit <= 0 || (device < 0 && (!current || current(&device) != SUCCESS)) || !uuid(device, r->device)) goto end;
  }
  if (now_ms() >= r->end) goto end;
  /* Page tables take some, and what is free may lie in pieces that are too small: each try asks for more. */
  unsigned long long need = bytes + (SLACK << 2 * (r->tries < 4 ? r->tries : 4));
  long long freed = ask_all(r->device, need, r->end);
  say("%zu bytes on %s refused: asked for %llu, %lld released", bytes, r->device, need, freed);
  if (freed < 0) goto end;
  r->tries++;
  retry = freed > 0 || r->tries <= 3;
  if (retry && !freed) {
    /* Nothing more is borrowed, or another process was faster: a moment for it to be seen. */
    struct timespec moment = {.tv_nsec = 2000000};
    nanosleep(&moment, NULL);
  }
end:
  errno = saved;
  return retry;
}

/* ---- the wrapped functions ---- */

/* A wrapped function has a pointer to the driver's own, which is looked up when it is first needed. */
#define WRAP(name, parameters, arguments, bytes, device) \
  typedef CUresult Type_##name parameters; \
  static Type_##name *own_##name; \
  EXPORT CUresult name parameters { \
    if (!own_##name) own_##name = (Type_##name *)driver(#name); \
    if (!own_##name) return NOT_FOUND; \
    Reclaim r = {0}; \
    CUresult result; \
    do result = own_##name arguments; \
    while (again(&r, result, bytes, device)); \
    return result; \
  }

WRAP(cuMemAlloc_v2, (CUdeviceptr * p, size_t n), (p, n), n, -1)
WRAP(cuMemAllocPitch_v2, (CUdeviceptr * p, size_t *pitch, size_t width, size_t height, unsigned element), (p, pitch, width, height, element),
     width *height, -1)
WRAP(cuMemAllocAsync, (CUdeviceptr * p, size_t n, Opaque stream), (p, n, stream), n, -1)
WRAP(cuMemAllocAsync_ptsz, (CUdeviceptr * p, size_t n, Opaque stream), (p, n, stream), n, -1)
WRAP(cuMemAllocFromPoolAsync, (CUdeviceptr * p, size_t n, Opaque pool, Opaque stream), (p, n, pool, stream), n, -1)
WRAP(cuMemAllocFromPoolAsync_ptsz, (CUdeviceptr * p, size_t n, Opaque pool, Opaque stream), (p, n, pool, stream), n, -1)
/* Type 1 is memory of a device. */
WRAP(cuMemCreate, (unsigned long long *handle, size_t n, const AllocationProp *prop, unsigned long long flags), (handle, n, prop, flags), n,
     prop->location_type == 1 ? prop->location_id : -1)

#define WRAPPED_ROWS                                             \
  ROW(cuMemAlloc_v2, "cuMemAlloc", 0)                            \
  ROW(cuMemAllocPitch_v2, "cuMemAllocPitch", 0)                  \
  ROW(cuMemAllocAsync, "cuMemAllocAsync", 0)                     \
  ROW(cuMemAllocAsync_ptsz, "cuMemAllocAsync", 1)                \
  ROW(cuMemAllocFromPoolAsync, "cuMemAllocFromPoolAsync", 0)     \
  ROW(cuMemAllocFromPoolAsync_ptsz, "cuMemAllocFromPoolAsync", 1) \
  ROW(cuMemCreate, "cuMemCreate", 0)
#include "interpose.h"
