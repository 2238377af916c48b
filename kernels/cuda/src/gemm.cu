// GEMM with transposed weights, Out = X W^T, dense or grouped by a layer's experts, with
// mma.sync.
//
// A block computes a tile of rows (tokens, M) by weight rows (N), in k-steps of 64 elements of
// the inner dimension, which pass through a multi-stage pipeline in shared memory. Every
// element is accumulated over K in ascending order, 16 elements at a time, for any tile:
// neither the number of rows nor the tile changes a bit of a row's result.

struct gemm_args {
  u64 x, w, bias, out;                  // dense only: w, and bias, 0 for none
  u64 offsets, order, slots, experts;   // experts only
  i64 x_stride, out_stride;
  // Elements from an expert's extent to the first weight row, and from w1 to w3; experts only.
  i64 w_start, w_matrix;
  i64 w_stride;                         // elements from a weight row to the next
  int rows, columns, inner;             // rows: dense only
  int listed, experts_all, top_k;       // experts only
  int w_type, bias_type, out_float;     // out_float: Out is float32
  int x_aligned, w_aligned, out_paired;
};

enum { dense, expert_up, expert_down };

constexpr int step = 64;              // elements of inner per stage: 8 chunks of 16 bytes
constexpr int row_bytes = 2 * step;

// Offset of a row's chunk in a tile, swizzled so that the eight rows that one phase of ldmatrix
// reads are in different banks.
DEVICE int chunk_at(int row, int chunk) { return row * row_bytes + ((chunk ^ (row & 7)) << 4); }

// tile_place identifies a block's tile among the tiles of all listed experts.
struct tile_place {
  int expert, first, rows, tile;  // the expert, its pairs in order, the tile within it; expert -1: none
};

// Finds tile number index; each expert has as many tiles as its rows need, times across. Warp 0
// searches, 32 experts at a time.
DEVICE tile_place find_tile(const gemm_args &a, int tile_rows, int across) {
  __shared__ tile_place found;
  if (threadIdx.x < 32) {
    int lane = threadIdx.x, base = 0, index = (int)blockIdx.x;
    tile_place mine = {-1, 0, 0, 0};
    bool done = false;
    for (int i = 0; i < a.listed && !done; i += 32) {
      int expert = i + lane < a.listed ? ((const int *)a.experts)[i + lane] : -1;
      int first = 0, rows = 0;
      if (expert >= 0 && expert < a.experts_all) {
        first = ((const int *)a.offsets)[expert];
        rows = ((const int *)a.offsets)[expert + 1] - first;
      }
      int tiles = rows > 0 ? (rows + tile_rows - 1) / tile_rows * across : 0, end = tiles;
#pragma unroll
      for (int j = 1; j < 32; j <<= 1) {
        int v = __shfl_up_sync(all_lanes, end, j);
        if (lane >= j) end += v;
      }
      end += base;
      bool here = index >= end - tiles && index < end;
      if (here) {
        mine.expert = expert, mine.first = first, mine.rows = rows, mine.tile = index - (end - tiles);
        found = mine;
      }
      done = __ballot_sync(all_lanes, here) != 0;
      base = __shfl_sync(all_lanes, end, 31);
    }
    if (!done && lane == 0) found = mine;
  }
  __syncthreads();
  return found;
}

// Converts eight elements to the activation type: part 0 is the rounded value, part 1 the
// rounded remainder.
DEVICE uint4 convert8(const void *base, int type, i64 at, int n, bool aligned, int part) {
  float v[8];
  load8(v, base, type, at, n, aligned);
#pragma unroll
  for (int i = 0; i < 8 && part; i++) {
    float rounded = from_act(to_act(v[i]));
    v[i] = fabsf(rounded) <= 3.4e38f ? v[i] - rounded : 0.f;
  }
  uint4 q;
  q.x = pack_act(v[0], v[1]), q.y = pack_act(v[2], v[3]);
  q.z = pack_act(v[4], v[5]), q.w = pack_act(v[6], v[7]);
  return q;
}

// Computes tile_rows rows of X by tile_weights rows of W (gate/up: half of them of w1, half of
// w3) with down times over warps. plain: W has the activation type and X and W are aligned, so
// cp.async can copy them. Otherwise W is split into two numbers of the activation type, whose
// products are added.
template <int mode, int tile_rows, int tile_weights, int down, int over, int stages, bool plain>
DEVICE void product(const gemm_args &a, unsigned char *memory) {
  constexpr int threads = 32 * down * over;
  constexpr int pass = threads / 8;                      // rows per pass of all threads' copies
  constexpr int x_passes = tile_rows / pass, w_passes = tile_weights / pass;
  constexpr int terms = plain ? 1 : 2;
  constexpr int stage_bytes = (tile_rows + terms * tile_weights) * row_bytes;
  constexpr int mi = tile_rows / down / 16;              // 16-row parts of a warp
  constexpr int ni = tile_weights / over / 8;            // 8-column parts of a warp
  constexpr int parts = mode == expert_up ? 2 : 1;
  constexpr int tile_columns = tile_weights / parts;     // of Out
  static_assert(tile_rows % pass == 0 && tile_weights % pass == 0 && ni % 2 == 0, "tile");

  // Selects the tile: neighboring blocks share weights.
  int across = (a.columns + tile_columns - 1) / tile_columns;
  tile_place place = {0, 0, a.rows, (int)blockIdx.x};
  if (mode != dense) {
    place = find_tile(a, tile_rows, across);
    if (place.expert < 0) return;  // the grid is sized for the worst case; uniform over the block
  }
  int tiles = (place.rows + tile_rows - 1) / tile_rows;
  int row0 = place.tile % tiles * tile_rows, column0 = place.tile / tiles * tile_columns;
  const int *order = (const int *)a.order + place.first;
  const char *weights = (const char *)(mode == dense ? a.w : ((const u64 *)a.slots)[place.expert]);
  int w_size = plain || a.w_type != f32_type ? 2 : 4;
  if (mode != dense) weights += a.w_start * w_size;

  // A thread copies these rows, the same chunk of each.
  int chunk = threadIdx.x & 7, lead = threadIdx.x >> 3;
  const u16 *x_rows[x_passes];
  const char *w_rows[w_passes];
#pragma unroll
  for (int i = 0; i < x_passes; i++) {
    int row = row0 + lead + i * pass;
    x_rows[i] = 0;
    if (row < place.rows) {
      i64 source = row;
      if (mode == expert_up) source = order[row] / a.top_k;
      if (mode == expert_down) source = place.first + row;
      x_rows[i] = (const u16 *)a.x + source * a.x_stride;
    }
  }
#pragma unroll
  for (int i = 0; i < w_passes; i++) {
    int row = lead + i * pass, part = row / tile_columns, column = column0 + row % tile_columns;
    w_rows[i] = 0;
    if (column < a.columns) w_rows[i] = weights + (part * a.w_matrix + column * a.w_stride) * w_size;
  }

  auto load_stage = [&](int k, int slot) {
    int at = k * step + chunk * 8, n = a.inner - at;
    n = n < 0 ? 0 : n > 8 ? 8 : n;
    unsigned char *stage = memory + slot * stage_bytes;
#pragma unroll
    for (int i = 0; i < x_passes; i++) {
      unsigned char *to = stage + chunk_at(lead + i * pass, chunk);
      int there = x_rows[i] ? n : 0;
      if (plain)
        copy_async(to, there ? (const void *)(x_rows[i] + at) : (const void *)a.x, 2 * there);
      else
        *(uint4 *)to = convert8(x_rows[i], act_type, at, there, a.x_aligned, 0);
    }
#pragma unroll
    for (int i = 0; i < w_passes; i++) {
      unsigned char *to = stage + chunk_at(tile_rows + lead + i * pass, chunk);
      int there = w_rows[i] ? n : 0;
      if (plain)
        copy_async(to, there ? (const void *)(w_rows[i] + 2 * at) : (const void *)weights, 2 * there);
      else
#pragma unroll
        for (int t = 0; t < terms; t++)
          *(uint4 *)(to + t * tile_weights * row_bytes) = convert8(w_rows[i], a.w_type, at, there, a.w_aligned, t);
    }
  };

  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int warp_row = warp / over * (tile_rows / down);
  int warp_column = warp % over * (tile_columns / over);
  // The row of the tile's weights at which part j of this warp starts.
  auto weight_row = [&](int j) {
    constexpr int half = ni / parts;
    return j / half * tile_columns + warp_column + j % half * 8;
  };
  float sums[mi][ni][4] = {};
  int steps = (a.inner + step - 1) / step;
#pragma unroll
  for (int k = 0; k < stages - 1; k++) {
    if (k < steps) load_stage(k, k);
    copy_commit();
  }
  int slot = 0, next = stages - 1;
  for (int k = 0; k < steps; k++) {
    copy_wait<stages - 2>();
    __syncthreads();  // step k has arrived for all threads, and none still reads the stage overwritten next
    if (k + stages - 1 < steps) load_stage(k + stages - 1, next);
    copy_commit();
    const unsigned char *stage = memory + slot * stage_bytes;
#pragma unroll
    for (int kk = 0; kk < step / 16; kk++) {
      u32 x[mi][4];
#pragma unroll
      for (int i = 0; i < mi; i++)
        load_matrices(x[i], stage + chunk_at(warp_row + i * 16 + (lane & 15), kk * 2 + (lane >> 4)));
#pragma unroll
      for (int t = 0; t < terms; t++) {
        u32 w[ni / 2][4];
#pragma unroll
        for (int j = 0; j < ni; j += 2) {
          int row = (lane >> 4 ? weight_row(j + 1) : weight_row(j)) + (lane & 7);
          load_matrices(w[j / 2], stage + chunk_at(tile_rows + t * tile_weights + row, kk * 2 + (lane >> 3 & 1)));
        }
#pragma unroll
        for (int i = 0; i < mi; i++)
#pragma unroll
          for (int j = 0; j < ni; j++) mma(sums[i][j], x[i], w[j / 2][j % 2 * 2], w[j / 2][j % 2 * 2 + 1]);
      }
    }
    if (++slot == stages) slot = 0;
    if (++next == stages) next = 0;
  }
  copy_wait<0>();

  // Epilogue: a thread has two neighboring columns of rows lane/4 and lane/4 + 8 of each part.
#pragma unroll
  for (int i = 0; i < mi; i++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int row = row0 + warp_row + i * 16 + h * 8 + (lane >> 2);
      if (row >= place.rows) continue;
      i64 target = (mode == dense ? row : mode == expert_up ? place.first + row : order[row]) * a.out_stride;
#pragma unroll
      for (int j = 0; j < ni / parts; j++) {
        int column = column0 + warp_column + j * 8 + (lane & 3) * 2, n = a.columns - column;
        if (n <= 0) continue;
        float v0 = sums[i][j][2 * h], v1 = sums[i][j][2 * h + 1];
        if (mode == expert_up) {
          v0 = __fmul_rn(silu(v0), sums[i][j + ni / 2][2 * h]);
          v1 = __fmul_rn(silu(v1), sums[i][j + ni / 2][2 * h + 1]);
        }
        if (mode == dense && a.bias) {
          v0 += load1((const void *)a.bias, a.bias_type, column);
          if (n > 1) v1 += load1((const void *)a.bias, a.bias_type, column + 1);
        }
        if (mode == dense && a.out_float) {
          float *out = (float *)a.out + target + column;
          if (n > 1 && a.out_paired) {
            *(float2 *)out = make_float2(v0, v1);
          } else {
            out[0] = v0;
            if (n > 1) out[1] = v1;
          }
        } else {
          u16 *out = (u16 *)a.out + target + column;
          u32 both = pack_act(v0, v1);
          if (n > 1 && a.out_paired) {
            *(u32 *)out = both;
          } else {
            out[0] = (u16)both;
            if (n > 1) out[1] = (u16)(both >> 16);
          }
        }
      }
    }
}

// Tiles for few, some and many rows. gemm.go has their sizes, threads and shared memory.
#define PRODUCTS(name, mode, plain)                                  \
  KERNEL(128, 3) name##_16(const gemm_args a) {                   \
    begin();                                                         \
    DYNAMIC_SHARED(memory);                                          \
    product<mode, 16, 64, 1, 4, 6, plain>(a, memory);                \
  }                                                                  \
  KERNEL(256, 2) name##_64(const gemm_args a) {                   \
    begin();                                                         \
    DYNAMIC_SHARED(memory);                                          \
    product<mode, 64, 128, 2, 4, 4, plain>(a, memory);               \
  }                                                                  \
  KERNEL(256, 2) name##_128(const gemm_args a) {                  \
    begin();                                                         \
    DYNAMIC_SHARED(memory);                                          \
    product<mode, 128, 128, 2, 4, 3, plain>(a, memory);              \
  }

PRODUCTS(matmul, dense, true)
PRODUCTS(up, expert_up, true)
PRODUCTS(down, expert_down, true)

// For weights of another type than the activations, and for unaligned rows.
KERNEL(256, 2) matmul_any(const gemm_args a) {
  begin();
  DYNAMIC_SHARED(memory);
  product<dense, 64, 128, 2, 4, 2, false>(a, memory);
}

KERNEL(256, 2) up_any(const gemm_args a) {
  begin();
  DYNAMIC_SHARED(memory);
  product<expert_up, 64, 128, 2, 4, 2, false>(a, memory);
}

KERNEL(256, 2) down_any(const gemm_args a) {
  begin();
  DYNAMIC_SHARED(memory);
  product<expert_down, 64, 128, 2, 4, 2, false>(a, memory);
}
