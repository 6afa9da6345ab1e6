// The gated delta rule with one gate per head: its formulas, and the parts that its four kernels share. They are in
// prepare.h and scan.h for the forward pass, reverse.h and gradients.h for the backward pass. The text is one for every
// machine: metal.h, cuda.h and the tests' host.h define the words that differ between machines.
//
// A chunk is C positions of one batch row and value head; i and j are positions in it. S [DV, DK] is the state before
// it.
//   G_i  is the product of the gates of positions 0..i, and E_i that of positions i+1..C-1.
//   D_ij is the product of the gates of positions j+1..i.
//   P_ij = D_ij <q_i, k_j> for i >= j, and N_ij = D_ij <k_i, k_j> for i > j; both are lower triangular [C, C].
//   r = V - G K S^T,   u = r - N (beta u),   Y = G Q S^T + P (beta u),   S_next = G_last S + (E beta u)^T K.
// u is defined before beta scales it, so the gradient of beta needs no division. Z = N (I + beta N)^-1, strictly lower
// triangular, gives u = r - Z (beta r). Backward, w = P^T dY + E K dS^T gives R = w - Z^T (beta w) and dr = beta R.
// A product of gates contains the gates of its own span only, so a gate of 0 (a document's start, log_g = -inf) is
// exact.
//
// A block computes with GROUPS groups of 32 lanes. A group holds 16x16 tiles of fp32; its lanes share their elements.
// Template values: In is the dtype of q, k and v; C positions per chunk; DK and DV head sizes; HK and HV numbers of key
// and value heads; SLICE rows of the state per block; STAGES buffers per pipeline; UNSTAGED, MASKED and SEGMENTED as in
// ops/gated_delta/tiling.py.

// A packed lower triangle of 16x16 tiles: tile row i has i + 1 tiles, and eight elements of padding per row.
inline constexpr int packed_offset(int i) {
  return 128 * i * (i + 2);
}
inline constexpr int packed_stride(int i) {
  return 16 * i + 24;
}
template <typename Store>
inline View<Store, false> packed(Store store, int i, int j) {
  return View<Store, false>{store, packed_offset(i) + 16 * j, packed_stride(i)};
}
template <typename Store>
inline View<Store, true> packed_turned(Store store, int i, int j) {
  return View<Store, true>{store, packed_offset(i) + 16 * j, packed_stride(i)};
}

inline void tile_scale(thread Tile& tile, float factor) {
  DELTATUNE_UNROLL
  for (int e = 0; e < 8; ++e) tile.set(e, factor * tile.get(e));
}
inline void tile_add(thread Tile& tile, const thread Tile& other) {
  DELTATUNE_UNROLL
  for (int e = 0; e < 8; ++e) tile.set(e, tile.get(e) + other.get(e));
}
// Multiplies each column by its own factor.
inline void tile_scale_columns(thread Tile& tile, threadgroup const float* factors, int lane) {
  DELTATUNE_UNROLL
  for (int e = 0; e < 8; ++e) tile.set(e, factors[tile_column(e, lane)] * tile.get(e));
}

// With UNSTAGED (on Metal, where a block has little shared memory) matrices as wide as DK are read from device memory.
// UnstagedRows reads rows of an input by the index that an element would have in a shared matrix. It gives zeros past
// DK and in rows that are not live.
template <int DK, typename P, typename Live>
struct UnstagedRows {
  P from;
  long first;
  int row_stride;
  Live live;
  inline float get(int i) const {
    const int row = (unsigned)i / stride_of(DK), column = (unsigned)i % stride_of(DK);
    return column < DK && live(row) ? static_cast<float>(from[first + (long)row * row_stride + column]) : 0.0f;
  }
};
template <int DK, typename P, typename Live>
inline UnstagedRows<DK, P, Live> unstaged_rows(P from, long first, int row_stride, Live live) {
  return UnstagedRows<DK, P, Live>{from, first, row_stride, live};
}
// Bytes of C rows as wide as a key in shared memory.
template <bool UNSTAGED, typename Store, int C, int DK>
inline constexpr int room_of() {
  return UNSTAGED ? 0 : C * stride_of(DK) * Store::bytes;
}

// Of each element of a state or its gradient that is saved in bf16, with one gate per head, two further bits (the tail)
// are saved in the padding at the end of u's and of R's rows. Where nothing is erased there are no such rows, and one bit
// is saved in the padding of the state's own. Only the inner product of the two reads them. This is how many elements of
// a row hold tails.
template <typename In, int DK, bool CHANNEL>
inline constexpr int tails_of() {
  return CHANNEL || Saved<In>::bytes != 2 ? 0 : (padded(DK) + 127) / 128 * 8;
}
// Elements between rows of u or of R, and between those of a state or its gradient. Eight elements of padding, or more,
// spread rows over the banks of shared memory; so do 24 or 40, but not 16 or 32.
template <typename In, int C, int DK, bool CHANNEL, bool ERASES>
inline constexpr int row_of_chunk() {
  return ERASES ? C + (tails_of<In, DK, CHANNEL>() > 8 ? tails_of<In, DK, CHANNEL>() : 8) : 0;
}
template <typename In, int DK, bool CHANNEL, bool ERASES>
inline constexpr int row_of_state() {
  return ERASES || tails_of<In, DK, CHANNEL>() <= 8 ? stride_of(DK)
                                                    : padded(DK) + tails_of<In, DK, CHANNEL>() / 16 * 16 + 8;
}

template <bool Condition, typename X, typename Y> struct Choose { using type = X; };
template <typename X, typename Y> struct Choose<false, X, Y> { using type = Y; };
template <bool Value> struct Flag {};

// The gate of position i of a chunk: exp(log_g), 1 where the step is not live, 0 where a document starts.
template <bool Segmented, typename Live, typename L, typename Z>
inline float gate_of(int i, Live live, L log_g, Z segments, int row, int head, int heads, int t0, int length) {
  const int t = t0 + i;
  if (t >= length) return 1.0f;
  const long at = (long)row * length + t;
  if (Segmented && t > 0 && segments[at] != segments[at - 1]) return 0.0f;
  return live(i) ? exp_of_gate(static_cast<float>(log_g[at * heads + head])) : 1.0f;
}

// D in shared memory: a full table for each tile on the diagonal. Between different tiles it is the product of
// prefix_i, the gates of the tiles between them, and suffix_j.
template <int C>
struct Decay {
  static constexpr constant int floats = C * 17 + 2 * C + C / 16;
  threadgroup float* diagonal;
  threadgroup float* prefix;
  threadgroup float* suffix;
  threadgroup float* total;
  // The product of the gates of the tiles between two tiles.
  inline float between(int row_tile, int column_tile) const {
    float product = 1.0f;
    for (int b = column_tile + 1; b < row_tile; ++b) product *= total[b];
    return product;
  }
  inline float at(bool same_tile, int i, int j, float middle) const {
    if (same_tile) return i >= j ? diagonal[i * 17 + (j & 15)] : 0.0f;
    return prefix[i] * middle * suffix[j];
  }
  inline float before(int i) const { return between(i / 16, -1) * prefix[i]; }
  inline float after(int j) const { return suffix[j] * between(C / 16, j / 16); }
};
template <int C>
inline Decay<C> decay_at(threadgroup float* p) {
  return Decay<C>{p, p + C * 17, p + C * 18, p + C * 19};
}
// Fills the tables from the gates of a chunk: thread `index` < C writes a column of a diagonal tile. Barriers are the
// caller's.
template <int C>
inline void fill_decay(Decay<C> d, threadgroup const float* gate, int index) {
  if (index < C) {
    const int first = index / 16 * 16, column = index % 16;
    float own[16];
    DELTATUNE_UNROLL
    for (int i = 0; i < 16; ++i) own[i] = gate[first + i];
    float product = 1.0f;
    DELTATUNE_UNROLL
    for (int i = 0; i < 16; ++i) {
      if (i > column) product *= own[i];
      if (i >= column) d.diagonal[(first + i) * 17 + column] = product;
      if (column == 0) d.prefix[first + i] = own[0] * product;
    }
    d.suffix[index] = product;
    if (column == 0) d.total[first / 16] = own[0] * product;
  }
}
