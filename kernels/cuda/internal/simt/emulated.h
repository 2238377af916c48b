// What src/ptx.cuh and the CUDA compiler offer to kernels, on the host.
#pragma once
#include <stdint.h>
#include <string.h>

#include <cmath>

#include "engine.h"

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct alignas(16) uint4 {
  u32 x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  u32 x, y;
};
struct alignas(8) float2 {
  float x, y;
};
static inline float2 make_float2(float x, float y) { return {x, y}; }

#define KERNEL(threads, blocks) static void
#define DEVICE inline
#define DYNAMIC_SHARED(name) unsigned char *name = simt::shared_memory()
#define __shared__ static __thread
#define __grid_constant__
#define threadIdx simt::thread()
#define blockIdx simt::block_index
#define blockDim simt::block_size
#define gridDim simt::grid_size

template <class To, class From>
static inline To bits(From v) {
  static_assert(sizeof(To) == sizeof(From), "size");
  To r;
  memcpy(&r, &v, sizeof r);
  return r;
}

static inline u32 __float_as_uint(float v) { return bits<u32>(v); }
static inline float __uint_as_float(u32 v) { return bits<float>(v); }
static inline float __uint2float_rn(u32 v) { return (float)v; }
static inline float __int2float_rn(int v) { return (float)v; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline u32 __umulhi(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }
static inline int __popc(u32 v) { return __builtin_popcount(v); }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline u64 __umul64hi(u64 a, u64 b) { return (u64)((unsigned __int128)a * b >> 64); }
template <class T>
static inline T atomicAdd(T *p, T v) {
  T old = *p;
  *p += v;
  return old;
}

static inline void __syncthreads() { simt::meet_block(); }
static inline void __syncwarp() { simt::meet_warp({}); }

template <class T>
static inline T from_lane(T v, int lane) {
  simt::message m = {};
  memcpy(m.words, &v, sizeof v);
  const simt::message *all = simt::meet_warp(m);
  memcpy(&v, all[lane].words, sizeof v);
  return v;
}

template <class T>
static inline T __shfl_sync(u32, T v, int lane) {
  return from_lane(v, lane & 31);
}

template <class T>
static inline T __shfl_xor_sync(u32, T v, int mask) {
  return from_lane(v, simt::lane() ^ mask);
}

template <class T>
static inline T __shfl_up_sync(u32, T v, int by) {
  int lane = simt::lane();
  return from_lane(v, lane < by ? lane : lane - by);
}

static inline u32 __reduce_max_sync(u32, u32 v) {
  simt::message m = {};
  m.words[0] = v;
  const simt::message *all = simt::meet_warp(m);
  for (int i = 0; i < 32; i++) v = all[i].words[0] > v ? all[i].words[0] : v;
  return v;
}

static inline u32 __reduce_min_sync(u32, u32 v) { return ~__reduce_max_sync(0, ~v); }

static inline u32 __ballot_sync(u32, bool v) {
  simt::message m = {};
  m.words[0] = v;
  const simt::message *all = simt::meet_warp(m);
  u32 r = 0;
  for (int i = 0; i < 32; i++) r |= all[i].words[0] << i;
  return r;
}

// Conversions, by arithmetic rather than as ptx.cuh does them.
static inline float from_bf16(u16 b) { return bits<float>((u32)b << 16); }

static inline float from_f16(u16 h) {
  // Exponent and fraction, where a float has its own; its exponents start 112 lower.
  float v = (h & 0x7c00) == 0x7c00 ? (h & 1023 ? NAN : INFINITY) : bits<float>((u32)(h & 0x7fff) << 13) * 0x1p112f;
  return h & 0x8000 ? -v : v;
}

static inline u16 round_bf16(float f) {
  u32 b = bits<u32>(f);
  if (f != f) return 0x7fff;
  return (u16)((b + 0x7fff + (b >> 16 & 1)) >> 16);
}

static inline u16 round_f16(float f) {
  u16 sign = bits<u32>(f) >> 31 ? 0x8000 : 0;
  float v = fabsf(f);
  if (f != f) return 0x7fff;
  if (v >= 65520.f) return sign | 0x7c00;
  if (v < ldexpf(1, -14)) return sign | (u16)nearbyintf(ldexpf(v, 24));
  int exponent;
  float fraction = frexpf(v, &exponent);  // [0.5, 1)
  u32 m = (u32)nearbyintf(ldexpf(fraction, 11));
  return sign | (u16)(((exponent + 14) << 10) + (m - 1024));
}

static inline u32 pack_bf16(float lo, float hi) { return round_bf16(lo) | (u32)round_bf16(hi) << 16; }
static inline u32 pack_f16(float lo, float hi) { return round_f16(lo) | (u32)round_f16(hi) << 16; }
static inline float exp2_fast(float x) { return exp2f(x); }
static inline float log2_fast(float x) { return log2f(x); }

// Four elements of D: (row 0, column 0), (0, 1), (1, 0), (1, 1). Vectors take a quarter of the time.
typedef float four __attribute__((vector_size(16)));
static inline four of_rows(float first, float second) { return four{first, first, second, second}; }

// Adds products of two rows and two columns, of 16 elements k each.
static inline void add_products(float *d, const four (&rows)[16], const float (&columns)[16][2]) {
  four sum = {};
  for (int k = 0; k < 16; k++) sum += rows[k] * four{columns[k][0], columns[k][1], columns[k][0], columns[k][1]};
  for (int i = 0; i < 4; i++) d[i] += sum[i];
}

// Lane l of A (16 x 16) holds rows l/4 (words 0, 2) and l/4 + 8 (1, 3), columns
// 2 (l%4) and its neighbor, from 8 on in words 2 and 3; of B (16 x 8) column l/4,
// rows 2 (l%4) and its neighbor, from 8 on in word 1; of D (16 x 8) rows l/4 (0, 1)
// and l/4 + 8 (2, 3), columns 2 (l%4) and its neighbor.
template <float (*widen)(u16)>
static inline void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  simt::message m = {{a[0], a[1], a[2], a[3], b0, b1}};
  const simt::product *p = simt::meet_warp(m, [](simt::product &p, const simt::message *all) {
    float left[16][16];
    alignas(16) float right[16][8];
    for (int lane = 0; lane < 32; lane++)
      for (int half = 0; half < 2; half++) {
        const u32 *words = all[lane].words;
        int at = lane / 4, k = lane % 4 * 2 + half;
        for (int w = 0; w < 4; w++) left[at + w % 2 * 8][k + w / 2 * 8] = widen((u16)(words[w] >> half * 16));
        for (int w = 0; w < 2; w++) right[k + w * 8][at] = widen((u16)(words[4 + w] >> half * 16));
      }
    for (int row = 0; row < 16; row++) {
      four sums[2] = {};
      for (int k = 0; k < 16; k++)
        for (int i = 0; i < 2; i++) sums[i] += left[row][k] * *(const four *)&right[k][i * 4];
      memcpy(p.at[row], sums, sizeof sums);
    }
  });
  int lane = simt::lane();
  for (int i = 0; i < 4; i++) d[i] += p->at[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
}

static inline void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { multiply<from_bf16>(d, a, b0, b1); }
static inline void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { multiply<from_f16>(d, a, b0, b1); }

static inline const u16 *row_of(const simt::message *all, int lane) {
  u64 p;
  memcpy(&p, all[lane].words, sizeof p);
  return (const u16 *)p;
}

static inline const simt::message *rows_of(const void *row) {
  simt::check_shared(row, 16);
  simt::message m = {};
  memcpy(m.words, &row, sizeof row);
  return simt::meet_warp(m);
}

static inline void load_matrices(u32 (&r)[4], const void *row) {
  const simt::message *all = rows_of(row);
  int lane = simt::lane();
  for (int i = 0; i < 4; i++) {
    const u16 *p = row_of(all, i * 8 + lane / 4) + lane % 4 * 2;
    r[i] = p[0] | (u32)p[1] << 16;
  }
  simt::meet_warp({});
}

static inline void load_matrices_transposed(u32 (&r)[4], const void *row) {
  const simt::message *all = rows_of(row);
  int lane = simt::lane();
  for (int i = 0; i < 4; i++) {
    int column = lane / 4, k = lane % 4 * 2;
    r[i] = row_of(all, i * 8 + k)[column] | (u32)row_of(all, i * 8 + k + 1)[column] << 16;
  }
  simt::meet_warp({});
}

static inline u64 read_once() { return 0; }
static inline void copy_async(void *shared, const void *global, int bytes) { simt::copy(shared, global, bytes); }
template <bool>
static inline void copy_async(void *shared, const void *global, int bytes, u64) { simt::copy(shared, global, bytes); }
static inline void copy_commit() { simt::commit(); }
template <int pending>
static inline void copy_wait() {
  simt::wait(pending);
}

static inline uint4 load_streaming(const uint4 *p) {
  simt::check_global(p, 16);
  return *p;
}
static inline void store_chunk(void *p, const uint4 &q) {
  simt::check_global(p, 16);
  *(uint4 *)p = q;
}
static inline void store_if(bool condition, void *p, u32 v) {
  if (!condition) return;
  simt::check_global(p, 4);
  *(u32 *)p = v;
}
static inline void store_if(bool condition, void *p, const uint2 &v) {
  if (!condition) return;
  simt::check_global(p, 8);
  *(uint2 *)p = v;
}
static inline void prefetch(const void *p) { simt::check_global(p, 1); }

// A launch may have memory that kernels in front are still to write, see simt.Launch.
static inline void launch_dependents() { simt::launch_dependents(); }
static inline void wait_dependencies() { simt::wait_dependencies(); }
static inline void begin() { wait_dependencies(); }
template <class T>
static inline T load_early(const T *p) {
  simt::check_global(p, sizeof *p);
  return *p;
}
