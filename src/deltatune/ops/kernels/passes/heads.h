// The kernels around the attention of a layer, for ops/pointwise/heads.py. Projections are [batch, length, heads, size],
// with one token after the other, and attention takes [batch, heads, length, size].
// LANES lanes share a row, which is one head of a token, with eight elements each.

// A lane's piece of a row, its token's position t, and the numbers of its row in both orders. Lanes past the end compute
// the last row again without storing it, because the sums need every lane of a group.
struct HeadRow {
  int piece, t;
  long by_token, by_head;
  bool live;
};
// A lane computes HEADS neighbouring heads of its token: the next is 1 further by token, and `length` further by head.
template <int LANES, int HEADS>
inline HeadRow head_row(long at, long tokens, int length, int heads) {
  const unsigned shares = (unsigned)heads / HEADS;
  const long row = at / LANES, rows = tokens * shares;
  const unsigned own = (unsigned)(row < rows ? row : rows - 1), token = own / shares, head = own % shares * HEADS;
  HeadRow found;
  found.piece = (int)(at % LANES);
  found.t = (int)(token % (unsigned)length);
  found.by_token = (long)token * heads + head;
  found.by_head = ((long)(token / (unsigned)length) * heads + head) * length + found.t;
  found.live = row < rows;
  return found;
}

// The sine and cosine of an angle of up to 2^20, to about a unit in the last place of 1. The machines' own functions are
// as accurate, but hold so much text for larger angles that sixteen of them fill an instruction cache.
inline void sine_and_cosine(float angle, thread float& sine, thread float& cosine) {
  // The nearest multiple of pi / 2 is subtracted in three parts. The first difference is exact: it is below 1, and both
  // of its terms are multiples of 2^-23.
  const float turns = metal::rint(angle * 0.636619772f);
  float x = metal::fma(-turns, 1.57079625f, angle);
  x = metal::fma(-turns, 7.54978942e-08f, x);
  x = metal::fma(-turns, 5.39030253e-15f, x);
  // The polynomials for the rest, up to pi / 4, are those of sinf and cosf in S. Moshier's Cephes library.
  const float square = x * x;
  float s = metal::fma(square, -1.9515295891e-4f, 8.3321608736e-3f);
  s = metal::fma(square, s, -1.6666654611e-1f);
  s = metal::fma(square * x, s, x);
  float c = metal::fma(square, 2.443315711809948e-5f, -1.388731625493765e-3f);
  c = metal::fma(square, c, 4.166664568298827e-2f);
  c = metal::fma(square * square, c, metal::fma(square, -0.5f, 1.0f));
  const int quarter = (int)turns & 3;
  sine = quarter & 1 ? c : s;
  cosine = quarter & 1 ? s : c;
  if (quarter & 2) sine = -sine;
  if ((quarter + 1) & 2) cosine = -cosine;
}

// A rotary turn of a row's first ROTARY elements: i and i + ROTARY / 2 turn together, by the angle t frequencies[i]. The
// second of the two is in another lane. Sines have the sign with which a lane adds the other's element.
struct HeadTurn {
  float cosine[8], sine[8];
  bool turns;
};
// Makes the turn at position t, or its inverse if `back`.
template <int ROTARY>
inline void make_turn(thread HeadTurn& turn, int piece, int t, const GLOBAL float* frequencies, bool back) {
  constexpr int half_lanes = ROTARY / 16;
  turn.turns = piece < 2 * half_lanes;
  if (!turn.turns) return;
  const bool first = piece < half_lanes;
  float angle[8];
  take(angle, frequencies, first ? piece : piece - half_lanes);
  DELTATUNE_UNROLL
  for (int i = 0; i < 8; ++i) {
    float sine;
    sine_and_cosine(angle[i] * (float)t, sine, turn.cosine[i]);
    turn.sine[i] = first == back ? sine : -sine;
  }
}
template <int ROTARY>
inline void turn_row(thread float (&h)[8], const thread HeadTurn& turn) {
  DELTATUNE_UNROLL
  for (int i = 0; i < 8; ++i) {
    const float other = lane_exchange(h[i], ROTARY / 16);
    if (turn.turns) h[i] = h[i] * turn.cosine[i] + other * turn.sine[i];
  }
}

// Computes y [batch, heads, length, size]: the turned rows of x / rms(x) weight. Where GATED, a row of x is followed by
// one of its gate; the sigmoid of that goes to `gate` [batch, length, heads, size], which is Nothing elsewhere.
template <int LANES, int HEADS, int ROTARY, bool GATED, typename T, typename W, typename G>
inline void turned_heads_forward(long at, long tokens, int length, int heads, float eps, const GLOBAL T* x,
                                 const GLOBAL W* weight, const GLOBAL float* frequencies, GLOBAL T* y, G gate) {
  constexpr int parts = GATED ? 2 : 1;
  const HeadRow own = head_row<LANES, HEADS>(at, tokens, length, heads);
  const bool aligned = aligned16(x);
  Octet<T> rows[HEADS], gates[HEADS];
  DELTATUNE_UNROLL
  for (int n = 0; n < HEADS; ++n) {
    fetch(rows[n], x, (own.by_token + n) * parts * LANES + own.piece, aligned);
    if (GATED) fetch(gates[n], x, ((own.by_token + n) * parts + 1) * LANES + own.piece, aligned);
  }
  float w[8];
  take(w, weight, own.piece);
  HeadTurn turn;
  make_turn<ROTARY>(turn, own.piece, own.t, frequencies, false);
  DELTATUNE_UNROLL
  for (int n = 0; n < HEADS; ++n) {
    float h[8];
    widen(h, rows[n]);
    const float inverse = inverse_of<LANES>(h, eps);
    DELTATUNE_UNROLL
    for (int i = 0; i < 8; ++i) h[i] *= inverse * w[i];
    turn_row<ROTARY>(h, turn);
    if (own.live) give(y, (own.by_head + (long)n * length) * LANES + own.piece, h);
    if (GATED) {
      widen(h, gates[n]);
      DELTATUNE_UNROLL
      for (int i = 0; i < 8; ++i) h[i] = sigmoid_of(h[i]);
      if (own.live) give(gate, (own.by_token + n) * LANES + own.piece, h);
    }
  }
}
// Computes dx from x, dy in the layout of y, and dgate. With u = weight times dy turned back,
// dx = (u - x <u, x> / (size rms^2)) / rms.
template <int LANES, int HEADS, int ROTARY, bool GATED, typename T, typename W, typename G>
inline void turned_heads_backward(long at, long tokens, int length, int heads, float eps, const GLOBAL T* x,
                                  const GLOBAL W* weight, const GLOBAL float* frequencies, const GLOBAL T* dy, G dgate,
                                  GLOBAL T* dx) {
  constexpr int parts = GATED ? 2 : 1;
  const HeadRow own = head_row<LANES, HEADS>(at, tokens, length, heads);
  const bool aligned = aligned16(x), dy_aligned = aligned16(dy);
  Octet<T> rows[HEADS], gates[HEADS], d[HEADS], d_gates[HEADS];
  DELTATUNE_UNROLL
  for (int n = 0; n < HEADS; ++n) {
    fetch(rows[n], x, (own.by_token + n) * parts * LANES + own.piece, aligned);
    fetch(d[n], dy, (own.by_head + (long)n * length) * LANES + own.piece, dy_aligned);
    if (GATED) {
      fetch(gates[n], x, ((own.by_token + n) * parts + 1) * LANES + own.piece, aligned);
      fetch(d_gates[n], dgate, (own.by_token + n) * LANES + own.piece, aligned16(dgate));
    }
  }
  float w[8];
  take(w, weight, own.piece);
  HeadTurn turn;
  make_turn<ROTARY>(turn, own.piece, own.t, frequencies, true);
  DELTATUNE_UNROLL
  for (int n = 0; n < HEADS; ++n) {
    float h[8], u[8];
    widen(h, rows[n]);
    widen(u, d[n]);
    turn_row<ROTARY>(u, turn);
    const float inverse = inverse_of<LANES>(h, eps);
    DELTATUNE_UNROLL
    for (int i = 0; i < 8; ++i) u[i] *= w[i];
    const float along = row_dot<LANES>(u, h) * inverse * inverse / (8 * LANES);
    DELTATUNE_UNROLL
    for (int i = 0; i < 8; ++i) u[i] = inverse * (u[i] - h[i] * along);
    if (own.live) give(dx, (own.by_token + n) * parts * LANES + own.piece, u);
    if (GATED) {
      widen(h, gates[n]);
      widen(u, d_gates[n]);
      DELTATUNE_UNROLL
      for (int i = 0; i < 8; ++i) {
        const float s = sigmoid_of(h[i]);
        u[i] *= s * (1.0f - s);
      }
      if (own.live) give(dx, ((own.by_token + n) * parts + 1) * LANES + own.piece, u);
    }
  }
}

// Computes out [batch, length, heads, size] = y gate, from y [batch, heads, length, size] and a gate in out's layout.
template <int LANES, typename T>
inline void times_gate_forward(long at, long tokens, int length, int heads, const GLOBAL T* y, const GLOBAL T* gate,
                               GLOBAL T* out) {
  const HeadRow own = head_row<LANES, 1>(at, tokens, length, heads);
  if (!own.live) return;
  float h[8], g[8];
  take(h, y, own.by_head * LANES + own.piece);
  take(g, gate, own.by_token * LANES + own.piece);
  DELTATUNE_UNROLL
  for (int i = 0; i < 8; ++i) h[i] *= g[i];
  give(out, own.by_token * LANES + own.piece, h);
}
// Computes dy and dgate from y, the gate and the gradient d of out.
template <int LANES, typename T>
inline void times_gate_backward(long at, long tokens, int length, int heads, const GLOBAL T* y, const GLOBAL T* gate,
                                const GLOBAL T* d, GLOBAL T* dy, GLOBAL T* dgate) {
  const HeadRow own = head_row<LANES, 1>(at, tokens, length, heads);
  if (!own.live) return;
  float h[8], g[8], u[8];
  take(h, y, own.by_head * LANES + own.piece);
  take(g, gate, own.by_token * LANES + own.piece);
  take(u, d, own.by_token * LANES + own.piece);
  DELTATUNE_UNROLL
  for (int i = 0; i < 8; ++i) {
    h[i] *= u[i];
    g[i] *= u[i];
  }
  give(dy, own.by_head * LANES + own.piece, g);
  give(dgate, own.by_token * LANES + own.piece, h);
}
