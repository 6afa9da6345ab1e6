// The shared memory of both scans, and how chunks and states are copied there and back.

// The shared memory of the two scans: STAGES times their operands of a chunk, then the strips.
template <typename In, int C, int DK, int SLICE, int STAGES, int SPLIT, bool UNSTAGED, bool CHANNEL = false>
struct ScanMemory {
  using Types = ScanTypes<In, CHANNEL>;
  static constexpr constant int k = 0;
  static constexpr constant int q = k + room_of<UNSTAGED, typename Types::keys, C, DK>();
  static constexpr constant int ends = q + room_of<UNSTAGED, typename Types::queries, C, DK>();
  static constexpr constant int solve = ends + (CHANNEL ? room_of<UNSTAGED, typename Types::ends, C, DK>() : 0);
  static constexpr constant int scores = solve + packed_offset(C / 16) * Wide<In>::bytes;
  static constexpr constant int values = scores + packed_offset(C / 16) * Wide<In>::bytes;
  static constexpr constant int factors = values + C * (SLICE + 8) * Exact<In>::bytes;
  static constexpr constant int stage = factors + (CHANNEL ? C + padded(DK) : 3 * C) * 4;
  // A strip's tiles on their way out, or on their way to the other group.
  static constexpr constant int out = SPLIT > 1 ? Rooms<In, C, DK, CHANNEL>::bytes
                                                  : 16 * staged<In>(stride_of(DK), row_of_chunk<In, C, DK, CHANNEL>());
  static constexpr constant int staging = STAGES * stage;
  static constexpr constant int arrivals = staging + SLICE / 16 * out;
  static constexpr constant int bytes = arrivals + 16;
};

// Copies the K and Q of a chunk to shared memory. With one gate per head they are rows of the inputs; with a gate per
// channel (the flag) they are blocks that the prepare kernel wrote.
template <typename In, int C, int DK, int HK, int HV, int GROUPS, typename Memory, typename PQ, typename PK,
          typename PE, typename Live>
inline void load_keys(Flag<false>, Place at, threadgroup char* memory, thread Arrival& arrival, PQ q, PK k,
                      PE, Live live, long, long row) {
  constexpr int threads = GROUPS * 32, stride = stride_of(DK), columns = padded(DK);
  const long from = (row * HK + at.y / (HV / HK)) * DK;
  copy_rows<C, columns, threads>(shared_at<Exact<In>>(memory, Memory::k, C * stride), stride, k + from, HK * DK, DK,
                                 live, arrival, at.index);
  copy_rows<C, columns, threads>(shared_at<Exact<In>>(memory, Memory::q, C * stride), stride, q + from, HK * DK, DK,
                                 live, arrival, at.index);
}
template <typename In, int C, int DK, int HK, int HV, int GROUPS, typename Memory, typename PQ, typename PK,
          typename PE, typename Live>
inline void load_keys(Flag<true>, Place at, threadgroup char* memory, thread Arrival& arrival, PQ q, PK k,
                      PE ends, Live, long chunk, long) {
  constexpr int threads = GROUPS * 32, count = C * stride_of(DK);
  copy_block<count, threads>(shared_at<Saved<In>>(memory, Memory::k, count), stored_at<Saved<In>>(k, chunk, count), 0,
                             arrival, at.index);
  copy_block<count, threads>(shared_at<Saved<In>>(memory, Memory::q, count), stored_at<Saved<In>>(q, chunk, count), 0,
                             arrival, at.index);
  copy_block<count, threads>(shared_at<Wide<In>>(memory, Memory::ends, count), stored_at<Wide<In>>(ends, chunk, count),
                             0, arrival, at.index);
}

// Returns the same matrices where they are in device memory, for UNSTAGED.
template <typename Store, int C, int DK, typename P, typename Live>
inline UnstagedRows<DK, P, Live> unstaged_keys(Flag<false>, P from, long, long first, int row_stride, Live live) {
  return unstaged_rows<DK>(from, first, row_stride, live);
}
template <typename Store, int C, int DK, typename P, typename Live>
inline auto unstaged_keys(Flag<true>, P from, long chunk, long, int, Live)
    -> decltype(stored_at<Store>(from, chunk, C * stride_of(DK))) {
  return stored_at<Store>(from, chunk, C * stride_of(DK));
}

template <typename In, int C, int DK, int DV, int SLICE, int HK, int HV, int GROUPS, bool UNSTAGED, bool MASKED,
          bool CHANNEL, typename Memory, typename PQ, typename PK, typename PE, typename PV, typename PM,
              typename PF>
inline void load_chunk(Place at, threadgroup char* memory, thread Arrival& arrival, PQ q, PK k, PE ends, PV values,
                       PM mask, PF solve, PF scores, PF factors, int length, int chunks, int n) {
  constexpr int threads = GROUPS * 32, triangle = packed_offset(C / 16);
  constexpr int numbers = CHANNEL ? C + padded(DK) : 3 * C;
  const int t0 = n * C, first = at.x * SLICE;
  const long chunk = ((long)at.z * HV + at.y) * chunks + n, row = (long)at.z * length + t0;
  const auto live = alive<MASKED>(mask, at.z, t0, length);
  copy_block<triangle, threads>(shared_at<Wide<In>>(memory, Memory::solve, triangle),
                                stored_at<Wide<In>>(solve, chunk, triangle), 0, arrival, at.index);
  copy_block<triangle, threads>(shared_at<Wide<In>>(memory, Memory::scores, triangle),
                                stored_at<Wide<In>>(scores, chunk, triangle), 0, arrival, at.index);
  copy_floats<numbers>(reinterpret_cast<threadgroup float*>(memory + Memory::factors), factors + chunk * numbers,
                       arrival, at.index);
  if (!UNSTAGED)
    load_keys<In, C, DK, HK, HV, GROUPS, Memory>(Flag<CHANNEL>{}, at, memory, arrival, q, k,
                                                 ends, live, chunk, row);
  copy_rows<C, SLICE, threads>(shared_at<Exact<In>>(memory, Memory::values, C * (SLICE + 8)), SLICE + 8,
                               values + (row * HV + at.y) * DV + first, HV * DV, DV - first, live, arrival, at.index);
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

// Writes the strip of a state from row `first` on to its rows of `to`. Where two groups share a strip, each leaves its
// part in `room` for both, as `Held`.
template <typename Held, int SPLIT, int STATE_TILES, int STRIDE, int ROWS, typename Target, typename Store>
inline void save_state(Target to, thread const Tile* state, Store room, threadgroup char* rooms, int first, int strip,
                       int part, int lane) {
  if (SPLIT > 1) {
    DELTATUNE_UNROLL
    for (int m = 0; m < STATE_TILES; ++m) {
      Held s;
      hold(s, state[m]);
      keep(room, (part * STATE_TILES + m) * 16, STRIDE, s, lane);
    }
    copies_fence();
    pair_barrier(strip);
    if (part == 0 && first < ROWS) write_strip<16 * STRIDE>(to, (long)first * STRIDE, room, lane);
  } else if (first < ROWS) {
    write_tiles<STATE_TILES>(to, (long)first * STRIDE, STRIDE, state, rooms, lane);
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
