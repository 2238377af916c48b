// The router's top-k, and sorting pairs by expert.

// One warp per row.
KERNEL(128, 1) route(const route_args a) {
  begin();
  DYNAMIC_SHARED(memory);
  int lane = threadIdx.x % 32;
  i64 row = (i64)blockIdx.x * 4 + threadIdx.x / 32;
  if (row >= a.rows) return;  // whole warps exit; no block barrier follows
  u32 *keys = (u32 *)memory + threadIdx.x / 32 * a.experts;
  const float *scores = (const float *)a.logits + row * a.stride;
  int *ids = (int *)a.ids + row * a.k;
  float *weights = (float *)a.weights + row * a.k;
  for (int e = lane; e < a.experts; e += 32) keys[e] = score_key(scores[e]);
  __syncwarp();

  float largest = 0, sum = 1, chosen = 0;
  for (int i = 0; i < a.k; i++) {
    u32 mine = 0, at = 0xffffffffu;  // this lane's largest key, and the lowest expert that has it
    for (int e = lane; e < a.experts; e += 32)
      if (keys[e] > mine) mine = keys[e], at = e;
    u32 best = __reduce_max_sync(all_lanes, mine);
    int id = (int)__reduce_min_sync(all_lanes, mine == best ? at : 0xffffffffu);
    float m = key_score(best), weight;
    if (a.method == sparse_method) {
      // Softmax over the experts not selected before that are within the limit of m.
      float part = 0;
      for (int e = lane; e < a.experts; e += 32)
        if (keys[e] != 0 && within_limit(a, m, key_score(keys[e]))) part += expf(key_score(keys[e]) - m);
      weight = 1.f / warp_sum(part);
    } else {
      if (i == 0) {
        float part = 0;
        for (int e = lane; e < a.experts; e += 32) part += expf(key_score(keys[e]) - m);
        largest = m;
        sum = warp_sum(part);
      }
      weight = expf(m - largest) / sum;
      chosen += weight;
    }
    __syncwarp();  // the keys have been read
    if (lane == 0) {
      keys[id] = 0;
      ids[i] = id;
      weights[i] = weight;
      if (a.counts) atomicAdd((u64 *)a.counts + id, 1ull);
    }
    __syncwarp();
  }
  if (a.method == renorm_method)
    for (int i = lane; i < a.k; i += 32) weights[i] /= chosen;
}

// Both for few rows, see sort_rows.
KERNEL(1024, 1) route_sort(const route_sort_args a) {
  __shared__ sorted_rows memory;
  sort_rows(a, memory);
}

struct sort_args {
  u64 ids, offsets, order;
  i64 pairs;
  int experts;
};

// One block of 32 warps per expert, each warp with a contiguous part of the pairs. The first
// pass counts the pairs of lower experts and of this one, the second writes the order.
KERNEL(1024, 1) group(const sort_args a) {
  begin();
  __shared__ int lower[32], equal[32];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u32 expert = blockIdx.x;
  const u32 *ids = (const u32 *)a.ids;
  i64 stretch = (a.pairs + 1023) / 1024 * 32;
  i64 from = warp * stretch < a.pairs ? warp * stretch : a.pairs;
  i64 to = from + stretch < a.pairs ? from + stretch : a.pairs;
  int less = 0, same = 0;
#pragma unroll 4
  for (i64 p = from + lane; p < to; p += 32) {
    u32 id = ids[p];  // as unsigned, negative ids are above all experts
    less += id < expert;
    same += id == expert;
  }
#pragma unroll
  for (int i = 16; i > 0; i >>= 1) {
    less += __shfl_xor_sync(all_lanes, less, i);
    same += __shfl_xor_sync(all_lanes, same, i);
  }
  if (lane == 0) lower[warp] = less, equal[warp] = same;
  __syncthreads();
  int begin = 0, before = 0, all = 0;
  for (int w = 0; w < 32; w++) {
    begin += lower[w];
    before += w < warp ? equal[w] : 0;
    all += equal[w];
  }
  if (threadIdx.x == 0) {
    ((int *)a.offsets)[expert] = begin;
    if (expert == a.experts - 1) ((int *)a.offsets)[a.experts] = begin + all;
  }
  int *order = (int *)a.order + begin + before;
#pragma unroll 4
  for (i64 p = from; p < to; p += 32) {
    bool hit = p + lane < to && ids[p + lane] == expert;
    u32 hits = __ballot_sync(all_lanes, hit);
    if (hit) order[__popc(hits & ((1u << lane) - 1))] = (int)(p + lane);
    order += __popc(hits);
  }
}

// The same for few pairs: a block of one warp per expert.
KERNEL(32, 1) group_few(const sort_args a) {
  begin();
  int lane = threadIdx.x;
  u32 expert = blockIdx.x;
  const u32 *ids = (const u32 *)a.ids;
  int less = 0, same = 0;
#pragma unroll 4
  for (i64 p = lane; p < a.pairs; p += 32) {
    u32 id = ids[p];
    less += id < expert;
    same += id == expert;
  }
#pragma unroll
  for (int i = 16; i > 0; i >>= 1) {
    less += __shfl_xor_sync(all_lanes, less, i);
    same += __shfl_xor_sync(all_lanes, same, i);
  }
  if (lane == 0) {
    ((int *)a.offsets)[expert] = less;
    if (expert == a.experts - 1) ((int *)a.offsets)[a.experts] = less + same;
  }
  int *order = (int *)a.order + less;
  for (i64 p = 0; p < a.pairs; p += 32) {
    bool hit = p + lane < a.pairs && ids[p + lane] == expert;
    u32 hits = __ballot_sync(all_lanes, hit);
    if (hit) order[__popc(hits & ((1u << lane) - 1))] = (int)(p + lane);
    order += __popc(hits);
  }
}

struct runs_args {
  u64 offsets, runs;
  int experts, pairs;
};

// Lists the experts with pairs as route_sort does, behind group and group_few; in one warp.
KERNEL(32, 1) runs(const runs_args a) {
  begin();
  const int *offsets = (const int *)a.offsets;
  int listed = 0;
  for (int from = 0; from < a.experts; from += 32) {
    int e = from + threadIdx.x, first = e < a.experts ? offsets[e] : 0, pairs = e < a.experts ? offsets[e + 1] - first : 0;
    int up_to = prefix_sum(runs_of(pairs));
    append_runs(a.runs, listed + up_to - runs_of(pairs), e, first, pairs);
    listed += __shfl_sync(all_lanes, up_to, 31);
  }
  end_runs(a.runs, listed, a.experts, a.pairs);
}
