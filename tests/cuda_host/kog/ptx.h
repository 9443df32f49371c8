// The kernel's instructions on one CPU thread: every GPU thread is a fiber, a collective is a
// rendezvous.
//
// Stands in for backends/cuda/include/kog/ptx.h (the include path decides). Fibers run round robin
// in an order that a seed shuffles, so that blocks drift apart in ways of their own; bulk copies
// land late. It proves layout, arithmetic, barriers and waits, not the memory order of a GPU: here
// all memory is one.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#define KOG_ASSUME(x) ((void)0)
#define KOG_DEVICE inline
#define KOG_DEVICE_NOINLINE inline
#define KOG_CONSTANT static const

struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct ulonglong2 {
  unsigned long long x, y;
};

namespace kog {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

namespace host {

struct Copy {
  void* to;
  const void* from;
  u32 bytes;
  u64* barrier;
  int delay;
};

struct Warp {
  int arrived = 0;
  u64 turn = 0;
  u64 value[32];
  u32 a[32][4], b[32][2];
};

struct BlockState {
  std::vector<u8> shared;
  Warp warps[32];
  int arrived = 0;
  u64 turn = 0;
  bool pending = false, result = false;
  std::vector<Copy> copies;
};

struct Fiber {
  void* stack_top = nullptr;
  BlockState* block;
  int block_index, thread;
  bool done = false;
};

extern Fiber* current;
extern i64 ticks;
void yield();
void land_copies(BlockState& block);

inline Warp& warp() { return current->block->warps[current->thread / 32]; }
inline int lane() { return current->thread % 32; }
inline void meet() {
  Warp& w = warp();
  u64 mine = w.turn;
  if (++w.arrived == 32) {
    w.arrived = 0;
    w.turn++;
  }
  while (w.turn == mine) yield();
}
template <class T>
T exchange(T v, int from) {
  Warp& w = warp();
  u64 bits = 0;
  std::memcpy(&bits, &v, sizeof v);
  w.value[lane()] = bits;
  meet();
  bits = w.value[from & 31];
  meet();
  std::memcpy(&v, &bits, sizeof v);
  return v;
}
inline float from_half(u32 h, bool f16) {
  float out;
  if (!f16) {
    u32 bits = h << 16;
    std::memcpy(&out, &bits, 4);
    return out;
  }
  _Float16 x;
  u16 bits = static_cast<u16>(h);
  std::memcpy(&x, &bits, 2);
  return static_cast<float>(x);
}
inline u32 to_half(float v, bool f16) {
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

inline int thread_index() { return host::current->thread; }
inline int block_index() { return host::current->block_index; }
inline void sleep_a_while() { host::yield(); }
inline i64 clock_ticks() { return host::ticks; }
inline u64 nanoseconds() { return static_cast<u64>(host::ticks); }
inline u8* shared_memory() { return host::current->block->shared.data(); }

inline uint4 load_relaxed4(const u32* p) { return {p[0], p[1], p[2], p[3]}; }
inline uint2 load_relaxed2(const u32* p) { return {p[0], p[1]}; }
inline u32 load_relaxed(const u32* p) { return *p; }
inline ulonglong2 load_relaxed_pair(const u64* p) { return {p[0], p[1]}; }
inline void store_relaxed(u32* p, u32 v) { *p = v; }
inline void store_release(u32* p, u32 v) { *p = v; }
inline void store_relaxed_pair(u64* p, u64 a, u64 b) { p[0] = a, p[1] = b; }
inline u64 load_system(const u64* p) { return *p; }
inline void store_system(u64* p, u64 v) { *p = v; }
inline void store_pair(u64* p, u64 a, u64 b) { p[0] = a, p[1] = b; }
inline void store_system_pair(u64* p, u64 a, u64 b) { p[0] = a, p[1] = b; }
inline u32 compare_and_swap(u32* p, u32 expected, u32 v) {
  u32 old = *p;
  if (old == expected) *p = v;
  return old;
}
inline void fence_gpu() {}
template <class T>
T load_cache(const T* p) {
  return *p;
}

inline void sync_warp() { host::meet(); }
inline bool any_lane(bool p) {
  host::Warp& w = host::warp();
  w.value[host::lane()] = p;
  host::meet();
  u64 any = 0;
  for (u64 v : w.value) any |= v;
  host::meet();
  return any != 0;
}
inline u32 lanes_with(bool p) {
  host::Warp& w = host::warp();
  w.value[host::lane()] = p;
  host::meet();
  u32 bits = 0;
  for (int i = 0; i < 32; i++) bits |= static_cast<u32>(w.value[i]) << i;
  host::meet();
  return bits;
}
inline float shuffle_xor(float v, int mask) { return host::exchange(v, host::lane() ^ mask); }
inline u32 shuffle_xor(u32 v, int mask) { return host::exchange(v, host::lane() ^ mask); }
inline float shuffle_down(float v, int by) {
  int from = host::lane() + by;
  return host::exchange(v, from < 32 ? from : host::lane());
}
inline float shuffle(float v, int lane) { return host::exchange(v, lane); }
inline u32 shuffle(u32 v, int lane) { return host::exchange(v, lane); }
template <class Join>
u32 join_lanes(u32 v, Join join) {
  host::Warp& w = host::warp();
  w.value[host::lane()] = v;
  host::meet();
  u32 out = 0;
  for (u64 other : w.value) out = join(out, static_cast<u32>(other));
  host::meet();
  return out;
}
inline u32 largest_of_warp(u32 v) {
  return join_lanes(v, [](u32 a, u32 b) { return a > b ? a : b; });
}
inline u32 sum_of_warp(u32 v) {
  return join_lanes(v, [](u32 a, u32 b) { return a + b; });
}

inline bool any_consumer(bool p) {
  host::BlockState& b = *host::current->block;
  u64 mine = b.turn;
  b.pending |= p;
  if (++b.arrived == 512) {
    b.arrived = 0;
    b.result = b.pending;
    b.pending = false;
    b.turn++;
  }
  while (b.turn == mine) host::yield();
  return b.result;
}
inline void sync_consumers() { any_consumer(false); }

inline void add_shared(u32* p, u32 v) { *p += v; }
inline void add_shared(u64* p, u64 v) { *p += v; }

inline float log2_fast(float x) { return std::log2(x); }
inline u32 low_halves(u32 a, u32 b) { return (a & 0xffffu) | b << 16; }
inline u32 high_halves(u32 a, u32 b) { return a >> 16 | (b & 0xffff0000u); }
inline float exp2_fast(float x) { return std::exp2(x); }
inline float divide(float a, float b) { return a / b; }
inline float product(float a, float b) { return a * b; }
inline float fused(float a, float b, float c) {
  return static_cast<float>(static_cast<double>(a) * b + c);
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
inline float widen_f16(u16 x) { return host::from_half(x, true); }

// kHalves times 8 values of K: c[16][8] += a[16][8 * kHalves] * b[8 * kHalves][8], laid out as PTX
// says of mma.m16n8k16 and m16n8k8.
template <bool kF16, int kHalves>
void multiply_halves(float (&c)[4], const u32* a, const u32* b) {
  host::Warp& w = host::warp();
  int lane = host::lane();
  for (int i = 0; i < 2 * kHalves; i++) w.a[lane][i] = a[i];
  for (int i = 0; i < kHalves; i++) w.b[lane][i] = b[i];
  host::meet();
  for (int i = 0; i < 4; i++) {
    int row = lane / 4, column = 2 * (lane % 4) + i % 2;
    double sum = 0;
    for (int half = 0; half < kHalves; half++)
      for (int q = 0; q < 4; q++)
        for (int s = 0; s < 2; s++) {
          float x = host::from_half(w.a[4 * row + q][2 * half + i / 2] >> 16 * s & 0xffff, kF16);
          sum += static_cast<double>(x) *
                 host::from_half(w.b[4 * column + q][half] >> 16 * s & 0xffff, kF16);
        }
    c[i] += static_cast<float>(sum);
  }
  host::meet();
}
template <bool kF16>
void multiply_add(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  multiply_halves<kF16, 2>(c, a, b);
}
template <bool kF16>
void multiply_add(float (&c)[4], const u32 (&a)[2], const u32 (&b)[1]) {
  multiply_halves<kF16, 1>(c, a, b);
}

// An mbarrier: arrivals expected, arrivals due, bytes due, phase.
struct HostBarrier {
  u16 expected, due;
  u32 state;  // bit 31: phase; below: bytes due
};
static_assert(sizeof(HostBarrier) == 8);
inline HostBarrier* host_barrier(u64* b) { return reinterpret_cast<HostBarrier*>(b); }
inline void barrier_complete(HostBarrier* b) {
  if (b->due != 0 || (b->state & 0x7fffffffu) != 0) return;
  b->due = b->expected;
  b->state ^= 0x80000000u;
}
inline void barrier_init(u64* b, u32 arrivals) {
  *host_barrier(b) = {static_cast<u16>(arrivals), static_cast<u16>(arrivals), 0};
}
inline void barrier_init_fence() {}
inline void barrier_expect(u64* b, u32 bytes) {
  host_barrier(b)->state += bytes;
  host_barrier(b)->due--;
  barrier_complete(host_barrier(b));
}
inline void barrier_arrive(u64* b) {
  host_barrier(b)->due--;
  barrier_complete(host_barrier(b));
}
// Whether the phase of this parity has ended.
inline bool barrier_try(u64* b, u32 parity) {
  if (host_barrier(b)->state >> 31 != parity) return true;
  host::land_copies(*host::current->block);
  host::yield();
  return false;
}
inline bool barrier_test(u64* b, u32 parity) { return barrier_try(b, parity); }
inline void fetch_to_l2(const void*, u32) {}
inline void bulk_load(void* to, const void* from, u32 bytes, u64* barrier) {
  host::current->block->copies.push_back(
      {to, from, bytes, barrier, static_cast<int>(host::ticks % 7)});
}
inline u32 load_volatile(const u32* p) { return *static_cast<const volatile u32*>(p); }
inline void store_volatile(u32* p, u32 v) { *static_cast<volatile u32*>(p) = v; }

}  // namespace kog
