// LoRA's products on 16-bit matrices: sums along rows and sums over rows with a result RANK wide, at most 64, and a
// product with such a narrow matrix that is added to a wide one. All that counts is how fast they read and write, so
// fragments go from device memory straight to registers, many loads are on their way at once, and a wide matrix is read
// in whole lines. The sums of groups or blocks are added in a fixed order, so the bits never vary.

// RANK in whole columns of fragments: their number, and the floats that a line takes in shared memory, of an odd number
// so that lines start in different banks.
inline constexpr int rank_tiles(int rank) { return (rank + 7) / 8; }
inline constexpr int line_floats(int rank) { return rank_tiles(rank) * 8 + 1; }

// Matrices [lines, EACH] of adapters that read one input. Together they stand for one matrix with lines of the ranks of
// all of them, one adapter after another. EACH is a multiple of 8, so that eight ranks belong to one adapter.
template <int EACH, int COUNT, typename P>
struct Several {
  P parts[COUNT];
  inline P of_rank(int rank) const {
    P part = parts[0];
    DELTATUNE_UNROLL
    for (int i = 1; i < COUNT; ++i)
      if (rank >= i * EACH) part = parts[i];
    return part;
  }
};
template <int EACH, typename P, typename... More>
inline Several<EACH, 1 + (int)sizeof...(More), P> several(P first, More... more) {
  return {{first, more...}};
}
template <int BYTES, int EACH, int COUNT, typename P>
inline bool starts_at_multiple(Several<EACH, COUNT, P> matrices) {
  bool all = true;
  DELTATUNE_UNROLL
  for (int i = 0; i < COUNT; ++i) all = all && starts_at_multiple<BYTES>(matrices.parts[i]);
  return all;
}
// A single matrix itself. Code for one alone has to compile for several, too, but is never run for them.
template <typename P>
inline P single(P matrix) {
  return matrix;
}
template <int EACH, int COUNT, typename P>
inline P single(Several<EACH, COUNT, P> matrices) {
  return matrices.parts[0];
}
// The address of an element of a matrix with lines of RANK elements.
template <int RANK, typename P>
inline P in_line(P matrix, long line, int rank) {
  return matrix + line * RANK + rank;
}
template <int RANK, int EACH, int COUNT, typename P>
inline P in_line(Several<EACH, COUNT, P> matrices, long line, int rank) {
  return matrices.of_rank(rank) + line * EACH + rank % EACH;
}

// LINES is the number of rows of x that a block takes.
template <int RANK, int LINES, int GROUPS>
struct LowRankRowsMemory {
  static constexpr constant int bytes = GROUPS * LINES * line_floats(RANK) * 4;
};

// Keeps a fragment's sums for the lines `first` (g) and `second` (g + 8) and the columns from 8 `tile` on. LINES is the
// number of lines of a group.
template <int RANK, int LINES>
inline void keep_sums(threadgroup float* all, const thread float (&sums)[4], int group, int first, int second, int tile,
                      int lane) {
  DELTATUNE_UNROLL
  for (int e = 0; e < 4; ++e) {
    const int line = e < 2 ? first : second;
    all[(group * LINES + line) * line_floats(RANK) + tile * 8 + (lane & 3) * 2 + (e & 1)] = sums[e];
  }
}

// Loads 32 inputs of LINES rows and of the weight, of which a lane has the eight from 8 t on. It gives them to two
// products of 16 in the same order on both sides. Inputs past the end are zeros.
template <typename In, int RANK, int LINES, bool TRANSPOSED, bool ALIGNED, typename PX, typename PW>
inline void load_inputs(thread unsigned (&left)[LINES / 8][4], thread unsigned (&right)[rank_tiles(RANK)][4], int start,
                        int rows, int inputs, int from, PX x, PW weight, int lane) {
  const int g = lane >> 2, t = lane & 3;
  DELTATUNE_UNROLL
  for (int m = 0; m < LINES / 8; ++m) {
    const int row = within(from + m * 8 + g, rows), k = start + t * 8;
    load_pairs<ALIGNED>(left[m], x + (long)row * inputs + k, k < inputs ? 8 : 0);
  }
  DELTATUNE_UNROLL
  for (int n = 0; n < rank_tiles(RANK); ++n) {
    if (TRANSPOSED) {
      const int k = start + t * 8, column = n * 8 + g;
      load_pairs<ALIGNED>(right[n], single(weight) + (long)column * inputs + k, column < RANK && k < inputs ? 8 : 0);
    } else {
      DELTATUNE_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int k = start + (g >> 1) * 8 + i * 2 + (g & 1), column = n * 8 + t * 2;
        unsigned pair[1];
        load_pairs<ALIGNED && RANK % 2 == 0>(pair, in_line<RANK>(weight, k, column), k < inputs ? RANK - column : 0);
        right[n][i] = pair[0];
      }
    }
  }
}
template <typename In, int RANK, int LINES, bool TRANSPOSED>
inline void multiply_inputs(thread float (&sums)[LINES / 16][rank_tiles(RANK)][4],
                            const thread unsigned (&left)[LINES / 8][4],
                            const thread unsigned (&right)[rank_tiles(RANK)][4]) {
  DELTATUNE_UNROLL
  for (int n = 0; n < rank_tiles(RANK); ++n) {
    DELTATUNE_UNROLL
    for (int i = 0; i < 4; i += 2) {
      unsigned b = right[n][i], further = right[n][i + 1];
      if (!TRANSPOSED) b = across_lanes(b), further = across_lanes(further);
      DELTATUNE_UNROLL
      for (int m = 0; m < LINES / 16; ++m) {
        const unsigned a[4] = {left[2 * m][i], left[2 * m + 1][i], left[2 * m][i + 1], left[2 * m + 1][i + 1]};
        Fragments<In>::multiply(sums[m][n], a, b, further);
      }
    }
  }
}

// Adds a group's share of the inputs, every GROUPS-th 32 of them. Two of these are on their way at once.
template <typename In, int RANK, int LINES, int GROUPS, bool TRANSPOSED, bool ALIGNED, typename PX, typename PW>
inline void add_along_rows(thread float (&sums)[LINES / 16][rank_tiles(RANK)][4], int rows, int inputs, int from, PX x,
                           PW weight, int group, int lane) {
  unsigned left[2][LINES / 8][4], right[2][rank_tiles(RANK)][4];
  const int step = GROUPS * 32;
  DELTATUNE_UNROLL
  for (int turn = 0; turn < 2; ++turn)
    load_inputs<In, RANK, LINES, TRANSPOSED, ALIGNED>(left[turn], right[turn], group * 32 + turn * step, rows, inputs,
                                                      from, x, weight, lane);
  for (int start = group * 32; start < inputs; start += 2 * step) {
    DELTATUNE_UNROLL
    for (int turn = 0; turn < 2; ++turn) {
      multiply_inputs<In, RANK, LINES, TRANSPOSED>(sums, left[turn], right[turn]);
      const int next = start + (turn + 2) * step;
      load_inputs<In, RANK, LINES, TRANSPOSED, ALIGNED>(left[turn], right[turn], next, rows, inputs, from, x, weight,
                                                        lane);
    }
  }
}

// Computes out [rows, RANK] = scale * x [rows, inputs] times weight: [RANK, inputs] where TRANSPOSED, else
// [inputs, RANK]. `inputs` is a multiple of 8, and scale is one fp32 number. A block takes LINES rows. Unless TRANSPOSED,
// weight and out may be Several.
template <typename In, int RANK, int LINES, int GROUPS, bool TRANSPOSED, typename PX, typename PW, typename PS,
          typename PO>
inline void low_rank_rows(Place at, threadgroup char* memory, int rows, int inputs, PX x, PW weight, PS scale,
                          PO out) {
  constexpr int tiles = rank_tiles(RANK);
  const int from = at.x * LINES;
  const float factor = scale[0];
  float sums[LINES / 16][tiles][4] = {};
  if (starts_at_multiple<16>(x) && starts_at_multiple<TRANSPOSED ? 16 : 4>(weight))
    add_along_rows<In, RANK, LINES, GROUPS, TRANSPOSED, true>(sums, rows, inputs, from, x, weight, at.group, at.lane);
  else
    add_along_rows<In, RANK, LINES, GROUPS, TRANSPOSED, false>(sums, rows, inputs, from, x, weight, at.group, at.lane);
  threadgroup float* all = reinterpret_cast<threadgroup float*>(memory);
  DELTATUNE_UNROLL
  for (int m = 0; m < LINES / 16; ++m) {
    DELTATUNE_UNROLL
    for (int n = 0; n < tiles; ++n) {
      const int line = m * 16 + (at.lane >> 2);
      keep_sums<RANK, LINES>(all, sums[m][n], at.group, line, line + 8, n, at.lane);
    }
  }
  barrier();
  for (int i = at.index; i < LINES * RANK; i += GROUPS * 32) {
    const int row = i / RANK, column = i % RANK;
    if (from + row >= rows) continue;
    float sum = 0.0f;
    DELTATUNE_UNROLL
    for (int group = 0; group < GROUPS; ++group) sum += all[(group * LINES + row) * line_floats(RANK) + column];
    *in_line<RANK>(out, from + row, column) = static_cast<In>(factor * sum);
  }
}

// A group takes a stripe of 64 columns, which is a line of 128 bytes in every row, and STEPS times 16 rows at once, or
// one step where the sums need the registers.
enum : int { stripe = 64 };
inline constexpr int steps_at_once(int rank) { return rank_tiles(rank) <= 2 ? 2 : 1; }
inline constexpr int larger(int one, int other) { return one > other ? one : other; }

// SIDE is the number of stripes of a block, side by side; its other groups take other rows. ALONG says whether the
// block sums along its rows, too.
template <int RANK, int SIDE, int GROUPS, bool ALONG>
struct LowRankColumnsMemory {
  static constexpr constant int sums = GROUPS * stripe * line_floats(RANK) * 4;
  static constexpr constant int along = GROUPS * steps_at_once(RANK) * 16 * line_floats(RANK);
  static constexpr constant int kept = SIDE * (stripe / 16) * rank_tiles(RANK) * 64;
  static constexpr constant int bytes = larger(sums, ALONG ? (2 * along + kept) * 4 : 0);
};

// Loads 16 rows of a stripe: a lane has eight neighbouring columns of four of the rows; and the same rows of `narrow`.
template <typename In, int RANK, bool ALIGNED, typename PN, typename PX>
inline void load_rows(thread unsigned (&found)[4][4], thread unsigned (&right)[rank_tiles(RANK)][2], int start, int end,
                      int columns, int column, PN narrow, PX wide, int lane) {
  const int g = lane >> 2, t = lane & 3;
  DELTATUNE_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int row = start + t * 2 + (i & 1) + (i >> 1) * 8;
    load_pairs<ALIGNED>(found[i], wide + (long)row * columns + column, row < end && column < columns ? 8 : 0);
  }
  DELTATUNE_UNROLL
  for (int n = 0; n < rank_tiles(RANK); ++n) {
    DELTATUNE_UNROLL
    for (int part = 0; part < 2; ++part) {
      const int row = start + part * 8 + g, place = n * 8 + t * 2;
      unsigned pair[1];
      load_pairs<ALIGNED && RANK % 2 == 0>(pair, in_line<RANK>(narrow, row, place), row < end ? RANK - place : 0);
      right[n][part] = pair[0];
    }
  }
}

// Adds 16 rows of a stripe to the sums over rows and, if ALONG, to those along rows. A fragment pairs the elements of
// two rows: its lines g and g + 8 are the neighbouring columns 8 g + 2 m and 8 g + 2 m + 1 of the stripe. Transposed,
// it is one of the rows with the columns 2 m and 2 m + 1 of each eight. The weight's fragments have that order, too.
template <typename In, int RANK, bool ALONG>
inline void multiply_rows(thread float (&over)[stripe / 16][rank_tiles(RANK)][4],
                          thread float (&along)[rank_tiles(RANK)][4], const thread unsigned (&found)[4][4],
                          const thread unsigned (&right)[rank_tiles(RANK)][2], threadgroup const unsigned* weight,
                          int lane) {
  unsigned b[rank_tiles(RANK)][2];
  DELTATUNE_UNROLL
  for (int n = 0; n < rank_tiles(RANK); ++n) {
    DELTATUNE_UNROLL
    for (int part = 0; part < 2; ++part) b[n][part] = across_lanes(right[n][part]);
  }
  DELTATUNE_UNROLL
  for (int m = 0; m < stripe / 16; ++m) {
    const unsigned a[4] = {pair_of_firsts(found[0][m], found[1][m]), pair_of_seconds(found[0][m], found[1][m]),
                           pair_of_firsts(found[2][m], found[3][m]), pair_of_seconds(found[2][m], found[3][m])};
    DELTATUNE_UNROLL
    for (int n = 0; n < rank_tiles(RANK); ++n) Fragments<In>::multiply(over[m][n], a, b[n][0], b[n][1]);
    if (!ALONG) continue;
    const unsigned rows[4] = {across_lanes(a[0]), across_lanes(a[2]), across_lanes(a[1]), across_lanes(a[3])};
    DELTATUNE_UNROLL
    for (int n = 0; n < rank_tiles(RANK); ++n) {
      threadgroup const unsigned* pair = weight + (m * rank_tiles(RANK) + n) * 64 + lane * 2;
      Fragments<In>::multiply(along[n], rows, pair[0], pair[1]);
    }
  }
}

// Writes the fragments of weight [RANK, columns] for the stripes of a block to shared memory, in the order in which
// multiply_rows takes them.
template <int RANK, int SIDE, int GROUPS, bool ALIGNED, typename PW>
inline void keep_weight(threadgroup unsigned* to, int columns, int from, PW weight, int index) {
  constexpr int tiles = rank_tiles(RANK);
  DELTATUNE_UNROLL
  for (int round = 0; round < SIDE * tiles; round += GROUPS) {
    const int i = round * 32 + index;
    if (i >= SIDE * tiles * 32) continue;
    const int lane = i % 32, n = i / 32 % tiles, side = i / (32 * tiles);
    const int rank = n * 8 + (lane >> 2), column = from + side * stripe + (lane & 3) * 16;
    unsigned pairs[2][4];
    DELTATUNE_UNROLL
    for (int far = 0; far < 2; ++far)
      load_pairs<ALIGNED>(pairs[far], weight + (long)rank * columns + column + far * 8,
                          rank < RANK && column + far * 8 < columns ? 8 : 0);
    DELTATUNE_UNROLL
    for (int m = 0; m < stripe / 16; ++m) {
      threadgroup unsigned* pair = to + ((side * (stripe / 16) + m) * tiles + n) * 64 + lane * 2;
      pair[0] = pair_of_firsts(pairs[0][m], pairs[1][m]);
      pair[1] = pair_of_seconds(pairs[0][m], pairs[1][m]);
    }
  }
}
template <int RANK, int SIDE, int GROUPS, bool ALIGNED>
inline void keep_weight(threadgroup unsigned*, int, int, Nothing, int) {}

// Where a block is among those that divide a matrix: `tile` of `tiles` next to one another, and `part` of `parts` below
// one another, with the rows from `first` to `end`. `parts` or `tiles` of them add to the same sums.
struct ColumnShare {
  int tile, tiles, part, parts, first, end;
};

// Adds up four neighbouring elements of the parts of a result from `count` blocks, `stride` apart, in their order.
inline void sum_of_blocks(thread float (&sums)[4], GLOBAL const float* from, int count, long stride) {
  DELTATUNE_UNROLL
  for (int e = 0; e < 4; ++e) sums[e] = 0.0f;
  DELTATUNE_ROLLED
  for (int start = 0; start < count; start += 8) {
    float found[8][4] = {};
    DELTATUNE_UNROLL
    for (int i = 0; i < 8; ++i)
      if (start + i < count) take_shares(found[i], from + (start + i) * stride);
    DELTATUNE_UNROLL
    for (int i = 0; i < 8; ++i) {
      DELTATUNE_UNROLL
      for (int e = 0; e < 4; ++e) sums[e] += found[i][e];
    }
  }
}
// The distance between the shares of two tiles of the sums along rows: four of their elements are always loaded.
inline long along_stride(int rows, int rank) { return ((long)rows * rank + 3) / 4 * 4; }

// Returns whether `count` marks are all set, for then all that these blocks wrote before can be read. Each block sets
// its own before it looks, so the last one finds all set, and maybe others do. A block that does clears them, so that
// no later launch finds them in its memory. One group calls it.
inline bool all_marked(GLOBAL unsigned* marks, int count, int lane) {
  float missing = 0.0f;
  DELTATUNE_ROLLED
  for (int i = lane; i < count; i += 32) missing += is_marked(marks + 2 * i) ? 0.0f : 1.0f;
  const bool all = lane_sum(missing) == 0.0f;
  DELTATUNE_ROLLED
  for (int i = lane; all && i < count; i += 32) clear_mark(marks + 2 * i);
  return all;
}

// Adds the groups' sums along rows of one round, and writes them: the results if a block has all columns, else the
// block's share of them.
template <typename In, int RANK, int SIDE, int GROUPS, typename PO, typename PP>
inline void write_along(threadgroup const float* all, float factor, int rows, int start, ColumnShare share, PO out, PP shares,
                        int index) {
  constexpr int lines = steps_at_once(RANK) * 16;
  DELTATUNE_ROLLED
  for (int i = index; i < GROUPS / SIDE * lines * RANK; i += GROUPS * 32) {
    const int line = i / RANK, column = i % RANK, row = start + line;
    if (row >= share.end) continue;
    float sum = 0.0f;
    DELTATUNE_UNROLL
    for (int side = 0; side < SIDE; ++side)
      sum += all[((line / lines * SIDE + side) * lines + line % lines) * line_floats(RANK) + column];
    if (share.tiles == 1)
      out[(long)row * RANK + column] = static_cast<In>(factor * sum);
    else
      shares[share.tile * along_stride(rows, RANK) + (long)row * RANK + column] = sum;
  }
}
template <typename In, int RANK, int SIDE, int GROUPS>
inline void write_along(threadgroup const float*, float, int, int, ColumnShare, Nothing, Nothing, int) {}
// Finishes the sums along the rows of a part, of which every tile has written its share.
template <typename In, int RANK, int GROUPS, typename PO, typename PP>
inline void finish_along(float factor, int rows, ColumnShare share, PO out, PP shares, int index) {
  const long first = (long)share.first * RANK;
  const int count = (share.end - share.first) * RANK;
  DELTATUNE_ROLLED
  for (int i = index * 4; i < count; i += GROUPS * 128) {
    float sums[4];
    sum_of_blocks(sums, shares + first + i, share.tiles, along_stride(rows, RANK));
    DELTATUNE_UNROLL
    for (int e = 0; e < 4; ++e)
      if (i + e < count) out[first + i + e] = static_cast<In>(factor * sums[e]);
  }
}
template <typename In, int RANK, int GROUPS>
inline void finish_along(float, int, ColumnShare, Nothing, Nothing, int) {}

// Adds a group's share of the rows of its stripe. All groups of a block go through as many rounds.
template <typename In, int RANK, int SIDE, int GROUPS, bool ALONG, bool ALIGNED, typename PN, typename PX, typename PW,
          typename PO, typename PP>
inline void add_over_rows(thread float (&over)[stripe / 16][rank_tiles(RANK)][4], threadgroup float* memory, int rows,
                          int columns, float factor, ColumnShare share, PN narrow, PX wide, PW weight, PO out, PP shares,
                          Place at) {
  constexpr int tiles = rank_tiles(RANK), steps = steps_at_once(RANK), own = steps * 16;
  constexpr int along_floats = LowRankColumnsMemory<RANK, SIDE, GROUPS, ALONG>::along;
  const int side = at.group % SIDE, column = (share.tile * SIDE + side) * stripe + (at.lane >> 2) * 8;
  threadgroup unsigned* kept = reinterpret_cast<threadgroup unsigned*>(memory + 2 * along_floats);
  int turn = 0;
  DELTATUNE_ROLLED
  for (int start = share.first; start < share.end; start += GROUPS / SIDE * own, turn = 1 - turn) {
    const int from = start + at.group / SIDE * own;
    unsigned found[steps][4][4], right[steps][tiles][2];
    DELTATUNE_UNROLL
    for (int s = 0; s < steps; ++s)
      load_rows<In, RANK, ALIGNED>(found[s], right[s], from + s * 16, share.end, columns, column, narrow, wide,
                                   at.lane);
    if (ALONG && start == share.first) {
      keep_weight<RANK, SIDE, GROUPS, ALIGNED>(kept, columns, share.tile * SIDE * stripe, weight, at.index);
      barrier();
    }
    threadgroup float* all = memory + turn * along_floats;
    DELTATUNE_UNROLL
    for (int s = 0; s < steps; ++s) {
      float along[tiles][4] = {};
      multiply_rows<In, RANK, ALONG>(over, along, found[s], right[s], kept + side * (stripe / 16) * tiles * 64,
                                     at.lane);
      DELTATUNE_UNROLL
      for (int n = 0; ALONG && n < tiles; ++n)
        keep_sums<RANK, own>(all, along[n], at.group, s * 16 + (at.lane >> 2), s * 16 + (at.lane >> 2) + 8, n, at.lane);
    }
    // The next round writes to the other place, so that one barrier a round is enough.
    if (ALONG) {
      barrier();
      write_along<In, RANK, SIDE, GROUPS>(all, factor, rows, start, share, out, shares, at.index);
    }
  }
}

// Whether element i of the sums over rows of a tile is there: out is [RANK, columns] where ACROSS, else
// [columns, RANK]. Four neighbouring elements have neighbouring places in it.
template <int RANK, int SIDE, bool ACROSS>
inline bool is_there(int i, int columns, int from) {
  return from + (ACROSS ? i % (SIDE * stripe) : i / RANK) < columns;
}
template <int RANK, int SIDE, bool ACROSS, typename PO>
inline auto place_of(PO out, int i, int columns, int from) {
  constexpr int width = SIDE * stripe;
  return ACROSS ? single(out) + (long)(i / width) * columns + from + i % width
                : in_line<RANK>(out, from + i / RANK, i % RANK);
}

// Computes out = scale times the sum over the rows of narrow [rows, RANK] and wide [rows, columns], each row's outer
// product: [RANK, columns] where ACROSS, else [columns, RANK]. Where ALONG, it computes from the same reading of wide
// also along [rows, RANK] = scale * wide times the transpose of weight [RANK, columns]. `columns` is a multiple of 8,
// and scale is one fp32 number. Unless ACROSS, narrow and out may be Several.
//
// The rows are divided into parts, and a block takes a part of SIDE stripes. It writes its share of the sums that other
// blocks add to, and sets its marks; the last block finishes the sums, and no block waits for another.
template <typename In, int RANK, int SIDE, int GROUPS, bool ACROSS, bool ALONG, typename PN, typename PX, typename PW,
          typename PS, typename PR, typename PO>
inline void sum_over_rows(Place at, threadgroup char* memory, int rows, int columns, int parts, PN narrow, PX wide,
                          PW weight, PS scale, PR out, PO along, GLOBAL float* handed) {
  constexpr int tiles = rank_tiles(RANK), width = SIDE * stripe;
  const float factor = scale[0];
  const int round = GROUPS / SIDE * steps_at_once(RANK) * 16, from = at.x * width;
  const int each = ((rows + parts - 1) / parts + round - 1) / round * round, last = at.y * each + each;
  const ColumnShare share = {at.x, (columns + width - 1) / width, at.y, parts, at.y * each, last < rows ? last : rows};
  // The arrays between blocks: two marks of each block, its share of the sums over rows, and of those along rows.
  const long blocks = (long)parts * share.tiles, size = width * RANK;
  GLOBAL unsigned* marks = reinterpret_cast<GLOBAL unsigned*>(handed);
  GLOBAL float* shares = handed + 4 * blocks;
  const auto along_shares = Choice<ALONG>::of(shares + (parts > 1 ? blocks * size : 0), Nothing{});
  threadgroup float* all = reinterpret_cast<threadgroup float*>(memory);
  float over[stripe / 16][tiles][4] = {};
  if (starts_at_multiple<16>(wide) && starts_at_multiple<4>(narrow) && starts_at_multiple<16>(weight))
    add_over_rows<In, RANK, SIDE, GROUPS, ALONG, true>(over, all, rows, columns, factor, share, narrow, wide, weight,
                                                       along, along_shares, at);
  else
    add_over_rows<In, RANK, SIDE, GROUPS, ALONG, false>(over, all, rows, columns, factor, share, narrow, wide, weight,
                                                        along, along_shares, at);
  barrier();
  DELTATUNE_UNROLL
  for (int m = 0; m < stripe / 16; ++m) {
    const int line = (at.lane >> 2) * 8 + 2 * m;
    DELTATUNE_UNROLL
    for (int n = 0; n < tiles; ++n) keep_sums<RANK, stripe>(all, over[m][n], at.group, line, line + 1, n, at.lane);
  }
  barrier();
  DELTATUNE_ROLLED
  for (int i = at.index; i < width * RANK; i += GROUPS * 32) {
    const int column = ACROSS ? i % width : i / RANK, rank = ACROSS ? i / width : i % RANK;
    if (!is_there<RANK, SIDE, ACROSS>(i, columns, from)) continue;
    float sum = 0.0f;
    DELTATUNE_UNROLL
    for (int down = 0; down < GROUPS / SIDE; ++down)
      sum += all[((down * SIDE + column / stripe) * stripe + column % stripe) * line_floats(RANK) + rank];
    if (share.parts == 1)
      *place_of<RANK, SIDE, ACROSS>(out, i, columns, from) = static_cast<In>(factor * sum);
    else
      shares[(at.y * share.tiles + at.x) * size + i] = sum;
  }
  if (share.parts == 1 && (!ALONG || share.tiles == 1)) return;
  barrier();
  if (at.group == 0) {
    GLOBAL unsigned* over_marks = marks + 2 * at.x * share.parts;
    GLOBAL unsigned* along_marks = marks + 2 * (share.parts + at.y) * share.tiles;
    if (at.lane < (ALONG ? 2 : 1)) set_mark(at.lane == 0 ? over_marks + 2 * at.y : along_marks + 2 * at.x);
    group_barrier();
    device_fence();
    const bool over_all = all_marked(over_marks, share.parts, at.lane) && share.parts > 1;
    const bool along_all = ALONG && all_marked(along_marks, share.tiles, at.lane) && share.tiles > 1;
    if (at.lane == 0) all[0] = over_all ? 1.0f : 0.0f, all[1] = along_all ? 1.0f : 0.0f;
  }
  barrier();
  DELTATUNE_ROLLED
  for (int i = at.index * 4; all[0] > 0.0f && i < width * RANK; i += GROUPS * 128) {
    if (!is_there<RANK, SIDE, ACROSS>(i, columns, from)) continue;
    const auto to = place_of<RANK, SIDE, ACROSS>(out, i, columns, from);
    float sums[4];
    sum_of_blocks(sums, shares + at.x * size + i, share.parts, share.tiles * size);
    DELTATUNE_UNROLL
    for (int e = 0; e < 4; ++e) to[e] = static_cast<In>(factor * sums[e]);
  }
  if (all[1] > 0.0f) finish_along<In, RANK, GROUPS>(factor, rows, share, along, along_shares, at.index);
}

// Loads the fragments of 64 columns of the weight, from `from` on: [columns, RANK] where TURNED, else [RANK, columns].
// Within 32 columns a lane has the results of the eight from 8 t on, two in each of four products.
template <int RANK, bool TURNED, bool ALIGNED, typename PW>
inline void load_weight(thread unsigned (&right)[2][4][(RANK + 15) / 16 * 2], int columns, int from, PW weight,
                        int lane) {
  const int g = lane >> 2, t = lane & 3;
  DELTATUNE_UNROLL
  for (int part = 0; part < 2; ++part) {
    DELTATUNE_UNROLL
    for (int k = 0; k < (RANK + 15) / 16 * 2; ++k) {
      unsigned found[4] = {};
      if (k * 8 < RANK && TURNED) {
        DELTATUNE_UNROLL
        for (int j = 0; j < 4; ++j) {
          const int column = within(from + part * 32 + (g >> 1) * 8 + j * 2 + (g & 1), columns), rank = k * 8 + t * 2;
          unsigned pair[1];
          load_pairs<ALIGNED && RANK % 2 == 0>(pair, in_line<RANK>(weight, column, rank), RANK - rank);
          found[j] = pair[0];
        }
      } else if (k * 8 < RANK) {
        const int column = within(from / 8 + part * 4 + t, columns / 8) * 8, rank = k * 8 + g;
        load_pairs<ALIGNED>(found, single(weight) + (long)rank * columns + column, rank < RANK ? 8 : 0);
        DELTATUNE_UNROLL
        for (int j = 0; j < 4; ++j) found[j] = across_lanes(found[j]);
      }
      DELTATUNE_UNROLL
      for (int j = 0; j < 4; ++j) right[part][j][k] = found[j];
    }
  }
}

// Computes 32 rows and 64 columns of the sum, from (row, column) on.
template <typename In, int RANK, bool TURNED, bool ALIGNED, typename PN, typename PW, typename PY>
inline void add_to_tile(int rows, int columns, int from, int column, float factor, PN narrow, PW weight, PY y,
                        GLOBAL In* out, int lane) {
  constexpr int depth = (RANK + 15) / 16;
  const int g = lane >> 2, t = lane & 3;
  unsigned found[4][2][4], left[2][depth][4], right[2][4][depth * 2];
  DELTATUNE_UNROLL
  for (int m = 0; m < 4; ++m) {
    DELTATUNE_UNROLL
    for (int part = 0; part < 2; ++part) {
      const int row = within(from + m * 8 + g, rows), first = within(column / 8 + part * 4 + t, columns / 8) * 8;
      load_pairs<ALIGNED>(found[m][part], y + (long)row * columns + first, 8);
    }
  }
  DELTATUNE_UNROLL
  for (int m = 0; m < 2; ++m) {
    DELTATUNE_UNROLL
    for (int k = 0; k < depth; ++k) {
      DELTATUNE_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int row = within(from + m * 16 + (i & 1) * 8 + g, rows), rank = k * 16 + (i >> 1) * 8 + t * 2;
        unsigned pair[1] = {};
        if (k * 16 + (i >> 1) * 8 < RANK)
          load_pairs<ALIGNED && RANK % 2 == 0>(pair, in_line<RANK>(narrow, row, rank), RANK - rank);
        left[m][k][i] = pair[0];
      }
    }
  }
  load_weight<RANK, TURNED, ALIGNED>(right, columns, column, weight, lane);
  DELTATUNE_UNROLL
  for (int m = 0; m < 2; ++m) {
    DELTATUNE_UNROLL
    for (int part = 0; part < 2; ++part) {
      DELTATUNE_UNROLL
      for (int j = 0; j < 4; ++j) {
        float sums[4] = {};
        DELTATUNE_UNROLL
        for (int k = 0; k < depth; ++k)
          Fragments<In>::multiply(sums, left[m][k], right[part][j][2 * k], right[part][j][2 * k + 1]);
        DELTATUNE_UNROLL
        for (int i = 0; i < 2; ++i) {
          thread unsigned& pair = found[2 * m + i][part][j];
          pair = pair_of<In>(first_of<In>(pair) + factor * sums[2 * i], second_of<In>(pair) + factor * sums[2 * i + 1]);
        }
      }
    }
  }
  DELTATUNE_UNROLL
  for (int m = 0; m < 4; ++m) {
    DELTATUNE_UNROLL
    for (int part = 0; part < 2; ++part) {
      const int row = from + m * 8 + g, first = column + part * 32 + t * 8;
      if (row < rows && first < columns) store_pairs(out + (long)row * columns + first, found[m][part]);
    }
  }
}

template <int GROUPS>
struct LowRankWideMemory {
  static constexpr constant int bytes = 16;
};

// Computes out [rows, columns] = y + scale * narrow [rows, RANK] times weight: [columns, RANK] where TURNED, else
// [RANK, columns]. `columns` is a multiple of 8, and scale is one fp32 number. A block takes 64 columns of 32 rows a
// group. Where TURNED, narrow and weight may be Several.
template <typename In, int RANK, int GROUPS, bool TURNED, typename PN, typename PW, typename PY, typename PS>
inline void low_rank_wide(Place at, threadgroup char*, int rows, int columns, PN narrow, PW weight, PY y, PS scale,
                          GLOBAL In* out) {
  const int from = (at.y * GROUPS + at.group) * 32, column = at.x * 64;
  const float factor = scale[0];
  if (starts_at_multiple<16>(y) && starts_at_multiple<16>(weight) && starts_at_multiple<4>(narrow))
    add_to_tile<In, RANK, TURNED, true>(rows, columns, from, column, factor, narrow, weight, y, out, at.lane);
  else
    add_to_tile<In, RANK, TURNED, false>(rows, columns, from, column, factor, narrow, weight, y, out, at.lane);
}
