// Weights in the ring, 16 bits each or narrow: what a warp takes of one ring slot, and how codes become 16-bit values.
//
//   fragment of all warps   [warp][kFragmentBytes of weights]  [warp][kRecordBytes of scales]
//
// Stage::Weights says how they lie (kog_triton/schedule/cuda_weights.py): a fragment of codes is kPack steps of K, of
// which kGranules parts have scales of their own, for kScaleRows rows. A step's codes become a fragment of 16-bit
// values, less their zero points, each off by a power of two that the sums make good (Stage::kSumUnit). What a
// granule's values sum up to is multiplied by its scale and added to the unit's sums. Values that are off by a number
// (kBiasedCodes), and minimums, multiply what a granule's operands sum up to (kSumsOperands, matvec.h): by the same
// operations in all kernels.
#pragma once
#include <kog/operands.h>
#include <kog/ring.h>

namespace kog {

// Of all warps, with its scales.
template <class Weights>
constexpr int kFragmentOfAll = kWarps * (kFragmentBytes + Weights::kRecordBytes);

template <class... Stages>
constexpr bool kSlotsFit = ((kFragments * kFragmentOfAll<typename Stages::Weights> <= kRingSlotBytes) && ...);
static_assert(kSlotsFit<QkvProj, OProj, GateUpProj, DownProj, LmHead>);

// Two codes of E4M3 of four, woven (schedule/narrow_packing.py), as 16-bit values: those that lie in place, and the
// others, in two parts. They are off by what the exponents' biases differ; subnormal codes become subnormal values.
KOG_DEVICE u32 e4m3_first(u32 q) { return q & (kF16 ? 0xbf80bf80u : 0x87f087f0u); }
KOG_DEVICE u32 e4m3_second(u32 q) {
  if constexpr (kF16) return and_or(q << 7, 0x3f803f80u, (q << 1) & 0x80008000u);
  return and_or(q << 4, 0x80f080f0u, (q >> 4) & 0x07000700u);
}

// Whole numbers from 0 on in the mantissa of `kBase`, less `less`: exact, since all of them are small.
constexpr u32 kBase = kF16 ? 0x64006400u : 0x43004300u;  // 1024; 128
constexpr u32 kOnes = kF16 ? 0x3c003c00u : 0x3f803f80u;
// Those of a code that stands for zero, of one value that 16 bits hold.
KOG_DEVICE u32 both_halves(u32 v) { return v | v << 16; }
// float16's 1024 would cost the sums ten bits, so it is subtracted here, with the zero point; bfloat16's 128 costs seven,
// and is taken from the sums (kBiasedCodes).
KOG_DEVICE u32 int4_pair(u32 q, u32 zero) {
  u32 both = and_or(q, 0x000f000fu, kBase);
  return kF16 ? subtract_pair<kF16>(both, kBase | zero) : both;
}
// Two codes of int8, in bytes 0 and 2. bfloat16's mantissa has seven bits: a code's eighth becomes 128 less.
KOG_DEVICE u32 int8_pair(u32 q) {
  if constexpr (kF16) return subtract_pair<kF16>(((q & 0x00ff00ffu) ^ 0x00800080u) | kBase, kBase | 0x00800080u);
  return subtract_pair<kF16>(and_or(q, 0x007f007fu, kBase), and_or(q, 0x00800080u, kBase));
}
// Two codes of E2M1 of eight, woven (schedule/narrow_packing.py): as bfloat16 values times 2^-126; float16's exponent
// has three bits less, and its values are off by 2^-14.
KOG_DEVICE u32 e2m1_pair(u32 q, int which) {
  constexpr u32 kSigned = 0x81c081c0u;
  u32 v;
  if (which < 3) {
    v = (q << 3 * which) & kSigned;
  } else {
    v = (q >> 4) & 0x00c000c0u;
    v |= (q >> 5) & 0x01000100u;
    v |= (q << 1) & 0x80008000u;
  }
  if constexpr (kF16) v = (v & 0x80008000u) | (v & 0x01c001c0u) << 3;
  return v;
}

// Step `step` of a fragment of codes. `zero`: the code that stands for zero, as pairs have it (SlotScales).
template <class Weights>
KOG_DEVICE Fragment unpack(const Fragment& codes, int step, u32 zero) {
  Fragment v;
  if constexpr (Weights::kCodes == kUint4 || Weights::kCodes == kE2m1) {
#pragma unroll
    for (int j = 0; j < kThreadWords; j++) {
      int at = step * kThreadWords + j;
      u32 q = codes.w[at / 4];
      v.w[j] = Weights::kCodes == kE2m1 ? e2m1_pair(q, at % 4) : int4_pair(q >> at % 4 * 4, zero);
    }
    return v;
  }
#pragma unroll
  for (int j = 0; j < kThreadWords; j += 2) {
    u32 q = codes.w[(step * kThreadWords + j) / 2];
    if constexpr (Weights::kCodes == kInt8) {
      v.w[j] = int8_pair(q >> 8);
      v.w[j + 1] = int8_pair(q);
      if constexpr (Weights::kOffsetKind == kOffsetZeroPoint) {
        v.w[j] = subtract_pair<kF16>(v.w[j], zero);
        v.w[j + 1] = subtract_pair<kF16>(v.w[j + 1], zero);
      }
    } else {
      v.w[j] = e4m3_first(q);
      v.w[j + 1] = e4m3_second(q);
    }
  }
  return v;
}

// A thread's scales of one fragment, or minimums: of its row of weights or, where weights are the columns (operands.h,
// swapped), of the two rows whose sums it has. Zero points that codes are taken from are of the row whose codes it has.
template <class Weights, bool kTwoRows, int kEach = Weights::kScaleBytes>
struct Scales {
  static constexpr int kRows = kTwoRows ? 2 : 1, kValues = kRows * Weights::kGranules, kBytes = kValues * kEach;
  u32 w[(kBytes + 3) / 4];

  KOG_DEVICE void load(const Block& b, const u8* record) {
    int row = (kTwoRows ? b.in_warp % 4 * 2 : b.in_warp / 4) % Weights::kScaleRows;
    const u8* from = record + row * (Weights::kGranules * kEach);
    if constexpr (kBytes == 1) {
      w[0] = *from;
    } else if constexpr (kBytes == 2) {
      w[0] = *reinterpret_cast<const u16*>(from);
    } else {
      auto v = WordVector<kBytes / 4>::load(from);
#pragma unroll
      for (int i = 0; i < kBytes / 4; i++) w[i] = v.w[i];
    }
  }
  // Of a granule, for sum i of a thread's four (matvec.h).
  KOG_DEVICE float at(int granule, int i) const {
    int n = (kTwoRows ? i % 2 * Weights::kGranules : 0) + granule;
    if constexpr (Weights::kScaleKind == kScaleF32) return float_of(w[n]);
    if constexpr (Weights::kScaleKind == kScaleE8m0) {
      u32 four = w[n / 4], exponent = (n % 4 < 3 ? four << (23 - n % 4 * 8) : four >> 1) & 0x7f800000u;
      return float_of(exponent < 0x400000u ? 0x400000u : exponent);  // 2^-127 is subnormal
    }
    u32 both = w[n / 2];
    if constexpr (Weights::kScaleKind == kScaleF16)
      return widen_f16(static_cast<u16>(n % 2 == 0 ? both & 0xffffu : both >> 16));
    return float_of(n % 2 == 0 ? both << 16 : both & 0xffff0000u);
  }
  // Where values are bytes.
  KOG_DEVICE u32 byte_at(int granule, int i = 0) const {
    int n = (kTwoRows ? i % 2 * Weights::kGranules : 0) + granule;
    return w[n / 4] >> n % 4 * 8 & 0xffu;
  }
};
// What lies behind a fragment's scales.
template <class Weights, bool kTwoRows, int kKind = Weights::kOffsetKind>
struct Offsets {
  KOG_DEVICE void load(const Block&, const u8*) {}
};
template <class Weights, bool kTwoRows>
struct Offsets<Weights, kTwoRows, kOffsetZeroPoint> : Scales<Weights, kTwoRows && kBiasedCodes<Weights>, 1> {};
template <class Weights, bool kTwoRows>
struct Offsets<Weights, kTwoRows, kOffsetMinimum> : Scales<Weights, kTwoRows> {};

// Those of a slot; none where a row has one or weights are 16 bits wide.
template <class Weights, bool kTwoRows, bool kScaled = (Weights::kScaleRows > 0)>
struct SlotScales {};
template <class Weights, bool kTwoRows>
struct SlotScales<Weights, kTwoRows, true> {
  static constexpr int kOffsetsAt = Weights::kScaleRows * Weights::kGranules * Weights::kScaleBytes;
  Scales<Weights, kTwoRows> scales[kFragments];
  Offsets<Weights, kTwoRows> offsets[kFragments];
};

// One warp's part of the next ring slot. Fragments behind a stage's last one are whatever the ring held
// before: what is computed of them goes nowhere.
template <class Weights, bool kTwoRows>
struct SlotWeights : SlotScales<Weights, kTwoRows> {
  Fragment w[kFragments];

  template <class Stage>
  KOG_DEVICE void take(Block& b, Ring& ring) {
    ring.wait_for<1>(b);
    take_there<Stage>(b, ring);
  }
  // One that is there. If it is not `mine` but the next stage's it is read all the same, and stays: loads
  // under a condition would take other registers (benchmarks/cuda-log.md#weights-ahead).
  template <class Stage>
  KOG_DEVICE void take_there(Block& b, Ring& ring, bool mine = true) {
    const u8* from = ring.weights(b) + b.warp * kFragmentBytes + OperandLayout<Stage>::offset_in_fragment(b);
#pragma unroll
    for (int f = 0; f < kFragments; f++) w[f] = Fragment::load(from + f * kFragmentOfAll<Weights>);
    if constexpr (Weights::kScaleRows > 0) {
      const u8* record = ring.weights(b) + kWarps * kFragmentBytes + b.warp * Weights::kRecordBytes;
#pragma unroll
      for (int f = 0; f < kFragments; f++) {
        this->scales[f].load(b, record + f * kFragmentOfAll<Weights>);
        this->offsets[f].load(b, record + f * kFragmentOfAll<Weights> + this->kOffsetsAt);
      }
    }
    if (mine) ring.release(b);
  }
  // Of fragment f's granule, the code that stands for zero: in the mantissas' bits, of int8 as two values.
  KOG_DEVICE u32 zero(int f, int granule) const {
    if constexpr (Weights::kOffsetKind == kOffsetZeroPoint) {
      u32 point = this->offsets[f].byte_at(granule);
      if constexpr (Weights::kCodes == kInt8) return int8_pair(both_halves(point));
      return both_halves(point);
    }
    return Weights::kOffsetKind == kOffsetMinimum ? 0 : 0x00080008u;
  }
  // What every value of fragment f's granule is more than its weight over the scale, for sum i of a thread's four.
  KOG_DEVICE float bias(int f, int granule, int i) const {
    if constexpr (Weights::kOffsetKind == kOffsetZeroPoint)
      return low_of((kBase & 0xffffu) | this->offsets[f].byte_at(granule, i));
    return low_of((kBase & 0xffffu) | (Weights::kOffsetKind == kOffsetMinimum ? 0 : 8));
  }
};
template <class Stage>
using SlotOf = SlotWeights<typename Stage::Weights, OperandLayout<Stage>::kSwaps>;

// A row's sum over all of K as its weights' units and scale have it. `layer`: kLayers for the head.
template <class Stage, class Item>
KOG_DEVICE float scaled_sum(const Block& b, const Item& item, float sum, int layer) {
  if constexpr (Stage::kSumUnit != 1.f) sum *= Stage::kSumUnit;
  if constexpr (Stage::kRowScales) {
    const float* of_lane = b.p.biases + static_cast<u64>(layer) * kBiasRows + Stage::kRowScaleAt;
    if constexpr (Stage::kId != StageId::kLmHead) of_lane += lane_of(b) * Stage::kRows;  // the head's are a rank's
    sum *= of_lane[item.there ? item.row : 0];
  }
  return sum;
}

}  // namespace kog
