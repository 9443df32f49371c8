// Weight @ activations of kColumns tokens: a warp multiplies each fragment of the stream (../matvec.h) with all
// sets of tokens (operands.h). Every token's sums are made by the operations, in the order, of a kernel of one
// token: who shares the step does not change a bit of them.
//
//   partial sums [part of K][unit][token][row]
#pragma once
#include <kog/columns/operands.h>

namespace kog::columns {

// The sums of one unit and part of K to shared memory; `to` is the warp's rows of the unit.
template <class Stage>
KOG_DEVICE void put_sums(const Block& b, const float (&c)[Cut<Stage>::kSets][2][4],
                         float* to) {
  constexpr int kSets = Cut<Stage>::kSets, kTokens = Cut<Stage>::kTokens;
  int quarter = b.in_warp % 4, row = b.in_warp / 4;
  if constexpr (Cut<Stage>::kSwaps) {
    // A lane has two rows of a token, each as high and low parts of even and odd words.
    float sum[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float part[2];
#pragma unroll
      for (int odd = 0; odd < 2; odd++) {
        auto& v = c[odd];
        part[odd] = v[0][i] + v[1][i];
        part[odd] += v[0][2 + i] + v[1][2 + i];
      }
      sum[i] = part[0] + part[1];
    }
    *reinterpret_cast<float2*>(to + row * Stage::kUnitRows + 2 * quarter) = {sum[0], sum[1]};
  } else if constexpr (Stage::kWide && Cut<Stage>::kHalves == 1) {
    // Of two sets at once, so that every lane has one to store.
    constexpr int kAtOnce = kSets < 2 ? 1 : 2;
#pragma unroll
    for (int first = 0; first < kSets; first += kAtOnce) {
      float sum[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; i++) {
        auto& v = c[first + i];
        float even = v[0][0] + v[1][0], odd = v[0][2] + v[1][2];
        even += v[0][1] + v[1][1];
        odd += v[0][3] + v[1][3];
        sum[i] = quarter % 2 == 0 ? even : odd;
        sum[i] += shuffle_xor(sum[i], 1);
      }
      int set = first + (kAtOnce > 1 ? quarter % 2 : 0);
      // One of two values, not the value at one of two places: registers have no index.
      float even = sum[0], odd = sum[kAtOnce - 1], mine = quarter % 2 == 0 ? even : odd;
      if (kAtOnce > 1 || quarter % 2 == 0)
        to[(2 * set + quarter / 2) * Stage::kUnitRows + row] = mine;
    }
  } else if constexpr (Cut<Stage>::kHalves == 1) {
#pragma unroll
    for (int set = 0; set < kSets; set++) {
      auto& v = c[set];
      float even = v[0][0] + v[1][0], odd = v[0][3] + v[1][3];
      if (quarter < kTokens) to[(kTokens * set + quarter) * Stage::kUnitRows + row] = even + odd;
    }
  } else {
    // Sums of even words in the first two quarters, of odd ones in the others; of the first step of
    // a fragment in the first of two, of the second in the other and four rows on (../matvec.h).
#pragma unroll
    for (int set = 0; set < kSets; set++)
#pragma unroll
      for (int token = 0; token < kTokens; token++) {
        auto& v = c[set];
        float even = v[0][token] + v[1][token], odd = v[0][2 + token] + v[1][2 + token];
        if constexpr (Stage::kWide) {
          even += v[0][1] + v[1][1];
          odd += v[0][3] + v[1][3];
        }
        float sum = quarter % 2 == row / 4 ? (quarter < 2 ? even : odd) : 0;
        sum += shuffle_xor(sum, 1);
        sum += shuffle_xor(sum, 2);
        sum += shuffle_xor(sum, 16);
        if (row < 4 && quarter == 0) to[(kTokens * set + token) * Stage::kUnitRows + row] = sum;
      }
  }
}

// Sums of one unit, or of the one in hand of a period: of each set in two chains.
template <class Stage>
using Sums = float[Cut<Stage>::kSets][2][4];

// One fragment by operands `row`, as the f-th of its chunk.
template <class Stage>
KOG_DEVICE void multiply_fragment(const Fragment& w, const Words<Cut<Stage>::kRowWords>& row, int f,
                                  Sums<Stage>& c) {
#pragma unroll
  for (int set = 0; set < Cut<Stage>::kSets; set++) {
    auto operands = of_set<Stage>(row, set);
    if constexpr (Cut<Stage>::kSwaps) {
      const u32 weights[2] = {w.w[set], w.w[2 + set]};
      multiply_add<kF16>(c[set][f & 1], operands.w, weights);
    } else {
      multiply_add<kF16>(c[set][f & 1], w.w, operands.w);
    }
  }
}

// Multiply the period's chunk i. kKnown: i is, and so are the operands' registers.
template <class Stage, bool kKnown>
KOG_DEVICE void multiply_chunk(Block& b, const Fragment (&w)[kFragments], const Operands<Stage>& x,
                               int i, int left, Sums<Stage>& c, float* to) {
  using S = Cut<Stage>;
  constexpr int kSteps = Stage::kSteps, kPeriod = Stage::kPeriod;
#pragma unroll
  for (int f = 0; f < kFragments; f++) {
    int at = i * kFragments + f, step = kPeriod == 1 ? at : at % kSteps;
    auto row = kKnown ? x.at(step) : x.load(step);
    multiply_fragment<Stage>(w[f], row, f, c);
    if (kPeriod > 1 && step == kSteps - 1) {
      int done = at / kSteps;
      if (done < left) put_sums<Stage>(b, c, to + done * S::kUnitWords);
#pragma unroll
      for (int set = 0; set < S::kSets; set++)
#pragma unroll
        for (int j = 0; j < 4; j++) c[set][0][j] = c[set][1][j] = 0;
    }
  }
}

// Operands in memory, of a unit's last chunks: some chunks are on their way while others are
// multiplied. All of them have been received (layer.h), and no block overwrites them meanwhile: for
// that it waits for the rows that this one sends behind them.
template <class Stage>
struct Reads {
  using Row = typename Operands<Stage>::Row;
  static constexpr int kFirst = Operands<Stage>::kLast / kFragments;  // chunk
  static_assert(Operands<Stage>::kLast % kFragments == 0);
  static_assert(Stage::kRead % (kReadChunks * kFragments) == 0);
  Row rows[kReadChunks][kFragments];

  KOG_DEVICE explicit Reads(const Operands<Stage>& x) {
#pragma unroll
    for (int n = 0; n < kReadChunks; n++) ask(x, n, kFirst + n);
  }
  KOG_DEVICE void ask(const Operands<Stage>& x, int n, int chunk) {
    const u32* from = x.in_memory + chunk * kFragments * Cut<Stage>::kStepWords;
#pragma unroll
    for (int f = 0; f < kFragments; f++) load_row(from + f * Cut<Stage>::kStepWords, rows[n][f]);
  }
  KOG_DEVICE void multiply(Block& b, Ring& ring, const Operands<Stage>& x, Sums<Stage>& c) {
#pragma unroll 1
    for (int first = kFirst; first < kPeriodChunks<Stage>; first += kReadChunks) {
#pragma unroll
      for (int n = 0; n < kReadChunks; n++) {
        Chunk<Stage> chunk;
        chunk.take(b, ring);
#pragma unroll
        for (int f = 0; f < kFragments; f++) {
          Row row = rows[n][f];
#pragma unroll
          for (int j = 0; j < Cut<Stage>::kRowWords; j++) row.w[j] = operand_of(row.w[j]);
          multiply_fragment<Stage>(chunk.w[f], row, f, c);
        }
        int next = first + n + kReadChunks;
        if (next < kPeriodChunks<Stage>) ask(x, n, next);
      }
    }
  }
};

// The sums of one period, of whose units `left` are there.
template <class Stage>
KOG_DEVICE void multiply_period(Block& b, Ring& ring, const Operands<Stage>& x, int left,
                                float* to) {
  constexpr int kPeriod = Stage::kPeriod, kChunks = kPeriodChunks<Stage>;
  // Operands in registers need steps that are known, and so does a period of several units.
  constexpr int kKnown =
      kPeriod > 1 ? kChunks : (Stage::kHeld + kFragments - 1) / kFragments;  // chunks
  Sums<Stage> c = {};
#pragma unroll
  for (int i = 0; i < kKnown; i++) {
    if (kPeriod > 1 && i * kFragments / Stage::kSteps >= left) break;
    Chunk<Stage> chunk;
    chunk.take(b, ring);
    multiply_chunk<Stage, true>(b, chunk.w, x, i, left, c, to);
  }
  constexpr int kHere = Stage::kRead > 0 ? Operands<Stage>::kLast / kFragments : kChunks;
  auto rest = [&] {
#pragma unroll 1
    for (int i = kKnown; i < kHere; i++) {
      Chunk<Stage> chunk;
      chunk.take(b, ring);
      multiply_chunk<Stage, false>(b, chunk.w, x, i, left, c, to);
    }
  };
  if constexpr (Stage::kRead > 0) {
    static_assert(kPeriod == 1);
    Reads<Stage> reads(x);
    rest();
    reads.multiply(b, ring, x, c);
  } else {
    rest();
  }
  if constexpr (kPeriod == 1) put_sums<Stage>(b, c, to);
}

// Weights that a warp takes from the ring before its activations are there (../matvec.h says why):
// the first units of a wide stage whose operands are all held.
template <int kCount, int kUnitChunks>
struct Taken {
  static constexpr int kUnits = kCount;
  Chunk<Wide> chunks[kUnits > 0 ? kUnits * kUnitChunks : 1];

  KOG_DEVICE void take(Block& b, Ring& ring) {
#pragma unroll
    for (int i = 0; i < kUnits * kUnitChunks; i++) chunks[i].take(b, ring);
  }
  template <class Stage>
  KOG_DEVICE void multiply(Block& b, const Operands<Stage>& x, float* to) const {
#pragma unroll
    for (int unit = 0; unit < kUnits; unit++) {
      Sums<Stage> c = {};
#pragma unroll
      for (int i = 0; i < kUnitChunks; i++)
        multiply_chunk<Stage, true>(b, chunks[unit * kUnitChunks + i].w, x, i, 1, c, to);
      put_sums<Stage>(b, c, to + unit * Cut<Stage>::kUnitWords);
    }
  }
};
using NothingTaken = Taken<0, 0>;

}  // namespace kog::columns
