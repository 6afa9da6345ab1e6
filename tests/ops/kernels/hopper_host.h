// kernels/hopper.h on the host machine: barriers that count, copies that arrive later, products that run when they are
// waited for and read their operands then. So a wait that is missing, or an operand that is let go or overwritten too
// early, shows. Addresses of shared memory, and the swizzle of its tiles, are as on the GPU.

namespace hopper {

struct Gate {
  int count, pending, bytes, rounds;
};
struct Copy {
  unsigned to, bytes, gate;
  const char* from;
};
struct Product {
  int columns, group, onto, held, adds_rows, turned;
  float* d;
  const unsigned* a;
  unsigned long long left, right;
  float (*value)(unsigned short);
};
// A block on its way out of shared memory, which leaves when its lane waits for that.
struct Send {
  char* to;
  unsigned from, bytes;
};
enum : int { most_sends = 8, most_copies = 16384, most_products = 256, most_barriers = 16 };
static Gate gates[host::threadgroup_limit / 8];
static Copy copies[most_copies];
static int copy_count, met[most_barriers], meetings[most_barriers];
// Looks at gates since one of them last moved on: past so many, none will.
static long looks;
static Send sends[host::most_lanes][most_sends];
static int send_count[host::most_lanes];
enum : long { most_looks = 3000000 };
static Product queues[host::most_lanes][most_products];
static int queued[host::most_lanes], sent[host::most_lanes];
static unsigned published[host::most_lanes][6];

static char* memory_at(unsigned place) {
  return host::arena.start + place;
}
static Gate& gate_at(unsigned place) {
  return gates[place / 8];
}
static void look(Gate& gate) {
  if (gate.pending == 0 && gate.bytes == 0) {
    gate.pending = gate.count;
    ++gate.rounds;
    looks = 0;
  }
}
static void fail(const char* message) {
  host::fail(message, 0);
  host::leave();
}
// One of the copies on their way arrives, now and then.
static void go_on() {
  if (copy_count && host::draw(4) == 0) {
    const int which = (int)host::draw((uint64_t)copy_count);
    const Copy copy = copies[which];
    copies[which] = copies[--copy_count];
    memcpy(memory_at(copy.to), copy.from, copy.bytes);
    gate_at(copy.gate).bytes -= (int)copy.bytes;
    look(gate_at(copy.gate));
  }
  if (++looks > most_looks) fail("a gate that does not open");
  host::lanes[host::current].wait = host::running;
  host::leave();
}

// An element of shared memory at an address before its swizzle.
static unsigned short element(unsigned place) {
  unsigned short x;
  memcpy(&x, memory_at(place ^ ((place >> 7 & 7) << 4)), 2);
  return x;
}
static unsigned first_place(unsigned long long operand) { return (unsigned)(operand & 0x3fff) << 4; }
static unsigned field(unsigned long long operand, int bit) { return (unsigned)(operand >> bit & 0x3fff) << 4; }
// Whether an operand is of cores, whose elements are not swizzled.
static bool has_cores(unsigned long long operand) { return operand >> 62 == 0; }
static unsigned short plain_element(unsigned place) {
  unsigned short x;
  memcpy(&x, memory_at(place), 2);
  return x;
}
static unsigned short along_rows(unsigned long long operand, int row, int k) {
  if (has_cores(operand))
    return plain_element(first_place(operand) + k / 8 * field(operand, 16) + row / 8 * field(operand, 32) +
                         row % 8 * 16 + k % 8 * 2);
  return element(first_place(operand) + row / 8 * field(operand, 32) + row % 8 * 128 + k * 2);
}
static unsigned short along_columns(unsigned long long operand, int k, int column) {
  if (has_cores(operand))
    return plain_element(first_place(operand) + k / 8 * field(operand, 16) + column / 8 * field(operand, 32) +
                         k % 8 * 16 + column % 8 * 2);
  if (operand >> 62 == 2) {
    const unsigned place = first_place(operand) + k / 8 * field(operand, 32) + k % 8 * 64 + column * 2;
    return plain_element(place ^ ((place >> 7 & 3) << 4));
  }
  return element(first_place(operand) + column / 64 * field(operand, 16) + k / 8 * field(operand, 32) + k % 8 * 128 +
                 column % 64 * 2);
}

static void multiply(const Product& p) {
  const int lane = host::lane_id(), warp = host::current / 32 % 4, base = host::current - lane % 4;
  float a[2][16];
  if (p.held) {
    for (int i = 0; i < 4; ++i) published[host::current][i] = p.a[i];
    host::meet_group(1);
    for (int side = 0; side < 2; ++side)
      for (int k = 0; k < 16; ++k)
        a[side][k] =
            p.value((unsigned short)(published[base + k % 8 / 2][side + k / 8 * 2] >> (k & 1) * 16));
    host::meet_group(2);
  } else {
    for (int side = 0; side < 2; ++side)
      for (int k = 0; k < 16; ++k) {
        const int row = warp * 16 + lane / 4 + side * 8;
        a[side][k] = p.value(p.turned ? along_columns(p.left, k, row) : along_rows(p.left, row, k));
      }
  }
  for (int pair = 0; pair < p.columns / 4; ++pair) {
    const int column = pair / 2 * 8 + lane % 4 * 2 + (pair & 1);
    float sums[2];
    for (int side = 0; side < 2; ++side) sums[side] = p.onto ? p.d[pair / 2 * 4 + side * 2 + (pair & 1)] : 0.0f;
    for (int k = 0; k < 16; ++k) {
      const float b = p.value(p.adds_rows ? along_columns(p.right, k, column) : along_rows(p.right, column, k));
      for (int side = 0; side < 2; ++side) sums[side] += a[side][k] * b;
    }
    for (int side = 0; side < 2; ++side) p.d[pair / 2 * 4 + side * 2 + (pair & 1)] = sums[side];
  }
}

}  // namespace hopper

using bf16 = bfloat16_t;
inline unsigned shared_place(threadgroup const void* p) { return (unsigned)((const char*)p - host::arena.start); }

inline void mbarrier_init(unsigned gate, int count) {
  hopper::gate_at(gate) = hopper::Gate{count, count, 0, 0};
  hopper::copy_count = 0;
  hopper::looks = 0;
  memset(hopper::met, 0, sizeof hopper::met);
  memset(hopper::queued, 0, sizeof hopper::queued);
  memset(hopper::send_count, 0, sizeof hopper::send_count);
  memset(hopper::sent, 0, sizeof hopper::sent);
}
inline void mbarriers_started() {}
inline void mbarrier_arrive(unsigned gate) {
  hopper::Gate& found = hopper::gate_at(gate);
  if (--found.pending < 0) hopper::fail("a gate that more pass than it counts");
  hopper::look(found);
}
inline void mbarrier_expect(unsigned gate, unsigned bytes) {
  hopper::gate_at(gate).bytes += (int)bytes;
  mbarrier_arrive(gate);
}
inline void mbarrier_wait(unsigned gate, int round) {
  while ((hopper::gate_at(gate).rounds & 1) == (round & 1)) hopper::go_on();
}
template <typename P>
inline void copy_tile(unsigned to, P from, unsigned bytes, unsigned gate) {
  if (to % 16 || bytes % 16) hopper::fail("a copy that is not of whole pieces of 16 bytes");
  if (hopper::copy_count == hopper::most_copies) hopper::fail("too many copies");
  memset(hopper::memory_at(to), 0xff, bytes);
  hopper::copies[hopper::copy_count++] = hopper::Copy{to, bytes, gate, (const char*)from};
}
// A piece arrives like any copy, but it is the thread that signals, as often as it says that its pieces are sent.
template <typename P>
inline void copy_signalled_piece(unsigned to, P from, bool live, unsigned gate) {
  if (to % 16 || (live && (uintptr_t)from % 16)) hopper::fail("a piece that is not aligned to 16 bytes");
  if (!live) {
    memset(hopper::memory_at(to), 0, 16);
    return;
  }
  if (hopper::copy_count == hopper::most_copies) hopper::fail("too many copies");
  memset(hopper::memory_at(to), 0xff, 16);
  hopper::copies[hopper::copy_count++] = hopper::Copy{to, 16, gate, (const char*)from};
  hopper::gate_at(gate).bytes += 16;
}
inline void signalled_pieces_sent(unsigned gate) { mbarrier_arrive(gate); }
template <typename P>
inline bool aligned16(P p) { return (uintptr_t)p % 16 == 0; }
inline unsigned bits_of(float x);
inline unsigned second_bytes_of(float one, float other) {
  return (bits_of(one) >> 8 & 0xff) | (bits_of(other) >> 8 & 0xff) << 8;
}
inline unsigned lower_halves(unsigned one, unsigned other) { return (one & 0xffff) | other << 16; }
inline unsigned bits_of(float x) {
  unsigned bits;
  memcpy(&bits, &x, 4);
  return bits;
}
template <int THREADS, int NUMBER = 1>
inline void named_barrier() {
  const int round = hopper::meetings[NUMBER];
  if (++hopper::met[NUMBER] == THREADS) {
    hopper::met[NUMBER] = 0;
    ++hopper::meetings[NUMBER];
    hopper::looks = 0;
  }
  while (hopper::meetings[NUMBER] == round) hopper::go_on();
}
// Loads elements (row, 2 c) and (row, 2 c + 1) of each part, or of its transpose, with row = lane / 4 and c = lane % 4.
inline void load_parts_of(unsigned* r, unsigned place, bool turned) {
  const int me = host::current, lane = host::lane_id(), first = me - lane;
  hopper::published[me][0] = place;
  host::meet_group(4);
  for (int i = 0; i < 4; ++i) {
    unsigned short pair[2];
    for (int j = 0; j < 2; ++j) {
      const int own = lane / 4, other = lane % 4 * 2 + j, row = turned ? other : own, column = turned ? own : other;
      memcpy(&pair[j], hopper::memory_at(hopper::published[first + 8 * i + row][0] + 2 * column), 2);
    }
    r[i] = pair[0] | (unsigned)pair[1] << 16;
  }
  host::meet_group(5);
}
inline void put_parts_of(unsigned place, const unsigned* r, bool turned, int parts = 4) {
  const int me = host::current, lane = host::lane_id(), first = me - lane;
  hopper::published[me][0] = place;
  host::meet_group(5);
  for (int i = 0; i < parts; ++i)
    for (int j = 0; j < 2; ++j) {
      const unsigned short bits = (unsigned short)(r[i] >> 16 * j);
      const int own = lane / 4, other = lane % 4 * 2 + j, row = turned ? other : own, column = turned ? own : other;
      memcpy(hopper::memory_at(hopper::published[first + 8 * i + row][0] + 2 * column), &bits, 2);
    }
  host::meet_group(6);
}
inline void put_parts(unsigned place, const unsigned* r) { put_parts_of(place, r, false); }
inline void put_turned_parts(unsigned place, const unsigned* r) { put_parts_of(place, r, true); }
inline void put_two_turned_parts(unsigned place, const unsigned* r) { put_parts_of(place, r, true, 2); }
template <typename P>
inline void send_block(P to, unsigned from, unsigned bytes) {
  const int me = host::current;
  if ((uintptr_t)to % 16 || from % 16 || bytes % 16) hopper::fail("a block that is not of whole pieces of 16 bytes");
  if (hopper::send_count[me] == hopper::most_sends) hopper::fail("too many blocks sent");
  hopper::sends[me][hopper::send_count[me]++] = hopper::Send{(char*)to, from, bytes};
}
inline void blocks_read() {
  const int me = host::current;
  for (int i = 0; i < hopper::send_count[me]; ++i)
    memcpy(hopper::sends[me][i].to, hopper::memory_at(hopper::sends[me][i].from), hopper::sends[me][i].bytes);
  hopper::send_count[me] = 0;
}
inline void blocks_arrived() { blocks_read(); }
inline void load_parts(unsigned* r, unsigned place) { load_parts_of(r, place, false); }
inline void load_turned_parts(unsigned* r, unsigned place) { load_parts_of(r, place, true); }
inline void load_parts_if_of(bool on, unsigned* r, unsigned place, bool turned) {
  unsigned part[4] = {0, 0, 0, 0};
  if (on) load_parts_of(part, place, turned);
  for (int i = 0; i < 4; ++i) r[i] = part[i];
}
inline void load_parts_if(bool on, unsigned* r, unsigned place) { load_parts_if_of(on, r, place, false); }
inline void load_turned_parts_if(bool on, unsigned* r, unsigned place) { load_parts_if_of(on, r, place, true); }
inline float float_of(unsigned bits) { return as_type<float>(bits); }

// Adds to c [16, 8] the product of a [16, 16] and b [16, 8], whose upper and lower eight rows are b0 and b1.
inline void multiply_accumulate(float* c, const unsigned (&a)[4], unsigned b0, unsigned b1) {
  const int me = host::current, lane = host::lane_id(), first = me - lane;
  for (int i = 0; i < 4; ++i) hopper::published[me][i] = a[i];
  hopper::published[me][4] = b0;
  hopper::published[me][5] = b1;
  host::meet_group(6);
  for (int e = 0; e < 4; ++e)
    for (int k = 0; k < 16; ++k) {
      const int upper = k / 8, holder = k % 8 / 2, shift = k % 2 * 16;
      const unsigned left = hopper::published[first + lane / 4 * 4 + holder][e / 2 + upper * 2] >> shift << 16;
      const int column = lane % 4 * 2 + e % 2;
      const unsigned right = hopper::published[first + column * 4 + holder][4 + upper] >> shift << 16;
      c[e] += as_type<float>(left) * as_type<float>(right);
    }
  host::meet_group(7);
}

template <int COUNT>
inline void more_registers() {}
template <int COUNT>
inline void fewer_registers() {}
inline int uniform(int x) { return x; }
inline unsigned opaque(unsigned x) { return x; }
template <typename T, int COUNT>
inline void register_fence(T (&)[COUNT]) {}

inline float power_of_two(float x) { return exp2f(x); }
template <typename In>
struct PairOf {
  static inline unsigned of(float low, float high) {
    const In pair[2] = {static_cast<In>(low), static_cast<In>(high)};
    unsigned r;
    memcpy(&r, pair, 4);
    return r;
  }
};
template <typename P>
inline void put_pair(P to, unsigned pair) {
  memcpy((void*)to, &pair, 4);
}
inline void put_four(threadgroup float* to, const float* from) {
  for (int i = 0; i < 4; ++i) to[i] = from[i];
}
inline void get_four(float* to, threadgroup const float* from) {
  for (int i = 0; i < 4; ++i) to[i] = from[i];
}
template <typename P>
inline unsigned get_pair(P from) {
  unsigned r;
  memcpy(&r, (const void*)from, 4);
  return r;
}
template <typename P>
inline void get_two(float* to, P from) {
  for (int i = 0; i < 2; ++i) to[i] = from[i];
}
template <typename To, typename From>
inline void put_piece(To to, From from, bool live) {
  for (int i = 0; i < 8; ++i) {
    to[i] = 0;
    if (live) to[i] = from[i];
  }
}
template <typename To, typename From>
inline void put_whole_piece(To to, From from) {
  if ((uintptr_t)to % 16 || (uintptr_t)from % 16) hopper::fail("a piece that is not aligned to 16 bytes");
  memcpy((void*)to, (const void*)from, 16);
}

inline void products_start() {}
inline void products_sent() { ++hopper::sent[host::current]; }
template <int LEFT>
inline void products_wait() {
  const int me = host::current, upto = hopper::sent[me] - LEFT;
  int done = 0;
  while (done < hopper::queued[me] && hopper::queues[me][done].group < upto) hopper::multiply(hopper::queues[me][done++]);
  for (int i = done; i < hopper::queued[me]; ++i) hopper::queues[me][i - done] = hopper::queues[me][i];
  hopper::queued[me] -= done;
  host::meet_group(3);
}
inline unsigned long long rows_operand(unsigned place) {
  return (unsigned long long)place | (1ull << 16) | (64ull << 32) | (1ull << 62);
}
inline unsigned long long columns_operand(unsigned place, int panel) {
  return (unsigned long long)place | ((unsigned long long)(panel >> 4) << 16) | (64ull << 32) | (1ull << 62);
}
inline unsigned long long short_columns_operand(unsigned place) {
  return (unsigned long long)place | (1ull << 16) | (32ull << 32) | (2ull << 62);
}
inline unsigned long long cores_operand(unsigned place, int summed, int kept) {
  return (unsigned long long)place | ((unsigned long long)(summed >> 4) << 16) |
         ((unsigned long long)(kept >> 4) << 32);
}
template <typename In, int N>
struct Products {
  static float value(unsigned short bits) {
    In x;
    memcpy(&x, &bits, 2);
    return static_cast<float>(x);
  }
  static void queue(const hopper::Product& product) {
    const int me = host::current;
    if (hopper::queued[me] == hopper::most_products) hopper::fail("too many products");
    hopper::queues[me][hopper::queued[me]++] = product;
  }
  static void rows(float* d, unsigned long long a, unsigned long long b, int onto) {
    queue(hopper::Product{N, hopper::sent[host::current], onto, 0, 0, 0, d, nullptr, a, b, value});
  }
  static void shared_columns(float* d, unsigned long long a, unsigned long long b, int onto) {
    queue(hopper::Product{N, hopper::sent[host::current], onto, 0, 1, 0, d, nullptr, a, b, value});
  }
  static void turned(float* d, unsigned long long a, unsigned long long b, int onto = 1) {
    queue(hopper::Product{N, hopper::sent[host::current], onto, 0, 0, 1, d, nullptr, a, b, value});
  }
  static void held_rows(float* d, const unsigned* a, unsigned long long b, int onto) {
    queue(hopper::Product{N, hopper::sent[host::current], onto, 1, 0, 0, d, a, 0, b, value});
  }
  static void columns(float* d, const unsigned* a, unsigned long long b, int onto = 1) {
    queue(hopper::Product{N, hopper::sent[host::current], onto, 1, 1, 0, d, a, 0, b, value});
  }
};
