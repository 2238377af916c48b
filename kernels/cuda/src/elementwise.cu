// Elementwise and row operations: blockIdx.x is a row, a thread has eight elements.

struct embed_args {
  u64 ids, table, out;
  i64 table_stride, out_stride;
  int vocabulary, columns, table_type, table_aligned, out_aligned;
};

// Rows whose id is outside of the table become NaN.
KERNEL(128, 1) embed(const embed_args a) {
  begin();
  int at = (blockIdx.y * 128 + threadIdx.x) * 8, n = a.columns - at;
  if (n <= 0) return;
  int id = ((const int *)a.ids)[blockIdx.x];
  float v[8];
  if (id >= 0 && id < a.vocabulary) {
    i64 bytes = (i64)id * a.table_stride * (a.table_type == f32_type ? 4 : 2);
    load8(v, (const char *)a.table + bytes, a.table_type, at, n, a.table_aligned);
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = __uint_as_float(0x7fc00000u);
  }
  store8((u16 *)a.out + blockIdx.x * a.out_stride, at, v, n, a.out_aligned);
}

struct norm_args {
  u64 x, residual, weight, bias, out;  // residual, bias: 0 for none
  i64 x_row, x_head, residual_row, residual_head, out_row, out_head;
  i64 items;  // rows times heads
  int heads, d, layer, weight_type, bias_type;
  float eps;
  int aligned, weight_aligned, bias_aligned;
};

// Sum over the threads of one item (a row or a head), for each of the thread's parts in turn.
// sums has a float per part and warp of the block. More threads with fewer parts each get the
// same bits.
template <int threads, int each>
DEVICE float item_sum(const float (&parts)[each], float *sums) {
  float v = 0;
#pragma unroll
  for (int i = 0; i < each; i++) {
    float part = warp_sum(parts[i]);
    if (threads == 32) v += part;
    if (threads > 32 && threadIdx.x % 32 == 0) sums[i * (threads / 32) + threadIdx.x / 32] = part;
  }
  if (threads == 32) return v;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < each * (threads / 32); i++) v += sums[i];
  return v;
}

// The first n of eight elements of a row, at a multiple of 8. plain: all, or none, and the row is aligned.
template <bool plain>
DEVICE uint4 load_part(const u16 *row, i64 at, int n, bool aligned) {
  return plain ? load_chunk(n > 0 ? row : 0, (int)at) : load_packed(row, at, n, aligned);
}

template <bool plain>
DEVICE void store_part(u16 *row, i64 at, const uint4 &q, int n, bool aligned) {
  if (!plain)
    store_packed(row, at, q, n, aligned);
  else if (n > 0)
    store_chunk(row + at, q);
}

// Brings the weights of a norm, which no kernel writes, before the wait. plain: to the thread that needs them; else to L2, for
// which one block is enough.
template <int threads, int each, bool plain>
DEVICE void bring_weights(const norm_args &a, uint4 (&weight)[each]) {
  if (plain) {
#pragma unroll
    for (int i = 0; i < each; i++) {
      int at = ((int)threadIdx.x % threads + i * threads) * 8;
      weight[i] = load_part<true>((const u16 *)a.weight, at, a.d - at, true);
    }
  } else if (blockIdx.x == 0 && threadIdx.x < threads) {
    for (int at = threadIdx.x * 8; at < a.d; at += threads * 8) prefetch((const char *)a.weight + at * (a.weight_type == f32_type ? 4 : 2));
  }
}

// Norms one row of one head, which rows.load returns, plus the residual unless that is 0, with
// threads threads of the block. A thread keeps its elements, up to each times eight, in
// registers in their 16-bit form, which leaves room for enough blocks to saturate memory
// bandwidth. Intrinsics, so that every kernel has the same bits.
//
// plain is for few rows, where a kernel takes most of its time to bring its instructions: RMS, no bias, one head, rows and
// weights of the activation type, aligned, and multiples of 8 long. The caller has loaded the weights.
template <int threads, int block, int each, bool plain, class Rows>
DEVICE void norm_row(const norm_args &a, const Rows &rows, u16 *residual, u16 *out, const uint4 (&weight)[each]) {
  __shared__ float sums[2][each * (block / 32)];
  int t = threadIdx.x % threads;
  uint4 q[each], old[each];
  if (residual) {
#pragma unroll
    for (int i = 0; i < each; i++) old[i] = load_part<plain>(residual, (t + i * threads) * 8, a.d - (t + i * threads) * 8, a.aligned);
  }
#pragma unroll
  for (int i = 0; i < each; i++) q[i] = rows.template load<plain>((t + i * threads) * 8, a.d - (t + i * threads) * 8);
  if (residual) {
#pragma unroll
    for (int i = 0; i < each; i++) {
      float v[8], r[8];
      unpack(v, q[i]), unpack(r, old[i]);
#pragma unroll
      for (int c = 0; c < 8; c++) v[c] = __fadd_rn(v[c], r[c]);
      q[i] = pack(v);
      store_part<plain>(residual, (t + i * threads) * 8, q[i], a.d - (t + i * threads) * 8, a.aligned);
    }
  }
  bool layer = !plain && a.layer;
  float total[each] = {}, v[8];
#pragma unroll
  for (int i = 0; i < each; i++) {
    unpack(v, q[i]);
#pragma unroll
    for (int c = 0; c < 8; c++) total[i] = __fadd_rn(total[i], layer ? v[c] : __fmul_rn(v[c], v[c]));
  }
  float mean = 0, square = item_sum<threads>(total, sums[0]) / a.d;
  if (layer) {
    mean = square;
#pragma unroll
    for (int i = 0; i < each; i++) {
      total[i] = 0;
      unpack(v, q[i]);
#pragma unroll
      for (int c = 0; c < 8; c++) {
        float off = (t + i * threads) * 8 + c < a.d ? v[c] - mean : 0.f;
        total[i] = __fmaf_rn(off, off, total[i]);
      }
    }
    square = item_sum<threads>(total, sums[1]) / a.d;
  }
  float scale = 1.f / sqrtf(square + a.eps);
#pragma unroll
  for (int i = 0; i < each; i++) {
    int at = (t + i * threads) * 8, n = a.d - at;
    float w[8];
    unpack(v, q[i]);
    if (plain)
      unpack(w, weight[i]);
    else
      load8(w, (const void *)a.weight, a.weight_type, at, n, a.weight_aligned);
#pragma unroll
    for (int c = 0; c < 8; c++) v[c] = __fmul_rn(__fmul_rn(v[c] - mean, scale), w[c]);
    if (!plain && a.bias) {
      load8(w, (const void *)a.bias, a.bias_type, at, n, a.bias_aligned);
#pragma unroll
      for (int c = 0; c < 8; c++) v[c] = __fadd_rn(v[c], w[c]);
    }
    store_part<plain>(out, at, pack(v), n, a.aligned);
  }
}

// One row of one head in memory.
struct stored_row {
  const u16 *x;
  bool aligned;
  template <bool plain>
  DEVICE uint4 load(int at, int n) const {
    return load_part<plain>(x, at, n, aligned);
  }
};

// threads threads norm one row of one head; a block has as many rows as fit.
template <int threads, int block, int each, bool plain>
DEVICE void norm_rows(const norm_args &a) {
  launch_dependents();
  uint4 weight[each];
  bring_weights<threads, each, plain>(a, weight);
  wait_dependencies();
  i64 item = (i64)blockIdx.x * (block / threads) + threadIdx.x / threads;
  if (item >= a.items) return;  // whole warps exit, and only if a block has several items
  i64 row = plain ? item : item / a.heads;
  int head = plain ? 0 : (int)(item - row * a.heads);
  stored_row x = {(const u16 *)a.x + row * a.x_row + head * a.x_head, a.aligned != 0};
  u16 *residual = a.residual ? (u16 *)a.residual + row * a.residual_row + head * a.residual_head : 0;
  norm_row<threads, block, each, plain>(a, x, residual, (u16 *)a.out + row * a.out_row + head * a.out_head, weight);
}

KERNEL(256, 8) norm_head(const norm_args a) { norm_rows<32, 256, 1, false>(a); }
KERNEL(256, 4) norm_warp(const norm_args a) { norm_rows<32, 256, 4, false>(a); }
KERNEL(256, 8) norm_256(const norm_args a) { norm_rows<256, 256, 1, false>(a); }
KERNEL(256, 6) norm_256_2(const norm_args a) { norm_rows<256, 256, 2, false>(a); }
KERNEL(512, 1) norm_512(const norm_args a) { norm_rows<512, 512, 1, false>(a); }
KERNEL(512, 1) norm_512_3(const norm_args a) { norm_rows<512, 512, 3, false>(a); }

// For few rows, see plain.
KERNEL(256, 1) norm_few_256(const norm_args a) { norm_rows<256, 256, 1, true>(a); }
KERNEL(512, 1) norm_few_512(const norm_args a) { norm_rows<512, 512, 1, true>(a); }

struct clamp_args {
  u64 x;
  i64 stride;
  int columns;
  float limit;
  int aligned;
};

KERNEL(128, 1) clamp(const clamp_args a) {
  begin();
  int at = (blockIdx.y * 128 + threadIdx.x) * 8, n = a.columns - at;
  if (n <= 0) return;
  u16 *x = (u16 *)a.x + blockIdx.x * a.stride;
  float v[8];
  load8(v, x, act_type, at, n, a.aligned);
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = v[i] > a.limit ? a.limit : v[i] < -a.limit ? -a.limit : v[i];
  store8(x, at, v, n, a.aligned);
}

struct silu_mul_args {
  u64 gate, up, out;
  i64 gate_stride, up_stride, out_stride;
  int columns, aligned;
};

KERNEL(128, 1) silu_mul(const silu_mul_args a) {
  begin();
  int at = (blockIdx.y * 128 + threadIdx.x) * 8, n = a.columns - at;
  if (n <= 0) return;
  float g[8], u[8];
  load8(g, (const u16 *)a.gate + blockIdx.x * a.gate_stride, act_type, at, n, a.aligned);
  load8(u, (const u16 *)a.up + blockIdx.x * a.up_stride, act_type, at, n, a.aligned);
#pragma unroll
  for (int i = 0; i < 8; i++) g[i] = silu(g[i]) * u[i];
  store8((u16 *)a.out + blockIdx.x * a.out_stride, at, g, n, a.aligned);
}

struct gather_args {
  u64 x, rows, out;
  i64 x_stride, out_stride;
  int count, columns, aligned;
};

// Rows of Out whose index is outside of x are not written.
KERNEL(128, 1) gather(const gather_args a) {
  begin();
  int at = (blockIdx.y * 128 + threadIdx.x) * 8, n = a.columns - at;
  int row = ((const int *)a.rows)[blockIdx.x];
  if (n <= 0 || row < 0 || row >= a.count) return;
  copy8((u16 *)a.out + blockIdx.x * a.out_stride + at, (const u16 *)a.x + row * a.x_stride + at, n, a.aligned);
}

struct combine_args {
  u64 x, weights, shared, gate, out;  // shared, gate: 0 for none
  i64 x_stride, shared_stride, gate_stride, out_stride;
  int k, columns, aligned;
};

// Adds to total the outputs of at_once of a token's experts from k on, as far as they exist:
// eight elements of each from at on, of which n exist. whole: all eight exist and are aligned.
// All loads are issued before the first sum.
template <int at_once, bool whole>
DEVICE void add_outputs(float (&total)[8], const combine_args &a, i64 row, int k, int at, int n) {
  const u16 *x = (const u16 *)a.x + (row * a.k + k) * a.x_stride;
  const float *weights = (const float *)a.weights + row * a.k + k;
  uint4 q[at_once];
  float w[at_once], v[8];
#pragma unroll
  for (int j = 0; j < at_once; j++)
    if (k + j < a.k) w[j] = weights[j], q[j] = load_packed(x + j * a.x_stride, at, whole ? 8 : n, whole || a.aligned);
#pragma unroll
  for (int j = 0; j < at_once; j++)
    if (k + j < a.k) {
      unpack(v, q[j]);
#pragma unroll
      for (int i = 0; i < 8; i++) total[i] = __fmaf_rn(w[j], v[i], total[i]);
    }
}

// Eight elements of a token's weighted sum, with intrinsics as in norm_row. With at_once 2, a.k
// is at most 2, and without the loop the kernel needs fewer registers. compact: all outputs are added in the loop, by few
// instructions.
template <int at_once, bool whole, bool compact>
DEVICE uint4 combine_elements(const combine_args &a, i64 row, int at, int n) {
  float total[8] = {}, v[8], gate = 0;
  uint4 shared = {0, 0, 0, 0};
  if (a.shared) {
    shared = load_packed((const u16 *)a.shared + row * a.shared_stride, at, whole ? 8 : n, whole || a.aligned);
    gate = ((const float *)a.gate)[row * a.gate_stride];
  }
  if (!compact) add_outputs<at_once, whole>(total, a, row, 0, at, n);
#pragma unroll 1
  for (int k = compact ? 0 : at_once; at_once > 2 && k < a.k; k += at_once) add_outputs<at_once, whole>(total, a, row, k, at, n);
  if (a.shared) {
    float w = __fdiv_rn(1.f, __fadd_rn(1.f, expf(-gate)));
    unpack(v, shared);
#pragma unroll
    for (int i = 0; i < 8; i++) total[i] = __fmaf_rn(w, v[i], total[i]);
  }
  return pack(total);
}

// A row that is the weighted sum of a token's expert outputs.
template <int at_once>
struct combined_row {
  const combine_args &a;
  i64 row;
  template <bool plain>
  DEVICE uint4 load(int at, int n) const {
    if (plain && n <= 0) return {0, 0, 0, 0};
    return plain || a.aligned && n >= 8 ? combine_elements<at_once, true, plain>(a, row, at, 8) : combine_elements<at_once, false, plain>(a, row, at, n);
  }
};

KERNEL(128, 9) combine(const combine_args a) {
  begin();
  int at = (blockIdx.y * 128 + threadIdx.x) * 8, n = a.columns - at;
  if (n <= 0) return;
  combined_row<4> x = {a, blockIdx.x};
  store_packed((u16 *)a.out + blockIdx.x * a.out_stride, at, x.load<false>(at, n), n, a.aligned);
}

// Arguments that only one part needs are in both: combine.out and norm.x are 0.
struct combine_norm_args {
  combine_args combine;
  norm_args norm;
};

// One block per row. Registers bound the bytes in flight per multiprocessor: at 64 per thread,
// 48 KiB with two experts per token and 80 with four or more; at 40, enough for two experts,
// 72.
template <int threads, int each, int at_once, bool plain>
DEVICE void combine_norm(const combine_norm_args &a) {
  launch_dependents();
  uint4 weight[each];
  bring_weights<threads, each, plain>(a.norm, weight);
  wait_dependencies();
  i64 row = blockIdx.x;
  combined_row<at_once> x = {a.combine, row};
  norm_row<threads, threads, each, plain>(a.norm, x, (u16 *)a.norm.residual + row * a.norm.residual_row, (u16 *)a.norm.out + row * a.norm.out_row, weight);
}

KERNEL(256, 4) combine_norm_256(const combine_norm_args a) { combine_norm<256, 1, 4, false>(a); }
KERNEL(512, 3) combine_norm_512_few(const combine_norm_args a) { combine_norm<512, 1, 2, false>(a); }
KERNEL(512, 2) combine_norm_512(const combine_norm_args a) { combine_norm<512, 1, 4, false>(a); }
KERNEL(512, 1) combine_norm_512_3(const combine_norm_args a) { combine_norm<512, 3, 4, false>(a); }

// For few rows, see plain.
KERNEL(256, 1) combine_norm_few_256(const combine_norm_args a) { combine_norm<256, 1, 4, true>(a); }
KERNEL(512, 1) combine_norm_few_512(const combine_norm_args a) { combine_norm<512, 1, 4, true>(a); }

struct add_bias_args {
  u64 x, bias;
  i64 stride;
  int columns, bias_type, aligned;
};

// Adds a bias to x, in float32. Rows have a multiple of 8 columns and start at multiples of 16
// bytes.
KERNEL(128, 1) add_bias(const add_bias_args a) {
  begin();
  int at = (blockIdx.y * 128 + threadIdx.x) * 8;
  if (at >= a.columns) return;
  float4 *x = (float4 *)((float *)a.x + blockIdx.x * a.stride + at), lo = x[0], hi = x[1];
  float b[8];
  load8(b, (const void *)a.bias, a.bias_type, at, 8, a.aligned);
  lo.x += b[0], lo.y += b[1], lo.z += b[2], lo.w += b[3];
  hi.x += b[4], hi.y += b[5], hi.z += b[6], hi.w += b[7];
  x[0] = lo, x[1] = hi;
}

struct rope_args {
  u64 q, k, table, rows;
  i64 q_row, q_head, k_row, k_head;
  int q_heads, k_heads, half, places, aligned;
};

// Tokens whose row is outside of the table are not rotated.
KERNEL(128, 1) rope(const rope_args a) {
  launch_dependents();
  int groups = (a.half + 7) / 8;
  int item = blockIdx.y * 128 + threadIdx.x;
  int head = item / groups, at = (item - head * groups) * 8, n = a.half - at;
  int place = load_early((const int *)a.rows + blockIdx.x);
  bool there = head < a.q_heads + a.k_heads && place >= 0 && place < a.places;
  const float *table = (const float *)a.table + (i64)(there ? place : 0) * 2 * a.half;
  float lo[8], hi[8], c[8], s[8];
  if (there) load8(c, table, f32_type, at, n, a.aligned), load8(s, table + a.half, f32_type, at, n, a.aligned);
  wait_dependencies();
  if (!there) return;
  u16 *x = head < a.q_heads ? (u16 *)a.q + blockIdx.x * a.q_row + head * a.q_head
                            : (u16 *)a.k + blockIdx.x * a.k_row + (head - a.q_heads) * a.k_head;
  load8(lo, x, act_type, at, n, a.aligned);
  load8(hi, x + a.half, act_type, at, n, a.aligned);
  rotate(lo, hi, c, s);
  store8(x, at, lo, n, a.aligned);
  store8(x + a.half, at, hi, n, a.aligned);
}

struct append_kv_args {
  u64 k, v, cache_k, cache_v, slots;
  i64 k_row, k_head, v_row, v_head;
  i64 ck_block, ck_token, ck_head, cv_block, cv_token, cv_head;
  int heads, d, blocks, tokens, aligned;
};

// Tokens whose slot is outside of the cache are skipped.
KERNEL(128, 1) append_kv(const append_kv_args a) {
  launch_dependents();
  int groups = (a.d + 7) / 8;
  int item = blockIdx.y * 128 + threadIdx.x;
  int head = item / groups, at = (item - head * groups) * 8, n = a.d - at;
  int slot = load_early((const int *)a.slots + blockIdx.x);
  wait_dependencies();
  if (head >= 2 * a.heads || slot < 0) return;
  i64 block = slot / a.tokens, token = slot - (int)block * a.tokens;
  if (block >= a.blocks) return;
  if (head < a.heads) {
    copy8((u16 *)a.cache_k + block * a.ck_block + token * a.ck_token + head * a.ck_head + at,
          (const u16 *)a.k + blockIdx.x * a.k_row + head * a.k_head + at, n, a.aligned);
  } else {
    head -= a.heads;
    copy8((u16 *)a.cache_v + block * a.cv_block + token * a.cv_token + head * a.cv_head + at,
          (const u16 *)a.v + blockIdx.x * a.v_row + head * a.v_head + at, n, a.aligned);
  }
}

struct rope_append_kv_args {
  u64 q, k, v, q_weight, k_weight, table, rows, cache_k, cache_v, slots;
  i64 q_row, q_head, k_row, k_head, v_row, v_head;
  i64 ck_block, ck_token, ck_head, cv_block, cv_token, cv_head;
  int q_heads, k_heads, half, lanes, q_type, k_type, places, blocks, tokens;
  float eps;
  int aligned;
};

// The heads of a row are those of q, then of k, then of v. a.lanes lanes (a power of two, at
// most 16) work on a head, each on eight elements of its lower half and the eight of the upper
// half that they are rotated with. A thread has the same elements of every head, so it reads
// cosines and sines once. It issues the loads of each heads before it works on the first.
// Between norm and rotation a head is rounded, as if it had been stored. Tokens whose row is
// outside of the table are not rotated; those whose slot is outside of the cache are not
// appended. d, unless 0, is the head size, a power of two, with everything aligned.
template <bool normed, int d, int each>
DEVICE void rope_append(const rope_append_kv_args &a) {
  i64 row = blockIdx.x;
  int lanes = d ? d / 16 : a.lanes, of_block = threadIdx.x / lanes, at = threadIdx.x % lanes * 8;
  int half = d ? d / 2 : a.half, n = d ? 8 : half - at;
  bool aligned = d || a.aligned;
  int slot = load_early((const int *)a.slots + row), place = load_early((const int *)a.rows + row);
  i64 block = slot / a.tokens, token = slot - (int)block * a.tokens;
  bool kept = slot >= 0 && block < a.blocks;
  bool turned = place >= 0 && place < a.places;
  float c[8], s[8];
  if (turned) {
    i64 angles = (i64)place * 2 * half + at;
    load8(c, (const void *)a.table, f32_type, angles, n, aligned), load8(s, (const void *)a.table, f32_type, angles + half, n, aligned);
  }
  __shared__ float4 weights[4][normed ? 32 : 1];  // for the halves of q, then of k
  if (normed) {
    if (of_block < 4) {
      float w[8];
      load8(w, (const void *)(of_block < 2 ? a.q_weight : a.k_weight), of_block < 2 ? a.q_type : a.k_type, of_block % 2 * half + at, n, aligned);
      weights[of_block][at / 4] = {w[0], w[1], w[2], w[3]}, weights[of_block][at / 4 + 1] = {w[4], w[5], w[6], w[7]};
    }
    __syncthreads();
  }
  u16 *q = (u16 *)a.q + row * a.q_row;
  const u16 *k = (const u16 *)a.k + row * a.k_row, *v = (const u16 *)a.v + row * a.v_row;
  u16 *cache_k = (u16 *)a.cache_k + block * a.ck_block + token * a.ck_token;
  u16 *cache_v = (u16 *)a.cache_v + block * a.cv_block + token * a.cv_token;
  int heads = a.q_heads + (kept ? 2 * a.k_heads : 0), at_once = 128 / lanes, step = gridDim.y * at_once;
  wait_dependencies();

  for (int from = blockIdx.y * at_once; from < heads; from += each * step) {
    uint4 lo[each], hi[each];
#pragma unroll
    for (int i = 0; i < each; i++) {
      int head = from + i * step + of_block, of_k = head - a.q_heads, of_v = of_k - a.k_heads;
      const u16 *x = of_k < 0 ? q + head * a.q_head : of_v < 0 ? k + of_k * a.k_head : v + of_v * a.v_head;
      if (head < heads) lo[i] = load_packed(x, at, n, aligned), hi[i] = load_packed(x, half + at, n, aligned);
    }
#pragma unroll
    for (int i = 0; i < each; i++) {
      if (from + i * step >= heads) break;  // uniform over the block
      int head = from + i * step + of_block, of_k = head - a.q_heads, of_v = of_k - a.k_heads;
      bool there = head < heads;
      if (normed) {
        // The sum of norm_head, in its order: eight consecutive elements in turn, then a
        // butterfly over groups of eight, the farthest first. If halves are powers of two, the
        // groups are those of the lanes.
        float total = 0;
        if (there && of_v < 0) {
          uint4 one = lo[i], other = hi[i];
          if (half != 8 * lanes) {
            const u16 *x = of_k < 0 ? q + head * a.q_head : k + of_k * a.k_head;
            one = load_packed(x, at, 2 * half - at, aligned);
            other = load_packed(x, 8 * lanes + at, 2 * half - 8 * lanes - at, aligned);
          }
          total = __fadd_rn(squares(one), squares(other));
        }
#pragma unroll
        for (int m = 8; m > 0; m /= 2)
          if (m < lanes) total += __shfl_xor_sync(all_lanes, total, m);
        if (there && of_v < 0) {
          float scale = rms_scale(total, 2 * half, a.eps);
          int w = of_k < 0 ? 0 : 2;
          const float4 *low = weights[w] + at / 4, *high = weights[w + 1] + at / 4;
          lo[i] = scaled(lo[i], scale, low[0], low[1]), hi[i] = scaled(hi[i], scale, high[0], high[1]);
        }
      }
      if (!there) continue;
      if (turned && of_v < 0) {
        rotate(lo[i], hi[i], c, s);
      }
      u16 *to = of_k < 0 ? q + head * a.q_head : of_v < 0 ? cache_k + of_k * a.ck_head : cache_v + of_v * a.cv_head;
      store_packed(to, at, lo[i], n, aligned), store_packed(to, half + at, hi[i], n, aligned);
    }
  }
}

KERNEL(128, 6) rope_append_kv(const rope_append_kv_args a) {
  launch_dependents();
  if (a.half == 64 && a.aligned)
    rope_append<false, 128, 3>(a);
  else
    rope_append<false, 0, 1>(a);
}

KERNEL(128, 5) norm_rope_append_kv(const rope_append_kv_args a) {
  launch_dependents();
  if (a.half == 64 && a.aligned)
    rope_append<true, 128, 3>(a);
  else
    rope_append<true, 0, 1>(a);
}

// For few rows of aligned heads of 128.
KERNEL(128, 1) rope_append_kv_few(const rope_append_kv_args a) {
  launch_dependents();
  rope_append<false, 128, 1>(a);
}

KERNEL(128, 1) norm_rope_append_kv_few(const rope_append_kv_args a) {
  launch_dependents();
  rope_append<true, 128, 1>(a);
}
