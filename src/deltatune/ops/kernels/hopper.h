// The additions of Hopper to cuda.h: products of 64 rows by a group of four warps, which read their operands from
// shared memory and run asynchronously (wgmma), and copies that signal a barrier in shared memory (mbarrier) when they
// arrive. tests/ops/kernels/hopper_host.h stands in for this file on a CPU.
// A tile of an operand is cut into panels of 64 columns, 128 bytes per row. The position of each of the eight 16-byte
// pieces of a row depends on the row's number modulo 8 (the 128-byte swizzle). A tile's address is a multiple of 1024.

// The address in shared memory by which barriers and operands are named.
inline unsigned shared_place(const void* p) { return shared_address(p); }

inline void mbarrier_init(unsigned mbarrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(mbarrier), "r"(count) : "memory");
}
inline void mbarriers_started() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
inline void mbarrier_expect(unsigned mbarrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(mbarrier), "r"(bytes) : "memory");
}
inline void mbarrier_arrive(unsigned mbarrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(mbarrier) : "memory");
}
// Waits until the mbarrier's round number `round` is over; rounds count from 0.
inline void mbarrier_wait(unsigned mbarrier, int round) {
  asm volatile(
      "{\n.reg .pred done;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra DONE;\nbra WAIT;\n"
      "DONE:\n}" :: "r"(mbarrier), "r"(round & 1) : "memory");
}
// Tells all lanes of a group alike whether that round is over. Their later reads are ordered by waiting for it.
inline bool mbarrier_over(unsigned mbarrier, int round) {
  int over;
  asm volatile("{\n.reg .pred done;\nmbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
               "selp.b32 %0, 1, 0, done;\n}" : "=r"(over) : "r"(mbarrier), "r"(round & 1) : "memory");
  return __shfl_sync(0xffffffffu, over, 0);
}
template <typename T>
inline void copy_tile(unsigned to, const T* from, unsigned bytes, unsigned mbarrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(to), "l"(from), "r"(bytes), "r"(mbarrier) : "memory");
}
// A barrier of this number of threads of the block; barriers that may be waited for at once have different numbers.
template <int THREADS, int NUMBER = 1>
inline void named_barrier() { asm volatile("bar.sync %0, %1;" :: "n"(NUMBER), "n"(THREADS) : "memory"); }

template <int COUNT>
inline void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(COUNT)); }
template <int COUNT>
inline void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(COUNT)); }

inline float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
template <typename In> struct PairOf;
template <> struct PairOf<bf16> {
  static inline unsigned of(float low, float high) { return pack(low, high); }
};
template <> struct PairOf<__half> {
  static inline unsigned of(float low, float high) {
    unsigned r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
  }
};
// Products of two pairs of bf16, and of two with a third added, rounded once.
inline unsigned pair_times(unsigned a, unsigned b) {
  unsigned r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
inline unsigned pair_times_add(unsigned a, unsigned b, unsigned c) {
  unsigned r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
// Byte i of each of two numbers, in both bytes of the lower and of the upper half.
inline unsigned bytes_of(unsigned one, unsigned other, int i) { return __byte_perm(one, other, 0x4400 + 0x1111 * i); }
// Returns a pair of the upper or the lower half of x.
inline unsigned half_twice(unsigned x, int upper) { return __byte_perm(x, x, 0x1010 + 0x2222 * upper); }
// Copies to shared memory for which the thread itself waits: four words that no other thread of the block asks for, or
// two bf16. Pieces that are not aligned as a whole are copied in parts. words_wait waits for all copies that were sent
// but the last LEFT times.
inline void copy_words(unsigned to, const unsigned* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory");
}
inline void copy_pair(unsigned to, const bf16* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(to), "l"(from) : "memory");
}
inline void copy_words_in_parts(unsigned to, const unsigned* from) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(to + 4 * i), "l"(from + i) : "memory");
}
inline void copy_pair_in_parts(unsigned to, const bf16* from) {
  const unsigned pair = __bfloat16_as_ushort(from[0]) | (unsigned)__bfloat16_as_ushort(from[1]) << 16;
  asm volatile("st.shared.u32 [%0], %1;" :: "r"(to), "r"(pair) : "memory");
}
inline void words_sent() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
inline void words_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory"); }
inline void get_words(unsigned (&to)[4], unsigned place) {
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(place) : "memory");
}
inline void get_two_words(unsigned (&to)[2], unsigned place) {
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(place) : "memory");
}
inline void put_words(unsigned place, const unsigned* from) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};"
               :: "r"(place), "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3]) : "memory");
}
inline void put_pair(void* to, unsigned pair) { *reinterpret_cast<unsigned*>(to) = pair; }
inline unsigned get_pair(const void* from) { return *reinterpret_cast<const unsigned*>(from); }
inline void put_four(float* to, const float* from) {
  *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]);
}
inline void get_four(float* to, const float* from) {
  const float4 x = *reinterpret_cast<const float4*>(from);
  to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
}
inline void get_two(float* to, const float* from) {
  const float2 x = *reinterpret_cast<const float2*>(from);
  to[0] = x.x, to[1] = x.y;
}
// Copies 16 bytes of a row of an input, which may start anywhere, into a tile; zeros if the row is not live.
template <typename In>
inline void put_piece(In* to, const In* from, bool live) {
  uint4 found = make_uint4(0, 0, 0, 0);
  if (live) {
    if (aligned16(from)) {
      found = *reinterpret_cast<const uint4*>(from);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) reinterpret_cast<In*>(&found)[i] = from[i];
    }
  }
  *reinterpret_cast<uint4*>(to) = found;
}
// Copies 16 bytes that are aligned to 16 bytes in both places.
template <typename In>
inline void put_whole_piece(In* to, const In* from) {
  *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
}

// Loads a left operand of 16 rows and columns, in four parts of 8 x 8: lanes 8 i to 8 i + 7 name the addresses of the
// rows of part i. load_turned_parts loads the transpose of each part.
inline void load_parts(unsigned* r, unsigned place) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(place) : "memory");
}
inline void load_turned_parts(unsigned* r, unsigned place) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(place) : "memory");
}
// They do so if `on`, which is equal on all lanes of a group, and else set the operand to zero, without a branch.
inline void load_parts_if(bool on, unsigned* r, unsigned place) {
  r[0] = r[1] = r[2] = r[3] = 0;
  asm volatile("{\n.reg .pred on;\nsetp.ne.b32 on, %5, 0;\n"
               "@on ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n}"
               : "+r"(r[0]), "+r"(r[1]), "+r"(r[2]), "+r"(r[3]) : "r"(place), "r"((int)on) : "memory");
}
inline void load_turned_parts_if(bool on, unsigned* r, unsigned place) {
  r[0] = r[1] = r[2] = r[3] = 0;
  asm volatile("{\n.reg .pred on;\nsetp.ne.b32 on, %5, 0;\n"
               "@on ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n}"
               : "+r"(r[0]), "+r"(r[1]), "+r"(r[2]), "+r"(r[3]) : "r"(place), "r"((int)on) : "memory");
}
// The fp32 number of these bits.
inline float float_of(unsigned bits) { return __uint_as_float(bits); }
// Stores such an operand, or the transpose of each part.
inline void put_parts(unsigned place, const unsigned* r) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
               :: "r"(place), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
inline void put_turned_parts(unsigned place, const unsigned* r) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
               :: "r"(place), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
inline void put_turned_parts_if(bool on, unsigned place, const unsigned* r) {
  asm volatile("{\n.reg .pred on;\nsetp.ne.b32 on, %5, 0;\n"
               "@on stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};\n}"
               :: "r"(place), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"((int)on) : "memory");
}
// Stores the transposes of two parts: lanes 8 i to 8 i + 7 name the addresses of the rows of part i < 2.
inline void put_two_turned_parts(unsigned place, const unsigned* r) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};"
               :: "r"(place), "r"(r[0]), "r"(r[1]) : "memory");
}
// Copies a block of shared memory to device memory. The lane that sends it calls blocks_read before the memory is
// written again, and blocks_arrived before the kernel ends.
template <typename T>
inline void send_block(T* to, unsigned from, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\ncp.async.bulk.commit_group;"
               :: "l"(to), "r"(from), "r"(bytes) : "memory");
}
inline void blocks_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
inline void blocks_arrived() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Copies 16 bytes of an input, aligned to 16 bytes, to shared memory, or zeros if they are not live. A thread's pieces
// signal the mbarrier once when all of them have arrived. The products that read them follow a fence (copies_fence).
template <typename T>
inline void copy_signalled_piece(unsigned to, const T* from, bool live, unsigned) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(live ? 16 : 0) : "memory");
}
inline void signalled_pieces_sent(unsigned mbarrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(mbarrier) : "memory");
}
// Adds one to a number in device memory and returns its old value.
inline int counted(int* number) { return atomicAdd(number, 1); }
inline unsigned bits_of(float x) { return __float_as_uint(x); }
// The second byte of each of two numbers, and the lower halves of two.
inline unsigned second_bytes_of(float one, float other) {
  return __byte_perm(__float_as_uint(one), __float_as_uint(other), 0x0051);
}
inline unsigned lower_halves(unsigned one, unsigned other) { return __byte_perm(one, other, 0x5410); }


// Products run from products_sent to products_wait. products_start follows the last write to their registers.
inline void products_start() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
inline void products_sent() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
inline void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(LEFT) : "memory"); }

// Tells the compiler that a product may read or write these registers until here.
template <int COUNT>
inline void register_fence(float (&x)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(x[i]) :: "memory");
}
template <int COUNT>
inline void register_fence(unsigned (&x)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+r"(x[i]) :: "memory");
}
// Returns a value that is equal on all lanes of a group, so that the compiler knows that it is.
inline int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// The descriptors of an operand: rows_operand where a product sums over its columns, columns_operand where it sums over
// its rows and the next 64 columns are `panel` bytes further. `place` is its address in units of 16 bytes.
inline unsigned long long rows_operand(unsigned place) {
  return (unsigned long long)place | (1ull << 16) | (64ull << 32) | (1ull << 62);
}
inline unsigned long long columns_operand(unsigned place, int panel) {
  return (unsigned long long)place | ((unsigned long long)(panel >> 4) << 16) | (64ull << 32) | (1ull << 62);
}
// The descriptor of a columns_operand of no more than 32 columns, with rows of 64 bytes in four pieces of 16 bytes, in
// an order that depends on half of the row's number modulo 4 (the 64-byte swizzle).
inline unsigned long long short_columns_operand(unsigned place) {
  return (unsigned long long)place | (1ull << 16) | (32ull << 32) | (2ull << 62);
}
// The descriptor of an operand of cores, 8 x 8 matrices of 128 bytes each. The next core of the dimension over which a
// product sums is `summed` bytes further, and the next core of its other dimension `kept` bytes.
inline unsigned long long cores_operand(unsigned place, int summed, int kept) {
  return (unsigned long long)place | ((unsigned long long)(summed >> 4) << 16) |
         ((unsigned long long)(kept >> 4) << 32);
}
// Returns x in a way that hides its origin. The compiler then keeps no values derived from x, since the products need
// their registers.
inline unsigned opaque(unsigned x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Products with results d [64, N]. `rows` and `held_rows` set d to a b^T over 16 columns, or add it if `onto`, with a
// in shared memory or in registers. `columns` and `shared_columns` do so with a b over 16 rows of b, with a in registers
// or in shared memory. `turned` does so with a^T b^T, both in shared memory, over 16 rows of a.
template <typename In, int N> struct Products;
#define DELTATUNE_FLOATS_8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), \
                              "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define DELTATUNE_FLOATS_16 DELTATUNE_FLOATS_8(0)
#define DELTATUNE_FLOATS_32 DELTATUNE_FLOATS_8(0), DELTATUNE_FLOATS_8(8)
#define DELTATUNE_FLOATS_48 DELTATUNE_FLOATS_8(0), DELTATUNE_FLOATS_8(8), DELTATUNE_FLOATS_8(16)
#define DELTATUNE_FLOATS_OF_32(i) DELTATUNE_FLOATS_8(i), DELTATUNE_FLOATS_8(i + 8), DELTATUNE_FLOATS_8(i + 16), \
                               DELTATUNE_FLOATS_8(i + 24)
#define DELTATUNE_FLOATS_64 DELTATUNE_FLOATS_OF_32(0)
#define DELTATUNE_FLOATS_128 DELTATUNE_FLOATS_64, DELTATUNE_FLOATS_OF_32(32)
#define DELTATUNE_FLOATS_192 DELTATUNE_FLOATS_128, DELTATUNE_FLOATS_OF_32(64)
#define DELTATUNE_FLOATS_256 DELTATUNE_FLOATS_192, DELTATUNE_FLOATS_OF_32(96)
#define DELTATUNE_PLACES_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define DELTATUNE_PLACES_32 DELTATUNE_PLACES_16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define DELTATUNE_PLACES_48 DELTATUNE_PLACES_32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define DELTATUNE_PLACES_64 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
    "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define DELTATUNE_PLACES_128 DELTATUNE_PLACES_64 ", " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
    "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define DELTATUNE_PLACES_192 DELTATUNE_PLACES_128 ", " \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, " \
    "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define DELTATUNE_PLACES_256 DELTATUNE_PLACES_192 ", " \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, " \
    "%111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, " \
    "%126, %127"
#define DELTATUNE_PRODUCTS(In, TYPE, N, P0, P1, P2, P3, P4, P5) \
  template <> struct Products<In, N> { \
    static inline void rows(float* d, unsigned long long a, unsigned long long b, int onto) { \
      asm volatile("{\n.reg .pred onto;\nsetp.ne.b32 onto, %" #P2 ", 0;\n" \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" DELTATUNE_PLACES_##N "}, %" #P0 \
                   ", %" #P1 ", onto, 1, 1, 0, 0;\n}" : DELTATUNE_FLOATS_##N : "l"(a), "l"(b), "r"(onto)); \
    } \
    static inline void shared_columns(float* d, unsigned long long a, unsigned long long b, int onto) { \
      asm volatile("{\n.reg .pred onto;\nsetp.ne.b32 onto, %" #P2 ", 0;\n" \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" DELTATUNE_PLACES_##N "}, %" #P0 \
                   ", %" #P1 ", onto, 1, 1, 0, 1;\n}" : DELTATUNE_FLOATS_##N : "l"(a), "l"(b), "r"(onto)); \
    } \
    static inline void turned(float* d, unsigned long long a, unsigned long long b, int onto = 1) { \
      asm volatile("{\n.reg .pred onto;\nsetp.ne.b32 onto, %" #P2 ", 0;\n" \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" DELTATUNE_PLACES_##N "}, %" #P0 \
                   ", %" #P1 ", onto, 1, 1, 1, 0;\n}" : DELTATUNE_FLOATS_##N : "l"(a), "l"(b), "r"(onto)); \
    } \
    static inline void held_rows(float* d, const unsigned* a, unsigned long long b, int onto) { \
      asm volatile("{\n.reg .pred onto;\nsetp.ne.b32 onto, %" #P5 ", 0;\n" \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" DELTATUNE_PLACES_##N "}, {%" #P0 \
                   ", %" #P1 ", %" #P2 ", %" #P3 "}, %" #P4 ", onto, 1, 1, 0;\n}" \
                   : DELTATUNE_FLOATS_##N : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(onto)); \
    } \
    static inline void columns(float* d, const unsigned* a, unsigned long long b, int onto = 1) { \
      asm volatile("{\n.reg .pred onto;\nsetp.ne.b32 onto, %" #P5 ", 0;\n" \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" DELTATUNE_PLACES_##N "}, {%" #P0 \
                   ", %" #P1 ", %" #P2 ", %" #P3 "}, %" #P4 ", onto, 1, 1, 1;\n}" \
                   : DELTATUNE_FLOATS_##N : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(onto)); \
    } \
  };
DELTATUNE_PRODUCTS(bf16, "bf16", 16, 8, 9, 10, 11, 12, 13)
DELTATUNE_PRODUCTS(bf16, "bf16", 32, 16, 17, 18, 19, 20, 21)
DELTATUNE_PRODUCTS(bf16, "bf16", 48, 24, 25, 26, 27, 28, 29)
DELTATUNE_PRODUCTS(bf16, "bf16", 64, 32, 33, 34, 35, 36, 37)
DELTATUNE_PRODUCTS(bf16, "bf16", 128, 64, 65, 66, 67, 68, 69)
DELTATUNE_PRODUCTS(bf16, "bf16", 192, 96, 97, 98, 99, 100, 101)
DELTATUNE_PRODUCTS(bf16, "bf16", 256, 128, 129, 130, 131, 132, 133)
DELTATUNE_PRODUCTS(__half, "f16", 64, 32, 33, 34, 35, 36, 37)
DELTATUNE_PRODUCTS(__half, "f16", 128, 64, 65, 66, 67, 68, 69)
DELTATUNE_PRODUCTS(__half, "f16", 192, 96, 97, 98, 99, 100, 101)
DELTATUNE_PRODUCTS(__half, "f16", 256, 128, 129, 130, 131, 132, 133)
