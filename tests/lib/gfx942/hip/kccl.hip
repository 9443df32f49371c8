// KCCL's collectives on gfx942, a kernel each (test_hip_kccl.py): what cuda_host/kccl.cpp has CPU threads do. Compiled
// with RANKS, POLICY, DELAY.
#include <hip/hip_runtime.h>
#include <kccl/collectives.h>

using namespace kccl;

constexpr int kVectors = 5, kRanks = RANKS, kThreads = 128;  // two waves, of which the second fetches
using Sums = AllReduce<POLICY, kRanks>;
constexpr int kValues = Sums::kValues, kStep = kVectors * kValues;

struct Argument {
  Comm comm;
  float* found;  // of the rank: [blocks, steps, values a step]
  u64 first, last, steps;
};
static __shared__ float firsts[3][kStep];  // of steps, their first rows: one is written while the last one is read

KCCL_DEVICE float input(int rank, u32 step, int i) {
  u32 h = static_cast<u32>(rank) * 2654435761u + step * 40503u + static_cast<u32>(i) * 69069u;
  h ^= h >> 16, h *= 0x45d9f3bu, h ^= h >> 16;
  if (h % 61 == 0) return float_of(0xffffffffu);
  float v = static_cast<float>(static_cast<int>(h)) * 0x1p-20f, b = step > 0 ? firsts[(step + 2) % 3][i] : 0;
  return b - b == 0 ? v + 0x1p-5f * b : v;  // of finite ones
}

// By the first wave of block 0, and by the second one, which fetches as well, of block 1.
template <class Channel>
KCCL_DEVICE void send(const Channel& channel, u32 step) {
  const int block = static_cast<int>(blockIdx.x), lane = static_cast<int>(threadIdx.x) - kThreads / 2 * block;
  const int at = 2 * lane + block;
  if (lane < 0 || at >= kVectors) return;
  float mine[kValues];
#pragma unroll
  for (int j = 0; j < kValues; j++) mine[j] = input(channel.comm.rank, step, at * kValues + j);
  channel.clear(step, at);
  channel.send(step, at, mine);
}

template <int kRows, class Channel>
KCCL_DEVICE bool fetch(const Channel& channel, u32 step, float* to) {
  const int lane = static_cast<int>(threadIdx.x) - kThreads / 2;
  auto at = [&](int i) { return 2 * lane + i < kVectors ? 2 * lane + i : -1; };
  float two[kRows][2][kValues];
  bool there = true;
  if (lane >= 0) {
    if constexpr (kRows > 1)
      there = channel.fetch(step, at, two);
    else
      there = channel.fetch(step, at, two[0]);
#pragma unroll
    for (int k = 0; k < kRows * 2 * kValues; k++) {
      const int row = k / (2 * kValues), i = k / kValues % 2, j = k % kValues;
      if (at(i) < 0) continue;
      to[row * kStep + at(i) * kValues + j] = two[row][i][j];
      if (row == 0) firsts[step % 3][at(i) * kValues + j] = two[0][i][j];
    }
  }
  return __syncthreads_and(there);
}

template <class Step>
KCCL_DEVICE void walk(const Argument& a, int width, Step step_of) {
  float* found = a.found + blockIdx.x * a.steps * width;
  if (a.first > 0 && threadIdx.x < kStep)
    firsts[(a.first + 2) % 3][threadIdx.x] = found[(a.first - 1) * width + threadIdx.x];
  __syncthreads();
  for (u64 step = a.first; step < a.last; step++)
    if (!step_of(static_cast<u32>(step), found + step * width)) return;
}

#define KERNEL extern "C" __global__ void __launch_bounds__(kThreads)

KERNEL reduce(const Argument a) {
  Sums sums{a.comm, 0, kVectors};
  walk(a, kStep + 1, [&](u32 step, float* out) {
    send(sums, step);
    return fetch<1>(sums, step, out);
  });
}
KERNEL delayed(const Argument a) {
  DelayedAllReduce<POLICY, kRanks, DELAY> sums{a.comm, 0, kVectors};
  walk(a, kStep + 1, [&](u32 step, float* out) {
    bool there = fetch<1>(sums, step, out);
    if (there) send(sums, step);
    return there;
  });
}
KERNEL gather(const Argument a) {
  AllGather<POLICY, kRanks> rows{a.comm, 0, kVectors};
  walk(a, kRanks * kStep, [&](u32 step, float* out) {
    send(rows, step);
    return fetch<kRanks>(rows, step, out);
  });
}
KERNEL chosen(const Argument a) {
  Sums sums{a.comm, 0, kVectors};
  Broadcast<kRanks> token{a.comm, Sums::kWords * kVectors};
  walk(a, kStep + 1, [&](u32 step, float* out) {
    send(sums, step);
    if (!fetch<1>(sums, step, out)) return false;
    u32 chooses = step % kRanks, value = 0;
    if (a.comm.rank == static_cast<int>(chooses) && blockIdx.x == 0 && threadIdx.x == 0)
      token.send(step, 1000 * chooses + step);
    bool there = threadIdx.x < kThreads / 2 || token.fetch(step, static_cast<int>(chooses), value);
    if (threadIdx.x == kThreads / 2) out[kStep] = static_cast<float>(value);
    return __syncthreads_and(there) != 0;
  });
}
