// Attention of one query a head to the keys and values of its row so far, for ops/decoding/attention_token.py and
// gated_attention_token.py. Rows of a batch have different lengths. A block computes HEADS query heads of one row that
// share a key head. LANES lanes share a key, with eight elements each, so that a block reads STEP keys at a time; each
// such share of the lanes has a running maximum, sum and result of its own, which are joined at the end.

template <int GROUPS, int HEADS, int SIZE>
struct AttentionTokenMemory {
  static constexpr constant int shares = GROUPS * 256 / SIZE;
  // The results of each share for each head, and then the maxima and the sums.
  static constexpr constant int numbers = 4 * shares * HEADS * SIZE;
  static constexpr constant int bytes = numbers + 8 * shares * HEADS;
};

// Joins the shares of a block: with M the largest maximum, the sum of 2^(maximum - M) result over that of
// 2^(maximum - M) sum. `finish` turns it into the output.
template <int GROUPS, int HEADS, int SIZE, typename T, typename F>
inline void join_shares(Place at, threadgroup char* memory, GLOBAL T* y, F finish) {
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
    y[c] = finish(result / sum, head, c % SIZE);
  }
}
template <typename T>
struct Plain {
  inline T operator()(float y, int, int) const { return static_cast<T>(y); }
};

// A lane's parts of HEADS queries, and of their attention to the keys that its share has read so far.
template <int HEADS>
struct Attended {
  float query[HEADS][8], result[HEADS][8], most[HEADS], sum[HEADS];

  inline void start() {
    DELTATUNE_UNROLL
    for (int h = 0; h < HEADS; ++h) {
      // No score is as low, and differences from it are no NaN.
      most[h] = -1e30f;
      sum[h] = 0.0f;
      DELTATUNE_UNROLL
      for (int i = 0; i < 8; ++i) result[h][i] = 0.0f;
    }
  }
  // Attends to one more key, if it is `real`. All lanes of a group call this together.
  template <int LANES>
  inline void attend(const thread float (&key)[8], const thread float (&value)[8], bool real) {
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
};

// Attends to the first `length` keys from `start` on, which counts keys.
template <int GROUPS, int HEADS, int SIZE, typename T>
inline void attend_to_row(Place at, thread Attended<HEADS>& own, const GLOBAL T* keys, const GLOBAL T* values, long start,
                          int length) {
  // Numbers of 4 bytes are read two keys ahead: four, beside four heads, would need 139 of an Apple lane's 128 registers.
  constexpr int LANES = SIZE / 8, STEP = GROUPS * 32 / LANES, DEPTH = sizeof(T) == 4 ? 2 : 4;
  const int piece = at.index % LANES, share = at.index / LANES;
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
      float key[8], value[8];
      widen(key, of_keys[n]);
      widen(value, of_values[n]);
      own.template attend<LANES>(key, value, from + n * STEP + share < length);
    }
  }
}

// Puts the shares' results into shared memory, joins them and writes the block's heads.
template <int GROUPS, int HEADS, int SIZE, typename T, typename F>
inline void write_heads(Place at, threadgroup char* memory, const thread Attended<HEADS>& own, GLOBAL T* y, F finish) {
  constexpr int LANES = SIZE / 8;
  const int piece = at.index % LANES, share = at.index / LANES;
  threadgroup float* results = reinterpret_cast<threadgroup float*>(memory);
  threadgroup float* numbers =
      reinterpret_cast<threadgroup float*>(memory + AttentionTokenMemory<GROUPS, HEADS, SIZE>::numbers);
  DELTATUNE_UNROLL
  for (int h = 0; h < HEADS; ++h) {
    DELTATUNE_UNROLL
    for (int i = 0; i < 8; ++i) results[(share * HEADS + h) * SIZE + 8 * piece + i] = own.result[h][i];
    if (piece != 0) continue;
    numbers[2 * (share * HEADS + h)] = own.most[h];
    numbers[2 * (share * HEADS + h) + 1] = own.sum[h];
  }
  barrier();
  join_shares<GROUPS, HEADS, SIZE>(at, memory, y, finish);
}

// q and y are [B, heads, SIZE], keys and values [B, heads / RATIO, capacity, SIZE], of which row b has lengths[b].
// `scale` has the factor log2(e), for exponents of two.
template <int GROUPS, int HEADS, int RATIO, int SIZE, typename T, typename L>
inline void attention_token(Place at, threadgroup char* memory, int heads, int capacity, float scale,
                            const GLOBAL T* q, const GLOBAL T* keys, const GLOBAL T* values, L lengths, GLOBAL T* y) {
  constexpr int LANES = SIZE / 8;
  const long first_head = (long)at.y * heads + at.x * HEADS;
  Attended<HEADS> own;
  own.start();
  DELTATUNE_UNROLL
  for (int h = 0; h < HEADS; ++h) {
    take(own.query[h], q, (first_head + h) * LANES + at.index % LANES);
    DELTATUNE_UNROLL
    for (int i = 0; i < 8; ++i) own.query[h][i] *= scale;
  }
  const long start = ((long)at.y * (heads / RATIO) + at.x * HEADS / RATIO) * capacity;
  attend_to_row<GROUPS, HEADS, SIZE>(at, own, keys, values, start, lengths[at.y]);
  write_heads<GROUPS, HEADS, SIZE>(at, memory, own, y + first_head * SIZE, Plain<T>{});
}
