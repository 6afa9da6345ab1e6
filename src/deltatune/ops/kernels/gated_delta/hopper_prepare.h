// The kernel of prepare.h on Hopper, for bf16, keys of 128 and chunks of 64 positions. Letters and formulas are those of
// chunk.h, and Z and P are written as hopper_cores.h says.
//
// A block does a chunk of a key head, for two of its value heads or one. Its four warps multiply Q with K once, then K
// with K: warp w has rows 16 w to 16 w + 15 of the product in registers. It weighs them for each value head, writes P
// to device memory from the registers, puts N into shared memory as cores, and computes its diagonal tile of Z, for
// both value heads at once. Then two warps take each value head and put a tile of Z in the place of each tile of N.
// They compute with the transposes of tiles, for then each result is in registers in the form of the next product's
// left operand. The two products come one after the other, for more blocks fit with half the registers.

// The shared memory of a block. Once Q is multiplied, the tiles of D on the diagonal take its place, by value head and
// warp, and become those of N. Once K is multiplied too, so do the triangles of the value heads.
template <int HEADS>
struct HopperPrepareMemory {
  static constexpr constant int k = 0, q = 16384, solve = 0, diagonal = 2 * triangle_bytes;
  static constexpr constant int tables = 32768, table = (4 * 64 + 4) * 4, arrival = tables + HEADS * table;
  static constexpr constant int bytes = arrival + 16 + 1024;
  static_assert(diagonal >= q && diagonal + 2 * 4096 <= tables, "the tiles fit in the place of Q");
};

// The gates of a chunk and value head, beta, and products of gates as in Decay of chunk.h.
struct PrepareTables {
  threadgroup float* gate;
  inline threadgroup float* rate() const { return gate + 64; }
  inline threadgroup float* prefix() const { return gate + 128; }
  inline threadgroup float* suffix() const { return gate + 192; }
  inline threadgroup float* total() const { return gate + 256; }
  // The product of the gates of the tiles between two tiles.
  inline float between(int row_tile, int column_tile) const {
    float product = 1.0f;
    DELTATUNE_UNROLL
    for (int b = 0; b < 4; ++b)
      if (b > column_tile && b < row_tile) product *= total()[b];
    return product;
  }
  // Fills prefix, suffix and total at position t.
  inline void fill(int t) const {
    const int first = t / 16 * 16, column = t % 16;
    float own[16], product = 1.0f;
    DELTATUNE_UNROLL
    for (int i = 0; i < 16; i += 4) get_four(own + i, gate + first + i);
    DELTATUNE_UNROLL
    for (int i = 0; i < 16; ++i) {
      if (i > column) product *= own[i];
      if (column == 0) prefix()[first + i] = own[0] * product;
    }
    suffix()[t] = product;
    if (column == 0) total()[first / 16] = own[0] * product;
  }
};
// A warp's tiles on the diagonal, of both value heads. Rows of the second are exchanged in pairs, so that 16 lanes of
// each read their row at once from different banks.
struct DiagonalTiles {
  threadgroup float* place;
  inline threadgroup float* row(int head, int i) const { return place + head * 1024 + (i ^ head) * 16; }
  // Fills a column of D from the gates of its 16 positions.
  inline void fill(int head, int column, threadgroup const float* gates) const {
    float own[16], product = 1.0f;
    DELTATUNE_UNROLL
    for (int i = 0; i < 16; i += 4) get_four(own + i, gates + i);
    DELTATUNE_UNROLL
    for (int i = 0; i < 16; ++i) {
      if (i > column) product *= own[i];
      if (i >= column) row(head, i)[column] = product;
    }
  }
};

// A tile of 16 x 16 numbers as pairs of bf16, in the form of a left operand.
struct SplitTile {
  unsigned high[4], low[4];
};
inline void split_tile(thread SplitTile& to, const thread float (&x)[8]) {
  split_pairs(to.high, to.low, x);
}
// The triangles of a value head in shared memory. A lane's place among the cores of a tile depends on which of the two
// dimensions has the larger distance; low parts have the other one, and so have transposes.
struct CoreTriangle {
  unsigned by_rows, by_columns;
  inline void load(thread SplitTile& to, int a, int b) const {
    load_parts(to.high, by_rows + core_high(2 * a, 2 * b));
    load_parts(to.low, by_columns + core_low(2 * a, 2 * b));
  }
  inline void load_turned(thread SplitTile& to, int a, int b) const {
    load_turned_parts(to.high, by_columns + core_high(2 * a, 2 * b));
    load_turned_parts(to.low, by_rows + core_low(2 * a, 2 * b));
  }
  inline void put(const thread SplitTile& tile, int a, int b) const {
    put_parts(by_rows + core_high(2 * a, 2 * b), tile.high);
    put_parts(by_columns + core_low(2 * a, 2 * b), tile.low);
  }
  inline void put_turned(const thread float (&x)[8], int a, int b) const {
    SplitTile tile;
    split_tile(tile, x);
    put_turned_parts(by_columns + core_high(2 * a, 2 * b), tile.high);
    put_turned_parts(by_rows + core_low(2 * a, 2 * b), tile.low);
  }
};
inline CoreTriangle core_triangle(unsigned place, int lane) {
  const unsigned first = place + (lane & 7) * 16, side = lane >> 3 & 1, other = lane >> 4;
  return CoreTriangle{first + side * core_row + other * core_bytes, first + side * core_bytes + other * core_row};
}

// Weighs a warp's tile in column `b` of Q K^T for a value head, and writes that tile of P to device memory. For KEYS it
// weighs that of K K^T, and puts the tile of N into shared memory: on the diagonal in fp32, elsewhere as cores.
template <bool KEYS>
inline void weigh_tile(const thread float* products, PrepareTables tables, DiagonalTiles diagonal, int head,
                       CoreTriangle triangle, GLOBAL bf16* scores, int warp, int b, int lane) {
  float x[8];
  if (b < warp) {
    const float middle = tables.between(warp, b);
    float prefix[2], suffix[4];
    DELTATUNE_UNROLL
    for (int side = 0; side < 2; ++side) prefix[side] = tables.prefix()[warp * 16 + lane / 4 + side * 8];
    get_two(suffix, tables.suffix() + b * 16 + lane % 4 * 2);
    get_two(suffix + 2, tables.suffix() + b * 16 + 8 + lane % 4 * 2);
    DELTATUNE_UNROLL
    for (int e = 0; e < 8; ++e) x[e] = prefix[e >> 1 & 1] * middle * suffix[e / 4 * 2 + e % 2] * products[e];
  } else {
    DELTATUNE_UNROLL
    for (int e = 0; e < 8; ++e) {
      x[e] = 0.0f;
      const int i = lane / 4 + (e >> 1 & 1) * 8, j = lane % 4 * 2 + e % 2 + e / 4 * 8;
      threadgroup float* place = diagonal.row(head, i) + j;
      if (KEYS) *place = i > j ? *place * products[e] : 0.0f;
      else x[e] = (i >= j ? *place : 0.0f) * products[e];
    }
    if (KEYS) return;
  }
  SplitTile tile;
  split_tile(tile, x);
  if (KEYS) {
    triangle.put(tile, warp, b);
    return;
  }
  DELTATUNE_UNROLL
  for (int i = 0; i < 4; ++i) {
    // Of the tile on the diagonal one core is above the triangle.
    if (i == 2 && b == warp) continue;
    put_pair(scores + core_high<packed_row>(2 * warp + i % 2, 2 * b + i / 2) / 2, tile.high[i]);
    put_pair(scores + core_low<packed_row>(2 * warp + i % 2, 2 * b + i / 2) / 2, tile.low[i]);
  }
}
// Does so for all tiles of a warp and all value heads. A lane writes to `scores`, and for the next value head
// `next_head` elements further.
template <bool KEYS, typename Tables>
inline void weigh_rows(const thread float (&products)[32], Tables tables_of, DiagonalTiles diagonal, unsigned triangles,
                       GLOBAL bf16* scores, long next_head, int heads, int warp, int lane) {
  DELTATUNE_UNROLL
  for (int b = 0; b < 4; ++b) {
    if (b > warp) continue;
    _Pragma("unroll 1")
    for (int head = 0; head < heads; ++head) {
      const CoreTriangle triangle = core_triangle(triangles + head * triangle_bytes, lane);
      weigh_tile<KEYS>(products + 8 * b, tables_of(head), diagonal, head, triangle, scores + head * next_head, warp, b,
                       lane);
    }
  }
}

// Computes a column of diagonal tile b of Z by forward substitution, and puts it at `to`, where the triangle starts.
inline void solve_column(DiagonalTiles diagonal, int head, threadgroup const float* rates, threadgroup char* to, int b,
                         int column) {
  float x[16], z[16], rate[16];
  DELTATUNE_UNROLL
  for (int i = 0; i < 16; i += 4) get_four(rate + i, rates + i);
  DELTATUNE_UNROLL
  for (int i = 0; i < 16; ++i) {
    float row[16];
    DELTATUNE_UNROLL
    for (int j = 0; j < i; j += 4) get_four(row + j, diagonal.row(head, i) + j);
    float sum = i > column ? diagonal.row(head, i)[column] : 0.0f, other = 0.0f;
    DELTATUNE_UNROLL
    for (int j = 0; j < i; ++j) {
      if (j % 2) other += row[j] * x[j];
      else sum -= row[j] * x[j];
    }
    z[i] = sum - other;
    x[i] = rate[i] * z[i];
  }
  threadgroup unsigned short* high = reinterpret_cast<threadgroup unsigned short*>(
      to + core_high(2 * b, 2 * b) + column / 8 * core_bytes + column % 8 * 2);
  threadgroup unsigned short* low = reinterpret_cast<threadgroup unsigned short*>(
      to + core_low(2 * b, 2 * b) + column / 8 * core_row + column % 8 * 2);
  DELTATUNE_UNROLL
  for (int i = 0; i < 16; i += 2) {
    unsigned pair, rest;
    split_pair(pair, rest, z[i], z[i + 1]);
    const int row = i % 8 * 8;
    high[i / 8 * (core_row / 2) + row] = (unsigned short)pair;
    high[i / 8 * (core_row / 2) + row + 8] = (unsigned short)(pair >> 16);
    low[i / 8 * (core_bytes / 2) + row] = (unsigned short)rest;
    low[i / 8 * (core_bytes / 2) + row + 8] = (unsigned short)(rest >> 16);
  }
}

// Adds to d the product of a and the transpose of b, the smallest products first. Low times low is left out.
inline void add_product(thread float (&d)[8], const thread SplitTile& a, const thread SplitTile& b) {
  multiply_accumulate(d, a.low, b.high[0], b.high[2]);
  multiply_accumulate(d + 4, a.low, b.high[1], b.high[3]);
  multiply_accumulate(d, a.high, b.low[0], b.low[2]);
  multiply_accumulate(d + 4, a.high, b.low[1], b.low[3]);
  multiply_accumulate(d, a.high, b.high[0], b.high[2]);
  multiply_accumulate(d + 4, a.high, b.high[1], b.high[3]);
}
inline void join_tile(thread float (&x)[8], const thread SplitTile& tile) {
  DELTATUNE_UNROLL
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = first_of(tile.high[i]) + first_of(tile.low[i]);
    x[2 * i + 1] = second_of(tile.high[i]) + second_of(tile.low[i]);
  }
}
// Multiplies each column by the beta of its position, and splits the products.
inline void scale_tile(thread SplitTile& to, const thread float (&x)[8], threadgroup const float* rates, int lane) {
  float rate[4], scaled[8];
  get_two(rate, rates + lane % 4 * 2);
  get_two(rate + 2, rates + 8 + lane % 4 * 2);
  DELTATUNE_UNROLL
  for (int e = 0; e < 8; ++e) scaled[e] = rate[e / 4 * 2 + e % 2] * x[e];
  split_tile(to, scaled);
}

// Two warps solve the rest of a triangle. As in prepare.h they merge pairs of blocks of one tile, then of two: with
// Y = N - N beta Z_upper for the block between the two, Z is Y - Z_lower beta Y there. Tiles here are transposes.
struct TriangleSolver {
  CoreTriangle triangle;
  threadgroup const float* rate;
  int lane;
  // Subtracts the sum from the transpose of N's tile, and splits beta times the difference.
  inline void finish(thread float (&y)[8], thread SplitTile& scaled, const thread float (&sum)[8], int a, int b) const {
    SplitTile tile;
    triangle.load_turned(tile, a, b);
    join_tile(y, tile);
    DELTATUNE_UNROLL
    for (int e = 0; e < 8; ++e) y[e] -= sum[e];
    scale_tile(scaled, y, rate + a * 16, lane);
  }
  inline void load_scaled(thread SplitTile& to, int a, int b) const {
    float x[8];
    triangle.load_turned(to, a, b);
    join_tile(x, to);
    scale_tile(to, x, rate + a * 16, lane);
  }
  inline void add(thread float (&sum)[8], const thread SplitTile& left, int a, int b) const {
    SplitTile right;
    triangle.load(right, a, b);
    add_product(sum, left, right);
  }
  inline void put_difference(const thread float (&y)[8], thread float (&sum)[8], int a, int b) const {
    DELTATUNE_UNROLL
    for (int e = 0; e < 8; ++e) sum[e] = y[e] - sum[e];
    triangle.put_turned(sum, a, b);
  }
  // Computes tile (b + 1, b) for b of 0 or 2.
  inline void merge_tiles(int b) const {
    float y[8], sum[8];
    SplitTile scaled;
    load_scaled(scaled, b, b);
    clear_floats(sum);
    add(sum, scaled, b + 1, b);
    finish(y, scaled, sum, b + 1, b);
    clear_floats(sum);
    add(sum, scaled, b + 1, b + 1);
    // All lanes have read the tile of N.
    group_barrier();
    put_difference(y, sum, b + 1, b);
  }
  // Computes Y of the tiles (2, b) and (3, b), and beta Y.
  inline void start_column(thread float (&y)[2][8], thread SplitTile (&scaled)[2], int b) const {
    float sum[2][8];
    clear_floats(sum[0]);
    clear_floats(sum[1]);
    DELTATUNE_UNROLL
    for (int c = 0; c < 2; ++c) {
      if (c < b) continue;
      SplitTile left;
      load_scaled(left, c, b);
      DELTATUNE_UNROLL
      for (int a = 0; a < 2; ++a) add(sum[a], left, 2 + a, c);
    }
    DELTATUNE_UNROLL
    for (int a = 0; a < 2; ++a) finish(y[a], scaled[a], sum[a], 2 + a, b);
  }
  inline void finish_column(const thread float (&y)[2][8], const thread SplitTile (&scaled)[2], int b) const {
    float sum[2][8];
    clear_floats(sum[0]);
    clear_floats(sum[1]);
    DELTATUNE_UNROLL
    for (int c = 0; c < 2; ++c) {
      DELTATUNE_UNROLL
      for (int a = c; a < 2; ++a) add(sum[a], scaled[c], 2 + a, 2 + c);
    }
    DELTATUNE_UNROLL
    for (int a = 0; a < 2; ++a) put_difference(y[a], sum[a], 2 + a, b);
  }
};

// Computes the outputs of gated_delta_prepare. The grid is (chunks, blocks, B), with as many blocks for a key head as
// it has pairs of value heads. With one for each it is (HK x chunks, 1, B): neighbours do heads that are side by side
// in memory.
template <typename In, int HK, int HV, int HEADS, bool MASKED, bool SEGMENTED, typename PQ, typename PK, typename PL,
          typename PB, typename PM, typename PZ>
inline void gated_delta_hopper_prepare(Place at, threadgroup char* memory, int length, PQ q, PK k, PL log_g, PB beta,
                                       PM mask, PZ segments, GLOBAL In* solve, GLOBAL In* scores,
                                       GLOBAL float* factors) {
  using Memory = HopperPrepareMemory<HEADS>;
  constexpr int repeats = HV / HK, blocks = (repeats + HEADS - 1) / HEADS;
  if (blocks == 1) at.y = at.x % HK, at.x /= HK;
  const Room room = room_of(memory);
  const int warp = uniform(at.group), lane = at.lane, chunks = (length + 63) / 64, key_head = at.y / blocks;
  const int first = key_head * repeats + at.y % blocks * HEADS, left = (key_head + 1) * repeats - first;
  const int heads = repeats % HEADS && left < HEADS ? left : HEADS;
  const long row = (long)at.z * length + at.x * 64, key = (row * HK + key_head) * 128;
  const auto chunk_of = [&](int head) { return ((long)at.z * HV + first + head) * chunks + at.x; };
  const auto tables_of = [&](int head) { return PrepareTables{room.floats(Memory::tables + head * Memory::table)}; };
  const auto live = alive<MASKED>(mask, at.z, at.x * 64, length);
  const unsigned arrival = room.place + Memory::arrival;

  if (at.index == 0) {
    mbarrier_init(arrival, 128);
    mbarriers_started();
  }
  barrier();
  copy_positions<128>(reinterpret_cast<threadgroup bf16*>(room.memory + Memory::k), k + key, HK * 128, live, arrival,
                      at.index);
  copy_positions<128>(reinterpret_cast<threadgroup bf16*>(room.memory + Memory::q), q + key, HK * 128, live, arrival,
                      at.index);
  signalled_pieces_sent(arrival);
  // Two warps fill the tables of a value head, each those of its own 32 positions.
  const int own_head = warp / 2, t = at.index % 64;
  const PrepareTables own = tables_of(own_head);
  if (own_head < heads) {
    const int hv = first + own_head;
    own.gate[t] = gate_of<SEGMENTED>(t, live, log_g, segments, at.z, hv, HV, at.x * 64, length);
    own.rate()[t] = live(t) ? static_cast<float>(beta[(row + t) * HV + hv]) : 0.0f;
    group_barrier();
    own.fill(t);
  }
  mbarrier_wait(arrival, 0);
  copies_fence();
  float products[32];
  // Multiplies with K. All warps have read both operands when it returns.
  const auto multiply_by_keys = [&](int operand) {
    register_fence(products);
    products_start();
    multiply_rows<In, 64, 128>(products, room.place + operand, 8192, room.place + Memory::k, 8192);
    products_sent();
    products_wait<0>();
    register_fence(products);
    barrier();
  };
  multiply_by_keys(Memory::q);
  if (own_head < heads) {
    GLOBAL float* to = factors + chunk_of(own_head) * 192 + t;
    to[0] = own.between(t / 16, -1) * own.prefix()[t];
    to[64] = own.suffix()[t] * own.between(4, t / 16);
    to[128] = own.rate()[t];
  }

  const DiagonalTiles diagonal{room.floats(Memory::diagonal) + warp * 256};
  const int own_side = lane / 16;
  if (own_side < heads) diagonal.fill(own_side, lane % 16, tables_of(own_side).gate + warp * 16);
  group_barrier();
  const unsigned triangles = room.place + Memory::solve;
  GLOBAL bf16* to = scores + chunk_of(0) * (packed_bytes / 2) + lane * 2;
  const long next_head = (long)chunks * (packed_bytes / 2);
  weigh_rows<false>(products, tables_of, diagonal, triangles, to, next_head, heads, warp, lane);
  multiply_by_keys(Memory::k);
  weigh_rows<true>(products, tables_of, diagonal, triangles, to, next_head, heads, warp, lane);
  group_barrier();
  if (own_side < heads)
    solve_column(diagonal, own_side, tables_of(own_side).rate() + warp * 16,
                 room.memory + Memory::solve + own_side * triangle_bytes, warp, lane % 16);
  barrier();

  const unsigned triangle = triangles + own_head * triangle_bytes;
  const TriangleSolver solver{core_triangle(triangle, lane), own.rate(), lane};
  float y[2][8];
  SplitTile scaled[2];
  if (own_head < heads) {
    solver.merge_tiles(warp % 2 * 2);
    group_barrier();
    solver.start_column(y, scaled, warp % 2);
  }
  // The other warp has read the tiles of N that this one now overwrites, and has put tile (3, 2) of Z.
  barrier();
  if (own_head < heads) solver.finish_column(y, scaled, warp % 2);
  copies_fence();
  barrier();
  if (own_head < heads && t < 9) {
    const CoreRun run = core_run(t);
    send_block(solve + chunk_of(own_head) * (packed_bytes / 2) + run.packed / 2, triangle + run.apart, run.bytes);
    // The block's memory is read when it ends. Copies that were sent arrive before the kernel ends.
    blocks_read();
  }
}
