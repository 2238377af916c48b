// Dense products on the tensor cores of sm_90a: weights are their rows (M), tokens
// their columns (N), both gathered from rows in memory by copies of 16 bytes. A sum's
// order is that of expert.cu, whatever the tile.

struct dense_args {
  u64 x, w, bias, out;  // bias: 0 for none
  i64 x_stride, out_stride;
  int rows, columns, inner;
  int bias_type, out_float, out_paired;
  int most, stages;     // tokens of a tile, a multiple of 16; stages of the ring
};

// As expert_product, with tiles of all rows by all columns.
template <int groups, int blocks, int most>
struct dense_product {
  static constexpr int tile_columns = groups * blocks * 64;
  static constexpr int producers = 128;

  const dense_args &a;
  ring r;
  int token_tiles, tiles, steps;

  DEVICE void produce() const {
    int chunk = threadIdx.x & 7, lead = threadIdx.x >> 3;
    int to = lead * 128 + ((chunk ^ (lead & 7)) << 4);
    turn now = {0, 1};
    for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
      // From a thread's first row on, every 16th.
      int column = index / token_tiles * tile_columns + lead, row = index % token_tiles * a.most + lead;
      int columns = min(a.columns - column, tile_columns - lead), rows = min(a.rows - row, a.most - lead);
      const u16 *w = (const u16 *)a.w + (i64)column * a.inner + chunk * 8, *x = (const u16 *)a.x + row * a.x_stride + chunk * 8;
      for (int k = 0; k < steps; k++) {
        unsigned char *stage = r.memory + now.slot * r.step_bytes + to;
        int bytes = k * 64 + chunk * 8 < a.inner ? 16 : 0;  // inner is a multiple of 8
        barrier_wait(&r.empty[now.slot], now.parity);
        const u16 *from = w + k * 64;
#pragma unroll 8
        for (int i = 0; i < tile_columns; i += 16, from += 16 * (i64)a.inner)
          if (i < columns) copy_async(stage + i * 128, from, bytes);
        from = x + k * 64;
        stage += groups * blocks * unit_bytes;
#pragma unroll 4
        for (int i = 0; i < rows; i += 16, from += 16 * a.x_stride) copy_async(stage + i * 128, from, bytes);
        barrier_arrive_after_copies(&r.full[now.slot]);
        advance(r, now);
      }
    }
  }

  // Two neighbors of a row of Out.
  DEVICE void put(int row, int column, u32 both) const {
    if (column >= a.columns) return;
    u16 *out = (u16 *)a.out + row * a.out_stride + column;
    if (a.out_paired && column + 1 < a.columns) {
      *(u32 *)out = both;
    } else {
      out[0] = (u16)both;
      if (column + 1 < a.columns) out[1] = (u16)(both >> 16);
    }
  }

  template <int tokens>
  DEVICE void multiply(int index, int group, turn &now) const {
    float d[blocks][tokens / 2] = {};
    multiply_steps<tokens, blocks, groups * blocks, 1>(d, r, steps, group * blocks, now);

    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
    int row0 = index % token_tiles * a.most, rows = min(a.rows - row0, a.most);
#pragma unroll
    for (int b = 0; b < blocks; b++) {
      int column0 = index / token_tiles * tile_columns + (group * blocks + b) * 64 + warp * 16;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        int mine = column0 + h * 8 + (lane >> 2);
        float bias = a.bias && mine < a.columns ? load1((const void *)a.bias, a.bias_type, mine) : 0.f;
#pragma unroll
        for (int j = 0; j < tokens / 8; j++) {
          float v0 = d[b][4 * j + 2 * h], v1 = d[b][4 * j + 2 * h + 1];
          if (a.bias) v0 = __fadd_rn(v0, bias), v1 = __fadd_rn(v1, bias);
          if (a.out_float) {
            int token = j * 8 + (lane & 3) * 2;
            float *out = (float *)a.out + (row0 + token) * a.out_stride + mine;
            if (mine < a.columns && token < rows) out[0] = v0;
            if (mine < a.columns && token + 1 < rows) out[a.out_stride] = v1;
          } else {
            // A lane gets two neighbors of one token's results.
            u32 both = transpose(pack_act(v0, v1));
            int token = j * 8 + (lane >> 2), column = column0 + h * 8 + (lane & 3) * 2;
            if (token < rows) put(row0 + token, column, both);
          }
        }
      }
    }
  }

  DEVICE void consume() const {
    int group = threadIdx.x / 128 - 1;
    turn now = {0, 0};
    for (int index = blockIdx.x; index < tiles; index += gridDim.x)
      with_room<most, false>(min(a.most, a.rows - index % token_tiles * a.most), [&](auto room) { multiply<decltype(room)::value>(index, group, now); });
  }
};

template <int groups, int blocks, int most>
DEVICE void dense(const dense_args &a, unsigned char *memory) {
  begin();
  __shared__ u64 full[most_stages], empty[most_stages];
  unsigned char *start = memory + (-shared_address(memory) & 1023);
  dense_product<groups, blocks, most> p = {a, {start, full, empty, a.stages, groups * blocks * unit_bytes + a.most * 128}, 0, 0, 0};
  p.token_tiles = (a.rows + a.most - 1) / a.most;
  p.tiles = (a.columns + p.tile_columns - 1) / p.tile_columns * p.token_tiles;
  p.steps = (a.inner + 63) / 64;
  if (threadIdx.x == 0) ring_init(p.r, p.producers, groups);
  __syncthreads();
  if (threadIdx.x < p.producers) {
    if (groups == 2) give_registers<72>();
    p.produce();
  } else {
    if (groups == 2) take_registers<216>();
    p.consume();
  }
}

// Their sizes are known to dense.go.
KERNEL(256, 2) dense_64(const dense_args a) {
  DYNAMIC_SHARED(memory);
  dense<1, 1, 64>(a, memory);
}

KERNEL(384, 1) dense_128(const dense_args a) {
  DYNAMIC_SHARED(memory);
  dense<2, 1, 192>(a, memory);
}

KERNEL(384, 1) dense_256(const dense_args a) {
  DYNAMIC_SHARED(memory);
  dense<2, 2, 128>(a, memory);
}
