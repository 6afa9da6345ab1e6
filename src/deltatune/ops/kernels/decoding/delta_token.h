// One token of each row of a gated-delta layer, from its projections to its output projection, for
// ops/decoding/delta_token.py: the short convolution and its silu, the norms of queries and keys, the gates, one step of
// the recurrence, and the gated norm. A block computes one value head of one row. Everything is computed in fp32;
// results that the layer's own operations round to the type T of its arrays are rounded to it here too.

template <int GROUPS, int KEY, int VALUE>
struct DeltaTokenMemory {
  static constexpr constant int queries = 0, keys = 4 * KEY, values = 8 * KEY, outputs = values + 4 * VALUE;
  static constexpr constant int sums = outputs + 4 * VALUE;
  static constexpr constant int bytes = sums + 8 * GROUPS;
};

// The factors of the normed queries and keys, the epsilons of the mean of their squares and of that of the outputs, and
// how far apart the rows of x, of z, and of a and b are.
struct DeltaTokenNumbers {
  float query_factor, key_factor, head_eps, output_eps;
  int x_stride, z_stride, gate_stride;
};

// The silu of one channel's convolution. `before` [TAPS - 1, channels] are the inputs before x, of which all but the
// first and then x go to `after`, if `keeps`.
template <int TAPS, typename T, typename W>
inline float convolved(const GLOBAL T* x, const GLOBAL T* before, const GLOBAL W* taps, GLOBAL T* after, int channel,
                       int channels, bool keeps) {
  const GLOBAL W* weight = taps + channel * TAPS;
  float sum = static_cast<float>(x[channel]) * static_cast<float>(weight[TAPS - 1]);
  DELTATUNE_UNROLL
  for (int i = 0; i < TAPS - 1; ++i) {
    const T earlier = before[i * channels + channel];
    sum += static_cast<float>(earlier) * static_cast<float>(weight[i]);
    if (keeps && i > 0) after[(i - 1) * channels + channel] = earlier;
  }
  if (keeps) after[(TAPS - 2) * channels + channel] = x[channel];
  sum = rounded_to<T>(sum);
  return rounded_to<T>(sum * sigmoid_of(sum));
}

// Makes a and b their sums over all lanes of the block.
template <int GROUPS>
inline void sum_over_block(Place at, threadgroup float* sums, thread float& a, thread float& b) {
  a = lane_sum(a);
  b = lane_sum(b);
  if (at.lane == 0) {
    sums[2 * at.group] = a;
    sums[2 * at.group + 1] = b;
  }
  barrier();
  a = b = 0.0f;
  for (int i = 0; i < GROUPS; ++i) {
    a += sums[2 * i];
    b += sums[2 * i + 1];
  }
  barrier();
}

// Four neighbouring elements of a state, which is loaded and stored by so many at a time.
struct alignas(16) Quad {
  float x[4];
};
// A lane's eight elements of a row of KEY are quad number `piece` of its first half and of its second, so that
// neighbouring lanes read and write neighbouring elements.
template <int KEY>
inline void load_row(thread float (&to)[8], const GLOBAL float* row, int piece) {
  const GLOBAL Quad* quads = reinterpret_cast<const GLOBAL Quad*>(row);
  DELTATUNE_UNROLL
  for (int i = 0; i < 8; ++i) to[i] = quads[piece + i / 4 * (KEY / 8)].x[i % 4];
}
template <int KEY>
inline void store_row(GLOBAL float* row, const thread float (&from)[8], int piece) {
  GLOBAL Quad* quads = reinterpret_cast<GLOBAL Quad*>(row);
  DELTATUNE_UNROLL
  for (int i = 0; i < 8; ++i) quads[piece + i / 4 * (KEY / 8)].x[i % 4] = from[i];
}

// Steps the state S [VALUE, KEY] of the block's head: S <- g S + d k^T with d = beta (v - g S k), and stores the outputs
// S q = g (old S) q + d <k, q>. LANES lanes share a row; a lane has DEPTH rows under way at once.
template <int GROUPS, int KEY, int VALUE>
inline void step_state(Place at, const GLOBAL float* state, GLOBAL float* next, float gate, float beta,
                       const threadgroup float* queries, const threadgroup float* keys,
                       const threadgroup float* values, threadgroup float* outputs) {
  constexpr int LANES = KEY / 8, ROWS = GROUPS * 32 / LANES, DEPTH = 2;
  const int piece = at.index % LANES, first = at.index / LANES;
  float q[8], k[8];
  DELTATUNE_UNROLL
  for (int i = 0; i < 8; ++i) {
    const int element = i / 4 * (KEY / 2) + 4 * piece + i % 4;
    q[i] = queries[element];
    k[i] = keys[element];
  }
  const float along = row_dot<LANES>(q, k);
  for (int from = 0; from < VALUE; from += ROWS * DEPTH) {
    float s[DEPTH][8];
    DELTATUNE_UNROLL
    for (int n = 0; n < DEPTH; ++n) {
      const int row = from + n * ROWS + first;
      if (row < VALUE) load_row<KEY>(s[n], state + row * KEY, piece);
    }
    DELTATUNE_UNROLL
    for (int n = 0; n < DEPTH; ++n) {
      const int row = from + n * ROWS + first;
      DELTATUNE_UNROLL
      for (int i = 0; i < 8; ++i) s[n][i] = row < VALUE ? gate * s[n][i] : 0.0f;
      const float by_key = row_dot<LANES>(s[n], k), by_query = row_dot<LANES>(s[n], q);
      if (row >= VALUE) continue;
      const float d = beta * (values[row] - by_key);
      DELTATUNE_UNROLL
      for (int i = 0; i < 8; ++i) s[n][i] += d * k[i];
      store_row<KEY>(next + row * KEY, s[n], piece);
      if (piece == 0) outputs[row] = by_query + d * along;
    }
  }
}

// The channels of x are those of all heads' queries, then their keys, then their values; RATIO value heads share a key
// head. x [B, channels], before and after [B, TAPS - 1, channels], z and y [B, heads VALUE], a and b [B, heads], state
// and next [B, heads, VALUE, KEY], `weight` [VALUE]. Metal has arrays of fewer than eight elements elsewhere, so
// the types of a, b, a_log and dt_bias are those of their pointers.
template <int GROUPS, int KEY, int VALUE, int RATIO, int TAPS, typename T, typename R, typename W, typename A, typename D,
          typename N>
inline void delta_token(Place at, threadgroup char* memory, int heads, DeltaTokenNumbers numbers, const GLOBAL T* x,
                        const GLOBAL T* z, R a, R b, const GLOBAL T* before, const GLOBAL float* state,
                        const GLOBAL W* taps, A a_log, D dt_bias, const GLOBAL N* weight, GLOBAL T* y, GLOBAL T* after,
                        GLOBAL float* next) {
  using Memory = DeltaTokenMemory<GROUPS, KEY, VALUE>;
  threadgroup float* queries = reinterpret_cast<threadgroup float*>(memory + Memory::queries);
  threadgroup float* keys = reinterpret_cast<threadgroup float*>(memory + Memory::keys);
  threadgroup float* values = reinterpret_cast<threadgroup float*>(memory + Memory::values);
  threadgroup float* outputs = reinterpret_cast<threadgroup float*>(memory + Memory::outputs);
  threadgroup float* sums = reinterpret_cast<threadgroup float*>(memory + Memory::sums);
  const int head = at.x, of_keys = head / RATIO, all_keys = heads / RATIO * KEY;
  const int channels = 2 * all_keys + heads * VALUE;
  const long row = at.y, of_head = row * heads + head;
  const GLOBAL T* own = x + row * numbers.x_stride;
  const GLOBAL T* earlier = before + row * (TAPS - 1) * channels;
  GLOBAL T* later = after + row * (TAPS - 1) * channels;
  const long place = of_head * VALUE * KEY;
  // All blocks compute this much at the same time, in which the memory would do nothing.
  if (at.index * 32 < VALUE * KEY) prefetch(state + place + at.index * 32);

  float q_squares = 0.0f, k_squares = 0.0f, none = 0.0f;
  for (int c = at.index; c < KEY; c += 32 * GROUPS) {
    const bool keeps = head % RATIO == 0;
    const int channel = of_keys * KEY + c;
    const float q = convolved<TAPS>(own, earlier, taps, later, channel, channels, keeps);
    const float k = convolved<TAPS>(own, earlier, taps, later, all_keys + channel, channels, keeps);
    queries[c] = q;
    keys[c] = k;
    q_squares += q * q;
    k_squares += k * k;
  }
  for (int c = at.index; c < VALUE; c += 32 * GROUPS)
    values[c] = convolved<TAPS>(own, earlier, taps, later, 2 * all_keys + head * VALUE + c, channels, true);
  sum_over_block<GROUPS>(at, sums, q_squares, k_squares);
  const float of_query = numbers.query_factor * metal::rsqrt(q_squares / KEY + numbers.head_eps);
  const float of_key = numbers.key_factor * metal::rsqrt(k_squares / KEY + numbers.head_eps);
  for (int c = at.index; c < KEY; c += 32 * GROUPS) {
    queries[c] = rounded_to<T>(queries[c] * of_query);
    keys[c] = rounded_to<T>(keys[c] * of_key);
  }
  barrier();

  const float rate = static_cast<float>(a[row * numbers.gate_stride + head]) + static_cast<float>(dt_bias[head]);
  const float softplus = (rate > 0.0f ? rate : 0.0f) + log_one_plus(DELTATUNE_EXP(rate > 0.0f ? -rate : rate));
  const float gate = DELTATUNE_EXP(-DELTATUNE_EXP(a_log[head]) * softplus);
  const float beta = sigmoid_of(static_cast<float>(b[row * numbers.gate_stride + head]));
  step_state<GROUPS, KEY, VALUE>(at, state + place, next + place, gate, beta, queries, keys, values, outputs);
  barrier();

  float squares = 0.0f;
  for (int c = at.index; c < VALUE; c += 32 * GROUPS) {
    const float out = rounded_to<T>(outputs[c]);
    squares += out * out;
  }
  sum_over_block<GROUPS>(at, sums, squares, none);
  const float inverse = metal::rsqrt(squares / VALUE + numbers.output_eps);
  for (int c = at.index; c < VALUE; c += 32 * GROUPS) {
    const float opening = static_cast<float>(z[row * numbers.z_stride + head * VALUE + c]);
    const float normed = rounded_to<T>(rounded_to<T>(outputs[c]) * inverse * static_cast<float>(weight[c]));
    y[of_head * VALUE + c] = static_cast<T>(normed * opening * sigmoid_of(opening));
  }
}
