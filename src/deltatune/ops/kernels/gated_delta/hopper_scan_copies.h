// The copies of both kinds of scans on Hopper: the team that loads, and where a block of ROWS rows of a state writes.

// Copies a triangle to a grid with zeros in between, which are read from nowhere, although `any` input is named.
template <typename PS, typename P>
inline void copy_runs(unsigned to, PS from, P any, unsigned mbarrier, int index) {
  // Hidden, so that no addresses are kept from chunk to chunk: the team has few registers.
  index = (int)opaque((unsigned)index);
  if (index < 9) {
    const CoreRun run = core_run(index);
    copy_tile(to + run.apart, from + run.packed / 2, run.bytes, mbarrier);
  } else if (index >= 32) {
    // Each of 96 threads does 16 bytes of a row of cores, and those four rows further.
    const int core = (index - 32) / 8, place = (13 * (core / 3) + 1 + core % 3) * core_bytes + index % 8 * 16;
    copy_signalled_piece(to + place, any, false, mbarrier);
    copy_signalled_piece(to + place + 4 * 13 * core_bytes, any, false, mbarrier);
  }
}

// The mbarriers of a scan: a stage has arrived, and it is no longer needed; a state, of STATES in turn, has been handed
// over, and it has been read; u or R of a chunk has been handed over, before the one in turn with it is waited for.
template <int STATES>
struct BarriersOfScan {
  unsigned place;
  inline unsigned here(int stage) const { return place + 8 * stage; }
  inline unsigned read(int stage) const { return place + 32 + 8 * stage; }
  inline unsigned state(int step) const { return place + 64 + 8 * (step & (STATES - 1)); }
  inline unsigned chunk(int step) const { return place + 80 + 8 * (step & 1); }
  inline unsigned state_read() const { return place + (STATES > 1 ? 96 : 72); }
  template <int STAGES>
  inline void start(Place at) const {
    if (at.index == 0) {
      for (int i = 0; i < STAGES; ++i) mbarrier_init(here(i), 128 + 1);
      for (int i = 0; i < STAGES; ++i) mbarrier_init_for_groups(read(i), 8);
      for (int i = 0; i < STATES; ++i) mbarrier_init_for_groups(state(i), 4);
      for (int i = 0; i < 2; ++i) mbarrier_init_for_groups(chunk(i), 4);
      mbarrier_init_for_groups(state_read(), 4);
      mbarriers_started();
    }
    barrier();
  }
};

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
      mbarrier_expect(mbarrier, 2 * packed_bytes + 3 * 64 * 4);
      copy_tile(to + Memory::factors, factors + chunk * 192, 3 * 64 * 4, mbarrier);
    }
    if (ROWS == 64) {
      copy_runs(to + Memory::solve, solve + chunk * (packed_bytes / 2), k, mbarrier, at.index);
      copy_runs(to + Memory::scores, scores + chunk * (packed_bytes / 2), k, mbarrier, at.index);
    } else if (at.index == 0) {
      copy_tile(to + Memory::solve, solve + chunk * (packed_bytes / 2), packed_bytes, mbarrier);
      copy_tile(to + Memory::scores, scores + chunk * (packed_bytes / 2), packed_bytes, mbarrier);
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
  // u or R and the tails of a chunk, as much as DV x 48 numbers of fp32.
  inline GLOBAL bf16* chunk(int n) const { return parts + (head * chunks + n) * DV * 96; }
  inline GLOBAL bf16* tails(int n) const { return chunk(n) + DV * 80 + row * 16; }
  inline void send_state(int n, unsigned from) const {
    send_block(states + ((head * chunks + n) * DV + row) * DK, from, ROWS * DK * 2);
  }
  // Sends the high parts of u or R.
  inline void send_chunk(int n, unsigned from) const { send_block(chunk(n) + row * 64, from, ROWS * 128); }
  // Writes a lane's bits that follow them, of 16 rows from 16 strip on and 16 positions from 16 part on.
  inline void write_bits(int n, int strip, int part, int lane, unsigned bits) const {
    put_pair(chunk(n) + DV * 64 + (row + 16 * strip) * 16 + (part * 32 + lane) * 2, bits);
  }
};
