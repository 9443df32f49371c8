// Weight @ activations of one token: fragments as they come from memory, a row in 4 or 8 threads of each warp.
//
//   partial sums [part of K][unit][row], summed over the parts by the thread that owns the row
#pragma once
#include <kog/operands.h>

namespace kog {

// Of one unit, in two chains.
template <class Stage>
using UnitSums = float[2];
template <class Stage>
KOG_DEVICE void clear(UnitSums<Stage>& c) {
  c[0] = c[1] = 0;
}

// One fragment of weights by its operand.
template <class Stage>
KOG_DEVICE void multiply_fragment(const uint4& w, const Operand<Stage::kWide>& x, UnitSums<Stage>& c) {
#pragma unroll
  for (int j = 0; j < 4; j++) {
    u32 pair = word_of(w, j);
    if constexpr (!Stage::kWide) {
      c[j % 2] = dot2<kF16>(pair, x.w[j], c[j % 2]);
    } else if constexpr (kF16) {
      c[0] = dot2<true>(pair, x.w[j], c[0]);
      c[1] = dot2<true>(pair, x.w[4 + j], c[1]);
    } else {
      c[0] = fused(low_of(pair), float_of(x.w[2 * j]), c[0]);
      c[1] = fused(high_of(pair), float_of(x.w[2 * j + 1]), c[1]);
    }
  }
  // Else LLVM moves a unit's products behind its last branch, and all that they multiply takes registers until then.
  stay(c[0], c[1]);
}

// The sums of one unit and part of K to shared memory; `to` is the warp's rows of the unit.
template <class Stage>
KOG_DEVICE void put_sums(const Block& b, const UnitSums<Stage>& c, float* to) {
  constexpr int kRowThreads = OperandLayout<Stage>::kRowThreads;
  float sums[2] = {c[0], c[1]};
  if constexpr (kF16) settle(sums[0], sums[1]);
  float sum = sums[0] + sums[1];
#pragma unroll
  for (int mask = 1; mask < kRowThreads; mask <<= 1) sum += shuffle_xor(sum, mask);
  if (b.in_warp % kRowThreads == 0) to[b.in_warp / kRowThreads] = sum;
}

}  // namespace kog
