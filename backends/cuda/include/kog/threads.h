// What threads of a warp side by side have, joined by each of them: pairs first that are farthest apart, so that every
// kernel adds floats in one order. What is wider than a register steps in a loop where it can: in line it was 830 of
// the 15,000 to 21,000 statements of a kernel, and 7 to 10 % of its compiler's time (benchmarks/cuda-log.md#early).
#pragma once
#include <kog/ptx.h>

namespace kog {

template <int kThreads = kWarpThreads, class T, class Join>
KOG_DEVICE T over_threads(T v, Join join) {
#pragma unroll(kMaskInRegister && sizeof(T) > 4 ? 1 : kThreads)
  for (int mask = kThreads / 2; mask; mask >>= 1) v = join(v, shuffle_xor(v, mask));
  return v;
}
template <int kThreads = kWarpThreads, class T>
KOG_DEVICE T sum_of_threads(T v) {
  return over_threads<kThreads>(v, [](T a, T b) { return a + b; });
}
template <int kThreads = kWarpThreads, class T>
KOG_DEVICE T largest_of_threads(T v) {
  return over_threads<kThreads>(v, [](T a, T b) { return b > a ? b : a; });
}

}  // namespace kog
