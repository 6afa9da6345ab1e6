// The third machine: Metal's language on a CPU, for tests. Lanes are fibers; they meet at barriers and group
// operations and run one after another in an order drawn from a seed, so a missing barrier reads what is not there.
// Address spaces are clang's, checked as types. Wrong use ends with a message in `host_fault`.

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread
#define bfloat16_t __bf16
#define float16_t _Float16
#define half _Float16
typedef unsigned int uint;
struct uint3 {
  uint x, y, z;
};

namespace host {

constexpr int most_lanes = 1024, most_groups = 32, stack_bytes = 256 * 1024, threadgroup_limit = 32768, margin = 4096;
enum Wait { running, at_barrier, in_group, done };

struct Lane {
  void* stack_pointer;
  char* stack;
  Wait wait;
  int site, barriers;
  bool released;
};
struct Group {
  float a[2][64], b[2][64], x[2][32];
  int parity[32];
};

inline char fault[512];
inline Lane lanes[most_lanes];
inline Group groups[most_groups];
inline int lane_count, current;
inline void* scheduler_pointer;
inline uint3 block_position;
inline char arena[threadgroup_limit + 2 * margin];
inline int arena_bytes;
inline uint64_t random_state;

inline void fail(const char* message, int site) {
  if (!fault[0]) snprintf(fault, sizeof fault, "%s (line %d of the kernel text)", message, site);
}

extern "C" void deltatune_switch(void** save, void* load);
#if defined(__x86_64__)
__asm__(".text\n.globl deltatune_switch\n.type deltatune_switch,@function\ndeltatune_switch:\n"
        "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
        "movq %rsp, (%rdi)\nmovq %rsi, %rsp\n"
        "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n");
constexpr int saved_words = 6;
#elif defined(__aarch64__)
#if defined(__APPLE__)
__asm__(".text\n.globl _deltatune_switch\n_deltatune_switch:\n"
#else
__asm__(".text\n.globl deltatune_switch\ndeltatune_switch:\n"
#endif
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

inline void pause(Wait wait, int site) {
  Lane& lane = lanes[current];
  lane.wait = wait;
  lane.site = site;
  deltatune_switch(&lane.stack_pointer, scheduler_pointer);
}

inline void meet_group(int site) { pause(in_group, site); }
inline void meet_all(int site) { pause(at_barrier, site); }

inline int lane_id() { return current % 32; }
inline Group& group_here(int& parity) {
  Group& g = groups[current / 32];
  parity = g.parity[lane_id()];
  g.parity[lane_id()] ^= 1;
  return g;
}

// Threadgroup memory of one block: as large as the text asks, refused past what an Apple GPU has, poisoned with NaN.
inline threadgroup char* threadgroup_memory(int bytes, int site) {
  if (bytes > threadgroup_limit) {
    fail("over 32768 bytes of threadgroup memory", site);
    bytes = threadgroup_limit;
  }
  arena_bytes = bytes;
  return (threadgroup char*)(arena + margin);
}

inline uint64_t draw() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state;
}

inline void (*body)();
inline void lane_main() {
  body();
  lanes[current].wait = done;
  deltatune_switch(&lanes[current].stack_pointer, scheduler_pointer);
  abort();
}

inline void start_lane(int i) {
  Lane& lane = lanes[i];
  if (!lane.stack) lane.stack = (char*)aligned_alloc(64, stack_bytes);
  uint64_t* top = (uint64_t*)(lane.stack + stack_bytes - 64);
#if defined(__x86_64__)
  *--top = 0;
  *--top = (uint64_t)&lane_main;
  for (int w = 0; w < saved_words; ++w) *--top = 0;
#else
  top -= 20;
  for (int w = 0; w < 20; ++w) top[w] = 0;
  top[11] = (uint64_t)&lane_main;
#endif
  lane.stack_pointer = top;
  lane.wait = running;
  lane.barriers = 0;
}

inline bool release_groups() {
  bool any = false;
  for (int g = 0; g * 32 < lane_count; ++g) {
    bool all = true;
    for (int l = 0; l < 32; ++l) {
      const Lane& lane = lanes[g * 32 + l];
      all = all && lane.wait == in_group && lane.site == lanes[g * 32].site;
    }
    if (!all) continue;
    for (int l = 0; l < 32; ++l) lanes[g * 32 + l].wait = running;
    any = true;
  }
  return any;
}

inline bool release_barrier() {
  for (int i = 0; i < lane_count; ++i)
    if (lanes[i].wait != at_barrier || lanes[i].site != lanes[0].site) return false;
  for (int i = 0; i < lane_count; ++i) lanes[i].wait = running;
  return true;
}

inline bool run_block(int count) {
  lane_count = count;
  memset(arena, 0xff, sizeof arena);
  arena_bytes = 0;
  memset(groups, 0, sizeof groups);
  for (int i = 0; i < count; ++i) start_lane(i);
  int order[most_lanes];
  for (;;) {
    for (int i = 0; i < count; ++i) order[i] = i;
    for (int i = count - 1; i > 0; --i) {
      const int j = (int)(draw() % (uint64_t)(i + 1)), kept = order[i];
      order[i] = order[j];
      order[j] = kept;
    }
    int finished = 0;
    for (int i = 0; i < count; ++i) {
      current = order[i];
      // A lane runs on through its group's operations only when the whole group has met.
      if (lanes[current].wait == running) deltatune_switch(&scheduler_pointer, lanes[current].stack_pointer);
    }
    for (int i = 0; i < count; ++i) finished += lanes[i].wait == done;
    if (finished == count) break;
    if (release_groups() || release_barrier()) continue;
    int site = 0;
    for (int i = 0; i < count; ++i)
      if (lanes[i].wait != done) site = lanes[i].site;
    fail("a barrier or group operation that not all lanes reach", site);
    return false;
  }
  for (int i = 0; i < margin; ++i)
    if ((unsigned char)arena[i] != 0xff || (unsigned char)arena[margin + arena_bytes + i] != 0xff) {
      fail("a write outside threadgroup memory", 0);
      return false;
    }
  return !fault[0];
}

}  // namespace host

namespace metal {
inline float exp(float x) { return expf(x); }
enum class mem_flags { mem_none, mem_threadgroup, mem_device };

template <typename T, int Rows, int Columns>
struct simdgroup_matrix {
  struct Elements {
    T x[2];
    T& operator[](int i) { return x[i]; }
    const T& operator[](int i) const { return x[i]; }
  } elements;
  Elements& thread_elements() { return elements; }
  const Elements& thread_elements() const { return elements; }
};

inline int host_row(int lane) { return ((lane >> 2) & 4) + ((lane >> 1) & 3); }
inline int host_column(int lane) { return ((lane >> 2) & 2) * 2 + (lane & 1) * 2; }

inline void host_multiply(simdgroup_matrix<float, 8, 8>& d, const simdgroup_matrix<float, 8, 8>& a,
                          const simdgroup_matrix<float, 8, 8>& b, const simdgroup_matrix<float, 8, 8>& c, int site) {
  int parity;
  host::Group& g = host::group_here(parity);
  const int row = host_row(host::lane_id()), column = host_column(host::lane_id());
  for (int i = 0; i < 2; ++i) {
    g.a[parity][row * 8 + column + i] = a.elements.x[i];
    g.b[parity][row * 8 + column + i] = b.elements.x[i];
  }
  host::meet_group(site);
  for (int i = 0; i < 2; ++i) {
    float sum = c.elements.x[i];
    for (int k = 0; k < 8; ++k) sum += g.a[parity][row * 8 + k] * g.b[parity][k * 8 + column + i];
    d.elements.x[i] = sum;
  }
}

inline float host_shuffle(float x, int mask, int site) {
  int parity;
  host::Group& g = host::group_here(parity);
  g.x[parity][host::lane_id()] = x;
  host::meet_group(site);
  return g.x[parity][host::lane_id() ^ mask];
}
inline float host_sum(float x, int site) {
  for (int step = 1; step < 32; step *= 2) x += host_shuffle(x, step, site);
  return x;
}
}  // namespace metal
using namespace metal;

#define threadgroup_barrier(flags) host::meet_all(__LINE__ + 0 * (int)(flags))
#define simdgroup_multiply_accumulate(d, a, b, c) metal::host_multiply(d, a, b, c, __LINE__)
#define simd_shuffle_xor(x, mask) metal::host_shuffle(x, mask, __LINE__)
#define simdgroup_barrier(flags) host::meet_group(__LINE__ + 0 * (int)(flags))
#define simd_sum(x) metal::host_sum(x, __LINE__)
#define DELTATUNE_SHARED(name, bytes) threadgroup char* name = host::threadgroup_memory(bytes, __LINE__)
