// The cross-entropy of each row of logits over a vocabulary, and its gradient, for ops/pointwise/vocabulary_loss.py.
// A block takes a row, and each of its LANES lanes takes every LANES-th piece of it: eight logits if all rows start on
// 16 bytes, else one. A row is read once forward and once backward, and everything is computed in fp32.

template <int GROUPS>
struct VocabularyMemory {
  static constexpr constant int bytes = 8 * GROUPS;
};

// The start of a row, in pieces of one and of eight logits.
template <typename T>
inline void take_piece(thread float (&to)[1], const GLOBAL T* row, long at) {
  to[0] = static_cast<float>(row[at]);
}
template <typename T>
inline void take_piece(thread float (&to)[8], const GLOBAL T* row, long at) {
  take_aligned(to, row, at);
}
template <typename T>
inline void give_piece(GLOBAL T* row, long at, const thread float (&from)[1]) {
  row[at] = static_cast<T>(from[0]);
}
template <typename T>
inline void give_piece(GLOBAL T* row, long at, const thread float (&from)[8]) {
  give(row, at, from);
}

// Takes COUNT pieces of a row, LANES apart from number `at` on. All loads are under way before the first is used.
template <int WIDTH, int LANES, int COUNT, typename T>
inline Exponentials exponentials_at(const GLOBAL T* row, long at) {
  float x[COUNT][WIDTH];
  DELTATUNE_UNROLL
  for (int j = 0; j < COUNT; ++j) take_piece(x[j], row, at + j * LANES);
  float largest = x[0][0];
  DELTATUNE_UNROLL
  for (int j = 0; j < COUNT; ++j)
    for (int i = 0; i < WIDTH; ++i) largest = metal::fmax(largest, x[j][i]);
  const float shift = shift_of(largest);
  float sum = 0.0f;
  DELTATUNE_UNROLL
  for (int j = 0; j < COUNT; ++j)
    for (int i = 0; i < WIDTH; ++i) sum += exponential(x[j][i] - shift);
  return Exponentials{largest, sum};
}
template <int WIDTH, int LANES, int COUNT, typename T>
inline void gradients_at(const GLOBAL T* row, GLOBAL T* d_row, long at, float shift, float factor) {
  float x[COUNT][WIDTH];
  DELTATUNE_UNROLL
  for (int j = 0; j < COUNT; ++j) take_piece(x[j], row, at + j * LANES);
  DELTATUNE_UNROLL
  for (int j = 0; j < COUNT; ++j) {
    for (int i = 0; i < WIDTH; ++i) x[j][i] = factor * exponential(x[j][i] - shift);
    give_piece(d_row, at + j * LANES, x[j]);
  }
}

// The maximum and the sum of lane `index` over its share of a row.
template <int WIDTH, int LANES, typename T>
inline Exponentials exponentials_of(const GLOBAL T* row, int vocabulary, int index) {
  const int pieces = vocabulary / WIDTH;
  Exponentials found{-INFINITY, 0.0f};
  int at = index;
  for (; at < pieces - 3 * LANES; at += 4 * LANES) found = joined(found, exponentials_at<WIDTH, LANES, 4>(row, at));
  for (; at < pieces; at += LANES) found = joined(found, exponentials_at<WIDTH, LANES, 1>(row, at));
  return found;
}
// Writes lane `index`'s share of a row's gradient.
template <int WIDTH, int LANES, typename T>
inline void write_gradients(const GLOBAL T* row, GLOBAL T* d_row, int vocabulary, int target, float shift, float sum,
                            float cotangent, int index) {
  const int pieces = vocabulary / WIDTH;
  const float factor = cotangent / sum;
  int at = index;
  for (; at < pieces - 3 * LANES; at += 4 * LANES) gradients_at<WIDTH, LANES, 4>(row, d_row, at, shift, factor);
  for (; at < pieces; at += LANES) gradients_at<WIDTH, LANES, 1>(row, d_row, at, shift, factor);
  // The lane that wrote the target's piece corrects it, so that no other store can come after.
  if (target / WIDTH % LANES != index) return;
  const float probability = exponential(static_cast<float>(row[target]) - shift) / sum;
  d_row[target] = static_cast<T>(cotangent * (probability - 1.0f));
}

// Computes for each row of logits [n, vocabulary] the cross-entropy, the shift of its exponentials and their sum.
template <int GROUPS, typename T, typename I>
inline void vocabulary_losses(Place at, threadgroup char* memory, int vocabulary, const GLOBAL T* logits, I targets,
                              GLOBAL float* losses, GLOBAL float* shifts, GLOBAL float* sums) {
  const GLOBAL T* row = logits + (long)at.x * vocabulary;
  Exponentials found = vocabulary % 8 == 0 && aligned16(logits)
                           ? exponentials_of<8, GROUPS * 32>(row, vocabulary, at.index)
                           : exponentials_of<1, GROUPS * 32>(row, vocabulary, at.index);
  for (int step = 1; step < 32; step *= 2) {
    const float largest = lane_exchange(found.largest, step), sum = lane_exchange(found.sum, step);
    found = joined(found, Exponentials{largest, sum});
  }
  threadgroup float* of_groups = reinterpret_cast<threadgroup float*>(memory);
  if (at.lane == 0) {
    of_groups[2 * at.group] = found.largest;
    of_groups[2 * at.group + 1] = found.sum;
  }
  barrier();
  if (at.index != 0) return;
  for (int i = 1; i < GROUPS; ++i) found = joined(found, Exponentials{of_groups[2 * i], of_groups[2 * i + 1]});
  const float shift = shift_of(found.largest);
  losses[at.x] = metal::log(found.sum) - (static_cast<float>(row[targets[at.x]]) - shift);
  shifts[at.x] = shift;
  sums[at.x] = found.sum;
}

// Computes d_logits = cotangent (softmax(logits) - [1 at the target]) from the outputs of vocabulary_losses.
template <int GROUPS, typename T, typename I, typename F>
inline void vocabulary_gradients(Place at, threadgroup char*, int vocabulary, const GLOBAL T* logits, I targets,
                                 F shifts, F sums, F cotangents, GLOBAL T* d_logits) {
  const GLOBAL T* row = logits + (long)at.x * vocabulary;
  GLOBAL T* d_row = d_logits + (long)at.x * vocabulary;
  const int target = targets[at.x];
  const float shift = shifts[at.x], sum = sums[at.x], cotangent = cotangents[at.x];
  if (vocabulary % 8 == 0 && aligned16(logits))
    write_gradients<8, GROUPS * 32>(row, d_row, vocabulary, target, shift, sum, cotangent, at.index);
  else
    write_gradients<1, GROUPS * 32>(row, d_row, vocabulary, target, shift, sum, cotangent, at.index);
}
