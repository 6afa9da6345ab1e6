// The parts that Hopper's kernels share beyond hopper.h: the place of a block's tiles, the elements of a 64-row result
// that a lane holds, and products of whole tiles.

// The start of a block's shared memory, rounded up to a multiple of 1024: as a pointer, and as an address (place).
struct Room {
  threadgroup char* memory;
  unsigned place;
  inline threadgroup float* floats(int offset) const {
    return reinterpret_cast<threadgroup float*>(memory + offset);
  }
};
inline Room room_of(threadgroup char* memory) {
  const unsigned place = shared_place(memory), start = (place + 1023) & ~1023u;
  return Room{memory + (start - place), start};
}

// The rows and columns of a lane's elements of a 64-row result: two rows, eight apart, and two of every eight columns.
inline int own_row(Place at, int side) {
  return at.group % 4 * 16 + at.lane / 4 + side * 8;
}
inline int own_column(Place at, int i) {
  return i / 4 * 8 + at.lane % 4 * 2 + (i & 1);
}
inline constexpr int own_side(int i) {
  return (i >> 1) & 1;
}
inline float quad_sum(float x) {
  x += lane_exchange(x, 1);
  return x + lane_exchange(x, 2);
}
inline float quad_max(float x) {
  const float other = lane_exchange(x, 1);
  x = x > other ? x : other;
  const float far = lane_exchange(x, 2);
  return x > far ? x : far;
}

template <int COUNT>
inline void clear_floats(thread float (&x)[COUNT]) {
  DELTATUNE_UNROLL
  for (int i = 0; i < COUNT; ++i) x[i] = 0.0f;
}

// Sets d [64, N] to a b^T over SIZE columns. a_panel and b_panel are the bytes between panels of 64 columns.
template <typename In, int N, int SIZE>
inline void multiply_rows(thread float (&d)[N / 2], unsigned a, int a_panel, unsigned b, int b_panel) {
  const unsigned left_place = opaque((a & 0x3ffff) >> 4), right_place = opaque((b & 0x3ffff) >> 4);
  DELTATUNE_UNROLL
  for (int k = 0; k < SIZE / 16; ++k)
    Products<In, N>::rows(d, rows_operand(left_place + (k / 4 * a_panel + k % 4 * 32) / 16),
                          rows_operand(right_place + (k / 4 * b_panel + k % 4 * 32) / 16), k > 0);
}
template <typename In, int N, int SIZE>
inline void multiply_held(thread float (&d)[N / 2], const thread unsigned (&a)[SIZE / 4], unsigned b, int b_panel) {
  const unsigned place = opaque((b & 0x3ffff) >> 4);
  DELTATUNE_UNROLL
  for (int k = 0; k < SIZE / 16; ++k)
    Products<In, N>::held_rows(d, a + 4 * k, rows_operand(place + (k / 4 * b_panel + k % 4 * 32) / 16), k > 0);
}
// Loads the 64 rows of a group of warps from a packed tile into registers, for multiply_held.
template <int SIZE, typename P>
inline void hold_rows(thread unsigned (&to)[SIZE / 4], P tile, Place at) {
  DELTATUNE_UNROLL
  for (int i = 0; i < SIZE / 4; ++i) {
    const int row = own_row(at, i & 1), piece = i / 4 * 2 + (i >> 1 & 1);
    to[i] = get_pair(tile + piece / 8 * 4096 + row * 64 + ((piece ^ row) & 7) * 8 + at.lane % 4 * 2);
  }
}
// Adds a b over ROWS rows of b to d [64, N], with a in registers.
template <typename In, int N, int ROWS>
inline void add_columns(thread float (&d)[N / 2], const thread unsigned (&a)[ROWS / 4], unsigned b, int panel) {
  const unsigned place = opaque((b & 0x3ffff) >> 4);
  DELTATUNE_UNROLL
  for (int k = 0; k < ROWS / 16; ++k) Products<In, N>::columns(d, a + 4 * k, columns_operand(place + k * 128, panel));
}
// Rounds a result to the left operand of the next product.
template <typename In, int COUNT>
inline void pack_rows(thread unsigned (&to)[COUNT / 2], const thread float (&from)[COUNT]) {
  DELTATUNE_UNROLL
  for (int i = 0; i < COUNT / 2; ++i) to[i] = PairOf<In>::of(from[2 * i], from[2 * i + 1]);
}

// How many lanes of a group report to an mbarrier that counts groups. One is enough, but compute-sanitizer's racecheck
// does not see that a lane reports for its whole group. So in kernels that are compiled for it all lanes report.
#ifdef DELTATUNE_RACECHECK
enum : int { reporting_lanes = 32 };
#else
enum : int { reporting_lanes = 1 };
#endif
inline void mbarrier_init_for_groups(unsigned mbarrier, int groups) {
  mbarrier_init(mbarrier, groups * reporting_lanes);
}
// Reports to an mbarrier for a group of lanes, all of which have come to the same place, if `on`.
inline void report(unsigned mbarrier, Place at, bool on = true) {
  if (on && (reporting_lanes == 32 || at.lane == 0)) mbarrier_arrive(mbarrier);
}
// Does so when all of them have come here.
inline void release(unsigned mbarrier, Place at) {
  group_barrier();
  report(mbarrier, at);
}
