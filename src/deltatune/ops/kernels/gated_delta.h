// gated_delta with one gate a head: forward and backward, one body for every machine.
// Symbols are those of ops/gated_delta/README.md. A chunk is C positions of one (batch, value head).
//   G_i  product of the gates of 0..i        E_i  product of the gates of i+1..C-1
//   D_ij product of the gates of j+1..i      A_ij = beta_i D_ij <k_i, k_j>, i > j;   T = (I + A)^-1
//   X = K S^T,  d = T (beta (V - G X)),  Y = G (Q S^T) + P d with P_ij = D_ij <q_i, k_j>, i >= j
//   S' = G_last S + d^T (E K)
// Products of gates run over their own segment only: a gate of 0 (a document's start, log_g = -inf) stays exact.

struct Place {
  int x, y, z, index, group, lane;
};
template <typename Store, bool Transposed>
struct View {
  using store_type = Store;
  static constexpr constant bool is_transposed = Transposed;
  Store store;
  int offset, stride;
  inline float get(int row, int column) const {
    return store.get(offset + (Transposed ? column * stride + row : row * stride + column));
  }
};
// The matrix as stored, from (row, column) on; and its transpose, from (row, column) of the transpose on.
template <typename Store>
inline View<Store, false> straight(Store store, int stride, int row, int column) {
  return View<Store, false>{store, row * stride + column, stride};
}
template <typename Store>
inline View<Store, true> turned(Store store, int stride, int row, int column) {
  return View<Store, true>{store, column * stride + row, stride};
}

inline void tile_clear(thread Tile& tile) {
  DELTATUNE_UNROLL
  for (int e = 0; e < 8; ++e) tile.set(e, 0.0f);
}

inline constexpr int padded(int n) {
  return (n + 15) / 16 * 16;
}
// Eight elements more a row: 16-byte rows that start in different banks.
inline constexpr int stride_of(int n) {
  return padded(n) + 8;
}

// Rows of a global matrix into shared memory, zeros where a row is not live or a column lies past `width`.
template <int Rows, int Width, int Threads, typename Store, typename Source>
inline void load_rows(Store store, int stride, Source source, int row_stride, threadgroup const float* live,
                      int index) {
  constexpr int columns = padded(Width);
  for (int i = index; i < Rows * columns; i += Threads) {
    const int row = i / columns, column = i % columns;
    const bool inside = live[row] != 0.0f && column < Width;
    store.put(row * stride + column, inside ? static_cast<float>(source[row * row_stride + column]) : 0.0f);
  }
}

// live is 1 inside the sequence and the mask, 0 elsewhere; every thread calls, a barrier must follow.
template <int C, bool Masked, typename M>
inline void load_live(threadgroup float* live, M mask, int row, int t0, int length, int index) {
  if (index < C) {
    const int t = t0 + index;
    bool on = t < length;
    if (Masked) on = on && mask[row * length + (on ? t : 0)];
    live[index] = on ? 1.0f : 0.0f;
  }
}

// The gate of each position: exp(log_g), 1 where the step is not live, 0 where a document starts.
template <int C, bool Segmented, typename L, typename Z>
inline void load_gates(threadgroup float* gate, threadgroup const float* live, L log_g, Z segments, int row, int head,
                       int heads, int t0, int length, int index) {
  if (index < C) {
    const int t = t0 + index;
    float g = 1.0f;
    if (t < length) {
      if (live[index] != 0.0f) g = DELTATUNE_EXP(static_cast<float>(log_g[(row * length + t) * heads + head]));
      if (Segmented && t > 0 && segments[row * length + t] != segments[row * length + t - 1]) g = 0.0f;
    }
    gate[index] = g;
  }
}

// D, zero above the diagonal; a thread a column, products only.
template <int C>
inline void fill_decay(threadgroup float* decay, threadgroup const float* gate, int index) {
  if (index < C) {
    for (int i = 0; i < index; ++i) decay[i * (C + 1) + index] = 0.0f;
    float product = 1.0f;
    decay[index * (C + 1) + index] = product;
    for (int i = index + 1; i < C; ++i) {
      product *= gate[i];
      decay[i * (C + 1) + index] = product;
    }
  }
}

// One 16x16 diagonal block of the inverse, by forward substitution: a lane a column.
template <typename Store>
inline void invert_diagonal(Store a, Store inverse, int stride, int origin, int lane) {
  if (lane < 16) {
    float x[16];
    DELTATUNE_UNROLL
    for (int i = 0; i < 16; ++i) {
      float sum = i == lane ? 1.0f : 0.0f;
      DELTATUNE_UNROLL
      for (int j = 0; j < i; ++j) sum -= a.get((origin + i) * stride + origin + j) * x[j];
      x[i] = sum;
    }
    DELTATUNE_UNROLL
    for (int i = 0; i < 16; ++i) inverse.put((origin + i) * stride + origin + lane, x[i]);
  }
}

template <typename In, int C, int DK>
struct PrepareMemory {
  static constexpr constant int k = 0;
  static constexpr constant int decay = k + C * stride_of(DK) * Exact<In>::bytes;
  static constexpr constant int a = decay + (C * (C + 1) * 4 + 15) / 16 * 16;
  static constexpr constant int inverse = a + C * (C + 8) * 4;
  static constexpr constant int scalars = inverse + C * (C + 8) * 4;
  static constexpr constant int bytes = scalars + 3 * C * 4;
};

// inverse [B,Hv,chunks,C,C], factors [B,Hv,chunks,2,C] (G, then E). Grid: chunks, Hv, B.
template <typename In, int C, int DK, int HK, int HV, int GROUPS, bool MASKED, bool SEGMENTED, typename PK,
          typename PL, typename PB, typename PM, typename PZ, typename PS>
inline void gated_delta_prepare(Place at, threadgroup char* memory, PK k, PL log_g, PB beta, PM mask, PZ segments,
                                PS sizes, GLOBAL float* inverse_out, GLOBAL float* factors) {
  using Memory = PrepareMemory<In, C, DK>;
  constexpr int threads = GROUPS * 32, stride = stride_of(DK), square = C + 8, blocks = C / 16;
  const int length = sizes[0], chunks = sizes[1], t0 = at.x * C, chunk = (at.z * HV + at.y) * chunks + at.x;
  const Exact<In> keys = exact_at<In>(memory, Memory::k, C * stride);
  const Wide<In> a = wide_at<In>(memory, Memory::a, C * square);
  const Wide<In> inverse = wide_at<In>(memory, Memory::inverse, C * square);
  threadgroup float* decay = reinterpret_cast<threadgroup float*>(memory + Memory::decay);
  threadgroup float* gate = reinterpret_cast<threadgroup float*>(memory + Memory::scalars);
  threadgroup float* rate = gate + C;
  threadgroup float* live = rate + C;

  load_live<C, MASKED>(live, mask, at.z, t0, length, at.index);
  barrier();
  load_gates<C, SEGMENTED>(gate, live, log_g, segments, at.z, at.y, HV, t0, length, at.index);
  if (at.index < C)
    rate[at.index] = live[at.index] != 0.0f ? static_cast<float>(beta[(at.z * length + t0 + at.index) * HV + at.y]) : 0.0f;
  load_rows<C, DK, threads>(keys, stride, k + ((at.z * length + t0) * HK + at.y / (HV / HK)) * DK, HK * DK, live,
                            at.index);
  for (int i = at.index; i < C * C; i += threads) inverse.put(i / C * square + i % C, 0.0f);
  barrier();
  fill_decay<C>(decay, gate, at.index);
  barrier();
  for (int tile_index = at.group; tile_index < blocks * blocks; tile_index += GROUPS) {
    const int row = tile_index / blocks * 16, column = tile_index % blocks * 16;
    if (column > row) continue;
    Tile tile;
    tile_clear(tile);
    tile_multiply(tile, straight(keys, stride, row, 0), turned(keys, stride, 0, column), padded(DK), at.lane);
    for (int e = 0; e < 8; ++e) {
      const int i = row + tile_row(e, at.lane), j = column + tile_column(e, at.lane);
      a.put(i * square + j, i > j ? rate[i] * decay[i * (C + 1) + j] * tile.get(e) : 0.0f);
    }
  }
  barrier();
  for (int block = at.group; block < blocks; block += GROUPS) invert_diagonal(a, inverse, square, block * 16, at.lane);
  barrier();
  // Row of blocks after row of blocks: T_IJ = -T_II (sum over K of A_IK T_KJ); the sum waits in A's own place.
  for (int row = 1; row < blocks; ++row) {
    Tile sum;
    for (int column = at.group; column < row; column += GROUPS) {
      tile_clear(sum);
      tile_multiply(sum, straight(a, square, row * 16, column * 16), straight(inverse, square, column * 16, column * 16),
                    (row - column) * 16, at.lane);
      // The decay matrix is no longer read: its memory takes the sums, one a column of blocks.
      for (int e = 0; e < 8; ++e)
        decay[column * 256 + tile_row(e, at.lane) * 16 + tile_column(e, at.lane)] = sum.get(e);
    }
    barrier();
    for (int i = at.index; i < row * 256; i += threads)
      a.put((row * 16 + i % 256 / 16) * square + i / 256 * 16 + i % 16, -decay[i]);
    barrier();
    for (int column = at.group; column < row; column += GROUPS) {
      tile_clear(sum);
      tile_multiply(sum, straight(inverse, square, row * 16, row * 16), straight(a, square, row * 16, column * 16), 16,
                    at.lane);
      for (int e = 0; e < 8; ++e)
        inverse.put((row * 16 + tile_row(e, at.lane)) * square + column * 16 + tile_column(e, at.lane), sum.get(e));
    }
    barrier();
  }
  for (int i = at.index; i < C * C; i += threads) inverse_out[chunk * C * C + i] = inverse.get(i / C * square + i % C);
  if (at.index < C) {
    float before = 1.0f, after = 1.0f;
    for (int i = 0; i <= at.index; ++i) before *= gate[i];
    for (int i = at.index + 1; i < C; ++i) after *= gate[i];
    factors[chunk * 2 * C + at.index] = before;
    factors[chunk * 2 * C + C + at.index] = after;
  }
}

template <typename In, int C, int DK, int SLICE>
struct ScanMemory {
  static constexpr constant int k = 0;
  static constexpr constant int state = k + C * stride_of(DK) * Exact<In>::bytes;
  static constexpr constant int inverse = state + SLICE * stride_of(DK) * 4;
  static constexpr constant int right = inverse + C * (C + 8) * 4;
  static constexpr constant int delta = right + C * (SLICE + 8) * 4;
  static constexpr constant int scalars = delta + C * (SLICE + 8) * 4;
  static constexpr constant int bytes = scalars + 4 * C * 4;
};

// Chunk after chunk, for SLICE rows of the state: states [B,Hv,chunks,Dv,Dk] at each chunk's start, delta [B,T,Hv,Dv],
// last [B,Hv,Dv,Dk]. Grid: slices, Hv, B.
template <typename In, int C, int DK, int DV, int SLICE, int HK, int HV, int GROUPS, bool MASKED, typename PK,
          typename PV, typename PB, typename PM, typename PI, typename PS, typename PT, typename PF>
inline void gated_delta_scan(Place at, threadgroup char* memory, PK k, PV v, PB beta, PM mask, PI initial, PS sizes,
                             PT inverse_in, PF factors, GLOBAL float* states, GLOBAL float* delta_out,
                             GLOBAL float* last) {
  using Memory = ScanMemory<In, C, DK, SLICE>;
  constexpr int threads = GROUPS * 32, stride = stride_of(DK), square = C + 8, thin = SLICE + 8;
  constexpr int across = padded(DK) / 16, tiles = SLICE / 16 * across, mine = (tiles + GROUPS - 1) / GROUPS;
  const int length = sizes[0], chunks = sizes[1], head = at.z * HV + at.y, first = at.x * SLICE;
  const Exact<In> keys = exact_at<In>(memory, Memory::k, C * stride);
  const Wide<In> state = wide_at<In>(memory, Memory::state, SLICE * stride);
  const Wide<In> inverse = wide_at<In>(memory, Memory::inverse, C * square);
  const Wide<In> right = wide_at<In>(memory, Memory::right, C * thin);
  const Wide<In> delta = wide_at<In>(memory, Memory::delta, C * thin);
  threadgroup float* before = reinterpret_cast<threadgroup float*>(memory + Memory::scalars);
  threadgroup float* after = before + C;
  threadgroup float* rate = after + C;
  threadgroup float* live = rate + C;

  Tile sums[mine];
  DELTATUNE_UNROLL
  for (int m = 0; m < mine; ++m) {
    const int tile_index = at.group + m * GROUPS;
    for (int e = 0; e < 8; ++e) {
      const int row = first + tile_index / across * 16 + tile_row(e, at.lane);
      const int column = tile_index % across * 16 + tile_column(e, at.lane);
      const bool inside = tile_index < tiles && row < DV && column < DK;
      sums[m].set(e, inside ? static_cast<float>(initial[(head * DV + row) * DK + column]) : 0.0f);
    }
  }
  for (int n = 0; n < chunks; ++n) {
    const int t0 = n * C, chunk = head * chunks + n;
    load_live<C, MASKED>(live, mask, at.z, t0, length, at.index);
    barrier();
    if (at.index < C) {
      before[at.index] = factors[chunk * 2 * C + at.index];
      after[at.index] = factors[chunk * 2 * C + C + at.index];
      rate[at.index] =
          live[at.index] != 0.0f ? static_cast<float>(beta[(at.z * length + t0 + at.index) * HV + at.y]) : 0.0f;
    }
    load_rows<C, DK, threads>(keys, stride, k + ((at.z * length + t0) * HK + at.y / (HV / HK)) * DK, HK * DK, live,
                              at.index);
    for (int i = at.index; i < C * C; i += threads) inverse.put(i / C * square + i % C, inverse_in[chunk * C * C + i]);
    DELTATUNE_UNROLL
    for (int m = 0; m < mine; ++m) {
      const int tile_index = at.group + m * GROUPS;
      if (tile_index >= tiles) continue;
      for (int e = 0; e < 8; ++e) {
        const int row = tile_index / across * 16 + tile_row(e, at.lane);
        const int column = tile_index % across * 16 + tile_column(e, at.lane);
        state.put(row * stride + column, sums[m].get(e));
        if (first + row < DV && column < DK) states[(chunk * DV + first + row) * DK + column] = sums[m].get(e);
      }
    }
    barrier();
    // right = beta (V - G X)
    for (int tile_index = at.group; tile_index < C / 16 * (SLICE / 16); tile_index += GROUPS) {
      const int row = tile_index / (SLICE / 16) * 16, column = tile_index % (SLICE / 16) * 16;
      Tile x;
      tile_clear(x);
      tile_multiply(x, straight(keys, stride, row, 0), turned(state, stride, 0, column), padded(DK), at.lane);
      for (int e = 0; e < 8; ++e) {
        const int i = row + tile_row(e, at.lane), j = column + tile_column(e, at.lane);
        const bool inside = live[i] != 0.0f && first + j < DV;
        const float value =
            inside ? static_cast<float>(v[((at.z * length + t0 + i) * HV + at.y) * DV + first + j]) : 0.0f;
        right.put(i * thin + j, rate[i] * (value - before[i] * x.get(e)));
      }
    }
    barrier();
    // d = T right, written out as it is and kept scaled by E
    for (int tile_index = at.group; tile_index < C / 16 * (SLICE / 16); tile_index += GROUPS) {
      const int row = tile_index / (SLICE / 16) * 16, column = tile_index % (SLICE / 16) * 16;
      Tile d;
      tile_clear(d);
      tile_multiply(d, straight(inverse, square, row, 0), straight(right, thin, 0, column), row + 16, at.lane);
      for (int e = 0; e < 8; ++e) {
        const int i = row + tile_row(e, at.lane), j = column + tile_column(e, at.lane);
        delta.put(i * thin + j, after[i] * d.get(e));
        if (t0 + i < length && first + j < DV)
          delta_out[((at.z * length + t0 + i) * HV + at.y) * DV + first + j] = d.get(e);
      }
    }
    barrier();
    DELTATUNE_UNROLL
    for (int m = 0; m < mine; ++m) {
      const int tile_index = at.group + m * GROUPS;
      if (tile_index >= tiles) continue;
      const int row = tile_index / across * 16, column = tile_index % across * 16;
      for (int e = 0; e < 8; ++e) sums[m].set(e, before[C - 1] * sums[m].get(e));
      tile_multiply(sums[m], turned(delta, thin, row, 0), straight(keys, stride, 0, column), C, at.lane);
    }
    barrier();
  }
  DELTATUNE_UNROLL
  for (int m = 0; m < mine; ++m) {
    const int tile_index = at.group + m * GROUPS;
    for (int e = 0; e < 8; ++e) {
      const int row = first + tile_index / across * 16 + tile_row(e, at.lane);
      const int column = tile_index % across * 16 + tile_column(e, at.lane);
      if (tile_index < tiles && row < DV && column < DK) last[(head * DV + row) * DK + column] = sums[m].get(e);
    }
  }
}

template <typename In, int C, int DK, int SLICE>
struct OutputMemory {
  static constexpr constant int q = 0;
  static constexpr constant int k = q + C * stride_of(DK) * Exact<In>::bytes;
  // Once P stands, the keys' memory takes slices of the state.
  static constexpr constant int state = k;
  static constexpr constant int state_end = state + SLICE * stride_of(DK) * 4;
  static constexpr constant int k_end = k + C * stride_of(DK) * Exact<In>::bytes;
  static constexpr constant int decay = state_end > k_end ? state_end : k_end;
  // And the decay's memory takes slices of d.
  static constexpr constant int delta = decay;
  static constexpr constant int delta_end = delta + C * (SLICE + 8) * 4;
  static constexpr constant int decay_end = decay + (C * (C + 1) * 4 + 15) / 16 * 16;
  static constexpr constant int p = delta_end > decay_end ? delta_end : decay_end;
  static constexpr constant int scalars = p + C * (C + 8) * 4;
  static constexpr constant int bytes = scalars + 3 * C * 4;
};

// P = D * (Q K^T), zero above the diagonal; keys and queries stand in shared memory.
template <int C, int DK, int GROUPS, typename Q, typename K, typename P>
inline void fill_scores(Q queries, K keys, P p, threadgroup const float* decay, int group, int lane) {
  constexpr int stride = stride_of(DK), square = C + 8, blocks = C / 16;
  for (int tile_index = group; tile_index < blocks * blocks; tile_index += GROUPS) {
    const int row = tile_index / blocks * 16, column = tile_index % blocks * 16;
    Tile tile;
    tile_clear(tile);
    if (column <= row)
      tile_multiply(tile, straight(queries, stride, row, 0), turned(keys, stride, 0, column), padded(DK), lane);
    for (int e = 0; e < 8; ++e) {
      const int i = row + tile_row(e, lane), j = column + tile_column(e, lane);
      p.put(i * square + j, i >= j ? decay[i * (C + 1) + j] * tile.get(e) : 0.0f);
    }
  }
}

// Y = G (Q S^T) + P d. Grid: chunks, Hv, B.
template <typename In, int C, int DK, int DV, int SLICE, int HK, int HV, int GROUPS, bool MASKED, bool SEGMENTED,
          typename PQ, typename PK, typename PL, typename PM, typename PZ, typename PS, typename PF, typename PT,
          typename PD, typename PY>
inline void gated_delta_output(Place at, threadgroup char* memory, PQ q, PK k, PL log_g, PM mask, PZ segments,
                               PS sizes, PF factors, PT states, PD delta_in, PY y) {
  using Memory = OutputMemory<In, C, DK, SLICE>;
  constexpr int threads = GROUPS * 32, stride = stride_of(DK), square = C + 8, thin = SLICE + 8;
  const int length = sizes[0], chunks = sizes[1], t0 = at.x * C, chunk = (at.z * HV + at.y) * chunks + at.x;
  const int key_offset = ((at.z * length + t0) * HK + at.y / (HV / HK)) * DK;
  const Exact<In> queries = exact_at<In>(memory, Memory::q, C * stride);
  const Exact<In> keys = exact_at<In>(memory, Memory::k, C * stride);
  const Wide<In> state = wide_at<In>(memory, Memory::state, SLICE * stride);
  const Wide<In> delta = wide_at<In>(memory, Memory::delta, C * thin);
  const Wide<In> p = wide_at<In>(memory, Memory::p, C * square);
  threadgroup float* decay = reinterpret_cast<threadgroup float*>(memory + Memory::decay);
  threadgroup float* gate = reinterpret_cast<threadgroup float*>(memory + Memory::scalars);
  threadgroup float* before = gate + C;
  threadgroup float* live = before + C;

  load_live<C, MASKED>(live, mask, at.z, t0, length, at.index);
  barrier();
  load_gates<C, SEGMENTED>(gate, live, log_g, segments, at.z, at.y, HV, t0, length, at.index);
  if (at.index < C) before[at.index] = factors[chunk * 2 * C + at.index];
  load_rows<C, DK, threads>(queries, stride, q + key_offset, HK * DK, live, at.index);
  load_rows<C, DK, threads>(keys, stride, k + key_offset, HK * DK, live, at.index);
  barrier();
  fill_decay<C>(decay, gate, at.index);
  barrier();
  fill_scores<C, DK, GROUPS>(queries, keys, p, decay, at.group, at.lane);
  for (int first = 0; first < DV; first += SLICE) {
    barrier();
    for (int i = at.index; i < SLICE * padded(DK); i += threads) {
      const int row = i / padded(DK), column = i % padded(DK);
      const bool inside = first + row < DV && column < DK;
      state.put(row * stride + column, inside ? states[(chunk * DV + first + row) * DK + column] : 0.0f);
    }
    for (int i = at.index; i < C * SLICE; i += threads) {
      const int row = i / SLICE, column = i % SLICE;
      const bool inside = t0 + row < length && first + column < DV;
      delta.put(row * thin + column,
                inside ? delta_in[((at.z * length + t0 + row) * HV + at.y) * DV + first + column] : 0.0f);
    }
    barrier();
    for (int tile_index = at.group; tile_index < C / 16 * (SLICE / 16); tile_index += GROUPS) {
      const int row = tile_index / (SLICE / 16) * 16, column = tile_index % (SLICE / 16) * 16;
      Tile out;
      tile_clear(out);
      tile_multiply(out, straight(queries, stride, row, 0), turned(state, stride, 0, column), padded(DK), at.lane);
      for (int e = 0; e < 8; ++e) out.set(e, before[row + tile_row(e, at.lane)] * out.get(e));
      tile_multiply(out, straight(p, square, row, 0), straight(delta, thin, 0, column), row + 16, at.lane);
      for (int e = 0; e < 8; ++e) {
        const int i = row + tile_row(e, at.lane), j = column + tile_column(e, at.lane);
        if (t0 + i < length && first + j < DV)
          y[((at.z * length + t0 + i) * HV + at.y) * DV + first + j] =
              static_cast<In>(live[i] != 0.0f ? out.get(e) : 0.0f);
      }
    }
  }
}

template <typename In, int C, int DK, int SLICE>
struct LocalMemory {
  static constexpr constant int q = 0;
  static constexpr constant int k = q + C * stride_of(DK) * Exact<In>::bytes;
  static constexpr constant int k_end = k + C * stride_of(DK) * Exact<In>::bytes;
  static constexpr constant int decay = k_end;
  static constexpr constant int dy = q;
  static constexpr constant int p = decay + (C * (C + 1) * 4 + 15) / 16 * 16;
  static constexpr constant int scalars = p + C * (C + 8) * 4;
  static constexpr constant int bytes = scalars + 2 * C * 4;
};

// The part of d's gradient that stays in its chunk: P^T dY, [B,T,Hv,Dv]. Grid: chunks, Hv, B.
template <typename In, int C, int DK, int DV, int SLICE, int HK, int HV, int GROUPS, bool MASKED, bool SEGMENTED,
          typename PQ, typename PK, typename PL, typename PM, typename PZ, typename PS, typename PY>
inline void gated_delta_local(Place at, threadgroup char* memory, PQ q, PK k, PL log_g, PM mask, PZ segments, PS sizes,
                              PY dy, GLOBAL float* d_delta) {
  using Memory = LocalMemory<In, C, DK, SLICE>;
  constexpr int threads = GROUPS * 32, stride = stride_of(DK), square = C + 8, thin = SLICE + 8;
  static_assert(C * (SLICE + 8) * 4 <= 2 * C * stride_of(DK) * Exact<In>::bytes, "dY's slice fits where Q and K stood");
  const int length = sizes[0], t0 = at.x * C;
  const int key_offset = ((at.z * length + t0) * HK + at.y / (HV / HK)) * DK;
  const Exact<In> queries = exact_at<In>(memory, Memory::q, C * stride);
  const Exact<In> keys = exact_at<In>(memory, Memory::k, C * stride);
  const Exact<In> dy_slice = exact_at<In>(memory, Memory::dy, C * thin);
  const Wide<In> p = wide_at<In>(memory, Memory::p, C * square);
  threadgroup float* decay = reinterpret_cast<threadgroup float*>(memory + Memory::decay);
  threadgroup float* gate = reinterpret_cast<threadgroup float*>(memory + Memory::scalars);
  threadgroup float* live = gate + C;

  load_live<C, MASKED>(live, mask, at.z, t0, length, at.index);
  barrier();
  load_gates<C, SEGMENTED>(gate, live, log_g, segments, at.z, at.y, HV, t0, length, at.index);
  load_rows<C, DK, threads>(queries, stride, q + key_offset, HK * DK, live, at.index);
  load_rows<C, DK, threads>(keys, stride, k + key_offset, HK * DK, live, at.index);
  barrier();
  fill_decay<C>(decay, gate, at.index);
  barrier();
  fill_scores<C, DK, GROUPS>(queries, keys, p, decay, at.group, at.lane);
  for (int first = 0; first < DV; first += SLICE) {
    barrier();
    for (int i = at.index; i < C * SLICE; i += threads) {
      const int row = i / SLICE, column = i % SLICE;
      const bool inside = live[row] != 0.0f && first + column < DV;
      dy_slice.put(row * thin + column,
                   inside ? static_cast<float>(dy[((at.z * length + t0 + row) * HV + at.y) * DV + first + column])
                          : 0.0f);
    }
    barrier();
    for (int tile_index = at.group; tile_index < C / 16 * (SLICE / 16); tile_index += GROUPS) {
      const int row = tile_index / (SLICE / 16) * 16, column = tile_index % (SLICE / 16) * 16;
      Tile out;
      tile_clear(out);
      tile_multiply(out, turned(p, square, row, row), straight(dy_slice, thin, row, column), C - row, at.lane);
      for (int e = 0; e < 8; ++e) {
        const int i = row + tile_row(e, at.lane), j = column + tile_column(e, at.lane);
        if (t0 + i < length && first + j < DV)
          d_delta[((at.z * length + t0 + i) * HV + at.y) * DV + first + j] = out.get(e);
      }
    }
  }
}

template <typename In, int C, int DK, int SLICE>
struct ReverseMemory {
  static constexpr constant int k = 0;
  static constexpr constant int state = k + C * stride_of(DK) * Exact<In>::bytes;
  // T is done with when Q comes: they share their place.
  static constexpr constant int inverse = state + SLICE * stride_of(DK) * 4;
  static constexpr constant int q = inverse;
  static constexpr constant int inverse_end = inverse + C * (C + 8) * 4;
  static constexpr constant int q_end = q + C * stride_of(DK) * Exact<In>::bytes;
  static constexpr constant int delta = inverse_end > q_end ? inverse_end : q_end;
  static constexpr constant int dy = delta;
  static constexpr constant int dx = delta + C * (SLICE + 8) * 4;
  static constexpr constant int scalars = dx + C * (SLICE + 8) * 4;
  static constexpr constant int bytes = scalars + 4 * C * 4;
};

// Chunk before chunk, for SLICE rows of the state's gradient: d_states [B,Hv,chunks,Dv,Dk] at each chunk's end;
// d_right [B,T,Hv,Dv] = T^T (local + E (K dS^T)); d_initial [B,Hv,Dv,Dk]. Grid: slices, Hv, B.
template <typename In, int C, int DK, int DV, int SLICE, int HK, int HV, int GROUPS, bool MASKED, typename PQ,
          typename PK, typename PB, typename PM, typename PS, typename PT, typename PF, typename PY, typename PE,
          typename PC>
inline void gated_delta_reverse(Place at, threadgroup char* memory, PQ q, PK k, PB beta, PM mask, PS sizes,
                                PT inverse_in, PF factors, PY dy_in, PE d_last, PC local, GLOBAL float* d_states,
                                GLOBAL float* d_right, GLOBAL float* d_initial) {
  using Memory = ReverseMemory<In, C, DK, SLICE>;
  constexpr int threads = GROUPS * 32, stride = stride_of(DK), square = C + 8, thin = SLICE + 8;
  constexpr int across = padded(DK) / 16, tiles = SLICE / 16 * across, mine = (tiles + GROUPS - 1) / GROUPS;
  const int length = sizes[0], chunks = sizes[1], head = at.z * HV + at.y, first = at.x * SLICE;
  const Exact<In> keys = exact_at<In>(memory, Memory::k, C * stride);
  const Exact<In> queries = exact_at<In>(memory, Memory::q, C * stride);
  const Wide<In> state = wide_at<In>(memory, Memory::state, SLICE * stride);
  const Wide<In> inverse = wide_at<In>(memory, Memory::inverse, C * square);
  const Wide<In> delta = wide_at<In>(memory, Memory::delta, C * thin);
  const Wide<In> dy = wide_at<In>(memory, Memory::dy, C * thin);
  const Wide<In> dx = wide_at<In>(memory, Memory::dx, C * thin);
  threadgroup float* before = reinterpret_cast<threadgroup float*>(memory + Memory::scalars);
  threadgroup float* after = before + C;
  threadgroup float* rate = after + C;
  threadgroup float* live = rate + C;

  Tile sums[mine];
  DELTATUNE_UNROLL
  for (int m = 0; m < mine; ++m) {
    const int tile_index = at.group + m * GROUPS;
    for (int e = 0; e < 8; ++e) {
      const int row = first + tile_index / across * 16 + tile_row(e, at.lane);
      const int column = tile_index % across * 16 + tile_column(e, at.lane);
      const bool inside = tile_index < tiles && row < DV && column < DK;
      sums[m].set(e, inside ? static_cast<float>(d_last[(head * DV + row) * DK + column]) : 0.0f);
    }
  }
  for (int n = chunks - 1; n >= 0; --n) {
    const int t0 = n * C, chunk = head * chunks + n;
    const int key_offset = ((at.z * length + t0) * HK + at.y / (HV / HK)) * DK;
    load_live<C, MASKED>(live, mask, at.z, t0, length, at.index);
    barrier();
    if (at.index < C) {
      before[at.index] = factors[chunk * 2 * C + at.index];
      after[at.index] = factors[chunk * 2 * C + C + at.index];
      rate[at.index] =
          live[at.index] != 0.0f ? static_cast<float>(beta[(at.z * length + t0 + at.index) * HV + at.y]) : 0.0f;
    }
    load_rows<C, DK, threads>(keys, stride, k + key_offset, HK * DK, live, at.index);
    for (int i = at.index; i < C * C; i += threads) inverse.put(i / C * square + i % C, inverse_in[chunk * C * C + i]);
    DELTATUNE_UNROLL
    for (int m = 0; m < mine; ++m) {
      const int tile_index = at.group + m * GROUPS;
      if (tile_index >= tiles) continue;
      for (int e = 0; e < 8; ++e) {
        const int row = tile_index / across * 16 + tile_row(e, at.lane);
        const int column = tile_index % across * 16 + tile_column(e, at.lane);
        state.put(row * stride + column, sums[m].get(e));
        if (first + row < DV && column < DK) d_states[(chunk * DV + first + row) * DK + column] = sums[m].get(e);
      }
    }
    barrier();
    for (int tile_index = at.group; tile_index < C / 16 * (SLICE / 16); tile_index += GROUPS) {
      const int row = tile_index / (SLICE / 16) * 16, column = tile_index % (SLICE / 16) * 16;
      Tile x;
      tile_clear(x);
      tile_multiply(x, straight(keys, stride, row, 0), turned(state, stride, 0, column), padded(DK), at.lane);
      for (int e = 0; e < 8; ++e) {
        const int i = row + tile_row(e, at.lane), j = column + tile_column(e, at.lane);
        const bool inside = t0 + i < length && first + j < DV;
        const float own = inside ? local[((at.z * length + t0 + i) * HV + at.y) * DV + first + j] : 0.0f;
        delta.put(i * thin + j, own + after[i] * x.get(e));
      }
    }
    barrier();
    for (int tile_index = at.group; tile_index < C / 16 * (SLICE / 16); tile_index += GROUPS) {
      const int row = tile_index / (SLICE / 16) * 16, column = tile_index % (SLICE / 16) * 16;
      Tile out;
      tile_clear(out);
      tile_multiply(out, turned(inverse, square, row, row), straight(delta, thin, row, column), C - row, at.lane);
      for (int e = 0; e < 8; ++e) {
        const int i = row + tile_row(e, at.lane), j = column + tile_column(e, at.lane);
        dx.put(i * thin + j, -rate[i] * before[i] * out.get(e));
        if (t0 + i < length && first + j < DV)
          d_right[((at.z * length + t0 + i) * HV + at.y) * DV + first + j] = out.get(e);
      }
    }
    barrier();
    load_rows<C, DK, threads>(queries, stride, q + key_offset, HK * DK, live, at.index);
    for (int i = at.index; i < C * SLICE; i += threads) {
      const int row = i / SLICE, column = i % SLICE;
      const bool inside = live[row] != 0.0f && first + column < DV;
      dy.put(row * thin + column,
             inside ? before[row] *
                          static_cast<float>(dy_in[((at.z * length + t0 + row) * HV + at.y) * DV + first + column])
                    : 0.0f);
    }
    barrier();
    DELTATUNE_UNROLL
    for (int m = 0; m < mine; ++m) {
      const int tile_index = at.group + m * GROUPS;
      if (tile_index >= tiles) continue;
      const int row = tile_index / across * 16, column = tile_index % across * 16;
      for (int e = 0; e < 8; ++e) sums[m].set(e, before[C - 1] * sums[m].get(e));
      tile_multiply(sums[m], turned(dy, thin, row, 0), straight(queries, stride, 0, column), C, at.lane);
      tile_multiply(sums[m], turned(dx, thin, row, 0), straight(keys, stride, 0, column), C, at.lane);
    }
    barrier();
  }
  DELTATUNE_UNROLL
  for (int m = 0; m < mine; ++m) {
    const int tile_index = at.group + m * GROUPS;
    for (int e = 0; e < 8; ++e) {
      const int row = first + tile_index / across * 16 + tile_row(e, at.lane);
      const int column = tile_index % across * 16 + tile_column(e, at.lane);
      if (tile_index < tiles && row < DV && column < DK) d_initial[(head * DV + row) * DK + column] = sums[m].get(e);
    }
  }
}

template <typename In, int C, int DK, int SLICE>
struct GradientMemory {
  static constexpr constant int across = padded(DK) / 16;
  // First the slices of the states, of dY, d and d_right; then Q, K and the pairs' weights.
  static constexpr constant int state = 0;
  static constexpr constant int d_state = state + SLICE * stride_of(DK) * 4;
  static constexpr constant int dy = d_state + SLICE * stride_of(DK) * 4;
  static constexpr constant int delta = dy + C * (SLICE + 8) * 4;
  static constexpr constant int right = delta + C * (SLICE + 8) * 4;
  static constexpr constant int slices_end = right + C * (SLICE + 8) * 4;
  static constexpr constant int q = 0;
  static constexpr constant int k = q + C * stride_of(DK) * Exact<In>::bytes;
  static constexpr constant int weights = k + C * stride_of(DK) * Exact<In>::bytes;
  static constexpr constant int pairs_end = weights + C * (C + 8) * 4;
  // The row sums' parts stand where the decay comes later.
  static constexpr constant int decay = slices_end > pairs_end ? slices_end : pairs_end;
  static constexpr constant int decay_bytes = C * (C + 1) * 4;
  static constexpr constant int parts_bytes = 3 * C * across * 4;
  static constexpr constant int scalars = decay + ((decay_bytes > parts_bytes ? decay_bytes : parts_bytes) + 15) / 16 * 16;
  static constexpr constant int bytes = scalars + (9 * C + C * (C / 16) + 32) * 4;
};

// Gradients of q, k, v, log_g and beta from what the scans left. Grid: chunks, Hk, B.
template <typename In, int C, int DK, int DV, int SLICE, int HK, int HV, int GROUPS, bool MASKED, bool SEGMENTED,
          typename PQ, typename PK, typename PV, typename PL, typename PB, typename PM, typename PZ, typename PS,
          typename PF, typename PT, typename PU, typename PD, typename PR, typename PY, typename OQ, typename OK,
          typename OV>
inline void gated_delta_gradients(Place at, threadgroup char* memory, PQ q, PK k, PV v, PL log_g, PB beta, PM mask,
                                  PZ segments, PS sizes, PF factors, PT states, PU d_states, PD delta_in, PR right_in,
                                  PY dy_in, OQ dq, OK dk, OV dv, GLOBAL float* d_log_g, GLOBAL float* d_beta) {
  using Memory = GradientMemory<In, C, DK, SLICE>;
  constexpr int threads = GROUPS * 32, stride = stride_of(DK), square = C + 8, thin = SLICE + 8, blocks = C / 16;
  constexpr int across = padded(DK) / 16, tiles = blocks * across, mine = (tiles + GROUPS - 1) / GROUPS;
  constexpr int pairs = blocks * (blocks + 1) / 2, own_pairs = (pairs + GROUPS - 1) / GROUPS;
  const int length = sizes[0], chunks = sizes[1], t0 = at.x * C;
  const int key_offset = ((at.z * length + t0) * HK + at.y) * DK;
  const Wide<In> state = wide_at<In>(memory, Memory::state, SLICE * stride);
  const Wide<In> d_state = wide_at<In>(memory, Memory::d_state, SLICE * stride);
  const Wide<In> dy = wide_at<In>(memory, Memory::dy, C * thin);
  const Wide<In> delta = wide_at<In>(memory, Memory::delta, C * thin);
  const Wide<In> right = wide_at<In>(memory, Memory::right, C * thin);
  const Exact<In> queries = exact_at<In>(memory, Memory::q, C * stride);
  const Exact<In> keys = exact_at<In>(memory, Memory::k, C * stride);
  const Wide<In> weights = wide_at<In>(memory, Memory::weights, C * square);
  threadgroup float* decay = reinterpret_cast<threadgroup float*>(memory + Memory::decay);
  threadgroup float* parts = decay;
  threadgroup float* gate = reinterpret_cast<threadgroup float*>(memory + Memory::scalars);
  threadgroup float* before = gate + C;
  threadgroup float* after = before + C;
  threadgroup float* rate = after + C;
  threadgroup float* live = rate + C;
  threadgroup float* on_before = live + C;
  threadgroup float* on_after = on_before + C;
  threadgroup float* on_rate = on_after + C;
  threadgroup float* on_all = on_rate + C;
  threadgroup float* rate_parts = on_all + 32;

  Tile dq_sums[mine], dk_sums[mine];
  DELTATUNE_UNROLL
  for (int m = 0; m < mine; ++m) {
    tile_clear(dq_sums[m]);
    tile_clear(dk_sums[m]);
  }
  for (int member = 0; member < HV / HK; ++member) {
    const int hv = at.y * (HV / HK) + member, chunk = (at.z * HV + hv) * chunks + at.x;
    barrier();
    load_live<C, MASKED>(live, mask, at.z, t0, length, at.index);
    barrier();
    load_gates<C, SEGMENTED>(gate, live, log_g, segments, at.z, hv, HV, t0, length, at.index);
    if (at.index < C) {
      before[at.index] = factors[chunk * 2 * C + at.index];
      after[at.index] = factors[chunk * 2 * C + C + at.index];
      rate[at.index] = live[at.index] != 0.0f ? static_cast<float>(beta[(at.z * length + t0 + at.index) * HV + hv]) : 0.0f;
      on_rate[at.index] = 0.0f;
    }
    for (int i = at.index; i < 3 * C * across; i += threads) parts[i] = 0.0f;
    Tile dp[own_pairs], da[own_pairs];
    DELTATUNE_UNROLL
    for (int m = 0; m < own_pairs; ++m) {
      tile_clear(dp[m]);
      tile_clear(da[m]);
    }
    float whole = 0.0f;
    for (int first = 0; first < DV; first += SLICE) {
      barrier();
      for (int i = at.index; i < SLICE * padded(DK); i += threads) {
        const int row = i / padded(DK), column = i % padded(DK);
        const bool inside = first + row < DV && column < DK;
        const int from = (chunk * DV + first + row) * DK + column;
        const float s = inside ? states[from] : 0.0f, ds = inside ? d_states[from] : 0.0f;
        state.put(row * stride + column, s);
        d_state.put(row * stride + column, ds);
        whole += s * ds;
      }
      for (int i = at.index; i < C * SLICE; i += threads) {
        const int row = i / SLICE, column = i % SLICE;
        const bool inside = t0 + row < length && first + column < DV;
        const int from = ((at.z * length + t0 + row) * HV + hv) * DV + first + column;
        dy.put(row * thin + column, inside && live[row] != 0.0f ? static_cast<float>(dy_in[from]) : 0.0f);
        delta.put(row * thin + column, inside ? delta_in[from] : 0.0f);
        const float r = inside ? right_in[from] : 0.0f;
        right.put(row * thin + column, r);
        if (inside) dv[from] = static_cast<In>(rate[row] * r);
      }
      for (int row = at.group; row < C; row += GROUPS) {
        float sum = 0.0f;
        for (int column = at.lane; column < SLICE; column += 32) {
          const int from = ((at.z * length + t0 + row) * HV + hv) * DV + first + column;
          if (live[row] != 0.0f && first + column < DV) sum += right_in[from] * static_cast<float>(v[from]);
        }
        sum = lane_sum(sum);
        if (at.lane == 0) on_rate[row] += sum;
      }
      barrier();
      DELTATUNE_UNROLL
      for (int m = 0; m < own_pairs; ++m) {
        const int pair = at.group + m * GROUPS;
        if (pair >= pairs) continue;
        int row = 0;
        while ((row + 1) * (row + 2) / 2 <= pair) ++row;
        const int column = pair - row * (row + 1) / 2;
        tile_multiply(dp[m], straight(dy, thin, row * 16, 0), turned(delta, thin, 0, column * 16), SLICE, at.lane);
        tile_multiply(da[m], straight(right, thin, row * 16, 0), turned(delta, thin, 0, column * 16), SLICE, at.lane);
      }
      DELTATUNE_UNROLL
      for (int m = 0; m < mine; ++m) {
        const int tile_index = at.group + m * GROUPS;
        if (tile_index >= tiles) continue;
        const int row = tile_index / across * 16, column = tile_index % across * 16;
        Tile from_y, from_right, from_end;
        tile_clear(from_y);
        tile_clear(from_right);
        tile_clear(from_end);
        tile_multiply(from_y, straight(dy, thin, row, 0), straight(state, stride, 0, column), SLICE, at.lane);
        tile_multiply(from_right, straight(right, thin, row, 0), straight(state, stride, 0, column), SLICE, at.lane);
        tile_multiply(from_end, straight(delta, thin, row, 0), straight(d_state, stride, 0, column), SLICE, at.lane);
        float sums[6] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
        DELTATUNE_UNROLL
        for (int e = 0; e < 8; ++e) {
          const int i = row + tile_row(e, at.lane), j = column + tile_column(e, at.lane);
          const bool inside = live[i] != 0.0f && j < DK;
          const int from = key_offset + i * HK * DK + j;
          const float query = inside ? static_cast<float>(q[from]) : 0.0f;
          const float key = inside ? static_cast<float>(k[from]) : 0.0f;
          const float y_part = before[i] * from_y.get(e);
          const float right_part = -before[i] * from_right.get(e);
          const float end_part = after[i] * from_end.get(e);
          dq_sums[m].set(e, dq_sums[m].get(e) + y_part);
          dk_sums[m].set(e, dk_sums[m].get(e) + rate[i] * right_part + end_part);
          sums[tile_side(e)] += y_part * query;
          sums[2 + tile_side(e)] += right_part * key;
          sums[4 + tile_side(e)] += end_part * key;
        }
        DELTATUNE_UNROLL
        for (int side = 0; side < 2; ++side) {
          const int e = side * tile_second, place = (row + tile_row(e, at.lane)) * across + column / 16;
          const float y_sum = row_sum(sums[side]), right_sum = row_sum(sums[2 + side]), end_sum = row_sum(sums[4 + side]);
          // One lane a row adds: the one that holds the tile's first column there.
          if (tile_column(e, at.lane) == 0) {
            parts[place] += y_sum;
            parts[C * across + place] += right_sum;
            parts[2 * C * across + place] += end_sum;
          }
        }
      }
    }
    whole = lane_sum(whole);
    if (at.lane == 0) on_all[at.group] = whole;
    barrier();
    if (at.index < C) {
      float on_y = 0.0f, on_right = 0.0f, on_end = 0.0f;
      for (int c = 0; c < across; ++c) {
        on_y += parts[at.index * across + c];
        on_right += parts[(C + at.index) * across + c];
        on_end += parts[(2 * C + at.index) * across + c];
      }
      on_before[at.index] = on_y + rate[at.index] * on_right;
      on_after[at.index] = on_end;
      on_rate[at.index] += on_right;
    }
    barrier();
    load_rows<C, DK, threads>(queries, stride, q + key_offset, HK * DK, live, at.index);
    load_rows<C, DK, threads>(keys, stride, k + key_offset, HK * DK, live, at.index);
    fill_decay<C>(decay, gate, at.index);
    for (int i = at.index; i < C * square; i += threads) weights.put(i, 0.0f);
    for (int i = at.index; i < C * blocks; i += threads) rate_parts[i] = 0.0f;
    barrier();
    // Pairs: dP's weights go out; the decay's place takes each pair's share of the gates' gradient.
    DELTATUNE_UNROLL
    for (int m = 0; m < own_pairs; ++m) {
      const int pair = at.group + m * GROUPS;
      if (pair >= pairs) continue;
      int row = 0;
      while ((row + 1) * (row + 2) / 2 <= pair) ++row;
      const int column = pair - row * (row + 1) / 2;
      Tile qk, kk;
      tile_clear(qk);
      tile_clear(kk);
      tile_multiply(qk, straight(queries, stride, row * 16, 0), turned(keys, stride, 0, column * 16), padded(DK), at.lane);
      tile_multiply(kk, straight(keys, stride, row * 16, 0), turned(keys, stride, 0, column * 16), padded(DK), at.lane);
      float sums[2] = {0.0f, 0.0f};
      DELTATUNE_UNROLL
      for (int e = 0; e < 8; ++e) {
        const int i = row * 16 + tile_row(e, at.lane), j = column * 16 + tile_column(e, at.lane);
        const float d = decay[i * (C + 1) + j];
        const float score = d * dp[m].get(e), solve = i > j ? -d * da[m].get(e) : 0.0f;
        weights.put(i * square + j, score);
        da[m].set(e, rate[i] * solve);
        sums[tile_side(e)] += solve * kk.get(e);
        decay[i * (C + 1) + j] = i > j ? score * qk.get(e) + rate[i] * solve * kk.get(e) : 0.0f;
      }
      DELTATUNE_UNROLL
      for (int side = 0; side < 2; ++side) {
        const int e = side * tile_second;
        const float sum = row_sum(sums[side]);
        if (tile_column(e, at.lane) == 0) rate_parts[(row * 16 + tile_row(e, at.lane)) * blocks + column] = sum;
      }
    }
    barrier();
    DELTATUNE_UNROLL
    for (int m = 0; m < mine; ++m) {
      const int tile_index = at.group + m * GROUPS;
      if (tile_index >= tiles) continue;
      const int row = tile_index / across * 16, column = tile_index % across * 16;
      tile_multiply(dq_sums[m], straight(weights, square, row, 0), straight(keys, stride, 0, column), row + 16, at.lane);
      tile_multiply(dk_sums[m], turned(weights, square, row, row), straight(queries, stride, row, column), C - row, at.lane);
    }
    // A column's sums over i >= t, then a row's over j < t: only pairs whose decay spans t.
    if (at.index < C) {
      float sum = 0.0f;
      for (int i = C - 1; i > at.index; --i) {
        sum += decay[i * (C + 1) + at.index];
        decay[i * (C + 1) + at.index] = sum;
      }
    }
    barrier();
    DELTATUNE_UNROLL
    for (int m = 0; m < own_pairs; ++m) {
      const int pair = at.group + m * GROUPS;
      if (pair >= pairs) continue;
      int row = 0;
      while ((row + 1) * (row + 2) / 2 <= pair) ++row;
      const int column = pair - row * (row + 1) / 2;
      DELTATUNE_UNROLL
      for (int e = 0; e < 8; ++e)
        weights.put((row * 16 + tile_row(e, at.lane)) * square + column * 16 + tile_column(e, at.lane), da[m].get(e));
    }
    barrier();
    DELTATUNE_UNROLL
    for (int m = 0; m < mine; ++m) {
      const int tile_index = at.group + m * GROUPS;
      if (tile_index >= tiles) continue;
      const int row = tile_index / across * 16, column = tile_index % across * 16;
      tile_multiply(dk_sums[m], straight(weights, square, row, 0), straight(keys, stride, 0, column), row + 16, at.lane);
      tile_multiply(dk_sums[m], turned(weights, square, row, row), straight(keys, stride, row, column), C - row, at.lane);
    }
    if (at.index < C && t0 + at.index < length) {
      const int t = at.index, to = (at.z * length + t0 + t) * HV + hv;
      float on_gate = 0.0f, on_beta = on_rate[t];
      for (int g = 0; g < GROUPS; ++g) on_gate += on_all[g];
      on_gate *= before[C - 1];
      for (int i = t; i < C; ++i) on_gate += on_before[i];
      for (int i = 0; i < t; ++i) on_gate += on_after[i] + decay[t * (C + 1) + i];
      for (int c = 0; c < blocks; ++c) on_beta += rate_parts[t * blocks + c];
      d_log_g[to] = live[t] != 0.0f ? on_gate : 0.0f;
      d_beta[to] = live[t] != 0.0f ? on_beta : 0.0f;
    }
  }
  DELTATUNE_UNROLL
  for (int m = 0; m < mine; ++m) {
    const int tile_index = at.group + m * GROUPS;
    if (tile_index >= tiles) continue;
    const int row = tile_index / across * 16, column = tile_index % across * 16;
    for (int e = 0; e < 8; ++e) {
      const int i = row + tile_row(e, at.lane), j = column + tile_column(e, at.lane);
      if (t0 + i < length && j < DK) {
        dq[key_offset + i * HK * DK + j] = static_cast<In>(dq_sums[m].get(e));
        dk[key_offset + i * HK * DK + j] = static_cast<In>(dk_sums[m].get(e));
      }
    }
  }
}
