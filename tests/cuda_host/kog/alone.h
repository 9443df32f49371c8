// Words, fences and barriers where one CPU thread runs all blocks: memory has one order, and nobody
// judges. concurrent.h has the same names.
#pragma once

namespace kog::host {

template <class T>
T load(const T* p) {
  return *p;
}
template <class T>
void store(T* p, T v) {
  *p = v;
}
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
