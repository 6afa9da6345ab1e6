// The shared memory of both scans, and how chunks and states are copied there and back.

// The sizes of a call, and how the groups of a block share its work: SPLIT groups do a strip of 16 rows of DV. Groups
// beyond those load the next chunk while the others compute; where there are none, all groups load.
template <typename Element, int POSITIONS, int KEY_SIZE, int VALUE_SIZE, int ROWS, int KEY_HEADS, int VALUE_HEADS,
          int BLOCK_GROUPS, int CHUNKS_IN_MEMORY, int STRIP_GROUPS, bool READ_UNSTAGED, bool HAS_MASK, bool HAS_BETA,
          bool GATE_A_CHANNEL>
struct ScanShape {
  using In = Element;
  using scores = typename Choose<HAS_BETA, Wide<In>, Saved<In>>::type;
  static constexpr constant int C = POSITIONS, DK = KEY_SIZE, DV = VALUE_SIZE, SLICE = ROWS;
  static constexpr constant int HK = KEY_HEADS, HV = VALUE_HEADS, GROUPS = BLOCK_GROUPS;
  static constexpr constant int STAGES = CHUNKS_IN_MEMORY, SPLIT = STRIP_GROUPS;
  static constexpr constant bool UNSTAGED = READ_UNSTAGED, MASKED = HAS_MASK, CHANNEL = GATE_A_CHANNEL;
  static constexpr constant bool ERASES = HAS_BETA;
  static constexpr constant int stride = stride_of(DK), square = row_of_chunk<In, C, DK, CHANNEL, HAS_BETA>();
  static constexpr constant int state_stride = row_of_state<In, DK, CHANNEL, HAS_BETA>();
  static constexpr constant int value_stride = SLICE + 8, value_rows = padded(DV), triangle = packed_offset(C / 16);
  static constexpr constant int numbers = CHANNEL ? C + padded(DK) : HAS_BETA ? 3 * C : 2 * C;
  // Tiles of a chunk and of a key, and those of them that a group has.
  static constexpr constant int blocks = C / 16, key_tiles = padded(DK) / 16;
  static constexpr constant int tiles = blocks / SPLIT, state_tiles = key_tiles / SPLIT;
  static constexpr constant int tails = tails_of<In, DK, CHANNEL>();
  static constexpr constant int computing = SLICE / 16 * SPLIT;
  static constexpr constant int loading = GROUPS > computing ? GROUPS - computing : GROUPS;
  // In fp32 a chunk's terms are summed first, so that the state, which is much larger, is rounded once per chunk.
  static constexpr constant bool add_separately = !CHANNEL && sizeof(In) == 4;
  static_assert(GROUPS >= computing, "SPLIT groups per strip");
  static_assert(key_tiles % SPLIT == 0 && blocks % SPLIT == 0, "halves of Dk and of a chunk's tiles");
};

// The shared memory of the two scans: STAGES times their operands of a chunk, then the strips.
template <typename Shape>
struct ScanMemory {
  using In = typename Shape::In;
  using Types = ScanTypes<In, Shape::CHANNEL>;
  static constexpr constant int C = Shape::C, DK = Shape::DK, triangle = Shape::triangle * Wide<In>::bytes;
  static constexpr constant int k = 0;
  // With a gate per channel, G K is there for the erase alone.
  static constexpr constant int keys_bytes = room_of<Shape::UNSTAGED, typename Types::keys, C, DK>();
  static constexpr constant int q = k + (Shape::ERASES || !Shape::CHANNEL ? keys_bytes : 0);
  static constexpr constant int ends = q + room_of<Shape::UNSTAGED, typename Types::queries, C, DK>();
  static constexpr constant int ends_bytes = room_of<Shape::UNSTAGED, typename Types::ends, C, DK>();
  static constexpr constant int solve = ends + (Shape::CHANNEL ? ends_bytes : 0);
  static constexpr constant int scores = solve + (Shape::ERASES ? triangle : 0);
  static constexpr constant int values = scores + Shape::triangle * Shape::scores::bytes;
  static constexpr constant int factors = values + C * Shape::value_stride * Exact<In>::bytes;
  static constexpr constant int stage = factors + Shape::numbers * 4;
  // A strip's tiles on their way out, or on their way to the other group.
  static constexpr constant int out = Shape::SPLIT > 1 ? Rooms<In, C, DK, Shape::CHANNEL, Shape::ERASES>::bytes
                                                       : 16 * staged<In>(Shape::state_stride, Shape::square);
  static constexpr constant int staging = Shape::STAGES * stage;
  static constexpr constant int arrivals = staging + Shape::SLICE / 16 * out;
  static constexpr constant int bytes = arrivals + 16;
};

// The arrays that both scans read by chunks, in device memory. `values` is v, or dy backward.
template <typename PQ, typename PK, typename PE, typename PV, typename PM, typename PF, typename PP>
struct ChunkArrays {
  PQ q;
  PK k;
  PE ends;
  PV values;
  PM mask;
  PF solve;
  PP scores;
  PF factors;
  int length;
};
template <typename PQ, typename PK, typename PE, typename PV, typename PM, typename PF, typename PP>
inline ChunkArrays<PQ, PK, PE, PV, PM, PF, PP> chunk_arrays(PQ q, PK k, PE ends, PV values, PM mask, PF solve,
                                                            PP scores, PF factors, int length) {
  return ChunkArrays<PQ, PK, PE, PV, PM, PF, PP>{q, k, ends, values, mask, solve, scores, factors, length};
}

// Copies the K and Q of a chunk to shared memory. With one gate per head they are rows of the inputs; with a gate per
// channel (the flag) they are blocks that the prepare kernel wrote.
template <typename Shape, typename Arrays, typename Live>
inline void load_keys(Flag<false>, Place at, threadgroup char* memory, thread Arrival& arrival, Arrays from, Live live,
                      long, long row) {
  using In = typename Shape::In;
  using Memory = ScanMemory<Shape>;
  constexpr int C = Shape::C, DK = Shape::DK, HK = Shape::HK, threads = Shape::loading * 32, stride = Shape::stride;
  const long first = (row * HK + at.y / (Shape::HV / HK)) * DK;
  copy_rows<C, padded(DK), threads>(shared_at<Exact<In>>(memory, Memory::k, C * stride), stride, from.k + first,
                                    HK * DK, DK, live, arrival, at.index);
  copy_rows<C, padded(DK), threads>(shared_at<Exact<In>>(memory, Memory::q, C * stride), stride, from.q + first,
                                    HK * DK, DK, live, arrival, at.index);
}
template <typename Shape, typename Arrays, typename Live>
inline void load_keys(Flag<true>, Place at, threadgroup char* memory, thread Arrival& arrival, Arrays from, Live,
                      long chunk, long) {
  using In = typename Shape::In;
  using Memory = ScanMemory<Shape>;
  constexpr int threads = Shape::loading * 32, count = Shape::C * Shape::stride;
  if (Shape::ERASES)
    copy_block<count, threads>(shared_at<Saved<In>>(memory, Memory::k, count),
                               stored_at<Saved<In>>(from.k, chunk, count), 0, arrival, at.index);
  copy_block<count, threads>(shared_at<Saved<In>>(memory, Memory::q, count), stored_at<Saved<In>>(from.q, chunk, count),
                             0, arrival, at.index);
  copy_block<count, threads>(shared_at<Wide<In>>(memory, Memory::ends, count),
                             stored_at<Wide<In>>(from.ends, chunk, count), 0, arrival, at.index);
}

// Returns a matrix of keys of a chunk: at `place` in the shared memory of the chunk or, with UNSTAGED, in device memory,
// where it is a block of its own with a gate per channel (the flag), and else rows of the input from `first` on.
template <typename Shape, typename Store, typename P, typename Live>
inline auto unstaged_keys(Flag<false>, P from, long, long first, Live live) {
  return unstaged_rows<Shape::DK>(from, first, Shape::HK * Shape::DK, live);
}
template <typename Shape, typename Store, typename P, typename Live>
inline auto unstaged_keys(Flag<true>, P from, long chunk, long, Live) {
  return stored_at<Store>(from, chunk, Shape::C * Shape::stride);
}
template <typename Shape, typename Store, typename P, typename Live>
inline auto keys_of(P from, threadgroup char* stage, int place, long chunk, long first, Live live) {
  return Choice<Shape::UNSTAGED>::of(unstaged_keys<Shape, Store>(Flag<Shape::CHANNEL>{}, from, chunk, first, live),
                                     shared_at<Store>(stage, place, Shape::C * Shape::stride));
}

// Starts to copy the operands of chunk n to shared memory.
template <typename Shape, typename Arrays>
inline void load_chunk(Place at, threadgroup char* memory, thread Arrival& arrival, Arrays from, int chunks, int n) {
  using In = typename Shape::In;
  using Memory = ScanMemory<Shape>;
  constexpr int C = Shape::C, SLICE = Shape::SLICE, DV = Shape::DV, HV = Shape::HV, threads = Shape::loading * 32;
  constexpr int triangle = Shape::triangle, numbers = Shape::numbers, value_stride = Shape::value_stride;
  const int t0 = n * C, first = at.x * SLICE;
  const long chunk = ((long)at.z * HV + at.y) * chunks + n, row = (long)at.z * from.length + t0;
  const auto live = alive<Shape::MASKED>(from.mask, at.z, t0, from.length);
  if (Shape::ERASES)
    copy_block<triangle, threads>(shared_at<Wide<In>>(memory, Memory::solve, triangle),
                                  stored_at<Wide<In>>(from.solve, chunk, triangle), 0, arrival, at.index);
  using Scores = typename Shape::scores;
  copy_block<triangle, threads>(shared_at<Scores>(memory, Memory::scores, triangle),
                                stored_at<Scores>(from.scores, chunk, triangle), 0, arrival, at.index);
  copy_floats<numbers>(reinterpret_cast<threadgroup float*>(memory + Memory::factors), from.factors + chunk * numbers,
                       arrival, at.index);
  if (!Shape::UNSTAGED) load_keys<Shape>(Flag<Shape::CHANNEL>{}, at, memory, arrival, from, live, chunk, row);
  copy_rows<C, SLICE, threads>(shared_at<Exact<In>>(memory, Memory::values, C * value_stride), value_stride,
                               from.values + (row * HV + at.y) * DV + first, HV * DV, DV - first, live, arrival,
                               at.index);
  copies_sent(arrival, at.index);
}

// Loads a group's part of a strip of a state, in fp32: STATE_TILES tiles from tile column `from_tile` on. They are
// zeros unless the state is `there`.
template <int DK, int DV, int STATE_TILES, typename P>
inline void load_state(thread Tile* state, P from, bool there, long head, int first, int from_tile, int lane) {
  DELTATUNE_UNROLL
  for (int m = 0; m < STATE_TILES; ++m) {
    DELTATUNE_UNROLL
    for (int e = 0; e < 8; ++e) {
      const int row = first + tile_row(e, lane), column = (from_tile + m) * 16 + tile_column(e, lane);
      state[m].set(e,
                   there && row < DV && column < DK ? static_cast<float>(from[(head * DV + row) * DK + column]) : 0.0f);
    }
  }
}
template <int DK, int DV, int STATE_TILES>
inline void store_state(thread const Tile* state, GLOBAL float* to, long head, int first, int from_tile, int lane) {
  DELTATUNE_UNROLL
  for (int m = 0; m < STATE_TILES; ++m) {
    DELTATUNE_UNROLL
    for (int e = 0; e < 8; ++e) {
      const int row = first + tile_row(e, lane), column = (from_tile + m) * 16 + tile_column(e, lane);
      if (row < DV && column < DK) to[(head * DV + row) * DK + column] = state[m].get(e);
    }
  }
}
template <int DK, int DV, int STATE_TILES>
inline void store_state(thread const Tile*, Nothing, long, int, int, int) {}

// Writes the strip of a state from row `first` on to its rows of `to`, with its tails where nothing is erased. Where two
// groups share a strip, each leaves its part in `room` for both, as `Held`.
template <typename Held, typename Shape, typename Target, typename Store>
inline void save_state(Target to, thread const Tile* state, Store room, threadgroup char* rooms, int first, int strip,
                       int part, int lane) {
  constexpr int state_tiles = Shape::state_tiles, stride = Shape::state_stride, tails = Shape::ERASES ? 0 : Shape::tails;
  const long offset = (long)first * stride;
  if (Shape::SPLIT > 1) {
    DELTATUNE_UNROLL
    for (int m = 0; m < state_tiles; ++m) {
      Held s;
      hold(s, state[m]);
      keep(room, (part * state_tiles + m) * 16, stride, s, lane);
    }
    write_part<stride, tails, state_tiles>(to, offset, room, state, part * state_tiles, strip,
                                           first < Shape::value_rows, lane);
  } else if (first < Shape::value_rows) {
    write_tiles_and_tails<state_tiles, tails, state_tiles>(to, offset, stride, state, state, rooms, lane);
  }
}

// Multiplies a tile of the state by the product of the chunk's gates: one number, or one per channel.
template <bool CHANNEL, int C>
inline void scale_state(thread Tile& tile, threadgroup const float* factors, int m, int lane) {
  if (CHANNEL) tile_scale_columns(tile, factors + C + m * 16, lane);
  else tile_scale(tile, factors[C - 1]);
}

// Writes a strip's columns of the positions that a group computed to rows of y or dv. `own` is the strip's
// first column in s.
template <int TILES, int SPLIT, int BLOCKS, int DV, typename Store, typename Target>
inline void write_tiles_of(Store s, int own, int value_stride, int part, Target to, long row, int heads, int first,
                           int length, int lane) {
  DELTATUNE_UNROLL
  for (int j = 0; j < TILES; ++j) {
    const int i = own_tile<SPLIT, BLOCKS>(j, part) * 16;
    write_rows<16, 16, 32>(s, i * value_stride + own, value_stride, to + (row + (long)i * heads) * DV + first,
                           heads * DV, length - i, DV - first, lane);
  }
}
