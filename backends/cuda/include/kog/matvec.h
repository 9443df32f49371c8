// Weight @ activations of kColumns tokens: activations staged once a stage (operands.h), weights multiplied
// as they arrive in the ring. Every token's sums are made by the same operations in the same order however many
// share the step: who shares it does not change a bit of them.
//
// A fragment is 8 rows by kFragK values of K; a thread holds a row's quarter of them, kFragK / 8 words.
// It is the 16-row operand of the tensor core: rows 0-7 multiply the even words of each quarter, rows
// 8-15 the odd ones, each against columns of its own. Of the other operand's columns, of one token,
//
//     0, 1   what the even words meet, high and low part        2, 3   what the odd words meet
//
// Or it is 4 rows by two such steps of K, the first in threads 0-15, the second in threads 16-31: rows 0-3
// and 4-7 multiply the even words of each, 8-11 and 12-15 the odd ones, and columns 0 to 7 hold what
// they meet in the same order.
//
// float32 activations come as two 16-bit parts, x = high + low, and keep 16 bits of mantissa or more (wide);
// values that came as 16-bit words have no low part and still carry their factor (words.h, narrow).
//
// Whole numbers meet bytes: byte_products.h.
//
//   partial sums [part of K][unit][token][row], summed over the parts by the thread that owns the row
#pragma once
#include <kog/byte_products.h>

namespace kog {

// The sums of one unit and part of K to shared memory; `to` is the warp's rows of the unit.
template <class Stage>
KOG_DEVICE void put_sums(const Block& b, const float (&c)[OperandLayout<Stage>::kSets][2][4],
                         float* to) {
  constexpr int kSets = OperandLayout<Stage>::kSets, kTokens = OperandLayout<Stage>::kTokens;
  int quarter = b.in_warp % 4, row = b.in_warp / 4;
  if constexpr (OperandLayout<Stage>::kInteger) {
    constexpr int kChains = kWholeChains<typename Stage::Weights>;
    if constexpr (kColumns == 1) {
      float sum = c[0][0][0];
#pragma unroll
      for (int mask = 1; mask < kChains; mask <<= 1) sum += shuffle_xor(sum, mask);
      if (quarter == 0) to[row] = sum;
    } else {
      float sum[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float of_chain[kChains];
#pragma unroll
        for (int n = 0; n < kChains; n++) of_chain[n] = c[0][i][n];
        sum[i] = sum_of(of_chain);
      }
      if (row < kColumns) *reinterpret_cast<float2*>(to + row * Stage::kUnitRows + 2 * quarter) = {sum[0], sum[1]};
    }
  } else if constexpr (OperandLayout<Stage>::kSwaps) {
    // A thread has two rows of a token, each as high and low parts of even and odd words.
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
  } else if constexpr (Stage::kWide && OperandLayout<Stage>::kHalves == 1) {
    // Of two sets at once, so that every thread has one to store.
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
      if (kAtOnce > 1 || (kColumns > 1 ? quarter % 2 : quarter) == 0)
        to[(2 * set + quarter / 2) * Stage::kUnitRows + row] = mine;
    }
  } else if constexpr (OperandLayout<Stage>::kHalves == 1) {
#pragma unroll
    for (int set = 0; set < kSets; set++) {
      auto& v = c[set];
      float even = v[0][0] + v[1][0], odd = v[0][3] + v[1][3];
      if (quarter < kTokens) to[(kTokens * set + quarter) * Stage::kUnitRows + row] = even + odd;
    }
  } else {
    // Sums of even words in the first two quarters, of odd ones in the others; of the first step of
    // a fragment in the first of two, of the second in the other and four rows on.
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

// Units and ring slots end together every kPeriod units: one period of a stage's stream
// (short, or its units are long: schedule/cuda.py).
template <class Stage>
constexpr int kPeriodSlots = Stage::kPeriod * Stage::kUnitFragments / kFragments;
// Steps of K of a ring slot.
template <class Stage>
constexpr int kSlotSteps = kFragments * Stage::Weights::kPack;
// Ring slots of a period that have code of their own: operands in registers need steps that are known, and so
// does a period of several units, unless those are long (multiply_long_units).
template <class Stage>
constexpr int kKnownSlots = Stage::kLongUnits    ? 0
                            : Stage::kPeriod > 1 ? kPeriodSlots<Stage>
                                                 : (Stage::kHeld + kSlotSteps<Stage> - 1) / kSlotSteps<Stage>;

// Weights that a warp takes from the ring before its activations are there: more of the stream finds
// room while all wait, and what is multiplied first need not be waited for then. At most kAheadWords
// registers: beside more of x, or of what ranks sent, fewer are free. `kAllOrNone`: only if they are the whole run.
constexpr int kAheadWords = kHeld <= 4 && kRanks <= 2 ? 64 : 36;
constexpr int kMostAhead = kAheadWords / (kFragments * kThreadWords);  // ring slots
// Narrow ones take their scales along, and unpacking takes registers that those of 16 bits leave free. So few was
// counted in spills (the compiler's), not timed.
constexpr int kUnpackingWords = 16;
template <class Weights>
constexpr int kMostAheadOf = Weights::kPack == 1
                                 ? kMostAhead
                                 : (kAheadWords - kUnpackingWords) / (kFragments * (kThreadWords + Weights::kGranules));
template <int kA, int kB>
constexpr int kLeast = kA < kB ? kA : kB;
template <class Stage, bool kAllOrNone = false>
struct Ahead {
  static constexpr int kSure = Stage::kUnits / Stage::kGroup;  // units of every block
  static constexpr int kLongest = (Stage::kUnits + Stage::kGroup - 1) / Stage::kGroup;
  static constexpr int kSureSlots = (kSure * Stage::kUnitFragments + kFragments - 1) / kFragments;
  static constexpr int kAllSlots = (kLongest * Stage::kUnitFragments + kFragments - 1) / kFragments;
  // None of long units: slots of theirs run in loops, and registers have no index.
  static constexpr int kRoom =
      Stage::kLongUnits ? 0
                        : kLeast<kLeast<kMostAheadOf<typename Stage::Weights>, kRingSlots>,
                                 Stage::kBatch * Stage::kUnitFragments / kFragments>;
  static constexpr bool kWhole = kAllSlots <= kRoom;
  static constexpr int kMost = kWhole ? kAllSlots : kAllOrNone ? 0 : kLeast<kRoom, kSureSlots>;
  // Part of a period only where its code is laid out slot by slot.
  static constexpr int kCount =
      kKnownSlots<Stage> > 0 ? kMost : kMost / kPeriodSlots<Stage> * kPeriodSlots<Stage>;
  static constexpr int kPeriods = (kCount + kPeriodSlots<Stage> - 1) / kPeriodSlots<Stage>;
  static constexpr int kUnits = kPeriods * Stage::kPeriod;
  static_assert(kCount <= kRingSlots);  // all of them may be waited for at once
  SlotOf<Stage> slots[kCount ? kCount : 1];

  // All of them, for `layer`, as they come.
  KOG_DEVICE void take(Block& b, Ring& ring, int layer) { take<0, kCount, false>(b, ring, layer); }
  // Ring slots [kFirst, kLast): kTogether where a ring that is full has them all.
  template <int kFirst, int kLast, bool kTogether>
  KOG_DEVICE void take(Block& b, Ring& ring, int layer) {
    if constexpr (kTogether) ring.wait_for<kLast - kFirst>(b);
#pragma unroll
    for (int i = kFirst; i < kLast; i++) {
      if constexpr (!kTogether) ring.wait_for<1>(b);
      slots[i].template take_there<Stage>(b, ring, is_mine(b, layer, i));
    }
  }
  KOG_DEVICE static bool is_mine(const Block& b, int layer, int i) {
    return i < kSureSlots || i * kFragments < fragments_of<Stage>(b.group_index, layer);
  }
};
// What was asked for ahead of weights that have come: a scoreboard knows that it has, too.
template <class T>
KOG_DEVICE void have_come(const T&) {}
// The first kCount units, of kUnitSlots ring slots each, of a stage of columns, all of whose operands are held.
template <class Stage, int kUnitsAhead, int kUnitSlots>
struct Taken {
  static constexpr int kCount = kUnitsAhead * kUnitSlots, kPeriods = kUnitsAhead, kUnits = kUnitsAhead,
                       kSure = kUnitsAhead;
  SlotOf<Stage> slots[kCount ? kCount : 1];

  KOG_DEVICE void take(Block& b, Ring& ring) {
#pragma unroll
    for (int i = 0; i < kCount; i++) slots[i].template take<Stage>(b, ring);
  }
};
using NothingAhead = Taken<QkvProj, 0, 0>;

// One fragment by operands `row`, as the f-th of its ring slot.
template <class Stage>
KOG_DEVICE void multiply_fragment(const Fragment& w,
                                  const WordVector<OperandLayout<Stage>::kRowWords>& row, int f,
                                  UnitSums<Stage>& c) {
#pragma unroll
  for (int set = 0; set < OperandLayout<Stage>::kSets; set++) {
    auto operands = of_set<Stage>(row, set);
    if constexpr (OperandLayout<Stage>::kSwaps) {
      const u32 weights[2] = {w.w[set], w.w[2 + set]};
      multiply_add<kF16>(c[set][f & 1], operands.w, weights);
    } else {
      multiply_add<kF16>(c[set][f & 1], w.w, operands.w);
    }
  }
}

// Fragment f of a ring slot, the unit's number `fragment`, by the operands of its steps: row_at(i) of the i-th.
template <class Stage, class RowAt>
KOG_DEVICE void multiply_steps(const SlotOf<Stage>& slot, const Operands<Stage>& x, int f, int fragment,
                               UnitSums<Stage>& c, RowAt row_at) {
  using Weights = typename Stage::Weights;
  if constexpr (Weights::kInteger && kColumns == 1) {
    multiply_steps_of_one<Stage>(slot, x, f, row_at(0), c);
  } else if constexpr (Weights::kInteger) {
    multiply_bytes_of_all<Stage>(slot, x, f, fragment, c, row_at);
  } else if constexpr (Weights::kPack == 1) {
    auto row = row_at(0);
    multiply_fragment<Stage>(slot.w[f], row, f, c);
  } else if constexpr (Weights::kScaleRows == 0) {
#pragma unroll
    for (int i = 0; i < Weights::kPack; i++)
      multiply_fragment<Stage>(unpack<Weights>(slot.w[f], i), row_at(i), i, c);
  } else {
    constexpr int kGranules = Weights::kGranules, kEach = Weights::kPack / kGranules;  // steps of a granule
#pragma unroll
    for (int g = 0; g < kGranules; g++) {
      UnitSums<Stage> sums = {};
#pragma unroll
      for (int i = g * kEach; i < (g + 1) * kEach; i++)
        multiply_fragment<Stage>(unpack<Weights>(slot.w[f], i), row_at(i), 0, sums);
#pragma unroll
      for (int set = 0; set < OperandLayout<Stage>::kSets; set++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float& to = c[set][f & 1][i];
          to = fused(slot.records[f].scales.at(g, i), sums[set][0][i], to);
        }
    }
  }
}

// Fragments [first, last) of a ring slot, the unit's from number `fragment` on. kKnown: it is, and so are the operands'
// registers.
template <class Stage, bool kKnown>
KOG_DEVICE void multiply_fragments(const SlotOf<Stage>& slot, const Operands<Stage>& x, int first, int last,
                                   int fragment, UnitSums<Stage>& c) {
  using Weights = typename Stage::Weights;
#pragma unroll
  for (int f = first; f < last; f++) {
    int number = fragment + f - first;
    auto row_at = [&](int n) {
      int step = number * Weights::kPack + n;
      return kKnown ? x.at(step) : x.load(step);
    };
    if constexpr (Weights::kInteger && kColumns == 1 && kOneScale<Weights>) {
      auto row = row_at(0);
      if (f % 2 == 0 && f + 1 < last)
        multiply_pair_of_one<Stage, true>(slot, x, f, row, row_at(Weights::kPack), c);
      else if (f % 2 == 0 || f == first)
        multiply_pair_of_one<Stage, false>(slot, x, f, row, row, c);
    } else {
      multiply_steps<Stage>(slot, x, f, number, c, row_at);
    }
  }
}

// Multiply the period's ring slot i. kKnown: i is, and so are the operands' registers.
template <class Stage, bool kKnown>
KOG_DEVICE void multiply_ring_slot(Block& b, const SlotOf<Stage>& slot, const Operands<Stage>& x,
                               int i, int left, UnitSums<Stage>& c, float* to) {
  using S = OperandLayout<Stage>;
  constexpr int kEach = Stage::kUnitFragments, kPeriod = Stage::kPeriod;
#pragma unroll
  for (int f = 0; f < kFragments; f++) {
    int at = i * kFragments + f, fragment = kPeriod == 1 ? at : at % kEach;
    if (f == 0 || (kPeriod > 1 && fragment == 0)) {
      int end = f + kEach - fragment, last = kPeriod == 1 || end > kFragments ? kFragments : end;
      multiply_fragments<Stage, kKnown>(slot, x, f, last, fragment, c);
    }
    if (kPeriod > 1 && fragment == kEach - 1) {
      int done = at / kEach;
      if (done < left) put_sums<Stage>(b, c, to + done * S::kUnitWords);
#pragma unroll
      for (int set = 0; set < S::kSets; set++)
#pragma unroll
        for (int j = 0; j < 4; j++) c[set][0][j] = c[set][1][j] = 0;
    }
  }
}

// Operands in memory, of a unit's last ring slots: some are on their way while others are
// multiplied. All of them have been received (columns/layer.h), and no block overwrites them meanwhile: for
// that it waits for the rows that this one sends behind them. Of a unit whose first kHead fragments came in the slot of
// the one before: of its kSlots slots behind those, and of kTail fragments of one more.
template <class Stage, int kHead = 0, int kSlots = kPeriodSlots<Stage>, int kTail = 0>
struct Reads {
  using Row = typename Operands<Stage>::Row;
  static constexpr int kSlotSteps = kog::kSlotSteps<Stage>, kReadSlots = Stage::kReadSlots,
                       kPack = Stage::Weights::kPack;
  static constexpr int kFirst = kSlots - Stage::kRead / kSlotSteps;  // ring slot
  static_assert(Stage::kRead % (kReadSlots * kSlotSteps) == 0);      // so that rows[0] are the tail's
  static_assert(kFirst >= 0 && kTail < kFragments);
  Row rows[kReadSlots][kSlotSteps];

  KOG_DEVICE explicit Reads(const Operands<Stage>& x) {
#pragma unroll
    for (int n = 0; n < kReadSlots; n++) ask(x, n, kFirst + n);
  }
  KOG_DEVICE void ask(const Operands<Stage>& x, int n, int slot) {
    const u32* from = x.in_memory + (kHead * kPack + slot * kSlotSteps) * OperandLayout<Stage>::kStepWords;
#pragma unroll
    for (int f = 0; f < kSlotSteps; f++)
      if (kTail == 0 || f < kTail * kPack || slot < kSlots)
        load_row(from + f * OperandLayout<Stage>::kStepWords, rows[n][f]);
  }
  // Fragment f of a slot of the ring, as rows[n] have its operands.
  KOG_DEVICE void multiply_one(const SlotOf<Stage>& weights, const Operands<Stage>& x, int n, int slot, int f,
                               UnitSums<Stage>& c) const {
    multiply_steps<Stage>(weights, x, f, kHead + slot * kFragments + f, c, [&](int i) {
      Row row = rows[n][f * kPack + i];
#pragma unroll
      for (int j = 0; j < OperandLayout<Stage>::kRowWords; j++) row.w[j] = operand_of(row.w[j]);
      if constexpr (Stage::Weights::kInteger) x.make_bytes(row, kHead * kPack + slot * kSlotSteps + f * kPack + i);
      return row;
    });
  }
  // The last slot, of which the kTail fragments are the unit's, stays in `last`.
  KOG_DEVICE void multiply(Block& b, Ring& ring, const Operands<Stage>& x, UnitSums<Stage>& c, SlotOf<Stage>& last) {
#pragma unroll 1
    for (int first = kFirst; first < kSlots; first += kReadSlots) {
#pragma unroll
      for (int n = 0; n < kReadSlots; n++) {
        SlotOf<Stage> weights;
        weights.template take<Stage>(b, ring);
#pragma unroll
        for (int f = 0; f < kFragments; f++) multiply_one(weights, x, n, first + n, f, c);
        int next = first + n + kReadSlots;
        if (next < kSlots + (kTail > 0)) ask(x, n, next);
      }
    }
    if constexpr (kTail > 0) {
      last.template take<Stage>(b, ring);
#pragma unroll
      for (int f = 0; f < kTail; f++) multiply_one(last, x, 0, kSlots, f, c);
    }
  }
};

// The sums of one period whose units are long and end within ring slots, of which `left` are there: for each unit a
// loop of whole slots, so that code is no longer than units are many. `slot`: the one in hand, whose last fragments are
// this unit's first.
template <class Stage, int kUnit>
KOG_DEVICE void multiply_long_units(Block& b, Ring& ring, const Operands<Stage>& x, int left, float* to,
                                    SlotOf<Stage>& slot) {
  constexpr int kEach = Stage::kUnitFragments, kPack = Stage::Weights::kPack, kBegun = kUnit * kEach % kFragments;
  constexpr int kHead = kBegun > 0 ? kFragments - kBegun : 0;
  constexpr int kSlots = (kEach - kHead) / kFragments, kTail = (kEach - kHead) % kFragments;
  using OfMemory = Reads<Stage, kHead, kSlots, kTail>;
  static_assert(kHead * kPack <= Operands<Stage>::kLast);
  // Whole slots whose operands are not in memory, and of those the ones whose operands are in registers.
  constexpr int kStaged = Stage::kRead > 0 ? OfMemory::kFirst : kSlots;
  constexpr int kKnown = kLeast<(Stage::kHeld - kHead * kPack + kSlotSteps<Stage> - 1) / kSlotSteps<Stage>, kStaged>;
  if (kUnit >= left) return;
  UnitSums<Stage> c = {};
  multiply_fragments<Stage, true>(slot, x, kBegun, kBegun + kHead, 0, c);
#pragma unroll
  for (int i = 0; i < kKnown; i++) {
    SlotOf<Stage> weights;
    weights.template take<Stage>(b, ring);
    multiply_fragments<Stage, true>(weights, x, 0, kFragments, kHead + i * kFragments, c);
  }
  auto staged = [&] {
#pragma unroll 1
    for (int i = kKnown; i < kStaged; i++) {
      SlotOf<Stage> weights;
      weights.template take<Stage>(b, ring);
      multiply_fragments<Stage, false>(weights, x, 0, kFragments, kHead + i * kFragments, c);
    }
  };
  if constexpr (Stage::kRead > 0) {
    OfMemory reads(x);
    staged();
    reads.multiply(b, ring, x, c, slot);
  } else {
    staged();
    if constexpr (kTail > 0) {
      slot.template take<Stage>(b, ring);
      multiply_fragments<Stage, true>(slot, x, 0, kTail, kHead + kSlots * kFragments, c);
    }
  }
  put_sums<Stage>(b, c, to + kUnit * OperandLayout<Stage>::kUnitWords);
  if constexpr (kUnit + 1 < Stage::kPeriod) multiply_long_units<Stage, kUnit + 1>(b, ring, x, left, to, slot);
}

// The sums of one period, of whose units `left` are there. next(i): ring slot i of it. `kLaidOut`: each has
// code of its own, as those that were taken ahead need it: registers have no index.
template <class Stage, bool kLaidOut, class Next>
KOG_DEVICE void multiply_period(Block& b, Ring& ring, const Operands<Stage>& x, int left, float* to,
                                Next next) {
  constexpr int kPeriod = Stage::kPeriod, kSlots = kPeriodSlots<Stage>;
  constexpr int kKnown = kLaidOut ? kSlots : kKnownSlots<Stage>;
  UnitSums<Stage> c = {};
#pragma unroll
  for (int i = 0; i < kKnown; i++) {
    if (kPeriod > 1 && i * kFragments / Stage::kUnitFragments >= left) break;
    SlotOf<Stage> weights = next(i);
    multiply_ring_slot<Stage, true>(b, weights, x, i, left, c, to);
  }
  constexpr int kHere = Stage::kRead > 0 ? Operands<Stage>::kLast / kSlotSteps<Stage> : kSlots;
  auto rest = [&] {
#pragma unroll 1
    for (int i = kKnown; i < kHere; i++) {
      SlotOf<Stage> weights = next(i);
      multiply_ring_slot<Stage, false>(b, weights, x, i, left, c, to);
    }
  };
  if constexpr (Stage::kRead > 0) {
    static_assert(kPeriod == 1);
    Reads<Stage> reads(x);
    rest();
    SlotOf<Stage> none;
    reads.multiply(b, ring, x, c, none);
  } else {
    rest();
  }
  if constexpr (kPeriod == 1) put_sums<Stage>(b, c, to);
}

// Sums of `units` units, all warps together; takes whole slots from the ring, those ahead first. `to`: where
// the warp's of the first one go.
template <class Stage, class Taken>
KOG_DEVICE void multiply(Block& b, Ring& ring, int units, const Operands<Stage>& x, const Taken& taken,
                         float* to) {
  constexpr int kPeriod = Stage::kPeriod;
  if constexpr (Stage::kLongUnits) {
    static_assert(Taken::kCount == 0);
#pragma unroll 1
    for (int n = 0; n < units; n += kPeriod) {
      SlotOf<Stage> slot;
      multiply_long_units<Stage, 0>(b, ring, x, units - n, to + n * OperandLayout<Stage>::kUnitWords, slot);
    }
  } else {
    auto next_of_ring = [&] {
      SlotOf<Stage> weights;
      weights.template take<Stage>(b, ring);
      return weights;
    };
#pragma unroll
    for (int p = 0; p < Taken::kPeriods; p++) {
      int left = (p + 1) * kPeriod <= Taken::kSure ? kPeriod : units - p * kPeriod;
      float* sums = to + p * kPeriod * OperandLayout<Stage>::kUnitWords;
      multiply_period<Stage, true>(b, ring, x, left, sums, [&](int i) {
        int n = p * kPeriodSlots<Stage> + i;
        if constexpr (Taken::kCount == 0)
          return next_of_ring();
        else
          return n < Taken::kCount ? taken.slots[n] : next_of_ring();
      });
    }
#pragma unroll 1
    for (int n = Taken::kUnits; n < units; n += kPeriod)
      multiply_period<Stage, false>(b, ring, x, units - n, to + n * OperandLayout<Stage>::kUnitWords,
                                    [&](int) { return next_of_ring(); });
  }
}

}  // namespace kog
