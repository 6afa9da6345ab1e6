// The words that the kernel bodies use, defined for Metal. cuda.h defines the same words for CUDA.
// A group is a simdgroup of 32 lanes, and a block is a threadgroup. A group holds 16x16 tiles of fp32, eight elements
// per lane. Matrices are in threadgroup memory (Matrix) or in device memory (Stored).
// The names of address spaces, positions and barriers are Metal's own. cuda.h defines them for CUDA, and the tests'
// host.h stands in for Metal's library, so that this same text is compiled and run on a CPU. Not yet run on Apple
// hardware.

#ifndef DELTATUNE_SHARED
#define DELTATUNE_SHARED(name, bytes) alignas(16) threadgroup char name[bytes]
#endif
// The tests' host machine checks that a vector in threadgroup memory starts at a multiple of its size.
#ifndef DELTATUNE_ALIGNED
#define DELTATUNE_ALIGNED(pointer) (pointer)
#endif
// Device memory; the word `device` itself has another meaning on CUDA.
#define GLOBAL device
#define DELTATUNE_EXP(x) metal::exp(x)
#define DELTATUNE_EXP2(x) metal::exp2(x)
#define DELTATUNE_LOG2(x) metal::log2(x)
#define DELTATUNE_UNROLL _Pragma("unroll")

#define barrier() threadgroup_barrier(mem_flags::mem_threadgroup)
#define group_barrier() simdgroup_barrier(mem_flags::mem_threadgroup)
// A barrier of the two groups that share a strip; on Metal, of all groups of the block.
#define pair_barrier(strip) barrier()

// exp(x) of a gate, x <= 0. Gates near 1 are multiplied along a row, and Metal's exp may be off by 4 units in the last
// place; Taylor's series is off by half of one there.
inline float exp_of_gate(float x) {
  if (x < -0.25f) return DELTATUNE_EXP(x);
  float sum = metal::fma(x, 1.0f / 720.0f, 1.0f / 120.0f);
  sum = metal::fma(x, sum, 1.0f / 24.0f);
  sum = metal::fma(x, sum, 1.0f / 6.0f);
  return metal::fma(x, metal::fma(x, metal::fma(x, sum, 0.5f), 1.0f), 1.0f);
}

// Vectors of elements, as the bits that they are in memory, by the bytes of an element. A packed vector may start at
// any element; those in threadgroup memory start at a multiple of their size.
template <int Bytes> struct Bits;
template <> struct Bits<2> {
  using one = ushort;
  using two = ushort2;
  using four = ushort4;
  using packed_two = packed_ushort2;
  using packed_four = packed_ushort4;
};
template <> struct Bits<4> {
  using one = uint;
  using two = uint2;
  using four = uint4;
  using packed_two = packed_uint2;
  using packed_four = packed_uint4;
};
// Two numbers as elements, as the bits that they are in memory.
template <typename Element>
inline typename Bits<sizeof(Element)>::two both_of(float x, float y) {
  using one = typename Bits<sizeof(Element)>::one;
  return {as_type<one>(static_cast<Element>(x)), as_type<one>(static_cast<Element>(y))};
}

// A matrix in shared memory. Exact<In> holds inputs, Wide<In> results in fp32, and Saved<In> arrays that kernels hand
// to one another.
template <typename Element>
struct Matrix {
  using element = Element;
  static constexpr constant int bytes = sizeof(Element);
  threadgroup Element* elements;
  void put(int i, float x) const { elements[i] = static_cast<Element>(x); }
  // Stores two elements side by side, from an even place on.
  void put_two(int i, float x, float y) const {
    *DELTATUNE_ALIGNED(reinterpret_cast<threadgroup typename Bits<bytes>::two*>(elements + i)) = both_of<Element>(x, y);
  }
  float get(int i) const { return static_cast<float>(elements[i]); }
};
// A matrix in device memory.
template <typename Element>
struct Stored {
  static constexpr constant int bytes = sizeof(Element);
  device Element* elements;
  void put(long i, float x) const { elements[i] = static_cast<Element>(x); }
  void put_two(long i, float x, float y) const {
    *reinterpret_cast<device typename Bits<bytes>::packed_two*>(elements + i) = both_of<Element>(x, y);
  }
  float get(long i) const { return static_cast<float>(elements[i]); }
};
// Copies four elements between device memory and threadgroup memory. Arrays in other spaces, and of other types, are
// copied one by one.
template <typename Element>
inline void copy_four(threadgroup Element* to, const device Element* from) {
  using bits = Bits<sizeof(Element)>;
  const typename bits::four x = *reinterpret_cast<const device typename bits::packed_four*>(from);
  *DELTATUNE_ALIGNED(reinterpret_cast<threadgroup typename bits::four*>(to)) = x;
}
template <typename Element>
inline void copy_four(device Element* to, const threadgroup Element* from) {
  using bits = Bits<sizeof(Element)>;
  const typename bits::four x = *DELTATUNE_ALIGNED(reinterpret_cast<const threadgroup typename bits::four*>(from));
  *reinterpret_cast<device typename bits::packed_four*>(to) = x;
}
template <typename To, typename From>
inline void copy_four(threadgroup To* to, From from) {
  DELTATUNE_UNROLL
  for (int i = 0; i < 4; ++i) to[i] = static_cast<To>(static_cast<float>(from[i]));
}

// Loads a lane's two elements of a row of a tile, which are `next` elements apart, or side by side from an even place
// on, where those of two bytes are one load.
template <bool Apart, typename Store>
inline void two_of(Store s, long i, int next, thread float& x, thread float& y) {
  x = s.get(i);
  y = s.get(i + next);
}
template <typename Element>
inline void widen_pair(typename Bits<sizeof(Element)>::two both, thread float& x, thread float& y) {
  using one = typename Bits<sizeof(Element)>::one;
  x = static_cast<float>(as_type<Element>(static_cast<one>(both[0])));
  y = static_cast<float>(as_type<Element>(static_cast<one>(both[1])));
}
template <bool Apart, typename Element>
inline void two_of(Matrix<Element> s, long i, int next, thread float& x, thread float& y) {
  using two = typename Bits<sizeof(Element)>::two;
  if (Apart || sizeof(Element) == 4) {
    x = s.get(i);
    y = s.get(i + next);
  } else {
    widen_pair<Element>(*DELTATUNE_ALIGNED(reinterpret_cast<const threadgroup two*>(s.elements + i)), x, y);
  }
}
template <bool Apart, typename Element>
inline void two_of(Stored<Element> s, long i, int next, thread float& x, thread float& y) {
  using packed_two = typename Bits<sizeof(Element)>::packed_two;
  if (Apart || sizeof(Element) == 4) {
    x = s.get(i);
    y = s.get(i + next);
  } else {
    widen_pair<Element>(*reinterpret_cast<const device packed_two*>(s.elements + i), x, y);
  }
}

template <typename In> struct SavedElement { using type = float; };
template <> struct SavedElement<bfloat16_t> { using type = bfloat16_t; };
template <typename In> using Exact = Matrix<In>;
template <typename In> using Wide = Matrix<float>;
template <typename In> using Saved = Matrix<typename SavedElement<In>::type>;

// The matrix at byte `offset` of shared memory.
template <typename Store>
Store shared_at(threadgroup char* memory, int offset, int) {
  return Store{reinterpret_cast<threadgroup typename Store::element*>(memory + offset)};
}
// Block number `block` of `count` elements in device memory.
template <typename Store>
Stored<typename Store::element> stored_at(const device typename Store::element* p, long block, int count) {
  return Stored<typename Store::element>{const_cast<device typename Store::element*>(p) + block * count};
}

// The row and the first column of a lane's two elements of an 8x8 simdgroup matrix.
inline int fragment_row(int lane) {
  return ((lane >> 2) & 4) + ((lane >> 1) & 3);
}
inline int fragment_column(int lane) {
  return ((lane >> 2) & 2) * 2 + (lane & 1) * 2;
}

// A 16x16 tile of fp32. A lane holds elements e = 0 to 7, two of each of the tile's four 8x8 parts.
struct Tile {
  float x[8];
  float get(int e) const { return x[e]; }
  void set(int e, float value) { x[e] = value; }
};
inline simdgroup_matrix<float, 8, 8> part_of(const thread Tile& t, int part) {
  simdgroup_matrix<float, 8, 8> m;
  m.thread_elements()[0] = t.x[2 * part];
  m.thread_elements()[1] = t.x[2 * part + 1];
  return m;
}

// The row and column in the tile of a lane's element e.
inline int tile_row(int e, int lane) {
  return (e >> 2) * 8 + fragment_row(lane);
}
inline int tile_column(int e, int lane) {
  return ((e >> 1) & 1) * 8 + fragment_column(lane) + (e & 1);
}
// A lane's elements are in two rows: tile_side says in which of the two e is; tile_second is the first of the second
// row.
inline int tile_side(int e) {
  return e >> 2;
}
constant constexpr int tile_second = 4;

// The value of x of the lane with a number that differs in the bits of `mask`.
#define lane_exchange(x, mask) simd_shuffle_xor(x, mask)
// Has a line of 128 bytes of an input brought nearer, where a GPU can be told so.
template <typename P>
inline void prefetch(P) {}

// Loads (take) or stores (give) piece number `at` of an array, which is eight elements.
template <typename P>
inline void take(thread float (&to)[8], P from, long at) {
  DELTATUNE_UNROLL
  for (int i = 0; i < 8; ++i) to[i] = static_cast<float>(from[at * 8 + i]);
}
// Does the same as take, where the array starts on 16 bytes.
template <typename T>
inline void take_aligned(thread float (&to)[8], const device T* from, long at) {
  take(to, from, at);
}
// Whether an address is a multiple of 16, where that matters to take_aligned and to give.
inline bool aligned16(const device void*) {
  return true;
}
template <typename T>
inline void give(device T* to, long at, const thread float (&from)[8]) {
  DELTATUNE_UNROLL
  for (int i = 0; i < 8; ++i) to[at * 8 + i] = static_cast<T>(from[i]);
}

// A piece as it is in memory: `fetch` loads it, from an array that starts on 16 bytes if it is `aligned`, and `widen`
// makes fp32 of it.
template <typename T>
struct Octet {
  T x[8];
};
template <typename T>
inline void fetch(thread Octet<T>& to, const device T* from, long at, bool) {
  DELTATUNE_UNROLL
  for (int i = 0; i < 8; ++i) to.x[i] = from[at * 8 + i];
}
template <typename T>
inline void widen(thread float (&to)[8], const thread Octet<T>& from) {
  DELTATUNE_UNROLL
  for (int i = 0; i < 8; ++i) to[i] = static_cast<float>(from.x[i]);
}

inline float sigmoid_of(float x) {
  return 1.0f / (1.0f + metal::exp(-x));
}

// The sum over the lanes of a group.
inline float lane_sum(float x) {
  return simd_sum(x);
}

// The largest over the lanes that hold the same rows of a tile.
inline float row_max(float x) {
  const float other = simd_shuffle_xor(x, 1);
  x = x > other ? x : other;
  const float far = simd_shuffle_xor(x, 8);
  return x > far ? x : far;
}
// Sums over the lanes that hold the same rows of a tile, and over those that hold the same columns.
inline float row_sum(float x) {
  x += simd_shuffle_xor(x, 1);
  return x + simd_shuffle_xor(x, 8);
}
inline float column_sum(float x) {
  x += simd_shuffle_xor(x, 2);
  x += simd_shuffle_xor(x, 4);
  return x + simd_shuffle_xor(x, 16);
}

// The operands of a product: Precise where rounding shows, Rough where it does not. On Metal both are tiles of fp32.
template <typename In> using Precise = Tile;
template <typename In> using Rough = Tile;

// Makes a left operand of a tile.
inline void hold(thread Tile& a, const thread Tile& t) {
  a = t;
}

// The tile at the start of a view.
template <typename View>
Tile tile_of(View view, int lane) {
  constexpr bool apart = View::is_transposed;
  Tile t;
  DELTATUNE_UNROLL
  for (int e = 0; e < 8; e += 2) {
    const int row = tile_row(e, lane), column = tile_column(e, lane);
    const int first = view.offset + (apart ? column * view.stride + row : row * view.stride + column);
    two_of<apart>(view.store, first, apart ? view.stride : 1, t.x[e], t.x[e + 1]);
  }
  return t;
}
// The left and the right operand of a product, from a view.
template <typename View>
Tile left(View view, int lane) {
  return tile_of(view, lane);
}
template <typename View>
Tile right(View view, int lane) {
  // One by one: pairs of right operands raise the registers of a gate per channel's gradients above those of a lane.
  Tile t;
  DELTATUNE_UNROLL
  for (int e = 0; e < 8; ++e) t.set(e, view.get(tile_row(e, lane), tile_column(e, lane)));
  return t;
}

// Adds the product a b to a tile.
inline void multiply(thread Tile& tile, const thread Tile& a, const thread Tile& b, int) {
  DELTATUNE_UNROLL
  for (int part = 0; part < 4; ++part) {
    simdgroup_matrix<float, 8, 8> sum = part_of(tile, part);
    DELTATUNE_UNROLL
    for (int k = 0; k < 2; ++k)
      simdgroup_multiply_accumulate(sum, part_of(a, part / 2 * 2 + k), part_of(b, 2 * k + part % 2), sum);
    tile.x[2 * part] = sum.thread_elements()[0];
    tile.x[2 * part + 1] = sum.thread_elements()[1];
  }
}

// A lane's share of the sum of products of the elements of two operands: by row of left operands, or of all elements of
// right operands.
inline void add_row_dots(thread float* sums, const thread Tile& a, const thread Tile& b, int) {
  DELTATUNE_UNROLL
  for (int e = 0; e < 8; ++e) sums[tile_side(e)] += a.get(e) * b.get(e);
}
inline float right_dot(const thread Tile& a, const thread Tile& b, int) {
  float sum = 0.0f;
  DELTATUNE_UNROLL
  for (int e = 0; e < 8; ++e) sum += a.get(e) * b.get(e);
  return sum;
}

// The tail of an element of a state is the next two bits of its fp32 value after those that its bf16 holds. As a signed
// number the tail says where within the last place of the bf16 the element was, to within an eighth of that place. A
// lane's tails take two bytes per tile, in the last Tails elements of 16 rows of u or R; no tails are kept if Tails is 0.
// In rows of bf16, which are those of the states themselves, a tail is the first of these bits alone.
template <int Tails, typename Element>
inline threadgroup uchar* tails_in(threadgroup Element* rows, int stride, int lane) {
  return reinterpret_cast<threadgroup uchar*>(rows + ((lane & 15) + 1) * stride - Tails + (lane >> 4) * (Tails / 2));
}
template <int Tails, typename Element>
inline device uchar* tails_in(device Element* rows, int stride, int lane) {
  return reinterpret_cast<device uchar*>(rows + ((lane & 15) + 1) * stride - Tails + (lane >> 4) * (Tails / 2));
}
// Stores the tails of `Count` tiles from tile `from` of a strip on.
template <int Tails, int Count, typename Store>
void keep_tails(Store s, long offset, int stride, const thread Tile* tiles, int from, int lane) {
  constexpr int bits = Store::bytes / 2;
  DELTATUNE_UNROLL
  for (int m = 0; m < (Tails > 0 ? Count : 0); ++m) {
    uint tail = 0;
    DELTATUNE_UNROLL
    for (int e = 0; e < 8; ++e) tail |= ((as_type<uint>(tiles[m].x[e]) & 0xffff) >> (16 - bits)) << (e * bits);
    DELTATUNE_UNROLL
    for (int i = 0; i < bits; ++i)
      tails_in<Tails>(s.elements + offset, stride, lane)[(from + m) * bits + i] = static_cast<uchar>(tail >> (8 * i));
  }
}
// tail_at loads a lane's tails of tile `m` of a strip; with_tail returns element e with its tail added.
template <int Tails, typename Store>
uint tail_at(Store s, int offset, int stride, int m, int lane) {
  constexpr int bits = Store::bytes / 2;
  uint tail = 0;
  DELTATUNE_UNROLL
  for (int i = 0; i < bits; ++i)
    tail |= (uint)tails_in<Tails>(s.elements + offset, stride, lane)[m * bits + i] << (8 * i);
  return tail;
}
template <int Bits>
inline float with_tail(float x, uint tail, int e) {
  const uint place = ((tail >> (e * Bits)) & (2 * Bits - 1)) ^ Bits;
  return as_type<float>(as_type<uint>(x) + (place << (16 - Bits)) + (0x8000 >> Bits) - 0x8000);
}
// A lane's share of the sum of products of two tiles' elements with their tails. An element of half the smallest bf16,
// which is rounded to zero, becomes NaN with its tail; then the sum is taken without tails.
template <int Bits, typename V, typename W>
float kept_dot(V v, W w, uint tail_v, uint tail_w, int lane) {
  const Tile a = tile_of(v, lane), b = tile_of(w, lane);
  float sum = 0.0f;
  DELTATUNE_UNROLL
  for (int e = 0; e < 8; ++e) sum += with_tail<Bits>(a.get(e), tail_v, e) * with_tail<Bits>(b.get(e), tail_w, e);
  return sum == sum ? sum : right_dot(a, b, lane);
}

// Writes a tile to a matrix in shared or device memory from `offset` on, except rows from `rows` and columns from
// `columns` on. Offset, stride and columns are even.
template <bool Even, bool Full, typename Store>
void put_tile(Store s, long offset, int stride, const thread Tile& t, int rows, int columns, int lane) {
  DELTATUNE_UNROLL
  for (int e = 0; e < 8; e += 2) {
    const int row = tile_row(e, lane), column = tile_column(e, lane);
    if (row < rows && column < columns) s.put_two(offset + (long)row * stride + column, t.get(e), t.get(e + 1));
  }
}

// Writes the transpose of a tile to a shared matrix.
template <typename Store>
void put_turned(Store s, int offset, int stride, const thread Tile& t, int lane) {
  DELTATUNE_UNROLL
  for (int e = 0; e < 8; ++e) s.put(offset + tile_column(e, lane) * stride + tile_row(e, lane), t.get(e));
}

// Copies to shared memory are asynchronous on CUDA. On Metal they are done when the call returns, so these do nothing.
struct Arrival {};
inline void arrivals_start(threadgroup char*, int) {}
inline Arrival arrival_at(threadgroup char*, int) {
  return Arrival{};
}
inline void copies_sent(const thread Arrival&, int) {}
inline void copies_wait(const thread Arrival&, int) {}
inline void copies_fence() {}
inline void writes_done() {}
inline void writes_left() {}

// Copies `Count` floats to shared memory.
template <int Count>
void copy_floats(threadgroup float* to, const device float* from, thread Arrival&, int index) {
  if (index < 32)
    for (int i = index; i < Count; i += 32) to[i] = from[i];
}

// Copies `Count` elements of a matrix in device memory, from `offset` on, to shared memory.
template <int Count, int Threads, typename Store, typename From>
void copy_block(Store s, From from, long offset, thread Arrival&, int index) {
  static_assert(Count % 4 == 0, "whole vectors");
  for (int i = index * 4; i < Count; i += Threads * 4) copy_four(s.elements + i, from.elements + offset + i);
}

// Copies rows of an input to shared memory. Rows that are not live and columns from `width` on become zeros.
template <int Rows, int Columns, int Threads, typename Store, typename Source, typename Live>
void copy_rows(Store s, int stride, Source from, int row_stride, int width, Live live, thread Arrival&, int index) {
  static_assert(Columns % 4 == 0, "whole vectors");
  for (int i = index; i < Rows * Columns / 4; i += Threads) {
    const int row = (unsigned)i / (Columns / 4), column = (unsigned)i % (Columns / 4) * 4;
    const bool on = live(row);
    const auto first = from + (long)row * row_stride + column;
    if (on && column + 4 <= width) {
      copy_four(s.elements + row * stride + column, first);
    } else {
      DELTATUNE_UNROLL
      for (int k = 0; k < 4; ++k)
        s.put(row * stride + column + k, on && column + k < width ? static_cast<float>(first[k]) : 0.0f);
    }
  }
}

// Writes a group's row of tiles to a matrix in device memory, and the tails of its `Kept` tiles of the state to the
// rows' padding. The state's first tile has the number `from`.
template <int Count, int Tails, int Kept, typename Store>
void write_tiles_and_tails(Store to, long offset, int stride, const thread Tile* tiles, const thread Tile* state,
                           threadgroup char*, int lane, int from = 0) {
  // An array that a loop indexes at run time is kept in memory on Apple GPUs, all through the kernel.
  DELTATUNE_UNROLL
  for (int m = 0; m < Count; ++m) put_tile<true, true>(to, offset + (from + m) * 16, stride, tiles[m], 16, 16, lane);
  keep_tails<Tails, Kept>(to, offset, stride, state, from, lane);
}

// Writes a left operand to a shared matrix, in the form in which `left` reads it.
template <typename Store>
void keep(Store s, int offset, int stride, const thread Tile& a, int lane) {
  put_tile<true, true>(s, offset, stride, a, 16, 16, lane);
}

// Writes `Count` elements of a shared matrix to a matrix in device memory, from `offset` on. One group calls it.
template <int Count, typename To, typename Store>
void write_strip(To to, long offset, Store s, int lane) {
  for (int i = lane; i < Count; i += 32) to.put(offset + i, s.get(i));
}

// Writes a group's `Count` tiles of a strip of a state, from tile `from` on, to rows of `Stride` elements, if they are
// `there`, and their tails to the rows' padding. Two groups share the strip, whose tiles are in `room` for both.
template <int Stride, int Tails, int Count, typename To, typename Store>
void write_part(To to, long offset, Store, const thread Tile* tiles, int from, int strip, bool there, int lane) {
  if (there) write_tiles_and_tails<Count, Tails, Count>(to, offset, Stride, tiles, tiles, nullptr, lane, from);
  pair_barrier(strip);
}

// Writes rows of a shared matrix to an array of the inputs' type. `Threads` threads call it.
template <int Rows, int Columns, int Threads, typename Store, typename Target>
void write_rows(Store s, int offset, int stride, device Target* to, int row_stride, int rows, int columns, int index) {
  static_assert(Columns % 4 == 0, "whole vectors");
  for (int i = index; i < Rows * Columns / 4; i += Threads) {
    const int row = (unsigned)i / (Columns / 4), column = (unsigned)i % (Columns / 4) * 4;
    device Target* first = to + (long)row * row_stride + column;
    if (row >= rows) continue;
    if (column + 4 <= columns) {
      copy_four(first, s.elements + offset + row * stride + column);
    } else {
      DELTATUNE_UNROLL
      for (int k = 0; k < 4; ++k)
        if (column + k < columns) first[k] = static_cast<Target>(s.get(offset + row * stride + column + k));
    }
  }
}

// Copies a shared matrix to a matrix in device memory of the same form.
template <int Count, int Threads, typename To, typename Store>
void write_block(To to, Store s, int index) {
  static_assert(Count % 4 == 0, "whole vectors");
  for (int i = index * 4; i < Count; i += Threads * 4) copy_four(to.elements + i, s.elements + i);
}

// Bytes of shared memory per row of tiles on its way out: none, since tiles are written directly to device memory.
template <typename In>
inline constexpr int staged(int, int) {
  return 0;
}
