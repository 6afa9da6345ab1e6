// The gradients kernel: the gradients of q, k, log_g and beta, from the arrays that the two scans saved.

// How many parts the columns of DK have room for: each part is a group's, in each row of tiles.
inline constexpr int room_of_parts(int groups, int blocks) {
  return groups > 4 * blocks ? groups / blocks : 4;
}

// The shared memory of a block.
template <typename Shape>
struct GradientMemory {
  using In = typename Shape::In;
  static constexpr constant int C = Shape::C, DK = Shape::DK, SLICE = Shape::SLICE, STAGES = Shape::STAGES;
  static constexpr constant bool UNSTAGED = Shape::UNSTAGED;
  static constexpr constant int room = room_of_parts(Shape::GROUPS, Shape::blocks);
  static constexpr constant int state = 0;
  static constexpr constant int state_bytes = UNSTAGED ? 0 : SLICE * Shape::state_stride * Saved<In>::bytes;
  static constexpr constant int d_state = state + state_bytes, u = d_state + state_bytes;
  static constexpr constant int right = u + SLICE * Shape::saved * Wide<In>::bytes;
  static constexpr constant int values = right + SLICE * Shape::saved * Wide<In>::bytes;
  static constexpr constant int values_bytes = C * (SLICE + 8) * Exact<In>::bytes;
  static constexpr constant int dy = values + (Shape::ERASES ? 0 : values_bytes);
  static constexpr constant int stage = dy + C * Shape::slice_stride * Exact<In>::bytes;
  static constexpr constant int q = 0;
  static constexpr constant int k = q + room_of<UNSTAGED, Exact<In>, C, DK>();
  static constexpr constant int k_end = k + room_of<UNSTAGED, Exact<In>, C, DK>();
  // The weights of the pairs take the slices' memory once the slices are done; with one stage so do Q and K.
  static constexpr constant int slices = STAGES == 1 ? 0 : k_end;
  static constexpr constant int weights_y = k_end;
  static constexpr constant int weights_right = weights_y + C * (C + 8) * Wide<In>::bytes;
  static constexpr constant int pairs_end = weights_right + (Shape::ERASES ? C * (C + 8) * Wide<In>::bytes : 0);
  // Where a slice is a whole state, the next value head's is loaded while this one is computed. The weights then take
  // the memory of this head's slice.
  static constexpr constant bool ahead = STAGES > 1 && SLICE >= Shape::DV && pairs_end - k_end <= stage;
  static constexpr constant int slices_end = slices + STAGES * stage;
  static constexpr constant int diagonal = pairs_end > slices_end ? pairs_end : slices_end;
  static constexpr constant int decay = diagonal + C * 17 * 4;
  static constexpr constant int scalars = decay + padded(Decay<C>::floats * 4);
  static constexpr constant int sums = scalars + (ahead ? 7 : 4) * C * 4;
  static constexpr constant int parts = sums + 2 * C * (C / 16) * 4;
  static constexpr constant int arrivals = parts + 3 * C * room * 4 + 32 * 4;
  static constexpr constant int bytes = arrivals + 16;
};

// The gradients of a group's tiles of Q and K, summed over the value heads.
template <typename Shape>
struct KeyGradients {
  thread Tile (&dq)[Shape::column_tiles];
  thread Tile (&dk)[Shape::column_tiles];
};

// Adds to dq and dk their terms through the states: G dY S, -G beta R^T S and E beta u^T dS. Writes the terms of the
// gates and of beta that the group's rows have there.
template <typename Shape, typename Tables, typename Queries, typename Keys>
inline void add_state_terms(Place at, KeyGradients<Shape> gradients, StateProducts<Shape> products,
                            Tables tables, Queries queries, Keys keys) {
  const int row = (unsigned)at.group % Shape::blocks, part = (unsigned)at.group / Shape::blocks, lane = at.lane;
  float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  DELTATUNE_UNROLL
  for (int m = 0; m < Shape::column_tiles; ++m) {
    const int column = (part * Shape::column_tiles + m) * 16;
    if (is_lacking<Shape>(column)) continue;
    const Tile query = tile_of(straight(queries, Shape::stride, row * 16, column), lane);
    const Tile key = tile_of(straight(keys, Shape::stride, row * 16, column), lane);
    DELTATUNE_UNROLL
    for (int e = 0; e < 8; ++e) {
      const int i = row * 16 + tile_row(e, lane);
      const float rate = tables.rate_of(i);
      const float y_part = tables.before[i] * products.from_y[m].get(e);
      const float right_part = -tables.before[i] * rate * products.from_right[m].get(e);
      const float end_part = tables.after[i] * rate * products.from_end[m].get(e);
      gradients.dq[m].set(e, gradients.dq[m].get(e) + y_part);
      gradients.dk[m].set(e, gradients.dk[m].get(e) + right_part + end_part);
      sums[tile_side(e)] += y_part * query.get(e) + right_part * key.get(e);
      sums[2 + tile_side(e)] += end_part * key.get(e);
    }
  }
  DELTATUNE_UNROLL
  for (int side = 0; side < 2; ++side) {
    const int e = side * tile_second;
    const float first_sum = row_sum(sums[side]), last_sum = row_sum(sums[2 + side]),
                rate_sum = row_sum(products.rates[side]);
    // One lane per row writes: the one that holds the tile's first column in that row.
    if (tile_column(e, lane) == 0) {
      tables.before_sums[(row * 16 + tile_row(e, lane)) * Tables::room + part] = first_sum;
      tables.after_sums[(row * 16 + tile_row(e, lane)) * Tables::room + part] = last_sum;
      tables.rate_sums[(row * 16 + tile_row(e, lane)) * Tables::room + part] = rate_sum;
    }
  }
}

// Computes the weights of the group's pairs in the gradients of q (D beta dY u) and of k (-beta D beta R^T u), and
// the terms of the pairs in those of the gates: each weight times <q_i, k_j> or <k_i, k_j>.
template <typename Shape, typename Tables, typename Weights, typename Queries, typename Keys>
inline void weigh_pairs(Place at, StateProducts<Shape> products, Tables tables, Weights weights_y,
                        Weights weights_right, Queries queries, Keys keys) {
  constexpr int square = Shape::C + 8;
  const int row = (unsigned)at.group % Shape::blocks, part = (unsigned)at.group / Shape::blocks, lane = at.lane;
  DELTATUNE_UNROLL
  for (int m = 0; m < Shape::own_pairs; ++m) {
    const int column = part + m * Shape::parts;
    if (column > row) continue;
    thread Tile& on_y = products.y_pairs[m];
    thread Tile& on_right = products.right_pairs[m];
    Tile qk, kk;
    tile_clear(qk);
    tile_clear(kk);
    DELTATUNE_UNROLL
    for (int c = 0; c < Shape::columns; c += 16) {
      const auto b = right(turned(keys, Shape::stride, c, column * 16), lane);
      multiply(qk, left(straight(queries, Shape::stride, row * 16, c), lane), b, lane);
      if (Shape::ERASES) multiply(kk, left(straight(keys, Shape::stride, row * 16, c), lane), b, lane);
    }
    const float middle = tables.decay.between(row, column);
    DELTATUNE_UNROLL
    for (int e = 0; e < 8; ++e) {
      const int i = row * 16 + tile_row(e, lane), j = column * 16 + tile_column(e, lane);
      const float d = tables.rate_of(j) * tables.decay.at(row == column, i, j, middle);
      on_y.set(e, d * on_y.get(e));
      on_right.set(e, i > j ? -tables.rate_of(i) * d * on_right.get(e) : 0.0f);
      const bool pairs = i > j || (Shape::ERASES && Shape::tails > 0 && i == j);
      qk.set(e, pairs ? on_y.get(e) * qk.get(e) + on_right.get(e) * kk.get(e) : 0.0f);
    }
    put_tile<true, true>(weights_y, row * 16 * square + column * 16, square, on_y, 16, 16, lane);
    if (Shape::ERASES)
      put_tile<true, true>(weights_right, row * 16 * square + column * 16, square, on_right, 16, 16, lane);
    if (row == column) {
      DELTATUNE_UNROLL
      for (int e = 0; e < 8; ++e)
        tables.diagonal[(row * 16 + tile_row(e, lane)) * 17 + tile_column(e, lane)] = qk.get(e);
    } else {
      sum_rows_and_columns<Shape::blocks>(tables, qk, row, column, lane);
    }
  }
}

// Adds to dq and dk their terms through P and N: the weights of the pairs times the other position's k or q.
template <typename Shape, typename Weights, typename Queries, typename Keys>
inline void multiply_with_weights(Place at, KeyGradients<Shape> gradients, Weights weights_y, Weights weights_right,
                                  Queries queries, Keys keys) {
  constexpr int square = Shape::C + 8, stride = Shape::stride;
  const int row = (unsigned)at.group % Shape::blocks, part = (unsigned)at.group / Shape::blocks, lane = at.lane;
  DELTATUNE_UNROLL
  for (int t = 0; t < Shape::blocks; ++t) {
    if (t <= row) {
      const auto w = left(straight(weights_y, square, row * 16, t * 16), lane);
      const auto a = left_if(Flag<Shape::ERASES>{}, straight(weights_right, square, row * 16, t * 16), w, lane);
      DELTATUNE_UNROLL
      for (int m = 0; m < Shape::column_tiles; ++m) {
        const int column = (part * Shape::column_tiles + m) * 16;
        if (is_lacking<Shape>(column)) continue;
        const auto b = right(straight(keys, stride, t * 16, column), lane);
        multiply(gradients.dq[m], w, b, lane);
        if (Shape::ERASES) multiply(gradients.dk[m], a, b, lane);
      }
    }
    if (t >= row) {
      const auto w = left(turned(weights_y, square, row * 16, t * 16), lane);
      const auto a = left_if(Flag<Shape::ERASES>{}, turned(weights_right, square, row * 16, t * 16), w, lane);
      DELTATUNE_UNROLL
      for (int m = 0; m < Shape::column_tiles; ++m) {
        const int column = (part * Shape::column_tiles + m) * 16;
        if (is_lacking<Shape>(column)) continue;
        multiply(gradients.dk[m], w, right(straight(queries, stride, t * 16, column), lane), lane);
        if (Shape::ERASES) multiply(gradients.dk[m], a, right(straight(keys, stride, t * 16, column), lane), lane);
      }
    }
  }
}

// Writes a tile of dq and one of dk to the outputs, from position row * 16 and column `column` on.
template <typename Shape, typename OQ, typename OK>
inline void write_unstaged(const thread Tile& on_q, const thread Tile& on_k, OQ dq, OK dk, int row, int column,
                           int positions, int lane) {
  using In = typename Shape::In;
  DELTATUNE_UNROLL
  for (int e = 0; e < 8; ++e) {
    const int i = row * 16 + tile_row(e, lane), c = column + tile_column(e, lane);
    if (i >= positions || c >= Shape::DK) continue;
    dq[(long)i * Shape::HK * Shape::DK + c] = static_cast<In>(on_q.get(e));
    dk[(long)i * Shape::HK * Shape::DK + c] = static_cast<In>(on_k.get(e));
  }
}

// Starts to copy the factors of a value head's chunk and, with two stages, its first slice.
template <typename Shape, typename Memory, typename Arrays, typename PF>
inline void load_head(Place at, threadgroup char* slice, thread Arrival& arrival, Arrays arrays, int hv, long chunk,
                      PF factors, threadgroup float* before) {
  constexpr int numbers = (Shape::ERASES ? 3 : 2) * Shape::C;
  if (Shape::STAGES > 1) load_slice<Shape, Memory>(at, slice, arrival, arrays, hv, chunk, 0);
  copy_floats<numbers>(before, factors + chunk * numbers, arrival, at.index);
}

// Computes the gradients of q, k, log_g and beta from the outputs of the two scans. Each block does one chunk of one
// key head and goes through that head's HV / HK value heads; the grid is (chunks, HK, B).
// Inputs: q, k, log_g, mask, segments; factors of the prepare kernel; states and u of the scan; d_states and d_right of
// the reverse scan; dy. Outputs: dq, dk [B,T,HK,DK]; d_log_g, d_beta [B,T,HV].
// A group owns the 16 positions of tile `row` and part `part` of the columns of DK. It multiplies with the states SLICE
// rows of DV at a time, then does its pairs of tiles of P and N. One thread per position and share adds up log_g's
// terms.
template <typename Shape, typename PQ, typename PK, typename PL, typename PM, typename PZ, typename PF, typename PT,
          typename PU, typename PR, typename PV, typename PY, typename OQ, typename OK>
inline void gated_delta_gradients(Place at, threadgroup char* memory, int length, PQ q, PK k, PL log_g, PM mask,
                                  PZ segments, PF factors, PT states, PT d_states, PU u_in, PR d_right, PV v_in, PY dy_in,
                                  OQ dq, OK dk, GLOBAL float* d_log_g, GLOBAL float* d_beta) {
  using In = typename Shape::In;
  using Memory = GradientMemory<Shape>;
  constexpr int C = Shape::C, DK = Shape::DK, DV = Shape::DV, SLICE = Shape::SLICE, HK = Shape::HK, HV = Shape::HV;
  constexpr int STAGES = Shape::STAGES;
  constexpr bool UNSTAGED = Shape::UNSTAGED, ERASES = Shape::ERASES;
  constexpr int threads = Shape::threads, stride = Shape::stride, square = C + 8, blocks = Shape::blocks;
  constexpr int columns = Shape::columns, column_tiles = Shape::column_tiles, room = Memory::room;
  constexpr int state_stride = Shape::state_stride, saved = ERASES ? Shape::saved : state_stride, tails = Shape::tails;
  static_assert(Shape::parts <= room, "the parts of a position's sums fit in its row");
  static_assert(STAGES == 1 || !UNSTAGED, "with UNSTAGED, q and k need no memory beside the slices");
  const int chunks = (length + C - 1) / C, t0 = at.x * C;
  const int row = (unsigned)at.group % blocks, part = (unsigned)at.group / blocks, lane = at.lane;
  const long key_offset = (((long)at.z * length + t0) * HK + at.y) * DK;
  const Exact<In> staged_q = shared_at<Exact<In>>(memory, Memory::q, C * stride);
  const Exact<In> staged_k = shared_at<Exact<In>>(memory, Memory::k, C * stride);
  threadgroup float* diagonal = reinterpret_cast<threadgroup float*>(memory + Memory::diagonal);
  const Decay<C> decay = decay_at<C>(reinterpret_cast<threadgroup float*>(memory + Memory::decay));
  threadgroup float* gate = reinterpret_cast<threadgroup float*>(memory + Memory::scalars);
  threadgroup float* row_sums = reinterpret_cast<threadgroup float*>(memory + Memory::sums);
  threadgroup float* column_sums = row_sums + C * blocks;
  threadgroup float* before_sums = reinterpret_cast<threadgroup float*>(memory + Memory::parts);
  threadgroup float* after_sums = before_sums + C * room;
  threadgroup float* rate_sums = after_sums + C * room;
  threadgroup float* state_dots = rate_sums + C * room;
  const auto arrays = saved_arrays(states, d_states, u_in, d_right, v_in, dy_in, mask, length);
  const auto live = alive<Shape::MASKED>(mask, at.z, t0, length);
  const auto queries = Choice<UNSTAGED>::of(unstaged_rows<DK>(q, key_offset, HK * DK, live), staged_q);
  const auto keys = Choice<UNSTAGED>::of(unstaged_rows<DK>(k, key_offset, HK * DK, live), staged_k);

  Tile dq_sums[column_tiles], dk_sums[column_tiles];
  clear_tiles<column_tiles>(dq_sums);
  clear_tiles<column_tiles>(dk_sums);
  const KeyGradients<Shape> gradients{dq_sums, dk_sums};
  arrivals_start(memory + Memory::arrivals, at.index);
  int loads = 0;
  float coming_gate = 0.0f;
  for (int repeat = 0; repeat < Shape::repeats; ++repeat) {
    const int hv = at.y * Shape::repeats + repeat;
    const long chunk = ((long)at.z * HV + hv) * chunks + at.x;
    const int current = Memory::ahead ? loads & 1 : 0;
    threadgroup float* before = gate + C + current * 3 * C;
    const GateTables<C, room, ERASES> tables{decay,     gate,        before,      before + C, before + 2 * C, diagonal,
                                             row_sums,  column_sums, before_sums, after_sums, rate_sums,
                                             state_dots};
    threadgroup char* spare = memory + current * Memory::stage;
    const Wide<In> weights_y = shared_at<Wide<In>>(spare, Memory::weights_y, C * square);
    const Wide<In> weights_right = shared_at<Wide<In>>(spare, Memory::weights_right, C * square);
    barrier();
    if (!Memory::ahead || repeat == 0) {
      // With one stage, the first load brings only the factors; with two, Q and K, too.
      Arrival arrival = arrival_at(memory + Memory::arrivals, STAGES > 1 ? loads & 1 : 0);
      load_head<Shape, Memory>(at, memory + Memory::slices + (loads & 1) * Memory::stage, arrival, arrays, hv, chunk,
                               factors, before);
      if (STAGES > 1 && repeat == 0) {
        copy_rows<C, columns, threads>(staged_q, stride, q + key_offset, HK * DK, DK, live, arrival, at.index);
        copy_rows<C, columns, threads>(staged_k, stride, k + key_offset, HK * DK, DK, live, arrival, at.index);
      }
      copies_sent(arrival, at.index);
      if (STAGES == 1) copies_wait(arrival, loads++);
    }
    if (at.index < C && (!Memory::ahead || repeat == 0))
      coming_gate = gate_of<Shape::SEGMENTED>(at.index, live, log_g, segments, at.z, hv, HV, t0, length);
    if (at.index < C) gate[at.index] = coming_gate;

    Tile from_y[column_tiles], from_right[column_tiles], from_end[column_tiles];
    Tile y_pairs[Shape::own_pairs], right_pairs[Shape::own_pairs];
    float state_dot = 0.0f, rates[2] = {0.0f, 0.0f};
    const StateProducts<Shape> products{from_y, from_right, from_end, y_pairs, right_pairs, rates};
    clear(products);
    for (int n = 0; n < (DV + SLICE - 1) / SLICE; ++n) {
      threadgroup char* slice = memory + Memory::slices + (STAGES > 1 ? (loads & 1) * Memory::stage : 0);
      const int coming = STAGES > 1 ? n + 1 : n, turn = STAGES > 1 ? (loads + 1) & 1 : 0;
      const Arrival here = arrival_at(memory + Memory::arrivals, STAGES > 1 ? loads & 1 : 0);
      if (STAGES > 1) copies_wait(here, loads >> 1);
      barrier();
      if (coming * SLICE < DV) {
        Arrival arrival = arrival_at(memory + Memory::arrivals, turn);
        load_slice<Shape, Memory>(at, memory + Memory::slices + turn * Memory::stage, arrival, arrays, hv, chunk,
                                  coming * SLICE);
        copies_sent(arrival, at.index);
      } else if (Memory::ahead && repeat + 1 < Shape::repeats) {
        Arrival arrival = arrival_at(memory + Memory::arrivals, turn);
        load_head<Shape, Memory>(at, memory + Memory::slices + turn * Memory::stage, arrival, arrays, hv + 1,
                                 chunk + chunks, factors, gate + C + turn * 3 * C);
        copies_sent(arrival, at.index);
        if (at.index < C)
          coming_gate = gate_of<Shape::SEGMENTED>(at.index, live, log_g, segments, at.z, hv + 1, HV, t0, length);
      }
      if (STAGES == 1) {
        copies_wait(here, loads);
        barrier();
      }
      ++loads;
      if (n == 0) fill_decay<C>(decay, gate, at.index);
      const auto state = Choice<UNSTAGED>::of(
          stored_at<Saved<In>>(states + n * SLICE * state_stride, chunk, padded(DV) * state_stride),
          shared_at<Saved<In>>(slice, Memory::state, SLICE * state_stride));
      const auto d_state = Choice<UNSTAGED>::of(
          stored_at<Saved<In>>(d_states + n * SLICE * state_stride, chunk, padded(DV) * state_stride),
          shared_at<Saved<In>>(slice, Memory::d_state, SLICE * state_stride));
      const auto u = deltas_of<Shape, Memory>(slice);
      const Wide<In> right_gradient = shared_at<Wide<In>>(slice, Memory::right, SLICE * Shape::saved);
      // The rows that hold the tails.
      const auto kept = Choice<ERASES>::of(u, state);
      const auto d_kept = Choice<ERASES>::of(right_gradient, d_state);
      const Exact<In> dy = shared_at<Exact<In>>(slice, Memory::dy, C * Shape::slice_stride);
      DELTATUNE_UNROLL
      for (int s = 0; s < SLICE; s += 16) {
        const auto left_y = left(straight(dy, Shape::slice_stride, row * 16, s), lane);
        const auto left_right = left_if(Flag<ERASES>{}, turned(right_gradient, saved, row * 16, s), left_y, lane);
        const auto left_u = left_deltas<Shape>(u, row * 16, s, lane);
        if (ERASES && s / 16 % Shape::parts == part) add_row_dots(rates, left_right, left_u, lane);
        DELTATUNE_UNROLL
        for (int m = 0; m < column_tiles; ++m) {
          const int column = (part * column_tiles + m) * 16;
          if (is_lacking<Shape>(column)) continue;
          const auto b = right(straight(state, state_stride, s, column), lane);
          const auto db = right(straight(d_state, state_stride, s, column), lane);
          multiply(from_y[m], left_y, b, lane);
          if (ERASES) multiply(from_right[m], left_right, b, lane);
          multiply(from_end[m], left_u, db, lane);
          if (tails == 0 && s / 16 % blocks == row) state_dot += right_dot(b, db, lane);
        }
        multiply_pairs(at, products, left_y, left_right, u, s);
      }
      for (int s = row * 16; tails > 0 && s < SLICE; s += blocks * 16) {
        DELTATUNE_UNROLL
        for (int m = 0; m < column_tiles; ++m) {
          const int column = (part * column_tiles + m) * 16;
          if (is_lacking<Shape>(column)) continue;
          state_dot += kept_dot<(tails > 0 ? Shape::tail_bits : 0)>(
              straight(state, state_stride, s, column), straight(d_state, state_stride, s, column),
              tail_at<tails>(kept, s * saved, saved, column / 16, lane),
              tail_at<tails>(d_kept, s * saved, saved, column / 16, lane), lane);
        }
      }
    }
    state_dot = lane_sum(state_dot);
    barrier();
    if (STAGES == 1 && !UNSTAGED) {
      Arrival arrival = arrival_at(memory + Memory::arrivals, 0);
      copies_fence();
      copy_rows<C, columns, threads>(staged_q, stride, q + key_offset, HK * DK, DK, live, arrival, at.index);
      copy_rows<C, columns, threads>(staged_k, stride, k + key_offset, HK * DK, DK, live, arrival, at.index);
      copies_sent(arrival, at.index);
      copies_wait(arrival, loads++);
      barrier();
    }
    if (lane == 0) state_dots[at.group] = state_dot;
    add_state_terms(at, gradients, products, tables, queries, keys);
    weigh_pairs(at, products, tables, weights_y, weights_right, queries, keys);
    barrier();
    multiply_with_weights(at, gradients, weights_y, weights_right, queries, keys);
    write_gate_gradients<Shape>(at, tables, live, length, hv, d_log_g, d_beta);
    copies_fence();
  }
  DELTATUNE_UNROLL
  for (int m = 0; m < column_tiles; ++m) {
    const int column = (part * column_tiles + m) * 16;
    if (is_lacking<Shape>(column)) continue;
    if (UNSTAGED) {
      write_unstaged<Shape>(dq_sums[m], dk_sums[m], dq + key_offset, dk + key_offset, row, column, length - t0, lane);
    } else {
      put_tile<true, true>(staged_q, row * 16 * stride + column, stride, dq_sums[m], 16, 16, lane);
      put_tile<true, true>(staged_k, row * 16 * stride + column, stride, dk_sums[m], 16, 16, lane);
    }
  }
  if (UNSTAGED) return;
  barrier();
  write_rows<C, columns, threads>(staged_q, 0, stride, dq + key_offset, HK * DK, length - t0, DK, at.index);
  write_rows<C, columns, threads>(staged_k, 0, stride, dk + key_offset, HK * DK, length - t0, DK, at.index);
}
