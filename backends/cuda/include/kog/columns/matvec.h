// Weight @ activations of kColumns tokens: a warp multiplies each fragment of the stream
// (../matvec.h) with a set of tokens an instruction, which are columns of the other operand:
//
//   wide     2 tokens: [high even, low even, high odd, low odd] of one, then of the other
//   narrow   up to 4 tokens: [even, odd] of each
//
// Every token's sums are made by the operations, in the order, of a kernel of one token: who shares
// the step does not change a bit of them. Operands of a step of K, in memory or in scratch: the
// sets one after the other, a lane's words side by side. A warp holds those of its first steps in
// registers.
//
//   partial sums [part of K][unit][token][row]; a warp adds and finishes a unit
#pragma once
#include <kog/columns/flags.h>
#include <kog/matvec.h>

namespace kog::columns {

constexpr int kOperandWords = kLaneWords / 2;  // of one lane, step and set
constexpr int kPadWords = 8;  // between steps of wide operands: their stagers meet other banks

template <class Stage>
struct Cut {
  static_assert(Stage::kFragmentRows == 8);
  static constexpr int kTokens = Stage::kWide ? 2 : kColumns < 4 ? kColumns : 4;  // of a set
  static constexpr int kSets = kColumns / kTokens;
  static constexpr int kSetWords = kTokens * kFragK / 2 * (Stage::kWide ? 2 : 1);
  static constexpr int kLanes = kSetWords / kOperandWords;  // the others repeat them
  static constexpr int kStepWords = kSets * kSetWords;
  static constexpr int kStaged = kStepWords + (Stage::kWide ? kPadWords : 0);  // words in scratch
  static constexpr int kUnitWords = Stage::kUnitRows * kColumns;  // sums
  static constexpr int kItems = (kUnitWords + 31) / 32;           // of a lane that finishes a unit

  // The first value of K that a warp multiplies, and how many there are.
  KOG_DEVICE static int first_value(const Block& b) {
    return b.warp % Stage::kParts * Stage::kSteps * kFragK;
  }
  static constexpr int kPartValues = Stage::kSteps * kFragK;
};

// A lane's words of a step and set, as another block has stored them; and into shared memory.
template <int N>
KOG_DEVICE void load_operand(const u32* from, Words<N>& v) {
  if constexpr (N == 2) {
    uint2 w = load_relaxed2(from);
    v.w[0] = w.x, v.w[1] = w.y;
  } else {
    v.w[0] = load_relaxed(from);
  }
}
template <int N>
KOG_DEVICE void store_operand(u32* to, const Words<N>& v) {
  if constexpr (N == 2)
    *reinterpret_cast<uint2*>(to) = {v.w[0], v.w[1]};
  else
    to[0] = v.w[0];
}

// Steps [0, kSteps) of narrow words at `from` as operands, once those of the lanes' own columns
// carry the phase. mine(step, set, word): whether the lane's word of them is ever written.
template <class S, int kSteps, class Mine>
KOG_DEVICE void receive(Block& b, Step step, const u32* from, u32 phase,
                        Words<kOperandWords> (&w)[kSteps][S::kSets], Mine mine) {
  ask_until_ready(b, step, place_of(b, from), phase ^ 1, phase, [&] {
    u32 bad = 0;
#pragma unroll
    for (int i = 0; i < kSteps; i++)
#pragma unroll
      for (int set = 0; set < S::kSets; set++)
        load_operand(from + i * S::kStepWords + set * S::kSetWords, w[i][set]);
#pragma unroll
    for (int i = 0; i < kSteps; i++)
#pragma unroll
      for (int set = 0; set < S::kSets; set++)
#pragma unroll
        for (int j = 0; j < kOperandWords; j++) {
          bad |= mine(i, set, j) ? w[i][set].w[j] ^ phase : 0;
          w[i][set].w[j] = operand_of(w[i][set].w[j]);
        }
    return any_lane((bad & 1) != 0);
  });
}

// What a warp's part of K is multiplied with.
template <class Stage>
struct Operands {
  using S = Cut<Stage>;
  static constexpr int kFirst = Stage::kWide ? 0 : Stage::kHeld;  // step in scratch
  Activation held[Stage::kHeld > 0 ? Stage::kHeld : 1][S::kSets];
  u32* staged;  // this lane's words of step kFirst, set 0

  KOG_DEVICE explicit Operands(const Block& b) {
    staged = reinterpret_cast<u32*>(b.scratch) +
             b.warp % Stage::kParts * (Stage::kSteps - kFirst) * S::kStaged +
             b.in_warp % S::kLanes * kOperandWords;
  }
  KOG_DEVICE u32* place(int step, int set) const {
    return staged + (step - kFirst) * S::kStaged + set * S::kSetWords;
  }
  KOG_DEVICE Activation load(int step, int set) const {
    return Activation::load(reinterpret_cast<const u8*>(place(step, set)));
  }
  KOG_DEVICE Activation at(int step, int set) const {
    if (step < Stage::kHeld) return held[step][set];
    return load(step, set);
  }
  KOG_DEVICE void store(int step, int set, const Activation& v) const {
    store_operand(place(step, set), v);
  }
};

// Where a narrow operand's word `word` of K (two values) is for a token, in words from the first
// step.
struct Narrow {
  static constexpr bool kWide = false;
  static constexpr int kUnitRows = 8, kSteps = 1, kParts = kWarps, kFragmentRows = 8;
};
KOG_DEVICE int narrow_place(int word, int token) {
  using S = Cut<Narrow>;
  int in_step = word % (kFragK / 2), in_lane = in_step % kLaneWords;
  int lane = (token % S::kTokens * 2 + in_lane % 2) * 4 + in_step / kLaneWords;
  return word / (kFragK / 2) * S::kStepWords + token / S::kTokens * S::kSetWords +
         lane * kOperandWords + in_lane / 2;
}

// The sums of one unit, part of K and set to shared memory; `to` is the warp's rows of the unit.
template <class Stage>
KOG_DEVICE void put_sums(const Block& b, const float (&c)[2][4], int set, float* to) {
  int quarter = b.in_warp % 4, row = b.in_warp / 4;
  float even = c[0][0] + c[1][0];
  if constexpr (Stage::kWide) {
    float odd = c[0][2] + c[1][2];
    even += c[0][1] + c[1][1];
    odd += c[0][3] + c[1][3];
    float sum = quarter % 2 == 0 ? even : odd;
    sum += shuffle_xor(sum, 1);
    if (quarter % 2 == 0) to[(2 * set + quarter / 2) * Stage::kUnitRows + row] = sum;
  } else {
    constexpr int kTokens = Cut<Stage>::kTokens;
    float odd = c[0][3] + c[1][3];
    if (quarter < kTokens) to[(kTokens * set + quarter) * Stage::kUnitRows + row] = even + odd;
  }
}

// The sums of one period, of whose units `left` are there.
template <class Stage>
KOG_DEVICE void multiply_period(Block& b, Ring& ring, const Operands<Stage>& x, int left,
                                float* to) {
  using S = Cut<Stage>;
  constexpr int kSteps = Stage::kSteps, kPeriod = Stage::kPeriod;
  // Operands in registers need indices that are known, and so does a period of several units.
  constexpr int kUnrolled = kPeriod > 1 || Stage::kHeld > 0 ? kPeriodChunks<Stage> : 1;
  float c[S::kSets][2][4] = {};
#pragma unroll kUnrolled
  for (int i = 0; i < kPeriodChunks<Stage>; i++) {
    if (kPeriod > 1 && i * kFragments / kSteps >= left) break;
    Chunk<Stage> chunk;
    chunk.take(b, ring);
#pragma unroll
    for (int f = 0; f < kFragments; f++) {
      int at = i * kFragments + f, step = kPeriod == 1 ? at : at % kSteps;
#pragma unroll
      for (int set = 0; set < S::kSets; set++)
        multiply_add<kF16>(c[set][f & 1], chunk.w[f].w, x.at(step, set).w);
      if (kPeriod > 1 && step == kSteps - 1) {
        int done = at / kSteps;
#pragma unroll
        for (int set = 0; set < S::kSets; set++) {
          if (done < left) put_sums<Stage>(b, c[set], set, to + done * S::kUnitWords);
#pragma unroll
          for (int j = 0; j < 4; j++) c[set][0][j] = c[set][1][j] = 0;
        }
      }
    }
  }
  if constexpr (kPeriod == 1)
#pragma unroll
    for (int set = 0; set < S::kSets; set++) put_sums<Stage>(b, c[set], set, to);
}

// One value of a unit: its row, of the stage, and whose token it is of. `there`: neither padding
// nor a column without a request.
struct Item {
  int row, column;
  bool there;
};
template <class Stage>
KOG_DEVICE Item item_of(const Block& b, int unit, int i) {
  int n = i * 32 + b.in_warp;
  Item item = {unit * Stage::kUnitRows + n % Stage::kUnitRows, n / Stage::kUnitRows, false};
  item.there = item.row < Stage::kRows && item.column < b.p.num_seats;
  return item;
}

// One batch of units: a warp finishes one. before(item) -> what its owner asks for early, then
// after(i, item, sum, asked) by whole warps, rows side by side in lanes, then done(unit).
template <class Stage, class Before, class After, class Done>
KOG_DEVICE void run_batch(Block& b, Ring& ring, int& turn, int first, int count,
                          const Operands<Stage>& x, Before before, After after, Done done) {
  using S = Cut<Stage>;
  static_assert(Stage::kBatch <= kWarps);
  float* partials = b.partials + (turn++ & 1) * (kPartialBytes / 8);
  int mine = (b.warp + kWarps - first % kWarps) % kWarps, unit = first + mine;
  decltype(before(Item{})) asked[S::kItems];
  if (mine < count)
#pragma unroll
    for (int i = 0; i < S::kItems; i++) asked[i] = before(item_of<Stage>(b, unit, i));
  constexpr int kBatchWords = Stage::kBatch * S::kUnitWords;
  float* to = partials + b.warp % Stage::kParts * kBatchWords + b.warp / Stage::kParts * 8;
  for (int n = 0; n < count; n += Stage::kPeriod)
    multiply_period<Stage>(b, ring, x, count - n, to + n * S::kUnitWords);
  sync_consumers();
  if (mine >= count) return;
#pragma unroll
  for (int i = 0; i < S::kItems; i++) {
    Item item = item_of<Stage>(b, unit, i);
    float sum = 0;
    if (item.there)
#pragma unroll
      for (int part = 0; part < Stage::kParts; part++)
        sum += partials[part * kBatchWords + mine * S::kUnitWords + i * 32 + b.in_warp];
    after(i, item, sum, asked[i]);
  }
  done(unit);
}

// All units of the block, batch by batch.
template <class Stage, class Before, class After, class Done>
KOG_DEVICE void run_units(Block& b, Ring& ring, int& turn, Units units, const Operands<Stage>& x,
                          Before before, After after, Done done) {
  if (units.first == units.last) return sync_consumers();  // what a stage staged is never overtaken
  for (int first = units.first; first < units.last; first += Stage::kBatch) {
    int left = units.last - first;
    run_batch<Stage>(b, ring, turn, first, left < Stage::kBatch ? left : Stage::kBatch, x, before,
                     after, done);
  }
}

}  // namespace kog::columns
