// One token of each row of a gated attention layer, from its projections to its output projection, for
// ops/decoding/gated_attention_token.py: the norms and the rotary turns of queries and keys, the place of the key and the
// value among those of the row, attention, and the gate. A block computes HEADS query heads of one row, as in
// attention_token.h. Results that the layer's own operations round to the type T of its arrays are rounded to it here
// too.

// The epsilons of the means of the squares, the scale with the factor log2(e), and how far apart the rows of the
// projected queries, keys and values are.
struct GatedTokenNumbers {
  float q_eps, k_eps, scale;
  int q_stride, k_stride, v_stride;
};

// Makes a lane's eight elements of a head normed and turned.
template <int SIZE, int ROTARY, typename T, typename W>
inline void norm_and_turn(thread float (&h)[8], const GLOBAL W* weight, float eps, int piece,
                          const thread HeadTurn& turn) {
  float w[8];
  take(w, weight, piece);
  const float inverse = inverse_of<SIZE / 8>(h, eps);
  DELTATUNE_UNROLL
  for (int i = 0; i < 8; ++i) h[i] = rounded_to<T>(h[i] * inverse * w[i]);
  turn_row<ROTARY>(h, turn);
  DELTATUNE_UNROLL
  for (int i = 0; i < 8; ++i) h[i] = rounded_to<T>(h[i]);
}

// Multiplies the attention of a head by the sigmoid of its gate, which lies behind the head's query.
template <int SIZE, typename T>
struct Gated {
  const GLOBAL T* queries;
  inline T operator()(float y, int head, int element) const {
    const float gate = static_cast<float>(queries[(2 * head + 1) * SIZE + element]);
    return static_cast<T>(rounded_to<T>(y) * rounded_to<T>(sigmoid_of(gate)));
  }
};

// q [B, heads, 2 SIZE], each query followed by its gate; k and v [B, heads / RATIO, SIZE]; keys and values [B, heads /
// RATIO, capacity, SIZE], of which row b has offsets[b]; y [B, heads, SIZE]. The token's key and value are written into
// keys and values behind the row's last ones, though these are inputs: MLX would copy them whole.
template <int GROUPS, int HEADS, int RATIO, int SIZE, int ROTARY, typename T, typename Q, typename K, typename O>
inline void gated_attention_token(Place at, threadgroup char* memory, int heads, int capacity,
                                  GatedTokenNumbers numbers, const GLOBAL T* q, const GLOBAL T* k, const GLOBAL T* v,
                                  const GLOBAL Q* q_weight, const GLOBAL K* k_weight,
                                  const GLOBAL float* frequencies, const GLOBAL T* keys, const GLOBAL T* values,
                                  O offsets, GLOBAL T* y) {
  constexpr int LANES = SIZE / 8;
  const int piece = at.index % LANES, first = at.x * HEADS, key_head = first / RATIO, offset = offsets[at.y];
  const int place = offset < capacity ? offset : capacity - 1;
  const GLOBAL T* queries = q + (long)at.y * numbers.q_stride + first * 2 * SIZE;
  HeadTurn turn;
  make_turn<ROTARY>(turn, piece, offset, frequencies, false);

  Attended<HEADS> own;
  own.start();
  DELTATUNE_UNROLL
  for (int h = 0; h < HEADS; ++h) {
    take(own.query[h], queries, h * 2 * LANES + piece);
    norm_and_turn<SIZE, ROTARY, T>(own.query[h], q_weight, numbers.q_eps, piece, turn);
    DELTATUNE_UNROLL
    for (int i = 0; i < 8; ++i) own.query[h][i] *= numbers.scale;
  }
  float key[8], value[8];
  take(key, k + (long)at.y * numbers.k_stride, key_head * LANES + piece);
  take(value, v + (long)at.y * numbers.v_stride, key_head * LANES + piece);
  norm_and_turn<SIZE, ROTARY, T>(key, k_weight, numbers.k_eps, piece, turn);
  const long start = ((long)at.y * (heads / RATIO) + key_head) * capacity;
  if (at.index < LANES && first % RATIO == 0) {
    give((GLOBAL T*)keys, (start + place) * LANES + piece, key);
    give((GLOBAL T*)values, (start + place) * LANES + piece, value);
  }
  own.template attend<LANES>(key, value, at.index < LANES);
  attend_to_row<GROUPS, HEADS, SIZE>(at, own, keys, values, start, place);
  write_heads<GROUPS, HEADS, SIZE>(at, memory, own, y + ((long)at.y * heads + first) * SIZE, Gated<SIZE, T>{queries});
}
