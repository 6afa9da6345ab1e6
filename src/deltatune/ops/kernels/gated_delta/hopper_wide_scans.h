// The scans of scan.h and reverse.h on Hopper for calls of many heads, with the same arguments and results as those of
// hopper_scans.h. There a block does 32 rows of a state, so that a few heads fill the GPU. Here it does 64, which takes
// less of the GPU for each row.
//
// A block has three teams of four warps. One loads chunks. One goes through the chunks: it holds 64 rows of a state in
// its registers, transposed as everything that it computes of a chunk: rows of DV by positions or by keys. Each result
// is in registers in the form of the next product's left operand. This team hands each state and each u, in bf16, to
// the third team, which computes y or dv from them and writes everything to device memory.
// A result in fp32 that is multiplied again is a pair of bf16, a high and a low part (cuda.h).

// The shared memory of a scan's block: for each stage K and Q in tiles of 64 x 64, Z, rows of V or dY with padding, P,
// and the factors; then a state and its tails as cores. When Z and V are read, u or R of the chunk takes their place,
// and rows of y or dv on their way out take that of P.
template <int DK, int STAGES>
struct HopperWideScanMemory {
  static constexpr constant int k = 0, q = k + 64 * DK * 2, solve = q + 64 * DK * 2, values = solve + triangle_bytes;
  static constexpr constant int scores = values + 64 * 72 * 2, factors = scores + triangle_bytes;
  static constexpr constant int stage = (factors + 3 * 64 * 4 + 1023) / 1024 * 1024;
  static constexpr constant int state = STAGES * stage, tails = state + 64 * DK * 2;
  static constexpr constant int barriers = tails + 4 * 512;
  static constexpr constant int bytes = barriers + 96 + 1024;
};

using ScanBarriers = BarriersOfScan<1>;

// Products of a team. Rows of a state times the transpose of 64 positions of K or Q: d [64, 64] = a b^T, or added.
// Results by positions are two of 32 positions each, for the tensor cores skip half of a triangle so.
template <int DK>
inline void times_positions(thread float (&d)[32], const thread unsigned (&a)[DK / 4], unsigned b, bool onto) {
  const unsigned place = opaque((b & 0x3ffff) >> 4);
  DELTATUNE_UNROLL
  for (int m = 0; m < DK / 16; ++m) {
    DELTATUNE_UNROLL
    for (int side = 0; side < 2; ++side)
      Products<bf16, 32>::held_rows(d + 16 * side, a + 4 * m,
                                    rows_operand(place + (side * 4096 + m / 4 * 8192 + m % 4 * 32) / 16),
                                    onto || m > 0);
  }
}
// Does so for a state in shared memory, as cores.
template <int DK>
inline void state_times_positions(thread float (&d)[32], unsigned state, unsigned b) {
  const unsigned left_place = opaque((state & 0x3ffff) >> 4), place = opaque((b & 0x3ffff) >> 4);
  DELTATUNE_UNROLL
  for (int m = 0; m < DK / 16; ++m) {
    DELTATUNE_UNROLL
    for (int side = 0; side < 2; ++side)
      Products<bf16, 32>::rows(d + 16 * side, cores_operand(left_place + m * 16, 128, DK * 16),
                               rows_operand(place + (side * 4096 + m / 4 * 8192 + m % 4 * 32) / 16), m > 0);
  }
}
// Adds rows by positions times K or Q to rows of a state [64, DK].
template <int DK>
inline void add_by_keys(thread float (&d)[DK / 2], const thread unsigned (&a)[16], unsigned b) {
  const unsigned place = opaque((b & 0x3ffff) >> 4);
  DELTATUNE_UNROLL
  for (int j = 0; j < 4; ++j)
    Products<bf16, DK>::columns(d, a + 4 * j, columns_operand(place + j * 128, 8192));
}
// Adds rows by positions [64, 64] times the transpose of a triangle (positions j to positions i >= j) or, unless
// TURNED, times itself (positions i to positions j <= i); or sets d to it, unless `onto`. LOW takes the triangle's low
// parts.
template <bool TURNED, bool LOW>
inline void add_times_cores(thread float (&d)[32], const thread unsigned (&a)[16], unsigned triangle,
                            bool onto = true) {
  constexpr int summed = TURNED == LOW ? core_row : core_bytes, kept = TURNED == LOW ? core_bytes : core_row;
  const unsigned place = opaque((triangle & 0x3ffff) >> 4);
  DELTATUNE_UNROLL
  for (int n = 0; n < 4; ++n) {
    DELTATUNE_UNROLL
    for (int side = 0; side < 2; ++side) {
      if (TURNED ? n > 2 * side + 1 : n < 2 * side) continue;
      const int i = TURNED ? 4 * side : 2 * n, j = TURNED ? 2 * n : 4 * side;
      const unsigned long long b = cores_operand(place + (LOW ? core_low(i, j) : core_high(i, j)) / 16, summed, kept);
      const bool added = onto || n > (TURNED ? 0 : 2 * side);
      if (TURNED) Products<bf16, 32>::held_rows(d + 16 * side, a + 4 * n, b, added);
      else Products<bf16, 32>::columns(d + 16 * side, a + 4 * n, b, added);
    }
  }
}
// Adds (high + low) times a triangle, the smallest products first. Low times low is left out, as in cuda.h.
template <bool TURNED>
inline void add_times_triangle(thread float (&d)[32], const thread unsigned (&high)[16],
                               const thread unsigned (&low)[16], unsigned triangle) {
  add_times_cores<TURNED, true>(d, high, triangle);
  add_times_cores<TURNED, false>(d, low, triangle);
  add_times_cores<TURNED, false>(d, high, triangle);
}

// Reads the numbers of a lane's positions: two for every four elements of a team's result [64, 64].
inline void get_positions(thread float (&to)[16], threadgroup const float* from, int lane) {
  DELTATUNE_UNROLL
  for (int j = 0; j < 8; ++j) get_two(to + 2 * j, from + j * 8 + lane % 4 * 2);
}
// The number among these of the first of elements 2 i and 2 i + 1.
inline constexpr int pair_of(int i) {
  return i / 2 * 2;
}

// Returns, for two tiles of a state, the two bits of each element that follow those of its bf16 (metal.h explains
// them): a lane's tails take two bytes per tile of 16 columns, those of even elements in the first.
inline unsigned tails_of(const thread float* x) {
  unsigned tails = 0;
  DELTATUNE_UNROLL
  for (int i = 0; i < 4; ++i) {
    const unsigned first = second_bytes_of(x[2 * i], x[2 * i + 1]);
    const unsigned second = second_bytes_of(x[8 + 2 * i], x[9 + 2 * i]);
    tails |= (lower_halves(first, second) & 0xc0c0c0c0u) >> 2 * i;
  }
  return tails;
}
// Writes a left operand, 16 rows by 16 columns, as cores in shared memory, or reads it. The next row of cores is `row`
// bytes further.
inline unsigned lane_core(unsigned cores, int row, int lane) {
  return cores + (lane >> 3 & 1) * row + (lane >> 4) * 128 + (lane & 7) * 16;
}
inline void put_cores(unsigned to, int row, const thread unsigned* operand, int lane) {
  put_parts(lane_core(to, row, lane), operand);
}
// Hands a warp's 16 rows of a state and their tails over, when the state before has been read.
template <typename Memory, int DK>
inline void hand_state_over(Room room, ScanBarriers barriers, int step, const thread unsigned (&rows)[DK / 4],
                            const thread float (&exact)[DK / 2], Place at) {
  const int warp = at.group % 4;
  if (step > 0) mbarrier_wait(barriers.state_read(), step - 1);
  DELTATUNE_UNROLL
  for (int m = 0; m < DK / 16; ++m)
    put_cores(room.place + Memory::state + warp * 32 * DK + m * 256, DK * 16, rows + 4 * m, at.lane);
  DELTATUNE_UNROLL
  for (int m = 0; m < DK / 16; m += 2)
    put_pair(room.memory + Memory::tails + warp * 512 + at.lane * 16 + 2 * m, tails_of(exact + 8 * m));
  copies_fence();
  release(barriers.state(0), at);
}
// Hands a warp's 16 rows of u or R over, in place of Z and V, which all warps of the team have read.
template <typename Memory>
inline void hand_chunk_over(unsigned stage, ScanBarriers barriers, int step, const thread float (&x)[32], Place at) {
  const unsigned to = stage + Memory::solve + at.group % 4 * 2048;
  named_barrier<128, 1>();
  DELTATUNE_UNROLL
  for (int j = 0; j < 4; ++j) {
    unsigned high[4], low[4];
    DELTATUNE_UNROLL
    for (int i = 0; i < 4; ++i) split_pair(high[i], low[i], x[8 * j + 2 * i], x[8 * j + 2 * i + 1]);
    put_cores(to + j * 256, 1024, high, at.lane);
    put_cores(to + 8192 + j * 256, 1024, low, at.lane);
  }
  copies_fence();
  release(barriers.chunk(step), at);
}

// Sends a state and its tails.
template <typename Memory, int DK, int DV>
inline void send_state(OwnRows<DK, DV, 64> own, int n, Room room) {
  own.send_state(n, room.place + Memory::state);
  send_block(own.tails(n), room.place + Memory::tails, 4 * 512);
}

// Calls use(i, first, second) for each pair of elements 2 i and 2 i + 1 of a warp's 16 rows of u or R, which are in
// shared memory.
template <typename Memory, typename Use>
inline void each_pair_of_chunk(unsigned stage, Place at, Use use) {
  const unsigned from = lane_core(stage + Memory::solve + at.group % 4 * 2048, 1024, at.lane);
  DELTATUNE_UNROLL
  for (int j = 0; j < 4; ++j) {
    unsigned high[4], low[4];
    load_parts(high, from + j * 256);
    load_parts(low, from + 8192 + j * 256);
    DELTATUNE_UNROLL
    for (int i = 0; i < 4; ++i)
      use(4 * j + i, first_of(high[i]) + first_of(low[i]), second_of(high[i]) + second_of(low[i]));
  }
}

// Writes the bits that follow the high parts of a warp's 16 rows of u or R, for 16 positions at a time.
template <int DK, int DV>
inline void write_chunk_bits(OwnRows<DK, DV, 64> own, int n, unsigned chunk, Place at) {
  const int strip = at.group % 4;
  const unsigned from = chunk + strip * 2048 + (at.lane >> 4) * 1024 + (at.lane >> 3 & 1) * 128 + (at.lane & 7) * 16;
  DELTATUNE_UNROLL
  for (int j = 0; j < 4; ++j) {
    unsigned high[4], low[4];
    load_turned_parts(high, from + j * 256);
    load_turned_parts(low, from + 8192 + j * 256);
    own.write_bits(n, strip, j, at.lane, low_bits(high, low));
  }
}

// A warp's 16 columns of the rows at `offset` of a stage.
template <typename Memory>
inline threadgroup bf16* own_columns(Room room, int stage, int offset, int strip) {
  return reinterpret_cast<threadgroup bf16*>(room.memory + stage * Memory::stage + offset) + strip * 16;
}
// The address that a lane names to load or store the transpose of 16 positions, from 16 j on, of a group's 16 columns.
inline unsigned turned_place(threadgroup const bf16* rows, int j, int lane) {
  return shared_place(rows + (16 * j + (lane & 7) + ((lane & 16) >> 1)) * 72 + (lane & 8));
}
// Loads the transpose of a group's 16 columns of v or dy, as left operands.
inline void load_turned(thread unsigned (&to)[16], threadgroup const bf16* rows, int lane) {
  DELTATUNE_UNROLL
  for (int j = 0; j < 4; ++j) {
    unsigned part[4];
    load_turned_parts(part, turned_place(rows, j, lane));
    DELTATUNE_UNROLL
    for (int i = 0; i < 4; ++i) to[4 * j + i] = part[i];
  }
}
// Writes the group's 16 columns of rows of y or dv, by way of shared memory.
inline void write_positions(threadgroup bf16* rows, const thread unsigned (&x)[16], GLOBAL bf16* to, long row_stride,
                            int left, int lane) {
  DELTATUNE_UNROLL
  for (int j = 0; j < 4; ++j) put_turned_parts(turned_place(rows, j, lane), x + 4 * j);
  group_barrier();
  DELTATUNE_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int row = i * 16 + lane / 2, column = lane % 2 * 8;
    if (row < left) put_piece(to + row * row_stride + column, rows + row * 72 + column, true);
  }
}

// Writes y or dv of a step's chunk, its first row to `to`, and ends the step for the team that writes.
template <typename Memory, int STAGES>
inline void write_and_release(Place at, Room room, ScanBarriers barriers, int step, const thread unsigned (&x)[16],
                              GLOBAL bf16* to, long row_stride, int left) {
  const int strip = at.group % 4;
  write_positions(own_columns<Memory>(room, step % STAGES, Memory::scores, strip), x, to + strip * 16, row_stride, left,
                  at.lane);
  if (strip == 0 && at.lane == 0) blocks_read();
  // The next chunk is copied to where these rows were on their way.
  copies_fence();
  release(barriers.read(step % STAGES), at);
}

// Loads and stores a team's 64 rows of a state in fp32.
template <int DK, int DV, typename P>
inline void load_rows(thread float (&state)[DK / 2], P from, bool there, long head, Place at) {
  DELTATUNE_UNROLL
  for (int i = 0; i < DK / 2; ++i) {
    const long row = head * DV + at.x * 64 + own_row(at, own_side(i));
    state[i] = there ? from[row * DK + own_column(at, i)] : 0.0f;
  }
}
template <int DK, int DV>
inline void store_rows(const thread float (&state)[DK / 2], GLOBAL float* to, long head, Place at) {
  DELTATUNE_UNROLL
  for (int i = 0; i < DK / 2; ++i)
    to[(head * DV + at.x * 64 + own_row(at, own_side(i))) * DK + own_column(at, i)] = state[i];
}

// Goes through the chunks: the chain from state to state.
template <typename In, int DK, int DV, int STAGES, typename PI>
inline void scan_states(Place at, Room room, ScanBarriers barriers, int chunks, PI initial, bool has_initial,
                        GLOBAL float* last, long head) {
  using Memory = HopperWideScanMemory<DK, STAGES>;
  const int lane = at.lane, strip = at.group % 4;
  float state[DK / 2], x[32], before[16], rate[16];
  unsigned rows[DK / 4], low_rows[DK / 4], high[16], low[16], pairs[16];
  load_rows<DK, DV>(state, initial, has_initial, head, at);
  // Computes K S^T of a chunk, while the state is handed over and the next operands are read. Both parts of S are
  // multiplied, for an error of u stays in the state.
  const auto start = [&](int n) {
    mbarrier_wait(barriers.here(n % STAGES), n / STAGES);
    copies_fence();
    split_pairs(rows, low_rows, state);
    register_fence(rows);
    register_fence(low_rows);
    register_fence(x);
    products_start();
    times_positions<DK>(x, low_rows, room.place + n % STAGES * Memory::stage + Memory::k, false);
    products_sent();
    times_positions<DK>(x, rows, room.place + n % STAGES * Memory::stage + Memory::k, true);
    products_sent();
    hand_state_over<Memory, DK>(room, barriers, n, rows, state, at);
    products_wait<1>();
    register_fence(low_rows);
    load_turned(pairs, own_columns<Memory>(room, n % STAGES, Memory::values, strip), lane);
    threadgroup const float* factors = room.floats(n % STAGES * Memory::stage + Memory::factors);
    get_positions(before, factors, lane);
    get_positions(rate, factors + 128, lane);
    products_wait<0>();
    register_fence(x);
  };
  start(0);
  for (int n = 0; n < chunks; ++n) {
    const unsigned stage = room.place + n % STAGES * Memory::stage;
    threadgroup const float* factors = room.floats(n % STAGES * Memory::stage + Memory::factors);
    // x becomes r, then u.
    DELTATUNE_UNROLL
    for (int i = 0; i < 16; ++i) {
      const int f = pair_of(i);
      x[2 * i] = first_of(pairs[i]) - before[f] * x[2 * i];
      x[2 * i + 1] = second_of(pairs[i]) - before[f + 1] * x[2 * i + 1];
      split_pair(high[i], low[i], -rate[f] * x[2 * i], -rate[f + 1] * x[2 * i + 1]);
    }
    register_fence(x);
    register_fence(high);
    register_fence(low);
    products_start();
    add_times_triangle<true>(x, high, low, stage + Memory::solve);
    products_sent();
    const float total = factors[63];
    DELTATUNE_UNROLL
    for (int i = 0; i < DK / 2; ++i) state[i] *= total;
    get_positions(before, factors + 64, lane);
    DELTATUNE_UNROLL
    for (int i = 0; i < 16; ++i) rate[i] *= before[i];
    products_wait<0>();
    register_fence(x);
    DELTATUNE_UNROLL
    for (int i = 0; i < 16; ++i)
      split_pair(high[i], low[i], rate[pair_of(i)] * x[2 * i], rate[pair_of(i) + 1] * x[2 * i + 1]);
    register_fence(state);
    register_fence(high);
    register_fence(low);
    products_start();
    add_by_keys<DK>(state, low, stage + Memory::k);
    add_by_keys<DK>(state, high, stage + Memory::k);
    products_sent();
    hand_chunk_over<Memory>(stage, barriers, n, x, at);
    products_wait<0>();
    register_fence(state);
    release(barriers.read(n % STAGES), at);
    if (n + 1 < chunks) start(n + 1);
  }
  store_rows<DK, DV>(state, last, head, at);
}
// Computes y from the states and u, and writes all three.
template <typename In, int DK, int DV, int HV, int STAGES>
inline void write_scan(Place at, Room room, ScanBarriers barriers, int length, OwnRows<DK, DV, 64> own, GLOBAL In* y) {
  using Memory = HopperWideScanMemory<DK, STAGES>;
  const int lane = at.lane, chunks = (length + 63) / 64;
  const bool sends = at.group % 4 == 0 && lane == 0;
  float out[32];
  unsigned high[16], low[16];
  for (int n = 0; n < chunks; ++n) {
    const unsigned stage = room.place + n % STAGES * Memory::stage;
    threadgroup const float* factors = room.floats(n % STAGES * Memory::stage + Memory::factors);
    mbarrier_wait(barriers.here(n % STAGES), n / STAGES);
    mbarrier_wait(barriers.state(0), n);
    copies_fence();
    register_fence(out);
    products_start();
    state_times_positions<DK>(out, room.place + Memory::state, stage + Memory::q);
    products_sent();
    if (sends) send_state<Memory>(own, n, room);
    products_wait<0>();
    register_fence(out);
    if (sends) blocks_read();
    release(barriers.state_read(), at);
    mbarrier_wait(barriers.chunk(n), n / 2);
    if (sends) own.send_chunk(n, stage + Memory::solve);
    each_pair_of_chunk<Memory>(stage, at, [&](int i, float first, float second) {
      const int place = (i / 2 * 8) + lane % 4 * 2;
      float before[2], rate[2];
      get_two(before, factors + place);
      get_two(rate, factors + 128 + place);
      out[2 * i] *= before[0];
      out[2 * i + 1] *= before[1];
      split_pair(high[i], low[i], rate[0] * first, rate[1] * second);
    });
    register_fence(out);
    register_fence(high);
    register_fence(low);
    products_start();
    add_times_triangle<true>(out, high, low, stage + Memory::scores);
    products_sent();
    write_chunk_bits(own, n, stage + Memory::solve, at);
    products_wait<0>();
    register_fence(out);
    DELTATUNE_UNROLL
    for (int i = 0; i < 16; ++i) high[i] = high_pair(out[2 * i], out[2 * i + 1]);
    // All warps have read P.
    named_barrier<128, 2>();
    write_and_release<Memory, STAGES>(at, room, barriers, n, high,
                                      y + (((long)at.z * length + n * 64) * HV + at.y) * DV + own.row, HV * DV,
                                      length - n * 64);
  }
  if (sends) blocks_arrived();
}

// The registers of a thread of each team. A block starts with 168 for each of its 384 threads: a team that asks for
// more than the others gave back waits forever.
enum ScanRegisters : int { SCAN_LOADER = 48, SCAN_CHAIN = 256, SCAN_WRITER = 200 };
static_assert(SCAN_LOADER + SCAN_CHAIN + SCAN_WRITER <= 3 * 168, "teams share out what the block starts with");
// Runs a block of either scan: each team calls its function with its place, the shared memory and the mbarriers.
template <int DK, int STAGES, typename Load, typename Chain, typename Write>
inline void run_teams(Place at, threadgroup char* memory, Load load, Chain chain, Write write) {
  const Room room = room_of(memory);
  const ScanBarriers barriers{room.place + HopperWideScanMemory<DK, STAGES>::barriers};
  barriers.template start<STAGES>(at);
  at.group = uniform(at.group);
  if (at.group < 4) {
    fewer_registers<SCAN_LOADER>();
    load(at, room, barriers);
  } else if (at.group < 8) {
    more_registers<SCAN_CHAIN>();
    chain(at, room, barriers);
  } else {
    more_registers<SCAN_WRITER>();
    write(at, room, barriers);
  }
}

// The forward scan, with the arguments and results of gated_delta_scan. A block does 64 rows of one state; the grid is
// (DV / 64, HV, B).
template <typename In, int DK, int DV, int HK, int HV, int STAGES, bool MASKED, typename PQ, typename PK,
          typename PV, typename PM, typename PI, typename PS, typename PF>
inline void gated_delta_hopper_wide_scan(Place at, threadgroup char* memory, int length, PQ q, PK k, PV v, PM mask,
                                    PI initial, bool has_initial, PS solve, PS scores, PF factors, GLOBAL In* y,
                                    GLOBAL In* states, GLOBAL float* u, GLOBAL float* last) {
  const int chunks = (length + 63) / 64;
  const long head = (long)at.z * HV + at.y;
  run_teams<DK, STAGES>(
      at, memory,
      [&](Place at, Room room, ScanBarriers barriers) {
        load_chunks<HopperWideScanMemory<DK, STAGES>, DK, DV, HK, HV, 64, STAGES, MASKED, false>(
            at, room, barriers, length, q, k, v, mask, solve, scores, factors);
      },
      [&](Place at, Room room, ScanBarriers barriers) {
        scan_states<In, DK, DV, STAGES>(at, room, barriers, chunks, initial, has_initial, last, head);
      },
      [&](Place at, Room room, ScanBarriers barriers) {
        const OwnRows<DK, DV, 64> own{at.x * 64, head, chunks, states, reinterpret_cast<GLOBAL bf16*>(u)};
        write_scan<In, DK, DV, HV, STAGES>(at, room, barriers, length, own, y);
      });
}

// Goes through the chunks in reverse order: the chain of the gradients of the states.
template <typename In, int DK, int DV, int STAGES, typename PE>
inline void reverse_states(Place at, Room room, ScanBarriers barriers, int chunks, PE d_last, GLOBAL float* d_initial,
                           long head) {
  using Memory = HopperWideScanMemory<DK, STAGES>;
  const int lane = at.lane, strip = at.group % 4;
  float state[DK / 2], x[32], part[32], after[16], rate[16];
  unsigned rows[DK / 4], low_rows[DK / 4], gradients[16], high[16], low[16];
  load_rows<DK, DV>(state, d_last, true, head, at);
  const auto get_gradients = [&](int step) {
    load_turned(gradients, own_columns<Memory>(room, step % STAGES, Memory::values, strip), lane);
  };
  // Starts P^T dY of a step's chunk.
  const auto start_part = [&](int step) {
    mbarrier_wait(barriers.here(step % STAGES), step / STAGES);
    copies_fence();
    get_gradients(step);
    register_fence(part);
    register_fence(gradients);
    products_start();
    add_times_cores<false, true>(part, gradients, room.place + step % STAGES * Memory::stage + Memory::scores, false);
    add_times_cores<false, false>(part, gradients, room.place + step % STAGES * Memory::stage + Memory::scores);
    products_sent();
  };
  // Computes K dS^T while the gradient of the state is handed over. The factors are read after the
  // products: before them, there are no registers left with the compilers of CUDA 12.9 to 13.2.
  const auto start = [&](int step) {
    split_pairs(rows, low_rows, state);
    register_fence(rows);
    register_fence(low_rows);
    register_fence(x);
    products_start();
    times_positions<DK>(x, low_rows, room.place + step % STAGES * Memory::stage + Memory::k, false);
    times_positions<DK>(x, rows, room.place + step % STAGES * Memory::stage + Memory::k, true);
    products_sent();
    hand_state_over<Memory, DK>(room, barriers, step, rows, state, at);
    products_wait<0>();
    register_fence(x);
    threadgroup const float* factors = room.floats(step % STAGES * Memory::stage + Memory::factors);
    get_positions(after, factors + 64, lane);
    get_positions(rate, factors + 128, lane);
  };
  start_part(0);
  products_wait<0>();
  register_fence(part);
  start(0);
  for (int step = 0; step < chunks; ++step) {
    const unsigned stage = room.place + step % STAGES * Memory::stage;
    threadgroup const float* factors = room.floats(step % STAGES * Memory::stage + Memory::factors);
    // x becomes w, then R; gradients become G dY.
    DELTATUNE_UNROLL
    for (int i = 0; i < 16; ++i) {
      const int f = pair_of(i);
      x[2 * i] = after[f] * x[2 * i] + part[2 * i];
      x[2 * i + 1] = after[f + 1] * x[2 * i + 1] + part[2 * i + 1];
      split_pair(high[i], low[i], -rate[f] * x[2 * i], -rate[f + 1] * x[2 * i + 1]);
    }
    register_fence(x);
    register_fence(high);
    register_fence(low);
    products_start();
    add_times_triangle<false>(x, high, low, stage + Memory::solve);
    products_sent();
    get_gradients(step);
    get_positions(after, factors, lane);
    DELTATUNE_UNROLL
    for (int i = 0; i < 16; ++i)
      gradients[i] =
          high_pair(after[pair_of(i)] * first_of(gradients[i]), after[pair_of(i) + 1] * second_of(gradients[i]));
    DELTATUNE_UNROLL
    for (int i = 0; i < 16; ++i) rate[i] *= -after[i];
    const float total = factors[63];
    DELTATUNE_UNROLL
    for (int i = 0; i < DK / 2; ++i) state[i] *= total;
    register_fence(state);
    register_fence(gradients);
    products_start();
    add_by_keys<DK>(state, gradients, stage + Memory::q);
    products_sent();
    products_wait<1>();
    register_fence(x);
    unsigned end_high[16], end_low[16];
    DELTATUNE_UNROLL
    for (int i = 0; i < 16; ++i)
      split_pair(end_high[i], end_low[i], rate[pair_of(i)] * x[2 * i], rate[pair_of(i) + 1] * x[2 * i + 1]);
    register_fence(end_high);
    register_fence(end_low);
    products_start();
    add_by_keys<DK>(state, end_low, stage + Memory::k);
    add_by_keys<DK>(state, end_high, stage + Memory::k);
    products_sent();
    hand_chunk_over<Memory>(stage, barriers, step, x, at);
    // The products with G dY are over, so that its registers are free.
    products_wait<1>();
    register_fence(gradients);
    // No branch while products run: the compiler would wait for each of them. So the last chunk's are started twice.
    start_part(step + 1 < chunks ? step + 1 : step);
    products_wait<0>();
    register_fence(state);
    register_fence(part);
    release(barriers.read(step % STAGES), at);
    if (step + 1 < chunks) start(step + 1);
  }
  store_rows<DK, DV>(state, d_initial, head, at);
}
// Computes dv from R, and writes it, R, and the gradients of the states.
template <typename In, int DK, int DV, int HV, int STAGES>
inline void write_reverse(Place at, Room room, ScanBarriers barriers, int length, OwnRows<DK, DV, 64> own,
                          GLOBAL In* dv) {
  using Memory = HopperWideScanMemory<DK, STAGES>;
  const int lane = at.lane, chunks = (length + 63) / 64;
  const bool sends = at.group % 4 == 0 && lane == 0;
  unsigned high[16];
  for (int step = 0; step < chunks; ++step) {
    const int n = chunks - 1 - step;
    const unsigned stage = room.place + step % STAGES * Memory::stage;
    threadgroup const float* rates = room.floats(step % STAGES * Memory::stage + Memory::factors) + 128;
    mbarrier_wait(barriers.here(step % STAGES), step / STAGES);
    mbarrier_wait(barriers.state(0), step);
    if (sends) {
      send_state<Memory>(own, n, room);
      blocks_read();
    }
    release(barriers.state_read(), at);
    mbarrier_wait(barriers.chunk(step), step / 2);
    if (sends) own.send_chunk(n, stage + Memory::solve);
    each_pair_of_chunk<Memory>(stage, at, [&](int i, float first, float second) {
      float rate[2];
      get_two(rate, rates + i / 2 * 8 + lane % 4 * 2);
      high[i] = high_pair(rate[0] * first, rate[1] * second);
    });
    write_chunk_bits(own, n, stage + Memory::solve, at);
    write_and_release<Memory, STAGES>(at, room, barriers, step, high,
                                      dv + (((long)at.z * length + n * 64) * HV + at.y) * DV + own.row, HV * DV,
                                      length - n * 64);
  }
  if (sends) blocks_arrived();
}

// The reverse scan, with the arguments and results of gated_delta_reverse. Blocks are those of the forward scan.
template <typename In, int DK, int DV, int HK, int HV, int STAGES, bool MASKED, typename PQ, typename PK,
          typename PY, typename PM, typename PE, typename PS, typename PF>
inline void gated_delta_hopper_wide_reverse(Place at, threadgroup char* memory, int length, PQ q, PK k, PY dy, PM mask,
                                       PE d_last, PS solve, PS scores, PF factors, GLOBAL In* d_states,
                                       GLOBAL float* d_right, GLOBAL In* dv, GLOBAL float* d_initial, GLOBAL int* taken) {
  if (at.index == 0 && at.x + at.y + at.z == 0) *taken = 0;
  const int chunks = (length + 63) / 64;
  const long head = (long)at.z * HV + at.y;
  run_teams<DK, STAGES>(
      at, memory,
      [&](Place at, Room room, ScanBarriers barriers) {
        load_chunks<HopperWideScanMemory<DK, STAGES>, DK, DV, HK, HV, 64, STAGES, MASKED, true>(
            at, room, barriers, length, q, k, dy, mask, solve, scores, factors);
      },
      [&](Place at, Room room, ScanBarriers barriers) {
        reverse_states<In, DK, DV, STAGES>(at, room, barriers, chunks, d_last, d_initial, head);
      },
      [&](Place at, Room room, ScanBarriers barriers) {
        const OwnRows<DK, DV, 64> own{at.x * 64, head, chunks, d_states, reinterpret_cast<GLOBAL bf16*>(d_right)};
        write_reverse<In, DK, DV, HV, STAGES>(at, room, barriers, length, own, dv);
      });
}
