// The two kinds of LoRA's products whose result is RANK wide, at most 64, and much smaller than what they read: sums
// along rows, and sums over rows. All that counts is how fast they read, so the groups of a block share out what is
// summed, each has many loads on their way, and fragments go from device memory straight to registers. At the end the
// groups' sums are added in a fixed order, so the bits never vary.

// RANK in whole columns of fragments: their number, and the floats that a line takes in shared memory, of an odd number
// so that lines start in different banks.
inline constexpr int rank_tiles(int rank) { return (rank + 7) / 8; }
inline constexpr int line_floats(int rank) { return rank_tiles(rank) * 8 + 1; }

// LINES is the number of rows of x, or of columns, that a block takes.
template <int RANK, int LINES, int GROUPS>
struct LowRankMemory {
  static constexpr constant int bytes = GROUPS * LINES * line_floats(RANK) * 4;
};

// Keeps a fragment's sums for the lines `first` (g) and `second` (g + 8) and the columns from 8 `tile` on.
template <int RANK, int LINES>
inline void keep_sums(threadgroup float* all, const thread float (&sums)[4], int group, int first, int second, int tile,
                      int lane) {
  DELTATUNE_UNROLL
  for (int e = 0; e < 4; ++e) {
    const int line = e < 2 ? first : second;
    all[(group * LINES + line) * line_floats(RANK) + tile * 8 + (lane & 3) * 2 + (e & 1)] = sums[e];
  }
}
// Writes factor times the sums of all groups to the result: [lines, RANK] or, if ACROSS, [RANK, lines]. The block's
// lines start at line `from` of it.
template <typename In, int RANK, int LINES, int GROUPS, bool ACROSS>
inline void write_sums(threadgroup const float* all, float factor, int lines, int from, GLOBAL In* out, int index) {
  for (int i = index; i < LINES * RANK; i += GROUPS * 32) {
    const int line = ACROSS ? i % LINES : i / RANK, column = ACROSS ? i / LINES : i % RANK;
    if (from + line >= lines) continue;
    float sum = 0.0f;
    DELTATUNE_UNROLL
    for (int group = 0; group < GROUPS; ++group) sum += all[(group * LINES + line) * line_floats(RANK) + column];
    const long place = ACROSS ? (long)column * lines + from + line : (long)(from + line) * RANK + column;
    out[place] = static_cast<In>(factor * sum);
  }
}

// Adds a group's share of the inputs: 64 of them at a time. Within 32 inputs a lane has the eight from 8 t on, which it
// gives to two products of 16 in the same order on both sides.
template <typename In, int RANK, int LINES, int GROUPS, bool TRANSPOSED, bool ALIGNED, typename PX, typename PW>
inline void add_along_rows(thread float (&sums)[LINES / 16][rank_tiles(RANK)][4], int rows, int inputs, int from, PX x,
                           PW weight, int group, int lane) {
  constexpr int tiles = rank_tiles(RANK);
  const int g = lane >> 2, t = lane & 3;
  for (int start = group * 64; start < inputs; start += GROUPS * 64) {
    unsigned left[2][LINES / 8][4], right[2][tiles][4];
    DELTATUNE_UNROLL
    for (int part = 0; part < 2; ++part) {
      const int k = start + part * 32 + t * 8;
      DELTATUNE_UNROLL
      for (int m = 0; m < LINES / 8; ++m) {
        const int row = from + m * 8 + g;
        load_pairs<ALIGNED>(left[part][m], x + (long)row * inputs + k, row < rows && k < inputs ? 8 : 0);
      }
    }
    DELTATUNE_UNROLL
    for (int part = 0; part < 2; ++part) {
      DELTATUNE_UNROLL
      for (int n = 0; n < tiles; ++n) {
        if (TRANSPOSED) {
          const int k = start + part * 32 + t * 8, column = n * 8 + g;
          load_pairs<ALIGNED>(right[part][n], weight + (long)column * inputs + k, column < RANK && k < inputs ? 8 : 0);
        } else {
          DELTATUNE_UNROLL
          for (int i = 0; i < 4; ++i) {
            const int k = start + part * 32 + (g >> 1) * 8 + i * 2 + (g & 1), column = n * 8 + t * 2;
            const int there = k < inputs ? RANK - column : 0;
            unsigned pair[1];
            load_pairs<ALIGNED && RANK % 2 == 0>(pair, weight + (long)k * RANK + column, there);
            right[part][n][i] = pair[0];
          }
        }
      }
    }
    DELTATUNE_UNROLL
    for (int part = 0; part < 2; ++part) {
      DELTATUNE_UNROLL
      for (int n = 0; n < tiles; ++n) {
        DELTATUNE_UNROLL
        for (int i = 0; i < 4; i += 2) {
          unsigned b = right[part][n][i], further = right[part][n][i + 1];
          if (!TRANSPOSED) b = across_lanes(b), further = across_lanes(further);
          DELTATUNE_UNROLL
          for (int m = 0; m < LINES / 16; ++m) {
            const unsigned a[4] = {left[part][2 * m][i], left[part][2 * m + 1][i], left[part][2 * m][i + 1],
                                   left[part][2 * m + 1][i + 1]};
            Fragments<In>::multiply(sums[m][n], a, b, further);
          }
        }
      }
    }
  }
}

// Computes out [rows, RANK] = scale * x [rows, inputs] times weight: [RANK, inputs] where TRANSPOSED, else
// [inputs, RANK]. `inputs` is a multiple of 8, and scale is one fp32 number. A block takes LINES rows.
template <typename In, int RANK, int LINES, int GROUPS, bool TRANSPOSED, typename PX, typename PW, typename PS>
inline void low_rank_rows(Place at, threadgroup char* memory, int rows, int inputs, PX x, PW weight, PS scale,
                          GLOBAL In* out) {
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
  write_sums<In, RANK, LINES, GROUPS, false>(all, factor, rows, from, out, at.index);
}

// How many times 16 rows a group loads before it multiplies: as many as leave registers for the sums.
inline constexpr int steps_at_once(int rank, int lines) {
  return 32 / (lines / 8 + rank_tiles(rank)) >= 8 ? 8 : 32 / (lines / 8 + rank_tiles(rank)) >= 4 ? 4 : 2;
}

// Adds a group's share of the rows. A lane loads LINES / 8 neighbouring columns of four of 16 rows, and pairs the rows'
// elements; a fragment's lines g and g + 8 are neighbouring columns.
template <typename In, int RANK, int LINES, int GROUPS, bool ALIGNED, typename PN, typename PX>
inline void add_over_rows(thread float (&sums)[LINES / 16][rank_tiles(RANK)][4], int rows, int columns, int column,
                          PN narrow, PX wide, int group, int lane) {
  constexpr int tiles = rank_tiles(RANK), steps = steps_at_once(RANK, LINES);
  const int g = lane >> 2, t = lane & 3;
  for (int start = group * steps * 16; start < rows; start += GROUPS * steps * 16) {
    unsigned found[steps][4][LINES / 16], right[steps][tiles][2];
    DELTATUNE_UNROLL
    for (int s = 0; s < steps; ++s) {
      DELTATUNE_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int row = start + s * 16 + t * 2 + (i & 1) + (i >> 1) * 8;
        load_pairs<ALIGNED>(found[s][i], wide + (long)row * columns + column,
                            row < rows && column < columns ? LINES / 8 : 0);
      }
      DELTATUNE_UNROLL
      for (int n = 0; n < tiles; ++n) {
        DELTATUNE_UNROLL
        for (int part = 0; part < 2; ++part) {
          const int row = start + s * 16 + part * 8 + g, place = n * 8 + t * 2;
          unsigned pair[1];
          load_pairs<ALIGNED && RANK % 2 == 0>(pair, narrow + (long)row * RANK + place, row < rows ? RANK - place : 0);
          right[s][n][part] = pair[0];
        }
      }
    }
    DELTATUNE_UNROLL
    for (int s = 0; s < steps; ++s) {
      DELTATUNE_UNROLL
      for (int n = 0; n < tiles; ++n) {
        const unsigned b = across_lanes(right[s][n][0]), further = across_lanes(right[s][n][1]);
        DELTATUNE_UNROLL
        for (int m = 0; m < LINES / 16; ++m) {
          const unsigned a[4] = {
              pair_of_firsts(found[s][0][m], found[s][1][m]), pair_of_seconds(found[s][0][m], found[s][1][m]),
              pair_of_firsts(found[s][2][m], found[s][3][m]), pair_of_seconds(found[s][2][m], found[s][3][m])};
          Fragments<In>::multiply(sums[m][n], a, b, further);
        }
      }
    }
  }
}

// Computes out = scale times the sum over the rows of narrow [rows, RANK] and wide [rows, columns], each row's outer
// product: out is [RANK, columns] where ACROSS, else [columns, RANK]. `columns` is a multiple of 8, and scale is one
// fp32 number. A block takes LINES columns and all rows.
template <typename In, int RANK, int LINES, int GROUPS, bool ACROSS, typename PN, typename PX, typename PS>
inline void low_rank_columns(Place at, threadgroup char* memory, int rows, int columns, PN narrow, PX wide, PS scale,
                             GLOBAL In* out) {
  constexpr int tiles = rank_tiles(RANK), own = LINES / 8;
  const int from = at.x * LINES, place = (at.lane >> 2) * own;
  const float factor = scale[0];
  float sums[LINES / 16][tiles][4] = {};
  if (starts_at_multiple<16>(wide) && starts_at_multiple<4>(narrow))
    add_over_rows<In, RANK, LINES, GROUPS, true>(sums, rows, columns, from + place, narrow, wide, at.group, at.lane);
  else
    add_over_rows<In, RANK, LINES, GROUPS, false>(sums, rows, columns, from + place, narrow, wide, at.group, at.lane);
  threadgroup float* all = reinterpret_cast<threadgroup float*>(memory);
  DELTATUNE_UNROLL
  for (int m = 0; m < LINES / 16; ++m) {
    DELTATUNE_UNROLL
    for (int n = 0; n < tiles; ++n)
      keep_sums<RANK, LINES>(all, sums[m][n], at.group, place + 2 * m, place + 2 * m + 1, n, at.lane);
  }
  barrier();
  write_sums<In, RANK, LINES, GROUPS, ACROSS>(all, factor, columns, from, out, at.index);
}
