// Instructions of exactly compute capability 9.0 (sm_90a): wgmma, bulk copies and TMA,
// mbarriers with transaction counts.

DEVICE u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

DEVICE void barrier_init(u64 *barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Makes initialized barriers visible to the async proxy.
DEVICE void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void barrier_arrive(u64 *barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives, and adds bytes to the transaction count that the phase waits for.
DEVICE void barrier_expect(u64 *barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// Arrives when this thread's previous cp.async copies (copy_async) are complete.
DEVICE void barrier_arrive_after_copies(u64 *barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// The phase also waits for this thread's previous cp.async copies, which are no arrival. A later
// arrival must be missing still.
DEVICE void barrier_await_copies(u64 *barrier) {
  asm volatile("cp.async.mbarrier.arrive.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Waits for the end of the phase of that parity.
DEVICE void barrier_wait(u64 *barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again;\n}"
      ::"r"(shared_address(barrier)), "r"(parity)
      : "memory");
}

// Bulk copy of bytes, a multiple of 16, counted at the barrier.
DEVICE void copy_bulk(void *shared, const void *global, int bytes, u64 *barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :
               : "r"(shared_address(shared)), "l"(global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

// The same; with hint by an L2 policy.
template <bool hint>
DEVICE void copy_bulk(void *shared, const void *global, int bytes, u64 *barrier, u64 policy) {
  if (!hint) return copy_bulk(shared, global, bytes, barrier);
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
               :
               : "r"(shared_address(shared)), "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
               : "memory");
}

// The TMA descriptor of a matrix (CUtensorMap), passed in the arguments of a kernel.
struct alignas(64) tensor_map {
  u64 words[16];
};

// Prefetches a tensor map.
DEVICE void prefetch_map(const tensor_map *map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// TMA copy of a tile of 64 elements of each row of a matrix, from element and row on: as many
// rows as the map has, 128 bytes each, with chunk c of row r at c ^ (r & 7) (128-byte swizzle).
// All its bytes count at the barrier; elements outside of the matrix are zeros.
DEVICE void copy_tile(void *shared, const tensor_map *map, int element, int row, u64 *barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
               :
               : "r"(shared_address(shared)), "l"(map), "r"(element), "r"(row), "r"(shared_address(barrier))
               : "memory");
}

// 1 / x, to one unit in the last place.
DEVICE float reciprocal_fast(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// Orders this thread's accesses to shared memory before those of the async proxy (tensor cores
// and TMA).
DEVICE void fence_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int registers>
DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers>
DEVICE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

// The matrix descriptor for wgmma of a tile in shared memory with 64 elements (128 bytes) per
// row, at a multiple of 1024 bytes, chunk c of row r at c ^ (r & 7). The descriptor plus 2 is
// that of the next 16 elements of K.
DEVICE u64 tile_descriptor(const void *tile) {
  return (u64)(shared_address(tile) >> 4 & 0x3fff) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

// The descriptor of an operand B that is transposed: rows of 64 elements of N (128 bytes), one for
// each element of K, swizzled as above. next is the distance in bytes to the next 64 of N. The
// descriptor plus 128 is that of the next 16 elements of K.
DEVICE u64 transposed_descriptor(const void *tile, int next) {
  return (u64)(shared_address(tile) >> 4 & 0x3fff) | (u64)(next >> 4) << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

DEVICE void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int pending>
DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

#ifdef ACT_F16
#define WGMMA_TYPES "f32.f16.f16"
#else
#define WGMMA_TYPES "f32.bf16.bf16"
#endif

// Operand lists of that many registers.
#define REGISTERS_4 "%0,%1,%2,%3"
#define REGISTERS_8 REGISTERS_4 ",%4,%5,%6,%7"
#define REGISTERS_12 REGISTERS_8 ",%8,%9,%10,%11"
#define REGISTERS_16 REGISTERS_12 ",%12,%13,%14,%15"
#define REGISTERS_20 REGISTERS_16 ",%16,%17,%18,%19"
#define REGISTERS_24 REGISTERS_20 ",%20,%21,%22,%23"
#define REGISTERS_28 REGISTERS_24 ",%24,%25,%26,%27"
#define REGISTERS_32 REGISTERS_28 ",%28,%29,%30,%31"
#define REGISTERS_36 REGISTERS_32 ",%32,%33,%34,%35"
#define REGISTERS_40 REGISTERS_36 ",%36,%37,%38,%39"
#define REGISTERS_44 REGISTERS_40 ",%40,%41,%42,%43"
#define REGISTERS_48 REGISTERS_44 ",%44,%45,%46,%47"
#define REGISTERS_52 REGISTERS_48 ",%48,%49,%50,%51"
#define REGISTERS_56 REGISTERS_52 ",%52,%53,%54,%55"
#define REGISTERS_60 REGISTERS_56 ",%56,%57,%58,%59"
#define REGISTERS_64 REGISTERS_60 ",%60,%61,%62,%63"
#define REGISTERS_68 REGISTERS_64 ",%64,%65,%66,%67"
#define REGISTERS_72 REGISTERS_68 ",%68,%69,%70,%71"
#define REGISTERS_76 REGISTERS_72 ",%72,%73,%74,%75"
#define REGISTERS_80 REGISTERS_76 ",%76,%77,%78,%79"
#define REGISTERS_84 REGISTERS_80 ",%80,%81,%82,%83"
#define REGISTERS_88 REGISTERS_84 ",%84,%85,%86,%87"
#define REGISTERS_92 REGISTERS_88 ",%88,%89,%90,%91"
#define REGISTERS_96 REGISTERS_92 ",%92,%93,%94,%95"
#define FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define OPERANDS_4 FOUR(0)
#define OPERANDS_8 OPERANDS_4, FOUR(4)
#define OPERANDS_12 OPERANDS_8, FOUR(8)
#define OPERANDS_16 OPERANDS_12, FOUR(12)
#define OPERANDS_20 OPERANDS_16, FOUR(16)
#define OPERANDS_24 OPERANDS_20, FOUR(20)
#define OPERANDS_28 OPERANDS_24, FOUR(24)
#define OPERANDS_32 OPERANDS_28, FOUR(28)
#define OPERANDS_36 OPERANDS_32, FOUR(32)
#define OPERANDS_40 OPERANDS_36, FOUR(36)
#define OPERANDS_44 OPERANDS_40, FOUR(40)
#define OPERANDS_48 OPERANDS_44, FOUR(44)
#define OPERANDS_52 OPERANDS_48, FOUR(48)
#define OPERANDS_56 OPERANDS_52, FOUR(52)
#define OPERANDS_60 OPERANDS_56, FOUR(56)
#define OPERANDS_64 OPERANDS_60, FOUR(60)
#define OPERANDS_68 OPERANDS_64, FOUR(64)
#define OPERANDS_72 OPERANDS_68, FOUR(68)
#define OPERANDS_76 OPERANDS_72, FOUR(72)
#define OPERANDS_80 OPERANDS_76, FOUR(76)
#define OPERANDS_84 OPERANDS_80, FOUR(80)
#define OPERANDS_88 OPERANDS_84, FOUR(84)
#define OPERANDS_92 OPERANDS_88, FOUR(88)
#define OPERANDS_96 OPERANDS_92, FOUR(92)

// D = A B^T + D of a warpgroup (wgmma, asynchronous), 64 x columns x 16, in float32. Warp w of
// the group has rows 16w to 16w+15; lane l has of each eight columns 2 (l%4) and the next, of
// rows l/4 (words 0, 1) and l/4 + 8 (words 2, 3).
template <int columns>
struct wgmma;

#define WGMMA(columns, n, a_at, b_at)                                                                  \
  template <>                                                                                          \
  struct wgmma<columns> {                                                                              \
    static DEVICE void multiply(float (&d)[columns / 2], u64 a, u64 b) {                               \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"                                            \
                   "wgmma.mma_async.sync.aligned.m64n" #columns "k16." WGMMA_TYPES " {" REGISTERS_##n  \
                   "}, %" a_at ", %" b_at ", p, 1, 1, 0, 0;\n}"                                        \
                   : OPERANDS_##n                                                                      \
                   : "l"(a), "l"(b));                                                                  \
    }                                                                                                  \
  };

WGMMA(16, 8, "8", "9")
WGMMA(32, 16, "16", "17")
WGMMA(48, 24, "24", "25")
WGMMA(64, 32, "32", "33")
WGMMA(80, 40, "40", "41")
WGMMA(96, 48, "48", "49")
WGMMA(104, 52, "52", "53")
WGMMA(112, 56, "56", "57")
WGMMA(120, 60, "60", "61")
WGMMA(128, 64, "64", "65")
WGMMA(136, 68, "68", "69")
WGMMA(144, 72, "72", "73")
WGMMA(152, 76, "76", "77")
WGMMA(160, 80, "80", "81")
WGMMA(176, 88, "88", "89")
WGMMA(192, 96, "96", "97")

// As wgmma<128>::multiply; without accumulate, D = A B^T.
DEVICE void wgmma_shared(float (&d)[64], u64 a, u64 b, int accumulate) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n128k16." WGMMA_TYPES " {" REGISTERS_64 "}, %64, %65, p, 1, 1, 0, 0;\n}"
               : OPERANDS_64
               : "l"(a), "l"(b), "r"(accumulate));
}

// D = A B (+ D), with A in registers, laid out as operand A of mma, and a transposed_descriptor
// of B. A must not change before the product is waited for.
DEVICE void wgmma_registers(float (&d)[64], const u32 (&a)[4], u64 b, int accumulate) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n128k16." WGMMA_TYPES " {" REGISTERS_64 "}, {%64,%65,%66,%67}, %68, p, 1, 1, 1;\n}"
               : OPERANDS_64
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

// wgmma_wait, before any use of d.
template <int pending>
DEVICE void wgmma_wait(float (&d)[64]) {
  asm volatile("wgmma.wait_group.sync.aligned %64;" : OPERANDS_64 : "n"(pending) : "memory");
}

// What computes d is not moved behind this: compilers would move a wait before it.
DEVICE void compute_now(float (&d)[64]) { asm volatile("" : OPERANDS_64 : : "memory"); }

// A barrier of the warpgroup with that number, from 0 on.
DEVICE void meet_warpgroup(int group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }

// Of two warpgroups that take turns: one waits for its turn, which the other has passed or passes
// to it.
DEVICE void await_turn(int group) { asm volatile("bar.sync %0, 256;" ::"r"(group + 3) : "memory"); }
DEVICE void pass_turn(int to) { asm volatile("bar.arrive %0, 256;" ::"r"(to + 3) : "memory"); }

// Transposes an 8 x 8 matrix of 16-bit elements; lane l has two neighbors of row l/4.
DEVICE u32 transpose(u32 v) {
  u32 r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
  return r;
}
