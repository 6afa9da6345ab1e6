// Sums of the exponentials of a row's logits. They are taken of a logit's difference from the largest of its row, which
// is exact where that matters: a multiple of the logit itself would be rounded to 5e-4 at 1e4.

// The largest of some logits, and the sum of exp(logit - largest).
struct Exponentials {
  float largest, sum;
};

inline float exponential(float difference) {
  return DELTATUNE_EXP2(difference * 1.4426950408889634f);
}
// The number subtracted from logits: 0 in the place of a largest logit of -infinity, which would give NaN.
inline float shift_of(float largest) {
  return largest == -INFINITY ? 0.0f : largest;
}
// A NaN is not the largest logit, but it makes the sum NaN.
inline Exponentials joined(Exponentials a, Exponentials b) {
  const float largest = metal::fmax(a.largest, b.largest), shift = shift_of(largest);
  return Exponentials{largest, a.sum * exponential(a.largest - shift) + b.sum * exponential(b.largest - shift)};
}
