// The shared memory of a block of hopper_gradients.h, its barriers, and the warps that fill it with the scans' saved
// arrays and with the inputs.

// The shared memory of a block. The scans' saved arrays stay in cores (hopper_scans.h), and q and k are put in cores
// too, [8, 16] of them. Tiles of weights have rows of 128 bytes with the 128-byte swizzle, and dy has rows of DV
// numbers with the same order of each eight pieces.
template <int DV>
struct HopperGradientMemory {
  // A stage: 16 rows of DV of each operand. The low parts of u are made of the bits that follow its high parts.
  static constexpr constant int panel = 2048, state = 0, d_state = 2 * panel, u = 4 * panel, u_low = 5 * panel;
  static constexpr constant int right = 6 * panel, u_bits = 7 * panel, right_bits = u_bits + 512;
  static constexpr constant int tails = u_bits + 1024, stage = 8 * panel, saved = stage - panel, stages = 5;
  static constexpr constant int dy = stages * stage, q = dy + 128 * DV, k = q + 16384;
  // The sums of dk, to which teams 2 and 1 add in turn, each lane its own. By KIND, the weights of the pairs: summed in
  // fp32, each lane its own, then as two planes of bf16.
  static constexpr constant int key_sums = k + 16384, weights = key_sums + 32768;
  // Rows of dq and dk on their way out take the place of the sums of dk (row_piece).
  static constexpr constant int dk_rows = key_sums, dq_rows = key_sums + 256;
  // The tables of the gates of a unit, for two units: Decay's tables, then G, E, beta and the gates.
  static constexpr constant int decay = weights + 2 * 16384, decay_bytes = Decay<64>::floats * 4;
  static constexpr constant int scalars = decay + 2 * decay_bytes;
  // The terms of a unit in the gradients of the gates: by KIND the diagonal tiles of pairs, their sums by row and those
  // by column; then, by position, before_sums (of teams 0 and 1), after_sums and rate_sums of gradients.h; and <dS, S>
  // by warp of teams 0 and 1. Last, the totals of 16 positions each, for two units.
  static constexpr constant int diagonal = scalars + 2 * 1024, diagonal_bytes = 64 * 17 * 4;
  static constexpr constant int row_sums = diagonal + 2 * diagonal_bytes, column_sums = row_sums + 2 * 1024;
  static constexpr constant int before_sums = column_sums + 2 * 1024, after_sums = before_sums + 512;
  static constexpr constant int rate_sums = after_sums + 256, dots = rate_sums + 256, totals = dots + 32;
  // The numbers of the items that this block takes next, in turn.
  static constexpr constant int items = totals + 2 * 64;
  static constexpr constant int barriers = items + 16;
  static constexpr constant int bytes = barriers + 280 + 1024;
};

// The barriers of a block: a stage has arrived, has the low parts of u, or was read; q and k have arrived; an item is
// done, so that q and k may be overwritten; dy of a unit has arrived, and was read; the tables of a unit's gates are
// filled; its sums are written, and were read; team 1 has added to the sums of dk, and then team 2 has, or read them;
// the planes of an item's weights are written, and were read; rows of dq or dk are handed over, and are in device
// memory; the number of the next item is there.
struct GradientBarriers {
  enum : int { warps = 12 };
  unsigned place;
  inline unsigned arrived(int stage) const { return place + 8 * stage; }
  inline unsigned read(int stage) const { return place + 40 + 8 * stage; }
  inline unsigned keys() const { return place + 80; }
  inline unsigned item() const { return place + 88; }
  inline unsigned tables(int unit) const { return place + 96 + 8 * (unit & 1); }
  inline unsigned sums() const { return place + 112; }
  inline unsigned sums_read() const { return place + 120; }
  inline unsigned keys_of_u() const { return place + 128; }
  inline unsigned keys_of_right() const { return place + 136; }
  // By KIND.
  inline unsigned planes(int kind) const { return place + (kind ? 176 : 144); }
  // Of dq, and of dk.
  inline unsigned rows(int kind) const { return place + 184 + 8 * kind; }
  inline unsigned rows_written() const { return place + 200; }
  inline unsigned planes_read() const { return place + 152; }
  inline unsigned dy() const { return place + 160; }
  inline unsigned dy_read() const { return place + 168; }
  inline unsigned next(int round) const { return place + 208 + 8 * (round & 3); }
  inline unsigned widened(int stage) const { return place + 240 + 8 * stage; }
  inline void start(Place at) const {
    if (at.index == 0) {
      for (int stage = 0; stage < 5; ++stage) {
        mbarrier_init(arrived(stage), 1);
        mbarrier_init_for_groups(read(stage), warps);
        mbarrier_init_for_groups(widened(stage), 4);
      }
      mbarrier_init(keys(), 32);
      mbarrier_init_for_groups(item(), warps);
      mbarrier_init_for_groups(tables(0), 2);
      mbarrier_init_for_groups(tables(1), 2);
      mbarrier_init_for_groups(sums(), warps);
      mbarrier_init_for_groups(sums_read(), 2);
      mbarrier_init_for_groups(keys_of_u(), 4);
      mbarrier_init_for_groups(keys_of_right(), 4);
      mbarrier_init_for_groups(planes(0), 4);
      mbarrier_init_for_groups(planes(1), 4);
      mbarrier_init_for_groups(rows(0), 4);
      mbarrier_init_for_groups(rows(1), 4);
      mbarrier_init_for_groups(rows_written(), 2);
      mbarrier_init_for_groups(planes_read(), 4);
      mbarrier_init(dy(), 32);
      mbarrier_init_for_groups(dy_read(), 4);
      for (int round = 0; round < 4; ++round) mbarrier_init(next(round), 1);
      mbarriers_started();
    }
    barrier();
  }
};

// The lane's place in a way that hides that it is the same all the time, so that no addresses are kept from phase to
// phase: the registers are needed for sums.
inline Place hidden(Place at) {
  at.index = (int)opaque((unsigned)at.index);
  at.lane = at.index & 31;
  return at;
}

// An item of work: chunk `n` of key head `head` in row `row` of the batch.
struct GradientItem {
  int n, head, row;
};
template <int HK>
inline GradientItem item_at(int number, int chunks) {
  return GradientItem{number / HK % chunks, number % HK, number / HK / chunks};
}

// The items of a block: the first is that of its own number, and then whichever the blocks have not taken yet, for some
// multiprocessors are slower than others. The warp that loads the scans' saved arrays is at most two items ahead of all
// others, so that four places in turn are enough.
template <int DV>
struct GradientItems {
  Room room;
  GradientBarriers barriers;
  inline threadgroup int* place(int round) const {
    return reinterpret_cast<threadgroup int*>(room.memory + HopperGradientMemory<DV>::items) + (round & 3);
  }
  // Takes the item that follows that of `round`: `taken` counts those that all blocks have taken so.
  inline void take(int round, GLOBAL int* taken, int blocks) const {
    *place(round) = blocks + counted(taken);
    mbarrier_arrive(barriers.next(round));
  }
  inline int after(int round) const {
    mbarrier_wait(barriers.next(round), round / 4);
    return *place(round);
  }
};

// The address of a piece of 16 bytes in a tile.
inline unsigned piece_place(unsigned tile, int row, int piece) {
  return tile + row * 128 + ((piece ^ row) & 7) * 16;
}
// The place of a piece of 16 bytes of one of 64 rows of dq or dk. The two rows of a position share 512 bytes, in which
// none but the position's own warp has its sums of dk.
inline int row_piece(int row, int piece) {
  return row % 16 * 2048 + row / 16 * 512 + ((piece & 8) | ((piece ^ row) & 7)) * 16;
}
template <int DV>
inline unsigned dy_piece_place(unsigned dy, int row, int piece) {
  return dy + row * DV * 2 + ((piece & 8) | ((piece ^ row) & 7)) * 16;
}
// Loads the left operand of 16 rows and columns from (row, column) of a tile on, or the transpose of the one there.
inline void load_left(thread unsigned (&to)[4], unsigned tile, int row, int column, Place at) {
  load_parts(to, piece_place(tile, row + at.lane % 16, column / 8 + at.lane / 16));
}
inline void load_left_turned(thread unsigned (&to)[4], unsigned tile, int row, int column, Place at) {
  load_turned_parts(to, piece_place(tile, row + at.lane % 8 + at.lane / 16 * 8, column / 8 + at.lane / 8 % 2));
}

// The address of eight elements of a row of cores, of which two rows follow one another every `groups` cores.
inline unsigned core_place(unsigned cores, int groups, int row, int group) {
  return cores + (row / 8 * groups + group) * 128 + row % 8 * 16;
}
// Loads the left operand of 16 rows and columns from core `group` on.
inline void load_left_cores(thread unsigned (&to)[4], unsigned cores, int groups, int group, Place at) {
  load_parts(to, core_place(cores, groups, at.lane % 16, group + at.lane / 16));
}

// One of the eight blocks of a stage: where those of a chunk start, the bytes of a chunk, those of a block, and the
// block's place in a stage.
struct SavedBlock {
  const GLOBAL char* from;
  long chunk;
  int bytes, to;
};
// Returns the block that a lane copies.
template <int DV, typename PT, typename PU>
inline SavedBlock saved_block(PT states, PT d_states, PU u, PU d_right, int lane) {
  using Memory = HopperGradientMemory<DV>;
  constexpr int panel = Memory::panel;
  if (lane < 2) {
    const auto from = reinterpret_cast<const GLOBAL char*>(lane ? d_states : states);
    return SavedBlock{from, DV * 256, 2 * panel, lane ? Memory::d_state : Memory::state};
  }
  // u and R have high parts, the bits that follow them, and tails.
  const int side = lane & 1, part = lane / 2 - 1;
  const auto from = reinterpret_cast<const GLOBAL char*>(side ? d_right : u);
  if (part == 0) return SavedBlock{from, DV * 192, panel, side ? Memory::right : Memory::u};
  const int place = (part == 1 ? Memory::u_bits : Memory::tails) + side * 512;
  return SavedBlock{from + DV * (96 + 32 * part), DV * 192, 512, place};
}
// Copies the scans' saved arrays of all units to the stages. One warp does it.
template <int DV, int HK, int HV, int BLOCKS, typename PT, typename PU>
inline void load_saved(Place at, Room room, GradientBarriers barriers, int items, int chunks, PT states, PT d_states,
                       PU u, PU d_right, GLOBAL int* taken) {
  using Memory = HopperGradientMemory<DV>;
  constexpr int repeats = HV / HK;
  const GradientItems<DV> next{room, barriers};
  const SavedBlock block = saved_block<DV>(states, d_states, u, d_right, at.lane < 8 ? at.lane : 0);
  int stage = 0, use = 0;
  for (int number = at.x, round = 0; number < items; number = next.after(round), ++round) {
    if (at.lane == 0) next.take(round, taken, BLOCKS);
    const GradientItem item = item_at<HK>(number, chunks);
    for (int repeat = 0; repeat < repeats; ++repeat) {
      const long chunk = ((long)item.row * HV + item.head * repeats + repeat) * chunks + item.n;
      auto from = block.from + chunk * block.chunk;
      for (int s = 0; s < DV / 16; ++s, from += block.bytes) {
        const unsigned mbarrier = barriers.arrived(stage), to = room.place + stage * Memory::stage;
        if (use > 0) mbarrier_wait(barriers.read(stage), use - 1);
        if (at.lane == 0) mbarrier_expect(mbarrier, Memory::saved);
        if (at.lane < 8) copy_tile(to + block.to, from, block.bytes, mbarrier);
        if (++stage == Memory::stages) stage = 0, ++use;
      }
    }
  }
}

// Copies a piece of an input, or zeros if it is not live. The thread signals when its pieces are there
// (signalled_pieces_sent).
template <typename In, typename P>
inline void load_piece(Room room, int to, P from, bool live, bool aligned, unsigned mbarrier) {
  if (aligned) copy_signalled_piece(room.place + to, from, live, mbarrier);
  else put_piece(reinterpret_cast<threadgroup In*>(room.memory + to), from, live);
}

// Copies 64 positions of dy, or of q and k as cores, from their first row on. One warp does it. WHOLE rows are all live
// and aligned.
template <typename In, int DV, bool WHOLE, typename P, typename Live>
inline void load_dy(Room room, P dy, long row_stride, Live live, bool aligned, unsigned mbarrier, int lane) {
  using Memory = HopperGradientMemory<DV>;
  constexpr int pieces = DV / 8, step = 32 / pieces;
  const int first = lane / pieces, piece = lane % pieces;
  auto from = dy + first * row_stride + piece * 8;
  _Pragma("unroll (WHOLE ? 4 : 1)")
  for (int r = first; r < 64; r += step, from += step * row_stride) {
    const int place = (int)dy_piece_place<DV>(Memory::dy, r, piece);
    if (WHOLE) copy_signalled_piece(room.place + place, from, true, mbarrier);
    else load_piece<In>(room, place, live(r) ? from : dy, live(r), aligned, mbarrier);
  }
}
template <typename In, int DV, bool WHOLE, typename P, typename Live>
inline void load_keys(Room room, P q, P k, long row_stride, Live live, bool aligned, unsigned mbarrier, int lane) {
  using Memory = HopperGradientMemory<DV>;
  // Eight lanes write a core, and 32 lanes read 64 bytes of each of eight rows.
  const long first = lane % 8 * row_stride + lane / 8 * 8;
  _Pragma("unroll 1")
  for (int r = 0; r < 64; r += 8) {
    const bool on = WHOLE || live(r + lane % 8);
    _Pragma("unroll (WHOLE ? 4 : 1)")
    for (int i = 0; i < 4; ++i) {
      const long from = on ? r * row_stride + first + i * 32 : 0;
      const int place = r * 256 + i * 512 + lane / 8 * 128 + lane % 8 * 16;
      if (WHOLE) {
        copy_signalled_piece(room.place + Memory::q + place, q + from, true, mbarrier);
        copy_signalled_piece(room.place + Memory::k + place, k + from, true, mbarrier);
      } else {
        load_piece<In>(room, Memory::q + place, q + from, on, aligned, mbarrier);
        load_piece<In>(room, Memory::k + place, k + from, on, aligned, mbarrier);
      }
    }
  }
}

// Copies the inputs of all items to shared memory. One warp does it.
template <typename In, int DV, int HK, int HV, bool MASKED, typename PQ, typename PK, typename PM, typename PY>
inline void load_inputs(Place at, Room room, GradientBarriers barriers, int length, int items, int chunks, PQ q, PK k,
                        PM mask, PY dy) {
  constexpr int repeats = HV / HK;
  const bool aligned = aligned16(q) && aligned16(k) && aligned16(dy);
  const auto send = [&](unsigned mbarrier) {
    if (!aligned) copies_fence();
    signalled_pieces_sent(mbarrier);
  };
  const GradientItems<DV> next{room, barriers};
  int unit = 0;
  for (int number = at.x, round = 0; number < items; number = next.after(round), ++round) {
    const GradientItem item = item_at<HK>(number, chunks);
    const auto live = alive<MASKED>(mask, item.row, item.n * 64, length);
    const bool whole = !MASKED && live.left >= 64 && aligned;
    const long row = (long)item.row * length + item.n * 64, key = (row * HK + item.head) * 128;
    for (int repeat = 0; repeat < repeats; ++repeat, ++unit) {
      const auto from = dy + (row * HV + item.head * repeats + repeat) * DV;
      if (unit > 0) mbarrier_wait(barriers.dy_read(), unit - 1);
      if (whole) load_dy<In, DV, true>(room, from, HV * DV, live, aligned, barriers.dy(), at.lane);
      else load_dy<In, DV, false>(room, from, HV * DV, live, aligned, barriers.dy(), at.lane);
      send(barriers.dy());
      if (repeat > 0) continue;
      if (round > 0) mbarrier_wait(barriers.item(), round - 1);
      if (whole) load_keys<In, DV, true>(room, q + key, k + key, HK * 128, live, aligned, barriers.keys(), at.lane);
      else load_keys<In, DV, false>(room, q + key, k + key, HK * 128, live, aligned, barriers.keys(), at.lane);
      send(barriers.keys());
    }
  }
}
