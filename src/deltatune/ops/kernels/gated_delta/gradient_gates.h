// How the gradients kernel for one gate per head computes the gradients of log_g and beta.

// Part `share` of `Shares` of the gradient of log_g at position t: the terms of rows at or after t (before_sums), of
// rows before t (after_sums), and of pairs i >= t > j with a span that contains t. Only such terms are added. A
// difference of running sums would lose the gradient of a small gate.
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
      for (int i = 0; i < 16; ++i) {
        const int of = (b * 16 + i) * Room + p;
        part += b * 16 + i >= t ? before_sums[of] : after_sums[of];
      }
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
// saved in bf16, and that sum would show the rounding. Since R + N^T beta R = w = P^T dY + E K dS^T, the sum also
// equals beta_i <R_i, u_i> less the terms of the pairs with the second position i, (i, i) among them, all of them in
// fp32. It is a difference, so it is not used where E_i is small.
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

// The tables in shared memory that the phases of a value head leave one another.
//   gate, before, after and rate are the gate, G, E and beta of each position. Without an erase there is no beta.
//   before_sums, after_sums and rate_sums have, for each position, a part of each group of its row of tiles: the terms
//   that the gates up to it receive from S, those that the gates after it receive from dS, and <R_i, u_i>.
//   diagonal has the terms of the pairs within a tile. Of those between two tiles, row_sums has the sums of rows by the
//   tile of the column, and column_sums those of columns by the tile of the row.
//   state_dots are the groups' shares of <S, dS>.
template <int C, int ROOM, bool ERASES>
struct GateTables {
  static constexpr constant int room = ROOM;
  Decay<C> decay;
  threadgroup float* gate;
  threadgroup float* before;
  threadgroup float* after;
  threadgroup float* rate;
  threadgroup float* diagonal;
  threadgroup float* row_sums;
  threadgroup float* column_sums;
  threadgroup float* before_sums;
  threadgroup float* after_sums;
  threadgroup float* rate_sums;
  threadgroup float* state_dots;
  inline float rate_of(int i) const { return ERASES ? rate[i] : 1.0f; }
};

// Sums the rows and the columns of a tile of terms of pairs between tiles `row` and `column`, for the gates in the two.
template <int BLOCKS, typename Tables>
inline void sum_rows_and_columns(Tables tables, const thread Tile& terms, int row, int column, int lane) {
  DELTATUNE_UNROLL
  for (int side = 0; side < 2; ++side) {
    float sum = 0.0f;
    DELTATUNE_UNROLL
    for (int e = 0; e < 8; ++e)
      if (tile_side(e) == side) sum += terms.get(e);
    sum = row_sum(sum);
    const int e = side * tile_second;
    if (tile_column(e, lane) == 0) tables.row_sums[(row * 16 + tile_row(e, lane)) * BLOCKS + column] = sum;
  }
  DELTATUNE_UNROLL
  for (int e = 0; e < 8; ++e) {
    if (tile_side(e) != 0) continue;
    const float sum = column_sum(terms.get(e) + terms.get(e + tile_second));
    if (tile_row(e, lane) == 0) tables.column_sums[(column * 16 + tile_column(e, lane)) * BLOCKS + row] = sum;
  }
}

// Writes the gradients of log_g and beta of one value head: a thread for each position and share of its terms.
template <typename Shape, typename Tables, typename Live>
inline void write_gate_gradients(Place at, Tables tables, Live live, int length, int hv, GLOBAL float* d_log_g,
                                 GLOBAL float* d_beta) {
  constexpr int C = Shape::C, room = Tables::room, sharers = Shape::threads / C;
  if (Shape::ERASES && Shape::tails > 0) {
    if (at.index < C)
      ends_by_pairs<C, room>(tables.diagonal, tables.column_sums, tables.rate_sums, tables.rate, tables.after,
                             tables.after_sums, Shape::parts, at.index);
    barrier();
  }
  // The shares of each position take the memory of the decay's tables, which are no longer read.
  threadgroup float* shares = tables.decay.diagonal;
  static_assert(sharers <= 17, "a position's shares fit in a row");
  const int t0 = at.x * C, t = (unsigned)at.index % C, share = (unsigned)at.index / C;
  shares[t * 17 + share] = spanning<C, sharers, room>(tables.diagonal, tables.row_sums, tables.column_sums,
                                                      tables.before_sums, tables.after_sums, Shape::parts, t, share);
  barrier();
  if (at.index < C && t0 + t < length) {
    const long to = ((long)at.z * length + t0 + t) * Shape::HV + hv;
    float on_gate = 0.0f, on_beta = 0.0f;
    DELTATUNE_UNROLL
    for (int g = 0; g < Shape::GROUPS; ++g) on_gate += tables.state_dots[g];
    on_gate *= tables.before[C - 1];
    DELTATUNE_UNROLL
    for (int p = 0; p < Shape::parts; ++p) on_beta += tables.rate_sums[t * room + p];
    DELTATUNE_UNROLL
    for (int p = 0; p < sharers; ++p) on_gate += shares[t * 17 + p];
    d_log_g[to] = live(t) ? on_gate : 0.0f;
    if (Shape::ERASES) d_beta[to] = live(t) ? on_beta : 0.0f;
  }
}
