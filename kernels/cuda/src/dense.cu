// Dense GEMM on the tensor cores of sm_90a (wgmma), as a persistent kernel: M are weight rows,
// N are tokens. Tiles of both operands are loaded by TMA. The order of each sum is that of
// expert.cu, for any tile.

struct dense_args {
  tensor_map w, x;      // tiles of all weight rows of a block, and of max_tokens tokens
  u64 bias, out;        // bias: 0 for none
  i64 out_stride;
  int rows, columns, steps;  // steps: k-steps of 64 elements of inner
  int bias_type, out_float;  // an Out of 16-bit elements has an even number of columns, with aligned pairs
  int max_tokens, stages;     // tokens of a tile, a multiple of 16; stages of the pipeline
  int swizzle;             // tile rasterization: token tiles per band
};

// As expert_product, over tiles of all rows by all columns. Tiles are rasterized in bands of
// token tiles: the blocks first share the weights of a band's tiles, then go on to the next
// weights.
template <int groups, int blocks, int max_tokens>
struct dense_product {
  static constexpr int tile_units = groups * blocks, tile_columns = tile_units * 64;

  const dense_args &a;
  ring r;
  int token_tiles, column_tiles, tiles;

  // First row and column of the tile with that index.
  DEVICE void place(int index, int &row, int &column) const {
    int before = index / (a.swizzle * column_tiles) * a.swizzle;  // token tiles in previous bands
    int width = min(a.swizzle, token_tiles - before);
    int i = index - before * column_tiles;
    row = (before + i % width) * a.max_tokens;
    column = i / width * tile_columns;
  }

  DEVICE void load_weights(int slot, int k, int column) const {
    barrier_expect(&r.full[slot], r.step_bytes);
    copy_tile(r.memory + slot * r.step_bytes, &a.w, k * 64, column, &r.full[slot]);
  }

  // Producer: runs in one thread.
  DEVICE void produce() const {
    int row, column, loaded = 0;  // k-steps of the first tile whose weights are loaded before X is complete
    prefetch_map(&a.x);
    if (blockIdx.x < tiles) {
      place(blockIdx.x, row, column);
      for (; loaded < min(r.stages, a.steps); loaded++) load_weights(loaded, loaded, column);
    }
    wait_dependencies();
    pipeline_state now = {0, 1};
    for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
      place(index, row, column);
      for (int k = 0; k < a.steps; k++) {
        if (index != blockIdx.x || k >= loaded) {
          barrier_wait(&r.empty[now.slot], now.parity);
          load_weights(now.slot, k, column);
        }
        copy_tile(r.memory + now.slot * r.step_bytes + tile_units * unit_bytes, &a.x, k * 64, row, &r.full[now.slot]);
        advance(r, now);
      }
    }
  }

  template <int tokens>
  DEVICE void multiply(int row0, int column0, int group, pipeline_state &now) const {
    float d[blocks][tokens / 2] = {};
    multiply_steps<tokens, blocks, tile_units, 1>(d, r, a.steps, group * blocks, now);

    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3, rows = min(a.rows - row0, a.max_tokens);
#pragma unroll
    for (int b = 0; b < blocks; b++) {
      int first = column0 + (group * blocks + b) * 64 + warp * 16;
      if (a.bias) {
        int mine = first + (lane >> 2);
        float bias0 = mine < a.columns ? load1((const void *)a.bias, a.bias_type, mine) : 0.f;
        float bias1 = mine + 8 < a.columns ? load1((const void *)a.bias, a.bias_type, mine + 8) : 0.f;
#pragma unroll
        for (int i = 0; i < tokens / 2; i++) d[b][i] = __fadd_rn(d[b][i], i & 2 ? bias1 : bias0);
      }
      if (a.out_float) {
        int token = (lane & 3) * 2, column = first + (lane >> 2);
        float *out = (float *)a.out + (row0 + token) * a.out_stride + column, *next = out + a.out_stride;
#pragma unroll
        for (int j = 0; j < tokens / 8; j++, token += 8, out += 8 * a.out_stride, next += 8 * a.out_stride) {
          store_if(column < a.columns && token < rows, out, __float_as_uint(d[b][4 * j]));
          store_if(column < a.columns && token + 1 < rows, next, __float_as_uint(d[b][4 * j + 1]));
          store_if(column + 8 < a.columns && token < rows, out + 8, __float_as_uint(d[b][4 * j + 2]));
          store_if(column + 8 < a.columns && token + 1 < rows, next + 8, __float_as_uint(d[b][4 * j + 3]));
        }
      } else {
        // Epilogue: a lane has two neighboring columns of one token.
        int token = lane >> 2, column = first + (lane & 3) * 2;
        u16 *out = (u16 *)a.out + (row0 + token) * a.out_stride + column;
#pragma unroll
        for (int j = 0; j < tokens / 8; j++, token += 8, out += 8 * a.out_stride) {
          u32 here = transpose(pack_act(d[b][4 * j], d[b][4 * j + 1])), there = transpose(pack_act(d[b][4 * j + 2], d[b][4 * j + 3]));
          store_if(column < a.columns && token < rows, out, here);
          store_if(column + 8 < a.columns && token < rows, out + 8, there);
        }
      }
    }
  }

  DEVICE void consume() const {
    int group = threadIdx.x / 128 - 1;
    pipeline_state now = {0, 0};
    wait_dependencies();
    for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
      int row, column;
      place(index, row, column);
      with_room<max_tokens, false>(min(a.max_tokens, a.rows - row), [&](auto room) { multiply<decltype(room)::value>(row, column, group, now); });
    }
  }
};

template <int groups, int blocks, int max_tokens>
DEVICE void dense(const dense_args &a, unsigned char *memory) {
  launch_dependents();
  __shared__ u64 full[most_stages], empty[most_stages];
  unsigned char *start = memory + (-shared_address(memory) & 1023);
  dense_product<groups, blocks, max_tokens> p = {a, {start, full, empty, a.stages, groups * blocks * unit_bytes + a.max_tokens * 128}, 0, 0, 0};
  p.token_tiles = (a.rows + a.max_tokens - 1) / a.max_tokens;
  p.column_tiles = (a.columns + p.tile_columns - 1) / p.tile_columns;
  p.tiles = p.token_tiles * p.column_tiles;
  if (threadIdx.x == 0) ring_init(p.r, 1, groups);
  __syncthreads();
  if (threadIdx.x < 128) {
    if (groups == 2) give_registers<24>();
    if (threadIdx.x == 0) p.produce();
  } else {
    if (groups == 2) take_registers<240>();
    p.consume();
  }
}

// dense.go has their tile sizes.
KERNEL(256, 2) dense_64(const __grid_constant__ dense_args a) {
  DYNAMIC_SHARED(memory);
  dense<1, 1, 128>(a, memory);
}

KERNEL(384, 1) dense_128(const __grid_constant__ dense_args a) {
  DYNAMIC_SHARED(memory);
  dense<2, 1, 192>(a, memory);
}

KERNEL(384, 1) dense_256(const __grid_constant__ dense_args a) {
  DYNAMIC_SHARED(memory);
  dense<2, 2, 192>(a, memory);
}
