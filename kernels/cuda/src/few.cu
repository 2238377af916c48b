// Products with few columns, routers and gates, and with few rows: tensor cores fed
// straight from global memory. The 16 warps of a block share the inner dimension out in pieces of 64,
// warp w every 16th from w on, and their sums are added in order of the warps: an
// order that depends on nothing but the length.

struct few_args {
  u64 x, w, bias, out;  // bias: 0 for none
  i64 x_stride, out_stride;
  int rows, columns, inner;
  int bias_type, out_float;
};

constexpr int few_warps = 16;

// A block has 16 rows of A by 8 tiles of B, which are X and W, or with by_columns W and
// X.
template <bool by_columns, int tiles>
DEVICE void few(const few_args &a) {
  constexpr int at_once = tiles > 2 ? 2 : tiles;  // of the tiles whose sums are shared
  __shared__ float parts[few_warps][16][8 * at_once];
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int a_row0 = blockIdx.x * 16, b_row0 = blockIdx.y * 8 * tiles;
  int a_rows = by_columns ? a.columns : a.rows, b_rows = by_columns ? a.rows : a.columns;
  const u16 *a_base = (const u16 *)(by_columns ? a.w : a.x), *b_base = (const u16 *)(by_columns ? a.x : a.w);
  i64 a_stride = by_columns ? a.inner : a.x_stride, b_stride = by_columns ? a.x_stride : a.inner;

  // A thread has eight neighbors, chunk lane % 4 of 32, of rows lane / 4 of each eight:
  // elements that are neighbors in the product are not in memory.
  int row = lane >> 2, first = (lane & 3) * 8;
  const u16 *a_at[2], *b_at[tiles];
#pragma unroll
  for (int i = 0; i < 2; i++) a_at[i] = a_row0 + row + 8 * i < a_rows ? a_base + (a_row0 + row + 8 * i) * a_stride : 0;
#pragma unroll
  for (int j = 0; j < tiles; j++) b_at[j] = b_row0 + row + 8 * j < b_rows ? b_base + (b_row0 + row + 8 * j) * b_stride : 0;
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
  for (int from = 0; from < tiles; from += at_once) {
    if (from > 0) __syncthreads();  // the sums before have been added
#pragma unroll
    for (int j = 0; j < at_once; j++)
#pragma unroll
      for (int c = 0; c < 4; c++) parts[warp][row + c / 2 * 8][j * 8 + (lane & 3) * 2 + c % 2] = sums[from + j][c];
    __syncthreads();
    // Threads that are neighbors write neighbors.
    int m = by_columns ? threadIdx.x % 16 : threadIdx.x / (8 * at_once), n = by_columns ? threadIdx.x / 16 : threadIdx.x % (8 * at_once);
    int a_row = a_row0 + m, b_row = b_row0 + 8 * from + n;
    if (m >= 16 || n >= 8 * at_once || a_row >= a_rows || b_row >= b_rows) continue;
    float v = 0;
#pragma unroll
    for (int i = 0; i < few_warps; i++) v = __fadd_rn(v, parts[i][m][n]);
    i64 r = by_columns ? b_row : a_row;
    int column = by_columns ? a_row : b_row;
    if (a.bias) v = __fadd_rn(v, load1((const void *)a.bias, a.bias_type, column));
    i64 at = r * a.out_stride + column;
    if (a.out_float)
      ((float *)a.out)[at] = v;
    else
      ((u16 *)a.out)[at] = to_act(v);
  }
}

KERNEL(512, 1) few_columns_8(const few_args a) { few<false, 1>(a); }
KERNEL(512, 1) few_columns_16(const few_args a) { few<false, 2>(a); }
KERNEL(512, 1) few_columns_64(const few_args a) { few<false, 8>(a); }
KERNEL(512, 1) few_rows_8(const few_args a) { few<true, 1>(a); }
