// The router's top-k with the sort of few pairs, for kernels that do other work beside it, too.

struct route_args {
  u64 logits, ids, weights, counts;  // counts: 0 for none
  i64 stride, rows;
  int experts, k, method;
  float limit;  // sparsemixer: twice the jitter
};

enum { softmax_method, renorm_method, sparse_method };

// Maps a score's bits to an integer of the same order: NaN is 1, below all scores, and 0 marks
// an expert already selected. Both zeros are equal.
DEVICE u32 score_key(float s) {
  if (s != s) return 1;
  u32 b = __float_as_uint(s + 0.f);
  return b >> 31 ? ~b : b | 0x80000000u;
}

// The score of a key. Of zeros it is +0, which has the same effect as -0.
DEVICE float key_score(u32 key) { return __uint_as_float(key >> 31 ? key & 0x7fffffff : ~key); }

// Whether a score is within the limit of sparsemixer of the largest one, m.
DEVICE bool within_limit(const route_args &a, float m, float s) { return !((m - s) / fmaxf(fabsf(s), m) > a.limit); }

struct route_sort_args {
  route_args route;
  u64 offsets, order, runs;  // runs: 0 for none
};

// Lists the experts of a warp's lanes that have pairs behind the first listed ones, and returns how many are
// listed then: {expert, first, pairs, 0} each.
DEVICE int append_runs(u64 runs, int listed, int expert, int first, int pairs) {
  u32 here = __ballot_sync(all_lanes, pairs > 0);
  int to = listed + __popc(here & ((1u << threadIdx.x % 32) - 1));
  if (pairs > 0) store_chunk((uint4 *)runs + to, uint4{(u32)expert, (u32)first, (u32)pairs, 0});
  return listed + __popc(here);
}

// Clears the entries behind the first listed ones; in a warp.
DEVICE void end_runs(u64 runs, int listed, int most) {
#pragma unroll 1
  for (int i = listed + threadIdx.x % 32; i < most; i += 32) store_chunk((uint4 *)runs + i, uint4{0, 0, 0, 0});
}

// Routes few rows and sorts their pairs, in one block with a thread for each row and expert, in
// whole warps of a row, and any number of warps more: a thread counts the experts that are selected
// before its own. Weights have the bits of route. Shared memory, in words: keys and terms of a sum
// of each thread; of each pair its expert, its key and its weight; for each 32 pairs the number of
// each expert's, then of those before; the first pair of each expert.
DEVICE void route_and_sort(const route_sort_args &args, unsigned char *memory) {
  launch_dependents();
  const route_args &a = args.route;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rows = (int)a.rows, across = (a.experts + 31) / 32;  // warps of a row
  int row = min(warp / across, rows - 1);  // warps that are too many read the last one's
  int group = warp % across, expert = group * 32 + lane, threads = blockDim.x;
  int pairs = rows * a.k, parts = (pairs + 31) / 32, first = row * a.k;
  u32 *keys = (u32 *)memory, *best = keys + threads;
  float *terms = (float *)(best + pairs), *weights = terms + threads;
  int *ids = (int *)(weights + pairs), *counts = ids + pairs, *firsts = counts + parts * a.experts;
#pragma unroll 1
  for (int i = threadIdx.x; i < parts * a.experts; i += threads) counts[i] = 0;
  wait_dependencies();
  bool there = expert < a.experts && warp < rows * across;
  u32 key = there ? score_key(((const float *)a.logits)[row * a.stride + expert]) : 0;
  float score = key_score(key);
  keys[threadIdx.x] = key;
  __syncthreads();

  int rank = 0;
#pragma unroll 1
  for (int g = 0; g < across; g++) {
    const u32 *others = keys + (row * across + g) * 32;
    u32 upper = key, lower = g <= group ? key - 1 : key;  // of equal keys the lower experts are selected before
    int until = g == group ? lane : 32;
#pragma unroll 16
    for (int i = 0; i < 32; i++) rank += others[i] > (i < until ? lower : upper);
  }
  bool selected = there && rank < a.k;
  int pair = first + rank;
  if (selected) ids[pair] = expert, best[pair] = key;
  __syncthreads();

  // The sum over a row, in the order of route; in all of its threads.
  auto sum_of = [&](float term) {
    __syncthreads();  // the previous terms have been read
    terms[threadIdx.x] = term;
    __syncthreads();
    float part = 0;
#pragma unroll 1
    for (int g = 0; g < across; g++) part += terms[(row * across + g) * 32 + lane];
    return warp_sum(part);
  };
  float weight = 0;
  if (a.method == sparse_method) {
#pragma unroll 1
    for (int i = 0; i < a.k; i++) {
      float m = key_score(best[first + i]);
      float sum = sum_of(there && rank >= i && within_limit(a, m, score) ? expf(score - m) : 0.f);
      if (rank == i) weight = 1.f / sum;
    }
  } else {
    float term = there ? expf(score - key_score(best[first])) : 0.f;
    weight = term / sum_of(term);
  }
  if (a.method == renorm_method) {
    if (selected) weights[pair] = weight;
    __syncthreads();
    float chosen = 0;
#pragma unroll 2
    for (int i = 0; i < a.k; i++) chosen += weights[first + i];
    weight /= chosen;
  }
  if (selected) {
    ((int *)a.ids)[pair] = expert;
    ((float *)a.weights)[pair] = weight;
    if (a.counts) atomicAdd((u64 *)a.counts + expert, 1ull);
  }

  // From here on a thread is a pair.
  pair = threadIdx.x;
  int id = pair < pairs ? ids[pair] : -1;
  u32 same = 0;  // lanes with the same expert
  if (warp < parts) {
#pragma unroll 8
    for (int i = 0; i < 32; i++) same |= (u32)(__shfl_sync(all_lanes, id, i) == id) << i;
  }
  int before = __popc(same & ((1u << lane) - 1));
  if (id >= 0 && before == 0) counts[warp * a.experts + id] = __popc(same);
  __syncthreads();
#pragma unroll 1
  for (int e = threadIdx.x; e < a.experts; e += threads) {
    int sum = 0;
#pragma unroll 1
    for (int i = 0; i < parts; i++) {
      int n = counts[i * a.experts + e];
      counts[i * a.experts + e] = sum;
      sum += n;
    }
    firsts[e] = sum;
  }
  __syncthreads();
  if (warp == 0) {
    int sum = 0, listed = 0;
#pragma unroll 1
    for (int from = 0; from < a.experts; from += 32) {
      int e = from + lane, n = e < a.experts ? firsts[e] : 0, up_to = n;
#pragma unroll
      for (int j = 1; j < 32; j <<= 1) {
        int v = __shfl_up_sync(all_lanes, up_to, j);
        if (lane >= j) up_to += v;
      }
      int begin = sum + up_to - n;
      if (e < a.experts) firsts[e] = ((int *)args.offsets)[e] = begin;
      if (args.runs) listed = append_runs(args.runs, listed, e, begin, n);
      sum += __shfl_sync(all_lanes, up_to, 31);
    }
    if (lane == 0) ((int *)args.offsets)[a.experts] = sum;
    if (args.runs) end_runs(args.runs, listed, min(a.experts, pairs));
  }
  __syncthreads();
  if (id >= 0) ((int *)args.order)[firsts[id] + counts[warp * a.experts + id] + before] = pair;
}
