// What weights meet: activations of kColumns tokens, a set of them an instruction, which are columns of its
// other operand:
//
//   wide     2 tokens: [high even, low even, high odd, low odd] of one, then of the other
//   narrow   up to 4 tokens: [even, odd] of each
//
// or, of fragments of four rows, which are two steps of K long, with half as many: even of the first
// step, of the second, then odd, each of high and low (wide) or of both tokens (narrow).
//
// Eight tokens' high and low parts fill the other side of the instruction (kSwapped): they are its 16 rows
// then, and the weights, first the even words, then the odd ones, its columns.
//
// Whole numbers (bytes.h) meet a token's bytes:
//
//   one token   as the columns [high, low] of each of a fragment's steps: a column without the step in hand has zeros;
//               where all steps share a scale as those of even and of odd steps, twice
//   several     as the rows: the high bytes of each, then the low ones; the weights are the columns
//
// In scratch they are [step][high, low][thread of four][8 values], or [step][token][thread of four][high and low of
// four values, of the next four]; in memory, as 16-bit words, [step][token][32 values].
//
// Other operands of a step of K, in memory or in scratch, are [set][thread][word] (wide: as fragments of eight rows
// take them, for those of four pick theirs), [even, odd][thread][word] (swapped) or [thread][set][word]
// (narrow). A warp holds those of its first steps in registers, or, of one token, all if they are few; those
// of its last ones (kRead), where scratch has no room, stay in memory and are read for each unit, some ring
// slots ahead (matvec.h).
#pragma once
#include <kog/bytes.h>
#include <kog/values.h>

namespace kog {

constexpr int kThreadWords = kFragK / 8;
constexpr int kFragmentBytes = 32 * kThreadWords * 4;  // of one warp, whatever the weights are
using Fragment = WordVector<kThreadWords>;

constexpr int kOperandWords = kThreadWords / 2;  // of one thread, step and set
constexpr bool kSwapped = kColumns == 8 && kFragK == 32 && QkvProj::kFragmentRows == 8 &&
                          GateUpProj::kFragmentRows == 8 && LmHead::kFragmentRows == 8;
// A wide operand's word of a step lies in scratch at its place exclusive or this: the threads of a warp
// that stages four steps at once meet banks of their own.
KOG_DEVICE int bank_swizzle(int step) {
  return kColumns == 1 ? 0 : kSwapped ? step % 2 * 16 : step % 4 * 8;
}

template <class Stage>
struct OperandLayout {
  static constexpr int kHalves = 8 / Stage::kFragmentRows;  // ../matvec.h
  static constexpr int kStepValues = kHalves * kFragK;  // of K
  static constexpr bool kInteger = Stage::Weights::kInteger;
  static_assert(!kInteger || (kFragK == 32 && kHalves == 1));
  static constexpr bool kSwaps = Stage::kWide && kSwapped && !kInteger;
  static constexpr bool kTwoRows = kSwaps || (kInteger && kColumns > 1);  // whose sums a thread has
  static constexpr int kMostTokens = kInteger ? kColumns : (Stage::kWide ? 2 : 4) / kHalves;
  static constexpr int kTokens = kColumns < kMostTokens ? kColumns : kMostTokens;  // of a set
  // Sets of tokens or, swapped, of words: the even and the odd ones.
  static constexpr int kSets = kSwaps ? 2 : kColumns / kTokens;
  static constexpr int kSetOperands =
      kInteger ? (kColumns == 1 ? 2 : 4) : kSwaps ? 2 * kOperandWords : kOperandWords;  // words of a thread
  static constexpr int kRowWords = kSets * kSetOperands;  // of one thread and step
  static constexpr int kStepWords = kColumns * kStepValues / 2 * (Stage::kWide && !kInteger ? 2 : 1);
  static constexpr int kSetWords = kStepWords / kSets;
  static constexpr int kHolders = kSetWords / kSetOperands;  // the others repeat them
  static constexpr int kThreadStride = Stage::kWide ? kSetOperands : kRowWords;
  static constexpr int kUnitWords = Stage::kUnitRows * kColumns;  // sums
  // A warp finishes a piece of a unit at a time, a sum a thread.
  static constexpr int kPieces = kUnitWords > 32 ? kUnitWords / 32 : 1;
  static constexpr int kPieceWords = kUnitWords / kPieces;
  static_assert(kPieceWords <= 32 && kWarps % kPieces == 0);
  static constexpr int kRounds = (Stage::kBatch * kPieces + kWarps - 1) / kWarps;  // of a batch
  // Partial sums lie in scratch behind the operands, or in the place of those that are held: each part's in
  // that of its own, or (kSumsOver) in that of others and behind them.
  static constexpr int kPartStride =
      Stage::kSumsInPlace ? Stage::kSteps * kStepWords : Stage::kBatch * kUnitWords;
  static_assert(Stage::kBatch * kUnitWords <= kPartStride);

  // Of a fragment, row by row, this thread's bytes.
  KOG_DEVICE static int offset_in_fragment(const Block& b) {
    int row = kHalves == 1 ? b.in_warp / 4 : b.in_warp / 4 % 4 * 2 + b.in_warp / 16;
    return (4 * row + b.in_warp % 4) * (kThreadWords * 4);
  }
  // The first value of K that a warp multiplies, and how many there are.
  KOG_DEVICE static int first_value(const Block& b) {
    return b.warp % Stage::kParts * kPartValues;
  }
  static constexpr int kPartValues = Stage::kSteps * kStepValues;

  KOG_DEVICE static int holder(int thread) { return thread % kHolders; }
  // Which narrow operands a thread has: of which token of a set, and the first value of a step.
  KOG_DEVICE static int token(int thread) {
    if constexpr (kInteger) return thread / 4;
    return kHalves == 1 ? thread / 8 : thread / 4 % 2;
  }
  KOG_DEVICE static int value(int thread) {
    if constexpr (kInteger) return thread % 4 * 8;
    int odd = kHalves == 1 ? thread / 4 % 2 : thread / 16, half = kHalves == 1 ? 0 : thread / 8 % 2;
    return half * kFragK + thread % 4 * (kFragK / 4) + 2 * odd;
  }
  // The thread that has word `word` (two values) of a step, of a token of a set.
  KOG_DEVICE static int thread_of(int word, int token) {
    if constexpr (kInteger) return 4 * token + word / 4;
    int in_half = word % (kFragK / 2), odd = in_half % 2, half = word / (kFragK / 2);
    int column = kHalves == 1 ? 2 * token + odd : 4 * odd + 2 * half + token;
    return 4 * column + in_half / kThreadWords;
  }
  // Which of that thread's words it is; and of a thread's word j, the first value from the thread's first on, and the
  // set.
  KOG_DEVICE static int place_of(int word) { return kInteger ? word % 4 : word % kThreadWords / 2; }
  KOG_DEVICE static int value_of(int j) { return kInteger ? 2 * j : 4 * (j % kOperandWords); }
  KOG_DEVICE static int set_of(int j) { return kInteger ? 0 : j / kOperandWords; }
};

// How wide operands lie, whatever the stage.
struct Wide {
  struct Weights {
    static constexpr int kInteger = 0;
  };
  static constexpr bool kWide = true, kSumsInPlace = false, kSumsOver = false;
  static constexpr int kUnitRows = 8, kSteps = 1, kUnitFragments = 1, kParts = kWarps, kFragmentRows = 8, kHeld = 0,
                       kBatch = 1;
};

// Where word `word` (two values) of a step is for a token, its high and low parts, in words from the step's.
struct WideOffset {
  int high, low;

  KOG_DEVICE WideOffset(int step, int token, int word) {
    int quarter = word / kThreadWords, odd = word % 2, at = word % kThreadWords / 2;
    int swizzle = bank_swizzle(step);
    if constexpr (kSwapped) {
      high = odd * OperandLayout<Wide>::kSetWords + (((token * 4 + quarter) * 4 + 2 * at) ^ swizzle);
      low = high + 1;
    } else {
      int set = token / 2 * OperandLayout<Wide>::kSetWords, thread = (token % 2 * 4 + odd * 2) * 4 + quarter;
      high = set + ((thread * kOperandWords + at) ^ swizzle);
      low = set + (((thread + 4) * kOperandWords + at) ^ swizzle);
    }
  }
};

// One value of a column's operands, element e of a stage's inputs.
KOG_DEVICE void stage_value(const Block& b, int column, int e, float v) {
  u32* step = reinterpret_cast<u32*>(b.scratch) + e / kFragK * OperandLayout<Wide>::kStepWords;
  WideOffset at(e / kFragK, column, e % kFragK / 2);
  HighLow parts(v, 0);
  reinterpret_cast<u16*>(step + at.high)[e % 2] = static_cast<u16>(parts.high);
  reinterpret_cast<u16*>(step + at.low)[e % 2] = static_cast<u16>(parts.low);
}

// Magnitudes of E2M1 times two, of the first four (narrow.h). A number that the compiler knows, or knows to be that of
// a whole warp, is moved to another register for each instruction that takes it (benchmarks/cuda-log.md#bytes).
constexpr u32 kE2m1Table = 0x03020100u;

// Whether a warp's first steps of wide operands are in registers before the others take their place in scratch.
template <class Stage>
constexpr bool kHeldFirst = Stage::kWide && kColumns > 1 && Stage::kHeld > 0 && Stage::kHeld < Stage::kSteps;

// What a warp's part of K is multiplied with.
template <class Stage, bool kBytesOfOne = Stage::Weights::kInteger && kColumns == 1>
struct Operands {
  using S = OperandLayout<Stage>;
  using Row = WordVector<S::kRowWords>;  // a thread's words of a step
  // The first step in scratch; those of one token all come by it, and wide ones, which may take turns.
  static constexpr int kFirst = (Stage::kWide || kColumns == 1) && !kHeldFirst<Stage> ? 0 : Stage::kHeld;
  static constexpr int kLast = Stage::kSteps - Stage::kRead;      // behind those
  // Fragments of four rows pick each token's words from among those of two, and of two steps.
  static constexpr bool kPicks = Stage::kWide && S::kHalves > 1;
  Row held[Stage::kHeld > 0 ? Stage::kHeld : 1];
  u32* staged;           // words of step kFirst
  const u32* in_memory;  // this thread's words of step 0, where some steps are read
  u32* scales;           // of whole numbers: the thread's token's, of the part's first fragment
  u32 table = kE2m1Table;
  int offset;            // where this thread's begin in a step
  int first;             // wide: the first step, which sets the swizzle

  KOG_DEVICE explicit Operands(const Block& b) {
    int part = b.warp % Stage::kParts;
    staged = reinterpret_cast<u32*>(b.scratch + Stage::kOperandsAt) + part * (kLast - kFirst) * S::kStepWords;
    offset = b.in_warp % S::kHolders * S::kThreadStride;
    first = part * Stage::kSteps;
    if constexpr (S::kInteger)
      scales = reinterpret_cast<u32*>(b.scratch) + scale_index<Stage>(first, S::token(b.in_warp % S::kHolders));
    if constexpr (S::kHalves > 1 && (kPicks || kColumns == 1)) {
      int column = b.in_warp / 4, odd = column / 4, half = column / 2 % 2, low = column % 2;
      offset = (4 * (Stage::kWide ? 2 * odd + low : odd) + b.in_warp % 4) * kOperandWords;
      staged += half * (S::kStepWords / S::kHalves);
      first = S::kHalves * first + half;
    }
  }
  // Of those that are read from memory, whose first words are the lane's.
  KOG_DEVICE void find_in_memory(const Block& b, const u32* words) {
    if constexpr (Stage::kRead > 0)
      in_memory = words + S::first_value(b) / S::kStepValues * S::kStepWords + offset;
  }
  KOG_DEVICE u32* words(int step) const {
    int at = Stage::kWide && !S::kInteger ? offset ^ bank_swizzle(first + step) : offset;
    return staged + (step - kFirst) * S::kStepWords + at;
  }
  // Of one token, among those of two.
  KOG_DEVICE const u32* picked_words(int step, int token) const {
    int at = offset ^ bank_swizzle(first + S::kHalves * step) ^ token % 2 * (16 * kOperandWords);
    return staged + step * S::kStepWords + token / 2 * OperandLayout<Wide>::kSetWords + at;
  }
  KOG_DEVICE Row load(int step) const {
    // A thread's words of all sets lie side by side, or of one.
    constexpr int kRun = Stage::kWide ? S::kSetOperands : S::kRowWords < 4 ? S::kRowWords : 4;
    constexpr int kStride = Stage::kWide ? S::kSetWords : kRun;
    Row row;
#pragma unroll
    for (int i = 0; i < S::kRowWords / kRun; i++) {
      const u32* from;
      if constexpr (kPicks)
        from = picked_words(step, i);
      else
        from = words(step) + i * kStride;
      auto v = WordVector<kRun>::load(from);
#pragma unroll
      for (int j = 0; j < kRun; j++) row.w[i * kRun + j] = v.w[j];
    }
    return row;
  }
  KOG_DEVICE Row at(int step) const { return step < Stage::kHeld ? held[step] : load(step); }
  KOG_DEVICE void store(int step, const Row& v) const { v.store(words(step)); }
  // Operands that all come by the scratch, into registers if that is where they belong.
  KOG_DEVICE void hold() {
#pragma unroll
    for (int step = 0; step < Stage::kHeld; step++) held[step] = load(step + kFirst);
  }
  // Of whole numbers: a fragment's scales, or (kSums) the sums behind them.
  static constexpr int kScales = S::kInteger ? kFragmentScales<typename Stage::Weights> : 1;
  KOG_DEVICE WordVector<kScales> of_fragment(int fragment, int behind = 0) const {
    return WordVector<kScales>::load(scales + fragment * (kColumns * kScales) + behind);
  }
  // Words of steps from `first` on as their bytes, and scales and sums to scratch, by whole warps; or by the scale that
  // is there.
  template <int kSteps>
  KOG_DEVICE void put_bytes(Row (&rows)[kSteps], int first) const {
    constexpr int kShared = Stage::Weights::kSharedSteps;
    static_assert(kSteps % kShared == 0);
#pragma unroll
    for (int i = 0; i < kSteps; i += kShared) {
      float v[S::kRowWords * 2];
      u32 largest = 0, sum = 0;
#pragma unroll
      for (int n = 0; n < kShared; n++) {
        values_of(rows[i + n], v);
        u32 other = largest_of(v);
        largest = other > largest ? other : largest;
      }
      WholeScale scale(largest_of_threads<4>(largest));
#pragma unroll
      for (int n = 0; n < kShared; n++) {
        values_of(rows[i + n], v);
        sum += bytes_of(v, scale.inverse, rows[i + n]);
      }
      if constexpr (kSums<typename Stage::Weights>) sum = sum_of_threads<4>(sum);
      u32* to = scales + scale_index<Stage>(first + i, 0);
      to[0] = bits_of(scale.scale);
      if constexpr (kSums<typename Stage::Weights>) to[Stage::kWholeSumsAt] = sum;
    }
  }
  KOG_DEVICE void make_bytes(Row& row, int step) const {
    float v[S::kRowWords * 2];
    values_of(row, v);
    bytes_of(v, WholeScale::inverse_of(float_of(scales[scale_index<Stage>(step, 0)])), row);
  }
  KOG_DEVICE static void values_of(const Row& row, float (&v)[S::kRowWords * 2]) {
#pragma unroll
    for (int j = 0; j < S::kRowWords; j++) v[2 * j] = low_of(row.w[j]), v[2 * j + 1] = high_of(row.w[j]);
  }
  KOG_DEVICE static u32 bytes_of(const float (&v)[S::kRowWords * 2], float inverse, Row& row) {
    FourBytes first({v[0], v[1], v[2], v[3]}, inverse), second({v[4], v[5], v[6], v[7]}, inverse);
    row.w[0] = first.high, row.w[1] = first.low, row.w[2] = second.high, row.w[3] = second.low;
    return first.sum + second.sum;
  }
};
// Bytes of one token: what a thread has of a fragment is of one step's column, and the scale of the step whose sums
// come to it. Where all steps share a scale the columns are those of even and of odd steps, twice.
template <class Stage>
struct Operands<Stage, true> {
  using S = OperandLayout<Stage>;
  static constexpr int kPack = Stage::Weights::kPack, kScales = kFragmentScales<typename Stage::Weights>;
  static constexpr int kLast = Stage::kSteps;
  // Steps that one product takes, and products of a fragment (narrow.h).
  static constexpr int kAtOnce = Stage::Weights::kCodes == kE2m1 ? 1 : 2, kProducts = kPack / kAtOnce;
  struct Row {
    WordVector<2> w[kProducts];  // zeros where the column is of other steps and scales
    u32 scale, sum;
  };
  static_assert(Stage::kWholeWords == Stage::kUnitFragments * (2 * kProducts + 1 + kSums<typename Stage::Weights>),
                "layout/batches.py counts other registers");
  Row held[Stage::kHeld > 0 ? Stage::kHeld : 1];
  const u32 *staged, *scales;  // the thread's, of the part's first fragment
  int product;                // that the thread's column is of
  bool odd;                   // whether the sums that come to it are of an odd step
  u32 table = kE2m1Table;

  KOG_DEVICE explicit Operands(const Block& b) {
    int first = b.warp % Stage::kParts * Stage::kSteps, column = b.in_warp / 4;
    staged = reinterpret_cast<const u32*>(b.scratch + Stage::kOperandsAt) +
             (first + column / 2 % (kOneScale<typename Stage::Weights> ? 2 : kPack)) * S::kStepWords + column % 2 * 8 + b.in_warp % 4 * 2;
    scales = reinterpret_cast<const u32*>(b.scratch) + scale_index<Stage>(first, 0) + b.in_warp % 4 % kScales;
    product = column / 2 % kPack / kAtOnce;
    odd = b.in_warp % 2 != 0;
    if constexpr (Stage::Weights::kCodes == kE2m1) table += *scales >> 31;  // a scale is not negative
  }
  // Of the fragment that begins with the step.
  KOG_DEVICE Row load(int step) const {
    Row row;
    if constexpr (kOneScale<typename Stage::Weights>) {
#pragma unroll
      for (int n = 0; n < kProducts; n++)
        row.w[n] = WordVector<2>::load(staged + (step + n * kAtOnce) * S::kStepWords);
    } else {
      auto v = WordVector<2>::load(staged + step * S::kStepWords);
#pragma unroll
      for (int n = 0; n < kProducts; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) row.w[n].w[i] = kProducts == 1 || product == n ? v.w[i] : 0;
    }
    const u32* of_fragment = scales + scale_index<Stage>(step, 0);
    row.scale = of_fragment[0];
    row.sum = kSums<typename Stage::Weights> ? of_fragment[Stage::kWholeSumsAt] : 0;
    return row;
  }
  KOG_DEVICE Row at(int step) const { return step < Stage::kHeld ? held[step] : load(step); }
  KOG_DEVICE void hold() {
#pragma unroll
    for (int step = 0; step < Stage::kHeld; step += kPack) held[step] = load(step);
  }
};
template <class Stage>
KOG_DEVICE Operands<Stage> held_operands(const Block& b) {
  static_assert(!kHeldFirst<Stage>, "by the time that all are staged the first ones are not there");
  Operands<Stage> x(b);
  x.hold();
  return x;
}
// A row's words of one set, as the tensor core takes them.
template <class Stage>
KOG_DEVICE WordVector<OperandLayout<Stage>::kSetOperands> of_set(
    const WordVector<OperandLayout<Stage>::kRowWords>& row, int set) {
  constexpr int kWords = OperandLayout<Stage>::kSetOperands;
  WordVector<kWords> v;
#pragma unroll
  for (int j = 0; j < kWords; j++) v.w[j] = row.w[set * kWords + j];
  return v;
}

// Where word `word` (two values) of Stage's inputs is for a token, in words from the first step. Of one token
// they lie in order: its readers share them out.
template <class Stage>
KOG_DEVICE int narrow_offset(int word, int token) {
  using S = OperandLayout<Stage>;
  if constexpr (kColumns == 1) return word;
  int in_step = word % (S::kStepValues / 2);
  return word / (S::kStepValues / 2) * S::kStepWords +
         S::thread_of(in_step, token % S::kTokens) * S::kThreadStride +
         token / S::kTokens * kOperandWords + S::place_of(in_step);
}

constexpr int kColumnWords = kFragK / 4;  // of a column of a step in scratch: a word is two values
// Values side by side from element e on, as bytes of one token; by whole warps, with those that share a scale in threads
// side by side.
template <class Stage, int N>
KOG_DEVICE void put_bytes(const Block& b, int e, const float (&v)[N], bool staged) {
  constexpr int kShared = kSharedValues<typename Stage::Weights>, kSharers = kShared / N;
  WholeScale scale(largest_of_sharers<kSharers>(largest_of(v)));
  u32 sum = 0;
  u32* to = reinterpret_cast<u32*>(b.scratch + Stage::kOperandsAt) +
            e / kFragK * OperandLayout<Stage>::kStepWords + e % kFragK / 4;
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    FourBytes four({v[i], v[i + 1], v[i + 2], v[i + 3]}, scale.inverse);
    sum += four.sum;
    if (staged) to[i / 4] = four.high, to[8 + i / 4] = four.low;
  }
  if constexpr (kSums<typename Stage::Weights>) sum = sum_of_sharers<kSharers>(sum);
  if (staged && e % kShared == 0) put_scale<Stage>(b, e / kFragK, 0, scale, sum);
}

// Four values of a column from element e on, as bytes; by whole warps, with those that share a scale in threads side by
// side.
template <class Stage>
KOG_DEVICE void put_bytes(const Block& b, int column, int e, const float (&v)[4], bool staged) {
  constexpr int kShared = kSharedValues<typename Stage::Weights>, kSharers = kShared / 4;
  WholeScale scale(largest_of_sharers<kSharers>(largest_of(v)));
  FourBytes four(v, scale.inverse);
  u32 sum = 0;
  if constexpr (kSums<typename Stage::Weights>) sum = sum_of_sharers<kSharers>(four.sum);
  if (!staged) return;
  u32* step = reinterpret_cast<u32*>(b.scratch + Stage::kOperandsAt) + e / kFragK * OperandLayout<Stage>::kStepWords;
  *reinterpret_cast<uint2*>(step + column * (kFragK / 2) + e % kFragK / 2) = {four.high, four.low};
  if (e % kShared == 0) put_scale<Stage>(b, e / kFragK, column, scale, sum);
}
// Stage four values times their gains from element e on, by whole warps, of one token; scale_four's sum.
template <class Stage>
KOG_DEVICE float stage_four(const Block& b, int e, const float (&x)[4], const float (&gain)[4], float square,
                            bool staged) {
  if constexpr (Stage::Weights::kInteger) {
    float scaled[4];
    square = scale_four(x, gain, square, scaled);
    put_bytes<Stage>(b, e, scaled, staged);
    return square;
  }
  return scale_four(x, gain, square, staged, [&](int odd, const HighLow& parts) {
    u32* to = reinterpret_cast<u32*>(b.scratch) + e / kFragK * (4 * kColumnWords) + e % kFragK / 4 +
              odd * 2 * kColumnWords;
    to[0] = parts.high;
    to[kColumnWords] = parts.low;
  });
}
// N words of a stage's inputs (two values each) from element e on, by whole warps, of one token; none past kPaddedK.
template <class Stage, int N>
KOG_DEVICE void stage_words_at(const Block& b, int e, const u32 (&w)[N]) {
  if constexpr (Stage::Weights::kInteger) {
    float v[2 * N];
#pragma unroll
    for (int j = 0; j < N; j++) v[2 * j] = low_of(w[j]), v[2 * j + 1] = high_of(w[j]);
    return put_bytes<Stage>(b, e, v, e < Stage::kPaddedK);
  }
  if (e >= Stage::kPaddedK) return;
  u32* to = reinterpret_cast<u32*>(b.scratch) + e / kFragK * (2 * kColumnWords) + e % kFragK / 4;
  if constexpr (N == 4) {
    *reinterpret_cast<uint2*>(to) = {w[0], w[2]};
    *reinterpret_cast<uint2*>(to + kColumnWords) = {w[1], w[3]};
  } else {
    to[0] = w[0], to[kColumnWords] = w[1];
  }
}

template <class... Stages>
constexpr bool kOperandLayoutsAgree =
    ((OperandLayout<Stages>::kStepWords * Stages::kParts * 4 == Stages::kStepBytes &&
      OperandLayout<Stages>::kRowWords == Stages::kRowWords &&
      OperandLayout<Stages>::kPieces == Stages::kPieces) &&
     ...);
static_assert(kOperandLayoutsAgree<QkvProj, OProj, GateUpProj, DownProj, LmHead>,
              "operands.h and layout/batches.py lay out operands and sums otherwise");

}  // namespace kog
