// The words that the kernel bodies use, defined for CUDA. metal.h defines the same words for Metal and explains them;
// the comments here explain the particulars of CUDA. A group is a warp, and products of 16x16 tiles run on the tensor
// cores. bf16 inputs are exact operands. A kernel's results are held as pairs of bf16, a high and a low part with 16
// bits of mantissa together, so a product with it takes two or three instructions and is nearly as accurate as fp32.
// Where the high part is enough (Rough, Saved), a product takes one. fp16 inputs are pairs throughout; fp32 inputs use
// FMA.

#define GLOBAL
#define threadgroup
#define constant
#define thread
#define metal
#define threadgroup_position_in_grid blockIdx
#define threadgroups_per_grid gridDim
#define thread_index_in_threadgroup ((int)threadIdx.x)
#define simdgroup_index_in_threadgroup ((int)(threadIdx.x >> 5))
#define thread_index_in_simdgroup ((int)(threadIdx.x & 31))
#define DELTATUNE_SHARED(name, bytes) extern __shared__ __align__(16) char name[]
#define DELTATUNE_EXP(x) expf(x)
#define DELTATUNE_EXP2(x) exp2f(x)
#define DELTATUNE_LOG2(x) log2f(x)
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#define inline __device__ __forceinline__
#define DELTATUNE_UNROLL _Pragma("unroll")

#define barrier() __syncthreads()
#define group_barrier() __syncwarp()
// A barrier of the two groups that share a strip: named barrier 1 + strip, of 64 threads.
#define pair_barrier(strip) asm volatile("bar.sync %0, 64;" :: "r"(1 + (strip)) : "memory")

using bf16 = __nv_bfloat16;

// exp(x) of a gate: CUDA's expf is off by at most one unit in the last place.
inline float exp_of_gate(float x) { return expf(x); }

inline unsigned pack(float low, float high) {
  unsigned r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
inline float unpack_low(unsigned r) { return __uint_as_float(r << 16); }
inline float unpack_high(unsigned r) { return __uint_as_float(r & 0xffff0000u); }

// A matrix of fp32, of bf16, and of pairs of bf16 with their parts in two planes of `count` elements.
struct PlainFloat {
  static constexpr int bytes = 4, planes = 0;
  float* elements;
  inline void put(int i, float x) const { elements[i] = x; }
  inline float get(int i) const { return elements[i]; }
};

struct Single {
  static constexpr int bytes = 2, planes = 1;
  bf16* elements;
  inline void put(int i, float x) const { elements[i] = __float2bfloat16_rn(x); }
  inline float get(int i) const { return __bfloat162float(elements[i]); }
  inline bf16* plane(int) const { return elements; }
};

struct Pair {
  static constexpr int bytes = 4, planes = 2;
  bf16* elements;
  int count;
  inline void put(int i, float x) const {
    const bf16 high = __float2bfloat16_rn(x);
    elements[i] = high;
    elements[i + count] = __float2bfloat16_rn(x - __bfloat162float(high));
  }
  inline float get(int i) const { return __bfloat162float(elements[i]) + __bfloat162float(elements[i + count]); }
  inline bf16* plane(int p) const { return elements + p * count; }
};

template <typename In> struct Storage { using exact = Single; using wide = Pair; using saved = Single; };
template <> struct Storage<__half> { using exact = Pair; using wide = Pair; using saved = Pair; };
template <> struct Storage<float> { using exact = PlainFloat; using wide = PlainFloat; using saved = PlainFloat; };
template <typename In> using Exact = typename Storage<In>::exact;
template <typename In> using Wide = typename Storage<In>::wide;
template <typename In> using Saved = typename Storage<In>::saved;

inline void place(PlainFloat& s, const void* p, int) { s.elements = (float*)p; }
inline void place(Single& s, const void* p, int) { s.elements = (bf16*)p; }
inline void place(Pair& s, const void* p, int count) { s.elements = (bf16*)p; s.count = count; }

// A matrix of `count` elements in shared memory.
template <typename Store>
inline Store shared_at(char* memory, int offset, int count) {
  Store s;
  place(s, memory + offset, count);
  return s;
}
// Block number `block` of `count` elements in device memory, in the form of Store.
template <typename Store, typename P>
inline Store stored_at(P* p, long block, int count) {
  Store s;
  place(s, reinterpret_cast<const char*>(p) + block * count * Store::bytes, count);
  return s;
}

struct Tile {
  float x[8];
  inline float get(int e) const { return x[e]; }
  inline void set(int e, float v) { x[e] = v; }
};
inline int tile_row(int e, int lane) { return (lane >> 2) + ((e >> 1) & 1) * 8; }
inline int tile_column(int e, int lane) { return (lane & 3) * 2 + (e & 1) + (e >> 2) * 8; }
inline int tile_side(int e) { return (e >> 1) & 1; }
constexpr int tile_second = 2;

#define lane_exchange(x, mask) __shfl_xor_sync(0xffffffffu, x, mask)
inline void prefetch(const void* line) { asm volatile("prefetch.global.L2 [%0];" :: "l"(line)); }

inline float lane_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

// The largest over the lanes that hold the same rows of a tile.
inline float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
// Sums over the lanes that hold the same rows of a tile, and over those that hold the same columns.
inline float row_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
inline float column_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 4);
  x += __shfl_xor_sync(0xffffffffu, x, 8);
  return x + __shfl_xor_sync(0xffffffffu, x, 16);
}

inline void load_matrices(unsigned (&r)[4], const bf16* p, bool transposed) {
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

// The operands of a 16x16x16 product. A left one comes from shared memory or from a tile, a right one from shared
// memory.
template <int Planes>
struct Left {
  static constexpr int planes = Planes;
  unsigned r[Planes][4];
};
template <int Planes>
struct Right {
  static constexpr int planes = Planes;
  unsigned r[Planes][4];
};
struct LeftFloat {
  float x[8];
};
template <typename View>
struct LazyRight {
  View view;
};

template <typename In> struct Operands { using precise = Left<2>; using rough = Left<1>; };
template <> struct Operands<__half> { using precise = Left<2>; using rough = Left<2>; };
template <> struct Operands<float> { using precise = LeftFloat; using rough = LeftFloat; };
template <typename In> using Precise = typename Operands<In>::precise;
template <typename In> using Rough = typename Operands<In>::rough;

inline void hold(Left<1>& a, const Tile& t) {
#pragma unroll
  for (int i = 0; i < 4; ++i) a.r[0][i] = pack(t.x[2 * i], t.x[2 * i + 1]);
}
inline void hold(Left<2>& a, const Tile& t) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned high = pack(t.x[2 * i], t.x[2 * i + 1]);
    a.r[0][i] = high;
    a.r[1][i] = pack(t.x[2 * i] - unpack_low(high), t.x[2 * i + 1] - unpack_high(high));
  }
}
inline void hold(LeftFloat& a, const Tile& t) {
#pragma unroll
  for (int e = 0; e < 8; ++e) a.x[e] = t.x[e];
}

// Loads a left operand. Registers 0 to 3 hold rows 0-7 and 8-15 of the first eight columns, then of the last eight.
template <typename View, int Planes>
inline void left_of(Left<Planes>& a, View v, int lane) {
  static_assert(Planes == View::store_type::planes, "as many planes as the matrix has");
#pragma unroll
  for (int plane = 0; plane < Planes; ++plane) {
    const bf16* p = v.store.plane(plane) + v.offset;
    if (View::is_transposed) {
      load_matrices(a.r[plane], p + ((lane & 7) + ((lane & 16) >> 1)) * v.stride + (lane & 8), true);
    } else {
      load_matrices(a.r[plane], p + ((lane & 7) + (lane & 8)) * v.stride + ((lane & 16) >> 1), false);
    }
  }
}
template <typename View>
inline void left_of(LeftFloat& a, View v, int lane) {
#pragma unroll
  for (int e = 0; e < 8; ++e) a.x[e] = v.get(tile_row(e, lane), tile_column(e, lane));
}
template <typename Store, bool Float = Store::planes == 0> struct LeftFor { using type = Left<Store::planes>; };
template <typename Store> struct LeftFor<Store, true> { using type = LeftFloat; };
template <typename View>
inline typename LeftFor<typename View::store_type>::type left(View v, int lane) {
  typename LeftFor<typename View::store_type>::type a;
  left_of(a, v, lane);
  return a;
}

// Loads a right operand. Registers 0 and 1 hold rows 0-7 and 8-15 of the first eight columns, 2 and 3 of the last
// eight.
template <typename View, bool Float = View::store_type::planes == 0>
struct RightOf {
  using type = Right<View::store_type::planes>;
  static inline type of(View v, int lane) {
    type b;
#pragma unroll
    for (int plane = 0; plane < type::planes; ++plane) {
      const bf16* p = v.store.plane(plane) + v.offset;
      if (View::is_transposed) {
        load_matrices(b.r[plane], p + ((lane & 7) + ((lane & 16) >> 1)) * v.stride + (lane & 8), false);
      } else {
        load_matrices(b.r[plane], p + ((lane & 7) + (lane & 8)) * v.stride + ((lane & 16) >> 1), true);
      }
    }
    return b;
  }
};
template <typename View>
struct RightOf<View, true> {
  using type = LazyRight<View>;
  static inline type of(View v, int) { return type{v}; }
};
template <typename View>
inline typename RightOf<View>::type right(View v, int lane) {
  return RightOf<View>::of(v, lane);
}

// Adds the product a b to a tile, the smallest partial products first. Low times low is left out: it is below the last
// place of the sum in fp32.
template <int PlanesA, int PlanesB>
inline void multiply(Tile& tile, const Left<PlanesA>& a, const Right<PlanesB>& b, int) {
#pragma unroll
  for (int p = PlanesA + PlanesB - 2; p >= 0; --p) {
#pragma unroll
    for (int i = 0; i < PlanesA; ++i) {
      const int j = p - i;
      if (j < 0 || j >= PlanesB || p > 1) continue;
      multiply_accumulate(tile.x, a.r[i], b.r[j][0], b.r[j][1]);
      multiply_accumulate(tile.x + 4, a.r[i], b.r[j][2], b.r[j][3]);
    }
  }
}
template <typename View>
inline void multiply(Tile& tile, const LeftFloat& a, const LazyRight<View>& b, int lane) {
  const int column = (lane & 3) * 2;
  // Two rounds: with all 16 inner products in a row the compiler needs up to five times as long, and more registers.
#pragma unroll 1
  for (int half = 0; half < 16; half += 8) {
    float x[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = half ? a.x[e + 4] : a.x[e];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const int from = (lane & ~3) + k / 2, e = k & 1;
      const float a0 = __shfl_sync(0xffffffffu, x[e], from), a1 = __shfl_sync(0xffffffffu, x[e + 2], from);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float b0 = b.view.get(half + k, column + 8 * j), b1 = b.view.get(half + k, column + 8 * j + 1);
        tile.x[4 * j] += a0 * b0;
        tile.x[4 * j + 1] += a0 * b1;
        tile.x[4 * j + 2] += a1 * b0;
        tile.x[4 * j + 3] += a1 * b1;
      }
    }
  }
}

// A lane's share of the sum of products of the elements of two operands: by row of left operands, or of all elements of
// right operands.
template <int Planes>
inline float row_element(const Left<Planes>& a, int i, bool high) {
  float x = high ? unpack_high(a.r[0][i]) : unpack_low(a.r[0][i]);
  if constexpr (Planes == 2) x += high ? unpack_high(a.r[1][i]) : unpack_low(a.r[1][i]);
  return x;
}
template <int PlanesA, int PlanesB>
inline void add_row_dots(float (&sums)[2], const Left<PlanesA>& a, const Left<PlanesB>& b, int) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    sums[i & 1] +=
        row_element(a, i, false) * row_element(b, i, false) + row_element(a, i, true) * row_element(b, i, true);
}
inline void add_row_dots(float (&sums)[2], const LeftFloat& a, const LeftFloat& b, int) {
#pragma unroll
  for (int e = 0; e < 8; ++e) sums[tile_side(e)] += a.x[e] * b.x[e];
}
inline float right_dot(const Right<1>& a, const Right<1>& b, int) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    sum += unpack_low(a.r[0][i]) * unpack_low(b.r[0][i]) + unpack_high(a.r[0][i]) * unpack_high(b.r[0][i]);
  return sum;
}
inline float right_dot(const Right<2>& a, const Right<2>& b, int) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    sum += (unpack_low(a.r[0][i]) + unpack_low(a.r[1][i])) * (unpack_low(b.r[0][i]) + unpack_low(b.r[1][i])) +
           (unpack_high(a.r[0][i]) + unpack_high(a.r[1][i])) * (unpack_high(b.r[0][i]) + unpack_high(b.r[1][i]));
  return sum;
}
template <typename V, typename W>
inline float right_dot(const LazyRight<V>& a, const LazyRight<W>& b, int lane) {
  float sum = 0.0f;
#pragma unroll
  for (int e = 0; e < 8; ++e)
    sum += a.view.get(tile_row(e, lane), tile_column(e, lane)) * b.view.get(tile_row(e, lane), tile_column(e, lane));
  return sum;
}

template <typename View>
inline Tile tile_of(View v, int lane) {
  Tile t;
  if constexpr (View::store_type::planes == 0) {
#pragma unroll
    for (int e = 0; e < 8; ++e) t.x[e] = v.get(tile_row(e, lane), tile_column(e, lane));
  } else {
    Left<View::store_type::planes> a;
    left_of(a, v, lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      t.x[2 * i] = unpack_low(a.r[0][i]);
      t.x[2 * i + 1] = unpack_high(a.r[0][i]);
      if constexpr (View::store_type::planes == 2) {
        t.x[2 * i] += unpack_low(a.r[1][i]);
        t.x[2 * i + 1] += unpack_high(a.r[1][i]);
      }
    }
  }
  return t;
}

// Writes a tile to a matrix in shared or device memory from `offset` on; unless Full, except rows from `rows` and
// columns from `columns` on.
template <bool Even, bool Full, typename Store>
inline void put_tile(Store s, long offset, int stride, const Tile& t, int rows, int columns, int lane) {
  const int first_row = tile_row(0, lane), first_column = tile_column(0, lane);
  const long first = offset + first_row * stride + first_column;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = first_row + (i & 1) * 8, column = first_column + (i >> 1) * 8;
    const int on = (i & 1) * 8 * stride + (i >> 1) * 8;
    if (!Full && row >= rows) continue;
    if constexpr (Even && Store::planes > 0) {
      if (!Full && column >= columns) continue;
      const unsigned high = pack(t.x[2 * i], t.x[2 * i + 1]);
      *reinterpret_cast<unsigned*>(s.plane(0) + first + on) = high;
      if constexpr (Store::planes == 2)
        *reinterpret_cast<unsigned*>(s.plane(1) + first + on) =
            pack(t.x[2 * i] - unpack_low(high), t.x[2 * i + 1] - unpack_high(high));
    } else if constexpr (Even) {
      if (Full || column < columns)
        *reinterpret_cast<float2*>(s.elements + first + on) = make_float2(t.x[2 * i], t.x[2 * i + 1]);
    } else {
      if (column < columns) s.put(first + on, t.x[2 * i]);
      if (column + 1 < columns) s.put(first + on + 1, t.x[2 * i + 1]);
    }
  }
}

// Tails are explained in metal.h. Of a lane's two bytes per tile, the first has the tails of even elements. Where a tail
// is one bit, the second byte takes the places of the first one's second bits.
inline unsigned second_bytes(const Tile& t, int i) {
  return __byte_perm(__float_as_uint(t.x[2 * i]), __float_as_uint(t.x[2 * i + 1]), 0x0051);
}
inline unsigned tail_pairs(const Tile& low, const Tile& high) {
  unsigned tails = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    tails |= (__byte_perm(second_bytes(low, i), second_bytes(high, i), 0x5410) & 0xc0c0c0c0u) >> 2 * i;
  return tails;
}
inline unsigned tail_bits(const Tile& low, const Tile& high) {
  const unsigned tails = tail_pairs(low, high) & 0xaaaaaaaau;
  return tails | tails >> 9;
}
template <int Tails, typename Store>
inline unsigned char* tails_in(Store s, int offset, int stride, int lane) {
  bf16* row = s.plane(lane >> 4) + offset + ((lane & 15) + 1) * stride - Tails;
  return reinterpret_cast<unsigned char*>(row) + (Store::planes == 1 ? (lane >> 4) * Tails : 0);
}
// Stores the tails of `Count` tiles from tile `from` of a strip on.
template <int Tails, int Count, typename Store>
inline void keep_tails(Store s, int offset, int stride, const Tile* tiles, int from, int lane) {
  if constexpr (Tails > 0) {
    unsigned char* to = tails_in<Tails>(s, offset, stride, lane) + from * Store::planes;
#pragma unroll
    for (int m = 0; m < Count; ++m) {
      if constexpr (Store::planes == 1) {
        if constexpr (Count % 4 != 0)
          to[m] = static_cast<unsigned char>(tail_bits(tiles[m], tiles[m]));
        else if (m % 4 == 0)
          *reinterpret_cast<unsigned*>(to + m) =
              __byte_perm(tail_bits(tiles[m], tiles[m + 1]), tail_bits(tiles[m + 2], tiles[m + 3]), 0x6420);
      } else if constexpr (Count % 4 == 0) {
        if (m % 4 == 0)
          *reinterpret_cast<uint2*>(to + 2 * m) =
              make_uint2(tail_pairs(tiles[m], tiles[m + 1]), tail_pairs(tiles[m + 2], tiles[m + 3]));
      } else {
        *reinterpret_cast<unsigned short*>(to + 2 * m) = static_cast<unsigned short>(tail_pairs(tiles[m], tiles[m]));
      }
    }
  }
}
// tail_at loads a lane's tails of tile `m` of a strip. low_halves returns the low 16 bits that they stand for, of two
// elements, each half a last place too large; with_low_half joins one to its bf16 and subtracts that excess.
template <int Tails, typename Store>
inline unsigned tail_at(Store s, int offset, int stride, int m, int lane) {
  if constexpr (Tails == 0) {
    return 0;
  } else {
    const unsigned char* from = tails_in<Tails>(s, offset, stride, lane);
    if constexpr (Store::planes == 1) return from[m] << 8 | from[m] << 25;
    else return __byte_perm(reinterpret_cast<const unsigned short*>(from)[m], 0, 0x1000);
  }
}
template <int Bits>
inline unsigned low_halves(unsigned tail, int i) {
  return Bits == 1 ? (tail << 2 * i & 0x80008000u) ^ 0xc000c000u : (tail << 2 * i & 0xc000c000u) ^ 0xa000a000u;
}
inline float with_low_half(unsigned low, unsigned high, unsigned which) {
  return __uint_as_float(__byte_perm(low, high, which) - 0x8000u);
}
// A lane's share of the sum of products of two tiles' elements with their tails. An element of half the smallest bf16,
// which is rounded to zero, becomes NaN with its tail; then the sum is taken without tails.
template <int Bits, typename V, typename W>
inline float kept_dot(V v, W w, unsigned tail_v, unsigned tail_w, int lane) {
  float sum = 0.0f;
  if constexpr (Bits > 0) {
    const auto a = left(v, lane);
    const auto b = left(w, lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const unsigned x = low_halves<Bits>(tail_v, i), y = low_halves<Bits>(tail_w, i);
      sum += with_low_half(x, a.r[0][i], 0x5410) * with_low_half(y, b.r[0][i], 0x5410);
      sum += with_low_half(x, a.r[0][i], 0x7632) * with_low_half(y, b.r[0][i], 0x7632);
    }
    if (sum != sum) {
      sum = 0.0f;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sum += unpack_low(a.r[0][i]) * unpack_low(b.r[0][i]) + unpack_high(a.r[0][i]) * unpack_high(b.r[0][i]);
    }
  }
  return sum;
}

// Writes the transpose of a tile to a shared matrix.
template <typename Store>
inline void put_turned(Store s, int offset, int stride, const Tile& t, int lane) {
  if constexpr (Store::planes == 1) {
    const int row = (lane & 7) + ((lane & 16) >> 1), column = lane & 8;
    const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(s.elements + offset + row * stride + column));
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
                 :: "r"(to), "r"(pack(t.x[0], t.x[1])), "r"(pack(t.x[2], t.x[3])), "r"(pack(t.x[4], t.x[5])),
                    "r"(pack(t.x[6], t.x[7])) : "memory");
  } else {
#pragma unroll
    for (int e = 0; e < 8; ++e) s.put(offset + tile_column(e, lane) * stride + tile_row(e, lane), t.x[e]);
  }
}

// Copies from device to shared memory are asynchronous. Whole blocks are copied in bulk and report to a barrier of the
// stage that they fill. Rows are copied in pieces of 16 bytes: a bulk copy per row is slower, since one lane issues it.
struct Arrival {
  unsigned barrier, bytes;
};
inline unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }
inline bool aligned16(const void* p) { return (reinterpret_cast<unsigned long long>(p) & 15) == 0; }

// Loads (take) or stores (give) piece number `at` of an array, which is eight elements. Inputs may be unaligned;
// outputs are allocated by MLX and aligned.
template <typename T>
struct alignas(16) Eight {
  T x[8];
};
template <typename T>
inline void take_aligned(float (&to)[8], const T* from, long at) {
  const Eight<T> found = *reinterpret_cast<const Eight<T>*>(from + at * 8);
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i] = static_cast<float>(found.x[i]);
}
template <typename T>
inline void take(float (&to)[8], const T* from, long at) {
  if (aligned16(from + at * 8)) {
    take_aligned(to, from, at);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = static_cast<float>(from[at * 8 + i]);
  }
}
template <typename T>
inline void give(T* to, long at, const float (&from)[8]) {
  Eight<T> made;
#pragma unroll
  for (int i = 0; i < 8; ++i) made.x[i] = static_cast<T>(from[i]);
  *reinterpret_cast<Eight<T>*>(to + at * 8) = made;
}

inline void give(bf16* to, long at, const float (&from)[8]) {
  *reinterpret_cast<uint4*>(to + at * 8) = make_uint4(pack(from[0], from[1]), pack(from[2], from[3]),
                                                      pack(from[4], from[5]), pack(from[6], from[7]));
}
// A piece as it is in memory, which takes half the registers of fp32 while its load is under way.
template <typename T> struct Octet { uint4 words; };
template <> struct Octet<float> { uint4 words, more; };
template <typename T>
inline void fetch(Octet<T>& to, const T* from, long at, bool aligned) {
  if (aligned) {
    const uint4* p = reinterpret_cast<const uint4*>(from + at * 8);
    to.words = __ldg(p);
    if constexpr (sizeof(T) == 4) to.more = __ldg(p + 1);
  } else {
    Eight<T> found;
#pragma unroll
    for (int i = 0; i < 8; ++i) found.x[i] = from[at * 8 + i];
    to = *reinterpret_cast<const Octet<T>*>(&found);
  }
}
inline void widen(float (&to)[8], const Octet<bf16>& from) {
  const unsigned words[] = {from.words.x, from.words.y, from.words.z, from.words.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i] = i % 2 ? unpack_high(words[i / 2]) : unpack_low(words[i / 2]);
}
template <typename T>
inline void widen(float (&to)[8], const Octet<T>& from) {
  const Eight<T> found = *reinterpret_cast<const Eight<T>*>(&from);
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i] = static_cast<float>(found.x[i]);
}

// 1 / (1 + exp(-x)) by the approximations of the hardware, each of which is right to two units in the last place.
inline float sigmoid_of(float x) {
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -1.4426950408889634f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
  return inverse;
}

// Starts the barriers of up to two stages. Every thread calls it.
inline void arrivals_start(char* p, int index) {
  if (index == 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(shared_address(p) + 8 * i) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
}
inline Arrival arrival_at(char* p, int stage) { return Arrival{shared_address(p) + 8 * stage, 0}; }
inline void copies_sent(const Arrival& a, int index) {
  if (index == 0)
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(a.barrier), "r"(a.bytes) : "memory");
}
// Waits until a stage is filled. `round` counts how often the stage was filled before.
inline void copies_wait(const Arrival& a, int round) {
  asm volatile("cp.async.wait_all;" ::: "memory");
  asm volatile(
      "{\n.reg .pred done;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra DONE;\n"
      "bra WAIT;\nDONE:\n}" :: "r"(a.barrier), "r"(round & 1) : "memory");
}
// Orders ordinary accesses to shared memory before bulk copies to or from the same place.
inline void copies_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

inline void copy_bulk(void* to, const void* from, unsigned bytes, const Arrival& a) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(a.barrier) : "memory");
}
inline void copy16(void* to, const void* from, bool live) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"(shared_address(to)), "l"(from), "r"(live ? 16 : 0) : "memory");
}

template <int Count>
inline void copy_floats(float* to, const float* from, Arrival& a, int index) {
  if (index == 0) copy_bulk(to, from, Count * 4, a);
  a.bytes += Count * 4;
}

// Copies `Count` elements of every plane of a matrix in device memory, from `offset` on, to shared memory.
template <int Count, int Threads, typename Store>
inline void copy_block(Store s, Store from, long offset, Arrival& a, int index) {
  if constexpr (Store::planes == 0) {
    if (index == 0) copy_bulk(s.elements, from.elements + offset, Count * 4, a);
    a.bytes += Count * 4;
  } else {
#pragma unroll
    for (int plane = 0; plane < Store::planes; ++plane)
      if (index == plane * 32 % Threads) copy_bulk(s.plane(plane), from.plane(plane) + offset, Count * 2, a);
    a.bytes += Store::planes * Count * 2;
  }
}

template <typename Store, typename Source> struct SameBits { static constexpr bool value = false; };
template <> struct SameBits<Single, bf16> { static constexpr bool value = true; };
template <> struct SameBits<PlainFloat, float> { static constexpr bool value = true; };

template <int Rows, int Columns, int Threads, typename Store, typename Source, typename Live>
__device__ __noinline__ void copy_elements(Store s, int stride, const Source* from, int row_stride, int width,
                                           Live live, int index) {
  for (unsigned i = index; i < Rows * Columns; i += Threads) {
    const int row = i / Columns, column = i % Columns;
    const bool on = column < width && live(row);
    s.put(row * stride + column, on ? static_cast<float>(from[(long)row * row_stride + column]) : 0.0f);
  }
}

// Copies rows of an input to shared memory. Rows that are not live and columns from `width` on become zeros.
template <int Rows, int Columns, int Threads, typename Store, typename Source, typename Live>
inline void copy_rows(Store s, int stride, const Source* from, int row_stride, int width, Live live, Arrival& a,
                      int index) {
  if constexpr (SameBits<Store, Source>::value) {
    constexpr int each = 16 / sizeof(Source);
    if (row_stride % each == 0 && aligned16(from)) {
      constexpr int vectors = Columns / each, step = Threads / vectors;
      // In the usual case a thread stays in its column, so its addresses differ by constants.
      if constexpr (!Live::masked && Threads % vectors == 0 && Rows % (step > 0 ? step : 1) == 0) {
        if (live.left >= Rows && width >= Columns) {
          const int row = (unsigned)index / vectors, column = (unsigned)index % vectors * each;
          const unsigned to = shared_address(s.elements + row * stride + column);
          const Source* source = from + (long)row * row_stride + column;
#pragma unroll
          for (int i = 0; i < Rows / step; ++i)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                         :: "r"(to + i * step * stride * (int)sizeof(Source)), "l"(source + (long)i * step * row_stride)
                         : "memory");
          return;
        }
      }
      if (width % each == 0) {
        for (unsigned i = index; i < Rows * vectors; i += Threads) {
          const int row = i / vectors, column = i % vectors * each;
          const bool on = column < width && live(row);
          copy16(s.elements + row * stride + column, on ? from + (long)row * row_stride + column : from, on);
        }
        return;
      }
    }
  }
  copy_elements<Rows, Columns, Threads>(s, stride, from, row_stride, width, live, index);
}

// Writes a left operand to a shared matrix, in the form in which `left` reads it.
template <int Planes, typename Store>
inline void keep(Store s, int offset, int stride, const Left<Planes>& a, int lane) {
  static_assert(Planes == Store::planes, "as many planes as the matrix has");
  const int place = offset + ((lane & 7) + (lane & 8)) * stride + ((lane & 16) >> 1);
#pragma unroll
  for (int plane = 0; plane < Planes; ++plane)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
                 :: "r"(shared_address(s.plane(plane) + place)), "r"(a.r[plane][0]), "r"(a.r[plane][1]),
                    "r"(a.r[plane][2]), "r"(a.r[plane][3]) : "memory");
}
inline void keep(PlainFloat s, int offset, int stride, const LeftFloat& a, int lane) {
#pragma unroll
  for (int e = 0; e < 8; ++e) s.put(offset + tile_row(e, lane) * stride + tile_column(e, lane), a.x[e]);
}

// Writes `Count` elements of each plane that `to` has from a shared matrix to device memory, from `offset` on. One lane
// starts the copies. It calls writes_left(), and a barrier follows, before the shared matrix is written again.
template <int Count, typename To, typename Store>
inline void write_strip(To to, long offset, Store s, int lane) {
  if (lane != 0) return;
  if constexpr (To::planes == 0) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 :: "l"(to.elements + offset), "r"(shared_address(s.elements)), "r"(Count * 4) : "memory");
  } else {
#pragma unroll
    for (int plane = 0; plane < To::planes; ++plane)
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                   :: "l"(to.plane(plane) + offset), "r"(shared_address(s.plane(plane))), "r"(Count * 2) : "memory");
  }
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int Stride, int Tails, int Count, typename To, typename Store>
inline void write_part(To to, long offset, Store room, const Tile* tiles, int from, int strip, bool there, int lane) {
  if constexpr (Tails > 0) keep_tails<Tails, Count>(Single{room.plane(0)}, 0, Stride, tiles, from, lane);
  copies_fence();
  pair_barrier(strip);
  if (from == 0 && there) write_strip<16 * Stride>(to, offset, room, lane);
}
inline void writes_left() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// Writes a group's row of tiles, 16 rows of `stride` elements, to device memory by way of `staging`, with the tails of
// the group's `Kept` tiles of the state. It first waits for the group's write before this one.
template <int Count, int Tails, int Kept, typename Store>
inline void write_tiles_and_tails(Store to, long offset, int stride, const Tile* tiles, const Tile* state,
                                  char* staging, int lane) {
  if constexpr (Store::planes == 0) {
#pragma unroll
    for (int m = 0; m < Count; ++m) put_tile<true, true>(to, offset + m * 16, stride, tiles[m], 16, 16, lane);
  } else {
    bf16* room = reinterpret_cast<bf16*>(staging);
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    __syncwarp();
    const int place = ((lane & 7) + (lane & 8)) * stride + ((lane & 16) >> 1);
#pragma unroll
    for (int m = 0; m < Count; ++m) {
      unsigned high[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) high[i] = pack(tiles[m].x[2 * i], tiles[m].x[2 * i + 1]);
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
                   :: "r"(shared_address(room + place + m * 16)), "r"(high[0]), "r"(high[1]), "r"(high[2]), "r"(high[3])
                   : "memory");
      if constexpr (Store::planes == 2) {
        unsigned low[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          low[i] = pack(tiles[m].x[2 * i] - unpack_low(high[i]), tiles[m].x[2 * i + 1] - unpack_high(high[i]));
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
                     :: "r"(shared_address(room + 16 * stride + place + m * 16)), "r"(low[0]), "r"(low[1]), "r"(low[2]),
                        "r"(low[3]) : "memory");
      }
    }
    keep_tails<Tails, Kept>(shared_at<Store>(staging, 0, 16 * stride), 0, stride, state, 0, lane);
    copies_fence();
    __syncwarp();
    if (lane == 0) {
#pragma unroll
      for (int plane = 0; plane < Store::planes; ++plane)
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                     :: "l"(to.plane(plane) + offset), "r"(shared_address(room + plane * 16 * stride)), "r"(32 * stride)
                     : "memory");
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
  }
}
inline void writes_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Writes rows of a shared matrix to an array of the inputs' type. `Threads` threads call it.
template <int Rows, int Columns, int Threads, typename Store, typename Target>
__device__ __noinline__ void write_elements(Store s, int offset, int stride, Target* to, int row_stride, int rows,
                                            int columns, int index) {
  for (unsigned i = index; i < Rows * Columns; i += Threads) {
    const int row = i / Columns, column = i % Columns;
    if (row < rows && column < columns)
      to[(long)row * row_stride + column] = static_cast<Target>(s.get(offset + row * stride + column));
  }
}
template <int Rows, int Columns, int Threads, typename Store, typename Target>
inline void write_rows(Store s, int offset, int stride, Target* to, int row_stride, int rows, int columns, int index) {
  if constexpr (SameBits<Store, Target>::value) {
    constexpr int each = 16 / sizeof(Target);
    if (columns % each == 0 && row_stride % each == 0) {
      constexpr int vectors = Columns / each;
#pragma unroll
      for (unsigned i = index; i < Rows * vectors; i += Threads) {
        const int row = i / vectors, column = i % vectors * each;
        if (row < rows && column < columns)
          *reinterpret_cast<uint4*>(to + (long)row * row_stride + column) =
              *reinterpret_cast<const uint4*>(s.elements + offset + row * stride + column);
      }
      return;
    }
  }
  write_elements<Rows, Columns, Threads>(s, offset, stride, to, row_stride, rows, columns, index);
}

// Copies a shared matrix to a matrix in device memory of the same form.
template <int Count, int Threads, typename Store>
inline void write_block(Store to, Store s, int index) {
  constexpr int bytes = Count * Store::bytes;
#pragma unroll
  for (unsigned i = index * 16; i < bytes; i += Threads * 16)
    *reinterpret_cast<uint4*>(reinterpret_cast<char*>(to.elements) + i) =
        *reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(s.elements) + i);
}

// Bytes of shared memory per row of a group's tiles on its way out: the larger of a state's and of u's.
template <typename In>
__host__ __device__ constexpr int staged(int state, int chunk) {
  constexpr int saved = Saved<In>::planes * 2, wide = Wide<In>::planes * 2;
  return saved * state > wide * chunk ? saved * state : wide * chunk;
}
