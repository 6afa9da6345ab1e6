// The reverse scan: goes through the chunks in reverse order and computes R, dv and the gradients of the states.
// Blocks, strips and groups are those of the forward scan.
// Inputs: q, k (and `ends` with CHANNEL), mask, solve, scores and factors as in the forward scan; dy [B,T,HV,DV];
// d_last [B,HV,DV,DK], the gradient of the last state.
// Outputs: for each of [B,HV,chunks], d_states [DV,DK], the gradient of the state after the chunk, and d_right [DV,C],
// which is R, both with padded rows; dv [B,T,HV,DV]; d_initial [B,HV,DV,DK], or Nothing.
template <typename Shape, typename PQ, typename PK, typename PE, typename PY, typename PM, typename PI, typename PF,
          typename PP, typename OS, typename OR, typename OV, typename OI>
inline void reverse_chunks(Place at, threadgroup char* memory, int length, PQ q, PK k, PE ends, PY dy, PM mask,
                           PI d_last, PF solve, PP scores, PF factors, OS d_states, OR d_right, OV dv,
                           OI d_initial) {
  using In = typename Shape::In;
  using Memory = ScanMemory<Shape>;
  using Room = Rooms<In, Shape::C, Shape::DK, Shape::CHANNEL, Shape::ERASES>;
  using Types = ScanTypes<In, Shape::CHANNEL>;
  constexpr int C = Shape::C, DK = Shape::DK, DV = Shape::DV, SLICE = Shape::SLICE, HK = Shape::HK, HV = Shape::HV;
  constexpr int GROUPS = Shape::GROUPS, STAGES = Shape::STAGES, SPLIT = Shape::SPLIT, computing = Shape::computing;
  constexpr bool CHANNEL = Shape::CHANNEL, ERASES = Shape::ERASES, add_separately = Shape::add_separately;
  constexpr int stride = Shape::stride, square = Shape::square, value_stride = Shape::value_stride;
  constexpr int state_stride = Shape::state_stride;
  constexpr int blocks = Shape::blocks, key_tiles = Shape::key_tiles, tiles = Shape::tiles, tails = Shape::tails;
  constexpr int state_tiles = Shape::state_tiles, triangle = Shape::triangle, value_rows = Shape::value_rows;
  const auto arrays = chunk_arrays(q, k, ends, dy, mask, solve, scores, factors, length);
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
  const Wide<In> state_room = shared_at<Wide<In>>(rooms, 0, 16 * state_stride);
  for (int step = STAGES > 1 ? -1 : 0; step < chunks; ++step) {
    const int coming = STAGES > 1 ? step + 1 : step, turn = STAGES > 1 ? coming & 1 : 0;
    const Arrival here = arrival_at(memory + Memory::arrivals, STAGES > 1 ? step & 1 : 0);
    if (STAGES > 1 && step >= 0) copies_wait(here, step >> 1);
    if (SPLIT > 1) writes_left();
    barrier();
    if (loads && coming < chunks) {
      Arrival arrival = arrival_at(memory + Memory::arrivals, turn);
      load_chunk<Shape>(loader, memory + turn * Memory::stage, arrival, arrays, chunks, chunks - 1 - coming);
    }
    if (step < 0) continue;
    if (STAGES == 1) {
      copies_wait(here, step);
      barrier();
    }
    if (!computes) continue;
    const int n = chunks - 1 - step;
    threadgroup char* stage = memory + (STAGES > 1 ? (step & 1) * Memory::stage : 0);
    const auto live = alive<Shape::MASKED>(mask, at.z, n * C, length);
    const long rows = (((long)at.z * length + n * C) * HK + at.y / (HV / HK)) * DK;
    const long chunk = head * chunks + n;
    const auto keys = keys_of<Shape, typename Types::keys>(k, stage, Memory::k, chunk, rows, live);
    const auto queries = keys_of<Shape, typename Types::queries>(q, stage, Memory::q, chunk, rows, live);
    const auto own_ends = Choice<CHANNEL>::of(ends, k);
    const auto last_keys = Choice<CHANNEL>::of(
        keys_of<Shape, typename Types::ends>(own_ends, stage, Memory::ends, chunk, rows, live), keys);
    const Exact<In> dy_rows = shared_at<Exact<In>>(stage, Memory::values, C * value_stride);
    const Wide<In> z = shared_at<Wide<In>>(stage, Memory::solve, triangle);
    const auto p = shared_at<typename Shape::scores>(stage, Memory::scores, triangle);
    threadgroup const float* before = reinterpret_cast<threadgroup const float*>(stage + Memory::factors);
    threadgroup const float* after = before + C;
    threadgroup const float* rate = CHANNEL ? before : after + C;
    const auto states_out = stored_at<Saved<In>>(d_states, chunk, value_rows * state_stride);
    const auto right_out = stored_at<Wide<In>>(d_right, chunk, value_rows * square);

    save_state<Precise<In>, Shape>(states_out, state, state_room, rooms, first, strip, part, lane);
    // x holds w, then R, both transposed: rows of DV by positions.
    Tile x[tiles];
    Chains<SPLIT, tiles> chains;
    chains.start();
    clear_tiles<tiles>(x);
    DELTATUNE_UNROLL
    for (int m = 0; m < key_tiles; ++m) {
      Precise<In> s;
      if (SPLIT > 1) s = left(straight(state_room, state_stride, 0, m * 16), lane);
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
    for (int j = 0; ERASES && j < tiles; ++j) {
      const int tile = own_tile<SPLIT, blocks>(j, part);
      Tile scaled;
      DELTATUNE_UNROLL
      for (int e = 0; e < 8; ++e) scaled.set(e, -rate[tile * 16 + tile_column(e, lane)] * x[j].get(e));
      rated.put(j, tile, scaled, lane);
    }
    if (SPLIT > 1) pair_barrier(strip);
    if (ERASES && part == 0) add_times<0>(x, rated, z, lane);
    else if (ERASES) add_times<1>(x, rated, z, lane);
    if (ERASES && SPLIT == 1 && first < value_rows)
      write_tiles_and_tails<tiles, tails, state_tiles>(right_out, (long)first * square, square, x, state, rooms, lane);
    Strip<In, blocks, SPLIT> right_part = strip_at<In, blocks, SPLIT>(rooms, Room::rated_gradient);
    const Wide<In> right_gradient_room = shared_at<Wide<In>>(rooms, Room::right_gradient, 16 * square);
    DELTATUNE_UNROLL
    for (int j = 0; j < tiles; ++j) {
      const int tile = own_tile<SPLIT, blocks>(j, part);
      if (ERASES && SPLIT > 1) {
        Precise<In> right_gradient;
        hold(right_gradient, x[j]);
        keep(right_gradient_room, tile * 16, square, right_gradient, lane);
      }
      if (ERASES) tile_scale_columns(x[j], rate + tile * 16, lane);
      put_turned(dy_rows, tile * 16 * value_stride + own, value_stride, x[j], lane);
      if (!ERASES) continue;
      DELTATUNE_UNROLL
      for (int e = 0; e < 8; ++e)
        x[j].set(e, (CHANNEL ? -1.0f : -before[tile * 16 + tile_column(e, lane)]) * x[j].get(e));
      right_part.put(j, tile, x[j], lane);
    }
    if (ERASES && SPLIT > 1) {
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
    for (int m = 0; ERASES && add_separately && m < state_tiles; ++m)
      add_separate_sum<blocks>(state[m], right_part, keys, stride, (part * state_tiles + m) * 16, lane);
    DELTATUNE_UNROLL
    for (int i = 0; !add_separately && i < blocks; ++i) {
      Precise<In> a;
      if (ERASES) a = right_part.get(i, lane);
      DELTATUNE_UNROLL
      for (int m = 0; m < state_tiles; ++m) {
        const int column = (part * state_tiles + m) * 16;
        multiply(state[m], decayed_dy[i], right(straight(queries, stride, i * 16, column), lane), lane);
        if (ERASES) multiply(state[m], a, right(straight(keys, stride, i * 16, column), lane), lane);
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
