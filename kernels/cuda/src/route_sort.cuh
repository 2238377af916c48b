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

constexpr int most_routed = 128;               // experts of which a warp selects
constexpr int routed_each = most_routed / 32;  // consecutive experts of a lane

// The experts that Route selects for a row; in one warp. Returns those of the lane, a bit each; take gets the rank, and the
// expert, of each.
template <typename F>
DEVICE u32 top_experts(const route_args &r, i64 row, F take) {
  constexpr int each = routed_each;
  int lane = threadIdx.x % 32, score[each];
  u32 keys[each], mine = 0;
#pragma unroll
  for (int j = 0; j < each; j++) score[j] = load_early((const int *)r.logits + row * r.stride + min(lane * each + j, r.experts - 1));
#pragma unroll
  for (int j = 0; j < each; j++) {
    u32 key = score_key(__uint_as_float((u32)score[j]));
    keys[j] = lane * each + j < r.experts ? key : 0;
  }
#pragma unroll 1
  for (int i = 0; i < r.k; i++) {
    u32 top = keys[0];
#pragma unroll
    for (int j = 1; j < each; j++) top = keys[j] > top ? keys[j] : top;
    u32 best = __reduce_max_sync(all_lanes, top), have = __ballot_sync(all_lanes, top == best);
    bool open = (have & -have) == 1u << lane;  // of equal scores the lowest expert's
#pragma unroll
    for (int j = 0; j < each; j++) {
      bool it = open && keys[j] == best;
      if (it) take(i, lane * each + j);
      mine |= it ? 1u << j : 0;
      keys[j] = it ? 0 : keys[j];
      open = open && !it;
    }
  }
  return mine;
}

// Weights, ids and counts of a row whose experts are selected, 32 at most, with the bits of route; in one warp. ids has them by
// rank; before(e, i) is whether expert e has a rank below i. Loops are not unrolled: all of this runs once, and takes longest
// to bring its instructions.
template <typename F>
DEVICE void weigh(const route_args &r, i64 row, const unsigned char *ids, F before) {
  int lane = threadIdx.x % 32;
  const float *scores = (const float *)r.logits + row * r.stride;
  auto score = [&](int e) { return key_score(score_key(scores[e])); };
  // Lanes have the experts that they have in route, as sums depend on that.
  auto sum_of = [&](auto term) {
    float part = 0;
#pragma unroll 1
    for (int e = lane; e < r.experts; e += 32) part = __fadd_rn(part, term(e));
    return warp_sum(part);
  };
  int id = ids[min(lane, r.k - 1)];
  float m = score(ids[0]), weight = 0;
  if (r.method == sparse_method) {
#pragma unroll 1
    for (int i = 0; i < r.k; i++) {
      m = score(ids[i]);
      float sum = sum_of([&](int e) { return !before(e, i) && within_limit(r, m, score(e)) ? expf(score(e) - m) : 0.f; });
      if (lane == i) weight = 1.f / sum;
    }
  } else {
    weight = expf(score(id) - m) / sum_of([&](int e) { return expf(score(e) - m); });
  }
  if (r.method == renorm_method) {
    float chosen = 0;
#pragma unroll 1
    for (int i = 0; i < r.k; i++) chosen += __shfl_sync(all_lanes, weight, i);
    weight /= chosen;
  }
  if (lane < r.k) {
    ((int *)r.ids)[row * r.k + lane] = id;
    ((float *)r.weights)[row * r.k + lane] = weight;
    if (r.counts) atomicAdd((u64 *)r.counts + id, 1ull);
  }
}

struct route_sort_args {
  route_args route;
  u64 offsets, order, runs;  // runs: 0 for none
};

constexpr int run_pairs = 16;  // of one run at most

// How many runs pairs have.
DEVICE int runs_of(int pairs) { return (pairs + run_pairs - 1) / run_pairs; }

// Lists an expert's pairs: {expert, first pair, pairs, 0} for each run.
DEVICE void append_runs(u64 runs, int to, int expert, int first, int pairs) {
#pragma unroll 1
  for (; pairs > 0; first += run_pairs, pairs -= run_pairs)
    store_chunk((uint4 *)runs + to++, uint4{(u32)expert, (u32)first, (u32)min(pairs, run_pairs), 0});
}

// Clears the entries behind the first listed ones, of as many as all experts' pairs may have; in a warp.
DEVICE void end_runs(u64 runs, int listed, int experts, int pairs) {
  int most = min(experts, pairs);
  most += (pairs - most) / run_pairs;
#pragma unroll 1
  for (int i = listed + threadIdx.x % 32; i < most; i += 32) store_chunk((uint4 *)runs + i, uint4{0, 0, 0, 0});
}

constexpr int most_sorted = 32, most_selected = 32;  // rows of sort_rows, and experts of a row

// Shared memory of sort_rows.
struct sorted_rows {
  u32 chosen[most_routed];                        // of each expert, a bit for each row
  u32 ranks[most_sorted][most_routed / 4];        // of selected experts, a byte each, 255 of others
  unsigned char ids[most_sorted][most_selected];  // by rank
  int firsts[most_routed];                        // the first pair of each expert
};

// Routes up to 32 rows, which select 32 of 128 experts each at most, and sorts their pairs: a warp for each row, then a thread
// for each expert. All threads of a block call it, which has a warp for each row or more.
DEVICE void sort_rows(const route_sort_args &args, sorted_rows &m) {
  const route_args &a = args.route;
  launch_dependents();
  auto rank = [&](int row, int e) -> unsigned char & { return ((unsigned char *)m.ranks[row])[e]; };
  int lane = threadIdx.x % 32, row = threadIdx.x / 32, rows = (int)a.rows;
  for (int i = threadIdx.x; i < most_routed; i += blockDim.x) m.chosen[i] = 0;
  for (int i = threadIdx.x; i < rows * (most_routed / 4); i += blockDim.x) (&m.ranks[0][0])[i] = ~0u;
  __syncthreads();
  wait_dependencies();
  if (row < rows) {
    top_experts(a, row, [&](int i, int e) {
      rank(row, e) = (unsigned char)i, m.ids[row][i] = (unsigned char)e;
      atomicAdd(&m.chosen[e], 1u << row);
    });
    __syncwarp();
    weigh(a, row, m.ids[row], [&](int e, int i) { return rank(row, e) < i; });
  }
  __syncthreads();
  if (row == 0) {
    int sum = 0;  // of pairs, and of runs in the upper half
#pragma unroll
    for (int j = 0; j < routed_each; j++) {
      int n = __popc(m.chosen[lane * routed_each + j]);
      sum += n + (runs_of(n) << 16);
    }
    int up_to = prefix_sum(sum);
    int first = (up_to - sum) & 0xffff, to = (up_to - sum) >> 16, all = __shfl_sync(all_lanes, up_to, 31);
#pragma unroll
    for (int j = 0; j < routed_each; j++) {
      int e = lane * routed_each + j, n = __popc(m.chosen[e]);
      if (e < a.experts) ((int *)args.offsets)[e] = m.firsts[e] = first;
      if (args.runs) append_runs(args.runs, to, e, first, n);
      first += n, to += runs_of(n);
    }
    if (lane == 0) ((int *)args.offsets)[a.experts] = all & 0xffff;
    if (args.runs) end_runs(args.runs, all >> 16, a.experts, rows * a.k);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < a.experts; e += blockDim.x) {
    int *to = (int *)args.order + m.firsts[e];
#pragma unroll 1
    for (u32 left = m.chosen[e]; left; left &= left - 1) {
      int of = __popc((left & -left) - 1);
      *to++ = of * a.k + rank(of, e);
    }
  }
}
