// The gradients of the gated delta rule with a gate per key channel; channel_positions.h goes along the positions.

template <typename Shape>
struct ChannelGradientMemory {
  using In = typename Shape::In;
  static constexpr constant int C = Shape::C, DK = Shape::DK, SLICE = Shape::SLICE, STAGES = Shape::STAGES;
  static constexpr constant bool UNSTAGED = Shape::UNSTAGED;
  // With UNSTAGED a chunk has one tile, and the products are in shared memory 128 channels at a time.
  static constexpr constant int span = UNSTAGED ? 128 : padded(DK);
  static constexpr constant int second_tile = C / 16 - 1, product_stride = span + 4;
  static constexpr constant int state = 0;
  static constexpr constant int state_bytes = UNSTAGED ? 0 : SLICE * Shape::state_stride * Saved<In>::bytes;
  static constexpr constant int d_state = state + state_bytes, u = d_state + state_bytes;
  static constexpr constant int right = u + SLICE * Shape::saved * Wide<In>::bytes;
  static constexpr constant int values = right + SLICE * Shape::saved * Wide<In>::bytes;
  static constexpr constant int values_bytes = C * (SLICE + 8) * Exact<In>::bytes;
  static constexpr constant int dy = values + (Shape::ERASES ? 0 : values_bytes);
  static constexpr constant int stage = dy + C * (SLICE + 8) * Exact<In>::bytes;
  // Once the slices are done, their memory holds the products with the states and those between the tiles, in fp32 by
  // position and channel.
  static constexpr constant int from_y = 0;
  static constexpr constant int from_right = from_y + C * product_stride * 4;
  static constexpr constant int from_end = from_right + C * product_stride * 4;
  static constexpr constant int over_y = from_end + C * product_stride * 4;
  static constexpr constant int over_right = over_y + second_tile * 16 * product_stride * 4;
  static constexpr constant int over_end = over_right + second_tile * 16 * product_stride * 4;
  static constexpr constant int products_end = over_end + second_tile * 16 * product_stride * 4;
  static constexpr constant int later_q = STAGES * stage > products_end ? STAGES * stage : products_end;
  static constexpr constant int later_k = later_q + second_tile * 16 * stride_of(DK) * Wide<In>::bytes;
  static constexpr constant int earlier_k = later_k + second_tile * 16 * stride_of(DK) * Wide<In>::bytes;
  static constexpr constant int pair_y = earlier_k + second_tile * 16 * stride_of(DK) * Wide<In>::bytes;
  static constexpr constant int pair_right = pair_y + second_tile * 16 * 24 * Wide<In>::bytes;
  // For each row of a tile, the two weights of each of its 16 pairs, and padding.
  static constexpr constant int weights_stride = 36;
  static constexpr constant int weights = pair_right + second_tile * 16 * 24 * Wide<In>::bytes;
  static constexpr constant int rate = weights + C * weights_stride * 4;
  static constexpr constant int rate_sums = rate + C * 4;
  // By channel: the product of each tile's gates, the terms that each tile adds to the gates of the other, and each
  // share of the inner product of the states.
  static constexpr constant int totals = rate_sums + C * 4 * 4;
  static constexpr constant int cross = totals + (UNSTAGED ? 1 : 2) * padded(DK) * 4;
  static constexpr constant int state_dots = cross + (UNSTAGED ? 0 : 2) * padded(DK) * 4;
  static constexpr constant int arrivals = state_dots + C / 16 * padded(DK) * 4;
  static constexpr constant int bytes = arrivals + 16;
};


// The tables in shared memory that the phases of a value head leave one another.
template <typename In, typename Layout>
struct ChannelTables {
  using Memory = Layout;
  threadgroup float* from_y;
  threadgroup float* from_right;
  threadgroup float* from_end;
  threadgroup float* over_y;
  threadgroup float* over_right;
  threadgroup float* over_end;
  Wide<In> later_q, later_k, earlier_k, pair_y, pair_right;
  threadgroup float* weights;
  threadgroup float* rate;
  threadgroup float* rate_sums;
  threadgroup float* totals;
  threadgroup float* cross;
  threadgroup float* state_dots;
};
inline threadgroup float* floats_at(threadgroup char* memory, int offset) {
  return reinterpret_cast<threadgroup float*>(memory + offset);
}
template <typename In, typename Memory, int STRIDE>
inline ChannelTables<In, Memory> channel_tables(threadgroup char* memory) {
  return ChannelTables<In, Memory>{floats_at(memory, Memory::from_y),
                                   floats_at(memory, Memory::from_right),
                                   floats_at(memory, Memory::from_end),
                                   floats_at(memory, Memory::over_y),
                                   floats_at(memory, Memory::over_right),
                                   floats_at(memory, Memory::over_end),
                                   shared_at<Wide<In>>(memory, Memory::later_q, 16 * STRIDE),
                                   shared_at<Wide<In>>(memory, Memory::later_k, 16 * STRIDE),
                                   shared_at<Wide<In>>(memory, Memory::earlier_k, 16 * STRIDE),
                                   shared_at<Wide<In>>(memory, Memory::pair_y, 16 * 24),
                                   shared_at<Wide<In>>(memory, Memory::pair_right, 16 * 24),
                                   floats_at(memory, Memory::weights),
                                   floats_at(memory, Memory::rate),
                                   floats_at(memory, Memory::rate_sums),
                                   floats_at(memory, Memory::totals),
                                   floats_at(memory, Memory::cross),
                                   floats_at(memory, Memory::state_dots)};
}

// Decays a channel of tile b to the border between the tiles: q and k of the later tile from there on, k of the earlier
// one up to there. Writes the product of the tile's gates.
template <typename Shape, typename Tables>
inline void decay_to_border(Tables tables, thread const ChannelRows& rows, int b, int c) {
  float product = 1.0f;
  if (Shape::blocks == 2 && b == 0) {
    DELTATUNE_UNROLL
    for (int i = 15; i >= 0; --i) {
      tables.earlier_k.put(i * Shape::stride + c, product * rows.key[i]);
      product *= rows.gate[i];
    }
  } else {
    DELTATUNE_UNROLL
    for (int i = 0; i < 16; ++i) {
      product *= rows.gate[i];
      if (Shape::blocks == 2) {
        tables.later_q.put(i * Shape::stride + c, product * rows.query[i]);
        tables.later_k.put(i * Shape::stride + c, product * rows.key[i]);
      }
    }
  }
  tables.totals[b * Shape::columns + c] = product;
}

// Shares out the inner product <S, dS> of each channel: with threads for it, one for each channel and tile of
// positions, which adds up every second row of a slice.
template <typename Shape>
struct StateDots {
  static constexpr constant int shares = Shape::threads >= Shape::blocks * Shape::columns ? Shape::blocks : 1;
  static constexpr constant int each = shares > 1 ? 1 : (Shape::columns + Shape::threads - 1) / Shape::threads;
  float sums[each];
  inline void start() {
    DELTATUNE_UNROLL
    for (int m = 0; m < each; ++m) sums[m] = 0.0f;
  }
  template <typename States>
  inline void add(States state, States d_state, int index) {
    DELTATUNE_UNROLL
    for (int m = 0; m < each; ++m) {
      const int item = index + m * Shape::threads, c = (unsigned)item % Shape::columns;
      if (item >= shares * Shape::columns) continue;
      for (int s = 0; s < Shape::SLICE; s += shares) {
        const int at = (s + (unsigned)item / Shape::columns) * Shape::stride + c;
        sums[m] += state.get(at) * d_state.get(at);
      }
    }
  }
  inline void write(threadgroup float* to, int index) const {
    DELTATUNE_UNROLL
    for (int m = 0; m < each; ++m)
      if (index + m * Shape::threads < shares * Shape::columns) to[index + m * Shape::threads] = sums[m];
  }
};

// Writes a group's products with the states, times their factors of beta, to their rows and columns in shared memory,
// from channel `first` on as many as there is room for.
template <typename Shape, typename Tables>
inline void put_products(Place at, StateProducts<Shape> sums, Tables tables, int first) {
  constexpr int span = Tables::Memory::span, stride = Tables::Memory::product_stride;
  const int row = (unsigned)at.group % Shape::blocks, part = (unsigned)at.group / Shape::blocks, lane = at.lane;
  DELTATUNE_UNROLL
  for (int m = 0; m < Shape::column_tiles; ++m) {
    const int column = (part * Shape::column_tiles + m) * 16;
    if (is_lacking<Shape>(column) || (Shape::UNSTAGED && (column < first || column >= first + span))) continue;
    DELTATUNE_UNROLL
    for (int e = 0; e < 8; ++e) {
      const int i = row * 16 + tile_row(e, lane), to = i * stride + column - first + tile_column(e, lane);
      tables.from_y[to] = sums.from_y[m].get(e);
      tables.from_right[to] = -tables.rate[i] * sums.from_right[m].get(e);
      tables.from_end[to] = tables.rate[i] * sums.from_end[m].get(e);
    }
  }
}

// Writes the weights of a group's pairs, which are those of dY and of R, and its shares of the gradient of beta.
template <typename Shape, typename Tables>
inline void weigh_channel_pairs(Place at, StateProducts<Shape> sums, Tables tables) {
  const int row = (unsigned)at.group % Shape::blocks, part = (unsigned)at.group / Shape::blocks, lane = at.lane;
  DELTATUNE_UNROLL
  for (int side = 0; side < 2; ++side) {
    const int e = side * tile_second;
    const float sum = row_sum(sums.rates[side]);
    if (tile_column(e, lane) == 0) tables.rate_sums[(row * 16 + tile_row(e, lane)) * 4 + part] = sum;
  }
  DELTATUNE_UNROLL
  for (int m = 0; m < Shape::own_pairs; ++m) {
    const int column = part + m * Shape::parts;
    if (column > row) continue;
    thread Tile& of_y = sums.y_pairs[m];
    thread Tile& of_right = sums.right_pairs[m];
    DELTATUNE_UNROLL
    for (int e = 0; e < 8; ++e) {
      const int i = row * 16 + tile_row(e, lane), j = column * 16 + tile_column(e, lane);
      of_y.set(e, tables.rate[j] * of_y.get(e));
      of_right.set(e, -tables.rate[i] * tables.rate[j] * of_right.get(e));
      if (row == column) {
        threadgroup float* to = tables.weights + i * Tables::Memory::weights_stride + (j & 15) * 2;
        to[0] = of_y.get(e);
        to[1] = i > j ? of_right.get(e) : 0.0f;
      }
    }
    if (row != column) {
      put_tile<true, true>(tables.pair_y, 0, 24, of_y, 16, 16, lane);
      put_tile<true, true>(tables.pair_right, 0, 24, of_right, 16, 16, lane);
    }
  }
}

// Multiplies the weights of the pairs between the two tiles with q and k at their border.
template <typename Shape, typename Tables>
inline void multiply_between_tiles(Place at, Tables tables) {
  constexpr int stride = Shape::stride, product_stride = Tables::Memory::product_stride;
  const int lane = at.lane;
  for (int t = at.group; t < Shape::key_tiles; t += Shape::GROUPS) {
    Tile y, r, end;
    tile_clear(y);
    tile_clear(r);
    tile_clear(end);
    const auto b = right(straight(tables.earlier_k, stride, 0, t * 16), lane);
    multiply(y, left(straight(tables.pair_y, 24, 0, 0), lane), b, lane);
    multiply(r, left(straight(tables.pair_right, 24, 0, 0), lane), b, lane);
    multiply(end, left(turned(tables.pair_y, 24, 0, 0), lane), right(straight(tables.later_q, stride, 0, t * 16), lane),
             lane);
    multiply(end, left(turned(tables.pair_right, 24, 0, 0), lane),
             right(straight(tables.later_k, stride, 0, t * 16), lane), lane);
    DELTATUNE_UNROLL
    for (int e = 0; e < 8; ++e) {
      const int to = tile_row(e, lane) * product_stride + t * 16 + tile_column(e, lane);
      tables.over_y[to] = y.get(e);
      tables.over_right[to] = r.get(e);
      tables.over_end[to] = end.get(e);
    }
  }
}

// Adds up the terms of channel c of a group's tile: from before the tile, from after it, and from the pairs in it. The
// channel is number `cell` of those with products in shared memory.
template <typename Shape, typename Tables>
inline void add_along_positions(ChannelSums sums, thread const ChannelRows& rows, Tables tables, int tile, int c,
                                int cell) {
  using Memory = typename Tables::Memory;
  constexpr int product_stride = Memory::product_stride, columns = Shape::columns;
  const bool later = Shape::blocks == 2 && tile == 1, earlier = Shape::blocks == 2 && tile == 0;
  const int of = tile * 16 * product_stride + cell;
  const float lead = later ? tables.totals[c] : 1.0f, tail = earlier ? tables.totals[columns + c] : 1.0f;
  const float of_state = add_from_before(sums, rows, lead, later, tables.from_y + of, tables.from_right + of,
                                         tables.over_y + c, tables.over_right + c, product_stride);
  const float of_end = add_to_after(sums, rows, tail, earlier, tables.from_end + of, tables.over_end + c,
                                    product_stride);
  if (later) tables.cross[c] = of_state;
  if (earlier) tables.cross[columns + c] = of_end;
  add_pairs_within<Memory::weights_stride>(sums, rows, tables.weights + tile * 16 * Memory::weights_stride);
}

// Returns the term that every gate of channel c in a group's tile shares: the inner product of the states, decayed by
// the whole chunk, and the terms of the other tile that span this one.
template <typename Shape, typename Tables>
inline float on_all_gates(Tables tables, int tile, int c) {
  constexpr int columns = Shape::columns;
  float sum = tables.state_dots[c];
  for (int share = 1; share < StateDots<Shape>::shares; ++share) sum += tables.state_dots[share * columns + c];
  sum *= tables.totals[c] * (Shape::blocks == 2 ? tables.totals[columns + c] : 1.0f);
  return Shape::blocks == 2 ? sum + tables.cross[tile * columns + c] : sum;
}

// Computes the gradients of q, k, log_g and beta from the outputs of the two scans. Inputs, outputs, blocks and the
// grid are those of gated_delta_gradients, but log_g and d_log_g are [B,T,HV,DK].
// First a group owns the 16 positions of a tile and a part of the columns of DK, and multiplies with the states. Then a
// lane owns a channel of a tile and goes along the tile's 16 positions.
template <typename Shape, typename PQ, typename PK, typename PL, typename PM, typename PZ, typename PF, typename PT,
          typename PU, typename PR, typename PV, typename PY, typename OQ, typename OK>
inline void gated_delta_channel_gradients(Place at, threadgroup char* memory, int length, PQ q, PK k, PL log_g, PM mask,
                                          PZ segments, PF factors, PT states, PT d_states, PU u_in, PR d_right, PV v_in,
                                          PY dy_in, OQ dq, OK dk, GLOBAL float* d_log_g, GLOBAL float* d_beta) {
  using In = typename Shape::In;
  using Memory = ChannelGradientMemory<Shape>;
  constexpr int C = Shape::C, DK = Shape::DK, DV = Shape::DV, SLICE = Shape::SLICE, HK = Shape::HK, HV = Shape::HV;
  constexpr int STAGES = Shape::STAGES;
  constexpr bool UNSTAGED = Shape::UNSTAGED, SEGMENTED = Shape::SEGMENTED, ERASES = Shape::ERASES;
  constexpr int threads = Shape::threads, stride = Shape::stride, square = Shape::saved, blocks = Shape::blocks;
  constexpr int columns = Shape::columns, parts = Shape::parts, column_tiles = Shape::column_tiles;
  constexpr int tasks = ((columns + 31) / 32 + parts - 1) / parts, numbers = C + columns;
  static_assert(parts <= 4 && blocks <= 2, "a lane for each channel of a tile, or several");
  static_assert(!UNSTAGED || (blocks == 1 && parts * 32 == Memory::span), "a span of channels at a time");
  const int chunks = (length + C - 1) / C, t0 = at.x * C;
  const int row = (unsigned)at.group % blocks, part = (unsigned)at.group / blocks, lane = at.lane;
  const long key_offset = (((long)at.z * length + t0) * HK + at.y) * DK;
  const auto tables = channel_tables<In, Memory, stride>(memory);
  const auto live = alive<Shape::MASKED>(mask, at.z, t0, length);
  const auto arrays = saved_arrays(states, d_states, u_in, d_right, v_in, dy_in, mask, length);
  float dq_sums[tasks][16], dk_sums[tasks][16];
  DELTATUNE_UNROLL
  for (int m = 0; m < tasks; ++m) {
    DELTATUNE_UNROLL
    for (int i = 0; i < 16; ++i) dq_sums[m][i] = dk_sums[m][i] = 0.0f;
  }
  arrivals_start(memory + Memory::arrivals, at.index);
  int loads = 0;
  for (int repeat = 0; repeat < Shape::repeats; ++repeat) {
    const int hv = at.y * Shape::repeats + repeat;
    const long chunk = ((long)at.z * HV + hv) * chunks + at.x;
    barrier();
    if (STAGES > 1) {
      Arrival arrival = arrival_at(memory + Memory::arrivals, loads & 1);
      load_slice<Shape, Memory>(at, memory + (loads & 1) * Memory::stage, arrival, arrays, hv, chunk, 0);
      copies_sent(arrival, at.index);
    }
    if (at.index < C) tables.rate[at.index] = factors[chunk * numbers + at.index];
    for (int item = at.index; item < blocks * columns; item += threads) {
      const int b = (unsigned)item / columns, c = (unsigned)item % columns;
      ChannelRows rows;
      load_channel<DK, SEGMENTED>(rows, c, b * 16, live, q, k, log_g, segments, at.z, hv, HV, HK * DK, key_offset, t0,
                                  length);
      decay_to_border<Shape>(tables, rows, b, c);
    }

    Tile from_y[column_tiles], from_right[column_tiles], from_end[column_tiles];
    Tile y_pairs[Shape::own_pairs], right_pairs[Shape::own_pairs];
    float rates[2] = {0.0f, 0.0f};
    const StateProducts<Shape> products{from_y, from_right, from_end, y_pairs, right_pairs, rates};
    clear(products);
    StateDots<Shape> dots;
    dots.start();
    for (int n = 0; n < padded(DV) / SLICE; ++n) {
      threadgroup char* slice = memory + (STAGES > 1 ? (loads & 1) * Memory::stage : 0);
      const int coming = STAGES > 1 ? n + 1 : n, turn = STAGES > 1 ? (loads + 1) & 1 : 0;
      const Arrival here = arrival_at(memory + Memory::arrivals, STAGES > 1 ? loads & 1 : 0);
      if (STAGES > 1) copies_wait(here, loads >> 1);
      barrier();
      if (coming * SLICE < DV) {
        Arrival arrival = arrival_at(memory + Memory::arrivals, turn);
        load_slice<Shape, Memory>(at, memory + turn * Memory::stage, arrival, arrays, hv, chunk, coming * SLICE);
        copies_sent(arrival, at.index);
      }
      if (STAGES == 1) {
        copies_wait(here, loads);
        barrier();
      }
      ++loads;
      const auto state = Choice<UNSTAGED>::of(
          stored_at<Saved<In>>(states + n * SLICE * stride, chunk, padded(DV) * stride),
          shared_at<Saved<In>>(slice, Memory::state, SLICE * stride));
      const auto d_state = Choice<UNSTAGED>::of(
          stored_at<Saved<In>>(d_states + n * SLICE * stride, chunk, padded(DV) * stride),
          shared_at<Saved<In>>(slice, Memory::d_state, SLICE * stride));
      const auto u = deltas_of<Shape, Memory>(slice);
      const Wide<In> right_gradient = shared_at<Wide<In>>(slice, Memory::right, SLICE * square);
      const Exact<In> dy = shared_at<Exact<In>>(slice, Memory::dy, C * Shape::slice_stride);
      dots.add(state, d_state, at.index);
      DELTATUNE_UNROLL
      for (int s = 0; s < SLICE; s += 16) {
        const auto left_y = left(straight(dy, Shape::slice_stride, row * 16, s), lane);
        const auto left_right = left_if(Flag<ERASES>{}, turned(right_gradient, square, row * 16, s), left_y, lane);
        const auto left_u = left_deltas<Shape>(u, row * 16, s, lane);
        if (ERASES && s / 16 % parts == part) add_row_dots(rates, left_right, left_u, lane);
        DELTATUNE_UNROLL
        for (int m = 0; m < column_tiles; ++m) {
          const int column = (part * column_tiles + m) * 16;
          if (is_lacking<Shape>(column)) continue;
          const auto b = right(straight(state, stride, s, column), lane);
          multiply(from_y[m], left_y, b, lane);
          if (ERASES) multiply(from_right[m], left_right, b, lane);
          multiply(from_end[m], left_u, right(straight(d_state, stride, s, column), lane), lane);
        }
        // Not by multiply_pairs(): then more sums are alive at one place, by the estimate for Apple GPUs.
        DELTATUNE_UNROLL
        for (int m = 0; m < Shape::own_pairs; ++m) {
          const int column = part + m * parts;
          if (column > row) continue;
          const auto b = right_deltas<Shape>(u, s, column * 16, lane);
          multiply(y_pairs[m], left_y, b, lane);
          if (ERASES) multiply(right_pairs[m], left_right, b, lane);
        }
      }
    }
    barrier();
    dots.write(tables.state_dots, at.index);
    put_products(at, products, tables, 0);
    weigh_channel_pairs(at, products, tables);
    barrier();
    if (blocks == 2) {
      multiply_between_tiles<Shape>(at, tables);
      barrier();
    }
    float on_gate[tasks][16];
    DELTATUNE_UNROLL
    for (int m = 0; m < tasks; ++m) {
      const int c = (part + m * parts) * 32 + lane;
      if (UNSTAGED && m > 0) {
        barrier();
        put_products(at, products, tables, m * Memory::span);
        barrier();
      }
      if (c >= DK) continue;
      ChannelRows rows;
      load_channel<DK, SEGMENTED>(rows, c, row * 16, live, q, k, log_g, segments, at.z, hv, HV, HK * DK, key_offset, t0,
                                  length);
      const ChannelSums sums{dq_sums[m], dk_sums[m], on_gate[m]};
      add_along_positions<Shape>(sums, rows, tables, row, c, c - (UNSTAGED ? m * Memory::span : 0));
    }
    if (blocks == 2) barrier();
    DELTATUNE_UNROLL
    for (int m = 0; m < tasks; ++m) {
      const int c = (part + m * parts) * 32 + lane;
      if (c >= DK) continue;
      const float common = on_all_gates<Shape>(tables, row, c);
      DELTATUNE_UNROLL
      for (int i = 0; i < 16; ++i) {
        const int t = t0 + row * 16 + i;
        if (t < length)
          d_log_g[(((long)at.z * length + t) * HV + hv) * DK + c] =
              live(row * 16 + i) ? on_gate[m][i] + common : 0.0f;
      }
    }
    if (ERASES && at.index < C && t0 + at.index < length) {
      float sum = 0.0f;
      for (int p = 0; p < parts; ++p) sum += tables.rate_sums[at.index * 4 + p];
      d_beta[((long)at.z * length + t0 + at.index) * HV + hv] = live(at.index) ? sum : 0.0f;
    }
    copies_fence();
  }
  DELTATUNE_UNROLL
  for (int m = 0; m < tasks; ++m) {
    const int c = (part + m * parts) * 32 + lane;
    if (c >= DK) continue;
    DELTATUNE_UNROLL
    for (int i = 0; i < 16; ++i) {
      if (t0 + row * 16 + i >= length) continue;
      const long to = key_offset + (long)(row * 16 + i) * HK * DK + c;
      dq[to] = static_cast<In>(dq_sums[m][i]);
      dk[to] = static_cast<In>(dk_sums[m][i]);
    }
  }
}
