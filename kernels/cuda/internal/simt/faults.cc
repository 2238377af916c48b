//go:build cuda && amd64

// Kernels that do what a GPU would refuse, or do otherwise: what the machine here must notice.
#include "emulated.h"

namespace {

struct fault_args {
  u64 data;  // global memory, aligned to 16 bytes
};

KERNEL(32, 1) well_behaved(const fault_args a) {
  begin();
  DYNAMIC_SHARED(memory);
  uint4 *own = (uint4 *)memory + threadIdx.x, *from = (uint4 *)a.data + threadIdx.x;
  prefetch(from);
  copy_async(own, from, 16);
  copy_commit();
  copy_wait<0>();
  store_chunk(from, *own);
}

KERNEL(32, 1) unaligned_load(const fault_args a) {
  begin();
  uint4 q = *(const uint4 *)((const u16 *)a.data + 4);
  *(u32 *)a.data = q.x ^ q.w;
}

KERNEL(32, 1) unaligned_store(const fault_args a) {
  begin();
  uint4 q = {};
  store_chunk((u16 *)a.data + 4, q);
}

KERNEL(32, 1) store_to_shared(const fault_args) {
  begin();
  DYNAMIC_SHARED(memory);
  uint4 q = {};
  store_chunk(memory, q);
}

KERNEL(32, 1) store_to_static_shared(const fault_args) {
  begin();
  __shared__ uint4 kept[32];
  uint4 q = {};
  store_chunk(kept + threadIdx.x, q);
}

KERNEL(32, 1) store_to_own(const fault_args a) {
  begin();
  uint4 own[2] = {}, q = {};
  store_chunk(own + (a.data & 1), q);
}

KERNEL(32, 1) load_of_shared(const fault_args a) {
  DYNAMIC_SHARED(memory);
  int v = load_early((const int *)memory);
  begin();
  *(int *)a.data = v;
}

KERNEL(32, 1) prefetch_of_static_shared(const fault_args) {
  begin();
  __shared__ float kept[32];
  prefetch(kept);
}

KERNEL(32, 1) copy_from_shared(const fault_args) {
  begin();
  DYNAMIC_SHARED(memory);
  copy_async(memory, memory + 16, 16);
  copy_commit();
  copy_wait<0>();
}

// The last block fails.
KERNEL(32, 1) store_to_own_late(const fault_args a) {
  begin();
  uint4 own[2] = {}, q = {};
  if (blockIdx.x == gridDim.x - 1) store_chunk(own + (a.data & 1), q);
}

KERNEL(32, 1) copy_from_shared_late(const fault_args) {
  begin();
  DYNAMIC_SHARED(memory);
  if (blockIdx.x == gridDim.x - 1) copy_async(memory, memory + 16, 16);
  copy_commit();
  copy_wait<0>();
}

KERNEL(32, 1) launches_early(const fault_args) {
  if (threadIdx.x == 5) launch_dependents();
  begin();
}

KERNEL(32, 1) launches_late(const fault_args) {
  begin();
  launch_dependents();
}

}  // namespace

#define ENTRY(name) {#name, simt::call<fault_args, name>, sizeof(fault_args)}
extern const simt_kernel simt_faults[] = {
    ENTRY(well_behaved), ENTRY(unaligned_load), ENTRY(unaligned_store), ENTRY(store_to_shared), ENTRY(store_to_static_shared), ENTRY(store_to_own),
    ENTRY(load_of_shared), ENTRY(prefetch_of_static_shared), ENTRY(copy_from_shared), ENTRY(store_to_own_late), ENTRY(copy_from_shared_late),
    ENTRY(launches_early), ENTRY(launches_late),
    {nullptr, nullptr, 0},
};
