// Attention for bf16 and fp16 on Hopper. A block has three groups of four warps. The first lane of the first group
// loads tiles. The other two groups compute with them, 64 rows each, and while one multiplies, the other computes
// weights. attention_hopper_pack cuts the operands into tiles of 64 rows (k and v of the forward pass: HEIGHT rows),
// with zeros up to a multiple of 128 rows and of 64 columns. In the rows without a query, sums are infinite and deltas
// 0, so that no product needs to know where a matrix ends.

inline constexpr int whole(int size, int unit) {
  return (size + unit - 1) / unit * unit;
}
inline constexpr int panels(int size) {
  return whole(size, 64);
}

// Whether the rows that a block keeps are in registers. Products then read half as much from shared memory, which
// limits their speed where rows are short.
inline constexpr bool held(int size, int value_size) {
  return panels(size) <= 128 && panels(value_size) <= 128;
}
// How many stages of `stage` bytes, at most 4, fit in addition to `taken` bytes and those that all kernels need.
inline constexpr int stages_beside(int taken, int stage) {
  return (232448 - 1216 - taken) / stage < 4 ? (232448 - 1216 - taken) / stage : 4;
}

// Writes the rows of a result, each times its factor.
template <typename In, int SIZE, int COUNT, typename P>
inline void write_own(const thread float (&from)[COUNT], P to, int row, int rows, const thread float* factors,
                      Place at) {
  DELTATUNE_UNROLL
  for (int side = 0; side < 2; ++side) {
    const int i = row + own_row(at, side);
    if (i >= rows) continue;
    const auto line = to + (long)i * SIZE + at.lane % 4 * 2;
    DELTATUNE_UNROLL
    for (int j = 0; j < COUNT / 4; ++j)
      if (j * 8 < SIZE)
        put_pair(line + j * 8, PairOf<In>::of(from[4 * j + 2 * side] * factors[side],
                                              from[4 * j + 2 * side + 1] * factors[side]));
  }
}

template <typename In>
struct HopperPackMemory {
  static constexpr constant int bytes = 16;
};
// Copies 64 rows of x [N, length, D] into tiles of HEIGHT rows: piece `number`, of whole(length, 128) / 64 per matrix.
template <typename In, int D, int HEIGHT, typename P>
inline void pack_rows_of(int number, int length, P x, GLOBAL In* tiles, Place at) {
  constexpr int pieces = panels(D) / 8;
  const int each = whole(length, 128) / 64, matrix = number / each, first = number % each * 64;
  const auto from = x + (long)matrix * length * D;
  const auto to = tiles + ((long)matrix * whole(length, 128) + first / HEIGHT * HEIGHT) * panels(D);
  for (int i = at.index; i < 64 * pieces; i += 256) {
    const int row = first + i / pieces, r = row % HEIGHT, c = i % pieces;
    const bool live = row < length && c * 8 < D;
    put_piece(to + c / 8 * HEIGHT * 64 + r * 64 + ((c ^ r) & 7) * 8, from + (live ? (long)row * D + c * 8 : 0), live);
  }
}
// Computes the inner products of the rows of dy and y in such a piece: 0 past the end of the matrix.
template <int DV, typename PY, typename PD>
inline void delta_of(int number, int length, PY y, PD dy, GLOBAL float* delta, Place at) {
  const int each = whole(length, 128) / 64, matrix = number / each, first = number % each * 64;
  for (int r = at.group; r < 64; r += 8) {
    const int row = first + r;
    const long from = ((long)matrix * length + row) * DV;
    float sum = 0.0f;
    if (row < length)
      for (int column = at.lane; column < DV; column += 32)
        sum += static_cast<float>(y[from + column]) * static_cast<float>(dy[from + column]);
    sum = lane_sum(sum);
    if (at.lane == 0) delta[(long)matrix * whole(length, 128) + row] = sum;
  }
}
template <bool GRADIENTS> struct PackGradients {
  template <typename In, int DV, typename PY, typename PD, typename TD, typename TE>
  static inline void of(int number, int length, PY y, PD dy, TD packed, TE delta, Place at) {
    pack_rows_of<In, DV, 64>(number, length, dy, packed, at);
    delta_of<DV>(number, length, y, dy, delta, at);
  }
};
template <> struct PackGradients<false> {
  template <typename In, int DV, typename PY, typename PD, typename TD, typename TE>
  static inline void of(int, int, PY, PD, TD, TE, Place) {}
};
// Packs q, k and v, and where GRADIENTS dy as well, with the inner products of its rows and those of y. The grid is
// (pieces of 64 rows of all these matrices).
template <typename In, int D, int DV, int HEIGHT, bool GRADIENTS, typename PQ, typename PK, typename PV, typename PD,
          typename PY, typename TD, typename TE>
inline void attention_hopper_pack(Place at, threadgroup char* memory, int heads, int key_heads, int queries, int keys,
                                  PQ q, PK k, PV v, PD dy, PY y, GLOBAL In* packed_q, GLOBAL In* packed_k,
                                  GLOBAL In* packed_v, TD packed_dy, TE delta) {
  const int of_queries = heads * whole(queries, 128) / 64, of_keys = key_heads * whole(keys, 128) / 64;
  int number = at.x;
  if (number < of_queries) return pack_rows_of<In, D, 64>(number, queries, q, packed_q, at);
  number -= of_queries;
  if (number < of_keys) return pack_rows_of<In, D, HEIGHT>(number, keys, k, packed_k, at);
  number -= of_keys;
  if (number < of_keys) return pack_rows_of<In, DV, HEIGHT>(number, keys, v, packed_v, at);
  PackGradients<GRADIENTS>::template of<In, DV>(number - of_keys, queries, y, dy, packed_dy, delta, at);
}

template <typename In, int D, int DV, int HEIGHT>
struct HopperForwardMemory {
  static constexpr constant int key = HEIGHT * panels(D) * 2, value = HEIGHT * panels(DV) * 2;
  static constexpr constant bool in_registers = held(D, DV);
  static constexpr constant int own = in_registers ? 0 : 128 * panels(D) * 2, keys = own;
  static constexpr constant int stages = stages_beside(keys, key + value), value_stages = stages;
  static constexpr constant int values = keys + stages * key;
  static constexpr constant int barriers = values + stages * value;
  static constexpr constant int bytes = barriers + 192 + 1024;
};

// The barriers of a block: one for the arrival of the operand that stays, and for each of up to four stages one for the
// arrival of keys, one for that of values, and one each for when they are no longer needed.
struct HopperBarriers {
  unsigned place;
  inline unsigned own() const { return place; }
  inline unsigned keys(int stage) const { return place + 8 + 8 * stage; }
  inline unsigned values(int stage) const { return place + 40 + 8 * stage; }
  inline unsigned keys_read(int stage) const { return place + 72 + 8 * stage; }
  inline unsigned values_read(int stage) const { return place + 104 + 8 * stage; }
  inline void start(Place at) const {
    if (at.index == 0) {
      for (int i = 0; i < 9; ++i) mbarrier_init(place + 8 * i, 1);
      for (int i = 9; i < 17; ++i) mbarrier_init_for_groups(place + 8 * i, 8);
      mbarriers_started();
    }
    barrier();
  }
};
// The positions that the two rows of a lane see (low and high), and those that all 64 rows of the tile see.
struct Rows {
  int low[2], high[2], all_low, all_high;
  inline bool whole_tile(int from, int to) const { return from >= all_low && to <= all_high; }
};
template <int COUNT>
inline void mask_scores(thread float (&scores)[COUNT], int column, const thread Rows& rows, Place at) {
  if (rows.whole_tile(column, column + COUNT * 2)) return;
  DELTATUNE_UNROLL
  for (int i = 0; i < COUNT; ++i) {
    const int j = column + own_column(at, i);
    if (j < rows.low[own_side(i)] || j >= rows.high[own_side(i)]) scores[i] = -INFINITY;
  }
}

// Replaces scores by 2^(score - the row's largest score), and adds them to `totals`. Results from earlier tiles must be
// multiplied by `factors`.
template <int COUNT>
inline void softmax_step(thread float (&scores)[COUNT], thread float* largest, thread float* totals,
                         thread float* factors, float scale) {
  float most[2] = {largest[0], largest[1]};
  DELTATUNE_UNROLL
  for (int i = 0; i < COUNT; ++i) most[own_side(i)] = scores[i] > most[own_side(i)] ? scores[i] : most[own_side(i)];
  float from[2];
  DELTATUNE_UNROLL
  for (int side = 0; side < 2; ++side) {
    most[side] = quad_max(most[side]);
    from[side] = most[side] == -INFINITY ? 0.0f : most[side] * scale;
    factors[side] = power_of_two(largest[side] * scale - from[side]);
    largest[side] = most[side];
    totals[side] *= factors[side];
  }
  DELTATUNE_UNROLL
  for (int i = 0; i < COUNT; ++i) {
    scores[i] = power_of_two(scores[i] * scale - from[own_side(i)]);
    totals[own_side(i)] += scores[i];
  }
}

// Loads the tiles of the forward pass, which has no dy, and of the kernel that computes dq.
inline void copy_tile(unsigned, Nothing, int, unsigned) {}
template <typename Memory, int D, int DV, int HEIGHT, typename PQ, typename PD, typename PK, typename PV>
inline void load_keys(Room room, HopperBarriers barriers, PQ q, PD dy, PK k, PV v, int first, int last) {
  if (!Memory::in_registers) {
    mbarrier_expect(barriers.own(), Memory::keys);
    copy_tile(room.place, q, Memory::own, barriers.own());
    copy_tile(room.place + Memory::own, dy, Memory::keys - Memory::own, barriers.own());
  }
  for (int tile = last - 1, step = 0; tile >= first; --tile, ++step) {
    const int stage = step % Memory::stages, round = step / Memory::stages;
    if (round > 0) mbarrier_wait(barriers.keys_read(stage), round - 1);
    mbarrier_expect(barriers.keys(stage), Memory::key);
    copy_tile(room.place + Memory::keys + stage * Memory::key, k + (long)tile * HEIGHT * panels(D), Memory::key,
              barriers.keys(stage));
    const int other = step % Memory::value_stages, turn = step / Memory::value_stages;
    if (turn > 0) mbarrier_wait(barriers.values_read(other), turn - 1);
    mbarrier_expect(barriers.values(other), Memory::value);
    copy_tile(room.place + Memory::values + other * Memory::value, v + (long)tile * HEIGHT * panels(DV), Memory::value,
              barriers.values(other));
  }
}

// Skips the tiles from the present one down to `to`.
template <typename Memory>
inline void skip_tiles(HopperBarriers barriers, thread int& step, thread int& tile, int to, Place at) {
  constexpr int stages = Memory::stages, value_stages = Memory::value_stages;
  for (; tile >= to; --tile, ++step) {
    mbarrier_wait(barriers.keys(step % stages), step / stages);
    release(barriers.keys_read(step % stages), at);
    mbarrier_wait(barriers.values(step % value_stages), step / value_stages);
    release(barriers.values_read(step % value_stages), at);
  }
}

// Multiplies the rows that a block keeps, in shared memory or in registers, with those of a tile.
template <bool HELD> struct RowsTimes {
  template <typename In, int N, int SIZE, int COUNT>
  static inline void of(thread float (&d)[N / 2], const thread unsigned (&)[COUNT], unsigned own, unsigned b,
                        int panel) {
    multiply_rows<In, N, SIZE>(d, own, 8192, b, panel);
  }
  template <int SIZE, int COUNT, typename P>
  static inline void take(thread unsigned (&)[COUNT], P, HopperBarriers barriers, Place) {
    mbarrier_wait(barriers.own(), 0);
  }
};
template <> struct RowsTimes<true> {
  template <typename In, int N, int SIZE>
  static inline void of(thread float (&d)[N / 2], const thread unsigned (&own)[SIZE / 4], unsigned, unsigned b,
                        int panel) {
    multiply_held<In, N, SIZE>(d, own, b, panel);
  }
  template <int SIZE, typename P>
  static inline void take(thread unsigned (&to)[SIZE / 4], P tile, HopperBarriers, Place at) {
    hold_rows<SIZE>(to, tile, at);
    register_fence(to);
  }
};

// Computes the results of 64 rows over the block's tiles `last - 1` down to `first`. These rows see only the tiles
// own_first to own_last - 1, and skip the others.
template <typename In, int D, int DV, int HEIGHT, typename PQ>
inline void attend(Room room, HopperBarriers barriers, PQ q, thread float (&results)[panels(DV) / 2],
                   thread float* largest, thread float* totals, const thread Rows& rows, float scale, int first,
                   int last, int own_first, int own_last, Place at) {
  using Memory = HopperForwardMemory<In, D, DV, HEIGHT>;
  constexpr int N = HEIGHT, panel = HEIGHT * 128, stages = Memory::stages;
  const unsigned own = room.place + (at.group / 4 - 1) * 64 * panels(D) * 2;
  float scores[N / 2], factors[2];
  unsigned weights[N / 4];
  unsigned own_rows[Memory::in_registers ? panels(D) / 4 : 4];
  int step = 0, tile = last - 1;
  const auto multiply = [&](int number) {
    RowsTimes<Memory::in_registers>::template of<In, N, panels(D)>(
        scores, own_rows, own, room.place + Memory::keys + number % stages * Memory::key, panel);
    products_sent();
  };
  const auto add = [&](int number) {
    add_columns<In, panels(DV), N>(results, weights, room.place + Memory::values + number % stages * Memory::value,
                                   panel);
    products_sent();
  };
  RowsTimes<Memory::in_registers>::template take<panels(D)>(own_rows, q, barriers, at);
  skip_tiles<Memory>(barriers, step, tile, own_last > first ? own_last : first, at);
  if (tile >= own_first) {
    mbarrier_wait(barriers.keys(step % stages), step / stages);
    register_fence(scores);
    products_start();
    multiply(step);
    products_wait<0>();
    register_fence(scores);
    release(barriers.keys_read(step % stages), at);
    mask_scores(scores, tile * HEIGHT, rows, at);
    softmax_step(scores, largest, totals, factors, scale);
    pack_rows<In>(weights, scores);
    for (; tile > own_first; --tile, ++step) {
      const int next = step + 1;
      mbarrier_wait(barriers.keys(next % stages), next / stages);
      register_fence(scores);
      register_fence(results);
      register_fence(weights);
      products_start();
      multiply(next);
      mbarrier_wait(barriers.values(step % stages), step / stages);
      products_start();
      add(step);
      products_wait<1>();
      register_fence(scores);
      release(barriers.keys_read(next % stages), at);
      mask_scores(scores, (tile - 1) * HEIGHT, rows, at);
      softmax_step(scores, largest, totals, factors, scale);
      products_wait<0>();
      register_fence(results);
      release(barriers.values_read(step % stages), at);
      DELTATUNE_UNROLL
      for (int i = 0; i < panels(DV) / 2; ++i) results[i] *= factors[own_side(i)];
      pack_rows<In>(weights, scores);
    }
    mbarrier_wait(barriers.values(step % stages), step / stages);
    register_fence(results);
    register_fence(weights);
    products_start();
    add(step);
    products_wait<0>();
    register_fence(results);
    release(barriers.values_read(step % stages), at);
    --tile, ++step;
  }
  skip_tiles<Memory>(barriers, step, tile, first, at);
}

// Computes the outputs of attention_forward, from packed q, k and v, with sums [B, HQ, whole(TQ, 128)]. The grid is
// (query heads, rows of the batch, pieces of 128 queries).
template <typename In, int D, int DV, int HEIGHT, bool CAUSAL, int WINDOW, bool SEGMENTED, bool WITH_SINKS, typename PQ,
          typename PK, typename PV, typename PN, typename PS, typename PI>
inline void attention_hopper_forward(Place at, threadgroup char* memory, int heads, int key_heads, int queries,
                                     int keys, PQ q, PK k, PV v, PN numbers, PS sinks, PI starts, PI ends, GLOBAL In* y,
                                     GLOBAL float* sums) {
  using Memory = HopperForwardMemory<In, D, DV, HEIGHT>;
  const Room room = room_of(memory);
  const HopperBarriers barriers{room.place + Memory::barriers};
  const Seen<CAUSAL, WINDOW, SEGMENTED, PI> seen{queries, keys, starts, ends, (long)at.y * keys};
  const int tiles = (queries + 127) / 128, row = (tiles - 1 - at.z) * 128;
  const long head = (long)at.y * heads + at.x, key_head = (long)at.y * key_heads + at.x / (heads / key_heads);
  const int first = uniform(seen.low(row) / HEIGHT), end = uniform((seen.high(row + 127) + HEIGHT - 1) / HEIGHT);
  const int last = end > first ? end : first;
  barriers.start(at);
  at.group = uniform(at.group);
  if (at.group < 4) {
    fewer_registers<24>();
    if (at.index == 0)
      load_keys<Memory, D, DV, HEIGHT>(room, barriers, q + (head * tiles * 128 + row) * panels(D), Nothing{},
                                       k + key_head * whole(keys, 128) * panels(D),
                                       v + key_head * whole(keys, 128) * panels(DV), first, last);
    return;
  }
  more_registers<240>();
  const int top = row + (at.group / 4 - 1) * 64;
  Rows rows;
  for (int side = 0; side < 2; ++side) {
    rows.low[side] = seen.low(top + own_row(at, side));
    rows.high[side] = seen.high(top + own_row(at, side));
  }
  rows.all_low = uniform(seen.low(top + 63));
  rows.all_high = uniform(seen.high(top));
  const int own_first = uniform(seen.low(top) / HEIGHT), own_end = uniform((seen.high(top + 63) + HEIGHT - 1) / HEIGHT);
  float results[panels(DV) / 2], largest[2] = {-INFINITY, -INFINITY}, totals[2] = {0.0f, 0.0f};
  clear_floats(results);
  const float scale = numbers[0];
  attend<In, D, DV, HEIGHT>(room, barriers, q + (head * tiles * 128 + top) * panels(D), results, largest, totals, rows,
                            scale, first, last, own_first, own_end < last ? own_end : last, at);
  float factors[2];
  DELTATUNE_UNROLL
  for (int side = 0; side < 2; ++side) {
    float total = quad_sum(totals[side]), most = largest[side] == -INFINITY ? -INFINITY : largest[side] * scale;
    factors[side] = 1.0f;
    if (WITH_SINKS) {
      const float sink = sinks[at.x] * 1.4426950408889634f, more = sink > most ? sink : most;
      factors[side] = power_of_two(most - more);
      total = total * factors[side] + power_of_two(sink - more);
      most = more;
    }
    factors[side] = total > 0.0f ? factors[side] / total : 0.0f;
    const int i = top + own_row(at, side);
    if (at.lane % 4 == 0)
      sums[head * tiles * 128 + i] = i < queries && total > 0.0f ? most + DELTATUNE_LOG2(total) : INFINITY;
  }
  write_own<In, DV>(results, y + head * queries * DV, top, queries, factors, at);
}

template <typename In, int D, int DV, int HEIGHT>
struct HopperQueriesMemory {
  static constexpr constant int key = HEIGHT * panels(D) * 2, value = HEIGHT * panels(DV) * 2;
  static constexpr constant bool in_registers = held(D, DV);
  static constexpr constant int own = in_registers ? 0 : 128 * panels(D) * 2;
  static constexpr constant int keys = in_registers ? 0 : own + 128 * panels(DV) * 2;
  // If two stages of keys and values do not fit, values have only one.
  static constexpr constant int both = stages_beside(keys, key + value);
  static constexpr constant int stages = both > 1 ? both : 2, value_stages = both > 1 ? both : 1;
  static constexpr constant int values = keys + stages * key;
  static constexpr constant int barriers = values + value_stages * value;
  static constexpr constant int bytes = barriers + 192 + 1024;
};

// Computes dq of 64 rows in the manner of `attend`: while the products of one tile run, the gradients of the scores of
// the next are computed.
template <typename In, int D, int DV, int HEIGHT, typename PQ, typename PD>
inline void add_gradients(Room room, HopperBarriers barriers, PQ q, PD dy, thread float (&results)[panels(D) / 2],
                          const thread Rows& rows, const thread float* sums, const thread float* deltas, float scale,
                          int first, int last, int own_first, int own_last, Place at) {
  using Memory = HopperQueriesMemory<In, D, DV, HEIGHT>;
  constexpr int N = HEIGHT, panel = HEIGHT * 128, stages = Memory::stages, value_stages = Memory::value_stages;
  const int which = at.group / 4 - 1;
  const unsigned own = room.place + which * 64 * panels(D) * 2;
  const unsigned gradient = room.place + Memory::own + which * 64 * panels(DV) * 2;
  float scores[N / 2], products[N / 2];
  unsigned gradients[N / 4];
  unsigned own_rows[Memory::in_registers ? panels(D) / 4 : 4], own_gradients[Memory::in_registers ? panels(DV) / 4 : 4];
  int step = 0, tile = last - 1;
  // `differentiate` replaces scores by weights, and `weigh` the products of dy and v by the scores' gradients.
  const auto differentiate = [&](int column) {
    mask_scores(scores, column, rows, at);
    DELTATUNE_UNROLL
    for (int i = 0; i < N / 2; ++i) scores[i] = power_of_two(scores[i] * scale - sums[own_side(i)]);
  };
  const auto weigh = [&](int number) {
    register_fence(products);
    release(barriers.values_read(number % value_stages), at);
    DELTATUNE_UNROLL
    for (int i = 0; i < N / 2; ++i) products[i] = scores[i] * (products[i] - deltas[own_side(i)]);
  };
  using Times = RowsTimes<Memory::in_registers>;
  const auto multiply = [&](int number) {
    Times::template of<In, N, panels(D)>(scores, own_rows, own,
                                         room.place + Memory::keys + number % stages * Memory::key, panel);
  };
  const auto multiply_gradients = [&](int number) {
    Times::template of<In, N, panels(DV)>(products, own_gradients, gradient,
                                          room.place + Memory::values + number % value_stages * Memory::value, panel);
  };
  Times::template take<panels(D)>(own_rows, q, barriers, at);
  Times::template take<panels(DV)>(own_gradients, dy, barriers, at);
  skip_tiles<Memory>(barriers, step, tile, own_last > first ? own_last : first, at);
  if (tile >= own_first) {
    mbarrier_wait(barriers.keys(step % stages), step / stages);
    mbarrier_wait(barriers.values(step % value_stages), step / value_stages);
    register_fence(scores);
    register_fence(products);
    products_start();
    multiply(step);
    multiply_gradients(step);
    products_sent();
    products_wait<0>();
    register_fence(scores);
    differentiate(tile * HEIGHT);
    weigh(step);
    pack_rows<In>(gradients, products);
    for (; tile > own_first; --tile, ++step) {
      const int next = step + 1;
      mbarrier_wait(barriers.keys(next % stages), next / stages);
      register_fence(scores);
      register_fence(products);
      register_fence(results);
      register_fence(gradients);
      products_start();
      multiply(next);
      products_sent();
      mbarrier_wait(barriers.values(next % value_stages), next / value_stages);
      products_start();
      multiply_gradients(next);
      products_sent();
      products_start();
      add_columns<In, panels(D), N>(results, gradients, room.place + Memory::keys + step % stages * Memory::key, panel);
      products_sent();
      products_wait<2>();
      register_fence(scores);
      differentiate((tile - 1) * HEIGHT);
      products_wait<1>();
      weigh(next);
      products_wait<0>();
      register_fence(results);
      release(barriers.keys_read(step % stages), at);
      pack_rows<In>(gradients, products);
    }
    register_fence(results);
    register_fence(gradients);
    products_start();
    add_columns<In, panels(D), N>(results, gradients, room.place + Memory::keys + step % stages * Memory::key, panel);
    products_sent();
    products_wait<0>();
    register_fence(results);
    release(barriers.keys_read(step % stages), at);
    --tile, ++step;
  }
  skip_tiles<Memory>(barriers, step, tile, first, at);
}

// Computes dq, as attention_queries does, from packed operands. The grid is that of the forward pass.
template <typename In, int D, int DV, int HEIGHT, bool CAUSAL, int WINDOW, bool SEGMENTED, typename PQ, typename PK,
          typename PV, typename PD, typename PL, typename PN, typename PI>
inline void attention_hopper_queries(Place at, threadgroup char* memory, int heads, int key_heads, int queries,
                                     int keys, PQ q, PK k, PV v, PD dy, PL sums, PL delta, PN numbers, PI starts,
                                     PI ends, GLOBAL In* dq) {
  using Memory = HopperQueriesMemory<In, D, DV, HEIGHT>;
  const Room room = room_of(memory);
  const HopperBarriers barriers{room.place + Memory::barriers};
  const Seen<CAUSAL, WINDOW, SEGMENTED, PI> seen{queries, keys, starts, ends, (long)at.y * keys};
  const int tiles = (queries + 127) / 128, row = (tiles - 1 - at.z) * 128;
  const long head = (long)at.y * heads + at.x, key_head = (long)at.y * key_heads + at.x / (heads / key_heads);
  const int first = uniform(seen.low(row) / HEIGHT), end = uniform((seen.high(row + 127) + HEIGHT - 1) / HEIGHT);
  const int last = end > first ? end : first;
  barriers.start(at);
  at.group = uniform(at.group);
  if (at.group < 4) {
    fewer_registers<24>();
    if (at.index == 0)
      load_keys<Memory, D, DV, HEIGHT>(room, barriers, q + (head * tiles * 128 + row) * panels(D),
                                       dy + (head * tiles * 128 + row) * panels(DV),
                                       k + key_head * whole(keys, 128) * panels(D),
                                       v + key_head * whole(keys, 128) * panels(DV), first, last);
    return;
  }
  more_registers<240>();
  const int top = row + (at.group / 4 - 1) * 64;
  Rows rows;
  float own_sums[2], own_deltas[2];
  for (int side = 0; side < 2; ++side) {
    const int i = top + own_row(at, side);
    rows.low[side] = seen.low(i);
    rows.high[side] = seen.high(i);
    own_sums[side] = sums[head * tiles * 128 + i];
    own_deltas[side] = delta[head * tiles * 128 + i];
  }
  rows.all_low = uniform(seen.low(top + 63));
  rows.all_high = uniform(seen.high(top));
  const int own_first = uniform(seen.low(top) / HEIGHT), own_end = uniform((seen.high(top + 63) + HEIGHT - 1) / HEIGHT);
  float results[panels(D) / 2];
  clear_floats(results);
  const long from = head * tiles * 128 + top;
  add_gradients<In, D, DV, HEIGHT>(room, barriers, q + from * panels(D), dy + from * panels(DV), results, rows, own_sums,
                                   own_deltas, numbers[0], first, last, own_first, own_end < last ? own_end : last, at);
  const float factors[2] = {numbers[1], numbers[1]};
  write_own<In, D>(results, dq + head * queries * D, top, queries, factors, at);
}

// A block has HEIGHT keys, 64 or 128. One of its groups of warps computes the weights and dv, the other the gradients
// of the scores and dk.
template <typename In, int D, int DV, int HEIGHT>
struct HopperKeysMemory {
  static constexpr constant int block = 64 * panels(D) * 2, value_block = 64 * panels(DV) * 2;
  static constexpr constant int own = HEIGHT / 64 * block, own_value = HEIGHT / 64 * value_block;
  static constexpr constant int query = 64 * panels(D) * 2, gradient = 64 * panels(DV) * 2;
  static constexpr constant int exchange = own + own_value;
  // Weights use two buffers in turn: when both groups of warps meet for one, the other has been read.
  static constexpr constant int queries = exchange + 2 * 64 * 64 * 4;
  static constexpr constant int stages = stages_beside(queries, query + gradient);
  static constexpr constant int gradients = queries + stages * query;
  static constexpr constant int barriers = gradients + stages * gradient;
  static constexpr constant int bytes = barriers + 192 + 1024;
};

// The steps of a block: `count` tiles of queries from number `first` on, for each of the heads that read its keys.
struct HopperSteps {
  int first, count, heads, length;
  long head;
  inline int all() const { return count * heads; }
  inline int tile(int step) const { return first + step % count; }
  // The first query of a step, numbered through all matrices of `length` rows each.
  inline long row(int step) const { return (head + step / count) * length + (long)tile(step) * 64; }
};

// Loads the tiles of the kernel that computes dk and dv.
template <typename In, int D, int DV, int HEIGHT, typename PQ, typename PD>
inline void load_queries(Room room, HopperBarriers barriers, PQ q, PD dy, HopperSteps steps) {
  using Memory = HopperKeysMemory<In, D, DV, HEIGHT>;
  for (int step = 0; step < steps.all(); ++step) {
    const int stage = step % Memory::stages, round = step / Memory::stages;
    const long row = steps.row(step);
    if (round > 0) mbarrier_wait(barriers.keys_read(stage), round - 1);
    mbarrier_expect(barriers.keys(stage), Memory::query);
    copy_tile(room.place + Memory::queries + stage * Memory::query, q + row * panels(D), Memory::query,
              barriers.keys(stage));
    if (round > 0) mbarrier_wait(barriers.values_read(stage), round - 1);
    mbarrier_expect(barriers.values(stage), Memory::gradient);
    copy_tile(room.place + Memory::gradients + stage * Memory::gradient, dy + row * panels(DV), Memory::gradient,
              barriers.values(stage));
  }
}
// Loads the numbers of the queries that are a lane's columns: two of every eight.
template <typename P>
inline void load_row_numbers(thread float (&to)[16], P from, Place at) {
  DELTATUNE_UNROLL
  for (int j = 0; j < 8; ++j) get_two(to + 2 * j, from + j * 8 + at.lane % 4 * 2);
}

// Passes the weights of 64 keys from one group of warps to the other, where lanes hold the same elements: pass_weights
// writes them, and multiply_by_weights multiplies by them.
inline void pass_weights(threadgroup float* room, const thread float (&x)[32], Place at) {
  DELTATUNE_UNROLL
  for (int i = 0; i < 8; ++i) put_four(room + (i * 128 + at.index % 128) * 4, x + 4 * i);
}
inline void multiply_by_weights(thread float (&x)[32], threadgroup const float* room, Place at) {
  DELTATUNE_UNROLL
  for (int i = 0; i < 8; ++i) {
    float weights[4];
    get_four(weights, room + (i * 128 + at.index % 128) * 4);
    DELTATUNE_UNROLL
    for (int j = 0; j < 4; ++j) x[4 * i + j] *= weights[j];
  }
}
// Computes dv: the weights [keys, queries] from k and q are handed over, then multiplied with dy. Or, TO_KEYS, dk: the
// products [keys, queries] of v and dy are multiplied by the weights from the other group, then with q. A unit of the
// work is a tile of queries with 64 keys. While the products of one unit run, the scores of the next are weighed.
template <bool TO_KEYS, typename In, int D, int DV, int HEIGHT, typename PL>
inline void add_units(Room room, HopperBarriers barriers,
                      thread float (&results)[HEIGHT / 64][panels(TO_KEYS ? D : DV) / 2], const thread Rows* rows,
                      float scale, PL numbers, HopperSteps steps, Place at) {
  using Memory = HopperKeysMemory<In, D, DV, HEIGHT>;
  constexpr int blocks = HEIGHT / 64, stages = Memory::stages;
  float scores[32], row_numbers[16];
  unsigned weights[16];
  const auto wait = [&](bool values, int step) {
    mbarrier_wait(values ? barriers.values(step % stages) : barriers.keys(step % stages), step / stages);
  };
  const auto read = [&](bool values, int step) {
    release(values ? barriers.values_read(step % stages) : barriers.keys_read(step % stages), at);
  };
  const auto query = [&](int step) { return room.place + Memory::queries + step % stages * Memory::query; };
  const auto gradient = [&](int step) { return room.place + Memory::gradients + step % stages * Memory::gradient; };
  const auto multiply = [&](int step, int b) {
    multiply_rows<In, 64, panels(TO_KEYS ? DV : D)>(
        scores, room.place + (TO_KEYS ? Memory::own + b * Memory::value_block : b * Memory::block), 8192,
        TO_KEYS ? gradient(step) : query(step), 8192);
    products_sent();
  };
  const auto add = [&](int step, int b) {
    add_columns<In, panels(TO_KEYS ? D : DV), 64>(results[b], weights, TO_KEYS ? query(step) : gradient(step), 8192);
    products_sent();
  };
  const auto weigh = [&](int step, int b) {
    if (!TO_KEYS) mask_scores(scores, steps.tile(step) * 64, rows[b], at);
    DELTATUNE_UNROLL
    for (int i = 0; i < 32; ++i) {
      const float number = row_numbers[i / 4 * 2 + (i & 1)];
      scores[i] = TO_KEYS ? scores[i] - number : power_of_two(scores[i] * scale - number);
    }
    if (b + 1 == blocks) read(TO_KEYS, step);
    threadgroup float* exchange = room.floats(Memory::exchange + (step * blocks + b) % 2 * 16384);
    if (!TO_KEYS) pass_weights(exchange, scores, at);
    named_barrier<256>();
    if (TO_KEYS) multiply_by_weights(scores, exchange, at);
  };
  const auto go_on = [&](int step, int b) {
    const int next = step + (b + 1) / blocks, next_block = (b + 1) % blocks;
    if (next_block == 0) wait(TO_KEYS, next);
    if (b == 0) wait(!TO_KEYS, step);
    register_fence(scores);
    register_fence(results[b]);
    register_fence(weights);
    products_start();
    multiply(next, next_block);
    add(step, b);
    if (next_block == 0) load_row_numbers(row_numbers, numbers + steps.row(next), at);
    products_wait<1>();
    register_fence(scores);
    weigh(next, next_block);
    products_wait<0>();
    register_fence(results[b]);
    if (b + 1 == blocks) read(!TO_KEYS, step);
    pack_rows<In>(weights, scores);
  };
  if (steps.all() == 0) return;
  wait(TO_KEYS, 0);
  register_fence(scores);
  products_start();
  multiply(0, 0);
  load_row_numbers(row_numbers, numbers + steps.row(0), at);
  products_wait<0>();
  register_fence(scores);
  weigh(0, 0);
  pack_rows<In>(weights, scores);
  const int end = steps.all() - 1;
  for (int step = 0; step < end; ++step) {
    DELTATUNE_UNROLL
    for (int b = 0; b < blocks; ++b) go_on(step, b);
  }
  DELTATUNE_UNROLL
  for (int b = 0; b + 1 < blocks; ++b) go_on(end, b);
  if (blocks == 1) wait(!TO_KEYS, end);
  register_fence(results[blocks - 1]);
  register_fence(weights);
  products_start();
  add(end, blocks - 1);
  products_wait<0>();
  register_fence(results[blocks - 1]);
}

// Computes dk and dv, as attention_keys does, from packed operands. The grid is (key heads, rows of the batch, tiles of
// HEIGHT keys).
template <typename In, int D, int DV, int HEIGHT, bool CAUSAL, int WINDOW, bool SEGMENTED, typename PQ, typename PK,
          typename PV, typename PD, typename PL, typename PN, typename PI>
inline void attention_hopper_keys(Place at, threadgroup char* memory, int heads, int key_heads, int queries, int keys,
                                  PQ q, PK k, PV v, PD dy, PL sums, PL delta, PN numbers, PI starts, PI ends,
                                  GLOBAL In* dk, GLOBAL In* dv) {
  using Memory = HopperKeysMemory<In, D, DV, HEIGHT>;
  constexpr int blocks = HEIGHT / 64;
  const Room room = room_of(memory);
  const HopperBarriers barriers{room.place + Memory::barriers};
  const Seen<CAUSAL, WINDOW, SEGMENTED, PI> seen{queries, keys, starts, ends, (long)at.y * keys};
  const int key = at.z * HEIGHT, each = heads / key_heads;
  const long key_head = (long)at.y * key_heads + at.x, head = (long)at.y * heads + (long)at.x * each;
  const int first = uniform(seen.first(key) / 64), end = uniform((seen.last(key + HEIGHT - 1) + 63) / 64);
  const HopperSteps steps{first, end > first ? end - first : 0, each, whole(queries, 128), head};
  barriers.start(at);
  at.group = uniform(at.group);
  if (at.group < 4) {
    fewer_registers<24>();
    if (at.index == 0) {
      mbarrier_expect(barriers.own(), Memory::exchange);
      const long row = key_head * whole(keys, 128) + key;
      copy_tile(room.place, k + row * panels(D), Memory::own, barriers.own());
      copy_tile(room.place + Memory::own, v + row * panels(DV), Memory::own_value, barriers.own());
      load_queries<In, D, DV, HEIGHT>(room, barriers, q, dy, steps);
    }
    return;
  }
  more_registers<240>();
  mbarrier_wait(barriers.own(), 0);
  if (at.group < 8) {
    Rows rows[blocks];
    for (int b = 0; b < blocks; ++b) {
      for (int side = 0; side < 2; ++side) {
        rows[b].low[side] = seen.first(key + b * 64 + own_row(at, side));
        rows[b].high[side] = seen.last(key + b * 64 + own_row(at, side));
      }
      rows[b].all_low = uniform(seen.first(key + b * 64 + 63));
      rows[b].all_high = uniform(seen.last(key + b * 64));
    }
    float results[blocks][panels(DV) / 2];
    for (int b = 0; b < blocks; ++b) clear_floats(results[b]);
    add_units<false, In, D, DV, HEIGHT>(room, barriers, results, rows, numbers[0], sums, steps, at);
    const float factors[2] = {1.0f, 1.0f};
    DELTATUNE_UNROLL
    for (int b = 0; b < blocks; ++b)
      write_own<In, DV>(results[b], dv + key_head * keys * DV, key + b * 64, keys, factors, at);
  } else {
    float results[blocks][panels(D) / 2];
    for (int b = 0; b < blocks; ++b) clear_floats(results[b]);
    add_units<true, In, D, DV, HEIGHT>(room, barriers, results, nullptr, 0.0f, delta, steps, at);
    const float factors[2] = {numbers[1], numbers[1]};
    DELTATUNE_UNROLL
    for (int b = 0; b < blocks; ++b)
      write_own<In, D>(results[b], dk + key_head * keys * D, key + b * 64, keys, factors, at);
  }
}
