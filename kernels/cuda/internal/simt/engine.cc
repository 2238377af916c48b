//go:build cuda && amd64

#include "engine.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include <vector>

#include "simt.h"

namespace simt {

index block_index, block_size, grid_size;

namespace {

constexpr size_t stack_bytes = 256 << 10, shared_room = 256 << 10, page = 4096;
constexpr unsigned most_threads = 1024;

struct pending_copy {
  unsigned char *to;
  const unsigned char *from;
  int bytes, group;
};

struct fiber {
  void *stack_pointer;
  bool done;
  std::vector<pending_copy> copies;
  int groups;  // committed
};

struct warp {
  int arrived;
  unsigned meetings;
  message brought[2][32];
};

fiber fibers[most_threads];
warp warps[most_threads / 32];
unsigned char *stacks, *shared_end;
size_t shared_bytes;
void *scheduler;  // its stack pointer
unsigned current, alive, arrived, meetings;
uint64_t events, random_state;
const simt_kernel *kernel;
const void *arguments;
char problem[256];

// Stores the callee's registers on the stack, the stack's pointer in *from, and goes
// on at to.
extern "C" void simt_switch(void **from, void *to);
asm(R"(
  .text
  .globl simt_switch
  .type simt_switch, @function
simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size simt_switch, .-simt_switch
)");

void yield() { simt_switch(&fibers[current].stack_pointer, scheduler); }

void fail(const char *format, ...) {
  if (problem[0]) return;
  va_list list;
  va_start(list, format);
  vsnprintf(problem, sizeof problem, format, list);
  va_end(list);
}

void body() {
  kernel->run(arguments);
  fiber &f = fibers[current];
  if (!f.copies.empty()) fail("thread %u ends with %zu copies under way", current, f.copies.size());
  f.done = true;
  events++;
  alive--;
  if (alive > 0 && arrived == alive) arrived = 0, meetings++;
  yield();
  __builtin_unreachable();
}

void prepare(unsigned i) {
  fiber &f = fibers[i];
  f.done = false, f.groups = 0;
  f.copies.clear();
  void **top = (void **)(stacks + (i + 1) * stack_bytes);
  top -= 2;  // so that body starts as if called
  *top = (void *)body;
  top -= 6;
  memset(top, 0, 6 * sizeof *top);
  f.stack_pointer = top;
}

unsigned random() {
  random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
  return (unsigned)(random_state >> 33);
}

bool run_block() {
  unsigned threads = block_size.x;
  alive = threads, arrived = 0;
  memset(shared_end - shared_bytes, 0xff, shared_bytes);
  for (unsigned i = 0; i < threads; i++) prepare(i);
  for (unsigned i = 0; i < threads / 32; i++) warps[i].arrived = 0;
  while (alive > 0) {
    uint64_t before = events;
    unsigned start = random() % threads, backwards = random() & 1;
    for (unsigned i = 0; i < threads; i++) {
      current = (start + (backwards ? threads - i : i)) % threads;
      if (!fibers[current].done) simt_switch(&scheduler, fibers[current].stack_pointer);
    }
    if (problem[0]) return false;
    if (events == before) {
      fail("%u threads wait for one another and never meet", alive);
      return false;
    }
  }
  return true;
}

}  // namespace

index thread() { return {current, 0, 0}; }
int lane() { return current % 32; }
unsigned char *shared_memory() { return shared_end - shared_bytes; }

void meet_block() {
  events++;
  if (++arrived == alive) {
    arrived = 0, meetings++;
    return;
  }
  for (unsigned m = meetings; m == meetings;) yield();
}

const message *meet_warp(const message &m) {
  warp &w = warps[current / 32];
  unsigned now = w.meetings;
  w.brought[now & 1][current % 32] = m;
  events++;
  if (++w.arrived == 32)
    w.arrived = 0, w.meetings++;
  else
    while (w.meetings == now) yield();
  return w.brought[now & 1];
}

void check_shared(const void *p, size_t bytes) {
  const unsigned char *q = (const unsigned char *)p;
  if (q < shared_memory() || q + bytes > shared_end || (uintptr_t)q % bytes != 0)
    fail("thread %u: %zu bytes at %td of %zu of shared memory", current, bytes, q - shared_memory(), shared_bytes);
}

void copy(void *shared, const void *global, int bytes) {
  check_shared(shared, 16);
  if ((uintptr_t)global % 16 != 0 || bytes < 0 || bytes > 16)
    fail("thread %u: copy of %d bytes from %p", current, bytes, global);
  fiber &f = fibers[current];
  f.copies.push_back({(unsigned char *)shared, (const unsigned char *)global, bytes, f.groups});
}

void commit() { fibers[current].groups++; }

void wait(int pending) {
  fiber &f = fibers[current];
  size_t done = 0;
  for (; done < f.copies.size() && f.copies[done].group < f.groups - pending; done++) {
    const pending_copy &c = f.copies[done];
    memcpy(c.to, c.from, c.bytes);
    memset(c.to + c.bytes, 0, 16 - c.bytes);
  }
  f.copies.erase(f.copies.begin(), f.copies.begin() + done);
}

}  // namespace simt

using namespace simt;

extern "C" int64_t simt_argument_bytes(int half, const char *name) {
  for (const simt_kernel *k = half ? simt_f16 : simt_bf16; k->name; k++)
    if (strcmp(k->name, name) == 0) return (int64_t)k->bytes;
  return -1;
}

extern "C" const char *simt_launch(int half, const char *name, const void *args, const unsigned *blocks, unsigned threads,
                                   size_t shared, uint64_t seed) {
  problem[0] = 0;
  kernel = nullptr;
  for (const simt_kernel *k = half ? simt_f16 : simt_bf16; k->name; k++)
    if (strcmp(k->name, name) == 0) kernel = k;
  if (!kernel) return "no such kernel";
  if (threads == 0 || threads % 32 != 0 || threads > most_threads) return "threads are not whole warps, or too many";
  if (shared > 227 << 10) return "too much shared memory";
  if (!stacks) {
    void *p = mmap(nullptr, most_threads * stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    void *q = mmap(nullptr, shared_room + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED || q == MAP_FAILED) return "no memory";
    stacks = (unsigned char *)p;
    shared_end = (unsigned char *)q + shared_room;
    if (mprotect(shared_end, page, PROT_NONE) != 0) return "cannot protect the page behind shared memory";
  }
  arguments = args;
  shared_bytes = (shared + 127) / 128 * 128;
  random_state = seed;
  block_size = {threads, 1, 1};
  grid_size = {blocks[0], blocks[1], blocks[2]};
  for (unsigned z = 0; z < blocks[2]; z++)
    for (unsigned y = 0; y < blocks[1]; y++)
      for (unsigned x = 0; x < blocks[0]; x++) {
        block_index = {x, y, z};
        if (!run_block()) return problem;
      }
  return nullptr;
}
