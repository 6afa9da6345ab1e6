// The kernel of gradients.h on Hopper, for bf16, heads of 128 x DV and chunks of 64 positions. Letters are those of
// chunk.h.
// A block has four groups of four warps. Three of them (teams) multiply 64 positions with all columns at once, and each
// has the products of one left operand: team 0 those of dY, which give dq and the weights of the pairs of P (KIND 0),
// team 1 those of R, which give the weights of N (KIND 1) and a part of dk, and team 2 those of u, the other part. So
// each operand is read from shared memory once, which is what bounds the kernel. Of the fourth group one warp copies 16
// rows of DV at a time to shared memory, one copies the inputs, and two add up the gradients of log_g and beta.
// A block takes every BLOCKS-th item of work, which is a chunk of a key head with its HV / HK value heads; a unit is
// one of these value heads. dq is summed over the value heads in registers, dk and the weights of the pairs in shared
// memory, so that the products of the weights with q and k are computed once per item.

// The shared memory of a block. What the scans saved stays in cores (hopper_scans.h), and q and k are put in
// cores too, [8, 16] of them. Tiles of weights have rows of 128 bytes with the 128-byte swizzle, and dy has rows of DV
// numbers with the same order of each eight pieces.
template <int DV>
struct HopperGradientMemory {
  // A stage: 16 rows of DV of each operand. u and R have two parts.
  static constexpr constant int panel = 2048, state = 0, d_state = 2 * panel, u = 4 * panel, right = 6 * panel;
  static constexpr constant int tails = 8 * panel, stage = tails + 1024, stages = 5;
  static constexpr constant int dy = stages * stage, q = dy + 128 * DV, k = q + 16384;
  // The sums of dk, to which teams 2 and 1 add in turn, each lane its own. By KIND, the weights of the pairs: summed in
  // fp32, each lane its own, then as two planes of bf16.
  static constexpr constant int key_sums = k + 16384, weights = key_sums + 32768;
  // What depends on the gates of a unit, for two units: Decay's tables, then G, E, beta and the gates.
  static constexpr constant int decay = weights + 2 * 16384, decay_bytes = Decay<64>::floats * 4;
  static constexpr constant int scalars = decay + 2 * decay_bytes;
  // What a unit adds to the gradients of the gates: by KIND the diagonal tiles of pairs, their sums by row and those by
  // column; then, by position, what before_sums (of teams 0 and 1), after_sums and rate_sums of gradients.h are; and
  // <dS, S> by warp of teams 0 and 1. Last, the totals of 16 positions each, for two units.
  static constexpr constant int diagonal = scalars + 2 * 1024, diagonal_bytes = 64 * 17 * 4;
  static constexpr constant int row_sums = diagonal + 2 * diagonal_bytes, column_sums = row_sums + 2 * 1024;
  static constexpr constant int before_sums = column_sums + 2 * 1024, after_sums = before_sums + 512;
  static constexpr constant int rate_sums = after_sums + 256, dots = rate_sums + 256, totals = dots + 32;
  static constexpr constant int barriers = totals + 2 * 64;
  static constexpr constant int bytes = barriers + 176 + 1024;
};

// The barriers of a block: a stage has arrived or was read; q and k have arrived; an item is done, so that q and k may
// be overwritten; dy of a unit has arrived, and was read; the tables of a unit's gates are filled; its sums are written, and were read; team 2 has added to
// the sums of dk, and team 1 has; the planes of an item's weights are written, and were read.
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
  inline unsigned planes() const { return place + 144; }
  inline unsigned planes_read() const { return place + 152; }
  inline unsigned dy() const { return place + 160; }
  inline unsigned dy_read() const { return place + 168; }
  inline void start(Place at) const {
    if (at.index == 0) {
      for (int stage = 0; stage < 5; ++stage) {
        mbarrier_init(arrived(stage), 1);
        mbarrier_init(read(stage), warps);
      }
      mbarrier_init(keys(), 32);
      mbarrier_init(item(), warps);
      mbarrier_init(tables(0), 2);
      mbarrier_init(tables(1), 2);
      mbarrier_init(sums(), warps);
      mbarrier_init(sums_read(), 2);
      mbarrier_init(keys_of_u(), 4);
      mbarrier_init(keys_of_right(), 4);
      mbarrier_init(planes(), 8);
      mbarrier_init(planes_read(), 4);
      mbarrier_init(dy(), 32);
      mbarrier_init(dy_read(), 4);
      mbarriers_started();
    }
    barrier();
  }
};

// An item of work: chunk `n` of key head `head` in row `row` of the batch.
struct GradientItem {
  int n, head, row;
};
template <int HK>
inline GradientItem item_at(int number, int chunks) {
  return GradientItem{number / HK % chunks, number % HK, number / HK / chunks};
}

// The address of a piece of 16 bytes in a tile.
inline unsigned piece_place(unsigned tile, int row, int piece) {
  return tile + row * 128 + ((piece ^ row) & 7) * 16;
}
template <int DV>
inline unsigned dy_piece_place(unsigned dy, int row, int piece) {
  return dy + row * DV * 2 + ((piece & 8) | ((piece ^ row) & 7)) * 16;
}
// Loads the left operand of 16 rows and columns from (row, column) of a tile on, or the one whose transpose is there.
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
// Loads the left operand of 16 rows and columns from core `group` on, or the one whose transpose is there.
inline void load_left_cores(thread unsigned (&to)[4], unsigned cores, int groups, int group, Place at) {
  load_parts(to, core_place(cores, groups, at.lane % 16, group + at.lane / 16));
}
inline void load_left_cores_turned(thread unsigned (&to)[4], unsigned cores, int groups, int group, Place at) {
  load_turned_parts(to, core_place(cores, groups, at.lane % 8 + at.lane / 16 * 8, group + at.lane / 8 % 2));
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
  // u and R have high parts, low parts and tails.
  const int side = lane & 1, part = lane / 2 - 1;
  const auto from = reinterpret_cast<const GLOBAL char*>(side ? d_right : u) + part * DV * 128;
  const int place = (side ? Memory::right : Memory::u) + part * panel;
  return SavedBlock{from, DV * 288, part < 2 ? panel : 512, part < 2 ? place : Memory::tails + side * 512};
}
// Copies what the scans saved of all units to the stages. One warp does it.
template <int DV, int HK, int HV, int BLOCKS, typename PT, typename PU>
inline void load_saved(Place at, Room room, GradientBarriers barriers, int items, int chunks, PT states, PT d_states,
                       PU u, PU d_right) {
  using Memory = HopperGradientMemory<DV>;
  constexpr int repeats = HV / HK;
  const SavedBlock block = saved_block<DV>(states, d_states, u, d_right, at.lane < 8 ? at.lane : 0);
  int stage = 0, use = 0;
  for (int number = at.x; number < items; number += BLOCKS) {
    const GradientItem item = item_at<HK>(number, chunks);
    for (int repeat = 0; repeat < repeats; ++repeat) {
      const long chunk = ((long)item.row * HV + item.head * repeats + repeat) * chunks + item.n;
      auto from = block.from + chunk * block.chunk;
      for (int s = 0; s < DV / 16; ++s, from += block.bytes) {
        const unsigned mbarrier = barriers.arrived(stage), to = room.place + stage * Memory::stage;
        if (use > 0) mbarrier_wait(barriers.read(stage), use - 1);
        if (at.lane == 0) mbarrier_expect(mbarrier, Memory::stage);
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
  _Pragma("unroll 4")
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
    DELTATUNE_UNROLL
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
template <typename In, int DV, int HK, int HV, int BLOCKS, bool MASKED, typename PQ, typename PK, typename PM,
          typename PY>
inline void load_inputs(Place at, Room room, GradientBarriers barriers, int length, int items, int chunks, PQ q, PK k,
                        PM mask, PY dy) {
  constexpr int repeats = HV / HK;
  const bool aligned = aligned16(q) && aligned16(k) && aligned16(dy);
  const auto send = [&](unsigned mbarrier) {
    if (!aligned) copies_fence();
    signalled_pieces_sent(mbarrier);
  };
  int unit = 0;
  for (int number = at.x, round = 0; number < items; number += BLOCKS, ++round) {
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

// The tables and sums of one unit's gates in shared memory.
template <int DV>
struct GradientTables {
  using Memory = HopperGradientMemory<DV>;
  Room room;
  int unit;
  inline Decay<64> decay() const { return decay_at<64>(room.floats(Memory::decay + (unit & 1) * Memory::decay_bytes)); }
  inline threadgroup float* before() const { return room.floats(Memory::scalars + (unit & 1) * 1024); }
  inline threadgroup float* after() const { return before() + 64; }
  inline threadgroup float* rate() const { return before() + 128; }
  inline threadgroup float* gate() const { return before() + 192; }
};

// The sum of a number over 16 lanes.
inline float sum_of_16(float x) {
  DELTATUNE_UNROLL
  for (int m = 1; m < 16; m *= 2) x += lane_exchange(x, m);
  return x;
}
// Adds to `own` the numbers of the lanes after it among 16, or unless AFTER those before it.
template <bool AFTER>
inline float add_others_of_16(float own, float x, int lane) {
  DELTATUNE_UNROLL
  for (int m = 1; m < 16; m *= 2) {
    const float others = lane_exchange(x, m);
    if (((lane & m) == 0) == AFTER) own += others;
    x += others;
  }
  return own;
}
// What a unit adds to the gradients of log_g and beta at a position.
struct GateSums {
  float on_gate, on_beta;
};
// Computes what `ends_by_pairs` and `spanning` of gradients.h do for position t, 64 lanes at a time: 16 positions are
// summed by lanes, and then the totals of other 16. As there only terms are added whose span contains t.
template <int DV>
inline GateSums sum_positions(Room room, GradientTables<DV> tables, int unit, int t, int lane) {
  using Memory = HopperGradientMemory<DV>;
  constexpr int other_kind = Memory::diagonal_bytes / 4;
  const int own = t / 16, column = t % 16;
  threadgroup float* diagonal = room.floats(Memory::diagonal) + own * 16 * 17;
  threadgroup float* totals = room.floats(Memory::totals) + (unit & 1) * 16;
  // A lane sums a column of a diagonal tile from the last row up, and keeps each sum in the row where it came to.
  float below = 0.0f, at_own = 0.0f;
  DELTATUNE_UNROLL
  for (int i = 15; i >= 0; --i) {
    below += diagonal[i * 17 + column] + diagonal[other_kind + i * 17 + column];
    diagonal[i * 17 + column] = below;
    if (i == column) at_own = below;
  }
  float columns[4], others[4], rows[4] = {0.0f, 0.0f, 0.0f, 0.0f}, later = 0.0f;
  get_four(columns, room.floats(Memory::column_sums) + t * 4);
  get_four(others, room.floats(Memory::column_sums + 1024) + t * 4);
  DELTATUNE_UNROLL
  for (int b = 1; b < 4; ++b) later += b > own ? columns[b] + others[b] : 0.0f;
  const float rates = room.floats(Memory::rate_sums)[t];
  float after = room.floats(Memory::after_sums)[t];
  if (tables.after()[t] >= 0.03125f) after = tables.rate()[t] * rates - (at_own + later);
  for (int kind = 0; kind < 2; ++kind) {
    get_four(columns, room.floats(Memory::row_sums + kind * 1024) + t * 4);
    DELTATUNE_UNROLL
    for (int b = 0; b < 3; ++b) rows[b] += columns[b];
  }
  // The terms of row t with tiles before tile 0, 1, 2 and 3.
  float of_teams[2];
  get_two(of_teams, room.floats(Memory::before_sums) + t * 2);
  float before = of_teams[0] + of_teams[1], spanning = before;
  DELTATUNE_UNROLL
  for (int b = 0; b < 3; ++b) {
    const float total = sum_of_16(before);
    if (column == 0) totals[own * 4 + b] = total;
    before += rows[b];
    if (b < own) spanning = before;
  }
  const float total = sum_of_16(after);
  if (column == 0) totals[own * 4 + 3] = total;
  float sum = add_others_of_16<true>(spanning, spanning, lane) + add_others_of_16<false>(0.0f, after + later, lane);
  group_barrier();
  float pairs = 0.0f;
  DELTATUNE_UNROLL
  for (int j = 0; j < 15; ++j) pairs += j < column ? diagonal[column * 17 + j] : 0.0f;
  named_barrier<64, 2>();
  for (int b = 0; b < 4; ++b)
    if (b != own) sum += totals[b * 4 + (b > own ? own : 3)];
  get_four(columns, room.floats(Memory::dots));
  get_four(others, room.floats(Memory::dots) + 4);
  float dots = 0.0f;
  DELTATUNE_UNROLL
  for (int i = 0; i < 4; ++i) dots += columns[i] + others[i];
  return GateSums{dots * tables.before()[63] + (sum + pairs), rates};
}

// Fills the tables of every unit's gates, and adds up what the units contribute to the gradients of log_g and beta. Two
// warps do it, a thread for each position.
template <typename In, int DV, int HK, int HV, int BLOCKS, bool MASKED, bool SEGMENTED, typename PL, typename PM,
          typename PZ, typename PF>
inline void sum_gates(Place at, Room room, GradientBarriers barriers, int length, int items, int chunks, PL log_g,
                      PM mask, PZ segments, PF factors, GLOBAL float* d_log_g, GLOBAL float* d_beta) {
  using Memory = HopperGradientMemory<DV>;
  constexpr int repeats = HV / HK;
  const int t = at.index % 64, units = items > at.x ? (items - at.x + BLOCKS - 1) / BLOCKS * repeats : 0;
  for (int step = -1; step < units; ++step) {
    if (step + 1 < units) {
      const GradientItem item = item_at<HK>(at.x + (step + 1) / repeats * BLOCKS, chunks);
      const GradientTables<DV> tables{room, step + 1};
      const int hv = item.head * repeats + (step + 1) % repeats;
      const long chunk = ((long)item.row * HV + hv) * chunks + item.n;
      const auto live = alive<MASKED>(mask, item.row, item.n * 64, length);
      const float gate = gate_of<SEGMENTED>(t, live, log_g, segments, item.row, hv, HV, item.n * 64, length);
      float scalars[3];
      for (int i = 0; i < 3; ++i) scalars[i] = factors[(chunk * 3 + i) * 64 + t];
      // The unit before the last one had these tables too.
      named_barrier<64, 2>();
      for (int i = 0; i < 3; ++i) tables.before()[i * 64 + t] = scalars[i];
      tables.gate()[t] = gate;
      named_barrier<64, 2>();
      fill_decay<64>(tables.decay(), tables.gate(), t);
      release(barriers.tables(step + 1), at);
    }
    if (step < 0) continue;
    const GradientItem item = item_at<HK>(at.x + step / repeats * BLOCKS, chunks);
    const GradientTables<DV> tables{room, step};
    mbarrier_wait(barriers.sums(), step);
    const GateSums found = sum_positions<DV>(room, tables, step, t, at.lane);
    if (item.n * 64 + t < length) {
      const bool live = alive<MASKED>(mask, item.row, item.n * 64, length)(t);
      const long to = ((long)item.row * length + item.n * 64 + t) * HV + item.head * repeats + step % repeats;
      d_log_g[to] = live ? found.on_gate : 0.0f;
      d_beta[to] = live ? found.on_beta : 0.0f;
    }
    release(barriers.sums_read(), at);
  }
}

// A lane's share of <dS, S> in 16 rows and columns, whose elements it has as left operands, with their tails: those of
// even columns in the first byte of each, of odd columns in the second. It is NaN if an element was rounded to zero.
inline float kept_products(const thread unsigned (&a)[4], const thread unsigned (&b)[4], unsigned tail_a,
                           unsigned tail_b) {
  // The upper bit of each tail is turned: then what is to be added is tail * 0x4000 - 0x6000.
  const unsigned spread_a = ((tail_a & 0xff) << 8 | (tail_a & 0xff00) << 16) ^ 0xaa00aa00u;
  const unsigned spread_b = ((tail_b & 0xff) << 8 | (tail_b & 0xff00) << 16) ^ 0xaa00aa00u;
  float sum = 0.0f, other = 0.0f;
  DELTATUNE_UNROLL
  for (int i = 0; i < 4; ++i) {
    const unsigned x = opaque(spread_a << 2 * i & 0xc000c000u), y = opaque(spread_b << 2 * i & 0xc000c000u);
    sum += float_of((a[i] << 16 | (x & 0xffff)) - 0x6000u) * float_of((b[i] << 16 | (y & 0xffff)) - 0x6000u);
    other +=
        float_of(((a[i] & 0xffff0000u) | x >> 16) - 0x6000u) * float_of(((b[i] & 0xffff0000u) | y >> 16) - 0x6000u);
  }
  return sum + other;
}

// Products of the 64 columns of pairs and of all columns of DK.
template <typename In> using PairProducts = Products<In, 64>;
template <typename In> using KeyProducts = Products<In, 128>;

// The operands of a stage: 16 rows of the states and of their gradients, and those of u in two parts.
template <int DV>
struct GradientStage {
  using Memory = HopperGradientMemory<DV>;
  unsigned tile;
  inline unsigned place(int offset) const { return opaque((tile & 0x3ffff) / 16) + offset / 16; }
  inline unsigned long long state() const { return cores_operand(place(Memory::state), 2048, 128); }
  inline unsigned long long d_state() const { return cores_operand(place(Memory::d_state), 2048, 128); }
  inline unsigned long long u() const { return cores_operand(place(Memory::u), 1024, 128); }
  inline unsigned long long u_low() const { return cores_operand(place(Memory::u + Memory::panel), 1024, 128); }
  // The left operand of a warp's positions whose transpose is at `offset`.
  inline void load_positions(thread unsigned (&to)[4], int offset, Place at) const {
    load_left_cores_turned(to, tile + offset, 8, at.group % 4 * 2, at);
  }
};

// A warp's tile of the states of a stage: of the eight tiles of 16 columns, teams 0 and 1 have four each.
template <int DV>
struct KeptTile {
  using Memory = HopperGradientMemory<DV>;
  Room room;
  unsigned place;
  int tile;
  inline void load(thread unsigned (&a)[4], thread unsigned (&b)[4], thread unsigned (&tails)[2], Place at) const {
    load_left_cores(a, place + Memory::state, 16, tile * 2, at);
    load_left_cores(b, place + Memory::d_state, 16, tile * 2, at);
    const auto from = reinterpret_cast<threadgroup const unsigned short*>(room.memory + (place - room.place) +
                                                                          Memory::tails + at.lane * 16 + tile * 2);
    tails[0] = from[0];
    tails[1] = from[256];
  }
  // Returns a lane's share of <dS, S>, or without the tails where `share` is NaN.
  inline float checked(float share, Place at) const {
    if (share == share) return share;
    const auto from = room.memory + (place - room.place) + tile * 256 + at.lane * 4;
    share = 0.0f;
    for (int i = 0; i < 4; ++i) {
      const unsigned a = get_pair(from + Memory::state + i % 2 * 2048 + i / 2 * 128);
      const unsigned b = get_pair(from + Memory::d_state + i % 2 * 2048 + i / 2 * 128);
      share += float_of(a << 16) * float_of(b << 16) + float_of(a & 0xffff0000u) * float_of(b & 0xffff0000u);
    }
    return share;
  }
};
template <int DV>
inline KeptTile<DV> kept_tile(Room room, unsigned place, int team, Place at) {
  return KeptTile<DV>{room, place, team * 4 + at.group % 4};
}

// The left operands of a warp in a stage, in one part or two, and its share of <dS, S>.
struct SliceOperands {
  unsigned left[4], low[4];
  float share;
};

// Starts a stage's products of dY (KIND 0) or of R (KIND 1) with u, which are added to `pairs`, and those with the
// states, which are added to `sums`, the smallest first; and the products of u with the gradients of the states
// (KIND 2). Products with the same sums are apart, for one waits for the other. KIND 0 and 1 compute a lane's share of
// <dS, S> meanwhile.
template <typename In, int DV, int KIND>
inline void start_slice(thread SliceOperands& x, Room room, GradientStage<DV> stage, int s,
                        thread float (&pairs)[32], thread float (&sums)[64], Place at) {
  using Memory = HopperGradientMemory<DV>;
  constexpr int from = KIND == 1 ? Memory::right : Memory::u;
  unsigned a[4], b[4], tails[2];
  if (KIND == 0) {
    load_parts(x.left, dy_piece_place<DV>(room.place + Memory::dy, at.group % 4 * 16 + at.lane % 16, s * 2 + at.lane / 16));
  } else {
    stage.load_positions(x.left, from, at);
    stage.load_positions(x.low, from + Memory::panel, at);
    register_fence(x.low);
  }
  if (KIND < 2) kept_tile<DV>(room, stage.tile, KIND, at).load(a, b, tails, at);
  register_fence(x.left);
  products_start();
  if (KIND == 2) {
    KeyProducts<In>::columns(sums, x.low, stage.d_state());
    KeyProducts<In>::columns(sums, x.left, stage.d_state());
  } else {
    PairProducts<In>::columns(pairs, x.left, stage.u_low());
    if (KIND == 1) {
      KeyProducts<In>::columns(sums, x.low, stage.state());
      PairProducts<In>::columns(pairs, x.low, stage.u());
    }
    KeyProducts<In>::columns(sums, x.left, stage.state());
    PairProducts<In>::columns(pairs, x.left, stage.u());
  }
  products_sent();
  if (KIND < 2) x.share = kept_products(a, b, tails[0], tails[1]);
}

// The lane's place in a way that hides that it is the same all the time, so that no addresses are kept from phase to
// phase: the sums need the registers.
inline Place hidden(Place at) {
  at.index = (int)opaque((unsigned)at.index);
  at.lane = at.index & 31;
  return at;
}

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

// Multiplies a team's sums by a factor for each row, and gives use(j, products) those of column group j, two of either
// row. Writes the inner products of the rows with those of q or k at `operand`, every `stride` numbers from `to` on.
template <typename Use>
inline void use_columns_of_keys(Room room, int operand, const thread float (&sums)[64], const thread float (&factors)[2],
                                threadgroup float* to, int stride, Place at, Use use) {
  const auto keys = room.memory + operand + at.group % 4 * 4096 + at.lane * 4;
  float found[2] = {0.0f, 0.0f};
  DELTATUNE_UNROLL
  for (int j = 0; j < 16; ++j) {
    float products[4];
    DELTATUNE_UNROLL
    for (int side = 0; side < 2; ++side) {
      const unsigned key = get_pair(keys + side * 2048 + j * 128);
      const thread float* own = sums + 4 * j + 2 * side;
      found[side] += own[0] * float_of(key << 16);
      found[side] += own[1] * float_of(key & 0xffff0000u);
      products[2 * side] = factors[side] * own[0];
      products[2 * side + 1] = factors[side] * own[1];
    }
    use(j, products);
  }
  DELTATUNE_UNROLL
  for (int side = 0; side < 2; ++side) {
    const float sum = quad_sum(factors[side] * found[side]);
    if (at.lane % 4 == 0) to[own_row(at, side) * stride] = sum;
  }
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
// Turns a unit's pairs of the tile on the diagonal into weights, and writes what their products with `scores` are. The
// diagonal of N is R u.
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

// Turns a unit's sums of pairs into weights, and writes what their products with `scores` add to the gradients of the
// gates. Tiles right of the diagonal become zeros.
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
  DELTATUNE_UNROLL
  for (int i = 0; i < 32; i += 2) {
    const auto to = room.memory + piece_place(planes, own_row(at, own_side(i)), i / 4) + at.lane % 4 * 4;
    const unsigned high = PairOf<In>::of(weights[i], weights[i + 1]);
    put_pair(to, high);
    const float first = weights[i] - float_of(high << 16), second = weights[i + 1] - float_of(high & 0xffff0000u);
    put_pair(to + 8192, PairOf<In>::of(first, second));
  }
}

// Adds the product of P's weights with k to dq: 16 positions of one plane at a time, the low parts first. Its sums are
// apart from dq, for the results of products can lie in few of the registers.
template <typename In, int DV>
inline void add_weighted_keys(Room room, thread float (&dq)[64], Place at) {
  using Memory = HopperGradientMemory<DV>;
  float sums[64];
  clear_floats(sums);
  _Pragma("unroll 1")
  for (int plane = 1; plane >= 0; --plane) {
    unsigned weights[4][4];
    DELTATUNE_UNROLL
    for (int t = 0; t < 4; ++t) {
      load_left(weights[t], room.place + Memory::weights + plane * 8192, at.group % 4 * 16, t * 16, at);
      register_fence(weights[t]);
    }
    register_fence(sums);
    products_start();
    const unsigned keys = opaque((room.place & 0x3ffff) / 16) + Memory::k / 16;
    DELTATUNE_UNROLL
    for (int t = 0; t < 4; ++t) KeyProducts<In>::columns(sums, weights[t], cores_operand(keys + t * 256, 2048, 128));
    products_sent();
    products_wait<0>();
    register_fence(sums);
  }
  DELTATUNE_UNROLL
  for (int i = 0; i < 64; ++i) dq[i] += sums[i];
}
// Adds to dk the products of the transpose of P's weights with q, and of N's weights and their transpose with k.
template <typename In, int DV>
inline void add_weighted_turned(Room room, thread float (&dk)[64], Place at) {
  using Memory = HopperGradientMemory<DV>;
  const int first = at.group % 4 * 16;
  _Pragma("unroll 1")
  for (int step = 0; step < 8; ++step) {
    const int t = step % 4;
    const unsigned of_y = room.place + Memory::weights + (step < 4 ? 8192 : 0), of_right = of_y + 16384;
    unsigned y[4], right[4], right_turned[4];
    load_left_turned(y, of_y, t * 16, first, at);
    load_left(right, of_right, first, t * 16, at);
    load_left_turned(right_turned, of_right, t * 16, first, at);
    register_fence(y);
    register_fence(right);
    register_fence(right_turned);
    register_fence(dk);
    products_start();
    const unsigned rows = opaque((room.place & 0x3ffff) / 16 + t * 256);
    const unsigned long long queries = cores_operand(rows + Memory::q / 16, 2048, 128);
    const unsigned long long keys = cores_operand(rows + Memory::k / 16, 2048, 128);
    KeyProducts<In>::columns(dk, y, queries);
    KeyProducts<In>::columns(dk, right, keys);
    KeyProducts<In>::columns(dk, right_turned, keys);
    products_sent();
    products_wait<0>();
    register_fence(dk);
  }
}

// Writes dq or dk of an item.
template <typename In, int HK, typename P>
inline void put_columns(P out, const thread float (&x)[64], GradientItem item, int length, Place at) {
  DELTATUNE_UNROLL
  for (int side = 0; side < 2; ++side) {
    const int i = item.n * 64 + own_row(at, side);
    if (i >= length) continue;
    const long to = (((long)item.row * length + i) * HK + item.head) * 128 + at.lane % 4 * 2;
    DELTATUNE_UNROLL
    for (int j = 0; j < 16; ++j)
      put_pair(out + to + j * 8, PairOf<In>::of(x[4 * j + 2 * side], x[4 * j + 2 * side + 1]));
  }
}

// Where a team has come to in the stages, units and items of its block.
template <int DV>
struct GradientProgress {
  int stage, use, unit, round;
  // Adds the products of a unit's stages. Those of the next stage are started before those of a stage are waited for.
  template <typename In, int KIND>
  inline void add_slices(Room room, GradientBarriers barriers, thread float (&pairs)[32], thread float (&sums)[64],
                         thread float& dot, Place at) {
    using Memory = HopperGradientMemory<DV>;
    SliceOperands operands[2];
    if (KIND == 0) mbarrier_wait(barriers.dy(), unit);
    if (KIND < 2) register_fence(pairs);
    register_fence(sums);
    int last = stage;
    _Pragma("unroll 1")
    for (int s = 0; s < DV / 16; s += 2) {
      DELTATUNE_UNROLL
      for (int odd = 0; odd < 2; ++odd) {
        mbarrier_wait(barriers.arrived(stage), use);
        start_slice<In, DV, KIND>(operands[odd], room, GradientStage<DV>{room.place + stage * Memory::stage}, s + odd,
                                  pairs, sums, at);
        products_wait<1>();
        if (s + odd > 0) end_slice<KIND>(operands[1 - odd], room, barriers, last, dot, at);
        last = stage;
        if (++stage == Memory::stages) stage = 0, ++use;
      }
    }
    products_wait<0>();
    if (KIND < 2) register_fence(pairs);
    register_fence(sums);
    end_slice<KIND>(operands[1], room, barriers, last, dot, at);
    if (KIND == 0) release(barriers.dy_read(), at);
  }
  // Ends a stage whose products are over.
  template <int KIND>
  static inline void end_slice(thread SliceOperands& x, Room room, GradientBarriers barriers, int stage,
                               thread float& dot, Place at) {
    register_fence(x.left);
    if (KIND > 0) register_fence(x.low);
    const unsigned place = room.place + stage * HopperGradientMemory<DV>::stage;
    if (KIND < 2) dot += kept_tile<DV>(room, place, KIND, at).checked(x.share, at);
    release(barriers.read(stage), at);
  }
  // Waits for what the end of a unit reads, and until the sums of the unit before have been read.
  inline void begin_end(GradientBarriers barriers, int repeat) const {
    if (repeat == 0) {
      mbarrier_wait(barriers.keys(), round);
      copies_fence();
    }
    mbarrier_wait(barriers.tables(unit), unit / 2);
    if (unit > 0) mbarrier_wait(barriers.sums_read(), unit - 1);
  }
};

// A lane's own place among the sums of dk.
template <int DV>
inline threadgroup float* key_sums(Room room, Place at) {
  return room.floats(HopperGradientMemory<DV>::key_sums) + at.index % 128 * 4;
}
template <int DV>
inline void add_key_sums(Room room, thread float (&to)[64], Place at) {
  DELTATUNE_UNROLL
  for (int j = 0; j < 16; ++j) {
    float sums[4];
    get_four(sums, key_sums<DV>(room, at) + j * 512);
    DELTATUNE_UNROLL
    for (int i = 0; i < 4; ++i) to[4 * j + i] += sums[i];
  }
}
// Adds four numbers to those in shared memory, or unless `onto` writes them there.
inline void add_shared(threadgroup float* to, thread float* x, bool onto) {
  if (onto) {
    float before[4];
    get_four(before, to);
    DELTATUNE_UNROLL
    for (int i = 0; i < 4; ++i) x[i] += before[i];
  }
  put_four(to, x);
}

// Writes a warp's share of <dS, S>.
template <int DV>
inline void put_dots(Room room, int team, float dot, Place at) {
  const float sum = lane_sum(dot);
  if (at.lane == 0) room.floats(HopperGradientMemory<DV>::dots)[team * 4 + at.group % 4] = sum;
}

// Teams 0 and 1 of a block: KIND 0 computes dq, KIND 1 what R adds to dk, and both the weights of their pairs.
template <typename In, int DV, int HK, int HV, int BLOCKS, int KIND, typename OQ>
inline void weigh_items(Place at, Room room, GradientBarriers barriers, int length, int items, int chunks, OQ dq_out) {
  using Memory = HopperGradientMemory<DV>;
  constexpr int repeats = HV / HK;
  GradientProgress<DV> progress{0, 0, 0, 0};
  float dq[64];
  for (int number = at.x; number < items; number += BLOCKS, ++progress.round) {
    if (KIND == 0) clear_floats(dq);
    _Pragma("unroll 1")
    for (int repeat = 0; repeat < repeats; ++repeat, ++progress.unit) {
      float pairs[32], sums[64], dot = 0.0f;
      clear_floats(pairs);
      clear_floats(sums);
      progress.template add_slices<In, KIND>(room, barriers, pairs, sums, dot, at);
      progress.begin_end(barriers, repeat);
      const GradientTables<DV> tables{room, progress.unit};
      const Place here = hidden(at);
      float factors[2];
      DELTATUNE_UNROLL
      for (int side = 0; side < 2; ++side) {
        const int row = own_row(here, side);
        factors[side] = KIND == 0 ? tables.before()[row] : -tables.before()[row] * tables.rate()[row];
      }
      put_dots<DV>(room, KIND, dot, here);
      threadgroup float* found = room.floats(Memory::before_sums) + KIND;
      if (KIND == 0) {
        use_columns_of_keys(room, Memory::q, sums, factors, found, 2, here, [&](int j, thread float* products) {
          DELTATUNE_UNROLL
          for (int i = 0; i < 4; ++i) dq[4 * j + i] += products[i];
        });
      } else {
        mbarrier_wait(barriers.keys_of_u(), progress.unit);
        use_columns_of_keys(room, Memory::k, sums, factors, found, 2, here, [&](int j, thread float* products) {
          add_shared(key_sums<DV>(room, here) + j * 512, products, true);
        });
        release(barriers.keys_of_right(), at);
      }
      float scores[32];
      multiply_by_keys<In, DV, KIND>(room, scores);
      weigh_pairs<DV, KIND>(room, tables, pairs, scores, hidden(at));
      release(barriers.sums(), at);
      if (repeat == 0 && progress.round > 0) mbarrier_wait(barriers.planes_read(), progress.round - 1);
      sum_weights<In, DV, KIND>(room, pairs, repeat, repeats, hidden(at));
    }
    release(barriers.planes(), at);
    if (KIND == 0) add_weighted_keys<In, DV>(room, dq, hidden(at));
    release(barriers.item(), at);
    if (KIND == 0) put_columns<In, HK>(dq_out, dq, item_at<HK>(number, chunks), length, hidden(at));
  }
}

// Team 2 of a block: it computes dk.
template <typename In, int DV, int HK, int HV, int BLOCKS, typename OK>
inline void sum_keys(Place at, Room room, GradientBarriers barriers, int length, int items, int chunks, OK dk_out) {
  using Memory = HopperGradientMemory<DV>;
  constexpr int repeats = HV / HK;
  GradientProgress<DV> progress{0, 0, 0, 0};
  float pairs[32], sums[64];
  for (int number = at.x; number < items; number += BLOCKS, ++progress.round) {
    _Pragma("unroll 1")
    for (int repeat = 0; repeat < repeats; ++repeat, ++progress.unit) {
      float dot = 0.0f;
      clear_floats(sums);
      progress.template add_slices<In, 2>(room, barriers, pairs, sums, dot, at);
      progress.begin_end(barriers, repeat);
      const GradientTables<DV> tables{room, progress.unit};
      const Place here = hidden(at);
      float factors[2];
      DELTATUNE_UNROLL
      for (int side = 0; side < 2; ++side) {
        const int row = own_row(here, side);
        factors[side] = tables.after()[row] * tables.rate()[row];
      }
      if (repeat > 0) mbarrier_wait(barriers.keys_of_right(), progress.unit - 1);
      use_columns_of_keys(
          room, Memory::k, sums, factors, room.floats(Memory::after_sums), 1, here,
          [&](int j, thread float* products) { add_shared(key_sums<DV>(room, here) + j * 512, products, repeat > 0); });
      release(barriers.keys_of_u(), at);
      release(barriers.sums(), at);
    }
    mbarrier_wait(barriers.planes(), progress.round);
    clear_floats(sums);
    add_weighted_turned<In, DV>(room, sums, hidden(at));
    release(barriers.planes_read(), at);
    release(barriers.item(), at);
    mbarrier_wait(barriers.keys_of_right(), progress.unit - 1);
    add_key_sums<DV>(room, sums, hidden(at));
    put_columns<In, HK>(dk_out, sums, item_at<HK>(number, chunks), length, hidden(at));
  }
}

// The registers of a thread of each group: of the one that loads and sums gates, and of the teams.
enum GradientRegisters : int { GRADIENT_LOADER = 40, GRADIENT_OF_Y = 216, GRADIENT_OF_R = 144, GRADIENT_OF_U = 112 };
static_assert(GRADIENT_LOADER + GRADIENT_OF_Y + GRADIENT_OF_R + GRADIENT_OF_U <= 4 * 128,
              "groups share out what the block starts with");

// Computes what gated_delta_gradients does, from the same inputs. The grid is at most BLOCKS blocks.
template <typename In, int DV, int HK, int HV, int BLOCKS, bool MASKED, bool SEGMENTED, typename PQ, typename PK,
          typename PL, typename PM, typename PZ, typename PF, typename PT, typename PY, typename OQ, typename OK>
inline void gated_delta_hopper_gradients(Place at, threadgroup char* memory, int length, int batch, PQ q, PK k,
                                         PL log_g, PM mask, PZ segments, PF factors, PT states, PT d_states, PF u,
                                         PF d_right, PY dy, OQ dq, OK dk, GLOBAL float* d_log_g,
                                         GLOBAL float* d_beta) {
  using Memory = HopperGradientMemory<DV>;
  static_assert(DV % 16 == 0, "a stage has 16 rows");
  const Room room = room_of(memory);
  const GradientBarriers barriers{room.place + Memory::barriers};
  const int chunks = (length + 63) / 64, items = batch * chunks * HK;
  barriers.start(at);
  at.group = uniform(at.group);
  if (at.group < 4) {
    fewer_registers<GRADIENT_LOADER>();
    if (at.group == 0)
      load_saved<DV, HK, HV, BLOCKS>(at, room, barriers, items, chunks, states, d_states, u, d_right);
    else if (at.group == 1)
      load_inputs<In, DV, HK, HV, BLOCKS, MASKED>(at, room, barriers, length, items, chunks, q, k, mask, dy);
    else
      sum_gates<In, DV, HK, HV, BLOCKS, MASKED, SEGMENTED>(at, room, barriers, length, items, chunks, log_g, mask,
                                                           segments, factors, d_log_g, d_beta);
  } else if (at.group < 8) {
    more_registers<GRADIENT_OF_Y>();
    weigh_items<In, DV, HK, HV, BLOCKS, 0>(at, room, barriers, length, items, chunks, dq);
  } else if (at.group < 12) {
    more_registers<GRADIENT_OF_R>();
    weigh_items<In, DV, HK, HV, BLOCKS, 1>(at, room, barriers, length, items, chunks, dq);
  } else {
    fewer_registers<GRADIENT_OF_U>();
    sum_keys<In, DV, HK, HV, BLOCKS>(at, room, barriers, length, items, chunks, dk);
  }
}
