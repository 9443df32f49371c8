// Words, fences and barriers where one CPU thread runs all blocks: memory has one order, and nobody
// judges. concurrent.h has the same names.
#pragma once

namespace kog::host {

inline i64 clock() { return ticks; }

template <class T>
T load(const T* p) {
  return *p;
}
template <class T>
void store(T* p, T v) {
  *p = v;
}

// Stores to words in [late_first, late_last) land up to `late_rounds` rounds late: one block's in order
// where they are to the same word, all others in any order.
extern const u32 *late_first, *late_last;
extern i64 late_rounds;
inline i64 land_at(const u32* p) {
  u64 mixed = (reinterpret_cast<u64>(p) + static_cast<u64>(ticks)) * 0x9e3779b97f4a7c15ull;
  return ticks + static_cast<i64>((mixed >> 40) % static_cast<u64>(late_rounds));
}
inline void store(u32* p, u32 v) {
  if (p >= late_first && p < late_last)
    current->block->stores.push_back({p, v, land_at(p)});
  else
    *p = v;
}
inline void land_stores(BlockState& block) {
  std::vector<Store> left;
  for (const Store& s : block.stores) {
    bool waits = s.lands > ticks;
    for (const Store& other : left) waits |= other.to == s.to;
    if (waits)
      left.push_back(s);
    else
      *s.to = s.value;
  }
  block.stores.swap(left);
}

// What a run asked to come into the L2.
struct Fetch {
  const void* from;
  u64 bytes;
};
extern std::vector<Fetch> fetches;
inline void note_fetch(const void* from, u32 bytes) { fetches.push_back({from, bytes}); }

inline u32 swap_if(u32* p, u32 expected, u32 v) {
  u32 old = *p;
  if (old == expected) *p = v;
  return old;
}
inline void fence() {}

inline u32 load_own(const u32* p) { return *static_cast<const volatile u32*>(p); }
inline void store_own(u32* p, u32 v) { *static_cast<volatile u32*>(p) = v; }
template <class T>
void add(T* p, T v) {
  *p += v;
}

inline void note_release(void*) {}
inline void note_acquire(void*) {}
inline void note_arrival(u64) {}
inline void note_leaving(u64) {}
inline void begin_warp(BlockState&, int) {}
inline void end_warp(BlockState&) {}
inline void copy_in_bulk(const Copy& c) { std::memcpy(c.to, c.from, c.bytes); }

}  // namespace kog::host
