// A linear layer for one token of each row, for ops/decoding/linear_token.py: at most some hundred rows, so that the
// weight is read once and its reading takes all the time. It goes from device memory straight to the fragments of the
// products. The groups of a block share out the inputs, and add up their sums at the end in a fixed order.
//
// A block computes 16 TILES outputs of 8 LINES rows. With PARTS 2 half of the tiles belong to a second weight, and the
// result is silu(first) second.

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

template <int PARTS, int TILES, int LINES, typename T, typename S, typename N>
inline void load_token(thread TokenInputs<TILES, LINES>& to, TokenPlace at, int start, const GLOBAL T* x,
                       const GLOBAL T* weight, S second, N norm) {
  const int g = at.lane >> 2, k = start + (at.lane & 3) * 8;
  const bool counts = k < at.inputs;
  DELTATUNE_UNROLL
  for (int i = 0; i < TILES; ++i) {
    constexpr int EACH = TILES / PARTS;
    const GLOBAL T* matrix = of_part(weight, second, i / EACH);
    DELTATUNE_UNROLL
    for (int upper = 0; upper < 2; ++upper) {
      const long line = within(at.output + i % EACH * 16 + upper * 8 + g, at.outputs);
      load_eight(to.weight[i][upper], matrix + line * at.inputs + k, counts, true);
    }
  }
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

// The term of an adapter in a row's output: its element of h b, h [rows, rank] and b [rank, outputs].
inline float of_adapter(Nothing, Nothing, int, long, int, int) { return 0.0f; }
template <typename T>
inline float of_adapter(const GLOBAL T* h, const GLOBAL T* b, int rank, long row, int output, int outputs) {
  float sum = 0.0f;
  for (int i = 0; i < rank; ++i)
    sum += static_cast<float>(h[row * rank + i]) * static_cast<float>(b[(long)i * outputs + output]);
  return sum;
}

// A result with its residual, if there is one.
template <typename T>
inline T with_residual(float y, Nothing, long) { return static_cast<T>(y); }
template <typename T>
inline T with_residual(float y, const GLOBAL T* residual, long place) {
  return static_cast<T>(rounded_to<T>(y) + static_cast<float>(residual[place]));
}

// Adds up the groups' sums, and writes the block's results.
template <int GROUPS, int TILES, int LINES, int PARTS, typename T, typename H, typename B, typename C, typename R>
inline void write_token(Place at, TokenPlace place, threadgroup char* memory, int rank, H h, B b, C second_b, R residual,
                        GLOBAL T* y) {
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
      const auto matrix = of_part(b, second_b, part);
      sum = sum * factors[row] + of_adapter(h, matrix, rank, place.row + row, place.output + output, place.outputs);
      sums[part] = rounded_to<T>(sum);
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

// x [rows, inputs], weight and second [outputs, inputs], norm [inputs], h [rows, rank], b and second_b [rank, outputs],
// residual and y [rows, outputs].
template <int GROUPS, int TILES, int LINES, int PARTS, typename T, typename S, typename N, typename H, typename B,
          typename C, typename R>
inline void linear_token(Place at, threadgroup char* memory, int rows, int inputs, int outputs, int rank, float eps,
                         const GLOBAL T* x, const GLOBAL T* weight, S second, N norm, H h, B b, C second_b, R residual,
                         GLOBAL T* y) {
  using Memory = LinearTokenMemory<GROUPS, TILES, LINES>;
  const TokenPlace place{at.x * (16 * TILES / PARTS), at.y * 8 * LINES, rows, inputs, outputs, at.lane,
                         starts_at_multiple<16>(x)};
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
  load_token<PARTS>(now, place, at.group * 32, x, weight, second, norm);
  DELTATUNE_ROLLED
  for (int start = at.group * 32; start < inputs; start += 2 * GROUPS * 32) {
    load_token<PARTS>(next, place, start + GROUPS * 32, x, weight, second, norm);
    multiply_token<T>(sums, squares, now, norm);
    load_token<PARTS>(now, place, start + 2 * GROUPS * 32, x, weight, second, norm);
    multiply_token<T>(sums, squares, next, norm);
  }
  keep_token<GROUPS>(at, memory, sums, squares);
  barrier();
  threadgroup float* factors = reinterpret_cast<threadgroup float*>(memory + Memory::factors);
  const threadgroup float* all_squares = reinterpret_cast<const threadgroup float*>(memory + Memory::squares);
  for (int row = at.index; row < 8 * LINES; row += 32 * GROUPS)
    factors[row] = factor_of<GROUPS, LINES>(all_squares, row, inputs, eps, norm);
  barrier();
  write_token<GROUPS, TILES, LINES, PARTS, T>(at, place, memory, rank, h, b, second_b, residual, y);
}
