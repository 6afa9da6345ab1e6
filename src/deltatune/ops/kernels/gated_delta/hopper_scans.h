// The scans of scan.h and reverse.h on Hopper, for bf16, chunks of 64 positions, keys of 128, and calls of few heads;
// hopper_wide_scans.h has those for many. Formulas are those of chunk.h, and matrices in device memory have the form
// that hopper_cores.h describes.
//
// A block goes through the chunks with 32 rows of a state. One team of four warps loads chunks. One, the chain, holds
// the state in its registers, transposed: all its results are positions or keys by rows. The left operands of its
// products are K and Q in shared memory, and triangles in registers. The right operands, the state and its results for
// a chunk, it puts into shared memory as cores, and so hands them to the other teams. These compute y or dv and write
// everything to device memory.
// A result in fp32 that is multiplied again is a pair of bf16, a high and a low part (cuda.h). A product with both
// parts is one with twice as many rows; its halves are added.

// The shared memory of a scan's block: for each stage K and Q in tiles of 64 x 64, Z, rows of V or dY, P, and the
// factors; as cores, high and low parts each, the state, and the right operands of Z and K; and G dY. When Z and V are
// read, u or R of the chunk and the state's tails take the place of Z, and rows of y or dv on their way out that of V.
template <int DK, int STAGES>
struct HopperScanMemory {
  static constexpr constant int k = 0, q = k + 64 * DK * 2, solve = q + 64 * DK * 2, values = solve + packed_bytes;
  static constexpr constant int scores = values + 64 * 32 * 2, factors = scores + packed_bytes;
  static constexpr constant int stage = (factors + 3 * 64 * 4 + 1023) / 1024 * 1024;
  static constexpr constant int tails = solve + 2 * chunk_part;
  static constexpr constant int state = STAGES * stage, weighed = state + 2 * 32 * DK * 2;
  static constexpr constant int added = weighed + 2 * chunk_part, gradients = added + 2 * chunk_part;
  static constexpr constant int barriers = gradients + chunk_part;
  static constexpr constant int bytes = barriers + 128 + 1024;
};

using ScanBarriers = BarriersOfScan<2>;

// The address that a lane names to store a warp's 16 positions or keys of 16 rows as cores with these as their rows.
// The next eight rows are `row` bytes further.
inline unsigned lane_core_turned(unsigned cores, int row, int lane) {
  return cores + (lane >> 4) * row + (lane >> 3 & 1) * core_bytes + (lane & 7) * 16;
}
// Stores the transpose of 64 positions or keys by 32 rows as cores.
inline void put_turned(unsigned to, int row, const thread unsigned (&x)[8], Place at) {
  const unsigned place = lane_core_turned(to + at.group % 4 * 2 * core_bytes, row, at.lane);
  DELTATUNE_UNROLL
  for (int j = 0; j < 2; ++j) put_turned_parts(place + 2 * j * row, x + 4 * j);
}
// Does so for high parts, and for low parts, which follow them.
inline void put_split(unsigned to, int row, const thread float (&x)[16], Place at) {
  unsigned high[8], low[8];
  split_pairs(high, low, x);
  put_turned(to, row, high, at);
  put_turned(to + 4 * row, row, low, at);
}
// Loads u or R of a warp's positions and 16 rows from 16 j on, as left operands.
inline void load_chunk_parts(thread unsigned (&high)[4], thread unsigned (&low)[4], unsigned chunk, int j, Place at) {
  const unsigned from = lane_core_turned(chunk + (at.group % 4 * 2 + 16 * j) * core_bytes, 8 * core_bytes, at.lane);
  load_turned_parts(high, from);
  load_turned_parts(low, from + chunk_part);
}
// The address that a lane names to load or store a warp's 16 positions of 16 columns of V, dY, y or dv, from 16 j on.
inline unsigned lane_piece(unsigned rows, int j, Place at) {
  const int row = at.group % 4 * 16 + (at.lane & 15);
  return rows + row * 64 + turned_piece(2 * j + (at.lane >> 4), row) * 16;
}
// Loads a warp's 16 rows of a triangle or, if TURNED, of its transpose, as left operands. Numbers outside are not read.
template <bool TURNED>
inline void load_triangle(thread unsigned (&high)[16], thread unsigned (&low)[16], unsigned triangle, Place at) {
  const int warp = at.group % 4, side = at.lane >> 3 & 1, other = at.lane >> 4;
  const int i = TURNED ? other : side, j = TURNED ? side : other;
  const unsigned from = triangle + (at.lane & 7) * 16;
  const unsigned by_rows = from + i * packed_row + j * core_bytes, by_columns = from + i * core_bytes + j * packed_row;
  DELTATUNE_UNROLL
  for (int n = 0; n < 4; ++n) {
    if (TURNED) {
      load_turned_parts_if(n >= warp, high + 4 * n, by_rows + core_high<packed_row>(2 * n, 2 * warp));
      load_turned_parts_if(n >= warp, low + 4 * n, by_columns + core_low<packed_row>(2 * n, 2 * warp));
    } else {
      load_parts_if(n <= warp, high + 4 * n, by_rows + core_high<packed_row>(2 * warp, 2 * n));
      load_parts_if(n <= warp, low + 4 * n, by_columns + core_low<packed_row>(2 * warp, 2 * n));
    }
    // Of the tile on the diagonal one part is outside.
    const int outside = 4 * n + (TURNED ? 1 : 2);
    if (n == warp) high[outside] = low[outside] = 0;
  }
}

// Products of a team with right operands as cores in shared memory. K or Q times the transpose of ROWS rows of a state,
// which may be high parts and then low parts: d = a b^T.
template <int DK, int ROWS>
inline void positions_times_state(thread float (&d)[ROWS / 2], unsigned a, unsigned state) {
  const unsigned left_place = opaque((a & 0x3ffff) >> 4), place = opaque((state & 0x3ffff) >> 4);
  DELTATUNE_UNROLL
  for (int m = 0; m < DK / 16; ++m)
    Products<bf16, ROWS>::rows(d, rows_operand(left_place + (m / 4 * 8192 + m % 4 * 32) / 16),
                               cores_operand(place + m * 16, core_bytes, DK * 16), m > 0);
}
// The transpose of 64 columns of K or Q times the transpose of ROWS rows by positions.
template <int ROWS>
inline void keys_times_chunk(thread float (&d)[ROWS / 2], unsigned a, unsigned x) {
  const unsigned left_place = opaque((a & 0x3ffff) >> 4), place = opaque((x & 0x3ffff) >> 4);
  DELTATUNE_UNROLL
  for (int j = 0; j < 4; ++j)
    Products<bf16, ROWS>::turned(d, columns_operand(left_place + j * 128, 8192),
                                 cores_operand(place + j * 16, core_bytes, 8 * core_bytes), j > 0);
}
// Adds a triangle, of which each warp holds 16 rows, times the transpose of rows by positions, of which x is high and
// then low parts. The smallest products are the first. Low times low is left out, as in cuda.h.
inline void add_triangle(thread float (&d)[16], const thread unsigned (&high)[16], const thread unsigned (&low)[16],
                         unsigned x) {
  const unsigned place = opaque((x & 0x3ffff) >> 4);
  DELTATUNE_UNROLL
  for (int i = 0; i < 3; ++i) {
    DELTATUNE_UNROLL
    for (int n = 0; n < 4; ++n)
      Products<bf16, 32>::held_rows(
          d, (i == 0 ? low : high) + 4 * n,
          cores_operand(place + (i == 1 ? chunk_part / 16 : 0) + n * 16, core_bytes, 8 * core_bytes), true);
  }
}
// A triangle times rows of dY.
inline void triangle_times_rows(thread float (&d)[16], const thread unsigned (&high)[16],
                                const thread unsigned (&low)[16], unsigned rows) {
  const unsigned place = opaque((rows & 0x3ffff) >> 4);
  DELTATUNE_UNROLL
  for (int n = 0; n < 4; ++n) Products<bf16, 32>::columns(d, low + 4 * n, short_columns_operand(place + n * 64), n > 0);
  DELTATUNE_UNROLL
  for (int n = 0; n < 4; ++n) Products<bf16, 32>::columns(d, high + 4 * n, short_columns_operand(place + n * 64));
}

// Loads and stores a block's rows of a state in fp32, which the chain holds as two panels of 64 keys by 32 rows.
template <int DK, int DV>
inline long held_place(long head, Place at, int panel, int i) {
  return (head * DV + at.x * 32 + own_column(at, i)) * DK + panel * 64 + own_row(at, own_side(i));
}
template <int DK, int DV, typename P>
inline void load_rows(thread float (&state)[2][16], P from, bool there, long head, Place at) {
  DELTATUNE_UNROLL
  for (int i = 0; i < 32; ++i)
    state[i / 16][i % 16] = there ? from[held_place<DK, DV>(head, at, i / 16, i % 16)] : 0.0f;
}
template <int DK, int DV>
inline void store_rows(const thread float (&state)[2][16], GLOBAL float* to, long head, Place at) {
  DELTATUNE_UNROLL
  for (int i = 0; i < 32; ++i) to[held_place<DK, DV>(head, at, i / 16, i % 16)] = state[i / 16][i % 16];
}
// Returns, for a panel, the two bits of each element that follow those of its bf16 (metal.h explains them): two bytes
// for a lane's even rows, then two for odd ones, the first for the upper 16 rows and the second for the lower 16.
inline unsigned tails_of(const thread float (&x)[16]) {
  unsigned tails = 0;
  DELTATUNE_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int e = i % 2 * 4 + i / 2 * 2;
    const unsigned even = second_bytes_of(x[e], x[e + 8]), odd = second_bytes_of(x[e + 1], x[e + 9]);
    tails |= (lower_halves(even, odd) & 0xc0c0c0c0u) >> 2 * i;
  }
  return tails;
}
// Puts the transposes of these into shared memory: for every 16 keys eight rows of eight keys, two bytes each.
inline void put_tails(unsigned to, const thread unsigned (&tails)[2], Place at) {
  const int core = (at.lane >> 3 & 1) * 4 + at.group % 4;
  put_two_turned_parts(to + core * core_bytes + (at.lane & 7) * 16, tails);
}
// Writes those of 16 rows, 16 bytes a lane: two bytes per tile of 16 columns, those of even columns in the first.
template <int DK>
inline void write_tails(GLOBAL bf16* to, threadgroup const char* tails, int strip, int lane) {
  DELTATUNE_UNROLL
  for (int m = 0; m < DK / 16; m += 2) {
    unsigned own[2];
    DELTATUNE_UNROLL
    for (int i = 0; i < 2; ++i) {
      const unsigned pair = get_pair(tails + (m + i) * core_bytes + lane * 4) >> 8 * strip & 0x00ff00ffu;
      own[i] = pair | pair >> 8;
    }
    put_pair(to + strip * 256 + lane * 8 + m, lower_halves(own[0], own[1]));
  }
}

// The registers of the chain: a state, the tails of the one that it handed over last, and its operands of a chunk,
// which are rows of Z or of its transpose, V or dY, and factors of a lane's two positions.
template <int DK, int STAGES>
struct Chain {
  using Memory = HopperScanMemory<DK, STAGES>;
  Room room;
  ScanBarriers barriers;
  float state[2][16], both[32], sums[2][32], x[16], y[16];
  unsigned tails[2], high[16], low[16], values[8];
  float before[2], rate[2], after[2], total;

  inline unsigned stage(int step) const { return room.place + step % STAGES * Memory::stage; }
  // Waits for a chunk. Behind products with one that has arrived, the wait keeps the compiler from moving later code to
  // between these products, which it would hold up.
  inline void wait_for(int step) const { mbarrier_wait(barriers.here(step % STAGES), step / STAGES); }

  template <bool TURNED>
  inline void read(int step, Place at) {
    threadgroup const float* factors = room.floats(step % STAGES * Memory::stage + Memory::factors);
    DELTATUNE_UNROLL
    for (int side = 0; side < 2; ++side) {
      const int row = own_row(at, side);
      before[side] = factors[row], after[side] = factors[64 + row], rate[side] = factors[128 + row];
    }
    total = factors[63];
    DELTATUNE_UNROLL
    for (int j = 0; j < 2; ++j) load_parts(values + 4 * j, lane_piece(stage(step) + Memory::values, j, at));
    load_triangle<TURNED>(high, low, stage(step) + Memory::solve, at);
    register_fence(high);
    register_fence(low);
    register_fence(values);
  }
  inline float value(int i) const { return i % 2 ? second_of(values[i / 2]) : first_of(values[i / 2]); }
  inline void keep_tails() {
    DELTATUNE_UNROLL
    for (int panel = 0; panel < 2; ++panel) tails[panel] = tails_of(state[panel]);
  }
  // Puts a panel of the state into shared memory, when all products with the one before are over.
  inline void put_panel(int panel, Place at) {
    put_split(room.place + Memory::state + panel * 8 * core_bytes, DK * 16, state[panel], at);
  }
  inline void put_state(Place at) {
    DELTATUNE_UNROLL
    for (int panel = 0; panel < 2; ++panel) put_panel(panel, at);
  }
  // Makes it that of the next state: `scale` times itself, plus the products of K.
  inline void next_panel(int panel, float scale, Place at) {
    register_fence(sums[panel]);
    DELTATUNE_UNROLL
    for (int i = 0; i < 16; ++i)
      state[panel][i] = scale * state[panel][i] + (sums[panel][16 + i] + sums[panel][i]);
    put_panel(panel, at);
  }
  // Puts y where Z or K is multiplied with it. When all warps have come here, all of it is there.
  inline void put_factor(int place, Place at) {
    put_split(room.place + place, 8 * core_bytes, y, at);
    copies_fence();
    named_barrier<128, 1>();
  }
  // Puts u or R and the tails in place of Z, which all warps have read.
  inline void put_chunk(int step, Place at) {
    put_split(stage(step) + Memory::solve, 8 * core_bytes, x, at);
    put_tails(stage(step) + Memory::tails, tails, at);
  }
  // Starts K S^T of a chunk. Both parts of S are multiplied, for an error of u stays in the state.
  inline void start_chunk(int step) {
    named_barrier<128, 1>();
    register_fence(both);
    products_start();
    positions_times_state<DK, 64>(both, stage(step) + Memory::k, room.place + Memory::state);
    products_sent();
    wait_for(step);
  }
  // Starts to add Z, or its transpose, times the cores at `weighed` to x.
  inline void start_solving() {
    register_fence(x);
    products_start();
    add_triangle(x, high, low, room.place + Memory::weighed);
    products_sent();
  }
  // Starts the products of K with the cores at `added`, one group of products for each panel.
  inline void start_panels(int step) {
    register_fence(sums[0]);
    register_fence(sums[1]);
    products_start();
    DELTATUNE_UNROLL
    for (int panel = 0; panel < 2; ++panel) {
      keys_times_chunk<64>(sums[panel], stage(step) + Memory::k + panel * 8192, room.place + Memory::added);
      products_sent();
    }
  }
};

// Writes a group's 16 rows of y or dv, by way of shared memory.
inline void write_positions(threadgroup bf16* rows, const thread float (&x)[16], GLOBAL bf16* to, long row_stride,
                            int left, Place at) {
  unsigned packed[8];
  pack_rows<bf16, 16>(packed, x);
  DELTATUNE_UNROLL
  for (int j = 0; j < 2; ++j) put_parts(lane_piece(shared_place(rows), j, at), packed + 4 * j);
  group_barrier();
  DELTATUNE_UNROLL
  for (int i = 0; i < 2; ++i) {
    const int row = at.group % 4 * 16 + i * 8 + at.lane / 4, piece = at.lane % 4;
    if (row < left)
      put_whole_piece(to + row * row_stride + piece * 8, rows + row * 32 + turned_piece(piece, row) * 8);
  }
}

// Goes through the chunks: the chain from state to state.
template <typename In, int DK, int DV, int STAGES, typename PI>
inline void scan_states(Place at, Room room, ScanBarriers barriers, int chunks, PI initial, bool has_initial,
                        GLOBAL float* last, long head) {
  using Memory = HopperScanMemory<DK, STAGES>;
  Chain<DK, STAGES> c;
  c.room = room, c.barriers = barriers;
  load_rows<DK, DV>(c.state, initial, has_initial, head, at);
  c.put_state(at);
  for (int n = 0; n < chunks; ++n) {
    // Hands over the state, and u of the chunk before.
    c.wait_for(n);
    copies_fence();
    release(barriers.state(n), at);
    report(barriers.chunk(n - 1), at, n > 0);
    c.start_chunk(n);
    c.template read<false>(n, at);
    c.keep_tails();
    products_wait<0>();
    register_fence(c.both);
    // x becomes r, then u.
    DELTATUNE_UNROLL
    for (int i = 0; i < 16; ++i) {
      c.x[i] = c.value(i) - c.before[own_side(i)] * (c.both[16 + i] + c.both[i]);
      c.y[i] = -c.rate[own_side(i)] * c.x[i];
    }
    c.put_factor(Memory::weighed, at);
    c.start_solving();
    products_wait<0>();
    register_fence(c.x);
    DELTATUNE_UNROLL
    for (int i = 0; i < 16; ++i) c.y[i] = c.after[own_side(i)] * c.rate[own_side(i)] * c.x[i];
    c.put_factor(Memory::added, at);
    c.start_panels(n);
    c.put_chunk(n, at);
    mbarrier_wait(barriers.state_read(), n);
    products_wait<1>();
    c.next_panel(0, c.total, at);
    products_wait<0>();
    c.next_panel(1, c.total, at);
    release(barriers.read(n % STAGES), at);
  }
  copies_fence();
  release(barriers.chunk(chunks - 1), at);
  store_rows<DK, DV>(c.state, last, head, at);
}
// Multiplies the columns of a warp's rows of a triangle by factors.
inline void scale_triangle(thread unsigned (&high)[16], thread unsigned (&low)[16], threadgroup const float* factors,
                           Place at) {
  DELTATUNE_UNROLL
  for (int n = 0; n < 4; ++n) {
    if (n > at.group % 4) continue;
    DELTATUNE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int e = 4 * n + i;
      float factor[2];
      get_two(factor, factors + 16 * n + i / 2 * 8 + at.lane % 4 * 2);
      split_pair(high[e], low[e], factor[0] * (first_of(high[e]) + first_of(low[e])),
                 factor[1] * (second_of(high[e]) + second_of(low[e])));
    }
  }
}
// Computes y of every second chunk, from chunk `first` on, from the states and u, and writes all three.
template <typename In, int DK, int DV, int HV, int STAGES>
inline void write_scan(Place at, Room room, ScanBarriers barriers, int length, OwnRows<DK, DV, 32> own, GLOBAL In* y,
                       int first) {
  using Memory = HopperScanMemory<DK, STAGES>;
  const int chunks = (length + 63) / 64, warp = at.group % 4;
  const bool sends = warp == 0 && at.lane == 0;
  float out[16], before[2];
  unsigned high[16], low[16];
  for (int n = first; n < chunks; n += 2) {
    const int offset = n % STAGES * Memory::stage;
    const unsigned stage = room.place + offset;
    threadgroup const float* factors = room.floats(offset + Memory::factors);
    mbarrier_wait(barriers.here(n % STAGES), n / STAGES);
    load_triangle<false>(high, low, stage + Memory::scores, at);
    // P (beta u) is (P beta) u, and u is in shared memory.
    scale_triangle(high, low, factors + 128, at);
    DELTATUNE_UNROLL
    for (int side = 0; side < 2; ++side) before[side] = factors[own_row(at, side)];
    mbarrier_wait(barriers.state(n), n / 2);
    copies_fence();
    register_fence(out);
    products_start();
    positions_times_state<DK, 32>(out, stage + Memory::q, room.place + Memory::state);
    products_sent();
    if (sends) own.send_state(n, room.place + Memory::state);
    products_wait<0>();
    register_fence(out);
    if (sends) blocks_read();
    release(barriers.state_read(), at);
    DELTATUNE_UNROLL
    for (int i = 0; i < 16; ++i) out[i] *= before[own_side(i)];
    mbarrier_wait(barriers.chunk(n), n / 2);
    register_fence(out);
    register_fence(high);
    register_fence(low);
    products_start();
    add_triangle(out, high, low, stage + Memory::solve);
    products_sent();
    if (sends) own.send_chunk(n, stage + Memory::solve);
    DELTATUNE_UNROLL
    for (int j = 0; j < 2; ++j) {
      unsigned first[4], rest[4];
      load_chunk_parts(first, rest, stage + Memory::solve, j, at);
      own.write_bits(n, j, warp, at.lane, low_bits(first, rest));
    }
    if (warp >= 2) write_tails<DK>(own.tails(n), room.memory + offset + Memory::tails, warp - 2, at.lane);
    products_wait<0>();
    register_fence(out);
    write_positions(reinterpret_cast<threadgroup bf16*>(room.memory + offset + Memory::values), out,
                    y + (((long)at.z * length + n * 64) * HV + at.y) * DV + own.row, HV * DV, length - n * 64, at);
    if (sends) blocks_read();
    release(barriers.read(n % STAGES), at);
  }
  if (sends) blocks_arrived();
}

// The registers of a thread of each team, of which two write. A block starts with 128 for each of its 512 threads: a
// team that asks for more than the others gave back waits forever.
enum ScanRegisters : int { SCAN_LOADER = 48, SCAN_CHAIN = 208, SCAN_WRITER = 128 };
static_assert(SCAN_LOADER + SCAN_CHAIN + 2 * SCAN_WRITER <= 4 * 128, "teams share out what the block starts with");
// The forward scan, with the arguments and results of gated_delta_scan. A block does 32 rows of one state; the grid is
// (DV / 32, HV, B).
template <typename In, int DK, int DV, int HK, int HV, int STAGES, bool MASKED, typename PQ, typename PK,
          typename PV, typename PM, typename PI, typename PS, typename PF>
inline void gated_delta_hopper_scan(Place at, threadgroup char* memory, int length, PQ q, PK k, PV v, PM mask,
                                    PI initial, bool has_initial, PS solve, PS scores, PF factors, GLOBAL In* y,
                                    GLOBAL In* states, GLOBAL float* u, GLOBAL float* last) {
  const int chunks = (length + 63) / 64;
  const long head = (long)at.z * HV + at.y;
  const Room room = room_of(memory);
  const ScanBarriers barriers{room.place + HopperScanMemory<DK, STAGES>::barriers};
  barriers.template start<STAGES>(at);
  at.group = uniform(at.group);
  if (at.group < 4) {
    fewer_registers<SCAN_LOADER>();
    load_chunks<HopperScanMemory<DK, STAGES>, DK, DV, HK, HV, 32, STAGES, MASKED, false>(
        at, room, barriers, length, q, k, v, mask, solve, scores, factors);
  } else if (at.group < 8) {
    more_registers<SCAN_CHAIN>();
    scan_states<In, DK, DV, STAGES>(at, room, barriers, chunks, initial, has_initial, last, head);
  } else {
    const OwnRows<DK, DV, 32> own{at.x * 32, head, chunks, states, reinterpret_cast<GLOBAL bf16*>(u)};
    write_scan<In, DK, DV, HV, STAGES>(at, room, barriers, length, own, y, at.group / 4 - 2);
  }
}

// P^T dY of a chunk, of which P is at `scores` and dY at `values`.
struct ScoresPart {
  float sum[16];
  unsigned high[16], low[16];
  inline void start(unsigned scores, unsigned values, Place at) {
    load_triangle<true>(high, low, scores, at);
    register_fence(sum);
    register_fence(high);
    register_fence(low);
    products_start();
    triangle_times_rows(sum, high, low, values);
    products_sent();
  }
};
// Starts the products of Q with G dY, a panel each.
inline void start_by_queries(thread float (&sums)[2][16], unsigned q, unsigned gradients) {
  register_fence(sums[0]);
  register_fence(sums[1]);
  products_start();
  DELTATUNE_UNROLL
  for (int panel = 0; panel < 2; ++panel) keys_times_chunk<32>(sums[panel], q + panel * 8192, gradients);
  products_sent();
}
inline void scale_and_add(thread float (&state)[2][16], float scale, thread float (&sums)[2][16]) {
  register_fence(sums[0]);
  register_fence(sums[1]);
  DELTATUNE_UNROLL
  for (int i = 0; i < 32; ++i) state[i / 16][i % 16] = scale * state[i / 16][i % 16] + sums[i / 16][i % 16];
}
// Puts G dY, rounded to bf16, where Q is multiplied with it.
template <int DK, int STAGES>
inline void put_gradients(const thread Chain<DK, STAGES>& c, Place at) {
  unsigned gradients[8];
  DELTATUNE_UNROLL
  for (int i = 0; i < 8; ++i)
    gradients[i] = high_pair(c.before[i % 2] * first_of(c.values[i]), c.before[i % 2] * second_of(c.values[i]));
  put_turned(c.room.place + HopperScanMemory<DK, STAGES>::gradients, 8 * core_bytes, gradients, at);
}
// Goes through the chunks in reverse order: the chain of the gradients of the states.
template <typename In, int DK, int DV, int STAGES, typename PE>
inline void reverse_states(Place at, Room room, ScanBarriers barriers, int chunks, PE d_last, GLOBAL float* d_initial,
                           long head) {
  using Memory = HopperScanMemory<DK, STAGES>;
  Chain<DK, STAGES> c;
  ScoresPart part;
  float by_queries[2][16];
  c.room = room, c.barriers = barriers;
  load_rows<DK, DV>(c.state, d_last, true, head, at);
  c.put_state(at);
  mbarrier_wait(barriers.here(0), 0);
  copies_fence();
  part.start(c.stage(0) + Memory::scores, c.stage(0) + Memory::values, at);
  products_wait<0>();
  register_fence(part.sum);
  for (int step = 0; step < chunks; ++step) {
    c.template read<true>(step, at);
    c.start_chunk(step);
    put_gradients(c, at);
    products_wait<0>();
    register_fence(c.both);
    release(barriers.state(step), at);
    // x becomes w, then R.
    DELTATUNE_UNROLL
    for (int i = 0; i < 16; ++i) {
      c.x[i] = c.after[own_side(i)] * (c.both[16 + i] + c.both[i]) + part.sum[i];
      c.y[i] = -c.rate[own_side(i)] * c.x[i];
    }
    c.put_factor(Memory::weighed, at);
    c.start_solving();
    start_by_queries(by_queries, c.stage(step) + Memory::q, room.place + Memory::gradients);
    c.wait_for(step);
    c.keep_tails();
    register_fence(c.tails);
    products_wait<1>();
    register_fence(c.x);
    DELTATUNE_UNROLL
    for (int i = 0; i < 16; ++i) c.y[i] = -c.rate[own_side(i)] * c.before[own_side(i)] * c.x[i];
    c.put_factor(Memory::added, at);
    c.start_panels(step);
    c.put_chunk(step, at);
    mbarrier_wait(barriers.state_read(), step);
    // No branch while products run: the compiler would wait for each of them. So the last chunk's are started twice.
    const int next = step + 1 < chunks ? step + 1 : step;
    c.wait_for(next);
    part.start(c.stage(next) + Memory::scores, c.stage(next) + Memory::values, at);
    products_wait<3>();
    scale_and_add(c.state, c.total, by_queries);
    products_wait<2>();
    c.next_panel(0, 1.0f, at);
    products_wait<1>();
    c.next_panel(1, 1.0f, at);
    products_wait<0>();
    register_fence(part.sum);
    copies_fence();
    release(barriers.chunk(step), at);
    report(barriers.read(step % STAGES), at);
  }
  store_rows<DK, DV>(c.state, d_initial, head, at);
}
// Computes dv from R, and writes it, R, and the gradients of the states.
template <typename In, int DK, int DV, int HV, int STAGES>
inline void write_reverse(Place at, Room room, ScanBarriers barriers, int length, OwnRows<DK, DV, 32> own,
                          GLOBAL In* dv) {
  using Memory = HopperScanMemory<DK, STAGES>;
  const int chunks = (length + 63) / 64, warp = at.group % 4;
  const bool sends = warp == 0 && at.lane == 0;
  for (int step = 0; step < chunks; ++step) {
    const int n = chunks - 1 - step, offset = step % STAGES * Memory::stage;
    const unsigned right = room.place + offset + Memory::solve;
    threadgroup const float* rates = room.floats(offset + Memory::factors) + 128;
    mbarrier_wait(barriers.here(step % STAGES), step / STAGES);
    mbarrier_wait(barriers.state(step), step / 2);
    if (sends) {
      own.send_state(n, room.place + Memory::state);
      blocks_read();
    }
    release(barriers.state_read(), at);
    mbarrier_wait(barriers.chunk(step), step / 2);
    if (sends) own.send_chunk(n, right);
    if (warp >= 2) write_tails<DK>(own.tails(n), room.memory + offset + Memory::tails, warp - 2, at.lane);
    float out[16];
    DELTATUNE_UNROLL
    for (int j = 0; j < 2; ++j) {
      unsigned high[4], low[4];
      load_chunk_parts(high, low, right, j, at);
      own.write_bits(n, j, warp, at.lane, low_bits(high, low));
      DELTATUNE_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float rate = rates[own_row(at, i % 2)];
        out[8 * j + 2 * i] = rate * (first_of(high[i]) + first_of(low[i]));
        out[8 * j + 2 * i + 1] = rate * (second_of(high[i]) + second_of(low[i]));
      }
    }
    write_positions(reinterpret_cast<threadgroup bf16*>(room.memory + offset + Memory::values), out,
                    dv + (((long)at.z * length + n * 64) * HV + at.y) * DV + own.row, HV * DV, length - n * 64, at);
    if (sends) blocks_read();
    release(barriers.read(step % STAGES), at);
  }
  if (sends) blocks_arrived();
}

// The registers of the teams of the reverse scan, of which one writes. A block starts with 168 for each of its 384
// threads.
enum ReverseRegisters : int { REVERSE_LOADER = 48, REVERSE_CHAIN = 256, REVERSE_WRITER = 200 };
static_assert(REVERSE_LOADER + REVERSE_CHAIN + REVERSE_WRITER <= 3 * 168, "teams share out what the block starts with");
// The reverse scan, with the arguments and results of gated_delta_reverse. Blocks are those of the forward scan.
template <typename In, int DK, int DV, int HK, int HV, int STAGES, bool MASKED, typename PQ, typename PK,
          typename PY, typename PM, typename PE, typename PS, typename PF>
inline void gated_delta_hopper_reverse(Place at, threadgroup char* memory, int length, PQ q, PK k, PY dy, PM mask,
                                       PE d_last, PS solve, PS scores, PF factors, GLOBAL In* d_states,
                                       GLOBAL float* d_right, GLOBAL In* dv, GLOBAL float* d_initial, GLOBAL int* taken) {
  if (at.index == 0 && at.x + at.y + at.z == 0) *taken = 0;
  const int chunks = (length + 63) / 64;
  const long head = (long)at.z * HV + at.y;
  const Room room = room_of(memory);
  const ScanBarriers barriers{room.place + HopperScanMemory<DK, STAGES>::barriers};
  barriers.template start<STAGES>(at);
  at.group = uniform(at.group);
  if (at.group < 4) {
    fewer_registers<REVERSE_LOADER>();
    load_chunks<HopperScanMemory<DK, STAGES>, DK, DV, HK, HV, 32, STAGES, MASKED, true>(
        at, room, barriers, length, q, k, dy, mask, solve, scores, factors);
  } else if (at.group < 8) {
    more_registers<REVERSE_CHAIN>();
    reverse_states<In, DK, DV, STAGES>(at, room, barriers, chunks, d_last, d_initial, head);
  } else {
    more_registers<REVERSE_WRITER>();
    const OwnRows<DK, DV, 32> own{at.x * 32, head, chunks, d_states, reinterpret_cast<GLOBAL bf16*>(d_right)};
    write_reverse<In, DK, DV, HV, STAGES>(at, room, barriers, length, own, dv);
  }
}
