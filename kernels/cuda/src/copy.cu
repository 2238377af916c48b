// Copies of many blocks of memory, of this device, of peers and of the host.

struct copy_blocks_args {
  u64 src, dst;      // addresses of the blocks, 0: skip
  int count, words;  // blocks, and words of 16 bytes per block
};

constexpr int copy_threads = 512;
// Words that a thread loads before it stores the first: one block of threads has 64 KiB in
// flight, about what a link to the host delivers within its latency.
constexpr int copy_words = 8;

// The words of all blocks are numbered in sequence, and a thread copies every n-th, n being the
// number of threads. Each warp reads and writes 512 contiguous bytes, unless blocks are
// smaller. The position is advanced without divisions.
KERNEL(512, 1) copy_blocks(const copy_blocks_args a) {
  begin();
  int first = blockIdx.x * copy_threads + threadIdx.x, step = gridDim.x * copy_threads;
  int block = first / a.words, word = first - block * a.words;
  int step_blocks = step / a.words, step_words = step - step_blocks * a.words;
  while (block < a.count) {
    const uint4 *from[copy_words];
    uint4 *to[copy_words];
#pragma unroll
    for (int i = 0; i < copy_words; i++) {
      u64 src = 0, dst = 0;
      if (block < a.count) src = ((const u64 *)a.src)[block], dst = ((const u64 *)a.dst)[block];
      bool copied = src != 0 && dst != 0;
      from[i] = copied ? (const uint4 *)src + word : nullptr;
      to[i] = copied ? (uint4 *)dst + word : nullptr;
      block += step_blocks, word += step_words;
      if (word >= a.words) word -= a.words, block++;
    }
    uint4 v[copy_words];
#pragma unroll
    for (int i = 0; i < copy_words; i++)
      if (from[i]) v[i] = load_streaming(from[i]);
#pragma unroll
    for (int i = 0; i < copy_words; i++)
      if (to[i]) store_chunk(to[i], v[i]);
  }
}

struct add_rows_args {
  u64 src, dst;  // addresses of the rows
  int columns;
};

constexpr int add_rows_threads = 128;

// Adds rows of activations to others. blockIdx.x is a row; a thread has eight elements. The rows
// that are read may be in host memory.
KERNEL(128, 1) add_rows(const add_rows_args a) {
  begin();
  int at = (blockIdx.y * add_rows_threads + threadIdx.x) * 8;
  if (at >= a.columns) return;
  u16 *to = (u16 *)((const u64 *)a.dst)[blockIdx.x] + at;
  uint4 term = load_streaming((const uint4 *)((const u16 *)((const u64 *)a.src)[blockIdx.x] + at));
  uint4 sum = *(const uint4 *)to;
  float v[8], u[8];
  unpack(v, sum);
  unpack(u, term);
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = __fadd_rn(v[i], u[i]);
  store_chunk(to, pack(v));
}

struct copy_part_args {
  u64 src, dst;
  int chunks, words;  // of 16 bytes, where both addresses are multiples of that, and of 4, in all
};

struct copy_args {
  copy_part_args first, second;
  int blocks;  // of the first, in front of those of the second
};

constexpr int copy_small_threads = 256;

// Launched without overlap with the kernel behind it, which may read what is written before it waits.
KERNEL(256, 1) copy_small(const copy_args a) {
  begin();
  bool second = blockIdx.x >= a.blocks;
  const copy_part_args part = second ? a.second : a.first;
  int block = second ? blockIdx.x - a.blocks : blockIdx.x, blocks = second ? gridDim.x - a.blocks : a.blocks;
  int first = block * copy_small_threads + threadIdx.x, step = blocks * copy_small_threads;
  for (int i = first; i < part.chunks; i += step) store_chunk((uint4 *)part.dst + i, load_streaming((const uint4 *)part.src + i));
  for (int i = 4 * part.chunks + first; i < part.words; i += step) ((u32 *)part.dst)[i] = ((const u32 *)part.src)[i];
}
