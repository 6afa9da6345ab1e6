// The prepare kernel: Z and P of each chunk, by the formulas of chunk.h.

// The shared memory of a block.
template <typename In, int C, int DK, bool UNSTAGED, bool ERASES>
struct PrepareMemory {
  static constexpr constant int k = 0;
  static constexpr constant int q = k + room_of<UNSTAGED, Exact<In>, C, DK>();
  static constexpr constant int q_end = q + room_of<UNSTAGED, Exact<In>, C, DK>();
  // Z and the scratch matrix take the memory of Q and K once N and P are computed.
  static constexpr constant int z = 0;
  static constexpr constant int scratch = z + packed_offset(C / 16) * Wide<In>::bytes;
  static constexpr constant int scratch_end = scratch + C * (C + 8) * Wide<In>::bytes;
  static constexpr constant int n = !ERASES || q_end > scratch_end ? q_end : scratch_end;
  static constexpr constant int blocks = n + (ERASES ? C * (C + 8) * Wide<In>::bytes : 0);
  static constexpr constant int decay = blocks + (ERASES ? C * 17 * 4 : 0);
  static constexpr constant int gate = decay + padded(Decay<C>::floats * 4);
  static constexpr constant int rate = gate + C * 4;
  static constexpr constant int arrivals = rate + C * 4;
  static constexpr constant int bytes = arrivals + 16;
};

// Computes diagonal tile b of Z by forward substitution. Each of 16 lanes computes one column.
template <typename Store>
inline void solve_diagonal(Store z, threadgroup const float* block, threadgroup const float* rate, int b, int lane) {
  if (lane < 16) {
    float x[16];
    DELTATUNE_UNROLL
    for (int i = 0; i < 16; ++i) {
      float sum = i > lane ? block[i * 17 + lane] : 0.0f, other = 0.0f;
      DELTATUNE_UNROLL
      for (int j = 0; j < i; ++j) {
        if (j % 2) other += block[i * 17 + j] * x[j];
        else sum -= block[i * 17 + j] * x[j];
      }
      const float value = sum - other;
      z.put(packed_offset(b) + i * packed_stride(b) + b * 16 + lane, value);
      x[i] = rate[i] * value;
    }
  }
}

// Computes Z from N, with the diagonal tiles of N in `diagonal` in fp32. `scratch` has the size of N. The caller puts a
// barrier before the call; the function ends with one.
template <int C, int GROUPS, typename Z, typename N>
inline void solve_triangle(Place at, Z z, N scratch, N n, threadgroup const float* diagonal,
                           threadgroup const float* rate) {
  constexpr int blocks = C / 16, square = C + 8;
  for (int b = at.group; b < blocks; b += GROUPS)
    solve_diagonal(z, diagonal + b * 16 * 17, rate + b * 16, b, at.lane);
  barrier();
  // Merges pairs of blocks of 1, 2, ... tiles per side. With Y = N - N beta Z_upper for the block between the two, Z is
  // Y - Z_lower beta Y there. Each group computes tiles of its own.
  DELTATUNE_UNROLL
  for (int side = 1; side < blocks; side *= 2) {
    constexpr int most = (blocks * blocks / 4 + GROUPS - 1) / GROUPS;
    Tile y[most > 0 ? most : 1];
    DELTATUNE_UNROLL
    for (int m = 0; m < most; ++m) {
      const int index = at.group + m * GROUPS;
      if (index >= blocks / 2 * side) continue;
      const int top = index / (side * side) * 2 * side;
      const int row = top + side + index / side % side, column = top + index % side;
      Tile sum;
      tile_clear(sum);
      for (int c = column; c < top + side; ++c) {
        Tile zt = tile_of(packed(z, c, column), at.lane);
        DELTATUNE_UNROLL
        for (int e = 0; e < 8; ++e) zt.set(e, rate[c * 16 + tile_row(e, at.lane)] * zt.get(e));
        put_tile<true, true>(scratch, column * 16 * square + row * 16, square, zt, 16, 16, at.lane);
        group_barrier();
        multiply(sum, left(straight(n, square, row * 16, c * 16), at.lane),
                 right(straight(scratch, square, column * 16, row * 16), at.lane), at.lane);
        group_barrier();
      }
      y[m] = tile_of(straight(n, square, row * 16, column * 16), at.lane);
      DELTATUNE_UNROLL
      for (int e = 0; e < 8; ++e) {
        y[m].set(e, y[m].get(e) - sum.get(e));
        sum.set(e, rate[row * 16 + tile_row(e, at.lane)] * y[m].get(e));
      }
      put_tile<true, true>(scratch, row * 16 * square + column * 16, square, sum, 16, 16, at.lane);
    }
    barrier();
    DELTATUNE_UNROLL
    for (int m = 0; m < most; ++m) {
      const int index = at.group + m * GROUPS;
      if (index >= blocks / 2 * side) continue;
      const int top = index / (side * side) * 2 * side;
      const int row = top + side + index / side % side, column = top + index % side;
      Tile sum;
      tile_clear(sum);
      for (int c = top + side; c <= row; ++c)
        multiply(sum, left(packed(z, row, c), at.lane),
                 right(straight(scratch, square, c * 16, column * 16), at.lane), at.lane);
      DELTATUNE_UNROLL
      for (int e = 0; e < 8; ++e) y[m].set(e, y[m].get(e) - sum.get(e));
      put_tile<true, true>(z, packed_offset(row) + column * 16, packed_stride(row), y[m], 16, 16, at.lane);
    }
    barrier();
  }
}

// Computes the scans' operands of each chunk, which do not depend on its state. Each block does one chunk; the grid is
// (chunks, HV, B).
// Inputs: q, k [B,T,HK,DK]; log_g, beta [B,T,HV]; mask [B,T] and segments [B,T], or Nothing.
// Outputs, for each of [B,HV,chunks]: solve, which is Z, and scores, which is P, both packed triangles; factors [3,C],
// which are G, E and beta (0 where a step is not live); without an erase, factors [2,C].
// The threads copy Q and K to shared memory, and one thread per position computes its gate. Each group then takes pairs
// of tiles of P and N, and solve_triangle computes Z.
template <typename In, int C, int DK, int HK, int HV, int GROUPS, bool UNSTAGED, bool MASKED, bool SEGMENTED,
          bool ERASES, typename PQ, typename PK, typename PL, typename PB, typename PM, typename PZ, typename OP>
inline void gated_delta_prepare(Place at, threadgroup char* memory, int length, PQ q, PK k, PL log_g, PB beta, PM mask,
                                PZ segments, GLOBAL float* solve, OP scores,
                                GLOBAL float* factors) {
  using Memory = PrepareMemory<In, C, DK, UNSTAGED, ERASES>;
  constexpr int threads = GROUPS * 32, stride = stride_of(DK), square = C + 8, blocks = C / 16, columns = padded(DK);
  constexpr int pairs = blocks * (blocks + 1) / 2, triangle = packed_offset(blocks), numbers = (ERASES ? 3 : 2) * C;
  const int chunks = (length + C - 1) / C, t0 = at.x * C;
  const long chunk = ((long)at.z * HV + at.y) * chunks + at.x;
  const Exact<In> staged_k = shared_at<Exact<In>>(memory, Memory::k, C * stride);
  const Exact<In> staged_q = shared_at<Exact<In>>(memory, Memory::q, C * stride);
  const Wide<In> z = shared_at<Wide<In>>(memory, Memory::z, triangle);
  const Wide<In> scratch = shared_at<Wide<In>>(memory, Memory::scratch, C * square);
  const Wide<In> n = shared_at<Wide<In>>(memory, Memory::n, C * square);
  threadgroup float* diagonal = reinterpret_cast<threadgroup float*>(memory + Memory::blocks);
  const Decay<C> decay = decay_at<C>(reinterpret_cast<threadgroup float*>(memory + Memory::decay));
  threadgroup float* gate = reinterpret_cast<threadgroup float*>(memory + Memory::gate);
  threadgroup float* rate = reinterpret_cast<threadgroup float*>(memory + Memory::rate);
  const auto live = alive<MASKED>(mask, at.z, t0, length);

  const long from = (((long)at.z * length + t0) * HK + at.y / (HV / HK)) * DK;
  const auto keys = Choice<UNSTAGED>::of(unstaged_rows<DK>(k, from, HK * DK, live), staged_k);
  const auto queries = Choice<UNSTAGED>::of(unstaged_rows<DK>(q, from, HK * DK, live), staged_q);
  arrivals_start(memory + Memory::arrivals, at.index);
  Arrival arrival = arrival_at(memory + Memory::arrivals, 0);
  if (!UNSTAGED) {
    copy_rows<C, columns, threads>(staged_k, stride, k + from, HK * DK, DK, live, arrival, at.index);
    copy_rows<C, columns, threads>(staged_q, stride, q + from, HK * DK, DK, live, arrival, at.index);
  }
  copies_sent(arrival, at.index);
  if (at.index < C) {
    gate[at.index] = gate_of<SEGMENTED>(at.index, live, log_g, segments, at.z, at.y, HV, t0, length);
    const bool on = ERASES && live(at.index);
    rate[at.index] =
        on ? static_cast<float>(beta[((long)at.z * length + t0 + (on ? at.index : 0)) * HV + at.y]) : 0.0f;
  }
  barrier();
  fill_decay<C>(decay, gate, at.index);
  copies_wait(arrival, 0);
  barrier();
  if (at.index < C) {
    factors[chunk * numbers + at.index] = decay.before(at.index);
    factors[chunk * numbers + C + at.index] = decay.after(at.index);
    if (ERASES) factors[chunk * numbers + 2 * C + at.index] = rate[at.index];
  }
  for (int pair = at.group; pair < pairs; pair += GROUPS) {
    int row = 0;
    while ((row + 1) * (row + 2) / 2 <= pair) ++row;
    const int column = pair - row * (row + 1) / 2;
    Tile qk, kk;
    tile_clear(qk);
    tile_clear(kk);
    DELTATUNE_UNROLL
    for (int c = 0; c < columns; c += 16) {
      const auto b = right(turned(keys, stride, c, column * 16), at.lane);
      multiply(qk, left(straight(queries, stride, row * 16, c), at.lane), b, at.lane);
      if (ERASES) multiply(kk, left(straight(keys, stride, row * 16, c), at.lane), b, at.lane);
    }
    const float middle = decay.between(row, column);
    DELTATUNE_UNROLL
    for (int e = 0; e < 8; ++e) {
      const int i = row * 16 + tile_row(e, at.lane), j = column * 16 + tile_column(e, at.lane);
      const float d = decay.at(row == column, i, j, middle);
      qk.set(e, d * qk.get(e));
      kk.set(e, i > j ? d * kk.get(e) : 0.0f);
      if (ERASES && row == column) diagonal[i * 17 + (j & 15)] = kk.get(e);
    }
    put_tile<true, true>(stored_at<typename Choose<ERASES, Wide<In>, Saved<In>>::type>(scores, chunk, triangle), packed_offset(row) + column * 16,
                         packed_stride(row), qk, 16, 16, at.lane);
    if (ERASES && row != column) put_tile<true, true>(n, row * 16 * square + column * 16, square, kk, 16, 16, at.lane);
    // A compiler that sees a loop here reads all of the row before it, into registers that a lane does not have.
    if (pairs == 1) break;
  }
  if (!ERASES) return;
  barrier();
  solve_triangle<C, GROUPS>(at, z, scratch, n, diagonal, rate);
  write_block<triangle, threads>(stored_at<Wide<In>>(solve, chunk, triangle), z, at.index);
}
