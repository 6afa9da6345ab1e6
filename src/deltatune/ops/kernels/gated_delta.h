// The gated delta rule with one gate per head: four kernels (prepare and scan forward, reverse and gradients backward),
// one text for every machine. metal.h, cuda.h and the tests' host.h define the words that differ between machines.
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
// A block computes with GROUPS groups of 32 lanes. A group holds 16x16 tiles of fp32, whose elements its lanes share.
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

// The number of further bits (the tail) saved of each element of a state or its gradient that is saved in bf16, with
// one gate per head. Only the inner product of the two reads them. They are stored in the padding of u and of R.
template <typename In, int DK, bool CHANNEL>
inline constexpr int tail_of() {
  return CHANNEL || Saved<In>::bytes != 2 ? 0 : padded(DK) <= 128 ? 2 : 1;
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
  return live(i) ? DELTATUNE_EXP(static_cast<float>(log_g[at * heads + head])) : 1.0f;
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

template <typename In, int C, int DK, bool UNSTAGED>
struct PrepareMemory {
  static constexpr constant int k = 0;
  static constexpr constant int q = k + room_of<UNSTAGED, Exact<In>, C, DK>();
  static constexpr constant int q_end = q + room_of<UNSTAGED, Exact<In>, C, DK>();
  // Z and the scratch matrix take the memory of Q and K once N and P are computed.
  static constexpr constant int z = 0;
  static constexpr constant int scratch = z + packed_offset(C / 16) * Wide<In>::bytes;
  static constexpr constant int scratch_end = scratch + C * (C + 8) * Wide<In>::bytes;
  static constexpr constant int n = q_end > scratch_end ? q_end : scratch_end;
  static constexpr constant int blocks = n + C * (C + 8) * Wide<In>::bytes;
  static constexpr constant int decay = blocks + C * 17 * 4;
  static constexpr constant int gate = decay + align16(Decay<C>::floats * 4);
  static constexpr constant int rate = gate + C * 4;
  static constexpr constant int arrivals = rate + C * 4;
  static constexpr constant int bytes = arrivals + 16;
};

// Computes diagonal tile b of Z by forward substitution. Each of 16 lanes computes one column.
template <typename Store>
inline void solve_diagonal(Store z, threadgroup const float* block, threadgroup const float* rate, int b, int lane) {
  if (lane < 16) {
    float x[16];
    DELTATUNE_UNROLL
    for (int i = 0; i < 16; ++i) {
      float sum = i > lane ? block[i * 17 + lane] : 0.0f, other = 0.0f;
      DELTATUNE_UNROLL
      for (int j = 0; j < i; ++j) {
        if (j % 2) other += block[i * 17 + j] * x[j];
        else sum -= block[i * 17 + j] * x[j];
      }
      const float value = sum - other;
      z.put(packed_offset(b) + i * packed_stride(b) + b * 16 + lane, value);
      x[i] = rate[i] * value;
    }
  }
}

// Computes Z from N, whose diagonal tiles are in `diagonal` in fp32. `scratch` has the size of N. The caller puts a
// barrier before the call; the function ends with one.
template <int C, int GROUPS, typename Z, typename N>
inline void solve_triangle(Place at, Z z, N scratch, N n, threadgroup const float* diagonal,
                           threadgroup const float* rate) {
  constexpr int blocks = C / 16, square = C + 8;
  for (int b = at.group; b < blocks; b += GROUPS)
    solve_diagonal(z, diagonal + b * 16 * 17, rate + b * 16, b, at.lane);
  barrier();
  // Merges pairs of blocks of 1, 2, ... tiles per side. With Y = N - N beta Z_upper for the block between the two, Z is
  // Y - Z_lower beta Y there. Each group computes tiles of its own.
  DELTATUNE_UNROLL
  for (int side = 1; side < blocks; side *= 2) {
    constexpr int most = (blocks * blocks / 4 + GROUPS - 1) / GROUPS;
    Tile y[most > 0 ? most : 1];
    DELTATUNE_UNROLL
    for (int m = 0; m < most; ++m) {
      const int index = at.group + m * GROUPS;
      if (index >= blocks / 2 * side) continue;
      const int top = index / (side * side) * 2 * side;
      const int row = top + side + index / side % side, column = top + index % side;
      Tile sum;
      tile_clear(sum);
      for (int c = column; c < top + side; ++c) {
        Tile zt = tile_of(packed(z, c, column), at.lane);
        DELTATUNE_UNROLL
        for (int e = 0; e < 8; ++e) zt.set(e, rate[c * 16 + tile_row(e, at.lane)] * zt.get(e));
        put_tile<true, true>(scratch, column * 16 * square + row * 16, square, zt, 16, 16, at.lane);
        group_barrier();
        multiply(sum, left(straight(n, square, row * 16, c * 16), at.lane),
                 right(straight(scratch, square, column * 16, row * 16), at.lane), at.lane);
        group_barrier();
      }
      y[m] = tile_of(straight(n, square, row * 16, column * 16), at.lane);
      DELTATUNE_UNROLL
      for (int e = 0; e < 8; ++e) {
        y[m].set(e, y[m].get(e) - sum.get(e));
        sum.set(e, rate[row * 16 + tile_row(e, at.lane)] * y[m].get(e));
      }
      put_tile<true, true>(scratch, row * 16 * square + column * 16, square, sum, 16, 16, at.lane);
    }
    barrier();
    DELTATUNE_UNROLL
    for (int m = 0; m < most; ++m) {
      const int index = at.group + m * GROUPS;
      if (index >= blocks / 2 * side) continue;
      const int top = index / (side * side) * 2 * side;
      const int row = top + side + index / side % side, column = top + index % side;
      Tile sum;
      tile_clear(sum);
      for (int c = top + side; c <= row; ++c)
        multiply(sum, left(packed(z, row, c), at.lane),
                 right(straight(scratch, square, c * 16, column * 16), at.lane), at.lane);
      DELTATUNE_UNROLL
      for (int e = 0; e < 8; ++e) y[m].set(e, y[m].get(e) - sum.get(e));
      put_tile<true, true>(z, packed_offset(row) + column * 16, packed_stride(row), y[m], 16, 16, at.lane);
    }
    barrier();
  }
}

// Computes what the scans need of each chunk and what does not depend on its state. Each block does one chunk; the grid
// is (chunks, HV, B).
// Inputs: q, k [B,T,HK,DK]; log_g, beta [B,T,HV]; mask [B,T] and segments [B,T], or Nothing.
// Outputs, for each of [B,HV,chunks]: solve, which is Z, and scores, which is P, both packed triangles; factors [3,C],
// which are G, E and beta (0 where a step is not live).
// The threads copy Q and K to shared memory, and one thread per position computes its gate. Each group then takes pairs
// of tiles of P and N, and solve_triangle computes Z.
template <typename In, int C, int DK, int HK, int HV, int GROUPS, bool UNSTAGED, bool MASKED, bool SEGMENTED,
          typename PQ, typename PK, typename PL, typename PB, typename PM, typename PZ>
inline void gated_delta_prepare(Place at, threadgroup char* memory, int length, PQ q, PK k, PL log_g, PB beta, PM mask,
                                PZ segments, GLOBAL float* solve, GLOBAL float* scores,
                                GLOBAL float* factors) {
  using Memory = PrepareMemory<In, C, DK, UNSTAGED>;
  constexpr int threads = GROUPS * 32, stride = stride_of(DK), square = C + 8, blocks = C / 16, columns = padded(DK);
  constexpr int pairs = blocks * (blocks + 1) / 2, triangle = packed_offset(blocks);
  const int chunks = (length + C - 1) / C, t0 = at.x * C;
  const long chunk = ((long)at.z * HV + at.y) * chunks + at.x;
  const Exact<In> staged_k = shared_at<Exact<In>>(memory, Memory::k, C * stride);
  const Exact<In> staged_q = shared_at<Exact<In>>(memory, Memory::q, C * stride);
  const Wide<In> z = shared_at<Wide<In>>(memory, Memory::z, triangle);
  const Wide<In> scratch = shared_at<Wide<In>>(memory, Memory::scratch, C * square);
  const Wide<In> n = shared_at<Wide<In>>(memory, Memory::n, C * square);
  threadgroup float* diagonal = reinterpret_cast<threadgroup float*>(memory + Memory::blocks);
  const Decay<C> decay = decay_at<C>(reinterpret_cast<threadgroup float*>(memory + Memory::decay));
  threadgroup float* gate = reinterpret_cast<threadgroup float*>(memory + Memory::gate);
  threadgroup float* rate = reinterpret_cast<threadgroup float*>(memory + Memory::rate);
  const auto live = alive<MASKED>(mask, at.z, t0, length);

  const long from = (((long)at.z * length + t0) * HK + at.y / (HV / HK)) * DK;
  const auto keys = Choice<UNSTAGED>::of(unstaged_rows<DK>(k, from, HK * DK, live), staged_k);
  const auto queries = Choice<UNSTAGED>::of(unstaged_rows<DK>(q, from, HK * DK, live), staged_q);
  arrivals_start(memory + Memory::arrivals, at.index);
  Arrival arrival = arrival_at(memory + Memory::arrivals, 0);
  if (!UNSTAGED) {
    copy_rows<C, columns, threads>(staged_k, stride, k + from, HK * DK, DK, live, arrival, at.index);
    copy_rows<C, columns, threads>(staged_q, stride, q + from, HK * DK, DK, live, arrival, at.index);
  }
  copies_sent(arrival, at.index);
  if (at.index < C) {
    gate[at.index] = gate_of<SEGMENTED>(at.index, live, log_g, segments, at.z, at.y, HV, t0, length);
    const bool on = live(at.index);
    rate[at.index] =
        on ? static_cast<float>(beta[((long)at.z * length + t0 + (on ? at.index : 0)) * HV + at.y]) : 0.0f;
  }
  barrier();
  fill_decay<C>(decay, gate, at.index);
  copies_wait(arrival, 0);
  barrier();
  if (at.index < C) {
    factors[chunk * 3 * C + at.index] = decay.before(at.index);
    factors[chunk * 3 * C + C + at.index] = decay.after(at.index);
    factors[chunk * 3 * C + 2 * C + at.index] = rate[at.index];
  }
  for (int pair = at.group; pair < pairs; pair += GROUPS) {
    int row = 0;
    while ((row + 1) * (row + 2) / 2 <= pair) ++row;
    const int column = pair - row * (row + 1) / 2;
    Tile qk, kk;
    tile_clear(qk);
    tile_clear(kk);
    DELTATUNE_UNROLL
    for (int c = 0; c < columns; c += 16) {
      const auto b = right(turned(keys, stride, c, column * 16), at.lane);
      multiply(qk, left(straight(queries, stride, row * 16, c), at.lane), b, at.lane);
      multiply(kk, left(straight(keys, stride, row * 16, c), at.lane), b, at.lane);
    }
    const float middle = decay.between(row, column);
    DELTATUNE_UNROLL
    for (int e = 0; e < 8; ++e) {
      const int i = row * 16 + tile_row(e, at.lane), j = column * 16 + tile_column(e, at.lane);
      const float d = decay.at(row == column, i, j, middle);
      qk.set(e, d * qk.get(e));
      kk.set(e, i > j ? d * kk.get(e) : 0.0f);
      if (row == column) diagonal[i * 17 + (j & 15)] = kk.get(e);
    }
    put_tile<true, true>(stored_at<Wide<In>>(scores, chunk, triangle), packed_offset(row) + column * 16,
                         packed_stride(row), qk, 16, 16, at.lane);
    if (row != column) put_tile<true, true>(n, row * 16 * square + column * 16, square, kk, 16, 16, at.lane);
  }
  barrier();
  solve_triangle<C, GROUPS>(at, z, scratch, n, diagonal, rate);
  write_block<triangle, threads>(stored_at<Wide<In>>(solve, chunk, triangle), z, at.index);
}

// The types of the matrices that the two scans multiply with the state. With one gate per head they are K and Q, and
// the gates scale the products. With a gate per channel they are G K, G Q, and E K for the state at the chunk's end.
template <typename In, bool CHANNEL, bool REVERSE>
struct ScanTypes {
  using keys = typename Choose<CHANNEL, typename Choose<REVERSE, Wide<In>, Upper<In>>::type, Exact<In>>::type;
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
// r, u, beta u and E beta u. Backward: the state, then by position beta w, R and G beta R.
template <typename In, int C, int DK>
struct Rooms {
  static constexpr constant int state_elements = 16 * stride_of(DK), chunk_elements = 16 * (C + 8);
  static constexpr constant int right = state_elements * Saved<In>::bytes;
  static constexpr constant int u = right + chunk_elements * Wide<In>::bytes;
  static constexpr constant int rated = u + chunk_elements * Wide<In>::bytes;
  static constexpr constant int ended = rated + chunk_elements * Wide<In>::bytes;
  static constexpr constant int forward = ended + chunk_elements * Wide<In>::bytes;
  static constexpr constant int rated_w = state_elements * Wide<In>::bytes;
  static constexpr constant int right_gradient = rated_w + chunk_elements * Wide<In>::bytes;
  static constexpr constant int rated_gradient = right_gradient + chunk_elements * Wide<In>::bytes;
  static constexpr constant int backward = rated_gradient + chunk_elements * Wide<In>::bytes;
  static constexpr constant int bytes = forward > backward ? forward : backward;
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
  inline void start() {
    DELTATUNE_UNROLL
    for (int n = 0; n < (SPLIT > 1 ? TILES : 1); ++n) tile_clear(odd[n]);
  }
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

// The shared memory of the two scans: STAGES times what they hold of a chunk, then the strips.
template <typename In, int C, int DK, int SLICE, int STAGES, int SPLIT, bool UNSTAGED, bool CHANNEL = false,
          bool REVERSE = false>
struct ScanMemory {
  using Types = ScanTypes<In, CHANNEL, REVERSE>;
  static constexpr constant int k = 0;
  static constexpr constant int q = k + room_of<UNSTAGED, typename Types::keys, C, DK>();
  static constexpr constant int ends = q + room_of<UNSTAGED, typename Types::queries, C, DK>();
  static constexpr constant int solve = ends + (CHANNEL ? room_of<UNSTAGED, typename Types::ends, C, DK>() : 0);
  static constexpr constant int scores = solve + packed_offset(C / 16) * Wide<In>::bytes;
  static constexpr constant int values = scores + packed_offset(C / 16) * Wide<In>::bytes;
  static constexpr constant int factors = values + C * (SLICE + 8) * Exact<In>::bytes;
  static constexpr constant int stage = factors + (CHANNEL ? C + padded(DK) : 3 * C) * 4;
  // A strip's tiles on their way out, or on their way to the other group.
  static constexpr constant int out = SPLIT > 1 ? Rooms<In, C, DK>::bytes : 16 * staged<In>(stride_of(DK), C + 8);
  static constexpr constant int staging = STAGES * stage;
  static constexpr constant int arrivals = staging + SLICE / 16 * out;
  static constexpr constant int bytes = arrivals + 16;
};

// Copies the K and Q of a chunk to shared memory. With one gate per head they are rows of the inputs; with a gate per
// channel (the first flag; the second marks the reverse scan) they are blocks that the prepare kernel wrote.
template <typename In, int C, int DK, int HK, int HV, int GROUPS, typename Memory, typename PQ, typename PK,
          typename PE, typename Live>
inline void load_keys(Flag<false>, Flag<false>, Place at, threadgroup char* memory, thread Arrival& arrival, PQ q, PK k,
                      PE, Live live, long, long row) {
  constexpr int threads = GROUPS * 32, stride = stride_of(DK), columns = padded(DK);
  const long from = (row * HK + at.y / (HV / HK)) * DK;
  copy_rows<C, columns, threads>(shared_at<Exact<In>>(memory, Memory::k, C * stride), stride, k + from, HK * DK, DK,
                                 live, arrival, at.index);
  copy_rows<C, columns, threads>(shared_at<Exact<In>>(memory, Memory::q, C * stride), stride, q + from, HK * DK, DK,
                                 live, arrival, at.index);
}
template <typename In, int C, int DK, int HK, int HV, int GROUPS, typename Memory, typename PQ, typename PK,
          typename PE, typename Live>
inline void load_keys(Flag<true>, Flag<false>, Place at, threadgroup char* memory, thread Arrival& arrival, PQ q, PK k,
                      PE ends, Live, long chunk, long) {
  constexpr int threads = GROUPS * 32, count = C * stride_of(DK);
  copy_block<count, threads>(shared_at<Upper<In>>(memory, Memory::k, count), upper_at<In>(k, chunk, count), 0, arrival,
                             at.index);
  copy_block<count, threads>(shared_at<Saved<In>>(memory, Memory::q, count), stored_at<Saved<In>>(q, chunk, count), 0,
                             arrival, at.index);
  copy_block<count, threads>(shared_at<Wide<In>>(memory, Memory::ends, count), stored_at<Wide<In>>(ends, chunk, count),
                             0, arrival, at.index);
}
template <typename In, int C, int DK, int HK, int HV, int GROUPS, typename Memory, typename PQ, typename PK,
          typename PE, typename Live>
inline void load_keys(Flag<true>, Flag<true>, Place at, threadgroup char* memory, thread Arrival& arrival, PQ q, PK k,
                      PE ends, Live, long chunk, long) {
  constexpr int threads = GROUPS * 32, count = C * stride_of(DK);
  copy_block<count, threads>(shared_at<Wide<In>>(memory, Memory::k, count), stored_at<Wide<In>>(k, chunk, count), 0,
                             arrival, at.index);
  copy_block<count, threads>(shared_at<Saved<In>>(memory, Memory::q, count), stored_at<Saved<In>>(q, chunk, count), 0,
                             arrival, at.index);
  copy_block<count, threads>(shared_at<Wide<In>>(memory, Memory::ends, count), stored_at<Wide<In>>(ends, chunk, count),
                             0, arrival, at.index);
}

// Returns the same matrices where they are in device memory, for UNSTAGED.
template <typename Store, int C, int DK, typename P, typename Live>
inline UnstagedRows<DK, P, Live> unstaged_keys(Flag<false>, P from, long, long first, int row_stride, Live live) {
  return unstaged_rows<DK>(from, first, row_stride, live);
}
template <typename Store, int C, int DK, typename P, typename Live>
inline auto unstaged_keys(Flag<true>, P from, long chunk, long, int, Live)
    -> decltype(stored_at<Store>(from, chunk, C * stride_of(DK))) {
  return stored_at<Store>(from, chunk, C * stride_of(DK));
}

template <typename In, int C, int DK, int DV, int SLICE, int HK, int HV, int GROUPS, bool UNSTAGED, bool MASKED,
          bool CHANNEL, bool REVERSE, typename Memory, typename PQ, typename PK, typename PE, typename PV, typename PM,
              typename PF>
inline void load_chunk(Place at, threadgroup char* memory, thread Arrival& arrival, PQ q, PK k, PE ends, PV values,
                       PM mask, PF solve, PF scores, PF factors, int length, int chunks, int n) {
  constexpr int threads = GROUPS * 32, triangle = packed_offset(C / 16);
  constexpr int numbers = CHANNEL ? C + padded(DK) : 3 * C;
  const int t0 = n * C, first = at.x * SLICE;
  const long chunk = ((long)at.z * HV + at.y) * chunks + n, row = (long)at.z * length + t0;
  const auto live = alive<MASKED>(mask, at.z, t0, length);
  copy_block<triangle, threads>(shared_at<Wide<In>>(memory, Memory::solve, triangle),
                                stored_at<Wide<In>>(solve, chunk, triangle), 0, arrival, at.index);
  copy_block<triangle, threads>(shared_at<Wide<In>>(memory, Memory::scores, triangle),
                                stored_at<Wide<In>>(scores, chunk, triangle), 0, arrival, at.index);
  copy_floats<numbers>(reinterpret_cast<threadgroup float*>(memory + Memory::factors), factors + chunk * numbers,
                       arrival, at.index);
  if (!UNSTAGED)
    load_keys<In, C, DK, HK, HV, GROUPS, Memory>(Flag<CHANNEL>{}, Flag<CHANNEL && REVERSE>{}, at, memory, arrival, q, k,
                                                 ends, live, chunk, row);
  copy_rows<C, SLICE, threads>(shared_at<Exact<In>>(memory, Memory::values, C * (SLICE + 8)), SLICE + 8,
                               values + (row * HV + at.y) * DV + first, HV * DV, DV - first, live, arrival, at.index);
  copies_sent(arrival, at.index);
}

// Loads a group's part of a strip of a state, in fp32: STATE_TILES tiles from tile column `from_tile` on. They are
// zeros unless the state is `there`.
template <int DK, int DV, int STATE_TILES, typename P>
inline void load_state(thread Tile* state, P from, bool there, long head, int first, int from_tile, int lane) {
  DELTATUNE_UNROLL
  for (int m = 0; m < STATE_TILES; ++m) {
    DELTATUNE_UNROLL
    for (int e = 0; e < 8; ++e) {
      const int row = first + tile_row(e, lane), column = (from_tile + m) * 16 + tile_column(e, lane);
      state[m].set(e,
                   there && row < DV && column < DK ? static_cast<float>(from[(head * DV + row) * DK + column]) : 0.0f);
    }
  }
}
template <int DK, int DV, int STATE_TILES>
inline void store_state(thread const Tile* state, GLOBAL float* to, long head, int first, int from_tile, int lane) {
  DELTATUNE_UNROLL
  for (int m = 0; m < STATE_TILES; ++m) {
    DELTATUNE_UNROLL
    for (int e = 0; e < 8; ++e) {
      const int row = first + tile_row(e, lane), column = (from_tile + m) * 16 + tile_column(e, lane);
      if (row < DV && column < DK) to[(head * DV + row) * DK + column] = state[m].get(e);
    }
  }
}

// Multiplies a tile of the state by the product of the chunk's gates: one number, or one per channel.
template <bool CHANNEL, int C>
inline void scale_state(thread Tile& tile, threadgroup const float* factors, int m, int lane) {
  if (CHANNEL) tile_scale_columns(tile, factors + C + m * 16, lane);
  else tile_scale(tile, factors[C - 1]);
}

// Writes a strip's columns of the positions that a group computed to rows of y or dv. `own` is the strip's
// first column in s.
template <int TILES, int SPLIT, int BLOCKS, int DV, typename Store, typename Target>
inline void write_tiles_of(Store s, int own, int value_stride, int part, Target to, long row, int heads, int first,
                           int length, int lane) {
  DELTATUNE_UNROLL
  for (int j = 0; j < TILES; ++j) {
    const int i = own_tile<SPLIT, BLOCKS>(j, part) * 16;
    write_rows<16, 16, 32>(s, i * value_stride + own, value_stride, to + (row + (long)i * heads) * DV + first,
                           heads * DV, length - i, DV - first, lane);
  }
}

// The forward scan: goes through the chunks in order and computes y, u and the states, from the outputs of the prepare
// kernel. Each block does SLICE rows of one state; the grid is (slices of DV, HV, B).
// Inputs: q, k [B,T,HK,DK] (with CHANNEL, the scaled keys and queries of each chunk, and `ends`); v [B,T,HV,DV]; mask;
// initial [B,HV,DV,DK], read if has_initial; solve, scores, factors.
// Outputs: y [B,T,HV,DV]; for each of [B,HV,chunks], states [DV,DK] before the chunk and u [DV,C], both with padded
// rows; last [B,HV,DV,DK].
// A strip's state stays in the registers of its one or two groups, and strips do not depend on one another. Further
// groups, if there are any, copy the next chunk to shared memory while the others compute.
template <typename In, int C, int DK, int DV, int SLICE, int HK, int HV, int GROUPS, int STAGES, int SPLIT,
          bool UNSTAGED, bool MASKED, bool CHANNEL, typename PQ, typename PK, typename PE, typename PV, typename PM,
              typename PI, typename PF,
          typename OY, typename OS>
inline void scan_chunks(Place at, threadgroup char* memory, int length, PQ q, PK k, PE ends, PV v, PM mask, PI initial,
                        bool has_initial, PF solve, PF scores, PF factors, OY y, OS states, GLOBAL float* u,
                            GLOBAL float* last) {
  using Memory = ScanMemory<In, C, DK, SLICE, STAGES, SPLIT, UNSTAGED, CHANNEL, false>;
  using Room = Rooms<In, C, DK>;
  using Types = ScanTypes<In, CHANNEL, false>;
  constexpr int stride = stride_of(DK), square = C + 8, value_stride = SLICE + 8, blocks = C / 16,
      key_tiles = padded(DK) / 16;
  constexpr int triangle = packed_offset(blocks), value_rows = padded(DV), state_tiles = key_tiles / SPLIT,
      tiles = blocks / SPLIT;
  constexpr int tail = tail_of<In, DK, CHANNEL>();
  // In fp32 what a chunk adds to the state is summed first, so that the state, much larger, is rounded once per chunk.
  constexpr bool add_separately = !CHANNEL && sizeof(In) == 4;
  // Groups beyond those that compute load the chunks; where there are none, all groups load.
  constexpr int computing = SLICE / 16 * SPLIT, loading = GROUPS > computing ? GROUPS - computing : GROUPS;
  static_assert(GROUPS >= computing, "SPLIT groups per strip");
  static_assert(key_tiles % SPLIT == 0 && blocks % SPLIT == 0, "halves of Dk and of a chunk's tiles");
  const int strip = (unsigned)at.group / SPLIT, part = (unsigned)at.group % SPLIT, lane = at.lane;
  const int chunks = (length + C - 1) / C, own = strip * 16, first = at.x * SLICE + own;
  const long head = (long)at.z * HV + at.y;
  const bool computes = GROUPS == computing || at.group < computing, loads = GROUPS == computing || !computes;
  Place loader = at;
  loader.index -= GROUPS == computing ? 0 : computing * 32;

  Tile state[state_tiles];
  load_state<DK, DV, state_tiles>(state, initial, has_initial && computes, head, first, part * state_tiles, lane);
  // With two stages a chunk is computed while the next one is copied; with one stage the block waits for each copy.
  arrivals_start(memory + Memory::arrivals, at.index);
  threadgroup char* rooms = memory + Memory::staging + strip * Memory::out;
  const Saved<In> state_room = shared_at<Saved<In>>(rooms, 0, 16 * stride);
  for (int step = STAGES > 1 ? -1 : 0; step < chunks; ++step) {
    const int coming = STAGES > 1 ? step + 1 : step, turn = STAGES > 1 ? coming & 1 : 0;
    const Arrival here = arrival_at(memory + Memory::arrivals, STAGES > 1 ? step & 1 : 0);
    if (STAGES > 1 && step >= 0) copies_wait(here, step >> 1);
    if (SPLIT > 1) writes_left();
    barrier();
    if (loads && coming < chunks) {
      Arrival arrival = arrival_at(memory + Memory::arrivals, turn);
      load_chunk<In, C, DK, DV, SLICE, HK, HV, loading, UNSTAGED, MASKED, CHANNEL, false, Memory>(
          loader, memory + turn * Memory::stage, arrival, q, k, ends, v, mask, solve, scores, factors, length, chunks,
          coming);
    }
    if (step < 0) continue;
    if (STAGES == 1) {
      copies_wait(here, step);
      barrier();
    }
    if (!computes) continue;
    const int n = step;
    threadgroup char* stage = memory + (STAGES > 1 ? (step & 1) * Memory::stage : 0);
    const auto live = alive<MASKED>(mask, at.z, n * C, length);
    const long rows = (((long)at.z * length + n * C) * HK + at.y / (HV / HK)) * DK;
    const auto keys = Choice<UNSTAGED>::of(
        unstaged_keys<typename Types::keys, C, DK>(Flag<CHANNEL>{}, k, head * chunks + n, rows, HK * DK, live),
        shared_at<typename Types::keys>(stage, Memory::k, C * stride));
    const auto queries = Choice<UNSTAGED>::of(
        unstaged_keys<typename Types::queries, C, DK>(Flag<CHANNEL>{}, q, head * chunks + n, rows, HK * DK, live),
        shared_at<typename Types::queries>(stage, Memory::q, C * stride));
    const auto end_keys = Choice<UNSTAGED>::of(
        unstaged_keys<typename Types::ends, C, DK>(Flag<CHANNEL>{}, ends, head * chunks + n, rows, HK * DK, live),
        shared_at<typename Types::ends>(stage, Memory::ends, C * stride));
    const Exact<In> values = shared_at<Exact<In>>(stage, Memory::values, C * value_stride);
    const Wide<In> z = shared_at<Wide<In>>(stage, Memory::solve, triangle);
    const Wide<In> p = shared_at<Wide<In>>(stage, Memory::scores, triangle);
    threadgroup const float* before = reinterpret_cast<threadgroup const float*>(stage + Memory::factors);
    threadgroup const float* after = before + C;
    threadgroup const float* rate = CHANNEL ? before : after + C;
    const auto states_out = stored_at<Saved<In>>(states, head * chunks + n, value_rows * stride);
    const auto u_out = stored_at<Wide<In>>(u, head * chunks + n, value_rows * square);

    if (SPLIT > 1) {
      DELTATUNE_UNROLL
      for (int m = 0; m < state_tiles; ++m) {
        Rough<In> s;
        hold(s, state[m]);
        keep(state_room, (part * state_tiles + m) * 16, stride, s, lane);
      }
      copies_fence();
      pair_barrier(strip);
      if (part == 0 && first < value_rows) write_strip<16 * stride>(states_out, (long)first * stride, state_room, lane);
    } else if (first < value_rows) {
      write_tiles<state_tiles>(states_out, (long)first * stride, stride, state, rooms, lane);
    }
    Tile x[tiles], out[tiles];
    DELTATUNE_UNROLL
    for (int j = 0; j < tiles; ++j) {
      tile_clear(x[j]);
      tile_clear(out[j]);
    }
    DELTATUNE_UNROLL
    for (int m = 0; m < key_tiles; ++m) {
      Rough<In> s;
      if (SPLIT > 1) s = left(straight(state_room, stride, 0, m * 16), lane);
      else hold(s, state[SPLIT > 1 ? 0 : m]);
      DELTATUNE_UNROLL
      for (int j = 0; j < tiles; ++j) {
        const int i = own_tile<SPLIT, blocks>(j, part) * 16;
        multiply(x[j], s, right(turned(keys, stride, m * 16, i), lane), lane);
        multiply(out[j], s, right(turned(queries, stride, m * 16, i), lane), lane);
      }
    }
    // x holds r, then u, then beta u, all transposed: rows of DV by positions.
    Strip<In, blocks, SPLIT> rights = strip_at<In, blocks, SPLIT>(rooms, Room::right);
    DELTATUNE_UNROLL
    for (int j = 0; j < tiles; ++j) {
      const int tile = own_tile<SPLIT, blocks>(j, part);
      const Tile value = tile_of(turned(values, value_stride, own, tile * 16), lane);
      Tile scaled;
      DELTATUNE_UNROLL
      for (int e = 0; e < 8; ++e) {
        const int i = tile * 16 + tile_column(e, lane);
        x[j].set(e, value.get(e) - (CHANNEL ? 1.0f : before[i]) * x[j].get(e));
        if (!CHANNEL) out[j].set(e, before[i] * out[j].get(e));
        scaled.set(e, -rate[i] * x[j].get(e));
      }
      rights.put(j, tile, scaled, lane);
    }
    if (SPLIT > 1) pair_barrier(strip);
    if (part == 0) add_times_turned<0>(x, rights, z, lane);
    else add_times_turned<1>(x, rights, z, lane);
    if (SPLIT == 1 && first < value_rows)
      write_tiles_and_tails<tiles, tail, state_tiles>(u_out, (long)first * square, square, x, state, rooms, lane);
    Strip<In, blocks, SPLIT> rated = strip_at<In, blocks, SPLIT>(rooms, Room::rated);
    Strip<In, blocks, SPLIT> ended = strip_at<In, blocks, SPLIT>(rooms, CHANNEL ? Room::rated : Room::ended);
    const Wide<In> u_room = shared_at<Wide<In>>(rooms, Room::u, 16 * square);
    DELTATUNE_UNROLL
    for (int j = 0; j < tiles; ++j) {
      const int tile = own_tile<SPLIT, blocks>(j, part);
      if (SPLIT > 1) {
        Precise<In> exact;
        hold(exact, x[j]);
        keep(u_room, tile * 16, square, exact, lane);
      }
      tile_scale_columns(x[j], rate + tile * 16, lane);
      rated.put(j, tile, x[j], lane);
      if (SPLIT > 1) {
        if (!CHANNEL) tile_scale_columns(x[j], after + tile * 16, lane);
        ended.put(j, tile, x[j], lane);
      }
    }
    if (SPLIT > 1) {
      keep_tails<tail, state_tiles>(u_room, 0, square, state, part * state_tiles, lane);
      copies_fence();
      pair_barrier(strip);
      if (part == 0 && first < value_rows) write_strip<16 * square>(u_out, (long)first * square, u_room, lane);
    }
    DELTATUNE_UNROLL
    for (int m = 0; m < state_tiles; ++m) scale_state<CHANNEL, C>(state[m], before, part * state_tiles + m, lane);
    const auto last_keys = Choice<CHANNEL>::of(end_keys, keys);
    if (SPLIT > 1) {
      if (part == 0) add_output_and_state<0, In, blocks, SPLIT, state_tiles>(out, state, rated, ended, p, last_keys,
          stride, lane);
      else add_output_and_state<1, In, blocks, SPLIT, state_tiles>(out, state, rated, ended, p, last_keys, stride,
          lane);
    } else {
      add_times_turned<0>(out, rated, p, lane);
    }
    DELTATUNE_UNROLL
    for (int j = 0; j < tiles; ++j) {
      const int tile = own_tile<SPLIT, blocks>(j, part);
      put_turned(values, tile * 16 * value_stride + own, value_stride, out[j], lane);
      if (SPLIT > 1) continue;
      if (!CHANNEL) tile_scale_columns(x[j], after + tile * 16, lane);
      ended.put(j, tile, x[j], lane);
    }
    if (SPLIT == 1 && add_separately) {
      DELTATUNE_UNROLL
      for (int m = 0; m < state_tiles; ++m) add_separate_sum<blocks>(state[m], ended, last_keys, stride, m * 16, lane);
    } else if (SPLIT == 1) {
      DELTATUNE_UNROLL
      for (int j = 0; j < blocks; ++j) {
        const Precise<In> a = ended.get(j, lane);
        DELTATUNE_UNROLL
        for (int m = 0; m < state_tiles; ++m)
          multiply(state[m], a, right(straight(last_keys, stride, j * 16, m * 16), lane), lane);
      }
    }
    group_barrier();
    write_tiles_of<tiles, SPLIT, blocks, DV>(values, own, value_stride, part, y,
                                             ((long)at.z * length + n * C) * HV + at.y, HV, first, length - n * C,
                                                 lane);
  }
  if (!computes) return;
  writes_done();
  store_state<DK, DV, state_tiles>(state, last, head, first, part * state_tiles, lane);
}
template <typename In, int C, int DK, int DV, int SLICE, int HK, int HV, int GROUPS, int STAGES, int SPLIT,
          bool UNSTAGED, bool MASKED, typename PQ, typename PK, typename PV, typename PM, typename PI, typename PF,
              typename OY, typename OS>
inline void gated_delta_scan(Place at, threadgroup char* memory, int length, PQ q, PK k, PV v, PM mask, PI initial,
                             bool has_initial, PF solve, PF scores, PF factors, OY y, OS states, GLOBAL float* u,
                                 GLOBAL float* last) {
  scan_chunks<In, C, DK, DV, SLICE, HK, HV, GROUPS, STAGES, SPLIT, UNSTAGED, MASKED, false>(
      at, memory, length, q, k, k, v, mask, initial, has_initial, solve, scores, factors, y, states, u, last);
}

// The reverse scan: goes through the chunks in reverse order and computes R, dv and the gradients of the states.
// Blocks, strips and groups are those of the forward scan.
// Inputs: q, k (and `ends` with CHANNEL), mask, solve, scores and factors as in the forward scan; dy [B,T,HV,DV];
// d_last [B,HV,DV,DK], the gradient of the last state.
// Outputs: for each of [B,HV,chunks], d_states [DV,DK], the gradient of the state after the chunk, and d_right [DV,C],
// which is R, both with padded rows; dv [B,T,HV,DV]; d_initial [B,HV,DV,DK].
template <typename In, int C, int DK, int DV, int SLICE, int HK, int HV, int GROUPS, int STAGES, int SPLIT,
          bool UNSTAGED, bool MASKED, bool CHANNEL, typename PQ, typename PK, typename PE, typename PY, typename PM,
              typename PI, typename PF,
          typename OS, typename OR, typename OV>
inline void reverse_chunks(Place at, threadgroup char* memory, int length, PQ q, PK k, PE ends, PY dy, PM mask,
                           PI d_last, PF solve, PF scores, PF factors, OS d_states, OR d_right, OV dv,
                           GLOBAL float* d_initial) {
  using Memory = ScanMemory<In, C, DK, SLICE, STAGES, SPLIT, UNSTAGED, CHANNEL, true>;
  using Room = Rooms<In, C, DK>;
  using Types = ScanTypes<In, CHANNEL, true>;
  constexpr int stride = stride_of(DK), square = C + 8, value_stride = SLICE + 8, blocks = C / 16,
      key_tiles = padded(DK) / 16;
  constexpr int triangle = packed_offset(blocks), value_rows = padded(DV), state_tiles = key_tiles / SPLIT,
      tiles = blocks / SPLIT;
  constexpr int tail = tail_of<In, DK, CHANNEL>();
  // In fp32 what a chunk adds to the state is summed first, so that the state, much larger, is rounded once per chunk.
  constexpr bool add_separately = !CHANNEL && sizeof(In) == 4;
  // Groups beyond those that compute load the chunks; where there are none, all groups load.
  constexpr int computing = SLICE / 16 * SPLIT, loading = GROUPS > computing ? GROUPS - computing : GROUPS;
  static_assert(GROUPS >= computing, "SPLIT groups per strip");
  static_assert(key_tiles % SPLIT == 0 && blocks % SPLIT == 0, "halves of Dk and of a chunk's tiles");
  const int strip = (unsigned)at.group / SPLIT, part = (unsigned)at.group % SPLIT, lane = at.lane;
  const int chunks = (length + C - 1) / C, own = strip * 16, first = at.x * SLICE + own;
  const long head = (long)at.z * HV + at.y;
  const bool computes = GROUPS == computing || at.group < computing, loads = GROUPS == computing || !computes;
  Place loader = at;
  loader.index -= GROUPS == computing ? 0 : computing * 32;

  Tile state[state_tiles];
  load_state<DK, DV, state_tiles>(state, d_last, computes, head, first, part * state_tiles, lane);
  arrivals_start(memory + Memory::arrivals, at.index);
  threadgroup char* rooms = memory + Memory::staging + strip * Memory::out;
  const Wide<In> state_room = shared_at<Wide<In>>(rooms, 0, 16 * stride);
  for (int step = STAGES > 1 ? -1 : 0; step < chunks; ++step) {
    const int coming = STAGES > 1 ? step + 1 : step, turn = STAGES > 1 ? coming & 1 : 0;
    const Arrival here = arrival_at(memory + Memory::arrivals, STAGES > 1 ? step & 1 : 0);
    if (STAGES > 1 && step >= 0) copies_wait(here, step >> 1);
    if (SPLIT > 1) writes_left();
    barrier();
    if (loads && coming < chunks) {
      Arrival arrival = arrival_at(memory + Memory::arrivals, turn);
      load_chunk<In, C, DK, DV, SLICE, HK, HV, loading, UNSTAGED, MASKED, CHANNEL, true, Memory>(
          loader, memory + turn * Memory::stage, arrival, q, k, ends, dy, mask, solve, scores, factors, length, chunks,
          chunks - 1 - coming);
    }
    if (step < 0) continue;
    if (STAGES == 1) {
      copies_wait(here, step);
      barrier();
    }
    if (!computes) continue;
    const int n = chunks - 1 - step;
    threadgroup char* stage = memory + (STAGES > 1 ? (step & 1) * Memory::stage : 0);
    const auto live = alive<MASKED>(mask, at.z, n * C, length);
    const long rows = (((long)at.z * length + n * C) * HK + at.y / (HV / HK)) * DK;
    const auto keys = Choice<UNSTAGED>::of(
        unstaged_keys<typename Types::keys, C, DK>(Flag<CHANNEL>{}, k, head * chunks + n, rows, HK * DK, live),
        shared_at<typename Types::keys>(stage, Memory::k, C * stride));
    const auto queries = Choice<UNSTAGED>::of(
        unstaged_keys<typename Types::queries, C, DK>(Flag<CHANNEL>{}, q, head * chunks + n, rows, HK * DK, live),
        shared_at<typename Types::queries>(stage, Memory::q, C * stride));
    const auto end_keys = Choice<UNSTAGED>::of(
        unstaged_keys<typename Types::ends, C, DK>(Flag<CHANNEL>{}, ends, head * chunks + n, rows, HK * DK, live),
        shared_at<typename Types::ends>(stage, Memory::ends, C * stride));
    const auto last_keys = Choice<CHANNEL>::of(end_keys, keys);
    const Exact<In> dy_rows = shared_at<Exact<In>>(stage, Memory::values, C * value_stride);
    const Wide<In> z = shared_at<Wide<In>>(stage, Memory::solve, triangle);
    const Wide<In> p = shared_at<Wide<In>>(stage, Memory::scores, triangle);
    threadgroup const float* before = reinterpret_cast<threadgroup const float*>(stage + Memory::factors);
    threadgroup const float* after = before + C;
    threadgroup const float* rate = CHANNEL ? before : after + C;
    const auto states_out = stored_at<Saved<In>>(d_states, head * chunks + n, value_rows * stride);
    const auto right_out = stored_at<Wide<In>>(d_right, head * chunks + n, value_rows * square);

    if (SPLIT > 1) {
      DELTATUNE_UNROLL
      for (int m = 0; m < state_tiles; ++m) {
        Precise<In> s;
        hold(s, state[m]);
        keep(state_room, (part * state_tiles + m) * 16, stride, s, lane);
      }
      copies_fence();
      pair_barrier(strip);
      if (part == 0 && first < value_rows) write_strip<16 * stride>(states_out, (long)first * stride, state_room, lane);
    } else if (first < value_rows) {
      write_tiles<state_tiles>(states_out, (long)first * stride, stride, state, rooms, lane);
    }
    // x holds w, then R, both transposed: rows of DV by positions.
    Tile x[tiles];
    Chains<SPLIT, tiles> chains;
    chains.start();
    DELTATUNE_UNROLL
    for (int j = 0; j < tiles; ++j) tile_clear(x[j]);
    DELTATUNE_UNROLL
    for (int m = 0; m < key_tiles; ++m) {
      Precise<In> s;
      if (SPLIT > 1) s = left(straight(state_room, stride, 0, m * 16), lane);
      else hold(s, state[SPLIT > 1 ? 0 : m]);
      DELTATUNE_UNROLL
      for (int j = 0; j < tiles; ++j) {
        const int i = own_tile<SPLIT, blocks>(j, part) * 16;
        chains.add(x, j, m, s, right(turned(last_keys, stride, m * 16, i), lane), lane);
      }
    }
    chains.finish(x);
    DELTATUNE_UNROLL
    for (int j = 0; j < tiles; ++j) {
      if (!CHANNEL) tile_scale_columns(x[j], after + own_tile<SPLIT, blocks>(j, part) * 16, lane);
    }
    Rough<In> dy_tiles[blocks], decayed_dy[blocks];
    DELTATUNE_UNROLL
    for (int i = 0; i < blocks; ++i) {
      Tile t = tile_of(turned(dy_rows, value_stride, own, i * 16), lane);
      hold(dy_tiles[i], t);
      if (!CHANNEL) tile_scale_columns(t, before + i * 16, lane);
      hold(decayed_dy[i], t);
    }
    if (part == 0) add_rough_times<0, In, blocks, SPLIT>(x, dy_tiles, p, lane);
    else add_rough_times<1, In, blocks, SPLIT>(x, dy_tiles, p, lane);
    Strip<In, blocks, SPLIT> rated = strip_at<In, blocks, SPLIT>(rooms, Room::rated_w);
    DELTATUNE_UNROLL
    for (int j = 0; j < tiles; ++j) {
      const int tile = own_tile<SPLIT, blocks>(j, part);
      Tile scaled;
      DELTATUNE_UNROLL
      for (int e = 0; e < 8; ++e) scaled.set(e, -rate[tile * 16 + tile_column(e, lane)] * x[j].get(e));
      rated.put(j, tile, scaled, lane);
    }
    if (SPLIT > 1) pair_barrier(strip);
    if (part == 0) add_times<0>(x, rated, z, lane);
    else add_times<1>(x, rated, z, lane);
    if (SPLIT == 1 && first < value_rows)
      write_tiles_and_tails<tiles, tail, state_tiles>(right_out, (long)first * square, square, x, state, rooms, lane);
    Strip<In, blocks, SPLIT> right_part = strip_at<In, blocks, SPLIT>(rooms, Room::rated_gradient);
    const Wide<In> right_gradient_room = shared_at<Wide<In>>(rooms, Room::right_gradient, 16 * square);
    DELTATUNE_UNROLL
    for (int j = 0; j < tiles; ++j) {
      const int tile = own_tile<SPLIT, blocks>(j, part);
      if (SPLIT > 1) {
        Precise<In> right_gradient;
        hold(right_gradient, x[j]);
        keep(right_gradient_room, tile * 16, square, right_gradient, lane);
      }
      tile_scale_columns(x[j], rate + tile * 16, lane);
      put_turned(dy_rows, tile * 16 * value_stride + own, value_stride, x[j], lane);
      DELTATUNE_UNROLL
      for (int e = 0; e < 8; ++e)
        x[j].set(e, (CHANNEL ? -1.0f : -before[tile * 16 + tile_column(e, lane)]) * x[j].get(e));
      right_part.put(j, tile, x[j], lane);
    }
    if (SPLIT > 1) {
      keep_tails<tail, state_tiles>(right_gradient_room, 0, square, state, part * state_tiles, lane);
      copies_fence();
      pair_barrier(strip);
      if (part == 0 && first < value_rows) write_strip<16 * square>(right_out, (long)first * square,
          right_gradient_room, lane);
    }
    DELTATUNE_UNROLL
    for (int m = 0; m < state_tiles; ++m) scale_state<CHANNEL, C>(state[m], before, part * state_tiles + m, lane);
    DELTATUNE_UNROLL
    for (int m = 0; add_separately && m < state_tiles; ++m)
      add_separate_sum<blocks>(state[m], decayed_dy, queries, stride, (part * state_tiles + m) * 16, lane);
    DELTATUNE_UNROLL
    for (int m = 0; add_separately && m < state_tiles; ++m)
      add_separate_sum<blocks>(state[m], right_part, keys, stride, (part * state_tiles + m) * 16, lane);
    DELTATUNE_UNROLL
    for (int i = 0; !add_separately && i < blocks; ++i) {
      const Precise<In> a = right_part.get(i, lane);
      DELTATUNE_UNROLL
      for (int m = 0; m < state_tiles; ++m) {
        const int column = (part * state_tiles + m) * 16;
        multiply(state[m], decayed_dy[i], right(straight(queries, stride, i * 16, column), lane), lane);
        multiply(state[m], a, right(straight(keys, stride, i * 16, column), lane), lane);
      }
    }
    group_barrier();
    write_tiles_of<tiles, SPLIT, blocks, DV>(dy_rows, own, value_stride, part, dv,
                                             ((long)at.z * length + n * C) * HV + at.y, HV, first, length - n * C,
                                                 lane);
  }
  if (!computes) return;
  writes_done();
  store_state<DK, DV, state_tiles>(state, d_initial, head, first, part * state_tiles, lane);
}
template <typename In, int C, int DK, int DV, int SLICE, int HK, int HV, int GROUPS, int STAGES, int SPLIT,
          bool UNSTAGED, bool MASKED, typename PQ, typename PK, typename PY, typename PM, typename PE, typename PF,
              typename OS, typename OR,
          typename OV>
inline void gated_delta_reverse(Place at, threadgroup char* memory, int length, PQ q, PK k, PY dy, PM mask, PE d_last,
                                PF solve, PF scores, PF factors, OS d_states, OR d_right, OV dv,
                                GLOBAL float* d_initial) {
  reverse_chunks<In, C, DK, DV, SLICE, HK, HV, GROUPS, STAGES, SPLIT, UNSTAGED, MASKED, false>(
      at, memory, length, q, k, k, dy, mask, d_last, solve, scores, factors, d_states, d_right, dv, d_initial);
}

template <typename In, int C, int DK, int SLICE, int STAGES, bool OVERLAY, bool UNSTAGED>
struct GradientMemory {
  static constexpr constant int state = 0;
  static constexpr constant int d_state = state + room_of<UNSTAGED, Saved<In>, SLICE, DK>();
  static constexpr constant int u = d_state + room_of<UNSTAGED, Saved<In>, SLICE, DK>();
  static constexpr constant int right = u + SLICE * (C + 8) * Wide<In>::bytes;
  static constexpr constant int dy = right + SLICE * (C + 8) * Wide<In>::bytes;
  static constexpr constant int stage = dy + C * (SLICE + 8) * Exact<In>::bytes;
  static constexpr constant int q = 0;
  static constexpr constant int k = q + room_of<UNSTAGED, Exact<In>, C, DK>();
  static constexpr constant int k_end = k + room_of<UNSTAGED, Exact<In>, C, DK>();
  // The weights of the pairs take the slices' memory once the slices are done; with OVERLAY so do Q and K.
  static constexpr constant int slices = OVERLAY ? 0 : k_end;
  static constexpr constant int weights_y = k_end;
  static constexpr constant int weights_right = weights_y + C * (C + 8) * Wide<In>::bytes;
  static constexpr constant int pairs_end = weights_right + C * (C + 8) * Wide<In>::bytes;
  static constexpr constant int slices_end = slices + STAGES * stage;
  static constexpr constant int diagonal = pairs_end > slices_end ? pairs_end : slices_end;
  static constexpr constant int decay = diagonal + C * 17 * 4;
  static constexpr constant int scalars = decay + align16(Decay<C>::floats * 4);
  static constexpr constant int sums = scalars + 4 * C * 4;
  static constexpr constant int parts = sums + 2 * C * (C / 16) * 4;
  static constexpr constant int arrivals = parts + 3 * C * 4 * 4 + 32 * 4;
  static constexpr constant int bytes = arrivals + 16;
};

template <typename In, int C, int DK, int DV, int SLICE, int HV, int GROUPS, typename Memory, bool UNSTAGED,
          bool MASKED, typename PT, typename PU, typename PR, typename PY, typename PM>
inline void load_slice(Place at, threadgroup char* memory, thread Arrival& arrival, PT states, PT d_states, PU u,
                       PR d_right, PY dy, PM mask, int length, int hv, long chunk, int first) {
  constexpr int threads = GROUPS * 32, stride = stride_of(DK), square = C + 8;
  constexpr int value_rows = padded(DV);
  if (!UNSTAGED) {
    copy_block<SLICE * stride, threads>(shared_at<Saved<In>>(memory, Memory::state, SLICE * stride),
                                        stored_at<Saved<In>>(states, chunk, value_rows * stride), (long)first * stride,
                                        arrival, at.index);
    copy_block<SLICE * stride, threads>(shared_at<Saved<In>>(memory, Memory::d_state, SLICE * stride),
                                        stored_at<Saved<In>>(d_states, chunk, value_rows * stride),
                                            (long)first * stride,
                                        arrival, at.index);
  }
  copy_block<SLICE * square, threads>(shared_at<Wide<In>>(memory, Memory::u, SLICE * square),
                                      stored_at<Wide<In>>(u, chunk, value_rows * square), (long)first * square, arrival,
                                      at.index);
  copy_block<SLICE * square, threads>(shared_at<Wide<In>>(memory, Memory::right, SLICE * square),
                                      stored_at<Wide<In>>(d_right, chunk, value_rows * square), (long)first * square,
                                      arrival, at.index);
  copy_rows<C, SLICE, threads>(shared_at<Exact<In>>(memory, Memory::dy, C * (SLICE + 8)), SLICE + 8,
                               dy + (((long)at.z * length + at.x * C) * HV + hv) * DV + first, HV * DV, DV - first,
                               alive<MASKED>(mask, at.z, at.x * C, length), arrival, at.index);
}

// Part `share` of `Shares` of the gradient of log_g at position t: the terms of rows at or after t (before_sums), of
// rows before t (after_sums), and of pairs i >= t > j, whose span contains t. Only such terms are added. A difference
// of running sums would lose the gradient of a small gate.
template <int C, int Shares>
inline float spanning(threadgroup const float* diagonal, threadgroup const float* row_sums,
                      threadgroup const float* column_sums, threadgroup const float* before_sums,
                      threadgroup const float* after_sums, int parts, int t, int share) {
  constexpr int blocks = C / 16;
  const int own = t / 16, first = own * 16;
  // Sixteen terms are summed first, then those sums: short sums round less.
  float sum = 0.0f;
  for (int b = share; b < blocks; b += Shares) {
    for (int p = 0; p < parts; ++p) {
      float part = 0.0f;
      DELTATUNE_UNROLL
      for (int i =
          0; i < 16; ++i) part += b * 16 + i >= t ? before_sums[(b * 16 + i) * 4 + p] :
              after_sums[(b * 16 + i) * 4 + p];
      sum += part;
    }
    if (b < own) {
      float part = 0.0f;
      DELTATUNE_UNROLL
      for (int i = 0; i < 16; ++i) {
        if (first + i >= t) part += row_sums[(first + i) * blocks + b];
      }
      sum += part;
      for (int c = own + 1; c < blocks; ++c) {
        part = 0.0f;
        DELTATUNE_UNROLL
        for (int i = 0; i < 16; ++i) part += row_sums[(c * 16 + i) * blocks + b];
        sum += part;
      }
    }
    if (b > own) {
      float part = 0.0f;
      DELTATUNE_UNROLL
      for (int j = 0; j < 16; ++j) {
        if (first + j < t) part += column_sums[(first + j) * blocks + b];
      }
      sum += part;
    }
  }
  for (int j = share; first + j < t && j < 16; j += Shares) {
    float part = 0.0f;
    DELTATUNE_UNROLL
    for (int i = 0; i < 16; ++i) {
      if (first + i >= t) part += diagonal[(first + i) * 17 + j];
    }
    sum += part;
  }
  return sum;
}

// Replaces after_sums[i] = <dS k_i, E_i beta_i u_i>, which the gates before i receive, by a more exact value: dS is
// saved in bf16, whose rounding that sum would show. Since R + N^T beta R = w = P^T dY + E K dS^T, the sum also equals
// beta_i <R_i, u_i> less the terms of the pairs whose second position is i, (i, i) among them, all of them in fp32.
// It is a difference, so it is not used where E_i is small.
template <int C>
inline void ends_by_pairs(threadgroup const float* diagonal, threadgroup const float* column_sums,
                          threadgroup const float* rate_sums, threadgroup const float* rate,
                          threadgroup const float* after, threadgroup float* after_sums, int parts, int i) {
  constexpr int blocks = C / 16;
  if (after[i] < 0.03125f) return;
  float sum = 0.0f, pairs = 0.0f;
  for (int p = 0; p < parts; ++p) sum += rate_sums[i * 4 + p];
  DELTATUNE_UNROLL
  for (int r = 0; r < 16; ++r)
    if (r >= i % 16) pairs += diagonal[(i / 16 * 16 + r) * 17 + i % 16];
  for (int b = i / 16 + 1; b < blocks; ++b) pairs += column_sums[i * blocks + b];
  after_sums[i * 4] = rate[i] * sum - pairs;
  for (int p = 1; p < parts; ++p) after_sums[i * 4 + p] = 0.0f;
}

// Computes the gradients of q, k, log_g and beta from what the two scans wrote. Each block does one chunk of one key
// head and goes through that head's HV / HK value heads; the grid is (chunks, HK, B).
// Inputs: q, k, log_g, mask, segments; factors of the prepare kernel; states and u of the scan; d_states and d_right of
// the reverse scan; dy. Outputs: dq, dk [B,T,HK,DK]; d_log_g, d_beta [B,T,HV].
// A group owns the 16 positions of tile `row` and part `part` of the columns of DK. It multiplies with the states SLICE
// rows of DV at a time, then does its pairs of tiles of P and N. One thread per position and share adds up log_g's
// terms.
template <typename In, int C, int DK, int DV, int SLICE, int HK, int HV, int GROUPS, int STAGES, bool OVERLAY,
          bool UNSTAGED, bool MASKED, bool SEGMENTED, typename PQ, typename PK, typename PL, typename PM, typename PZ,
          typename PF, typename PT, typename PR, typename PY, typename OQ, typename OK>
inline void gated_delta_gradients(Place at, threadgroup char* memory, int length, PQ q, PK k, PL log_g, PM mask,
                                  PZ segments, PF factors, PT states, PT d_states, PF u_in, PR d_right, PY dy_in,
                                      OQ dq, OK dk, GLOBAL float* d_log_g, GLOBAL float* d_beta) {
  using Memory = GradientMemory<In, C, DK, SLICE, STAGES, OVERLAY, UNSTAGED>;
  constexpr int threads = GROUPS * 32, stride = stride_of(DK), square = C + 8, slice_stride = SLICE + 8,
      blocks = C / 16;
  constexpr int columns = padded(DK), key_tiles = columns / 16, parts = GROUPS / blocks;
  constexpr int column_tiles = (key_tiles + parts - 1) / parts, own_pairs = (blocks + parts - 1) / parts,
      repeats = HV / HK;
  constexpr int sharers = threads / C, tail = tail_of<In, DK, false>();
  static_assert(GROUPS % blocks == 0 && parts <= 4, "groups share the columns of a row of tiles");
  const int chunks = (length + C - 1) / C, t0 = at.x * C;
  const int row = (unsigned)at.group % blocks, part = (unsigned)at.group / blocks, lane = at.lane;
  const long key_offset = (((long)at.z * length + t0) * HK + at.y) * DK;
  const Exact<In> staged_q = shared_at<Exact<In>>(memory, Memory::q, C * stride);
  const Exact<In> staged_k = shared_at<Exact<In>>(memory, Memory::k, C * stride);
  const Wide<In> weights_y = shared_at<Wide<In>>(memory, Memory::weights_y, C * square);
  const Wide<In> weights_right = shared_at<Wide<In>>(memory, Memory::weights_right, C * square);
  threadgroup float* diagonal = reinterpret_cast<threadgroup float*>(memory + Memory::diagonal);
  const Decay<C> decay = decay_at<C>(reinterpret_cast<threadgroup float*>(memory + Memory::decay));
  threadgroup float* gate = reinterpret_cast<threadgroup float*>(memory + Memory::scalars);
  threadgroup float* before = gate + C;
  threadgroup float* after = before + C;
  threadgroup float* rate = after + C;
  threadgroup float* row_sums = reinterpret_cast<threadgroup float*>(memory + Memory::sums);
  threadgroup float* column_sums = row_sums + C * blocks;
  threadgroup float* before_sums = reinterpret_cast<threadgroup float*>(memory + Memory::parts);
  threadgroup float* after_sums = before_sums + C * 4;
  threadgroup float* rate_sums = after_sums + C * 4;
  threadgroup float* state_dots = rate_sums + C * 4;
  const auto live = alive<MASKED>(mask, at.z, t0, length);
  const auto queries = Choice<UNSTAGED>::of(unstaged_rows<DK>(q, key_offset, HK * DK, live), staged_q);
  const auto keys = Choice<UNSTAGED>::of(unstaged_rows<DK>(k, key_offset, HK * DK, live), staged_k);

  Tile dq_sums[column_tiles], dk_sums[column_tiles];
  DELTATUNE_UNROLL
  for (int m = 0; m < column_tiles; ++m) {
    tile_clear(dq_sums[m]);
    tile_clear(dk_sums[m]);
  }
  static_assert(padded(DV) % SLICE == 0 && (STAGES > 1) != OVERLAY,
                "SLICE divides the rows; one stage goes with OVERLAY");
  static_assert(OVERLAY || !UNSTAGED, "with UNSTAGED, q and k need no memory beside the slices");
  arrivals_start(memory + Memory::arrivals, at.index);
  int loads = 0;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    const int hv = at.y * repeats + repeat;
    const long chunk = ((long)at.z * HV + hv) * chunks + at.x;
    barrier();
    {
      // With one stage, the first load brings only the factors and, without OVERLAY, Q and K.
      Arrival arrival = arrival_at(memory + Memory::arrivals, STAGES > 1 ? loads & 1 : 0);
      if (STAGES > 1)
        load_slice<In, C, DK, DV, SLICE, HV, GROUPS, Memory, UNSTAGED, MASKED>(
            at, memory + Memory::slices + (loads & 1) * Memory::stage, arrival, states, d_states, u_in, d_right, dy_in,
            mask, length, hv, chunk, 0);
      if (!OVERLAY && repeat == 0) {
        copy_rows<C, columns, threads>(staged_q, stride, q + key_offset, HK * DK, DK, live, arrival, at.index);
        copy_rows<C, columns, threads>(staged_k, stride, k + key_offset, HK * DK, DK, live, arrival,
                                       at.index);
      }
      copy_floats<3 * C>(before, factors + chunk * 3 * C, arrival, at.index);
      copies_sent(arrival, at.index);
      if (STAGES == 1) copies_wait(arrival, loads++);
    }
    if (at.index < C) gate[at.index] = gate_of<SEGMENTED>(at.index, live, log_g, segments, at.z, hv, HV, t0, length);

    Tile from_y[column_tiles], from_right[column_tiles], from_end[column_tiles], dp[own_pairs], da[own_pairs];
    DELTATUNE_UNROLL
    for (int m = 0; m < column_tiles; ++m) {
      tile_clear(from_y[m]);
      tile_clear(from_right[m]);
      tile_clear(from_end[m]);
    }
    DELTATUNE_UNROLL
    for (int m = 0; m < own_pairs; ++m) {
      tile_clear(dp[m]);
      tile_clear(da[m]);
    }
    float state_dot = 0.0f, rates[2] = {0.0f, 0.0f};
    for (int n = 0; n < (DV + SLICE - 1) / SLICE; ++n) {
      threadgroup char* slice = memory + Memory::slices + (STAGES > 1 ? (loads & 1) * Memory::stage : 0);
      const int coming = STAGES > 1 ? n + 1 : n, turn = STAGES > 1 ? (loads + 1) & 1 : 0;
      const Arrival here = arrival_at(memory + Memory::arrivals, STAGES > 1 ? loads & 1 : 0);
      if (STAGES > 1) copies_wait(here, loads >> 1);
      barrier();
      if (coming * SLICE < DV) {
        Arrival arrival = arrival_at(memory + Memory::arrivals, turn);
        load_slice<In, C, DK, DV, SLICE, HV, GROUPS, Memory, UNSTAGED, MASKED>(
            at, memory + Memory::slices + turn * Memory::stage, arrival, states, d_states, u_in, d_right, dy_in, mask,
            length, hv, chunk, coming * SLICE);
        copies_sent(arrival, at.index);
      }
      if (STAGES == 1) {
        copies_wait(here, loads);
        barrier();
      }
      ++loads;
      if (n == 0) fill_decay<C>(decay, gate, at.index);
      const auto state = Choice<UNSTAGED>::of(stored_at<Saved<In>>(states + n * SLICE * stride, chunk,
          padded(DV) * stride), shared_at<Saved<In>>(slice, Memory::state, SLICE * stride));
      const auto d_state = Choice<UNSTAGED>::of(
          stored_at<Saved<In>>(d_states + n * SLICE * stride, chunk, padded(DV) * stride),
          shared_at<Saved<In>>(slice, Memory::d_state, SLICE * stride));
      const Wide<In> u = shared_at<Wide<In>>(slice, Memory::u, SLICE * square);
      const Wide<In> right_gradient = shared_at<Wide<In>>(slice, Memory::right, SLICE * square);
      const Exact<In> dy = shared_at<Exact<In>>(slice, Memory::dy, C * slice_stride);
      DELTATUNE_UNROLL
      for (int s = 0; s < SLICE; s += 16) {
        const auto left_y = left(straight(dy, slice_stride, row * 16, s), lane);
        const auto left_right = left(turned(right_gradient, square, row * 16, s), lane);
        const auto left_u = left(turned(u, square, row * 16, s), lane);
        if (s / 16 % parts == part) add_row_dots(rates, left_right, left_u, lane);
        DELTATUNE_UNROLL
        for (int m = 0; m < column_tiles; ++m) {
          const int column = (part * column_tiles + m) * 16;
          if (key_tiles % parts != 0 && column >= columns) continue;
          const auto b = right(straight(state, stride, s, column), lane);
          const auto db = right(straight(d_state, stride, s, column), lane);
          multiply(from_y[m], left_y, b, lane);
          multiply(from_right[m], left_right, b, lane);
          multiply(from_end[m], left_u, db, lane);
          if (tail == 0 && s / 16 % blocks == row) state_dot += right_dot(b, db, lane);
        }
        DELTATUNE_UNROLL
        for (int m = 0; m < own_pairs; ++m) {
          const int column = part + m * parts;
          if (column > row) continue;
          const auto b = right(straight(u, square, s, column * 16), lane);
          multiply(dp[m], left_y, b, lane);
          multiply(da[m], left_right, b, lane);
        }
      }
      for (int s = row * 16; tail > 0 && s < SLICE; s += blocks * 16) {
        DELTATUNE_UNROLL
        for (int m = 0; m < column_tiles; ++m) {
          const int column = (part * column_tiles + m) * 16;
          if (key_tiles % parts != 0 && column >= columns) continue;
          state_dot += kept_dot<tail>(straight(state, stride, s, column), straight(d_state, stride, s, column),
                                  tail_at<tail>(u, s * square, square, column / 16, lane),
                                  tail_at<tail>(right_gradient, s * square, square, column / 16, lane), lane);
        }
      }
    }
    state_dot = lane_sum(state_dot);
    barrier();
    if (OVERLAY && !UNSTAGED) {
      Arrival arrival = arrival_at(memory + Memory::arrivals, 0);
      copies_fence();
      copy_rows<C, columns, threads>(staged_q, stride, q + key_offset, HK * DK, DK, live, arrival, at.index);
      copy_rows<C, columns, threads>(staged_k, stride, k + key_offset, HK * DK, DK, live, arrival,
                                     at.index);
      copies_sent(arrival, at.index);
      copies_wait(arrival, loads++);
      barrier();
    }
    if (lane == 0) state_dots[at.group] = state_dot;
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    DELTATUNE_UNROLL
    for (int m = 0; m < column_tiles; ++m) {
      const int column = (part * column_tiles + m) * 16;
      if (key_tiles % parts != 0 && column >= columns) continue;
      const Tile query = tile_of(straight(queries, stride, row * 16, column), lane);
      const Tile key = tile_of(straight(keys, stride, row * 16, column), lane);
      DELTATUNE_UNROLL
      for (int e = 0; e < 8; ++e) {
        const int i = row * 16 + tile_row(e, lane);
        const float y_part = before[i] * from_y[m].get(e);
        const float right_part = -before[i] * rate[i] * from_right[m].get(e);
        const float end_part = after[i] * rate[i] * from_end[m].get(e);
        dq_sums[m].set(e, dq_sums[m].get(e) + y_part);
        dk_sums[m].set(e, dk_sums[m].get(e) + right_part + end_part);
        sums[tile_side(e)] += y_part * query.get(e) + right_part * key.get(e);
        sums[2 + tile_side(e)] += end_part * key.get(e);
      }
    }
    DELTATUNE_UNROLL
    for (int side = 0; side < 2; ++side) {
      const int e = side * tile_second;
      const float first_sum = row_sum(sums[side]), last_sum = row_sum(sums[2 + side]), rate_sum = row_sum(rates[side]);
      // One lane per row writes: the one that holds the tile's first column in that row.
      if (tile_column(e, lane) == 0) {
        before_sums[(row * 16 + tile_row(e, lane)) * 4 + part] = first_sum;
        after_sums[(row * 16 + tile_row(e, lane)) * 4 + part] = last_sum;
        rate_sums[(row * 16 + tile_row(e, lane)) * 4 + part] = rate_sum;
      }
    }
    // Computes the weights of the pairs in the gradients of q and k, and the terms of the pairs in those of the gates.
    DELTATUNE_UNROLL
    for (int m = 0; m < own_pairs; ++m) {
      const int column = part + m * parts;
      if (column > row) continue;
      Tile qk, kk;
      tile_clear(qk);
      tile_clear(kk);
      DELTATUNE_UNROLL
      for (int c = 0; c < columns; c += 16) {
        const auto b = right(turned(keys, stride, c, column * 16), lane);
        multiply(qk, left(straight(queries, stride, row * 16, c), lane), b, lane);
        multiply(kk, left(straight(keys, stride, row * 16, c), lane), b, lane);
      }
      const float middle = decay.between(row, column);
      DELTATUNE_UNROLL
      for (int e = 0; e < 8; ++e) {
        const int i = row * 16 + tile_row(e, lane), j = column * 16 + tile_column(e, lane);
        const float d = rate[j] * decay.at(row == column, i, j, middle);
        dp[m].set(e, d * dp[m].get(e));
        da[m].set(e, i > j ? -rate[i] * d * da[m].get(e) : 0.0f);
        const bool pairs = i > j || (tail > 0 && i == j);
        qk.set(e, pairs ? dp[m].get(e) * qk.get(e) + da[m].get(e) * kk.get(e) : 0.0f);
      }
      put_tile<true, true>(weights_y, row * 16 * square + column * 16, square, dp[m], 16, 16, lane);
      put_tile<true, true>(weights_right, row * 16 * square + column * 16, square, da[m], 16, 16, lane);
      if (row == column) {
        DELTATUNE_UNROLL
        for (int e = 0; e < 8; ++e)
          diagonal[(row * 16 + tile_row(e, lane)) * 17 + tile_column(e, lane)] = qk.get(e);
      } else {
        DELTATUNE_UNROLL
        for (int side = 0; side < 2; ++side) {
          float sum = 0.0f;
          DELTATUNE_UNROLL
          for (int e = 0; e < 8; ++e)
            if (tile_side(e) == side) sum += qk.get(e);
          sum = row_sum(sum);
          const int e = side * tile_second;
          if (tile_column(e, lane) == 0) row_sums[(row * 16 + tile_row(e, lane)) * blocks + column] = sum;
        }
        DELTATUNE_UNROLL
        for (int e = 0; e < 8; ++e) {
          if (tile_side(e) != 0) continue;
          const float sum = column_sum(qk.get(e) + qk.get(e + tile_second));
          if (tile_row(e, lane) == 0) column_sums[(column * 16 + tile_column(e, lane)) * blocks + row] = sum;
        }
      }
    }
    barrier();
    DELTATUNE_UNROLL
    for (int t = 0; t < blocks; ++t) {
      if (t <= row) {
        const auto w = left(straight(weights_y, square, row * 16, t * 16), lane);
        const auto a = left(straight(weights_right, square, row * 16, t * 16), lane);
        DELTATUNE_UNROLL
        for (int m = 0; m < column_tiles; ++m) {
          const int column = (part * column_tiles + m) * 16;
          if (key_tiles % parts != 0 && column >= columns) continue;
          const auto b = right(straight(keys, stride, t * 16, column), lane);
          multiply(dq_sums[m], w, b, lane);
          multiply(dk_sums[m], a, b, lane);
        }
      }
      if (t >= row) {
        const auto w = left(turned(weights_y, square, row * 16, t * 16), lane);
        const auto a = left(turned(weights_right, square, row * 16, t * 16), lane);
        DELTATUNE_UNROLL
        for (int m = 0; m < column_tiles; ++m) {
          const int column = (part * column_tiles + m) * 16;
          if (key_tiles % parts != 0 && column >= columns) continue;
          multiply(dk_sums[m], w, right(straight(queries, stride, t * 16, column), lane), lane);
          multiply(dk_sums[m], a, right(straight(keys, stride, t * 16, column), lane), lane);
        }
      }
    }
    if (tail > 0) {
      if (at.index < C) ends_by_pairs<C>(diagonal, column_sums, rate_sums, rate, after, after_sums, parts, at.index);
      barrier();
    }
    // The shares of each position take the memory of the decay's tables, which are no longer read.
    threadgroup float* shares = decay.diagonal;
    static_assert(sharers <= 17, "a position's shares fit in a row");
    const int t = (unsigned)at.index % C, share = (unsigned)at.index / C;
    shares[t * 17 + share] =
        spanning<C, sharers>(diagonal, row_sums, column_sums, before_sums, after_sums, parts, t, share);
    barrier();
    if (at.index < C && t0 + t < length) {
      const long to = ((long)at.z * length + t0 + t) * HV + hv;
      float on_gate = 0.0f, on_beta = 0.0f;
      DELTATUNE_UNROLL
      for (int g = 0; g < GROUPS; ++g) on_gate += state_dots[g];
      on_gate *= before[C - 1];
      DELTATUNE_UNROLL
      for (int p = 0; p < parts; ++p) on_beta += rate_sums[t * 4 + p];
      DELTATUNE_UNROLL
      for (int p = 0; p < sharers; ++p) on_gate += shares[t * 17 + p];
      d_log_g[to] = live(t) ? on_gate : 0.0f;
      d_beta[to] = live(t) ? on_beta : 0.0f;
    }
    copies_fence();
  }
  DELTATUNE_UNROLL
  for (int m = 0; m < column_tiles; ++m) {
    const int column = (part * column_tiles + m) * 16;
    if (key_tiles % parts != 0 && column >= columns) continue;
    if (UNSTAGED) {
      DELTATUNE_UNROLL
      for (int e = 0; e < 8; ++e) {
        const int i = row * 16 + tile_row(e, lane), c = column + tile_column(e, lane);
        if (t0 + i >= length || c >= DK) continue;
        dq[key_offset + (long)i * HK * DK + c] = static_cast<In>(dq_sums[m].get(e));
        dk[key_offset + (long)i * HK * DK + c] = static_cast<In>(dk_sums[m].get(e));
      }
    } else {
      put_tile<true, true>(staged_q, row * 16 * stride + column, stride, dq_sums[m], 16, 16, lane);
      put_tile<true, true>(staged_k, row * 16 * stride + column, stride, dk_sums[m], 16, 16, lane);
    }
  }
  if (UNSTAGED) return;
  barrier();
  write_rows<C, columns, threads>(staged_q, 0, stride, dq + key_offset, HK * DK, length - t0, DK, at.index);
  write_rows<C, columns, threads>(staged_k, 0, stride, dk + key_offset, HK * DK, length - t0, DK, at.index);
}
