// Weights in the ring, 16 bits each or narrow: what a warp takes of one ring slot, and how codes become 16-bit values.
//
//   fragment of all warps   [warp][kFragmentBytes of weights]  [warp][kRecordBytes of scales]
//
// Stage::Weights says how they lie (kog_triton/schedule/cuda_weights.py): a fragment of codes is kPack steps of K, of
// which kGranules parts have scales of their own, for kScaleRows rows. A step's codes of E4M3 become a fragment of
// 16-bit values, others become bytes and meet bytes (kInteger, bytes.h), off by a power of two that the sums make good
// (Stage::kSumUnit). What a granule's values sum up to, or bytes of one scale, is multiplied by its scale and added to
// the unit's sums. Zero points and minimums multiply what operands of one scale sum up to.
#pragma once
#include <kog/codes.h>
#include <kog/operands.h>
#include <kog/ring.h>

namespace kog {

// Of all warps, with its scales.
template <class Weights>
constexpr int kFragmentOfAll = kWarps * (kFragmentBytes + Weights::kRecordBytes);

template <class... Stages>
constexpr bool kSlotsFit = ((kFragments * kFragmentOfAll<typename Stages::Weights> <= kRingSlotBytes) && ...);
static_assert(kSlotsFit<QkvProj, OProj, GateUpProj, DownProj, LmHead>);

// Step `step` of a fragment of codes of E4M3.
template <class Weights>
KOG_DEVICE Fragment unpack(const Fragment& codes, int step) {
  static_assert(Weights::kCodes == kE4m3);
  Fragment v;
#pragma unroll
  for (int j = 0; j < kThreadWords; j += 2) {
    u32 q = codes.w[(step * kThreadWords + j) / 2];
    v.w[j] = e4m3_first(q);
    v.w[j + 1] = e4m3_second(q);
  }
  return v;
}

// Magnitudes of E2M1 times two, by their bits. A nibble whose fourth bit is set finds the sign of the magnitude: zero.
KOG_DEVICE u32 e2m1_bytes(u32 table, u32 nibbles) { return pick_bytes(table, 0x0c080604u, nibbles); }

// A thread's eight codes of a step as bytes: int8 as it is, int4 less 8 times 16. Of E2M1 the positive ones and, behind
// them, the magnitudes of the negative ones: the difference of their products is what counts.
template <class Weights>
struct StepBytes {
  static constexpr bool kSigned = Weights::kCodes == kE2m1;
  u32 w[2], negative[2];

  KOG_DEVICE StepBytes(const Fragment& codes, int step, u32 table) {
    if constexpr (Weights::kCodes == kInt8) {
      w[0] = codes.w[2 * step], w[1] = codes.w[2 * step + 1];
    } else if constexpr (Weights::kCodes == kUint4) {
      w[0] = (codes.w[step] << 4) & 0xf0f0f0f0u, w[1] = codes.w[step] & 0xf0f0f0f0u;
    } else {
      u32 q = codes.w[step], other = q ^ 0x88888888u;
      w[0] = e2m1_bytes(table, q), w[1] = e2m1_bytes(table, q >> 16);
      negative[0] = e2m1_bytes(table, other), negative[1] = e2m1_bytes(table, other >> 16);
    }
  }
};

// A thread's scales of one fragment, or minimums: of its row of weights or, where weights are the columns (operands.h,
// swapped), of the two rows whose sums it has, unless all rows share one. Of one token's whole numbers: the one of the
// step whose sums it has.
template <class Weights, bool kTwoRows, int kEach = Weights::kScaleBytes>
struct Scales {
  static constexpr bool kOne = Weights::kInteger && !kTwoRows;
  static constexpr int kRows = kTwoRows && Weights::kScaleRows > 1 ? 2 : 1;
  static constexpr int kValues = kOne ? 1 : kRows * Weights::kGranules, kBytes = kValues * kEach;
  u32 w[(kBytes + 3) / 4];

  KOG_DEVICE void load(const Block& b, const u8* record) {
    int row = (kTwoRows ? b.in_warp % 4 * 2 : b.in_warp / 4) % Weights::kScaleRows;
    const u8* from = record + row * (Weights::kGranules * kEach);
    if constexpr (kOne) from += b.in_warp % 4 % Weights::kPack * Weights::kGranules / Weights::kPack * kEach;
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
  KOG_DEVICE static int number(int granule, int i) {
    return kOne ? 0 : (kRows > 1 ? i % 2 * Weights::kGranules : 0) + granule;
  }
  // Of a granule, for sum i of a thread's four (matvec.h).
  KOG_DEVICE float at(int granule, int i) const {
    int n = number(granule, i);
    if constexpr (Weights::kScaleKind == kScaleF32) return float_of(w[n]);
    if constexpr (Weights::kScaleKind == kScaleE8m0) {
      u32 four = w[n / 4], exponent = n % 4 < 3 ? four << (23 - n % 4 * 8) : four >> 1;
      if (kBytes > 1) exponent &= 0x7f800000u;
      return float_of(exponent < 0x400000u ? 0x400000u : exponent);  // 2^-127 is subnormal
    }
    u32 both = w[n / 2];
    if constexpr (Weights::kScaleKind == kScaleF16)
      return widen_f16(static_cast<u16>(n % 2 == 0 ? both & 0xffffu : both >> 16));
    return float_of(n % 2 == 0 ? both << 16 : both & 0xffff0000u);
  }
  // Where values are bytes.
  KOG_DEVICE u32 byte_at(int granule, int i) const {
    int n = number(granule, i);
    return w[n / 4] >> n % 4 * 8 & 0xffu;
  }
};
// What lies behind a fragment's scales.
template <class Weights, bool kTwoRows, int kKind = Weights::kOffsetKind>
struct Offsets {
  KOG_DEVICE void load(const Block&, const u8*) {}
};
template <class Weights, bool kTwoRows>
struct Offsets<Weights, kTwoRows, kOffsetZeroPoint> : Scales<Weights, kTwoRows, 1> {};
template <class Weights, bool kTwoRows>
struct Offsets<Weights, kTwoRows, kOffsetMinimum> : Scales<Weights, kTwoRows> {};

// A fragment's record, its scales and offsets; empty where a row has one scale or weights are 16 bits wide.
template <class Weights, bool kTwoRows, bool kScaled = (Weights::kScaleRows > 0)>
struct FragmentRecord {
  KOG_DEVICE static FragmentRecord one_of(bool, const FragmentRecord&, const FragmentRecord&) { return {}; }
};
template <class Weights, bool kTwoRows>
struct FragmentRecord<Weights, kTwoRows, true> {
  static_assert(Weights::kRecordBytes == 4 || Weights::kRecordBytes % 8 == 0, "loads of scales are not aligned");
  static constexpr int kOffsetsAt = Weights::kScaleRows * Weights::kGranules * Weights::kScaleBytes;
  Scales<Weights, kTwoRows> scales;
  Offsets<Weights, kTwoRows> offsets;

  KOG_DEVICE void load(const Block& b, const u8* record) {
    scales.load(b, record);
    offsets.load(b, record + kOffsetsAt);
  }
  // What the sum of a scale's operands counts for, of sum i of a thread's four: the codes' zero point or, where weights
  // have minimums, what int4 was taken less.
  KOG_DEVICE int of_sum(int granule, int i) const {
    constexpr int kTimes = Weights::kCodes == kUint4 ? 16 : 1;  // what codes are multiplied with
    if constexpr (Weights::kOffsetKind == kOffsetMinimum) return Weights::kCodes == kUint4 ? 8 * kTimes : 0;
    u32 point = offsets.byte_at(granule, i);
    if constexpr (Weights::kCodes == kUint4) return (8 - static_cast<int>(point)) * kTimes;
    return -(static_cast<int>(point ^ 0x80u) - 128);
  }
  KOG_DEVICE static FragmentRecord one_of(bool first, const FragmentRecord& a, const FragmentRecord& b) {
    FragmentRecord one;
    constexpr auto kScaleWords = sizeof(one.scales.w) / sizeof(u32);
#pragma unroll
    for (int i = 0; i < static_cast<int>(kScaleWords); i++) one.scales.w[i] = first ? a.scales.w[i] : b.scales.w[i];
    if constexpr (Weights::kOffsetKind != kOffsetNone) {
      constexpr auto kOffsetWords = sizeof(one.offsets.w) / sizeof(u32);
#pragma unroll
      for (int i = 0; i < static_cast<int>(kOffsetWords); i++)
        one.offsets.w[i] = first ? a.offsets.w[i] : b.offsets.w[i];
    }
    return one;
  }
};

// One warp's part of the next ring slot. Fragments behind a stage's last one are whatever the ring held
// before: what is computed of them goes nowhere.
template <class Weights, bool kTwoRows>
struct SlotWeights {
  Fragment w[kFragments];
  FragmentRecord<Weights, kTwoRows> records[kFragments];

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
      for (int f = 0; f < kFragments; f++) records[f].load(b, record + f * kFragmentOfAll<Weights>);
    }
    if (mine) ring.release(b);
  }
};
template <class Stage>
using SlotOf = SlotWeights<typename Stage::Weights, OperandLayout<Stage>::kTwoRows>;
template <class Stage>
using RecordOf = FragmentRecord<typename Stage::Weights, OperandLayout<Stage>::kTwoRows>;

// Sums of one unit, or of the one in hand of a period: of each set in two chains.
template <class Stage>
using UnitSums = float[OperandLayout<Stage>::kSets][2][4];

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
