// PTX instructions and compiler attributes that C++ lacks. NVRTC has no cuda_bf16.h, and none
// is needed: 16-bit floats are handled as their bits. internal/simt replaces this file on the
// host.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define KERNEL(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)
#define DEVICE __device__ __forceinline__
#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]

DEVICE float from_bf16(u16 b) { return __uint_as_float((u32)b << 16); }

DEVICE float from_f16(u16 h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
}

// Rounds to nearest, ties to even, two at a time: lo is the lower half.
DEVICE u32 pack_bf16(float lo, float hi) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

DEVICE u32 pack_f16(float lo, float hi) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

// 2^x, within about 2 units in the last place; 0 for -infinity, exactly 1 for 0.
DEVICE float exp2_fast(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// Logarithm to base 2, with an error of 2^-22 relative, or absolute if x is in (0.5, 2).
DEVICE float log2_fast(float x) {
  float r;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// D = A B + D on a warp, in float32: A is 16 x 16 by rows, B 16 x 8 by columns.
DEVICE void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

DEVICE void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ldmatrix.x4: four 8 x 8 matrices of 16-bit elements from shared memory. Lane l passes row l %
// 8 of matrix l / 8 and gets two neighbors of row l / 4 of each matrix.
DEVICE void load_matrices(u32 (&r)[4], const void *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"((u32)__cvta_generic_to_shared(row))
               : "memory");
}

// The same, each matrix transposed.
DEVICE void load_matrices_transposed(u32 (&r)[4], const void *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"((u32)__cvta_generic_to_shared(row))
               : "memory");
}

// cp.async: copies bytes (0 to 16) of 16-byte aligned global memory to shared memory in the
// background, padded with zeros to 16. L2 fetches the whole line of 128 bytes, of which warps copy all in turn: an LM head
// of 151,936 x 2,048 and one row, alone in a graph, reads 4.3 TB/s with it, 3.5 without.
DEVICE void copy_async(void *shared, const void *global, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
               :
               : "r"((u32)__cvta_generic_to_shared(shared)), "l"(global), "r"(bytes)
               : "memory");
}

// The L2 policy of data that is read once: it is replaced before other data, such as the instructions of the next kernels.
DEVICE u64 read_once() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// copy_async; with hint by an L2 policy.
template <bool hint>
DEVICE void copy_async(void *shared, const void *global, int bytes, u64 policy) {
  if (!hint) return copy_async(shared, global, bytes);
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;"
               :
               : "r"((u32)__cvta_generic_to_shared(shared)), "l"(global), "r"(bytes), "l"(policy)
               : "memory");
}

DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but this thread's latest pending copy groups are complete.
template <int pending>
DEVICE void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// Stores 16 bytes to global memory in one instruction; compilers split an assignment into four
// on some paths.
DEVICE void store_chunk(void *p, const uint4 &q) {
  asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" : : "l"(p), "r"(q.x), "r"(q.y), "r"(q.z), "r"(q.w) : "memory");
}

// Stores to global memory with a predicate; for an if, compilers emit branches and recompute
// the address in each.
DEVICE void store_if(bool condition, void *p, u32 v) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %0, 0;\n@p st.global.b32 [%1], %2;\n}" : : "r"((int)condition), "l"(p), "r"(v) : "memory");
}

DEVICE void store_if(bool condition, void *p, const uint2 &v) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %0, 0;\n@p st.global.v2.b32 [%1], {%2,%3};\n}"
               :
               : "r"((int)condition), "l"(p), "r"(v.x), "r"(v.y)
               : "memory");
}

// Loads 16 bytes of global memory that are used once, past L1.
DEVICE uint4 load_streaming(const uint4 *p) {
  uint4 q;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(q.x), "=r"(q.y), "=r"(q.z), "=r"(q.w) : "l"(p) : "memory");
  return q;
}

// Prefetches to L2.
DEVICE void prefetch(const void *p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// griddepcontrol.launch_dependents: lets the next kernel of the stream start once all blocks
// have executed this or ended, if it was launched with programmatic dependent launch. From
// compute capability 9.0 on.
DEVICE void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// griddepcontrol.wait: waits until the preceding kernel has ended. That kernel has waited as
// well, so all preceding kernels have ended and their writes are visible.
DEVICE void wait_dependencies() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The start of a kernel that has nothing to do before the preceding ones have ended.
DEVICE void begin() {
  launch_dependents();
  wait_dependencies();
}

// Loads past L1, which may hold old data: for data that has changed since this multiprocessor
// read it, read before this kernel's wait.
DEVICE int load_early(const int *p) {
  int v;
  asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

DEVICE u64 load_early(const u64 *p) {
  u64 v;
  asm volatile("ld.global.cg.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
