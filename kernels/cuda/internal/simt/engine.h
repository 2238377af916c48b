// The machine under emulated.h: on each thread of the process one block at a time, its threads as
// fibers.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "simt.h"

struct simt_kernel {
  const char *name;
  void (*run)(const void *args);
  size_t bytes;  // of its arguments
};

extern const simt_field *const simt_bf16_fields, *const simt_f16_fields;
extern const simt_kernel simt_bf16[], simt_f16[], simt_faults[];  // end with a null name

#ifdef __cplusplus
namespace simt {

struct index {
  unsigned x, y, z;
};
struct message {
  uint32_t words[6];
};
struct product {
  float at[16][8];
};

constexpr size_t shared_room = 256 << 10;
extern __thread index block_index, block_size, grid_size;
extern __thread unsigned current;  // thread of the block
extern __thread unsigned char *shared_end;
extern __thread size_t shared_bytes;

inline index thread() { return {current, 0, 0}; }
inline int lane() { return current % 32; }
inline unsigned char *shared_memory() { return shared_end - shared_bytes; }
// meet_block and meet_warp return when all threads have come; meet_warp returns what
// each lane brought, valid until the lane's next meeting but one.
void meet_block();
const message *meet_warp(const message &m);
// Likewise, and the last lane to come computes a product for all.
const product *meet_warp(const message &m, void (*last)(product &p, const message *all));
void launch_dependents();
void wait_dependencies();
// bytes: a power of two, to which p is aligned
void fail_shared(const void *p, size_t bytes);
inline bool check_shared(const void *p, size_t bytes) {
  const unsigned char *q = (const unsigned char *)p;
  bool good = q >= shared_memory() && q + bytes <= shared_end && ((uintptr_t)q & (bytes - 1)) == 0;
  if (!good) fail_shared(p, bytes);
  return good;
}
void check_global(const void *p, size_t bytes);
void copy(void *shared, const void *global, int bytes);
void commit();
void wait(int pending);

// Of sm_90a: addresses in shared memory as numbers; barriers that count arrivals and bytes
// of bulk copies; products of a warpgroup (of 128 threads) in the background.
void fail(const char *format, ...);
inline uint32_t shared_address(const void *p) { return (uint32_t)((const unsigned char *)p - (shared_end - shared_room)); }
inline const void *at_shared_address(uint32_t at, size_t bytes) {
  const unsigned char *p = shared_end - shared_room + at;
  return check_shared(p, bytes) ? p : shared_end - bytes;
}
void barrier_init(unsigned long long *barrier, int arrivals);
void barrier_arrive(unsigned long long *barrier, int bytes);
void barrier_arrive_after_copies(unsigned long long *barrier);
void barrier_await_copies(unsigned long long *barrier);
void barrier_wait(unsigned long long *barrier, uint32_t parity);
void copy_bulk(void *shared, const void *global, int bytes, unsigned long long *barrier);
void copy_tile(void *shared, const void *global, int64_t rows, int64_t elements, int64_t stride, int tile_rows, int element, int row,
               unsigned long long *barrier);
void meet_group();
// Named barriers of a block, of which some threads wait and others only arrive.
void named_sync(int id, int threads);
void named_arrive(int id, int threads);
void multiply_later(void (*run)(float *d, unsigned long long a, unsigned long long b), float *d, unsigned long long a, unsigned long long b);
// operand is two rows of operand A of a product, 16 elements each, which registers of several
// threads hold; this thread's are to stay what they were then until the product is done.
struct operand {
  uint32_t words[2][8];
  const uint32_t *registers;
  uint32_t then[4];
  int accumulate;
};
void multiply_later(void (*run)(float *d, const operand &a, unsigned long long b), float *d, const operand &a, unsigned long long b);
void multiply_commit();
void multiply_wait(int pending);

template <class A, void (*f)(A)>
void call(const void *args) {
  A a;  // at its own alignment
  memcpy(&a, args, sizeof a);
  f(a);
}

}  // namespace simt
#endif
