// Grouped GEMM of a layer's experts on the tensor cores of sm_90a (wgmma), as a persistent
// kernel: M are weight rows, N are tokens.
//
// An expert is stored in units of 64 weight rows: for every 64 elements of the inner dimension
// (K) a tile of 8 KiB, 64 rows of 128 bytes, in the 128-byte swizzle of the tensor cores. So a
// block streams weights in address order by bulk copies. For the gate/up projection, rows of
// tokens are gathered by 16-byte copies; for the down projection the rows of an expert are
// contiguous and are loaded as tiles by TMA. Each block computes every gridDim.x-th tile of
// (weights, tokens), and its loads run ahead of the MMAs across tiles.
//
// Every element is accumulated over K in ascending order, 16 elements at a time, for any tile,
// so the number of tokens does not change a bit of any token's result.
//
// Kernels for few tokens (few) read the runs that the router has listed (Runs of kernels.Route):
// experts with pairs, once for each tile of tokens. The others make such a list first. Routed kernels select the experts
// of one token, or of up to eight, themselves, while one block writes what the router does.

struct expert_args {
  tensor_map x_rows;       // down projection: tiles of max_tokens rows of X
  u64 x, out, offsets, order, slots, experts;
  i64 x_stride, out_stride;
  i64 start;               // bytes of the extent before the first tile
  int units, steps;        // units of 64 weight rows; k-steps of 64 elements of inner
  int tiles;               // of a unit: steps, or more if the product has a part of inner
  int listed, experts_all;
  int top_k;               // gate/up projection: a pair's row of X is pair / top_k
  int max_tokens, stages;        // tokens of a tile, a multiple of 16; stages of the pipeline
  int lists_ready;               // what selects experts (lists, or with routed the scores) was complete when the preceding kernel let this one start
  int most_runs;                 // few: entries of runs
  u64 runs;                      // few: {expert, first pair, pairs, 0} each, zeros behind the last
};

// run is the tiles of one expert, which have consecutive indices.
struct run {
  u64 weights;
  int end, first, rows, parts;  // end: one past its last tile; parts: token tiles
};

// Lists the experts that have tokens, with across tiles for each a.max_tokens of them, and returns the
// number of tiles; in warp 0. The loads of 128 experts are in flight at once: 32 after another took 2 us
// longer in each of a layer's two kernels with 128 experts.
DEVICE int list_runs(const expert_args &a, run *runs, int across) {
  constexpr int at_once = 4;
  int lane = threadIdx.x, tiles = 0, n = 0;
#pragma unroll 1
  for (int from = 0; from < a.listed; from += 32 * at_once) {
    int id[at_once];
    run e[at_once];
#pragma unroll
    for (int j = 0; j < at_once; j++) {
      int i = from + j * 32 + lane;
      id[j] = i < a.listed ? load_early((const int *)a.experts + i) : -1;
    }
#pragma unroll
    for (int j = 0; j < at_once; j++) {
      e[j] = {0, 0, 0, 0, 0};
      if (id[j] >= 0 && id[j] < a.experts_all) {
        e[j].weights = load_early((const u64 *)a.slots + id[j]);
        e[j].first = load_early((const int *)a.offsets + id[j]);
        e[j].rows = load_early((const int *)a.offsets + id[j] + 1);
      }
    }
#pragma unroll
    for (int j = 0; j < at_once; j++) {
      if (from + j * 32 >= a.listed) break;
      run &now = e[j];
      now.weights += a.start;
      now.rows -= now.first;
      if (now.rows > 0) {
        now.parts = (now.rows + a.max_tokens - 1) / a.max_tokens;
        now.end = now.parts * across;
      }
      u32 here = __ballot_sync(all_lanes, now.rows > 0);
#pragma unroll
      for (int d = 1; d < 32; d <<= 1) {
        int v = __shfl_up_sync(all_lanes, now.end, d);
        if (lane >= d) now.end += v;
      }
      now.end += tiles;
      tiles = __shfl_sync(all_lanes, now.end, 31);
      if (now.rows > 0) runs[n + __popc(here & ((1u << lane) - 1))] = now;
      n += __popc(here);
    }
  }
  return tiles;
}

// The same with half as many instructions, for kernels that have few tokens and many experts: one prefix sum over the lanes, each of
// which has four of 128 experts, counts their tiles and, in its lowest byte, the experts with tokens. The other kernels are
// slower with it.
DEVICE int list_few_runs(const expert_args &a, run *runs, int across) {
  constexpr int each = 4;
  int lane = threadIdx.x, tiles = 0, n = 0;
#pragma unroll 1
  for (int from = 0; from < a.listed; from += 32 * each) {
    run e[each];
    u32 mine = 0;
#pragma unroll
    for (int j = 0; j < each; j++) {
      int i = from + j * 32 + lane, id = i < a.listed ? load_early((const int *)a.experts + i) : -1;
      e[j] = {0, 0, 0, 0, 0};
      if (id >= 0 && id < a.experts_all) {
        e[j].weights = load_early((const u64 *)a.slots + id);
        e[j].first = load_early((const int *)a.offsets + id);
        e[j].rows = load_early((const int *)a.offsets + id + 1);
      }
    }
#pragma unroll
    for (int j = 0; j < each; j++) {
      e[j].weights += a.start;
      e[j].rows -= e[j].first;
      e[j].parts = 1;  // without the instructions of a division
#pragma unroll 1
      while (e[j].parts * a.max_tokens < e[j].rows) e[j].parts++;
      if (e[j].rows > 0) mine += (u32)(e[j].parts * across) << 8 | 1;
      e[j].end = (int)(mine >> 8);
    }
    u32 up_to = mine;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      u32 v = __shfl_up_sync(all_lanes, up_to, d);
      if (lane >= d) up_to += v;
    }
    u32 before = up_to - mine;
    run *to = runs + n + (before & 255);
#pragma unroll
    for (int j = 0; j < each; j++) {
      if (e[j].rows <= 0) continue;
      e[j].end += tiles + (int)(before >> 8);
      *to++ = e[j];
    }
    u32 all = __shfl_sync(all_lanes, up_to, 31);
    tiles += (int)(all >> 8), n += all & 255;
  }
  return tiles;
}

struct routed_expert_args {
  expert_args expert;
  route_sort_args route;
};

constexpr int most_routed_rows = 8, most_routed_pairs = 64;  // tokens, and (token, expert) pairs

// The experts that Route selects for at most that many tokens, ascending, in shared memory of each block. For one token the
// list is less code, which each launch brings from L2 anew.
template <int rows>
struct selection {};

template <>
struct selection<1> {
  const int *list;
  int k;

  DEVICE static void select(const route_args &r, int *list) {
    u32 mine = top_experts(r, 0, [](int, int) {});
    int lane = threadIdx.x % 32, at = 0;
#pragma unroll
    for (int j = 0; j < routed_each; j++) at += __popc(__ballot_sync(all_lanes, mine >> j & 1) & ((1u << lane) - 1));
#pragma unroll
    for (int j = 0; j < routed_each; j++)
      if (mine >> j & 1) list[at++] = lane * routed_each + j;
  }

  // The entry of a run, as sort_rows writes it, and the row of a pair.
  DEVICE uint4 entry(int run) const {
    if (run < k) return {(u32)list[run], (u32)run, 1, 0};
    return {0, 0, 0, 0};
  }
  DEVICE int row(int) const { return 0; }
};

// What Route selects for up to eight tokens.
struct alignas(16) routed_lists {
  u32 selected[most_routed_rows][4];        // of each token: bit l of word j is expert 4 l + j
  u32 runs[most_routed_pairs];              // {expert, first pair, pairs} in 8, 8 and 16 bits, zeros behind the last
  unsigned char tokens[most_routed_pairs];  // of the pairs sorted by expert
};

template <>
struct selection<most_routed_rows> {
  const routed_lists *lists;

  DEVICE uint4 entry(int run) const {
    u32 e = run < most_routed_pairs ? lists->runs[run] : 0;
    return {e & 255, e >> 8 & 255, e >> 16, 0};
  }
  DEVICE int row(int pair) const { return lists->tokens[pair]; }
};

// Shared memory of the block that writes what Route does, in place of stages. Of several tokens each has most_routed_pairs / 2
// experts at most.
struct routed_ranks {
  unsigned char rank[most_routed_rows][most_routed];           // of selected experts
  unsigned char ids[most_routed_rows][most_routed_pairs / 2];  // by rank
};

// Selects the experts of all tokens, one in each warp, whose lanes have consecutive experts, and lists them; with
// lists_tokens also the tokens of pairs. With routes it also writes what Route does.
template <bool lists_tokens>
DEVICE void select_experts(const route_sort_args &args, routed_lists &l, bool routes, unsigned char *memory) {
  constexpr int each = routed_each;
  const route_args &r = args.route;
  routed_ranks &ranks = *(routed_ranks *)memory;
  int lane = threadIdx.x % 32, row = threadIdx.x / 32, rows = (int)r.rows;
  if (row < rows) {
    u32 mine = top_experts(r, row, [&](int i, int e) {
      if (routes) ranks.rank[row][e] = (unsigned char)i, ranks.ids[row][i] = (unsigned char)e;
    });
#pragma unroll
    for (int j = 0; j < each; j++) {
      u32 word = __ballot_sync(all_lanes, mine >> j & 1);
      if (lane == 0) l.selected[row][j] = word;
    }
  }
  __syncthreads();
  if (row == 0) {
    u32 tokens = 0;  // those that have selected each of the lane's experts, in eight bits each
#pragma unroll 1
    for (int t = 0; t < rows; t++) {
      uint4 words = *(const uint4 *)l.selected[t];
      tokens |= ((words.x >> lane & 1) | (words.y >> lane & 1) << 8 | (words.z >> lane & 1) << 16 | (words.w >> lane & 1) << 24) << t;
    }
    int sum = __popc(tokens);  // of pairs, and of experts in the upper half
#pragma unroll
    for (int j = 0; j < each; j++) sum += (tokens >> 8 * j & 255) != 0 ? 1 << 16 : 0;
    int up_to = prefix_sum(sum);
    int first = (up_to - sum) & 0xffff, to = (up_to - sum) >> 16, all = __shfl_sync(all_lanes, up_to, 31);
#pragma unroll 1
    for (int j = 0; j < each; j++, tokens >>= 8) {
      int e = lane * each + j, n = __popc(tokens & 255);
      if (routes && e < r.experts) ((int *)args.offsets)[e] = first;
      if (n == 0) continue;
      if (routes) store_chunk((uint4 *)args.runs + to, uint4{(u32)e, (u32)first, (u32)n, 0});
      l.runs[to++] = e | first << 8 | n << 16;
      if constexpr (lists_tokens) {
#pragma unroll 1
        for (u32 left = tokens & 255; left; left &= left - 1) {
          int t = __popc((left & -left) - 1);
          if (routes) ((int *)args.order)[first] = t * r.k + ranks.rank[t][e];
          l.tokens[first++] = (unsigned char)t;
        }
      } else {
        first += n;
      }
    }
#pragma unroll 1
    for (int i = (all >> 16) + lane; i < most_routed_pairs; i += 32) l.runs[i] = 0;
    if (routes) {
      if (lane == 0) ((int *)args.offsets)[r.experts] = all & 0xffff;
      end_runs(args.runs, all >> 16, r.experts, rows * r.k);
    }
  }
  if (routes) {
    if (row < rows) weigh(r, row, ranks.ids[row], [&](int e, int i) { return (l.selected[row][e % 4] >> e / 4 & 1) && ranks.rank[row][e] < i; });
    fence_shared();  // before the copies of weights that take the memory of ranks
  }
  __syncthreads();
}

// The approximate division is accurate to about 1e-7, far below the rounding of the result.
DEVICE float silu_fast(float x) { return __fmul_rn(x, reciprocal_fast(__fadd_rn(1.f, exp2_fast(__fmul_rn(x, -1.44269504f))))); }

// groups consumer warpgroups multiply blocks units of weights each, by up to max_tokens tokens;
// a stage of the pipeline has steps_per_stage k-steps. once: weights need not stay in L2. routed: the most tokens for which the
// kernel selects the experts itself, 0 if it does not.
template <bool up, int groups, int blocks, int max_tokens, int steps_per_stage, bool once, bool few, int routed>
struct expert_product {
  static constexpr int tile_units = groups * blocks;
  static constexpr int producers = 128;
  static constexpr int threads = producers + 128 * groups;
  static constexpr int rows_each = max_tokens / 16;  // maximum rows that a producer thread loads
  // An expert's tokens are divided into parts of equal size, up to a multiple of grain. A grain
  // of 8 pads less; gate/up is still faster with 16.
  static constexpr int grain = up ? 16 : 8;

  const expert_args &a;
  ring r;
  run *runs;         // not with few
  const u64 *slots;  // with few: all experts' slots, in shared memory
  int across;
  u64 policy;  // of weights in L2, with once
  int run_step, unit_step;     // with few: from a tile of the block to the next
  selection<routed> selected;  // with routed, which is the most tokens

  // A tile of weights and tokens.
  struct tile {
    u64 weights;
    int unit, units, first, tokens;  // first: first token, in order
  };

  // Where the search for a block's next tile starts: the run. With few that tile itself: its run, of which it is the
  // unit-th tile, and the entry of the run, which is loaded ahead.
  struct place {
    int run, unit;
    uint4 entry;
  };

  // Whether the kernel in front (route_down) neither writes what this one reads nor uses what it writes, and may run
  // beside it: gate/up with lists_ready. What this one reads early it reads past L1, as its own wait is behind.
  DEVICE bool complete() const { return routed && up && a.lists_ready; }

  // The entry of a tile's run, zeros behind the last one.
  DEVICE uint4 entry(int run) const {
    if constexpr (routed) return selected.entry(run);
    if (run < a.most_runs) return load_streaming((const uint4 *)a.runs + run);
    return {0, 0, 0, 0};
  }

  // Whether there is a tile of that index, from the block's own on and increasing from call to call, and
  // which.
  DEVICE bool next(int index, int count, place &at, tile &t) const {
    if constexpr (few) {
      uint4 e = at.entry;
      if (e.z == 0) return false;
      int unit = at.unit * tile_units;
      t = {slots[e.x] + a.start + (i64)unit * a.tiles * unit_bytes, unit, tile_units == 1 ? 1 : min(tile_units, a.units - unit), (int)e.y, (int)e.z};
      at.run += run_step;
      at.unit += unit_step;
      if (at.unit >= across) at.unit -= across, at.run++;
      at.entry = entry(at.run);
      return true;
    } else {
      if (index >= count) return false;
      t = find(index, at.run);
      return true;
    }
  }

  // Returns the tile with that index, which increases from call to call; at is the run to start
  // the search from.
  DEVICE tile find(int index, int &at) const {
    while (index >= runs[at].end) at++;
    const run e = runs[at];
    int i = index - (e.end - e.parts * across);
    if (e.parts == 1)  // without the instructions of divisions
      return {e.weights + (i64)i * tile_units * a.tiles * unit_bytes, i * tile_units, min(tile_units, a.units - i * tile_units), e.first, e.rows};
    int column = i / e.parts, unit = column * tile_units;
    // If a block would compute the same part of every column of tiles, it takes the next part
    // in turn, so that all blocks have equal work.
    int rotation = column * e.parts / (int)gridDim.x * (e.parts + 1 - (int)gridDim.x % e.parts);
    int part = (i + rotation) % e.parts;
    int all = (e.rows + grain - 1) / grain, each = all / e.parts, longer = all % e.parts;
    int token = (part * each + min(part, longer)) * grain;
    return {e.weights + (i64)unit * a.tiles * unit_bytes, unit, min(tile_units, a.units - unit), e.first + token,
            min((each + (part < longer)) * grain, e.rows - token)};
  }

  // Starts the load of a stage's weights, from k-step k on; in one thread.
  DEVICE void load_weights(const tile &t, int k, int slot) const {
    unsigned char *stage = r.memory + slot * steps_per_stage * r.step_bytes;
    int steps = min(steps_per_stage, a.steps - k);
    barrier_expect(&r.full[slot], t.units * steps * unit_bytes);
    auto copy = [&](int u, int s) {
      copy_bulk<once>(stage + s * r.step_bytes + u * unit_bytes, (const char *)t.weights + ((i64)u * a.tiles + k + s) * unit_bytes, unit_bytes,
                      &r.full[slot], policy);
    };
    if constexpr (few) {  // without the instructions of loops
#pragma unroll
      for (int u = 0; u < tile_units; u++)
#pragma unroll
        for (int s = 0; s < steps_per_stage; s++)
          if (u < t.units && s < steps) copy(u, s);
    } else {
      for (int u = 0; u < t.units; u++)
        for (int s = 0; s < steps; s++) copy(u, s);
    }
  }

  // Starts the load of a stage's tokens, from k-step k on; in one thread, for the down
  // projection.
  DEVICE void load_tokens(const tile &t, int k, int slot) const {
    unsigned char *stage = r.memory + slot * steps_per_stage * r.step_bytes + tile_units * unit_bytes;
    int steps = min(steps_per_stage, a.steps - k);
    barrier_expect(&r.full[slot], steps * a.max_tokens * 128);
    for (int s = 0; s < steps; s++) copy_tile(stage + s * r.step_bytes, &a.x_rows, (k + s) * 64, t.first, &r.full[slot]);
  }

  // Producer: one thread for the down projection, else all producer threads.
  DEVICE void produce(int count, place at) {
    int chunk = threadIdx.x & 7, lead = threadIdx.x >> 3;
    tile t;
    int loaded = 0;  // k-steps of the first tile whose weights are loaded before X is complete
    if (!up) prefetch_map(&a.x_rows);
    if (few || a.lists_ready) {  // with few also behind the wait: before the tokens are looked up
      place first = at;
      if (threadIdx.x == 0 && next(blockIdx.x, count, first, t)) {
        for (int slot = 0; slot < r.stages && loaded < a.steps; slot++, loaded += steps_per_stage) load_weights(t, loaded, slot);
      }
      if (!complete()) wait_dependencies();
    }
    pipeline_state now = {0, 1};
    int to = tile_units * unit_bytes + lead * 128 + ((chunk ^ (lead & 7)) << 4);
    for (int index = blockIdx.x; next(index, count, at, t); index += gridDim.x) {
      const u16 *rows[rows_each];
      auto load = [&](int k) {
        unsigned char *stage = r.memory + now.slot * steps_per_stage * r.step_bytes;
        int steps = min(steps_per_stage, a.steps - k);
        barrier_wait(&r.empty[now.slot], now.parity);
        if (threadIdx.x == 0 && (index != blockIdx.x || k >= loaded)) load_weights(t, k, now.slot);
        if (!up) {
          load_tokens(t, k, now.slot);
          advance(r, now);
          return;
        }
        if (k == 0) {  // looked up while the first weights are in flight
#pragma unroll
          for (int i = 0; i < rows_each; i++) {
            rows[i] = 0;
            if (lead + i * 16 < t.tokens) {
              int pair = t.first + lead + i * 16;
              i64 row;
              if constexpr (routed)
                row = selected.row(pair);
              else
                row = ((const int *)a.order)[pair] / a.top_k;
              rows[i] = (const u16 *)a.x + row * a.x_stride + chunk * 8;
            }
          }
        }
#pragma unroll
        for (int s = 0; s < steps_per_stage; s++)
#pragma unroll
          for (int i = 0; i < rows_each; i++)
            if (lead + i * 16 < t.tokens && s < steps) copy_async(stage + s * r.step_bytes + to + i * 16 * 128, rows[i] + (k + s) * 64, 16);
        barrier_arrive_after_copies(&r.full[now.slot]);
        advance(r, now);
      };
      if constexpr (few) {
#pragma unroll 1
        for (int k = 0; k < a.steps; k += steps_per_stage) load(k);
      } else {
        for (int k = 0; k < a.steps; k += steps_per_stage) load(k);
      }
    }
  }

  // Consumer: one tile, with room for that many tokens.
  template <int tokens>
  DEVICE void multiply(const tile &t, int group, pipeline_state &now) const {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
    int pairs[(tokens + 31) / 32];  // down projection: pairs of every 32nd token, loaded while the tensor cores work
#pragma unroll
    for (int i = 0; !up && i < (tokens + 31) / 32; i++) {
      int token = i * 32 + lane;
      pairs[i] = token < t.tokens ? ((const int *)a.order)[t.first + token] : 0;
    }
    float d[blocks][tokens / 2] = {};
    multiply_steps<tokens, blocks, tile_units, steps_per_stage>(d, r, a.steps, group * blocks, now);

    // Epilogue: a lane has two (down: four) neighboring columns of one token.
    constexpr int unit_columns = up ? 32 : 64;
    int first = group * blocks;
    u16 *out = (u16 *)a.out + (t.unit + first) * unit_columns + (up ? warp * 8 + (lane & 3) * 2 : warp * 16 + (lane & 3) * 4);
    if (up) out += (i64)(t.first + (lane >> 2)) * a.out_stride;
#pragma unroll
    for (int j = 0; j < tokens / 8; j++) {
      int token = j * 8 + (lane >> 2);
      u16 *row = up ? out : out + __shfl_sync(all_lanes, pairs[j / 4], token & 31) * a.out_stride;
#pragma unroll
      for (int b = 0; b < blocks; b++) {
        float *v = d[b] + 4 * j;
        bool mine = token < t.tokens && first + b < t.units;
        if (up) {
          store_if(mine, row + b * unit_columns, transpose(pack_act(__fmul_rn(silu_fast(v[0]), v[2]), __fmul_rn(silu_fast(v[1]), v[3]))));
        } else {
          uint2 four;
          four.x = transpose(pack_act(v[0], v[1]));
          four.y = transpose(pack_act(v[2], v[3]));
          store_if(mine, row + b * unit_columns, four);
        }
      }
      if (up) out += 8 * a.out_stride;
    }
  }

  DEVICE void consume(int count, place at) {
    int group = threadIdx.x / 128 - 1;
    pipeline_state now = {0, 0};
    tile t;
    if (!complete()) wait_dependencies();
    for (int index = blockIdx.x; next(index, count, at, t); index += gridDim.x) {
      if constexpr (few)
        multiply<max_tokens>(t, group, now);
      else
        with_room<max_tokens, !up>(t.tokens, [&](auto room) { multiply<decltype(room)::value>(t, group, now); });
    }
    if (complete()) wait_dependencies();  // a wait for this kernel is one for the kernel in front, too
  }
};

template <bool up, int groups, int blocks, int max_tokens, int steps_per_stage, bool once, bool few, int routed = 0>
DEVICE void expert(const expert_args &a, unsigned char *memory, const route_sort_args *route = nullptr) {
  using product = expert_product<up, groups, blocks, max_tokens, steps_per_stage, once, few, routed>;
  if constexpr (!few) {
    if (!a.lists_ready) wait_dependencies();
    launch_dependents();  // after the wait: the next kernel may start with data that this one has waited for
  }
  __shared__ u64 full[most_stages], empty[most_stages];
  __shared__ int tiles;
  // The stages start at a multiple of 1024 bytes, as the swizzle requires.
  unsigned char *start = memory + (-shared_address(memory) & 1023);
  // The last block has the fewest tiles. With lists_ready the kernel in front routes.
  bool routes = routed && up && blockIdx.x == gridDim.x - 1 && !a.lists_ready;
  if (routed == 1 && routes) {
    wait_dependencies();
    sort_rows(*route, *(sorted_rows *)start);
    fence_shared();  // before the copies of weights that take its memory
    __syncthreads();
  }
  product p = {a, {start, full, empty, a.stages, groups * blocks * unit_bytes + a.max_tokens * 128}, 0, 0, 0, 0, 0, 0, {}};
  if (once) p.policy = read_once();
  p.across = (a.units + p.tile_units - 1) / p.tile_units;
  unsigned char *lists = start + a.stages * steps_per_stage * p.r.step_bytes;
  typename product::place at = {0, 0, {0, 0, 0, 0}};
  // With few, the wait for the runs, or for the scores that select them, and the load of the block's first.
  auto begin_runs = [&] {
    if (!a.lists_ready) wait_dependencies();
    launch_dependents();
    if constexpr (routed == 1) {
      __shared__ int chosen[most_routed];
      p.selected = {chosen, route->route.k};
      if (threadIdx.x < 32) p.selected.select(route->route, chosen);
      __syncthreads();
    } else if constexpr (routed) {
      __shared__ routed_lists chosen;
      p.selected = {&chosen};
      select_experts<up>(*route, chosen, routes, start);
    }
    at.entry = p.entry(at.run);
  };
  // Wide kernels do not overlap the one in front, so they load the run beside the slots; the others load slots before they wait.
  constexpr bool begins_late = groups == 1;
  if constexpr (few) {
    // No kernel that this one may overlap writes slots.
    u64 slot = threadIdx.x < a.experts_all ? load_early((const u64 *)a.slots + threadIdx.x) : 0;
    if (threadIdx.x == 0) ring_init(p.r, up ? p.producers + 1 : 2, groups);
    u32 across = p.across;
    p.run_step = gridDim.x / across, p.unit_step = gridDim.x % across;
    at.run = blockIdx.x / across, at.unit = blockIdx.x % across;
    if (!begins_late) begin_runs();
#pragma unroll 1
    for (int i = threadIdx.x; i < a.experts_all; i += p.threads) ((u64 *)lists)[i] = i < p.threads ? slot : load_early((const u64 *)a.slots + i);
    p.slots = (const u64 *)lists;
  } else {
    p.runs = (run *)lists;
    if (threadIdx.x < 32) {
      if (threadIdx.x == 0) ring_init(p.r, up ? p.producers + 1 : 2, groups);
      int n = once ? list_few_runs(a, p.runs, p.across) : list_runs(a, p.runs, p.across);
      if (threadIdx.x == 0) tiles = n;
    }
  }
  __syncthreads();
  if (few && begins_late) begin_runs();
  auto produce = [&] {
    if (groups == 2 && !few) give_registers<72>();
    if (up || threadIdx.x == 0) p.produce(tiles, at);
  };
  auto consume = [&] {
    if (groups == 2 && !few) take_registers<216>();
    p.consume(tiles, at);
  };
  if constexpr (few) {  // in this order the compiler places the first loads of weights right behind the wait
    if (threadIdx.x >= p.producers)
      consume();
    else
      produce();
  } else {
    if (threadIdx.x < p.producers)
      produce();
    else
      consume();
  }
}

// Wide: two warpgroups with 128 weight rows each. Narrow: one with 64, for few tiles. Alone:
// narrow with one block per multiprocessor, for few pairs. Each has a kernel with few, too. expert.go has their
// threads and shared memory. Alone, copies with the policy of once were slower: steps of Mixtral with one sequence took
// 1 to 4 % longer.
#define EXPERT(name, up)                                                   \
  KERNEL(384, 1) name##_256(const __grid_constant__ expert_args a) {       \
    DYNAMIC_SHARED(memory);                                                \
    expert<up, 2, 2, 160, 1, false, false>(a, memory);                     \
  }                                                                        \
  KERNEL(256, 2) name##_64(const __grid_constant__ expert_args a) {        \
    DYNAMIC_SHARED(memory);                                                \
    expert<up, 1, 1, 64, 2, true, false>(a, memory);                       \
  }                                                                        \
  KERNEL(256, 1) name##_alone(const __grid_constant__ expert_args a) {     \
    DYNAMIC_SHARED(memory);                                                \
    expert<up, 1, 1, 64, 2, false, false>(a, memory);                      \
  }                                                                        \
  KERNEL(384, 1) name##_256_few(const __grid_constant__ expert_args a) {   \
    DYNAMIC_SHARED(memory);                                                \
    expert<up, 2, 2, 16, 1, false, true>(a, memory);                       \
  }                                                                        \
  KERNEL(256, 2) name##_64_few(const __grid_constant__ expert_args a) {    \
    DYNAMIC_SHARED(memory);                                                \
    expert<up, 1, 1, 16, 2, true, true>(a, memory);                        \
  }                                                                        \
  KERNEL(256, 1) name##_alone_few(const __grid_constant__ expert_args a) { \
    DYNAMIC_SHARED(memory);                                                \
    expert<up, 1, 1, 16, 2, false, true>(a, memory);                       \
  }

EXPERT(expert_up, true)
EXPERT(expert_down, false)

#define ROUTED_EXPERT(name, up, rows, ending)                                          \
  KERNEL(256, 2) name##_64_##ending(const __grid_constant__ routed_expert_args a) {    \
    DYNAMIC_SHARED(memory);                                                            \
    expert<up, 1, 1, 16, 2, true, true, rows>(a.expert, memory, &a.route);             \
  }                                                                                    \
  KERNEL(256, 1) name##_alone_##ending(const __grid_constant__ routed_expert_args a) { \
    DYNAMIC_SHARED(memory);                                                            \
    expert<up, 1, 1, 16, 2, false, true, rows>(a.expert, memory, &a.route);            \
  }

ROUTED_EXPERT(expert_up, true, 1, routed)
ROUTED_EXPERT(expert_down, false, 1, routed)
ROUTED_EXPERT(expert_up, true, most_routed_rows, routed_few)
ROUTED_EXPERT(expert_down, false, most_routed_rows, routed_few)
