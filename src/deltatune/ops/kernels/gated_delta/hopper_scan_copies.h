// What both kinds of scans on Hopper copy: the team that loads, and where a block of ROWS rows of a state writes.

// Copies chunk after chunk to the stages of `Memory`, with ROWS columns of V or dY, where the scans with 64 want
// padding between rows. REVERSE begins with the last chunk.
template <typename Memory, int DK, int DV, int HK, int HV, int ROWS, int STAGES, bool MASKED, bool REVERSE,
          typename Barriers, typename PQ, typename PK, typename PV, typename PM, typename PS, typename PF>
inline void load_chunks(Place at, Room room, Barriers barriers, int length, PQ q, PK k, PV values, PM mask, PS solve,
                        PS scores, PF factors) {
  const int chunks = (length + 63) / 64;
  const long head = (long)at.z * HV + at.y;
  int stage = 0, use = 0;
  for (int step = 0; step < chunks; ++step) {
    const int n = REVERSE ? chunks - 1 - step : step;
    const long chunk = head * chunks + n, row = (long)at.z * length + n * 64;
    const long key = (row * HK + at.y / (HV / HK)) * DK;
    if (use > 0) mbarrier_wait(barriers.read(stage), use - 1);
    const auto live = alive<MASKED>(mask, at.z, n * 64, length);
    threadgroup char* memory = room.memory + stage * Memory::stage;
    const unsigned mbarrier = barriers.here(stage), to = room.place + stage * Memory::stage;
    if (at.index == 0) {
      mbarrier_expect(mbarrier, 2 * triangle_bytes + 3 * 64 * 4);
      copy_tile(to + Memory::solve, solve + chunk * (triangle_bytes / 2), triangle_bytes, mbarrier);
      copy_tile(to + Memory::scores, scores + chunk * (triangle_bytes / 2), triangle_bytes, mbarrier);
      copy_tile(to + Memory::factors, factors + chunk * 192, 3 * 64 * 4, mbarrier);
    }
    copy_positions<DK>(reinterpret_cast<threadgroup bf16*>(memory + Memory::k), k + key, HK * DK, live, mbarrier,
                       at.index);
    copy_positions<ROWS, ROWS == 64>(reinterpret_cast<threadgroup bf16*>(memory + Memory::values),
                                     values + (row * HV + at.y) * DV + at.x * ROWS, HV * DV, live, mbarrier, at.index);
    copy_positions<DK>(reinterpret_cast<threadgroup bf16*>(memory + Memory::q), q + key, HK * DK, live, mbarrier,
                       at.index);
    signalled_pieces_sent(mbarrier);
    if (++stage == STAGES) stage = 0, ++use;
  }
}

// Where a block writes: ROWS rows of the states of one head.
template <int DK, int DV, int ROWS>
struct OwnRows {
  int row;
  long head, chunks;
  GLOBAL bf16* states;
  GLOBAL bf16* parts;
  // u or R and the tails of a chunk, as much as DV x 72 numbers of fp32.
  inline GLOBAL bf16* chunk(int n) const { return parts + (head * chunks + n) * DV * 144; }
  inline GLOBAL bf16* tails(int n) const { return chunk(n) + DV * 128 + row * 16; }
  inline void send_state(int n, unsigned from) const {
    send_block(states + ((head * chunks + n) * DV + row) * DK, from, ROWS * DK * 2);
  }
  // Sends u or R: high parts, which low parts follow.
  inline void send_chunk(int n, unsigned from) const {
    send_block(chunk(n) + row * 64, from, ROWS * 128);
    send_block(chunk(n) + DV * 64 + row * 64, from + ROWS * 128, ROWS * 128);
  }
};
