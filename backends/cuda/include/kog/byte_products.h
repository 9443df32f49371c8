// Products of whole numbers: a fragment's codes as bytes by activations as bytes (bytes.h), and what a unit's sums take
// of them.
//
// Of one token a thread has the sum of its row and one of a fragment's steps, of several tokens those of two rows and a
// token, for all steps: each multiplied by the step's scale and the weights', and added up fragment after fragment, then
// over the steps of a fragment. Where all steps of a fragment share a scale, their sum is multiplied, and added up over
// the even fragments of ring slots and over the odd ones, which of one token are in two threads side by side.
#pragma once
#include <kog/narrow.h>

namespace kog {

// Sums of whole numbers that a row's is made of in the end: of each of a fragment's steps or, where those share a scale,
// of even and of odd fragments.
template <class Weights>
constexpr int kWholeChains = kOneScale<Weights> ? 2 : Weights::kPack;

// The product of two rows of bytes, from those of high and of low ones.
KOG_DEVICE int whole_sum(int high, int low) { return high * 256 + low; }
// What a fragment's values of one scale add to a sum, number i of the thread's: their whole number in hand, their
// operands' scale and sum.
template <class Stage>
KOG_DEVICE void add_whole(const RecordOf<Stage>& record, int granule, int i, int whole, float scale, int operands,
                          float& to) {
  using Weights = typename Stage::Weights;
  // Products of 16 bits and a code of eight, and what offsets make as large.
  static_assert(kSharedValues<Weights> * (i64{1} << 15) * (128 + 128) < i64{1} << 31, "sums of bytes outgrow an int");
  if constexpr (kSums<Weights>) whole += record.of_sum(granule, i) * operands;
  float v = product(static_cast<float>(whole), scale);
  if constexpr (Weights::kScaleRows > 0)
    to = fused(record.scales.at(granule, i), v, to);
  else
    to += v;
  if constexpr (Weights::kOffsetKind == kOffsetMinimum) {
    constexpr float kTimes = Weights::kCodes == kUint4 ? 16 : 1;  // what codes are multiplied with
    to = fused(record.offsets.at(granule, i), product(static_cast<float>(operands), scale * kTimes), to);
  }
}
// The products of a fragment of whole numbers and one token's bytes: steps two by two, the second as the other eight
// rows, or one by one with its negative weights there.
template <class Stage>
KOG_DEVICE void multiply_bytes_of_one(const Fragment& w, const Operands<Stage>& x,
                                      const typename Operands<Stage>::Row& row, int (&sums)[4]) {
  using X = Operands<Stage>;
  using Bytes = StepBytes<typename Stage::Weights>;
  static_assert(X::kAtOnce == (Bytes::kSigned ? 1 : 2));
#pragma unroll
  for (int n = 0; n < X::kProducts; n++) {
    Bytes first(w, n * X::kAtOnce, x.table);
    if constexpr (Bytes::kSigned) {
      multiply_bytes(sums, {first.w[0], first.negative[0], first.w[1], first.negative[1]}, row.w[n].w);
    } else {
      Bytes second(w, n * X::kAtOnce + 1, x.table);
      multiply_bytes(sums, {first.w[0], second.w[0], first.w[1], second.w[1]}, row.w[n].w);
    }
  }
}
// A fragment of whole numbers by one token's bytes, whose steps have scales of their own.
template <class Stage>
KOG_DEVICE void multiply_steps_of_one(const SlotOf<Stage>& slot, const Operands<Stage>& x, int f,
                                      const typename Operands<Stage>::Row& row, UnitSums<Stage>& c) {
  int sums[4] = {0, 0, 0, 0}, high, low;
  multiply_bytes_of_one<Stage>(slot.w[f], x, row, sums);
  if constexpr (StepBytes<typename Stage::Weights>::kSigned)
    high = sums[0] - sums[2], low = sums[1] - sums[3];
  else
    high = x.odd ? sums[2] : sums[0], low = x.odd ? sums[3] : sums[1];
  add_whole<Stage>(slot.records[f], 0, 0, whole_sum(high, low), float_of(row.scale), static_cast<int>(row.sum),
                   c[0][0][0]);
}
// Fragments of a ring slot, the first of an even number, by one token's bytes, the steps of each of one scale: threads
// of odd steps add up the second one, where it is the unit's (kBoth), others the first. `f`: the first or, alone, the
// one that is the unit's.
template <class Stage, bool kBoth>
KOG_DEVICE void multiply_pair_of_one(const SlotOf<Stage>& slot, const Operands<Stage>& x, int f,
                                     const typename Operands<Stage>::Row& row,
                                     const typename Operands<Stage>::Row& next, UnitSums<Stage>& c) {
  static_assert(!StepBytes<typename Stage::Weights>::kSigned);
  // Of even steps, or (odd) of odd ones: which are this thread's.
  auto half = [](const int(&sums)[4], bool odd) {
    return whole_sum(odd ? sums[2] : sums[0], odd ? sums[3] : sums[1]);
  };
  auto exchanged = [](int own, int other) {
    return own + static_cast<int>(shuffle_xor(static_cast<u32>(other), 1));
  };
  int sums[2][4] = {};
  multiply_bytes_of_one<Stage>(slot.w[f], x, row, sums[0]);
  if constexpr (kBoth) {
    multiply_bytes_of_one<Stage>(slot.w[f + 1], x, next, sums[1]);
    int own = x.odd ? half(sums[1], true) : half(sums[0], false);
    int other = x.odd ? half(sums[0], true) : half(sums[1], false);
    u32 scale = x.odd ? next.scale : row.scale, operands = x.odd ? next.sum : row.sum;
    add_whole<Stage>(RecordOf<Stage>::one_of(x.odd, slot.records[f + 1], slot.records[f]), 0, 0, exchanged(own, other),
                     float_of(scale), static_cast<int>(operands), c[0][0][0]);
  } else {
    int own = half(sums[0], x.odd);
    float sum = c[0][0][0];
    add_whole<Stage>(slot.records[f], 0, 0, exchanged(own, own), float_of(row.scale), static_cast<int>(row.sum), sum);
    c[0][0][0] = x.odd == (f % 2 != 0) ? sum : c[0][0][0];
  }
}
// A fragment of whole numbers by the bytes of all tokens, the unit's number `fragment`: row_at(i) of its step i.
template <class Stage, class RowAt>
KOG_DEVICE void multiply_bytes_of_all(const SlotOf<Stage>& slot, const Operands<Stage>& x, int f, int fragment,
                                      UnitSums<Stage>& c, RowAt row_at) {
  using Weights = typename Stage::Weights;
  using Bytes = StepBytes<Weights>;
  constexpr int kPack = Weights::kPack, kShared = Weights::kSharedSteps, kScales = kFragmentScales<Weights>;
  constexpr int kGranules = Weights::kGranules > 0 ? Weights::kGranules : 1;
  auto scales = x.of_fragment(fragment);
  WordVector<kScales> operands = {};
  if constexpr (kSums<Weights>) operands = x.of_fragment(fragment, Stage::kWholeSumsAt);
#pragma unroll
  for (int first = 0; first < kPack; first += kShared) {
    int sums[4] = {0, 0, 0, 0};
#pragma unroll
    for (int n = first; n < first + kShared; n++) {
      auto row = row_at(n);
      Bytes weights(slot.w[f], n, x.table);
      multiply_bytes(sums, row.w, weights.w);
      if constexpr (Bytes::kSigned) {
        int negative[4] = {0, 0, 0, 0};
        multiply_bytes(negative, row.w, weights.negative);
#pragma unroll
        for (int i = 0; i < 4; i++) sums[i] -= negative[i];
      }
    }
    int chain = kOneScale<Weights> ? f % 2 : first;
#pragma unroll
    for (int i = 0; i < 2; i++)
      add_whole<Stage>(slot.records[f], first * kGranules / kPack, i, whole_sum(sums[i], sums[2 + i]),
                       float_of(scales.w[first / kShared]), static_cast<int>(operands.w[first / kShared]),
                       c[0][i][chain]);
  }
}

}  // namespace kog
