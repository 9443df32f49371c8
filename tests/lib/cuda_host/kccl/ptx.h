// KCCL's instructions on a CPU: a block is a CPU thread, a warp has one thread, memory is as weak as promised.
//
// Stands in for backends/cuda/include/kccl/ptx.h (the include path decides). A store waits in its block's own buffer,
// and what an instruction does not promise to move whole lands apart: words in any order, pairs in any order, two
// stores to one word in theirs. To ThreadSanitizer an access is an atomic that orders nothing.
#pragma once
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#define KCCL_DEVICE inline
#define KCCL_EMULATED __attribute__((no_sanitize("thread"))) inline

namespace kccl {

using u32 = unsigned int;
using u64 = unsigned long long;

struct alignas(16) Vector {
  u32 w[4];
};
constexpr int kWholeWords = 4;  // that load_whole and store_whole move whole

namespace host {

constexpr int kLocks = 1 << 10;
constexpr u32 kMostDelay = 40;  // loads of its block that a store waits

struct Store {
  u32* to;
  u32 w[4];
  u32 words, delay;
};
inline thread_local std::vector<Store> stores;
inline thread_local u32 dice = 1;
// How wrong the clock of a block's GPU is: ns, and ns a ns since the program began.
inline thread_local long long clock_offset = 0;
inline thread_local double clock_drift = 0;
inline unsigned char locks[kLocks];

KCCL_EMULATED u32 below(u32 n) {
  dice = dice * 1664525u + 1013904223u;
  return (dice >> 8) % n;
}
KCCL_EMULATED unsigned char* lock(const u32* p) {
  unsigned char* at = &locks[reinterpret_cast<std::uintptr_t>(p) / 16 % kLocks];
  while (__atomic_exchange_n(at, 1, __ATOMIC_ACQUIRE) != 0) std::this_thread::yield();
  return at;
}
KCCL_EMULATED void unlock(unsigned char* at) { __atomic_store_n(at, 0, __ATOMIC_RELEASE); }

// `words` words from p on, all at once; own stores on their way are seen.
inline Vector read(const u32* p, u32 words) {
  Vector v{};
  unsigned char* held = lock(p);
  for (u32 i = 0; i < words; i++)
    v.w[i] = std::atomic_ref<u32>(const_cast<u32&>(p[i])).load(std::memory_order_relaxed);
  unlock(held);
  for (const Store& s : stores)
    for (u32 i = 0; i < words; i++)
      if (p + i >= s.to && p + i < s.to + s.words) v.w[i] = s.w[p + i - s.to];
  return v;
}
inline void land(const Store& s) {
  unsigned char* held = lock(s.to);
  for (u32 i = 0; i < s.words; i++)
    std::atomic_ref<u32>(s.to[i]).store(s.w[i], std::memory_order_relaxed);
  unlock(held);
}
// Those whose time has come, or all; two of one word in their order.
inline void land_stores(bool all) {
  std::vector<Store> left;
  for (Store& s : stores) {
    bool waits = !all && s.delay > 0 && s.delay-- > 0;
    for (const Store& other : left) waits |= other.to < s.to + s.words && s.to < other.to + other.words;
    if (waits)
      left.push_back(s);
    else
      land(s);
  }
  stores.swap(left);
}
inline void write(u32* p, const u32* w, u32 words) {
  Store s{p, {}, words, below(4) == 0 ? below(kMostDelay) : 0};
  std::memcpy(s.w, w, 4 * words);
  stores.push_back(s);
}
// A block that stands still, so that the others run ahead as far as they may.
inline void stumble() {
  if (below(200) == 0) usleep(below(2000));
  std::this_thread::yield();
}

}  // namespace host

inline Vector load_apart(const u32* p, u32 words) {
  host::land_stores(false);
  Vector v{};
  for (u32 i = 0; i < 4; i += words) {
    Vector part = host::read(p + i, words);
    std::memcpy(v.w + i, part.w, 4 * words);
  }
  return v;
}
inline void store_apart(u32* p, const Vector& v, u32 words) {
  u32 first = host::below(4 / words) * words;
  for (u32 i = 0; i < 4; i += words) host::write(p + (first + i) % 4, v.w + (first + i) % 4, words);
}
inline Vector load_words(const u32* p) { return load_apart(p, 1); }
inline Vector load_pairs(const u32* p) { return load_apart(p, 2); }
inline Vector load_whole(const u32* p) { return load_apart(p, 4); }
inline void store_words(u32* p, const Vector& v) { store_apart(p, v, 1); }
inline void store_pairs(u32* p, const Vector& v) { store_apart(p, v, 2); }
inline void store_whole(u32* p, const Vector& v) { store_apart(p, v, 4); }
inline u64 join(u32 low, u32 high) { return static_cast<u64>(high) << 32 | low; }
inline u64 load_pair(const u32* p) {
  host::land_stores(false);
  Vector v = host::read(p, 2);
  return join(v.w[0], v.w[1]);
}
inline void store_pair(u32* p, u64 v) {
  u32 w[2] = {static_cast<u32>(v), static_cast<u32>(v >> 32)};
  host::write(p, w, 2);
}
inline u32 load_word(const u32* p) { return host::read(p, 1).w[0]; }
inline void store_word(u32* p, u32 v) { host::write(p, &v, 1); }
inline u32 compare_and_swap(u32* p, u32 expected, u32 v) {
  std::atomic_ref<u32>(*p).compare_exchange_strong(expected, v, std::memory_order_relaxed);
  return expected;
}
inline void fence() { host::land_stores(true); }

inline bool any_in_warp(bool p) {
  host::stumble();
  return p;
}
inline u64 nanoseconds() {
  auto monotonic = [] {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<u64>(now.tv_sec) * 1000000000u + static_cast<u64>(now.tv_nsec);
  };
  static const u64 began = monotonic();
  u64 now = monotonic();
  double ahead = host::clock_drift * static_cast<double>(now - began);
  return now + static_cast<u64>(host::clock_offset + static_cast<long long>(ahead));
}
inline u32 bits_of(float x) {
  u32 bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float float_of(u32 x) {
  float v;
  std::memcpy(&v, &x, 4);
  return v;
}

}  // namespace kccl
