// Weight @ activations of one token: fragments as they come from memory, a row in 4 or 8 threads of each warp.
//
//   partial sums [part of K][unit][row], summed over the parts by the thread that owns the row
#pragma once
#include <kog/operands.h>
#include <kog/ring.h>

namespace kog {

// Fragments that a wave takes before its activations are there: 4 registers each.
constexpr int kMostAhead = 20;
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
      w[i] = i < kSure * Stage::kUnitFragments || i < fragments_of<Stage>(b.group_index, layer) ? ring.take(b) : uint4{};
  }
};
struct NothingAhead {
  static constexpr int kCount = 0, kUnits = 0, kSure = 0;
};

// One fragment of weights by its operand, in two chains of sums.
template <bool kWide>
KOG_DEVICE void multiply_fragment(const uint4& w, const Operand<kWide>& x, float (&c)[2]) {
#pragma unroll
  for (int j = 0; j < 4; j++) {
    u32 pair = word_of(w, j);
    if constexpr (!kWide) {
      c[j % 2] = dot2<kF16>(pair, x.w[j], c[j % 2]);
    } else if constexpr (kF16) {
      c[0] = dot2<true>(pair, x.w[j], c[0]);
      c[1] = dot2<true>(pair, x.w[4 + j], c[1]);
    } else {
      c[0] = fused(low_of(pair), float_of(x.w[2 * j]), c[0]);
      c[1] = fused(high_of(pair), float_of(x.w[2 * j + 1]), c[1]);
    }
  }
}

// The sums of one unit and part of K to shared memory; `to` is the warp's rows of the unit.
template <class Stage>
KOG_DEVICE void put_sums(const Block& b, const float (&c)[2], float* to) {
  constexpr int kRowThreads = OperandLayout<Stage>::kRowThreads;
  float sum = c[0] + c[1];
#pragma unroll
  for (int mask = 1; mask < kRowThreads; mask <<= 1) sum += shuffle_xor(sum, mask);
  if (b.in_warp % kRowThreads == 0) to[b.in_warp / kRowThreads] = sum;
}

// Sums of `units` units, all warps together, of whose fragments the first may be on their way: as one is multiplied
// the one that takes its registers is asked for. `to`: where the warp's sums of the first unit go.
template <class Stage, class Taken>
KOG_DEVICE void multiply(Block& b, Ring& ring, int units, const Operands<Stage>& x, const Taken& taken, float* to) {
  constexpr int kUnit = Stage::kUnitFragments, kDepth = depth_of<Stage>();
  constexpr bool kOneRound = (Stage::kUnits + Stage::kGroup - 1) / Stage::kGroup * kUnit <= kDepth;
  const int count = units * kUnit;
  uint4 w[kDepth];
#pragma unroll
  for (int i = 0; i < kDepth; i++) {
    if constexpr (Taken::kCount > 0)
      w[i] = taken.w[i];
    else
      w[i] = i < count ? ring.take(b) : uint4{};
  }
  float c[2] = {0, 0};
  int first = 0;  // step of the unit with which a round begins, where a unit is several
#pragma unroll 1
  for (int done = 0; done < count; done += kDepth) {
#pragma unroll
    for (int i = 0; i < kDepth; i++) {
      if (i % kUnit == 0 && i > 0 && done + i >= count) break;
      int step = kUnit <= kDepth ? i % kUnit : first + i;
      multiply_fragment<Stage::kWide>(w[i], x.at(step), c);
      if (!kOneRound && done + i + kDepth < count) w[i] = ring.take(b);
      bool ends = kUnit <= kDepth ? i % kUnit == kUnit - 1 : i == kDepth - 1 && first + kDepth == kUnit;
      if (ends) {
        put_sums<Stage>(b, c, to);
        to += OperandLayout<Stage>::kUnitWords;
        c[0] = c[1] = 0;
      }
    }
    if constexpr (kUnit > kDepth) first = first + kDepth == kUnit ? 0 : first + kDepth;
    if constexpr (kOneRound) break;
  }
}

}  // namespace kog
