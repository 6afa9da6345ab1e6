// The gated delta rule with a gate per key channel: prepare is here, gradients are in channel_gradients.h. The two scans
// are those of scan.h and reverse.h, which multiply with G K, G Q and E K in place of K and Q. The notation is that of
// chunk.h.
//   G_i, E_i and D_ij are vectors over channels c; P_ij = sum_c q_ic D_ij,c k_jc, and N_ij likewise with k_ic.
// A chunk has one or two tiles of 16 positions. Between the two tiles D is a product of two factors, each at most 1: of
// the gates from the later tile's start to i (prefix_i), and of those from j + 1 to the earlier tile's end (suffix_j).
// Within a tile, pairs are summed one by one. Nothing is divided by a gate, and the gradient of a gate is a sum of
// terms with a span that contains it.

template <typename In, int C, int DK, bool UNSTAGED, bool ERASES>
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
  // The pairs of q within tiles take the memory of the scratch matrix until it is written.
  static constexpr constant int tile_qk = scratch;
  static constexpr constant int tile_kk = n + C * (C + 8) * Wide<In>::bytes;
  static constexpr constant int rate = tile_kk + C * 17 * 4;
  static constexpr constant int arrivals = rate + C * 4;
  static constexpr constant int bytes = arrivals + 16;
};

// The product of a channel's gates at positions `from` to `to` - 1.
inline float product_of_gates(threadgroup const float* gate, int from, int to, int stride) {
  float product = 1.0f;
  for (int i = from; i < to; ++i) product *= gate[i * stride];
  return product;
}

// Returns, in lane l, the sum over all lanes of their element l. Each step halves the number of sums that a lane still
// forms.
inline float lane_sums(thread float (&x)[32], int lane) {
  DELTATUNE_UNROLL
  for (int width = 16; width > 0; width /= 2) {
    const bool upper = (lane & width) != 0;
    DELTATUNE_UNROLL
    for (int i = 0; i < 16; ++i) {
      if (i >= width) continue;
      const float kept = upper ? x[i + width] : x[i], given = upper ? x[i] : x[i + width];
      x[i] = kept + lane_exchange(given, width);
    }
  }
  return x[0];
}

// Writes columns j and j + 1 of the pairs of a tile that starts at position `first`: those of q and k to `of_q`, those
// of k and k, strictly below the diagonal, to `of_k`. A group calls it, and each lane adds up some channels.
template <int COLUMNS, int STRIDE, typename Queries, typename Keys>
inline void sum_pairs_of_columns(threadgroup float* of_q, threadgroup float* of_k, threadgroup const float* gate,
                                 Queries queries, Keys keys, int first, int j, int lane) {
  constexpr int each = (COLUMNS + 31) / 32;
  // Of each column: 16 rows of q, then 16 of k.
  float sums[2][32], decayed[2][each];
  DELTATUNE_UNROLL
  for (int column = 0; column < 2; ++column) {
    DELTATUNE_UNROLL
    for (int m = 0; m < each; ++m) {
      const int c = lane + 32 * m;
      decayed[column][m] = c < COLUMNS ? keys.get((first + j + column) * STRIDE + c) : 0.0f;
    }
  }
  DELTATUNE_UNROLL
  for (int i = 0; i < 16; ++i) {
    DELTATUNE_UNROLL
    for (int column = 0; column < 2; ++column) sums[column][i] = sums[column][16 + i] = 0.0f;
    if (i < j) continue;
    DELTATUNE_UNROLL
    for (int m = 0; m < each; ++m) {
      const int c = lane + 32 * m;
      if (c >= COLUMNS) continue;
      const float on = gate[(first + i) * COLUMNS + c];
      const float query = queries.get((first + i) * STRIDE + c), key = keys.get((first + i) * STRIDE + c);
      DELTATUNE_UNROLL
      for (int column = 0; column < 2; ++column) {
        if (i > j + column) decayed[column][m] *= on;
        if (i < j + column) continue;
        sums[column][i] += decayed[column][m] * query;
        sums[column][16 + i] += decayed[column][m] * key;
      }
    }
  }
  DELTATUNE_UNROLL
  for (int column = 0; column < 2; ++column) {
    const float sum = lane_sums(sums[column], lane);
    const int row = lane & 15;
    if (lane < 16) of_q[row * 17 + j + column] = sum;
    else of_k[row * 17 + j + column] = row > j + column ? sum : 0.0f;
  }
}

// Computes the scans' operands of each chunk, which do not depend on its state. Each block does one chunk; the grid is
// (chunks, HV, B).
// Inputs: q, k [B,T,HK,DK]; log_g [B,T,HV,DK]; beta [B,T,HV]; mask and segments [B,T], or Nothing.
// Outputs, for each of [B,HV,chunks]: solve, the packed Z; scores, the packed P; factors, which are beta [C] and then
// the product of the chunk's gates [DK]; and, [C,DK] with padded rows, queries G Q, keys G K and ends E K.
// One thread per tile and channel goes along the positions to scale Q and K. For pairs within a tile, each group takes
// some columns j, each lane some channels. The pairs between the two tiles are matrix products.
template <typename In, int C, int DK, int HK, int HV, int GROUPS, bool UNSTAGED, bool MASKED, bool SEGMENTED,
          bool ERASES, typename PQ, typename PK, typename PL, typename PB, typename PM, typename PZ, typename OP, typename OQ>
inline void gated_delta_channel_prepare(Place at, threadgroup char* memory, int length, PQ q, PK k, PL log_g, PB beta,
                                        PM mask, PZ segments, GLOBAL float* solve, OP scores,
                                        GLOBAL float* factors, OQ queries_out, OQ keys_out,
                                        GLOBAL float* ends_out) {
  using Memory = ChannelPrepareMemory<In, C, DK, UNSTAGED, ERASES>;
  constexpr int threads = GROUPS * 32, stride = stride_of(DK), square = C + 8, blocks = C / 16, columns = padded(DK);
  constexpr int triangle = packed_offset(blocks), numbers = C + columns, shares = GROUPS / blocks;
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
  const auto scores_out = stored_at<typename Choose<ERASES, Wide<In>, Saved<In>>::type>(scores, chunk, triangle);
  const auto scaled_q = stored_at<Saved<In>>(queries_out, chunk, C * stride);
  const auto scaled_k = stored_at<Saved<In>>(keys_out, chunk, C * stride);
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
    if (!ERASES) rate[at.index] = on ? 1.0f : 0.0f;
    else
      rate[at.index] =
          on ? static_cast<float>(beta[((long)at.z * length + t0 + (on ? at.index : 0)) * HV + at.y]) : 0.0f;
    factors[chunk * numbers + at.index] = rate[at.index];
  }
  const auto keys = Choice<UNSTAGED>::of(unstaged_rows<DK>(k, from, HK * DK, live), staged_k);
  const auto queries = Choice<UNSTAGED>::of(unstaged_rows<DK>(q, from, HK * DK, live), staged_q);
  copies_wait(arrival, 0);
  barrier();
  for (int item = at.index; item < blocks * columns; item += threads) {
    const int b = (unsigned)item / columns, c = (unsigned)item % columns;
    const float lead = product_of_gates(gate + c, 0, b * 16, columns);
    const float tail = product_of_gates(gate + c, b * 16 + 16, C, columns);
    float prefix = 1.0f, suffix = 1.0f;
    DELTATUNE_UNROLL
    for (int i = 0; i < 16; ++i) {
      const int of = (b * 16 + i) * stride + c;
      prefix *= gate[(b * 16 + i) * columns + c];
      const float query = queries.get(of), key = keys.get(of);
      scaled_q.put(of, lead * prefix * query);
      if (ERASES) scaled_k.put(of, lead * prefix * key);
      if (b == 1) {
        later_q.put(i * stride + c, prefix * query);
        if (ERASES) later_k.put(i * stride + c, prefix * key);
      }
    }
    DELTATUNE_UNROLL
    for (int i = 15; i >= 0; --i) {
      const int of = (b * 16 + i) * stride + c;
      const float key = keys.get(of);
      end_k.put(of, suffix * tail * key);
      if (blocks == 2 && b == 0) earlier_k.put(i * stride + c, suffix * key);
      suffix *= gate[(b * 16 + i) * columns + c];
    }
    if (b == blocks - 1) factors[chunk * numbers + C + c] = lead * prefix;
  }
  // Pairs within a tile: each group takes some pairs of columns, and each of its lanes some channels.
  const int tile = (unsigned)at.group % blocks;
  for (int j = (unsigned)at.group / blocks * 2; j < 16; j += shares * 2)
    sum_pairs_of_columns<columns, stride>(tile_qk + tile * 16 * 17, tile_kk + tile * 16 * 17, gate, queries, keys,
                                          tile * 16, j, lane);
  barrier();
  if (blocks == 2) {
    for (int side = at.group; side < (ERASES ? 2 : 1); side += GROUPS) {
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
  if (!ERASES) return;
  solve_triangle<C, GROUPS>(at, z, scratch, n, tile_kk, rate);
  write_block<triangle, threads>(stored_at<Wide<In>>(solve, chunk, triangle), z, at.index);
}
