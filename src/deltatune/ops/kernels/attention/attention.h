// Softmax attention and its gradients, in steps of 32 queries by 32 keys, for any head size and dtype. Scores are
// exponents of two: scale * log2(e) * q k^T. The four groups of a block each compute one of the four 16x16 tiles of a
// step's scores. Each group holds 16 columns of every PIECE columns of the results, for all rows of the block.

// Which keys a query sees, and which queries see a key. Each is an interval with ends that never decrease with the
// position, so that the first and the last row of a tile tell which other tiles it meets. `starts` and `ends` [B, keys]
// are the bounds of each key's segment, and query i belongs to that of key ahead + i.
template <bool CAUSAL, int WINDOW, bool SEGMENTED, typename P>
struct Seen {
  int queries, keys;
  P starts, ends;
  long row;
  inline int ahead() const { return keys - queries; }
  // Query i sees the keys low(i) to high(i) - 1.
  inline int low(int query) const {
    const int i = query < queries ? query : queries - 1;
    int from = 0;
    if (WINDOW && i + ahead() - WINDOW + 1 > from) from = i + ahead() - WINDOW + 1;
    if (SEGMENTED && starts[row + ahead() + i] > from) from = starts[row + ahead() + i];
    return from;
  }
  inline int high(int query) const {
    const int i = query < queries ? query : queries - 1;
    int to = keys;
    if (CAUSAL && i + ahead() + 1 < to) to = i + ahead() + 1;
    if (SEGMENTED && ends[row + ahead() + i] < to) to = ends[row + ahead() + i];
    return to < 0 ? 0 : to;
  }
  // The queries first(j) to last(j) - 1 see key j.
  inline int first(int key) const {
    const int j = key < keys ? key : keys - 1;
    int from = 0;
    if (CAUSAL && j - ahead() > from) from = j - ahead();
    if (SEGMENTED && starts[row + j] - ahead() > from) from = starts[row + j] - ahead();
    return from;
  }
  inline int last(int key) const {
    const int j = key < keys ? key : keys - 1;
    int to = queries;
    if (WINDOW && j - ahead() + WINDOW < to) to = j - ahead() + WINDOW;
    if (SEGMENTED && ends[row + j] - ahead() < to) to = ends[row + j] - ahead();
    return to < 0 ? 0 : to;
  }
};

inline constexpr int pieces_of(int size, int piece) {
  return (size + piece - 1) / piece;
}

// The columns in shared memory of a block's own operands that are HELD there: none, the first, or both.
inline constexpr int held_columns(int held, int size, int value_size) {
  return held == 0 ? 0 : stride_of(size) + (held == 1 ? 0 : stride_of(value_size));
}

// The shared memory of a block: pieces of SIDES operands as they are in device memory, then the weights and the
// gradients of the scores, 32 x 32 each, which take the same place if SQUARES is 1, and rows that are held.
template <typename Input, int PIECE, int SIDES, int SQUARES, int HELD_COLUMNS>
struct AttentionMemory {
  using In = Input;
  static constexpr constant int piece = PIECE, sides = SIDES;
  static constexpr constant int stride = stride_of(PIECE), weight_stride = 40;
  static constexpr constant int side = 32 * stride * Exact<In>::bytes;
  static constexpr constant int weights = SIDES * side;
  static constexpr constant int gradients = weights + (SQUARES - 1) * 32 * weight_stride * Wide<In>::bytes;
  // The rows' largest scores, in two buffers; those of either half of a step's keys; and the sums of either half.
  static constexpr constant int numbers = gradients + 32 * weight_stride * Wide<In>::bytes;
  static constexpr constant int arrivals = numbers + 6 * 32 * 4;
  static constexpr constant int held = arrivals + 16;
  static constexpr constant int bytes = held + 32 * HELD_COLUMNS * Exact<In>::bytes;
};

// The shared memory through which a block reads its operands, and how many times it has been filled.
template <typename Layout>
struct Staging {
  using Memory = Layout;
  using In = typename Memory::In;
  threadgroup char* memory;
  int round;

  inline Exact<In> side(int which) const {
    return shared_at<Exact<In>>(memory, which * Memory::side, 32 * Memory::stride);
  }
  inline Wide<In> weights() const { return shared_at<Wide<In>>(memory, Memory::weights, 32 * Memory::weight_stride); }
  inline Wide<In> gradients() const {
    return shared_at<Wide<In>>(memory, Memory::gradients, 32 * Memory::weight_stride);
  }
  // The held operand that has SIZE columns and follows `columns` others.
  template <int SIZE>
  inline Exact<In> held(int columns) const {
    return shared_at<Exact<In>>(memory, Memory::held + 32 * columns * Exact<In>::bytes, 32 * stride_of(SIZE));
  }
};

// Loads 32 rows from `row` on and PIECE columns, those of piece number `piece`, of a matrix [rows, SIZE].
template <int SIZE, typename Memory, typename P>
inline void stage(const thread Staging<Memory>& staging, int which, P from, int row, int rows, int piece,
                  thread Arrival& arrival, int index) {
  constexpr int PIECE = Memory::piece;
  copy_rows<32, PIECE, 128>(staging.side(which), Memory::stride,
                            from + (long)row * SIZE + piece * PIECE, SIZE, SIZE - piece * PIECE,
                            alive<false>(Nothing{}, 0, row, rows), arrival, index);
}
template <typename Memory>
inline void staged_rows(thread Staging<Memory>& staging, const thread Arrival& arrival, int index) {
  copies_sent(arrival, index);
  copies_wait(arrival, staging.round++);
  barrier();
}

// Copies 32 rows from `row` on of a matrix [rows, SIZE] to where they are held, behind `columns` others.
template <int SIZE, typename Memory, typename P>
inline void hold_rows(thread Staging<Memory>& staging, int columns, P from, int row, int rows, int index) {
  Arrival arrival = arrival_at(staging.memory + Memory::arrivals, 0);
  copy_rows<32, padded(SIZE), 128>(staging.template held<SIZE>(columns), stride_of(SIZE), from + (long)row * SIZE, SIZE,
                                   SIZE, alive<false>(Nothing{}, 0, row, rows), arrival, index);
  staged_rows(staging, arrival, index);
}

// Rows of a block's own operand, from column `column` + k on: where they are held, or in the piece that starts at
// `column`.
template <bool HELD>
struct OperandRows {
  template <int SIZE, typename Memory>
  static inline View<Exact<typename Memory::In>, false> from(const thread Staging<Memory>& staging, int columns,
                                                             int row, int column, int k) {
    return straight(staging.template held<SIZE>(columns), stride_of(SIZE), row, column + k);
  }
};
template <>
struct OperandRows<false> {
  template <int SIZE, typename Memory>
  static inline View<Exact<typename Memory::In>, false> from(const thread Staging<Memory>& staging, int, int row, int,
                                                             int k) {
    return straight(staging.side(0), Memory::stride, row, k);
  }
};

// Returns the tile of a b^T of the group, where a and b have SIZE columns. It needs a barrier before it and ends with
// one. With HELD, the rows of a are held behind `columns` others.
template <int SIZE, bool HELD, typename Memory, typename A, typename B>
inline Tile tile_of_products(thread Staging<Memory>& staging, int columns, A a, int row, int rows, B b, int other,
                             int others, Place at) {
  constexpr int PIECE = Memory::piece, stride = Memory::stride, last = Memory::sides - 1;
  Tile sum;
  tile_clear(sum);
  for (int piece = 0; piece < pieces_of(SIZE, PIECE); ++piece) {
    Arrival arrival = arrival_at(staging.memory + Memory::arrivals, 0);
    if (!HELD) stage<SIZE>(staging, 0, a, row, rows, piece, arrival, at.index);
    stage<SIZE>(staging, last, b, other, others, piece, arrival, at.index);
    staged_rows(staging, arrival, at.index);
    DELTATUNE_UNROLL
    for (int k = 0; k < PIECE; k += 16) {
      if (piece * PIECE + k >= SIZE) continue;
      multiply(sum,
               left(OperandRows<HELD>::template from<SIZE>(staging, columns, at.group / 2 * 16, piece * PIECE, k),
                    at.lane),
               right(turned(staging.side(last), stride, k, at.group % 2 * 16), at.lane), at.lane);
    }
    barrier();
  }
  return sum;
}

// Adds weights b, where b has SIZE columns, to the group's tiles: its 16 columns of each piece, in both rows of tiles.
template <int SIZE, typename Memory, typename W, typename B>
inline void add_products(thread Tile* sums, thread Staging<Memory>& staging, W weights, B b, int row, int rows,
                         Place at) {
  constexpr int PIECE = Memory::piece;
  DELTATUNE_UNROLL
  for (int piece = 0; piece < pieces_of(SIZE, PIECE); ++piece) {
    Arrival arrival = arrival_at(staging.memory + Memory::arrivals, 0);
    stage<SIZE>(staging, 0, b, row, rows, piece, arrival, at.index);
    staged_rows(staging, arrival, at.index);
    DELTATUNE_UNROLL
    for (int k = 0; k < 2; ++k) {
      if (piece * PIECE + at.group * 16 >= SIZE) continue;
      const auto operand = right(straight(staging.side(0), Memory::stride, k * 16, at.group * 16), at.lane);
      DELTATUNE_UNROLL
      for (int m = 0; m < 2; ++m)
        multiply(sums[piece * 2 + m], left(straight(weights, Memory::weight_stride, m * 16, k * 16), at.lane), operand,
                 at.lane);
    }
    barrier();
  }
}

// Writes the results, each row times its factor.
template <int SIZE, int PIECE, typename Out, typename Factor>
inline void write_results(thread Tile* sums, GLOBAL Out* to, int row, int rows, Factor factor, Place at) {
  DELTATUNE_UNROLL
  for (int piece = 0; piece < pieces_of(SIZE, PIECE); ++piece) {
    DELTATUNE_UNROLL
    for (int m = 0; m < 2; ++m) {
      DELTATUNE_UNROLL
      for (int e = 0; e < 8; ++e) {
        const int i = m * 16 + tile_row(e, at.lane), column = piece * PIECE + at.group * 16 + tile_column(e, at.lane);
        if (row + i < rows && column < SIZE)
          to[(long)(row + i) * SIZE + column] = static_cast<Out>(sums[piece * 2 + m].get(e) * factor(i));
      }
    }
  }
}
// Results that a kernel does not write have no place.
template <int SIZE, int PIECE, typename Factor>
inline void write_results(thread Tile*, Nothing, int, int, Factor, Place) {}
template <typename Out>
inline GLOBAL Out* place_in(GLOBAL Out* results, long first) {
  return results + first;
}
inline Nothing place_in(Nothing results, long) {
  return results;
}
struct OneFactor {
  float factor;
  inline float operator()(int) const { return factor; }
};
struct RowFactors {
  threadgroup const float* factors;
  inline float operator()(int row) const { return factors[row]; }
};

// The factor that makes sums relative to the maximum `now`. Where it stays, it is 1: Metal's exp2(0) may be off, and its
// error would be repeated in every step.
inline float rescaling(float before, float now) {
  return before == now ? 1.0f : DELTATUNE_EXP2(before - now);
}

// Computes y [B, HQ, TQ, DV] and sums [B, HQ, TQ] from q [B, HQ, TQ, D], k [B, HK, TK, D] and v [B, HK, TK, DV]. `sums`
// is log2 of the sum of 2^score of each row, or infinite for a row that sees no key. The grid is (tiles of queries,
// query heads, rows of the batch).
template <typename In, int D, int DV, int PIECE, int SIDES, int SQUARES, int HELD, bool CAUSAL, int WINDOW,
          bool SEGMENTED, bool WITH_SINKS, typename PQ, typename PK, typename PV, typename PN, typename PS, typename PI>
inline void attention_forward(Place at, threadgroup char* memory, int heads, int key_heads, int queries, int keys, PQ q,
                              PK k, PV v, PN numbers, PS sinks, PI starts, PI ends, GLOBAL In* y, GLOBAL float* sums) {
  using Memory = AttentionMemory<In, PIECE, SIDES, SQUARES, held_columns(HELD, D, DV)>;
  constexpr int columns = pieces_of(DV, PIECE);
  Staging<Memory> staging{memory, 0};
  threadgroup float* largest = reinterpret_cast<threadgroup float*>(memory + Memory::numbers);
  threadgroup float* halves = largest + 64;
  threadgroup float* half_sums = largest + 128;
  const Seen<CAUSAL, WINDOW, SEGMENTED, PI> seen{queries, keys, starts, ends, (long)at.z * keys};
  // The last rows see the most keys under causality, so their blocks start first.
  const int row = ((queries + 31) / 32 - 1 - at.x) * 32;
  const long head = (long)at.z * heads + at.y, key_head = (long)at.z * key_heads + at.y / (heads / key_heads);
  const auto own_q = q + head * queries * D;
  const auto own_k = k + key_head * keys * D;
  const auto own_v = v + key_head * keys * DV;
  const float scale = numbers[0], sink = WITH_SINKS ? sinks[at.y] * 1.4426950408889634f : -INFINITY;

  Tile results[2 * columns];
  clear_tiles<2 * columns>(results);
  float total = WITH_SINKS ? 1.0f : 0.0f;
  if (at.index < 32) largest[at.index] = sink;
  arrivals_start(memory + Memory::arrivals, at.index);
  int low[2], high[2], parity = 0;
  const int top = at.group / 2 * 16;
  DELTATUNE_UNROLL
  for (int side = 0; side < 2; ++side) {
    const int i = row + top + tile_row(side * tile_second, at.lane);
    low[side] = seen.low(i);
    high[side] = seen.high(i);
  }
  const int last_key = seen.high(row + 31);
  if (HELD > 0) hold_rows<D>(staging, 0, own_q, row, queries, at.index);
  for (int key = seen.low(row) / 32 * 32; key < last_key; key += 32) {
    Tile scores = tile_of_products<D, (HELD > 0)>(staging, 0, own_q, row, queries, own_k, key, keys, at);
    float most[2] = {-INFINITY, -INFINITY};
    DELTATUNE_UNROLL
    for (int e = 0; e < 8; ++e) {
      const int j = key + at.group % 2 * 16 + tile_column(e, at.lane), side = tile_side(e);
      const float score = j >= low[side] && j < high[side] ? scores.get(e) : -INFINITY;
      scores.set(e, score);
      most[side] = score > most[side] ? score : most[side];
    }
    DELTATUNE_UNROLL
    for (int side = 0; side < 2; ++side) {
      const float whole = row_max(most[side]) * scale;
      const int i = top + tile_row(side * tile_second, at.lane);
      if (tile_column(0, at.lane) == 0) halves[at.group % 2 * 32 + i] = whole;
    }
    barrier();
    float sum[2] = {0.0f, 0.0f}, from[2];
    DELTATUNE_UNROLL
    for (int side = 0; side < 2; ++side) {
      const int i = top + tile_row(side * tile_second, at.lane);
      float now = largest[parity * 32 + i];
      DELTATUNE_UNROLL
      for (int half_of = 0; half_of < 2; ++half_of)
        now = halves[half_of * 32 + i] > now ? halves[half_of * 32 + i] : now;
      if (at.group % 2 == 0 && tile_column(0, at.lane) == 0) largest[(1 - parity) * 32 + i] = now;
      from[side] = now == -INFINITY ? 0.0f : now;
    }
    DELTATUNE_UNROLL
    for (int e = 0; e < 8; ++e) {
      // Rounded once, after the maximum is subtracted: half a unit of a large score is much of its weight.
      const float weight = DELTATUNE_EXP2(metal::fma(scores.get(e), scale, -from[tile_side(e)]));
      scores.set(e, weight);
      sum[tile_side(e)] += weight;
    }
    DELTATUNE_UNROLL
    for (int side = 0; side < 2; ++side) {
      const float whole = row_sum(sum[side]);
      const int i = top + tile_row(side * tile_second, at.lane);
      if (tile_column(0, at.lane) == 0) half_sums[at.group % 2 * 32 + i] = whole;
    }
    put_tile<true, true>(staging.weights(), top * Memory::weight_stride + at.group % 2 * 16, Memory::weight_stride,
                         scores, 16, 16, at.lane);
    barrier();
    if (at.index < 32) {
      const float before = largest[parity * 32 + at.index], now = largest[(1 - parity) * 32 + at.index];
      total = total * rescaling(before, now) + half_sums[at.index] + half_sums[32 + at.index];
    }
    DELTATUNE_UNROLL
    for (int m = 0; m < 2; ++m) {
      float factors[2];
      DELTATUNE_UNROLL
      for (int side = 0; side < 2; ++side) {
        const int i = m * 16 + tile_row(side * tile_second, at.lane);
        const float before = largest[parity * 32 + i], now = largest[(1 - parity) * 32 + i];
        factors[side] = rescaling(before, now);
      }
      DELTATUNE_UNROLL
      for (int piece = 0; piece < columns; ++piece) {
        DELTATUNE_UNROLL
        for (int e = 0; e < 8; ++e)
          results[piece * 2 + m].set(e, results[piece * 2 + m].get(e) * factors[tile_side(e)]);
      }
    }
    parity = 1 - parity;
    add_products<DV>(results, staging, staging.weights(), own_v, key, keys, at);
  }
  barrier();
  if (at.index < 32) {
    const int i = row + at.index;
    if (i < queries) sums[head * queries + i] = total > 0.0f ? largest[parity * 32 + at.index] + DELTATUNE_LOG2(total)
                                                             : INFINITY;
    half_sums[at.index] = total > 0.0f ? 1.0f / total : 0.0f;
  }
  barrier();
  write_results<DV, PIECE>(results, y + head * queries * DV, row, queries, RowFactors{half_sums}, at);
}

template <typename In>
struct DeltaMemory {
  static constexpr constant int bytes = 16;
};
// Computes delta [B, HQ, TQ], the inner product of each row of dy with that of y. The grid is (rows / 4), a row per
// group.
template <typename In, int DV, typename PY, typename PD>
inline void attention_delta(Place at, threadgroup char* memory, int rows, PY y, PD dy, GLOBAL float* delta) {
  const long row = (long)at.x * 4 + at.group;
  if (row >= rows) return;
  float sum = 0.0f;
  for (int column = at.lane; column < DV; column += 32)
    sum += static_cast<float>(y[row * DV + column]) * static_cast<float>(dy[row * DV + column]);
  sum = lane_sum(sum);
  if (at.lane == 0) delta[row] = sum;
}

// Computes weights from a tile of scores, and the scores' gradients from the products of dy and v, and writes those of
// them to shared memory that are wanted. The tile's rows are queries or, where TURNED, keys. `from` and `to` bound the
// positions that each of a lane's two rows sees.
template <bool TURNED, bool WEIGHTS, bool GRADIENTS, typename Memory, typename PL>
inline void put_gradients(const thread Staging<Memory>& staging, thread Tile& scores, thread Tile& products,
                          const thread int* from, const thread int* to, int column, int query, int queries, float scale,
                          PL sums, PL delta, Place at) {
  constexpr int stride = Memory::weight_stride;
  const int top = at.group / 2 * 16, side_column = at.group % 2 * 16;
  DELTATUNE_UNROLL
  for (int e = 0; e < 8; ++e) {
    const int j = column + side_column + tile_column(e, at.lane), side = tile_side(e);
    const int i = query + (TURNED ? side_column + tile_column(e, at.lane) : top + tile_row(e, at.lane));
    const bool on = i < queries && j >= from[side] && j < to[side];
    const float weight = on ? DELTATUNE_EXP2(metal::fma(scores.get(e), scale, -sums[i])) : 0.0f;
    scores.set(e, weight);
    if (GRADIENTS) products.set(e, on ? weight * (products.get(e) - delta[i]) : 0.0f);
  }
  if (WEIGHTS) put_tile<true, true>(staging.weights(), top * stride + side_column, stride, scores, 16, 16, at.lane);
  if (GRADIENTS)
    put_tile<true, true>(staging.gradients(), top * stride + side_column, stride, products, 16, 16, at.lane);
  barrier();
}

// Computes dq, one tile of queries per block. The grid is that of the forward pass.
template <typename In, int D, int DV, int PIECE, int SIDES, int SQUARES, int HELD, bool CAUSAL, int WINDOW,
          bool SEGMENTED, typename PQ, typename PK, typename PV, typename PD, typename PL, typename PN, typename PI>
inline void attention_queries(Place at, threadgroup char* memory, int heads, int key_heads, int queries, int keys, PQ q,
                              PK k, PV v, PD dy, PL sums, PL delta, PN numbers, PI starts, PI ends, GLOBAL In* dq) {
  using Memory = AttentionMemory<In, PIECE, SIDES, SQUARES, held_columns(HELD, D, DV)>;
  constexpr int columns = pieces_of(D, PIECE);
  Staging<Memory> staging{memory, 0};
  const Seen<CAUSAL, WINDOW, SEGMENTED, PI> seen{queries, keys, starts, ends, (long)at.z * keys};
  const int row = ((queries + 31) / 32 - 1 - at.x) * 32;
  const long head = (long)at.z * heads + at.y, key_head = (long)at.z * key_heads + at.y / (heads / key_heads);
  const auto own_q = q + head * queries * D;
  const auto own_dy = dy + head * queries * DV;
  const auto own_k = k + key_head * keys * D;
  const auto own_v = v + key_head * keys * DV;
  Tile results[2 * columns];
  clear_tiles<2 * columns>(results);
  arrivals_start(memory + Memory::arrivals, at.index);
  int low[2], high[2];
  DELTATUNE_UNROLL
  for (int side = 0; side < 2; ++side) {
    const int i = row + at.group / 2 * 16 + tile_row(side * tile_second, at.lane);
    low[side] = seen.low(i);
    high[side] = seen.high(i);
  }
  const int last_key = seen.high(row + 31);
  if (HELD > 0) hold_rows<D>(staging, 0, own_q, row, queries, at.index);
  if (HELD > 1) hold_rows<DV>(staging, stride_of(D), own_dy, row, queries, at.index);
  for (int key = seen.low(row) / 32 * 32; key < last_key; key += 32) {
    Tile scores = tile_of_products<D, (HELD > 0)>(staging, 0, own_q, row, queries, own_k, key, keys, at);
    Tile products =
        tile_of_products<DV, (HELD > 1)>(staging, stride_of(D), own_dy, row, queries, own_v, key, keys, at);
    put_gradients<false, false, true>(staging, scores, products, low, high, key, row, queries, numbers[0],
                                      sums + head * queries, delta + head * queries, at);
    add_products<D>(results, staging, staging.gradients(), own_k, key, keys, at);
  }
  write_results<D, PIECE>(results, dq + head * queries * D, row, queries, OneFactor{numbers[1]}, at);
}

// Computes dk and dv, or one of them, one tile of keys per block, by summing over the query heads that read the keys
// and over their queries, in order. The grid is (tiles of keys, key heads, rows of the batch).
template <typename In, int D, int DV, int PIECE, int SIDES, int SQUARES, int HELD, bool CAUSAL, int WINDOW,
          bool SEGMENTED, bool TO_KEYS, bool TO_VALUES, typename PQ, typename PK, typename PV, typename PD, typename PL,
          typename PN, typename PI, typename OK, typename OV>
inline void attention_keys(Place at, threadgroup char* memory, int heads, int key_heads, int queries, int keys, PQ q,
                           PK k, PV v, PD dy, PL sums, PL delta, PN numbers, PI starts, PI ends, OK dk, OV dv) {
  using Memory = AttentionMemory<In, PIECE, SIDES, SQUARES, held_columns(HELD, D, DV)>;
  constexpr int columns = TO_KEYS ? pieces_of(D, PIECE) : 0, value_columns = TO_VALUES ? pieces_of(DV, PIECE) : 0;
  Staging<Memory> staging{memory, 0};
  const Seen<CAUSAL, WINDOW, SEGMENTED, PI> seen{queries, keys, starts, ends, (long)at.z * keys};
  const int key = at.x * 32, each = heads / key_heads;
  const long key_head = (long)at.z * key_heads + at.y;
  const auto own_k = k + key_head * keys * D;
  const auto own_v = v + key_head * keys * DV;
  Tile results[TO_KEYS ? 2 * columns : 1], values[TO_VALUES ? 2 * value_columns : 1];
  clear_tiles<2 * columns>(results);
  clear_tiles<2 * value_columns>(values);
  arrivals_start(memory + Memory::arrivals, at.index);
  int first[2], last[2];
  DELTATUNE_UNROLL
  for (int side = 0; side < 2; ++side) {
    const int j = key + at.group / 2 * 16 + tile_row(side * tile_second, at.lane);
    first[side] = seen.first(j);
    last[side] = seen.last(j);
  }
  const int last_query = seen.last(key + 31);
  if (HELD > 0) hold_rows<D>(staging, 0, own_k, key, keys, at.index);
  if (HELD > 1) hold_rows<DV>(staging, stride_of(D), own_v, key, keys, at.index);
  for (int number = 0; number < each; ++number) {
    const long head = (long)at.z * heads + at.y * each + number;
    const auto own_q = q + head * queries * D;
    const auto own_dy = dy + head * queries * DV;
    for (int query = seen.first(key) / 32 * 32; query < last_query; query += 32) {
      Tile scores = tile_of_products<D, (HELD > 0)>(staging, 0, own_k, key, keys, own_q, query, queries, at), products;
      if (TO_KEYS)
        products =
            tile_of_products<DV, (HELD > 1)>(staging, stride_of(D), own_v, key, keys, own_dy, query, queries, at);
      put_gradients<true, TO_VALUES, TO_KEYS>(staging, scores, products, first, last, query, query, queries, numbers[0],
                                              sums + head * queries, delta + head * queries, at);
      if (TO_VALUES) add_products<DV>(values, staging, staging.weights(), own_dy, query, queries, at);
      if (TO_KEYS) add_products<D>(results, staging, staging.gradients(), own_q, query, queries, at);
    }
  }
  if (TO_KEYS)
    write_results<D, PIECE>(results, place_in(dk, key_head * keys * D), key, keys, OneFactor{numbers[1]}, at);
  if (TO_VALUES)
    write_results<DV, PIECE>(values, place_in(dv, key_head * keys * DV), key, keys, OneFactor{1.0f}, at);
}
