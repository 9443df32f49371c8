// How a kernel of one token stages a stage's inputs as operands (operands.h): x, of which every block has a
// copy in registers, and words of other stages' outputs.
#pragma once
#include <kog/matvec.h>

namespace kog {

constexpr int kColumnWords = kFragK / 4;  // of a column of a step in scratch: a word is two values
// Index of the first element of a thread's group i; kHidden or more if it has none.
KOG_DEVICE int element(const Block& b, int i) {
  int local = i * 128 + b.in_warp * 4;
  return local < kSlice ? b.warp * kSlice + local : kHiddenStride;
}

// Values side by side from element e on, as bytes of one token; by whole warps, with those of the step in threads side
// by side.
template <class Stage, int N>
KOG_DEVICE void put_bytes(const Block& b, int e, const float (&v)[N], bool staged) {
  constexpr int kSharers = kFragK / N;
  StepScale scale(largest_of_threads<kSharers>(largest_of(v)));
  u32 sum = 0;
  u32* to = reinterpret_cast<u32*>(b.scratch + Stage::kOperandsAt) +
            e / kFragK * OperandLayout<Stage>::kStepWords + e % kFragK / 4;
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    FourBytes four({v[i], v[i + 1], v[i + 2], v[i + 3]}, scale.inverse);
    sum += four.sum;
    if (staged) to[i / 4] = four.high, to[8 + i / 4] = four.low;
  }
  if constexpr (kSums<typename Stage::Weights>) sum = sum_of_threads<kSharers>(sum);
  if (staged && e % kFragK == 0) put_step<Stage>(b, e / kFragK, 0, scale, sum);
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
  float square[1] = {0};
#pragma unroll
  for (int i = 0; i < kGroups; i++) {
    int local = i * 128 + b.in_warp * 4, e = b.warp * kSlice + local;
    const float four[4] = {x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]};
    const float g[4] = {gain[4 * i], gain[4 * i + 1], gain[4 * i + 2], gain[4 * i + 3]};
    bool staged = local < kSlice && e < Stage::kPaddedK;
    if constexpr (Stage::Weights::kInteger) {
      float scaled[4];
      square[0] = scale_four(four, g, square[0], scaled);
      put_bytes<Stage>(b, e, scaled, staged);
    } else {
      square[0] = scale_four(four, g, square[0], staged, [&](int odd, const HighLow& parts) {
        u32* to = reinterpret_cast<u32*>(b.scratch) + e / kFragK * (4 * kColumnWords) + e % kFragK / 4 +
                  odd * 2 * kColumnWords;
        to[0] = parts.high;
        to[kColumnWords] = parts.low;
      });
    }
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
  static constexpr int kStride = kValues * 32 * (kOwnSlice ? 1 : kWarps);
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
    int at = value(i);
    if constexpr (Stage::Weights::kInteger) {
      float v[kValues];
#pragma unroll
      for (int j = 0; j < kValues; j++) v[j] = j % 2 == 0 ? low_of(w[j / 2]) : high_of(w[j / 2]);
      return put_bytes<Stage>(b, at, v, at < Stage::kPaddedK);
    }
    if (at >= Stage::kPaddedK) return;
    u32* to = reinterpret_cast<u32*>(b.scratch) + at / kFragK * (2 * kColumnWords) + at % kFragK / 4;
    if constexpr (kValues == 8) {
      *reinterpret_cast<uint2*>(to) = {w[0], w[2]};
      *reinterpret_cast<uint2*>(to + kColumnWords) = {w[1], w[3]};
    } else {
      to[0] = w[0], to[kColumnWords] = w[1];
    }
  }
};

// Wait for Stage's inputs, the lane's pair words of a region, and stage them.
template <class Stage, class Words>
KOG_DEVICE void stage_words(Block& b, Step step, u32 phase) {
  constexpr int kCount = Inputs<Stage>::kCount, kWords = (Stage::kCols + 1) / 2;
  Inputs<Stage> in(b);
  int at[kCount];
  uint4 q[kCount];
#pragma unroll
  for (int i = 0; i < kCount; i++) {
    int value = in.value(i);
    at[i] = value < Stage::kPaddedK ? value / 2 : kWords;
  }
  poll<kWords>(b, step, lane_words<Words>(b), at, phase, q);
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
