// The gated delta rule with a gate per key channel: prepare and gradients are here. The two scans are those of
// scan.h and reverse.h, which multiply with G K, G Q and E K in place of K and Q. The notation is that of chunk.h.
//   G_i, E_i and D_ij are vectors over channels c; P_ij = sum_c q_ic D_ij,c k_jc, and N_ij likewise with k_ic.
// A chunk has one or two tiles of 16 positions. Between the two tiles D is a product of two factors, each at most 1: of
// the gates from the later tile's start to i (prefix_i), and of those from j + 1 to the earlier tile's end (suffix_j).
// Within a tile, pairs are summed one by one. Nothing is divided by a gate, and the gradient of a gate is a sum of
// terms whose span contains it.

template <typename In, int C, int DK, bool UNSTAGED>
struct ChannelPrepareMemory {
  static constexpr constant int second_tile = C / 16 - 1;
  static constexpr constant int k = 0;
  static constexpr constant int q = k + room_of<UNSTAGED, Exact<In>, C, DK>();
  static constexpr constant int gate = q + room_of<UNSTAGED, Exact<In>, C, DK>();
  // With two tiles: prefix times q and prefix times k of the later tile, and suffix times k of the earlier one.
  static constexpr constant int later_q = gate + C * padded(DK) * 4;
  static constexpr constant int later_k = later_q + second_tile * 16 * stride_of(DK) * Wide<In>::bytes;
  static constexpr constant int earlier_k = later_k + second_tile * 16 * stride_of(DK) * Wide<In>::bytes;
  static constexpr constant int z = earlier_k + second_tile * 16 * stride_of(DK) * Wide<In>::bytes;
  static constexpr constant int scratch = z + packed_offset(C / 16) * Wide<In>::bytes;
  static constexpr constant int n = scratch + C * (C + 8) * Wide<In>::bytes;
  static constexpr constant int tile_qk = n + C * (C + 8) * Wide<In>::bytes;
  static constexpr constant int tile_kk = tile_qk + C * 17 * 4;
  static constexpr constant int rate = tile_kk + C * 17 * 4;
  static constexpr constant int arrivals = rate + C * 4;
  static constexpr constant int bytes = arrivals + 16;
};

// Computes what the scans need of each chunk and what does not depend on its state. Each block does one chunk; the grid
// is (chunks, HV, B).
// Inputs: q, k [B,T,HK,DK]; log_g [B,T,HV,DK]; beta [B,T,HV]; mask and segments [B,T], or Nothing.
// Outputs, for each of [B,HV,chunks]: solve, the packed Z; scores, the packed P; factors, which are beta [C] and then
// the product of the chunk's gates [DK]; and, [C,DK] with padded rows, queries G Q, keys G K and ends E K.
// One thread per channel goes along the positions to scale Q and K. For pairs within a tile, each group takes some
// columns j, each lane some channels. The pairs between the two tiles are matrix products.
template <typename In, int C, int DK, int HK, int HV, int GROUPS, bool UNSTAGED, bool MASKED, bool SEGMENTED,
          typename PQ, typename PK, typename PL, typename PB, typename PM, typename PZ, typename OQ>
inline void gated_delta_channel_prepare(Place at, threadgroup char* memory, int length, PQ q, PK k, PL log_g, PB beta,
                                        PM mask, PZ segments, GLOBAL float* solve, GLOBAL float* scores,
                                        GLOBAL float* factors, OQ queries_out, GLOBAL float* keys_out,
                                        GLOBAL float* ends_out) {
  using Memory = ChannelPrepareMemory<In, C, DK, UNSTAGED>;
  constexpr int threads = GROUPS * 32, stride = stride_of(DK), square = C + 8, blocks = C / 16, columns = padded(DK);
  constexpr int triangle = packed_offset(blocks), numbers = C + columns, shares = GROUPS / blocks;
  constexpr int each = (columns + 31) / 32;
  static_assert(blocks <= 2 && GROUPS % blocks == 0, "one or two tiles a chunk");
  const int chunks = (length + C - 1) / C, t0 = at.x * C, lane = at.lane;
  const long chunk = ((long)at.z * HV + at.y) * chunks + at.x;
  const Exact<In> staged_k = shared_at<Exact<In>>(memory, Memory::k, C * stride);
  const Exact<In> staged_q = shared_at<Exact<In>>(memory, Memory::q, C * stride);
  const Wide<In> later_q = shared_at<Wide<In>>(memory, Memory::later_q, 16 * stride);
  const Wide<In> later_k = shared_at<Wide<In>>(memory, Memory::later_k, 16 * stride);
  const Wide<In> earlier_k = shared_at<Wide<In>>(memory, Memory::earlier_k, 16 * stride);
  const Wide<In> z = shared_at<Wide<In>>(memory, Memory::z, triangle);
  const Wide<In> scratch = shared_at<Wide<In>>(memory, Memory::scratch, C * square);
  const Wide<In> n = shared_at<Wide<In>>(memory, Memory::n, C * square);
  const auto scores_out = stored_at<Wide<In>>(scores, chunk, triangle);
  const auto scaled_q = stored_at<Saved<In>>(queries_out, chunk, C * stride);
  const auto scaled_k = stored_at<Wide<In>>(keys_out, chunk, C * stride);
  const auto end_k = stored_at<Wide<In>>(ends_out, chunk, C * stride);
  threadgroup float* gate = reinterpret_cast<threadgroup float*>(memory + Memory::gate);
  threadgroup float* tile_qk = reinterpret_cast<threadgroup float*>(memory + Memory::tile_qk);
  threadgroup float* tile_kk = reinterpret_cast<threadgroup float*>(memory + Memory::tile_kk);
  threadgroup float* rate = reinterpret_cast<threadgroup float*>(memory + Memory::rate);
  const auto live = alive<MASKED>(mask, at.z, t0, length);

  const long from = (((long)at.z * length + t0) * HK + at.y / (HV / HK)) * DK;
  arrivals_start(memory + Memory::arrivals, at.index);
  Arrival arrival = arrival_at(memory + Memory::arrivals, 0);
  if (!UNSTAGED) {
    copy_rows<C, columns, threads>(staged_k, stride, k + from, HK * DK, DK, live, arrival, at.index);
    copy_rows<C, columns, threads>(staged_q, stride, q + from, HK * DK, DK, live, arrival, at.index);
  }
  copies_sent(arrival, at.index);
  for (int i = at.index; i < C * columns; i += threads) {
    const int row = (unsigned)i / columns, c = (unsigned)i % columns;
    gate[i] = c < DK ? gate_of<SEGMENTED>(row, live, log_g, segments, at.z, at.y * DK + c, HV * DK, t0, length) : 1.0f;
  }
  if (at.index < C) {
    const bool on = live(at.index);
    rate[at.index] =
        on ? static_cast<float>(beta[((long)at.z * length + t0 + (on ? at.index : 0)) * HV + at.y]) : 0.0f;
    factors[chunk * numbers + at.index] = rate[at.index];
  }
  const auto keys = Choice<UNSTAGED>::of(unstaged_rows<DK>(k, from, HK * DK, live), staged_k);
  const auto queries = Choice<UNSTAGED>::of(unstaged_rows<DK>(q, from, HK * DK, live), staged_q);
  copies_wait(arrival, 0);
  barrier();
  for (int c = at.index; c < columns; c += threads) {
    float all = 1.0f, tail = 1.0f;
    for (int b = 0; b < blocks; ++b) {
      const float lead = all;
      float prefix = 1.0f;
      for (int i = b * 16; i < b * 16 + 16; ++i) {
        prefix *= gate[i * columns + c];
        const float query = queries.get(i * stride + c), key = keys.get(i * stride + c);
        all = lead * prefix;
        scaled_q.put(i * stride + c, all * query);
        scaled_k.put(i * stride + c, all * key);
        if (b == 1) {
          later_q.put((i - 16) * stride + c, prefix * query);
          later_k.put((i - 16) * stride + c, prefix * key);
        }
      }
    }
    for (int b = blocks - 1; b >= 0; --b) {
      float suffix = 1.0f;
      for (int i = b * 16 + 15; i >= b * 16; --i) {
        const float key = keys.get(i * stride + c);
        end_k.put(i * stride + c, suffix * tail * key);
        if (blocks == 2 && b == 0) earlier_k.put(i * stride + c, suffix * key);
        suffix *= gate[i * columns + c];
      }
      tail *= suffix;
    }
    factors[chunk * numbers + C + c] = all;
  }
  // Pairs within a tile: each group takes every `shares`-th column, and each of its lanes some channels.
  const int tile = (unsigned)at.group % blocks, share = (unsigned)at.group / blocks;
  for (int j = share; j < 16; j += shares) {
    float product[each];
    DELTATUNE_UNROLL
    for (int m = 0; m < each; ++m) {
      const int c = lane + 32 * m;
      product[m] = c < columns ? keys.get((tile * 16 + j) * stride + c) : 0.0f;
    }
    for (int i = 0; i < 16; ++i) {
      const int r = tile * 16 + i;
      float of_q = 0.0f, of_k = 0.0f;
      if (i >= j) {
        DELTATUNE_UNROLL
        for (int m = 0; m < each; ++m) {
          const int c = lane + 32 * m;
          if (c >= columns) continue;
          if (i > j) product[m] *= gate[r * columns + c];
          of_q += product[m] * queries.get(r * stride + c);
          of_k += product[m] * keys.get(r * stride + c);
        }
        of_q = lane_sum(of_q);
        of_k = lane_sum(of_k);
      }
      if (lane == 0) {
        tile_qk[r * 17 + j] = of_q;
        tile_kk[r * 17 + j] = i > j ? of_k : 0.0f;
      }
    }
  }
  barrier();
  if (blocks == 2) {
    for (int side = at.group; side < 2; side += GROUPS) {
      Tile sum;
      tile_clear(sum);
      for (int c = 0; c < columns; c += 16) {
        const auto b = right(turned(earlier_k, stride, c, 0), lane);
        if (side == 0) multiply(sum, left(straight(later_q, stride, 0, c), lane), b, lane);
        else multiply(sum, left(straight(later_k, stride, 0, c), lane), b, lane);
      }
      if (side == 0) put_tile<true, true>(scores_out, packed_offset(1), packed_stride(1), sum, 16, 16, lane);
      else put_tile<true, true>(n, 16 * square, square, sum, 16, 16, lane);
    }
  }
  for (int i = at.index; i < C * 16; i += threads) {
    const int row = (unsigned)i / 16, b = row / 16;
    scores_out.put(packed_offset(b) + (row & 15) * packed_stride(b) + b * 16 + (i & 15), tile_qk[row * 17 + (i & 15)]);
  }
  solve_triangle<C, GROUPS>(at, z, scratch, n, tile_kk, rate);
  write_block<triangle, threads>(stored_at<Wide<In>>(solve, chunk, triangle), z, at.index);
}

// The scans of scan.h and reverse.h, with the outputs of the prepare kernel above in place of q and k.
template <typename In, int C, int DK, int DV, int SLICE, int HK, int HV, int GROUPS, int STAGES, int SPLIT,
          bool UNSTAGED, bool MASKED, typename PV, typename PM, typename PQ, typename PK, typename PI, typename OY,
              typename OS>
inline void gated_delta_channel_scan(Place at, threadgroup char* memory, int length, PV v, PM mask, PQ queries, PK keys,
                                     PK ends, PI initial, bool has_initial, PK solve, PK scores, PK factors, OY y,
                                         OS states,
                                     GLOBAL float* u, GLOBAL float* last) {
  scan_chunks<In, C, DK, DV, SLICE, HK, HV, GROUPS, STAGES, SPLIT, UNSTAGED, MASKED, true>(
      at, memory, length, queries, keys, ends, v, mask, initial, has_initial, solve, scores, factors, y, states, u,
          last);
}
template <typename In, int C, int DK, int DV, int SLICE, int HK, int HV, int GROUPS, int STAGES, int SPLIT,
          bool UNSTAGED, bool MASKED, typename PY, typename PM, typename PQ, typename PK, typename PE, typename OS,
              typename OR, typename OV>
inline void gated_delta_channel_reverse(Place at, threadgroup char* memory, int length, PY dy, PM mask, PQ queries,
                                        PK keys, PK ends, PE d_last, PK solve, PK scores, PK factors, OS d_states,
                                        OR d_right, OV dv, GLOBAL float* d_initial) {
  reverse_chunks<In, C, DK, DV, SLICE, HK, HV, GROUPS, STAGES, SPLIT, UNSTAGED, MASKED, true>(
      at, memory, length, queries, keys, ends, dy, mask, d_last, solve, scores, factors, d_states, d_right, dv,
      d_initial);
}

template <typename In, int C, int DK, int SLICE, int STAGES, bool UNSTAGED>
struct ChannelGradientMemory {
  // With UNSTAGED a chunk has one tile, and the products are in shared memory 128 channels at a time.
  static constexpr constant int span = UNSTAGED ? 128 : padded(DK);
  static constexpr constant int second_tile = C / 16 - 1, product_stride = span + 4;
  static constexpr constant int state = 0;
  static constexpr constant int d_state = state + room_of<UNSTAGED, Saved<In>, SLICE, DK>();
  static constexpr constant int u = d_state + room_of<UNSTAGED, Saved<In>, SLICE, DK>();
  static constexpr constant int right = u + SLICE * (C + 8) * Wide<In>::bytes;
  static constexpr constant int dy = right + SLICE * (C + 8) * Wide<In>::bytes;
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
  static constexpr constant int tiles_y = pair_right + second_tile * 16 * 24 * Wide<In>::bytes;
  static constexpr constant int tiles_right = tiles_y + C * 17 * 4;
  static constexpr constant int rate = tiles_right + C * 17 * 4;
  static constexpr constant int rate_sums = rate + C * 4;
  // By channel: the product of each tile's gates, the terms that each tile adds to the gates of the other, and the
  // inner product of the states.
  static constexpr constant int totals = rate_sums + C * 4 * 4;
  static constexpr constant int cross = totals + (UNSTAGED ? 1 : 2) * padded(DK) * 4;
  static constexpr constant int state_dots = cross + (UNSTAGED ? 0 : 2) * padded(DK) * 4;
  static constexpr constant int arrivals = state_dots + padded(DK) * 4;
  static constexpr constant int bytes = arrivals + 16;
};

// Loads a channel's gates, queries and keys at `Count` positions from `first` on: zeros and gates of 1 where a step is
// not live.
template <int DK, bool SEGMENTED, int Count, typename Live, typename PQ, typename PK, typename PL, typename PZ>
inline void load_channel(thread float* gate, thread float* query, thread float* key, int c, int first, Live live, PQ q,
                         PK k, PL log_g, PZ segments, int row, int head, int heads, int key_stride, long key_offset,
                         int t0, int length) {
  DELTATUNE_UNROLL
  for (int i = 0; i < Count; ++i) {
    const bool on = c < DK && live(first + i);
    const long of = on ? key_offset + (long)(first + i) * key_stride + c : key_offset;
    const float x = static_cast<float>(q[of]), y = static_cast<float>(k[of]);
    query[i] = on ? x : 0.0f;
    key[i] = on ? y : 0.0f;
  }
  DELTATUNE_UNROLL
  for (int i = 0; i < Count; ++i)
    gate[i] = c < DK ? gate_of<SEGMENTED>(first + i, live, log_g, segments, row, head * DK + c, heads * DK, t0, length)
                     : 1.0f;
}

// Writes a tile of the products with the states to its row and column in shared memory, times what beta gives it.
inline void put_products(threadgroup float* from_y, threadgroup float* from_right, threadgroup float* from_end,
                         thread const Tile& y, thread const Tile& right_gradient, thread const Tile& end,
                         threadgroup const float* rate, int row, int column, int product_stride, int lane) {
  DELTATUNE_UNROLL
  for (int e = 0; e < 8; ++e) {
    const int i = row * 16 + tile_row(e, lane), to = i * product_stride + column + tile_column(e, lane);
    from_y[to] = y.get(e);
    from_right[to] = -rate[i] * right_gradient.get(e);
    from_end[to] = rate[i] * end.get(e);
  }
}

// Computes the gradients of q, k, log_g and beta from what the two scans wrote. Inputs, outputs, blocks and the grid
// are those of gated_delta_gradients, but log_g and d_log_g are [B,T,HV,DK].
// First a group owns the 16 positions of a tile and a part of the columns of DK, and multiplies with the states. Then a
// lane owns a channel of a tile and goes along the tile's 16 positions.
template <typename In, int C, int DK, int DV, int SLICE, int HK, int HV, int GROUPS, int STAGES, bool UNSTAGED,
          bool MASKED, bool SEGMENTED, typename PQ, typename PK, typename PL, typename PM, typename PZ, typename PF,
          typename PT, typename PR, typename PY, typename OQ, typename OK>
inline void gated_delta_channel_gradients(Place at, threadgroup char* memory, int length, PQ q, PK k, PL log_g, PM mask,
                                          PZ segments, PF factors, PT states, PT d_states, PF u_in, PR d_right,
                                          PY dy_in, OQ dq, OK dk, GLOBAL float* d_log_g, GLOBAL float* d_beta) {
  using Memory = ChannelGradientMemory<In, C, DK, SLICE, STAGES, UNSTAGED>;
  using Shape = GradientShape<In, C, DK, DV, SLICE, HK, HV, GROUPS, UNSTAGED, MASKED, true>;
  constexpr int threads = GROUPS * 32, stride = stride_of(DK), square = C + 8, slice_stride = SLICE + 8,
      blocks = C / 16;
  constexpr int columns = padded(DK), key_tiles = columns / 16, parts = GROUPS / blocks,
      product_stride = Memory::product_stride;
  constexpr int column_tiles = (key_tiles + parts - 1) / parts, own_pairs = (blocks + parts - 1) / parts,
      repeats = HV / HK;
  constexpr int tasks = ((columns + 31) / 32 + parts - 1) / parts, numbers = C + columns;
  constexpr int each = (columns + threads - 1) / threads;
  static_assert(GROUPS % blocks == 0 && parts <= 4 && blocks <= 2, "groups share the columns of a row of tiles");
  static_assert(padded(DV) % SLICE == 0, "SLICE divides the rows");
  static_assert(!UNSTAGED || (blocks == 1 && parts * 32 == Memory::span), "a span of channels at a time");
  const int chunks = (length + C - 1) / C, t0 = at.x * C;
  const int row = (unsigned)at.group % blocks, part = (unsigned)at.group / blocks, lane = at.lane;
  const long key_offset = (((long)at.z * length + t0) * HK + at.y) * DK;
  threadgroup float* from_y = reinterpret_cast<threadgroup float*>(memory + Memory::from_y);
  threadgroup float* from_right = reinterpret_cast<threadgroup float*>(memory + Memory::from_right);
  threadgroup float* from_end = reinterpret_cast<threadgroup float*>(memory + Memory::from_end);
  threadgroup float* over_y = reinterpret_cast<threadgroup float*>(memory + Memory::over_y);
  threadgroup float* over_right = reinterpret_cast<threadgroup float*>(memory + Memory::over_right);
  threadgroup float* over_end = reinterpret_cast<threadgroup float*>(memory + Memory::over_end);
  const Wide<In> later_q = shared_at<Wide<In>>(memory, Memory::later_q, 16 * stride);
  const Wide<In> later_k = shared_at<Wide<In>>(memory, Memory::later_k, 16 * stride);
  const Wide<In> earlier_k = shared_at<Wide<In>>(memory, Memory::earlier_k, 16 * stride);
  const Wide<In> pair_y = shared_at<Wide<In>>(memory, Memory::pair_y, 16 * 24);
  const Wide<In> pair_right = shared_at<Wide<In>>(memory, Memory::pair_right, 16 * 24);
  threadgroup float* tiles_y = reinterpret_cast<threadgroup float*>(memory + Memory::tiles_y);
  threadgroup float* tiles_right = reinterpret_cast<threadgroup float*>(memory + Memory::tiles_right);
  threadgroup float* rate = reinterpret_cast<threadgroup float*>(memory + Memory::rate);
  threadgroup float* rate_sums = reinterpret_cast<threadgroup float*>(memory + Memory::rate_sums);
  threadgroup float* totals = reinterpret_cast<threadgroup float*>(memory + Memory::totals);
  threadgroup float* cross = reinterpret_cast<threadgroup float*>(memory + Memory::cross);
  threadgroup float* state_dots = reinterpret_cast<threadgroup float*>(memory + Memory::state_dots);
  const auto live = alive<MASKED>(mask, at.z, t0, length);

  const auto arrays = saved_arrays(states, d_states, u_in, d_right, dy_in, mask, length);
  float dq_sums[tasks][16], dk_sums[tasks][16];
  DELTATUNE_UNROLL
  for (int m = 0; m < tasks; ++m) {
    DELTATUNE_UNROLL
    for (int i = 0; i < 16; ++i) dq_sums[m][i] = dk_sums[m][i] = 0.0f;
  }
  arrivals_start(memory + Memory::arrivals, at.index);
  int loads = 0;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    const int hv = at.y * repeats + repeat;
    const long chunk = ((long)at.z * HV + hv) * chunks + at.x;
    barrier();
    if (STAGES > 1) {
      Arrival arrival = arrival_at(memory + Memory::arrivals, loads & 1);
      load_slice<Shape, Memory>(at, memory + (loads & 1) * Memory::stage, arrival, arrays, hv, chunk, 0);
      copies_sent(arrival, at.index);
    }
    if (at.index < C) rate[at.index] = factors[chunk * numbers + at.index];
    // Each thread takes a channel of a tile. It loads all that it needs, then goes along the positions.
    for (int item = at.index; item < blocks * columns; item += threads) {
      const int b = (unsigned)item / columns, c = (unsigned)item % columns;
      float gate[16], query[16], key[16];
      load_channel<DK, SEGMENTED, 16>(gate, query, key, c, b * 16, live, q, k, log_g, segments, at.z, hv, HV, HK * DK,
                                      key_offset, t0, length);
      float product = 1.0f;
      if (blocks == 2 && b == 0) {
        DELTATUNE_UNROLL
        for (int i = 15; i >= 0; --i) {
          earlier_k.put(i * stride + c, product * key[i]);
          product *= gate[i];
        }
      } else {
        DELTATUNE_UNROLL
        for (int i = 0; i < 16; ++i) {
          product *= gate[i];
          if (blocks == 2) {
            later_q.put(i * stride + c, product * query[i]);
            later_k.put(i * stride + c, product * key[i]);
          }
        }
      }
      totals[b * columns + c] = product;
    }

    Tile y_sums[column_tiles], right_sums[column_tiles], end_sums[column_tiles], dp[own_pairs], da[own_pairs];
    DELTATUNE_UNROLL
    for (int m = 0; m < column_tiles; ++m) {
      tile_clear(y_sums[m]);
      tile_clear(right_sums[m]);
      tile_clear(end_sums[m]);
    }
    DELTATUNE_UNROLL
    for (int m = 0; m < own_pairs; ++m) {
      tile_clear(dp[m]);
      tile_clear(da[m]);
    }
    float rates[2] = {0.0f, 0.0f}, all[each];
    DELTATUNE_UNROLL
    for (int m = 0; m < each; ++m) all[m] = 0.0f;
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
      const auto state = Choice<UNSTAGED>::of(stored_at<Saved<In>>(states + n * SLICE * stride, chunk,
          padded(DV) * stride), shared_at<Saved<In>>(slice, Memory::state, SLICE * stride));
      const auto d_state = Choice<UNSTAGED>::of(
          stored_at<Saved<In>>(d_states + n * SLICE * stride, chunk, padded(DV) * stride),
          shared_at<Saved<In>>(slice, Memory::d_state, SLICE * stride));
      const Wide<In> u = shared_at<Wide<In>>(slice, Memory::u, SLICE * square);
      const Wide<In> right_gradient = shared_at<Wide<In>>(slice, Memory::right, SLICE * square);
      const Exact<In> dy = shared_at<Exact<In>>(slice, Memory::dy, C * slice_stride);
      DELTATUNE_UNROLL
      for (int m = 0; m < each; ++m) {
        const int c = at.index + m * threads;
        if (c >= columns) continue;
        for (int s = 0; s < SLICE; ++s) all[m] += state.get(s * stride + c) * d_state.get(s * stride + c);
      }
      DELTATUNE_UNROLL
      for (int s = 0; s < SLICE; s += 16) {
        const auto left_y = left(straight(dy, slice_stride, row * 16, s), lane);
        const auto left_right = left(turned(right_gradient, square, row * 16, s), lane);
        const auto left_u = left(turned(u, square, row * 16, s), lane);
        if (s / 16 % parts == part) add_row_dots(rates, left_right, left_u, lane);
        DELTATUNE_UNROLL
        for (int m = 0; m < column_tiles; ++m) {
          const int column = (part * column_tiles + m) * 16;
          if (key_tiles % parts != 0 && column >= columns) continue;
          const auto b = right(straight(state, stride, s, column), lane);
          multiply(y_sums[m], left_y, b, lane);
          multiply(right_sums[m], left_right, b, lane);
          multiply(end_sums[m], left_u, right(straight(d_state, stride, s, column), lane), lane);
        }
        DELTATUNE_UNROLL
        for (int m = 0; m < own_pairs; ++m) {
          const int column = part + m * parts;
          if (column > row) continue;
          const auto b = right(straight(u, square, s, column * 16), lane);
          multiply(dp[m], left_y, b, lane);
          multiply(da[m], left_right, b, lane);
        }
      }
    }
    barrier();
    DELTATUNE_UNROLL
    for (int m = 0; m < each; ++m)
      if (at.index + m * threads < columns) state_dots[at.index + m * threads] = all[m];
    DELTATUNE_UNROLL
    for (int m = 0; m < column_tiles; ++m) {
      const int column = (part * column_tiles + m) * 16;
      if (key_tiles % parts != 0 && column >= columns) continue;
      if (UNSTAGED && column >= Memory::span) continue;
      put_products(from_y, from_right, from_end, y_sums[m], right_sums[m], end_sums[m], rate, row, column,
                   product_stride, lane);
    }
    DELTATUNE_UNROLL
    for (int side = 0; side < 2; ++side) {
      const int e = side * tile_second;
      const float sum = row_sum(rates[side]);
      if (tile_column(e, lane) == 0) rate_sums[(row * 16 + tile_row(e, lane)) * 4 + part] = sum;
    }
    DELTATUNE_UNROLL
    for (int m = 0; m < own_pairs; ++m) {
      const int column = part + m * parts;
      if (column > row) continue;
      DELTATUNE_UNROLL
      for (int e = 0; e < 8; ++e) {
        const int i = row * 16 + tile_row(e, lane), j = column * 16 + tile_column(e, lane);
        dp[m].set(e, rate[j] * dp[m].get(e));
        da[m].set(e, -rate[i] * rate[j] * da[m].get(e));
        if (row == column) {
          tiles_y[i * 17 + (j & 15)] = dp[m].get(e);
          tiles_right[i * 17 + (j & 15)] = i > j ? da[m].get(e) : 0.0f;
        }
      }
      if (row != column) {
        put_tile<true, true>(pair_y, 0, 24, dp[m], 16, 16, lane);
        put_tile<true, true>(pair_right, 0, 24, da[m], 16, 16, lane);
      }
    }
    barrier();
    if (blocks == 2) {
      for (int t = at.group; t < key_tiles; t += GROUPS) {
        Tile y, r, end;
        tile_clear(y);
        tile_clear(r);
        tile_clear(end);
        const auto b = right(straight(earlier_k, stride, 0, t * 16), lane);
        multiply(y, left(straight(pair_y, 24, 0, 0), lane), b, lane);
        multiply(r, left(straight(pair_right, 24, 0, 0), lane), b, lane);
        multiply(end, left(turned(pair_y, 24, 0, 0), lane), right(straight(later_q, stride, 0, t * 16), lane), lane);
        multiply(end, left(turned(pair_right, 24, 0, 0), lane), right(straight(later_k, stride, 0, t * 16), lane),
                 lane);
        DELTATUNE_UNROLL
        for (int e = 0; e < 8; ++e) {
          const int to = tile_row(e, lane) * product_stride + t * 16 + tile_column(e, lane);
          over_y[to] = y.get(e);
          over_right[to] = r.get(e);
          over_end[to] = end.get(e);
        }
      }
      barrier();
    }
    float on_gate[tasks][16];
    DELTATUNE_UNROLL
    for (int m = 0; m < tasks; ++m) {
      const int c = (part + m * parts) * 32 + lane, first = row * 16;
      if (UNSTAGED && m > 0) {
        barrier();
        DELTATUNE_UNROLL
        for (int n = 0; n < column_tiles; ++n) {
          const int column = (part * column_tiles + n) * 16 - m * Memory::span;
          if (column < 0 || column >= Memory::span || column + m * Memory::span >= columns) continue;
          put_products(from_y, from_right, from_end, y_sums[n], right_sums[n], end_sums[n], rate, row, column,
                       product_stride, lane);
        }
        barrier();
      }
      DELTATUNE_UNROLL
      for (int i = 0; i < 16; ++i) on_gate[m][i] = 0.0f;
      if (c >= DK) continue;
      const int cell = c - (UNSTAGED ? m * Memory::span : 0);
      float gate[16], query[16], key[16];
      load_channel<DK, SEGMENTED, 16>(gate, query, key, c, first, live, q, k, log_g, segments, at.z, hv, HV, HK * DK,
                                      key_offset, t0, length);
      const float lead = row == 1 ? totals[c] : 1.0f, tail = blocks == 2 && row == 0 ? totals[columns + c] : 1.0f;
      // Rows: terms that reach position i from before its tile. A gate receives those of the rows from its own on.
      float prefix = 1.0f, given = 0.0f, sum = 0.0f, before[16];
      DELTATUNE_UNROLL
      for (int i = 0; i < 16; ++i) {
        prefix *= gate[i];
        const int of = (first + i) * product_stride + cell;
        float y_part = lead * prefix * from_y[of], k_part = lead * prefix * from_right[of];
        given += query[i] * y_part + key[i] * k_part;
        if (row == 1) {
          y_part += prefix * over_y[i * product_stride + c];
          k_part += prefix * over_right[i * product_stride + c];
        }
        before[i] = query[i] * y_part + key[i] * k_part;
        dq_sums[m][i] += y_part;
        dk_sums[m][i] += k_part;
      }
      DELTATUNE_UNROLL
      for (int i = 15; i >= 0; --i) {
        sum += before[i];
        on_gate[m][i] += sum;
      }
      if (row == 1) cross[c] = given;
      // Columns: terms that position j gives beyond its tile. A gate receives those of the columns before its own.
      float suffix = 1.0f;
      given = 0.0f;
      DELTATUNE_UNROLL
      for (int j = 15; j >= 0; --j) {
        float end_part = suffix * tail * from_end[(first + j) * product_stride + cell];
        given += key[j] * end_part;
        if (blocks == 2 && row == 0) end_part += suffix * over_end[j * product_stride + c];
        before[j] = key[j] * end_part;
        dk_sums[m][j] += end_part;
        suffix *= gate[j];
      }
      sum = 0.0f;
      DELTATUNE_UNROLL
      for (int j = 0; j < 16; ++j) {
        on_gate[m][j] += sum;
        sum += before[j];
      }
      if (blocks == 2 && row == 0) cross[columns + c] = given;
      // Pairs within the tile.
      DELTATUNE_UNROLL
      for (int j = 0; j < 16; ++j) {
        float product = 1.0f, own = 0.0f;
        DELTATUNE_UNROLL
        for (int i = j; i < 16; ++i) {
          if (i > j) product *= gate[i];
          const float weight_y = tiles_y[(first + i) * 17 + j], weight_right = tiles_right[(first + i) * 17 + j];
          const float decayed = product * key[j], both = weight_y * query[i] + weight_right * key[i];
          dq_sums[m][i] += weight_y * decayed;
          dk_sums[m][i] += weight_right * decayed;
          own += product * both;
          before[i] = decayed * both;
        }
        dk_sums[m][j] += own;
        sum = 0.0f;
        DELTATUNE_UNROLL
        for (int i = 15; i > j; --i) {
          sum += before[i];
          on_gate[m][i] += sum;
        }
      }
    }
    if (blocks == 2) barrier();
    DELTATUNE_UNROLL
    for (int m = 0; m < tasks; ++m) {
      const int c = (part + m * parts) * 32 + lane;
      if (c >= DK) continue;
      float common = state_dots[c] * totals[c] * (blocks == 2 ? totals[columns + c] : 1.0f);
      if (blocks == 2) common += row == 0 ? cross[c] : cross[columns + c];
      DELTATUNE_UNROLL
      for (int i = 0; i < 16; ++i) {
        const int t = t0 + row * 16 + i;
        if (t < length)
          d_log_g[(((long)at.z * length + t) * HV + hv) * DK + c] =
              live(row * 16 + i) ? on_gate[m][i] + common : 0.0f;
      }
    }
    if (at.index < C && t0 + at.index < length) {
      float sum = 0.0f;
      for (int p = 0; p < parts; ++p) sum += rate_sums[at.index * 4 + p];
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
