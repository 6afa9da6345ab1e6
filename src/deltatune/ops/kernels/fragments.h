// What the products of LoRA need in addition to cuda.h: products of fragments, which a group loads from device memory
// straight to its registers. tests/ops/kernels/fragments_host.h stands in for this file on a CPU.
// A register of a fragment holds a pair of elements, the first in its low half. Lane 4 g + t of a group has g, its row,
// and t, its place among the four lanes of a row.

// Adds to sums [16, 8] the product of left [16, 16] and right [16, 8]. A lane has the rows g and g + 8 of left, at the
// columns 2 t and 2 t + 1 (registers 0 and 1) and eight further on (2 and 3); column g of right, at the rows
// of the same numbers; and the columns 2 t and 2 t + 1 of the sums, in row g (0 and 1) and in row g + 8 (2 and 3).
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

// Whether an array starts at a multiple of this number of bytes.
template <int BYTES, typename T>
inline bool starts_at_multiple(const T* p) {
  return (reinterpret_cast<unsigned long long>(p) & (BYTES - 1)) == 0;
}
// Loads `there` neighbouring elements of an input, in one load if it may be assumed ALIGNED and all are there; zeros
// take the places of the others. The load has a predicate and no branch, so that many of them can be on their way.
template <bool ALIGNED, int PAIRS, typename T>
inline void load_pairs(unsigned (&to)[PAIRS], const T* from, int there) {
  const int all = there >= 2 * PAIRS;
  if constexpr (ALIGNED && PAIRS == 4) {
    asm("{\n.reg .pred all;\nsetp.ne.s32 all, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
        "@all ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
        : "=&r"(to[0]), "=&r"(to[1]), "=&r"(to[2]), "=&r"(to[3]) : "l"(from), "r"(all));
  } else if constexpr (ALIGNED && PAIRS == 2) {
    asm("{\n.reg .pred all;\nsetp.ne.s32 all, %3, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\n"
        "@all ld.global.nc.v2.b32 {%0, %1}, [%2];\n}" : "=&r"(to[0]), "=&r"(to[1]) : "l"(from), "r"(all));
  } else if constexpr (ALIGNED) {
    asm("{\n.reg .pred all;\nsetp.ne.s32 all, %2, 0;\nmov.b32 %0, 0;\n@all ld.global.nc.b32 %0, [%1];\n}"
        : "=&r"(to[0]) : "l"(from), "r"(all));
  } else {
    const unsigned short* bits = reinterpret_cast<const unsigned short*>(from);
#pragma unroll
    for (int i = 0; i < 2 * PAIRS; ++i) {
      const unsigned found = i < there ? __ldg(bits + i) : 0;
      to[i / 2] = i % 2 == 0 ? found : to[i / 2] | found << 16;
    }
  }
}
