// The pairs of positions of hopper_gradients.h: the weights from their sums, and the products of these weights with q
// and k.

// Products of the 64 columns of pairs and of all columns of DK.
template <typename In> using PairProducts = Products<In, 64>;
template <typename In> using KeyProducts = Products<In, 128>;

// Adds pairs of numbers over two lanes, of which the one with `odd` keeps the second of each pair.
template <int COUNT>
inline void sum_pairs(thread float (&to)[COUNT / 2], const thread float (&from)[COUNT], bool odd, int mask) {
  DELTATUNE_UNROLL
  for (int i = 0; i < COUNT / 2; ++i) {
    const float kept = odd ? from[2 * i + 1] : from[2 * i], given = odd ? from[2 * i] : from[2 * i + 1];
    to[i] = kept + lane_exchange(given, mask);
  }
}
// Sums numbers [2, 4] over the four lanes that share a row. Lane i of them keeps the sums of column i.
inline void sum_rows(thread float (&to)[2], const thread float (&from)[8], int lane) {
  float halves[4];
  sum_pairs<8>(halves, from, lane & 1, 1);
  sum_pairs<4>(to, halves, lane & 2, 2);
}

// Starts and waits for the products of q (KIND 0) or k with k that the pairs of a unit are multiplied by.
template <typename In, int DV, int KIND>
inline void multiply_by_keys(Room room, thread float (&scores)[32]) {
  using Memory = HopperGradientMemory<DV>;
  register_fence(scores);
  products_start();
  const unsigned place = opaque((room.place & 0x3ffff) / 16), keys = place + Memory::k / 16;
  const unsigned left = place + (KIND == 0 ? Memory::q : Memory::k) / 16;
  DELTATUNE_UNROLL
  for (int m = 0; m < 8; ++m)
    PairProducts<In>::rows(scores, cores_operand(left + m * 16, 128, 2048), cores_operand(keys + m * 16, 128, 2048),
                           m > 0);
  products_sent();
  products_wait<0>();
  register_fence(scores);
}

// The column in its tile of element e of a lane's eight.
inline int tile_column(int e, Place at) {
  return e / 4 * 8 + at.lane % 4 * 2 + (e & 1);
}
// Turns a unit's pairs of the tile on the diagonal into weights, and writes their products with `scores`. The diagonal
// of N is R u.
template <int DV, int KIND>
inline void weigh_diagonal(Room room, GradientTables<DV> tables, thread float* pairs, const thread float* scores,
                           int tile, const thread int (&rows)[2], Place at) {
  using Memory = HopperGradientMemory<DV>;
  threadgroup float* diagonal = room.floats(Memory::diagonal + KIND * Memory::diagonal_bytes);
  threadgroup const float* rate = tables.rate();
  DELTATUNE_UNROLL
  for (int e = 0; e < 8; ++e) {
    const int i = rows[own_side(e)], column = tile_column(e, at), j = tile * 16 + column;
    const float d = (KIND == 0 ? rate[j] : -rate[i] * rate[j]) * tables.decay().diagonal[i * 17 + column];
    if (KIND == 1 && i == j) room.floats(Memory::rate_sums)[i] = pairs[e];
    pairs[e] = i > j || (KIND == 0 && i == j) ? d * pairs[e] : 0.0f;
    diagonal[i * 17 + column] = pairs[e] * scores[e];
  }
}

// Turns a unit's sums of pairs into weights, and writes the terms of their products with `scores` in the gradients of
// the gates. Tiles right of the diagonal become zeros.
template <int DV, int KIND>
inline void weigh_pairs(Room room, GradientTables<DV> tables, thread float (&pairs)[32],
                        const thread float (&scores)[32], Place at) {
  using Memory = HopperGradientMemory<DV>;
  const int warp = at.group % 4, rows[2] = {own_row(at, 0), own_row(at, 1)};
  const Decay<64> decay = tables.decay();
  threadgroup const float* rate = tables.rate();
  float row_factors[2], in_rows[8], in_columns[16];
  DELTATUNE_UNROLL
  for (int side = 0; side < 2; ++side)
    row_factors[side] = decay.prefix[rows[side]] * (KIND == 0 ? 1.0f : -rate[rows[side]]);
  DELTATUNE_UNROLL
  for (int tile = 3; tile >= 0; --tile) {
    thread float* own = pairs + tile * 8;
    float terms[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    if (tile > warp) {
      DELTATUNE_UNROLL
      for (int e = 0; e < 8; ++e) own[e] = 0.0f;
    } else if (tile == warp) {
      weigh_diagonal<DV, KIND>(room, tables, own, scores + tile * 8, tile, rows, at);
    } else {
      float suffixes[4], rates[4];
      DELTATUNE_UNROLL
      for (int part = 0; part < 2; ++part) {
        get_two(suffixes + 2 * part, decay.suffix + tile * 16 + tile_column(4 * part, at));
        get_two(rates + 2 * part, rate + tile * 16 + tile_column(4 * part, at));
      }
      DELTATUNE_UNROLL
      for (int e = 0; e < 8; ++e) {
        const int column = e / 4 * 2 + (e & 1);
        own[e] *= row_factors[own_side(e)] * (suffixes[column] * rates[column]);
        terms[e] = own[e] * scores[tile * 8 + e];
      }
      // The next tile is further away by all gates of this one.
      const float total = decay.total[tile];
      row_factors[0] *= total;
      row_factors[1] *= total;
    }
    in_rows[tile] = (terms[0] + terms[1]) + (terms[4] + terms[5]);
    in_rows[4 + tile] = (terms[2] + terms[3]) + (terms[6] + terms[7]);
    DELTATUNE_UNROLL
    for (int i = 0; i < 4; ++i) in_columns[4 * tile + i] = terms[i / 2 * 4 + i % 2] + terms[i / 2 * 4 + i % 2 + 2];
  }
  float by_row[2], eight[8], four[4], by_column[2];
  sum_rows(by_row, in_rows, at.lane);
  sum_pairs<16>(eight, in_columns, at.lane & 4, 4);
  sum_pairs<8>(four, eight, at.lane & 8, 8);
  sum_pairs<4>(by_column, four, at.lane & 16, 16);
  const int column = (at.lane >> 4 & 1) * 16 + (at.lane >> 3 & 1) * 8 + at.lane % 4 * 2 + (at.lane >> 2 & 1);
  DELTATUNE_UNROLL
  for (int side = 0; side < 2; ++side) {
    room.floats(Memory::row_sums + KIND * 1024)[rows[side] * 4 + at.lane % 4] = by_row[side];
    room.floats(Memory::column_sums + KIND * 1024)[(side * 32 + column) * 4 + warp] = by_column[side];
  }
}

// Adds the weights of all units of an item but the last to those in shared memory, and writes the last one's sum as
// two planes of bf16. A warp's sums in fp32 take the memory of its own rows of the planes.
template <typename In, int DV, int KIND>
inline void sum_weights(Room room, thread float (&weights)[32], int repeat, int repeats, Place at) {
  using Memory = HopperGradientMemory<DV>;
  const int planes = Memory::weights + KIND * 16384, own = planes + at.group % 4 * 2048 + at.lane * 16;
  DELTATUNE_UNROLL
  for (int i = 0; repeats > 1 && i < 8; ++i) {
    threadgroup float* place = room.floats(own + i / 4 * 8192 + i % 4 * 512);
    if (repeat > 0) {
      float before[4];
      get_four(before, place);
      DELTATUNE_UNROLL
      for (int j = 0; j < 4; ++j) weights[4 * i + j] += before[j];
    }
    if (repeat + 1 < repeats) put_four(place, weights + 4 * i);
  }
  if (repeat + 1 < repeats) return;
  group_barrier();
  unsigned high[16], low[16];
  split_pairs(high, low, weights);
  const unsigned place = room.place + planes;
  DELTATUNE_UNROLL
  for (int t = 0; t < 4; ++t) {
    const unsigned to = piece_place(place, at.group % 4 * 16 + at.lane % 16, 2 * t + at.lane / 16);
    put_parts(to, high + 4 * t);
    put_parts(to + 8192, low + 4 * t);
  }
}

// Adds the product of P's weights, which a team has in its registers, with k to dq: the low parts first. Its sums are
// apart from dq, for the results of products can lie in few of the registers.
template <typename In, int DV>
inline void add_weighted_keys(Room room, thread float (&dq)[64], const thread float (&weights)[32]) {
  using Memory = HopperGradientMemory<DV>;
  float sums[64];
  unsigned high[16], low[16];
  split_pairs(high, low, weights);
  register_fence(high);
  register_fence(low);
  register_fence(sums);
  products_start();
  const unsigned keys = opaque((room.place & 0x3ffff) / 16) + Memory::k / 16;
  DELTATUNE_UNROLL
  for (int i = 0; i < 8; ++i)
    KeyProducts<In>::columns(sums, (i < 4 ? low : high) + i % 4 * 4, cores_operand(keys + i % 4 * 256, 2048, 128),
                             i > 0);
  products_sent();
  products_wait<0>();
  register_fence(sums);
  DELTATUNE_UNROLL
  for (int i = 0; i < 64; ++i) dq[i] += sums[i];
}

// Adds eight products with one left operand after another to `sums`, while the next operand is loaded. load gives the
// operand of tile t in a plane, and `rows` is where the other operands begin: 16 rows of q or k for each tile.
template <typename In, typename Load>
inline void add_weighted(thread float (&sums)[64], unsigned planes, unsigned rows, Load load) {
  unsigned operands[2][4];
  register_fence(sums);
  DELTATUNE_UNROLL
  for (int step = 0; step < 8; ++step) {
    load(operands[step & 1], planes + (step < 4 ? 8192 : 0), step % 4 * 16);
    register_fence(operands[step & 1]);
    products_start();
    KeyProducts<In>::columns(sums, operands[step & 1], cores_operand(rows + step % 4 * 256, 2048, 128));
    products_sent();
    products_wait<1>();
    if (step > 0) register_fence(operands[1 - (step & 1)]);
  }
  products_wait<0>();
  register_fence(sums);
}
// Adds to dk the product of the transpose of P's weights with q, the low parts first.
template <typename In, int DV>
inline void add_weighted_queries(Room room, thread float (&dk)[64], Place at) {
  using Memory = HopperGradientMemory<DV>;
  const unsigned queries = opaque((room.place & 0x3ffff) / 16) + Memory::q / 16;
  add_weighted<In>(dk, room.place + Memory::weights, queries, [&](thread unsigned (&to)[4], unsigned plane, int t) {
    load_left_turned(to, plane, t, at.group % 4 * 16, at);
  });
}
// Adds to dk the product of N's weights and their transpose with k. The weights are zero on the diagonal and right of
// it, so that each element of the sum of both is one of them, and the bits of the other are zero.
template <typename In, int DV>
inline void add_weighted_neighbours(Room room, thread float (&dk)[64], Place at) {
  using Memory = HopperGradientMemory<DV>;
  const unsigned keys = opaque((room.place & 0x3ffff) / 16) + Memory::k / 16;
  add_weighted<In>(dk, room.place + Memory::weights + 16384, keys,
                   [&](thread unsigned (&to)[4], unsigned plane, int t) {
                     unsigned turned[4];
                     load_left(to, plane, at.group % 4 * 16, t, at);
                     load_left_turned(turned, plane, t, at.group % 4 * 16, at);
                     DELTATUNE_UNROLL
                     for (int i = 0; i < 4; ++i) to[i] |= turned[i];
                   });
}
