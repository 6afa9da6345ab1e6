// The vocabulary of the kernel bodies on CUDA: Metal's names, and 16x16 tiles on the tensor cores.
// bf16 inputs are exact operands; what the kernels compute is held as a pair of bf16 (high and low part, 16 bits of
// mantissa), so a product with it takes two or three instructions and keeps near-fp32 accuracy. fp32 inputs use FMA.

#define GLOBAL
#define threadgroup
#define constant
#define thread
#define metal
#define threadgroup_position_in_grid blockIdx
#define thread_index_in_threadgroup ((int)threadIdx.x)
#define simdgroup_index_in_threadgroup ((int)threadIdx.x / 32)
#define thread_index_in_simdgroup ((int)threadIdx.x % 32)
#define DELTATUNE_SHARED(name, bytes) extern __shared__ __align__(16) char name[]
#define DELTATUNE_EXP(x) expf(x)
#define inline __device__ __forceinline__
#define DELTATUNE_UNROLL _Pragma("unroll")

#define barrier() __syncthreads()

inline float to_float(float x) { return x; }
inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
inline float to_float(__half x) { return __half2float(x); }

struct PlainFloat {
  static constexpr int bytes = 4, planes = 0;
  float* elements;
  inline void put(int i, float x) const { elements[i] = x; }
  inline float get(int i) const { return elements[i]; }
};

struct Single {
  static constexpr int bytes = 2, planes = 1;
  __nv_bfloat16* elements;
  inline void put(int i, float x) const { elements[i] = __float2bfloat16_rn(x); }
  inline float get(int i) const { return __bfloat162float(elements[i]); }
  inline __nv_bfloat16* plane(int) const { return elements; }
};

struct Pair {
  static constexpr int bytes = 4, planes = 2;
  __nv_bfloat16* elements;
  int count;
  inline void put(int i, float x) const {
    const __nv_bfloat16 high = __float2bfloat16_rn(x);
    elements[i] = high;
    elements[i + count] = __float2bfloat16_rn(x - __bfloat162float(high));
  }
  inline float get(int i) const { return __bfloat162float(elements[i]) + __bfloat162float(elements[i + count]); }
  inline __nv_bfloat16* plane(int p) const { return elements + p * count; }
};

template <typename In> struct Storage { using exact = Single; using wide = Pair; };
template <> struct Storage<__half> { using exact = Pair; using wide = Pair; };
template <> struct Storage<float> { using exact = PlainFloat; using wide = PlainFloat; };
template <typename In> using Exact = typename Storage<In>::exact;
template <typename In> using Wide = typename Storage<In>::wide;

inline void place(PlainFloat& s, char* p, int) { s.elements = reinterpret_cast<float*>(p); }
inline void place(Single& s, char* p, int) { s.elements = reinterpret_cast<__nv_bfloat16*>(p); }
inline void place(Pair& s, char* p, int count) { s.elements = reinterpret_cast<__nv_bfloat16*>(p); s.count = count; }

template <typename In>
inline Exact<In> exact_at(char* memory, int offset, int count) {
  Exact<In> s;
  place(s, memory + offset, count);
  return s;
}
template <typename In>
inline Wide<In> wide_at(char* memory, int offset, int count) {
  Wide<In> s;
  place(s, memory + offset, count);
  return s;
}

struct Tile {
  float x[8];
  inline float get(int e) const { return x[e]; }
  inline void set(int e, float v) { x[e] = v; }
};
inline int tile_row(int e, int lane) { return lane / 4 + ((e >> 1) & 1) * 8; }
inline int tile_column(int e, int lane) { return (lane % 4) * 2 + (e & 1) + (e >> 2) * 8; }
inline int tile_side(int e) { return (e >> 1) & 1; }
constexpr int tile_second = 2;

inline float lane_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

inline float row_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

inline void load_matrices(unsigned (&r)[4], const __nv_bfloat16* p, bool transposed) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(p));
  if (transposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
  }
}

inline void multiply_accumulate(float* c, const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Registers 0 to 3 of a 16x16 operand: rows 0-7 and 8-15 of its first eight columns, then of its last eight.
template <typename View>
inline void left_operand(unsigned (&r)[4], View v, int k, int plane, int lane) {
  const int row = (lane & 7) + (lane & 8), column = k + (lane & 16) / 2;
  const int row_t = (lane & 7) + (lane & 16) / 2, column_t = (lane & 8);
  const auto* p = v.store.plane(plane) + v.offset;
  if (View::is_transposed) {
    load_matrices(r, p + (k + row_t) * v.stride + column_t, true);
  } else {
    load_matrices(r, p + row * v.stride + column, false);
  }
}

// Registers 0, 1: k 0-7 and 8-15 of the first eight columns; 2, 3: of the last eight.
template <typename View>
inline void right_operand(unsigned (&r)[4], View v, int k, int plane, int lane) {
  const auto* p = v.store.plane(plane) + v.offset;
  if (View::is_transposed) {
    const int column = (lane & 7) + (lane & 16) / 2, row = k + (lane & 8);
    load_matrices(r, p + column * v.stride + row, false);
  } else {
    const int row = k + (lane & 7) + (lane & 8), column = (lane & 16) / 2;
    load_matrices(r, p + row * v.stride + column, true);
  }
}

template <typename A, typename B>
inline void tile_multiply(Tile& tile, A a, B b, int n, int lane) {
  constexpr int planes_a = A::store_type::planes, planes_b = B::store_type::planes;
  if constexpr (planes_a == 0) {
    const int row = lane / 4, column = (lane % 4) * 2;
    for (int k = 0; k < n; ++k) {
      const float a0 = a.get(row, k), a1 = a.get(row + 8, k);
      for (int j = 0; j < 2; ++j) {
        const float b0 = b.get(k, column + 8 * j), b1 = b.get(k, column + 8 * j + 1);
        tile.x[4 * j] += a0 * b0;
        tile.x[4 * j + 1] += a0 * b1;
        tile.x[4 * j + 2] += a1 * b0;
        tile.x[4 * j + 3] += a1 * b1;
      }
    }
  } else {
    for (int k = 0; k < n; k += 16) {
      unsigned left[planes_a][4], right[planes_b][4];
#pragma unroll
      for (int p = 0; p < planes_a; ++p) left_operand(left[p], a, k, p, lane);
#pragma unroll
      for (int p = 0; p < planes_b; ++p) right_operand(right[p], b, k, p, lane);
      // Smallest products first; low times low is below fp32's last place of the sum.
#pragma unroll
      for (int p = planes_a + planes_b - 2; p >= 0; --p) {
#pragma unroll
        for (int i = 0; i < planes_a; ++i) {
          const int j = p - i;
          if (j < 0 || j >= planes_b || p > 1) continue;
          multiply_accumulate(tile.x, left[i], right[j][0], right[j][1]);
          multiply_accumulate(tile.x + 4, left[i], right[j][2], right[j][3]);
        }
      }
    }
  }
}
