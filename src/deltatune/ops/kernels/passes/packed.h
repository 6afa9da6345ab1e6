// Unpacks matrices that are quantised in groups, each with a scale and a bias: y = scale q + bias, rounded once.
// ops/pointwise/unpacking.py launches it.

// The eight numbers q of a piece, the first of them in the lowest bits. Numbers of BITS bits follow one another through
// words of 32 bits, from the lowest bit of each on, so a piece starts on a byte and reaches into two words at most.
template <int BITS, typename W>
inline unsigned long packed_piece(W w, unsigned piece) {
  const unsigned word = piece * BITS / 4, shift = piece * BITS % 4 * 8;
  unsigned long bits = w[word];
  if (shift + 8 * BITS > 32) bits |= (unsigned long)w[word + 1] << 32;
  return bits >> shift;
}
// A lane unpacks MORE of `count` pieces, which are 32 apart, so that neighbouring lanes write neighbouring pieces. All
// loads are under way before the first result is stored.
template <int BITS, int GROUP, int MORE, typename W, typename S, typename Y>
inline void unpacked_groups(long at, unsigned count, W w, S scales, S biases, GLOBAL Y* y) {
  const unsigned first = (unsigned)(at / 32) * (32 * MORE) + (unsigned)at % 32;
  unsigned long bits[MORE];
  float scale[MORE], bias[MORE];
  DELTATUNE_UNROLL
  for (int j = 0; j < MORE; ++j) {
    const unsigned piece = first + 32 * j, from = piece < count ? piece : count - 1;
    bits[j] = packed_piece<BITS>(w, from);
    scale[j] = static_cast<float>(scales[from / (GROUP / 8)]);
    bias[j] = static_cast<float>(biases[from / (GROUP / 8)]);
  }
  DELTATUNE_UNROLL
  for (int j = 0; j < MORE; ++j) {
    float h[8];
    DELTATUNE_UNROLL
    for (int i = 0; i < 8; ++i)
      h[i] = scale[j] * static_cast<float>((unsigned)(bits[j] >> (BITS * i)) & ((1u << BITS) - 1)) + bias[j];
    if (first + 32 * j < count) give(y, first + 32 * j, h);
  }
}
