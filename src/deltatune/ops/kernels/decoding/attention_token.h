// Attention of one query a head to the keys and values of its row so far, for ops/decoding/attention_token.py. Rows of a
// batch have different lengths. A block computes HEADS query heads of one row that share a key head. LANES lanes share a
// key, with eight elements each, so that a block reads STEP keys at a time; each such share of the lanes has a running
// maximum, sum and result of its own, which are joined at the end.

template <int GROUPS, int HEADS, int SIZE>
struct AttentionTokenMemory {
  static constexpr constant int shares = GROUPS * 256 / SIZE;
  // The results of each share for each head, and then the maxima and the sums.
  static constexpr constant int numbers = 4 * shares * HEADS * SIZE;
  static constexpr constant int bytes = numbers + 8 * shares * HEADS;
};

// Joins the shares of a block: with M the largest maximum, the sum of 2^(maximum - M) result over that of
// 2^(maximum - M) sum.
template <int GROUPS, int HEADS, int SIZE, typename T>
inline void join_shares(Place at, threadgroup char* memory, GLOBAL T* y) {
  using Memory = AttentionTokenMemory<GROUPS, HEADS, SIZE>;
  const threadgroup float* results = reinterpret_cast<const threadgroup float*>(memory);
  const threadgroup float* numbers = reinterpret_cast<const threadgroup float*>(memory + Memory::numbers);
  for (int c = at.index; c < HEADS * SIZE; c += 32 * GROUPS) {
    const int head = c / SIZE;
    float most = numbers[2 * head];
    for (int i = 1; i < Memory::shares; ++i) most = metal::fmax(most, numbers[2 * (i * HEADS + head)]);
    float sum = 0.0f, result = 0.0f;
    for (int i = 0; i < Memory::shares; ++i) {
      const float factor = DELTATUNE_EXP2(numbers[2 * (i * HEADS + head)] - most);
      sum += factor * numbers[2 * (i * HEADS + head) + 1];
      result += factor * results[i * HEADS * SIZE + c];
    }
    y[c] = static_cast<T>(result / sum);
  }
}

// q and y are [B, heads, SIZE], keys and values [B, heads / RATIO, capacity, SIZE], of which row b has lengths[b].
// `scale` has the factor log2(e), for exponents of two.
template <int GROUPS, int HEADS, int RATIO, int SIZE, typename T, typename L>
inline void attention_token(Place at, threadgroup char* memory, int heads, int capacity, float scale,
                            const GLOBAL T* q, const GLOBAL T* keys, const GLOBAL T* values, L lengths, GLOBAL T* y) {
  using Memory = AttentionTokenMemory<GROUPS, HEADS, SIZE>;
  constexpr int LANES = SIZE / 8, STEP = GROUPS * 32 / LANES, DEPTH = 4;
  const int piece = at.index % LANES, share = at.index / LANES;
  const long first_head = (long)at.y * heads + at.x * HEADS;
  const long start = ((long)at.y * (heads / RATIO) + at.x * HEADS / RATIO) * capacity;
  const int length = lengths[at.y];

  float query[HEADS][8], result[HEADS][8], most[HEADS], sum[HEADS];
  DELTATUNE_UNROLL
  for (int h = 0; h < HEADS; ++h) {
    take(query[h], q, (first_head + h) * LANES + piece);
    // No score is as low, and differences from it are no NaN.
    most[h] = -1e30f;
    sum[h] = 0.0f;
    DELTATUNE_UNROLL
    for (int i = 0; i < 8; ++i) {
      query[h][i] *= scale;
      result[h][i] = 0.0f;
    }
  }
  // All lanes of a group go as often through this loop, since they exchange numbers in it.
  for (int from = 0; from < length; from += STEP * DEPTH) {
    // MLX's arrays start on 16 bytes, and so does each key.
    Octet<T> of_keys[DEPTH], of_values[DEPTH];
    DELTATUNE_UNROLL
    for (int n = 0; n < DEPTH; ++n) {
      const int key = from + n * STEP + share;
      const long place = (start + (key < length ? key : 0)) * LANES + piece;
      fetch(of_keys[n], keys, place, true);
      fetch(of_values[n], values, place, true);
    }
    DELTATUNE_UNROLL
    for (int n = 0; n < DEPTH; ++n) {
      const bool real = from + n * STEP + share < length;
      float key[8], value[8];
      widen(key, of_keys[n]);
      widen(value, of_values[n]);
      DELTATUNE_UNROLL
      for (int h = 0; h < HEADS; ++h) {
        const float score = row_dot<LANES>(query[h], key);
        const float higher = real ? metal::fmax(most[h], score) : most[h];
        const float kept = DELTATUNE_EXP2(most[h] - higher), weight = real ? DELTATUNE_EXP2(score - higher) : 0.0f;
        most[h] = higher;
        sum[h] = sum[h] * kept + weight;
        DELTATUNE_UNROLL
        for (int i = 0; i < 8; ++i) result[h][i] = result[h][i] * kept + (real ? weight * value[i] : 0.0f);
      }
    }
  }
  threadgroup float* results = reinterpret_cast<threadgroup float*>(memory);
  threadgroup float* numbers = reinterpret_cast<threadgroup float*>(memory + Memory::numbers);
  DELTATUNE_UNROLL
  for (int h = 0; h < HEADS; ++h) {
    DELTATUNE_UNROLL
    for (int i = 0; i < 8; ++i) results[(share * HEADS + h) * SIZE + 8 * piece + i] = result[h][i];
    if (piece != 0) continue;
    numbers[2 * (share * HEADS + h)] = most[h];
    numbers[2 * (share * HEADS + h) + 1] = sum[h];
  }
  barrier();
  join_shares<GROUPS, HEADS, SIZE>(at, memory, y + first_head * SIZE);
}
