// What o_proj would multiply, as it lies in scratch; for a stage alone (stage.h).
#pragma once
#include <kog/byte_products.h>

namespace kog {

// Word `word` (two values) of what o_proj would multiply.
KOG_DEVICE u32 staged_word(const Block& b, int word) {
  const u32* scratch = reinterpret_cast<const u32*>(b.scratch + OProj::kOperandsAt);
  if constexpr (OProj::Weights::kInteger) {
    int step = 2 * word / kFragK, in_step = 2 * word % kFragK;
    const u32* from = scratch + step * OperandLayout<OProj>::kStepWords + in_step / 4;
    float scale = float_of(reinterpret_cast<const u32*>(b.scratch)[scale_index<OProj>(step, 0)]), v[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int shift = 24 - 8 * (in_step % 4 + i);  // a byte with its sign
      int high = static_cast<int>(from[0] << shift) >> 24, low = static_cast<int>(from[8] << shift) >> 24;
      v[i] = static_cast<float>(whole_sum(high, low)) * scale;
    }
    return round_pair<kF16>(v[0], v[1]);
  }
  int in_fragment = 2 * word % kFragK, in_thread = word % kThreadWords;
  return scratch[(2 * word / kFragK * 2 + in_thread % 2) * kColumnWords +
                 in_fragment / (2 * kThreadWords) * (kThreadWords / 2) + in_thread / 2];
}

}  // namespace kog
