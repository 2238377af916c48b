// What src/hopper.cuh offers to kernels, on the host, behind emulated.h. It depends on the
// activation type, so it comes into a namespace of one translation unit.

static inline u32 shared_address(const void *p) { return simt::shared_address(p); }

static inline void barrier_init(u64 *barrier, int arrivals) { simt::barrier_init(barrier, arrivals); }
static inline void barrier_init_done() {}
static inline void barrier_arrive(u64 *barrier) { simt::barrier_arrive(barrier, 0); }
static inline void barrier_expect(u64 *barrier, int bytes) { simt::barrier_arrive(barrier, bytes); }
static inline void barrier_arrive_after_copies(u64 *barrier) { simt::barrier_arrive_after_copies(barrier); }
static inline void barrier_await_copies(u64 *barrier) { simt::barrier_await_copies(barrier); }
static inline void barrier_wait(u64 *barrier, u32 parity) { simt::barrier_wait(barrier, parity); }
template <bool>
static inline void copy_bulk(void *shared, const void *global, int bytes, u64 *barrier, u64) { simt::copy_bulk(shared, global, bytes, barrier); }

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

// Of an operand B with N contiguous: bits 16 to 29 are the distance between 64 elements of N and
// the next 64, 32 to 45 that between eight rows of K.
static inline u64 transposed_descriptor(const void *tile, int next) {
  u32 at = simt::shared_address(tile);
  if (at % 1024 != 0 || next % 1024 != 0) simt::fail("thread %u: a tile at %u, the next %d bytes on, no multiples of 1024", threadIdx.x, at, next);
  return at >> 4 | (u64)(next >> 4) << 16 | (u64)64 << 32 | (u64)1 << 62;
}
#ifdef ACT_F16
#define WIDEN from_f16
#else
#define WIDEN from_bf16
#endif

// The 16 elements k of a column, an even one, and of the next.
static inline void transposed_elements(float (&v)[16][2], u64 descriptor, int column) {
  u32 first = (u32)(descriptor & 0x3fff) * 16 + column / 64 * (u32)(descriptor >> 16 & 0x3fff) * 16 + column % 64 * 2;
  for (int k = 0; k < 16; k++) {
    u32 at = first + k / 8 * (u32)(descriptor >> 32 & 0x3fff) * 16 + k % 8 * 128;
    at ^= at >> 3 & 0x70;
    const u16 *two = (const u16 *)simt::at_shared_address(at, 4);
    v[k][0] = WIDEN(two[0]), v[k][1] = WIDEN(two[1]);
  }
}

// Elements k to k+7, of 16 bytes, of a tile's row: the three bits above 128 bytes are added to those
// of the place of 16 bytes.
static inline const u16 *tile_elements(u64 descriptor, int row, int k) {
  u32 at = (u32)(descriptor & 0x3fff) * 16 + row / 8 * (u32)(descriptor >> 32 & 0x3fff) * 16 + row % 8 * 128 + k * 2;
  at ^= at >> 3 & 0x70;
  return (const u16 *)simt::at_shared_address(at, 16);
}

// Products of a warpgroup run in the background, here as late as its waits allow.
template <int columns>
struct wgmma {
  static void run(float *d, u64 a, u64 b) {
    int thread = threadIdx.x % 128, lane = thread % 32;
    int row = thread / 32 * 16 + lane / 4;
    four rows[16];
    float pair[16][2];
    for (int k = 0; k < 16; k += 8) {
      const u16 *first = tile_elements(a, row, k), *second = tile_elements(a, row + 8, k);
      for (int i = 0; i < 8; i++) rows[k + i] = of_rows(WIDEN(first[i]), WIDEN(second[i]));
    }
    for (int column = lane % 4 * 2; column < columns; column += 8, d += 4) {
      for (int k = 0; k < 16; k += 8) {
        const u16 *first = tile_elements(b, column, k), *second = tile_elements(b, column + 1, k);
        for (int i = 0; i < 8; i++) pair[k + i][0] = WIDEN(first[i]), pair[k + i][1] = WIDEN(second[i]);
      }
      add_products(d, rows, pair);
    }
  }
  static void multiply(float (&d)[columns / 2], u64 a, u64 b) {
    static_assert(columns % 8 == 0 && columns <= 256, "columns");
    simt::multiply_later(run, d, a, b);
  }
};

// The same, where accumulate decides whether D is added to.
static inline void wgmma_shared(float (&d)[64], u64 a, u64 b, int accumulate) {
  simt::multiply_later(accumulate ? wgmma<128>::run : +[](float *d, u64 a, u64 b) {
    for (int i = 0; i < 64; i++) d[i] = 0;
    wgmma<128>::run(d, a, b);
  }, d, a, b);
}

// A's registers are read at once, and must be the same when the product is waited for. A
// thread's rows of D take the elements of A of the four threads that hold these rows.
static inline void wgmma_registers(float (&d)[64], const u32 (&a)[4], u64 b, int accumulate) {
  simt::message m = {{a[0], a[1], a[2], a[3]}};
  const simt::message *all = simt::meet_warp(m);
  simt::operand rows = {};
  int first = simt::lane() / 4 * 4;
  for (int i = 0; i < 4; i++)
    for (int w = 0; w < 4; w++) rows.words[w % 2][w / 2 * 4 + i] = all[first + i].words[w];
  rows.registers = a;
  memcpy(rows.then, a, sizeof rows.then);
  rows.accumulate = accumulate;
  simt::multiply_later([](float *d, const simt::operand &rows, u64 b) {
    int lane = simt::lane();
    four a[16];
    float pair[16][2];
    for (int k = 0; k < 16; k++) a[k] = of_rows(WIDEN((u16)(rows.words[0][k / 2] >> k % 2 * 16)), WIDEN((u16)(rows.words[1][k / 2] >> k % 2 * 16)));
    for (int i = 0; i < 64 && !rows.accumulate; i++) d[i] = 0;
    for (int column = lane % 4 * 2; column < 128; column += 8, d += 4) {
      transposed_elements(pair, b, column);
      add_products(d, a, pair);
    }
  }, d, rows, b);
}

static inline void wgmma_begin() { simt::meet_group(); }
static inline void wgmma_commit() { simt::multiply_commit(); }
template <int pending>
static inline void wgmma_wait() {
  simt::meet_group();  // warps of a group multiply together
  simt::multiply_wait(pending);
  simt::meet_group();
}

template <int pending>
static inline void wgmma_wait(float (&)[64]) {
  wgmma_wait<pending>();
}
static inline void compute_now(float (&)[64]) {}
static inline void meet_warpgroup(int group) {
  if (group != (int)threadIdx.x / 128 - 1) simt::fail("thread %u: a barrier of warpgroup %d", threadIdx.x, group);
  simt::meet_group();
}

static inline void await_turn(int group) { simt::named_sync(group + 3, 256); }
static inline void pass_turn(int to) { simt::named_arrive(to + 3, 256); }

static inline u32 transpose(u32 v) {
  simt::message m = {{v}};
  const simt::message *all = simt::meet_warp(m);
  int lane = simt::lane(), row = lane / 4, column = lane % 4 * 2;
  auto element = [&](int r, int c) { return all[r * 4 + c / 2].words[0] >> c % 2 * 16 & 0xffff; };
  return element(column, row) | element(column + 1, row) << 16;
}
