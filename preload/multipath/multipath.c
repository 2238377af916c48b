/* Preloaded into a program that uses GPUs (LD_PRELOAD), this copies between pinned host memory and a GPU over
   the PCIe links of other GPUs, too. The program need not know of it, and computes the same.

     make preload
     LD_PRELOAD=$PWD/libmoeserve-multipath.so python train.py

   MOESERVE_MULTIPATH_RELAYS     the GPUs whose links are used: all (default: those that NVLink connects),
                                 none, or numbers as the process sees them, or UUIDs, separated by commas
   MOESERVE_MULTIPATH_THRESHOLD  the smallest copy that takes part, in bytes, or with K, M or G (default: what pays
                                 by the file that MOESERVE_HARDWARE names, of moeserve bench transfer
                                 --calibrate, if it says so; else 16M)
   MOESERVE_MULTIPATH_MAPPED     1: also memory that the program maps itself by cuMemMap (PyTorch's expandable
                                 segments, vLLM's sleep mode), by giving relays access to it
   MOESERVE_MULTIPATH_LOG        the file that the report at the end is appended to (default: standard error,
                                 from programs that have copied that much at a time; none: no report)

   Wrapped are cuMemcpyHtoD, cuMemcpyDtoH and cuMemcpy, synchronous and not, for each kind of default stream,
   which the CUDA runtime calls, linked in whichever way; cuMemcpy2D and cuMemcpy3D are counted; and the calls
   that end a primary context. What cannot be shown to be safe goes to the driver as it is, and is counted by
   reason. Preloaded with libmoeserve-reclaim.so, this one goes first. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "relay.h"

#define DEFAULT_THRESHOLD ((size_t)16 << 20)
#define LEAST_THRESHOLD ((size_t)1 << 20)

static size_t threshold = DEFAULT_THRESHOLD;
static char complaint[256];
static int mapped; /* relays get access to memory that the program maps itself */
static int forked; /* this process was forked from one that used CUDA, whose state cannot be used here */
static struct {
  atomic_ullong copies, bytes;
} counted[REASONS];

static void count(Reason why, unsigned long long bytes) {
  atomic_fetch_add_explicit(&counted[why].copies, 1, memory_order_relaxed);
  atomic_fetch_add_explicit(&counted[why].bytes, bytes, memory_order_relaxed);
}

/* ---- the start and the end ---- */

static void report(void) {
  const char *path = getenv("MOESERVE_MULTIPATH_LOG");
  int named = path && *path;
  unsigned long long copies = 0; /* that the report is about */
  for (int i = 0; i < REASONS; i++) copies += i == SMALL && !named ? 0 : counted[i].copies;
  if (forked || !copies || (named && !strcmp(path, "none"))) return;
  char *line = NULL;
  size_t length;
  FILE *out = open_memstream(&line, &length);
  if (!out) return;
  fprintf(out, "moeserve-multipath[%d] %s: %llu copies relayed, %llu bytes", (int)getpid(), program_invocation_short_name,
          (unsigned long long)counted[RELAYED].copies, (unsigned long long)counted[RELAYED].bytes);
  relay_report(out);
  fprintf(out, "; left alone:");
  for (int i = 0; i < REASONS; i++)
    if (i != RELAYED && counted[i].copies)
      fprintf(out, " %s %llu (%llu bytes)", reason_names[i], (unsigned long long)counted[i].copies, (unsigned long long)counted[i].bytes);
  for (const char *what = complaint; what; what = what == complaint ? relay_complaint : NULL)
    if (*what) fprintf(out, "; %s", what);
  fputc('\n', out);
  fclose(out);
  FILE *to = named ? fopen(path, "ae") : stderr;
  if (to) fputs(line, to); /* one write, so that lines of several processes do not mix */
  if (to && to != stderr) fclose(to);
  free(line);
}

static void child(void) {
  forked = relay_child();
  for (int i = 0; i < REASONS; i++) counted[i].copies = counted[i].bytes = 0;
}

/* calibrated returns the larger of the thresholds in a file of hardware; 0 if it has none. */
static size_t calibrated(const char *path) {
  static const char *const keys[] = {"\"threshold_in_bytes\"", "\"threshold_out_bytes\""};
  char text[1 << 16];
  unsigned long long most = 0;
  FILE *f = path && *path ? fopen(path, "re") : NULL; /* it may be the name of a preset, too */
  if (!f) return 0;
  text[fread(text, 1, sizeof text - 1, f)] = 0;
  fclose(f);
  for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
    const char *at = strstr(text, keys[i]);
    unsigned long long value = at && (at = strchr(at, ':')) ? strtoull(at + 1, NULL, 10) : 0;
    if (value > most) most = value;
  }
  return most;
}

__attribute__((constructor)) static void start(void) {
  const char *text = getenv("MOESERVE_MULTIPATH_THRESHOLD");
  size_t known = calibrated(getenv("MOESERVE_HARDWARE"));
  if (known) threshold = known < LEAST_THRESHOLD ? LEAST_THRESHOLD : known;
  if (text && *text) {
    char *end;
    errno = 0;
    double value = strtod(text, &end);
    const char *units = "KMG", *unit = *end ? strchr(units, *end & ~0x20) : NULL;
    if (unit) value *= (double)(1ull << 10 * (unit - units + 1)), end++;
    if (errno || end == text || *end || !(value >= 0 && value < 1e18))
      snprintf(complaint, sizeof complaint, "MOESERVE_MULTIPATH_THRESHOLD: \"%.64s\" is no size: give bytes, or a number with K, M or G; %zu is used", text, threshold);
    else
      threshold = value < LEAST_THRESHOLD ? LEAST_THRESHOLD : (size_t)value;
  }
  text = getenv("MOESERVE_MULTIPATH_MAPPED");
  mapped = text && !strcmp(text, "1");
  pthread_atfork(NULL, NULL, child);
  atexit(report);
}

/* ---- the wrapped functions ---- */

/* explicit_stream gives stream 0 a handle that does not depend on the call. */
static Opaque explicit_stream(Opaque stream, int per_thread) { return stream ? stream : (Opaque)(uintptr_t)(per_thread ? 2 : 1); }

/* attempt begins a copy over several paths, and returns how many bytes the program's call need not copy. */
static size_t attempt(Copy *c) {
  Reason why = SMALL;
  size_t done = 0;
  if (c->bytes >= threshold && !forked) done = relay_begin(c, &why);
  count(done ? RELAYED : why, c->bytes);
  return done;
}

/* A wrapped copy has a pointer to the driver's own, which is looked up when it is first needed. */
#define COPY(name, to_type, from_type, parameters, arguments, per_thread, on)                                             \
  typedef CUresult Type_##name parameters;                                                                                \
  static Type_##name *own_##name;                                                                                         \
  EXPORT CUresult name parameters {                                                                                       \
    if (!own_##name && !(own_##name = (Type_##name *)driver(#name))) return NOT_FOUND;                                    \
    Copy c = {.to = (CUdeviceptr)(uintptr_t)to, .from = (CUdeviceptr)(uintptr_t)from, .bytes = n, .stream = explicit_stream(on, per_thread)}; \
    size_t done = attempt(&c);                                                                                            \
    to = (to_type)((uintptr_t)to + done), from = (from_type)((uintptr_t)from + done), n -= done;                           \
    CUresult result = own_##name arguments;                                                                               \
    if (done) relay_end(&c);                                                                                              \
    return c.result != SUCCESS ? c.result : result;                                                                       \
  }
#define SYNCHRONOUS(name, to_type, from_type, per_thread) COPY(name, to_type, from_type, (to_type to, from_type from, size_t n), (to, from, n), per_thread, NULL)
#define ASYNCHRONOUS(name, to_type, from_type, per_thread) \
  COPY(name, to_type, from_type, (to_type to, from_type from, size_t n, Opaque stream), (to, from, n, stream), per_thread, stream)

SYNCHRONOUS(cuMemcpy, CUdeviceptr, CUdeviceptr, 0)
SYNCHRONOUS(cuMemcpy_ptds, CUdeviceptr, CUdeviceptr, 1)
SYNCHRONOUS(cuMemcpyHtoD_v2, CUdeviceptr, const void *, 0)
SYNCHRONOUS(cuMemcpyHtoD_v2_ptds, CUdeviceptr, const void *, 1)
SYNCHRONOUS(cuMemcpyDtoH_v2, void *, CUdeviceptr, 0)
SYNCHRONOUS(cuMemcpyDtoH_v2_ptds, void *, CUdeviceptr, 1)
ASYNCHRONOUS(cuMemcpyAsync, CUdeviceptr, CUdeviceptr, 0)
ASYNCHRONOUS(cuMemcpyAsync_ptsz, CUdeviceptr, CUdeviceptr, 1)
ASYNCHRONOUS(cuMemcpyHtoDAsync_v2, CUdeviceptr, const void *, 0)
ASYNCHRONOUS(cuMemcpyHtoDAsync_v2_ptsz, CUdeviceptr, const void *, 1)
ASYNCHRONOUS(cuMemcpyDtoHAsync_v2, void *, CUdeviceptr, 0)
ASYNCHRONOUS(cuMemcpyDtoHAsync_v2_ptsz, void *, CUdeviceptr, 1)

/* The ends of CUDA_MEMCPY2D and CUDA_MEMCPY3D. */
typedef struct {
  size_t before[14], width, height;
} Shape2;
typedef struct {
  size_t before[22], width, height, depth;
} Shape3;
_Static_assert(sizeof(Shape2) == 128 && sizeof(Shape3) == 200, "as the driver's");

#define SHAPED(name, type, parameters, arguments, bytes)                                  \
  typedef CUresult Type_##name parameters;                                                \
  static Type_##name *own_##name;                                                         \
  EXPORT CUresult name parameters {                                                       \
    if (!own_##name && !(own_##name = (Type_##name *)driver(#name))) return NOT_FOUND;    \
    if (shape && bytes >= threshold) count(SHAPE, bytes);                                 \
    return own_##name arguments;                                                          \
  }
#define SHAPED2(name) SHAPED(name, Shape2, (const Shape2 *shape), (shape), shape->width *shape->height)
#define SHAPED2_ASYNC(name) SHAPED(name, Shape2, (const Shape2 *shape, Opaque stream), (shape, stream), shape->width *shape->height)
#define SHAPED3(name) SHAPED(name, Shape3, (const Shape3 *shape), (shape), shape->width *shape->height *shape->depth)
#define SHAPED3_ASYNC(name) SHAPED(name, Shape3, (const Shape3 *shape, Opaque stream), (shape, stream), shape->width *shape->height *shape->depth)

SHAPED2(cuMemcpy2D_v2)
SHAPED2(cuMemcpy2D_v2_ptds)
SHAPED2(cuMemcpy2DUnaligned_v2)
SHAPED2(cuMemcpy2DUnaligned_v2_ptds)
SHAPED2_ASYNC(cuMemcpy2DAsync_v2)
SHAPED2_ASYNC(cuMemcpy2DAsync_v2_ptsz)
SHAPED3(cuMemcpy3D_v2)
SHAPED3(cuMemcpy3D_v2_ptds)
SHAPED3_ASYNC(cuMemcpy3DAsync_v2)
SHAPED3_ASYNC(cuMemcpy3DAsync_v2_ptsz)

/* A primary context ends with its last release, or by a reset: what relay.c has in it goes first. */
static atomic_int retained[64];

typedef CUresult Type_cuDevicePrimaryCtxRetain(Opaque *context, CUdevice device);
static Type_cuDevicePrimaryCtxRetain *own_cuDevicePrimaryCtxRetain;
EXPORT CUresult cuDevicePrimaryCtxRetain(Opaque *context, CUdevice device) {
  if (!own_cuDevicePrimaryCtxRetain && !(own_cuDevicePrimaryCtxRetain = (Type_cuDevicePrimaryCtxRetain *)driver("cuDevicePrimaryCtxRetain"))) return NOT_FOUND;
  CUresult result = own_cuDevicePrimaryCtxRetain(context, device);
  if (result == SUCCESS && device >= 0 && device < 64) atomic_fetch_add(&retained[device], 1);
  return result;
}

static void ends(CUdevice device, int reset) {
  if (device < 0 || device >= 64 || forked) return;
  if (reset || atomic_fetch_sub(&retained[device], 1) <= 1) {
    relay_forget(device);
    atomic_store(&retained[device], 0);
  }
}
#define CONTEXT_END(name, reset)                                                          \
  typedef CUresult Type_##name(CUdevice device);                                          \
  static Type_##name *own_##name;                                                         \
  EXPORT CUresult name(CUdevice device) {                                                 \
    if (!own_##name && !(own_##name = (Type_##name *)driver(#name))) return NOT_FOUND;    \
    ends(device, reset);                                                                  \
    return own_##name(device);                                                            \
  }

CONTEXT_END(cuDevicePrimaryCtxRelease, 0)
CONTEXT_END(cuDevicePrimaryCtxRelease_v2, 0)
CONTEXT_END(cuDevicePrimaryCtxReset, 1)
CONTEXT_END(cuDevicePrimaryCtxReset_v2, 1)

/* Memory that a program maps itself is for the devices that it names: relays are added if that is wanted. */
typedef CUresult Type_cuMemSetAccess(CUdeviceptr at, size_t n, const AccessRight *rights, size_t count);
static Type_cuMemSetAccess *own_cuMemSetAccess;
EXPORT CUresult cuMemSetAccess(CUdeviceptr at, size_t n, const AccessRight *rights, size_t count) {
  if (!own_cuMemSetAccess && !(own_cuMemSetAccess = (Type_cuMemSetAccess *)driver("cuMemSetAccess"))) return NOT_FOUND;
  CUresult result = own_cuMemSetAccess(at, n, rights, count);
  if (result == SUCCESS && mapped && !forked && count == 1 && rights->type == 1 && rights->flags == 3) relay_share(at, n, rights->device);
  return result;
}

#define WRAPPED_ROWS                                          \
  ROW(cuMemcpy, "cuMemcpy", 0)                                \
  ROW(cuMemcpy_ptds, "cuMemcpy", 1)                           \
  ROW(cuMemcpyHtoD_v2, "cuMemcpyHtoD", 0)                     \
  ROW(cuMemcpyHtoD_v2_ptds, "cuMemcpyHtoD", 1)                \
  ROW(cuMemcpyDtoH_v2, "cuMemcpyDtoH", 0)                     \
  ROW(cuMemcpyDtoH_v2_ptds, "cuMemcpyDtoH", 1)                \
  ROW(cuMemcpyAsync, "cuMemcpyAsync", 0)                      \
  ROW(cuMemcpyAsync_ptsz, "cuMemcpyAsync", 1)                 \
  ROW(cuMemcpyHtoDAsync_v2, "cuMemcpyHtoDAsync", 0)           \
  ROW(cuMemcpyHtoDAsync_v2_ptsz, "cuMemcpyHtoDAsync", 1)      \
  ROW(cuMemcpyDtoHAsync_v2, "cuMemcpyDtoHAsync", 0)           \
  ROW(cuMemcpyDtoHAsync_v2_ptsz, "cuMemcpyDtoHAsync", 1)      \
  ROW(cuMemcpy2D_v2, "cuMemcpy2D", 0)                         \
  ROW(cuMemcpy2D_v2_ptds, "cuMemcpy2D", 1)                    \
  ROW(cuMemcpy2DUnaligned_v2, "cuMemcpy2DUnaligned", 0)       \
  ROW(cuMemcpy2DUnaligned_v2_ptds, "cuMemcpy2DUnaligned", 1)  \
  ROW(cuMemcpy2DAsync_v2, "cuMemcpy2DAsync", 0)               \
  ROW(cuMemcpy2DAsync_v2_ptsz, "cuMemcpy2DAsync", 1)          \
  ROW(cuMemcpy3D_v2, "cuMemcpy3D", 0)                         \
  ROW(cuMemcpy3D_v2_ptds, "cuMemcpy3D", 1)                    \
  ROW(cuMemcpy3DAsync_v2, "cuMemcpy3DAsync", 0)               \
  ROW(cuMemcpy3DAsync_v2_ptsz, "cuMemcpy3DAsync", 1)          \
  ROW(cuMemSetAccess, "cuMemSetAccess", 0)                    \
  ROW(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", 0) \
  ROW(cuDevicePrimaryCtxRelease, "", 0)                       \
  ROW(cuDevicePrimaryCtxRelease_v2, "cuDevicePrimaryCtxRelease", 0) \
  ROW(cuDevicePrimaryCtxReset, "", 0)                         \
  ROW(cuDevicePrimaryCtxReset_v2, "cuDevicePrimaryCtxReset", 0)
#include "../interpose.h"
