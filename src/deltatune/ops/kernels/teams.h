// What the kernels share whose blocks consist of teams of four groups of lanes, as Hopper's products want them: one team
// that loads, and others that compute.

// The start of a block's shared memory, rounded up to a multiple of 1024: as a pointer, and as an address (place).
struct Room {
  threadgroup char* memory;
  unsigned place;
  inline threadgroup float* floats(int offset) const {
    return reinterpret_cast<threadgroup float*>(memory + offset);
  }
};
inline Room room_of(threadgroup char* memory) {
  const unsigned place = shared_place(memory), start = (place + 1023) & ~1023u;
  return Room{memory + (start - place), start};
}

template <int COUNT>
inline void clear_floats(thread float (&x)[COUNT]) {
  DELTATUNE_UNROLL
  for (int i = 0; i < COUNT; ++i) x[i] = 0.0f;
}

// Signals an mbarrier once for a group of lanes, when all of them have come here.
inline void release(unsigned mbarrier, Place at) {
  group_barrier();
  if (at.lane == 0) mbarrier_arrive(mbarrier);
}
