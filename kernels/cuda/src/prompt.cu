// Causal attention over a paged KV cache on the tensor cores of sm_90a (wgmma), for heads of 128
// elements, as a persistent kernel: what attention.cu computes, for prompts, and for few tokens
// with long contexts.
//
// An item of work is one KV head for a tile of 128 queries, a query being one token and head of Q
// that shares the KV head (GQA). One warpgroup loads keys and values in tiles of 128 positions, from
// a multiple of 128 on, by TMA from the blocks of the cache; two compute 64 queries each.
// While the tensor cores multiply weights and values of a tile, a warpgroup computes the softmax
// of the next. Probabilities stay in registers, as operand A.
//
// The softmax is online, as in FlashAttention-3 (https://arxiv.org/abs/2407.08608): over all positions
// or (joins) inside chunks of positions, which are then joined in ascending order. With joins chunks are small
// at first, so that a short context makes enough of them, and large from position 4096 on, so that a
// long one has few partial results. Without, a sequence may be split into chunks of chunk_tiles.
// Positions that a query does not attend to leave its state unchanged, bit for bit. So a token's
// result depends only on the positions it attends to: neither on its tile nor on how its prompt was
// cut, and with joins not even on whether its chunks are items of their own (split) and are joined by
// prompt_join. Without, it depends on chunk_tiles, too.

struct prompt_args {
  tensor_map k, v;         // rows of both: tokens of the cache, of all its KV heads; tiles of box of them
  u64 q, values, starts, lens, table, out;
  u64 sums, ends;          // split: partial results, as of attention_args
  i64 q_row, q_head, k_head, v_block, v_token, v_head, table_row, out_row, out_head;
  int k_block_rows, v_block_rows;  // rows of the maps from block to block
  int k_rows, v_rows;      // rows of the maps
  int sequences, heads, group;  // heads of Q, and heads of Q per KV head
  int shift, blocks;       // a KV block has 1 << shift tokens
  int box;                 // positions per TMA copy: those of a block, at most 128
  int window;              // 0: all
  int min_rows, max_rows;  // this launch computes the sequences with that many tokens in the step
  int chunks;              // split: chunks of a sequence at most; else 0
  int joins;               // the softmax is online inside chunks, which are joined; 0: over all positions of an item
  int chunk_tiles;         // split, without joins: tiles of a chunk
  float scale;             // multiplied by log2(e)
};

constexpr int head_size = 128, tile_queries = 128, tile_positions = 128;
constexpr int half_bytes = tile_positions * 128;  // 64 elements of each position
constexpr int slot_bytes = 2 * half_bytes;        // keys or values of a tile
constexpr int query_bytes = 64 * 128;             // 64 elements of each query of a warpgroup
constexpr int slots = 4;
constexpr int cached_positions = 65536;           // 32 MiB of keys and values of one KV head

// With joins chunks have 256 positions up to position 4096, and 1024 from there on. prompt.go counts them.
constexpr int small_chunk = 256, large_chunk = 1024, large_from = 4096;

DEVICE int chunk_of(const prompt_args &a, int position) {
  if (a.chunk_tiles > 0) return position / (a.chunk_tiles * tile_positions);
  return position < large_from ? position / small_chunk : large_from / small_chunk + (position - large_from) / large_chunk;
}

// The first tile of a chunk.
DEVICE int chunk_tile(const prompt_args &a, int chunk) {
  if (a.chunk_tiles > 0) return chunk * a.chunk_tiles;
  int more = max(0, chunk - large_from / small_chunk);
  return ((chunk - more) * small_chunk + more * large_chunk) / tile_positions;
}

DEVICE bool starts_chunk(int tile) {
  return tile % ((tile < large_from / tile_positions ? small_chunk : large_chunk) / tile_positions) == 0;
}

// prompt_item is one item of work; rows 0: none are left.
struct prompt_item {
  int sequence, row0, rows;  // tokens of Q, rows of it
  int position;              // of row0
  int kv_head;
  int from, to;              // tiles of positions
  int begin, end;            // positions of the sequence that any query of this step attends to
};

struct prompt {
  const prompt_args &a;
  ring r;
  prompt_item *items;  // of a slot with the first keys of an item
  unsigned char *queries;
  float4 *totals;

  // The schedule: every block takes items from the list of all of them in turn, in both
  // directions, so that longer and shorter ones even out. The list has the sequences in order, and
  // of a sequence, or some of its KV heads, its last and longest tile first. The lanes look at 32 sequences at a time.
  struct cursor {
    int first, before;             // first of 32 sequences, and items of those before them
    int rows, context, items, to;  // of this lane's: items, and items up to its last one
  };

  DEVICE int kv_heads() const { return a.heads / a.group; }
  DEVICE int tile_rows() const { return tile_queries / a.group; }
  DEVICE int first_seen(int position) const { return a.window > 0 ? max(0, position - a.window + 1) : 0; }

  // Items of a KV head and tile of a sequence: with split one for each chunk.
  DEVICE int parts(int rows, int context) const {
    return a.chunks == 0 ? 1 : chunk_of(a, context - 1) + 1 - chunk_of(a, first_seen(context - rows));
  }

  DEVICE void look(cursor &c) const {
    int s = c.first + (threadIdx.x & 31);
    c.rows = c.context = c.items = 0;
    if (s < a.sequences) {
      int start = load_early((const int *)a.starts + s);
      c.rows = load_early((const int *)a.starts + s + 1) - start;
      c.context = load_early((const int *)a.lens + s);
      if (c.rows >= a.min_rows && c.rows <= a.max_rows)
        c.items = (c.rows + tile_rows() - 1) / tile_rows() * parts(c.rows, c.context) * kv_heads();
    }
    c.to = c.items;
#pragma unroll
    for (int j = 1; j < 32; j <<= 1) {
      int v = __shfl_up_sync(all_lanes, c.to, j);
      if ((threadIdx.x & 31) >= j) c.to += v;
    }
    c.to += c.before;
  }

  // The item with that index, which increases from call to call.
  DEVICE prompt_item find(cursor &c, int index) const {
    prompt_item t = {0, 0, 0, 0, 0, 0, 0, 0, 0};
    u32 behind;
    while ((behind = __ballot_sync(all_lanes, index < c.to)) == 0) {
      c.before = __shfl_sync(all_lanes, c.to, 31);
      c.first += 32;
      if (c.first >= a.sequences) return t;
      look(c);
    }
    int lane = __popc((behind & -behind) - 1);  // of the sequence
    int n = __shfl_sync(all_lanes, c.rows, lane), context = __shfl_sync(all_lanes, c.context, lane);
    int i = index - __shfl_sync(all_lanes, c.to - c.items, lane);
    int tiles = (n + tile_rows() - 1) / tile_rows(), parts = this->parts(n, context);
    t.sequence = c.first + lane;
    // As many KV heads in turn as have room for their keys and values in the L2 cache.
    int in_turn = a.chunks > 0 ? kv_heads() : max(1, min(kv_heads(), cached_positions / (context - first_seen(context - n))));
    int before = i / (tiles * parts * in_turn) * in_turn;  // KV heads
    i -= before * tiles * parts;
    in_turn = min(in_turn, kv_heads() - before);
    t.kv_head = before + i % in_turn;
    i /= in_turn;
    int part = parts - 1 - i % parts, first = (tiles - 1 - i / parts) * tile_rows();
    t.row0 = load_early((const int *)a.starts + t.sequence) + first;
    t.rows = min(tile_rows(), n - first);
    t.position = context - n + first;
    t.begin = first_seen(context - n);
    t.end = context;
    t.from = first_seen(t.position) / tile_positions;
    t.to = (t.position + t.rows + tile_positions - 1) / tile_positions;
    if (a.chunks > 0) {
      int chunk = chunk_of(a, t.begin) + part;
      t.from = max(t.from, chunk_tile(a, chunk));
      t.to = min(t.to, chunk_tile(a, chunk + 1));
    }
    return t;
  }

  // The KV block of this lane's box of a tile, -1 if there is none.
  DEVICE int block_of(const prompt_item &t, int tile) const {
    int lane = threadIdx.x & 31, p = tile * tile_positions + lane * a.box;
    if (lane * a.box >= tile_positions || tile >= t.to || p >= t.end || p + a.box <= t.begin) return -1;
    int block = load_early((const int *)a.table + t.sequence * a.table_row + (p >> a.shift));
    return block < a.blocks ? block : -1;
  }

  // The four warps of the producer issue a quarter of a tile's copies each: one every so many
  // cycles is what a warp can do.
  DEVICE bool own_box() const {
    int lane = threadIdx.x & 31;
    return lane * a.box < tile_positions && (lane & 3) == threadIdx.x >> 5;
  }

  // Copies this lane's box; the tiles of a map end before row outside, so that it has zeros.
  DEVICE void copy_box(unsigned char *slot, const tensor_map *map, int element, int row, int outside, int block, int tile, u64 *full) const {
    int lane = threadIdx.x & 31, p = tile * tile_positions + lane * a.box;
    int at = block < 0 ? outside : block * row + (p & ((1 << a.shift) - 1));
    copy_tile(slot + lane * a.box * 128, map, element, at, full);
    copy_tile(slot + half_bytes + lane * a.box * 128, map, element + 64, at, full);
  }

  // The arrivals of the producer's warps but the first, whose arrival says how many bytes to expect.
  DEVICE void arrive_rest(u64 *full) const {
    if (threadIdx.x > 0 && threadIdx.x % 32 == 0) barrier_arrive(full);
  }

  // Positions that no query attends to may be anything in keys, as their scores are not used.
  DEVICE void load_keys(const prompt_item &t, int tile, int block, pipeline_state &now) const {
    u64 *full = &r.full[now.slot];
    if (own_box())
      copy_box(r.memory + now.slot * slot_bytes, &a.k, (int)(t.kv_head * a.k_head), a.k_block_rows, a.k_rows, block, tile, full);
    if (threadIdx.x == 0) barrier_expect(full, slot_bytes);
    arrive_rest(full);
    advance(r, now);
  }

  // In values they must be numbers, as they are multiplied by zero: boxes that have such positions
  // are copied in chunks of 16 bytes, the others set to zero.
  DEVICE void load_values(const prompt_item &t, int tile, int block, pipeline_state &now) const {
    int lane = threadIdx.x & 31, p = tile * tile_positions + lane * a.box;
    unsigned char *slot = r.memory + now.slot * slot_bytes;
    u64 *full = &r.full[now.slot];
    bool whole = block < 0 || (p >= t.begin && p + a.box <= t.end);
    u32 partly = __ballot_sync(all_lanes, !whole);  // lanes without a box have no block
    barrier_wait(&r.empty[now.slot], now.parity);
    int bytes = slot_bytes - __popc(partly) * a.box * 256;
    if (own_box() && whole) copy_box(slot, &a.v, (int)(t.kv_head * a.v_head), a.v_block_rows, a.v_rows, block, tile, full);
    u32 own = __ballot_sync(all_lanes, !whole && own_box());
    for (partly = own; partly != 0; partly &= partly - 1) {
      int box = __popc((partly & -partly) - 1), in = __shfl_sync(all_lanes, block, box);
      const u16 *from = (const u16 *)a.values + in * a.v_block + t.kv_head * a.v_head;
      for (int i = lane; i < a.box * 16; i += 32) {
        int row = box * a.box + (i >> 4), chunk = i & 15, p = tile * tile_positions + row;
        bool there = p >= t.begin && p < t.end;
        i64 token = p & ((1 << a.shift) - 1);
        copy_async(slot + (chunk >> 3) * half_bytes + row * 128 + (((chunk & 7) ^ (row & 7)) << 4), there ? from + token * a.v_token + chunk * 8 : from, there ? 16 : 0);
      }
    }
    if (own != 0) barrier_await_copies(full);
    __syncwarp();
    if (threadIdx.x == 0) barrier_expect(full, bytes);
    arrive_rest(full);
    advance(r, now);
  }

  // Producer: one warpgroup. Slots have, in this order, keys of the first tile, then keys of each
  // further tile and values of the one before, then values of the last.
  DEVICE void produce() const {
    pipeline_state now = {0, 1};
    cursor c = {0, 0, 0, 0, 0, 0};
    prefetch_map(&a.k);
    prefetch_map(&a.v);
    look(c);
    for (int round = 0;; round++) {
      int at = round & 1 ? (int)(gridDim.x - 1 - blockIdx.x) : (int)blockIdx.x;
      prompt_item t = find(c, round * (int)gridDim.x + at);
      int block = block_of(t, t.from);
      if (round == 0) wait_dependencies();
      barrier_wait(&r.empty[now.slot], now.parity);
      if (threadIdx.x == 0) items[now.slot] = t;
      if (t.rows == 0) {
        if (threadIdx.x == 0) barrier_arrive(&r.full[now.slot]);
        arrive_rest(&r.full[now.slot]);
        return;
      }
      load_keys(t, t.from, block, now);
      for (int tile = t.from; tile < t.to; tile++) {
        int next = block_of(t, tile + 1);
        if (tile + 1 < t.to) {
          barrier_wait(&r.empty[now.slot], now.parity);
          load_keys(t, tile + 1, next, now);
        }
        load_values(t, tile, block, now);
        block = next;
      }
    }
  }

  // The state of a consumer: one warpgroup. A thread has rows lane/4 (h = 0) and lane/4 + 8 (h =
  // 1) of its warp's 16 queries, and of each eight columns 2 (lane%4) and the next.
  struct state {
    pipeline_state now;
    float part[64];              // of this chunk: weights times values
    float row_max[2], sum[2];    // of this chunk: scores, unscaled; sum over this thread's columns
    float total_max[2], total_sum[2];  // of the chunks before, whose values are in totals
    int attends_from[2], attends_to[2];
  };

  DEVICE unsigned char *await(const pipeline_state &now) const {
    barrier_wait(&r.full[now.slot], now.parity);
    return r.memory + now.slot * slot_bytes;
  }

  // Values of a tile where the sequence begins or ends may have been copied in chunks.
  DEVICE unsigned char *await_values(const state &s, const prompt_item &t, int tile) const {
    unsigned char *slot = await(s.now);
    if (tile * tile_positions < t.begin || (tile + 1) * tile_positions > t.end) fence_shared();
    return slot;
  }

  DEVICE void release(int slot) const {
    if (threadIdx.x % 128 == 0) barrier_arrive(&r.empty[slot]);
  }

  // Loads the queries of this warpgroup. The memory behind the last is never read.
  DEVICE void load_queries(const prompt_item &t, int group, unsigned char *tile) const {
    meet_warpgroup(group);  // products with the queries before have ended in all warps
    int chunk = threadIdx.x & 15;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      int row = i * 8 + (threadIdx.x % 128 >> 4), n = group * 64 + row, token = n / a.group;
      bool there = token < t.rows;
      const u16 *from = (const u16 *)a.q + (t.row0 + (there ? token : 0)) * a.q_row + (t.kv_head * a.group + n % a.group) * a.q_head + chunk * 8;
      copy_async(tile + (chunk >> 3) * query_bytes + row * 128 + (((chunk & 7) ^ (row & 7)) << 4), from, there ? 16 : 0);
    }
    copy_commit();
    copy_wait<0>();
    fence_shared();
    meet_warpgroup(group);
  }

  // Starts score = queries times keys.
  DEVICE void start_scores(float (&score)[64], u64 queries, const unsigned char *keys) const {
    u64 k = tile_descriptor(keys);
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < head_size / 16; i++)
      wgmma_shared(score, queries + i / 4 * (query_bytes >> 4) + i % 4 * 2, k + i / 4 * (half_bytes >> 4) + i % 4 * 2, i > 0);
    wgmma_commit();
  }

  // Starts part += weights times values.
  DEVICE void start_values(state &s, const u32 (&weights)[tile_positions / 16][4], const unsigned char *values, int accumulate) const {
    u64 v = transposed_descriptor(values, half_bytes);
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < tile_positions / 16; i++) wgmma_registers(s.part, weights[i], v + i * 128, i > 0 || accumulate);
    wgmma_commit();
  }

  // Turns scores into weights, 2^(scale (score - maximum)), and returns the factors of what was
  // computed with the maxima before.
  DEVICE void softmax(state &s, float (&score)[64], int tile, bool masked, float (&rescale)[2]) const {
    if (masked) {
      int lane = threadIdx.x & 31;
#pragma unroll
      for (int i = 0; i < 64; i++) {
        int p = tile * tile_positions + i / 4 * 8 + (lane & 3) * 2 + (i & 1);
        score[i] = p >= s.attends_from[i / 2 & 1] && p <= s.attends_to[i / 2 & 1] ? score[i] : neg_infinity;
      }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float tile_max = neg_infinity;
#pragma unroll
      for (int j = 0; j < 16; j++) tile_max = fmaxf(tile_max, fmaxf(score[4 * j + 2 * h], score[4 * j + 2 * h + 1]));
      tile_max = fmaxf(tile_max, __shfl_xor_sync(all_lanes, tile_max, 1));
      tile_max = fmaxf(tile_max, __shfl_xor_sync(all_lanes, tile_max, 2));
      float now = fmaxf(s.row_max[h], tile_max), base = now == neg_infinity ? 0.f : __fmul_rn(now, a.scale);
      rescale[h] = exp2_fast(__fadd_rn(__fmul_rn(s.row_max[h], a.scale), -base));
      s.row_max[h] = now;
      float added[2] = {0, 0};
#pragma unroll
      for (int j = 0; j < 16; j++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
          float &x = score[4 * j + 2 * h + c];
          x = exp2_fast(__fmaf_rn(x, a.scale, -base));
          added[c] = __fadd_rn(added[c], x);
        }
      s.sum[h] = __fmaf_rn(s.sum[h], rescale[h], __fadd_rn(added[0], added[1]));
    }
  }

  DEVICE void pack_weights(u32 (&weights)[tile_positions / 16][4], const float (&score)[64]) const {
#pragma unroll
    for (int i = 0; i < tile_positions / 16; i++)
#pragma unroll
      for (int w = 0; w < 4; w++) weights[i][w] = pack_act(score[8 * i + 2 * w], score[8 * i + 2 * w + 1]);
  }

  // Sums of whole rows, of the chunk that ends.
  DEVICE void sum_rows(float (&sum)[2]) const {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      sum[h] = __fadd_rn(sum[h], __shfl_xor_sync(all_lanes, sum[h], 1));
      sum[h] = __fadd_rn(sum[h], __shfl_xor_sync(all_lanes, sum[h], 2));
    }
  }

  // Joins a chunk with the maxima row_max and this thread's sums to those before; the item's last
  // to part, others to totals.
  DEVICE void join_chunk(state &s, const float (&row_max)[2], float (&sum)[2], float4 *total, bool first, bool last) const {
    float old_part[2], new_part[2];
    sum_rows(sum);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      join(s.total_max[h], __fmul_rn(row_max[h], a.scale), old_part[h], new_part[h]);
      s.total_sum[h] = joined(s.total_sum[h], old_part[h], sum[h], new_part[h]);
    }
#pragma unroll
    for (int j = 0; j < 16; j++) {
      float4 t = {0, 0, 0, 0};
      if (!first) t = total[j * 128];
      float *part = s.part + 4 * j;
      t.x = joined(t.x, old_part[0], part[0], new_part[0]), t.y = joined(t.y, old_part[0], part[1], new_part[0]);
      t.z = joined(t.z, old_part[1], part[2], new_part[1]), t.w = joined(t.w, old_part[1], part[3], new_part[1]);
      if (last)
        part[0] = t.x, part[1] = t.y, part[2] = t.z, part[3] = t.w;
      else
        total[j * 128] = t;
    }
  }

  // The query of this thread's row h: its token within the item's, and its head of Q.
  DEVICE bool query(const prompt_item &t, int group, int h, int &token, int &head) const {
    int i = group * 64 + (threadIdx.x % 128 >> 5) * 16 + h * 8 + (threadIdx.x >> 2 & 7);
    token = i / a.group;
    head = t.kv_head * a.group + i % a.group;
    return token < t.rows;
  }

  // Split: stores the partial results of an item, which is a chunk.
  DEVICE void store_partial(state &s, const prompt_item &t, int group, int chunk) const {
    int lane = threadIdx.x & 31;
    sum_rows(s.sum);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int token, head;
      if (!query(t, group, h, token, head)) continue;
      i64 at = ((t.sequence * (i64)a.max_rows + token) * a.heads + head) * a.chunks + chunk;
      if ((lane & 3) == 0) {
        ((float *)a.ends)[2 * at] = __fmul_rn(s.row_max[h], a.scale);
        ((float *)a.ends)[2 * at + 1] = s.sum[h];
      }
      float *to = (float *)a.sums + at * head_size + (lane & 3) * 2;
#pragma unroll
      for (int j = 0; j < 16; j++) *(float2 *)(to + j * 8) = make_float2(s.part[4 * j + 2 * h], s.part[4 * j + 2 * h + 1]);
    }
  }

  DEVICE void store(const state &s, const prompt_item &t, int group) const {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int token, head;
      if (!query(t, group, h, token, head)) continue;
      u16 *out = (u16 *)a.out + (t.row0 + token) * a.out_row + head * a.out_head + (lane & 3) * 2;
      float inverse = __fdiv_rn(1.f, s.total_sum[h]);
#pragma unroll
      for (int j = 0; j < 16; j++)
        *(u32 *)(out + j * 8) = pack_act(__fmul_rn(s.part[4 * j + 2 * h], inverse), __fmul_rn(s.part[4 * j + 2 * h + 1], inverse));
    }
  }

  // Consumer: one item, whose first keys are there.
  DEVICE void attend(state &s, const prompt_item &t, int group) const {
    unsigned char *query_tile = queries + group * 2 * query_bytes;
    float4 *total = totals + group * 16 * 128 + threadIdx.x % 128;
    load_queries(t, group, query_tile);
    u64 q = tile_descriptor(query_tile);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int token, head;
      bool there = query(t, group, h, token, head);
      s.attends_to[h] = there ? t.position + token : -1;
      s.attends_from[h] = first_seen(t.position + token);
      s.row_max[h] = s.total_max[h] = neg_infinity, s.sum[h] = s.total_sum[h] = 0;
    }
    int seen_by_all = first_seen(t.position + t.rows - 1);  // from there to t.position
    auto masked = [&](int tile) { return tile * tile_positions < seen_by_all || (tile + 1) * tile_positions - 1 > t.position; };

    float score[64], rescale[2], row_max[2], sum[2];
    u32 weights[tile_positions / 16][4];
    start_scores(score, q, await(s.now));
    wgmma_wait<0>(score);
    release(s.now.slot);
    advance(r, s.now);
    softmax(s, score, t.from, masked(t.from), rescale);
    pack_weights(weights, score);
    bool turns = t.rows * a.group > 64;  // both warpgroups have queries: one's products run while the other computes a softmax
    bool first = true;      // no chunk has been joined
    bool next_chunk = true;  // the weights are of another chunk than part, which has nothing yet
    // Before part gets the product of the weights: it is rescaled, or its chunk has ended.
    auto prepare_part = [&](int tile) {
      if (!next_chunk) {
#pragma unroll
        for (int i = 0; i < 64; i++) s.part[i] = __fmul_rn(s.part[i], rescale[i / 2 & 1]);
      } else if (tile > t.from) {
        join_chunk(s, row_max, sum, total, first, false);
        first = false;
      }
    };
#pragma unroll 1
    for (int tile = t.from + 1; tile < t.to; tile++) {
      if (turns) await_turn(group);
      start_scores(score, q, await(s.now));
      int keys = s.now.slot;
      advance(r, s.now);
      prepare_part(tile - 1);  // while the tensor cores work
      start_values(s, weights, await_values(s, t, tile - 1), !next_chunk);
      if (turns) pass_turn(1 - group);
      wgmma_wait<1>(score);
      release(keys);
      next_chunk = a.joins != 0 && starts_chunk(tile);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        row_max[h] = s.row_max[h], sum[h] = s.sum[h];
        if (next_chunk) s.row_max[h] = neg_infinity, s.sum[h] = 0;
      }
      softmax(s, score, tile, masked(tile), rescale);
      compute_now(score);
      int values = s.now.slot;
      advance(r, s.now);
      await(s.now);  // a branch, before which compilers do not move the wait for the values' product
      wgmma_wait<0>(s.part);
      release(values);
      pack_weights(weights, score);
    }
    prepare_part(t.to - 1);
    start_values(s, weights, await_values(s, t, t.to - 1), !next_chunk);
    wgmma_wait<0>(s.part);
    release(s.now.slot);
    advance(r, s.now);
    if (a.chunks > 0) {
      store_partial(s, t, group, chunk_of(a, t.from * tile_positions));
      return;
    }
    join_chunk(s, s.row_max, s.sum, total, first, true);
    store(s, t, group);
  }

  DEVICE void consume() const {
    int group = threadIdx.x / 128 - 1;
    state s;
    s.now = {0, 0};
    wait_dependencies();
    if (group == 1) pass_turn(0);
    for (;;) {
      await(s.now);
      prompt_item t = items[s.now.slot];
      if (t.rows == 0) return;
      if (group * 64 < t.rows * a.group) {
        attend(s, t, group);
        continue;
      }
      for (int i = 2 * (t.to - t.from); i > 0; i--) {  // none of the queries
        await(s.now);
        meet_warpgroup(group);  // no warp awaits the slot still, or reads its item
        release(s.now.slot);
        advance(r, s.now);
      }
    }
  }
};

// prompt.go has its shared memory.
KERNEL(384, 1) prompt_128(const __grid_constant__ prompt_args a) {
  DYNAMIC_SHARED(memory);
  launch_dependents();
  __shared__ u64 full[slots], empty[slots];
  __shared__ prompt_item items[slots];
  unsigned char *start = memory + (-shared_address(memory) & 1023);
  prompt p = {a, {start, full, empty, slots, slot_bytes}, items, start + slots * slot_bytes, 0};
  p.totals = (float4 *)(p.queries + 4 * query_bytes);
  if (threadIdx.x == 0) ring_init(p.r, 4, 2);  // the producer's warps, and two warpgroups
  __syncthreads();
  if (threadIdx.x < 128) {
    give_registers<24>();
    p.produce();
  } else {
    take_registers<240>();
    p.consume();
  }
}

// Joins the chunks of one token (blockIdx.x, max_rows of each sequence) and head of Q (blockIdx.y).
KERNEL(128, 1) prompt_join(const __grid_constant__ prompt_args a) {
  begin();
  int sequence = blockIdx.x / a.max_rows, row = blockIdx.x % a.max_rows, head = blockIdx.y, column = threadIdx.x;
  int start = ((const int *)a.starts)[sequence], n = ((const int *)a.starts)[sequence + 1] - start;
  if (row >= n || n < a.min_rows || n > a.max_rows) return;
  int p = ((const int *)a.lens)[sequence] - n + row, first = chunk_of(a, a.window > 0 ? max(0, p - a.window + 1) : 0);
  i64 at = ((sequence * (i64)a.max_rows + row) * a.heads + head) * a.chunks + first;
  float out = join_chunks((const float *)a.sums + at * head_size, (const float2 *)a.ends + at, chunk_of(a, p) + 1 - first, head_size, column);
  ((u16 *)a.out)[(start + row) * a.out_row + head * a.out_head + column] = to_act(out);
}
