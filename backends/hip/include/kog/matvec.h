// Weight @ activations: fragments as they come from memory, multiplied by what operands.h says.
//
//   partial sums [part of K][unit][token][row], summed over the parts by the thread that owns the row
#pragma once
#include <kog/operands.h>
#include <kog/ring.h>
#ifdef KOG_COLUMNS
#include <kog/mma/products.h>
#else
#include <kog/dot/products.h>
#endif

namespace kog {

// Fragments that a wave takes before its activations are there: 4 registers each.
// Operands of several columns are registers, too.
constexpr int kMostAhead = kColumns == 1 ? 20 : 12;
// At a wait: 1.5 times what 4.2 TB/s bring in 2 us, of 256 blocks (docs/HIP.md, Budget).
constexpr int kLeastOnWay = 7;
template <class Weights>
constexpr int kMostAheadOf = kMostAhead;
template <int kA, int kB>
constexpr int kLeast = kA < kB ? kA : kB;

// Of a stage's fragments, how many are on their way at once: whole units, or a whole part of one.
template <class Stage>
constexpr int depth_of() {
  constexpr int kUnit = Stage::kUnitFragments, kLongest = (Stage::kUnits + Stage::kGroup - 1) / Stage::kGroup;
  constexpr int kMost = kLeast<kMostAhead, kLeast<kLongest, Stage::kBatch> * kUnit>;
  if (kUnit <= kMost) return kMost / kUnit * kUnit;
  int depth = kMost;
  while (kUnit % depth != 0) depth--;
  return depth;
}

// The next fragments of a stage, ahead of their use.
template <class Stage, bool kAllOrNone = false>
struct Ahead {
  static constexpr int kCount = depth_of<Stage>();
  static constexpr int kSure = Stage::kUnits / Stage::kGroup;  // units of every block
  static constexpr int kLongest = (Stage::kUnits + Stage::kGroup - 1) / Stage::kGroup;
  static constexpr bool kWhole = kLongest * Stage::kUnitFragments <= kCount;
  static constexpr int kUnits = (kCount + Stage::kUnitFragments - 1) / Stage::kUnitFragments;
  uint4 w[kCount];  // each begins on every path: else registers would be kept for it throughout

  KOG_DEVICE void take(Block& b, Ring& ring, int layer) { take<0, kCount, false>(b, ring, layer); }
  template <int kFirst, int kLast, bool>
  KOG_DEVICE void take(Block& b, Ring& ring, int layer) {
#pragma unroll
    for (int i = kFirst; i < kLast; i++)
      w[i] = i < kSure * Stage::kUnitFragments || i < fragments_of<Stage>(b.group_index, layer)
                 ? ring.template take<Stage::kFragmentRows>(b)
                 : uint4{};
  }
};
struct NothingAhead {
  static constexpr int kCount = 0, kUnits = 0, kSure = 0;
};

// Sums of `units` units, all warps together, of whose fragments the first may be on their way: as one is multiplied
// the one that takes its registers is asked for. `to`: where the warp's sums of the first unit go.
template <class Stage, class Taken>
KOG_DEVICE void multiply(Block& b, Ring& ring, int units, const Operands<Stage>& x, const Taken& taken, float* to) {
  constexpr int kUnit = Stage::kUnitFragments, kDepth = depth_of<Stage>();
  constexpr bool kOneRound = (Stage::kUnits + Stage::kGroup - 1) / Stage::kGroup * kUnit <= kDepth;
  // Operands in registers have no index: all of a unit has code of its own.
  constexpr int kRound = kColumns > 1 && kUnit > kDepth ? kUnit : kDepth;
  const int count = units * kUnit;
  uint4 w[kDepth];
#pragma unroll
  for (int i = 0; i < kDepth; i++) {
    if constexpr (Taken::kCount > 0)
      w[i] = taken.w[i];
    else
      w[i] = i < count ? ring.template take<Stage::kFragmentRows>(b) : uint4{};
  }
  UnitSums<Stage> c = {};
  int first = 0;  // step of the unit with which a round begins, where a unit is several
#pragma unroll 1
  for (int done = 0; done < count; done += kRound) {
#pragma unroll
    for (int i = 0; i < kRound; i++) {
      // of_wave: else both ways out of the loop become one, whose count nobody knows, and w is memory with an index.
      if (i % kUnit == 0 && i > 0 && done + i >= static_cast<int>(of_wave(count))) break;
      int step = kUnit <= kRound ? i % kUnit : first + i;
      multiply_fragment<Stage>(w[i % kDepth], x.at(step), c);
      if (!kOneRound && done + i + kDepth < count) w[i % kDepth] = ring.template take<Stage::kFragmentRows>(b);
      bool ends = kUnit <= kRound ? i % kUnit == kUnit - 1 : i == kDepth - 1 && first + kDepth == kUnit;
      if (ends) {
        put_sums<Stage>(b, c, to);
        to += OperandLayout<Stage>::kUnitWords;
        clear<Stage>(c);
      }
    }
    if constexpr (kUnit > kRound) first = first + kDepth == kUnit ? 0 : first + kDepth;
    if constexpr (kOneRound) break;
  }
}

}  // namespace kog
