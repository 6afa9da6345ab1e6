// The kernels for the operations around the recurrence in a layer, and for the optimizer: each computes element by
// element or row by row in one pass over memory. ops/pointwise launches them.
// Unless its comment says otherwise, a lane loads and stores one piece of eight neighbouring elements, number `at` of
// `count`, and computes in fp32. Where rows are normed, LANES lanes share a row of 8 LANES elements.

// An array that a call lacks: nothing is stored to it, and its elements are zeros.
inline void give(Nothing, long, const thread float (&)[8]) {}
template <typename T>
inline void fetch(thread Octet<T>& to, Nothing, long, bool) {
  to = Octet<T>();
}
inline bool aligned16(Nothing) { return true; }

// The derivative of silu(x), from x and its sigmoid.
inline float silu_slope(float x, float sigmoid) {
  return sigmoid * (1.0f + x * (1.0f - sigmoid));
}
// log(1 + x) without losing the digits of a small x (W. Kahan's method).
inline float log_one_plus(float x) {
  const float sum = 1.0f + x, kept = sum - 1.0f;
  return kept == 0.0f ? x : metal::log(sum) * (x / kept);
}
// The inner product of two rows.
template <int LANES>
inline float row_dot(const thread float (&a)[8], const thread float (&b)[8]) {
  float sum = 0.0f;
  DELTATUNE_UNROLL
  for (int i = 0; i < 8; ++i) sum += a[i] * b[i];
  DELTATUNE_UNROLL
  for (int step = 1; step < LANES; step *= 2) sum += lane_exchange(sum, step);
  return sum;
}
// 1 / sqrt(mean(x^2) + eps) of a row.
template <int LANES>
inline float inverse_of(const thread float (&x)[8], float eps) {
  return metal::rsqrt(row_dot<LANES>(x, x) / (8 * LANES) + eps);
}

// Returns silu(g), and replaces g and d by the gradients of g and x for the gradient d of silu(g) x.
inline float swiglu_gradients(thread float& g, float x, thread float& d) {
  const float s = sigmoid_of(g), silu = g * s;
  g = d * x * silu_slope(g, s);
  d *= silu;
  return silu;
}

// Computes y = silu(gate) x for gate, x and y of `count` pieces.
template <typename T>
inline void swiglu_forward(long at, long count, const GLOBAL T* gate, const GLOBAL T* x, GLOBAL T* y) {
  if (at >= count) return;
  float g[8], other[8];
  take(g, gate, at);
  take(other, x, at);
  DELTATUNE_UNROLL
  for (int i = 0; i < 8; ++i) g[i] *= sigmoid_of(g[i]) * other[i];
  give(y, at, g);
}
// Computes dgate and dx from gate, x and dy.
template <typename T>
inline void swiglu_backward(long at, long count, const GLOBAL T* gate, const GLOBAL T* x, const GLOBAL T* dy,
                            GLOBAL T* dgate, GLOBAL T* dx) {
  if (at >= count) return;
  float g[8], other[8], d[8];
  take(g, gate, at);
  take(other, x, at);
  take(d, dy, at);
  DELTATUNE_UNROLL
  for (int i = 0; i < 8; ++i) swiglu_gradients(g[i], other[i], d[i]);
  give(dgate, at, g);
  give(dx, at, d);
}
// Computes hidden = silu(gate) x, and its gradients from d, which lacks the factor `score` of its row: dgate and dx,
// and dscore = <d, hidden>. A row has `pieces` pieces, and LANES lanes, which share it.
template <int LANES, typename T, typename S>
inline void scored_swiglu(long at, int rows, int pieces, const GLOBAL T* gate, const GLOBAL T* x, const GLOBAL T* d,
                          S score, GLOBAL T* hidden, GLOBAL T* dgate, GLOBAL T* dx, GLOBAL float* dscore) {
  const long row = at / LANES;
  if (row >= rows) return;
  const float own = score[row];
  float along = 0.0f;
  for (long piece = row * pieces + at % LANES; piece < (row + 1) * pieces; piece += LANES) {
    float g[8], other[8], e[8];
    take(g, gate, piece);
    take(other, x, piece);
    take(e, d, piece);
    DELTATUNE_UNROLL
    for (int i = 0; i < 8; ++i) {
      const float unscored = e[i];
      e[i] *= own;
      other[i] *= swiglu_gradients(g[i], other[i], e[i]);
      along += unscored * other[i];
    }
    give(hidden, piece, other);
    give(dgate, piece, g);
    give(dx, piece, e);
  }
  DELTATUNE_UNROLL
  for (int step = 1; step < LANES; step *= 2) along += lane_exchange(along, step);
  if (at % LANES == 0) dscore[row] = along;
}

// Computes y = x / rms(x) weight silu(gate) row by row, with weight [8 LANES]. Lanes past the end compute the last
// piece again without storing it, because the sums need every lane of a group.
template <int LANES, typename T, typename W>
inline void gated_norm_forward(long at, long count, float eps, const GLOBAL T* x, W weight, const GLOBAL T* gate,
                               GLOBAL T* y) {
  const long from = at < count ? at : count - 1;
  float h[8], g[8];
  take(h, x, from);
  take(g, gate, from);
  const float inverse = inverse_of<LANES>(h, eps);
  DELTATUNE_UNROLL
  for (int i = 0; i < 8; ++i)
    h[i] *= inverse * static_cast<float>(weight[from % LANES * 8 + i]) * g[i] * sigmoid_of(g[i]);
  if (at < count) give(y, at, h);
}
// Computes dx and dgate. With u = dy weight silu(gate), dx = (u - x <u, x> / (width rms^2)) / rms.
template <int LANES, typename T, typename W>
inline void gated_norm_backward(long at, long count, float eps, const GLOBAL T* x, W weight, const GLOBAL T* gate,
                                const GLOBAL T* dy, GLOBAL T* dx, GLOBAL T* dgate) {
  const long from = at < count ? at : count - 1;
  float h[8], g[8], u[8];
  take(h, x, from);
  take(g, gate, from);
  take(u, dy, from);
  const float inverse = inverse_of<LANES>(h, eps);
  DELTATUNE_UNROLL
  for (int i = 0; i < 8; ++i) {
    const float s = sigmoid_of(g[i]), silu = g[i] * s;
    u[i] *= static_cast<float>(weight[from % LANES * 8 + i]);
    g[i] = u[i] * h[i] * inverse * silu_slope(g[i], s);
    u[i] *= silu;
  }
  const float along = row_dot<LANES>(u, h) * inverse * inverse / (8 * LANES);
  DELTATUNE_UNROLL
  for (int i = 0; i < 8; ++i) u[i] = inverse * (u[i] - h[i] * along);
  if (at < count) {
    give(dx, at, u);
    give(dgate, at, g);
  }
}

// Computes the gradient of the weight in PARTS parts [PARTS, 8 LANES], each of which sums every PARTS-th row.
template <int LANES, int PARTS, typename T>
inline void gated_norm_weight(long at, long count, float eps, const GLOBAL T* x, const GLOBAL T* gate,
                              const GLOBAL T* dy, GLOBAL float* dweight) {
  const long rows = count / LANES;
  float sum[8], h[8], g[8], d[8];
  for (int i = 0; i < 8; ++i) sum[i] = 0.0f;
  for (long first = 0; first < rows; first += PARTS) {
    const long row = first + at / LANES, from = (row < rows ? row : rows - 1) * LANES + at % LANES;
    take(h, x, from);
    take(g, gate, from);
    take(d, dy, from);
    const float inverse = inverse_of<LANES>(h, eps);
    DELTATUNE_UNROLL
    for (int i = 0; i < 8; ++i) sum[i] += row < rows ? d[i] * g[i] * sigmoid_of(g[i]) * h[i] * inverse : 0.0f;
  }
  if (at < PARTS * LANES) give(dweight, at, sum);
}

// Computes log_g = -exp(A_log) softplus(a + dt_bias) and beta = most sigmoid(b). a and b are [tokens, heads], A_log and
// dt_bias [heads]. A lane computes one element.
template <typename T, typename A, typename D>
inline void gates_forward(long at, long count, int heads, float most, const GLOBAL T* a, const GLOBAL T* b, A A_log,
                          D dt_bias, GLOBAL float* log_g, GLOBAL float* beta) {
  if (at >= count) return;
  const int head = at % heads;
  const float step = static_cast<float>(a[at]) + static_cast<float>(dt_bias[head]);
  const float softplus = (step > 0.0f ? step : 0.0f) + log_one_plus(DELTATUNE_EXP(step > 0.0f ? -step : step));
  log_g[at] = -DELTATUNE_EXP(static_cast<float>(A_log[head])) * softplus;
  beta[at] = most * sigmoid_of(static_cast<float>(b[at]));
}
// Computes da and db; the gradients of A_log and dt_bias are summed elsewhere.
template <typename T, typename A, typename D>
inline void gates_backward(long at, long count, int heads, float most, const GLOBAL T* a, const GLOBAL T* b, A A_log,
                           D dt_bias, const GLOBAL float* dlog_g, const GLOBAL float* dbeta, GLOBAL T* da,
                           GLOBAL T* db) {
  if (at >= count) return;
  const int head = at % heads;
  const float step = static_cast<float>(a[at]) + static_cast<float>(dt_bias[head]);
  const float s = sigmoid_of(static_cast<float>(b[at]));
  da[at] = static_cast<T>(-dlog_g[at] * DELTATUNE_EXP(static_cast<float>(A_log[head])) * sigmoid_of(step));
  db[at] = static_cast<T>(dbeta[at] * most * s * (1.0f - s));
}

// Copies the rows of x [rows, 8 width] named by `index` to y. A negative index counts from the end.
template <typename T, typename I>
inline void rows_taken(long at, long count, int width, int rows, const GLOBAL T* x, I index, GLOBAL T* y) {
  if (at >= count) return;
  const unsigned row = (unsigned)at / (unsigned)width, piece = (unsigned)at % (unsigned)width;
  const long found = (long)index[row];
  float h[8];
  take(h, x, (found < 0 ? found + rows : found) * width + piece);
  give(y, at, h);
}
// Computes for each token the sum of K rows of x, those that `place` [tokens, K] names, times their weights [tokens, K]
// where WEIGHTED.
template <int K, int WEIGHTED, typename T, typename I, typename W, typename Y>
inline void rows_combined(long at, long count, int width, const GLOBAL T* x, I place, W weights, GLOBAL Y* y) {
  if (at >= count) return;
  const unsigned token = (unsigned)at / (unsigned)width, piece = (unsigned)at % (unsigned)width;
  float sum[8], h[8];
  for (int i = 0; i < 8; ++i) sum[i] = 0.0f;
  DELTATUNE_UNROLL
  for (int k = 0; k < K; ++k) {
    const unsigned pair = token * K + k;
    take(h, x, (long)place[pair] * width + piece);
    const float weight = WEIGHTED ? static_cast<float>(weights[pair]) : 1.0f;
    for (int i = 0; i < 8; ++i) sum[i] += weight * h[i];
  }
  give(y, at, sum);
}

// Makes a step of Adam in fp32. Each result is rounded once, to its array's dtype, and none is computed from a rounded
// one. A lane computes a piece, and the last lane, where `count` is no multiple of eight, element by element.
// fixed holds beta1, 1 - beta1, beta2, 1 - beta2 and eps. moving holds the learning rate divided by m's bias
// correction, 1 / sqrt of v's bias correction, the factor of weight decay, the factor of the gradient, and 0 if the
// step is skipped.
template <typename F, typename M>
inline void adam_number(thread float& p, thread float& first, thread float& second, float d, F fixed, M moving) {
  d *= moving[3];
  first = fixed[0] * first + fixed[1] * d;
  second = fixed[2] * second + fixed[3] * (d * d);
  p = p * moving[2] - moving[0] * first / (metal::sqrt(second) * moving[1] + fixed[4]);
}
template <typename F, typename M, typename P, typename G, typename X, typename Y, typename Z>
inline void adam_step(long at, long count, F fixed, M moving, P parameter, G gradient, X m, X v,
                      GLOBAL Y* new_parameter, GLOBAL Z* new_m, GLOBAL Z* new_v) {
  const bool healthy = moving[4] != 0.0f;
  if (at < count / 8) {
    float p[8], d[8], first[8], second[8];
    take(p, parameter, at);
    take(d, gradient, at);
    take(first, m, at);
    take(second, v, at);
    if (healthy) {
      DELTATUNE_UNROLL
      for (int i = 0; i < 8; ++i) adam_number(p[i], first[i], second[i], d[i], fixed, moving);
    }
    give(new_parameter, at, p);
    give(new_m, at, first);
    give(new_v, at, second);
  } else if (at == count / 8) {
    for (long i = at * 8; i < count; ++i) {
      float p = static_cast<float>(parameter[i]), first = static_cast<float>(m[i]), second = static_cast<float>(v[i]);
      if (healthy) adam_number(p, first, second, static_cast<float>(gradient[i]), fixed, moving);
      new_parameter[i] = static_cast<Y>(p);
      new_m[i] = static_cast<Z>(first);
      new_v[i] = static_cast<Z>(second);
    }
  }
}

// Adds the squares of x to the sums `before`, one for each group of lanes. Each of LANES lanes takes every LANES-th
// piece, and the first lane also the elements after the last whole piece.
template <int LANES, typename X, typename B>
inline void squares_added(long at, long count, X x, B before, GLOBAL float* sums) {
  float sum[8], h[8];
  for (int i = 0; i < 8; ++i) sum[i] = 0.0f;
  for (long piece = at; piece < count / 8; piece += LANES) {
    take(h, x, piece);
    DELTATUNE_UNROLL
    for (int i = 0; i < 8; ++i) sum[i] += h[i] * h[i];
  }
  if (at == 0) {
    for (long i = count / 8 * 8; i < count; ++i) {
      const float last = static_cast<float>(x[i]);
      sum[i % 8] += last * last;
    }
  }
  const float total = ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
  const float of_group = lane_sum(total);
  if (at % 32 == 0) sums[at / 32] = before[at / 32] + of_group;
}

// Concatenates arrays as fp32. A lane copies element `at` of the concatenation: from the first array if that has so
// many elements, else from the others.
inline void end_to_end(long, long, GLOBAL float*) {}
template <typename X, typename... Rest>
inline void end_to_end(long at, long place, GLOBAL float* y, X x, int size, Rest... rest) {
  if (at < size) {
    y[place] = static_cast<float>(x[at]);
    return;
  }
  end_to_end(at - size, place, y, rest...);
}

// The causal depthwise convolution of a layer, followed by silu. Its channels are those of KEY_HEADS queries, of as many
// keys, each of KEY_SIZE channels, and then VALUES others; queries and keys are also normed head by head, as `norms` says.
// x is [batch, BEFORE + length, channels]. Its first BEFORE rows are the convolution's state, and each other row is a
// token; where BEFORE is 0, the state is in `state` [batch, TAPS - 1, channels] or is zeros. A tap that would reach into
// an earlier document contributes nothing; the state belongs to the first document.
// A lane computes eight channels of ROWS tokens, one token after the other, so that each row is loaded once: its terms
// in later rows are kept in sums. A group has lanes of the same tokens only, and either normed or other channels. Rows
// are loaded AHEAD of their use.

// Queries become q x / sqrt(mean(x^2) + eps), and keys k x / sqrt(mean(x^2) + eps).
struct HeadNorms {
  float q, k, eps;
};
// The share of a lane: eight channels of ROWS rows from `first` on, of batch row b.
struct ConvShare {
  int b, first;
  // Its eight channels among `pieces` of a row, and among `width` of the output of this part: 0 for queries, 1 for keys,
  // 2 for the others. Lanes that are not live only take part in their group's sums.
  int piece, pieces, part, place, width;
  bool live;
};
inline constexpr int lanes_of_head(int size) {
  int lanes = 1;
  while (lanes * 8 < size) lanes *= 2;
  return lanes;
}
inline constexpr int whole_groups(int lanes) {
  return (lanes + 31) / 32 * 32;
}
// `rows` is how many rows a batch row has, of which the first is row `start`.
template <int ROWS, int KEY_HEADS, int KEY_SIZE, int VALUES>
inline ConvShare share_at(long at, int rows, int start) {
  constexpr int of_head = lanes_of_head(KEY_SIZE), normed = whole_groups(2 * KEY_HEADS * of_head);
  constexpr int lanes = normed + whole_groups(VALUES / 8), pieces = (2 * KEY_HEADS * KEY_SIZE + VALUES) / 8;
  const unsigned block = (unsigned)at / lanes, lane = (unsigned)at % lanes, blocks = (unsigned)(rows + ROWS - 1) / ROWS;
  ConvShare own;
  own.b = block / blocks;
  own.first = start + (int)(block % blocks) * ROWS;
  own.pieces = pieces;
  if (lane < normed) {
    const int head = lane / of_head, place = lane % of_head;
    own.live = head < 2 * KEY_HEADS && place < KEY_SIZE / 8;
    own.part = head < KEY_HEADS ? 0 : 1;
    own.place = (head - own.part * KEY_HEADS) * (KEY_SIZE / 8) + place;
    own.width = KEY_HEADS * (KEY_SIZE / 8);
    own.piece = own.part * own.width + own.place;
  } else {
    own.part = 2;
    own.place = lane - normed;
    own.width = VALUES / 8;
    own.live = own.place < own.width;
    own.piece = 2 * KEY_HEADS * (KEY_SIZE / 8) + own.place;
  }
  if (!own.live) own.piece = own.place = 0;
  return own;
}
// Whether a lane's elements count in the sums over its head: where heads fill their lanes, always.
template <int SIZE>
inline bool counts(const thread ConvShare& own) {
  return SIZE == 0 || lanes_of_head(SIZE) * 8 == SIZE || own.live;
}
// Loads the taps of eight channels from weight [channels, TAPS].
template <int TAPS, typename W>
inline void take_taps(thread float (&to)[TAPS][8], W weight, int piece) {
  float found[TAPS][8];
  DELTATUNE_UNROLL
  for (int n = 0; n < TAPS; ++n) take(found[n], weight, (long)piece * TAPS + n);
  DELTATUNE_UNROLL
  for (int i = 0; i < 8 * TAPS; ++i) to[i % TAPS][i / TAPS] = found[i / 8][i % 8];
}
// The inputs of a lane: its channels of x, and the tokens' documents.
template <int TAPS, int BEFORE, typename T, typename P, typename S>
struct TokenRows {
  const GLOBAL T* x;
  P state;
  S segments;
  int length;
  bool aligned;
  inline void load(thread Octet<T>& row, thread int& document, const thread ConvShare& own, int t) const {
    document = segments[(long)own.b * length + (t > 0 ? t : 0)];
    if (t >= -BEFORE) {
      fetch(row, x, ((long)own.b * (BEFORE + length) + BEFORE + t) * own.pieces + own.piece, aligned);
    } else if (t >= -(TAPS - 1)) {
      fetch(row, state, ((long)own.b * (TAPS - 1) + TAPS - 1 + t) * own.pieces + own.piece, aligned);
    } else {
      row = Octet<T>();
    }
  }
};
// Computes the convolution at a token from its row and the sums for it and the later tokens, and adds the row to those.
template <int TAPS>
inline void convolve(thread float (&sum)[8], thread float (&later)[TAPS - 1][8], const thread float (&row)[8],
                     const thread float (&w)[TAPS][8]) {
  DELTATUNE_UNROLL
  for (int i = 0; i < 8; ++i) sum[i] = later[0][i] + w[TAPS - 1][i] * row[i];
  DELTATUNE_UNROLL
  for (int j = 0; j + 2 < TAPS; ++j)
    for (int i = 0; i < 8; ++i) later[j][i] = later[j + 1][i] + w[TAPS - 2 - j][i] * row[i];
  DELTATUNE_UNROLL
  for (int i = 0; i < 8; ++i) later[TAPS - 2][i] = w[0][i] * row[i];
}
template <int TAPS>
inline void clear_sums(thread float (&later)[TAPS - 1][8]) {
  DELTATUNE_UNROLL
  for (int j = 0; j + 1 < TAPS; ++j)
    for (int i = 0; i < 8; ++i) later[j][i] = 0.0f;
}

// Writes the lane's rows of y. SIZE is that of the heads to norm, or 0.
template <int TAPS, int ROWS, int AHEAD, int SIZE, typename R, typename W, typename T>
inline void convolve_forward(const thread ConvShare& own, const thread R& rows, W weight, float factor, float eps,
                             GLOBAL T* y) {
  constexpr int lanes = lanes_of_head(SIZE);
  float w[TAPS][8], later[TAPS - 1][8];
  take_taps(w, weight, own.piece);
  clear_sums<TAPS>(later);
  Octet<T> ahead[AHEAD];
  int documents[AHEAD];
  const int start = own.first - (TAPS - 1), last = own.first + ROWS, end = last < rows.length ? last : rows.length;
  DELTATUNE_UNROLL
  for (int i = 0; i < AHEAD; ++i)
    if (start + i < end) rows.load(ahead[i], documents[i], own, start + i);
  int document = documents[0];
  for (int from = start; from < end; from += AHEAD) {
    DELTATUNE_UNROLL
    for (int i = 0; i < AHEAD; ++i) {
      const int t = from + i;
      if (t < end) {
        float row[8], sum[8];
        widen(row, ahead[i]);
        if (documents[i] != document) clear_sums<TAPS>(later);
        document = documents[i];
        if (t + AHEAD < end) rows.load(ahead[i], documents[i], own, t + AHEAD);
        convolve<TAPS>(sum, later, row, w);
        if (t >= own.first) {
          DELTATUNE_UNROLL
          for (int j = 0; j < 8; ++j) sum[j] = counts<SIZE>(own) ? sum[j] * sigmoid_of(sum[j]) : 0.0f;
          if (SIZE > 0) {
            const float by = factor * metal::rsqrt(row_dot<lanes>(sum, sum) / (SIZE > 0 ? SIZE : 1) + eps);
            for (int j = 0; j < 8; ++j) sum[j] *= by;
          }
          if (own.live) give(y, ((long)own.b * rows.length + t) * own.width + own.place, sum);
        }
      }
    }
  }
}
// Computes q, k [batch, length, KEY_HEADS KEY_SIZE] and v [batch, length, VALUES].
template <int TAPS, int ROWS, int AHEAD, int BEFORE, int KEY_HEADS, int KEY_SIZE, int VALUES, typename T, typename P,
          typename W, typename S>
inline void conv_silu_forward(long at, long batch, int length, HeadNorms norms, const GLOBAL T* x, P state, W weight,
                              S segments, GLOBAL T* q, GLOBAL T* k, GLOBAL T* v) {
  const ConvShare own = share_at<ROWS, KEY_HEADS, KEY_SIZE, VALUES>(at, length, 0);
  if (own.b >= batch) return;
  const TokenRows<TAPS, BEFORE, T, P, S> rows{x, state, segments, length, aligned16(x) && aligned16(state)};
  if (own.part < 2) {
    convolve_forward<TAPS, ROWS, AHEAD, KEY_SIZE>(own, rows, weight, own.part == 0 ? norms.q : norms.k, norms.eps,
                                                  own.part == 0 ? q : k);
  } else {
    convolve_forward<TAPS, ROWS, AHEAD, 0>(own, rows, weight, 1.0f, 0.0f, v);
  }
}

// Makes the gradient of a normed row y = factor s inverse of that of s. `d` holds dy and then ds.
template <int SIZE>
inline void unnorm(thread float (&d)[8], const thread float (&s)[8], float factor, float eps) {
  constexpr int lanes = lanes_of_head(SIZE);
  const float inverse = metal::rsqrt(row_dot<lanes>(s, s) / SIZE + eps);
  const float along = row_dot<lanes>(d, s) * inverse * inverse / SIZE;
  DELTATUNE_UNROLL
  for (int i = 0; i < 8; ++i) d[i] = factor * inverse * (d[i] - s[i] * along);
}
template <>
inline void unnorm<0>(thread float (&)[8], const thread float (&)[8], float, float) {}
// The gradients of the convolution's input: `next` receives that of the row TAPS - 1 before the token with the gradient
// d. `age` is how many tokens of the same document are known to precede it.
template <int TAPS>
inline void convolve_back(thread float (&next)[8], thread float (&earlier)[TAPS - 1][8], const thread float (&d)[8],
                          const thread float (&w)[TAPS][8], int age) {
  DELTATUNE_UNROLL
  for (int i = 0; i < 8; ++i) next[i] = earlier[0][i] + w[0][i] * (age >= TAPS - 1 ? d[i] : 0.0f);
  DELTATUNE_UNROLL
  for (int j = 0; j + 2 < TAPS; ++j)
    for (int i = 0; i < 8; ++i) earlier[j][i] = earlier[j + 1][i] + w[j + 1][i] * (age >= TAPS - 2 - j ? d[i] : 0.0f);
  DELTATUNE_UNROLL
  for (int i = 0; i < 8; ++i) earlier[TAPS - 2][i] = w[TAPS - 1][i] * d[i];
}

// Writes the lane's rows of dx. Row s is read by the tokens s to s + TAPS - 1; their convolutions are recomputed.
template <int TAPS, int ROWS, int AHEAD, int BEFORE, int SIZE, typename R, typename W, typename T, typename D>
inline void convolve_backward(const thread ConvShare& own, const thread R& rows, W weight, float factor, float eps,
                              const GLOBAL T* dy, GLOBAL T* dx, D dstate) {
  float w[TAPS][8], later[TAPS - 1][8], earlier[TAPS - 1][8];
  take_taps(w, weight, own.piece);
  clear_sums<TAPS>(later);
  clear_sums<TAPS>(earlier);
  Octet<T> ahead[AHEAD], dy_ahead[AHEAD];
  int documents[AHEAD];
  const int start = own.first - (TAPS - 1), last = own.first + ROWS + TAPS - 1, length = rows.length;
  const int end = last < length ? last : length, done = last < length + TAPS - 1 ? last : length + TAPS - 1;
  const bool aligned = aligned16(dy);
  const int computed = own.first > 0 ? own.first : 0;
  DELTATUNE_UNROLL
  for (int i = 0; i < AHEAD; ++i) {
    if (start + i < end) rows.load(ahead[i], documents[i], own, start + i);
    if (start + i >= computed && start + i < end)
      fetch(dy_ahead[i], dy, ((long)own.b * length + start + i) * own.width + own.place, aligned);
  }
  int document = documents[0], age = TAPS;
  for (int from = start; from < done; from += AHEAD) {
    DELTATUNE_UNROLL
    for (int i = 0; i < AHEAD; ++i) {
      const int t = from + i;
      if (t < done) {
        float row[8], d[8], sum[8];
        DELTATUNE_UNROLL
        for (int j = 0; j < 8; ++j) d[j] = 0.0f;
        if (t < end) {
          widen(row, ahead[i]);
          if (t >= computed) widen(d, dy_ahead[i]);
          const bool same = documents[i] == document;
          if (!same) clear_sums<TAPS>(later);
          age = same ? (age < TAPS ? age + 1 : TAPS) : 0;
          document = documents[i];
          if (t + AHEAD < end) {
            rows.load(ahead[i], documents[i], own, t + AHEAD);
            if (t + AHEAD >= computed)
              fetch(dy_ahead[i], dy, ((long)own.b * length + t + AHEAD) * own.width + own.place, aligned);
          }
          convolve<TAPS>(sum, later, row, w);
          if (t >= computed) {
            DELTATUNE_UNROLL
            for (int j = 0; j < 8; ++j) {
              const float sigmoid = sigmoid_of(sum[j]);
              row[j] = counts<SIZE>(own) ? sum[j] * sigmoid : 0.0f;
              sum[j] = sigmoid + row[j] * (1.0f - sigmoid);
              d[j] = counts<SIZE>(own) ? d[j] : 0.0f;
            }
            unnorm<SIZE>(d, row, factor, eps);
            for (int j = 0; j < 8; ++j) d[j] *= sum[j];
          }
        }
        convolve_back<TAPS>(row, earlier, d, w, age);
        const int s = t - (TAPS - 1);
        if (s >= own.first && own.live) {
          if (s >= -BEFORE) give(dx, ((long)own.b * (BEFORE + length) + BEFORE + s) * own.pieces + own.piece, row);
          else give(dstate, ((long)own.b * (TAPS - 1) + TAPS - 1 + s) * own.pieces + own.piece, row);
        }
      }
    }
  }
}
// Computes dx, and the gradient of the state where the call has one, from the gradients of q, k and v.
template <int TAPS, int ROWS, int AHEAD, int BEFORE, int KEY_HEADS, int KEY_SIZE, int VALUES, typename T, typename P,
          typename W, typename S, typename D>
inline void conv_silu_backward(long at, long batch, int length, HeadNorms norms, const GLOBAL T* x, P state, W weight,
                               S segments, const GLOBAL T* dq, const GLOBAL T* dk, const GLOBAL T* dv, GLOBAL T* dx,
                               D dstate, bool stateful) {
  const int before = BEFORE > 0 || stateful ? TAPS - 1 : 0;
  const ConvShare own = share_at<ROWS, KEY_HEADS, KEY_SIZE, VALUES>(at, before + length, -before);
  if (own.b >= batch) return;
  const TokenRows<TAPS, BEFORE, T, P, S> rows{x, state, segments, length, aligned16(x) && aligned16(state)};
  if (own.part < 2) {
    convolve_backward<TAPS, ROWS, AHEAD, BEFORE, KEY_SIZE>(own, rows, weight, own.part == 0 ? norms.q : norms.k,
                                                           norms.eps, own.part == 0 ? dq : dk, dx, dstate);
  } else {
    convolve_backward<TAPS, ROWS, AHEAD, BEFORE, 0>(own, rows, weight, 1.0f, 0.0f, dv, dx, dstate);
  }
}

// Writes the terms of the lane's rows in the gradients of its taps to its place in part `share` of dweight.
template <int TAPS, int ROWS, int AHEAD, int SIZE, typename R, typename W, typename T>
inline void convolve_taps(const thread ConvShare& own, const thread R& rows, W weight, float factor, float eps,
                          const GLOBAL T* dy, long share, GLOBAL float* dweight) {
  float w[TAPS][8], recent[TAPS][8], sums[TAPS][8];
  take_taps(w, weight, own.piece);
  DELTATUNE_UNROLL
  for (int j = 0; j < TAPS; ++j)
    for (int i = 0; i < 8; ++i) recent[j][i] = sums[j][i] = 0.0f;
  Octet<T> ahead[AHEAD], dy_ahead[AHEAD];
  int documents[AHEAD];
  const int start = own.first - (TAPS - 1), last = own.first + ROWS, end = last < rows.length ? last : rows.length;
  const bool aligned = aligned16(dy);
  DELTATUNE_UNROLL
  for (int i = 0; i < AHEAD; ++i) {
    if (start + i < end) rows.load(ahead[i], documents[i], own, start + i);
    if (start + i >= own.first && start + i < end)
      fetch(dy_ahead[i], dy, ((long)own.b * rows.length + start + i) * own.width + own.place, aligned);
  }
  int document = documents[0];
  for (int from = start; from < end; from += AHEAD) {
    DELTATUNE_UNROLL
    for (int i = 0; i < AHEAD; ++i) {
      const int t = from + i, next = t + AHEAD;
      if (t < end) {
        float d[8], s[8], slope[8];
        // recent[j] is the row j tokens ago, or zeros where that token is of an earlier document.
        const bool same = documents[i] == document;
        document = documents[i];
        DELTATUNE_UNROLL
        for (int j = TAPS - 1; j > 0; --j)
          for (int c = 0; c < 8; ++c) recent[j][c] = same ? recent[j - 1][c] : 0.0f;
        widen(recent[0], ahead[i]);
        if (t >= own.first) widen(d, dy_ahead[i]);
        if (next < end) {
          rows.load(ahead[i], documents[i], own, next);
          if (next >= own.first)
            fetch(dy_ahead[i], dy, ((long)own.b * rows.length + next) * own.width + own.place, aligned);
        }
        if (t >= own.first) {
          DELTATUNE_UNROLL
          for (int c = 0; c < 8; ++c) {
            float sum = 0.0f;
            for (int j = 0; j < TAPS; ++j) sum += w[TAPS - 1 - j][c] * recent[j][c];
            const float sigmoid = sigmoid_of(sum);
            s[c] = counts<SIZE>(own) ? sum * sigmoid : 0.0f;
            slope[c] = sigmoid + s[c] * (1.0f - sigmoid);
            d[c] = counts<SIZE>(own) ? d[c] : 0.0f;
          }
          unnorm<SIZE>(d, s, factor, eps);
          DELTATUNE_UNROLL
          for (int j = 0; j < TAPS; ++j)
            for (int c = 0; c < 8; ++c) sums[j][c] += d[c] * slope[c] * recent[j][c];
        }
      }
    }
  }
  if (!own.live) return;
  DELTATUNE_UNROLL
  for (int n = 0; n < TAPS; ++n) {
    float taps[8];
    for (int i = 0; i < 8; ++i) taps[i] = sums[TAPS - 1 - (8 * n + i) % TAPS][(8 * n + i) / TAPS];
    give(dweight, (share * own.pieces + own.piece) * TAPS + n, taps);
  }
}
// Computes from the gradients of q, k and v those of the weight, as sums over ROWS tokens each: dweight is
// [batch, blocks of ROWS tokens, channels, TAPS].
template <int TAPS, int ROWS, int AHEAD, int BEFORE, int KEY_HEADS, int KEY_SIZE, int VALUES, typename T, typename P,
          typename W, typename S>
inline void conv_silu_taps(long at, long batch, int length, HeadNorms norms, const GLOBAL T* x, P state, W weight,
                           S segments, const GLOBAL T* dq, const GLOBAL T* dk, const GLOBAL T* dv,
                           GLOBAL float* dweight) {
  const ConvShare own = share_at<ROWS, KEY_HEADS, KEY_SIZE, VALUES>(at, length, 0);
  if (own.b >= batch) return;
  const TokenRows<TAPS, BEFORE, T, P, S> rows{x, state, segments, length, aligned16(x) && aligned16(state)};
  const long share = (long)own.b * ((length + ROWS - 1) / ROWS) + own.first / ROWS;
  if (own.part < 2) {
    convolve_taps<TAPS, ROWS, AHEAD, KEY_SIZE>(own, rows, weight, own.part == 0 ? norms.q : norms.k, norms.eps,
                                               own.part == 0 ? dq : dk, share, dweight);
  } else {
    convolve_taps<TAPS, ROWS, AHEAD, 0>(own, rows, weight, 1.0f, 0.0f, dv, share, dweight);
  }
}
