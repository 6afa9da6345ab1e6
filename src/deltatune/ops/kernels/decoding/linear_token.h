// A linear layer for one token of each row, for ops/decoding/linear_token.py: at most some hundred rows, so that the
// weight is read once and its reading takes all the time. It goes from device memory straight to the fragments of the
// products. The groups of a block share out the inputs, and add up their sums at the end in a fixed order.
//
// A block computes 16 TILES outputs of 8 LINES rows. With PARTS 2 half of the tiles belong to a second weight, and the
// result is silu(first) second. With adapters the first blocks of some rows compute the product with their narrow factor
// in the same way, for which the others wait before they add the product of that with the other factor to their sums.

// The distance of rows of sums: four floats more than a multiple of 32 or 16 spread a group's stores over all banks.
inline constexpr int token_stride(int tiles) { return 16 * tiles + 4; }

template <int GROUPS, int TILES, int LINES>
struct LinearTokenMemory {
  // Each group's sums, then its sums of the squares of the rows, and then the factors of the rows' norms.
  static constexpr constant int sums = 0, squares = GROUPS * 8 * LINES * token_stride(TILES) * 4;
  static constexpr constant int factors = squares + GROUPS * 8 * LINES * 4;
  static constexpr constant int bytes = factors + 8 * LINES * 4;
};

// Loads eight elements, one by one if they may not be ALIGNED. Those past the end of the row are zeros.
template <typename P>
inline void load_eight(thread unsigned (&to)[4], P from, bool counts, bool aligned) {
  load_pairs<true>(to, from, counts && aligned ? 8 : 0);
  if (!aligned) load_pairs<false>(to, from, counts ? 8 : 0);
}

// A lane's share of 32 inputs: the eight from 8 t on of row g of each fragment. Products of 16 take them in the same
// order on both sides.
template <int TILES, int LINES>
struct TokenInputs {
  unsigned weight[TILES][2][4], x[LINES][4], norm[4];
};

// The weight of a norm of the rows, where there is one.
inline void load_norm(thread unsigned (&)[4], Nothing, int, bool) {}
template <typename T>
inline void load_norm(thread unsigned (&to)[4], const GLOBAL T* norm, int k, bool counts) {
  load_eight(to, norm + k, counts, true);
}

// Multiplies eight elements by the norm's weight, and adds up their squares before.
template <typename T>
inline void weigh(thread unsigned (&)[4], const thread unsigned (&)[4], thread float&, Nothing) {}
template <typename T, typename N>
inline void weigh(thread unsigned (&x)[4], const thread unsigned (&norm)[4], thread float& squares, const GLOBAL N*) {
  DELTATUNE_UNROLL
  for (int i = 0; i < 4; ++i) {
    const float first = first_of<T>(x[i]), second = second_of<T>(x[i]);
    squares += first * first + second * second;
    x[i] = pair_of<T>(first * first_of<T>(norm[i]), second * second_of<T>(norm[i]));
  }
}

// Where a lane's loads start: the block's first output and row, the matrices' sizes, and whether x may be loaded whole.
struct TokenPlace {
  int output, row, rows, inputs, outputs, lane;
  bool aligned;
};

// The matrix of a part: the second one, if the call has one.
inline Nothing of_part(Nothing, Nothing, int) { return Nothing{}; }
template <typename T>
inline const GLOBAL T* of_part(const GLOBAL T* weight, Nothing, int) { return weight; }
template <typename T>
inline const GLOBAL T* of_part(const GLOBAL T* weight, const GLOBAL T* second, int part) {
  return part == 0 ? weight : second;
}

template <int PARTS, int TILES, int LINES, typename T, typename S>
inline void load_weights(thread TokenInputs<TILES, LINES>& to, TokenPlace at, int start, const GLOBAL T* weight,
                         S second) {
  const int g = at.lane >> 2, k = start + (at.lane & 3) * 8;
  DELTATUNE_UNROLL
  for (int i = 0; i < TILES; ++i) {
    constexpr int EACH = TILES / PARTS;
    const GLOBAL T* matrix = of_part(weight, second, i / EACH);
    DELTATUNE_UNROLL
    for (int upper = 0; upper < 2; ++upper) {
      const long line = within(at.output + i % EACH * 16 + upper * 8 + g, at.outputs);
      load_eight(to.weight[i][upper], matrix + line * at.inputs + k, k < at.inputs, true);
    }
  }
}

template <int PARTS, int TILES, int LINES, typename T, typename S, typename N>
inline void load_token(thread TokenInputs<TILES, LINES>& to, TokenPlace at, int start, const GLOBAL T* x,
                       const GLOBAL T* weight, S second, N norm) {
  const int g = at.lane >> 2, k = start + (at.lane & 3) * 8;
  const bool counts = k < at.inputs;
  load_weights<PARTS>(to, at, start, weight, second);
  DELTATUNE_UNROLL
  for (int m = 0; m < LINES; ++m)
    load_eight(to.x[m], x + (long)within(at.row + m * 8 + g, at.rows) * at.inputs + k, counts, at.aligned);
  load_norm(to.norm, norm, k, counts);
}

template <typename T, int TILES, int LINES, typename N>
inline void multiply_token(thread float (&sums)[TILES][LINES][4], thread float (&squares)[LINES],
                           thread TokenInputs<TILES, LINES>& inputs, N norm) {
  DELTATUNE_UNROLL
  for (int m = 0; m < LINES; ++m) {
    weigh<T>(inputs.x[m], inputs.norm, squares[m], norm);
    DELTATUNE_UNROLL
    for (int n = 0; n < TILES; ++n) {
      DELTATUNE_UNROLL
      for (int i = 0; i < 4; i += 2) {
        const unsigned left[4] = {inputs.weight[n][0][i], inputs.weight[n][1][i], inputs.weight[n][0][i + 1],
                                  inputs.weight[n][1][i + 1]};
        Fragments<T>::multiply(sums[n][m], left, inputs.x[m][i], inputs.x[m][i + 1]);
      }
    }
  }
}

// Puts a group's sums, and those of the squares of its rows, into shared memory.
template <int GROUPS, int TILES, int LINES>
inline void keep_token(Place at, threadgroup char* memory, const thread float (&sums)[TILES][LINES][4],
                       const thread float (&squares)[LINES]) {
  using Memory = LinearTokenMemory<GROUPS, TILES, LINES>;
  threadgroup float* all = reinterpret_cast<threadgroup float*>(memory + Memory::sums);
  threadgroup float* all_squares = reinterpret_cast<threadgroup float*>(memory + Memory::squares);
  const int g = at.lane >> 2, t = at.lane & 3, first = at.group * 8 * LINES;
  DELTATUNE_UNROLL
  for (int m = 0; m < LINES; ++m) {
    // The four lanes of a row of a fragment have the squares of different inputs.
    const float of_two = squares[m] + lane_exchange(squares[m], 1), of_row = of_two + lane_exchange(of_two, 2);
    if (t == 0) all_squares[first + m * 8 + g] = of_row;
    DELTATUNE_UNROLL
    for (int n = 0; n < TILES; ++n) {
      DELTATUNE_UNROLL
      for (int e = 0; e < 4; ++e)
        all[(first + m * 8 + t * 2 + (e & 1)) * token_stride(TILES) + n * 16 + e / 2 * 8 + g] = sums[n][m][e];
    }
  }
}

// Whether a block computes the product with the adapters' narrow factor, which the first `narrow` of them do.
inline bool is_narrow(Nothing, int, int) { return false; }
template <typename T>
inline bool is_narrow(const GLOBAL T*, int block, int narrow) { return block < narrow; }

// The narrow factor in the place of a weight, if it is to be and there is one.
template <typename P>
inline Nothing narrow_or(bool, P, Nothing) { return Nothing{}; }
template <typename T>
inline const GLOBAL T* narrow_or(bool, Nothing, const GLOBAL T* weight) { return weight; }
template <typename T>
inline const GLOBAL T* narrow_or(bool narrow, const GLOBAL T* a, const GLOBAL T* weight) { return narrow ? a : weight; }

// The two counters of a block of rows: of the narrow blocks that have written h, and of those that have read it.
inline Nothing counters_of(Nothing, int) { return Nothing{}; }
inline GLOBAL int* counters_of(GLOBAL int* counters, int rows) { return counters + 2 * rows; }

// Adds the product of h [rows, rank], which the `narrow` first blocks write, and b [outputs, rank] to the sums. The norm
// of the rows multiplies it, too, since h is the product of rows without their norms' factors.
template <int GROUPS, int PARTS, int TILES, int LINES>
inline void add_adapters(thread float (&)[TILES][LINES][4], TokenPlace, int, int, int, Nothing, Nothing, Nothing,
                         Nothing) {}
template <int GROUPS, int PARTS, int TILES, int LINES, typename T, typename C>
inline void add_adapters(thread float (&sums)[TILES][LINES][4], TokenPlace at, int group, int rank, int narrow,
                         const GLOBAL T* b, C second_b, GLOBAL T* h, GLOBAL int* arrived) {
  TokenInputs<TILES, LINES> share;
  float none[LINES];
  at.inputs = rank;
  DELTATUNE_ROLLED
  for (int start = group * 32; start < rank; start += GROUPS * 32) {
    const int g = at.lane >> 2, k = start + (at.lane & 3) * 8;
    load_weights<PARTS>(share, at, start, b, second_b);
    wait_for(arrived, narrow);
    DELTATUNE_UNROLL
    for (int m = 0; m < LINES; ++m)
      load_written(share.x[m], h + (long)within(at.row + m * 8 + g, at.rows) * rank + k, k < rank);
    multiply_token<T>(sums, none, share, Nothing{});
  }
}

// Writes a narrow block's sums over the groups to h, and lets the other blocks of these rows know.
template <int GROUPS, int TILES, int LINES, int PARTS>
inline void write_narrow(Place, TokenPlace, const threadgroup char*, Nothing, Nothing) {}
template <int GROUPS, int TILES, int LINES, int PARTS, typename T>
inline void write_narrow(Place at, TokenPlace place, const threadgroup char* memory, GLOBAL T* h, GLOBAL int* arrived) {
  constexpr int RANKS = 16 * TILES / PARTS, STRIDE = token_stride(TILES);
  const threadgroup float* all =
      reinterpret_cast<const threadgroup float*>(memory + LinearTokenMemory<GROUPS, TILES, LINES>::sums);
  for (int i = at.index; i < 8 * LINES * RANKS; i += 32 * GROUPS) {
    const int row = i / RANKS, rank = i % RANKS;
    if (place.row + row >= place.rows || place.output + rank >= place.outputs) continue;
    float sum = 0.0f;
    DELTATUNE_UNROLL
    for (int group = 0; group < GROUPS; ++group) sum += all[(group * 8 * LINES + row) * STRIDE + rank];
    h[(long)(place.row + row) * place.outputs + place.output + rank] = static_cast<T>(sum);
  }
  barrier();
  if (at.index == 0) arrive(arrived);
}
// The last of `count` blocks that have read h makes the counters zero again, as the next launch needs them.
inline void leave_adapters(Nothing, int) {}
inline void leave_adapters(GLOBAL int* arrived, int count) {
  if (is_last_of(arrived + 1, count)) arrived[0] = 0;
}

// A result with its residual, if there is one.
template <typename T>
inline T with_residual(float y, Nothing, long) { return static_cast<T>(y); }
template <typename T>
inline T with_residual(float y, const GLOBAL T* residual, long place) {
  return static_cast<T>(rounded_to<T>(y) + static_cast<float>(residual[place]));
}

// Adds up the groups' sums, and writes the block's results.
template <int GROUPS, int TILES, int LINES, int PARTS, typename T, typename R>
inline void write_token(Place at, TokenPlace place, threadgroup char* memory, R residual, GLOBAL T* y) {
  using Memory = LinearTokenMemory<GROUPS, TILES, LINES>;
  constexpr int OUTPUTS = 16 * TILES / PARTS, STRIDE = token_stride(TILES);
  const threadgroup float* all = reinterpret_cast<const threadgroup float*>(memory + Memory::sums);
  const threadgroup float* factors = reinterpret_cast<const threadgroup float*>(memory + Memory::factors);
  for (int i = at.index; i < 8 * LINES * OUTPUTS; i += 32 * GROUPS) {
    const int row = i / OUTPUTS, output = i % OUTPUTS;
    if (place.row + row >= place.rows || place.output + output >= place.outputs) continue;
    float sums[PARTS];
    DELTATUNE_UNROLL
    for (int part = 0; part < PARTS; ++part) {
      float sum = 0.0f;
      DELTATUNE_UNROLL
      for (int group = 0; group < GROUPS; ++group)
        sum += all[(group * 8 * LINES + row) * STRIDE + part * OUTPUTS + output];
      sums[part] = rounded_to<T>(sum * factors[row]);
    }
    float result = sums[0];
    if (PARTS == 2) result = sums[0] * sigmoid_of(sums[0]) * sums[PARTS - 1];
    const long target = (long)(place.row + row) * place.outputs + place.output + output;
    y[target] = with_residual<T>(result, residual, target);
  }
}

// The factors of the rows' norms: 1 where there is no norm.
template <int GROUPS, int LINES>
inline float factor_of(const threadgroup float*, int, int, float, Nothing) { return 1.0f; }
template <int GROUPS, int LINES, typename N>
inline float factor_of(const threadgroup float* squares, int row, int inputs, float eps, const GLOBAL N*) {
  float sum = 0.0f;
  DELTATUNE_UNROLL
  for (int group = 0; group < GROUPS; ++group) sum += squares[group * 8 * LINES + row];
  return metal::rsqrt(sum / inputs + eps);
}

// x [rows, inputs], weight and second [outputs, inputs], norm [inputs], a [rank, inputs], b and second_b [outputs, rank],
// residual and y [rows, outputs]; h [rows, rank], and two counters for each block of rows, which are zeros.
template <int GROUPS, int TILES, int LINES, int PARTS, typename T, typename S, typename N, typename A, typename B,
          typename C, typename R, typename M, typename H>
inline void linear_token(Place at, threadgroup char* memory, int rows, int inputs, int outputs, int rank, float eps,
                         const GLOBAL T* x, const GLOBAL T* weight, S second, N norm, A a, B b, C second_b, R residual,
                         M counters, H h, GLOBAL T* y) {
  using Memory = LinearTokenMemory<GROUPS, TILES, LINES>;
  constexpr int SHARE = 16 * TILES / PARTS;
  const int narrow_blocks = (rank + SHARE - 1) / SHARE;
  const bool narrow = is_narrow(a, at.x, narrow_blocks);
  const TokenPlace place{(narrow ? at.x : at.x - narrow_blocks) * SHARE, at.y * 8 * LINES, rows, inputs,
                         narrow ? rank : outputs, at.lane, starts_at_multiple<16>(x)};
  const auto arrived = counters_of(counters, at.y);
  const auto first = narrow_or(narrow, a, weight);
  const auto other = narrow_or(narrow, a, second);
  float sums[TILES][LINES][4], squares[LINES];
  DELTATUNE_UNROLL
  for (int m = 0; m < LINES; ++m) {
    squares[m] = 0.0f;
    DELTATUNE_UNROLL
    for (int n = 0; n < TILES; ++n) {
      DELTATUNE_UNROLL
      for (int e = 0; e < 4; ++e) sums[n][m][e] = 0.0f;
    }
  }
  // While one share of the inputs is multiplied the next one is loaded.
  TokenInputs<TILES, LINES> now, next;
  load_token<PARTS>(now, place, at.group * 32, x, first, other, norm);
  DELTATUNE_ROLLED
  for (int start = at.group * 32; start < inputs; start += 2 * GROUPS * 32) {
    load_token<PARTS>(next, place, start + GROUPS * 32, x, first, other, norm);
    multiply_token<T>(sums, squares, now, norm);
    load_token<PARTS>(now, place, start + 2 * GROUPS * 32, x, first, other, norm);
    multiply_token<T>(sums, squares, next, norm);
  }
  if (!narrow) add_adapters<GROUPS, PARTS>(sums, place, at.group, rank, narrow_blocks, b, second_b, h, arrived);
  keep_token<GROUPS>(at, memory, sums, squares);
  barrier();
  if (narrow) {
    write_narrow<GROUPS, TILES, LINES, PARTS>(at, place, memory, h, arrived);
    return;
  }
  if (at.index == 0) leave_adapters(arrived, (outputs + SHARE - 1) / SHARE);
  threadgroup float* factors = reinterpret_cast<threadgroup float*>(memory + Memory::factors);
  const threadgroup float* all_squares = reinterpret_cast<const threadgroup float*>(memory + Memory::squares);
  for (int row = at.index; row < 8 * LINES; row += 32 * GROUPS)
    factors[row] = factor_of<GROUPS, LINES>(all_squares, row, inputs, eps, norm);
  barrier();
  write_token<GROUPS, TILES, LINES, PARTS, T>(at, place, memory, residual, y);
}
