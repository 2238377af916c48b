// What the kernels of sm_90a share: how weights and tokens come, and the loop over them.

// A ring of stages in shared memory, each of some steps: 64 elements of inner of units
// of 64 weight rows, and behind them of rows of X. full and empty have a barrier per
// stage: that it has come, and that it has been used.
struct ring {
  unsigned char *memory;
  u64 *full, *empty;
  int stages, step_bytes;
};

constexpr int unit_bytes = 64 * 128;  // one step of a unit
constexpr int most_stages = 16;

// Where stages are: the slot of the next, and the parity of its barrier.
struct turn {
  int slot;
  u32 parity;
};

DEVICE void advance(const ring &r, turn &t) {
  if (++t.slot == r.stages) t.slot = 0, t.parity ^= 1;
}

// Makes the barriers, for so many arrivals of who brings and who uses; by one thread.
DEVICE void ring_init(const ring &r, int bring, int use) {
  for (int i = 0; i < r.stages; i++) barrier_init(&r.full[i], bring), barrier_init(&r.empty[i], use);
  barrier_init_done();
}

// The products of one tile by one warpgroup, which has blocks units from the first on.
template <int tokens, int blocks, int tile_units, int deep>
DEVICE void multiply_steps(float (&d)[blocks][tokens / 2], const ring &r, int steps, int first, turn &t) {
  const unsigned char *stage = r.memory;
  int before = 0;  // the slot of the stage before
#pragma unroll 1
  for (int k = 0; k < steps; k++) {
    bool next = k % deep == 0;
    if (next) {
      stage = r.memory + t.slot * deep * r.step_bytes;
      barrier_wait(&r.full[t.slot], t.parity);
      fence_shared();
    }
    u64 w = tile_descriptor(stage + first * unit_bytes), x = tile_descriptor(stage + tile_units * unit_bytes);
    wgmma_begin();
#pragma unroll
    for (int kk = 0; kk < 4; kk++)
#pragma unroll
      for (int b = 0; b < blocks; b++) wgmma<tokens>::multiply(d[b], w + b * (unit_bytes >> 4) + 2 * kk, x + 2 * kk);
    wgmma_commit();
    wgmma_wait<1>();
    stage += r.step_bytes;
    if (next) {
      if (k > 0 && threadIdx.x % 128 == 0) barrier_arrive(&r.empty[before]);
      before = t.slot;
      advance(r, t);
    }
  }
  wgmma_wait<0>();
  if (threadIdx.x % 128 == 0) barrier_arrive(&r.empty[before]);
}

// Calls f with the fewest columns, up to most, that products are made for and that hold
// so many tokens, as a type's constant: multiples of 16, or with fine of 8 above 96.
template <int n>
struct number {
  static constexpr int value = n;
};

template <int most, bool fine, class F>
DEVICE void with_room(int tokens, F f) {
  int room = (tokens + 7) / 8 * 8;
  if (!fine || room <= 96) room = (room + 15) / 16 * 16;
  switch (room) {
#define ROOM(n)                                   \
  case n:                                         \
    if constexpr (n <= most) f(number<n>{});      \
    break;
#define FINE_ROOM(n)                                   \
  case n:                                              \
    if constexpr (fine && n <= most) f(number<n>{});   \
    break;
    ROOM(16)
    ROOM(32)
    ROOM(48)
    ROOM(64)
    ROOM(80)
    ROOM(96)
    FINE_ROOM(104)
    ROOM(112)
    FINE_ROOM(120)
    ROOM(128)
    FINE_ROOM(136)
    ROOM(144)
    FINE_ROOM(152)
    ROOM(160)
    ROOM(176)
    ROOM(192)
  }
}
