// The kernel of gradients.h on Hopper, for bf16, heads of 128 x DV and chunks of 64 positions. Letters are those of
// chunk.h.
// A block has four groups of four warps. Three of them (teams) multiply 64 positions with all columns at once, and each
// has the products of one left operand: team 0 those of dY, which give dq and the weights of the pairs of P (KIND 0),
// team 1 those of R, which give the weights of N (KIND 1) and a part of dk, and team 2 those of u, the other part. So
// each operand is read from shared memory once. Team 2 also makes the low parts of u for the other teams. Of the fourth
// group one warp copies 16 rows of DV at a time to shared memory, one copies the inputs, and two add up the gradients of
// log_g and beta and write dq and dk.
// A block takes one item of work after another, which is a chunk of a key head with its HV / HK value heads; a unit is
// one of these value heads. dq is summed over the value heads in registers, dk and the weights of the pairs in shared
// memory, so that the products of the weights with q and k are computed once per item.

// A lane's share of <dS, S> in 16 rows and columns, which it has as left operands, with their tails: those of even
// columns in the first byte of each, of odd columns in the second. It is NaN if an element was rounded to zero.
inline float kept_products(const thread unsigned (&a)[4], const thread unsigned (&b)[4], unsigned tail_a,
                           unsigned tail_b) {
  // The upper bit of each tail is turned: then the number to add is tail * 0x4000 - 0x6000.
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

// The operands of a stage: 16 rows of the states and of their gradients, and those of u in two parts.
template <int DV>
struct GradientStage {
  using Memory = HopperGradientMemory<DV>;
  unsigned tile;
  inline unsigned place(int offset) const { return opaque((tile & 0x3ffff) / 16) + offset / 16; }
  inline unsigned long long state() const { return cores_operand(place(Memory::state), 2048, 128); }
  inline unsigned long long d_state() const { return cores_operand(place(Memory::d_state), 2048, 128); }
  inline unsigned long long u() const { return cores_operand(place(Memory::u), 1024, 128); }
  inline unsigned long long u_low() const { return cores_operand(place(Memory::u_low), 1024, 128); }
  // The address that a lane names for a warp's positions, with their transposes in the rows of cores at `offset`.
  inline unsigned own_cores(int offset, Place at) const {
    return core_place(tile + offset, 8, at.lane % 8 + at.lane / 16 * 8, at.group % 4 * 2 + at.lane / 8 % 2);
  }
  // The left operand of these positions: high parts, and low parts made of the bits that follow.
  inline void load_positions(thread unsigned (&high)[4], thread unsigned (&low)[4], Room room, int offset, int bits,
                             Place at) const {
    load_turned_parts(high, own_cores(offset, at));
    low_parts(low, high, get_pair(room.memory + (tile - room.place) + bits + (at.group % 4 * 32 + at.lane) * 4));
  }
  // Hands low parts of u over, `if` the stage has none yet.
  inline void put_low_parts(const thread unsigned (&low)[4], unsigned mbarrier, bool on, Place at) const {
    put_turned_parts_if(on, own_cores(Memory::u_low, at), low);
    copies_fence();
    group_barrier();
    report(mbarrier, at, on);
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
// states, which are added to `sums`; and the products of u with the gradients of the states (KIND 2), which hands u's
// low parts over if it comes `first`. Products with the same sums are apart, for one waits for the other. KIND 0 and 1
// compute a lane's share of <dS, S> meanwhile.
template <typename In, int DV, int KIND>
inline void start_slice(thread SliceOperands& x, Room room, GradientStage<DV> stage, int s, unsigned widened, int use,
                        bool first, thread float (&pairs)[32], thread float (&sums)[64], Place at) {
  using Memory = HopperGradientMemory<DV>;
  unsigned a[4], b[4], tails[2];
  if (KIND == 0) {
    const int row = at.group % 4 * 16 + at.lane % 16;
    load_parts(x.left, dy_piece_place<DV>(room.place + Memory::dy, row, s * 2 + at.lane / 16));
  } else {
    stage.load_positions(x.left, x.low, room, KIND == 1 ? Memory::right : Memory::u,
                         KIND == 1 ? Memory::right_bits : Memory::u_bits, at);
    if (KIND == 2) stage.put_low_parts(x.low, widened, first, at);
    register_fence(x.low);
  }
  if (KIND < 2) kept_tile<DV>(room, stage.tile, KIND, at).load(a, b, tails, at);
  register_fence(x.left);
  products_start();
  if (KIND == 2) {
    KeyProducts<In>::columns(sums, x.low, stage.d_state());
    KeyProducts<In>::columns(sums, x.left, stage.d_state());
  } else {
    if (KIND == 1) {
      KeyProducts<In>::columns(sums, x.low, stage.state());
      PairProducts<In>::columns(pairs, x.low, stage.u());
    }
    KeyProducts<In>::columns(sums, x.left, stage.state());
    PairProducts<In>::columns(pairs, x.left, stage.u());
    // The low parts are made meanwhile.
    mbarrier_wait(widened, use);
    PairProducts<In>::columns(pairs, x.left, stage.u_low());
  }
  products_sent();
  if (KIND < 2) x.share = kept_products(a, b, tails[0], tails[1]);
}

// Multiplies a team's sums by a factor for each row, and gives use(j, products) those of column group j, two of either
// row. Writes the inner products of the rows with those of q or k at `operand`, every `stride` numbers from `to` on.
template <typename Use>
inline void use_columns_of_keys(Room room, int operand, const thread float (&sums)[64],
                                const thread float (&factors)[2], threadgroup float* to, int stride, Place at,
                                Use use) {
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

// Where a team has come to in the stages, units and items of its block; and of how many stages from there on team 2 has
// made the low parts of u already.
template <int DV>
struct GradientProgress {
  int stage, use, unit, round, ahead;
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
                                  barriers.widened(stage), use, ahead == 0, pairs, sums, at);
        if (KIND == 2) ahead -= ahead > 0;
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
  // Ends a stage after its products.
  template <int KIND>
  static inline void end_slice(thread SliceOperands& x, Room room, GradientBarriers barriers, int stage,
                               thread float& dot, Place at) {
    register_fence(x.left);
    if (KIND > 0) register_fence(x.low);
    const unsigned place = room.place + stage * HopperGradientMemory<DV>::stage;
    if (KIND < 2) dot += kept_tile<DV>(room, place, KIND, at).checked(x.share, at);
    release(barriers.read(stage), at);
  }
  // Waits, and meanwhile makes the low parts of u in stages that have arrived already.
  inline void wait_widening(Room room, GradientBarriers barriers, unsigned mbarrier, int number, Place at) {
    using Memory = HopperGradientMemory<DV>;
    while (!mbarrier_over(mbarrier, number)) {
      const bool around = stage + ahead >= Memory::stages;
      const int next = around ? stage + ahead - Memory::stages : stage + ahead;
      if (ahead == Memory::stages || !mbarrier_over(barriers.arrived(next), use + around)) continue;
      mbarrier_wait(barriers.arrived(next), use + around);
      unsigned high[4], low[4];
      const GradientStage<DV> found{room.place + next * Memory::stage};
      found.load_positions(high, low, room, Memory::u, Memory::u_bits, at);
      found.put_low_parts(low, barriers.widened(next), true, at);
      ++ahead;
    }
    mbarrier_wait(mbarrier, number);
  }
  // Waits for the operands of the end of a unit, and until the sums of the unit before have been read.
  inline void begin_end(GradientBarriers barriers, int repeat) const {
    if (repeat == 0) {
      mbarrier_wait(barriers.keys(), round);
      copies_fence();
    }
    mbarrier_wait(barriers.tables(unit), unit / 2);
    if (unit > 0) mbarrier_wait(barriers.sums_read(), unit - 1);
  }
};

// A lane's own place among the sums of dk, to which team 1 adds before team 2.
template <int DV>
inline threadgroup float* key_sums(Room room, Place at) {
  return room.floats(HopperGradientMemory<DV>::key_sums) + at.index % 128 * 4;
}
// Hands a warp's 16 rows of dq or dk over to the groups that write them.
template <typename In, int DV>
inline void hand_rows_over(Room room, int rows, const thread float (&x)[64], unsigned mbarrier, Place at) {
  unsigned packed[32];
  pack_rows<In, 64>(packed, x);
  DELTATUNE_UNROLL
  for (int m = 0; m < 8; ++m)
    put_parts(room.place + rows + row_piece(at.group % 4 * 16 + at.lane % 16, 2 * m + at.lane / 16), packed + 4 * m);
  release(mbarrier, at);
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

// Teams 0 and 1 of a block: KIND 0 computes dq, KIND 1 the terms of R in dk, and both the weights of their pairs.
template <typename In, int DV, int HK, int HV, int KIND>
inline void weigh_items(Place at, Room room, GradientBarriers barriers, int items) {
  using Memory = HopperGradientMemory<DV>;
  constexpr int repeats = HV / HK;
  GradientProgress<DV> progress{0, 0, 0, 0, 0};
  const GradientItems<DV> next{room, barriers};
  float dq[64];
  for (int number = at.x; number < items; number = next.after(progress.round++)) {
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
      const float factors[2] = {tables.template factor<KIND>(own_row(here, 0)),
                                tables.template factor<KIND>(own_row(here, 1))};
      put_dots<DV>(room, KIND, dot, here);
      threadgroup float* found = room.floats(Memory::before_sums) + KIND;
      if (KIND == 0) {
        use_columns_of_keys(room, Memory::q, sums, factors, found, 2, here, [&](int j, thread float* products) {
          DELTATUNE_UNROLL
          for (int i = 0; i < 4; ++i) dq[4 * j + i] += products[i];
        });
      } else {
        if (progress.unit > 0) mbarrier_wait(barriers.keys_of_u(), progress.unit - 1);
        if (repeat == 0 && progress.round > 0) mbarrier_wait(barriers.rows_written(), progress.round - 1);
        use_columns_of_keys(room, Memory::k, sums, factors, found, 2, here, [&](int j, thread float* products) {
          add_shared(key_sums<DV>(room, here) + j * 512, products, repeat > 0);
        });
        release(barriers.keys_of_right(), at);
      }
      float scores[32];
      multiply_by_keys<In, DV, KIND>(room, scores);
      weigh_pairs<DV, KIND>(room, tables, pairs, scores, hidden(at));
      release(barriers.sums(), at);
      if (repeat == 0 && progress.round > 0) mbarrier_wait(barriers.planes_read(), progress.round - 1);
      sum_weights<In, DV, KIND>(room, pairs, repeat, repeats, hidden(at));
      if (repeat + 1 < repeats) continue;
      release(barriers.planes(KIND), at);
      if (KIND == 0) add_weighted_keys<In, DV>(room, dq, pairs);
    }
    release(barriers.item(), at);
    if (KIND == 0) {
      // Rows of dq take the place of sums of dk, which team 2 has read.
      mbarrier_wait(barriers.keys_of_u(), progress.unit - 1);
      hand_rows_over<In, DV>(room, HopperGradientMemory<DV>::dq_rows, dq, barriers.rows(0), hidden(at));
    }
  }
}

// Team 2 of a block: it computes dk. The other teams wait for its stages, so its end of an item must be short.
template <typename In, int DV, int HK, int HV>
inline void sum_keys(Place at, Room room, GradientBarriers barriers, int items) {
  using Memory = HopperGradientMemory<DV>;
  constexpr int repeats = HV / HK;
  GradientProgress<DV> progress{0, 0, 0, 0, 0};
  const GradientItems<DV> next{room, barriers};
  float pairs[32], sums[64];
  for (int number = at.x; number < items; number = next.after(progress.round++)) {
    _Pragma("unroll 1")
    for (int repeat = 0; repeat < repeats; ++repeat, ++progress.unit) {
      float dot = 0.0f;
      clear_floats(sums);
      progress.template add_slices<In, 2>(room, barriers, pairs, sums, dot, at);
      progress.begin_end(barriers, repeat);
      const GradientTables<DV> tables{room, progress.unit};
      const Place here = hidden(at);
      const float factors[2] = {tables.template factor<2>(own_row(here, 0)),
                                tables.template factor<2>(own_row(here, 1))};
      const bool last = repeat + 1 == repeats;
      progress.wait_widening(room, barriers, barriers.keys_of_right(), progress.unit, here);
      use_columns_of_keys(room, Memory::k, sums, factors, room.floats(Memory::after_sums), 1, here,
                          [&](int j, thread float* products) {
                            threadgroup float* place = key_sums<DV>(room, here) + j * 512;
                            get_four(sums + 4 * j, place);
                            DELTATUNE_UNROLL
                            for (int i = 0; i < 4; ++i) sums[4 * j + i] += products[i];
                            if (!last) put_four(place, sums + 4 * j);
                          });
      release(barriers.keys_of_u(), at);
      release(barriers.sums(), at);
    }
    progress.wait_widening(room, barriers, barriers.planes(0), progress.round, hidden(at));
    add_weighted_queries<In, DV>(room, sums, hidden(at));
    mbarrier_wait(barriers.planes(1), progress.round);
    add_weighted_neighbours<In, DV>(room, sums, hidden(at));
    release(barriers.planes_read(), at);
    release(barriers.item(), at);
    hand_rows_over<In, DV>(room, HopperGradientMemory<DV>::dk_rows, sums, barriers.rows(1), hidden(at));
  }
}

// The registers of a thread of each group: of the one that loads and sums gates, and of the teams.
enum GradientRegisters : int { GRADIENT_LOADER = 40, GRADIENT_OF_Y = 216, GRADIENT_OF_R = 144, GRADIENT_OF_U = 112 };
static_assert(GRADIENT_LOADER + GRADIENT_OF_Y + GRADIENT_OF_R + GRADIENT_OF_U <= 4 * 128,
              "groups share out what the block starts with");

// Computes the outputs of gated_delta_gradients, from the same inputs and `taken`, which is 0. The grid is BLOCKS
// blocks, or as many as there are items.
template <typename In, int DV, int HK, int HV, int BLOCKS, bool MASKED, bool SEGMENTED, typename PQ, typename PK,
          typename PL, typename PM, typename PZ, typename PF, typename PT, typename PY, typename OQ, typename OK,
          typename B>
inline void gated_delta_hopper_gradients(Place at, threadgroup char* memory, int length, int batch, PQ q, PK k,
                                         PL log_g, PM mask, PZ segments, PF factors, PT states, PT d_states, PF u,
                                         PF d_right, PY dy, GLOBAL int* taken, OQ dq, OK dk, GLOBAL float* d_log_g,
                                         GLOBAL B* d_beta) {
  using Memory = HopperGradientMemory<DV>;
  static_assert(DV % 32 == 0, "stages have 16 rows, and two are added in turn");
  const Room room = room_of(memory);
  const GradientBarriers barriers{room.place + Memory::barriers};
  const int chunks = (length + 63) / 64, items = batch * chunks * HK;
  barriers.start(at);
  at.group = uniform(at.group);
  if (at.group < 4) {
    fewer_registers<GRADIENT_LOADER>();
    if (at.group == 0)
      load_saved<DV, HK, HV, BLOCKS>(at, room, barriers, items, chunks, states, d_states, u, d_right, taken);
    else if (at.group == 1)
      load_inputs<In, DV, HK, HV, MASKED>(at, room, barriers, length, items, chunks, q, k, mask, dy);
    else
      sum_gates<In, DV, HK, HV, MASKED, SEGMENTED>(at, room, barriers, length, items, chunks, log_g, mask, segments,
                                                   factors, dq, dk, d_log_g, d_beta);
  } else if (at.group < 8) {
    more_registers<GRADIENT_OF_Y>();
    weigh_items<In, DV, HK, HV, 0>(at, room, barriers, items);
  } else if (at.group < 12) {
    more_registers<GRADIENT_OF_R>();
    weigh_items<In, DV, HK, HV, 1>(at, room, barriers, items);
  } else {
    fewer_registers<GRADIENT_OF_U>();
    sum_keys<In, DV, HK, HV>(at, room, barriers, items);
  }
}
