// How the experts' matrices get to shared memory in the kernel of experts_hopper.h: as they are stored, or unpacked.

// The shared memory of a block: for each stage, 64 columns of a tile's rows and 64 inputs of COLUMNS outputs of the
// matrix; then where the tile of each stage lies, how many tiles the experts have, and barriers; and if the matrices are
// PACKED, for each of three slots the words, scales and biases of as many numbers as a stage has.
template <typename In, int TEAMS, int COLUMNS, bool PACKED>
struct HopperExpertMemory {
  static constexpr constant int rows = 0, weight = TEAMS * 64 * 128, stage = weight + COLUMNS * 128;
  // Each thread counts the tiles of one expert.
  static constexpr constant int most_experts = (TEAMS + 1) * 128, slots = 3, slot = COLUMNS * (32 + 8);
  static constexpr constant int others = 64 + 64 + 64 + most_experts * 2 + (PACKED ? slots * slot : 0);
  static constexpr constant int stages = (232448 - 1024 - others) / stage < 4 ? (232448 - 1024 - others) / stage : 4;
  static constexpr constant int barriers = stages * stage, places = barriers + 64, totals = places + 64;
  static constexpr constant int tiles = totals + 64, packed = tiles + most_experts * 2;
  static constexpr constant int bytes = stages * stage + others + 1024;
};

// Copies a thread's pieces of PANELS panels of ROWS x 64 elements, every 16th row from its first on. Rows from `live` on,
// and columns from `width` on, keep their old contents.
template <int ROWS, int PANELS, typename In, typename P>
inline void copy_panels(threadgroup In* to, P from, int stride, int live, int width, bool aligned, unsigned mbarrier) {
  const long step = (long)16 * stride;
  if (aligned) {
    const unsigned place = shared_place(to);
    DELTATUNE_UNROLL
    for (int row = 0; row < ROWS; row += 16, from += step) {
      DELTATUNE_UNROLL
      for (int panel = 0; panel < PANELS; ++panel)
        if (row < live && panel * 64 < width)
          copy_signalled_piece(place + (panel * ROWS + row) * 128, from + panel * 64, true, mbarrier);
    }
    return;
  }
  for (int row = 0; row < ROWS && row < live; row += 16, from += step)
    for (int panel = 0; panel < PANELS && panel * 64 < width; ++panel)
      put_piece(to + (panel * ROWS + row) * 64, from + panel * 64, true);
  copies_fence();
}

// The tiles of a matrix that is stored as it is multiplied: those pieces that a thread of the loading team copies.
// `stride` is the length of a stored row.
template <typename In, int COLUMNS, bool TRANSPOSED, int GROUP, typename PW, typename PS>
struct ExpertMatrix {
  PW from;
  int stride, first;
  bool aligned;
  inline ExpertMatrix(PW weight, PS, PS, int stride, unsigned, Place at)
      : from(weight + (long)(at.index / 8) * stride + at.index % 8 * 8), stride(stride), first(at.index / 8),
        aligned(aligned16(weight)) {}
  template <typename F>
  inline void read(int, int, F) {}
  inline void put(threadgroup In* tile, long number, int width, unsigned mbarrier, Place at) {
    copy_panels<TRANSPOSED ? COLUMNS : 64, TRANSPOSED ? 1 : COLUMNS / 64>(
        tile + first * 64 + ((at.index ^ first) & 7) * 8, from + number, stride, TRANSPOSED ? width - first : 64, width,
        aligned, mbarrier);
  }
};

// Unpacks eight numbers of 4 bits, the first in the lowest bits: scale q + bias, rounded once to bf16. `scale` and `bias`
// are pairs of one number.
inline void unpack_eight(thread unsigned (&to)[4], unsigned bits, unsigned scale, unsigned bias) {
  DELTATUNE_UNROLL
  for (int i = 0; i < 4; ++i) {
    // As bf16, 0x4300 is 128, and its last bits count ones.
    const unsigned more = (bytes_of(bits, bits >> 4, i) & 0x000f000f) | 0x43004300;
    to[i] = pair_times_add(scale, pair_times_add(more, 0x3f803f80, 0xc300c300), bias);
  }
}

// The part of a matrix that a tile multiplies: its first number in the array of all, and its columns of the result.
struct ExpertPart {
  unsigned number;
  int width;
};
// The tiles of a matrix that is stored in words of eight numbers of 4 bits, in groups with a scale and a bias each. Of
// each 64 inputs a thread unpacks COLUMNS / 64 times 32 numbers of a row. Their words are in shared memory by then, where
// the thread has copied them a few steps before, with the word that holds a row's scales or that of its biases.
template <typename In, int COLUMNS, bool TRANSPOSED, int GROUP, typename PS>
struct ExpertMatrix<In, COLUMNS, TRANSPOSED, GROUP, GLOBAL const unsigned*, PS> {
  using Memory = HopperExpertMemory<In, 2, COLUMNS, true>;
  enum : int { parts = COLUMNS / 64, of_scales = COLUMNS * 32 };
  GLOBAL const unsigned* words;
  PS scales;
  unsigned room, read_room, put_room;
  // The thread's first number within a tile, how many numbers the next part's is further, and the place of the next
  // read.
  unsigned own, part_step;
  int row, side, left;
  bool aligned;
  ExpertPart next;
  inline ExpertMatrix(GLOBAL const unsigned* words, PS scales, PS biases, int stride, unsigned room, Place at)
      : words(words), scales(at.index % 2 ? biases : scales), room(room), read_room(room), put_room(room),
        own(at.index / 2 * stride + at.index % 2 * 32), part_step(TRANSPOSED ? 64 * stride : 64), row(at.index / 2),
        side(at.index % 2), left(0), aligned(aligned16(words) && aligned16(this->scales)) {}
  inline unsigned after(unsigned slot) const {
    return slot == room + (Memory::slots - 1) * Memory::slot ? room : slot + Memory::slot;
  }
  // Copies the words of the 64 inputs that follow those of the call before; `next_part` returns the next tile's part.
  template <typename F>
  inline void read(int inputs, int step, F next_part) {
    if (left == 0) next = next_part(), left = inputs;
    const unsigned to = read_room + row * 32 + side * 16, scales_to = read_room + of_scales + row * 8 + side * 4;
    const unsigned first = next.number + own;
    group_barrier();
    if (aligned) {
      DELTATUNE_UNROLL
      for (int part = 0; part < parts; ++part) {
        if (part * 64 >= next.width) continue;
        const unsigned from = first + part * part_step;
        copy_words(to + part * 2048, words + from / 8);
        copy_pair(scales_to + part * 512, scales + from / GROUP / 2 * 2);
      }
    } else {
      for (int part = 0; part < parts && part * 64 < next.width; ++part) {
        const unsigned from = first + part * part_step;
        copy_words_in_parts(to + part * 2048, words + from / 8);
        copy_pair_in_parts(scales_to + part * 512, scales + from / GROUP / 2 * 2);
      }
    }
    words_sent();
    next.number += step, left -= 64;
    read_room = after(read_room);
  }
  // Unpacks the 64 inputs that were read first of those that were not unpacked.
  inline void put(threadgroup In* tile, unsigned number, int width, unsigned, Place) {
    unsigned bits[parts][4], stored[parts][2];
    words_wait<Memory::slots - 1>();
    group_barrier();
    DELTATUNE_UNROLL
    for (int part = 0; part < parts; ++part) {
      get_words(bits[part], put_room + row * 32 + side * 16 + part * 2048);
      get_two_words(stored[part], put_room + of_scales + row * 8 + part * 512);
    }
    put_room = after(put_room);
    const unsigned to = shared_place(tile) + row * 128;
    DELTATUNE_UNROLL
    for (int part = 0; part < parts; ++part) {
      if (part * 64 >= width) continue;
      const int upper = (number + own + part * part_step) / GROUP & 1;
      const unsigned scale = half_twice(stored[part][0], upper), bias = half_twice(stored[part][1], upper);
      DELTATUNE_UNROLL
      for (int i = 0; i < 4; ++i) {
        unsigned pairs[4];
        unpack_eight(pairs, bits[part][i], scale, bias);
        put_words(to + part * 8192 + (((side * 4 + i) ^ row) & 7) * 16, pairs);
      }
    }
  }
};
