// Products with few rows of X, or of W (routers): tensor cores fed straight from
// global memory. The eight warps of a block share the inner dimension out in pieces of
// 64, warp w every eighth from w on, and their sums are added in order of the warps:
// an order that depends on nothing but the length. Within 32 elements a thread has
// eight neighbors of each row, so the order inside of a piece is not that of
// product.cu.

struct few_args {
  u64 x, w, bias, out;  // bias: 0 for none
  i64 x_stride, out_stride;
  int rows, columns, inner;
  int bias_type, out_float;
};

constexpr int few_warps = 8;

// 16 rows of A by 8 tiles of B. swapped: A is of W, else of X.
template <bool swapped, int tiles>
DEVICE void few(const few_args &a) {
  __shared__ float parts[few_warps][16][8 * tiles];
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int a_row0 = blockIdx.x * 16, b_row0 = blockIdx.y * 8 * tiles;
  int a_rows = swapped ? a.columns : a.rows, b_rows = swapped ? a.rows : a.columns;
  const u16 *a_base = (const u16 *)(swapped ? a.w : a.x), *b_base = (const u16 *)(swapped ? a.x : a.w);
  i64 a_stride = swapped ? a.inner : a.x_stride, b_stride = swapped ? a.x_stride : a.inner;

  // A thread has chunk lane % 4 of rows lane / 4.
  int row = lane >> 2, first = (lane & 3) * 8;
  const u16 *a_at[2], *b_at[tiles];
#pragma unroll
  for (int i = 0; i < 2; i++) a_at[i] = a_row0 + row + 8 * i < a_rows ? a_base + (a_row0 + row + 8 * i) * a_stride : 0;
#pragma unroll
  for (int j = 0; j < tiles; j++) b_at[j] = b_row0 + row + 8 * j < b_rows ? b_base + (b_row0 + row + 8 * j) * b_stride : 0;
  float sums[tiles][4] = {};
#pragma unroll(tiles > 1 ? 2 : 4)
  for (int k = warp * 64 + first; k < a.inner + first; k += 64 * few_warps) {
    uint4 x[2][2], y[2][tiles];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      bool there = k + 32 * h < a.inner;  // inner is a multiple of 8
#pragma unroll
      for (int i = 0; i < 2; i++) x[h][i] = load_chunk(there ? a_at[i] : 0, k + 32 * h);
#pragma unroll
      for (int j = 0; j < tiles; j++) y[h][j] = load_chunk(there ? b_at[j] : 0, k + 32 * h);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      u32 first_half[4] = {x[h][0].x, x[h][1].x, x[h][0].y, x[h][1].y}, second_half[4] = {x[h][0].z, x[h][1].z, x[h][0].w, x[h][1].w};
#pragma unroll
      for (int j = 0; j < tiles; j++) {
        mma(sums[j], first_half, y[h][j].x, y[h][j].y);
        mma(sums[j], second_half, y[h][j].z, y[h][j].w);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < tiles; j++)
#pragma unroll
    for (int c = 0; c < 4; c++) parts[warp][row + c / 2 * 8][j * 8 + (lane & 3) * 2 + c % 2] = sums[j][c];
  __syncthreads();
  // Neighbors in a warp are neighbors in Out.
  for (int i = threadIdx.x; i < 16 * 8 * tiles; i += 32 * few_warps) {
    int m = swapped ? i % 16 : i / (8 * tiles), n = swapped ? i / 16 : i % (8 * tiles);
    if (a_row0 + m >= a_rows || b_row0 + n >= b_rows) continue;
    float v = 0;
#pragma unroll
    for (int w = 0; w < few_warps; w++) v = __fadd_rn(v, parts[w][m][n]);
    i64 r = swapped ? b_row0 + n : a_row0 + m;
    int column = swapped ? a_row0 + m : b_row0 + n;
    if (a.bias) v = __fadd_rn(v, load1((const void *)a.bias, a.bias_type, column));
    if (a.out_float)
      ((float *)a.out)[r * a.out_stride + column] = v;
    else
      ((u16 *)a.out)[r * a.out_stride + column] = to_act(v);
  }
}

KERNEL(256, 2) few_rows_8(const few_args a) { few<true, 1>(a); }
KERNEL(256, 2) few_rows_16(const few_args a) { few<true, 2>(a); }
KERNEL(256, 2) few_rows_32(const few_args a) { few<true, 4>(a); }
KERNEL(256, 2) few_columns_8(const few_args a) { few<false, 1>(a); }
KERNEL(256, 2) few_columns_16(const few_args a) { few<false, 2>(a); }
KERNEL(256, 2) few_columns_64(const few_args a) { few<false, 8>(a); }
