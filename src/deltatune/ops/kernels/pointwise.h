// The kernels for what surrounds the recurrence in a layer, and for the optimizer: each computes element by element or
// row by row in one pass over memory. ops/pointwise launches them.
// Unless its comment says otherwise, a lane loads and stores one piece of eight neighbouring elements, number `at` of
// `count`, and computes in fp32. Where rows are normed, LANES lanes share a row of 8 LANES elements.

inline float sigmoid_of(float x) {
  return 1.0f / (1.0f + DELTATUNE_EXP(-x));
}
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
  for (int i = 0; i < 8; ++i) {
    const float s = sigmoid_of(g[i]), silu = g[i] * s;
    g[i] = d[i] * other[i] * silu_slope(g[i], s);
    d[i] *= silu;
  }
  give(dgate, at, g);
  give(dx, at, d);
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

// Computes y = factor x / sqrt(mean(x^2) + eps) row by row. `numbers` holds factor and eps, so that one compiled kernel
// serves q and k.
template <int LANES, typename N, typename T>
inline void norm_forward(long at, long count, N numbers, const GLOBAL T* x, GLOBAL T* y) {
  const long from = at < count ? at : count - 1;
  float h[8];
  take(h, x, from);
  const float by = numbers[0] * inverse_of<LANES>(h, numbers[1]);
  DELTATUNE_UNROLL
  for (int i = 0; i < 8; ++i) h[i] *= by;
  if (at < count) give(y, at, h);
}
// Computes dx from x and dy.
template <int LANES, typename N, typename T>
inline void norm_backward(long at, long count, N numbers, const GLOBAL T* x, const GLOBAL T* dy, GLOBAL T* dx) {
  const long from = at < count ? at : count - 1;
  float h[8], d[8];
  take(h, x, from);
  take(d, dy, from);
  const float inverse = inverse_of<LANES>(h, numbers[1]);
  const float along = row_dot<LANES>(d, h) * inverse * inverse / (8 * LANES);
  DELTATUNE_UNROLL
  for (int i = 0; i < 8; ++i) d[i] = numbers[0] * inverse * (d[i] - h[i] * along);
  if (at < count) give(dx, at, d);
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

// Copies the rows of x named by `index` to y. A row has `width` pieces.
template <typename T, typename I>
inline void rows_taken(long at, long count, int width, const GLOBAL T* x, I index, GLOBAL T* y) {
  if (at >= count) return;
  const unsigned row = (unsigned)at / (unsigned)width, piece = (unsigned)at % (unsigned)width;
  float h[8];
  take(h, x, (long)index[row] * width + piece);
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

// Makes a step of Adam. A lane computes one parameter.
// fixed holds beta1, 1 - beta1, beta2, 1 - beta2 and eps. moving holds the learning rate divided by m's bias
// correction, 1 / sqrt of v's bias correction, the factor of weight decay, the factor of the gradient, and 0 if the
// step is skipped.
template <typename F, typename M, typename X>
inline void adam_step(long at, long count, F fixed, M moving, X parameter, X gradient, X m, X v,
                      GLOBAL float* new_parameter, GLOBAL float* new_m, GLOBAL float* new_v) {
  if (at >= count) return;
  float p = parameter[at], first = m[at], second = v[at];
  if (moving[4] != 0.0f) {
    const float d = gradient[at] * moving[3];
    first = fixed[0] * first + fixed[1] * d;
    second = fixed[2] * second + fixed[3] * (d * d);
    p = p * moving[2] - moving[0] * first / (metal::sqrt(second) * moving[1] + fixed[4]);
  }
  new_parameter[at] = p;
  new_m[at] = first;
  new_v[at] = second;
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

// The causal depthwise convolution of a layer, followed by silu. x is [batch, rows, channels], whose first TAPS - 1
// rows are the convolution's state and each other row is a token. A lane computes eight channels of ROWS tokens. A tap
// that would reach into an earlier document contributes nothing; the state belongs to the first document.

// The batch row, first row and piece of channels of a lane.
struct Lanes {
  int b, row, piece;
};
template <int ROWS>
inline Lanes lanes_at(long at, int rows, int pieces) {
  const int blocks = (rows + ROWS - 1) / ROWS;
  const long rest = at / pieces;
  return Lanes{(int)(rest / blocks), (int)(rest % blocks) * ROWS, (int)(at % pieces)};
}
// Whether token `from` (the state where negative) is in the same document as token t.
inline bool together(Nothing, long, int, int) { return true; }
template <typename S>
inline bool together(const GLOBAL S* segments, long start, int from, int t) {
  return segments[start + (from < 0 ? 0 : from)] == segments[start + t];
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
// Moves the rows of a window one up; the last is to be written next.
template <int TAPS>
inline void make_room(thread float (&window)[TAPS][8]) {
  DELTATUNE_UNROLL
  for (int j = 0; j + 1 < TAPS; ++j)
    for (int i = 0; i < 8; ++i) window[j][i] = window[j + 1][i];
}
// Computes the convolution at token t, whose rows are in `window`.
template <int TAPS, typename S>
inline void convolve(thread float (&sum)[8], const thread float (&window)[TAPS][8], const thread float (&w)[TAPS][8],
                     S segments, long start, int t) {
  for (int i = 0; i < 8; ++i) sum[i] = 0.0f;
  DELTATUNE_UNROLL
  for (int j = 0; j < TAPS; ++j) {
    if (!together(segments, start, t - (TAPS - 1 - j), t)) continue;
    for (int i = 0; i < 8; ++i) sum[i] += w[j][i] * window[j][i];
  }
}

// Computes y [batch, tokens, channels] from x and weight.
template <int TAPS, int ROWS, typename T, typename W, typename S>
inline void conv_silu_forward(long at, long batch, int rows, int channels, const GLOBAL T* x, W weight, S segments,
                              GLOBAL T* y) {
  const int length = rows - (TAPS - 1), pieces = channels / 8;
  const Lanes own = lanes_at<ROWS>(at, length, pieces);
  if (own.b >= batch) return;
  float w[TAPS][8], window[TAPS][8], sum[8];
  take_taps(w, weight, own.piece);
  const long first = ((long)own.b * rows + own.row) * pieces + own.piece, start = (long)own.b * length;
  DELTATUNE_UNROLL
  for (int j = 0; j + 1 < TAPS; ++j) take(window[j + 1], x, first + (long)j * pieces);
  DELTATUNE_UNROLL
  for (int r = 0; r < ROWS; ++r) {
    const int t = own.row + r;
    if (t >= length) break;
    make_room(window);
    take(window[TAPS - 1], x, first + (long)(r + TAPS - 1) * pieces);
    convolve(sum, window, w, segments, start, t);
    for (int i = 0; i < 8; ++i) sum[i] *= sigmoid_of(sum[i]);
    give(y, (start + t) * pieces + own.piece, sum);
  }
}
// Computes dx [batch, rows, channels]. Row s of x is read by the tokens s - TAPS + 1 to s, whose convolutions are
// computed again.
template <int TAPS, int ROWS, typename T, typename W, typename S>
inline void conv_silu_backward(long at, long batch, int rows, int channels, const GLOBAL T* x, W weight, S segments,
                               const GLOBAL T* dy, GLOBAL T* dx) {
  const int length = rows - (TAPS - 1), pieces = channels / 8;
  const Lanes own = lanes_at<ROWS>(at, rows, pieces);
  if (own.b >= batch) return;
  float w[TAPS][8], window[TAPS][8], d[TAPS][8], sum[8];
  take_taps(w, weight, own.piece);
  const long first = (long)own.b * rows * pieces + own.piece, start = (long)own.b * length;
  DELTATUNE_UNROLL
  for (int j = 0; j + 1 < TAPS; ++j) {
    const int row = own.row - (TAPS - 1) + j;
    take(window[j + 1], x, first + (long)(row > 0 ? row : 0) * pieces);
  }
  DELTATUNE_UNROLL
  for (int r = -(TAPS - 1); r < ROWS; ++r) {
    const int t = own.row + r;
    if (t >= rows) break;
    make_room(window);
    make_room(d);
    for (int i = 0; i < 8; ++i) d[TAPS - 1][i] = 0.0f;
    if (t >= 0 && t < length) {
      take(window[TAPS - 1], x, first + (long)(t + TAPS - 1) * pieces);
      convolve(sum, window, w, segments, start, t);
      take(d[TAPS - 1], dy, (start + t) * pieces + own.piece);
      for (int i = 0; i < 8; ++i) d[TAPS - 1][i] *= silu_slope(sum[i], sigmoid_of(sum[i]));
    } else if (t + TAPS - 1 >= 0 && t + TAPS - 1 < rows) {
      take(window[TAPS - 1], x, first + (long)(t + TAPS - 1) * pieces);
    }
    if (r < 0) continue;
    for (int i = 0; i < 8; ++i) sum[i] = 0.0f;
    DELTATUNE_UNROLL
    for (int j = 0; j < TAPS; ++j) {
      const int reader = t - j;
      if (reader < 0 || reader >= length || !together(segments, start, t - (TAPS - 1), reader)) continue;
      for (int i = 0; i < 8; ++i) sum[i] += w[j][i] * d[TAPS - 1 - j][i];
    }
    give(dx, first + (long)t * pieces, sum);
  }
}
