// The kernel's instructions on a CPU: every GPU thread is a fiber, a collective is a rendezvous.
//
// Stands in for backends/cuda/include/kog/ptx.h (the include path decides). Fibers run round robin
// in an order that a seed shuffles, so that blocks drift apart in ways of their own; bulk copies
// land late. All blocks share one CPU thread (run.cpp), where memory has one order and what is
// proved is layout, arithmetic, barriers and waits; or each has its own (threads.cpp, KOG_THREADS),
// where what they exchange is seen late and ThreadSanitizer judges the rest (concurrent.h).
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#define KOG_ASSUME(x) ((void)0)
#define KOG_OFFSET(T, member) __builtin_offsetof(T, member)
#define KOG_EITHER(first, a, b) (first ? a : b)
#define KOG_DEVICE inline
#define KOG_DEVICE_NOINLINE inline
#define KOG_CONSTANT static const

// What the emulation itself does is no access of the kernel's: a judge does not look at it.
#ifdef KOG_THREADS
#define KOG_OWN thread_local
#define KOG_EMULATED __attribute__((no_sanitize("thread"))) inline
#else
#define KOG_OWN
#define KOG_EMULATED inline
#endif

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) ulonglong2 {
  unsigned long long x, y;
};

namespace kog {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;
template <class T>
using Memory = T*;

constexpr int kWarpThreads = 32;
#ifndef KOG_WAVE
constexpr bool kMaskInRegister = true;
#endif

namespace host {

struct Copy {
  void* to;
  const void* from;
  u32 bytes;
  u64* barrier;
  int delay;
};

using Shown = u64[32];  // by thread of the warp

struct Warp {
  int arrived = 0;
  u64 generation = 0;
  bool looked = false;  // whether somebody else has done something: it waits
  int blocked = 0;      // threads at the block's barrier, or past it, and which one that is
  u64 barrier = 0;
  // What threads show each other in one generation and the next: nobody is two ahead.
  Shown shown[2];
  float a[2][32][8], b[2][32][4];
};
// A store that lands late (alone.h).
struct Store {
  u32* to;
  u32 value;
  i64 lands;
};
constexpr int kMostWarps = 32, kMostCopies = 512;
#ifdef KOG_WAVE
// Threads of two warps, or of one, that meet.
struct Wave {
  int arrived = 0;
  u64 generation = 0;
  u32 shown[2][KOG_WAVE][4];
};
#endif

struct BlockState {
  u8* shared = nullptr;
  Warp warps[kMostWarps];
  int arrived = 0;
  u64 generation = 0;
  bool pending = false, result = false;
  Copy copies[kMostCopies];
  int num_copies = 0;
  struct Witness* witness = nullptr;  // concurrent.h
  std::vector<Store> stores;
#ifdef KOG_WAVE
  int place = 0;
  Wave waves[kMostWarps];
#endif
};

struct Fiber {
  void* stack_top = nullptr;
  BlockState* block;
  int rank, block_index, thread;
  bool heard_no = false;  // of a barrier (barrier_test), and has not waited for one since
  bool done = false;
};

extern KOG_OWN Fiber* current;
extern KOG_OWN i64 ticks;
void yield();
void land_copies(BlockState& block);

KOG_EMULATED Warp& warp() { return current->block->warps[current->thread / 32]; }
KOG_EMULATED int thread() { return current->thread % 32; }
KOG_EMULATED void meet() {
  Warp& w = warp();
  u64 mine = w.generation;
  if (++w.arrived == 32) {
    w.arrived = 0;
    w.generation++;
  }
  while (w.generation == mine) yield();
}
// What every thread of the warp shows.
KOG_EMULATED const Shown& show(u64 v) {
  Warp& w = warp();
  Shown& all = w.shown[w.generation % 2];
  all[thread()] = v;
  meet();
  return all;
}
template <class T>
KOG_EMULATED T exchange(T v, int from) {
  u64 bits = 0;
  std::memcpy(&bits, &v, sizeof v);
  bits = show(bits)[from & 31];
  std::memcpy(&v, &bits, sizeof v);
  return v;
}
KOG_EMULATED float from_half(u32 h, bool f16) {
  // A float16's exponent is smaller by 112. (_Float16 is a call into the compiler's library.)
  u32 bits = f16 ? (h & 0x8000) << 16 | (h & 0x7fff) << 13 : h << 16;
  bool finite = !f16 || (h & 0x7c00) != 0x7c00;
  if (!finite) bits |= 0x7f800000;
  float out;
  std::memcpy(&out, &bits, 4);
  return f16 && finite ? out * 0x1p112f : out;
}
KOG_EMULATED u32 to_half(float v, bool f16) {
  if (f16) {
    _Float16 x = static_cast<_Float16>(v);
    u16 bits;
    std::memcpy(&bits, &x, 2);
    return bits;
  }
  u32 bits;
  std::memcpy(&bits, &v, 4);
  if (v != v) return 0x7fff;
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

}  // namespace host
}  // namespace kog

#ifdef KOG_THREADS
#include <kog/concurrent.h>
#else
#include <kog/alone.h>
#endif

namespace kog {

KOG_EMULATED int thread_index() { return host::current->thread; }
#ifndef KOG_WAVE
struct BlockPlace {};
KOG_EMULATED int block_index(BlockPlace = {}) { return host::current->block_index; }
#endif
inline void sleep_a_while() { host::yield(); }
inline void look_again() { host::yield(); }
template <int>
void take_registers() {}
template <int>
void give_registers() {}
#ifndef KOG_WAVE
// An SM's clock runs faster than the GPU's and began at another time: who takes one for the other is seen.
inline i64 clock_ticks() { return 3 * host::clock() + 1000; }
inline u64 nanoseconds() { return static_cast<u64>(host::clock()); }
#endif
KOG_EMULATED u8* shared_memory() { return host::current->block->shared; }

inline uint4 load_relaxed4(const u32* p) {
  return {host::load(p), host::load(p + 1), host::load(p + 2), host::load(p + 3)};
}
inline uint4 load_relaxed4(const u32* p, bool there, u32 other) {
  return there ? load_relaxed4(p) : uint4{other, other, other, other};
}
inline uint2 load_relaxed2(const u32* p) { return {host::load(p), host::load(p + 1)}; }
inline u32 load_relaxed(const u32* p) { return host::load(p); }
inline ulonglong2 load_relaxed_pair(const u64* p) { return {host::load(p), host::load(p + 1)}; }
inline void store_relaxed(u32* p, u32 v) { host::store(p, v); }
inline void store_relaxed_pair(u64* p, u64 a, u64 b) { host::store(p, a), host::store(p + 1, b); }
inline u64 load_system(const u64* p) { return host::load(p); }
inline void store_system(u64* p, u64 v) { host::store(p, v); }
inline void store_pair(u64* p, u64 a, u64 b) { p[0] = a, p[1] = b; }
inline void store_system_pair(u64* p, u64 a, u64 b) { store_relaxed_pair(p, a, b); }
inline u32 compare_and_swap(u32* p, u32 expected, u32 v) { return host::swap_if(p, expected, v); }
inline void drain_stores() {}
inline void release_gpu() { host::fence(); }
inline void acquire_gpu() { host::fence(); }
inline void acquire_words() { host::fence(); }
inline void store_cache(u32* p, u32 v) { *p = v; }
template <class T>
T load_cache(const T* p, bool there) {
  return there ? *p : T{};
}

KOG_EMULATED void sync_warp() { host::meet(); }
KOG_EMULATED bool any_in_warp(bool p) {
  u64 any = 0;
  for (u64 v : host::show(p)) any |= v;
  return any != 0;
}
inline bool any_in_wave(bool p) { return any_in_warp(p); }
inline bool late_itself(bool) { return true; }
constexpr bool kPairAtOnce = true;
KOG_EMULATED u32 threads_with(bool p) {
  const host::Shown& all = host::show(p);
  u32 bits = 0;
  for (int i = 0; i < 32; i++) bits |= static_cast<u32>(all[i]) << i;
  return bits;
}
inline void rejoin() {}
#ifndef KOG_WAVE
inline u32 of_wave(u32 v) { return v; }
#endif
inline float shuffle_xor(float v, int mask) { return host::exchange(v, host::thread() ^ mask); }
inline u32 shuffle_xor(u32 v, int mask) { return host::exchange(v, host::thread() ^ mask); }
inline u64 shuffle_xor(u64 v, int mask) { return host::exchange(v, host::thread() ^ mask); }
inline float shuffle_down(float v, int by) {
  int from = host::thread() + by;
  return host::exchange(v, from < 32 ? from : host::thread());
}
inline float shuffle(float v, int thread) { return host::exchange(v, thread); }
inline u32 shuffle(u32 v, int thread) { return host::exchange(v, thread); }
inline u64 shuffle(u64 v, int thread) { return host::exchange(v, thread); }
template <class Join>
KOG_EMULATED u32 join_threads(u32 v, Join join) {
  u32 out = 0;
  for (u64 other : host::show(v)) out = join(out, static_cast<u32>(other));
  return out;
}
inline u32 largest_of_warp(u32 v) {
  return join_threads(v, [](u32 a, u32 b) { return a > b ? a : b; });
}
inline u32 sum_of_warp(u32 v) {
  return join_threads(v, [](u32 a, u32 b) { return a + b; });
}

KOG_EMULATED bool any_consumer(bool p) {
  host::BlockState& b = *host::current->block;
  u64 mine = b.generation;
  host::note_arrival(mine);
  b.pending |= p;
  if (++b.arrived == kConsumers) {
    b.arrived = 0;
    b.result = b.pending;
    b.pending = false;
    b.generation++;
  }
  host::Warp& w = host::warp();
  w.blocked = w.barrier == mine ? w.blocked + 1 : 1;
  w.barrier = mine;
  while (b.generation == mine) host::yield();
  host::note_leaving(mine);
  return b.result;
}
inline void sync_consumers() { any_consumer(false); }

inline void add_shared(u32* p, u32 v) { host::add(p, v); }
inline void add_shared(u64* p, u64 v) { host::add(p, v); }

#ifndef KOG_WAVE
template <class Block>
void watch_own_wait(const Block&, bool) {}
#endif

inline float log2_fast(float x) { return std::log2(x); }
inline u32 low_halves(u32 a, u32 b) { return (a & 0xffffu) | b << 16; }
inline u32 high_halves(u32 a, u32 b) { return a >> 16 | (b & 0xffff0000u); }
inline float exp2_fast(float x) { return std::exp2(x); }
inline float divide(float a, float b) { return a / b; }
inline float product(float a, float b) { return a * b; }
inline float fused(float a, float b, float c) {
  return static_cast<float>(static_cast<double>(a) * b + c);
}
inline float larger_magnitude(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<float>::quiet_NaN();
  return a > std::fabs(b) ? a : std::fabs(b);
}
inline float rsqrt_of(float x) { return 1.f / std::sqrt(x); }
inline u32 bits_of(float x) {
  u32 b;
  std::memcpy(&b, &x, 4);
  return b;
}
inline float float_of(u32 b) {
  float x;
  std::memcpy(&x, &b, 4);
  return x;
}
inline u64 bits_of(double x) {
  u64 b;
  std::memcpy(&b, &x, 8);
  return b;
}
inline double double_of(u64 b) {
  double x;
  std::memcpy(&x, &b, 8);
  return x;
}
inline int bit_length(u64 x) { return x == 0 ? 0 : 64 - __builtin_clzll(x); }
template <bool kF16>
u32 round_pair(float low, float high) {
  return host::to_half(high, kF16) << 16 | host::to_half(low, kF16);
}
inline u32 and_or(u32 q, u32 mask, u32 base) { return (q & mask) | base; }
inline u32 pick_bytes(u32 a, u32 b, u32 selector) {
  u32 out = 0;
  for (int i = 0; i < 4; i++) {
    u32 which = selector >> 4 * i & 7, sign = selector >> 4 * i & 8;
    u32 byte = (which < 4 ? a : b) >> which % 4 * 8 & 0xff;
    out |= (sign == 0 ? byte : byte >> 7 != 0 ? 0xff : 0) << 8 * i;
  }
  return out;
}
inline float widen_f16(u16 x) { return host::from_half(x, true); }

// kHalves times 8 values of K: c[16][8] += a[16][8 * kHalves] * b[8 * kHalves][8], laid out as PTX
// says of mma.m16n8k16 and m16n8k8.
template <bool kF16, int kHalves>
KOG_EMULATED void multiply_halves(float (&c)[4], const u32* a, const u32* b) {
  host::Warp& w = host::warp();
  int thread = host::thread();
  auto& rows = w.a[w.generation % 2];
  auto& columns = w.b[w.generation % 2];
  for (int i = 0; i < 4 * kHalves; i++)
    rows[thread][i] = host::from_half(a[i / 2] >> 16 * (i % 2) & 0xffff, kF16);
  for (int i = 0; i < 2 * kHalves; i++)
    columns[thread][i] = host::from_half(b[i / 2] >> 16 * (i % 2) & 0xffff, kF16);
  host::meet();
  for (int i = 0; i < 4; i++) {
    int row = thread / 4, column = 2 * (thread % 4) + i % 2;
    double sum = 0;
    for (int half = 0; half < kHalves; half++)
      for (int q = 0; q < 4; q++)
        for (int s = 0; s < 2; s++)
          sum += static_cast<double>(rows[4 * row + q][4 * half + i / 2 * 2 + s]) *
                 columns[4 * column + q][2 * half + s];
    c[i] += static_cast<float>(sum);
  }
}
template <bool kF16>
void multiply_add(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  multiply_halves<kF16, 2>(c, a, b);
}
template <bool kF16>
void multiply_add(float (&c)[4], const u32 (&a)[2], const u32 (&b)[1]) {
  multiply_halves<kF16, 1>(c, a, b);
}

// c[16][8] += a[16][32] * b[32][8] of signed bytes, laid out as PTX says of mma.m16n8k32.
KOG_EMULATED void multiply_bytes(int (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  host::Warp& w = host::warp();
  int thread = host::thread();
  auto& rows = w.a[w.generation % 2];
  auto& columns = w.b[w.generation % 2];
  for (int i = 0; i < 4; i++) std::memcpy(&rows[thread][i], &a[i], 4);
  for (int i = 0; i < 2; i++) std::memcpy(&columns[thread][i], &b[i], 4);
  host::meet();
  auto product = [](const float& a, const float& b) {
    signed char x[4], y[4];
    std::memcpy(x, &a, 4), std::memcpy(y, &b, 4);
    return x[0] * y[0] + x[1] * y[1] + x[2] * y[2] + x[3] * y[3];
  };
  for (int i = 0; i < 4; i++) {
    int row = thread / 4, column = 2 * (thread % 4) + i % 2;
    for (int half = 0; half < 2; half++)
      for (int q = 0; q < 4; q++)
        c[i] += product(rows[4 * row + q][i / 2 + 2 * half], columns[4 * column + q][half]);
  }
}

// An mbarrier: arrivals expected, arrivals due, bytes due, phase.
struct HostBarrier {
  u16 expected, due;
  u32 state;  // bit 31: phase; below: bytes due
};
static_assert(sizeof(HostBarrier) == 8);
KOG_EMULATED HostBarrier* host_barrier(u64* b) { return reinterpret_cast<HostBarrier*>(b); }
KOG_EMULATED void barrier_complete(HostBarrier* b) {
  if (b->due != 0 || (b->state & 0x7fffffffu) != 0) return;
  b->due = b->expected;
  b->state ^= 0x80000000u;
}
KOG_EMULATED void barrier_init(u64* b, u32 arrivals) {
  *host_barrier(b) = {static_cast<u16>(arrivals), static_cast<u16>(arrivals), 0};
}
inline void barrier_init_fence() {}
KOG_EMULATED void barrier_expect(u64* b, u32 bytes) {
  host::note_release(b);
  host_barrier(b)->state += bytes;
  host_barrier(b)->due--;
  barrier_complete(host_barrier(b));
}
KOG_EMULATED void barrier_arrive(u64* b) {
  host::note_release(b);
  host_barrier(b)->due--;
  barrier_complete(host_barrier(b));
}
// Whether the phase of this parity has ended.
KOG_EMULATED bool has_ended(u64* b, u32 parity) {
  if (host_barrier(b)->state >> 31 == parity) {
    host::land_copies(*host::current->block);
    return false;
  }
  host::note_acquire(b);
  return true;
}
KOG_EMULATED bool barrier_try(u64* b, u32 parity) {
  bool ended = has_ended(b, parity);
  if (!ended) host::yield();
  return ended;
}
// Asks and goes on. A fiber that would ask for ever has to yield, so every second no is a wait.
KOG_EMULATED bool barrier_test(u64* b, u32 parity) {
  if (has_ended(b, parity)) return true;
  bool& heard_no = host::current->heard_no;
  if (heard_no) host::yield();
  heard_no = !heard_no;
  return false;
}
inline u64 read_once() { return 0; }
inline void fetch_to_l2(const void* from, u32 bytes, u64 = 0) { host::note_fetch(from, bytes); }
KOG_EMULATED void add_released(u32* p, u32 v) {
  host::note_release(p);
  host::add(p, v);
}
KOG_EMULATED void acquire_for_copies(const u32* p) { host::note_acquire(const_cast<u32*>(p)); }
KOG_EMULATED void bulk_load(void* to, const void* from, u32 bytes, u64* barrier, u64) {
  host::BlockState& block = *host::current->block;
  host::note_release(&block.copies);
  block.copies[block.num_copies++] = {to, from, bytes, barrier, static_cast<int>(host::ticks % 7)};
}
inline u32 unknown(u32 v) { return v; }
KOG_EMULATED u32 load_volatile(const u32* p) {
  host::warp().looked = true;
  return host::load_own(p);
}
inline void store_volatile(u32* p, u32 v) { host::store_own(p, v); }

}  // namespace kog
