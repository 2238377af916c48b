// Shared by all kernels. ACT_F16 makes half precision the activation type instead of bfloat16.

constexpr u32 all_lanes = 0xffffffffu;

// Element types, numbered as kernels.DType.
enum { f32_type = 1, bf16_type = 2, f16_type = 3 };

#ifdef ACT_F16
constexpr int act_type = f16_type;
DEVICE float from_act(u16 v) { return from_f16(v); }
DEVICE u32 pack_act(float lo, float hi) { return pack_f16(lo, hi); }
DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_f16(d, a, b0, b1); }
#else
constexpr int act_type = bf16_type;
DEVICE float from_act(u16 v) { return from_bf16(v); }
DEVICE u32 pack_act(float lo, float hi) { return pack_bf16(lo, hi); }
DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_bf16(d, a, b0, b1); }
#endif

DEVICE u16 to_act(float v) { return (u16)pack_act(v, 0.f); }

// Loads element at of a vector of any float type.
DEVICE float load1(const void *base, int type, i64 at) {
  if (type == f32_type) return ((const float *)base)[at];
  u16 v = ((const u16 *)base)[at];
  return type == bf16_type ? from_bf16(v) : from_f16(v);
}

// Loads elements at to at+7; the first n exist, the others are set to 0. With aligned, one
// vector load may read all eight: at is a multiple of 8, and base of 16 bytes.
DEVICE void load8(float (&v)[8], const void *base, int type, i64 at, int n, bool aligned) {
  if (aligned && n >= 8) {
    if (type == f32_type) {
      const float4 *p = (const float4 *)((const float *)base + at);
      float4 a = p[0], b = p[1];
      v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
      v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
      return;
    }
    uint4 q = *(const uint4 *)((const u16 *)base + at);
    u32 w[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      u16 lo = (u16)w[i], hi = (u16)(w[i] >> 16);
      v[2 * i] = type == bf16_type ? from_bf16(lo) : from_f16(lo);
      v[2 * i + 1] = type == bf16_type ? from_bf16(hi) : from_f16(hi);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = i < n ? load1(base, type, at + i) : 0.f;
}

// Loads elements at to at+7 of 16 bits, unconverted; the first n exist, the others are set to
// 0.
DEVICE uint4 load_packed(const u16 *row, i64 at, int n, bool aligned) {
  if (aligned && n >= 8) return *(const uint4 *)(row + at);
  u32 w[4] = {};
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (i < n) w[i / 2] |= (u32)row[at + i] << 16 * (i % 2);
  uint4 q = {w[0], w[1], w[2], w[3]};
  return q;
}

DEVICE void unpack(float (&v)[8], const uint4 &q) {
  u32 w[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
  for (int i = 0; i < 4; i++) v[2 * i] = from_act((u16)w[i]), v[2 * i + 1] = from_act((u16)(w[i] >> 16));
}

DEVICE uint4 pack(const float (&v)[8]) {
  uint4 q = {pack_act(v[0], v[1]), pack_act(v[2], v[3]), pack_act(v[4], v[5]), pack_act(v[6], v[7])};
  return q;
}

// Stores the first n of eight 16-bit elements to elements at to at+7 in global memory.
DEVICE void store_packed(u16 *row, i64 at, const uint4 &q, int n, bool aligned) {
  if (aligned && n >= 8) {
    store_chunk(row + at, q);
    return;
  }
  u32 w[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (i < n) row[at + i] = (u16)(w[i / 2] >> 16 * (i % 2));
}

// Stores the first n of eight activations to elements at to at+7 in global memory.
DEVICE void store8(u16 *base, i64 at, const float (&v)[8], int n, bool aligned) { store_packed(base, at, pack(v), n, aligned); }

// Loads eight 16-bit elements from at on, or zeros if row is null.
DEVICE uint4 load_chunk(const u16 *row, int at) {
  uint4 zero = {0, 0, 0, 0};
  return row ? *(const uint4 *)(row + at) : zero;
}

// Copies the first n of eight 16-bit elements.
DEVICE void copy8(u16 *to, const u16 *from, int n, bool aligned) {
  if (aligned && n >= 8) {
    *(uint4 *)to = *(const uint4 *)from;
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (i < n) to[i] = from[i];
}

// Sum over a warp, with the same bits in every lane.
DEVICE float warp_sum(float v) {
#pragma unroll
  for (int i = 16; i > 0; i >>= 1) v += __shfl_xor_sync(all_lanes, v, i);
  return v;
}

// The sum over this lane and those before it.
DEVICE int prefix_sum(int v) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 1; i < 32; i <<= 1) {
    int before = __shfl_up_sync(all_lanes, v, i);
    if (lane >= i) v += before;
  }
  return v;
}

// Intrinsics, so that the compiler fuses nothing and every kernel has the same bits.
DEVICE float silu(float x) { return __fdiv_rn(x, __fadd_rn(1.f, expf(-x))); }

// Rotates eight elements of a head's lower half with the corresponding ones of its upper half.
// Intrinsics, so that every kernel has the same bits.
DEVICE void rotate(float (&lo)[8], float (&hi)[8], const float (&c)[8], const float (&s)[8]) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    float v = lo[i], w = hi[i];
    lo[i] = __fmaf_rn(v, c[i], -__fmul_rn(w, s[i]));
    hi[i] = __fmaf_rn(w, c[i], __fmul_rn(v, s[i]));
  }
}

// The same with the elements as they are stored, which are rounded again.
DEVICE void rotate(uint4 &lo, uint4 &hi, const float (&c)[8], const float (&s)[8]) {
  float x[8], y[8];
  unpack(x, lo), unpack(y, hi);
  rotate(x, y, c, s);
  lo = pack(x), hi = pack(y);
}

// A thread's sum of squares of a row, as norm_head computes it.
DEVICE float squares(const uint4 &q) {
  float v[8], total = 0;
  unpack(v, q);
#pragma unroll
  for (int i = 0; i < 8; i++) total = __fadd_rn(total, __fmul_rn(v[i], v[i]));
  return total;
}

// The factor that norms a head of d elements, of which total is the sum of squares.
DEVICE float rms_scale(float total, int d, float eps) { return 1.f / sqrtf(total / d + eps); }

// Norms eight elements as norm_head does; a and b are their weights.
DEVICE uint4 scaled(const uint4 &x, float scale, const float4 &a, const float4 &b) {
  float v[8];
  unpack(v, x);
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = __fmul_rn(v[i], scale);
  v[0] = __fmul_rn(v[0], a.x), v[1] = __fmul_rn(v[1], a.y), v[2] = __fmul_rn(v[2], a.z), v[3] = __fmul_rn(v[3], a.w);
  v[4] = __fmul_rn(v[4], b.x), v[5] = __fmul_rn(v[5], b.y), v[6] = __fmul_rn(v[6], b.z), v[7] = __fmul_rn(v[7], b.w);
  return pack(v);
}

// Attention runs its online softmax over chunks of positions, which are then joined in ascending
// order.
#define neg_infinity __uint_as_float(0xff800000u)  // -infinity: no score yet

// Computes the factors of an old and a new part, with maximum scores m and n, when they are
// joined; m becomes the larger.
DEVICE void join(float &m, float n, float &old_part, float &new_part) {
  float row_max = fmaxf(m, n), base = row_max == neg_infinity ? 0.f : row_max;
  old_part = exp2_fast(__fadd_rn(m, -base));
  new_part = exp2_fast(__fadd_rn(n, -base));
  m = row_max;
}

DEVICE float joined(float old, float old_part, float add, float new_part) {
  return __fmaf_rn(add, new_part, __fmul_rn(old, old_part));
}

// Joins element column of count chunks of one query and head, whose partial results are d elements
// apart, and returns it divided by the sum of weights; ends are each chunk's maximum and sum. Loads
// run ahead of the arithmetic, which is that of a block that computes all chunks.
DEVICE float join_chunks(const float *sums, const float2 *ends, int count, int d, int column) {
  constexpr int ahead = 16;
  float total = 0, total_max = neg_infinity, total_sum = 0;
#pragma unroll 1
  for (int c = 0; c < count; c += ahead) {
    float part[ahead];
    float2 end[ahead];
#pragma unroll
    for (int i = 0; i < ahead; i++) {
      int at = min(c + i, count - 1);
      end[i] = ends[at];
      part[i] = column < d ? sums[(i64)at * d + column] : 0.f;
    }
#pragma unroll
    for (int i = 0; i < ahead; i++) {
      if (c + i >= count) break;
      float old_part, new_part;
      join(total_max, end[i].x, old_part, new_part);
      total_sum = joined(total_sum, old_part, end[i].y, new_part);
      total = joined(total, old_part, part[i], new_part);
    }
  }
  return __fmul_rn(total, __fdiv_rn(1.f, total_sum));
}
