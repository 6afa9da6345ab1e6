// Samples a token of each row of logits, for ops/decoding/sampled_token.py. A block takes a row, of which it reads each
// logit once. The token with the largest sum of its logit and Gumbel's noise is one of the softmax's distribution.

template <int GROUPS>
struct SampledTokenMemory {
  static constexpr constant int bytes = 24 * GROUPS;
};

// Four rounds of Threefry-2x32, with their rotations.
template <int A>
inline void threefry_round(thread unsigned int& x, thread unsigned int& y) {
  x += y;
  y = ((y << A) | (y >> (32 - A))) ^ x;
}
template <int A, int B, int C, int D>
inline void threefry_rounds(thread unsigned int& x, thread unsigned int& y) {
  threefry_round<A>(x, y);
  threefry_round<B>(x, y);
  threefry_round<C>(x, y);
  threefry_round<D>(x, y);
}

// The random bits of number `at` of an array of `count`, as MLX draws them: twenty rounds of Threefry-2x32 give the bits
// of two numbers that lie half of the array apart. The middle one of an odd count has a counter of its own.
inline unsigned int random_bits(unsigned int at, unsigned int count, unsigned int key, unsigned int second) {
  const unsigned int half_way = count / 2 + count % 2, third = key ^ second ^ 0x1BD11BDAu;
  const bool is_first = at < half_way;
  const unsigned int partner = at < count / 2 ? at + half_way : 0;
  unsigned int x = (is_first ? at : at - half_way) + key, y = (is_first ? partner : at) + second;
  threefry_rounds<13, 15, 26, 6>(x, y);
  x += second;
  y += third + 1;
  threefry_rounds<17, 29, 16, 24>(x, y);
  x += third;
  y += key + 2;
  threefry_rounds<13, 15, 26, 6>(x, y);
  x += key;
  y += second + 3;
  threefry_rounds<17, 29, 16, 24>(x, y);
  x += second;
  y += third + 4;
  threefry_rounds<13, 15, 26, 6>(x, y);
  x += third;
  y += key + 5;
  return is_first ? x : y;
}
inline float gumbel(unsigned int bits) {
  const float uniform = static_cast<float>(bits) * 2.3283064365386963e-10f;
  // The largest number below 1 stands in the place of 1.
  return -metal::log(-metal::log(uniform < 1.0f ? uniform : 0.99999994f));
}
inline float exponential(float difference) {
  return DELTATUNE_EXP2(difference * 1.4426950408889634f);
}

// A share of a row: the largest logit, the sums of e = exp(logit - largest) and of e (logit - largest), and the largest
// sum of a logit and its noise, with its logit and token.
struct RowShare {
  float largest, sum, spread, score, logit;
  int token;

  inline void take(float x, float noise, int at) {
    if (x > largest) move_to(x);
    const float difference = x - largest, e = exponential(difference);
    sum += e;
    // A logit of -infinity adds nothing.
    if (e > 0.0f) spread += e * difference;
    if (x + noise > score) {
      score = x + noise;
      logit = x;
      token = at;
    }
  }
  inline void move_to(float higher) {
    const float difference = largest - higher, factor = exponential(difference);
    spread = factor > 0.0f ? factor * (spread + difference * sum) : 0.0f;
    sum *= factor;
    largest = higher;
  }
  inline void join(RowShare other) {
    if (other.largest > largest) move_to(other.largest);
    other.move_to(largest);
    sum += other.sum;
    spread += other.spread;
    if (other.score > score || (other.score == score && other.token < token)) {
      score = other.score;
      logit = other.logit;
      token = other.token;
    }
  }
};

// Samples the tokens of logits [rows, vocabulary] / temperature, their log-probabilities and the rows' entropies. Two
// numbers of 32 bits are the key.
template <int GROUPS, typename L, typename K>
inline void sampled_token(Place at, threadgroup char* memory, int rows, int vocabulary, L logits, K key,
                          float temperature, GLOBAL int* tokens, GLOBAL float* log_probabilities,
                          GLOBAL float* entropies) {
  const unsigned int count = static_cast<unsigned int>(rows) * vocabulary, start = at.x * vocabulary;
  const unsigned int first_key = key[0], second_key = key[1];
  // No logit is as low, and differences from it are no NaN.
  RowShare own{-1e30f, 0.0f, 0.0f, -INFINITY, 0.0f, 0};
  for (int c = at.index; c < vocabulary; c += 32 * GROUPS)
    own.take(static_cast<float>(logits[start + c]) / temperature,
             gumbel(random_bits(start + c, count, first_key, second_key)), c);
  for (int step = 1; step < 32; step *= 2)
    own.join(RowShare{lane_exchange(own.largest, step), lane_exchange(own.sum, step), lane_exchange(own.spread, step),
                      lane_exchange(own.score, step), lane_exchange(own.logit, step), lane_exchange(own.token, step)});
  threadgroup float* numbers = reinterpret_cast<threadgroup float*>(memory);
  threadgroup int* of_groups = reinterpret_cast<threadgroup int*>(memory + 20 * GROUPS);
  if (at.lane == 0) {
    numbers[at.group] = own.largest;
    numbers[GROUPS + at.group] = own.sum;
    numbers[2 * GROUPS + at.group] = own.spread;
    numbers[3 * GROUPS + at.group] = own.score;
    numbers[4 * GROUPS + at.group] = own.logit;
    of_groups[at.group] = own.token;
  }
  barrier();
  if (at.index != 0) return;
  for (int i = 1; i < GROUPS; ++i)
    own.join(RowShare{numbers[i], numbers[GROUPS + i], numbers[2 * GROUPS + i], numbers[3 * GROUPS + i],
                      numbers[4 * GROUPS + i], of_groups[i]});
  const float total = metal::log(own.sum);
  tokens[at.x] = own.token;
  log_probabilities[at.x] = own.logit - own.largest - total;
  entropies[at.x] = total - own.spread / own.sum;
}
