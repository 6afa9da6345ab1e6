// The third step of ladder.py: the recurrence, token after token, by one kernel. It is written in Metal's own words and
// those of metal.h; cuda.h has the same for CUDA.
// A lane keeps one row of a state S [DV, DK] in its registers, and rows do not depend on one another. So 32 lanes, a
// block, do 32 rows; the grid is (DV / 32, HV, B). Only k and q are read by all lanes: a block copies them to shared
// memory, token by token. Nothing is kept for a backward pass.

// How a block's shared memory is laid out: k, then q, in fp32.
template <int DK>
struct LadderMemory {
  static constexpr constant int queries = DK * 4, bytes = 2 * queries;
};

// Inputs: q, k [B,T,HK,DK]; v [B,T,HV,DV]; log_g, beta [B,T,HV]. Output: y [B,T,HV,DV].
template <int DK, int DV, int HK, int HV, typename PQ, typename PK, typename PV, typename PG, typename PB, typename OY>
inline void ladder_scan(Place at, threadgroup char* memory, int length, PQ q, PK k, PV v, PG log_g, PB beta, OY y) {
  const Wide<float> keys = shared_at<Wide<float>>(memory, 0, DK);
  const Wide<float> queries = shared_at<Wide<float>>(memory, LadderMemory<DK>::queries, DK);
  const int row = at.x * 32 + at.lane, key_head = at.y / (HV / HK);
  float state[DK];
  DELTATUNE_UNROLL
  for (int i = 0; i < DK; ++i) state[i] = 0;
  for (int t = 0; t < length; ++t) {
    const long token = (long)at.z * length + t, head = token * HV + at.y, first = (token * HK + key_head) * DK;
    barrier();  // Every lane has read the token before.
    for (int i = at.lane; i < DK; i += 32) {
      keys.put(i, (float)k[first + i]);
      queries.put(i, (float)q[first + i]);
    }
    barrier();  // The token is there.
    // S <- S exp(log_g), and what S then holds about the key: S k.
    const float gate = DELTATUNE_EXP((float)log_g[head]);
    float held = 0;
    DELTATUNE_UNROLL
    for (int i = 0; i < DK; ++i) {
      state[i] *= gate;
      held += state[i] * keys.get(i);
    }
    // S <- S + beta (v - S k) k^T, and y = S q.
    const float change = row < DV ? (float)beta[head] * ((float)v[head * DV + row] - held) : 0.0f;
    float answer = 0;
    DELTATUNE_UNROLL
    for (int i = 0; i < DK; ++i) {
      state[i] += change * keys.get(i);
      answer += state[i] * queries.get(i);
    }
    if (row < DV) y[head * DV + row] = answer;
  }
}
