// Words, fences and barriers where every block is a CPU thread of its own: seen late by other blocks,
// and told to ThreadSanitizer, to which each warp is a thread.
//
//   word      relaxed. A store waits in its block's buffer, of whose words any may land first; the
//             block itself sees it at once. To the judge it is an atomic that orders nothing.
//   fence     all of the block's stores land. Who reads a word that was stored behind a fence, and
//             then has a fence himself, has everything from before the first one behind the second.
//   barrier   of a block, of the weight ring, or of a bulk copy: releases and acquires.
//
// The judge knows no fences. So each fence leaves what its warp has seen at an address of its own,
// which goes with the words stored behind it; a fence takes up those of the words read before it.
// What happens between the threads of a warp is not judged.
#pragma once
#include <time.h>

#include <atomic>

#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
extern "C" void AnnotateBenignRaceSized(const char*, int, const void*, size_t, const char*);
#else
inline void __tsan_acquire(void*) {}
inline void __tsan_release(void*) {}
inline void* __tsan_create_fiber(unsigned) { return nullptr; }
inline void* __tsan_get_current_fiber() { return nullptr; }
inline void __tsan_switch_to_fiber(void*, unsigned) {}
inline void AnnotateBenignRaceSized(const char*, int, const void*, size_t, const char*) {}
#endif

namespace kog::host {

constexpr unsigned kNoSync = 1;  // a switch of fibers that orders nothing
constexpr int kMostLate = 256, kMostFences = 1 << 20, kMostSeen = 4096, kLocks = 1 << 12;

// The memory that blocks share: behind which fence each word was stored.
struct Shared {
  u8* base = nullptr;
  u32* fences = nullptr;  // by word; 0: behind none
  u8 locks[kLocks];       // over a word and its fence
  u64 left[kMostFences];  // where fence n leaves what its warp has seen
  u32 num_fences = 0;
};
extern Shared shared;

struct Late {
  void* to;
  u64 value;
  u32 bytes, fence;
  int delay;
};

// What the judge must know of one warp.
struct WarpWitness {
  void* judged;      // the warp as a fiber of the judge's
  u32 fence = 0;     // the last one; its words are those stored since
  bool used = true;  // there are any
  u32 seen[kMostSeen];
  int num_seen = 0;
  int arrived = 0, left = 0;  // threads, at the block's barrier
};
struct Witness {
  WarpWitness warps[kMostWarps];
  void* copies;      // the engine that copies in bulk, as a fiber of the judge's
  u64 barriers[2];   // of the block, alternating
  Late late[kMostLate];
  int num_late = 0;
  u32 dice = 1;
};

KOG_EMULATED Witness& witness() { return *current->block->witness; }
KOG_EMULATED WarpWitness& warp_witness() { return witness().warps[current->thread / 32]; }
KOG_EMULATED u32 word_at(const void* p) {
  return static_cast<u32>((static_cast<const u8*>(p) - shared.base) / 4);
}
KOG_EMULATED u8* lock(u32 word) {
  u8* at = &shared.locks[word % kLocks];
  while (__atomic_exchange_n(at, 1, __ATOMIC_ACQUIRE) != 0) {
  }
  return at;
}
KOG_EMULATED void unlock(u8* at) { __atomic_store_n(at, 0, __ATOMIC_RELEASE); }

// Microseconds: rounds say little of a block that the system has not let run.
inline i64 clock() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * i64{1000000} + now.tv_nsec / 1000;
}

// What the judge sees of an access to a word; memory stays as it is.
template <class T>
void tell_load(const T* p) {
  (void)std::atomic_ref<T>(*const_cast<T*>(p)).load(std::memory_order_relaxed);
}
template <class T>
void tell_store(T* p) {
  std::atomic_ref<T>(*p).fetch_or(0, std::memory_order_relaxed);
}

KOG_EMULATED void land(const Late& one) {
  u32 word = word_at(one.to);
  u8* held = lock(word);
  shared.fences[word] = one.fence;
  if (one.bytes == 4)
    __atomic_store_n(static_cast<u32*>(one.to), static_cast<u32>(one.value), __ATOMIC_RELAXED);
  else
    __atomic_store_n(static_cast<u64*>(one.to), one.value, __ATOMIC_RELAXED);
  unlock(held);
}
// Those whose time has come, or all; two of one word in their order.
KOG_EMULATED void land_words(Witness& w, bool all) {
  int kept = 0;
  for (int i = 0; i < w.num_late; i++) {
    Late one = w.late[i];
    bool waits = !all && one.delay-- > 0;
    for (int j = 0; j < kept && !waits; j++) waits = w.late[j].to == one.to;
    if (waits)
      w.late[kept++] = one;
    else
      land(one);
  }
  w.num_late = kept;
}

template <class T>
KOG_EMULATED T load(const T* p) {
#ifdef __SANITIZE_THREAD__
  tell_load(p);
#endif
  Witness& all = witness();
  for (int i = all.num_late - 1; i >= 0; i--)
    if (all.late[i].to == p) return static_cast<T>(all.late[i].value);
  u32 word = word_at(p);
  u8* held = lock(word);
  u32 fence = shared.fences[word];
  T v = __atomic_load_n(p, __ATOMIC_RELAXED);
  unlock(held);
  WarpWitness& w = warp_witness();
  for (int i = w.num_seen - 1; i >= 0 && fence != 0; i--)
    if (w.seen[i] == fence) fence = 0;
  if (fence != 0) {
    if (w.num_seen == kMostSeen) __builtin_trap();
    w.seen[w.num_seen++] = fence;
  }
  return v;
}
template <class T>
KOG_EMULATED void store(T* p, T v) {
#ifdef __SANITIZE_THREAD__
  tell_store(p);
#endif
  Witness& all = witness();
  WarpWitness& w = warp_witness();
  if (all.num_late == kMostLate) land_words(all, true);
  all.dice = all.dice * 1664525u + 1013904223u;
  int delay = all.dice >> 30 == 0 ? static_cast<int>(all.dice >> 26 & 15) : 0;
  all.late[all.num_late++] = {p, v, sizeof v, w.fence, delay};
  w.used = true;
}
KOG_EMULATED void fence() {
  Witness& all = witness();
  WarpWitness& w = warp_witness();
  land_words(all, true);
  for (int i = 0; i < w.num_seen; i++) __tsan_acquire(&shared.left[w.seen[i]]);
  w.num_seen = 0;
  if (w.used) w.fence = __atomic_add_fetch(&shared.num_fences, 1, __ATOMIC_RELAXED);
  if (w.fence >= kMostFences) __builtin_trap();
  w.used = false;
  __tsan_release(&shared.left[w.fence]);
}
inline u32 swap_if(u32* p, u32 expected, u32 v) {
  std::atomic_ref<u32>(*p).compare_exchange_strong(expected, v, std::memory_order_relaxed);
  return expected;
}

// Words of shared memory that warps of a block write and read without a barrier.
inline u32 load_own(const u32* p) {
  return std::atomic_ref<u32>(*const_cast<u32*>(p)).load(std::memory_order_relaxed);
}
inline void store_own(u32* p, u32 v) {
  std::atomic_ref<u32>(*p).store(v, std::memory_order_relaxed);
}
template <class T>
void add(T* p, T v) {
  std::atomic_ref<T>(*p).fetch_add(v, std::memory_order_relaxed);
}

inline void note_fetch(const void*, u32) {}
KOG_EMULATED void note_release(void* at) { __tsan_release(at); }
KOG_EMULATED void note_acquire(void* at) { __tsan_acquire(at); }
// A warp arrives at the block's barrier with its last thread and leaves it with its first.
KOG_EMULATED void note_arrival(u64 generation) {
  if (++warp_witness().arrived % 32 == 0) __tsan_release(&witness().barriers[generation % 2]);
}
KOG_EMULATED void note_leaving(u64 generation) {
  if (warp_witness().left++ % 32 == 0) __tsan_acquire(&witness().barriers[generation % 2]);
}

// The judge's own idea of who runs.
extern thread_local void* scheduler;
KOG_EMULATED void begin_warp(BlockState& block, int warp) {
  scheduler = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(block.witness->warps[warp].judged, kNoSync);
}
KOG_EMULATED void end_warp(BlockState&) { __tsan_switch_to_fiber(scheduler, kNoSync); }
// By the engine that copies, after the warp that asked and before those that wait.
KOG_EMULATED void copy_in_bulk(const Copy& c) {
  void* warp = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(witness().copies, kNoSync);
  __tsan_acquire(&current->block->copies);
  std::memcpy(c.to, c.from, c.bytes);
  __tsan_release(c.barrier);
  __tsan_switch_to_fiber(warp, kNoSync);
}

}  // namespace kog::host
