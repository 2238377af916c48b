//go:build cuda

#include "glue.h"

#include <stdlib.h>
#include <string.h>

#define CURRENT(ctx)                          \
  do {                                        \
    CUresult current_ = cuCtxSetCurrent(ctx); \
    if (current_ != CUDA_SUCCESS) return current_; \
  } while (0)

ms_arguments *ms_arguments_new(void) {
  ms_arguments *a = aligned_alloc(_Alignof(ms_arguments), sizeof *a);
  if (!a) return NULL;
  memset(a, 0, sizeof *a);
  for (int i = 0; i < MS_ARGUMENTS; i++) a->at[i] = a->data; /* what is left out reads what is there */
  return a;
}

CUresult ms_launch(CUcontext ctx, CUfunction f, CUstream s, ms_shape shape, ms_arguments *args) {
  CURRENT(ctx);
  CUlaunchAttribute overlap;
  memset(&overlap, 0, sizeof overlap);
  overlap.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  overlap.value.programmaticStreamSerializationAllowed = 1;
  CUlaunchConfig c;
  memset(&c, 0, sizeof c);
  c.gridDimX = shape.grid[0], c.gridDimY = shape.grid[1], c.gridDimZ = shape.grid[2];
  c.blockDimX = shape.block[0], c.blockDimY = shape.block[1], c.blockDimZ = shape.block[2];
  c.sharedMemBytes = shape.shared;
  c.hStream = s;
  c.attrs = &overlap;
  c.numAttrs = shape.overlap ? 1 : 0;
  return cuLaunchKernelEx(&c, f, args->at, NULL);
}

CUresult ms_event_query(CUcontext ctx, CUevent e) {
  CURRENT(ctx);
  return cuEventQuery(e);
}

CUresult ms_event_elapsed(CUcontext ctx, CUevent from, CUevent to, float *ms) {
  CURRENT(ctx);
  return cuEventElapsedTime(ms, from, to);
}

CUresult ms_stream_query(CUcontext ctx, CUstream s) {
  CURRENT(ctx);
  return cuStreamQuery(s);
}

const char *ms_error_name(CUresult r) {
  const char *name = NULL;
  return cuGetErrorName(r, &name) == CUDA_SUCCESS ? name : NULL;
}

static CUmemAllocationProp on_device(int device) {
  CUmemAllocationProp prop;
  memset(&prop, 0, sizeof prop);
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = device;
  return prop;
}

CUresult ms_granularity(int device, size_t *bytes) {
  CUmemAllocationProp prop = on_device(device);
  return cuMemGetAllocationGranularity(bytes, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
}

CUresult ms_device_map(CUcontext ctx, int device, size_t bytes, const int *access, int n, CUdeviceptr at) {
  CUmemAllocationProp prop = on_device(device);
  CUmemGenericAllocationHandle memory;
  CUmemAccessDesc rights[64];
  CUresult r;
  if (n > 64) return CUDA_ERROR_INVALID_VALUE;
  CURRENT(ctx);
  if ((r = cuMemCreate(&memory, bytes, &prop, 0)) != CUDA_SUCCESS) return r;
  if ((r = cuMemMap(at, bytes, 0, memory, 0)) == CUDA_SUCCESS) {
    for (int i = 0; i < n; i++) {
      memset(&rights[i], 0, sizeof rights[i]);
      rights[i].location.type = CU_MEM_LOCATION_TYPE_DEVICE;
      rights[i].location.id = access[i];
      rights[i].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    }
    r = cuMemSetAccess(at, bytes, rights, n);
    if (r != CUDA_SUCCESS) cuMemUnmap(at, bytes);
  }
  /* The mapping keeps the memory alive. */
  CUresult released = cuMemRelease(memory);
  return r != CUDA_SUCCESS ? r : released;
}

CUresult ms_device_unmap(CUcontext ctx, CUdeviceptr at, size_t bytes) {
  CURRENT(ctx);
  return cuMemUnmap(at, bytes);
}

CUresult ms_device_alloc(CUcontext ctx, int device, size_t bytes, const int *access, int n, CUdeviceptr *at) {
  CUresult r;
  CURRENT(ctx);
  if ((r = cuMemAddressReserve(at, bytes, 0, 0, 0)) != CUDA_SUCCESS) return r;
  r = ms_device_map(ctx, device, bytes, access, n, *at);
  if (r != CUDA_SUCCESS) cuMemAddressFree(*at, bytes);
  return r;
}

CUresult ms_device_free(CUcontext ctx, CUdeviceptr at, size_t bytes, int mapped) {
  CUresult r;
  CURRENT(ctx);
  if (mapped && (r = cuMemUnmap(at, bytes)) != CUDA_SUCCESS) return r;
  return cuMemAddressFree(at, bytes);
}

CUresult ms_host_alloc(CUcontext ctx, size_t bytes, void **p) {
  CURRENT(ctx);
  return cuMemHostAlloc(p, bytes, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP);
}

CUresult ms_host_free(CUcontext ctx, void *p) {
  CURRENT(ctx);
  return cuMemFreeHost(p);
}

CUresult ms_host_register(CUcontext ctx, void *p, size_t bytes) {
  CURRENT(ctx);
  return cuMemHostRegister(p, bytes, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
}

CUresult ms_host_address(CUcontext ctx, void *p, CUdeviceptr *at) {
  CURRENT(ctx);
  return cuMemHostGetDevicePointer(at, p, 0);
}

CUresult ms_host_unregister(CUcontext ctx, void *p) {
  CURRENT(ctx);
  return cuMemHostUnregister(p);
}

void ms_touch(unsigned char *p, size_t bytes, size_t page) {
  for (size_t i = 0; i < bytes; i += page) ((volatile unsigned char *)p)[i] = 0;
}

typedef struct {
  void *to;
  const void *from;
  size_t bytes;
} host_copy;

static void CUDA_CB run_host_copy(void *data) {
  host_copy *c = data;
  memcpy(c->to, c->from, c->bytes);
  free(c);
}

CUresult ms_host_copy(CUcontext ctx, CUstream s, uint64_t to, uint64_t from, size_t bytes) {
  CURRENT(ctx);
  host_copy *c = malloc(sizeof *c);
  if (!c) return CUDA_ERROR_OUT_OF_MEMORY;
  *c = (host_copy){(void *)(uintptr_t)to, (const void *)(uintptr_t)from, bytes};
  CUresult r = cuLaunchHostFunc(s, run_host_copy, c);
  if (r != CUDA_SUCCESS) free(c);
  return r;
}

/* CUmemcpyAttributes. Hints of locations are for managed memory. */
typedef struct {
  int source_order; /* CU_MEMCPY_SRC_ACCESS_ORDER_STREAM */
  struct {
    int type, id;
  } source_hint, destination_hint;
  unsigned flags;
} copy_attributes;
#if CUDA_VERSION >= 12080 && CUDA_VERSION < 13000
_Static_assert(sizeof(copy_attributes) == sizeof(CUmemcpyAttributes) && offsetof(copy_attributes, flags) == offsetof(CUmemcpyAttributes, flags), "as the driver's");
#endif

typedef CUresult copy_batch(CUdeviceptr *to, CUdeviceptr *from, size_t *bytes, size_t n, copy_attributes *attributes, size_t *first, size_t kinds,
                            size_t *failed, CUstream s);

CUresult ms_copy_batch(CUcontext ctx, void *call, const uint64_t *to, const uint64_t *from, const uint64_t *bytes, size_t n, CUstream s) {
  _Static_assert(sizeof(CUdeviceptr) == 8 && sizeof(size_t) == 8, "arrays are passed on as they are");
  CURRENT(ctx);
  copy_attributes attributes = {.source_order = 1};
  size_t first = 0, failed = 0;
  return ((copy_batch *)call)((CUdeviceptr *)(uintptr_t)to, (CUdeviceptr *)(uintptr_t)from, (size_t *)(uintptr_t)bytes, n, &attributes, &first, 1, &failed, s);
}

CUresult ms_function_attribute(CUcontext ctx, CUfunction f, int attribute, int *value) {
  CURRENT(ctx);
  return cuFuncGetAttribute(value, attribute, f);
}

CUresult ms_set_function_attribute(CUcontext ctx, CUfunction f, int attribute, int value) {
  CURRENT(ctx);
  return cuFuncSetAttribute(f, (CUfunction_attribute)attribute, value);
}

CUresult ms_map_tiles(CUcontext ctx, void *map, uint64_t at, uint64_t rows, uint64_t columns, uint64_t stride, unsigned tile_rows) {
  CURRENT(ctx);
  CUtensorMap m; /* it has to lie at a multiple of 64 bytes, which Go's memory need not */
  cuuint64_t size[2] = {columns, rows}, strides[1] = {stride};
  cuuint32_t box[2] = {64, tile_rows}, steps[2] = {1, 1};
  CUresult r = cuTensorMapEncodeTiled(&m, CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, (void *)(uintptr_t)at, size, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (r == CUDA_SUCCESS) memcpy(map, &m, sizeof m);
  return r;
}

CUresult ms_capture_begin(CUcontext ctx, CUstream s) {
  CURRENT(ctx);
  return cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
}

CUresult ms_capture_end(CUcontext ctx, CUstream s, CUgraphExec *exec, size_t *nodes) {
  CUgraph graph = NULL;
  CUresult r;
  CURRENT(ctx);
  if ((r = cuStreamEndCapture(s, &graph)) != CUDA_SUCCESS) return r;
  if ((r = cuGraphGetNodes(graph, NULL, nodes)) == CUDA_SUCCESS && exec)
    r = cuGraphInstantiateWithFlags(exec, graph, 0);
  cuGraphDestroy(graph);
  return r;
}

CUresult ms_graph_upload(CUcontext ctx, CUgraphExec g, CUstream s) {
  CURRENT(ctx);
  return cuGraphUpload(g, s);
}

CUresult ms_graph_launch(CUcontext ctx, CUgraphExec g, CUstream s) {
  CURRENT(ctx);
  return cuGraphLaunch(g, s);
}

CUresult ms_graph_destroy(CUcontext ctx, CUgraphExec g) {
  CURRENT(ctx);
  return cuGraphExecDestroy(g);
}
