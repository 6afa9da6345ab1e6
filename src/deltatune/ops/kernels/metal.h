// The vocabulary of the kernel bodies on Metal: 16x16 tiles of fp32 held by one simdgroup, and shared matrices.
// Names of address spaces, positions and barriers are Metal's own; cuda.h gives them a meaning on CUDA, and host.h
// (tests only) stands in for metal_stdlib so that this very text is compiled and run on a CPU.
// Not yet run on Apple hardware.

#ifndef DELTATUNE_SHARED
#define DELTATUNE_SHARED(name, bytes) threadgroup char name[bytes]
#endif
// CUDA keeps the word `device` for itself.
#define GLOBAL device
#define DELTATUNE_EXP(x) metal::exp(x)
#define DELTATUNE_UNROLL _Pragma("unroll")

#define barrier() threadgroup_barrier(mem_flags::mem_threadgroup)

// Both kinds of shared matrix hold plain elements here: products are fp32 on every Apple GPU.
template <typename In>
struct Exact {
  static constexpr constant int bytes = sizeof(In);
  threadgroup In* elements;
  void put(int i, float x) const { elements[i] = static_cast<In>(x); }
  float get(int i) const { return static_cast<float>(elements[i]); }
};

template <typename In>
struct Wide {
  static constexpr constant int bytes = 4;
  threadgroup float* elements;
  void put(int i, float x) const { elements[i] = x; }
  float get(int i) const { return elements[i]; }
};

template <typename In>
Exact<In> exact_at(threadgroup char* memory, int offset, int) {
  return Exact<In>{reinterpret_cast<threadgroup In*>(memory + offset)};
}

template <typename In>
Wide<In> wide_at(threadgroup char* memory, int offset, int) {
  return Wide<In>{reinterpret_cast<threadgroup float*>(memory + offset)};
}

// Where a lane's two elements of an 8x8 simdgroup matrix stand.
inline int fragment_row(int lane) {
  return ((lane >> 2) & 4) + ((lane >> 1) & 3);
}
inline int fragment_column(int lane) {
  return ((lane >> 2) & 2) * 2 + (lane & 1) * 2;
}

// A 16x16 tile of fp32, eight elements a lane: get and set take 0 <= e < 8.
struct Tile {
  simdgroup_matrix<float, 8, 8> part[4];
  float get(int e) thread { return part[e >> 1].thread_elements()[e & 1]; }
  void set(int e, float x) thread { part[e >> 1].thread_elements()[e & 1] = x; }
};

inline int tile_row(int e, int lane) {
  return (e >> 2) * 8 + fragment_row(lane);
}
inline int tile_column(int e, int lane) {
  return ((e >> 1) & 1) * 8 + fragment_column(lane) + (e & 1);
}
// A lane's elements stand in two rows: which of the two, and the first element of the second.
inline int tile_side(int e) {
  return e >> 2;
}
constant constexpr int tile_second = 4;

inline float lane_sum(float x) {
  return simd_sum(x);
}

// Sum over the lanes that hold the same rows of a tile.
inline float row_sum(float x) {
  x += simd_shuffle_xor(x, 1);
  return x + simd_shuffle_xor(x, 8);
}

template <typename View>
simdgroup_matrix<float, 8, 8> fragment(View view, int row, int column, int lane) {
  simdgroup_matrix<float, 8, 8> m;
  const int r = row + fragment_row(lane);
  const int c = column + fragment_column(lane);
  m.thread_elements()[0] = view.get(r, c);
  m.thread_elements()[1] = view.get(r, c + 1);
  return m;
}

// tile += a[0:16, 0:n] b[0:n, 0:16]; n is a multiple of 16.
template <typename A, typename B>
void tile_multiply(thread Tile& tile, A a, B b, int n, int lane) {
  for (int k = 0; k < n; k += 8) {
    simdgroup_matrix<float, 8, 8> a0 = fragment(a, 0, k, lane), a1 = fragment(a, 8, k, lane);
    simdgroup_matrix<float, 8, 8> b0 = fragment(b, k, 0, lane), b1 = fragment(b, k, 8, lane);
    simdgroup_multiply_accumulate(tile.part[0], a0, b0, tile.part[0]);
    simdgroup_multiply_accumulate(tile.part[1], a0, b1, tile.part[1]);
    simdgroup_multiply_accumulate(tile.part[2], a1, b0, tile.part[2]);
    simdgroup_multiply_accumulate(tile.part[3], a1, b1, tile.part[3]);
  }
}
