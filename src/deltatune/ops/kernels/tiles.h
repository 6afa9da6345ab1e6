// What bodies share beyond a machine's vocabulary: where a block stands, views of matrices, which rows are there.

struct Place {
  int x, y, z, index, group, lane;
};
// In place of a mask or segments that a call leaves out.
struct Nothing {
  inline int operator[](long) const { return 1; }
};
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
// The matrix as stored, from (row, column) on; and its transpose, from (row, column) of the transpose on.
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

inline constexpr int padded(int n) {
  return (n + 15) / 16 * 16;
}
// Eight elements more a row: 16-byte rows that start in different banks.
inline constexpr int stride_of(int n) {
  return padded(n) + 8;
}
inline constexpr int align16(int n) {
  return (n + 15) / 16 * 16;
}

// Whether a chunk's position lies inside the sequence and the mask.
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

template <bool Condition> struct Choice {
  template <typename X, typename Y> static inline X of(X x, Y) { return x; }
};
template <> struct Choice<false> {
  template <typename X, typename Y> static inline Y of(X, Y y) { return y; }
};
