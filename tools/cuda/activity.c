// Part of gaps.py: a library that CUDA_INJECTION64_PATH puts into a process, and that writes what the
// GPU did when, as CSV into the file that ACTIVITY_CSV names: kind (kernel, copy, set), start and end
// in ns, stream, blocks of the grid's first dimension (of a copy its bytes), name. KERNEL, MEMCPY and
// MEMSET are the record types of the CUPTI at hand.
#include <cupti.h>
#include <stdio.h>
#include <stdlib.h>

enum { bufferBytes = 1 << 20, flushMilliseconds = 100 };

static FILE *out;

static void requested(uint8_t **buffer, size_t *size, size_t *records) {
  *buffer = aligned_alloc(8, bufferBytes);
  *size = *buffer ? bufferBytes : 0;
  *records = 0;
}

static void completed(CUcontext context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid) {
  (void)size;
  CUpti_Activity *record = NULL;
  while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
    switch (record->kind) {
      case CUPTI_ACTIVITY_KIND_KERNEL:
      case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: {
        const KERNEL *k = (const KERNEL *)record;
        fprintf(out, "kernel,%llu,%llu,%u,%d,%s\n", (unsigned long long)k->start, (unsigned long long)k->end, k->streamId, k->gridX, k->name);
        break;
      }
      case CUPTI_ACTIVITY_KIND_MEMCPY: {
        const MEMCPY *m = (const MEMCPY *)record;
        fprintf(out, "copy,%llu,%llu,%u,%llu,copy of kind %d\n", (unsigned long long)m->start, (unsigned long long)m->end, m->streamId,
                (unsigned long long)m->bytes, m->copyKind);
        break;
      }
      case CUPTI_ACTIVITY_KIND_MEMSET: {
        const MEMSET *m = (const MEMSET *)record;
        fprintf(out, "set,%llu,%llu,%u,%llu,memset\n", (unsigned long long)m->start, (unsigned long long)m->end, m->streamId, (unsigned long long)m->bytes);
        break;
      }
      default:
        break;
    }
  }
  size_t dropped = 0;
  if (cuptiActivityGetNumDroppedRecords(context, stream, &dropped) == CUPTI_SUCCESS && dropped)
    fprintf(out, "dropped,%zu,0,0,0,\n", dropped);
  // A Go program ends without what C does at the end of one.
  fflush(out);
  free(buffer);
}

// What is not full yet goes out before its context does. CUPTI allows that in a callback of a driver
// call, and in no other.
static void CUPTIAPI ending(void *user, CUpti_CallbackDomain domain, CUpti_CallbackId id, const void *data) {
  (void)user, (void)domain, (void)id;
  if (((const CUpti_CallbackData *)data)->callbackSite == CUPTI_API_ENTER) cuptiActivityFlushAll(0);
}

static void must(CUptiResult r, const char *what) {
  const char *text = "";
  if (r == CUPTI_SUCCESS) return;
  cuptiGetResultString(r, &text);
  fprintf(stderr, "activity: %s: %s\n", what, text);
  exit(3);
}

// The driver calls it when it is initialized.
int InitializeInjection(void) {
  const char *path = getenv("ACTIVITY_CSV");
  if (!path || !(out = fopen(path, "w"))) {
    fprintf(stderr, "activity: ACTIVITY_CSV names no file that can be written\n");
    exit(3);
  }
  must(cuptiActivityRegisterCallbacks(requested, completed), "callbacks");
  must(cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL), "kernels");
  must(cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMCPY), "copies");
  must(cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMSET), "sets");
  CUpti_SubscriberHandle subscriber;
  must(cuptiSubscribe(&subscriber, ending, NULL), "subscribe");
  must(cuptiEnableCallback(1, subscriber, CUPTI_CB_DOMAIN_DRIVER_API, CUPTI_DRIVER_TRACE_CBID_cuDevicePrimaryCtxRelease), "the context's end");
  must(cuptiEnableCallback(1, subscriber, CUPTI_CB_DOMAIN_DRIVER_API, CUPTI_DRIVER_TRACE_CBID_cuDevicePrimaryCtxRelease_v2), "the context's end");
  must(cuptiActivityFlushPeriod(flushMilliseconds), "flush");
  return 1;
}
