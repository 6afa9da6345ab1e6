// The product of rows that are sorted by expert with their experts' matrices, on Hopper, for bf16 and fp16. The
// product, and `ends`, are explained in experts.h. A block has a team of four warps that loads, and TEAMS teams that
// multiply, 64 rows each. It computes one tile of the result after another, and while the last rows of one are written,
// the operands of the next are on their way. Reading the matrices bounds its speed. A tile is therefore so tall that
// an expert's matrix is seldom read more than twice, and blocks that run at the same time compute neighbouring tiles,
// which share their operands in L2 unless the blocks drift apart.

// The registers of a thread of the loading team and of the others. A block starts with as many for each of its threads
// as the multiprocessor has: a team that asks for more than the others gave back waits forever.
template <int TEAMS, bool PACKED> struct ExpertRegisters;
template <> struct ExpertRegisters<2, false> { static constexpr constant int load = 40, multiply = 232, start = 168; };
template <> struct ExpertRegisters<3, false> { static constexpr constant int load = 32, multiply = 160, start = 128; };
template <> struct ExpertRegisters<2, true> { static constexpr constant int load = 88, multiply = 208, start = 168; };
template <> struct ExpertRegisters<3, true> { static constexpr constant int load = 56, multiply = 152, start = 128; };

// The mbarriers of a stage: its operands have arrived, and all warps have read them.
struct ExpertBarriers {
  unsigned place;
  inline unsigned here(int stage) const { return place + 8 * stage; }
  inline unsigned read(int stage) const { return place + 32 + 8 * stage; }
  template <int TEAMS, int STAGES>
  inline void start(Place at) const {
    if (at.index == 0) {
      // Each thread of the loading team reports its writes, and once more when its copies have arrived.
      for (int i = 0; i < STAGES; ++i) mbarrier_init(here(i), 2 * 128);
      for (int i = 0; i < STAGES; ++i) mbarrier_init_for_groups(read(i), TEAMS * 4);
      mbarriers_started();
    }
  }
};

// A tile of the result: its first row, how many rows its expert has from there on (none after the last tile), and its
// first column. The loader names each stage's tile to the others.
struct ExpertTile {
  int row, height, column;
};
inline void put_expert_tile(threadgroup int* to, ExpertTile tile) {
  to[0] = tile.row, to[1] = tile.height, to[2] = tile.column;
}
inline ExpertTile get_expert_tile(threadgroup const int* from) {
  return ExpertTile{uniform(from[0]), uniform(from[1]), uniform(from[2])};
}

// Counts for each expert the tiles of ROWS rows of all experts up to this one.
template <int ROWS, typename PE>
inline void count_expert_tiles(threadgroup unsigned short* tiles, threadgroup int* totals, PE ends, int experts,
                               Place at) {
  const int e = at.index, rows = e < experts ? ends[e] - (e > 0 ? ends[e - 1] : 0) : 0;
  int upto = (rows + ROWS - 1) / ROWS, all = upto;
  DELTATUNE_UNROLL
  for (int step = 1; step < 32; step *= 2) {
    const int other = lane_exchange(all, step);
    upto += at.lane & step ? other : 0;
    all += other;
  }
  if (at.lane == 0) totals[at.group] = all;
  barrier();
  for (int group = 0; group < at.group; ++group) upto += totals[group];
  if (e < experts) tiles[e] = (unsigned short)upto;
  barrier();
}

// Returns the place of tile `number` of `across` in each row of tiles.
template <int ROWS, int COLUMNS, typename PE>
inline ExpertTile expert_tile(int number, int across, threadgroup const unsigned short* tiles, PE ends, int experts,
                              thread int& expert, int lane) {
  const int down = number / across;
  int found = 0;
  for (int e = lane; e < experts; e += 32) found += tiles[e] <= down ? 1 : 0;
  expert = (int)lane_sum((float)found);
  if (expert >= experts) return ExpertTile{0, 0, 0};
  const int start = expert > 0 ? ends[expert - 1] : 0, before = expert > 0 ? tiles[expert - 1] : 0;
  const int row = start + (down - before) * ROWS;
  return ExpertTile{row, ends[expert] - row, (number - down * across) * COLUMNS};
}

// Copies a thread's pieces of an adapter's part of a tile: RANK columns of ROWS rows and RANK inputs of COLUMNS outputs
// of the factor, with zeros up to a multiple of 16. `low_rank` and `factor` start at the tile.
template <typename In, int ROWS, int COLUMNS, int RANK, bool TRANSPOSED, typename PA, typename PB>
inline void copy_adapter(threadgroup In* rows, threadgroup In* weight, PA low_rank, PB factor, int outputs, int height,
                         int width, unsigned mbarrier, Place at) {
  constexpr int depth = padded(RANK);
  const int first = at.index / 8, piece = at.index % 8, own = first * 64 + ((piece ^ first) & 7) * 8;
  const bool aligned = aligned16(low_rank) && aligned16(factor), live = piece * 8 < RANK;
  // A piece that is not live is not read, but its address is that of an existing element.
  const int column = live ? piece * 8 : 0;
  const auto copy = [&](threadgroup In* to, auto from, bool there) {
    if (aligned) copy_signalled_piece(shared_place(to), from, there, mbarrier);
    else put_piece(to, from, there);
  };
  for (int row = 0; row < ROWS && piece * 8 < depth; row += 16)
    if (first + row < height)
      copy(rows + own + row * 64, low_rank + (long)(first + row) * RANK + column, live);
  if (TRANSPOSED) {
    for (int row = 0; row < COLUMNS && piece * 8 < depth; row += 16)
      if (first + row < width)
        copy(weight + own + row * 64, factor + (long)(first + row) * RANK + column, live);
  } else {
    for (int row = first; row < depth; row += 16)
      for (int panel = 0; panel < COLUMNS && panel < width; panel += 64)
        copy(weight + own + (row - first + panel) * 64,
             factor + (long)(row < RANK ? row : 0) * outputs + panel + piece * 8, row < RANK);
  }
  if (!aligned) copies_fence();
}

// Loads the operands of one tile after another: 64 inputs at a time, then those of the adapter.
template <typename In, int TEAMS, int COLUMNS, int BLOCKS, int RANK, bool TRANSPOSED, int GROUP, typename PX,
          typename PW, typename PS, typename PE, typename PA, typename PB>
inline void load_expert_tiles(Place at, Room room, ExpertBarriers barriers, int inputs, int outputs, int experts,
                              PX rows, PW weight, PS scales, PS biases, PE ends, PA low_rank, PB factor) {
  using Memory = HopperExpertMemory<In, TEAMS, COLUMNS, (GROUP > 0)>;
  constexpr int ROWS = TEAMS * 64;
  const int across = (outputs + COLUMNS - 1) / COLUMNS, weight_stride = TRANSPOSED ? inputs : outputs;
  const bool rows_aligned = aligned16(rows);
  const int step = TRANSPOSED ? 64 : 64 * outputs;
  ExpertMatrix<In, COLUMNS, TRANSPOSED, GROUP, PW, PS> matrix(weight, scales, biases, weight_stride,
                                                              room.place + Memory::packed, at);
  const auto tiles = reinterpret_cast<threadgroup unsigned short*>(room.memory + Memory::tiles);
  // A thread's rows have equal numbers modulo 8, so its pieces have the same place in each.
  const int first = at.index / 8, piece = at.index % 8, own = first * 64 + ((piece ^ first) & 7) * 8;
  const auto part_of = [&](ExpertTile tile, int expert) {
    return (long)expert * inputs * outputs + (TRANSPOSED ? (long)tile.column * inputs : tile.column);
  };
  int stage = 0, use = 0, expert = 0, read_number = at.x;
  const auto next_part = [&]() {
    int of = 0;
    const ExpertTile tile = expert_tile<ROWS, COLUMNS>(read_number, across, tiles, ends, experts, of, at.lane);
    read_number += BLOCKS;
    return ExpertPart{(unsigned)part_of(tile, of), tile.height > 0 ? outputs - tile.column : 0};
  };
  for (int slot = 0; slot < Memory::slots; ++slot) matrix.read(inputs, step, next_part);
  for (int number = at.x;; number += BLOCKS) {
    const ExpertTile tile = expert_tile<ROWS, COLUMNS>(number, across, tiles, ends, experts, expert, at.lane);
    const int height = tile.height - first, width = outputs - tile.column;
    auto rows_from = rows + (long)(tile.row + first) * inputs + piece * 8;
    long number_in_weight = part_of(tile, expert);
    for (int left = inputs; left > (RANK > 0 ? -64 : 0); left -= 64) {
      const unsigned mbarrier = barriers.here(stage);
      if (use > 0) mbarrier_wait(barriers.read(stage), use - 1);
      if (at.index == 0)
        put_expert_tile(reinterpret_cast<threadgroup int*>(room.memory + Memory::places) + 4 * stage, tile);
      const auto start = reinterpret_cast<threadgroup In*>(room.memory + stage * Memory::stage);
      if (RANK > 0 && left <= 0 && tile.height > 0) {
        copy_adapter<In, ROWS, COLUMNS, RANK, TRANSPOSED>(
            start, start + Memory::weight / 2, low_rank + (long)tile.row * RANK,
            factor + (long)expert * RANK * outputs + (long)tile.column * (TRANSPOSED ? RANK : 1), outputs, tile.height,
            width, mbarrier, at);
      } else if (tile.height > 0) {
        copy_panels<ROWS, 1>(start + own, rows_from, inputs, height, 64, rows_aligned, mbarrier);
        matrix.put(start + Memory::weight / 2, number_in_weight, width, mbarrier, at);
      }
      mbarrier_arrive(mbarrier);
      signalled_pieces_sent(mbarrier);
      if (left > 0) matrix.read(inputs, step, next_part);
      if (++stage == Memory::stages) stage = 0, ++use;
      if (tile.height <= 0) return;
      rows_from += 64;
      number_in_weight += step;
    }
  }
}

// Adds the product of DEPTH inputs of a stage to d, or sets d to it: 64 rows times the matrix. The compiler gives a
// thread no product of more columns where a block has four teams.
template <typename In, int COLUMNS, bool TRANSPOSED, int DEPTH>
inline void multiply_expert_stage(thread float (&d)[COLUMNS / 2], unsigned rows, unsigned weight, bool onto) {
  copies_fence();
  register_fence(d);
  products_start();
  const unsigned left_place = opaque((rows & 0x3ffff) >> 4), right_place = opaque((weight & 0x3ffff) >> 4);
  DELTATUNE_UNROLL
  for (int k = 0; k < DEPTH / 16; ++k) {
    const unsigned long long left = rows_operand(left_place + k * 2);
    DELTATUNE_UNROLL
    for (int side = 0; side < COLUMNS / 128; ++side) {
      const unsigned right = right_place + side * 1024;
      if (TRANSPOSED) Products<In, 128>::rows(d + 64 * side, left, rows_operand(right + k * 2), onto || k > 0);
      else Products<In, 128>::shared_columns(d + 64 * side, left, columns_operand(right + k * 128, 8192), onto || k > 0);
    }
  }
  products_sent();
  products_wait<0>();
  register_fence(d);
}

// Writes a warp's 16 rows of a tile, of which `height` are there, by way of its 2048 bytes of shared memory: 64 columns
// at a time, in the form of a packed tile. `onto` and `out` start at the strip; `width` columns are left of the matrix.
template <typename In, int COLUMNS, bool ADDED, typename PO>
inline void write_expert_strip(threadgroup In* strip, const thread float (&sums)[COLUMNS / 2], float factor, PO onto,
                               GLOBAL In* out, int stride, int height, int width, int lane) {
  const unsigned place = shared_place(strip) + (lane & 15) * 128;
  const int first = lane / 8, piece = lane % 8 * 8;
  DELTATUNE_UNROLL
  for (int part = 0; part < COLUMNS / 64; ++part) {
    if (part * 64 >= width) continue;
    if (ADDED) {
      for (int row = first; row < 16; row += 4)
        put_piece(strip + row * 64 + ((lane ^ row) & 7) * 8, onto + (long)row * stride + part * 64 + piece,
                  row < height);
      group_barrier();
    }
    DELTATUNE_UNROLL
    for (int j = 0; j < 4; ++j) {
      unsigned pairs[4];
      DELTATUNE_UNROLL
      for (int i = 0; i < 4; ++i) {
        float x = factor * sums[part * 32 + j * 8 + 2 * i], y = factor * sums[part * 32 + j * 8 + 2 * i + 1];
        if (ADDED) {
          const int row = lane / 4 + (i & 1) * 8;
          threadgroup const In* old = strip + row * 64 + (((2 * j + (i >> 1)) ^ row) & 7) * 8 + lane % 4 * 2;
          x = static_cast<float>(old[0]) + x, y = static_cast<float>(old[1]) + y;
        }
        pairs[i] = PairOf<In>::of(x, y);
      }
      put_parts(place + (((2 * j + (lane >> 4)) ^ lane) & 7) * 16, pairs);
    }
    group_barrier();
    DELTATUNE_UNROLL
    for (int row = first; row < 16; row += 4)
      if (row < height)
        put_whole_piece(out + (long)row * stride + part * 64 + piece, strip + row * 64 + ((lane ^ row) & 7) * 8);
    group_barrier();
  }
}

// A barrier of one team that multiplies.
inline void expert_team_barrier(int team) {
  if (team == 1) named_barrier<128, 1>();
  else if (team == 2) named_barrier<128, 2>();
  else named_barrier<128, 3>();
}

// Computes a team's 64 rows of one tile after another.
template <typename In, int TEAMS, int COLUMNS, int RANK, bool TRANSPOSED, bool ADDED, bool PACKED, typename PO>
inline void multiply_expert_tiles(Place at, Room room, ExpertBarriers barriers, int inputs, int outputs, float scale,
                                  PO onto, GLOBAL In* out) {
  using Memory = HopperExpertMemory<In, TEAMS, COLUMNS, PACKED>;
  const int team = at.group / 4, top = (team - 1) * 64, strip = at.group % 4;
  const int steps = inputs / 64 + (RANK > 0 ? 1 : 0);
  int stage = 0, use = 0;
  const auto advance = [&]() {
    release(barriers.read(stage), at);
    if (++stage == Memory::stages) stage = 0, ++use;
  };
  float sums[COLUMNS / 2];
  for (;;) {
    mbarrier_wait(barriers.here(stage), use);
    const ExpertTile tile =
        get_expert_tile(reinterpret_cast<threadgroup const int*>(room.memory + Memory::places) + 4 * stage);
    if (tile.height <= 0) return;
    if (tile.height <= top) {
      for (int step = 0; step < steps; ++step) {
        mbarrier_wait(barriers.here(stage), use);
        advance();
      }
      continue;
    }
    for (int step = 0;; ++step) {
      mbarrier_wait(barriers.here(stage), use);
      const unsigned place = room.place + stage * Memory::stage;
      multiply_expert_stage<In, COLUMNS, TRANSPOSED, 64>(sums, place + Memory::rows + top * 128, place + Memory::weight,
                                                         step > 0);
      if (step + 1 == inputs / 64) break;
      advance();
    }
    if (RANK > 0) {
      advance();
      mbarrier_wait(barriers.here(stage), use);
      const unsigned place = room.place + stage * Memory::stage;
      multiply_expert_stage<In, COLUMNS, TRANSPOSED, padded(RANK)>(sums, place + Memory::rows + top * 128,
                                                                   place + Memory::weight, true);
    }
    // The last stage's rows have been multiplied by all warps, and the results take their place.
    expert_team_barrier(team);
    const int row = top + strip * 16;
    const long first = (long)(tile.row + row) * outputs + tile.column;
    const auto memory = room.memory + stage * Memory::stage + Memory::rows + row * 128;
    if (tile.height > row)
      write_expert_strip<In, COLUMNS, ADDED>(reinterpret_cast<threadgroup In*>(memory), sums, scale, onto + first,
                                             out + first, outputs, tile.height - row, outputs - tile.column, at.lane);
    advance();
  }
}

// Computes the outputs of expert_product, for inputs and outputs that are multiples of 64. With RANK, the sum that
// `scale` multiplies contains the product of an adapter's rows low_rank [R, RANK] and factor, [E, N, RANK] if
// TRANSPOSED and else [E, RANK, N]. The grid is BLOCKS blocks at most. Block b computes the tiles b, b + BLOCKS, and so
// on, of TEAMS x 64 rows and COLUMNS columns; those of one expert follow one another.
// With GROUP, the matrices are packed in 4 bits, and each GROUP numbers of a row have one of `scales` and `biases`.
template <typename In, int TEAMS, int COLUMNS, int BLOCKS, int RANK, bool TRANSPOSED, bool ADDED, int GROUP,
          typename PX, typename PW, typename PG, typename PH, typename PE, typename PS, typename PO, typename PA,
          typename PB>
inline void expert_hopper_product(Place at, threadgroup char* memory, int inputs, int outputs, int experts, PX rows,
                                  PW weight, PG scales, PH biases, PE ends, PS scale, PO onto, PA low_rank, PB factor,
                                  GLOBAL In* out) {
  using Memory = HopperExpertMemory<In, TEAMS, COLUMNS, (GROUP > 0)>;
  using Registers = ExpertRegisters<TEAMS, (GROUP > 0)>;
  static_assert(Registers::load + TEAMS * Registers::multiply <= (TEAMS + 1) * Registers::start,
                "teams share out what the block starts with");
  const Room room = room_of(memory);
  const ExpertBarriers barriers{room.place + Memory::barriers};
  barriers.template start<TEAMS, Memory::stages>(at);
  count_expert_tiles<TEAMS * 64>(reinterpret_cast<threadgroup unsigned short*>(room.memory + Memory::tiles),
                                 reinterpret_cast<threadgroup int*>(room.memory + Memory::totals), ends, experts, at);
  at.group = uniform(at.group);
  if (at.group < 4) {
    fewer_registers<Registers::load>();
    load_expert_tiles<In, TEAMS, COLUMNS, BLOCKS, RANK, TRANSPOSED, GROUP>(
        at, room, barriers, inputs, outputs, experts, rows, weight, scales, biases, ends, low_rank, factor);
  } else {
    more_registers<Registers::multiply>();
    multiply_expert_tiles<In, TEAMS, COLUMNS, RANK, TRANSPOSED, ADDED, (GROUP > 0)>(at, room, barriers, inputs, outputs,
                                                                                    scale[0], onto, out);
  }
}
