/* Opens relays: their contexts, buffers and streams, and access to the memory of the GPUs that they serve. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "state.h"

struct Calls own;

Relay relays[MAX_DEVICES];
Target *targets[MAX_DEVICES];
uint64_t chosen;
int sets = SETS;
char relay_complaint[256];
static int by_default; /* nobody has named the relays */
static enum { NOT_LOADED, LOADED, UNUSABLE } calls;

/* chosen_devices reads MOESERVE_MULTIPATH_RELAYS: all, none, or ordinals and UUIDs. */
static void chosen_devices(void) {
  const char *text = getenv("MOESERVE_MULTIPATH_RELAYS");
  int count = 0;
  if (own.cuDeviceGetCount(&count) != SUCCESS) return;
  if (count > MAX_DEVICES) count = MAX_DEVICES;
  by_default = !text || !*text || !strcmp(text, "all");
  if (by_default) {
    chosen = count == 64 ? ~0ull : (1ull << count) - 1;
    return;
  }
  char copy[1024], *rest = copy, *name;
  if (!strcmp(text, "none")) return;
  snprintf(copy, sizeof copy, "%s", text);
  while ((name = strsep(&rest, ", "))) {
    if (!*name) continue;
    char *end, id[64];
    long n = strtol(name, &end, 10);
    if (*end) n = -1;
    for (int d = 0; n < 0 && d < count; d++) {
      CUuuid uuid;
      if (own.cuDeviceGetUuid(&uuid, d) != SUCCESS) continue;
      int at = sprintf(id, "GPU-");
      for (int i = 0; i < 16; i++) at += sprintf(id + at, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", uuid.bytes[i]);
      if (!strcmp(id, name)) n = d;
    }
    if (n >= 0 && n < count)
      chosen |= 1ull << n;
    else
      snprintf(relay_complaint, sizeof relay_complaint,
               "MOESERVE_MULTIPATH_RELAYS: this process sees no GPU \"%.64s\": give numbers below %d, or UUIDs (GPU-...)", name, count);
  }
}

/* count_sets follows what the program has set of queues, as the driver does. */
static void count_sets(void) {
  const char *text = getenv("CUDA_DEVICE_MAX_COPY_CONNECTIONS");
  if (!text || !*text) text = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  int queues = text ? atoi(text) : 0;
  if (queues > 0 && queues / 2 < SETS) sets = queues / 2 > 0 ? queues / 2 : 1;
}

/* load looks up the driver's own functions. */
int load(void) {
  if (calls == NOT_LOADED) {
    void *library = driver_library();
    calls = library ? LOADED : UNUSABLE;
#define CALL(name, parameters) \
  if (library && !(own.name = (CUresult(*) parameters)libc_dlsym()(library, #name))) calls = UNUSABLE;
#include "calls.h"
#undef CALL
    if (calls == LOADED) {
      count_sets();
      chosen_devices();
    }
  }
  return calls == LOADED;
}

#define TRY(call, arguments)                  \
  do {                                        \
    r->what = #call, r->code = own.call arguments; \
    if (r->code != SUCCESS) goto failed;      \
  } while (0)

static void open_set(Relay *r, Set *s, volatile uint32_t *word) {
  s->word = word;
  for (int i = 0; i < 2; i++) {
    TRY(cuMemAlloc_v2, (&s->buffer[i], BUFFER));
    TRY(cuStreamCreate, (&s->stream[i], 1)); /* not synchronized with stream 0 */
  }
  TRY(cuEventCreate, (&s->joined, 2)); /* without times */
  TRY(cuEventCreate, (&s->begun, 0));
  TRY(cuEventCreate, (&s->ended, 0));
failed:;
}

/* open_relay makes the context of a relay. What it has made is freed with the context if a part fails. */
static void open_relay(Relay *r, CUdevice device) {
  Opaque unused;
  void *page;
  size_t spare, total;
  r->device = device, r->context = NULL;
  TRY(cuCtxCreate_v2, (&r->context, 0, device));
  TRY(cuMemHostAlloc, (&page, 4096, 3)); /* for all contexts, on the devices too */
  memset(page, 0, 4096);
  for (int i = 0; i < sets; i++) {
    open_set(r, &r->sets[i], (volatile uint32_t *)((char *)page + 64 * i));
    if (r->code != SUCCESS) goto failed;
  }
  TRY(cuMemGetInfo_v2, (&spare, &total));
  if (spare < SPARE_BYTES) {
    r->what = "memory: less than 1 GiB would be left", r->code = OUT_OF_MEMORY;
    goto failed;
  }
  own.cuCtxPopCurrent_v2(&unused);
  r->state = READY;
  return;
failed:
  if (r->context) {
    own.cuCtxPopCurrent_v2(&unused);
    own.cuCtxDestroy_v2(r->context);
  }
  r->state = FAILED;
}

/* reach lets a relay access the memory of a target. */
static void reach(Relay *r, Target *t) {
  int can = 0, fast = 0;
  Opaque before;
  if (r->state == LOST) return;
  r->what = "no peer access";
  if (own.cuDeviceCanAccessPeer(&can, r->device, t->device) != SUCCESS || !can) return;
  /* Over NVLink there are atomic operations; over PCIe a relay does not pay. */
  r->what = "no NVLink";
  if (by_default && (own.cuDeviceGetP2PAttribute(&fast, 3, r->device, t->device) != SUCCESS || !fast)) return;
  r->what = NULL;
  if (r->state == UNTRIED || r->state == FAILED) open_relay(r, r->device);
  if (r->state != READY) return;
  if (enter(r->context, &before) != SUCCESS) return;
  CUresult result = own.cuCtxEnablePeerAccess(t->context, 0);
  leave(before);
  if (result == SUCCESS || result == PEER_ACCESS_ALREADY_ENABLED)
    r->reaches |= 1ull << t->device;
  else
    r->what = "cuCtxEnablePeerAccess", r->code = result;
}

void close_target(Target *t) {
  Opaque before;
  if (enter(t->context, &before) != SUCCESS) return;
  for (int i = 0; i < MAX_PENDING; i++) {
    Pending *f = &t->copies[i];
    if (f->begin) own.cuEventDestroy_v2(f->begin);
    if (f->middle) own.cuEventDestroy_v2(f->middle);
    if (f->end) own.cuEventDestroy_v2(f->end);
    f->begin = f->middle = f->end = NULL;
  }
  if (t->direct) own.cuStreamDestroy_v2(t->direct);
  t->direct = NULL;
  leave(before);
}

/* open_target prepares relays for copies of a device; the lock is not held. */
int open_target(Target *t) {
  unsigned flags;
  int active = 0, count = 0, relayed = 0;
  Opaque before;
  if (own.cuDevicePrimaryCtxGetState(t->device, &flags, &active) != SUCCESS || !active) return 0;
  if (own.cuDevicePrimaryCtxRetain(&t->context, t->device) != SUCCESS) return 0;
  own.cuDevicePrimaryCtxRelease_v2(t->device); /* it is the program's: see relay_forget */
  if (enter(t->context, &before) != SUCCESS) return 0;
  CUresult result = own.cuStreamCreate(&t->direct, 1);
  for (int i = 0; i < MAX_PENDING && result == SUCCESS; i++) {
    Pending *f = &t->copies[i];
    f->target = t;
    result = own.cuEventCreate(&f->begin, 0);
    if (result == SUCCESS) result = own.cuEventCreate(&f->middle, 0);
    if (result == SUCCESS) result = own.cuEventCreate(&f->end, 0);
  }
  leave(before);
  own.cuDeviceGetCount(&count);
  for (int d = 0; d < count && d < MAX_DEVICES && result == SUCCESS; d++) {
    if (d == t->device || !(chosen >> d & 1)) continue;
    relays[d].device = d;
    reach(&relays[d], t);
    relayed |= relays[d].state == READY && relays[d].reaches >> t->device & 1;
  }
  if (!relayed) close_target(t);
  return relayed;
}
