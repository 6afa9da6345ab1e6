// The parts that all bodies share and that are alike on every machine: the place of a lane, views of matrices, sizes
// with padding, and which positions are live.

// The block's position in the grid (x, y, z), the thread's index in the block, its group of 32 lanes, and its lane
// there.
struct Place {
  int x, y, z, index, group, lane;
};
// The argument of a body in place of a mask or segments that the call does not have.
struct Nothing {
  inline int operator[](long) const { return 1; }
};
// The number of a row, or column, that is there: the last one for those past the end; nobody writes their results. A
// load without a condition can start at any time.
inline int within(int number, int count) { return number < count ? number : count - 1; }
// A number as it is when it has been rounded to the type T.
template <typename T>
inline float rounded_to(float x) {
  return static_cast<float>(static_cast<T>(x));
}
// A matrix in shared or device memory, or its transpose: `offset` is its first element, `stride` the distance of rows.
template <typename Store, bool Transposed>
struct View {
  using store_type = Store;
  static constexpr constant bool is_transposed = Transposed;
  Store store;
  int offset, stride;
  inline float get(int row, int column) const {
    return store.get(offset + (Transposed ? column * stride + row : row * stride + column));
  }
};
// `straight` views a matrix as stored, from (row, column) on; `turned` views its transpose, from (row, column) of that
// on.
template <typename Store>
inline View<Store, false> straight(Store store, int stride, int row, int column) {
  return View<Store, false>{store, row * stride + column, stride};
}
template <typename Store>
inline View<Store, true> turned(Store store, int stride, int row, int column) {
  return View<Store, true>{store, column * stride + row, stride};
}

inline void tile_clear(thread Tile& tile) {
  DELTATUNE_UNROLL
  for (int e = 0; e < 8; ++e) tile.set(e, 0.0f);
}
template <int COUNT>
inline void clear_tiles(thread Tile* tiles) {
  DELTATUNE_UNROLL
  for (int m = 0; m < COUNT; ++m) tile_clear(tiles[m]);
}

// Rounds up to whole tiles of 16.
inline constexpr int padded(int n) {
  return (n + 15) / 16 * 16;
}
// The distance of rows of n elements: eight elements of padding keep rows aligned to 16 bytes and start them in
// different banks of shared memory.
inline constexpr int stride_of(int n) {
  return padded(n) + 8;
}

// Whether position i of a chunk is live: inside the sequence and, with Masked, not masked.
template <bool Masked, typename M>
struct Alive {
  static constexpr constant bool masked = Masked;
  M mask;
  long start;
  int left;
  inline bool operator()(int i) const { return i < left && (!Masked || mask[start + i]); }
};
template <bool Masked, typename M>
inline Alive<Masked, M> alive(M mask, int row, int t0, int length) {
  return Alive<Masked, M>{mask, (long)row * length + t0, length - t0};
}

// Returns one of two values of different types; if constexpr would, but Metal is C++14.
template <bool Condition> struct Choice {
  template <typename X, typename Y> static inline X of(X x, Y) { return x; }
};
template <> struct Choice<false> {
  template <typename X, typename Y> static inline Y of(X, Y y) { return y; }
};
