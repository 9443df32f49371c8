// A warp's part of a vector of 16-bit words as the operands of the stage that multiplies it: asked for once
// hints say that it is there or, if it is little, at once.
#pragma once
#include <kog/columns/flags.h>
#include <kog/columns/warp_state.h>
#include <kog/operands.h>

namespace kog::columns {

// Steps of K whose words are on their way at once: in as few batches as registers allow, and no more than the
// first batch can leave in registers and scratch.
template <class Stage>
struct LoadBatch {
  // Words that become bytes take registers more.
  static constexpr int kMost = (Stage::Weights::kInteger ? 40 : 64) / OperandLayout<Stage>::kRowWords;
  static constexpr int kBatches = (Stage::kSteps + kMost - 1) / kMost;
  static constexpr int kEvenly = (Stage::kSteps + kBatches - 1) / kBatches;
  static constexpr int kAtLeast = kEvenly > Stage::kHeld ? kEvenly : Stage::kHeld;
  static constexpr int kShared = Stage::Weights::kSharedSteps;  // of a scale, which are staged together
  static constexpr int kWanted = (kAtLeast + kShared - 1) / kShared * kShared;
  static constexpr int kStored = Operands<Stage>::kLast;
  static constexpr int kSteps = kWanted < kStored ? kWanted : kStored;
  static_assert(Stage::kHeld <= kSteps);
  using Rows = WordVector<OperandLayout<Stage>::kRowWords>[kSteps];
};

// Whether all words of a part are few enough to be asked for before a hint says that some are there: in
// vain, while other blocks still work, they cost the L2 what they would cost in the end. So few was chosen,
// not tuned.
template <class Stage>
constexpr bool kAsksAtOnce = Stage::kSteps * OperandLayout<Stage>::kRowWords <= 32;

// Operands of a batch from step `first` on, once the words of the thread's own columns carry the phase.
// hint() returns when some of the warp's are there: it is called if none of them are, unless it was.
template <class Stage, class Region, class Hint>
KOG_DEVICE void receive(Block& b, Step step, u32 phase, int first, typename LoadBatch<Stage>::Rows& w,
                        Hint hint, bool& hinted) {
  using S = OperandLayout<Stage>;
  constexpr int kSteps = LoadBatch<Stage>::kSteps;
  // The thread's words of a step: every other one of a quarter.
  int thread = S::holder(b.in_warp), k = S::first_value(b) + first * S::kStepValues;
  int value = k + S::value(thread);
  const u32* from = lane_words<Region>(b) + k / S::kStepValues * S::kStepWords + thread * S::kThreadStride;
  // Whether the thread's word of a step is ever written.
  auto mine = [&](int i, int j) {
    bool inside = Stage::kPaddedK == Stage::kCols ||
                  value + i * S::kStepValues + S::value_of(j) < Stage::kCols;
    return S::set_of(j) * S::kTokens + S::token(thread) < b.p.num_requests && inside;
  };
  static_assert(kSteps <= 32);
  constexpr u32 kAll = ~0u >> (32 - kSteps);
  u32 late = kAll;  // bit i: step i is
#pragma unroll
  for (int i = 0; i < kSteps; i++) w[i] = {};
  ask_until_ready(b, step, word_index(b, from), phase ^ 1, phase, [&] {
#pragma unroll
    for (int i = 0; i < kSteps; i++)
      if ((late >> i & 1) != 0) load_row(from + i * S::kStepWords, w[i]);
    late = 0;
#pragma unroll
    for (int i = 0; i < kSteps; i++) {
      u32 bad = 0;
#pragma unroll
      for (int j = 0; j < S::kRowWords; j++)
        bad |= mine(i, j) ? w[i].w[j] ^ phase : 0;
      late |= (bad & 1) << i;
    }
    bool again = any_in_warp(late != 0);
    if (again && !hinted && !any_in_warp(S::token(thread) < b.p.num_requests && late != kAll)) hint();
    hinted = true;
    return again;
  });
#pragma unroll
  for (int i = 0; i < kSteps; i++)
#pragma unroll
    for (int j = 0; j < S::kRowWords; j++) w[i].w[j] = operand_of(w[i].w[j]);
}

// This warp's part of Region's words as Stage's operands. hint(): see receive.
template <class Stage, class Region, class Hint>
KOG_DEVICE void stage_words(Block& b, Step step, Operands<Stage>& to, u32 phase, Hint hint) {
  constexpr int kSteps = LoadBatch<Stage>::kSteps;
  typename LoadBatch<Stage>::Rows w;
  bool hinted = !kAsksAtOnce<Stage>;
  if (hinted) hint();
#pragma unroll 1
  for (int next = kSteps; next < Stage::kSteps; next += kSteps) {
    int first = next + kSteps <= Stage::kSteps ? next : Stage::kSteps - kSteps;
    receive<Stage, Region>(b, step, phase, first, w, hint, hinted);
    if constexpr (Stage::Weights::kInteger) to.put_bytes(w, first);
#pragma unroll
    for (int i = 0; i < kSteps; i++)
      if (first + i >= Stage::kHeld && (Stage::kRead == 0 || first + i < to.kLast))
        to.store(first + i, w[i]);
  }
  // Those that stay in registers come last.
  receive<Stage, Region>(b, step, phase, 0, w, hint, hinted);
  if constexpr (Stage::Weights::kInteger) to.put_bytes(w, 0);
#pragma unroll
  for (int i = 0; i < kSteps; i++) {
    if (i < Stage::kHeld)
      to.held[i] = w[i];
    else
      to.store(i, w[i]);
  }
  sync_warp();
}

}  // namespace kog::columns
