// The forward scan of linear attention: u is v, so that a group reads the strip's columns of all positions in shared
// memory. Scales the outputs by G, adds P v to them, and adds E v times columns of keys to its part of the decayed state.
template <int PART, typename Shape, typename Values, typename Triangle, typename Keys>
inline void add_values(thread Tile* sums, thread Tile* state, Values values, Triangle triangle, Keys keys,
                       threadgroup const float* factors, int own, int lane) {
  using In = typename Shape::In;
  constexpr int blocks = Shape::blocks, state_tiles = Shape::state_tiles, first = PART * state_tiles;
  Precise<In> ended[blocks];
  DELTATUNE_UNROLL
  for (int n = 0; !Shape::CHANNEL && n < Shape::tiles; ++n)
    tile_scale_columns(sums[n], factors + own_tile<Shape::SPLIT, blocks>(n, PART) * 16, lane);
  DELTATUNE_UNROLL
  for (int j = 0; j < blocks; ++j) {
    Tile value = tile_of(turned(values, Shape::value_stride, own, j * 16), lane);
    Rough<In> exact;
    hold(exact, value);
    DELTATUNE_UNROLL
    for (int n = 0; n < Shape::tiles; ++n) {
      const int i = own_tile<Shape::SPLIT, blocks>(n, PART);
      if (i >= j) multiply(sums[n], exact, right(packed_turned(triangle, i, j), lane), lane);
    }
    if (!Shape::CHANNEL) tile_scale_columns(value, factors + Shape::C + j * 16, lane);
    hold(ended[j], value);
  }
  DELTATUNE_UNROLL
  for (int m = 0; m < state_tiles; ++m) scale_state<Shape::CHANNEL, Shape::C>(state[m], factors, first + m, lane);
  DELTATUNE_UNROLL
  for (int m = 0; Shape::add_separately && m < state_tiles; ++m)
    add_separate_sum<blocks>(state[m], ended, keys, Shape::stride, (first + m) * 16, lane);
  DELTATUNE_UNROLL
  for (int j = 0; !Shape::add_separately && j < blocks; ++j) {
    DELTATUNE_UNROLL
    for (int m = 0; m < state_tiles; ++m)
      multiply(state[m], ended[j], right(straight(keys, Shape::stride, j * 16, (first + m) * 16), lane), lane);
  }
}

// The forward scan: goes through the chunks in order and computes y, u and the states, from the outputs of the prepare
// kernel. Each block does SLICE rows of one state; the grid is (slices of DV, HV, B).
// Inputs: q, k [B,T,HK,DK] (with CHANNEL, the scaled keys and queries of each chunk, and `ends`); v [B,T,HV,DV]; mask;
// initial [B,HV,DV,DK], read if has_initial; solve, scores, factors.
// Outputs: y [B,T,HV,DV]; for each of [B,HV,chunks], states [DV,DK] before the chunk and u [DV,C], both with padded
// rows; last [B,HV,DV,DK].
// A strip's state stays in the registers of its one or two groups, and strips do not depend on one another. Further
// groups, if there are any, copy the next chunk to shared memory while the others compute.
template <typename Shape, typename PQ, typename PK, typename PE, typename PV, typename PM, typename PI, typename PF,
          typename PP, typename OY, typename OS>
inline void scan_chunks(Place at, threadgroup char* memory, int length, PQ q, PK k, PE ends, PV v, PM mask, PI initial,
                        bool has_initial, PF solve, PP scores, PF factors, OY y, OS states, GLOBAL float* u,
                        GLOBAL float* last) {
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
  const auto arrays = chunk_arrays(q, k, ends, v, mask, solve, scores, factors, length);
  const int strip = (unsigned)at.group / SPLIT, part = (unsigned)at.group % SPLIT, lane = at.lane;
  const int chunks = (length + C - 1) / C, own = strip * 16, first = at.x * SLICE + own;
  const long head = (long)at.z * HV + at.y;
  const bool computes = GROUPS == computing || at.group < computing, loads = GROUPS == computing || !computes;
  Place loader = at;
  loader.index -= GROUPS == computing ? 0 : computing * 32;

  Tile state[state_tiles];
  load_state<DK, DV, state_tiles>(state, initial, has_initial && computes, head, first, part * state_tiles, lane);
  // With two stages a chunk is computed while the next one is copied; with one stage the block waits for each copy.
  arrivals_start(memory + Memory::arrivals, at.index);
  threadgroup char* rooms = memory + Memory::staging + strip * Memory::out;
  const Saved<In> state_room = shared_at<Saved<In>>(rooms, 0, 16 * state_stride);
  for (int step = STAGES > 1 ? -1 : 0; step < chunks; ++step) {
    const int coming = STAGES > 1 ? step + 1 : step, turn = STAGES > 1 ? coming & 1 : 0;
    const Arrival here = arrival_at(memory + Memory::arrivals, STAGES > 1 ? step & 1 : 0);
    if (STAGES > 1 && step >= 0) copies_wait(here, step >> 1);
    if (SPLIT > 1) writes_left();
    barrier();
    if (loads && coming < chunks) {
      Arrival arrival = arrival_at(memory + Memory::arrivals, turn);
      load_chunk<Shape>(loader, memory + turn * Memory::stage, arrival, arrays, chunks, coming);
    }
    if (step < 0) continue;
    if (STAGES == 1) {
      copies_wait(here, step);
      barrier();
    }
    if (!computes) continue;
    const int n = step;
    threadgroup char* stage = memory + (STAGES > 1 ? (step & 1) * Memory::stage : 0);
    const auto live = alive<Shape::MASKED>(mask, at.z, n * C, length);
    const long rows = (((long)at.z * length + n * C) * HK + at.y / (HV / HK)) * DK;
    const long chunk = head * chunks + n;
    const auto keys = keys_of<Shape, typename Types::keys>(k, stage, Memory::k, chunk, rows, live);
    const auto queries = keys_of<Shape, typename Types::queries>(q, stage, Memory::q, chunk, rows, live);
    const auto own_ends = Choice<CHANNEL>::of(ends, k);
    const auto last_keys = Choice<CHANNEL>::of(
        keys_of<Shape, typename Types::ends>(own_ends, stage, Memory::ends, chunk, rows, live), keys);
    const Exact<In> values = shared_at<Exact<In>>(stage, Memory::values, C * value_stride);
    const Wide<In> z = shared_at<Wide<In>>(stage, Memory::solve, triangle);
    const auto p = shared_at<typename Shape::scores>(stage, Memory::scores, triangle);
    threadgroup const float* before = reinterpret_cast<threadgroup const float*>(stage + Memory::factors);
    threadgroup const float* after = before + C;
    threadgroup const float* rate = CHANNEL ? before : after + C;
    const auto states_out = stored_at<Saved<In>>(states, chunk, value_rows * state_stride);
    const auto u_out = stored_at<Wide<In>>(u, chunk, value_rows * square);

    save_state<Rough<In>, Shape>(states_out, state, state_room, rooms, first, strip, part, lane);
    Tile x[tiles], out[tiles];
    DELTATUNE_UNROLL
    for (int j = 0; j < tiles; ++j) {
      tile_clear(x[j]);
      tile_clear(out[j]);
    }
    DELTATUNE_UNROLL
    for (int m = 0; m < key_tiles; ++m) {
      Rough<In> s;
      if (SPLIT > 1) s = left(straight(state_room, state_stride, 0, m * 16), lane);
      else hold(s, state[SPLIT > 1 ? 0 : m]);
      DELTATUNE_UNROLL
      for (int j = 0; j < tiles; ++j) {
        const int i = own_tile<SPLIT, blocks>(j, part) * 16;
        if (ERASES) multiply(x[j], s, right(turned(keys, stride, m * 16, i), lane), lane);
        multiply(out[j], s, right(turned(queries, stride, m * 16, i), lane), lane);
      }
    }
    if (!ERASES) {
      if (part == 0) add_values<0, Shape>(out, state, values, p, last_keys, before, own, lane);
      else add_values<1, Shape>(out, state, values, p, last_keys, before, own, lane);
      if (SPLIT > 1) pair_barrier(strip);
      DELTATUNE_UNROLL
      for (int j = 0; j < tiles; ++j)
        put_turned(values, own_tile<SPLIT, blocks>(j, part) * 16 * value_stride + own, value_stride, out[j], lane);
    } else {
      // x holds r, then u, then beta u, all transposed: rows of DV by positions.
      Strip<In, blocks, SPLIT> rights = strip_at<In, blocks, SPLIT>(rooms, Room::right);
      DELTATUNE_UNROLL
      for (int j = 0; j < tiles; ++j) {
        const int tile = own_tile<SPLIT, blocks>(j, part);
        const Tile value = tile_of(turned(values, value_stride, own, tile * 16), lane);
        Tile scaled;
        DELTATUNE_UNROLL
        for (int e = 0; e < 8; ++e) {
          const int i = tile * 16 + tile_column(e, lane);
          x[j].set(e, value.get(e) - (CHANNEL ? 1.0f : before[i]) * x[j].get(e));
          if (!CHANNEL) out[j].set(e, before[i] * out[j].get(e));
          scaled.set(e, -rate[i] * x[j].get(e));
        }
        rights.put(j, tile, scaled, lane);
      }
      if (SPLIT > 1) pair_barrier(strip);
      if (part == 0) add_times_turned<0>(x, rights, z, lane);
      else add_times_turned<1>(x, rights, z, lane);
      if (SPLIT == 1 && first < value_rows)
        write_tiles_and_tails<tiles, tails, state_tiles>(u_out, (long)first * square, square, x, state, rooms, lane);
      Strip<In, blocks, SPLIT> rated = strip_at<In, blocks, SPLIT>(rooms, Room::rated);
      Strip<In, blocks, SPLIT> ended = strip_at<In, blocks, SPLIT>(rooms, CHANNEL ? Room::rated : Room::ended);
      const Wide<In> u_room = shared_at<Wide<In>>(rooms, Room::u, 16 * square);
      DELTATUNE_UNROLL
      for (int j = 0; j < tiles; ++j) {
        const int tile = own_tile<SPLIT, blocks>(j, part);
        if (SPLIT > 1) {
          Precise<In> exact;
          hold(exact, x[j]);
          keep(u_room, tile * 16, square, exact, lane);
        }
        tile_scale_columns(x[j], rate + tile * 16, lane);
        rated.put(j, tile, x[j], lane);
        if (SPLIT > 1) {
          if (!CHANNEL) tile_scale_columns(x[j], after + tile * 16, lane);
          ended.put(j, tile, x[j], lane);
        }
      }
      if (SPLIT > 1) {
        keep_tails<tails, state_tiles>(u_room, 0, square, state, part * state_tiles, lane);
        copies_fence();
        pair_barrier(strip);
        if (part == 0 && first < value_rows) write_strip<16 * square>(u_out, (long)first * square, u_room, lane);
      }
      DELTATUNE_UNROLL
      for (int m = 0; m < state_tiles; ++m) scale_state<CHANNEL, C>(state[m], before, part * state_tiles + m, lane);
      if (SPLIT > 1) {
        if (part == 0) add_output_and_state<0, In, blocks, SPLIT, state_tiles>(out, state, rated, ended, p, last_keys,
            stride, lane);
        else add_output_and_state<1, In, blocks, SPLIT, state_tiles>(out, state, rated, ended, p, last_keys, stride,
            lane);
      } else {
        add_times_turned<0>(out, rated, p, lane);
      }
      DELTATUNE_UNROLL
      for (int j = 0; j < tiles; ++j) {
        const int tile = own_tile<SPLIT, blocks>(j, part);
        put_turned(values, tile * 16 * value_stride + own, value_stride, out[j], lane);
        if (SPLIT > 1) continue;
        if (!CHANNEL) tile_scale_columns(x[j], after + tile * 16, lane);
        ended.put(j, tile, x[j], lane);
      }
      if (SPLIT == 1 && add_separately) {
        DELTATUNE_UNROLL
        for (int m = 0; m < state_tiles; ++m) add_separate_sum<blocks>(state[m], ended, last_keys, stride, m * 16, lane);
      } else if (SPLIT == 1) {
        DELTATUNE_UNROLL
        for (int j = 0; j < blocks; ++j) {
          const Precise<In> a = ended.get(j, lane);
          DELTATUNE_UNROLL
          for (int m = 0; m < state_tiles; ++m)
            multiply(state[m], a, right(straight(last_keys, stride, j * 16, m * 16), lane), lane);
        }
      }
    }
    group_barrier();
    write_tiles_of<tiles, SPLIT, blocks, DV>(values, own, value_stride, part, y,
                                             ((long)at.z * length + n * C) * HV + at.y, HV, first, length - n * C,
                                                 lane);
  }
  if (!computes) return;
  writes_done();
  store_state<DK, DV, state_tiles>(state, last, head, first, part * state_tiles, lane);
}
