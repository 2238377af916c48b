// Shared by the kernels of sm_90a: the multi-stage pipeline of weights and tokens, and its
// mainloop.

// A ring buffer of stages in shared memory, each of some k-steps: 64 elements of inner of units
// of 64 weight rows, followed by those of rows of X. full and empty have a barrier per stage:
// the stage is loaded, and it has been consumed.
struct ring {
  unsigned char *memory;
  u64 *full, *empty;
  int stages, step_bytes;
};

constexpr int unit_bytes = 64 * 128;  // one k-step of a unit
constexpr int most_stages = 16;

// The pipeline state: the slot of the next stage, and the parity of its barrier.
struct pipeline_state {
  int slot;
  u32 parity;
};

DEVICE void advance(const ring &r, pipeline_state &t) {
  if (++t.slot == r.stages) t.slot = 0, t.parity ^= 1;
}

// Initializes the barriers for that many arrivals of producers and consumers; in one thread.
DEVICE void ring_init(const ring &r, int producers, int consumers) {
  for (int i = 0; i < r.stages; i++) barrier_init(&r.full[i], producers), barrier_init(&r.empty[i], consumers);
  barrier_init_done();
}

// The mainloop of one tile for one warpgroup, which has blocks units from first on.
template <int tokens, int blocks, int tile_units, int steps_per_stage>
DEVICE void multiply_steps(float (&d)[blocks][tokens / 2], const ring &r, int steps, int first, pipeline_state &t) {
  const unsigned char *stage = r.memory;
  int before = 0;  // the slot of the previous stage
#pragma unroll 1
  for (int k = 0; k < steps; k++) {
    bool next = k % steps_per_stage == 0;
    if (next) {
      stage = r.memory + t.slot * steps_per_stage * r.step_bytes;
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

// Calls f with the smallest N, at most max_tokens, for which an MMA exists and which has room
// for that many tokens, as a constant type: a multiple of 16, or with fine of 8 above 96.
template <int n>
struct number {
  static constexpr int value = n;
};

template <int max_tokens, bool fine, class F>
DEVICE void with_room(int tokens, F f) {
  int room = (tokens + 7) / 8 * 8;
  if (!fine || room <= 96) room = (room + 15) / 16 * 16;
  switch (room) {
#define ROOM(n)                                   \
  case n:                                         \
    if constexpr (n <= max_tokens) f(number<n>{});      \
    break;
#define FINE_ROOM(n)                                   \
  case n:                                              \
    if constexpr (fine && n <= max_tokens) f(number<n>{});   \
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
