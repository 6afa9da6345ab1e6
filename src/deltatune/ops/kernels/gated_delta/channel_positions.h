// How the gradients kernel for a gate per channel goes along positions: a lane has one channel of one tile, and adds to
// the gradients of q, k and log_g the terms from before the tile, those to after it, and the pairs within it. A gate
// receives the terms with a span that contains it, and only sums of them are formed.

// A channel's gates, queries and keys at the 16 positions of a tile: zeros and gates of 1 where a step is not live.
struct ChannelRows {
  float gate[16], query[16], key[16];
};
template <int DK, bool SEGMENTED, typename Live, typename PQ, typename PK, typename PL, typename PZ>
inline void load_channel(thread ChannelRows& rows, int c, int first, Live live, PQ q, PK k, PL log_g, PZ segments,
                         int row, int head, int heads, int key_stride, long key_offset, int t0, int length) {
  DELTATUNE_UNROLL
  for (int i = 0; i < 16; ++i) {
    const bool on = c < DK && live(first + i);
    const long of = on ? key_offset + (long)(first + i) * key_stride + c : key_offset;
    const float x = static_cast<float>(q[of]), y = static_cast<float>(k[of]);
    rows.query[i] = on ? x : 0.0f;
    rows.key[i] = on ? y : 0.0f;
  }
  DELTATUNE_UNROLL
  for (int i = 0; i < 16; ++i)
    rows.gate[i] = c < DK ? gate_of<SEGMENTED>(first + i, live, log_g, segments, row, head * DK + c, heads * DK, t0,
                                               length)
                          : 1.0f;
}

// A lane's sums at the positions of its tile. They refer to a kernel's own arrays, which stay in registers.
struct ChannelSums {
  thread float (&dq)[16];
  thread float (&dk)[16];
  thread float (&on_gate)[16];
};

// Adds the terms that reach a position from before its tile, at which `lead` has decayed the state: from_y and
// from_right are the products with the state and, in the later tile, over_y and over_right those with the earlier one.
// Returns the sum of the state's terms, which the gates of the earlier tile receive. Sets on_gate.
inline float add_from_before(ChannelSums sums, thread const ChannelRows& rows, float lead, bool later,
                             threadgroup const float* from_y, threadgroup const float* from_right,
                             threadgroup const float* over_y, threadgroup const float* over_right, int stride) {
  float prefix = 1.0f, of_state = 0.0f;
  DELTATUNE_UNROLL
  for (int i = 0; i < 16; ++i) {
    prefix *= rows.gate[i];
    float y = lead * prefix * from_y[i * stride], k = lead * prefix * from_right[i * stride];
    of_state += rows.query[i] * y + rows.key[i] * k;
    if (later) {
      y += prefix * over_y[i * stride];
      k += prefix * over_right[i * stride];
    }
    sums.on_gate[i] = rows.query[i] * y + rows.key[i] * k;
    sums.dq[i] += y;
    sums.dk[i] += k;
  }
  DELTATUNE_UNROLL
  for (int i = 14; i >= 0; --i) sums.on_gate[i] += sums.on_gate[i + 1];
  return of_state;
}

// Adds the terms that a position gives beyond its tile, after which `tail` decays them to the chunk's end: from_end is
// the product with the state's gradient and, in the earlier tile, over_end that with the later one. Returns the sum of
// the terms at the chunk's end, which the gates of the later tile receive. Overwrites the lane's elements of from_end.
inline float add_to_after(ChannelSums sums, thread const ChannelRows& rows, float tail, bool earlier,
                          threadgroup float* from_end, threadgroup const float* over_end, int stride) {
  float suffix = 1.0f, of_end = 0.0f, sum = 0.0f;
  DELTATUNE_UNROLL
  for (int j = 15; j >= 0; --j) {
    float end = suffix * tail * from_end[j * stride];
    of_end += rows.key[j] * end;
    if (earlier) end += suffix * over_end[j * stride];
    from_end[j * stride] = rows.key[j] * end;
    sums.dk[j] += end;
    suffix *= rows.gate[j];
  }
  DELTATUNE_UNROLL
  for (int j = 0; j < 16; ++j) {
    sums.on_gate[j] += sum;
    sum += from_end[j * stride];
  }
  return of_end;
}

// Adds the pairs i >= j of eight positions from FROM on, one by one. `weights` has for each pair of the tile its weight
// of y and then that of R. Leaves in `decay` the product of the gates after each position, to the last of the eight.
template <int FROM, int STRIDE>
inline void add_pairs_of_half(ChannelSums sums, thread const ChannelRows& rows, thread float (&decay)[8],
                              threadgroup const float* weights) {
  DELTATUNE_UNROLL
  for (int i = 0; i < 8; ++i) {
    const int row = FROM + i;
    float sum = 0.0f;
    DELTATUNE_UNROLL
    for (int j = 0; j < 8; ++j) {
      if (j > i) continue;
      const int column = FROM + j;
      decay[j] = i > j ? decay[j] * rows.gate[row] : 1.0f;
      const float of_y = weights[row * STRIDE + 2 * column], of_right = weights[row * STRIDE + 2 * column + 1];
      const float decayed = decay[j] * rows.key[column];
      const float both = of_y * rows.query[row] + of_right * rows.key[row];
      sums.dq[row] += of_y * decayed;
      sums.dk[row] += of_right * decayed;
      sums.dk[column] += decay[j] * both;
      if (i == j) continue;
      sum += decayed * both;
      sums.on_gate[column + 1] += sum;
    }
  }
}

// Adds the pairs between the two halves of a tile. Their decay is a product of two factors: of the gates of the later
// half up to i, and `decay`, of those of the earlier half after j.
template <int STRIDE>
inline void add_pairs_between_halves(ChannelSums sums, thread const ChannelRows& rows, thread const float (&decay)[8],
                                     threadgroup const float* weights) {
  float prefix = 1.0f, given[8];
  DELTATUNE_UNROLL
  for (int j = 0; j < 8; ++j) given[j] = 0.0f;
  DELTATUNE_UNROLL
  for (int i = 8; i < 16; ++i) {
    prefix *= rows.gate[i];
    const float query = prefix * rows.query[i], key = prefix * rows.key[i];
    float y = 0.0f, k = 0.0f;
    DELTATUNE_UNROLL
    for (int j = 0; j < 8; ++j) {
      const float of_y = weights[i * STRIDE + 2 * j], of_right = weights[i * STRIDE + 2 * j + 1];
      const float decayed = decay[j] * rows.key[j];
      y += of_y * decayed;
      k += of_right * decayed;
      given[j] += of_y * query + of_right * key;
    }
    sums.dq[i] += prefix * y;
    sums.dk[i] += prefix * k;
    const float term = query * y + key * k;
    DELTATUNE_UNROLL
    for (int t = 8; t < 16; ++t)
      if (t <= i) sums.on_gate[t] += term;
    // Within the loop, since compilers put off the sums of `given` to where they are used, and keep all weights for it.
    float sum = 0.0f;
    DELTATUNE_UNROLL
    for (int j = 0; j < 8; ++j) {
      if (i < 15) continue;
      sums.on_gate[j] += sum;
      sums.dk[j] += decay[j] * given[j];
      sum += decay[j] * rows.key[j] * given[j];
    }
  }
}

// Adds the pairs within a tile.
template <int STRIDE>
inline void add_pairs_within(ChannelSums sums, thread const ChannelRows& rows, threadgroup const float* weights) {
  float decay[8];
  add_pairs_of_half<0, STRIDE>(sums, rows, decay, weights);
  add_pairs_between_halves<STRIDE>(sums, rows, decay, weights);
  add_pairs_of_half<8, STRIDE>(sums, rows, decay, weights);
}
