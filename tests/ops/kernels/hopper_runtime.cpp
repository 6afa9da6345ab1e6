// What hopper_host.h declares, and is the same for every kernel: compiled once, optimised.

#include "host.h"

#include "hopper_host.h"

#pragma GCC visibility push(hidden)
namespace hopper {

static Gate gates[host::threadgroup_limit / 8];
Copy copies[most_copies];
int copy_count, met[most_barriers], meetings[most_barriers];
long looks;
Send sends[host::most_lanes][most_sends];
int send_count[host::most_lanes], sent[host::most_lanes];
enum : long { most_looks = 3000000 };
static Product queues[host::most_lanes][most_products];
static int queued[host::most_lanes];
unsigned published[host::most_lanes][6];
// A lane's own copies that are on their way, and how often it sent some.
struct OwnCopy {
  unsigned to, bytes;
  int sending;
  const char* from;
};
enum : int { most_own = 64 };
static OwnCopy own_copies[host::most_lanes][most_own];
static int own_count[host::most_lanes], sendings[host::most_lanes];

Gate& gate_at(unsigned place) {
  return gates[place / 8];
}
static void look(Gate& gate) {
  if (gate.pending == 0 && gate.bytes == 0) {
    gate.pending = gate.count;
    ++gate.rounds;
    looks = 0;
  }
}
void fail(const char* message) {
  host::fail(message, 0);
  host::leave();
}
void go_on() {
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

static unsigned first_place(unsigned long long operand) { return (unsigned)(operand & 0x3fff) << 4; }
static unsigned field(unsigned long long operand, int bit) { return (unsigned)(operand >> bit & 0x3fff) << 4; }
// Whether an operand is of cores, whose elements are not swizzled.
static bool has_cores(unsigned long long operand) { return operand >> 62 == 0; }
static unsigned swizzled(unsigned place) { return place ^ ((place >> 7 & 7) << 4); }
static unsigned swizzled_shortly(unsigned place) { return place ^ ((place >> 7 & 3) << 4); }

// The 16 elements of a row, which lie in two pieces of 16 bytes.
static void get_row(unsigned short (&x)[16], unsigned long long operand, int row) {
  const unsigned first = first_place(operand) + row / 8 * field(operand, 32);
  for (int piece = 0; piece < 2; ++piece) {
    const unsigned place = has_cores(operand) ? first + piece * field(operand, 16) + row % 8 * 16
                                              : swizzled(first + row % 8 * 128 + piece * 16);
    memcpy(x + 8 * piece, memory_at(place), 16);
  }
}
static void get_column(unsigned short (&x)[16], unsigned long long operand, int column) {
  const unsigned first = first_place(operand);
  for (int k = 0; k < 16; ++k) {
    unsigned place = first + k / 8 * field(operand, 32);
    if (has_cores(operand))
      place = first + k / 8 * field(operand, 16) + column / 8 * field(operand, 32) + k % 8 * 16 + column % 8 * 2;
    else if (operand >> 62 == 2) place = swizzled_shortly(place + k % 8 * 64 + column * 2);
    else place = swizzled(place + column / 64 * field(operand, 16) + k % 8 * 128 + column % 64 * 2);
    memcpy(&x[k], memory_at(place), 2);
  }
}
static void get_numbers(float (&to)[16], const unsigned short (&x)[16], bool half_precision) {
  for (int k = 0; k < 16; ++k) {
    half number;
    memcpy(&number, &x[k], 2);
    to[k] = half_precision ? (float)number : as_type<float>((unsigned)x[k] << 16);
  }
}

static void multiply(const Product& p) {
  const int lane = host::lane_id(), warp = host::current / 32 % 4, base = host::current - lane % 4;
  unsigned short elements[16];
  float a[2][16], b[16];
  if (p.held) {
    for (int i = 0; i < 4; ++i) published[host::current][i] = p.a[i];
    host::meet_group(1);
    for (int side = 0; side < 2; ++side) {
      for (int k = 0; k < 16; ++k)
        elements[k] = (unsigned short)(published[base + k % 8 / 2][side + k / 8 * 2] >> (k & 1) * 16);
      get_numbers(a[side], elements, p.half_precision);
    }
    host::meet_group(2);
  } else {
    for (int side = 0; side < 2; ++side) {
      const int row = warp * 16 + lane / 4 + side * 8;
      p.turned ? get_column(elements, p.left, row) : get_row(elements, p.left, row);
      get_numbers(a[side], elements, p.half_precision);
    }
  }
  for (int pair = 0; pair < p.columns / 4; ++pair) {
    const int column = pair / 2 * 8 + lane % 4 * 2 + (pair & 1);
    p.adds_rows ? get_column(elements, p.right, column) : get_row(elements, p.right, column);
    get_numbers(b, elements, p.half_precision);
    for (int side = 0; side < 2; ++side) {
      float& d = p.d[pair / 2 * 4 + side * 2 + (pair & 1)];
      float sum = p.onto ? d : 0.0f;
      for (int k = 0; k < 16; ++k) sum += a[side][k] * b[k];
      d = sum;
    }
  }
}

void queue(const Product& product) {
  const int me = host::current;
  if (queued[me] == most_products) fail("too many products");
  queues[me][queued[me]++] = product;
}

void finish_products(int upto) {
  const int me = host::current;
  int done = 0;
  while (done < queued[me] && queues[me][done].group < upto) multiply(queues[me][done++]);
  for (int i = done; i < queued[me]; ++i) queues[me][i - done] = queues[me][i];
  queued[me] -= done;
  host::meet_group(3);
}

}  // namespace hopper

void own_copy(unsigned to, const char* from, unsigned bytes) {
  const int me = host::current;
  if (to % bytes || (uintptr_t)from % bytes) hopper::fail("a copy that is not aligned to its bytes");
  if (hopper::own_count[me] == hopper::most_own) hopper::fail("too many copies of a lane's own");
  memset(hopper::memory_at(to), 0xff, bytes);
  hopper::own_copies[me][hopper::own_count[me]++] = hopper::OwnCopy{to, bytes, hopper::sendings[me], from};
}
void words_sent() { ++hopper::sendings[host::current]; }
void own_copies_wait(int left) {
  const int me = host::current, count = hopper::own_count[me];
  int kept = 0;
  for (int i = 0; i < count; ++i) {
    const hopper::OwnCopy copy = hopper::own_copies[me][i];
    if (copy.sending < hopper::sendings[me] - left) memcpy(hopper::memory_at(copy.to), copy.from, copy.bytes);
    else hopper::own_copies[me][kept++] = copy;
  }
  hopper::own_count[me] = kept;
}
void mbarrier_init(unsigned gate, int count) {
  hopper::gate_at(gate) = hopper::Gate{count, count, 0, 0};
  hopper::copy_count = 0;
  hopper::looks = 0;
  memset(hopper::met, 0, sizeof hopper::met);
  memset(hopper::queued, 0, sizeof hopper::queued);
  memset(hopper::send_count, 0, sizeof hopper::send_count);
  memset(hopper::own_count, 0, sizeof hopper::own_count);
  memset(hopper::sendings, 0, sizeof hopper::sendings);
  memset(hopper::sent, 0, sizeof hopper::sent);
}
void mbarrier_arrive(unsigned gate) {
  hopper::Gate& found = hopper::gate_at(gate);
  if (--found.pending < 0) hopper::fail("a gate that more pass than it counts");
  hopper::look(found);
}
void mbarrier_wait(unsigned gate, int round) {
  while ((hopper::gate_at(gate).rounds & 1) == (round & 1)) hopper::go_on();
}
bool mbarrier_over(unsigned gate, int round) {
  const int me = host::current, first = me - host::lane_id();
  hopper::published[me][0] = (hopper::gate_at(gate).rounds & 1) != (round & 1);
  host::meet_group(8);
  const bool over = hopper::published[first][0];
  host::meet_group(9);
  if (!over) hopper::go_on();
  return over;
}
void load_parts_of(unsigned* r, unsigned place, bool turned) {
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
void put_parts_of(unsigned place, const unsigned* r, bool turned, int parts) {
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
void load_parts_if_of(bool on, unsigned* r, unsigned place, bool turned) {
  unsigned part[4] = {0, 0, 0, 0};
  if (on) load_parts_of(part, place, turned);
  for (int i = 0; i < 4; ++i) r[i] = part[i];
}
void multiply_accumulate(float* c, const unsigned (&a)[4], unsigned b0, unsigned b1) {
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

#pragma GCC visibility pop
