//go:build cuda && amd64

#include "engine.h"

#include <link.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include <vector>

#include "simt.h"

namespace simt {

__thread index block_index, block_size, grid_size;
__thread unsigned current;
__thread unsigned char *shared_end;
__thread size_t shared_bytes;

namespace {

// No power of two, and no multiple of a page: the tops of all stacks would share a few places of the
// processor's caches.
constexpr size_t stack_bytes = (260 << 10) + 17 * 64, page = 4096;
constexpr unsigned most_threads = 1024;

struct pending_copy {
  unsigned char *to;
  const unsigned char *from;
  int bytes, group;
  bool read;  // data has what is to be written
  unsigned char data[16];
};

struct pending_product {
  void (*run)(float *d, unsigned long long a, unsigned long long b);
  float *d;
  unsigned long long a, b;
  int group;
  // Of a product whose operand A is in registers.
  void (*run_registers)(float *d, const operand &a, unsigned long long b);
  operand rows;
};

struct fiber {
  void *stack_pointer;
  bool done;
  // What it waits for: that *word & mask is no longer was; null: nothing.
  const unsigned *word;
  unsigned mask, was;
  std::vector<pending_copy> copies;
  int groups;  // committed
  std::vector<pending_product> products;
  int product_groups;  // committed
};

// later is an arrival at a barrier that comes with copies in the background: a thread's so
// far, or (thread -1) a bulk copy.
struct later {
  int thread;
  unsigned long long *barrier;
  std::vector<pending_copy> copies;
};

// barrier is what lies in a kernel's 64 bits.
struct barrier_state {
  unsigned pending : 16, arrivals : 16, phase : 1;
  int bytes : 31;  // still to come in this phase
};
static_assert(sizeof(barrier_state) == sizeof(unsigned long long), "barrier");

struct warp {
  int arrived;
  unsigned meetings;
  message brought[2][32];
  product products[2];
};

struct warp_group {
  int arrived;
  unsigned meetings;
};

// Each thread of the process has a multiprocessor of its own, from its first launch on: what is
// declared __thread, and this.
struct multiprocessor {
  fiber fibers[most_threads];
  warp warps[most_threads / 32];
  std::vector<later> laters;
  std::vector<unsigned char> written;  // what awaited is once kernels in front have written it
};

__thread multiprocessor *own;
__thread warp_group groups[most_threads / 128];
__thread warp_group named[16];
// What kernels in front are still to write. A block is in front until its threads can do
// nothing more without.
__thread const simt_range *awaited;
__thread size_t awaited_count;
__thread unsigned in_front;
__thread bool waited, launched_early;
__thread unsigned char *stacks;
__thread unsigned char *statics, *statics_end;  // where static shared memory lies
__thread void *scheduler;                       // its stack pointer
__thread unsigned alive, arrived, meetings;
__thread uint64_t events, random_state;
__thread const simt_kernel *kernel;
__thread const void *arguments;
__thread char problem[256];

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
  popq %rcx  # a jump is predicted, a return from another stack never
  jmp *%rcx
  .size simt_switch, .-simt_switch
)");

// Gives way to other threads while *word & mask is was, if it is now.
void wait_while(const unsigned *word, unsigned was, unsigned mask = ~0u) {
  if ((*word & mask) != was) return;
  fiber &f = own->fibers[current];
  f.word = word, f.mask = mask, f.was = was;
  simt_switch(&f.stack_pointer, scheduler);
  f.word = nullptr;
}

// Ends a thread.
void leave() {
  fiber &f = own->fibers[current];
  f.done = true;
  simt_switch(&f.stack_pointer, scheduler);
  __builtin_unreachable();
}

}  // namespace

void fail(const char *format, ...) {
  if (problem[0]) return;
  va_list list;
  va_start(list, format);
  vsnprintf(problem, sizeof problem, format, list);
  va_end(list);
}

namespace {

void body() {
  kernel->run(arguments);
  fiber &f = own->fibers[current];
  if (!f.copies.empty()) fail("thread %u ends with %zu copies under way", current, f.copies.size());
  if (!f.products.empty()) fail("thread %u ends with %zu products under way", current, f.products.size());
  events++;
  alive--;
  if (alive > 0 && arrived == alive) arrived = 0, meetings++;
  leave();
}

void prepare(unsigned i) {
  fiber &f = own->fibers[i];
  f.done = false, f.word = nullptr, f.groups = f.product_groups = 0;
  f.copies.clear(), f.products.clear();
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

void do_copy(const pending_copy &c) {
  memcpy(c.to, c.read ? c.data : c.from, c.bytes);
  if (c.bytes < 16) memset(c.to + c.bytes, 0, 16 - c.bytes);
}

// Counts bytes that came (negative) or are to come, and arrivals.
void count(unsigned long long *barrier, int bytes, unsigned arrivals) {
  barrier_state b;
  memcpy(&b, barrier, sizeof b);
  if (b.pending < arrivals) fail("thread %u: a barrier for %u arrivals has one more", current, b.arrivals);
  b.pending -= arrivals, b.bytes += bytes;
  if (b.pending == 0 && b.bytes == 0) b.phase ^= 1, b.pending = b.arrivals;
  memcpy(barrier, &b, sizeof b);
  events++;
}

// Does one of laters, of a thread's its first.
void do_later(size_t i) {
  if (own->laters[i].thread >= 0)
    for (size_t j = 0; j < i; j++)
      if (own->laters[j].thread == own->laters[i].thread) i = j;
  int bytes = 0;
  for (const pending_copy &c : own->laters[i].copies) do_copy(c), bytes += c.bytes < 16 ? 16 : c.bytes;  // zeros count, too
  if (own->laters[i].thread >= 0)
    count(own->laters[i].barrier, 0, 1);
  else
    count(own->laters[i].barrier, -bytes, 0);
  own->laters.erase(own->laters.begin() + i);
}

// Hides what is awaited, or shows it.
void hide(bool now) {
  in_front = now;
  size_t at = 0;
  for (size_t i = 0; i < awaited_count; i++) {
    size_t n = awaited[i].bytes;
    if (now) {
      own->written.resize(at + n);
      memcpy(own->written.data() + at, (void *)awaited[i].at, n);
    }
    at += n;
  }
  // From the last on, so that ranges may overlap.
  for (size_t i = awaited_count; i-- > 0;) {
    size_t n = awaited[i].bytes;
    at -= n;
    if (now)
      memset((void *)awaited[i].at, 0xff, n);
    else
      memcpy((void *)awaited[i].at, own->written.data() + at, n);
  }
  events++;
}

// The program's variables of one thread end at the thread pointer (the x86-64 ABI's second
// variant); the program itself is the first of dl_iterate_phdr.
int find_statics(dl_phdr_info *program, size_t, void *) {
  asm("movq %%fs:0, %0" : "=r"(statics_end));
  for (int i = 0; i < program->dlpi_phnum; i++)
    if (program->dlpi_phdr[i].p_type == PT_TLS) statics = statics_end - (program->dlpi_phdr[i].p_memsz + program->dlpi_phdr[i].p_align);
  return 1;
}

bool run_block() {
  unsigned threads = block_size.x;
  alive = threads, arrived = 0;
  own->laters.clear();
  waited = false;
  if (awaited_count > 0) hide(true);
  for (warp_group &g : groups) g.arrived = 0;
  for (warp_group &b : named) b.arrived = 0;
  memset(shared_end - shared_bytes, 0xff, shared_bytes);
  for (unsigned i = 0; i < threads; i++) prepare(i);
  for (unsigned i = 0; i < threads / 32; i++) own->warps[i].arrived = 0;
  while (alive > 0) {
    uint64_t before = events;
    unsigned next = random() % threads, backwards = random() & 1;
    for (unsigned i = 0; i < threads; i++) {
      current = next;
      next = backwards ? (next == 0 ? threads : next) - 1 : (next + 1 == threads ? 0 : next + 1);
      const fiber &f = own->fibers[current];
      if (f.done || (f.word && (*f.word & f.mask) == f.was)) continue;
      simt_switch(&scheduler, f.stack_pointer);
    }
    if (problem[0]) break;
    if (in_front && events == before) hide(false);
    // Copies come at once, at some time, or when nothing goes on without them.
    if (!own->laters.empty() && (events == before || random() % 4 == 0)) do_later(random() % own->laters.size());
    if (events == before) {
      fail("%u threads wait for one another and never meet", alive);
      break;
    }
  }
  if (in_front) hide(false);
  if (!waited) fail("a block ends without having waited for the kernels in front");
  if (!own->laters.empty()) fail("a block ends with %zu copies under way that count at barriers", own->laters.size());
  return !problem[0];
}

}  // namespace


void meet_block() {
  events++;
  if (++arrived == alive) {
    arrived = 0, meetings++;
    return;
  }
  wait_while(&meetings, meetings);
}

const message *meet_warp(const message &m) {
  warp &w = own->warps[current / 32];
  unsigned now = w.meetings;
  w.brought[now & 1][current % 32] = m;
  events++;
  if (++w.arrived == 32)
    w.arrived = 0, w.meetings++;
  else
    wait_while(&w.meetings, now);
  return w.brought[now & 1];
}

const product *meet_warp(const message &m, void (*last)(product &p, const message *all)) {
  warp &w = own->warps[current / 32];
  unsigned now = w.meetings;
  w.brought[now & 1][current % 32] = m;
  events++;
  if (++w.arrived == 32) {
    last(w.products[now & 1], w.brought[now & 1]);
    w.arrived = 0, w.meetings++;
  } else
    wait_while(&w.meetings, now);
  return &w.products[now & 1];
}

void launch_dependents() { launched_early |= in_front != 0; }

void wait_dependencies() {
  waited = true;
  wait_while(&in_front, 1);
}

void fail_shared(const void *p, size_t bytes) {
  fail("thread %u: %zu bytes at %td of %zu of shared memory", current, bytes, (const unsigned char *)p - shared_memory(), shared_bytes);
}

// A thread's own variables lie on its stack.
void check_global(const void *p, size_t bytes) {
  const unsigned char *q = (const unsigned char *)p;
  if (q + bytes > shared_end - shared_room && q < shared_end)
    fail("thread %u: %zu bytes of global memory at %p, which is shared", current, bytes, p);
  else if (q + bytes > statics && q < statics_end)
    fail("thread %u: %zu bytes of global memory at %p, which is static, so shared", current, bytes, p);
  else if (q + bytes > stacks && q < stacks + most_threads * stack_bytes)
    fail("thread %u: %zu bytes of global memory at %p, which is a thread's own", current, bytes, p);
  else if (((uintptr_t)q & (bytes - 1)) != 0)
    fail("thread %u: %zu bytes of global memory at %p, which is not aligned", current, bytes, p);
}

void copy(void *shared, const void *global, int bytes) {
  check_shared(shared, 16);
  if ((uintptr_t)global % 16 != 0 || bytes < 0 || bytes > 16)
    fail("thread %u: copy of %d bytes from %p", current, bytes, global);
  if (bytes > 0) check_global(global, 16);
  fiber &f = own->fibers[current];
  pending_copy c = {(unsigned char *)shared, (const unsigned char *)global, bytes, f.groups};
  unsigned how = random() % 3;
  if (how == 0) return do_copy(c);
  if (how == 1 && bytes > 0 && bytes <= 16) {
    c.read = true;
    memcpy(c.data, global, bytes);
  }
  f.copies.push_back(c);
}

void commit() { own->fibers[current].groups++; }

void wait(int pending) {
  fiber &f = own->fibers[current];
  size_t done = 0;
  for (; done < f.copies.size() && f.copies[done].group < f.groups - pending; done++) {
    do_copy(f.copies[done]);
  }
  f.copies.erase(f.copies.begin(), f.copies.begin() + done);
}

void barrier_init(unsigned long long *barrier, int arrivals) {
  barrier_state b = {(unsigned)arrivals, (unsigned)arrivals, 0, 0};
  memcpy(barrier, &b, sizeof b);
}

void barrier_arrive(unsigned long long *barrier, int bytes) { count(barrier, bytes, 1); }

void barrier_arrive_after_copies(unsigned long long *barrier) {
  later l = {(int)current, barrier, {}};
  l.copies.swap(own->fibers[current].copies);
  own->laters.push_back(l);
  if (random() % 2 == 0) do_later(own->laters.size() - 1);
}

// As above, with one more arrival of this phase to wait for.
void barrier_await_copies(unsigned long long *barrier) {
  barrier_state b;
  memcpy(&b, barrier, sizeof b);
  b.pending++;
  memcpy(barrier, &b, sizeof b);
  barrier_arrive_after_copies(barrier);
}

void barrier_wait(unsigned long long *barrier, uint32_t parity) {
  for (;;) {
    barrier_state b;
    memcpy(&b, barrier, sizeof b);
    if (b.phase != parity) return;
    wait_while((const unsigned *)barrier + 1, b.phase, 1);  // phase is its lowest bit
  }
}

void copy_bulk(void *shared, const void *global, int bytes, unsigned long long *barrier) {
  check_shared(shared, 16);
  if ((uintptr_t)global % 16 != 0 || bytes <= 0 || bytes % 16 != 0 || (unsigned char *)shared + bytes > shared_end)
    fail("thread %u: bulk copy of %d bytes from %p to %p", current, bytes, global, shared);
  check_global(global, 16);
  own->laters.push_back({-1, barrier, {{(unsigned char *)shared, (const unsigned char *)global, bytes, 0}}});
  if (random() % 2 == 0) do_later(own->laters.size() - 1);
}

void copy_tile(void *shared, const void *global, int64_t rows, int64_t elements, int64_t stride, int tile_rows, int element, int row,
               unsigned long long *barrier) {
  unsigned char *to = (unsigned char *)shared;
  check_shared(shared, 16);
  if (shared_address(to) % 1024 != 0 || (uintptr_t)global % 16 != 0 || stride % 16 != 0 || tile_rows < 1 || tile_rows > 256 ||
      to + tile_rows * 128 > shared_end)
    fail("thread %u: copy of a tile of %d rows from %p, stride %ld, to %p", current, tile_rows, global, (long)stride, shared);
  if (problem[0]) return;
  later l = {-1, barrier, {}};
  for (int r = 0; r < tile_rows; r++)
    for (int c = 0; c < 8; c++) {
      int64_t at = element + c * 8, left = row + r < rows ? (elements - at) * 2 : 0;
      const unsigned char *from = (const unsigned char *)global + (row + r) * stride + at * 2;
      int bytes = left <= 0 ? 0 : left < 16 ? (int)left : 16;
      if (bytes > 0) check_global(from, 16);
      l.copies.push_back({to + r * 128 + ((c ^ (r & 7)) << 4), from, bytes, 0});
    }
  own->laters.push_back(l);
  if (random() % 2 == 0) do_later(own->laters.size() - 1);
}

void meet_group() {
  warp_group &g = groups[current / 128];
  events++;
  if (++g.arrived == 128) {
    g.arrived = 0, g.meetings++;
    return;
  }
  wait_while(&g.meetings, g.meetings);
}

void named_arrive(int id, int threads) {
  warp_group &b = named[id];
  events++;
  if (++b.arrived == threads) b.arrived = 0, b.meetings++;
}

void named_sync(int id, int threads) {
  unsigned m = named[id].meetings;
  named_arrive(id, threads);
  wait_while(&named[id].meetings, m);
}

void multiply_later(void (*run)(float *d, unsigned long long a, unsigned long long b), float *d, unsigned long long a, unsigned long long b) {
  fiber &f = own->fibers[current];
  f.products.push_back({run, d, a, b, f.product_groups, nullptr, {}});
}

void multiply_later(void (*run)(float *d, const operand &a, unsigned long long b), float *d, const operand &a, unsigned long long b) {
  fiber &f = own->fibers[current];
  f.products.push_back({nullptr, d, 0, b, f.product_groups, run, a});
}

void multiply_commit() { own->fibers[current].product_groups++; }

void multiply_wait(int pending) {
  fiber &f = own->fibers[current];
  size_t done = 0;
  for (; done < f.products.size() && f.products[done].group < f.product_groups - pending; done++) {
    const pending_product &p = f.products[done];
    if (p.run) {
      p.run(p.d, p.a, p.b);
      continue;
    }
    if (memcmp(p.rows.registers, p.rows.then, sizeof p.rows.then) != 0) fail("thread %u: registers of a product under way have changed", current);
    p.run_registers(p.d, p.rows, p.b);
  }
  f.products.erase(f.products.begin(), f.products.begin() + done);
}

}  // namespace simt

using namespace simt;

// Called by code compiled with -fsanitize=alignment, before an access for which p is not
// aligned: the thread goes no further.
extern "C" void __ubsan_handle_type_mismatch_v1(void *where, void *p) {
  struct {
    const char *file;
    uint32_t line, column;
  } at;
  memcpy(&at, where, sizeof at);
  fail("thread %u: %s:%u: an access at %p, which is not aligned", current, at.file, at.line, p);
  leave();
}

const simt_kernel *const tables[] = {simt_bf16, simt_f16, simt_faults};

extern "C" int64_t simt_argument_bytes(int table, const char *name) {
  for (const simt_kernel *k = tables[table]; k->name; k++)
    if (strcmp(k->name, name) == 0) return (int64_t)k->bytes;
  return -1;
}

extern "C" simt_field simt_argument_field(int table, size_t i) { return (table == 0 ? simt_bf16_fields : simt_f16_fields)[i]; }

extern "C" int simt_launched_early(void) { return launched_early; }

extern "C" const char *simt_launch(int table, const char *name, const void *args, const unsigned *blocks, unsigned threads,
                                   size_t shared, uint64_t seed, const simt_range *ranges, size_t n) {
  problem[0] = 0;
  kernel = nullptr;
  for (const simt_kernel *k = tables[table]; k->name; k++)
    if (strcmp(k->name, name) == 0) kernel = k;
  if (!kernel) return "no such kernel";
  if (threads == 0 || threads % 32 != 0 || threads > most_threads) return "threads are not whole warps, or too many";
  if (shared > 227 << 10) return "too much shared memory";
  if (!own) {
    void *p = mmap(nullptr, most_threads * stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    void *q = mmap(nullptr, shared_room + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED || q == MAP_FAILED) return "no memory";
    stacks = (unsigned char *)p;
    shared_end = (unsigned char *)q + shared_room;
    if (mprotect(shared_end, page, PROT_NONE) != 0) return "cannot protect the page behind shared memory";
    dl_iterate_phdr(find_statics, nullptr);
    if (!statics) return "no static shared memory is found";
    own = new multiprocessor();
  }
  arguments = args;
  awaited = ranges, awaited_count = n;
  launched_early = false;
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
