// The walk of both gradients kernels through the arrays that the scans saved, SLICE rows of DV at a time: they multiply
// S and u with dY and R, and dS with u.

// The sizes of a call, and how the groups of a block share the tiles of a chunk: a group owns the 16 positions of one
// row of tiles and, with the other groups of that row, its share of the columns of DK and of the pairs of tiles.
template <typename Element, int POSITIONS, int KEY_SIZE, int VALUE_SIZE, int ROWS, int KEY_HEADS, int VALUE_HEADS,
          int BLOCK_GROUPS, int SLICES_IN_MEMORY, bool READ_UNSTAGED, bool HAS_MASK, bool HAS_SEGMENTS,
          bool HAS_BETA, bool GATE_A_CHANNEL>
struct GradientShape {
  using In = Element;
  static constexpr constant int C = POSITIONS, DK = KEY_SIZE, DV = VALUE_SIZE, SLICE = ROWS;
  static constexpr constant int HK = KEY_HEADS, HV = VALUE_HEADS, GROUPS = BLOCK_GROUPS, STAGES = SLICES_IN_MEMORY;
  static constexpr constant bool UNSTAGED = READ_UNSTAGED, MASKED = HAS_MASK, SEGMENTED = HAS_SEGMENTS;
  static constexpr constant bool ERASES = HAS_BETA, CHANNEL = GATE_A_CHANNEL;
  static constexpr constant int threads = GROUPS * 32, repeats = HV / HK;
  // Distances of rows in shared memory: of keys, of dY, of states, and of u and R.
  static constexpr constant int stride = stride_of(DK), slice_stride = SLICE + 8;
  static constexpr constant int state_stride = row_of_state<In, DK, CHANNEL, ERASES>();
  static constexpr constant int saved = row_of_chunk<In, C, DK, CHANNEL, ERASES>();
  static constexpr constant int tails = tails_of<In, DK, CHANNEL>(), tail_bits = ERASES ? 2 : 1;
  static constexpr constant int blocks = C / 16, columns = padded(DK), key_tiles = columns / 16;
  static constexpr constant int parts = GROUPS / blocks, column_tiles = (key_tiles + parts - 1) / parts;
  static constexpr constant int own_pairs = (blocks + parts - 1) / parts;
  static_assert(GROUPS % blocks == 0, "groups share the columns of a row of tiles");
  static_assert(padded(DV) % SLICE == 0, "SLICE divides the rows");
};

// Whether no tile starts at a group's column: where the parts do not divide the columns, the last part lacks some.
template <typename Shape>
inline bool is_lacking(int column) {
  return Shape::key_tiles % Shape::parts != 0 && column >= Shape::columns;
}

// The arrays that a gradients kernel goes through by slices, in device memory: those that the scans saved, dY, and v,
// in place of which dY stands with an erase.
template <typename PT, typename PU, typename PR, typename PV, typename PY, typename PM>
struct SavedArrays {
  PT states, d_states;
  PU u;
  PR right;
  PV values;
  PY dy;
  PM mask;
  int length;
};
template <typename PT, typename PU, typename PR, typename PV, typename PY, typename PM>
inline SavedArrays<PT, PU, PR, PV, PY, PM> saved_arrays(PT states, PT d_states, PU u, PR right, PV values, PY dy,
                                                        PM mask, int length) {
  return SavedArrays<PT, PU, PR, PV, PY, PM>{states, d_states, u, right, values, dy, mask, length};
}

// A slice's u or, where nothing is erased, v; positions from `i` on of its rows from `s` on, transposed, as an operand;
// and those rows as a right operand.
template <typename Shape, typename Memory>
inline auto deltas_of(threadgroup char* slice) {
  using In = typename Shape::In;
  return Choice<Shape::ERASES>::of(shared_at<Wide<In>>(slice, Memory::u, Shape::SLICE * Shape::saved),
                                   shared_at<Exact<In>>(slice, Memory::values, Shape::C * Shape::slice_stride));
}
template <typename Shape, typename Store>
inline auto left_deltas(Store u, int i, int s, int lane) {
  return left(Choice<Shape::ERASES>::of(turned(u, Shape::saved, i, s), straight(u, Shape::slice_stride, i, s)), lane);
}
template <typename Shape, typename Store>
inline auto right_deltas(Store u, int s, int i, int lane) {
  return right(Choice<Shape::ERASES>::of(straight(u, Shape::saved, s, i), turned(u, Shape::slice_stride, s, i)), lane);
}
// A view as a left operand or, where nothing is erased (the flag), another operand, which no product reads then.
template <typename View, typename Other>
inline auto left_if(Flag<true>, View view, const thread Other&, int lane) {
  return left(view, lane);
}
template <typename View, typename Other>
inline Other left_if(Flag<false>, View, const thread Other& other, int) {
  return other;
}

// Starts to copy the rows of DV from `first` on of chunk number `chunk`, which is of value head hv, to `memory`.
template <typename Shape, typename Memory, typename Arrays>
inline void load_slice(Place at, threadgroup char* memory, thread Arrival& arrival, Arrays from, int hv, long chunk,
                       int first) {
  using In = typename Shape::In;
  constexpr int threads = Shape::threads, C = Shape::C, DV = Shape::DV, SLICE = Shape::SLICE, HV = Shape::HV;
  constexpr int stride = Shape::state_stride, saved = Shape::saved, value_rows = padded(DV);
  if (!Shape::UNSTAGED) {
    copy_block<SLICE * stride, threads>(shared_at<Saved<In>>(memory, Memory::state, SLICE * stride),
                                        stored_at<Saved<In>>(from.states, chunk, value_rows * stride),
                                        (long)first * stride, arrival, at.index);
    copy_block<SLICE * stride, threads>(shared_at<Saved<In>>(memory, Memory::d_state, SLICE * stride),
                                        stored_at<Saved<In>>(from.d_states, chunk, value_rows * stride),
                                        (long)first * stride, arrival, at.index);
  }
  if (saved > 0) {
    copy_block<SLICE * saved, threads>(shared_at<Wide<In>>(memory, Memory::u, SLICE * saved),
                                       stored_at<Wide<In>>(from.u, chunk, value_rows * saved), (long)first * saved,
                                       arrival, at.index);
    copy_block<SLICE * saved, threads>(shared_at<Wide<In>>(memory, Memory::right, SLICE * saved),
                                       stored_at<Wide<In>>(from.right, chunk, value_rows * saved),
                                       (long)first * saved, arrival, at.index);
  }
  constexpr int slice_stride = Shape::slice_stride;
  const long values = (((long)at.z * from.length + at.x * C) * HV + hv) * DV + first;
  const auto live = alive<Shape::MASKED>(from.mask, at.z, at.x * C, from.length);
  if (!Shape::ERASES)
    copy_rows<C, SLICE, threads>(shared_at<Exact<In>>(memory, Memory::values, C * slice_stride), slice_stride,
                                 from.values + values, HV * DV, DV - first, live, arrival, at.index);
  copy_rows<C, SLICE, threads>(shared_at<Exact<In>>(memory, Memory::dy, C * slice_stride), slice_stride,
                               from.dy + values, HV * DV, DV - first, live, arrival, at.index);
}

// A group's sums over the rows of DV: from_y is dY S, from_right R^T S and from_end u^T dS, for its columns of DK;
// y_pairs is dY u and right_pairs R^T u, for its pairs of tiles; rates are <R_i, u_i>, a lane's share of its two rows.
// They refer to a kernel's own arrays, which stay in registers.
template <typename Shape>
struct StateProducts {
  thread Tile (&from_y)[Shape::column_tiles];
  thread Tile (&from_right)[Shape::column_tiles];
  thread Tile (&from_end)[Shape::column_tiles];
  thread Tile (&y_pairs)[Shape::own_pairs];
  thread Tile (&right_pairs)[Shape::own_pairs];
  thread float (&rates)[2];
};

// Sets the sums of a group's tiles to zero.
template <typename Shape>
inline void clear(StateProducts<Shape> sums) {
  clear_tiles<Shape::column_tiles>(sums.from_y);
  clear_tiles<Shape::column_tiles>(sums.from_right);
  clear_tiles<Shape::column_tiles>(sums.from_end);
  clear_tiles<Shape::own_pairs>(sums.y_pairs);
  clear_tiles<Shape::own_pairs>(sums.right_pairs);
}

// Adds to the sums of a group's pairs of tiles the products of dY and of R with rows s to s + 15 of u.
template <typename Shape, typename Store, typename LeftY, typename LeftRight>
inline void multiply_pairs(Place at, StateProducts<Shape> sums, const thread LeftY& left_y,
                           const thread LeftRight& left_right, Store u, int s) {
  const int row = (unsigned)at.group % Shape::blocks, part = (unsigned)at.group / Shape::blocks, lane = at.lane;
  DELTATUNE_UNROLL
  for (int m = 0; m < Shape::own_pairs; ++m) {
    const int column = part + m * Shape::parts;
    if (column > row) continue;
    const auto b = right_deltas<Shape>(u, s, column * 16, lane);
    multiply(sums.y_pairs[m], left_y, b, lane);
    if (Shape::ERASES) multiply(sums.right_pairs[m], left_right, b, lane);
  }
}
