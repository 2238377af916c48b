/* The first cuda.h on the include path: the toolkit's, with the signatures that
   gorgonia.org/cu v0.9.6 was written for.

   CUDA 13 changed five of the calls that cu makes. Each gets its old signature
   back here, on top of the new call. Older headers pass through unchanged. */
#ifndef MOESERVE_SHIM_CUDA_H
#define MOESERVE_SHIM_CUDA_H
#include_next <cuda.h>

#if CUDA_VERSION < 12000
#error "cuda.h is older than CUDA 12.0: give a newer one by CUDA_INCLUDE"
#endif

#if CUDA_VERSION >= 13000

/* cu names a memory location by its device, and the host by a negative one. */
static inline CUmemLocation moeserve_location(CUdevice device) {
  CUmemLocation where = {CU_MEM_LOCATION_TYPE_HOST};
  if (device >= 0) {
    where.type = CU_MEM_LOCATION_TYPE_DEVICE;
    where.id = device;
  }
  return where;
}

static inline CUresult moeserve_cuCtxCreate(CUcontext *context, unsigned int flags, CUdevice device) {
  return cuCtxCreate_v4(context, 0, flags, device);
}

static inline CUresult moeserve_cuMemAdvise(CUdeviceptr at, size_t bytes, CUmem_advise advice, CUdevice device) {
  return cuMemAdvise_v2(at, bytes, advice, moeserve_location(device));
}

static inline CUresult moeserve_cuMemPrefetchAsync(CUdeviceptr at, size_t bytes, CUdevice to, CUstream stream) {
  return cuMemPrefetchAsync_v2(at, bytes, moeserve_location(to), 0, stream);
}

static inline CUresult moeserve_cuGraphAddDependencies(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to,
                                                       size_t edges) {
  return cuGraphAddDependencies_v2(graph, from, to, 0, edges);
}

static inline CUresult moeserve_cuGraphGetEdges(CUgraph graph, CUgraphNode *from, CUgraphNode *to, size_t *edges) {
  return cuGraphGetEdges_v2(graph, from, to, 0, edges);
}

#undef cuCtxCreate
#undef cuMemAdvise
#undef cuMemPrefetchAsync
#undef cuGraphAddDependencies
#undef cuGraphGetEdges
#define cuCtxCreate moeserve_cuCtxCreate
#define cuMemAdvise moeserve_cuMemAdvise
#define cuMemPrefetchAsync moeserve_cuMemPrefetchAsync
#define cuGraphAddDependencies moeserve_cuGraphAddDependencies
#define cuGraphGetEdges moeserve_cuGraphGetEdges

#endif
#endif
