// CDNA3's instructions on a CPU, in the place of backends/hip/include/kog/ptx.h: fibers that meet by warps, as CUDA's
// do (tests/lib/cuda_host/kog/ptx.h), and of which KOG_WAVE, two warps or one, are a wave. Threads of a wave get on by
// themselves between places where all of it meet: a compiler may part them so.
#pragma once
#include_next <kog/ptx.h>

#define KOG_KERNEL static

namespace kog {

constexpr bool kMaskInRegister = false;
constexpr int kWaveThreads = KOG_WAVE, kWaves = kConsumers / kWaveThreads;

namespace host {

// Four words of every thread of the wave.
KOG_EMULATED const u32 (&show_wave(const u32 (&v)[4]))[kWaveThreads][4] {
  Wave& w = current->block->waves[current->thread / kWaveThreads];
  u64 mine = w.generation;
  auto& all = w.shown[mine % 2];
  for (int i = 0; i < 4; i++) all[current->thread % kWaveThreads][i] = v[i];
  if (++w.arrived == kWaveThreads) {
    w.arrived = 0;
    w.generation++;
  }
  while (w.generation == mine) yield();
  return all;
}

}  // namespace host

KOG_EMULATED int in_wave() { return host::current->thread % kWaveThreads; }
KOG_EMULATED int wave_index() { return host::current->thread / kWaveThreads; }
// Of the threads that come here, in one pass of fibers, none goes on before all have: what each has loaded is not yet
// overwritten by another.
inline u32 of_wave(u32 v) {
  host::yield();
  return v;
}
inline void keep_order() {}

KOG_EMULATED int workgroup_index() { return host::current->block_index; }
KOG_EMULATED int* place_in_shared() { return &host::current->block->place; }
template <class T>
T* in_shared(T* p) {
  return p;
}
struct BlockPlace {
  int index = *place_in_shared();
};
inline int block_index(BlockPlace place) { return place.index; }
template <bool, class T>
const T& by_address(const T& p) {
  return p;
}
// Blocks side by side lie apart, as on an MI300X.
constexpr int kDies = 16;
inline int die_index() { return workgroup_index() * 5 % 7; }

// A round of fibers, or a microsecond of threads.
constexpr int kTickNs = 1000;
inline i64 clock_ticks() { return host::clock(); }
inline u64 nanoseconds() { return static_cast<u64>(host::clock() * kTickNs); }

inline uint4 load_streamed(const u8* p) { return *reinterpret_cast<const uint4*>(p); }

template <int kThread, int kOf>
u32 of_neighbors(u32 v) {
  return host::exchange(v, host::thread() / kOf * kOf + kThread);
}
inline void fuse_two(float2 a, float2 b, float2& c) { c = {fused(a.x, b.x, c.x), fused(a.y, b.y, c.y)}; }

template <bool kF16>
KOG_EMULATED float half_of(u32 pair, int which) {
  return host::from_half(pair >> 16 * which & 0xffff, kF16);
}
template <bool kF16>
float dot2(u32 a, u32 b, float c) {
  for (int i = 0; i < 2; i++) c = fused(half_of<kF16>(a, i), half_of<kF16>(b, i), c);
  return c;
}

struct Matrix {
  float v[4];
};
// v_mfma_f32_16x16x16: thread l brings row l % 16 and column l % 16 of values l / 16 * 4 of K on, and has sums of that
// column and rows l / 16 * 4 on.
template <bool kF16>
KOG_EMULATED void multiply_add(Matrix& c, uint2 rows, uint2 columns) {
  const auto& all = host::show_wave({rows.x, rows.y, columns.x, columns.y});
  for (int i = 0; i < 4; i++) {
    double sum = 0;
    for (int k = 0; k < 16; k++) {
      int row = k / 4 * 16 + in_wave() / 16 * 4 + i, column = k / 4 * 16 + in_wave() % 16;
      sum += static_cast<double>(half_of<kF16>(all[row][k % 4 / 2], k % 2)) *
             half_of<kF16>(all[column][2 + k % 4 / 2], k % 2);
    }
    c.v[i] += static_cast<float>(sum);
  }
}
inline void settle(Matrix&) {}
inline void settle(float&, float&) {}
inline void stay(float, float) {}

}  // namespace kog
#include <kog/own_waits.h>
