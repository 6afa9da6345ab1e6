// kernels/hopper.h on the host machine: barriers that count, copies that arrive later, products that run when they are
// waited for and read their operands then. So a wait that is missing, or an operand that is let go or overwritten too
// early, shows. Addresses of shared memory, and the swizzle of its tiles, are as on the GPU. What is the same for every kernel
// is in hopper_runtime.cpp.

#pragma GCC visibility push(hidden)
namespace hopper {

struct Gate {
  int count, pending, bytes, rounds;
};
struct Copy {
  unsigned to, bytes, gate;
  const char* from;
};
// A product of two operands, of which `held` ones are in registers, of bf16 or of fp16.
struct Product {
  int columns, group, onto, held, adds_rows, turned;
  float* d;
  const unsigned* a;
  unsigned long long left, right;
  bool half_precision;
};
// A block on its way out of shared memory, which leaves when its lane waits for that.
struct Send {
  char* to;
  unsigned from, bytes;
};
enum : int { most_sends = 8, most_copies = 16384, most_products = 256, most_barriers = 16 };

extern Copy copies[most_copies];
extern int copy_count, met[most_barriers], meetings[most_barriers];
// Looks at gates since one of them last moved on: past so many, none will.
extern long looks;
extern Send sends[host::most_lanes][most_sends];
extern int send_count[host::most_lanes], sent[host::most_lanes];
extern unsigned published[host::most_lanes][6];

inline char* memory_at(unsigned place) { return host::arena.start + place; }
Gate& gate_at(unsigned place);
void fail(const char* message);
// One of the copies on their way arrives, now and then.
void go_on();
void queue(const Product& product);
// Computes the products of this lane that were sent before its group number `upto`.
void finish_products(int upto);

}  // namespace hopper

void mbarrier_init(unsigned gate, int count);
void mbarrier_arrive(unsigned gate);
void mbarrier_wait(unsigned gate, int round);
bool mbarrier_over(unsigned gate, int round);
// Loads elements (row, 2 c) and (row, 2 c + 1) of each part, or of its transpose, with row = lane / 4 and c = lane % 4.
void load_parts_of(unsigned* r, unsigned place, bool turned);
void load_parts_if_of(bool on, unsigned* r, unsigned place, bool turned);
// Copies that arrive when their own lane waits for them: all but those of the last `left` times that it sent.
void own_copy(unsigned to, const char* from, unsigned bytes);
void words_sent();
void own_copies_wait(int left);
void put_parts_of(unsigned place, const unsigned* r, bool turned, int parts = 4);
#pragma GCC visibility pop

using bf16 = bfloat16_t;
inline unsigned shared_place(threadgroup const void* p) { return (unsigned)((const char*)p - host::arena.start); }

inline void mbarriers_started() {}
inline void mbarrier_expect(unsigned gate, unsigned bytes) {
  hopper::gate_at(gate).bytes += (int)bytes;
  mbarrier_arrive(gate);
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
inline void put_parts(unsigned place, const unsigned* r) { put_parts_of(place, r, false); }
inline void put_turned_parts(unsigned place, const unsigned* r) { put_parts_of(place, r, true); }
inline void put_turned_parts_if(bool on, unsigned place, const unsigned* r) {
  if (on) put_parts_of(place, r, true);
}
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
inline void load_parts_if(bool on, unsigned* r, unsigned place) { load_parts_if_of(on, r, place, false); }
inline void load_turned_parts_if(bool on, unsigned* r, unsigned place) { load_parts_if_of(on, r, place, true); }
// Blocks run one after another.
inline int counted(device int* number) { return (*number)++; }
inline float float_of(unsigned bits) { return as_type<float>(bits); }

// Adds to c [16, 8] the product of a [16, 16] and b [16, 8], whose upper and lower eight rows are b0 and b1.
void multiply_accumulate(float* c, const unsigned (&a)[4], unsigned b0, unsigned b1) __attribute__((visibility("hidden")));

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
inline unsigned pair_times_add(unsigned a, unsigned b, unsigned c) {
  float r[2];
  for (int i = 0; i < 2; ++i)
    r[i] = float_of(a << 16 * (1 - i) & 0xffff0000u) * float_of(b << 16 * (1 - i) & 0xffff0000u) +
           float_of(c << 16 * (1 - i) & 0xffff0000u);
  return PairOf<bf16>::of(r[0], r[1]);
}
// The sum with -0 is the product itself.
inline unsigned pair_times(unsigned a, unsigned b) { return pair_times_add(a, b, 0x80008000u); }
inline unsigned bytes_of(unsigned one, unsigned other, int i) {
  return (one >> 8 * i & 0xff) * 0x101 | (other >> 8 * i & 0xff) * 0x1010000;
}
inline unsigned half_twice(unsigned x, int upper) { return (x >> 16 * upper & 0xffff) * 0x10001; }
template <typename P>
inline void copy_words(unsigned to, P from) {
  own_copy(to, (const char*)from, 16);
}
template <typename P>
inline void copy_pair(unsigned to, P from) {
  own_copy(to, (const char*)from, 4);
}
template <typename P>
inline void copy_words_in_parts(unsigned to, P from) {
  for (int i = 0; i < 4; ++i) own_copy(to + 4 * i, (const char*)(from + i), 4);
}
template <typename P>
inline void copy_pair_in_parts(unsigned to, P from) {
  memcpy(hopper::memory_at(to), (const void*)from, 4);
}
template <int LEFT>
inline void words_wait() {
  own_copies_wait(LEFT);
}
inline void get_words(unsigned (&to)[4], unsigned place) { memcpy(to, hopper::memory_at(place), 16); }
inline void get_two_words(unsigned (&to)[2], unsigned place) { memcpy(to, hopper::memory_at(place), 8); }
inline void put_words(unsigned place, const unsigned* from) {
  if (place % 16) hopper::fail("words that are not aligned to 16 bytes");
  memcpy(hopper::memory_at(place), from, 16);
}
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
  hopper::finish_products(hopper::sent[host::current] - LEFT);
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
template <typename In>
struct HalfPrecision {
  static constexpr bool value = true;
};
template <>
struct HalfPrecision<bf16> {
  static constexpr bool value = false;
};
template <typename In, int N>
struct Products {
  static constexpr bool half_precision = HalfPrecision<In>::value;
  static void rows(float* d, unsigned long long a, unsigned long long b, int onto) {
    hopper::queue(hopper::Product{N, hopper::sent[host::current], onto, 0, 0, 0, d, nullptr, a, b, half_precision});
  }
  static void shared_columns(float* d, unsigned long long a, unsigned long long b, int onto) {
    hopper::queue(hopper::Product{N, hopper::sent[host::current], onto, 0, 1, 0, d, nullptr, a, b, half_precision});
  }
  static void turned(float* d, unsigned long long a, unsigned long long b, int onto = 1) {
    hopper::queue(hopper::Product{N, hopper::sent[host::current], onto, 0, 0, 1, d, nullptr, a, b, half_precision});
  }
  static void held_rows(float* d, const unsigned* a, unsigned long long b, int onto) {
    hopper::queue(hopper::Product{N, hopper::sent[host::current], onto, 1, 0, 0, d, a, 0, b, half_precision});
  }
  static void columns(float* d, const unsigned* a, unsigned long long b, int onto = 1) {
    hopper::queue(hopper::Product{N, hopper::sent[host::current], onto, 1, 1, 0, d, a, 0, b, half_precision});
  }
};
