// Activations as whole numbers, which meet weights that are whole numbers (narrow.h): products of bytes.
//
// Of each step of K, 32 values, or of all steps of a fragment of int4 with one scale a row (kSharedSteps: so whole
// numbers of all of them add up), the largest value sets a scale, a power of two. A value over it is `whole`, 16 bits of
// two's complement rounded to nearest, as two bytes: 256 * high + low. It is off by half a scale at most, 2^-15 of the
// largest value and a hair: of all values that share a scale together 2^-12.4 of their length or, of 128, 2^-11.4, where
// bfloat16's rounding is off by up to 2^-8 (tests/cuda/test_cuda_bytes.py). Sums of products of bytes are exact, so that
// they are the same bits in whatever order and instruction a kernel makes them.
//
// In scratch, before a stage's operands: [fragment][token][scale of it], then (kSums) as many sums of `whole`.
#pragma once
#include <kog/block.h>

namespace kog {

// Of the largest value's bits: what takes values that would round beyond two bytes to the next power of two.
constexpr u32 kStepRoom = 0x18000u;
constexpr u32 kLeastExponent = 15;  // of float32: below, scales would be none

struct WholeScale {
  float scale;    // NaN where the values hold what is no number: so are its sums then
  float inverse;  // 1 / scale

  // `largest`: of the bits of the values' magnitudes.
  KOG_DEVICE explicit WholeScale(u32 largest) {
    u32 exponent = (largest + kStepRoom) >> 23;
    exponent = exponent > kLeastExponent ? exponent : kLeastExponent;
    scale = float_of(largest < 0x7f800000u ? (exponent - 14) << 23 : 0x7fc00000u);
    inverse = float_of((268 - exponent) << 23);
  }
  // Of a scale that is kept.
  KOG_DEVICE static float inverse_of(float scale) { return float_of(0x7f000000u - bits_of(scale)); }
};

// Bits of the largest magnitude, which are in the order of magnitudes; of NaN if one is.
template <int N>
KOG_DEVICE u32 largest_of(const float (&v)[N]) {
  float most = 0;
#pragma unroll
  for (int i = 0; i < N; i++) most = larger_magnitude(most, v[i]);
  return bits_of(most);
}

// Four values side by side as bytes.
struct FourBytes {
  u32 high, low;
  u32 sum;  // of the whole numbers

  KOG_DEVICE FourBytes(const float (&v)[4], float inverse) {
    // 1.5 * 2^23 + 128 + whole: the lowest byte is the low one, 128 off, and the next the high one.
    constexpr float kBase = 12583040.f;
    u32 w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) w[i] = bits_of(fused(v[i], inverse, kBase));
    u32 first = pick_bytes(w[0], w[1], 0x5140), second = pick_bytes(w[2], w[3], 0x5140);
    low = low_halves(first, second) ^ 0x80808080u;
    high = high_halves(first, second);
    sum = w[0] + w[1] + w[2] + w[3] - 4u * 0x4b400080u;
  }
};

// Values of K that share a scale, and scales of a token's fragment.
template <class Weights>
constexpr int kSharedValues = Weights::kSharedSteps * kFragK;
template <class Weights>
constexpr int kFragmentScales = Weights::kPack / Weights::kSharedSteps;
template <class Weights>
constexpr bool kOneScale = kFragmentScales<Weights> == 1;
// Where a token's `step` has its scale, and its sum behind all scales.
template <class Stage>
KOG_DEVICE int scale_index(int step, int token) {
  using Weights = typename Stage::Weights;
  return (step / Weights::kPack * kColumns + token) * kFragmentScales<Weights> +
         step % Weights::kPack / Weights::kSharedSteps;
}
// Of threads side by side, by whole warps.
template <int kThreads>
KOG_DEVICE u32 largest_of_sharers(u32 v) {
  if constexpr (kThreads == kWarpThreads) return largest_of_warp(v);
  return largest_of_threads<kThreads>(v);
}
template <int kThreads>
KOG_DEVICE u32 sum_of_sharers(u32 v) {
  if constexpr (kThreads == kWarpThreads) return sum_of_warp(v);
  return sum_of_threads<kThreads>(v);
}
template <class Weights>
constexpr bool kSums = Weights::kInteger && Weights::kOffsetKind != kOffsetNone;

// By one thread of those that share the scale, of `step` of all of K: `sum` if the weights ask for it.
template <class Stage>
KOG_DEVICE void put_scale(const Block& b, int step, int token, const WholeScale& scale, u32 sum) {
  u32* to = reinterpret_cast<u32*>(b.scratch) + scale_index<Stage>(step, token);
  to[0] = bits_of(scale.scale);
  if constexpr (kSums<typename Stage::Weights>) to[Stage::kWholeSumsAt] = sum;
}

}  // namespace kog
