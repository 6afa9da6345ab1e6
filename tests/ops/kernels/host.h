// Metal's language and library on a CPU, for tests: clang compiles it with the Metal text of the kernels.
// What runs the lanes is in host_runtime.cpp, which is compiled once. Address spaces are those of clang, which checks them
// as types. The language is C++14, as in Metal.

#include <math.h>
#include <stdint.h>
#include <string.h>

#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread
#define bfloat16_t __bf16
#define float16_t _Float16
#define half _Float16
typedef unsigned int uint;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef uint uint2 __attribute__((ext_vector_type(2)));
typedef ushort ushort2 __attribute__((ext_vector_type(2)));
typedef ushort ushort4 __attribute__((ext_vector_type(4)));
typedef uint uint4 __attribute__((ext_vector_type(4)));
typedef ushort2 packed_ushort2 __attribute__((aligned(2)));
typedef ushort4 packed_ushort4 __attribute__((aligned(2)));
typedef uint2 packed_uint2 __attribute__((aligned(4)));
typedef uint4 packed_uint4 __attribute__((aligned(4)));
struct uint3 {
  uint x, y, z;
};

// Tests of tilings for a machine with more memory define a larger limit.
#ifndef DELTATUNE_THREADGROUP_BYTES
#define DELTATUNE_THREADGROUP_BYTES 32768
#endif

// Each library of kernels has its own lanes.
#pragma GCC visibility push(hidden)
namespace host {

enum : int { most_lanes = 1024, most_buffers = 31, threadgroup_limit = DELTATUNE_THREADGROUP_BYTES };
enum Wait { running, at_barrier, in_group, done };

// A lane: its fiber, what it waits for and since which line, and how often it met others and passed barriers.
struct Lane {
  void* stack_pointer;
  Wait wait;
  int site, meetings[4], ordered;
};
// `bytes` of memory with a fence of pages before and after it, placed against one of the two.
struct Region {
  char* mapping;
  char* start;
  size_t bytes, mapped;
  const char* name;
};

extern Lane lanes[most_lanes];
extern int current;
extern uint3 block_position, grid_size;
extern Region arena, buffers[most_buffers + 1];

// A number below `below`, from the seed of the run.
uint64_t draw(uint64_t below);
// Ends the run, with a message; the lane that finds the fault then leaves.
void fail(const char* message, int site);
void leave();
// Only barriers order accesses to threadgroup memory; products, sums and shuffles do not.
void meet_group(int site);
void order_group(int site);
void order_all(int site);
inline int lane_id() { return current % 32; }
// Returns threadgroup memory full of NaN; more than an Apple GPU has is refused.
threadgroup char* threadgroup_memory(int bytes, int site);
// d = a b + c of 8x8 matrices, of which each lane holds two elements, x of the lane `mask` away, and the sum of all x.
void multiply(float* d, const float* a, const float* b, const float* c, int site);
float exchanged(float x, int mask, int site);
float sum(float x, int site);
// Runs a grid of blocks on copies of the buffers `data`, inputs first, and copies those back that may be `written`.
// Returns what went wrong, or an empty text.
const char* run_kernel(void (*kernel)(), const char* const* names, void** data, const uint64_t* sizes, int inputs,
                       const bool* written, int count, uint3 grid, int threads, uint64_t seed);

}  // namespace host
#pragma GCC visibility pop

namespace metal {
inline float exp(float x) { return expf(x); }
inline float log(float x) { return logf(x); }
inline float exp2(float x) { return exp2f(x); }
inline float log2(float x) { return log2f(x); }
inline float fmax(float x, float y) { return fmaxf(x, y); }
inline float rsqrt(float x) { return 1.0f / sqrtf(x); }
inline float sqrt(float x) { return sqrtf(x); }
inline float fma(float x, float y, float z) { return fmaf(x, y, z); }
inline float rint(float x) { return rintf(x); }
template <typename To, typename From>
inline To as_type(From x) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To bits;
  __builtin_memcpy(&bits, &x, sizeof x);
  return bits;
}
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
}  // namespace metal
using namespace metal;

#define threadgroup_barrier(flags) host::order_all(__LINE__ + 0 * (int)(flags))
#define simdgroup_barrier(flags) host::order_group(__LINE__ + 0 * (int)(flags))
#define simdgroup_multiply_accumulate(d, a, b, c) \
  host::multiply((d).elements.x, (a).elements.x, (b).elements.x, (c).elements.x, __LINE__)
#define simd_shuffle_xor(x, mask) host::exchanged(x, mask, __LINE__)
#define simd_sum(x) host::sum(x, __LINE__)
#define DELTATUNE_SHARED(name, bytes) threadgroup char* name = host::threadgroup_memory(bytes, __LINE__)
namespace host {
template <typename T>
inline threadgroup T* aligned(threadgroup T* pointer, int site) {
  if ((uint64_t)pointer % sizeof(T)) {
    fail("a vector in threadgroup memory that does not start at a multiple of its size", site);
    leave();
  }
  return pointer;
}
}  // namespace host
#define DELTATUNE_ALIGNED(pointer) host::aligned(pointer, __LINE__)

// An Apple GPU has no double.
#pragma GCC poison double
