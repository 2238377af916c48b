// Drawing tokens. The noise has the bits of kernels.GumbelNoise: every operation is
// rounded to nearest and none fused.

struct sample_args {
  u64 logits, temperatures, seeds, samples, positions, out, work;
  i64 stride;
  int vocabulary, segments, segment;  // tokens of a segment, a multiple of 4
  int aligned;
};

struct choice {
  float score;
  int id;  // -1: none
};

DEVICE choice better(choice a, choice b) {
  bool second = b.id >= 0 && (a.id < 0 || b.score > a.score || (b.score == a.score && b.id < a.id));
  return second ? b : a;
}

DEVICE float ln(float x) {
  u32 b = __float_as_uint(x);
  int k = (int)(b >> 23) - 127;
  b = (b & 0x7fffffu) | 127u << 23;
  if (b > 0x3fb504f2u) b -= 1u << 23, k++;
  float m = __uint_as_float(b);
  float s = __fdiv_rn(__fadd_rn(m, -1.f), __fadd_rn(m, 1.f));
  float z = __fmul_rn(s, s);
  float p = __fadd_rn(2.f / 9, __fmul_rn(z, 2.f / 11));
  p = __fadd_rn(2.f / 7, __fmul_rn(z, p));
  p = __fadd_rn(2.f / 5, __fmul_rn(z, p));
  p = __fadd_rn(2.f / 3, __fmul_rn(z, p));
  float fk = __int2float_rn(k);
  float tail = __fadd_rn(__fmul_rn(__fmul_rn(s, z), p), __fmul_rn(fk, -2.12194442e-4f));
  return __fadd_rn(__fmul_rn(fk, 0.693359375f), __fadd_rn(__fmul_rn(2.f, s), tail));
}

DEVICE float gumbel(u32 w) {
  const float scale = 1.f / 4294967296.f;
  float e;
  if (w < 0x80000000u) {
    float t = __fmul_rn(__uint2float_rn(w | 1), scale);
    float y = __fadd_rn(1.f, -t);
    float d = __fadd_rn(__fadd_rn(y, -1.f), t);
    e = -__fadd_rn(ln(y), -__fdiv_rn(d, y));
  } else {
    e = -ln(__fmul_rn(__uint2float_rn(~w | 1), scale));
  }
  return -ln(e);
}

// Philox4x32-10 (Salmon et al., SC 2011).
DEVICE void philox(u32 (&c)[4], u32 k0, u32 k1) {
#pragma unroll
  for (int i = 0; i < 10; i++) {
    u32 h0 = __umulhi(0xd2511f53u, c[0]), l0 = 0xd2511f53u * c[0];
    u32 h1 = __umulhi(0xcd9e8d57u, c[2]), l1 = 0xcd9e8d57u * c[2];
    c[0] = h1 ^ c[1] ^ k0, c[1] = l1, c[2] = h0 ^ c[3] ^ k1, c[3] = l0;
    k0 += 0x9e3779b9u, k1 += 0xbb67ae85u;
  }
}

// The best of the block's choices, in thread 0.
DEVICE choice block_best(choice c) {
  __shared__ choice best[16];
#pragma unroll
  for (int i = 16; i > 0; i >>= 1) {
    choice d;
    d.score = __shfl_xor_sync(all_lanes, c.score, i);
    d.id = __shfl_xor_sync(all_lanes, c.id, i);
    c = better(c, d);
  }
  if (threadIdx.x % 32 == 0) best[threadIdx.x / 32] = c;
  __syncthreads();
  if (threadIdx.x == 0)
    for (int w = 1; w < (int)blockDim.x / 32; w++) c = better(c, best[w]);
  return c;
}

// Block (row, segment). A row without any number draws -1.
KERNEL(512, 1) sample(const sample_args a) {
  i64 row = blockIdx.x;
  const float *logits = (const float *)a.logits + row * a.stride;
  float temperature = ((const float *)a.temperatures)[row];
  u64 seed = ((const u64 *)a.seeds)[row];
  u32 which = ((const u32 *)a.samples)[row], position = ((const u32 *)a.positions)[row];
  int from = blockIdx.y * a.segment, to = min(from + a.segment, a.vocabulary);
  choice c = {0.f, -1};
  for (int at = from + 4 * threadIdx.x; at < to; at += 4 * 512) {
    float v[4], noise[4] = {};
    int n = min(4, to - at);
    if (n == 4 && a.aligned) {
      float4 q = *(const float4 *)(logits + at);
      v[0] = q.x, v[1] = q.y, v[2] = q.z, v[3] = q.w;
    } else {
#pragma unroll
      for (int i = 0; i < 4; i++) v[i] = i < n ? logits[at + i] : 0.f;
    }
    if (temperature > 0) {
      u32 counter[4] = {(u32)at / 4, position, which, 1};
      philox(counter, (u32)seed, (u32)(seed >> 32));
#pragma unroll
      for (int i = 0; i < 4; i++) {
        noise[i] = gumbel(counter[i]);
        v[i] = __fadd_rn(__fdiv_rn(v[i], temperature), noise[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      choice d = {v[i], i < n && v[i] == v[i] ? at + i : -1};
      c = better(c, d);
    }
  }
  c = block_best(c);
  if (threadIdx.x != 0) return;
  if (a.segments == 1)
    ((int *)a.out)[row] = c.id;
  else
    ((choice *)a.work)[row * a.segments + blockIdx.y] = c;
}

// The best of each row's segments; one warp per row.
KERNEL(32, 1) sample_merge(const sample_args a) {
  i64 row = blockIdx.x;
  choice c = {0.f, -1};
  for (int s = threadIdx.x; s < a.segments; s += 32) c = better(c, ((const choice *)a.work)[row * a.segments + s]);
  c = block_best(c);
  if (threadIdx.x == 0) ((int *)a.out)[row] = c.id;
}
