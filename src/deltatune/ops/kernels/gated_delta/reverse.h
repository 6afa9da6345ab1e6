// The reverse scan: goes through the chunks in reverse order and computes R, dv and the gradients of the states.
// Blocks, strips and groups are those of the forward scan.
// Inputs: q, k (and `ends` with CHANNEL), mask, solve, scores and factors as in the forward scan; dy [B,T,HV,DV];
// d_last [B,HV,DV,DK], the gradient of the last state.
// Outputs: for each of [B,HV,chunks], d_states [DV,DK], the gradient of the state after the chunk, and d_right [DV,C],
// which is R, both with padded rows; dv [B,T,HV,DV]; d_initial [B,HV,DV,DK].
template <typename In, int C, int DK, int DV, int SLICE, int HK, int HV, int GROUPS, int STAGES, int SPLIT,
          bool UNSTAGED, bool MASKED, bool CHANNEL, typename PQ, typename PK, typename PE, typename PY, typename PM,
              typename PI, typename PF,
          typename OS, typename OR, typename OV>
inline void reverse_chunks(Place at, threadgroup char* memory, int length, PQ q, PK k, PE ends, PY dy, PM mask,
                           PI d_last, PF solve, PF scores, PF factors, OS d_states, OR d_right, OV dv,
                           GLOBAL float* d_initial) {
  using Memory = ScanMemory<In, C, DK, SLICE, STAGES, SPLIT, UNSTAGED, CHANNEL>;
  using Room = Rooms<In, C, DK, CHANNEL>;
  using Types = ScanTypes<In, CHANNEL>;
  constexpr int stride = stride_of(DK), square = row_of_chunk<In, C, DK, CHANNEL>(), value_stride = SLICE + 8;
  constexpr int blocks = C / 16, key_tiles = padded(DK) / 16;
  constexpr int triangle = packed_offset(blocks), value_rows = padded(DV), state_tiles = key_tiles / SPLIT,
      tiles = blocks / SPLIT;
  constexpr int tails = tails_of<In, DK, CHANNEL>();
  // In fp32 a chunk's terms are summed first, so that the state, which is much larger, is rounded once per chunk.
  constexpr bool add_separately = !CHANNEL && sizeof(In) == 4;
  // Groups beyond those that compute load the chunks; where there are none, all groups load.
  constexpr int computing = SLICE / 16 * SPLIT, loading = GROUPS > computing ? GROUPS - computing : GROUPS;
  static_assert(GROUPS >= computing, "SPLIT groups per strip");
  static_assert(key_tiles % SPLIT == 0 && blocks % SPLIT == 0, "halves of Dk and of a chunk's tiles");
  const int strip = (unsigned)at.group / SPLIT, part = (unsigned)at.group % SPLIT, lane = at.lane;
  const int chunks = (length + C - 1) / C, own = strip * 16, first = at.x * SLICE + own;
  const long head = (long)at.z * HV + at.y;
  const bool computes = GROUPS == computing || at.group < computing, loads = GROUPS == computing || !computes;
  Place loader = at;
  loader.index -= GROUPS == computing ? 0 : computing * 32;

  Tile state[state_tiles];
  load_state<DK, DV, state_tiles>(state, d_last, computes, head, first, part * state_tiles, lane);
  arrivals_start(memory + Memory::arrivals, at.index);
  threadgroup char* rooms = memory + Memory::staging + strip * Memory::out;
  const Wide<In> state_room = shared_at<Wide<In>>(rooms, 0, 16 * stride);
  for (int step = STAGES > 1 ? -1 : 0; step < chunks; ++step) {
    const int coming = STAGES > 1 ? step + 1 : step, turn = STAGES > 1 ? coming & 1 : 0;
    const Arrival here = arrival_at(memory + Memory::arrivals, STAGES > 1 ? step & 1 : 0);
    if (STAGES > 1 && step >= 0) copies_wait(here, step >> 1);
    if (SPLIT > 1) writes_left();
    barrier();
    if (loads && coming < chunks) {
      Arrival arrival = arrival_at(memory + Memory::arrivals, turn);
      load_chunk<In, C, DK, DV, SLICE, HK, HV, loading, UNSTAGED, MASKED, CHANNEL, Memory>(
          loader, memory + turn * Memory::stage, arrival, q, k, ends, dy, mask, solve, scores, factors, length, chunks,
          chunks - 1 - coming);
    }
    if (step < 0) continue;
    if (STAGES == 1) {
      copies_wait(here, step);
      barrier();
    }
    if (!computes) continue;
    const int n = chunks - 1 - step;
    threadgroup char* stage = memory + (STAGES > 1 ? (step & 1) * Memory::stage : 0);
    const auto live = alive<MASKED>(mask, at.z, n * C, length);
    const long rows = (((long)at.z * length + n * C) * HK + at.y / (HV / HK)) * DK;
    const auto keys = Choice<UNSTAGED>::of(
        unstaged_keys<typename Types::keys, C, DK>(Flag<CHANNEL>{}, k, head * chunks + n, rows, HK * DK, live),
        shared_at<typename Types::keys>(stage, Memory::k, C * stride));
    const auto queries = Choice<UNSTAGED>::of(
        unstaged_keys<typename Types::queries, C, DK>(Flag<CHANNEL>{}, q, head * chunks + n, rows, HK * DK, live),
        shared_at<typename Types::queries>(stage, Memory::q, C * stride));
    const auto end_keys = Choice<UNSTAGED>::of(
        unstaged_keys<typename Types::ends, C, DK>(Flag<CHANNEL>{}, ends, head * chunks + n, rows, HK * DK, live),
        shared_at<typename Types::ends>(stage, Memory::ends, C * stride));
    const auto last_keys = Choice<CHANNEL>::of(end_keys, keys);
    const Exact<In> dy_rows = shared_at<Exact<In>>(stage, Memory::values, C * value_stride);
    const Wide<In> z = shared_at<Wide<In>>(stage, Memory::solve, triangle);
    const Wide<In> p = shared_at<Wide<In>>(stage, Memory::scores, triangle);
    threadgroup const float* before = reinterpret_cast<threadgroup const float*>(stage + Memory::factors);
    threadgroup const float* after = before + C;
    threadgroup const float* rate = CHANNEL ? before : after + C;
    const auto states_out = stored_at<Saved<In>>(d_states, head * chunks + n, value_rows * stride);
    const auto right_out = stored_at<Wide<In>>(d_right, head * chunks + n, value_rows * square);

    save_state<Precise<In>, SPLIT, state_tiles, stride, value_rows>(states_out, state, state_room, rooms, first, strip,
                                                                    part, lane);
    // x holds w, then R, both transposed: rows of DV by positions.
    Tile x[tiles];
    Chains<SPLIT, tiles> chains;
    chains.start();
    DELTATUNE_UNROLL
    for (int j = 0; j < tiles; ++j) tile_clear(x[j]);
    DELTATUNE_UNROLL
    for (int m = 0; m < key_tiles; ++m) {
      Precise<In> s;
      if (SPLIT > 1) s = left(straight(state_room, stride, 0, m * 16), lane);
      else hold(s, state[SPLIT > 1 ? 0 : m]);
      DELTATUNE_UNROLL
      for (int j = 0; j < tiles; ++j) {
        const int i = own_tile<SPLIT, blocks>(j, part) * 16;
        chains.add(x, j, m, s, right(turned(last_keys, stride, m * 16, i), lane), lane);
      }
    }
    chains.finish(x);
    DELTATUNE_UNROLL
    for (int j = 0; j < tiles; ++j) {
      if (!CHANNEL) tile_scale_columns(x[j], after + own_tile<SPLIT, blocks>(j, part) * 16, lane);
    }
    Rough<In> dy_tiles[blocks], decayed_dy[blocks];
    DELTATUNE_UNROLL
    for (int i = 0; i < blocks; ++i) {
      Tile t = tile_of(turned(dy_rows, value_stride, own, i * 16), lane);
      hold(dy_tiles[i], t);
      if (!CHANNEL) tile_scale_columns(t, before + i * 16, lane);
      hold(decayed_dy[i], t);
    }
    if (part == 0) add_rough_times<0, In, blocks, SPLIT>(x, dy_tiles, p, lane);
    else add_rough_times<1, In, blocks, SPLIT>(x, dy_tiles, p, lane);
    Strip<In, blocks, SPLIT> rated = strip_at<In, blocks, SPLIT>(rooms, Room::rated_w);
    DELTATUNE_UNROLL
    for (int j = 0; j < tiles; ++j) {
      const int tile = own_tile<SPLIT, blocks>(j, part);
      Tile scaled;
      DELTATUNE_UNROLL
      for (int e = 0; e < 8; ++e) scaled.set(e, -rate[tile * 16 + tile_column(e, lane)] * x[j].get(e));
      rated.put(j, tile, scaled, lane);
    }
    if (SPLIT > 1) pair_barrier(strip);
    if (part == 0) add_times<0>(x, rated, z, lane);
    else add_times<1>(x, rated, z, lane);
    if (SPLIT == 1 && first < value_rows)
      write_tiles_and_tails<tiles, tails, state_tiles>(right_out, (long)first * square, square, x, state, rooms, lane);
    Strip<In, blocks, SPLIT> right_part = strip_at<In, blocks, SPLIT>(rooms, Room::rated_gradient);
    const Wide<In> right_gradient_room = shared_at<Wide<In>>(rooms, Room::right_gradient, 16 * square);
    DELTATUNE_UNROLL
    for (int j = 0; j < tiles; ++j) {
      const int tile = own_tile<SPLIT, blocks>(j, part);
      if (SPLIT > 1) {
        Precise<In> right_gradient;
        hold(right_gradient, x[j]);
        keep(right_gradient_room, tile * 16, square, right_gradient, lane);
      }
      tile_scale_columns(x[j], rate + tile * 16, lane);
      put_turned(dy_rows, tile * 16 * value_stride + own, value_stride, x[j], lane);
      DELTATUNE_UNROLL
      for (int e = 0; e < 8; ++e)
        x[j].set(e, (CHANNEL ? -1.0f : -before[tile * 16 + tile_column(e, lane)]) * x[j].get(e));
      right_part.put(j, tile, x[j], lane);
    }
    if (SPLIT > 1) {
      keep_tails<tails, state_tiles>(right_gradient_room, 0, square, state, part * state_tiles, lane);
      copies_fence();
      pair_barrier(strip);
      if (part == 0 && first < value_rows) write_strip<16 * square>(right_out, (long)first * square,
          right_gradient_room, lane);
    }
    DELTATUNE_UNROLL
    for (int m = 0; m < state_tiles; ++m) scale_state<CHANNEL, C>(state[m], before, part * state_tiles + m, lane);
    DELTATUNE_UNROLL
    for (int m = 0; add_separately && m < state_tiles; ++m)
      add_separate_sum<blocks>(state[m], decayed_dy, queries, stride, (part * state_tiles + m) * 16, lane);
    DELTATUNE_UNROLL
    for (int m = 0; add_separately && m < state_tiles; ++m)
      add_separate_sum<blocks>(state[m], right_part, keys, stride, (part * state_tiles + m) * 16, lane);
    DELTATUNE_UNROLL
    for (int i = 0; !add_separately && i < blocks; ++i) {
      const Precise<In> a = right_part.get(i, lane);
      DELTATUNE_UNROLL
      for (int m = 0; m < state_tiles; ++m) {
        const int column = (part * state_tiles + m) * 16;
        multiply(state[m], decayed_dy[i], right(straight(queries, stride, i * 16, column), lane), lane);
        multiply(state[m], a, right(straight(keys, stride, i * 16, column), lane), lane);
      }
    }
    group_barrier();
    write_tiles_of<tiles, SPLIT, blocks, DV>(dy_rows, own, value_stride, part, dv,
                                             ((long)at.z * length + n * C) * HV + at.y, HV, first, length - n * C,
                                                 lane);
  }
  if (!computes) return;
  writes_done();
  store_state<DK, DV, state_tiles>(state, d_initial, head, first, part * state_tiles, lane);
}
template <typename In, int C, int DK, int DV, int SLICE, int HK, int HV, int GROUPS, int STAGES, int SPLIT,
          bool UNSTAGED, bool MASKED, typename PQ, typename PK, typename PY, typename PM, typename PE, typename PF,
              typename OS, typename OR,
          typename OV>
inline void gated_delta_reverse(Place at, threadgroup char* memory, int length, PQ q, PK k, PY dy, PM mask, PE d_last,
                                PF solve, PF scores, PF factors, OS d_states, OR d_right, OV dv,
                                GLOBAL float* d_initial) {
  reverse_chunks<In, C, DK, DV, SLICE, HK, HV, GROUPS, STAGES, SPLIT, UNSTAGED, MASKED, false>(
      at, memory, length, q, k, k, dy, mask, d_last, solve, scores, factors, d_states, d_right, dv, d_initial);
}
