// What the prepare kernel and the scans of Hopper share: the form of what they hand to one another, pairs of bf16 for
// what is computed in fp32, and how 64 positions of an input are copied to shared memory.
//
// Matrices that the kernels hand to one another consist of cores: 8 x 8 matrices of bf16, 128 bytes each. A group of
// lanes writes a core at once from its registers, and the tensor cores multiply with cores as they are. States have
// their cores in rows, [DV / 8, DK / 8]. So have u and R [DV / 8, 8]: all high parts, then all low parts, then for each
// 16 rows the tails of the state, 16 bytes a lane (write_tails).
// Z and P of a chunk are in a grid of 8 x 12 cores. The high part of core (I, J) of the lower triangle is at (I, J).
// Its low part is at (J, I + 4), above the triangle. Either way the distances between neighbours are constant, as the
// tensor cores want them. The 16 x 16 tiles (0, 1) and (2, 3) are zeros.

enum CoreSizes : int { core_bytes = 128, core_row = 12 * core_bytes, triangle_bytes = 8 * core_row };
// The bytes of the high or low parts of a chunk's 64 positions by 32 rows.
enum ChunkSizes : int { chunk_part = 4096 };
inline constexpr int core_high(int i, int j) {
  return i * core_row + j * core_bytes;
}
inline constexpr int core_low(int i, int j) {
  return j * core_row + (i + 4) * core_bytes;
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
