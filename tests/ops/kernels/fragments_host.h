// kernels/fragments.h on the host machine: the lanes of a group meet in every product and exchange their registers.

#define DELTATUNE_ROLLED

namespace fragments {

static unsigned lefts[host::most_lanes][4], rights[host::most_lanes][2], pairs[host::most_lanes];

// Element number `which` of a register.
template <typename In>
static float element(unsigned pair, int which) {
  const unsigned short bits = (unsigned short)(pair >> which * 16);
  In x;
  memcpy(&x, &bits, 2);
  return static_cast<float>(x);
}

}  // namespace fragments

template <typename In>
struct Fragments {
  static inline void multiply(float (&sums)[4], const unsigned (&left)[4], unsigned right, unsigned further) {
    const int me = host::current, first = me / 32 * 32, g = me % 32 / 4, t = me % 4;
    memcpy(fragments::lefts[me], left, sizeof left);
    fragments::rights[me][0] = right;
    fragments::rights[me][1] = further;
    host::meet_group(1);
    for (int e = 0; e < 4; ++e) {
      const int row = g + e / 2 * 8, column = t * 2 + e % 2;
      for (int k = 0; k < 16; ++k) {
        const int far = k / 8, holder = k % 8 / 2;
        const unsigned a = fragments::lefts[first + row % 8 * 4 + holder][row / 8 + far * 2];
        const unsigned b = fragments::rights[first + column * 4 + holder][far];
        sums[e] += fragments::element<In>(a, k & 1) * fragments::element<In>(b, k & 1);
      }
    }
    host::meet_group(2);
  }
};

inline unsigned across_lanes(unsigned pair) {
  const int me = host::current, first = me / 32 * 32, g = me % 32 / 4, t = me % 4;
  fragments::pairs[me] = pair;
  host::meet_group(3);
  unsigned found = 0;
  for (int i = 0; i < 2; ++i)
    found |= (fragments::pairs[first + (t * 2 + i) * 4 + g / 2] >> (g & 1) * 16 & 0xffff) << i * 16;
  host::meet_group(4);
  return found;
}
inline unsigned pair_of_firsts(unsigned one, unsigned other) { return (one & 0xffff) | other << 16; }
inline unsigned pair_of_seconds(unsigned one, unsigned other) { return one >> 16 | (other & 0xffff0000u); }

template <typename In> inline float first_of(unsigned pair) { return fragments::element<In>(pair, 0); }
template <typename In> inline float second_of(unsigned pair) { return fragments::element<In>(pair, 1); }
template <typename In>
inline unsigned pair_of(float first, float second) {
  const In both[2] = {static_cast<In>(first), static_cast<In>(second)};
  unsigned pair;
  memcpy(&pair, both, 4);
  return pair;
}

template <int BYTES, typename P>
inline bool starts_at_multiple(P p) {
  return ((uintptr_t)p & (BYTES - 1)) == 0;
}
template <int BYTES>
inline bool starts_at_multiple(Nothing) {
  return true;
}
template <bool ALIGNED, int PAIRS, typename P>
inline void load_pairs(unsigned (&to)[PAIRS], P from, int there) {
  if (ALIGNED && there >= 2 * PAIRS && (uintptr_t)from % sizeof to) {
    host::fail("a load of pairs that are not aligned", 0);
    host::leave();
  }
  // As on the GPU, an aligned load is of all pairs or of none.
  const int count = ALIGNED && there < 2 * PAIRS ? 0 : there < 2 * PAIRS ? there : 2 * PAIRS;
  for (int i = 0; i < PAIRS; ++i) to[i] = 0;
  for (int i = 0; i < count; ++i) {
    unsigned short bits;
    auto element = from[i];
    memcpy(&bits, &element, 2);
    to[i / 2] |= (unsigned)bits << (i & 1) * 16;
  }
}

template <typename P>
inline void store_pairs(P to, const unsigned (&pairs)[4]) {
  if ((uintptr_t)to % 16) {
    host::fail("a store of pairs that are not aligned", 0);
    host::leave();
  }
  for (int i = 0; i < 8; ++i) {
    const unsigned short bits = (unsigned short)(pairs[i / 2] >> (i & 1) * 16);
    memcpy((void*)(to + i), &bits, 2);
  }
}

// The blocks run one after another, so the last one finds the marks of all; outputs start as other bits than a mark.
inline void set_mark(device unsigned* mark) { mark[0] = 0x7fe5ffc6u, mark[1] = 0x7fd3ffa9u; }
inline void clear_mark(device unsigned* mark) { mark[0] = mark[1] = 0; }
inline bool is_marked(const device unsigned* mark) { return mark[0] == 0x7fe5ffc6u && mark[1] == 0x7fd3ffa9u; }
inline void device_fence() {}
inline void take_shares(float (&to)[4], const device float* from) {
  if ((uintptr_t)from % 16) {
    host::fail("a load of shares that are not aligned", 0);
    host::leave();
  }
  for (int e = 0; e < 4; ++e) to[e] = from[e];
}

// The blocks of a kernel that waits run in the order of the grid, so that those it waits for have run.
inline void arrive(device int* counter) { ++*counter; }
inline void wait_for(const device int* counter, int count) {
  if (*counter >= count) return;
  host::fail("a block waits for one that has not run", 0);
  host::leave();
}
inline bool is_last_of(device int* counter, int count) {
  *counter = *counter + 1 == count ? 0 : *counter + 1;
  return *counter == 0;
}
template <typename P>
inline void load_written(unsigned (&to)[4], P from, bool counts) {
  load_pairs<true>(to, from, counts ? 8 : 0);
}
