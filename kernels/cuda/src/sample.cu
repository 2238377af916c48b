// Sampling, and other kernels on rows of logits. The noise has the bits of philox.Gumbel, and
// the weights of tokens those of kernels.Exp: every operation is rounded to nearest and none is
// fused.

struct sample_args {
  u64 logits, temperatures, seeds, samples, positions, out, work;
  u64 top_k, top_p, min_p;  // 0 for none
  i64 stride;
  int vocabulary, segments, segment;  // tokens of a segment, a multiple of 4
  int aligned;
};

struct choice {
  float score;
  int id;  // -1: none
};

constexpr int sample_threads = 512;
#define lowest __uint_as_float(0xff800000u)  // -infinity

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

// Loads logits at to at+3; the first n exist, the others are set to 0.
DEVICE void load4(float (&v)[4], const float *logits, int at, int n, bool aligned) {
  if (n == 4 && aligned) {
    float4 q = *(const float4 *)(logits + at);
    v[0] = q.x, v[1] = q.y, v[2] = q.z, v[3] = q.w;
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; i++) v[i] = i < n ? logits[at + i] : 0.f;
}

// What the noise of one sample depends on besides the token.
struct draw {
  float temperature;
  u64 seed;
  u32 which, position;
};

DEVICE draw row_draw(const sample_args &a, i64 row) {
  return {((const float *)a.temperatures)[row], ((const u64 *)a.seeds)[row], ((const u32 *)a.samples)[row], ((const u32 *)a.positions)[row]};
}

// The best of c and of the four tokens from at on (a multiple of 4) whose bits are set in kept.
DEVICE choice draw4(choice c, float (&v)[4], u32 kept, int at, const draw &d) {
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (!(v[i] > lowest)) kept &= ~(1u << i);  // NaN and -infinity are never sampled
  if (d.temperature > 0) {
    u32 counter[4] = {(u32)at / 4, d.position, d.which, 1};
    philox(counter, (u32)d.seed, (u32)(d.seed >> 32));
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = __fadd_rn(__fdiv_rn(v[i], d.temperature), gumbel(counter[i]));
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    choice one = {v[i], kept >> i & 1 ? at + i : -1};
    c = better(c, one);
  }
  return c;
}

// The best of the block's candidates, in thread 0.
DEVICE choice block_best(choice c) {
  __shared__ choice best[32];
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

// The noise, with an error of at most 2^-14.
DEVICE float gumbel_near(u32 w) {
  bool high = w >> 31;
  float f = __fmul_rn(__uint2float_rn((high ? ~w : w) | 1), 1.f / 4294967296.f);
  float e = __fmul_rn(log2_fast(high ? f : 1.f - f), -0.693147181f);
  if (!high && f < 1.f / 256) e = f + f * f * (0.5f + f * (1.f / 3));
  return __fmul_rn(log2_fast(e), -0.693147181f);
}

// The best of the tokens from + 4 threadIdx.x to to+3, and so on by stride.
DEVICE choice draw_all(const float *logits, int from, int to, bool aligned, const draw &d) {
  choice c = {0.f, -1};
#pragma unroll 1
  for (int at = from + 4 * threadIdx.x; at < to; at += 4 * sample_threads) {
    float v[4];
    int n = min(4, to - at);
    load4(v, logits, at, n, aligned);
    c = draw4(c, v, (1u << n) - 1, at, d);
  }
  return c;
}

// The same for a temperature above 0. Approximate scores rule out most tokens: each thread
// keeps its best and the score of its second best, and only tokens within slack of the block's
// best are computed exactly.
DEVICE choice draw_near(const float *logits, int from, int to, bool aligned, const draw &d) {
  __shared__ float bests[sample_threads / 32];
  float inverse = __fdiv_rn(1.f, d.temperature);
  float best = lowest, second = lowest;
  int id = from;
#pragma unroll 2
  for (int at = from + 4 * threadIdx.x; at < to; at += 4 * sample_threads) {
    float v[4];
    int n = min(4, to - at);
    load4(v, logits, at, n, aligned);
    u32 counter[4] = {(u32)at / 4, d.position, d.which, 1};
    philox(counter, (u32)d.seed, (u32)(d.seed >> 32));
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float s = i < n ? v[i] * inverse + gumbel_near(counter[i]) : lowest;
      second = fmaxf(second, fminf(best, s));
      if (s > best) best = s, id = at + i;
    }
  }
  float block_max = best;
#pragma unroll
  for (int i = 16; i > 0; i >>= 1) block_max = fmaxf(block_max, __shfl_xor_sync(all_lanes, block_max, i));
  if (threadIdx.x % 32 == 0) bests[threadIdx.x / 32] = block_max;
  __syncthreads();
  for (int w = 0; w < sample_threads / 32; w++) block_max = fmaxf(block_max, bests[w]);
  float slack = 1.f / 2048 + (fabsf(block_max) + 32.f) * (1.f / 262144), near = block_max - slack;
  // If several tokens of a thread are near the best, or scores leave the range of floats, all
  // are computed exactly.
  if (!(fabsf(block_max) < 1e30f) || second >= near) return draw_all(logits, from, to, aligned, d);
  choice c = {0.f, -1};
  if (best >= near) {
    float v[4];
    int at = id & ~3, n = min(4, to - at);
    load4(v, logits, at, n, aligned);
    c = draw4(c, v, 1u << (id - at), at, d);
  }
  return c;
}

// Block (row, segment). A row in which no logit is above -infinity samples -1.
KERNEL(512, 2) sample(const sample_args a) {
  begin();
  i64 row = blockIdx.x;
  const float *logits = (const float *)a.logits + row * a.stride;
  draw d = row_draw(a, row);
  int from = blockIdx.y * a.segment, to = min(from + a.segment, a.vocabulary);
  choice c = d.temperature > 1e-30f ? draw_near(logits, from, to, a.aligned, d) : draw_all(logits, from, to, a.aligned, d);
  c = block_best(c);
  if (threadIdx.x != 0) return;
  if (a.segments == 1)
    ((int *)a.out)[row] = c.id;
  else
    ((choice *)a.work)[row * a.segments + blockIdx.y] = c;
}

// The best of each row's segments; one warp per row.
KERNEL(32, 1) sample_merge(const sample_args a) {
  begin();
  i64 row = blockIdx.x;
  choice c = {0.f, -1};
  for (int s = threadIdx.x; s < a.segments; s += 32) c = better(c, ((const choice *)a.work)[row * a.segments + s]);
  c = block_best(c);
  if (threadIdx.x == 0) ((int *)a.out)[row] = c.id;
}

// Selection among a row's tokens: a block of row_threads per row. A token's rank key is its
// logit's key, then the distance of its id from the last: keys descend from the most probable
// token on, the lower id of equal ones first.
constexpr int row_threads = 1024;
constexpr int digit_bins = 2048;  // a bin's sum is 64 bits, in two arrays
constexpr int list_room = 4096;

// Maps a logit's bits to an integer of the same order: NaN is 0. Both zeros are equal.
DEVICE u32 logit_key(float v) {
  if (v != v) return 0;
  u32 b = __float_as_uint(__fadd_rn(v, 0.f));
  return b >> 31 ? ~b : b | 0x80000000u;
}

DEVICE float key_logit(u32 key) { return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key); }

// kernels.Exp.
DEVICE float exp_exact(float x) {
  if (!(x >= -87.f)) return 0.f;
  int k = (int)__fadd_rn(__fmul_rn(x, 1.44269504f), -0.5f);
  float fk = __int2float_rn(k);
  float r = __fadd_rn(__fadd_rn(x, -__fmul_rn(fk, 0.693359375f)), -__fmul_rn(fk, -2.12194442e-4f));
  float p = __fadd_rn(1.f / 720, __fmul_rn(r, 1.f / 5040));
  p = __fadd_rn(1.f / 120, __fmul_rn(r, p));
  p = __fadd_rn(1.f / 24, __fmul_rn(r, p));
  p = __fadd_rn(1.f / 6, __fmul_rn(r, p));
  p = __fadd_rn(0.5f, __fmul_rn(r, p));
  p = __fadd_rn(1.f, __fmul_rn(r, p));
  p = __fadd_rn(1.f, __fmul_rn(r, p));
  return __fmul_rn(p, __uint_as_float((u32)(k + 127) << 23));
}

// kernels.SampleWeight.
DEVICE u64 sample_weight(float e) { return (u64)__fmul_rn(e, 4294967296.f); }

// Shared memory of a block.
struct row_memory {
  union {
    struct {
      u32 low[digit_bins], high[digit_bins];
    };
    u64 rank_keys[digit_bins];
  };
  int list[list_room];
  u64 totals[32];
  double sums[32];
  u64 found_left, found_sum;
  u32 keys[32];
  int found, count;
};

// The tokens of a row that are kept: at least min_p as probable as the most probable one, and
// with a rank key of at least min_key. If the list exists, it has all of them.
struct tokens {
  const float *logits;
  int vocabulary;
  bool aligned;
  float temperature, top, min_p;  // top: the largest logit / temperature
  u64 min_key;
  int listed;  // length of the list; -1: no list
};

constexpr u64 min_number_key = 1ull << 32;  // below the rank key of any number

DEVICE u64 rank_key(const tokens &t, int id, float v) { return (u64)logit_key(v) << 32 | (u32)(t.vocabulary - 1 - id); }

// The probability of the token of a logit, relative to the most probable token.
DEVICE float likelihood(const tokens &t, float v) {
  float s = __fdiv_rn(v, t.temperature);
  return s == t.top ? 1.f : exp_exact(__fadd_rn(s, -t.top));
}

// Calls f(id, logit) for all tokens that may be kept.
template <class F>
DEVICE void each(const tokens &t, const row_memory &m, F f) {
  if (t.listed >= 0) {
#pragma unroll 1
    for (int i = threadIdx.x; i < t.listed; i += row_threads) f(m.list[i], t.logits[m.list[i]]);
    return;
  }
#pragma unroll 1
  for (int at = 8 * threadIdx.x; at < t.vocabulary; at += 8 * row_threads) {
    float v[8];
    int n = min(8, t.vocabulary - at);
    load8(v, t.logits, f32_type, at, n, t.aligned);
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (i < n) f(at + i, v[i]);
  }
}

// The key of a row's largest logit, 0 if none is a number.
DEVICE u32 largest_key(const tokens &t, row_memory &m) {
  u32 key = 0;
  each(t, m, [&](int, float v) {
    u32 k = logit_key(v);
    key = k > key ? k : key;
  });
#pragma unroll
  for (int i = 16; i > 0; i >>= 1) {
    u32 k = __shfl_xor_sync(all_lanes, key, i);
    key = k > key ? k : key;
  }
  if (threadIdx.x % 32 == 0) m.keys[threadIdx.x / 32] = key;
  __syncthreads();
  for (int w = 0; w < row_threads / 32; w++) key = m.keys[w] > key ? m.keys[w] : key;
  return key;
}

// Adds to a bin. When a low word overflows, the high one is incremented, so the sum does not
// depend on the order.
DEVICE void add_weight(row_memory &m, int bin, u64 weight) {
  u32 low = (u32)weight, high = (u32)(weight >> 32);
  if (low) high += atomicAdd(m.low + bin, low) > ~low;
  if (high) atomicAdd(m.high + bin, high);
}

// Lists the tokens that are kept and have rank keys of at least min_key, if they are few.
DEVICE void gather(tokens &t, row_memory &m, u64 min_key) {
  __syncthreads();
  if (threadIdx.x == 0) m.count = 0;
  __syncthreads();
  bool full = false;
  each(t, m, [&](int id, float v) {
    if (full || rank_key(t, id, v) < min_key) return;
    if (t.min_p > 0 && !(likelihood(t, v) >= t.min_p)) return;
    int at = atomicAdd(&m.count, 1);
    full = at >= list_room;
    if (!full) m.list[at] = id;
  });
  __syncthreads();
  if (m.count <= list_room) t.listed = m.count;
}

// Keeps the fewest tokens, from the highest rank key down, that reach count (counting) or, by
// weight, the fraction part/2^64 of the total; all if they do not reach it. Finds the last
// one's key digit by digit (radix select), from sums by digit.
DEVICE void narrow(tokens &t, row_memory &m, bool counting, u64 many, u64 part) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  u64 prefix = 0, left = 0;
#pragma unroll 1
  for (int shift = 64; shift > 0;) {
    int width = shift == 42 || shift == 10 ? 10 : 11;
    bool first = shift == 64;
    shift -= width;
    if (shift == 21 && t.vocabulary <= 1 << 21) continue;  // the digit is 0
    for (int i = threadIdx.x; i < digit_bins; i += row_threads) m.low[i] = m.high[i] = 0;
    __syncthreads();
    each(t, m, [&](int id, float v) {
      u64 p = rank_key(t, id, v);
      if (p < t.min_key || (p ^ prefix) >> shift >> width) return;
      u64 weight = 1;
      if (!counting || t.min_p > 0) {
        float e = likelihood(t, v);
        if (!(e >= t.min_p)) return;
        if (!counting) weight = sample_weight(e);
      }
      add_weight(m, (int)(p >> shift) & ((1 << width) - 1), weight);
    });
    __syncthreads();

    // Two bins per thread, from the highest down.
    int bin = digit_bins - 1 - 2 * threadIdx.x;
    u64 upper = (u64)m.high[bin] << 32 | m.low[bin];
    u64 both = upper + ((u64)m.high[bin - 1] << 32 | m.low[bin - 1]);
    u64 to = both;
#pragma unroll
    for (int i = 1; i < 32; i <<= 1) {
      u64 before = __shfl_up_sync(all_lanes, to, i);
      if (lane >= i) to += before;
    }
    if (lane == 31) m.totals[warp] = to;
    __syncthreads();
    u64 total = 0;
    for (int w = 0; w < row_threads / 32; w++) {
      if (w == warp) to += total;
      total += m.totals[w];
    }
    if (first) {
      left = many;
      if (!counting) {
        left = __umul64hi(total, part);
        if (total * part != 0 || left == 0) left++;
      }
      if (left > total) return;
    }
    u64 from = to - both;
    if (from < left && left <= to) {  // true for one thread
      bool next = left > from + upper;
      m.found = next ? bin - 1 : bin;
      m.found_left = left - from - (next ? upper : 0);
      m.found_sum = next ? both - upper : upper;
    }
    __syncthreads();
    prefix |= (u64)m.found << shift;
    left = m.found_left;
    u64 sum = m.found_sum;
    if (shift == 32 && !counting) {  // equal logits have equal weights
      u64 weight = sample_weight(likelihood(t, key_logit((u32)(prefix >> 32))));
      left = (left + weight - 1) / weight;
      sum /= weight;
      counting = true;
    }
    u64 min_key = prefix > t.min_key ? prefix : t.min_key;
    if (t.listed < 0 && shift >= 42) gather(t, m, min_key);
    if (sum == left) break;
  }
  t.min_key = prefix > t.min_key ? prefix : t.min_key;
}

// sample with top-k, top-p or min-p; a block per row.
KERNEL(row_threads, 1) sample_cut(const sample_args a) {
  begin();
  __shared__ row_memory m;
  i64 row = blockIdx.x;
  draw d = row_draw(a, row);
  tokens t = {(const float *)a.logits + row * a.stride, a.vocabulary, a.aligned != 0, d.temperature, 0.f, 0.f, min_number_key, -1};
  if (d.temperature > 0) {
    int k = a.top_k ? ((const int *)a.top_k)[row] : 0;
    float p = a.top_p ? ((const float *)a.top_p)[row] : 1.f;
    float min_p = a.min_p ? ((const float *)a.min_p)[row] : 0.f;
    if (min_p > 0) t.min_p = min_p < 1 ? min_p : 1.f;
    bool cut_k = k > 0 && k < a.vocabulary, cut_p = p < 1;
    if (cut_k || cut_p || t.min_p > 0) {
      u32 key = largest_key(t, m);
      if (key != 0) {
        t.top = __fdiv_rn(key_logit(key), d.temperature);
        // p 2^64 is exact, except below 1, where one token is enough anyway.
        u64 part = p > 0 && cut_p ? (u64)__fmul_rn(p, 18446744073709551616.f) : 0;
#pragma unroll 1
        for (int by_p = 0; by_p < 2; by_p++)
          if (by_p ? cut_p : cut_k) narrow(t, m, !by_p, (u64)k, part);
      }
    }
  }
  choice c = {0.f, -1};
  if (t.listed >= 0) {
    each(t, m, [&](int id, float v) {
      if (rank_key(t, id, v) < t.min_key) return;
      float four[4] = {v, v, v, v};
      c = draw4(c, four, 1u << id % 4, id / 4 * 4, d);
    });
  } else {
    for (int at = 4 * threadIdx.x; at < a.vocabulary; at += 4 * row_threads) {
      float v[4];
      int n = min(4, a.vocabulary - at);
      load4(v, t.logits, at, n, t.aligned);
      u32 kept = 0;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        bool keep = i < n && rank_key(t, at + i, v[i]) >= t.min_key && (t.min_p == 0 || likelihood(t, v[i]) >= t.min_p);
        kept |= (u32)keep << i;
      }
      if (kept) c = draw4(c, v, kept, at, d);
    }
  }
  c = block_best(c);
  if (threadIdx.x == 0) ((int *)a.out)[row] = c.id;
}

struct log_probs_args {
  u64 logits, tokens, sampled, top_ids, top, ranks;
  i64 stride;
  int vocabulary, n, aligned;  // n: up to digit_bins
};

// The log-softmax of a logit.
DEVICE float log_softmax(float v, float largest, double log_sum) {
  return (float)(v == largest ? -log_sum : (double)v - (double)largest - log_sum);
}

// A block per row.
KERNEL(row_threads, 1) log_probs(const log_probs_args a) {
  begin();
  __shared__ row_memory m;
  i64 row = blockIdx.x;
  tokens t = {(const float *)a.logits + row * a.stride, a.vocabulary, a.aligned != 0, 1.f, 0.f, 0.f, min_number_key, -1};
  float largest = key_logit(largest_key(t, m));  // NaN if no logit is a number
  float part = 0.f;
  each(t, m, [&](int, float v) { part = __fadd_rn(part, v == largest ? 1.f : exp_exact(__fadd_rn(v, -largest))); });
  double sum = part;
#pragma unroll
  for (int i = 16; i > 0; i >>= 1) sum += __shfl_xor_sync(all_lanes, sum, i);
  if (threadIdx.x % 32 == 0) m.sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0;
  for (int w = 0; w < row_threads / 32; w++) sum += m.sums[w];
  double log_sum = log(sum);
  if (threadIdx.x == 0) {
    u32 id = ((const u32 *)a.tokens)[row];
    float v = id < (u32)a.vocabulary ? t.logits[id] : key_logit(0);
    ((float *)a.sampled)[row] = log_softmax(v, largest, log_sum);
  }
  if (a.ranks) {
    u32 id = ((const u32 *)a.tokens)[row];
    float own = id < (u32)a.vocabulary ? t.logits[id] : key_logit(0);  // NaN: no logit reaches it
    int rank = 0;
    each(t, m, [&](int, float v) { rank += v >= own; });
    if (threadIdx.x == 0) m.count = 0;
    __syncthreads();
#pragma unroll
    for (int i = 16; i > 0; i >>= 1) rank += __shfl_xor_sync(all_lanes, rank, i);
    if (threadIdx.x % 32 == 0) atomicAdd(&m.count, rank);
    __syncthreads();
    if (threadIdx.x == 0) ((int *)a.ranks)[row] = m.count;
  }
  if (a.n == 0) return;

  narrow(t, m, true, (u64)a.n, 0);
  __syncthreads();
  if (threadIdx.x == 0) m.count = 0;
  __syncthreads();
  each(t, m, [&](int id, float v) {
    u64 p = rank_key(t, id, v);
    if (p >= t.min_key) m.rank_keys[atomicAdd(&m.count, 1)] = p;
  });
  __syncthreads();
  int *ids = (int *)a.top_ids + row * a.n;
  float *top = (float *)a.top + row * a.n;
  for (int i = threadIdx.x; i < a.n; i += row_threads) {
    if (i >= m.count) {
      ids[i] = -1, top[i] = __uint_as_float(0xff800000u);
      continue;
    }
    int rank = 0;
    for (int j = 0; j < m.count; j++) rank += m.rank_keys[j] > m.rank_keys[i];
    ids[rank] = a.vocabulary - 1 - (int)(u32)m.rank_keys[i];
    top[rank] = log_softmax(key_logit((u32)(m.rank_keys[i] >> 32)), largest, log_sum);
  }
}

// Arguments of adjust, and of restore, which uses a few of them.
struct adjust_args {
  u64 logits, starts, ids, seen, bias, repetition, presence, frequency, saved;
  i64 stride;
  int vocabulary, entries, parts;  // parts: blocks per row
};

// The entries of a row, without those outside of the lists.
DEVICE void row_entries(const adjust_args &a, i64 row, int &from, int &to) {
  from = max(((const int *)a.starts)[row], 0), to = min(((const int *)a.starts)[row + 1], a.entries);
}

// Block (row, part); a thread per entry.
KERNEL(256, 1) adjust(const adjust_args a) {
  begin();
  i64 row = blockIdx.x;
  float *logits = (float *)a.logits + row * a.stride;
  float repetition = ((const float *)a.repetition)[row], presence = ((const float *)a.presence)[row], frequency = ((const float *)a.frequency)[row];
  int from, to;
  row_entries(a, row, from, to);
  for (i64 i = from + (i64)blockIdx.y * 256 + threadIdx.x; i < to; i += (i64)a.parts * 256) {
    u32 id = ((const u32 *)a.ids)[i];
    if (id >= (u32)a.vocabulary) continue;
    float x = logits[id];
    ((float *)a.saved)[i] = x;
    int n = ((const int *)a.seen)[i];
    x = __fadd_rn(x, ((const float *)a.bias)[i]);
    if (n >= 0) x = x > 0 ? __fdiv_rn(x, repetition) : __fmul_rn(x, repetition);
    if (n > 0) x = __fadd_rn(__fadd_rn(x, -__fmul_rn(frequency, __int2float_rn(n))), -presence);
    logits[id] = x;
  }
}

// As adjust.
KERNEL(256, 1) restore(const adjust_args a) {
  begin();
  i64 row = blockIdx.x;
  float *logits = (float *)a.logits + row * a.stride;
  int from, to;
  row_entries(a, row, from, to);
  for (i64 i = from + (i64)blockIdx.y * 256 + threadIdx.x; i < to; i += (i64)a.parts * 256) {
    u32 id = ((const u32 *)a.ids)[i];
    if (id < (u32)a.vocabulary) logits[id] = ((const float *)a.saved)[i];
  }
}

struct mask_args {
  u64 logits, rows, allowed;
  i64 stride, words;                      // words of a row of allowed
  int count, vocabulary, parts, aligned;  // count: rows of logits; parts: blocks per row
};

// Block (listed row, part); a thread has four tokens at a time.
KERNEL(256, 2) mask_logits(const mask_args a) {
  begin();
  u32 row = ((const u32 *)a.rows)[blockIdx.x];
  if (row >= (u32)a.count) return;
  float *logits = (float *)a.logits + row * a.stride;
  const u32 *allowed = (const u32 *)a.allowed + blockIdx.x * a.words;
  float banned = __uint_as_float(0xff800000u);
  float4 four = {banned, banned, banned, banned};
  for (int at = 4 * ((int)blockIdx.y * 256 + (int)threadIdx.x); at < a.vocabulary; at += 4 * 256 * a.parts) {
    u32 bits = allowed[at / 32] >> at % 32 & 15;
    int n = min(4, a.vocabulary - at);
    if (bits == 0 && n == 4 && a.aligned) {
      *(float4 *)(logits + at) = four;
      continue;
    }
    for (int i = 0; i < n; i++)
      if (!(bits >> i & 1)) logits[at + i] = banned;
  }
}
