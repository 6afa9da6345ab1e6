// The parts that the prepare kernel and the scans of Hopper share: the form of the arrays between them, pairs of bf16
// for results in fp32, and the copy of 64 positions of an input to shared memory.
//
// Matrices that the kernels hand to one another consist of cores: 8 x 8 matrices of bf16, 128 bytes each. A group of
// lanes writes a core at once from its registers, and the tensor cores multiply with cores as they are. States have
// their cores in rows, [DV / 8, DK / 8]. So have the high parts of u and R, [DV / 8, 8]. Behind them, for each 16 rows
// and 16 positions, are the four bits of each number that follow its high part, 4 bytes a lane (low_bits). Then there
// are, for each 16 rows, the tails of the state, 16 bytes a lane (write_tails).
// Z and P of a chunk are in a grid of 8 x 9 cores. The high part of core (I, J) of the lower triangle is at (I, J). Its
// low part is at (J, I + 1), above the triangle. Either way the distances between neighbours are constant, as the
// tensor cores want them. Where these read above the triangle too, the grid in shared memory has 8 x 12 cores: low
// parts are at (J, I + 4), and the three cores between them and the triangle are zeros.

enum CoreSizes : int {
  core_bytes = 128,
  core_row = 12 * core_bytes,
  triangle_bytes = 8 * core_row,
  packed_row = 9 * core_bytes,
  packed_bytes = 8 * packed_row
};
// The bytes of the high or low parts of a chunk's 64 positions by 32 rows.
enum ChunkSizes : int { chunk_part = 4096 };
template <int ROW = core_row>
inline constexpr int core_high(int i, int j) {
  return i * ROW + j * core_bytes;
}
template <int ROW = core_row>
inline constexpr int core_low(int i, int j) {
  return j * ROW + i * core_bytes + ROW - 8 * core_bytes;
}
// The grids have nine runs of cores in common: where run k is in the one with zeros, where in the other, and its bytes.
struct CoreRun {
  int apart, packed, bytes;
};
inline CoreRun core_run(int k) {
  const int first = k > 0 ? 13 * k - 9 : 0, last = k < 8 ? 13 * k : 95;
  return CoreRun{first * core_bytes, (first - 3 * k) * core_bytes, (last - first + 1) * core_bytes};
}

// Splits pairs of fp32 numbers into pairs of high and of low parts.
inline unsigned high_pair(float first, float second) {
  return PairOf<bf16>::of(first, second);
}
inline float first_of(unsigned pair) {
  return float_of(pair << 16);
}
inline float second_of(unsigned pair) {
  return float_of(pair & 0xffff0000u);
}
inline unsigned low_pair(float first, float second, unsigned high) {
  return PairOf<bf16>::of(first - first_of(high), second - second_of(high));
}
inline void split_pair(thread unsigned& high, thread unsigned& low, float first, float second) {
  high = high_pair(first, second);
  low = low_pair(first, second, high);
}
template <int COUNT>
inline void split_pairs(thread unsigned (&high)[COUNT / 2], thread unsigned (&low)[COUNT / 2],
                        const thread float (&x)[COUNT]) {
  DELTATUNE_UNROLL
  for (int i = 0; i < COUNT / 2; ++i) split_pair(high[i], low[i], x[2 * i], x[2 * i + 1]);
}

// u and R are saved in twelve bits that count. The gradient kernel sums terms that nearly cancel: with high parts
// alone, of eight bits, nearly equal keys would leave errors of 1 %.
// Returns the four bits of each number of a left operand that follow its high part: those of pair i from bit 4 i of
// either half on, with the first of the four turned. A low part is made a little less, for it must not be half of the
// high part's last place.
inline unsigned low_bits(const thread unsigned (&high)[4], const thread unsigned (&low)[4]) {
  unsigned bits = 0;
  DELTATUNE_UNROLL
  for (int i = 0; i < 4; ++i) {
    const unsigned first = bits_of(first_of(high[i]) + 0.9921875f * first_of(low[i]));
    const unsigned second = bits_of(second_of(high[i]) + 0.9921875f * second_of(low[i]));
    bits |= (lower_halves(first, second) & 0xf000f000u) >> (12 - 4 * i);
  }
  return bits ^ 0x88888888u;
}
// Returns the low parts that these bits stand for: the middle of the numbers that have them.
inline void low_parts(thread unsigned (&low)[4], const thread unsigned (&high)[4], unsigned bits) {
  DELTATUNE_UNROLL
  for (int i = 0; i < 4; ++i) {
    // A pair of 128 + 2 t + 1, with t the four bits, becomes one of (t - 7.5) / 2048.
    const unsigned numbers = ((i ? bits >> (4 * i - 1) : bits << 1) & 0x001e001eu) | 0x43014301u;
    low[i] = pair_times(pair_times_add(numbers, 0x39803980u, 0xbd10bd10u), high[i] & 0xff80ff80u);
  }
}

// In rows of 32 columns the order of the four pieces of eight depends on the row (the 64-byte swizzle): the place of a
// piece.
inline int turned_piece(int piece, int row) {
  return (piece ^ row >> 1) & 3;
}
// Copies 64 rows of COLUMNS columns to shared memory, by 128 threads: to swizzled tiles of 64 columns, to rows of 32,
// or to rows with eight numbers of padding. Rows that are not live become zeros.
template <int COLUMNS, bool PADDED = false, typename P, typename Live>
inline void copy_positions(threadgroup bf16* to, P from, long row_stride, Live live, unsigned mbarrier, int index) {
  constexpr int pieces = COLUMNS / 8, step = 128 / pieces;
  constexpr int stride = PADDED ? COLUMNS + 8 : COLUMNS < 64 ? COLUMNS : 64;
  const int c = index % pieces, first = index / pieces;
  // A thread's rows have equal numbers modulo 8, so its pieces have the same place in each.
  const int piece = PADDED ? c : COLUMNS < 64 ? turned_piece(c, first) : (c ^ first) & 7;
  threadgroup bf16* place = to + (PADDED ? 0 : c / 8 * 4096) + first * stride + piece * 8;
  const auto source = from + first * row_stride + c * 8;
  if (!Live::masked && live.left >= 64 && aligned16(from)) {
    const unsigned start = shared_place(place);
    DELTATUNE_UNROLL
    for (int i = 0; i < 64 / step; ++i)
      copy_signalled_piece(start + i * step * stride * 2, source + i * step * row_stride, true, mbarrier);
    return;
  }
  const bool aligned = aligned16(from);
  for (int i = 0; i < 64 / step; ++i) {
    const bool on = live(first + i * step);
    const auto row = on ? source + i * step * row_stride : from;
    if (aligned) copy_signalled_piece(shared_place(place + i * step * stride), row, on, mbarrier);
    else put_piece(place + i * step * stride, row, on);
  }
  if (!aligned) copies_fence();
}
