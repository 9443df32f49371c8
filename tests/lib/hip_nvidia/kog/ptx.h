// CDNA3's instructions on an NVIDIA GPU, in the place of backends/hip/include/kog/ptx.h, over CUDA's own: the HIP kernel
// at full size, for what it computes. Nothing here is fast. A wave is two warps, which go on by themselves between the
// places where all of it meet, as a compiler may part its threads.
#pragma once

// What CUDA's seam has otherwise.
#define kMaskInRegister kMaskInRegisterOfCuda
#define BlockPlace BlockPlaceOfCuda
#define block_index block_index_of_cuda
#define of_wave of_wave_of_cuda
#define clock_ticks clock_ticks_of_cuda
#define watch_own_wait watch_own_wait_of_cuda
#include "../../../../backends/cuda/include/kog/ptx.h"
#undef kMaskInRegister
#undef BlockPlace
#undef block_index
#undef of_wave
#undef clock_ticks
#undef watch_own_wait

#undef KOG_KERNEL
#define KOG_KERNEL extern "C" __global__ __launch_bounds__(kog::kThreads, 1)

namespace kog {

constexpr bool kMaskInRegister = false;
constexpr int kWaveThreads = 64, kWaves = kConsumers / kWaveThreads;

KOG_DEVICE int in_wave() { return thread_index() % kWaveThreads; }
KOG_DEVICE int wave_index() { return thread_index() / kWaveThreads; }
// What each thread that comes here has loaded is not yet overwritten by another. Some come alone (end_step).
KOG_DEVICE u32 of_wave(u32 v) {
  __syncwarp(__activemask());
  return v;
}
KOG_DEVICE void keep_order() {}
KOG_DEVICE void stay(float, float) {}

KOG_DEVICE int workgroup_index() { return block_index_of_cuda(); }
KOG_DEVICE int* place_in_shared() {
  static __shared__ int index;
  return &index;
}
template <class T>
KOG_DEVICE T* in_shared(T* p) {
  return p;
}
struct BlockPlace {
  int index = *place_in_shared();
};
KOG_DEVICE int block_index(BlockPlace place) { return place.index; }
template <bool, class T>
KOG_DEVICE const T& by_address(const T& p) {
  return p;
}
// Blocks side by side lie apart, as on an MI300X.
constexpr int kDies = 16;
KOG_DEVICE int die_index() { return workgroup_index() % 8; }

constexpr int kTickNs = 160;
KOG_DEVICE i64 clock_ticks() { return static_cast<i64>(nanoseconds() / kTickNs); }

KOG_DEVICE uint4 load_streamed(const u8* p) { return __ldcs(reinterpret_cast<const uint4*>(p)); }

template <int kThread, int kOf>
KOG_DEVICE u32 of_neighbors(u32 v) {
  return shuffle(v, thread_index() % 32 / kOf * kOf + kThread);
}
KOG_DEVICE void fuse_two(float2 a, float2 b, float2& c) { c = {fused(a.x, b.x, c.x), fused(a.y, b.y, c.y)}; }

template <bool kF16>
KOG_DEVICE float half_of(u32 pair, int which) {
  u32 half = pair >> 16 * which & 0xffff;
  return kF16 ? widen_f16(static_cast<u16>(half)) : float_of(half << 16);
}
template <bool kF16>
KOG_DEVICE float dot2(u32 a, u32 b, float c) {
#pragma unroll
  for (int i = 0; i < 2; i++) c = fused(half_of<kF16>(a, i), half_of<kF16>(b, i), c);
  return c;
}

struct Matrix {
  float v[4];
};
KOG_DEVICE void meet_wave() {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(2 + wave_index()), "n"(kWaveThreads) : "memory");
}
// v_mfma_f32_16x16x16: thread l brings row l % 16 and column l % 16 of values l / 16 * 4 of K on, and has sums of that
// column and rows l / 16 * 4 on.
template <bool kF16>
KOG_DEVICE void multiply_add(Matrix& c, uint2 rows, uint2 columns) {
  static __shared__ uint4 shown[kWaves][kWaveThreads];
  uint4(&all)[kWaveThreads] = shown[wave_index()];
  int group = in_wave() / 16 * 4, column = in_wave() % 16;
  meet_wave();  // all have read the last one's
  all[in_wave()] = {rows.x, rows.y, columns.x, columns.y};
  meet_wave();
#pragma unroll 1
  for (int k = 0; k < kWaveThreads; k += 16) {
    uint4 x = all[k + column];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      uint4 w = all[k + group + i];
      c.v[i] = dot2<kF16>(w.y, x.w, dot2<kF16>(w.x, x.z, c.v[i]));
    }
  }
}
KOG_DEVICE void settle(Matrix&) {}
KOG_DEVICE void settle(float&, float&) {}

}  // namespace kog
#include <kog/own_waits.h>
