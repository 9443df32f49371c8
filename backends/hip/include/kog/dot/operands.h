// What weights meet, of one token: values in the order of K, in scratch.
//
//   wide     x * gain. float16: two 16-bit parts, all high ones, then all low ones. bfloat16: float32
//   narrow   what came as 16-bit words, which carry their factor
//
// A fragment of 16 bytes a thread is 8 rows by 32 values of K, a row in 4 threads, or 4 rows by 64, in 8.
#pragma once
#include <kog/plain.h>

namespace kog {

constexpr int kOperandValues = kThreadValues / 2;  // words of a narrow operand
static_assert(kColumns == 1);

template <class Stage>
struct OperandLayout {
  static constexpr int kRowThreads = kWarpThreads / Stage::kFragmentRows;
  static constexpr int kStepValues = kRowThreads * kThreadValues;
  static constexpr int kUnitWords = Stage::kUnitRows;  // sums
  static constexpr int kPartStride = Stage::kBatch * kUnitWords;
};

// 8 values as a thread multiplies them.
template <bool kWide>
struct Operand {
  u32 w[kWide ? 8 : 4];
};

// Stage four values times their gains from element e on; scale_four's sum.
template <class Stage>
KOG_DEVICE float stage_four(const Block& b, int e, const float (&x)[4], const float (&gain)[4], float square,
                            bool staged) {
  float v[4];
  square = scale_four(x, gain, square, v);
  if (!staged) return square;
  if constexpr (kF16) {
    u32* high = reinterpret_cast<u32*>(b.scratch) + e / 2;
    HighLow first(v[0], v[1]), second(v[2], v[3]);
    *reinterpret_cast<uint2*>(high) = {first.high, second.high};
    *reinterpret_cast<uint2*>(high + Stage::kPaddedK / 2) = {first.low, second.low};
  } else {
    *reinterpret_cast<float4*>(reinterpret_cast<float*>(b.scratch) + e) = {v[0], v[1], v[2], v[3]};
  }
  return square;
}
// N words of a stage's inputs (two values each) from element e on; none past kPaddedK.
template <class Stage, int N>
KOG_DEVICE void stage_words_at(const Block& b, int e, const u32 (&w)[N]) {
  if (e >= Stage::kPaddedK) return;
  u32* to = reinterpret_cast<u32*>(b.scratch) + e / 2;
  if constexpr (N == 4)
    *reinterpret_cast<uint4*>(to) = {w[0], w[1], w[2], w[3]};
  else
    *reinterpret_cast<uint2*>(to) = {w[0], w[1]};
}
// One value of the head's input where that is made of several streams.
KOG_DEVICE void stage_value(const Block& b, int, int e, float v) {
  if constexpr (kF16) {
    HighLow parts(v, 0);
    u16* high = reinterpret_cast<u16*>(b.scratch) + e;
    high[0] = static_cast<u16>(parts.high), high[LmHead::kPaddedK] = static_cast<u16>(parts.low);
  } else {
    reinterpret_cast<float*>(b.scratch)[e] = v;
  }
}

template <class Stage>
struct Operands {
  using S = OperandLayout<Stage>;
  using Row = Operand<Stage::kWide>;
  Row held[Stage::kHeld > 0 ? Stage::kHeld : 1];
  const u8* staged;  // this thread's of step 0

  KOG_DEVICE explicit Operands(const Block& b) {
    int first = b.warp % Stage::kParts * (Stage::kSteps * S::kStepValues) + b.in_warp % S::kRowThreads * kThreadValues;
    staged = b.scratch + first * (Stage::kWide && !kF16 ? 4 : 2);
  }
  KOG_DEVICE Row load(int step) const {
    constexpr int kBytes = S::kStepValues * (Stage::kWide && !kF16 ? 4 : 2);
    constexpr int kNext = kF16 ? Stage::kPaddedK * 2 : 16;  // from the first four words to the others
    const u8* from = staged + step * kBytes;
    Row row;
#pragma unroll
    for (int i = 0; i < (Stage::kWide ? 2 : 1); i++) {
      uint4 v = *reinterpret_cast<const uint4*>(from + i * kNext);
      row.w[4 * i] = v.x, row.w[4 * i + 1] = v.y, row.w[4 * i + 2] = v.z, row.w[4 * i + 3] = v.w;
    }
    return row;
  }
  KOG_DEVICE Row at(int step) const {
    // Else an array that nobody reads would lie in memory, by the step of a loop.
    if constexpr (Stage::kHeld == 0) return load(step);
    return step < Stage::kHeld ? held[step] : load(step);
  }
  KOG_DEVICE void hold() {
#pragma unroll
    for (int step = 0; step < Stage::kHeld; step++) held[step] = load(step);
  }
};
template <class Stage>
KOG_DEVICE Operands<Stage> held_operands(const Block& b) {
  Operands<Stage> x(b);
  x.hold();
  return x;
}

// Words of a stage's inputs lie in order.
template <class Stage>
KOG_DEVICE int narrow_offset(int word, int) {
  return word;
}

}  // namespace kog
