// What src/hopper.cuh offers to kernels, on the host, behind emulated.h. It depends on the
// activation type, so it comes into a namespace of one translation unit.

static inline u32 shared_address(const void *p) { return simt::shared_address(p); }

static inline void barrier_init(u64 *barrier, int arrivals) { simt::barrier_init(barrier, arrivals); }
static inline void barrier_init_done() {}
static inline void barrier_arrive(u64 *barrier) { simt::barrier_arrive(barrier, 0); }
static inline void barrier_expect(u64 *barrier, int bytes) { simt::barrier_arrive(barrier, bytes); }
static inline void barrier_arrive_after_copies(u64 *barrier) { simt::barrier_arrive_after_copies(barrier); }
static inline void barrier_wait(u64 *barrier, u32 parity) { simt::barrier_wait(barrier, parity); }
static inline void copy_bulk(void *shared, const void *global, int bytes, u64 *barrier) { simt::copy_bulk(shared, global, bytes, barrier); }

struct alignas(64) tensor_map {
  u64 words[16];  // address, rows, elements of a row, bytes from row to row, rows of a tile
};
static inline void prefetch_map(const tensor_map *) {}
static inline void copy_tile(void *shared, const tensor_map *map, int element, int row, u64 *barrier) {
  const u64 *w = map->words;
  simt::copy_tile(shared, (const void *)w[0], (i64)w[1], (i64)w[2], (i64)w[3], (int)w[4], element, row, barrier);
}

static inline float reciprocal_fast(float x) { return 1.f / x; }
static inline void fence_shared() {}
template <int registers>
static inline void take_registers() {}
template <int registers>
static inline void give_registers() {}

// Bits 0 to 13: the address without its last four; 32 to 45: between groups of eight rows,
// likewise; 62: rows of 128 bytes, swizzled.
static inline u64 tile_descriptor(const void *tile) {
  u32 at = simt::shared_address(tile);
  if (at % 1024 != 0) simt::fail("thread %u: a tile at %u, no multiple of 1024", threadIdx.x, at);
  return at >> 4 | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
}

// Element (row, k) of a tile: the three bits above 128 bytes are added to those of the
// place of 16 bytes.
static inline u16 tile_element(u64 descriptor, int row, int k) {
  u32 at = (u32)(descriptor & 0x3fff) * 16 + row / 8 * (u32)(descriptor >> 32 & 0x3fff) * 16 + row % 8 * 128 + k * 2;
  at ^= at >> 3 & 0x70;
  return *(const u16 *)simt::at_shared_address(at, 2);
}

#ifdef ACT_F16
#define WIDEN from_f16
#else
#define WIDEN from_bf16
#endif

// Products of a warpgroup run in the background, here as late as its waits allow.
template <int columns>
struct wgmma {
  static void run(float *d, u64 a, u64 b) {
    int thread = threadIdx.x % 128, lane = thread % 32;
    for (int i = 0; i < columns / 2; i++) {
      int row = thread / 32 * 16 + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      float sum = 0;
      for (int k = 0; k < 16; k++) sum += WIDEN(tile_element(a, row, k)) * WIDEN(tile_element(b, column, k));
      d[i] += sum;
    }
  }
  static void multiply(float (&d)[columns / 2], u64 a, u64 b) {
    static_assert(columns % 8 == 0 && columns <= 256, "columns");
    simt::multiply_later(run, d, a, b);
  }
};

static inline void wgmma_begin() { simt::meet_group(); }
static inline void wgmma_commit() { simt::multiply_commit(); }
template <int pending>
static inline void wgmma_wait() {
  simt::meet_group();  // warps of a group multiply together
  simt::multiply_wait(pending);
  simt::meet_group();
}

static inline u32 transpose(u32 v) {
  simt::message m = {{v}};
  const simt::message *all = simt::meet_warp(m);
  int lane = simt::lane(), row = lane / 4, column = lane % 4 * 2;
  auto element = [&](int r, int c) { return all[r * 4 + c / 2].words[0] >> c % 2 * 16 & 0xffff; };
  return element(column, row) | element(column + 1, row) << 16;
}
