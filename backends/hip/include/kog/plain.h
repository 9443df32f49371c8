// Weights of 16 bits, the only ones that have kernels here (schedule/hip.py): what others would bring is not there.
#pragma once
#include <kog/values.h>

namespace kog {

template <class Weights>
constexpr bool kSumsOperands = false;
template <class Weights>
constexpr bool kSums = false;  // of bytes
// Bytes of a fragment, of all warps.
template <class Weights>
constexpr int kFragmentOfAll = kRingSlotBytes;
template <class... Stages>
constexpr bool kPlainWeights = ((Stages::Weights::kCodes < 0 && !Stages::kRowScales) && ...);
static_assert(kPlainWeights<QkvProj, OProj, GateUpProj, DownProj, LmHead>);
static_assert(kFragK == 32 && kFragments == 1 && kRingSlotBytes == kConsumers * 16);

constexpr int kThreadValues = 8;  // of K, in 16 bytes

// Whether all blocks have as many units of a stage, and multiply them in one batch: its loops have no exit then.
template <class Stage>
constexpr bool kEven = Stage::kUnits % Stage::kGroup == 0 && Stage::kUnits / Stage::kGroup <= Stage::kBatch;

// A row's sum over all of K as its words' factor has it.
template <class Stage, class Item>
KOG_DEVICE float scaled_sum(const Block&, const Item&, float sum, int) {
  if constexpr (Stage::kSumUnit != 1.f) sum *= Stage::kSumUnit;
  return sum;
}

}  // namespace kog
