// How a kernel of one token stages a stage's inputs as operands (operands.h, each vendor's): x, of which every block has
// a copy in registers, and words of other stages' outputs.
#pragma once
#include <kog/matvec.h>

namespace kog {

// Index of the first element of a thread's group i; kHidden or more if it has none.
KOG_DEVICE int element(const Block& b, int i) {
  int local = i * 128 + b.in_warp * 4;
  return local < kSlice ? b.warp * kSlice + local : kHiddenStride;
}

// Inputs that run on over other stages' partial sums wait for those who still add them.
template <class Stage>
KOG_DEVICE void begin_inputs() {
  if constexpr (kOverSums<Stage>) sync_consumers();
}

// Stage x * gain for Stage, and leave the warps' sums of squares for `inverse_rms`.
template <class Stage>
KOG_DEVICE void stage_x(Block& b, const float (&x)[kHeld], const float (&gain)[kHeld]) {
  static_assert(Stage::kWide);
  // What the warps stage is what they multiply; their own parts, where no barrier follows. (The head
  // of concatenated lanes is staged elsewhere.)
  static_assert(Stage::kCols != kHidden || (Stage::kParts == kWarps
                                                ? Stage::kPaddedK == kWarps * kSlice
                                                : Stage::kPaddedK <= kWarps * kSlice));
  begin_inputs<Stage>();
  float square[1] = {0};
#pragma unroll
  for (int i = 0; i < kGroups; i++) {
    int local = i * 128 + b.in_warp * 4, e = b.warp * kSlice + local;
    const float four[4] = {x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]};
    const float g[4] = {gain[4 * i], gain[4 * i + 1], gain[4 * i + 2], gain[4 * i + 3]};
    square[0] = stage_four<Stage>(b, e, four, g, square[0], local < kSlice && e < Stage::kPaddedK);
  }
  float sum = sum_columns<1>(b, square);
  if (b.in_warp == 0) b.small->squares[b.warp] = sum;
  sync_staged<Stage::kParts == kWarps>();
}

// Stage's inputs as they come in 16-bit words, kValues (8 or 4) a vector: which of them a thread stages.
template <class Stage, int kValues = 8>
struct Inputs {
  static_assert(!Stage::kWide);
  static constexpr bool kOwnSlice = Stage::kParts == kWarps;
  static constexpr int kPart =
      kOwnSlice ? Stage::kPaddedK / kWarps : Stage::kPaddedK;  // values of one warp, or of all
  static constexpr int kStride = kValues * (kOwnSlice ? kWarpThreads : kConsumers);
  static constexpr int kCount = (kPart + kStride - 1) / kStride;
  int first, thread;

  KOG_DEVICE explicit Inputs(const Block& b) {
    first = kOwnSlice ? b.warp * kPart : 0;
    thread = kOwnSlice ? b.in_warp : b.thread;
  }
  // The first value of vector i; kPaddedK or more where there is none.
  KOG_DEVICE int value(int i) const {
    int local = i * kStride + thread * kValues;
    return local < kPart ? first + local : Stage::kPaddedK;
  }
  KOG_DEVICE void put(const Block& b, int i, const u32 (&w)[kValues / 2]) const {
    stage_words_at<Stage>(b, value(i), w);
  }
};

// Wait for Stage's inputs, the lane's pair words of a region, and stage them.
template <class Stage, class Words, class Between = NothingBetween>
KOG_DEVICE void stage_words(Block& b, Step step, u32 phase, Between between = {}) {
  constexpr int kCount = Inputs<Stage>::kCount, kWords = (Stage::kCols + 1) / 2;
  begin_inputs<Stage>();
  Inputs<Stage> in(b);
  int at[kCount];
  uint4 q[kCount];
#pragma unroll
  for (int i = 0; i < kCount; i++) {
    int value = in.value(i);
    at[i] = value < Stage::kPaddedK ? value / 2 : kWords;
  }
  poll<kWords>(b, step, lane_words<Words>(b), at, phase, q, between);
#pragma unroll
  for (int i = 0; i < kCount; i++) {
    u32 w[4];
#pragma unroll
    for (int j = 0; j < 4; j++) w[j] = at[i] + j < kWords ? operand_of(word_of(q[i], j)) : 0;
    in.put(b, i, w);
  }
  sync_staged<Inputs<Stage>::kOwnSlice>();
}

}  // namespace kog
