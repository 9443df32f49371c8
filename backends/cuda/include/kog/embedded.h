// The embedding: a row a token, of 16-bit values or of a narrow checkpoint's codes, behind which float32 scales stand, and
// zero points or minimums (schedule/embedding.py).
#pragma once
#include <kog/block.h>

namespace kog {

template <class Row = EmbeddingRow, bool kNarrow = (Row::kCodes >= 0)>
struct EmbeddedQuad;

// Four values of a row from element e on, a multiple of 4: asked for, then as 16-bit values.
template <class Row>
struct EmbeddedQuad<Row, false> {
  using Unit = u16;
  static constexpr int kUnits = kHiddenStride;  // of a row
  uint2 w;

  KOG_DEVICE void load(const u16* row, int e) { w = *reinterpret_cast<const uint2*>(row + e); }
  KOG_DEVICE uint2 values() const { return w; }
  // Not what was loaded, for all that a compiler knows.
  KOG_DEVICE void hide() { w = {unknown(w.x), unknown(w.y)}; }
  // One value of a row.
  KOG_DEVICE static u32 one(const u16* row, int e) { return row[e]; }
};

template <class Row>
struct EmbeddedQuad<Row, true> {
  using Unit = u8;
  static constexpr int kUnits = Row::kBytes;
  static constexpr int kBits = Row::kCodes == kE4m3 || Row::kCodes == kInt8 ? 8 : 4;
  u32 codes;
  float scale, offset;

  KOG_DEVICE void load(const u8* row, int e) {
    if constexpr (kBits == 8)
      codes = *reinterpret_cast<const u32*>(row + e);
    else
      codes = *reinterpret_cast<const u16*>(row + e / 2);
    const float* scales = reinterpret_cast<const float*>(row + Row::kScalesAt) + e / Row::kGroup;
    scale = scales[0];
    if constexpr (Row::kOffsetKind != kOffsetNone) offset = scales[Row::kGroups];
  }
  KOG_DEVICE uint2 values() const {
    return {round_pair<kF16>(value(0), value(1)), round_pair<kF16>(value(2), value(3))};
  }
  KOG_DEVICE void hide() { codes = unknown(codes); }
  KOG_DEVICE static u32 one(const u8* row, int e) {
    EmbeddedQuad quad;
    quad.load(row, e & ~3);
    uint2 all = quad.values();
    u32 both = (e & 2) != 0 ? all.y : all.x;
    return (e & 1) != 0 ? both >> 16 : both & 0xffffu;
  }

 private:
  KOG_DEVICE float value(int i) const {
    u32 code = codes >> i * kBits & ((1u << kBits) - 1);
    float v = number(code);
    if constexpr (Row::kOffsetKind == kOffsetZeroPoint)
      v -= offset;
    else
      v -= Row::kZero;
    v = product(v, scale);
    if constexpr (Row::kOffsetKind == kOffsetMinimum) v += offset;
    return v;
  }
  // What a code stands for. A float16 holds exponent and fraction of E4M3 and E2M1, biased by less.
  KOG_DEVICE static float number(u32 code) {
    if constexpr (Row::kCodes == kE4m3)
      return widen_f16(static_cast<u16>((code & 0x80u) << 8 | (code & 0x7fu) << 7)) * 256;
    else if constexpr (Row::kCodes == kE2m1)
      return widen_f16(static_cast<u16>((code & 8u) << 12 | (code & 7u) << 9)) * 16384;
    else if constexpr (Row::kCodes == kInt8)
      return static_cast<float>(static_cast<int>(code ^ 0x80u) - 128);
    else
      return static_cast<float>(code);
  }
};

using EmbeddingUnit = EmbeddedQuad<>::Unit;

KOG_DEVICE const EmbeddingUnit* embedding_row(const Block& b, int token) {
  const u16* table = b.p.embed;
  return reinterpret_cast<const EmbeddingUnit*>(table) + static_cast<u64>(token) * EmbeddedQuad<>::kUnits;
}

}  // namespace kog
