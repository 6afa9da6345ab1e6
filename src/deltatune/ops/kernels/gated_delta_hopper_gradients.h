// gated_delta_gradients of gated_delta.h for bf16 on Hopper: heads of 128 x DV, chunks of 64 positions. Letters are
// those of that file.
// A block has three groups of four warps. Two of them multiply, 64 positions by half of the columns of DK each; in
// addition the first one (PART 0) computes the pairs of P, the second one those of N. Of the third group two warps copy
// 16 rows of DV at a time to shared memory, and two add up the gradients of log_g and beta while the others go on.
// A block takes every BLOCKS-th item of work, which is a chunk of a key head with its HV / HK value heads; a unit is one
// of these value heads. dk is summed over the value heads in registers, dq and the weights of the pairs in shared memory,
// so that the products of the weights with q and k are computed once per item.

// The shared memory of a block. Tiles have rows of 128 bytes with the 128-byte swizzle, but those of dy, which have rows
// of 32 bytes: there the order of the two pieces depends on bit 2 of the row's number.
template <int DV>
struct HopperGradientMemory {
  // A stage: 16 rows of DV of each operand. States have two panels of 64 columns; u and R two planes.
  static constexpr constant int panel = 2048, state = 0, d_state = 2 * panel, u = 4 * panel, right = 6 * panel;
  static constexpr constant int dy = 8 * panel, tails = 9 * panel, stage = tails + 1024, stages = 5;
  static constexpr constant int q = stages * stage, k = q + 16384;
  // By PART, the sums of dq, each lane its own, and the weights of the pairs: summed in fp32, each lane its own, then as
  // two planes of bf16.
  static constexpr constant int sums = k + 16384, weights = sums + 2 * 16384;
  // What depends on the gates of a unit, for two units: Decay's tables, then G, E, beta and the gates.
  static constexpr constant int decay = weights + 2 * 16384, decay_bytes = Decay<64>::floats * 4;
  static constexpr constant int scalars = decay + 2 * decay_bytes;
  // What a unit adds to the gradients of the gates: tables of pairs by PART, sums by position, and sums by warp.
  static constexpr constant int diagonal = scalars + 2 * 1024, diagonal_bytes = 64 * 17 * 4;
  static constexpr constant int row_sums = diagonal + 2 * diagonal_bytes, column_sums = row_sums + 2 * 1024;
  static constexpr constant int before_sums = column_sums + 2 * 1024, after_sums = before_sums + 1024;
  static constexpr constant int rate_sums = after_sums + 1024, dots = rate_sums + 1024;
  static constexpr constant int barriers = dots + 32;
  static constexpr constant int bytes = barriers + 128 + 1024;
};

// The barriers of a block: a stage has arrived or was read; q and k have arrived; an item is done, so that q, k and the
// weights may be overwritten; the tables of a unit's gates are filled; its sums are written, and were read.
struct GradientBarriers {
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
        mbarrier_init(arrived(stage), 2);
        mbarrier_init(read(stage), 8);
      }
      mbarrier_init(keys(), 2);
      mbarrier_init(item(), 8);
      mbarrier_init(tables(0), 2);
      mbarrier_init(tables(1), 2);
      mbarrier_init(sums(), 8);
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

// Copies rows `first` to `first` + 15 of what the scans saved of a chunk, and their tails. 64 threads call it. All loads
// of these four arrays are here.
template <typename In, int DV, typename PT, typename PU>
inline void load_saved(unsigned stage, PT states, PT d_states, PU u, PU d_right, long chunk, int first, int index) {
  using Memory = HopperGradientMemory<DV>;
  constexpr int state_stride = 136, stride = 72;
  const int piece = index % 16, row = index / 16;
  const long from = (chunk * DV + first + row) * state_stride + piece * 8;
  const unsigned panel = stage + piece / 8 * Memory::panel;
  DELTATUNE_UNROLL
  for (int i = 0; i < 4; ++i) {
    const unsigned to = piece_place(panel, row + 4 * i, piece);
    copy_piece(to + Memory::state, states + from + i * 4 * state_stride, true, true);
    copy_piece(to + Memory::d_state, d_states + from + i * 4 * state_stride, true, true);
  }
  const int short_piece = index % 8, short_row = index / 8;
  const auto u_rows = reinterpret_cast<const GLOBAL In*>(u) + (chunk * 2 * DV + first) * stride;
  const auto right_rows = reinterpret_cast<const GLOBAL In*>(d_right) + (chunk * 2 * DV + first) * stride;
  DELTATUNE_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int plane = i / 2, r = short_row + i % 2 * 8;
    const unsigned to = piece_place(stage + plane * Memory::panel, r, short_piece);
    const int offset = (plane * DV + r) * stride + short_piece * 8;
    copy_piece(to + Memory::u, u_rows + offset, true, true);
    copy_piece(to + Memory::right, right_rows + offset, true, true);
  }
  // The tails of 16 rows are 32 pieces, one for each lane: those of lanes 0 to 15 in the first plane.
  const int offset = (index / 16 % 2 * DV + index % 16) * stride + 64;
  copy_piece(stage + Memory::tails + index * 16, (index < 32 ? u_rows : right_rows) + offset, true, true);
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
  // What was sent is announced when three more are on their way; these are the mbarriers of the last three.
  constexpr unsigned none = ~0u;
  unsigned sent[3] = {none, none, none};
  const auto announce = [&](unsigned mbarrier) {
    copies_fence();
    release(mbarrier, at);
  };
  const auto send = [&](unsigned mbarrier) {
    pieces_sent();
    if (sent[0] != none) {
      pieces_wait<3>();
      announce(sent[0]);
    }
    sent[0] = sent[1], sent[1] = sent[2], sent[2] = mbarrier;
  };
  int stage = 0, use = 0;
  for (int number = at.x, round = 0; number < items; number += BLOCKS, ++round) {
    const GradientItem item = item_at<HK>(number, chunks);
    const auto live = alive<MASKED>(mask, item.row, item.n * 64, length);
    const long row = (long)item.row * length + item.n * 64;
    const bool own_live[2] = {live(index / 2), live(index / 2 + 32)};
    for (int s = 0; s < repeats * slices; ++s) {
      const int hv = item.head * repeats + s / slices, first = s % slices * 16;
      const unsigned to = room.place + stage * Memory::stage;
      if (use > 0) mbarrier_wait(barriers.read(stage), use - 1);
      load_saved<In, DV>(to, states, d_states, u, d_right, ((long)item.row * HV + hv) * chunks + item.n, first, index);
      const auto dy_rows = dy + (row * HV + hv) * DV + first + index % 2 * 8;
      DELTATUNE_UNROLL
      for (int i = 0; i < 2; ++i) {
        const int r = index / 2 + 32 * i;
        copy_piece(dy_piece_place(to + Memory::dy, r, index % 2), own_live[i] ? dy_rows + (long)r * HV * DV : dy,
                   own_live[i], aligned);
      }
      send(barriers.arrived(stage));
      if (++stage == Memory::stages) stage = 0, ++use;
      if (s != before_keys) continue;
      if (round > 0) mbarrier_wait(barriers.item(), round - 1);
      for (int i = 0; i < 16; ++i) {
        const int r = index / 16 + 4 * i, piece = index % 16;
        const bool on = live(r);
        const long from = on ? ((row + r) * HK + item.head) * 128 + piece * 8 : 0;
        const unsigned place = piece_place(room.place + piece / 8 * 8192, r, piece);
        copy_piece(place + Memory::q, q + from, on, aligned);
        copy_piece(place + Memory::k, k + from, on, aligned);
      }
      send(barriers.keys());
    }
  }
  pieces_wait<0>();
  for (int i = 0; i < 3; ++i)
    if (sent[i] != none) announce(sent[i]);
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

// Fills the tables of every unit's gates, and adds up what the units contribute to the gradients of log_g and beta. Two
// warps do it, a thread for each position.
template <typename In, int DV, int HK, int HV, int BLOCKS, bool MASKED, bool SEGMENTED, typename PL, typename PM,
          typename PZ, typename PF>
inline void sum_gates(Place at, Room room, GradientBarriers barriers, int length, int items, int chunks, PL log_g,
                      PM mask, PZ segments, PF factors, GLOBAL float* d_log_g, GLOBAL float* d_beta) {
  using Memory = HopperGradientMemory<DV>;
  constexpr int repeats = HV / HK;
  const int t = at.index % 64, units = items > at.x ? (items - at.x + BLOCKS - 1) / BLOCKS * repeats : 0;
  threadgroup float* diagonal = room.floats(Memory::diagonal);
  threadgroup float* row_sums = room.floats(Memory::row_sums);
  threadgroup float* column_sums = room.floats(Memory::column_sums);
  threadgroup float* before_sums = room.floats(Memory::before_sums);
  threadgroup float* after_sums = room.floats(Memory::after_sums);
  threadgroup float* rate_sums = room.floats(Memory::rate_sums);
  threadgroup const float* dots = room.floats(Memory::dots);
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
    for (int j = 0; j < 16; ++j) diagonal[t * 17 + j] += diagonal[Memory::diagonal_bytes / 4 + t * 17 + j];
    for (int b = 0; b < 4; ++b) {
      row_sums[t * 4 + b] += row_sums[256 + t * 4 + b];
      column_sums[t * 4 + b] += column_sums[256 + t * 4 + b];
    }
    named_barrier<64, 2>();
    ends_by_pairs<64>(diagonal, column_sums, rate_sums, tables.rate(), tables.after(), after_sums, 2, t);
    named_barrier<64, 2>();
    const float shares = spanning<64, 1>(diagonal, row_sums, column_sums, before_sums, after_sums, 2, t, 0);
    float on_gate = 0.0f;
    for (int g = 0; g < 8; ++g) on_gate += dots[g];
    on_gate = on_gate * tables.before()[63] + shares;
    const float on_beta = rate_sums[t * 4] + rate_sums[t * 4 + 1];
    if (item.n * 64 + t < length) {
      const bool live = alive<MASKED>(mask, item.row, item.n * 64, length)(t);
      const long to = ((long)item.row * length + item.n * 64 + t) * HV + item.head * repeats + step % repeats;
      d_log_g[to] = live ? on_gate : 0.0f;
      d_beta[to] = live ? on_beta : 0.0f;
    }
    release(barriers.sums_read(), at);
  }
}

// A lane's share of <dS, S> in 16 rows and columns, whose elements it has as left operands, with their tails: those of
// even columns in the first byte of each, of odd columns in the second.
inline float kept_products(const thread unsigned (&a)[4], const thread unsigned (&b)[4], unsigned tail_a,
                           unsigned tail_b) {
  const unsigned spread_a = (tail_a & 0xff) << 8 | (tail_a & 0xff00) << 16;
  const unsigned spread_b = (tail_b & 0xff) << 8 | (tail_b & 0xff00) << 16;
  float sum = 0.0f;
  DELTATUNE_UNROLL
  for (int i = 0; i < 4; ++i) {
    const unsigned x = (spread_a << 2 * i & 0xc000c000u) ^ 0xa000a000u;
    const unsigned y = (spread_b << 2 * i & 0xc000c000u) ^ 0xa000a000u;
    sum += float_of((a[i] << 16 | (x & 0xffff)) - 0x8000u) * float_of((b[i] << 16 | (y & 0xffff)) - 0x8000u);
    sum += float_of(((a[i] & 0xffff0000u) | x >> 16) - 0x8000u) * float_of(((b[i] & 0xffff0000u) | y >> 16) - 0x8000u);
  }
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
    sums[i & 1] += (float_of(a[i] << 16) + float_of(a_low[i] << 16)) * (float_of(b[i] << 16) + float_of(b_low[i] << 16)) +
                   (float_of(a[i] & 0xffff0000u) + float_of(a_low[i] & 0xffff0000u)) *
                       (float_of(b[i] & 0xffff0000u) + float_of(b_low[i] & 0xffff0000u));
}

// What a warp has of a unit: the sums by half of the columns of DK, those of the pairs, which are dp for PART 0 and da
// for PART 1, and a lane's shares of R u by row and of <dS, S>.
struct GradientSums {
  float from_y[32], from_right[32], from_end[32], pairs[32], rates[2], dot;
};

// Adds the products of a stage, in which the unit has come to slice `s`.
template <typename In, int DV, int PART>
inline void add_slice(Room room, int stage, int s, thread GradientSums& sums, Place at) {
  using Memory = HopperGradientMemory<DV>;
  using Half = Products<In, 64>;
  constexpr int own_panel = PART * Memory::panel;
  const int warp = at.group % 4;
  const unsigned tile = room.place + stage * Memory::stage;
  unsigned y[4], right[4], right_low[4], u[4], u_low[4];
  load_parts(y, dy_piece_place(tile + Memory::dy, warp * 16 + at.lane % 16, at.lane / 16));
  load_left_turned(right, tile + Memory::right, 0, warp * 16, at);
  load_left_turned(right_low, tile + Memory::right + Memory::panel, 0, warp * 16, at);
  load_left_turned(u, tile + Memory::u, 0, warp * 16, at);
  load_left_turned(u_low, tile + Memory::u + Memory::panel, 0, warp * 16, at);
  if (s % 2 == PART) add_operand_dots(sums.rates, right, right_low, u, u_low);
  register_fence(y);
  register_fence(right);
  register_fence(right_low);
  register_fence(u);
  register_fence(u_low);
  register_fence(sums.pairs);
  register_fence(sums.from_y);
  register_fence(sums.from_right);
  register_fence(sums.from_end);
  products_start();
  const unsigned rows = opaque((tile & 0x3ffff) / 16);
  const unsigned long long state = columns_operand(rows + (Memory::state + own_panel) / 16, Memory::panel);
  const unsigned long long d_state = columns_operand(rows + (Memory::d_state + own_panel) / 16, Memory::panel);
  const unsigned long long low = columns_operand(rows + (Memory::u + Memory::panel) / 16, Memory::panel);
  const unsigned long long high = columns_operand(rows + Memory::u / 16, Memory::panel);
  if (PART == 0) {
    Half::columns(sums.pairs, y, low);
    Half::columns(sums.pairs, y, high);
  } else {
    Half::columns(sums.pairs, right, low);
    Half::columns(sums.pairs, right_low, high);
    Half::columns(sums.pairs, right, high);
  }
  Half::columns(sums.from_y, y, state);
  Half::columns(sums.from_right, right_low, state);
  Half::columns(sums.from_right, right, state);
  Half::columns(sums.from_end, u_low, d_state);
  Half::columns(sums.from_end, u, d_state);
  products_sent();
  products_wait<0>();
  register_fence(sums.pairs);
  register_fence(sums.from_y);
  register_fence(sums.from_right);
  register_fence(sums.from_end);
  unsigned a[4], b[4];
  load_left(a, tile + Memory::state + own_panel, 0, warp * 16, at);
  load_left(b, tile + Memory::d_state + own_panel, 0, warp * 16, at);
  const auto tails = reinterpret_cast<threadgroup const unsigned short*>(
      room.memory + stage * Memory::stage + Memory::tails + at.lane * 16 + (PART * 4 + warp) * 2);
  sums.dot += kept_products(a, b, tails[0], tails[256]);
}

// Adds the sums by columns of DK, each row times its factors, to dq and dk, and writes their inner products with q and
// k: of what the gates up to a row and of what those after it receive. dq is in shared memory before an item's last unit.
template <typename In, int DV, int PART>
inline void add_columns_of_keys(Room room, GradientTables<DV> tables, thread GradientSums& sums, thread float (&dq)[32],
                                thread float (&dk)[32], int repeat, int repeats, Place at) {
  using Memory = HopperGradientMemory<DV>;
  float dots[4] = {0.0f, 0.0f, 0.0f, 0.0f}, on_y[2], on_right[2], on_end[2];
  DELTATUNE_UNROLL
  for (int side = 0; side < 2; ++side) {
    const int i = own_row(at, side);
    on_y[side] = tables.before()[i];
    on_right[side] = -tables.before()[i] * tables.rate()[i];
    on_end[side] = tables.after()[i] * tables.rate()[i];
  }
  DELTATUNE_UNROLL
  for (int i = 0; i < 32; i += 2) {
    const int side = own_side(i), row = own_row(at, side);
    const auto from = room.memory + Memory::q + PART * 8192 + row * 128 + ((i / 4 ^ row) & 7) * 16 + at.lane % 4 * 4;
    const unsigned queries = get_pair(from), keys = get_pair(from + (Memory::k - Memory::q));
    DELTATUNE_UNROLL
    for (int j = i; j < i + 2; ++j) {
      const float query = float_of(j > i ? queries & 0xffff0000u : queries << 16);
      const float key = float_of(j > i ? keys & 0xffff0000u : keys << 16);
      const float y_part = on_y[side] * sums.from_y[j];
      const float right_part = on_right[side] * sums.from_right[j];
      const float end_part = on_end[side] * sums.from_end[j];
      dq[j] = y_part;
      dk[j] += right_part + end_part;
      dots[side] += y_part * query + right_part * key;
      dots[2 + side] += end_part * key;
    }
  }
  DELTATUNE_UNROLL
  for (int i = 0; repeats > 1 && i < 8; ++i) {
    threadgroup float* own = room.floats(Memory::sums + PART * 16384 + (i * 128 + at.index % 128) * 16);
    if (repeat > 0) {
      float before[4];
      get_four(before, own);
      DELTATUNE_UNROLL
      for (int j = 0; j < 4; ++j) dq[4 * i + j] += before[j];
    }
    if (repeat + 1 < repeats) put_four(own, dq + 4 * i);
  }
  DELTATUNE_UNROLL
  for (int side = 0; side < 2; ++side) {
    const int i = own_row(at, side);
    const float first = quad_sum(dots[side]), last = quad_sum(dots[2 + side]), rate = quad_sum(sums.rates[side]);
    if (at.lane % 4 != 0) continue;
    room.floats(Memory::before_sums)[i * 4 + PART] = first;
    room.floats(Memory::after_sums)[i * 4 + PART] = last;
    room.floats(Memory::rate_sums)[i * 4 + PART] = rate;
  }
  const float dot = lane_sum(sums.dot);
  if (at.lane == 0) room.floats(Memory::dots)[PART * 4 + at.group % 4] = dot;
}

// Turns a unit's sums of pairs into weights, and writes what their products with `scores`, those of q or k with k, add
// to the gradients of the gates. Tiles right of the diagonal become zeros.
template <int DV, int PART>
inline void weigh_pairs(Room room, GradientTables<DV> tables, thread float* pairs, const thread float (&scores)[32],
                        Place at) {
  using Memory = HopperGradientMemory<DV>;
  const int warp = at.group % 4;
  const Decay<64> decay = tables.decay();
  threadgroup const float* rate = tables.rate();
  threadgroup float* diagonal = room.floats(Memory::diagonal + PART * Memory::diagonal_bytes);
  threadgroup float* row_sums = room.floats(Memory::row_sums + PART * 1024);
  threadgroup float* column_sums = room.floats(Memory::column_sums + PART * 1024);
  const int rows[2] = {own_row(at, 0), own_row(at, 1)};
  const float own_rate[2] = {-rate[rows[0]], -rate[rows[1]]};
  DELTATUNE_UNROLL
  for (int tile = 0; tile < 4; ++tile) {
    if (tile > warp) {
      DELTATUNE_UNROLL
      for (int e = tile * 8; e < tile * 8 + 8; ++e) pairs[e] = 0.0f;
      continue;
    }
    const float middle = decay.between(warp, tile);
    float terms[8];
    DELTATUNE_UNROLL
    for (int e = 0; e < 8; ++e) {
      const int i = rows[own_side(e)], j = tile * 16 + own_column(at, e);
      const float d = rate[j] * decay.at(warp == tile, i, j, middle), x = pairs[tile * 8 + e];
      pairs[tile * 8 + e] = PART == 0 ? d * x : i > j ? own_rate[own_side(e)] * d * x : 0.0f;
      terms[e] = pairs[tile * 8 + e] * scores[tile * 8 + e];
    }
    if (tile == warp) {
      DELTATUNE_UNROLL
      for (int e = 0; e < 8; ++e) diagonal[rows[own_side(e)] * 17 + own_column(at, e)] = terms[e];
      continue;
    }
    DELTATUNE_UNROLL
    for (int side = 0; side < 2; ++side) {
      const float sum = quad_sum(terms[2 * side] + terms[2 * side + 1] + terms[4 + 2 * side] + terms[5 + 2 * side]);
      if (at.lane % 4 == 0) row_sums[rows[side] * 4 + tile] = sum;
    }
    DELTATUNE_UNROLL
    for (int e = 0; e < 8; ++e) {
      if (own_side(e) != 0) continue;
      float sum = terms[e] + terms[e + 2];
      sum += lane_exchange(sum, 4);
      sum += lane_exchange(sum, 8);
      sum += lane_exchange(sum, 16);
      if (at.lane < 4) column_sums[(tile * 16 + own_column(at, e)) * 4 + warp] = sum;
    }
  }
}

// Adds the weights of all units of an item but the last to those in shared memory, and writes the last one's sum as
// two planes of bf16. A warp's sums in fp32 take the memory of its own rows of the planes.
template <typename In, int DV, int PART>
inline void sum_weights(Room room, thread float* weights, int repeat, int repeats, Place at) {
  using Memory = HopperGradientMemory<DV>;
  const int warp = at.group % 4, planes = Memory::weights + PART * 16384;
  DELTATUNE_UNROLL
  for (int i = 0; repeats > 1 && i < 8; ++i) {
    if (i / 2 > warp) continue;
    threadgroup float* own = room.floats(planes + i / 4 * 8192 + warp * 2048 + i % 4 * 512 + at.lane * 16);
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
  for (int i = 0; i < 32; i += 2) {
    const int row = own_row(at, own_side(i));
    const auto to = room.memory + planes + row * 128 + ((i / 4 ^ row) & 7) * 16 + at.lane % 4 * 4;
    const unsigned high = PairOf<In>::of(weights[i], weights[i + 1]);
    put_pair(to, high);
    put_pair(to + 8192, PairOf<In>::of(weights[i] - float_of(high << 16), weights[i + 1] - float_of(high & 0xffff0000u)));
  }
}

// Adds the products of an item's weights with q and k to dq and dk.
template <typename In, int DV, int PART>
inline void add_weighted(Room room, thread float (&dq)[32], thread float (&dk)[32], Place at) {
  using Memory = HopperGradientMemory<DV>;
  using Half = Products<In, 64>;
  const int warp = at.group % 4;
  const unsigned of_y = room.place + Memory::weights, of_right = of_y + 16384;
  DELTATUNE_UNROLL
  for (int t = 0; t < 4; ++t) {
    unsigned y[2][4], y_turned[2][4], right[2][4], right_turned[2][4];
    DELTATUNE_UNROLL
    for (int plane = 0; plane < 2; ++plane) {
      load_left(y[plane], of_y + plane * 8192, warp * 16, t * 16, at);
      load_left_turned(y_turned[plane], of_y + plane * 8192, t * 16, warp * 16, at);
      load_left(right[plane], of_right + plane * 8192, warp * 16, t * 16, at);
      load_left_turned(right_turned[plane], of_right + plane * 8192, t * 16, warp * 16, at);
    }
    DELTATUNE_UNROLL
    for (int plane = 0; plane < 2; ++plane) {
      register_fence(y[plane]);
      register_fence(y_turned[plane]);
      register_fence(right[plane]);
      register_fence(right_turned[plane]);
    }
    register_fence(dq);
    register_fence(dk);
    products_start();
    const unsigned rows = opaque((room.place & 0x3ffff) / 16 + t * 128);
    const unsigned long long queries = columns_operand(rows + (Memory::q + PART * 8192) / 16, 8192);
    const unsigned long long keys = columns_operand(rows + (Memory::k + PART * 8192) / 16, 8192);
    DELTATUNE_UNROLL
    for (int plane = 1; plane >= 0; --plane) {
      Half::columns(dq, y[plane], keys);
      Half::columns(dk, y_turned[plane], queries);
      Half::columns(dk, right[plane], keys);
      Half::columns(dk, right_turned[plane], keys);
    }
    products_sent();
    products_wait<0>();
    register_fence(dq);
    register_fence(dk);
  }
}

// Computes half of the columns of dq and dk, and what the sums of the gates need.
template <typename In, int DV, int HK, int HV, int BLOCKS, int PART, typename OQ, typename OK>
inline void compute_items(Place at, Room room, GradientBarriers barriers, int length, int items, int chunks, OQ dq_out,
                          OK dk_out) {
  using Memory = HopperGradientMemory<DV>;
  constexpr int slices = DV / 16, repeats = HV / HK;
  float dq[32], dk[32];
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
        add_slice<In, DV, PART>(room, stage, s, sums, at);
        release(barriers.read(stage), at);
        if (++stage == Memory::stages) stage = 0, ++use;
      }
      const GradientTables<DV> tables{room, unit};
      if (repeat == 0) mbarrier_wait(barriers.keys(), round);
      mbarrier_wait(barriers.tables(unit), unit / 2);
      if (unit > 0) mbarrier_wait(barriers.sums_read(), unit - 1);
      add_columns_of_keys<In, DV, PART>(room, tables, sums, dq, dk, repeat, repeats, at);
      float scores[32];
      register_fence(scores);
      products_start();
      multiply_rows<In, 64, 128>(scores, room.place + (PART == 0 ? Memory::q : Memory::k), 8192,
                                 room.place + Memory::k, 8192);
      products_sent();
      products_wait<0>();
      register_fence(scores);
      weigh_pairs<DV, PART>(room, tables, sums.pairs, scores, at);
      release(barriers.sums(), at);
      if (repeat == 0 && round > 0) mbarrier_wait(barriers.item(), round - 1);
      sum_weights<In, DV, PART>(room, sums.pairs, repeat, repeats, at);
    }
    named_barrier<256>();
    add_weighted<In, DV, PART>(room, dq, dk, at);
    release(barriers.item(), at);
    const GradientItem item = item_at<HK>(number, chunks);
    DELTATUNE_UNROLL
    for (int side = 0; side < 2; ++side) {
      const int i = item.n * 64 + own_row(at, side);
      if (i >= length) continue;
      const long to = (((long)item.row * length + i) * HK + item.head) * 128 + PART * 64 + at.lane % 4 * 2;
      DELTATUNE_UNROLL
      for (int j = 0; j < 8; ++j) {
        put_pair(dq_out + to + j * 8, PairOf<In>::of(dq[4 * j + 2 * side], dq[4 * j + 2 * side + 1]));
        put_pair(dk_out + to + j * 8, PairOf<In>::of(dk[4 * j + 2 * side], dk[4 * j + 2 * side + 1]));
      }
    }
  }
}

// Computes what gated_delta_gradients does, from the same inputs. The grid is at most BLOCKS blocks.
template <typename In, int DV, int HK, int HV, int BLOCKS, bool MASKED, bool SEGMENTED, typename PQ, typename PK,
          typename PL, typename PM, typename PZ, typename PF, typename PT, typename PY, typename OQ, typename OK>
inline void gated_delta_hopper_gradients(Place at, threadgroup char* memory, int length, int batch, PQ q, PK k, PL log_g,
                                         PM mask, PZ segments, PF factors, PT states, PT d_states, PF u, PF d_right,
                                         PY dy, OQ dq, OK dk, GLOBAL float* d_log_g, GLOBAL float* d_beta) {
  using Memory = HopperGradientMemory<DV>;
  static_assert(DV % 16 == 0, "a stage has 16 rows");
  const Room room = room_of(memory);
  const GradientBarriers barriers{room.place + Memory::barriers};
  const int chunks = (length + 63) / 64, items = batch * chunks * HK;
  barriers.start(at);
  at.group = uniform(at.group);
  if (at.group < 4) {
    fewer_registers<56>();
    if (at.group < 2)
      load_items<In, DV, HK, HV, BLOCKS, MASKED>(at, room, barriers, length, items, chunks, q, k, mask, states, d_states,
                                                 u, d_right, dy);
    else
      sum_gates<In, DV, HK, HV, BLOCKS, MASKED, SEGMENTED>(at, room, barriers, length, items, chunks, log_g, mask,
                                                           segments, factors, d_log_g, d_beta);
    return;
  }
  more_registers<224>();
  if (at.group < 8)
    compute_items<In, DV, HK, HV, BLOCKS, 0>(at, room, barriers, length, items, chunks, dq, dk);
  else
    compute_items<In, DV, HK, HV, BLOCKS, 1>(at, room, barriers, length, items, chunks, dq, dk);
}
