// Skinny GEMMs: with few columns (routers, gates) or few rows. The 16 warps of a block split
// the inner dimension (split-K within the block) in pieces of 64, warp w taking every 16th from
// w on, and their sums are added in order of the warps. So the order depends only on the length
// of the inner dimension.

struct few_args {
  u64 x, w, bias, out;  // bias: 0 for none
  i64 x_stride, out_stride;
  int rows, columns, inner;
  int bias_type, out_float;
};

constexpr int few_warps = 16;

// Writes an element of Out.
DEVICE void put_sum(const few_args &a, i64 row, int column, float v) {
  if (a.bias) v = __fadd_rn(v, load1((const void *)a.bias, a.bias_type, column));
  i64 at = row * a.out_stride + column;
  if (a.out_float)
    ((float *)a.out)[at] = v;
  else
    ((u16 *)a.out)[at] = to_act(v);
}

// Few columns: a block has 16 rows of X by tiles times eight weight rows, and loads the
// fragments of the tensor cores directly from global memory.
template <int tiles>
DEVICE void few_columns(const few_args &a) {
  begin();
  constexpr int tiles_per_pass = tiles > 2 ? 2 : tiles;  // tiles whose sums are exchanged at once
  __shared__ float parts[few_warps][16][8 * tiles_per_pass];
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int a_row0 = blockIdx.x * 16, b_row0 = blockIdx.y * 8 * tiles;

  // A thread has eight consecutive elements, chunk lane % 4 of 32, of row lane / 4 of every
  // eight: consecutive elements of K in the MMA are not consecutive in memory.
  int row = lane >> 2, first = (lane & 3) * 8;
  const u16 *a_at[2], *b_at[tiles];
#pragma unroll
  for (int i = 0; i < 2; i++) a_at[i] = a_row0 + row + 8 * i < a.rows ? (const u16 *)a.x + (a_row0 + row + 8 * i) * a.x_stride : 0;
#pragma unroll
  for (int j = 0; j < tiles; j++) b_at[j] = b_row0 + row + 8 * j < a.columns ? (const u16 *)a.w + (b_row0 + row + 8 * j) * (i64)a.inner : 0;
  float sums[tiles][4] = {};
#pragma unroll(tiles > 2 ? 1 : tiles > 1 ? 2 : 4)
  for (int piece = warp * 64; piece < a.inner; piece += 64 * few_warps) {
    uint4 x[2][2], w[2][tiles];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int k = piece + 32 * h + first;
      bool there = k < a.inner;  // a multiple of 8
#pragma unroll
      for (int i = 0; i < 2; i++) x[h][i] = load_chunk(there ? a_at[i] : 0, k);
#pragma unroll
      for (int j = 0; j < tiles; j++) w[h][j] = load_chunk(there ? b_at[j] : 0, k);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      u32 low[4] = {x[h][0].x, x[h][1].x, x[h][0].y, x[h][1].y}, high[4] = {x[h][0].z, x[h][1].z, x[h][0].w, x[h][1].w};
#pragma unroll
      for (int j = 0; j < tiles; j++) {
        mma(sums[j], low, w[h][j].x, w[h][j].y);
        mma(sums[j], high, w[h][j].z, w[h][j].w);
      }
    }
  }
#pragma unroll
  for (int from = 0; from < tiles; from += tiles_per_pass) {
    if (from > 0) __syncthreads();  // the previous sums have been added
#pragma unroll
    for (int j = 0; j < tiles_per_pass; j++)
#pragma unroll
      for (int c = 0; c < 4; c++) parts[warp][row + c / 2 * 8][j * 8 + (lane & 3) * 2 + c % 2] = sums[from + j][c];
    __syncthreads();
    // Consecutive threads write consecutive columns.
    int m = threadIdx.x / (8 * tiles_per_pass), n = threadIdx.x % (8 * tiles_per_pass), column = b_row0 + 8 * from + n;
    i64 r = a_row0 + m;
    if (m >= 16 || r >= a.rows || column >= a.columns) continue;
    float v = 0;
#pragma unroll
    for (int i = 0; i < few_warps; i++) v = __fadd_rn(v, parts[i][m][n]);
    put_sum(a, r, column, v);
  }
}

KERNEL(512, 1) few_columns_8(const few_args a) { few_columns<1>(a); }
KERNEL(512, 1) few_columns_16(const few_args a) { few_columns<2>(a); }
KERNEL(512, 1) few_columns_64(const few_args a) { few_columns<8>(a); }

// Sums of a tile by warp, row of X and weight row. 20: eight rows are in different banks.
template <int eights>
struct tile_parts {
  float of[few_warps][8 * eights][20];
};

// Those of this tile and of the previous one. They are the same memory in all instances of few_rows in a kernel.
template <int eights>
DEVICE tile_parts<eights> *parts_of_tiles() {
  __shared__ tile_parts<eights> parts[2];
  return parts;
}

// Up to eight rows, or that many groups of eight, which share each load of weights: a tile is 16 weight rows by all of X, and
// a block computes every blocks-th (persistent kernel). A thread copies the weights that it multiplies itself to
// stages of its own, so the block synchronizes only for the sum of a tile, and copies run ahead
// across tiles. The first copies start before the preceding kernels end, which do not write
// weights. gated: W has a.columns rows of gate, then as many of up, of which a tile has eight
// each, and Out is silu(gate) up of both in their 16-bit form. once: weights need not stay in L2. late: the next kernel
// starts with data that this one has waited for.
template <int stages, bool gated, bool once, bool late = false, int eights = 1>
DEVICE void few_rows(const few_args &a, unsigned char *memory, int block = blockIdx.x, int blocks = gridDim.x) {
  tile_parts<eights> *parts = parts_of_tiles<eights>();
  if (!late) launch_dependents();
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int row = lane >> 2, first = warp * 64 + (lane & 3) * 8;  // chunks as in few_columns
  constexpr int tile_columns = gated ? 8 : 16, piece = 64 * few_warps;
  int tiles = (a.columns + tile_columns - 1) / tile_columns, pieces = max(0, a.inner - warp * 64 + piece - 1) / piece;
  uint4 *ring = (uint4 *)memory + threadIdx.x;
  u64 policy = once ? read_once() : 0;

  // next is this thread's first weight of what is loaded next: to compute an address for each load takes more instructions than the
  // multiplication. Behind the last row of W it is not dereferenced.
  int next_tile = pieces > 0 ? block : tiles, next_k = first, column = block * tile_columns + row;
  const u16 *next = (const u16 *)a.w + column * (i64)a.inner + first;
  i64 second = (gated ? a.columns : 8) * (i64)a.inner;  // to the other eight rows of a tile
  i64 to_tile = blocks * tile_columns * (i64)a.inner - pieces * piece;
  auto load_stage = [&](int slot) {
    if (next_tile < tiles) {
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          bool there = column + (gated ? 0 : 8 * i) < a.columns && next_k + 32 * h < a.inner;  // a multiple of 8
          copy_async<once>(ring + (slot * 4 + i * 2 + h) * 32 * few_warps, next + i * second + 32 * h, there ? 16 : 0, policy);
        }
      next += piece, next_k += piece;
      if (next_k - first == pieces * piece) next += to_tile, next_k = first, next_tile += blocks, column += blocks * tile_columns;
    }
    copy_commit();
  };
#pragma unroll 1
  for (int i = 0; i < stages; i++) load_stage(i);
  wait_dependencies();
  if (late) launch_dependents();

  const u16 *x_at[eights];  // what is computed of rows behind the last one is not kept
#pragma unroll
  for (int e = 0; e < eights; e++) x_at[e] = (const u16 *)a.x + min(row + 8 * e, a.rows - 1) * a.x_stride + first;
  int slot = 0, turn = 0;
  auto load_x = [&](uint4 (&x)[eights][2], int k) {
#pragma unroll
    for (int e = 0; e < eights; e++)
#pragma unroll
      for (int h = 0; h < 2; h++) x[e][h] = k + 32 * h < a.inner - first ? *(const uint4 *)(x_at[e] + k + 32 * h) : uint4{0, 0, 0, 0};
  };
  constexpr bool keeps = gated || eights > 1;  // X, if it has at most two pieces, as blocks have several tiles
  uint4 kept[2][eights][2];
  if (gated && eights == 1 || keeps && pieces <= 2) load_x(kept[0], 0), load_x(kept[1], piece);
  for (int tile = block; tile < tiles; tile += blocks, turn ^= 1) {
    float sums[eights][4] = {};
    auto multiply = [&](const uint4 (&x)[eights][2]) {
      uint4 w[2][2];
      copy_wait<stages - 1>();
#pragma unroll
      for (int j = 0; j < 4; j++) w[j / 2][j % 2] = ring[(slot * 4 + j) * 32 * few_warps];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        u32 low[4] = {w[0][h].x, w[1][h].x, w[0][h].y, w[1][h].y}, high[4] = {w[0][h].z, w[1][h].z, w[0][h].w, w[1][h].w};
#pragma unroll
        for (int e = 0; e < eights; e++) {
          mma(sums[e], low, x[e][h].x, x[e][h].y);
          mma(sums[e], high, x[e][h].z, x[e][h].w);
        }
      }
      load_stage(slot);  // its previous content has been multiplied
      if (++slot == stages) slot = 0;
    };
    if (keeps && pieces <= 2) {
      if (pieces > 0) multiply(kept[0]);
      if (pieces > 1) multiply(kept[1]);
    } else {
#pragma unroll 1
      for (int k = 0; k < pieces * piece; k += piece) {
        uint4 x[eights][2];
        load_x(x, k);
        multiply(x);
      }
    }
#pragma unroll
    for (int e = 0; e < eights; e++)
#pragma unroll
      for (int c = 0; c < 4; c++) parts[turn].of[warp][e * 8 + (lane & 3) * 2 + c % 2][row + c / 2 * 8] = sums[e][c];
    __syncthreads();
    // A thread adds the parts of one weight row and row of X, in whole warps.
    int m = threadIdx.x % 16, n = threadIdx.x / 16;
    if (warp * 2 >= a.rows) continue;
    float v = 0;
#pragma unroll
    for (int i = 0; i < few_warps; i++) v = __fadd_rn(v, parts[turn].of[i][n][m]);
    if (gated) {
      v = from_act(to_act(v));
      v = silu(v) * __shfl_xor_sync(all_lanes, v, 8);
    }
    if (n < a.rows && m < tile_columns && tile * tile_columns + m < a.columns) put_sum(a, n, tile * tile_columns + m, v);
  }
}

// For any device, and for devices whose blocks may use more shared memory.
KERNEL(512, 1) few_rows_2(const few_args a) {
  DYNAMIC_SHARED(memory);
  few_rows<2, false, false>(a, memory);
}

// For few tiles, after which other kernels follow soon. With three stages a narrow block of an expert GEMM finds room beside.
KERNEL(512, 2) few_rows_3(const few_args a) {
  DYNAMIC_SHARED(memory);
  few_rows<3, false, true>(a, memory);
}

KERNEL(512, 2) few_rows_4(const few_args a) {
  DYNAMIC_SHARED(memory);
  few_rows<4, false, true>(a, memory);
}

KERNEL(512, 2) few_rows_5(const few_args a) {
  DYNAMIC_SHARED(memory);
  few_rows<5, false, false>(a, memory);
}

KERNEL(512, 1) few_rows_gated_2(const few_args a) {
  DYNAMIC_SHARED(memory);
  few_rows<2, true, false>(a, memory);
}

KERNEL(512, 2) few_rows_gated_5(const few_args a) {
  DYNAMIC_SHARED(memory);
  few_rows<5, true, false>(a, memory);
}

// For few tiles, as few_rows_4.
KERNEL(512, 2) few_rows_gated_once_5(const few_args a) {
  DYNAMIC_SHARED(memory);
  few_rows<5, true, true>(a, memory);
}

// few_rows_4 and few_rows_gated_once_5 for up to 16 rows.
KERNEL(512, 1) sixteen_rows_4(const few_args a) {
  DYNAMIC_SHARED(memory);
  few_rows<4, false, true, false, 2>(a, memory);
}

KERNEL(512, 1) sixteen_rows_gated_5(const few_args a) {
  DYNAMIC_SHARED(memory);
  few_rows<5, true, true, false, 2>(a, memory);
}

struct router_gate_up_args {
  few_args router, gate_up;
};

// The router and the shared expert's gate/up projection. The last blocks, one for each tile, are the router's.
template <int eights>
DEVICE void router_beside_gate_up(const router_gate_up_args &a, unsigned char *memory) {
  int tiles = (a.router.columns + 15) / 16, blocks = gridDim.x - tiles, block = blockIdx.x;
  if (block < blocks)
    few_rows<5, true, true, false, eights>(a.gate_up, memory, block, blocks);
  else
    few_rows<4, false, true, false, eights>(a.router, memory, block - blocks, tiles);
}

// few_rows_4 and few_rows_gated_once_5 in one launch.
KERNEL(512, 2) router_gate_up(const router_gate_up_args a) {
  DYNAMIC_SHARED(memory);
  router_beside_gate_up<1>(a, memory);
}

// sixteen_rows_4 and sixteen_rows_gated_5 in one launch.
KERNEL(512, 1) sixteen_router_gate_up(const router_gate_up_args a) {
  DYNAMIC_SHARED(memory);
  router_beside_gate_up<2>(a, memory);
}

struct route_down_args {
  route_sort_args route;
  few_args down;
};

// The router's selection, in the first block, which has the longer way, and the shared expert's down projection. Gate/up of
// few tokens selects the experts by the scores, and runs beside this kernel, so it may start only once this one has waited
// for these.
static_assert(sizeof(sorted_rows) <= 64 * 512, "a stage");
template <int stages, int eights>
DEVICE void route_beside_down(const route_down_args &a, unsigned char *memory) {
  if (blockIdx.x == 0) {
    wait_dependencies();
    sort_rows(a.route, *(sorted_rows *)memory);
  } else {
    few_rows<stages, false, true, true, eights>(a.down, memory, blockIdx.x - 1, gridDim.x - 1);
  }
}

// route_sort and few_rows_4 in one launch, with a stage less, so that a narrow block of the gate/up projection behind it finds
// room beside.
KERNEL(512, 2) route_down(const route_down_args a) {
  DYNAMIC_SHARED(memory);
  route_beside_down<3, 1>(a, memory);
}

// route_sort and sixteen_rows_4 in one launch.
KERNEL(512, 1) sixteen_route_down(const route_down_args a) {
  DYNAMIC_SHARED(memory);
  route_beside_down<4, 2>(a, memory);
}
