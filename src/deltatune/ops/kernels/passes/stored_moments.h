// A step of Adam with moments stored in 8 bits, for ops/pointwise/stored_moments.py, which defines the codes. A group
// of 32 lanes computes one block of 256 numbers, which share a scale, and each lane one piece of eight.

inline float magnitude_of(float x) {
  return metal::fmax(x, -x);
}
// The code of a magnitude of `share` times its block's scale. With SIGNED half of the codes are negative.
template <bool SIGNED>
inline int code_of(float share, bool negative) {
  constexpr int decades = 7, top = SIGNED ? 128 : 255;
  // The factor that brings a magnitude into the decade from 0.1 to 1.
  float factor = 1.0f;
  int decade = decades - 1;
  if (share <= 1e-1f) factor = 1e1f, decade = 5;
  if (share <= 1e-2f) factor = 1e2f, decade = 4;
  if (share <= 1e-3f) factor = 1e3f, decade = 3;
  if (share <= 1e-4f) factor = 1e4f, decade = 2;
  if (share <= 1e-5f) factor = 1e5f, decade = 1;
  if (share <= 1e-6f) factor = 1e6f, decade = 0;
  const int intervals = 1 << (SIGNED ? decade : decade + 1);
  const int within = (int)((share * factor - 0.1f) / 0.9f * (float)intervals);
  int code = intervals + (within < 0 ? 0 : within < intervals ? within : intervals - 1) - (SIGNED ? 0 : 1);
  // The code of 1, from halfway between it and the code before; and that of 0, which a second moment above 0 never gets.
  if (share >= 1.0f - 0.225f / (SIGNED ? 64 : 128)) code = top;
  if (SIGNED ? share < 0.275e-6f : !(share > 0.0f)) return 0;
  return SIGNED && negative ? (code == top ? 255 : code + 128) : code;
}

// The largest number of the lanes of a group.
inline float lane_largest(float x) {
  DELTATUNE_UNROLL
  for (int step = 1; step < 32; step *= 2) x = metal::fmax(x, lane_exchange(x, step));
  return x;
}

// Writes the codes of a lane's numbers, of which `there` exist, and by the first lane of the group the block's scale.
template <bool SIGNED>
inline void store_codes(const thread float (&x)[8], GLOBAL unsigned char* codes, GLOBAL float* scales, long block,
                        int lane, int there) {
  float largest = 0.0f;
  DELTATUNE_UNROLL
  for (int i = 0; i < 8; ++i) largest = metal::fmax(largest, magnitude_of(x[i]));
  const float scale = lane_largest(largest), divisor = scale > 0.0f ? scale : 1.0f;
  if (lane == 0) scales[block] = scale;
  unsigned words[2] = {0, 0};
  DELTATUNE_UNROLL
  for (int i = 0; i < 8; ++i)
    words[i / 4] |= (unsigned)code_of<SIGNED>(magnitude_of(x[i]) / divisor, x[i] < 0.0f) << (i % 4 * 8);
  const long start = block * 256 + lane * 8;
  if (there == 8) {
    GLOBAL unsigned* to = reinterpret_cast<GLOBAL unsigned*>(codes + start);
    to[0] = words[0];
    to[1] = words[1];
  } else {
    DELTATUNE_UNROLL
    for (int i = 0; i < 8; ++i) {
      if (i < there) codes[start + i] = (unsigned char)(words[i / 4] >> (i % 4 * 8) & 255);
    }
  }
}

// Makes the step of adam_step, with its `fixed` and `moving`, on `count` numbers. `signs` and `magnitudes` hold the
// values of the codes of m and of v.
template <typename F, typename M, typename V, typename P, typename G, typename C, typename S, typename Y>
inline void adam_step_8bit(long at, long count, F fixed, M moving, V signs, V magnitudes, P parameter, G gradient, C m,
                           S m_scale, C v, S v_scale, GLOBAL Y* new_parameter, GLOBAL unsigned char* new_m,
                           GLOBAL float* new_m_scale, GLOBAL unsigned char* new_v, GLOBAL float* new_v_scale) {
  const long block = at / 32, start = at * 8;
  // A group leaves as a whole, since its lanes compare their numbers.
  if (block * 256 >= count) return;
  const int lane = (int)(at % 32), there = count - start >= 8 ? 8 : count > start ? (int)(count - start) : 0;
  if (moving[4] == 0.0f) {
    for (long i = start; i < start + there; ++i) {
      new_parameter[i] = static_cast<Y>(parameter[i]);
      new_m[i] = m[i];
      new_v[i] = v[i];
    }
    if (lane == 0) {
      new_m_scale[block] = m_scale[block];
      new_v_scale[block] = v_scale[block];
    }
    return;
  }
  const float of_m = m_scale[block], of_v = v_scale[block];
  float p[8], d[8], first[8], second[8];
  if (there == 8) {
    take(p, parameter, at);
    take(d, gradient, at);
  }
  DELTATUNE_UNROLL
  for (int i = 0; i < 8; ++i) {
    const bool exists = i < there;
    if (there != 8) {
      p[i] = exists ? static_cast<float>(parameter[start + i]) : 0.0f;
      d[i] = exists ? static_cast<float>(gradient[start + i]) : 0.0f;
    }
    first[i] = exists ? of_m * signs[(int)m[start + i]] : 0.0f;
    second[i] = exists ? of_v * magnitudes[(int)v[start + i]] : 0.0f;
    adam_number(p[i], first[i], second[i], d[i], fixed, moving);
  }
  if (there == 8) {
    give(new_parameter, at, p);
  } else {
    DELTATUNE_UNROLL
    for (int i = 0; i < 8; ++i) {
      if (i < there) new_parameter[start + i] = static_cast<Y>(p[i]);
    }
  }
  store_codes<true>(first, new_m, new_m_scale, block, lane, there);
  store_codes<false>(second, new_v, new_v_scale, block, lane, there);
}
