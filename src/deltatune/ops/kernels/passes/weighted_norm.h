// RMS norms with a weight, alone or of a sum of two arrays, for ops/pointwise/weighted_norms.py. SHARING groups of a
// block share a row, so that a block takes GROUPS / SHARING rows; a lane takes PIECES pieces of eight elements of its
// row, and everything is computed in fp32. Lanes past the last row compute it again without storing it, because the sums
// need every lane.

template <int GROUPS>
struct WeightedNormMemory {
  static constexpr constant int bytes = 8 * GROUPS;
};

// Where a lane's row starts, in pieces, its first piece in there, and whether the row exists.
struct NormShare {
  long start;
  int first;
  bool real;
};
template <int GROUPS, int SHARING>
inline NormShare share_of(Place at, int rows, int pieces) {
  const int row = at.x * (GROUPS / SHARING) + at.group / SHARING;
  return NormShare{(long)(row < rows ? row : rows - 1) * pieces, at.index % (32 * SHARING), row < rows};
}
// Makes a and b their sums over all lanes of a row.
template <int SHARING>
inline void sum_over_row(Place at, threadgroup char* memory, thread float& a, thread float& b) {
  for (int step = 1; step < 32; step *= 2) {
    a += lane_exchange(a, step);
    b += lane_exchange(b, step);
  }
  if (SHARING == 1) return;
  threadgroup float* of_groups = reinterpret_cast<threadgroup float*>(memory);
  if (at.lane == 0) {
    of_groups[2 * at.group] = a;
    of_groups[2 * at.group + 1] = b;
  }
  barrier();
  a = b = 0.0f;
  for (int i = at.group / SHARING * SHARING; i < (at.group / SHARING + 1) * SHARING; ++i) {
    a += of_groups[2 * i];
    b += of_groups[2 * i + 1];
  }
}
// Adds piece number `at` of an array that a call may lack.
inline void add_piece(thread float (&)[8], Nothing, long) {}
template <typename T>
inline void add_piece(thread float (&to)[8], const GLOBAL T* other, long at) {
  float more[8];
  take(more, other, at);
  for (int i = 0; i < 8; ++i) to[i] += more[i];
}
// Stores a piece of the sum, and rounds it to the stored value. Without a second array there is nothing to store.
inline void give_sum(Nothing, long, thread float (&)[8], bool) {}
template <typename T>
inline void give_sum(GLOBAL T* sum, long at, thread float (&h)[8], bool real) {
  for (int i = 0; i < 8; ++i) h[i] = static_cast<float>(static_cast<T>(h[i]));
  if (real) give(sum, at, h);
}

// Computes sum = x + other and y = sum / sqrt(mean(sum^2) + eps) weight. x, other, sum and y are [rows, width].
template <int GROUPS, int SHARING, int PIECES, typename T, typename O, typename W, typename S>
inline void weighted_norm_forward(Place at, threadgroup char* memory, int rows, int width, float eps, const GLOBAL T* x,
                                  O other, const GLOBAL W* weight, S sum, GLOBAL T* y) {
  const int pieces = width / 8;
  const NormShare own = share_of<GROUPS, SHARING>(at, rows, pieces);
  float h[PIECES][8], squares = 0.0f, none = 0.0f;
  DELTATUNE_UNROLL
  for (int j = 0; j < PIECES; ++j) {
    const int piece = own.first + j * 32 * SHARING;
    if (piece >= pieces) continue;
    take(h[j], x, own.start + piece);
    add_piece(h[j], other, own.start + piece);
    give_sum(sum, own.start + piece, h[j], own.real);
    for (int i = 0; i < 8; ++i) squares += h[j][i] * h[j][i];
  }
  sum_over_row<SHARING>(at, memory, squares, none);
  const float inverse = metal::rsqrt(squares / width + eps);
  DELTATUNE_UNROLL
  for (int j = 0; j < PIECES; ++j) {
    const int piece = own.first + j * 32 * SHARING;
    if (piece >= pieces || !own.real) continue;
    float w[8];
    take(w, weight, piece);
    for (int i = 0; i < 8; ++i) h[j][i] *= inverse * w[i];
    give(y, own.start + piece, h[j]);
  }
}

// Computes dx = d_sum + the gradient that dy gives to the normed rows h. With u = dy weight and r = 1 / rms, that is
// r (u - h <u, h> r^2 / width).
template <int GROUPS, int SHARING, int PIECES, typename T, typename W, typename S>
inline void weighted_norm_backward(Place at, threadgroup char* memory, int rows, int width, float eps,
                                   const GLOBAL T* h, const GLOBAL W* weight, const GLOBAL T* dy, S d_sum,
                                   GLOBAL T* dx) {
  const int pieces = width / 8;
  const NormShare own = share_of<GROUPS, SHARING>(at, rows, pieces);
  float normed[PIECES][8], u[PIECES][8], squares = 0.0f, along = 0.0f;
  DELTATUNE_UNROLL
  for (int j = 0; j < PIECES; ++j) {
    const int piece = own.first + j * 32 * SHARING;
    if (piece >= pieces) continue;
    float w[8];
    take(normed[j], h, own.start + piece);
    take(u[j], dy, own.start + piece);
    take(w, weight, piece);
    for (int i = 0; i < 8; ++i) {
      u[j][i] *= w[i];
      squares += normed[j][i] * normed[j][i];
      along += normed[j][i] * u[j][i];
    }
  }
  sum_over_row<SHARING>(at, memory, squares, along);
  const float inverse = metal::rsqrt(squares / width + eps);
  along *= inverse * inverse / width;
  DELTATUNE_UNROLL
  for (int j = 0; j < PIECES; ++j) {
    const int piece = own.first + j * 32 * SHARING;
    if (piece >= pieces || !own.real) continue;
    for (int i = 0; i < 8; ++i) u[j][i] = inverse * (u[j][i] - normed[j][i] * along);
    add_piece(u[j], d_sum, own.start + piece);
    give(dx, own.start + piece, u[j]);
  }
}
