// The kernel of gradients.h on Hopper, for bf16, heads of 128 x DV and chunks of 64 positions. Letters are those of
// chunk.h.
// A block has five groups of four warps. Four of them (teams) multiply, 64 positions by 32 columns of DK each. In
// addition teams 0 and 1 compute the pairs of P (KIND 0) and teams 2 and 3 those of N (KIND 1); of two such teams each
// has every other eight columns, so that both have as much to do below the diagonal. Of the last group two warps copy
// 16 rows of DV at a time to shared memory, and two add up the gradients of log_g and beta while the others go on.
// Four teams, and not two with more columns each, because a team mostly waits: for its products, for shared memory.
// A block takes every BLOCKS-th item of work, which is a chunk of a key head with its HV / HK value heads; a unit is
// one of these value heads. dk is summed over the value heads in registers, dq and the weights of the pairs in shared
// memory, so that the products of the weights with q and k are computed once per item.

// The shared memory of a block. What the scans saved stays in cores (hopper_scans.h), and q and k are put in
// cores too, [8, 16] of them. Tiles of weights have rows of 128 bytes with the 128-byte swizzle, and those of dy rows
// of 32 bytes, where the order of the two pieces depends on bit 2 of the row's number.
template <int DV>
struct HopperGradientMemory {
  // A stage: 16 rows of DV of each operand. u and R have two parts.
  static constexpr constant int panel = 2048, state = 0, d_state = 2 * panel, u = 4 * panel, right = 6 * panel;
  static constexpr constant int dy = 8 * panel, tails = 9 * panel, stage = tails + 1024, stages = 5;
  static constexpr constant int q = stages * stage, k = q + 16384;
  // By team, the sums of dq, each lane its own. By KIND, the weights of the pairs: summed in fp32, each lane its own,
  // then as two planes of bf16.
  static constexpr constant int sums = k + 16384, weights = sums + 4 * 8192;
  // What depends on the gates of a unit, for two units: Decay's tables, then G, E, beta and the gates.
  static constexpr constant int decay = weights + 2 * 16384, decay_bytes = Decay<64>::floats * 4;
  static constexpr constant int scalars = decay + 2 * decay_bytes;
  // What a unit adds to the gradients of the gates: by KIND the diagonal tiles of pairs and their sums by column, by
  // team their sums by row; then, by position and team, what before_sums, after_sums and rate_sums of gradients.h
  // are; and by warp <dS, S>. Last, the totals of 16 positions each, for two units.
  static constexpr constant int diagonal = scalars + 2 * 1024, diagonal_bytes = 64 * 17 * 4;
  static constexpr constant int row_sums = diagonal + 2 * diagonal_bytes, column_sums = row_sums + 4 * 1024;
  static constexpr constant int before_sums = column_sums + 2 * 1024, after_sums = before_sums + 1024;
  static constexpr constant int rate_sums = after_sums + 1024, dots = rate_sums + 1024, totals = dots + 64;
  static constexpr constant int barriers = totals + 2 * 64;
  static constexpr constant int bytes = barriers + 128 + 1024;
};

// The barriers of a block: a stage has arrived or was read; q and k have arrived; an item is done, so that q, k and the
// weights may be overwritten; the tables of a unit's gates are filled; its sums are written, and were read.
struct GradientBarriers {
  enum : int { loaders = 64, warps = 16 };
  unsigned place;
  inline unsigned arrived(int stage) const { return place + 8 * stage; }
  inline unsigned read(int stage) const { return place + 40 + 8 * stage; }
  inline unsigned keys() const { return place + 80; }
  inline unsigned item() const { return place + 88; }
  inline unsigned tables(int unit) const { return place + 96 + 8 * (unit & 1); }
  inline unsigned sums() const { return place + 112; }
  inline unsigned sums_read() const { return place + 120; }
  inline void start(Place at) const {
    if (at.index == 0) {
      for (int stage = 0; stage < 5; ++stage) {
        mbarrier_init(arrived(stage), loaders + 1);
        mbarrier_init(read(stage), warps);
      }
      mbarrier_init(keys(), loaders);
      mbarrier_init(item(), warps);
      mbarrier_init(tables(0), 2);
      mbarrier_init(tables(1), 2);
      mbarrier_init(sums(), warps);
      mbarrier_init(sums_read(), 2);
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
inline unsigned dy_piece_place(unsigned tile, int row, int piece) {
  return tile + row * 32 + ((piece ^ (row >> 2)) & 1) * 16;
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

// Copies rows `first` to `first` + 15 of what the scans saved of a chunk, and their tails. One thread calls it.
template <int DV, typename PT, typename PU>
inline void load_saved(unsigned stage, unsigned mbarrier, PT states, PT d_states, PU u, PU d_right, long chunk,
                       int first) {
  using Memory = HopperGradientMemory<DV>;
  constexpr int panel = Memory::panel;
  const long state = (chunk * DV + first) * 128, part = chunk * DV * 144 + first * 64;
  const auto u_parts = reinterpret_cast<const GLOBAL bf16*>(u) + part;
  const auto right_parts = reinterpret_cast<const GLOBAL bf16*>(d_right) + part;
  mbarrier_expect(mbarrier, 8 * panel + 1024);
  copy_tile(stage + Memory::state, states + state, 2 * panel, mbarrier);
  copy_tile(stage + Memory::d_state, d_states + state, 2 * panel, mbarrier);
  copy_tile(stage + Memory::u, u_parts, panel, mbarrier);
  copy_tile(stage + Memory::u + panel, u_parts + DV * 64, panel, mbarrier);
  copy_tile(stage + Memory::right, right_parts, panel, mbarrier);
  copy_tile(stage + Memory::right + panel, right_parts + DV * 64, panel, mbarrier);
  // Sixteen rows have 1,024 elements in each part, and 256 in the tails.
  copy_tile(stage + Memory::tails, u_parts + DV * 128 - first * 48, 512, mbarrier);
  copy_tile(stage + Memory::tails + 512, right_parts + DV * 128 - first * 48, 512, mbarrier);
}

// Copies a piece of an input, or zeros if it is not live. The thread signals when its pieces are there
// (signalled_pieces_sent).
template <typename In, typename P>
inline void load_piece(Room room, int to, P from, bool live, bool aligned, unsigned mbarrier) {
  if (aligned) copy_signalled_piece(room.place + to, from, live, mbarrier);
  else put_piece(reinterpret_cast<threadgroup In*>(room.memory + to), from, live);
}

// Copies the inputs of all items to shared memory. Two warps do it.
template <typename In, int DV, int HK, int HV, int BLOCKS, bool MASKED, typename PQ, typename PK, typename PM,
          typename PT, typename PU, typename PY>
inline void load_items(Place at, Room room, GradientBarriers barriers, int length, int items, int chunks, PQ q, PK k,
                       PM mask, PT states, PT d_states, PU u, PU d_right, PY dy) {
  using Memory = HopperGradientMemory<DV>;
  constexpr int slices = DV / 16, repeats = HV / HK, before_keys = slices < 5 ? slices - 1 : 4;
  const int index = at.index;
  const bool aligned = aligned16(q) && aligned16(k) && aligned16(dy);
  const auto send = [&](unsigned mbarrier) {
    if (!aligned) copies_fence();
    signalled_pieces_sent(mbarrier);
  };
  int stage = 0, use = 0;
  for (int number = at.x, round = 0; number < items; number += BLOCKS, ++round) {
    const GradientItem item = item_at<HK>(number, chunks);
    const auto live = alive<MASKED>(mask, item.row, item.n * 64, length);
    const long row = (long)item.row * length + item.n * 64;
    const bool own_live[2] = {live(index / 2), live(index / 2 + 32)};
    for (int s = 0; s < repeats * slices; ++s) {
      const int hv = item.head * repeats + s / slices, first = s % slices * 16, to = stage * Memory::stage;
      const unsigned mbarrier = barriers.arrived(stage);
      if (use > 0) mbarrier_wait(barriers.read(stage), use - 1);
      if (index == 0)
        load_saved<DV>(room.place + to, mbarrier, states, d_states, u, d_right,
                       ((long)item.row * HV + hv) * chunks + item.n, first);
      const auto dy_rows = dy + (row * HV + hv) * DV + first + index % 2 * 8;
      DELTATUNE_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int r = index / 2 + 32 * i;
        load_piece<In>(room, dy_piece_place(to + Memory::dy, r, index % 2),
                       own_live[i] ? dy_rows + (long)r * HV * DV : dy, own_live[i], aligned, mbarrier);
      }
      send(mbarrier);
      if (++stage == Memory::stages) stage = 0, ++use;
      if (s != before_keys) continue;
      if (round > 0) mbarrier_wait(barriers.item(), round - 1);
      // Eight lanes write a core, and 32 lanes read 64 bytes of each of eight rows.
      for (int i = 0; i < 16; ++i) {
        const int r = i / 2 * 8 + index % 8, piece = i % 2 * 8 + index / 8;
        const bool on = live(r);
        const long from = on ? ((row + r) * HK + item.head) * 128 + piece * 8 : 0;
        const int place = (int)core_place(0, 16, r, piece);
        load_piece<In>(room, Memory::q + place, q + from, on, aligned, barriers.keys());
        load_piece<In>(room, Memory::k + place, k + from, on, aligned, barriers.keys());
      }
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
inline float sum_of_four(threadgroup const float* from) {
  float x[4];
  get_four(x, from);
  return (x[0] + x[1]) + (x[2] + x[3]);
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
  const float rates = sum_of_four(room.floats(Memory::rate_sums) + t * 4);
  float after = sum_of_four(room.floats(Memory::after_sums) + t * 4);
  if (tables.after()[t] >= 0.03125f) after = tables.rate()[t] * rates - (at_own + later);
  for (int team = 0; team < 4; ++team) {
    get_four(columns, room.floats(Memory::row_sums + team * 1024) + t * 4);
    DELTATUNE_UNROLL
    for (int b = 0; b < 3; ++b) rows[b] += columns[b];
  }
  // The terms of row t with tiles before tile 0, 1, 2 and 3.
  float before = sum_of_four(room.floats(Memory::before_sums) + t * 4), spanning = before;
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
  float dots = 0.0f;
  for (int team = 0; team < 4; ++team) dots += sum_of_four(room.floats(Memory::dots) + team * 4);
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
// even columns in the first byte of each, of odd columns in the second.
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
  sum += other;
  // An element that was rounded to zero becomes NaN with its tail.
  if (sum != sum) {
    sum = 0.0f;
    DELTATUNE_UNROLL
    for (int i = 0; i < 4; ++i)
      sum += float_of(a[i] << 16) * float_of(b[i] << 16) + float_of(a[i] & 0xffff0000u) * float_of(b[i] & 0xffff0000u);
  }
  return sum;
}
// Adds a lane's share of the inner products of rows of two left operands in two planes.
inline void add_operand_dots(thread float (&sums)[2], const thread unsigned (&a)[4], const thread unsigned (&a_low)[4],
                             const thread unsigned (&b)[4], const thread unsigned (&b_low)[4]) {
  DELTATUNE_UNROLL
  for (int i = 0; i < 4; ++i)
    sums[i & 1] +=
        (float_of(a[i] << 16) + float_of(a_low[i] << 16)) * (float_of(b[i] << 16) + float_of(b_low[i] << 16)) +
        (float_of(a[i] & 0xffff0000u) + float_of(a_low[i] & 0xffff0000u)) *
            (float_of(b[i] & 0xffff0000u) + float_of(b_low[i] & 0xffff0000u));
}

// What a warp has of a unit: the sums by its team's columns of DK, those of its pairs, which are dp for KIND 0 and da
// for KIND 1, and a lane's shares of R u by row and of <dS, S>.
struct GradientSums {
  float from_y[16], from_right[16], from_end[16], pairs[16], rates[2], dot;
};

// Adds the products of a stage, in which the unit has come to slice `s`: first those with dY and R, then those with u,
// so that the operands take few registers. Products with the same sums are apart, for one waits for the other.
template <typename In, int DV, int KIND>
inline void add_slice(Room room, int stage, int s, int team, thread GradientSums& sums, Place at) {
  using Memory = HopperGradientMemory<DV>;
  using Part = Products<In, 32>;
  const int warp = at.group % 4;
  const unsigned tile = room.place + stage * Memory::stage;
  const unsigned rows = opaque((tile & 0x3ffff) / 16), own = rows + team * 32;
  {
    unsigned y[4], right[4], right_low[4];
    load_parts(y, dy_piece_place(tile + Memory::dy, warp * 16 + at.lane % 16, at.lane / 16));
    load_left_cores_turned(right, tile + Memory::right, 8, warp * 2, at);
    load_left_cores_turned(right_low, tile + Memory::right + Memory::panel, 8, warp * 2, at);
    register_fence(y);
    register_fence(right);
    register_fence(right_low);
    register_fence(sums.pairs);
    register_fence(sums.from_y);
    register_fence(sums.from_right);
    products_start();
    const unsigned long long state = cores_operand(own + Memory::state / 16, 2048, 128);
    const unsigned pairs = rows + team % 2 * 8 + Memory::u / 16;
    const unsigned long long high = cores_operand(pairs, 1024, 256);
    const unsigned long long low = cores_operand(pairs + Memory::panel / 16, 1024, 256);
    if (KIND == 0) Part::columns(sums.pairs, y, low);
    else Part::columns(sums.pairs, right, low);
    Part::columns(sums.from_right, right_low, state);
    if (KIND == 0) Part::columns(sums.pairs, y, high);
    else Part::columns(sums.pairs, right_low, high);
    Part::columns(sums.from_y, y, state);
    Part::columns(sums.from_right, right, state);
    if (KIND == 1) Part::columns(sums.pairs, right, high);
    products_sent();
    products_wait<0>();
    register_fence(sums.pairs);
    register_fence(sums.from_y);
    register_fence(sums.from_right);
  }
  unsigned u[4], u_low[4];
  load_left_cores_turned(u, tile + Memory::u, 8, warp * 2, at);
  load_left_cores_turned(u_low, tile + Memory::u + Memory::panel, 8, warp * 2, at);
  register_fence(u);
  register_fence(u_low);
  register_fence(sums.from_end);
  products_start();
  const unsigned long long d_state = cores_operand(own + Memory::d_state / 16, 2048, 128);
  Part::columns(sums.from_end, u_low, d_state);
  Part::columns(sums.from_end, u, d_state);
  products_sent();
  products_wait<0>();
  register_fence(sums.from_end);
  unsigned a[4], b[4];
  if (s % 4 == team) {
    load_left_cores_turned(a, tile + Memory::right, 8, warp * 2, at);
    load_left_cores_turned(b, tile + Memory::right + Memory::panel, 8, warp * 2, at);
    add_operand_dots(sums.rates, a, b, u, u_low);
  }
  if ((s + team) % 2 == 0) return;
  load_left_cores(a, tile + Memory::state, 16, KIND * 8 + warp * 2, at);
  load_left_cores(b, tile + Memory::d_state, 16, KIND * 8 + warp * 2, at);
  const auto tails = reinterpret_cast<threadgroup const unsigned short*>(
      room.memory + stage * Memory::stage + Memory::tails + at.lane * 16 + (KIND * 4 + warp) * 2);
  sums.dot += kept_products(a, b, tails[0], tails[256]);
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

// Adds the sums by columns of DK, each row times its factors, to dq and dk, and writes their inner products with q and
// k: of what the gates up to a row and of what those after it receive. dq is in shared memory until an item's end.
template <typename In, int DV>
inline void add_columns_of_keys(Room room, GradientTables<DV> tables, int team, thread GradientSums& sums,
                                thread float (&dk)[16], bool onto, Place at) {
  using Memory = HopperGradientMemory<DV>;
  const int warp = at.group % 4;
  float of_y[2] = {0.0f, 0.0f}, of_right[2] = {0.0f, 0.0f}, of_end[2] = {0.0f, 0.0f}, on_y[2], on_right[2], on_end[2];
  DELTATUNE_UNROLL
  for (int side = 0; side < 2; ++side) {
    const int row = own_row(at, side);
    const float rate = tables.rate()[row];
    on_y[side] = tables.before()[row];
    on_right[side] = -on_y[side] * rate;
    on_end[side] = tables.after()[row] * rate;
  }
  threadgroup float* own = room.floats(Memory::sums + team * 8192) + at.index % 128 * 4;
  const auto keys = room.memory + Memory::q + (warp * 32 + team * 4) * 128 + at.lane * 4;
  DELTATUNE_UNROLL
  for (int i = 0; i < 4; ++i) {
    float dq[4];
    get_four(dq, own + i * 512);
    DELTATUNE_UNROLL
    for (int side = 0; side < 2; ++side) {
      const unsigned queries = get_pair(keys + side * 2048 + i * 128);
      const unsigned others = get_pair(keys + (Memory::k - Memory::q) + side * 2048 + i * 128);
      DELTATUNE_UNROLL
      for (int j = 0; j < 2; ++j) {
        const int at_row = 2 * side + j, e = 4 * i + at_row;
        const float key = float_of(j > 0 ? others & 0xffff0000u : others << 16);
        of_y[side] += sums.from_y[e] * float_of(j > 0 ? queries & 0xffff0000u : queries << 16);
        of_right[side] += sums.from_right[e] * key;
        of_end[side] += sums.from_end[e] * key;
        dq[at_row] = (onto ? dq[at_row] : 0.0f) + on_y[side] * sums.from_y[e];
        dk[e] += on_right[side] * sums.from_right[e];
        dk[e] += on_end[side] * sums.from_end[e];
      }
    }
    put_four(own + i * 512, dq);
  }
  // By side: what the gates up to a row receive, what those after it do, R u.
  float found[2], dots[8];
  DELTATUNE_UNROLL
  for (int side = 0; side < 2; ++side) {
    dots[4 * side] = on_y[side] * of_y[side] + on_right[side] * of_right[side];
    dots[4 * side + 1] = on_end[side] * of_end[side];
    dots[4 * side + 2] = sums.rates[side];
    dots[4 * side + 3] = 0.0f;
  }
  sum_rows(found, dots, at.lane);
  threadgroup float* to = room.floats(Memory::before_sums) + at.lane % 4 * 256 + team;
  DELTATUNE_UNROLL
  for (int side = 0; side < 2; ++side)
    if (at.lane % 4 != 3) to[own_row(at, side) * 4] = found[side];
  const float dot = lane_sum(sums.dot);
  if (at.lane == 0) room.floats(Memory::dots)[team * 4 + warp] = dot;
}

// Starts the products of q or k with k that a team's pairs are multiplied by.
template <typename In, int DV, int KIND>
inline void start_scores(Room room, int team, thread float (&scores)[16]) {
  using Memory = HopperGradientMemory<DV>;
  register_fence(scores);
  products_start();
  const unsigned place = opaque((room.place & 0x3ffff) / 16), keys = place + Memory::k / 16 + team % 2 * 128;
  const unsigned left = place + (KIND == 0 ? Memory::q : Memory::k) / 16;
  DELTATUNE_UNROLL
  for (int m = 0; m < 8; ++m)
    Products<In, 32>::rows(scores, cores_operand(left + m * 16, 128, 2048), cores_operand(keys + m * 16, 128, 4096),
                           m > 0);
  products_sent();
}

// Turns a team's pairs of tile `tile` into weights. The first of a lane's columns is `column`.
template <int KIND>
inline void weigh_diagonal(Decay<64> decay, threadgroup const float* rate, thread float* pairs, int column,
                           const thread int (&rows)[2]) {
  DELTATUNE_UNROLL
  for (int e = 0; e < 4; ++e) {
    const int i = rows[own_side(e)], j = column + (e & 1);
    const float d = (KIND == 0 ? rate[j] : -rate[i] * rate[j]) * decay.diagonal[i * 17 + (j & 15)];
    pairs[e] = i > j || (KIND == 0 && i == j) ? d * pairs[e] : 0.0f;
  }
}

// Turns a unit's sums of pairs into weights, and writes what their products with `scores` add to the gradients of the
// gates. Tiles right of the diagonal become zeros.
template <int DV, int KIND>
inline void weigh_pairs(Room room, GradientTables<DV> tables, int team, thread float (&pairs)[16],
                        const thread float (&scores)[16], Place at) {
  using Memory = HopperGradientMemory<DV>;
  const int warp = at.group % 4, first = team % 2 * 8 + at.lane % 4 * 2, rows[2] = {own_row(at, 0), own_row(at, 1)};
  const Decay<64> decay = tables.decay();
  threadgroup const float* rate = tables.rate();
  threadgroup float* diagonal = room.floats(Memory::diagonal + KIND * Memory::diagonal_bytes);
  float row_factors[2], in_rows[8], in_columns[8];
  DELTATUNE_UNROLL
  for (int side = 0; side < 2; ++side)
    row_factors[side] = decay.prefix[rows[side]] * (KIND == 0 ? 1.0f : -rate[rows[side]]);
  DELTATUNE_UNROLL
  for (int tile = 3; tile >= 0; --tile) {
    thread float* own = pairs + tile * 4;
    float terms[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (tile > warp) {
      DELTATUNE_UNROLL
      for (int e = 0; e < 4; ++e) own[e] = 0.0f;
    } else if (tile == warp) {
      weigh_diagonal<KIND>(decay, rate, own, tile * 16 + first, rows);
      DELTATUNE_UNROLL
      for (int e = 0; e < 4; ++e)
        diagonal[rows[own_side(e)] * 17 + first + (e & 1)] = own[e] * scores[tile * 4 + e];
    } else {
      float suffixes[2], rates[2];
      get_two(suffixes, decay.suffix + tile * 16 + first);
      get_two(rates, rate + tile * 16 + first);
      DELTATUNE_UNROLL
      for (int e = 0; e < 4; ++e) {
        own[e] *= row_factors[own_side(e)] * (suffixes[e & 1] * rates[e & 1]);
        terms[e] = own[e] * scores[tile * 4 + e];
      }
      // The next tile is further away by all gates of this one.
      const float total = decay.total[tile];
      row_factors[0] *= total;
      row_factors[1] *= total;
    }
    in_rows[tile] = terms[0] + terms[1];
    in_rows[4 + tile] = terms[2] + terms[3];
    in_columns[2 * tile] = terms[0] + terms[2];
    in_columns[2 * tile + 1] = terms[1] + terms[3];
  }
  float by_row[2], halves[4], quarter[2], by_column[1];
  sum_rows(by_row, in_rows, at.lane);
  sum_pairs<8>(halves, in_columns, at.lane & 4, 4);
  sum_pairs<4>(quarter, halves, at.lane & 8, 8);
  sum_pairs<2>(by_column, quarter, at.lane & 16, 16);
  DELTATUNE_UNROLL
  for (int side = 0; side < 2; ++side)
    room.floats(Memory::row_sums + team * 1024)[rows[side] * 4 + at.lane % 4] = by_row[side];
  const int column = at.lane / 8 * 16 + (at.lane >> 2 & 1) + first;
  room.floats(Memory::column_sums + KIND * 1024)[column * 4 + warp] = by_column[0];
}

// Adds the weights of all units of an item but the last to those in shared memory, and writes the last one's sum as
// two planes of bf16. A warp's sums in fp32 take the memory of its own rows and columns of the planes.
template <typename In, int DV, int KIND>
inline void sum_weights(Room room, int team, thread float (&weights)[16], int repeat, int repeats, Place at) {
  using Memory = HopperGradientMemory<DV>;
  const int planes = Memory::weights + KIND * 16384, warp = at.group % 4, odd = team % 2;
  DELTATUNE_UNROLL
  for (int i = 0; repeats > 1 && i < 4; ++i) {
    const int row = warp * 16 + i % 2 * 8 + at.lane / 4, piece = at.lane % 4 * 2 + odd;
    threadgroup float* own = room.floats((int)piece_place(planes + i / 2 * 8192, row, piece));
    if (repeat > 0) {
      float before[4];
      get_four(before, own);
      DELTATUNE_UNROLL
      for (int j = 0; j < 4; ++j) weights[4 * i + j] += before[j];
    }
    if (repeat + 1 < repeats) put_four(own, weights + 4 * i);
  }
  if (repeat + 1 < repeats) return;
  group_barrier();
  DELTATUNE_UNROLL
  for (int i = 0; i < 16; i += 2) {
    const auto to = room.memory + piece_place(planes, own_row(at, own_side(i)), i / 4 * 2 + odd) + at.lane % 4 * 4;
    const unsigned high = PairOf<In>::of(weights[i], weights[i + 1]);
    put_pair(to, high);
    const float first = weights[i] - float_of(high << 16), second = weights[i + 1] - float_of(high & 0xffff0000u);
    put_pair(to + 8192, PairOf<In>::of(first, second));
  }
}

// Adds the products of an item's weights with q and k to dq, which comes from shared memory, and to dk: 16 positions of
// one plane at a time, the low parts first.
template <typename In, int DV>
inline void add_weighted(Room room, int team, thread float (&dq)[16], thread float (&dk)[16], Place at) {
  using Memory = HopperGradientMemory<DV>;
  using Part = Products<In, 32>;
  const int warp = at.group % 4;
  DELTATUNE_UNROLL
  for (int i = 0; i < 4; ++i)
    get_four(dq + 4 * i, room.floats(Memory::sums + team * 8192) + (i * 128 + at.index % 128) * 4);
  // Sums of products lie in few of the registers. dk stays in others while an item's slices are multiplied.
  float on_keys[16];
  clear_floats(on_keys);
  for (int step = 0; step < 8; ++step) {
    const int t = step % 4;
    const unsigned of_y = room.place + Memory::weights + (step < 4 ? 8192 : 0), of_right = of_y + 16384;
    unsigned y[4], y_turned[4], right[4], right_turned[4];
    load_left(y, of_y, warp * 16, t * 16, at);
    load_left_turned(y_turned, of_y, t * 16, warp * 16, at);
    load_left(right, of_right, warp * 16, t * 16, at);
    load_left_turned(right_turned, of_right, t * 16, warp * 16, at);
    register_fence(y);
    register_fence(y_turned);
    register_fence(right);
    register_fence(right_turned);
    register_fence(dq);
    register_fence(on_keys);
    products_start();
    const unsigned rows = opaque((room.place & 0x3ffff) / 16 + t * 256 + team * 32);
    const unsigned long long queries = cores_operand(rows + Memory::q / 16, 2048, 128);
    const unsigned long long keys = cores_operand(rows + Memory::k / 16, 2048, 128);
    Part::columns(on_keys, y_turned, queries);
    Part::columns(dq, y, keys);
    Part::columns(on_keys, right, keys);
    Part::columns(on_keys, right_turned, keys);
    products_sent();
    products_wait<0>();
    register_fence(dq);
    register_fence(on_keys);
  }
  DELTATUNE_UNROLL
  for (int i = 0; i < 16; ++i) dk[i] += on_keys[i];
}

// Writes a team's columns of dq or dk.
template <typename In, int HK, typename P>
inline void put_columns(P out, const thread float (&x)[16], GradientItem item, int length, int team, Place at) {
  DELTATUNE_UNROLL
  for (int side = 0; side < 2; ++side) {
    const int i = item.n * 64 + own_row(at, side);
    if (i >= length) continue;
    const long to = (((long)item.row * length + i) * HK + item.head) * 128 + team * 32 + at.lane % 4 * 2;
    DELTATUNE_UNROLL
    for (int j = 0; j < 4; ++j)
      put_pair(out + to + j * 8, PairOf<In>::of(x[4 * j + 2 * side], x[4 * j + 2 * side + 1]));
  }
}

// Computes 32 columns of dq and dk, and what the sums of the gates need.
template <typename In, int DV, int HK, int HV, int BLOCKS, int KIND, typename OQ, typename OK>
inline void compute_items(Place at, Room room, GradientBarriers barriers, int length, int items, int chunks, OQ dq_out,
                          OK dk_out) {
  constexpr int slices = DV / 16, repeats = HV / HK;
  const int team = at.group / 4 - 1;
  float dk[16];
  int stage = 0, use = 0, unit = 0;
  for (int number = at.x, round = 0; number < items; number += BLOCKS, ++round) {
    clear_floats(dk);
    for (int repeat = 0; repeat < repeats; ++repeat, ++unit) {
      GradientSums sums;
      clear_floats(sums.pairs);
      clear_floats(sums.from_y);
      clear_floats(sums.from_right);
      clear_floats(sums.from_end);
      sums.rates[0] = sums.rates[1] = sums.dot = 0.0f;
      for (int s = 0; s < slices; ++s) {
        mbarrier_wait(barriers.arrived(stage), use);
        add_slice<In, DV, KIND>(room, stage, s, team, sums, at);
        release(barriers.read(stage), at);
        if (++stage == HopperGradientMemory<DV>::stages) stage = 0, ++use;
      }
      const GradientTables<DV> tables{room, unit};
      if (repeat == 0) {
        mbarrier_wait(barriers.keys(), round);
        copies_fence();
      }
      mbarrier_wait(barriers.tables(unit), unit / 2);
      if (unit > 0) mbarrier_wait(barriers.sums_read(), unit - 1);
      add_columns_of_keys<In, DV>(room, tables, team, sums, dk, repeat > 0, hidden(at));
      float scores[16];
      start_scores<In, DV, KIND>(room, team, scores);
      products_wait<0>();
      register_fence(scores);
      weigh_pairs<DV, KIND>(room, tables, team, sums.pairs, scores, hidden(at));
      release(barriers.sums(), at);
      if (repeat == 0 && round > 0) mbarrier_wait(barriers.item(), round - 1);
      sum_weights<In, DV, KIND>(room, team, sums.pairs, repeat, repeats, hidden(at));
    }
    named_barrier<512>();
    float dq[16];
    add_weighted<In, DV>(room, team, dq, dk, hidden(at));
    release(barriers.item(), at);
    const GradientItem item = item_at<HK>(number, chunks);
    put_columns<In, HK>(dq_out, dq, item, length, team, hidden(at));
    put_columns<In, HK>(dk_out, dk, item, length, team, hidden(at));
  }
}

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
    fewer_registers<32>();
    if (at.group < 2)
      load_items<In, DV, HK, HV, BLOCKS, MASKED>(at, room, barriers, length, items, chunks, q, k, mask, states,
                                                 d_states, u, d_right, dy);
    else
      sum_gates<In, DV, HK, HV, BLOCKS, MASKED, SEGMENTED>(at, room, barriers, length, items, chunks, log_g, mask,
                                                           segments, factors, d_log_g, d_beta);
    return;
  }
  more_registers<112>();
  if (at.group < 12)
    compute_items<In, DV, HK, HV, BLOCKS, 0>(at, room, barriers, length, items, chunks, dq, dk);
  else
    compute_items<In, DV, HK, HV, BLOCKS, 1>(at, room, barriers, length, items, chunks, dq, dk);
}
