// The additions of LoRA's products to cuda.h: products of fragments, which a group loads from device memory straight to
// its registers. tests/ops/kernels/fragments_host.h stands in for this file on a CPU. A register of a fragment holds a
// pair of elements, the first in its low half. Lane 4 g + t of a group has g, its row, and t, its place among the four
// lanes of a row.

// Adds to sums [16, 8] the product of left [16, 16] and right [16, 8]. A lane has the rows g and g + 8 of left, at the
// columns 2 t and 2 t + 1 (registers 0 and 1) and eight further on (2 and 3); column g of right, at the rows
// of the same numbers; and the columns 2 t and 2 t + 1 of the sums, in row g (0 and 1) and in row g + 8 (2 and 3).
#define DELTATUNE_ROLLED _Pragma("unroll 1")
template <typename In> struct Fragments;
#define DELTATUNE_FRAGMENTS(In, TYPE) \
  template <> struct Fragments<In> { \
    static inline void multiply(float (&sums)[4], const unsigned (&left)[4], unsigned right, unsigned further) { \
      asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, " \
          "{%0,%1,%2,%3};" \
          : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]) \
          : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right), "r"(further)); \
    } \
  };
DELTATUNE_FRAGMENTS(bf16, "bf16")
DELTATUNE_FRAGMENTS(__half, "f16")

// Transposes a matrix [8, 8] of which a lane holds row g at the columns 2 t and 2 t + 1: it gets column g at these
// rows.
inline unsigned across_lanes(unsigned pair) {
  unsigned r;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(pair));
  return r;
}
// The pair of the first elements of two pairs, and that of the second.
inline unsigned pair_of_firsts(unsigned one, unsigned other) { return __byte_perm(one, other, 0x5410); }
inline unsigned pair_of_seconds(unsigned one, unsigned other) { return __byte_perm(one, other, 0x7632); }

// The two elements of a pair in fp32, and the pair of two numbers, each rounded once.
template <typename In> inline float first_of(unsigned pair);
template <typename In> inline float second_of(unsigned pair);
template <typename In> inline unsigned pair_of(float first, float second);
template <> inline float first_of<bf16>(unsigned pair) { return unpack_low(pair); }
template <> inline float second_of<bf16>(unsigned pair) { return unpack_high(pair); }
template <> inline unsigned pair_of<bf16>(float first, float second) { return pack(first, second); }
template <> inline float first_of<__half>(unsigned pair) { return __half2float(__ushort_as_half(pair & 0xffff)); }
template <> inline float second_of<__half>(unsigned pair) { return __half2float(__ushort_as_half(pair >> 16)); }
template <> inline unsigned pair_of<__half>(float first, float second) {
  return __half_as_ushort(__float2half_rn(first)) | (unsigned)__half_as_ushort(__float2half_rn(second)) << 16;
}

// Whether an array starts at a multiple of this number of bytes.
template <int BYTES, typename T>
inline bool starts_at_multiple(const T* p) {
  return (reinterpret_cast<unsigned long long>(p) & (BYTES - 1)) == 0;
}
template <int BYTES>
inline bool starts_at_multiple(Nothing) {
  return true;
}
// Loads eight elements one by one. It is not inlined, so that the rare array that is not aligned costs a kernel no
// registers and little text, which MLX hashes at every launch.
__device__ __noinline__ uint4 load_elements(const unsigned short* from, int there) {
  unsigned pairs[4];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const unsigned found = i < there ? __ldg(from + i) : 0;
    pairs[i / 2] = i % 2 == 0 ? found : pairs[i / 2] | found << 16;
  }
  return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}
// Loads `there` neighbouring elements of an input, in one load if it may be assumed ALIGNED and all are there; zeros
// take the places of the others. The load has a predicate and no branch, and stays in its place before
// products, so that many of them are on their way.
template <bool ALIGNED, int PAIRS, typename T>
inline void load_pairs(unsigned (&to)[PAIRS], const T* from, int there) {
  const int all = there >= 2 * PAIRS;
  if constexpr (ALIGNED && PAIRS == 4) {
    asm volatile("{\n.reg .pred all;\nsetp.ne.s32 all, %5, 0;\n"
        "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
        "@all ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
        : "=&r"(to[0]), "=&r"(to[1]), "=&r"(to[2]), "=&r"(to[3]) : "l"(from), "r"(all));
  } else if constexpr (ALIGNED) {
    static_assert(PAIRS == 1, "one pair or four");
    asm volatile("{\n.reg .pred all;\nsetp.ne.s32 all, %2, 0;\nmov.b32 %0, 0;\n@all ld.global.nc.b32 %0, [%1];\n}"
        : "=&r"(to[0]) : "l"(from), "r"(all));
  } else if constexpr (PAIRS == 1) {
    const unsigned short* bits = reinterpret_cast<const unsigned short*>(from);
    to[0] = (there > 0 ? __ldg(bits) : 0) | (there > 1 ? (unsigned)__ldg(bits + 1) << 16 : 0);
  } else {
    const uint4 found = load_elements(reinterpret_cast<const unsigned short*>(from), there);
    to[0] = found.x, to[1] = found.y, to[2] = found.z, to[3] = found.w;
  }
}
// Stores eight neighbouring elements of an output at a multiple of 16 bytes.
template <typename T>
inline void store_pairs(T* to, const unsigned (&pairs)[4]) {
  *reinterpret_cast<uint4*>(to) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// A mark between the blocks of a launch is 64 bits of an output. That memory holds numbers of an earlier array, so a
// mark that is set is a number that no array has but with a chance of 2^-64: four 16-bit NaNs with some random bits.
#define DELTATUNE_MARK 0x7fd3ffa97fe5ffc6ull
// A block's writes before a barrier can be read by those who find its mark set.
inline void set_mark(unsigned* mark) {
  asm volatile("st.release.gpu.global.b64 [%0], %1;" :: "l"(mark), "l"(DELTATUNE_MARK) : "memory");
}
inline void clear_mark(unsigned* mark) {
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" :: "l"(mark), "l"(0ull) : "memory");
}
inline bool is_marked(const unsigned* mark) {
  unsigned long long bits;
  asm volatile("ld.acquire.gpu.global.b64 %0, [%1];" : "=l"(bits) : "l"(mark) : "memory");
  return bits == DELTATUNE_MARK;
}
// Of two blocks that set a mark, pass this fence and look at marks, at least one sees the other's mark.
inline void device_fence() { asm volatile("fence.sc.gpu;" ::: "memory"); }
// Loads four neighbouring elements that another block wrote.
inline void take_shares(float (&to)[4], const float* from) {
  const float4 found = __ldcg(reinterpret_cast<const float4*>(from));
  to[0] = found.x, to[1] = found.y, to[2] = found.z, to[3] = found.w;
}

// A counter between the blocks of a launch, at zero before it. A block's writes before a barrier can be read, by
// load_written(), by those that waited for its arrival. A block may wait only for blocks before it in the grid, since a
// GPU starts them in this order.
inline void arrive(int* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" :: "l"(counter) : "memory");
}
inline void wait_for(const int* counter, int count) {
  int found;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(counter) : "memory");
  } while (found < count);
}
// Whether this is the last of `count` blocks that count themselves here. The counter is zero again afterwards.
inline bool is_last_of(int* counter, int count) {
  return atomicInc(reinterpret_cast<unsigned*>(counter), count - 1) == count - 1;
}
// Loads eight neighbouring elements that another block wrote, or zeros.
template <typename T>
inline void load_written(unsigned (&to)[4], const T* from, bool counts) {
  const uint4 found = counts ? __ldcg(reinterpret_cast<const uint4*>(from)) : make_uint4(0, 0, 0, 0);
  to[0] = found.x, to[1] = found.y, to[2] = found.z, to[3] = found.w;
}
