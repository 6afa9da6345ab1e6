// Runs the lanes of a kernel on a CPU, for tests. It is compiled by itself, optimised, and once for all kernels.
// Each lane is a fiber. Lanes wait for one another at barriers and group operations. One lane runs at a time, in an
// order drawn from a seed: sometimes a group far ahead of the others, sometimes lanes in turn, so that a kernel with a
// missing barrier reads what is not written yet. Buffers and threadgroup memory lie between pages that may not be touched.

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "host.h"

#pragma GCC visibility push(hidden)

// clang calls these to round to bf16 and fp16, and to widen fp16, on a CPU without an instruction for it.
extern "C" __attribute__((weak)) __bf16 __truncsfbf2(float x) {
  uint32_t bits = as_type<uint32_t>(x);
  // Rounded to nearest, ties to even; a NaN stays one.
  bits = x == x ? bits + 0x7fff + (bits >> 16 & 1) : bits | 0x400000;
  return as_type<__bf16>((uint16_t)(bits >> 16));
}
extern "C" __attribute__((weak)) _Float16 __truncsfhf2(float x) {
  const uint32_t bits = as_type<uint32_t>(x), size = bits & 0x7fffffff;
  uint32_t rounded = (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13;
  // Below the least normal number, fp32 rounds at 0.5 to the same places. From 65,520 on, numbers are infinite.
  if (size < 0x38800000) rounded = as_type<uint32_t>(as_type<float>(size) + 0.5f) - 0x3f000000;
  if (size >= 0x477ff000) rounded = size > 0x7f800000 ? 0x7e00 | (size >> 13 & 0x1ff) : 0x7c00;
  return as_type<_Float16>((uint16_t)(bits >> 16 & 0x8000 | rounded));
}
extern "C" __attribute__((weak)) float __extendhfsf2(_Float16 x) {
  const uint32_t bits = as_type<uint16_t>(x), size = bits & 0x7fff, sign = (bits & 0x8000) << 16;
  uint32_t wide = (size << 13) + 0x38000000;
  if (size < 0x400) wide = as_type<uint32_t>((float)size * 5.9604644775390625e-8f);
  if (size >= 0x7c00) wide = size << 13 | 0x7f800000;
  return as_type<float>(sign | wide);
}

namespace host {

enum : size_t { stack_bytes = 256 * 1024, fence = 1 << 20 };
// What the lanes of a group exchange in products and shuffles, twice, so that two operations may follow each other.
struct Group {
  float a[2][64], b[2][64], x[2][32];
  int parity[32];
};
Lane lanes[most_lanes];
int current;
uint3 block_position, grid_size;
Region arena, buffers[most_buffers + 1];
static char fault[512];
static Group groups[most_lanes / 32];
static int inside;
static bool in_order;
static void* scheduler_pointer;
static int buffer_count, arena_bytes;
static uint64_t random_state;
static char* stacks;
static void (*body)();

uint64_t draw(uint64_t below) {
  random_state += 0x9e3779b97f4a7c15u;
  uint64_t z = random_state;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return (z ^ (z >> 31)) % below;
}
static void exchange(int* order, int i) {
  const int j = (int)draw((uint64_t)i + 1), kept = order[i];
  order[i] = order[j];
  order[j] = kept;
}
static void shuffle(int* order, int count) {
  for (int i = 0; i < count; ++i) order[i] = i;
  for (int i = count - 1; i > 0; --i) exchange(order, i);
}
// Unrolled, its divisors are constants, which take no division. It is the most frequent operation of all.
static void shuffle_group(int* order) {
  for (int i = 0; i < 32; ++i) order[i] = i;
#pragma clang loop unroll(full)
  for (int i = 31; i > 0; --i) exchange(order, i);
}

void fail(const char* message, int site) {
  if (fault[0]) return;
  if (site) snprintf(fault, sizeof fault, "%s (line %d of the kernel text)", message, site);
  else snprintf(fault, sizeof fault, "%s", message);
}

// Saves the registers that a callee must keep and the stack pointer, and continues where `load` was saved.
extern "C" void deltatune_switch(void** save, void* load);
#if defined(__APPLE__)
#define DELTATUNE_SYMBOL "_deltatune_switch"
#else
#define DELTATUNE_SYMBOL "deltatune_switch"
#endif
__asm__(".text\n.globl " DELTATUNE_SYMBOL "\n" DELTATUNE_SYMBOL ":\n"
#if defined(__x86_64__)
        "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
        "movq %rsp, (%rdi)\nmovq %rsi, %rsp\n"
        "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n");
#elif defined(__aarch64__)
        "sub sp, sp, #160\nstp x19, x20, [sp]\nstp x21, x22, [sp, #16]\nstp x23, x24, [sp, #32]\n"
        "stp x25, x26, [sp, #48]\nstp x27, x28, [sp, #64]\nstp x29, x30, [sp, #80]\n"
        "stp d8, d9, [sp, #96]\nstp d10, d11, [sp, #112]\nstp d12, d13, [sp, #128]\nstp d14, d15, [sp, #144]\n"
        "mov x9, sp\nstr x9, [x0]\nmov sp, x1\n"
        "ldp x19, x20, [sp]\nldp x21, x22, [sp, #16]\nldp x23, x24, [sp, #32]\n"
        "ldp x25, x26, [sp, #48]\nldp x27, x28, [sp, #64]\nldp x29, x30, [sp, #80]\n"
        "ldp d8, d9, [sp, #96]\nldp d10, d11, [sp, #112]\nldp d12, d13, [sp, #128]\nldp d14, d15, [sp, #144]\n"
        "add sp, sp, #160\nret\n");
#else
#error "host.h knows x86-64 and arm64"
#endif

void leave() { deltatune_switch(&lanes[current].stack_pointer, scheduler_pointer); }

static void pause(Wait wait, int site) {
  lanes[current].wait = wait;
  lanes[current].site = site;
  ++lanes[current].meetings[wait];
  leave();
}
void meet_group(int site) { pause(in_group, site); }
void order_group(int site) {
  meet_group(site);
  ++lanes[current].ordered;
}
void order_all(int site) {
  pause(at_barrier, site);
  ++lanes[current].ordered;
}

static Group& group_here(int& parity) {
  Group& g = groups[current / 32];
  parity = g.parity[lane_id()];
  g.parity[lane_id()] ^= 1;
  return g;
}

static size_t whole_pages(size_t bytes) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  return (bytes + page - 1) / page * page;
}
static Region reserve(size_t bytes, bool at_end, const char* name) {
  Region r;
  r.bytes = bytes;
  r.mapped = whole_pages(bytes ? bytes : 1);
  r.name = name;
  r.mapping = (char*)mmap(nullptr, r.mapped + 2 * fence, PROT_NONE, MAP_PRIVATE | MAP_ANON, -1, 0);
  if (r.mapping == MAP_FAILED || mprotect(r.mapping + fence, r.mapped, PROT_READ | PROT_WRITE)) abort();
  memset(r.mapping + fence, 0xff, r.mapped);
  // Start on 16 bytes, the widest load. untouched() checks the bytes between the end and the fence after the run.
  r.start = r.mapping + fence + (at_end ? (r.mapped - bytes) / 16 * 16 : 0);
  return r;
}
static bool untouched(const Region& r) {
  const char* first = r.mapping + fence;
  for (const char* p = first; p < first + r.mapped; ++p)
    if ((p < r.start || p >= r.start + r.bytes) && (unsigned char)*p != 0xff) return false;
  return true;
}
static bool holds(const Region& r, const char* p) {
  return r.mapping && p >= r.mapping && p < r.mapping + r.mapped + 2 * fence;
}

// Handles the signal of a lane that touched a fence: reports whose fence it was, and never resumes the lane.
static void on_fault(int signal_number, siginfo_t* info, void*) {
  if (!inside) {
    signal(signal_number, SIG_DFL);
    return;
  }
  const char* p = (const char*)info->si_addr;
  const Region* found = holds(arena, p) ? &arena : nullptr;
  for (int i = 0; i < buffer_count; ++i)
    if (holds(buffers[i], p)) found = &buffers[i];
  if (!found) fail("a read or write at an address of no buffer", 0);
  else if (p >= found->start && p < found->start + found->bytes)
    snprintf(fault, sizeof fault, "a write to the input %s", found->name);
  else snprintf(fault, sizeof fault, "a read or write outside %s", found->name);
  leave();
}

#ifdef DELTATUNE_WATCH
// The last access to two bytes of threadgroup memory: by which lane, and how many barriers that lane had passed, `at`
// of the block and `ordered` of the block and its group. Clang calls watch() at every load and store.
struct Access {
  int lane, group, at, ordered;
};
enum : int { nobody = -1, several = -2 };
static Access writers[threadgroup_limit / 2], readers[threadgroup_limit / 2];
#define DELTATUNE_UNWATCHED __attribute__((no_sanitize("coverage")))

static void forget_accesses() {
  memset(writers, 0xff, sizeof writers);
  memset(readers, 0xff, sizeof readers);
}
DELTATUNE_UNWATCHED static bool races(const Access& before, const Access& now) {
  if (before.lane == nobody || before.lane == now.lane || before.at != now.at) return false;
  return before.group != now.group || before.ordered == now.ordered;
}
DELTATUNE_UNWATCHED static void watch(const void* pointer, int bytes, bool write) {
  const char* p = (const char*)pointer;
  if (!inside || p < arena.start || p >= arena.start + threadgroup_limit) return;
  const Access now = {current, current / 32, lanes[current].meetings[at_barrier], lanes[current].ordered};
  for (int i = (int)(p - arena.start) / 2; i <= (int)(p + bytes - 1 - arena.start) / 2; ++i) {
    if (races(writers[i], now) || (write && races(readers[i], now))) {
      fail("lanes meet in threadgroup memory with no barrier between them, after the barrier or group operation",
           lanes[current].site);
      leave();
    }
    Access& reader = readers[i];
    if (write) {
      writers[i] = now;
      reader.lane = nobody;
    } else if (reader.lane == nobody || reader.at != now.at) {
      reader = now;
    } else if (reader.group != now.group) {
      reader.lane = reader.group = several;
    } else if (reader.ordered != now.ordered) {
      reader = now;
    } else if (reader.lane != now.lane) {
      reader.lane = several;
    }
  }
}
#define DELTATUNE_WATCHED(bytes) \
  extern "C" DELTATUNE_UNWATCHED void __sanitizer_cov_load##bytes(void* p) { watch(p, bytes, false); } \
  extern "C" DELTATUNE_UNWATCHED void __sanitizer_cov_store##bytes(void* p) { watch(p, bytes, true); }
DELTATUNE_WATCHED(1)
DELTATUNE_WATCHED(2)
DELTATUNE_WATCHED(4)
DELTATUNE_WATCHED(8)
DELTATUNE_WATCHED(16)
#else
static void forget_accesses() {}
#endif

threadgroup char* threadgroup_memory(int bytes, int site) {
  if (bytes > threadgroup_limit) {
    fail("over 32768 bytes of threadgroup memory", site);
    leave();
  }
  arena_bytes = bytes;
  return (threadgroup char*)(arena.start + (threadgroup_limit - bytes) / 16 * 16);
}

static void lane_main() {
  body();
  lanes[current].wait = done;
  leave();
  abort();
}

static void start_lane(int i) {
  char* bottom = stacks + (size_t)i * stack_bytes;
  memset(bottom, 0xff, 64);
  uint64_t* top = (uint64_t*)(bottom + stack_bytes - 64);
#if defined(__x86_64__)
  *--top = 0;
  *--top = (uint64_t)&lane_main;
  for (int w = 0; w < 6; ++w) *--top = 0;
#else
  top -= 20;
  for (int w = 0; w < 20; ++w) top[w] = 0;
  top[11] = (uint64_t)&lane_main;
#endif
  lanes[i].stack_pointer = top;
  lanes[i].wait = running;
  lanes[i].ordered = 0;
  memset(lanes[i].meetings, 0, sizeof lanes[i].meetings);
}

static bool met(int first, int count, Wait wait) {
  for (int i = first; i < first + count; ++i)
    if (lanes[i].wait != wait || lanes[i].site != lanes[first].site ||
        lanes[i].meetings[wait] != lanes[first].meetings[wait])
      return false;
  return true;
}
static void release(int first, int count) {
  for (int i = first; i < first + count; ++i) lanes[i].wait = running;
}

static void run_group(int group) {
  int order[32];
  shuffle_group(order);
  for (int i = 0; i < 32 && !fault[0]; ++i) {
    current = group * 32 + order[i];
    if (lanes[current].wait != running) continue;
    inside = 1;
    deltatune_switch(&scheduler_pointer, lanes[current].stack_pointer);
    inside = 0;
  }
  if (met(group * 32, 32, in_group)) release(group * 32, 32);
}

static bool runs(int group) {
  for (int i = group * 32; i < group * 32 + 32; ++i)
    if (lanes[i].wait == running) return true;
  return false;
}

static bool run_block(int count) {
  memset(arena.start, 0xff, threadgroup_limit);
  memset(groups, 0, sizeof groups);
  forget_accesses();
  for (int i = 0; i < count; ++i) start_lane(i);
  int group = 0;
  while (!fault[0]) {
    int ready[most_lanes / 32], found = 0;
    bool same = false;
    for (int g = 0; g < count / 32; ++g)
      if (runs(g)) {
        ready[found++] = g;
        same = same || g == group;
      }
    if (found) {
      if (!same || draw(64) == 0) group = ready[draw((uint64_t)found)];
      run_group(group);
      continue;
    }
    if (met(0, count, at_barrier)) {
      release(0, count);
      continue;
    }
    int site = 0;
    for (int i = 0; i < count; ++i)
      if (lanes[i].wait != done) site = lanes[i].site;
    if (site) fail("a barrier or group operation that not all lanes reach", site);
    break;
  }
  for (int i = 0; i < count && !fault[0]; ++i)
    if (*(uint64_t*)(stacks + (size_t)i * stack_bytes) != ~(uint64_t)0) fail("a lane's stack ran over", 0);
  for (int i = 0; i < (threadgroup_limit - arena_bytes) / 16 * 16 && !fault[0]; ++i)
    if ((unsigned char)arena.start[i] != 0xff) fail("a write outside threadgroup memory", 0);
  return !fault[0];
}

static void prepare_memory() {
  if (stacks) return;
  stacks = (char*)mmap(nullptr, most_lanes * stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
  if (stacks == MAP_FAILED) abort();
  arena = reserve(threadgroup_limit, true, "threadgroup memory");
}

static void run_blocks(uint3 grid, int threads) {
  const int count = (int)(grid.x * grid.y * grid.z);
  grid_size = grid;
  int* order = (int*)malloc((size_t)count * sizeof(int));
  shuffle(order, count);
  for (int i = 0; i < count; ++i) {
    if (in_order) order[i] = i;
    const uint b = (uint)order[i];
    block_position.x = b % grid.x;
    block_position.y = b / grid.x % grid.y;
    block_position.z = b / grid.x / grid.y;
    if (!run_block(threads)) break;
  }
  free(order);
}

const char* run_kernel(void (*kernel)(), const char* const* names, void** data, const uint64_t* sizes,
                       int inputs, const bool* written, int count, uint3 grid, int threads, uint64_t seed) {
  static char signal_stack[65536];
  prepare_memory();
  body = kernel;
  fault[0] = 0;
  random_state = seed;
  in_order = !seed;
  buffer_count = count;
  for (int i = 0; i < count; ++i) {
    buffers[i] = reserve(sizes[i], draw(2), names[i]);
    if (i >= inputs) continue;
    memcpy(buffers[i].start, data[i], sizes[i]);
    if (!written[i] && mprotect(buffers[i].mapping + fence, buffers[i].mapped, PROT_READ)) abort();
  }
  struct sigaction action, segv, bus;
  memset(&action, 0, sizeof action);
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  stack_t own, old;
  memset(&own, 0, sizeof own);
  own.ss_sp = signal_stack;
  own.ss_size = sizeof signal_stack;
  sigaltstack(&own, &old);
  sigaction(SIGSEGV, &action, &segv);
  sigaction(SIGBUS, &action, &bus);
  run_blocks(grid, threads);
  sigaction(SIGSEGV, &segv, nullptr);
  sigaction(SIGBUS, &bus, nullptr);
  sigaltstack(&old, nullptr);
  for (int i = 0; i < count; ++i) {
    if (written[i] && !fault[0] && !untouched(buffers[i]))
      snprintf(fault, sizeof fault, "a write outside %s", names[i]);
    if (written[i]) memcpy(data[i], buffers[i].start, sizes[i]);
    munmap(buffers[i].mapping, buffers[i].mapped + 2 * fence);
    buffers[i].mapping = nullptr;
  }
  return fault;
}

static int row_of(int lane) { return ((lane >> 2) & 4) + ((lane >> 1) & 3); }
static int column_of(int lane) { return ((lane >> 2) & 2) * 2 + (lane & 1) * 2; }

void multiply(float* d, const float* a, const float* b, const float* c, int site) {
  int parity;
  Group& g = group_here(parity);
  const int row = row_of(lane_id()), column = column_of(lane_id());
  for (int i = 0; i < 2; ++i) {
    g.a[parity][row * 8 + column + i] = a[i];
    g.b[parity][row * 8 + column + i] = b[i];
  }
  meet_group(site);
  for (int i = 0; i < 2; ++i) {
    float sum = c[i];
    for (int k = 0; k < 8; ++k) sum += g.a[parity][row * 8 + k] * g.b[parity][k * 8 + column + i];
    d[i] = sum;
  }
}

float exchanged(float x, int mask, int site) {
  int parity;
  Group& g = group_here(parity);
  g.x[parity][lane_id()] = x;
  meet_group(site);
  return g.x[parity][lane_id() ^ mask];
}
float sum(float x, int site) {
  for (int step = 1; step < 32; step *= 2) x += exchanged(x, step, site);
  return x;
}

}  // namespace host
#pragma GCC visibility pop
