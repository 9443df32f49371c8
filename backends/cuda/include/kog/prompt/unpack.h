// A stage's weights in 16 bits, out of the stream, for the products of prompts (prompt.cu): a fragment of codes becomes
// kPack fragments in the order in which those of 16-bit weights lie. Plain C++: tests run it on a CPU.
//
// Values are the checkpoint's, by float32 operations that round once each, rounded to 16 bits: the weights of a model
// that was unpacked before it was loaded. The generated header (layout/unpack.py) has Weights, kFragK and kF16.
#pragma once
#include <kog/codes.h>

namespace kog {

struct Unpack {  // the kernel's argument (unpacking.py)
  const u8* arena;
  const u64* fragments;     // of each shard's each unit: the byte of the arena at which each of them begins
  const float* row_scales;  // of each shard's rows, if they have one scale each
  u8* out;
  int unit_fragments, shard_units, rows;  // a unit's; a shard's units and rows
  int parts;                              // into which K is cut
};

constexpr int kThreadWords = kFragK / 8, kThreadValues = kFragK / 4;
constexpr int kFragmentBytes = 16 * kFragK;
struct alignas(4 * kThreadWords) ThreadWords {
  u32 w[kThreadWords];
};

// `bits`, a whole number below 2^23, less another: exact, and no conversion, of which a cycle has few.
KOG_DEVICE float whole_less(u32 bits, int less) {
  constexpr int kHidden = 1 << 23;
  return float_of(0x4b000000u | bits) - static_cast<float>(kHidden + less);
}
// Where float32 has sign, exponent and mantissa; subnormal codes become subnormal values.
KOG_DEVICE float e2m1_value(u32 code) {
  return float_of((code & 7) << 22 | (code & 8) << 28) * float_of((126u + 127u) << 23);
}
KOG_DEVICE float e4m3_value(u32 low_half) {
  if constexpr (kF16) return widen_f16(static_cast<u16>(low_half)) * 256.f;
  return float_of(low_half << 16) * float_of((120u + 127u) << 23);
}

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
      if constexpr (Weights::kCodes == kUint4) {
        int nibble = i % 4 * 2 + i / 4;  // of a code less 8
        v[i] = whole_less((codes.w[step] ^ 0x88888888u) >> nibble * 4 & 15u, Weights::kOffsetKind == kOffsetNone ? 8 : 0);
      }
    }
  }
}

KOG_DEVICE float scale_at(const u8* from) {
  if constexpr (Weights::kScaleKind == kScaleF32) return *reinterpret_cast<const float*>(from);
  if constexpr (Weights::kScaleKind == kScaleE8m0) return float_of(*from == 0 ? 0x400000u : *from * 0x800000u);
  u16 half = *reinterpret_cast<const u16*>(from);
  return Weights::kScaleKind == kScaleF16 ? widen_f16(half) : float_of(static_cast<u32>(half) << 16);
}

// What a granule of a row has beside its codes.
struct Beside {
  float scale = 1, point = 0, minimum = 0;

  KOG_DEVICE void load(const u8* record, int row, int granule) {
    int index = row % Weights::kScaleRows * Weights::kGranules + granule;
    scale = scale_at(record + index * Weights::kScaleBytes);
    const u8* offsets = record + Weights::kScaleRows * Weights::kGranules * Weights::kScaleBytes;
    if constexpr (Weights::kOffsetKind == kOffsetMinimum) minimum = scale_at(offsets + index * Weights::kScaleBytes);
    if constexpr (Weights::kOffsetKind == kOffsetZeroPoint)
      point = Weights::kCodes == kInt8 ? whole_less(offsets[index] ^ 0x80u, 128) : static_cast<float>(offsets[index]);
  }
  KOG_DEVICE float of(float value) const {
    value = product(value - point, scale);
    return Weights::kOffsetKind == kOffsetMinimum ? value + minimum : value;
  }
};

// What one thread of 16 warps makes of fragment `index` of all units.
KOG_DEVICE void unpack_fragment(const Unpack& p, int index, int thread) {
  int warp = thread / 32, lane = thread % 32;
  const u8* from = p.arena + p.fragments[index];
  auto codes = *reinterpret_cast<const ThreadWords*>(from + warp * kFragmentBytes + lane * sizeof(ThreadWords));
  u8* to = p.out + (static_cast<u64>(index) * Weights::kPack * kWarps + warp) * kFragmentBytes + lane * sizeof(codes);
  if constexpr (Weights::kCodes < 0) {
    *reinterpret_cast<ThreadWords*>(to) = codes;
  } else {
    const u8* record = from + kWarps * kFragmentBytes + warp * Weights::kRecordBytes;
    Beside beside;
    if constexpr (kRowScales) {
      int unit = index / p.unit_fragments;
      int row = ((unit % p.shard_units) * (kWarps / p.parts) + warp / p.parts) * 8 + lane / 4;
      if (row < p.rows) beside.scale = p.row_scales[static_cast<u64>(unit / p.shard_units) * p.rows + row];
    }
#pragma unroll
    for (int step = 0; step < Weights::kPack; step++) {
      if constexpr (!kRowScales) beside.load(record, lane / 4, step * Weights::kGranules / Weights::kPack);
      float v[kThreadValues];
      code_values(codes, step, v);
      ThreadWords wide;
#pragma unroll
      for (int i = 0; i < kThreadWords; i++) wide.w[i] = round_pair<kF16>(beside.of(v[2 * i]), beside.of(v[2 * i + 1]));
      *reinterpret_cast<ThreadWords*>(to + step * kWarps * kFragmentBytes) = wide;
    }
  }
}

}  // namespace kog
