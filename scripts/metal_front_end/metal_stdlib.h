// Declarations alone, of what the kernels and MLX's prelude use of Metal's library. Clang compiles this as C++ for OpenCL, whose address spaces are those of Metal.
#ifdef __OPENCL_CPP_VERSION__
#define device __global
#define constant __constant
#define threadgroup __local
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#else
// Plain C++, for LLVM's language: without OpenCL's generic pointers, which keep arrays out of registers.
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define __kernel extern "C"
#define half _Float16
#define bfloat16_t __bf16
#define float16_t _Float16
#define DELTATUNE_SHARED(name, bytes) threadgroup char* name = threadgroup_memory(bytes)
threadgroup char* threadgroup_memory(int);
#endif
#define thread
#define INFINITY __builtin_inff()
#define METAL_FUNC inline
#define __METAL_MAYBE_FAST_MATH__ 0
#define __METAL_FAST_MATH__ 1
#define __METAL_PRECISE_MATH__ 0
#define __METAL__ 1
typedef __bf16 bfloat;
typedef unsigned int uint;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
typedef unsigned long size_t;
template <typename T, int N> struct vec_of { typedef T type __attribute__((ext_vector_type(N))); };
template <typename T, int N> using vec = typename vec_of<T, N>::type;
typedef uint uint2 __attribute__((ext_vector_type(2)));
typedef uint uint3 __attribute__((ext_vector_type(3)));
typedef ushort ushort2 __attribute__((ext_vector_type(2)));
typedef ushort ushort4 __attribute__((ext_vector_type(4)));
typedef uint uint4 __attribute__((ext_vector_type(4)));
typedef ushort2 packed_ushort2 __attribute__((aligned(2)));
typedef ushort4 packed_ushort4 __attribute__((aligned(2)));
typedef uint2 packed_uint2 __attribute__((aligned(4)));
typedef uint4 packed_uint4 __attribute__((aligned(4)));
namespace metal {
template <bool B, typename T = void> struct enable_if {};
template <typename T> struct enable_if<true, T> { using type = T; };
template <bool B, typename T = void> using enable_if_t = typename enable_if<B, T>::type;
template <typename T, typename U> struct is_same { static constexpr constant bool value = false; };
template <typename T> struct is_same<T, T> { static constexpr constant bool value = true; };
template <typename T, typename U> static constexpr constant bool is_same_v = is_same<T, U>::value;
template <typename T, typename U> static constexpr constant bool is_convertible_v = __is_convertible(T, U);
template <typename T> struct numeric_limits {
  static constexpr T max() { return T(0); }
  static constexpr T min() { return T(0); }
  static constexpr T infinity() { return T(0); }
  static constexpr T quiet_NaN() { return T(0); }
};
template <typename To, typename From> To as_type(From);
template <typename T> T select(T, T, bool);
#define DELTATUNE_OF_ONE(name) float name(float); half name(half);
#define DELTATUNE_OF_TWO(name) float name(float, float); half name(half, half);
DELTATUNE_OF_ONE(abs) DELTATUNE_OF_ONE(fabs) DELTATUNE_OF_ONE(exp) DELTATUNE_OF_ONE(exp2) DELTATUNE_OF_ONE(log)
DELTATUNE_OF_ONE(log2) DELTATUNE_OF_ONE(sqrt) DELTATUNE_OF_ONE(rsqrt) DELTATUNE_OF_ONE(rint)
DELTATUNE_OF_TWO(fmax) DELTATUNE_OF_TWO(fmin) DELTATUNE_OF_TWO(atan2)
float fma(float, float, float);
bool isnan(float);
bool isinf(float);
namespace precise { DELTATUNE_OF_ONE(sqrt) }
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
#define DELTATUNE_OF_A_GROUP(name) template <typename T, typename... More> T name(T, More...);
DELTATUNE_OF_A_GROUP(simd_shuffle) DELTATUNE_OF_A_GROUP(simd_shuffle_xor) DELTATUNE_OF_A_GROUP(simd_shuffle_up)
DELTATUNE_OF_A_GROUP(simd_shuffle_down) DELTATUNE_OF_A_GROUP(simd_shuffle_and_fill_up) DELTATUNE_OF_A_GROUP(simd_sum)
DELTATUNE_OF_A_GROUP(simd_shuffle_and_fill_down)
template <typename T, int Rows, int Columns> struct simdgroup_matrix {
  vec<T, 2> elements;
  vec<T, 2>& thread_elements() { return elements; }
  const vec<T, 2>& thread_elements() const { return elements; }
};
template <typename T, int N>
using square = simdgroup_matrix<T, N, N>;
// A lane's two elements of a product and sum; in registers, as Metal's are.
template <typename T>
__attribute__((const)) vec<T, 2> multiplied_and_added(vec<T, 2>, vec<T, 2>, vec<T, 2>);
template <typename T, int N>
inline void simdgroup_multiply_accumulate(square<T, N>& d, square<T, N> a, square<T, N> b, square<T, N> c) {
  d.elements = multiplied_and_added<T>(a.elements, b.elements, c.elements);
}
}
using namespace metal;
