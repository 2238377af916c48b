// Grouped products of a layer's experts on the tensor cores of sm_90a: weights are
// their rows (M), tokens their columns (N).
//
// An expert lies in units of 64 weight rows: for every 64 elements of the inner
// dimension in turn a tile of 8 KiB, rows of 128 bytes, swizzled as the tensor cores
// read them. So a block streams weights in order, by bulk copies. Rows of tokens are
// gathered by copies of 16 bytes on the way up; on the way down an expert's stand
// together, and come as tiles. Blocks stay: each takes every gridDim.x-th tile of
// (weights, tokens), and its copies run ahead of its products across tiles.
//
// Every element is one chain of products over inner in rising order, 16 at a time,
// whatever the tile, so the number of rows does not change a bit of any row's result.

struct expert_args {
  tensor_map x_rows;       // on the way down: tiles of most rows of X
  u64 x, out, offsets, order, slots, experts;
  i64 x_stride, out_stride;
  i64 start;               // bytes of the extent before the matrix
  int units, steps;        // of 64 weight rows; of 64 elements of inner
  int listed, experts_all;
  int top_k;               // on the way up, a pair's row of X is pair / top_k
  int most, stages;        // tokens of a tile, a multiple of 16; stages of the ring
  int early;               // only X is of the kernel in front: all else was there when it began
};

// run is the tiles of one expert, which stand in a row.
struct run {
  u64 weights;
  int end, first, rows, parts;  // end: one past its last tile; parts: tiles its rows make
};

// The sigmoid's quotient is good to some 1e-7, which is far below what the result is
// rounded to.
DEVICE float silu_fast(float x) { return __fmul_rn(x, reciprocal_fast(__fadd_rn(1.f, exp2_fast(__fmul_rn(x, -1.44269504f))))); }

// groups warpgroups multiply blocks units of weights each, by up to most tokens; a
// stage of the ring has deep steps.
template <bool up, int groups, int blocks, int most, int deep>
struct expert_product {
  static constexpr int tile_units = groups * blocks;
  static constexpr int producers = 128;
  static constexpr int threads = producers + 128 * groups;
  static constexpr int rows_each = most / 16;  // that a producer brings at most
  // The parts of an expert's tokens are as equal as multiples of so many can be. By
  // eights less is padded; the way up is faster by sixteens all the same.
  static constexpr int grain = up ? 16 : 8;

  const expert_args &a;
  ring r;
  run *runs;
  int across;

  // A tile of weights and tokens.
  struct tile {
    u64 weights;
    int unit, units, first, tokens;  // first: in order
  };

  // The tile of that index, which rises from call to call; at is where to look first.
  DEVICE tile find(int index, int &at) const {
    while (index >= runs[at].end) at++;
    const run e = runs[at];
    int i = index - (e.end - e.parts * across);
    int column = i / e.parts, unit = column * tile_units;
    // Where a block would go through the same part of every column it meets, it takes the
    // next in turn, so that blocks keep pace with each other.
    int turns = column * e.parts / (int)gridDim.x * (e.parts + 1 - (int)gridDim.x % e.parts);
    int part = (i + turns) % e.parts;
    int all = (e.rows + grain - 1) / grain, each = all / e.parts, longer = all % e.parts;
    int token = (part * each + min(part, longer)) * grain;
    return {e.weights + (i64)unit * a.steps * unit_bytes, unit, min(tile_units, a.units - unit), e.first + token,
            min((each + (part < longer)) * grain, e.rows - token)};
  }

  // Has the weights of a stage brought, from step k on; by one thread.
  DEVICE void bring_weights(const tile &t, int k, int slot) const {
    unsigned char *stage = r.memory + slot * deep * r.step_bytes;
    int steps = min(deep, a.steps - k);
    barrier_expect(&r.full[slot], t.units * steps * unit_bytes);
    for (int u = 0; u < t.units; u++)
      for (int s = 0; s < steps; s++)
        copy_bulk(stage + s * r.step_bytes + u * unit_bytes, (const char *)t.weights + ((i64)u * a.steps + k + s) * unit_bytes, unit_bytes,
                  &r.full[slot]);
  }

  // Has the tokens of a stage brought, from step k on; by one thread, on the way down.
  DEVICE void bring_tokens(const tile &t, int k, int slot) const {
    unsigned char *stage = r.memory + slot * deep * r.step_bytes + tile_units * unit_bytes;
    int steps = min(deep, a.steps - k);
    barrier_expect(&r.full[slot], steps * a.most * 128);
    for (int s = 0; s < steps; s++) copy_tile(stage + s * r.step_bytes, &a.x_rows, (k + s) * 64, t.first, &r.full[slot]);
  }

  // Brings what is multiplied; on the way down by one thread, else by all producers.
  DEVICE void produce(int count) {
    int chunk = threadIdx.x & 7, lead = threadIdx.x >> 3, at = 0;
    int brought = 0;  // steps of the first tile whose weights come before X is there
    if (!up) prefetch_map(&a.x_rows);
    if (a.early) {
      if (threadIdx.x == 0 && blockIdx.x < count) {
        tile t = find(blockIdx.x, at);
        for (int slot = 0; slot < r.stages && brought < a.steps; slot++, brought += deep) bring_weights(t, brought, slot);
      }
      wait_dependencies();
    }
    turn now = {0, 1};
    int to = tile_units * unit_bytes + lead * 128 + ((chunk ^ (lead & 7)) << 4);
    for (int index = blockIdx.x; index < count; index += gridDim.x) {
      tile t = find(index, at);
      const u16 *rows[rows_each];
      for (int k = 0; k < a.steps; k += deep) {
        unsigned char *stage = r.memory + now.slot * deep * r.step_bytes;
        int steps = min(deep, a.steps - k);
        barrier_wait(&r.empty[now.slot], now.parity);
        if (threadIdx.x == 0 && (index != blockIdx.x || k >= brought)) bring_weights(t, k, now.slot);
        if (!up) {
          bring_tokens(t, k, now.slot);
          advance(r, now);
          continue;
        }
        if (k == 0) {  // looked up while the first weights come
#pragma unroll
          for (int i = 0; i < rows_each; i++) {
            rows[i] = 0;
            if (lead + i * 16 < t.tokens) {
              i64 pair = ((const int *)a.order)[t.first + lead + i * 16];
              rows[i] = (const u16 *)a.x + pair / a.top_k * a.x_stride + chunk * 8;
            }
          }
        }
#pragma unroll
        for (int s = 0; s < deep; s++)
#pragma unroll
          for (int i = 0; i < rows_each; i++)
            if (lead + i * 16 < t.tokens && s < steps) copy_async(stage + s * r.step_bytes + to + i * 16 * 128, rows[i] + (k + s) * 64, 16);
        barrier_arrive_after_copies(&r.full[now.slot]);
        advance(r, now);
      }
    }
  }

  // One tile, with room for so many tokens.
  template <int tokens>
  DEVICE void multiply(const tile &t, int group, turn &now) const {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
    int pairs[(tokens + 31) / 32];  // down: of every 32nd token; they come while tensor cores work
#pragma unroll
    for (int i = 0; !up && i < (tokens + 31) / 32; i++) {
      int token = i * 32 + lane;
      pairs[i] = token < t.tokens ? ((const int *)a.order)[t.first + token] : 0;
    }
    float d[blocks][tokens / 2] = {};
    multiply_steps<tokens, blocks, tile_units, deep>(d, r, a.steps, group * blocks, now);

    // A lane gets two neighbors (down: four) of one token's results.
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

  DEVICE void consume(int count) {
    int group = threadIdx.x / 128 - 1, at = 0;
    turn now = {0, 0};
    wait_dependencies();
    for (int index = blockIdx.x; index < count; index += gridDim.x) {
      tile t = find(index, at);
      with_room<most, !up>(t.tokens, [&](auto room) { multiply<decltype(room)::value>(t, group, now); });
    }
  }

  // Lists the experts that have rows, and returns how many tiles there are; by warp 0.
  DEVICE int list() const {
    int lane = threadIdx.x, tiles = 0, n = 0;
    for (int i = 0; i < a.listed; i += 32) {
      int expert = i + lane < a.listed ? load_early((const int *)a.experts + i + lane) : -1;
      run e = {0, 0, 0, 0, 0};
      if (expert >= 0 && expert < a.experts_all) {
        e.weights = load_early((const u64 *)a.slots + expert) + a.start;
        e.first = load_early((const int *)a.offsets + expert);
        e.rows = load_early((const int *)a.offsets + expert + 1) - e.first;
      }
      if (e.rows > 0) {
        e.parts = (e.rows + a.most - 1) / a.most;
        e.end = e.parts * across;
      }
      u32 here = __ballot_sync(all_lanes, e.rows > 0);
#pragma unroll
      for (int j = 1; j < 32; j <<= 1) {
        int v = __shfl_up_sync(all_lanes, e.end, j);
        if (lane >= j) e.end += v;
      }
      e.end += tiles;
      tiles = __shfl_sync(all_lanes, e.end, 31);
      if (e.rows > 0) runs[n + __popc(here & ((1u << lane) - 1))] = e;
      n += __popc(here);
    }
    return tiles;
  }
};

template <bool up, int groups, int blocks, int most, int deep>
DEVICE void expert(const expert_args &a, unsigned char *memory) {
  if (!a.early) wait_dependencies();
  launch_dependents();  // not before: what comes next may start with what this one has been waiting for
  __shared__ u64 full[most_stages], empty[most_stages];
  __shared__ int tiles;
  // The ring starts at a multiple of 1024 bytes.
  unsigned char *start = memory + (-shared_address(memory) & 1023);
  expert_product<up, groups, blocks, most, deep> p = {a, {start, full, empty, a.stages, groups * blocks * unit_bytes + a.most * 128}, 0, 0};
  p.across = (a.units + p.tile_units - 1) / p.tile_units;
  p.runs = (run *)(start + a.stages * deep * p.r.step_bytes);
  if (threadIdx.x < 32) {
    if (threadIdx.x == 0) ring_init(p.r, up ? p.producers + 1 : 2, groups);
    int n = p.list();
    if (threadIdx.x == 0) tiles = n;
  }
  __syncthreads();
  if (threadIdx.x < p.producers) {
    if (groups == 2) give_registers<72>();
    if (up || threadIdx.x == 0) p.produce(tiles);
  } else {
    if (groups == 2) take_registers<216>();
    p.consume(tiles);
  }
}

// Two warpgroups with 128 weight rows each, and one with 64 for where tiles are few; on a
// multiprocessor of its own where pairs are.
// Their threads and shared memory are known to expert.go.
#define EXPERT(name, up)                                               \
  KERNEL(384, 1) name##_256(const __grid_constant__ expert_args a) {   \
    DYNAMIC_SHARED(memory);                                            \
    expert<up, 2, 2, 160, 1>(a, memory);                               \
  }                                                                    \
  KERNEL(256, 2) name##_64(const __grid_constant__ expert_args a) {    \
    DYNAMIC_SHARED(memory);                                            \
    expert<up, 1, 1, 64, 2>(a, memory);                                \
  }                                                                    \
  KERNEL(256, 1) name##_alone(const __grid_constant__ expert_args a) { \
    DYNAMIC_SHARED(memory);                                            \
    expert<up, 1, 1, 64, 2>(a, memory);                                \
  }

EXPERT(expert_up, true)
EXPERT(expert_down, false)
