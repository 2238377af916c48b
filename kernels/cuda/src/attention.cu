// Causal attention over a paged KV cache, with grouped heads (GQA) and an optional sliding
// window.
//
// A block computes one KV head (or several, one after another) for a tile of queries: 16 per
// warp, one query per token and head of Q that shares the KV head. Positions are read in tiles
// of 32, from a multiple of 32 on, with an online softmax inside chunks of 256, and chunks are
// joined in ascending order. Positions that a query does not attend to leave its state
// unchanged, bit for bit. So a token's result depends only on the positions it attends to:
// neither on its tile nor on whether its chunks were computed by separate blocks (split) and
// joined by attention_join. Arithmetic that both paths share uses intrinsics, so that the
// compiler cannot fuse it in one path and not in the other.

struct attention_args {
  u64 q, k, v, starts, lens, table, out;
  u64 sums, ends;  // split: partial results, [sequences, max_rows, heads, chunks, d] and [.., 2] float32
  i64 q_row, q_head, k_block, k_token, k_head, v_block, v_token, v_head, table_row, out_row, out_head;
  int heads, group;               // heads of Q, and heads of Q per KV head
  int d, tokens, blocks, window;  // tokens of a KV block; window 0: all
  int min_rows, max_rows;         // this launch computes the sequences with that many tokens in the step
  int tiles;                      // of one sequence
  int chunks;                     // split: gridDim.z; else 0
  float scale;                    // multiplied by log2(e)
  int q_aligned, out_paired;
  int each;                       // KV heads per block, one after another
  int shift;                      // tokens is 1 << shift, if not negative
  int v_as_k;                     // V has the strides of K
  int past_ready;                 // the preceding kernels write no position before this step's tokens
  int chunk_tiles;                // attention_128_wide: tiles of positions that a block has shared memory for
};

constexpr int tile_tokens = 32, chunk_tokens = 256;

// query_span is a block's tile of queries; rows 0: none.
struct query_span {
  int sequence, row0, rows;  // row0: row of Q
  int position;              // of row0
  int begin, end;            // positions that any of the rows attends to
};

DEVICE query_span find_span(const attention_args &a, int tile_rows) {
  query_span s = {(int)blockIdx.x / a.tiles, 0, 0, 0, 0, 0};
  int start = load_early((const int *)a.starts + s.sequence), n = load_early((const int *)a.starts + s.sequence + 1) - start;
  int first = (int)blockIdx.x % a.tiles * tile_rows;
  if (n < a.min_rows || n > a.max_rows || first >= n) return s;
  s.row0 = start + first;
  s.rows = min(tile_rows, n - first);
  s.position = load_early((const int *)a.lens + s.sequence) - n + first;
  s.end = s.position + s.rows;
  s.begin = a.window > 0 ? max(0, s.position - a.window + 1) : 0;
  return s;
}

// Offset in shared memory of a chunk of 16 bytes of a row of d elements, swizzled: eight rows are in
// different banks.
template <int d>
DEVICE int swizzled(int row, int chunk) {
  return row * d * 2 + ((chunk ^ (d % 64 == 0 ? row & 7 : row >> 1 & 3)) << 4);
}

// Adds a tile of positions to the state of a warp's queries, of which query(i, q) returns elements 16 i to 16 i + 15: their
// maximum scores, the sums of weights of this thread's columns, and the weighted sums of values. A thread has rows
// lane/4 and lane/4 + 8, which attend to positions attends_from to attends_to. at_once of the d/16 parts of the scores
// are unrolled.
template <int d, int at_once, class Query>
DEVICE void attend_tile(Query query, const unsigned char *keys, const unsigned char *values, int tile, const int (&attends_from)[2],
                        const int (&attends_to)[2], float scale, float (&row_max)[2], float (&sum)[2], float (&part)[d / 8][4]) {
  int lane = threadIdx.x & 31;
  float score[tile_tokens / 8][4] = {};
#pragma unroll at_once
  for (int i = 0; i < d / 16; i++) {
    u32 q[4];
    query(i, q);
#pragma unroll
    for (int j = 0; j < tile_tokens / 8; j += 2) {
      u32 k[4];
      load_matrices(k, keys + swizzled<d>(j * 8 + (lane >> 4) * 8 + (lane & 7), i * 2 + (lane >> 3 & 1)));
      mma(score[j], q, k[0], k[1]);
      mma(score[j + 1], q, k[2], k[3]);
    }
  }

  float rescale[2];
  bool changed = false;  // whether the accumulators must be rescaled
#pragma unroll
  for (int h = 0; h < 2; h++) {
    float tile_max = neg_infinity;
#pragma unroll
    for (int j = 0; j < tile_tokens / 8; j++)
#pragma unroll
      for (int c = 2 * h; c < 2 * h + 2; c++) {
        int p = tile * tile_tokens + j * 8 + (lane & 3) * 2 + (c & 1);
        bool seen = p >= attends_from[h] && p <= attends_to[h];
        score[j][c] = seen ? __fmul_rn(score[j][c], scale) : neg_infinity;
        tile_max = fmaxf(tile_max, score[j][c]);
      }
    tile_max = fmaxf(tile_max, __shfl_xor_sync(all_lanes, tile_max, 1));
    tile_max = fmaxf(tile_max, __shfl_xor_sync(all_lanes, tile_max, 2));
    float now = fmaxf(row_max[h], tile_max), base = now == neg_infinity ? 0.f : now;
    rescale[h] = row_max[h] == now ? 1.f : exp2_fast(__fadd_rn(row_max[h], -base));
    changed |= row_max[h] != now && row_max[h] != neg_infinity;
    row_max[h] = now;
    float added = 0;
#pragma unroll
    for (int j = 0; j < tile_tokens / 8; j++)
#pragma unroll
      for (int c = 2 * h; c < 2 * h + 2; c++) {
        score[j][c] = exp2_fast(__fadd_rn(score[j][c], -base));
        added = __fadd_rn(added, score[j][c]);
      }
    sum[h] = __fmaf_rn(sum[h], rescale[h], added);
  }
  if (__ballot_sync(all_lanes, changed)) {
#pragma unroll
    for (int j = 0; j < d / 8; j++)
#pragma unroll
      for (int c = 0; c < 4; c++) part[j][c] = __fmul_rn(part[j][c], rescale[c / 2]);
  }

#pragma unroll
  for (int i = 0; i < tile_tokens / 16; i++) {
    u32 p[4] = {pack_act(score[2 * i][0], score[2 * i][1]), pack_act(score[2 * i][2], score[2 * i][3]),
                pack_act(score[2 * i + 1][0], score[2 * i + 1][1]), pack_act(score[2 * i + 1][2], score[2 * i + 1][3])};
#pragma unroll
    for (int j = 0; j < d / 8; j += 2) {
      u32 v[4];
      load_matrices_transposed(v, values + swizzled<d>(i * 16 + (lane & 15), j + (lane >> 4)));
      mma(part[j], p, v[0], v[1]);
      mma(part[j + 1], p, v[2], v[3]);
    }
  }
}

// d is the head size, rounded up to what is instantiated.
template <int d, int warps>
DEVICE void attend(const attention_args &a, unsigned char *memory) {
  constexpr int threads = 32 * warps, queries = 16 * warps, stages = warps == 1 ? 2 : 3;
  constexpr int chunks = d / 8;               // chunks of 16 bytes per row
  constexpr int row_bytes = d * 2;
  constexpr int half_bytes = tile_tokens * row_bytes, stage_bytes = 2 * half_bytes;
  constexpr int passes = tile_tokens * chunks / threads;
  constexpr bool even = threads % chunks == 0;  // a thread copies the same chunk of the row in all passes
  static_assert(tile_tokens * chunks % threads == 0, "each warp brings whole passes");
  unsigned char *ring = memory, *query_tile = memory + stages * stage_bytes;  // queries of one head
  auto chunk_at = [](int row, int chunk) { return swizzled<d>(row, chunk); };

  // Starts, lengths and block table are not written by preceding kernels; queries, keys and
  // values are.
  launch_dependents();
  query_span s = find_span(a, queries / a.group);
  int from = s.begin / tile_tokens, to = (s.end + tile_tokens - 1) / tile_tokens;  // tiles of positions
  if (a.chunks > 0) {
    constexpr int per_chunk = chunk_tokens / tile_tokens;
    from = max(from, (int)blockIdx.z * per_chunk);
    to = min(to, ((int)blockIdx.z + 1) * per_chunk);
  }
  if (s.rows == 0 || from >= to) {  // uniform over the block
    wait_dependencies();
    return;
  }
  int kv_head = blockIdx.y * a.each, left = (to - from) * a.each;

  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int *table = (const int *)a.table + s.sequence * a.table_row;
  // Each lane looks up one position of a tile in the block table, one tile ahead; then each
  // thread copies its chunks of some of the positions.
  auto in_table = [&](int p) { return a.shift >= 0 ? p >> a.shift : p / a.tokens; };
  auto look = [&](int tile) {
    int p = tile * tile_tokens + lane;
    return p < s.end ? table[in_table(p)] : -1;
  };
  int p0 = from * tile_tokens + lane;
  int next_tile = from, next_head = kv_head, to_bring = left, block = p0 < s.end ? load_early(table + in_table(p0)) : -1;
  wait_dependencies();
  // Loads the queries of a head. Query i is head i % group of row i / group. The memory behind
  // the last query is never read.
  auto load_queries = [&] {
    for (int item = threadIdx.x; item < s.rows * a.group * chunks; item += threads) {
      int i = item / chunks, at = item % chunks * 8, row = i / a.group;
      bool there = at < a.d;
      const u16 *head = (const u16 *)a.q + (s.row0 + row) * a.q_row + (next_head * a.group + i % a.group) * a.q_head;
      unsigned char *to = query_tile + chunk_at(i, item % chunks);
      if (a.q_aligned) {
        copy_async(to, head + (there ? at : 0), there ? 16 : 0);
      } else {
        float v[8];
        load8(v, head, act_type, at, there ? 8 : 0, false);
        *(uint4 *)to = pack(v);
      }
    }
  };
  // Loads the next tile, and before a head's first tile its queries.
  auto load_tile = [&](int slot) {
    if (to_bring > 0) {
      if (next_tile == from) load_queries();
      unsigned char *stage = ring + slot * stage_bytes;
      if (even && a.shift >= 4) {
        // Sixteen consecutive positions are in one KV block, a token's stride apart.
        constexpr int tokens_per_pass = even ? threads / chunks : 16, groups = tokens_per_pass > 16 ? 1 : 2;
        int lead = threadIdx.x / chunks, chunk = threadIdx.x % chunks;
#pragma unroll
        for (int g = 0; g < groups; g++) {
          int row = g * 16 + lead, p = next_tile * tile_tokens + row;
          int in = __shfl_sync(all_lanes, block, row & 31);
          i64 token = p & (a.tokens - 1);
          const u16 *k = (const u16 *)a.k + in * a.k_block + token * a.k_token + next_head * a.k_head + chunk * 8;
          const u16 *v = (const u16 *)a.v + in * a.v_block + token * a.v_token + next_head * a.v_head + chunk * 8;
          // Positions from first on, as many as the span has, are loaded; others are filled
          // with zeros, and their addresses are not dereferenced.
          int first = s.begin - p;
          u32 seen = chunk * 8 < a.d && in >= 0 && in < a.blocks ? s.end - s.begin : 0;  // d is a multiple of 8
#pragma unroll
          for (int i = 0; i < 16; i += tokens_per_pass) {
            int at = chunk_at(row + i, chunk), bytes = (u32)(i - first) < seen ? 16 : 0;
            copy_async(stage + at, k, bytes);
            copy_async(stage + half_bytes + at, v, bytes);
            k += tokens_per_pass * a.k_token, v += tokens_per_pass * a.v_token;
          }
        }
      } else {
        i64 k_at = -1, v_at = -1;
        int p = next_tile * tile_tokens + lane;
        if (p >= s.begin && block >= 0 && block < a.blocks) {
          i64 token = p - in_table(p) * a.tokens;
          k_at = block * a.k_block + token * a.k_token + next_head * a.k_head;
          v_at = block * a.v_block + token * a.v_token + next_head * a.v_head;
        }
#pragma unroll 1
        for (int i = 0; i < passes; i++) {
          int item = threadIdx.x + i * threads, row = item / chunks, chunk = item % chunks;
          i64 k_row = __shfl_sync(all_lanes, k_at, row), v_row = k_row;
          if (!a.v_as_k) v_row = __shfl_sync(all_lanes, v_at, row);
          bool there = k_row >= 0 && chunk * 8 < a.d;  // d is a multiple of 8
          int at = chunk_at(row, chunk);
          copy_async(stage + at, (const u16 *)a.k + (there ? k_row + chunk * 8 : 0), there ? 16 : 0);
          copy_async(stage + half_bytes + at, (const u16 *)a.v + (there ? v_row + chunk * 8 : 0), there ? 16 : 0);
        }
      }
      if (++next_tile == to) next_tile = from, next_head++;
      if (--to_bring > 0) block = look(next_tile);
    }
    copy_commit();
  };
  // A thread has rows lane/4 and lane/4 + 8 of its warp's queries, which attend to these
  // positions.
  int attends_from[2], attends_to[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    int row = (warp * 16 + h * 8 + (lane >> 2)) / a.group;
    int p = s.position + row;
    attends_to[h] = row < s.rows ? p : -1;
    attends_from[h] = a.window > 0 ? p - a.window + 1 : 0;
  }

  u32 q[d / 16][4];
  float total[d / 8][4], part[d / 8][4];
  float total_max[2], total_sum[2], row_max[2], sum[2];  // sum: over this thread's columns
  int slot = 0, next = 0;
#pragma unroll 1
  for (int tile = from, ahead = stages - 1; left > 0;) {
    if (ahead == 0) {
      copy_wait<stages - 2>();
      __syncthreads();
    }
    if (ahead == 0 && tile == from) {
#pragma unroll
      for (int i = 0; i < d / 16; i++) load_matrices(q[i], query_tile + chunk_at(warp * 16 + (lane & 15), i * 2 + (lane >> 4)));
      __syncwarp();  // blocks with several KV heads have one warp
#pragma unroll
      for (int h = 0; h < 2; h++) total_max[h] = row_max[h] = neg_infinity, total_sum[h] = sum[h] = 0;
#pragma unroll
      for (int j = 0; j < d / 8; j++)
#pragma unroll
        for (int c = 0; c < 4; c++) total[j][c] = part[j][c] = 0;
    }
    load_tile(next);
    if (++next == stages) next = 0;
    if (ahead > 0) {
      ahead--;
      continue;
    }
    left--;
    const unsigned char *keys = ring + slot * stage_bytes, *values = keys + half_bytes;
    if (++slot == stages) slot = 0;

    auto query = [&](int i, u32 (&to)[4]) {
#pragma unroll
      for (int c = 0; c < 4; c++) to[c] = q[i][c];
    };
    attend_tile<d, d / 16>(query, keys, values, tile, attends_from, attends_to, a.scale, row_max, sum, part);

    tile++;
    if (tile * tile_tokens % chunk_tokens != 0 && tile < to) continue;
    // End of a chunk.
#pragma unroll
    for (int h = 0; h < 2; h++) {
      sum[h] = __fadd_rn(sum[h], __shfl_xor_sync(all_lanes, sum[h], 1));
      sum[h] = __fadd_rn(sum[h], __shfl_xor_sync(all_lanes, sum[h], 2));
    }
    if (a.chunks == 0) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float old_part, new_part;
        join(total_max[h], row_max[h], old_part, new_part);
        total_sum[h] = joined(total_sum[h], old_part, sum[h], new_part);
#pragma unroll
        for (int j = 0; j < d / 8; j++)
#pragma unroll
          for (int c = 2 * h; c < 2 * h + 2; c++) {
            total[j][c] = joined(total[j][c], old_part, part[j][c], new_part);
            part[j][c] = 0;
          }
        row_max[h] = neg_infinity, sum[h] = 0;
      }
      if (tile < to) continue;
    }
    // End of all positions that the queries attend to.
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int i = warp * 16 + h * 8 + (lane >> 2), row = i / a.group;
      if (row >= s.rows) continue;
      i64 n = s.row0 + row;
      int head = kv_head * a.group + i % a.group;
      if (a.chunks > 0) {
        i64 at = ((s.sequence * (i64)a.max_rows + row) * a.heads + head) * a.chunks + blockIdx.z;
        if ((lane & 3) == 0) {
          ((float *)a.ends)[2 * at] = row_max[h];
          ((float *)a.ends)[2 * at + 1] = sum[h];
        }
#pragma unroll
        for (int j = 0; j < d / 8; j++) {
          int column = j * 8 + (lane & 3) * 2;
          if (column < a.d)  // both: d is even
            *(float2 *)((float *)a.sums + at * a.d + column) = make_float2(part[j][2 * h], part[j][2 * h + 1]);
        }
        continue;
      }
      u16 *out = (u16 *)a.out + n * a.out_row + head * a.out_head;
      float inverse = __fdiv_rn(1.f, total_sum[h]);
#pragma unroll
      for (int j = 0; j < d / 8; j++) {
        int column = j * 8 + (lane & 3) * 2;
        if (column >= a.d) continue;
        u32 both = pack_act(__fmul_rn(total[j][2 * h], inverse), __fmul_rn(total[j][2 * h + 1], inverse));
        if (a.out_paired)
          *(u32 *)(out + column) = both;
        else
          out[column] = (u16)both, out[column + 1] = (u16)(both >> 16);
      }
    }
    tile = from, kv_head++;
  }
}

#define ATTENTION(d)                                       \
  KERNEL(32, 8) attention_##d##_1(const attention_args a) { \
    DYNAMIC_SHARED(memory);                                \
    attend<d, 1>(a, memory);                               \
  }                                                        \
  KERNEL(128, 2) attention_##d##_4(const attention_args a) { \
    DYNAMIC_SHARED(memory);                                \
    attend<d, 4>(a, memory);                               \
  }

ATTENTION(32)
ATTENTION(64)
ATTENTION(96)
ATTENTION(128)

// The same for heads of 128 elements of few sequences with few tokens each, where a block of one
// warp would compute one tile of positions after the other: warp w of a block has tile w of its chunk.
// The tiles' parts are joined at the end, so results differ from those of attend in their last bits.
// With a.past_ready keys and values of earlier steps are loaded while the preceding kernel runs.
constexpr int wide_warps = chunk_tokens / tile_tokens, wide_head = 128, wide_half_bytes = tile_tokens * wide_head * 2;

// bring writes the queries to a tile of shared memory. With roped it also brings the keys and values of this step's rows,
// those for which brings is true, from what look has loaded before the preceding kernel has ended.
template <bool roped, class Look, class Brings, class Bring>
DEVICE void attend_wide(const attention_args &a, unsigned char *memory, Look look, Brings brings, Bring bring) {
  constexpr int d = wide_head, chunks = d / 8, half_bytes = wide_half_bytes;
  query_span s = find_span(a, 16 / a.group);
  int from = blockIdx.z * chunk_tokens, queries = s.rows * a.group;
  if (s.rows == 0 || from >= s.end || from + chunk_tokens <= s.begin) {  // uniform over the block
    launch_dependents();
    wait_dependencies();
    return;
  }
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, kv_head = blockIdx.y;
  int tile = from / tile_tokens + warp, p = tile * tile_tokens + lane;
  bool some = tile * tile_tokens < s.end && (tile + 1) * tile_tokens > s.begin;  // uniform over the warp
  unsigned char *keys = memory + warp * 2 * half_bytes, *values = keys + half_bytes, *query_tile = memory + a.chunk_tiles * 2 * half_bytes;
  float2 *ends = (float2 *)(query_tile + 16 * d * 2);  // of each warp and query
  int in = roped || a.shift >= 0 ? p >> a.shift : p / a.tokens;
  int block = p >= s.begin && p < s.end ? load_early((const int *)a.table + s.sequence * a.table_row + in) : -1;
  bool here = roped && p >= s.position && p < s.end && brings(s.row0 + p - s.position);
  look(s);
  constexpr i64 brought = -2;
  i64 k_at = -1, v_at = -1;
  if (block >= 0 && block < a.blocks) {
    i64 token = p - in * a.tokens;
    k_at = block * a.k_block + token * a.k_token + kv_head * a.k_head;
    v_at = block * a.v_block + token * a.v_token + kv_head * a.v_head;
  }
  if (here) k_at = brought;
  // First, before the preceding kernels have ended, what they do not write: keys and values of earlier steps, and
  // zeros for positions that nobody attends to. Then queries and the other positions. Loops are not unrolled, here and
  // below: with few sequences the kernel takes most of its time to bring its instructions.
  int before = a.past_ready ? s.position : s.begin;  // a sequence is one tile here: position is of its first token
#pragma unroll 1
  for (int turn = 0; turn < 2; turn++) {
    int row = 0, last = some ? tile_tokens : 0;
    if (turn > 0) {
      row = max(before - tile * tile_tokens, 0) & ~1, last = min(s.end - tile * tile_tokens, last);
      wait_dependencies();
      bring(s, query_tile);
    }
#pragma unroll 1
    for (; row < last; row += 2) {
      int mine = row + lane / chunks, chunk = lane % chunks, position = tile * tile_tokens + mine;
      i64 k_row = __shfl_sync(all_lanes, k_at, mine), v_row = k_row;
      if (!a.v_as_k) v_row = __shfl_sync(all_lanes, v_at, mine);
      if ((position >= before && position < s.end) != (turn > 0) || (roped && k_row == brought)) continue;
      bool there = k_row >= 0;
      unsigned char *to = keys + swizzled<d>(mine, chunk);
      copy_async(to, (const u16 *)a.k + (there ? k_row + chunk * 8 : 0), there ? 16 : 0);
      copy_async(to + half_bytes, (const u16 *)a.v + (there ? v_row + chunk * 8 : 0), there ? 16 : 0);
    }
    if (turn == 0) launch_dependents();
  }
  copy_commit();
  copy_wait<0>();
  __syncthreads();

  float row_max[2] = {neg_infinity, neg_infinity}, sum[2] = {}, part[d / 8][4] = {};
  if (some) {
    int attends_from[2], attends_to[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int row = (h * 8 + (lane >> 2)) / a.group;
      attends_to[h] = row < s.rows ? s.position + row : -1;
      attends_from[h] = a.window > 0 ? s.position + row - a.window + 1 : 0;
    }
    auto query = [&](int i, u32 (&q)[4]) { load_matrices(q, query_tile + swizzled<d>(lane & 15, i * 2 + (lane >> 4))); };
    attend_tile<d, 2>(query, keys, values, tile, attends_from, attends_to, a.scale, row_max, sum, part);
    __syncwarp();  // what follows overwrites the tile
  }
  float *mine = (float *)keys;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    int i = h * 8 + (lane >> 2);
    sum[h] = __fadd_rn(sum[h], __shfl_xor_sync(all_lanes, sum[h], 1));
    sum[h] = __fadd_rn(sum[h], __shfl_xor_sync(all_lanes, sum[h], 2));
    if (i >= queries) continue;
    if ((lane & 3) == 0) ends[warp * 16 + i] = make_float2(row_max[h], sum[h]);
    if (!some) continue;  // nobody reads it, and the block may have no memory for it
#pragma unroll
    for (int j = 0; j < d / 8; j++) *(float2 *)(mine + i * d + j * 8 + (lane & 3) * 2) = make_float2(part[j][2 * h], part[j][2 * h + 1]);
  }
  __syncthreads();
#pragma unroll 1
  for (int item = threadIdx.x; item < queries * d / 2; item += 32 * wide_warps) {
    int i = item / (d / 2), column = item % (d / 2) * 2, head = kv_head * a.group + i % a.group;
    float all_max = neg_infinity, all_sum = 0, x = 0, y = 0;
#pragma unroll
    for (int w = 0; w < wide_warps; w++) all_max = fmaxf(all_max, ends[w * 16 + i].x);
#pragma unroll
    for (int w = 0; w < wide_warps; w++) {
      int at = w < a.chunk_tiles ? w : 0;  // the block has memory for no more tiles, and nobody attends to them
      float2 end = ends[w * 16 + i], v = *(const float2 *)((const float *)(memory + at * 2 * half_bytes) + i * d + column);
      if (end.x == neg_infinity) continue;  // the query attends to nothing of this tile
      float weight = exp2_fast(__fadd_rn(end.x, -all_max));
      all_sum = __fmaf_rn(end.y, weight, all_sum);
      x = __fmaf_rn(v.x, weight, x), y = __fmaf_rn(v.y, weight, y);
    }
    i64 n = s.row0 + i / a.group;
    if (a.chunks > 0) {
      i64 at = ((s.sequence * (i64)a.max_rows + i / a.group) * a.heads + head) * a.chunks + blockIdx.z;
      if (column == 0) ((float2 *)a.ends)[at] = make_float2(all_max, all_sum);
      *(float2 *)((float *)a.sums + at * d + column) = make_float2(x, y);
      continue;
    }
    float inverse = __fdiv_rn(1.f, all_sum);
    u16 *out = (u16 *)a.out + n * a.out_row + head * a.out_head + column;
    u32 both = pack_act(__fmul_rn(x, inverse), __fmul_rn(y, inverse));
    if (a.out_paired)
      *(u32 *)out = both;
    else
      out[0] = (u16)both, out[1] = (u16)(both >> 16);
  }
}

KERNEL(32 * wide_warps, 2) attention_128_wide(const attention_args a) {
  DYNAMIC_SHARED(memory);
  auto bring = [&](const query_span &s, unsigned char *query_tile) {
    constexpr int chunks = wide_head / 8;
#pragma unroll 1
    for (int item = threadIdx.x; item < s.rows * a.group * chunks; item += 32 * wide_warps) {
      int i = item / chunks, chunk = item % chunks;
      const u16 *head = (const u16 *)a.q + (s.row0 + i / a.group) * a.q_row + (blockIdx.y * a.group + i % a.group) * a.q_head;
      unsigned char *to = query_tile + swizzled<wide_head>(i, chunk);
      if (a.q_aligned)
        copy_async(to, head + chunk * 8, 16);
      else
        *(uint4 *)to = load_packed(head, chunk * 8, 8, false);
    }
  };
  attend_wide<false>(a, memory, [](const query_span &) {}, [](i64) { return false; }, bring);
}

struct rope_attention_args {
  attention_args attention;  // tokens is a power of two, and everything is aligned
  u64 k, v;                  // of this step's tokens
  u64 q_weight, k_weight;    // activations
  u64 angles, rows, slots;   // cosines and sines, and which row of them each token has
  i64 k_row, k_head, v_row, v_head;
  int places;  // rows of angles
  float eps;
};

// attention_128_wide, and before it what rope_append_kv_few does, with the same bits, in each block for its KV head: queries
// go to shared memory only, and keys and values there and to the cache, in the block whose chunk has their position. Those
// that are not appended are read from the cache. Eight lanes work on a head, as in rope_append.
template <bool normed>
DEVICE void rope_attend_wide(const rope_attention_args &r, unsigned char *memory) {
  constexpr int half = wide_head / 2, lanes = half / 8, at_once = 32 * wide_warps / lanes;
  const attention_args &a = r.attention;
  int each = a.group + 2;  // heads of a row: those of q, then of k and v
  int lane = threadIdx.x % lanes, at = lane * 8, kv_head = blockIdx.y;
  auto kept = [&](int slot) { return slot >= 0 && slot >> a.shift < a.blocks; };
  auto brings = [&](i64 row) { return kept(load_early((const int *)r.slots + row)); };

  // The first of a warp's heads, among those of all rows, and what look loads for this thread's one of them.
  int from = threadIdx.x / 32 * (32 / lanes), row, of_k, slot;
  bool turned;
  float c[8], sines[8];
  uint4 low, high;  // weights
  auto look = [&](const query_span &s) {
    int all = s.rows * each;
    if (from >= all) return;
    row = 0, of_k = min(from + (int)threadIdx.x % 32 / lanes, all - 1) - a.group;
#pragma unroll 1
    for (; of_k > 1; of_k -= each) row++;
    int place = load_early((const int *)r.rows + s.row0 + row);
    slot = load_early((const int *)r.slots + s.row0 + row);
    if (normed) {
      const u16 *weight = (const u16 *)(of_k < 0 ? r.q_weight : r.k_weight) + at;
      low = *(const uint4 *)weight, high = *(const uint4 *)(weight + half);
    }
    turned = of_k <= 0 && place >= 0 && place < r.places;
    if (!turned) return;
    i64 angles = (i64)place * wide_head + at;
    load8(c, (const void *)r.angles, f32_type, angles, 8, true), load8(sines, (const void *)r.angles, f32_type, angles + half, 8, true);
  };
  auto bring = [&](const query_span &s, unsigned char *query_tile) {
    int all = s.rows * each;
#pragma unroll 1
    for (; from < all; from += at_once, look(s)) {
      i64 n = s.row0 + row;
      const u16 *x = of_k < 0    ? (const u16 *)a.q + n * a.q_row + (kv_head * a.group + a.group + of_k) * a.q_head
                     : of_k == 0 ? (const u16 *)r.k + n * r.k_row + kv_head * r.k_head
                                 : (const u16 *)r.v + n * r.v_row + kv_head * r.v_head;
      uint4 lo = *(const uint4 *)(x + at), hi = *(const uint4 *)(x + half + at);
      if (normed) {
        float total = __fadd_rn(squares(lo), squares(hi));
#pragma unroll
        for (int m = lanes / 2; m > 0; m /= 2) total += __shfl_xor_sync(all_lanes, total, m);
        if (of_k <= 0) {
          float scale = rms_scale(total, wide_head, r.eps), w[8], v[8];
          unpack(w, low), unpack(v, high);
          lo = scaled(lo, scale, {w[0], w[1], w[2], w[3]}, {w[4], w[5], w[6], w[7]});
          hi = scaled(hi, scale, {v[0], v[1], v[2], v[3]}, {v[4], v[5], v[6], v[7]});
        }
      }
      if (turned) rotate(lo, hi, c, sines);
      bool there = from + (int)threadIdx.x % 32 / lanes < all;
      unsigned char *tile = query_tile;
      int line = (row + 1) * a.group + of_k;
      if (of_k >= 0) {
        int p = s.position + row - blockIdx.z * chunk_tokens;
        there = there && p >= 0 && p < chunk_tokens && kept(slot);
        tile = memory + (p / tile_tokens * 2 + of_k) * wide_half_bytes, line = p % tile_tokens;
        if (there) {
          i64 block = slot >> a.shift, token = slot & (a.tokens - 1);
          u16 *to = of_k == 0 ? (u16 *)a.k + block * a.k_block + token * a.k_token + kv_head * a.k_head
                              : (u16 *)a.v + block * a.v_block + token * a.v_token + kv_head * a.v_head;
          store_chunk(to + at, lo), store_chunk(to + half + at, hi);
        }
      }
      if (there) *(uint4 *)(tile + swizzled<wide_head>(line, lane)) = lo, *(uint4 *)(tile + swizzled<wide_head>(line, lanes + lane)) = hi;
    }
  };
  attend_wide<true>(a, memory, look, brings, bring);
}

KERNEL(32 * wide_warps, 2) rope_attention_128_wide(const rope_attention_args r) {
  DYNAMIC_SHARED(memory);
  rope_attend_wide<false>(r, memory);
}

KERNEL(32 * wide_warps, 2) norm_rope_attention_128_wide(const rope_attention_args r) {
  DYNAMIC_SHARED(memory);
  rope_attend_wide<true>(r, memory);
}

// Joins the chunks of one token (blockIdx.x, max_rows of each sequence) and head of Q (blockIdx.y).
KERNEL(128, 1) attention_join(const attention_args a) {
  begin();
  int sequence = blockIdx.x / a.max_rows, row = blockIdx.x % a.max_rows, head = blockIdx.y, column = threadIdx.x;
  int start = ((const int *)a.starts)[sequence], n = ((const int *)a.starts)[sequence + 1] - start;
  if (row >= n || n < a.min_rows || n > a.max_rows) return;
  int p = ((const int *)a.lens)[sequence] - n + row, first = (a.window > 0 ? max(0, p - a.window + 1) : 0) / chunk_tokens;
  i64 at = ((sequence * (i64)a.max_rows + row) * a.heads + head) * a.chunks + first;
  float out = join_chunks((const float *)a.sums + at * a.d, (const float2 *)a.ends + at, p / chunk_tokens + 1 - first, a.d, column);
  if (column < a.d) ((u16 *)a.out)[(start + row) * a.out_row + head * a.out_head + column] = to_act(out);
}
