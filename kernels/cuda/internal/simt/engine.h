// The machine under emulated.h: one block at a time, its threads as fibers.
#pragma once
#include <stddef.h>
#include <stdint.h>

struct simt_kernel {
  const char *name;
  void (*run)(const void *args);
  size_t bytes;  // of its arguments
};

extern const simt_kernel simt_bf16[], simt_f16[];  // end with a null name

#ifdef __cplusplus
namespace simt {

struct index {
  unsigned x, y, z;
};
struct message {
  uint32_t words[6];
};

extern index block_index, block_size, grid_size;

index thread();
int lane();
unsigned char *shared_memory();
// meet_block and meet_warp return when all threads have come; meet_warp returns what
// each lane brought, valid until the lane's next meeting but one.
void meet_block();
const message *meet_warp(const message &m);
void check_shared(const void *p, size_t bytes);
void copy(void *shared, const void *global, int bytes);
void commit();
void wait(int pending);

template <class A, void (*f)(A)>
void call(const void *args) {
  f(*(const A *)args);
}

}  // namespace simt
#endif
