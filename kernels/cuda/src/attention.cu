// Attention over a paged cache, causal, with grouped heads and an optional window.
//
// A block has one head of the cache (or some in turn) and a tile of queries: 16 per
// warp, being rows times the heads that share the cache's. Positions come in tiles of 32 from a
// multiple of 32 on, with a running softmax inside of chunks of 256, and chunks are
// joined in rising order. What a query does not see leaves its state as it is, bit
// for bit, so a row's result depends on nothing but its own positions: neither on
// its tile nor on whether chunks went to blocks of their own (split) and were joined
// by attention_join. Arithmetic that both have is spelled out, so that no compiler
// fuses it in one and not the other.

struct attention_args {
  u64 q, k, v, starts, lens, table, out;
  u64 sums, ends;  // split: [sequences, rows of a tile, heads, chunks, d] and [.., 2] float32
  i64 q_row, q_head, k_block, k_token, k_head, v_block, v_token, v_head, table_row, out_row, out_head;
  int heads, group;               // heads of Q, and how many share one of the cache
  int d, tokens, blocks, window;  // tokens of a block; window 0: all
  int least, most;                // rows of the sequences that this launch takes
  int tiles;                      // of one sequence
  int chunks;                     // split: blocks in z; else 0
  float scale;                    // times log2(e)
  int q_aligned, out_paired;
  int each;                       // heads of the cache that a block takes, one after another
  int shift;                      // tokens is 1 << shift, if not negative
  int v_as_k;                     // V has the strides of K
};

constexpr int tile_tokens = 32, chunk_tokens = 256;
#define nothing __uint_as_float(0xff800000u)  // -infinity: no score yet

// span is what a block works on; rows 0: nothing.
struct span {
  int sequence, row0, rows;  // row0: of Q
  int position;              // of row0
  int begin, end;            // positions that any of the rows sees
};

DEVICE span find_span(const attention_args &a, int tile_rows) {
  span s = {(int)blockIdx.x / a.tiles, 0, 0, 0, 0, 0};
  int start = load_early((const int *)a.starts + s.sequence), n = load_early((const int *)a.starts + s.sequence + 1) - start;
  int first = (int)blockIdx.x % a.tiles * tile_rows;
  if (n < a.least || n > a.most || first >= n) return s;
  s.row0 = start + first;
  s.rows = min(tile_rows, n - first);
  s.position = load_early((const int *)a.lens + s.sequence) - n + first;
  s.end = s.position + s.rows;
  s.begin = a.window > 0 ? max(0, s.position - a.window + 1) : 0;
  return s;
}

// How much of an old and a new part, whose largest scores are m and n, stays when
// they are joined; m becomes the larger.
DEVICE void join(float &m, float n, float &old_part, float &new_part) {
  float most = fmaxf(m, n), base = most == nothing ? 0.f : most;
  old_part = exp2_fast(__fadd_rn(m, -base));
  new_part = exp2_fast(__fadd_rn(n, -base));
  m = most;
}

DEVICE float joined(float old, float old_part, float add, float new_part) {
  return __fmaf_rn(add, new_part, __fmul_rn(old, old_part));
}

// d is the head size, rounded up to what is instantiated.
template <int d, int warps>
DEVICE void attend(const attention_args &a, unsigned char *memory) {
  constexpr int threads = 32 * warps, queries = 16 * warps, stages = warps == 1 ? 2 : 3;
  constexpr int chunks = d / 8;               // of 16 bytes in a row
  constexpr int row_bytes = d * 2;
  constexpr int half_bytes = tile_tokens * row_bytes, stage_bytes = 2 * half_bytes;
  constexpr int passes = tile_tokens * chunks / threads;
  constexpr bool even = threads % chunks == 0;  // a thread has the same chunk in all passes
  static_assert(tile_tokens * chunks % threads == 0, "each warp brings whole passes");
  unsigned char *ring = memory, *asked = memory + stages * stage_bytes;  // asked: a head's queries
  // Where a chunk of a row lies: eight rows' in different banks.
  auto place = [](int row, int chunk) { return row * row_bytes + ((chunk ^ (d % 64 == 0 ? row & 7 : row >> 1 & 3)) << 4); };

  // Where things are does not come from kernels in front; queries, keys and values do.
  launch_dependents();
  span s = find_span(a, queries / a.group);
  int from = s.begin / tile_tokens, to = (s.end + tile_tokens - 1) / tile_tokens;  // tiles
  if (a.chunks > 0) {
    constexpr int per_chunk = chunk_tokens / tile_tokens;
    from = max(from, (int)blockIdx.z * per_chunk);
    to = min(to, ((int)blockIdx.z + 1) * per_chunk);
  }
  if (s.rows == 0 || from >= to) {  // the whole block
    wait_dependencies();
    return;
  }
  int kv_head = blockIdx.y * a.each, left = (to - from) * a.each;

  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int *table = (const int *)a.table + s.sequence * a.table_row;
  // Every lane looks one position of a tile up, one tile ahead; each thread then brings
  // its chunks of some.
  auto in_table = [&](int p) { return a.shift >= 0 ? p >> a.shift : p / a.tokens; };
  auto look = [&](int tile) {
    int p = tile * tile_tokens + lane;
    return p < s.end ? table[in_table(p)] : -1;
  };
  int p0 = from * tile_tokens + lane;
  int next_tile = from, next_head = kv_head, to_bring = left, block = p0 < s.end ? load_early(table + in_table(p0)) : -1;
  wait_dependencies();
  // Query i is head i % group of row i / group. They come as they are; what is behind the
  // last is never looked at.
  auto ask = [&] {
    for (int item = threadIdx.x; item < s.rows * a.group * chunks; item += threads) {
      int i = item / chunks, at = item % chunks * 8, row = i / a.group;
      bool there = at < a.d;
      const u16 *head = (const u16 *)a.q + (s.row0 + row) * a.q_row + (next_head * a.group + i % a.group) * a.q_head;
      unsigned char *to = asked + place(i, item % chunks);
      if (a.q_aligned) {
        copy_async(to, head + (there ? at : 0), there ? 16 : 0);
      } else {
        float v[8];
        load8(v, head, act_type, at, there ? 8 : 0, false);
        *(uint4 *)to = pack(v);
      }
    }
  };
  // Brings the next tile, with the queries of a head before its first.
  auto bring = [&](int slot) {
    if (to_bring > 0) {
      if (next_tile == from) ask();
      unsigned char *stage = ring + slot * stage_bytes;
      if (even && a.shift >= 4) {
        // Sixteen positions lie in one block, a token's stride apart.
        constexpr int at_once = even ? threads / chunks : 16, groups = at_once > 16 ? 1 : 2;
        int lead = threadIdx.x / chunks, chunk = threadIdx.x % chunks;
#pragma unroll
        for (int g = 0; g < groups; g++) {
          int row = g * 16 + lead, p = next_tile * tile_tokens + row;
          int in = __shfl_sync(all_lanes, block, row & 31);
          i64 token = p & (a.tokens - 1);
          const u16 *k = (const u16 *)a.k + in * a.k_block + token * a.k_token + next_head * a.k_head + chunk * 8;
          const u16 *v = (const u16 *)a.v + in * a.v_block + token * a.v_token + next_head * a.v_head + chunk * 8;
          // Those from the least on, as many as there are, are seen; where nothing is copied,
          // addresses do not count.
          int least = s.begin - p;
          u32 seen = chunk * 8 < a.d && in >= 0 && in < a.blocks ? s.end - s.begin : 0;  // d is a multiple of 8
#pragma unroll
          for (int i = 0; i < 16; i += at_once) {
            int at = place(row + i, chunk), bytes = (u32)(i - least) < seen ? 16 : 0;
            copy_async(stage + at, k, bytes);
            copy_async(stage + half_bytes + at, v, bytes);
            k += at_once * a.k_token, v += at_once * a.v_token;
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
          int at = place(row, chunk);
          copy_async(stage + at, (const u16 *)a.k + (there ? k_row + chunk * 8 : 0), there ? 16 : 0);
          copy_async(stage + half_bytes + at, (const u16 *)a.v + (there ? v_row + chunk * 8 : 0), there ? 16 : 0);
        }
      }
      if (++next_tile == to) next_tile = from, next_head++;
      if (--to_bring > 0) block = look(next_tile);
    }
    copy_commit();
  };
  // A thread has rows lane/4 and lane/4 + 8 of its warp's queries.
  int sees_from[2], sees_to[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    int row = (warp * 16 + h * 8 + (lane >> 2)) / a.group;
    int p = s.position + row;
    sees_to[h] = row < s.rows ? p : -1;
    sees_from[h] = a.window > 0 ? p - a.window + 1 : 0;
  }

  u32 q[d / 16][4];
  float total[d / 8][4], part[d / 8][4];
  float total_most[2], total_sum[2], most[2], sum[2];  // sum: of this thread's columns
  int slot = 0, next = 0;
#pragma unroll 1
  for (int tile = from, ahead = stages - 1; left > 0;) {
    if (ahead == 0) {
      copy_wait<stages - 2>();
      __syncthreads();
    }
    if (ahead == 0 && tile == from) {
#pragma unroll
      for (int i = 0; i < d / 16; i++) load_matrices(q[i], asked + place(warp * 16 + (lane & 15), i * 2 + (lane >> 4)));
      __syncwarp();  // more than one head have blocks of one warp
#pragma unroll
      for (int h = 0; h < 2; h++) total_most[h] = most[h] = nothing, total_sum[h] = sum[h] = 0;
#pragma unroll
      for (int j = 0; j < d / 8; j++)
#pragma unroll
        for (int c = 0; c < 4; c++) total[j][c] = part[j][c] = 0;
    }
    bring(next);
    if (++next == stages) next = 0;
    if (ahead > 0) {
      ahead--;
      continue;
    }
    left--;
    const unsigned char *keys = ring + slot * stage_bytes, *values = keys + half_bytes;
    if (++slot == stages) slot = 0;

    float score[tile_tokens / 8][4] = {};
#pragma unroll
    for (int i = 0; i < d / 16; i++)
#pragma unroll
      for (int j = 0; j < tile_tokens / 8; j += 2) {
        u32 k[4];
        load_matrices(k, keys + place(j * 8 + (lane >> 4) * 8 + (lane & 7), i * 2 + (lane >> 3 & 1)));
        mma(score[j], q[i], k[0], k[1]);
        mma(score[j + 1], q[i], k[2], k[3]);
      }

    float stays[2];
    bool changed = false;  // what was summed up has to be scaled
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float tile_most = nothing;
#pragma unroll
      for (int j = 0; j < tile_tokens / 8; j++)
#pragma unroll
        for (int c = 2 * h; c < 2 * h + 2; c++) {
          int p = tile * tile_tokens + j * 8 + (lane & 3) * 2 + (c & 1);
          bool seen = p >= sees_from[h] && p <= sees_to[h];
          score[j][c] = seen ? __fmul_rn(score[j][c], a.scale) : nothing;
          tile_most = fmaxf(tile_most, score[j][c]);
        }
      tile_most = fmaxf(tile_most, __shfl_xor_sync(all_lanes, tile_most, 1));
      tile_most = fmaxf(tile_most, __shfl_xor_sync(all_lanes, tile_most, 2));
      float now = fmaxf(most[h], tile_most), base = now == nothing ? 0.f : now;
      stays[h] = most[h] == now ? 1.f : exp2_fast(__fadd_rn(most[h], -base));
      changed |= most[h] != now && most[h] != nothing;
      most[h] = now;
      float added = 0;
#pragma unroll
      for (int j = 0; j < tile_tokens / 8; j++)
#pragma unroll
        for (int c = 2 * h; c < 2 * h + 2; c++) {
          score[j][c] = exp2_fast(__fadd_rn(score[j][c], -base));
          added = __fadd_rn(added, score[j][c]);
        }
      sum[h] = __fmaf_rn(sum[h], stays[h], added);
    }
    if (__ballot_sync(all_lanes, changed)) {
#pragma unroll
      for (int j = 0; j < d / 8; j++)
#pragma unroll
        for (int c = 0; c < 4; c++) part[j][c] = __fmul_rn(part[j][c], stays[c / 2]);
    }

#pragma unroll
    for (int i = 0; i < tile_tokens / 16; i++) {
      u32 p[4] = {pack_act(score[2 * i][0], score[2 * i][1]), pack_act(score[2 * i][2], score[2 * i][3]),
                  pack_act(score[2 * i + 1][0], score[2 * i + 1][1]), pack_act(score[2 * i + 1][2], score[2 * i + 1][3])};
#pragma unroll
      for (int j = 0; j < d / 8; j += 2) {
        u32 v[4];
        load_matrices_transposed(v, values + place(i * 16 + (lane & 15), j + (lane >> 4)));
        mma(part[j], p, v[0], v[1]);
        mma(part[j + 1], p, v[2], v[3]);
      }
    }

    tile++;
    if (tile * tile_tokens % chunk_tokens != 0 && tile < to) continue;
    // A chunk ends here.
#pragma unroll
    for (int h = 0; h < 2; h++) {
      sum[h] = __fadd_rn(sum[h], __shfl_xor_sync(all_lanes, sum[h], 1));
      sum[h] = __fadd_rn(sum[h], __shfl_xor_sync(all_lanes, sum[h], 2));
    }
    if (a.chunks == 0) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float old_part, new_part;
        join(total_most[h], most[h], old_part, new_part);
        total_sum[h] = joined(total_sum[h], old_part, sum[h], new_part);
#pragma unroll
        for (int j = 0; j < d / 8; j++)
#pragma unroll
          for (int c = 2 * h; c < 2 * h + 2; c++) {
            total[j][c] = joined(total[j][c], old_part, part[j][c], new_part);
            part[j][c] = 0;
          }
        most[h] = nothing, sum[h] = 0;
      }
      if (tile < to) continue;
    }
    // And all that the queries see.
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int i = warp * 16 + h * 8 + (lane >> 2), row = i / a.group;
      if (row >= s.rows) continue;
      i64 n = s.row0 + row;
      int head = kv_head * a.group + i % a.group;
      if (a.chunks > 0) {
        i64 at = ((s.sequence * (queries / a.group) + row) * (i64)a.heads + head) * a.chunks + blockIdx.z;
        if ((lane & 3) == 0) {
          ((float *)a.ends)[2 * at] = most[h];
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

// Joins the chunks of one head of Q (y) for the rows of one tile, as a block that
// has them all does.
KERNEL(128, 1) attention_join(const attention_args a) {
  begin();
  span s = find_span(a, 16 / a.group);
  int head = blockIdx.y, column = threadIdx.x;
  for (int i = 0; i < s.rows; i++) {
    i64 n = s.row0 + i;
    int p = s.position + i, begin = a.window > 0 ? max(0, p - a.window + 1) : 0;
    float total = 0, total_most = nothing, total_sum = 0;
    for (int c = begin / chunk_tokens; c <= p / chunk_tokens; c++) {
      i64 at = ((s.sequence * (16 / a.group) + i) * (i64)a.heads + head) * a.chunks + c;
      float old_part, new_part;
      join(total_most, ((const float *)a.ends)[2 * at], old_part, new_part);
      total_sum = joined(total_sum, old_part, ((const float *)a.ends)[2 * at + 1], new_part);
      if (column < a.d) total = joined(total, old_part, ((const float *)a.sums)[at * a.d + column], new_part);
    }
    if (column < a.d) ((u16 *)a.out)[n * a.out_row + head * a.out_head + column] = to_act(__fmul_rn(total, __fdiv_rn(1.f, total_sum)));
  }
}
