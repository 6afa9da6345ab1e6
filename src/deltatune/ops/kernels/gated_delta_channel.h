// gated_delta with a gate for every key channel; the scans are those of gated_delta.h, over G K, G Q and E K.
//   G_i, E_i, D_ij are vectors over channels c; P_ij = sum_c q_ic D_ij,c k_jc, and N_ij likewise from k_i.
// Chunks have one or two tiles of 16 positions. Between the tiles D is a product of two factors, each <= 1: of the gates
// from the later tile's start to i (prefix_i), and of those from j + 1 to the earlier tile's end (suffix_j). Within a tile
// pairs are summed directly. Nothing is divided by a gate, and sums are of terms that span their gate alone.

template <typename In, int C, int DK, bool FAR>
struct ChannelPrepareMemory {
  static constexpr constant int across = C / 16 - 1;
  static constexpr constant int k = 0;
  static constexpr constant int q = k + room_of<FAR, Exact<In>, C, DK>();
  static constexpr constant int gate = q + room_of<FAR, Exact<In>, C, DK>();
  // Where there are two tiles: prefix q and prefix k of the later, suffix k of the earlier.
  static constexpr constant int later_q = gate + C * padded(DK) * 4;
  static constexpr constant int later_k = later_q + across * 16 * stride_of(DK) * Wide<In>::bytes;
  static constexpr constant int earlier_k = later_k + across * 16 * stride_of(DK) * Wide<In>::bytes;
  static constexpr constant int z = earlier_k + across * 16 * stride_of(DK) * Wide<In>::bytes;
  static constexpr constant int waiting = z + packed_offset(C / 16) * Wide<In>::bytes;
  static constexpr constant int n = waiting + C * (C + 8) * Wide<In>::bytes;
  static constexpr constant int on_q = n + C * (C + 8) * Wide<In>::bytes;
  static constexpr constant int on_k = on_q + C * 17 * 4;
  static constexpr constant int rate = on_k + C * 17 * 4;
  static constexpr constant int arrivals = rate + C * 4;
  static constexpr constant int bytes = arrivals + 16;
};

// solve and scores as for one gate a head; factors [B,Hv,chunks] blocks of beta [C], then the chunk's gates' product [Dk];
// blocks [C,Dk], rows padded: queries G Q, keys G K, ends E K. Grid: chunks, Hv, B.
template <typename In, int C, int DK, int HK, int HV, int GROUPS, bool FAR, bool MASKED, bool SEGMENTED, typename PQ,
          typename PK, typename PL, typename PB, typename PM, typename PZ, typename OQ>
inline void gated_delta_channel_prepare(Place at, threadgroup char* memory, int length, PQ q, PK k, PL log_g, PB beta,
                                        PM mask, PZ segments, GLOBAL float* solve, GLOBAL float* scores,
                                        GLOBAL float* factors, OQ queries_out, GLOBAL float* keys_out,
                                        GLOBAL float* ends_out) {
  using Memory = ChannelPrepareMemory<In, C, DK, FAR>;
  constexpr int threads = GROUPS * 32, stride = stride_of(DK), square = C + 8, blocks = C / 16, columns = padded(DK);
  constexpr int triangle = packed_offset(blocks), numbers = C + columns, shares = GROUPS / blocks;
  constexpr int each = (columns + 31) / 32;
  static_assert(blocks <= 2 && GROUPS % blocks == 0, "one or two tiles a chunk");
  const int chunks = (length + C - 1) / C, t0 = at.x * C, lane = at.lane;
  const long chunk = ((long)at.z * HV + at.y) * chunks + at.x;
  const Exact<In> near_k = shared_at<Exact<In>>(memory, Memory::k, C * stride);
  const Exact<In> near_q = shared_at<Exact<In>>(memory, Memory::q, C * stride);
  const Wide<In> later_q = shared_at<Wide<In>>(memory, Memory::later_q, 16 * stride);
  const Wide<In> later_k = shared_at<Wide<In>>(memory, Memory::later_k, 16 * stride);
  const Wide<In> earlier_k = shared_at<Wide<In>>(memory, Memory::earlier_k, 16 * stride);
  const Wide<In> z = shared_at<Wide<In>>(memory, Memory::z, triangle);
  const Wide<In> waiting = shared_at<Wide<In>>(memory, Memory::waiting, C * square);
  const Wide<In> n = shared_at<Wide<In>>(memory, Memory::n, C * square);
  const auto scores_out = stored_at<Wide<In>>(scores, chunk, triangle);
  const auto scaled_q = stored_at<Saved<In>>(queries_out, chunk, C * stride);
  const auto scaled_k = stored_at<Wide<In>>(keys_out, chunk, C * stride);
  const auto end_k = stored_at<Wide<In>>(ends_out, chunk, C * stride);
  threadgroup float* gate = reinterpret_cast<threadgroup float*>(memory + Memory::gate);
  threadgroup float* on_q = reinterpret_cast<threadgroup float*>(memory + Memory::on_q);
  threadgroup float* on_k = reinterpret_cast<threadgroup float*>(memory + Memory::on_k);
  threadgroup float* rate = reinterpret_cast<threadgroup float*>(memory + Memory::rate);
  const auto live = alive<MASKED>(mask, at.z, t0, length);

  const long from = (((long)at.z * length + t0) * HK + at.y / (HV / HK)) * DK;
  arrivals_start(memory + Memory::arrivals, at.index);
  Arrival arrival = arrival_at(memory + Memory::arrivals, 0);
  if (!FAR) {
    copy_rows<C, columns, threads>(near_k, stride, k + from, HK * DK, DK, live, arrival, at.index);
    copy_rows<C, columns, threads>(near_q, stride, q + from, HK * DK, DK, live, arrival, at.index);
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
  const auto keys = Choice<FAR>::of(far_rows<DK>(k, from, HK * DK, live), near_k);
  const auto queries = Choice<FAR>::of(far_rows<DK>(q, from, HK * DK, live), near_q);
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
  // Pairs within a tile: a lane some channels, a group every so many columns.
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
        on_q[r * 17 + j] = of_q;
        on_k[r * 17 + j] = i > j ? of_k : 0.0f;
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
    scores_out.put(packed_offset(b) + (row & 15) * packed_stride(b) + b * 16 + (i & 15), on_q[row * 17 + (i & 15)]);
  }
  solve_triangle<C, GROUPS>(at, z, waiting, n, on_k, rate);
  write_block<triangle, threads>(stored_at<Wide<In>>(solve, chunk, triangle), z, at.index);
}

template <typename In, int C, int DK, int DV, int SLICE, int HK, int HV, int GROUPS, int STAGES, int SPLIT, bool FAR,
          bool MASKED, typename PV, typename PM, typename PQ, typename PK, typename PI, typename OY, typename OS>
inline void gated_delta_channel_scan(Place at, threadgroup char* memory, int length, PV v, PM mask, PQ queries, PK keys,
                                     PK ends, PI initial, bool started, PK solve, PK scores, PK factors, OY y, OS states,
                                     GLOBAL float* u, GLOBAL float* last) {
  scan_chunks<In, C, DK, DV, SLICE, HK, HV, GROUPS, STAGES, SPLIT, FAR, MASKED, true>(
      at, memory, length, queries, keys, ends, v, mask, initial, started, solve, scores, factors, y, states, u, last);
}
template <typename In, int C, int DK, int DV, int SLICE, int HK, int HV, int GROUPS, int STAGES, int SPLIT, bool FAR,
          bool MASKED, typename PY, typename PM, typename PQ, typename PK, typename PE, typename OS, typename OR, typename OV>
inline void gated_delta_channel_reverse(Place at, threadgroup char* memory, int length, PY dy, PM mask, PQ queries,
                                        PK keys, PK ends, PE d_last, PK solve, PK scores, PK factors, OS d_states,
                                        OR d_right, OV dv, GLOBAL float* d_initial) {
  reverse_chunks<In, C, DK, DV, SLICE, HK, HV, GROUPS, STAGES, SPLIT, FAR, MASKED, true>(
      at, memory, length, queries, keys, ends, dy, mask, d_last, solve, scores, factors, d_states, d_right, dv,
      d_initial);
}

template <typename In, int C, int DK, int SLICE, int STAGES, bool FAR>
struct ChannelGradientMemory {
  // Far: one tile a chunk, and the products come so many channels at a time, four groups of 32 lanes.
  static constexpr constant int span = FAR ? 128 : padded(DK);
  static constexpr constant int across = C / 16 - 1, wide = span + 4;
  static constexpr constant int state = 0;
  static constexpr constant int d_state = state + room_of<FAR, Saved<In>, SLICE, DK>();
  static constexpr constant int u = d_state + room_of<FAR, Saved<In>, SLICE, DK>();
  static constexpr constant int right = u + SLICE * (C + 8) * Wide<In>::bytes;
  static constexpr constant int dy = right + SLICE * (C + 8) * Wide<In>::bytes;
  static constexpr constant int stage = dy + C * (SLICE + 8) * Exact<In>::bytes;
  // Once the slices are done with: products with the states, and between the tiles; [position, channel] in fp32.
  static constexpr constant int from_y = 0;
  static constexpr constant int from_right = from_y + C * wide * 4;
  static constexpr constant int from_end = from_right + C * wide * 4;
  static constexpr constant int over_y = from_end + C * wide * 4;
  static constexpr constant int over_right = over_y + across * 16 * wide * 4;
  static constexpr constant int over_end = over_right + across * 16 * wide * 4;
  static constexpr constant int products_end = over_end + across * 16 * wide * 4;
  static constexpr constant int later_q = STAGES * stage > products_end ? STAGES * stage : products_end;
  static constexpr constant int later_k = later_q + across * 16 * stride_of(DK) * Wide<In>::bytes;
  static constexpr constant int earlier_k = later_k + across * 16 * stride_of(DK) * Wide<In>::bytes;
  static constexpr constant int pair_y = earlier_k + across * 16 * stride_of(DK) * Wide<In>::bytes;
  static constexpr constant int pair_right = pair_y + across * 16 * 24 * Wide<In>::bytes;
  static constexpr constant int tiles_y = pair_right + across * 16 * 24 * Wide<In>::bytes;
  static constexpr constant int tiles_right = tiles_y + C * 17 * 4;
  static constexpr constant int rate = tiles_right + C * 17 * 4;
  static constexpr constant int on_rate = rate + C * 4;
  // The tiles' whole products, what each tile gives the other's gates, and the states' product, by channel.
  static constexpr constant int whole = on_rate + C * 4 * 4;
  static constexpr constant int cross = whole + (FAR ? 1 : 2) * padded(DK) * 4;
  static constexpr constant int on_all = cross + (FAR ? 0 : 2) * padded(DK) * 4;
  static constexpr constant int arrivals = on_all + padded(DK) * 4;
  static constexpr constant int bytes = arrivals + 16;
};

// A channel's gates, queries and keys at `Count` positions from `first` on; zeros where a step is not live.
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

// A tile of the products with the states, at its row and column, into shared memory.
inline void put_products(threadgroup float* from_y, threadgroup float* from_right, threadgroup float* from_end,
                         thread const Tile& y, thread const Tile& rest, thread const Tile& end,
                         threadgroup const float* rate, int row, int column, int wide, int lane) {
  DELTATUNE_UNROLL
  for (int e = 0; e < 8; ++e) {
    const int i = row * 16 + tile_row(e, lane), to = i * wide + column + tile_column(e, lane);
    from_y[to] = y.get(e);
    from_right[to] = -rate[i] * rest.get(e);
    from_end[to] = rate[i] * end.get(e);
  }
}

// Gradients of q, k, log_g and beta. First as for one gate a head: a group owns 16 positions and a part of Dk. Then a lane
// owns a channel of a tile, and goes along its positions. Grid: chunks, Hk, B.
template <typename In, int C, int DK, int DV, int SLICE, int HK, int HV, int GROUPS, int STAGES, bool FAR,
          bool MASKED, bool SEGMENTED, typename PQ, typename PK, typename PL, typename PM, typename PZ, typename PF,
          typename PT, typename PR, typename PY, typename OQ, typename OK>
inline void gated_delta_channel_gradients(Place at, threadgroup char* memory, int length, PQ q, PK k, PL log_g, PM mask,
                                          PZ segments, PF factors, PT states, PT d_states, PF u_in, PR d_right,
                                          PY dy_in, OQ dq, OK dk, GLOBAL float* d_log_g, GLOBAL float* d_beta) {
  using Memory = ChannelGradientMemory<In, C, DK, SLICE, STAGES, FAR>;
  constexpr int threads = GROUPS * 32, stride = stride_of(DK), square = C + 8, thin = SLICE + 8, blocks = C / 16;
  constexpr int columns = padded(DK), across = columns / 16, parts = GROUPS / blocks, wide = Memory::wide;
  constexpr int mine = (across + parts - 1) / parts, own_pairs = (blocks + parts - 1) / parts, members = HV / HK;
  constexpr int tasks = ((columns + 31) / 32 + parts - 1) / parts, numbers = C + columns;
  constexpr int each = (columns + threads - 1) / threads;
  static_assert(GROUPS % blocks == 0 && parts <= 4 && blocks <= 2, "groups share the columns of a row of tiles");
  static_assert(padded(DV) % SLICE == 0, "whole slices");
  static_assert(!FAR || (blocks == 1 && parts * 32 == Memory::span), "a span of channels at a time");
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
  threadgroup float* on_rate = reinterpret_cast<threadgroup float*>(memory + Memory::on_rate);
  threadgroup float* whole = reinterpret_cast<threadgroup float*>(memory + Memory::whole);
  threadgroup float* cross = reinterpret_cast<threadgroup float*>(memory + Memory::cross);
  threadgroup float* on_all = reinterpret_cast<threadgroup float*>(memory + Memory::on_all);
  const auto live = alive<MASKED>(mask, at.z, t0, length);

  float dq_sums[tasks][16], dk_sums[tasks][16];
  DELTATUNE_UNROLL
  for (int m = 0; m < tasks; ++m) {
    DELTATUNE_UNROLL
    for (int i = 0; i < 16; ++i) dq_sums[m][i] = dk_sums[m][i] = 0.0f;
  }
  arrivals_start(memory + Memory::arrivals, at.index);
  int loads = 0;
  for (int member = 0; member < members; ++member) {
    const int hv = at.y * members + member;
    const long chunk = ((long)at.z * HV + hv) * chunks + at.x;
    barrier();
    if (STAGES > 1) {
      Arrival arrival = arrival_at(memory + Memory::arrivals, loads & 1);
      load_slice<In, C, DK, DV, SLICE, HV, GROUPS, Memory, FAR, MASKED>(at, memory + (loads & 1) * Memory::stage, arrival,
                                                                   states, d_states, u_in, d_right, dy_in, mask, length,
                                                                   hv, chunk, 0);
      copies_sent(arrival, at.index);
    }
    if (at.index < C) rate[at.index] = factors[chunk * numbers + at.index];
    // A thread a channel of a tile; what it reads comes together, then it goes along the positions.
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
      whole[b * columns + c] = product;
    }

    Tile y_sums[mine], right_sums[mine], end_sums[mine], dp[own_pairs], da[own_pairs];
    DELTATUNE_UNROLL
    for (int m = 0; m < mine; ++m) {
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
        load_slice<In, C, DK, DV, SLICE, HV, GROUPS, Memory, FAR, MASKED>(at, memory + turn * Memory::stage, arrival, states,
                                                                     d_states, u_in, d_right, dy_in, mask, length, hv,
                                                                     chunk, coming * SLICE);
        copies_sent(arrival, at.index);
      }
      if (STAGES == 1) {
        copies_wait(here, loads);
        barrier();
      }
      ++loads;
      const auto state = Choice<FAR>::of(stored_at<Saved<In>>(states + n * SLICE * stride, chunk, padded(DV) * stride),
                                         shared_at<Saved<In>>(slice, Memory::state, SLICE * stride));
      const auto d_state = Choice<FAR>::of(
          stored_at<Saved<In>>(d_states + n * SLICE * stride, chunk, padded(DV) * stride),
          shared_at<Saved<In>>(slice, Memory::d_state, SLICE * stride));
      const Wide<In> u = shared_at<Wide<In>>(slice, Memory::u, SLICE * square);
      const Wide<In> rest = shared_at<Wide<In>>(slice, Memory::right, SLICE * square);
      const Exact<In> dy = shared_at<Exact<In>>(slice, Memory::dy, C * thin);
      DELTATUNE_UNROLL
      for (int m = 0; m < each; ++m) {
        const int c = at.index + m * threads;
        if (c >= columns) continue;
        for (int s = 0; s < SLICE; ++s) all[m] += state.get(s * stride + c) * d_state.get(s * stride + c);
      }
      DELTATUNE_UNROLL
      for (int s = 0; s < SLICE; s += 16) {
        const auto left_y = left(straight(dy, thin, row * 16, s), lane);
        const auto left_right = left(turned(rest, square, row * 16, s), lane);
        const auto left_u = left(turned(u, square, row * 16, s), lane);
        if (s / 16 % parts == part) add_row_dots(rates, left_right, left_u, lane);
        DELTATUNE_UNROLL
        for (int m = 0; m < mine; ++m) {
          const int column = (part * mine + m) * 16;
          if (across % parts != 0 && column >= columns) continue;
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
      if (at.index + m * threads < columns) on_all[at.index + m * threads] = all[m];
    DELTATUNE_UNROLL
    for (int m = 0; m < mine; ++m) {
      const int column = (part * mine + m) * 16;
      if (across % parts != 0 && column >= columns) continue;
      if (FAR && column >= Memory::span) continue;
      put_products(from_y, from_right, from_end, y_sums[m], right_sums[m], end_sums[m], rate, row, column, wide, lane);
    }
    DELTATUNE_UNROLL
    for (int side = 0; side < 2; ++side) {
      const int e = side * tile_second;
      const float sum = row_sum(rates[side]);
      if (tile_column(e, lane) == 0) on_rate[(row * 16 + tile_row(e, lane)) * 4 + part] = sum;
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
      for (int t = at.group; t < across; t += GROUPS) {
        Tile y, r, end;
        tile_clear(y);
        tile_clear(r);
        tile_clear(end);
        const auto b = right(straight(earlier_k, stride, 0, t * 16), lane);
        multiply(y, left(straight(pair_y, 24, 0, 0), lane), b, lane);
        multiply(r, left(straight(pair_right, 24, 0, 0), lane), b, lane);
        multiply(end, left(turned(pair_y, 24, 0, 0), lane), right(straight(later_q, stride, 0, t * 16), lane), lane);
        multiply(end, left(turned(pair_right, 24, 0, 0), lane), right(straight(later_k, stride, 0, t * 16), lane), lane);
        DELTATUNE_UNROLL
        for (int e = 0; e < 8; ++e) {
          const int to = tile_row(e, lane) * wide + t * 16 + tile_column(e, lane);
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
      if (FAR && m > 0) {
        barrier();
        DELTATUNE_UNROLL
        for (int n = 0; n < mine; ++n) {
          const int column = (part * mine + n) * 16 - m * Memory::span;
          if (column < 0 || column >= Memory::span || column + m * Memory::span >= columns) continue;
          put_products(from_y, from_right, from_end, y_sums[n], right_sums[n], end_sums[n], rate, row, column, wide,
                       lane);
        }
        barrier();
      }
      DELTATUNE_UNROLL
      for (int i = 0; i < 16; ++i) on_gate[m][i] = 0.0f;
      if (c >= DK) continue;
      const int cell = c - (FAR ? m * Memory::span : 0);
      float gate[16], query[16], key[16];
      load_channel<DK, SEGMENTED, 16>(gate, query, key, c, first, live, q, k, log_g, segments, at.z, hv, HV, HK * DK,
                                      key_offset, t0, length);
      const float lead = row == 1 ? whole[c] : 1.0f, tail = blocks == 2 && row == 0 ? whole[columns + c] : 1.0f;
      // Rows: what reaches position i from before its tile; a gate gets the rows from it on.
      float prefix = 1.0f, given = 0.0f, sum = 0.0f, before[16];
      DELTATUNE_UNROLL
      for (int i = 0; i < 16; ++i) {
        prefix *= gate[i];
        const int of = (first + i) * wide + cell;
        float y_part = lead * prefix * from_y[of], k_part = lead * prefix * from_right[of];
        given += query[i] * y_part + key[i] * k_part;
        if (row == 1) {
          y_part += prefix * over_y[i * wide + c];
          k_part += prefix * over_right[i * wide + c];
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
      // Columns: what position j gives past its tile; a gate gets the columns before it.
      float suffix = 1.0f;
      given = 0.0f;
      DELTATUNE_UNROLL
      for (int j = 15; j >= 0; --j) {
        float end_part = suffix * tail * from_end[(first + j) * wide + cell];
        given += key[j] * end_part;
        if (blocks == 2 && row == 0) end_part += suffix * over_end[j * wide + c];
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
      float common = on_all[c] * whole[c] * (blocks == 2 ? whole[columns + c] : 1.0f);
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
      for (int p = 0; p < parts; ++p) sum += on_rate[at.index * 4 + p];
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
