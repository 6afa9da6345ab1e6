// The warps of hopper_gradients.h that compute the gradients of log_g and beta, from sums that the teams leave in
// shared memory.

// The tables and sums of one unit's gates in shared memory.
template <int DV>
struct GradientTables {
  using Memory = HopperGradientMemory<DV>;
  Room room;
  int unit;
  inline Decay<64> decay() const { return decay_at<64>(room.floats(Memory::decay + (unit & 1) * Memory::decay_bytes)); }
  inline threadgroup float* before() const { return room.floats(Memory::scalars + (unit & 1) * 1024); }
  inline threadgroup float* after() const { return before() + 64; }
  inline threadgroup float* rate() const { return before() + 128; }
  inline threadgroup float* gate() const { return before() + 192; }
  // The factor of the sums by columns of DK of a team, in a row.
  template <int TEAM>
  inline float factor(int row) const {
    if (TEAM == 2) return after()[row] * rate()[row];
    return TEAM == 0 ? before()[row] : -before()[row] * rate()[row];
  }
};

// The sum of a number over 16 lanes.
inline float sum_of_16(float x) {
  DELTATUNE_UNROLL
  for (int m = 1; m < 16; m *= 2) x += lane_exchange(x, m);
  return x;
}
// Adds to `own` the numbers of the lanes after it among 16, or unless AFTER those before it.
template <bool AFTER>
inline float add_others_of_16(float own, float x, int lane) {
  DELTATUNE_UNROLL
  for (int m = 1; m < 16; m *= 2) {
    const float others = lane_exchange(x, m);
    if (((lane & m) == 0) == AFTER) own += others;
    x += others;
  }
  return own;
}
// The terms of a unit in the gradients of log_g and beta at a position.
struct GateSums {
  float on_gate, on_beta;
};
// Computes `ends_by_pairs` and `spanning` of gradient_gates.h for position t, 64 lanes at a time: 16 positions are
// summed by lanes, and then the totals of other 16. As there, only terms with a span that contains t are added.
template <int DV>
inline GateSums sum_positions(Room room, GradientTables<DV> tables, int unit, int t, int lane) {
  using Memory = HopperGradientMemory<DV>;
  constexpr int other_kind = Memory::diagonal_bytes / 4;
  const int own = t / 16, column = t % 16;
  threadgroup float* diagonal = room.floats(Memory::diagonal) + own * 16 * 17;
  threadgroup float* totals = room.floats(Memory::totals) + (unit & 1) * 16;
  // A lane sums a column of a diagonal tile from the last row up, and keeps each sum in the row where it came to.
  float below = 0.0f, at_own = 0.0f;
  DELTATUNE_UNROLL
  for (int i = 15; i >= 0; --i) {
    below += diagonal[i * 17 + column] + diagonal[other_kind + i * 17 + column];
    diagonal[i * 17 + column] = below;
    if (i == column) at_own = below;
  }
  float columns[4], others[4], rows[4] = {0.0f, 0.0f, 0.0f, 0.0f}, later = 0.0f;
  get_four(columns, room.floats(Memory::column_sums) + t * 4);
  get_four(others, room.floats(Memory::column_sums + 1024) + t * 4);
  DELTATUNE_UNROLL
  for (int b = 1; b < 4; ++b) later += b > own ? columns[b] + others[b] : 0.0f;
  const float rates = room.floats(Memory::rate_sums)[t];
  float after = room.floats(Memory::after_sums)[t];
  if (tables.after()[t] >= 0.03125f) after = tables.rate()[t] * rates - (at_own + later);
  for (int kind = 0; kind < 2; ++kind) {
    get_four(columns, room.floats(Memory::row_sums + kind * 1024) + t * 4);
    DELTATUNE_UNROLL
    for (int b = 0; b < 3; ++b) rows[b] += columns[b];
  }
  // The terms of row t with tiles before tile 0, 1, 2 and 3.
  float of_teams[2];
  get_two(of_teams, room.floats(Memory::before_sums) + t * 2);
  float before = of_teams[0] + of_teams[1], spanning = before;
  DELTATUNE_UNROLL
  for (int b = 0; b < 3; ++b) {
    const float total = sum_of_16(before);
    if (column == 0) totals[own * 4 + b] = total;
    before += rows[b];
    if (b < own) spanning = before;
  }
  const float total = sum_of_16(after);
  if (column == 0) totals[own * 4 + 3] = total;
  float sum = add_others_of_16<true>(spanning, spanning, lane) + add_others_of_16<false>(0.0f, after + later, lane);
  group_barrier();
  float pairs = 0.0f;
  DELTATUNE_UNROLL
  for (int j = 0; j < 15; ++j) pairs += j < column ? diagonal[column * 17 + j] : 0.0f;
  named_barrier<64, 2>();
  for (int b = 0; b < 4; ++b)
    if (b != own) sum += totals[b * 4 + (b > own ? own : 3)];
  get_four(columns, room.floats(Memory::dots));
  get_four(others, room.floats(Memory::dots) + 4);
  float dots = 0.0f;
  DELTATUNE_UNROLL
  for (int i = 0; i < 4; ++i) dots += columns[i] + others[i];
  return GateSums{dots * tables.before()[63] + (sum + pairs), rates};
}

// Writes 64 rows of dq or dk that a team has handed over, by 64 threads.
template <typename In, int HK, typename P>
inline void write_rows(threadgroup const char* rows, P out, GradientItem item, int length, int t) {
  const long first = (long)item.row * length + item.n * 64;
  const int left = length - item.n * 64;
  _Pragma("unroll 4")
  for (int row = t / 16; row < 64; row += 4) {
    const auto from = reinterpret_cast<threadgroup const In*>(rows + row_piece(row, t % 16));
    if (row < left) put_whole_piece(out + ((first + row) * HK + item.head) * 128 + t % 16 * 8, from);
  }
}

// Fills the tables of every unit's gates, and adds up the units' terms in the gradients of log_g and beta. Writes every
// item's dq and dk. Two warps do it, a thread for each position.
template <typename In, int DV, int HK, int HV, bool MASKED, bool SEGMENTED, typename PL, typename PM, typename PZ,
          typename PF, typename OQ, typename OK, typename B>
inline void sum_gates(Place at, Room room, GradientBarriers barriers, int length, int items, int chunks, PL log_g,
                      PM mask, PZ segments, PF factors, OQ dq, OK dk, GLOBAL float* d_log_g, GLOBAL B* d_beta) {
  using Memory = HopperGradientMemory<DV>;
  constexpr int repeats = HV / HK;
  const GradientItems<DV> next{room, barriers};
  const int t = at.index % 64;
  // The items of a step's unit, and of the one after it.
  int number = -1, following = at.x;
  for (int step = -1; number < items; ++step, number = following) {
    if (step >= 0 && (step + 1) % repeats == 0) following = next.after(step / repeats);
    if (following < items) {
      const GradientItem item = item_at<HK>(following, chunks);
      const GradientTables<DV> tables{room, step + 1};
      const int hv = item.head * repeats + (step + 1) % repeats;
      const long chunk = ((long)item.row * HV + hv) * chunks + item.n;
      const auto live = alive<MASKED>(mask, item.row, item.n * 64, length);
      const float gate = gate_of<SEGMENTED>(t, live, log_g, segments, item.row, hv, HV, item.n * 64, length);
      float scalars[3];
      for (int i = 0; i < 3; ++i) scalars[i] = factors[(chunk * 3 + i) * 64 + t];
      // The unit before the last one had these tables too.
      named_barrier<64, 2>();
      for (int i = 0; i < 3; ++i) tables.before()[i * 64 + t] = scalars[i];
      tables.gate()[t] = gate;
      named_barrier<64, 2>();
      fill_decay<64>(tables.decay(), tables.gate(), t);
      release(barriers.tables(step + 1), at);
    }
    if (step < 0) continue;
    const GradientItem item = item_at<HK>(number, chunks);
    const GradientTables<DV> tables{room, step};
    mbarrier_wait(barriers.sums(), step);
    const Place here = hidden(at);
    const GateSums found = sum_positions<DV>(room, tables, step, here.index % 64, here.lane);
    if (item.n * 64 + t < length) {
      const bool live = alive<MASKED>(mask, item.row, item.n * 64, length)(t);
      const long to = ((long)item.row * length + item.n * 64 + t) * HV + item.head * repeats + step % repeats;
      d_log_g[to] = live ? found.on_gate : 0.0f;
      d_beta[to] = static_cast<B>(live ? found.on_beta : 0.0f);
    }
    release(barriers.sums_read(), at);
    if ((step + 1) % repeats) continue;
    const int round = step / repeats;
    mbarrier_wait(barriers.rows(0), round);
    write_rows<In, HK>(room.memory + Memory::dq_rows, dq, item, length, here.index % 64);
    mbarrier_wait(barriers.rows(1), round);
    write_rows<In, HK>(room.memory + Memory::dk_rows, dk, item, length, here.index % 64);
    release(barriers.rows_written(), at);
  }
}
