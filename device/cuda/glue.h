#ifndef MOESERVE_CUDA_GLUE_H
#define MOESERVE_CUDA_GLUE_H
#include <cuda.h>
#include <stddef.h>
#include <stdint.h>

/* What gorgonia.org/cu lacks. Each function makes ctx current first, where it takes one. */

/* MS_ARGUMENT_BYTES is what the arguments of one launch may take, MS_ARGUMENTS how many there may be. */
#define MS_ARGUMENT_BYTES 4096
#define MS_ARGUMENTS 16

/* A stream's argument block: the arguments of its next launch, and where each is. It lies in C memory, so a
   launch hands over no Go pointer and allocates nothing. The driver is told of each argument: those that are
   at multiples of 64 bytes end up elsewhere if it is given all of them in one piece. */
typedef struct {
  size_t bytes;
  int count;
  void *at[MS_ARGUMENTS];
  _Alignas(64) unsigned char data[MS_ARGUMENT_BYTES];
} ms_arguments;

typedef struct {
  unsigned grid[3], block[3], shared;
  int overlap; /* it may start before the kernel in front has ended */
} ms_shape;

ms_arguments *ms_arguments_new(void);
CUresult ms_launch(CUcontext ctx, CUfunction f, CUstream s, ms_shape shape, ms_arguments *args);

CUresult ms_event_query(CUcontext ctx, CUevent e);
/* Milliseconds from one event to another, both of which have passed. */
CUresult ms_event_elapsed(CUcontext ctx, CUevent from, CUevent to, float *ms);
CUresult ms_stream_query(CUcontext ctx, CUstream s);
const char *ms_error_name(CUresult r);

/* Memory of a device, mapped for it and for the peers listed (itself included). */
CUresult ms_granularity(int device, size_t *bytes);
CUresult ms_device_alloc(CUcontext ctx, int device, size_t bytes, const int *access, int n, CUdeviceptr *at);
CUresult ms_device_free(CUcontext ctx, CUdeviceptr at, size_t bytes, int mapped);
CUresult ms_device_map(CUcontext ctx, int device, size_t bytes, const int *access, int n, CUdeviceptr at);
CUresult ms_device_unmap(CUcontext ctx, CUdeviceptr at, size_t bytes);

/* Pinned memory, portable to every context: the driver's own, or memory that the caller mapped. */
CUresult ms_host_alloc(CUcontext ctx, size_t bytes, void **p);
CUresult ms_host_free(CUcontext ctx, void *p);
CUresult ms_host_register(CUcontext ctx, void *p, size_t bytes);
CUresult ms_host_address(CUcontext ctx, void *p, CUdeviceptr *at);
CUresult ms_host_unregister(CUcontext ctx, void *p);
/* Writes one byte of every page, so that the kernel brings the pages in. */
void ms_touch(unsigned char *p, size_t bytes, size_t page);

/* Copies between two places in host memory in the stream's order. cuMemcpyAsync would hold up the
   caller until everything before it on the stream has run. */
CUresult ms_host_copy(CUcontext ctx, CUstream s, uint64_t to, uint64_t from, size_t bytes);

/* Copies n blocks by call, the driver's cuMemcpyBatchAsync as of CUDA 12.8: headers may lack it, and later ones
   mean another function by that name. */
CUresult ms_copy_batch(CUcontext ctx, void *call, const uint64_t *to, const uint64_t *from, const uint64_t *bytes, size_t n, CUstream s);

CUresult ms_function_attribute(CUcontext ctx, CUfunction f, int attribute, int *value);
CUresult ms_set_function_attribute(CUcontext ctx, CUfunction f, int attribute, int value);

/* Writes the 128 bytes that tell the copy engine of a matrix of 16-bit numbers in device memory, rows stride
   bytes apart, of which a copy brings so many rows of 64 elements, swizzled by 128 bytes. */
CUresult ms_map_tiles(CUcontext ctx, void *map, uint64_t at, uint64_t rows, uint64_t columns, uint64_t stride, unsigned tile_rows);

CUresult ms_capture_begin(CUcontext ctx, CUstream s);
CUresult ms_capture_end(CUcontext ctx, CUstream s, CUgraphExec *exec, size_t *nodes);
CUresult ms_graph_upload(CUcontext ctx, CUgraphExec g, CUstream s);
CUresult ms_graph_launch(CUcontext ctx, CUgraphExec g, CUstream s);
CUresult ms_graph_destroy(CUcontext ctx, CUgraphExec g);

#endif
