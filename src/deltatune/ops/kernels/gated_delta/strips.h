// The operands of both scans: strips of rows of the state, and their products with the triangles of a chunk.

// The types of the matrices that the two scans multiply with the state. With one gate per head they are K and Q, and
// the gates scale the products. With a gate per channel they are G K, G Q, and E K for the state at the chunk's end.
// The state is a sum of products with E K alone, so that only there more than bf16 makes results more exact.
template <typename In, bool CHANNEL>
struct ScanTypes {
  using keys = typename Choose<CHANNEL, Saved<In>, Exact<In>>::type;
  using queries = typename Choose<CHANNEL, Saved<In>, Exact<In>>::type;
  using ends = Wide<In>;
};

// A strip is 16 rows of the state. Either one group has all of it (SPLIT 1), or two groups share it (SPLIT 2). Then
// each holds half of DK, computes the positions of half of the chunk's tiles, and reads the other's half in shared
// memory. One group takes the outer tiles and one the inner tiles, so that both have as many tiles of a triangle.
template <int SPLIT, int BLOCKS>
inline constexpr int own_tile(int n, int part) {
  return SPLIT == 1 ? n : n == 0 ? part : BLOCKS - 1 - part;
}

// The shared memory of a strip with SPLIT 2, in which its groups exchange tiles. Forward: the state, then by position
// r, u, beta u and E beta u. Backward: the state, then by position beta w, R and G beta R. Without an erase they exchange
// the state alone.
template <typename In, int C, int DK, bool CHANNEL, bool ERASES>
struct Rooms {
  static constexpr constant int state_elements = 16 * row_of_state<In, DK, CHANNEL, ERASES>();
  static constexpr constant int chunk_elements = 16 * (C + 8);
  static constexpr constant int saved_elements = 16 * row_of_chunk<In, C, DK, CHANNEL, ERASES>();
  static constexpr constant int right = state_elements * Saved<In>::bytes;
  static constexpr constant int u = right + chunk_elements * Wide<In>::bytes;
  static constexpr constant int rated = u + saved_elements * Wide<In>::bytes;
  static constexpr constant int ended = rated + chunk_elements * Wide<In>::bytes;
  static constexpr constant int forward = ended + chunk_elements * Wide<In>::bytes;
  static constexpr constant int rated_w = state_elements * Wide<In>::bytes;
  static constexpr constant int right_gradient = rated_w + chunk_elements * Wide<In>::bytes;
  static constexpr constant int rated_gradient = right_gradient + saved_elements * Wide<In>::bytes;
  static constexpr constant int backward = rated_gradient + chunk_elements * Wide<In>::bytes;
  static constexpr constant int bytes = !ERASES ? rated_w : forward > backward ? forward : backward;
};

// A strip's rows by positions, as left operands of products. A group has the tiles that it computed in registers; it
// reads the others in the strip's shared memory.
template <typename In, int BLOCKS, int SPLIT>
struct Strip {
  static constexpr constant int stride = 16 * BLOCKS + 8;
  Precise<In> own[BLOCKS / SPLIT];
  Wide<In> room;
  inline void put(int n, int tile, thread const Tile& t, int lane) {
    hold(own[n], t);
    if (SPLIT > 1) keep(room, tile * 16, stride, own[n], lane);
  }
  inline Precise<In> get(int j, int lane) const {
    return SPLIT == 1 ? own[SPLIT == 1 ? j : 0] : left(straight(room, stride, 0, j * 16), lane);
  }
};
template <int PART, typename In, int BLOCKS, int SPLIT>
inline Precise<In> strip_tile(thread const Strip<In, BLOCKS, SPLIT>& strip, int j, int lane) {
  DELTATUNE_UNROLL
  for (int n = 0; n < BLOCKS / SPLIT; ++n)
    if (own_tile<SPLIT, BLOCKS>(n, PART) == j) return strip.own[n];
  return strip.get(j, lane);
}
template <typename In, int BLOCKS, int SPLIT>
inline Strip<In, BLOCKS, SPLIT> strip_at(threadgroup char* rooms, int offset) {
  Strip<In, BLOCKS, SPLIT> strip;
  strip.room = shared_at<Wide<In>>(rooms, offset, 16 * (16 * BLOCKS + 8));
  return strip;
}

// Whether the products of group PART with a lower triangle read tile j of the positions (reaches_down, transposed
// triangle) or tile i (reaches_up).
template <int PART, int BLOCKS, int SPLIT>
inline constexpr bool reaches_down(int j) {
  return SPLIT == 1 || j <= own_tile<SPLIT, BLOCKS>(0, PART) || j <= own_tile<SPLIT, BLOCKS>(BLOCKS / SPLIT - 1, PART);
}
template <int PART, int BLOCKS, int SPLIT>
inline constexpr bool reaches_up(int i) {
  return SPLIT == 1 || i >= own_tile<SPLIT, BLOCKS>(0, PART);
}
// Sums of products. Each product waits for the sum before it. With SPLIT 2 there are registers for two sums per tile,
// so odd and even products form two chains of half the length.
template <int SPLIT, int TILES>
struct Chains {
  Tile odd[SPLIT > 1 ? TILES : 1];
  inline void start() { clear_tiles<(SPLIT > 1 ? TILES : 1)>(odd); }
  template <typename A, typename B>
  inline void add(thread Tile* sums, int n, int turn, A a, B b, int lane) {
    if (SPLIT > 1 && turn % 2) multiply(odd[SPLIT > 1 ? n : 0], a, b, lane);
    else multiply(sums[n], a, b, lane);
  }
  inline void finish(thread Tile* sums) const {
    if (SPLIT == 1) return;
    DELTATUNE_UNROLL
    for (int n = 0; n < TILES; ++n) {
      DELTATUNE_UNROLL
      for (int e = 0; e < 8; ++e) sums[n].set(e, sums[n].get(e) + odd[SPLIT > 1 ? n : 0].get(e));
    }
  }
};

// Adds strip times the transpose of a lower triangle to a group's tiles; add_times does so with the triangle itself.
template <int PART, typename In, int BLOCKS, int SPLIT, typename Store>
inline void add_times_turned(thread Tile* sums, thread const Strip<In, BLOCKS, SPLIT>& strip, Store triangle,
                             int lane) {
  constexpr int tiles = BLOCKS / SPLIT;
  Chains<SPLIT, tiles> chains;
  chains.start();
  DELTATUNE_UNROLL
  for (int j = 0; j < BLOCKS; ++j) {
    if (!reaches_down<PART, BLOCKS, SPLIT>(j)) continue;
    const Precise<In> a = strip_tile<PART>(strip, j, lane);
    DELTATUNE_UNROLL
    for (int n = 0; n < tiles; ++n) {
      const int i = own_tile<SPLIT, BLOCKS>(n, PART);
      if (i >= j) chains.add(sums, n, j, a, right(packed_turned(triangle, i, j), lane), lane);
    }
  }
  chains.finish(sums);
}
template <int PART, typename In, int BLOCKS, int SPLIT, typename Store>
inline void add_times(thread Tile* sums, thread const Strip<In, BLOCKS, SPLIT>& strip, Store triangle, int lane) {
  constexpr int tiles = BLOCKS / SPLIT;
  Chains<SPLIT, tiles> chains;
  chains.start();
  DELTATUNE_UNROLL
  for (int i = BLOCKS - 1; i >= 0; --i) {
    if (!reaches_up<PART, BLOCKS, SPLIT>(i)) continue;
    const Precise<In> a = strip_tile<PART>(strip, i, lane);
    DELTATUNE_UNROLL
    for (int n = 0; n < tiles; ++n) {
      const int j = own_tile<SPLIT, BLOCKS>(n, PART);
      if (i >= j) chains.add(sums, n, i, a, right(packed(triangle, i, j), lane), lane);
    }
  }
  chains.finish(sums);
}
// Does add_times_turned with `rated`, and adds `ended` times columns of keys to the state. The products of the two fill
// each other's waits.
template <int PART, typename In, int BLOCKS, int SPLIT, int STATE_TILES, typename Store, typename Keys>
inline void add_output_and_state(thread Tile* sums, thread Tile* state, thread const Strip<In, BLOCKS, SPLIT>& rated,
                                 thread const Strip<In, BLOCKS, SPLIT>& ended, Store triangle, Keys keys, int stride,
                                 int lane) {
  constexpr int tiles = BLOCKS / SPLIT;
  Chains<SPLIT, tiles> chains;
  chains.start();
  DELTATUNE_UNROLL
  for (int j = 0; j < BLOCKS; ++j) {
    if (reaches_down<PART, BLOCKS, SPLIT>(j)) {
      const Precise<In> a = strip_tile<PART>(rated, j, lane);
      DELTATUNE_UNROLL
      for (int n = 0; n < tiles; ++n) {
        const int i = own_tile<SPLIT, BLOCKS>(n, PART);
        if (i >= j) chains.add(sums, n, j, a, right(packed_turned(triangle, i, j), lane), lane);
      }
    }
    const Precise<In> e = strip_tile<PART>(ended, j, lane);
    DELTATUNE_UNROLL
    for (int m = 0; m < STATE_TILES; ++m)
      multiply(state[m], e, right(straight(keys, stride, j * 16, (PART * STATE_TILES + m) * 16), lane), lane);
  }
  chains.finish(sums);
}
// Does add_times for rows that are all in registers, as rough operands.
template <int PART, typename In, int BLOCKS, int SPLIT, typename Store>
inline void add_rough_times(thread Tile* sums, thread const Rough<In>* rows, Store triangle, int lane) {
  DELTATUNE_UNROLL
  for (int i = 0; i < BLOCKS; ++i) {
    DELTATUNE_UNROLL
    for (int n = 0; n < BLOCKS / SPLIT; ++n) {
      const int j = own_tile<SPLIT, BLOCKS>(n, PART);
      if (i >= j) multiply(sums[n], rows[i], right(packed(triangle, i, j), lane), lane);
    }
  }
}

template <typename In, int BLOCKS, int SPLIT>
inline Precise<In> operand_at(thread const Strip<In, BLOCKS, SPLIT>& strip, int i, int lane) {
  return strip.get(i, lane);
}
template <typename Operand>
inline Operand operand_at(thread const Operand* rows, int i, int) {
  return rows[i];
}
// Adds rows by positions times columns of a matrix to a tile. The products are summed before they are added, so that
// the tile, which may be much larger than they are, is rounded once.
template <int BLOCKS, typename Strips, typename Store>
inline void add_separate_sum(thread Tile& tile, thread const Strips& rows, Store matrix, int stride, int column,
                             int lane) {
  Tile sum;
  tile_clear(sum);
  DELTATUNE_UNROLL
  for (int i = 0; i < BLOCKS; ++i)
    multiply(sum, operand_at(rows, i, lane), right(straight(matrix, stride, i * 16, column), lane), lane);
  tile_add(tile, sum);
}
