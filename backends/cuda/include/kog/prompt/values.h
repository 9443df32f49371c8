// Narrow weights in 16 bits for the products of prompts: what a thread's codes of a fragment stand for. Plain C++: tests
// run it on a CPU.
//
// Values are the checkpoint's, by float32 operations that round once each, rounded to 16 bits: the weights of a model
// that was unpacked before it was loaded, but for the sign of zero. The generated headers have Weights, kFragK and kF16
// (layout/prompt.py, layout/unpack.py).
#pragma once
#include <kog/codes.h>

namespace kog {

constexpr int kThreadWords = kFragK / 8, kThreadValues = kFragK / 4;
constexpr int kFragmentBytes = 16 * kFragK;  // of one warp
struct alignas(4 * kThreadWords) ThreadWords {
  u32 w[kThreadWords];
};

// `bits`, a whole number below 2^23, less another: exact, and no conversion, of which a cycle has few.
KOG_DEVICE float whole_less(u32 bits, int less) {
  constexpr int kHidden = 1 << 23;
  return float_of(0x4b000000u | bits) - static_cast<float>(kHidden + less);
}
// Nibble n of `q` in the last bits of a float32 that is as much more as `above_nibble` says.
KOG_DEVICE float above_with_nibble(u32 q, int n) {
  int by = 4 * n - (n % 2 ? 12 : 16);
  u32 moved = by < 0 ? q << -by : q >> by;
  return float_of(n % 2 ? and_or(moved, 0xf000u, 0x45000000u) : and_or(moved, 0xf0000u, 0x43000000u));
}
KOG_DEVICE float above_nibble(int n) { return n % 2 ? 2048.f : 128.f; }
// Where float32 has sign, exponent and mantissa; subnormal codes become subnormal values.
KOG_DEVICE float e2m1_value(u32 code) {
  return float_of((code & 7) << 22 | (code & 8) << 28) * float_of((126u + 127u) << 23);
}
KOG_DEVICE float e4m3_value(u32 low_half) {
  if constexpr (kF16) return widen_f16(static_cast<u16>(low_half)) * 256.f;
  return float_of(low_half << 16) * float_of((120u + 127u) << 23);
}

KOG_DEVICE int nibble_of(int i) { return i % 4 * 2 + i / 4; }  // that has value i of a step, as a code less 8

// What a thread's codes of a step stand for, in the order of K, before zero points and scales.
KOG_DEVICE void code_values(const ThreadWords& codes, int step, float (&v)[kThreadValues]) {
  if constexpr (Weights::kCodes == kE4m3) {
#pragma unroll
    for (int j = 0; j < kThreadWords; j += 2) {
      u32 q = codes.w[(step * kThreadWords + j) / 2], pairs[2] = {e4m3_first(q), e4m3_second(q)};
#pragma unroll
      for (int i = 0; i < 4; i++) v[2 * j + i] = e4m3_value(pairs[i / 2] >> i % 2 * 16 & 0xffffu);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kThreadValues; i++) {
      if constexpr (Weights::kCodes == kInt8)
        v[i] = whole_less((codes.w[2 * step + i / 4] ^ 0x80808080u) >> i % 4 * 8 & 255u, 128);
      if constexpr (Weights::kCodes == kE2m1) v[i] = e2m1_value(codes.w[step] >> i * 4 & 15u);
      if constexpr (Weights::kCodes == kUint4) v[i] = whole_less((codes.w[step] ^ 0x88888888u) >> nibble_of(i) * 4 & 15u, 0);
    }
  }
}

KOG_DEVICE float scale_at(const u8* from) {
  if constexpr (Weights::kScaleKind == kScaleF32) return *reinterpret_cast<const float*>(from);
  if constexpr (Weights::kScaleKind == kScaleE8m0) {
    u32 bits = *from * 0x800000u;
    return float_of(bits > 0x400000u ? bits : 0x400000u);  // 2^-127 has no exponent of its own
  }
  u16 half = *reinterpret_cast<const u16*>(from);
  return Weights::kScaleKind == kScaleF16 ? widen_f16(half) : float_of(static_cast<u32>(half) << 16);
}

// What a granule of a row has beside its codes.
struct Beside {
  float scale = 1, minimum = 0;
  float point = Weights::kCodes == kUint4 && Weights::kOffsetKind == kOffsetNone ? 8 : 0;

  KOG_DEVICE void load(const u8* record, int row, int granule) {
    constexpr int kRows = Weights::kScaleRows > 0 ? Weights::kScaleRows : 1;
    int index = row % kRows * Weights::kGranules + granule;
    scale = scale_at(record + index * Weights::kScaleBytes);
    const u8* offsets = record + kRows * Weights::kGranules * Weights::kScaleBytes;
    if constexpr (Weights::kOffsetKind == kOffsetMinimum) minimum = scale_at(offsets + index * Weights::kScaleBytes);
    if constexpr (Weights::kOffsetKind == kOffsetZeroPoint)
      point = Weights::kCodes == kInt8 ? whole_less(offsets[index] ^ 0x80u, 128) : static_cast<float>(offsets[index]);
  }
  KOG_DEVICE float of(float value) const { return shifted(product(value - point, scale)); }
  // Of value i of a step: one operation, which is exact while a scale has no more than float16's 11 bits. A scale of
  // 2^116 or more, which no trained weight has, becomes an infinity.
  KOG_DEVICE float of_nibble(u32 q, int i) const {
    int n = nibble_of(i);
    return shifted(fused(above_with_nibble(q, n), scale, product(-above_nibble(n) - point, scale)));
  }
  KOG_DEVICE float shifted(float value) const {
    return Weights::kOffsetKind == kOffsetMinimum ? value + minimum : value;
  }
};

// A thread's codes of a step in 16 bits, as a fragment of 16-bit weights has them.
KOG_DEVICE ThreadWords wide_words(const ThreadWords& codes, int step, const Beside& beside) {
  float v[kThreadValues];
  if constexpr (Weights::kCodes == kUint4 && Weights::kScaleKind != kScaleF32) {
    u32 q = codes.w[step] ^ 0x88888888u;
#pragma unroll
    for (int i = 0; i < kThreadValues; i++) v[i] = beside.of_nibble(q, i);
  } else {
    code_values(codes, step, v);
#pragma unroll
    for (int i = 0; i < kThreadValues; i++) v[i] = beside.of(v[i]);
  }
  ThreadWords wide;
#pragma unroll
  for (int i = 0; i < kThreadWords; i++) wide.w[i] = round_pair<kF16>(v[2 * i], v[2 * i + 1]);
  return wide;
}

}  // namespace kog
