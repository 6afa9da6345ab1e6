// The gradients kernel: the gradients of q, k, log_g and beta, from what the two scans saved.

// How many parts the columns of DK have room for: each part is a group's, in each row of tiles.
inline constexpr int room_of_parts(int groups, int blocks) {
  return groups > 4 * blocks ? groups / blocks : 4;
}

// The shared memory of a block.
template <typename In, int C, int DK, int SLICE, int GROUPS, int STAGES, bool OVERLAY, bool UNSTAGED>
struct GradientMemory {
  static constexpr constant int room = room_of_parts(GROUPS, C / 16);
  static constexpr constant int state = 0;
  static constexpr constant int d_state = state + room_of<UNSTAGED, Saved<In>, SLICE, DK>();
  static constexpr constant int u = d_state + room_of<UNSTAGED, Saved<In>, SLICE, DK>();
  static constexpr constant int right = u + SLICE * row_of_chunk<In, C, DK, false>() * Wide<In>::bytes;
  static constexpr constant int dy = right + SLICE * row_of_chunk<In, C, DK, false>() * Wide<In>::bytes;
  static constexpr constant int stage = dy + C * (SLICE + 8) * Exact<In>::bytes;
  static constexpr constant int q = 0;
  static constexpr constant int k = q + room_of<UNSTAGED, Exact<In>, C, DK>();
  static constexpr constant int k_end = k + room_of<UNSTAGED, Exact<In>, C, DK>();
  // The weights of the pairs take the slices' memory once the slices are done; with OVERLAY so do Q and K.
  static constexpr constant int slices = OVERLAY ? 0 : k_end;
  static constexpr constant int weights_y = k_end;
  static constexpr constant int weights_right = weights_y + C * (C + 8) * Wide<In>::bytes;
  static constexpr constant int pairs_end = weights_right + C * (C + 8) * Wide<In>::bytes;
  static constexpr constant int slices_end = slices + STAGES * stage;
  static constexpr constant int diagonal = pairs_end > slices_end ? pairs_end : slices_end;
  static constexpr constant int decay = diagonal + C * 17 * 4;
  static constexpr constant int scalars = decay + align16(Decay<C>::floats * 4);
  static constexpr constant int sums = scalars + 4 * C * 4;
  static constexpr constant int parts = sums + 2 * C * (C / 16) * 4;
  static constexpr constant int arrivals = parts + 3 * C * room * 4 + 32 * 4;
  static constexpr constant int bytes = arrivals + 16;
};

template <typename In, int C, int DK, int DV, int SLICE, int HV, int GROUPS, typename Memory, bool UNSTAGED,
          bool MASKED, bool CHANNEL, typename PT, typename PU, typename PR, typename PY, typename PM>
inline void load_slice(Place at, threadgroup char* memory, thread Arrival& arrival, PT states, PT d_states, PU u,
                       PR d_right, PY dy, PM mask, int length, int hv, long chunk, int first) {
  constexpr int threads = GROUPS * 32, stride = stride_of(DK), saved = row_of_chunk<In, C, DK, CHANNEL>();
  constexpr int value_rows = padded(DV);
  if (!UNSTAGED) {
    copy_block<SLICE * stride, threads>(shared_at<Saved<In>>(memory, Memory::state, SLICE * stride),
                                        stored_at<Saved<In>>(states, chunk, value_rows * stride), (long)first * stride,
                                        arrival, at.index);
    copy_block<SLICE * stride, threads>(shared_at<Saved<In>>(memory, Memory::d_state, SLICE * stride),
                                        stored_at<Saved<In>>(d_states, chunk, value_rows * stride),
                                            (long)first * stride,
                                        arrival, at.index);
  }
  copy_block<SLICE * saved, threads>(shared_at<Wide<In>>(memory, Memory::u, SLICE * saved),
                                      stored_at<Wide<In>>(u, chunk, value_rows * saved), (long)first * saved, arrival,
                                      at.index);
  copy_block<SLICE * saved, threads>(shared_at<Wide<In>>(memory, Memory::right, SLICE * saved),
                                      stored_at<Wide<In>>(d_right, chunk, value_rows * saved), (long)first * saved,
                                      arrival, at.index);
  copy_rows<C, SLICE, threads>(shared_at<Exact<In>>(memory, Memory::dy, C * (SLICE + 8)), SLICE + 8,
                               dy + (((long)at.z * length + at.x * C) * HV + hv) * DV + first, HV * DV, DV - first,
                               alive<MASKED>(mask, at.z, at.x * C, length), arrival, at.index);
}

// Part `share` of `Shares` of the gradient of log_g at position t: the terms of rows at or after t (before_sums), of
// rows before t (after_sums), and of pairs i >= t > j, whose span contains t. Only such terms are added. A difference
// of running sums would lose the gradient of a small gate.
template <int C, int Shares, int Room>
inline float spanning(threadgroup const float* diagonal, threadgroup const float* row_sums,
                      threadgroup const float* column_sums, threadgroup const float* before_sums,
                      threadgroup const float* after_sums, int parts, int t, int share) {
  constexpr int blocks = C / 16;
  const int own = t / 16, first = own * 16;
  // Sixteen terms are summed first, then those sums: short sums round less.
  float sum = 0.0f;
  for (int b = share; b < blocks; b += Shares) {
    for (int p = 0; p < parts; ++p) {
      float part = 0.0f;
      DELTATUNE_UNROLL
      for (int i =
          0; i < 16; ++i) part += b * 16 + i >= t ? before_sums[(b * 16 + i) * Room + p] :
              after_sums[(b * 16 + i) * Room + p];
      sum += part;
    }
    if (b < own) {
      float part = 0.0f;
      DELTATUNE_UNROLL
      for (int i = 0; i < 16; ++i) {
        if (first + i >= t) part += row_sums[(first + i) * blocks + b];
      }
      sum += part;
      for (int c = own + 1; c < blocks; ++c) {
        part = 0.0f;
        DELTATUNE_UNROLL
        for (int i = 0; i < 16; ++i) part += row_sums[(c * 16 + i) * blocks + b];
        sum += part;
      }
    }
    if (b > own) {
      float part = 0.0f;
      DELTATUNE_UNROLL
      for (int j = 0; j < 16; ++j) {
        if (first + j < t) part += column_sums[(first + j) * blocks + b];
      }
      sum += part;
    }
  }
  for (int j = share; first + j < t && j < 16; j += Shares) {
    float part = 0.0f;
    DELTATUNE_UNROLL
    for (int i = 0; i < 16; ++i) {
      if (first + i >= t) part += diagonal[(first + i) * 17 + j];
    }
    sum += part;
  }
  return sum;
}

// Replaces after_sums[i] = <dS k_i, E_i beta_i u_i>, which the gates before i receive, by a more exact value: dS is
// saved in bf16, whose rounding that sum would show. Since R + N^T beta R = w = P^T dY + E K dS^T, the sum also equals
// beta_i <R_i, u_i> less the terms of the pairs whose second position is i, (i, i) among them, all of them in fp32.
// It is a difference, so it is not used where E_i is small.
template <int C, int Room>
inline void ends_by_pairs(threadgroup const float* diagonal, threadgroup const float* column_sums,
                          threadgroup const float* rate_sums, threadgroup const float* rate,
                          threadgroup const float* after, threadgroup float* after_sums, int parts, int i) {
  constexpr int blocks = C / 16;
  if (after[i] < 0.03125f) return;
  float sum = 0.0f, pairs = 0.0f;
  for (int p = 0; p < parts; ++p) sum += rate_sums[i * Room + p];
  DELTATUNE_UNROLL
  for (int r = 0; r < 16; ++r)
    if (r >= i % 16) pairs += diagonal[(i / 16 * 16 + r) * 17 + i % 16];
  for (int b = i / 16 + 1; b < blocks; ++b) pairs += column_sums[i * blocks + b];
  after_sums[i * Room] = rate[i] * sum - pairs;
  for (int p = 1; p < parts; ++p) after_sums[i * Room + p] = 0.0f;
}

// Computes the gradients of q, k, log_g and beta from what the two scans wrote. Each block does one chunk of one key
// head and goes through that head's HV / HK value heads; the grid is (chunks, HK, B).
// Inputs: q, k, log_g, mask, segments; factors of the prepare kernel; states and u of the scan; d_states and d_right of
// the reverse scan; dy. Outputs: dq, dk [B,T,HK,DK]; d_log_g, d_beta [B,T,HV].
// A group owns the 16 positions of tile `row` and part `part` of the columns of DK. It multiplies with the states SLICE
// rows of DV at a time, then does its pairs of tiles of P and N. One thread per position and share adds up log_g's
// terms.
template <typename In, int C, int DK, int DV, int SLICE, int HK, int HV, int GROUPS, int STAGES, bool OVERLAY,
          bool UNSTAGED, bool MASKED, bool SEGMENTED, typename PQ, typename PK, typename PL, typename PM, typename PZ,
          typename PF, typename PT, typename PR, typename PY, typename OQ, typename OK>
inline void gated_delta_gradients(Place at, threadgroup char* memory, int length, PQ q, PK k, PL log_g, PM mask,
                                  PZ segments, PF factors, PT states, PT d_states, PF u_in, PR d_right, PY dy_in,
                                      OQ dq, OK dk, GLOBAL float* d_log_g, GLOBAL float* d_beta) {
  using Memory = GradientMemory<In, C, DK, SLICE, GROUPS, STAGES, OVERLAY, UNSTAGED>;
  constexpr int threads = GROUPS * 32, stride = stride_of(DK), square = C + 8, slice_stride = SLICE + 8,
      saved = row_of_chunk<In, C, DK, false>(),
      blocks = C / 16;
  constexpr int columns = padded(DK), key_tiles = columns / 16, parts = GROUPS / blocks;
  constexpr int column_tiles = (key_tiles + parts - 1) / parts, own_pairs = (blocks + parts - 1) / parts,
      repeats = HV / HK;
  constexpr int sharers = threads / C, tails = tails_of<In, DK, false>(), room = Memory::room;
  static_assert(GROUPS % blocks == 0 && parts <= room, "groups share the columns of a row of tiles");
  const int chunks = (length + C - 1) / C, t0 = at.x * C;
  const int row = (unsigned)at.group % blocks, part = (unsigned)at.group / blocks, lane = at.lane;
  const long key_offset = (((long)at.z * length + t0) * HK + at.y) * DK;
  const Exact<In> staged_q = shared_at<Exact<In>>(memory, Memory::q, C * stride);
  const Exact<In> staged_k = shared_at<Exact<In>>(memory, Memory::k, C * stride);
  const Wide<In> weights_y = shared_at<Wide<In>>(memory, Memory::weights_y, C * square);
  const Wide<In> weights_right = shared_at<Wide<In>>(memory, Memory::weights_right, C * square);
  threadgroup float* diagonal = reinterpret_cast<threadgroup float*>(memory + Memory::diagonal);
  const Decay<C> decay = decay_at<C>(reinterpret_cast<threadgroup float*>(memory + Memory::decay));
  threadgroup float* gate = reinterpret_cast<threadgroup float*>(memory + Memory::scalars);
  threadgroup float* before = gate + C;
  threadgroup float* after = before + C;
  threadgroup float* rate = after + C;
  threadgroup float* row_sums = reinterpret_cast<threadgroup float*>(memory + Memory::sums);
  threadgroup float* column_sums = row_sums + C * blocks;
  threadgroup float* before_sums = reinterpret_cast<threadgroup float*>(memory + Memory::parts);
  threadgroup float* after_sums = before_sums + C * room;
  threadgroup float* rate_sums = after_sums + C * room;
  threadgroup float* state_dots = rate_sums + C * room;
  const auto live = alive<MASKED>(mask, at.z, t0, length);
  const auto queries = Choice<UNSTAGED>::of(unstaged_rows<DK>(q, key_offset, HK * DK, live), staged_q);
  const auto keys = Choice<UNSTAGED>::of(unstaged_rows<DK>(k, key_offset, HK * DK, live), staged_k);

  Tile dq_sums[column_tiles], dk_sums[column_tiles];
  DELTATUNE_UNROLL
  for (int m = 0; m < column_tiles; ++m) {
    tile_clear(dq_sums[m]);
    tile_clear(dk_sums[m]);
  }
  static_assert(padded(DV) % SLICE == 0 && (STAGES > 1) != OVERLAY,
                "SLICE divides the rows; one stage goes with OVERLAY");
  static_assert(OVERLAY || !UNSTAGED, "with UNSTAGED, q and k need no memory beside the slices");
  arrivals_start(memory + Memory::arrivals, at.index);
  int loads = 0;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    const int hv = at.y * repeats + repeat;
    const long chunk = ((long)at.z * HV + hv) * chunks + at.x;
    barrier();
    {
      // With one stage, the first load brings only the factors and, without OVERLAY, Q and K.
      Arrival arrival = arrival_at(memory + Memory::arrivals, STAGES > 1 ? loads & 1 : 0);
      if (STAGES > 1)
        load_slice<In, C, DK, DV, SLICE, HV, GROUPS, Memory, UNSTAGED, MASKED, false>(
            at, memory + Memory::slices + (loads & 1) * Memory::stage, arrival, states, d_states, u_in, d_right, dy_in,
            mask, length, hv, chunk, 0);
      if (!OVERLAY && repeat == 0) {
        copy_rows<C, columns, threads>(staged_q, stride, q + key_offset, HK * DK, DK, live, arrival, at.index);
        copy_rows<C, columns, threads>(staged_k, stride, k + key_offset, HK * DK, DK, live, arrival,
                                       at.index);
      }
      copy_floats<3 * C>(before, factors + chunk * 3 * C, arrival, at.index);
      copies_sent(arrival, at.index);
      if (STAGES == 1) copies_wait(arrival, loads++);
    }
    if (at.index < C) gate[at.index] = gate_of<SEGMENTED>(at.index, live, log_g, segments, at.z, hv, HV, t0, length);

    Tile from_y[column_tiles], from_right[column_tiles], from_end[column_tiles], dp[own_pairs], da[own_pairs];
    DELTATUNE_UNROLL
    for (int m = 0; m < column_tiles; ++m) {
      tile_clear(from_y[m]);
      tile_clear(from_right[m]);
      tile_clear(from_end[m]);
    }
    DELTATUNE_UNROLL
    for (int m = 0; m < own_pairs; ++m) {
      tile_clear(dp[m]);
      tile_clear(da[m]);
    }
    float state_dot = 0.0f, rates[2] = {0.0f, 0.0f};
    for (int n = 0; n < (DV + SLICE - 1) / SLICE; ++n) {
      threadgroup char* slice = memory + Memory::slices + (STAGES > 1 ? (loads & 1) * Memory::stage : 0);
      const int coming = STAGES > 1 ? n + 1 : n, turn = STAGES > 1 ? (loads + 1) & 1 : 0;
      const Arrival here = arrival_at(memory + Memory::arrivals, STAGES > 1 ? loads & 1 : 0);
      if (STAGES > 1) copies_wait(here, loads >> 1);
      barrier();
      if (coming * SLICE < DV) {
        Arrival arrival = arrival_at(memory + Memory::arrivals, turn);
        load_slice<In, C, DK, DV, SLICE, HV, GROUPS, Memory, UNSTAGED, MASKED, false>(
            at, memory + Memory::slices + turn * Memory::stage, arrival, states, d_states, u_in, d_right, dy_in, mask,
            length, hv, chunk, coming * SLICE);
        copies_sent(arrival, at.index);
      }
      if (STAGES == 1) {
        copies_wait(here, loads);
        barrier();
      }
      ++loads;
      if (n == 0) fill_decay<C>(decay, gate, at.index);
      const auto state = Choice<UNSTAGED>::of(stored_at<Saved<In>>(states + n * SLICE * stride, chunk,
          padded(DV) * stride), shared_at<Saved<In>>(slice, Memory::state, SLICE * stride));
      const auto d_state = Choice<UNSTAGED>::of(
          stored_at<Saved<In>>(d_states + n * SLICE * stride, chunk, padded(DV) * stride),
          shared_at<Saved<In>>(slice, Memory::d_state, SLICE * stride));
      const Wide<In> u = shared_at<Wide<In>>(slice, Memory::u, SLICE * saved);
      const Wide<In> right_gradient = shared_at<Wide<In>>(slice, Memory::right, SLICE * saved);
      const Exact<In> dy = shared_at<Exact<In>>(slice, Memory::dy, C * slice_stride);
      DELTATUNE_UNROLL
      for (int s = 0; s < SLICE; s += 16) {
        const auto left_y = left(straight(dy, slice_stride, row * 16, s), lane);
        const auto left_right = left(turned(right_gradient, saved, row * 16, s), lane);
        const auto left_u = left(turned(u, saved, row * 16, s), lane);
        if (s / 16 % parts == part) add_row_dots(rates, left_right, left_u, lane);
        DELTATUNE_UNROLL
        for (int m = 0; m < column_tiles; ++m) {
          const int column = (part * column_tiles + m) * 16;
          if (key_tiles % parts != 0 && column >= columns) continue;
          const auto b = right(straight(state, stride, s, column), lane);
          const auto db = right(straight(d_state, stride, s, column), lane);
          multiply(from_y[m], left_y, b, lane);
          multiply(from_right[m], left_right, b, lane);
          multiply(from_end[m], left_u, db, lane);
          if (tails == 0 && s / 16 % blocks == row) state_dot += right_dot(b, db, lane);
        }
        DELTATUNE_UNROLL
        for (int m = 0; m < own_pairs; ++m) {
          const int column = part + m * parts;
          if (column > row) continue;
          const auto b = right(straight(u, saved, s, column * 16), lane);
          multiply(dp[m], left_y, b, lane);
          multiply(da[m], left_right, b, lane);
        }
      }
      for (int s = row * 16; tails > 0 && s < SLICE; s += blocks * 16) {
        DELTATUNE_UNROLL
        for (int m = 0; m < column_tiles; ++m) {
          const int column = (part * column_tiles + m) * 16;
          if (key_tiles % parts != 0 && column >= columns) continue;
          state_dot += kept_dot<tails>(straight(state, stride, s, column), straight(d_state, stride, s, column),
                                  tail_at<tails>(u, s * saved, saved, column / 16, lane),
                                  tail_at<tails>(right_gradient, s * saved, saved, column / 16, lane), lane);
        }
      }
    }
    state_dot = lane_sum(state_dot);
    barrier();
    if (OVERLAY && !UNSTAGED) {
      Arrival arrival = arrival_at(memory + Memory::arrivals, 0);
      copies_fence();
      copy_rows<C, columns, threads>(staged_q, stride, q + key_offset, HK * DK, DK, live, arrival, at.index);
      copy_rows<C, columns, threads>(staged_k, stride, k + key_offset, HK * DK, DK, live, arrival,
                                     at.index);
      copies_sent(arrival, at.index);
      copies_wait(arrival, loads++);
      barrier();
    }
    if (lane == 0) state_dots[at.group] = state_dot;
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    DELTATUNE_UNROLL
    for (int m = 0; m < column_tiles; ++m) {
      const int column = (part * column_tiles + m) * 16;
      if (key_tiles % parts != 0 && column >= columns) continue;
      const Tile query = tile_of(straight(queries, stride, row * 16, column), lane);
      const Tile key = tile_of(straight(keys, stride, row * 16, column), lane);
      DELTATUNE_UNROLL
      for (int e = 0; e < 8; ++e) {
        const int i = row * 16 + tile_row(e, lane);
        const float y_part = before[i] * from_y[m].get(e);
        const float right_part = -before[i] * rate[i] * from_right[m].get(e);
        const float end_part = after[i] * rate[i] * from_end[m].get(e);
        dq_sums[m].set(e, dq_sums[m].get(e) + y_part);
        dk_sums[m].set(e, dk_sums[m].get(e) + right_part + end_part);
        sums[tile_side(e)] += y_part * query.get(e) + right_part * key.get(e);
        sums[2 + tile_side(e)] += end_part * key.get(e);
      }
    }
    DELTATUNE_UNROLL
    for (int side = 0; side < 2; ++side) {
      const int e = side * tile_second;
      const float first_sum = row_sum(sums[side]), last_sum = row_sum(sums[2 + side]), rate_sum = row_sum(rates[side]);
      // One lane per row writes: the one that holds the tile's first column in that row.
      if (tile_column(e, lane) == 0) {
        before_sums[(row * 16 + tile_row(e, lane)) * room + part] = first_sum;
        after_sums[(row * 16 + tile_row(e, lane)) * room + part] = last_sum;
        rate_sums[(row * 16 + tile_row(e, lane)) * room + part] = rate_sum;
      }
    }
    // Computes the weights of the pairs in the gradients of q and k, and the terms of the pairs in those of the gates.
    DELTATUNE_UNROLL
    for (int m = 0; m < own_pairs; ++m) {
      const int column = part + m * parts;
      if (column > row) continue;
      Tile qk, kk;
      tile_clear(qk);
      tile_clear(kk);
      DELTATUNE_UNROLL
      for (int c = 0; c < columns; c += 16) {
        const auto b = right(turned(keys, stride, c, column * 16), lane);
        multiply(qk, left(straight(queries, stride, row * 16, c), lane), b, lane);
        multiply(kk, left(straight(keys, stride, row * 16, c), lane), b, lane);
      }
      const float middle = decay.between(row, column);
      DELTATUNE_UNROLL
      for (int e = 0; e < 8; ++e) {
        const int i = row * 16 + tile_row(e, lane), j = column * 16 + tile_column(e, lane);
        const float d = rate[j] * decay.at(row == column, i, j, middle);
        dp[m].set(e, d * dp[m].get(e));
        da[m].set(e, i > j ? -rate[i] * d * da[m].get(e) : 0.0f);
        const bool pairs = i > j || (tails > 0 && i == j);
        qk.set(e, pairs ? dp[m].get(e) * qk.get(e) + da[m].get(e) * kk.get(e) : 0.0f);
      }
      put_tile<true, true>(weights_y, row * 16 * square + column * 16, square, dp[m], 16, 16, lane);
      put_tile<true, true>(weights_right, row * 16 * square + column * 16, square, da[m], 16, 16, lane);
      if (row == column) {
        DELTATUNE_UNROLL
        for (int e = 0; e < 8; ++e)
          diagonal[(row * 16 + tile_row(e, lane)) * 17 + tile_column(e, lane)] = qk.get(e);
      } else {
        DELTATUNE_UNROLL
        for (int side = 0; side < 2; ++side) {
          float sum = 0.0f;
          DELTATUNE_UNROLL
          for (int e = 0; e < 8; ++e)
            if (tile_side(e) == side) sum += qk.get(e);
          sum = row_sum(sum);
          const int e = side * tile_second;
          if (tile_column(e, lane) == 0) row_sums[(row * 16 + tile_row(e, lane)) * blocks + column] = sum;
        }
        DELTATUNE_UNROLL
        for (int e = 0; e < 8; ++e) {
          if (tile_side(e) != 0) continue;
          const float sum = column_sum(qk.get(e) + qk.get(e + tile_second));
          if (tile_row(e, lane) == 0) column_sums[(column * 16 + tile_column(e, lane)) * blocks + row] = sum;
        }
      }
    }
    barrier();
    DELTATUNE_UNROLL
    for (int t = 0; t < blocks; ++t) {
      if (t <= row) {
        const auto w = left(straight(weights_y, square, row * 16, t * 16), lane);
        const auto a = left(straight(weights_right, square, row * 16, t * 16), lane);
        DELTATUNE_UNROLL
        for (int m = 0; m < column_tiles; ++m) {
          const int column = (part * column_tiles + m) * 16;
          if (key_tiles % parts != 0 && column >= columns) continue;
          const auto b = right(straight(keys, stride, t * 16, column), lane);
          multiply(dq_sums[m], w, b, lane);
          multiply(dk_sums[m], a, b, lane);
        }
      }
      if (t >= row) {
        const auto w = left(turned(weights_y, square, row * 16, t * 16), lane);
        const auto a = left(turned(weights_right, square, row * 16, t * 16), lane);
        DELTATUNE_UNROLL
        for (int m = 0; m < column_tiles; ++m) {
          const int column = (part * column_tiles + m) * 16;
          if (key_tiles % parts != 0 && column >= columns) continue;
          multiply(dk_sums[m], w, right(straight(queries, stride, t * 16, column), lane), lane);
          multiply(dk_sums[m], a, right(straight(keys, stride, t * 16, column), lane), lane);
        }
      }
    }
    if (tails > 0) {
      if (at.index < C)
        ends_by_pairs<C, room>(diagonal, column_sums, rate_sums, rate, after, after_sums, parts, at.index);
      barrier();
    }
    // The shares of each position take the memory of the decay's tables, which are no longer read.
    threadgroup float* shares = decay.diagonal;
    static_assert(sharers <= 17, "a position's shares fit in a row");
    const int t = (unsigned)at.index % C, share = (unsigned)at.index / C;
    shares[t * 17 + share] =
        spanning<C, sharers, room>(diagonal, row_sums, column_sums, before_sums, after_sums, parts, t, share);
    barrier();
    if (at.index < C && t0 + t < length) {
      const long to = ((long)at.z * length + t0 + t) * HV + hv;
      float on_gate = 0.0f, on_beta = 0.0f;
      DELTATUNE_UNROLL
      for (int g = 0; g < GROUPS; ++g) on_gate += state_dots[g];
      on_gate *= before[C - 1];
      DELTATUNE_UNROLL
      for (int p = 0; p < parts; ++p) on_beta += rate_sums[t * room + p];
      DELTATUNE_UNROLL
      for (int p = 0; p < sharers; ++p) on_gate += shares[t * 17 + p];
      d_log_g[to] = live(t) ? on_gate : 0.0f;
      d_beta[to] = live(t) ? on_beta : 0.0f;
    }
    copies_fence();
  }
  DELTATUNE_UNROLL
  for (int m = 0; m < column_tiles; ++m) {
    const int column = (part * column_tiles + m) * 16;
    if (key_tiles % parts != 0 && column >= columns) continue;
    if (UNSTAGED) {
      DELTATUNE_UNROLL
      for (int e = 0; e < 8; ++e) {
        const int i = row * 16 + tile_row(e, lane), c = column + tile_column(e, lane);
        if (t0 + i >= length || c >= DK) continue;
        dq[key_offset + (long)i * HK * DK + c] = static_cast<In>(dq_sums[m].get(e));
        dk[key_offset + (long)i * HK * DK + c] = static_cast<In>(dk_sums[m].get(e));
      }
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
