// Two kernels for rows that are sorted by expert: the product of every row with its expert's matrix, and the gradients
// of those matrices. ends[e] is the number of rows of the experts 0..e, so expert e has the rows ends[e - 1] to
// ends[e]. A group of 32 lanes holds 16x16 tiles of the result in fp32. While it multiplies, the next rows are copied
// to shared memory.

// Returns the expert of a tile of ROWS rows. Every tile belongs to one expert. If expert e's rows start at `start`, its
// first tile has the number start / ROWS + e. So every expert has enough numbers for its rows, the experts' numbers are
// in order, and `ends` alone decides to which expert a number belongs. Some numbers have no rows.
template <int ROWS, typename PE>
inline int expert_of(int tile, PE ends, int experts, int lane) {
  int before = 0;
  for (int e = lane; e < experts; e += 32) before += ends[e] / ROWS + e < tile ? 1 : 0;
  return (int)lane_sum((float)before);
}

// The view from (row, column) of a view on.
template <typename Store, bool Transposed>
inline View<Store, Transposed> moved(View<Store, Transposed> v, int row, int column) {
  return View<Store, Transposed>{v.store, v.offset + (Transposed ? column * v.stride + row : row * v.stride + column),
                                 v.stride};
}

// How many tiles of 16, at most `most`, are needed for so many elements.
inline int tiles_within(int elements, int most) {
  const int tiles = (elements + 15) / 16;
  return tiles < 0 ? 0 : tiles < most ? tiles : most;
}

// Adds the product l r to a group's DOWN x OVER tiles, over DEPTH elements. Unless WHOLE, only the first `down` x
// `over` tiles and `deep` tiles of the depth are there.
template <bool WHOLE, int DOWN, int OVER, int DEPTH, typename L, typename R>
inline void add_product(thread Tile* sums, L l, R r, int down, int over, int deep, int lane) {
  const int end = WHOLE ? DEPTH : deep * 16;
  DELTATUNE_UNROLL
  for (int k = 0; k < end; k += 16) {
    decltype(left(l, lane)) a[DOWN];
    DELTATUNE_UNROLL
    for (int m = 0; m < DOWN; ++m)
      if (WHOLE || m < down) a[m] = left(moved(l, m * 16, k), lane);
    DELTATUNE_UNROLL
    for (int n = 0; n < OVER; ++n) {
      if (!WHOLE && n >= over) continue;
      const auto b = right(moved(r, k, n * 16), lane);
      DELTATUNE_UNROLL
      for (int m = 0; m < DOWN; ++m)
        if (WHOLE || m < down) multiply(sums[m * OVER + n], a[m], b, lane);
    }
  }
}

// Adds the product of a stage to a group's tiles, of which `down` x `over` are there; `rest` elements of the depth
// remain from the stage's start on.
template <int DOWN, int OVER, int DEPTH, typename L, typename R>
inline void add_stage(thread Tile* sums, L l, R r, int down, int over, int rest, int lane) {
  const int deep = tiles_within(rest, DEPTH / 16);
  if (down == DOWN && over == OVER && deep * 16 == DEPTH)
    add_product<true, DOWN, OVER, DEPTH>(sums, l, r, down, over, deep, lane);
  else
    add_product<false, DOWN, OVER, DEPTH>(sums, l, r, down, over, deep, lane);
}

template <typename In, int ROWS, int COLUMNS, int DEPTH, bool TRANSPOSED>
struct ExpertProductMemory {
  static constexpr constant int rows = 0;
  static constexpr constant int weight = ROWS * stride_of(DEPTH) * Exact<In>::bytes;
  static constexpr constant int stage =
      weight + (TRANSPOSED ? COLUMNS * stride_of(DEPTH) : DEPTH * stride_of(COLUMNS)) * Exact<In>::bytes;
  // The results are written out through the memory of the stages.
  static constexpr constant int results = ROWS * stride_of(COLUMNS) * Exact<In>::bytes;
  static constexpr constant int arrivals = 2 * stage > results ? 2 * stage : results;
  static constexpr constant int bytes = arrivals + 16;
};

// Computes out [R, outputs] = scale * rows [R, inputs] times the matrix of each row's expert, plus `onto` [R, outputs]
// where ADDED. The matrices are [E, outputs, inputs] where TRANSPOSED, else [E, inputs, outputs]; scale is one fp32
// number. Each block computes a tile of ROWS x COLUMNS of one expert, DEPTH inputs at a time; the grid is (tiles of
// columns, R / ROWS + E tiles of rows). ACROSS groups lie side by side, and each has as many tiles of the result.
template <typename In, int ROWS, int COLUMNS, int DEPTH, int GROUPS, int ACROSS, bool TRANSPOSED, bool ADDED,
          typename PX, typename PW, typename PE, typename PS, typename PO>
inline void expert_product(Place at, threadgroup char* memory, int inputs, int outputs, int experts, PX rows, PW weight,
                           PE ends, PS scale, PO onto, GLOBAL In* out) {
  using Memory = ExpertProductMemory<In, ROWS, COLUMNS, DEPTH, TRANSPOSED>;
  constexpr int threads = GROUPS * 32, down = ROWS / 16 * ACROSS / GROUPS, over = COLUMNS / 16 / ACROSS;
  constexpr int stride = stride_of(DEPTH), weight_stride = TRANSPOSED ? stride : stride_of(COLUMNS);
  constexpr int result_stride = stride_of(COLUMNS), result_count = ROWS * result_stride;
  constexpr int weight_count = (TRANSPOSED ? COLUMNS : DEPTH) * weight_stride;
  static_assert(down * GROUPS * 16 == ROWS * ACROSS && over * ACROSS * 16 == COLUMNS, "each group has as many tiles");
  const int expert = expert_of<ROWS>(at.y, ends, experts, at.lane);
  if (expert >= experts) return;
  const int start = expert > 0 ? ends[expert - 1] : 0;
  const int first = start + (at.y - start / ROWS - expert) * ROWS, height = ends[expert] - first;
  if (height <= 0) return;
  const int column = at.x * COLUMNS, width = outputs - column, steps = (inputs + DEPTH - 1) / DEPTH;
  const int own_row = at.group / ACROSS * down * 16, own_column = at.group % ACROSS * over * 16;
  const int tall = tiles_within(height - own_row, down), wide = tiles_within(width - own_column, over);
  const auto rows_from = rows + (long)first * inputs;
  const auto weight_from = weight + (long)expert * inputs * outputs + (TRANSPOSED ? (long)column * inputs : column);

  Tile sums[down * over];
  clear_tiles<down * over>(sums);
  arrivals_start(memory + Memory::arrivals, at.index);
  for (int step = -1; step < steps; ++step) {
    if (step >= 0) {
      copies_wait(arrival_at(memory + Memory::arrivals, step & 1), step >> 1);
      barrier();
    }
    if (step + 1 < steps) {
      threadgroup char* stage = memory + ((step + 1) & 1) * Memory::stage;
      Arrival arrival = arrival_at(memory + Memory::arrivals, (step + 1) & 1);
      const int k = (step + 1) * DEPTH;
      copy_rows<ROWS, DEPTH, threads>(shared_at<Exact<In>>(stage, Memory::rows, ROWS * stride), stride, rows_from + k,
                                      inputs, inputs - k, alive<false>(Nothing{}, 0, 0, height), arrival, at.index);
      const auto to = shared_at<Exact<In>>(stage, Memory::weight, weight_count);
      if (TRANSPOSED)
        copy_rows<COLUMNS, DEPTH, threads>(to, weight_stride, weight_from + k, inputs, inputs - k,
                                           alive<false>(Nothing{}, 0, 0, width), arrival, at.index);
      else
        copy_rows<DEPTH, COLUMNS, threads>(to, weight_stride, weight_from + (long)k * outputs, outputs, width,
                                           alive<false>(Nothing{}, 0, k, inputs), arrival, at.index);
      copies_sent(arrival, at.index);
    }
    if (step < 0 || tall == 0) continue;
    threadgroup char* stage = memory + (step & 1) * Memory::stage;
    const auto l = straight(shared_at<Exact<In>>(stage, Memory::rows, ROWS * stride), stride, own_row, 0);
    const auto matrix = shared_at<Exact<In>>(stage, Memory::weight, weight_count);
    const auto r = Choice<TRANSPOSED>::of(turned(matrix, weight_stride, 0, own_column),
                                          straight(matrix, weight_stride, 0, own_column));
    add_stage<down, over, DEPTH>(sums, l, r, tall, wide, inputs - step * DEPTH, at.lane);
  }
  barrier();
  const Exact<In> results = shared_at<Exact<In>>(memory, 0, result_count);
  if (ADDED) {
    Arrival arrival = arrival_at(memory + Memory::arrivals, steps & 1);
    copy_rows<ROWS, COLUMNS, threads>(results, result_stride, onto + (long)first * outputs + column, outputs, width,
                                      alive<false>(Nothing{}, 0, 0, height), arrival, at.index);
    copies_sent(arrival, at.index);
    copies_wait(arrival, steps >> 1);
    barrier();
  }
  const float factor = scale[0];
  DELTATUNE_UNROLL
  for (int m = 0; m < down; ++m) {
    DELTATUNE_UNROLL
    for (int n = 0; n < over; ++n) {
      const int row = own_row + m * 16, place = own_column + n * 16;
      Tile sum = sums[m * over + n], old;
      if (ADDED) old = tile_of(straight(results, result_stride, row, place), at.lane);
      DELTATUNE_UNROLL
      for (int e = 0; e < 8; ++e) sum.set(e, ADDED ? old.get(e) + factor * sum.get(e) : factor * sum.get(e));
      put_tile<true, true>(results, row * result_stride + place, result_stride, sum, 16, 16, at.lane);
    }
  }
  barrier();
  write_rows<ROWS, COLUMNS, threads>(results, 0, result_stride, out + (long)first * outputs + column, outputs, height,
                                     width, at.index);
}

template <typename In, int ROWS, int COLUMNS, int DEPTH>
struct ExpertGradientMemory {
  static constexpr constant int left = 0;
  static constexpr constant int right = DEPTH * stride_of(ROWS) * Exact<In>::bytes;
  static constexpr constant int stage = right + DEPTH * stride_of(COLUMNS) * Exact<In>::bytes;
  static constexpr constant int arrivals = 2 * stage;
  static constexpr constant int bytes = arrivals + 16;
};

// Computes out [E, height, width] in fp32: scale times the sum over each expert's rows of left [R, height]^T right
// [R, width], plus `total` [E, height, width] where ADDED. Rows are summed in their order, so the bits never vary.
// Each block computes a tile of ROWS x COLUMNS of one expert's gradient, DEPTH rows of left and right at a time; the
// grid is (tiles of columns, tiles of rows, experts). Groups share the tile as in expert_product.
template <typename In, int ROWS, int COLUMNS, int DEPTH, int GROUPS, int ACROSS, bool ADDED, typename PL, typename PR,
          typename PE, typename PS, typename PT>
inline void expert_gradient(Place at, threadgroup char* memory, int height, int width, PL left_rows, PR right_rows,
                            PE ends, PS scale, PT total, GLOBAL float* out) {
  using Memory = ExpertGradientMemory<In, ROWS, COLUMNS, DEPTH>;
  constexpr int threads = GROUPS * 32, down = ROWS / 16 * ACROSS / GROUPS, over = COLUMNS / 16 / ACROSS;
  constexpr int left_stride = stride_of(ROWS), right_stride = stride_of(COLUMNS);
  static_assert(down * GROUPS * 16 == ROWS * ACROSS && over * ACROSS * 16 == COLUMNS, "each group has as many tiles");
  const int start = at.z > 0 ? ends[at.z - 1] : 0, count = ends[at.z] - start, steps = (count + DEPTH - 1) / DEPTH;
  const int row = at.y * ROWS, column = at.x * COLUMNS;
  const int own_row = at.group / ACROSS * down * 16, own_column = at.group % ACROSS * over * 16;
  const int tall = tiles_within(height - row - own_row, down), wide = tiles_within(width - column - own_column, over);
  const auto left_from = left_rows + (long)start * height + row;
  const auto right_from = right_rows + (long)start * width + column;

  Tile sums[down * over];
  clear_tiles<down * over>(sums);
  arrivals_start(memory + Memory::arrivals, at.index);
  for (int step = -1; step < steps; ++step) {
    if (step >= 0) {
      copies_wait(arrival_at(memory + Memory::arrivals, step & 1), step >> 1);
      barrier();
    }
    if (step + 1 < steps) {
      threadgroup char* stage = memory + ((step + 1) & 1) * Memory::stage;
      Arrival arrival = arrival_at(memory + Memory::arrivals, (step + 1) & 1);
      const int k = (step + 1) * DEPTH;
      const auto live = alive<false>(Nothing{}, 0, k, count);
      copy_rows<DEPTH, ROWS, threads>(shared_at<Exact<In>>(stage, Memory::left, DEPTH * left_stride), left_stride,
                                      left_from + (long)k * height, height, height - row, live, arrival, at.index);
      copy_rows<DEPTH, COLUMNS, threads>(shared_at<Exact<In>>(stage, Memory::right, DEPTH * right_stride), right_stride,
                                         right_from + (long)k * width, width, width - column, live, arrival, at.index);
      copies_sent(arrival, at.index);
    }
    if (step < 0 || tall == 0) continue;
    threadgroup char* stage = memory + (step & 1) * Memory::stage;
    const auto l = turned(shared_at<Exact<In>>(stage, Memory::left, DEPTH * left_stride), left_stride, own_row, 0);
    const auto r =
        straight(shared_at<Exact<In>>(stage, Memory::right, DEPTH * right_stride), right_stride, 0, own_column);
    add_stage<down, over, DEPTH>(sums, l, r, tall, wide, count - step * DEPTH, at.lane);
  }
  const float factor = scale[0];
  const long block = (long)at.z * height * width;
  const auto to = stored_at<Wide<float>>(out, 0, 0);
  DELTATUNE_UNROLL
  for (int m = 0; m < down; ++m) {
    DELTATUNE_UNROLL
    for (int n = 0; n < over; ++n) {
      Tile sum = sums[m * over + n];
      const int i = row + own_row + m * 16, j = column + own_column + n * 16;
      const long from = block + (long)i * width + j;
      DELTATUNE_UNROLL
      for (int e = 0; e < 8; ++e) {
        const int y = tile_row(e, at.lane), x = tile_column(e, at.lane);
        const bool there = ADDED && i + y < height && j + x < width;
        sum.set(e, (there ? total[from + (long)y * width + x] : 0.0f) + factor * sum.get(e));
      }
      put_tile<true, false>(to, from, width, sum, height - i, width - j, at.lane);
    }
  }
}
