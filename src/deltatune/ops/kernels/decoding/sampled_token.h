// Samples a token of each row of logits, for ops/decoding/sampled_token.py. PARTS blocks share a row, of which each logit
// is read once. The token with the largest sum of its logit and Gumbel's noise is one of the softmax's distribution.

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

// A share of a row: its largest logit and sum of exponentials, the sum of exp(logit - largest) (logit - largest), and the
// largest sum of a logit and its noise, with its logit and token.
struct RowShare {
  Exponentials all;
  float spread, score, logit;
  int token;

  inline void take(float x, float noise, int at) {
    if (x > all.largest) {
      spread = spread_from(x);
      all.sum *= exponential(all.largest - x);
      all.largest = x;
    }
    const float difference = x - all.largest, e = exponential(difference);
    all.sum += e;
    // A logit of -infinity adds nothing.
    if (e > 0.0f) spread += e * difference;
    if (x + noise > score) {
      score = x + noise;
      logit = x;
      token = at;
    }
  }
  // The spread where a higher logit is the largest one.
  inline float spread_from(float higher) const {
    const float difference = all.largest - higher, factor = exponential(difference);
    return factor > 0.0f ? factor * (spread + difference * all.sum) : 0.0f;
  }
  inline void join(RowShare other) {
    const Exponentials both = joined(all, other.all);
    spread = spread_from(both.largest) + other.spread_from(both.largest);
    all = both;
    if (other.score > score || (other.score == score && other.token < token)) {
      score = other.score;
      logit = other.logit;
      token = other.token;
    }
  }
};

// The share of no logit. No logit is as low as its largest, and differences from it are no NaN.
inline RowShare no_share() {
  return RowShare{{-1e30f, 0.0f}, 0.0f, -INFINITY, 0.0f, 0};
}
// Joins the shares of a group's lanes.
inline void join_lanes(thread RowShare& own) {
  for (int step = 1; step < 32; step *= 2)
    own.join(RowShare{{lane_exchange(own.all.largest, step), lane_exchange(own.all.sum, step)},
                      lane_exchange(own.spread, step), lane_exchange(own.score, step), lane_exchange(own.logit, step),
                      lane_exchange(own.token, step)});
}
// A share as six numbers in fp32, which holds every token of a vocabulary below 2^24.
template <typename P>
inline void give_share(P to, RowShare share) {
  to[0] = share.all.largest;
  to[1] = share.all.sum;
  to[2] = share.spread;
  to[3] = share.score;
  to[4] = share.logit;
  to[5] = static_cast<float>(share.token);
}
template <typename P>
inline RowShare share_at(P from) {
  return RowShare{{from[0], from[1]}, from[2], from[3], from[4], static_cast<int>(from[5])};
}

// A number of the two keys that MLX splits a key into: 0 and 1 are those of the next token's key, 2 and 3 of this one's.
inline unsigned int split_key(int number, unsigned int first, unsigned int second) {
  return random_bits(number, 4, first, second);
}

// Computes a block's share of a row of logits [rows, vocabulary] / temperature. Two numbers of 32 bits are the key.
template <int GROUPS, int PARTS, typename L, typename K>
inline void sampled_shares(Place at, threadgroup char* memory, int rows, int vocabulary, L logits, K key,
                           float temperature, GLOBAL float* shares) {
  const unsigned int count = static_cast<unsigned int>(rows) * vocabulary, start = at.y * vocabulary;
  const unsigned int first_key = split_key(2, key[0], key[1]), second_key = split_key(3, key[0], key[1]);
  const int part = (vocabulary + PARTS - 1) / PARTS, after = ((int)at.x + 1) * part;
  const int end = after < vocabulary ? after : vocabulary;
  RowShare own = no_share();
  for (int c = at.x * part + at.index; c < end; c += 32 * GROUPS)
    own.take(static_cast<float>(logits[start + c]) / temperature,
             gumbel(random_bits(start + c, count, first_key, second_key)), c);
  join_lanes(own);
  threadgroup float* of_groups = reinterpret_cast<threadgroup float*>(memory);
  if (at.lane == 0) give_share(of_groups + 6 * at.group, own);
  barrier();
  if (at.index != 0) return;
  for (int i = 1; i < GROUPS; ++i) own.join(share_at(of_groups + 6 * i));
  give_share(shares + 6 * (at.y * PARTS + at.x), own);
}

// Joins the shares of each row; writes its token, the token again with its log-probability and the row's entropy in
// [3, rows], and the next token's key, twice.
template <int GROUPS, typename S, typename K>
inline void sampled_token(Place at, threadgroup char*, int rows, int parts, S shares, K key, GLOBAL int* tokens,
                          GLOBAL float* figures, GLOBAL unsigned int* next) {
  if (at.x == 0 && at.lane < 4) next[at.lane] = split_key(at.lane % 2, key[0], key[1]);
  RowShare own = no_share();
  if (at.lane < parts) own = share_at(shares + 6 * (at.x * parts + at.lane));
  join_lanes(own);
  if (at.lane != 0) return;
  const float total = metal::log(own.all.sum);
  tokens[at.x] = own.token;
  figures[at.x] = static_cast<float>(own.token);
  figures[rows + at.x] = own.logit - own.all.largest - total;
  figures[2 * rows + at.x] = total - own.spread / own.all.sum;
}
