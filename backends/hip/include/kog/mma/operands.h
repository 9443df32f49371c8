// What weights meet, of several tokens (columns): 16-bit values in registers, as a matrix instruction of a wave takes
// them. Its warps' fragments are of two parts of K, its rows and its columns both 16 (products.h):
//
//   thread t of a warp   has column t % R of a set and the eight values of K number t / R of a step
//
// R is a fragment's rows, 8 or 4, and a step is 32 or 64 values of K. Columns of a set:
//
//   wide     [token][high, low]: x * gain as two 16-bit parts, as in CUDA's kernels
//   narrow   [token]: what came as 16-bit words, which carry their factor
//
// In scratch (wide) they are [8 values of K][token][high, low], in memory (narrow) [step][8 values][token][set].
// Threads without a column repeat another's.
#pragma once
#include <kog/plain.h>

namespace kog {

static_assert(kColumns > 1);
constexpr int kPieceValueWords = kThreadValues / 2;  // of a column's eight values

template <class Stage>
struct OperandLayout {
  static constexpr int kSetColumns = Stage::kFragmentRows, kValuePieces = kWarpThreads / kSetColumns;
  static constexpr int kStepValues = kValuePieces * kThreadValues;  // of K
  static constexpr int kCopies = Stage::kWide ? 2 : 1;              // high and low
  static constexpr int kTokens = kColumns < kSetColumns / kCopies ? kColumns : kSetColumns / kCopies;  // of a set
  static constexpr int kSets = kColumns / kTokens;
  static constexpr int kRowWords = kSets * kPieceValueWords;  // of one thread and step
  static constexpr int kStepWords = kColumns * kStepValues / 2 * kCopies;
  static constexpr int kHolders = kValuePieces * kTokens;  // of narrow ones; the others repeat them
  static constexpr int kThreadStride = kRowWords;
  static constexpr int kUnitWords = Stage::kUnitRows * kColumns;  // sums
  // A warp finishes a piece of a unit at a time, a sum a thread.
  static constexpr int kPieces = kUnitWords > kWarpThreads ? kUnitWords / kWarpThreads : 1;
  static constexpr int kPieceWords = kUnitWords / kPieces;
  static_assert(kPieceWords <= kWarpThreads && kWarps % kPieces == 0);
  static constexpr int kRounds = (Stage::kBatch * kPieces + kWarps - 1) / kWarps;  // of a batch
  // Sums of wide stages lie in the place of operands, which are registers by then: each part's in that of its own, or
  // (kSumsOver) of others.
  static constexpr int kPartStride = Stage::kSumsInPlace ? Stage::kSteps * kStepWords : Stage::kBatch * kUnitWords;
  static_assert(Stage::kBatch * kUnitWords <= kPartStride);
  // A wave's two parts of K are of the same rows, and all operands are held: registers have no index.
  static_assert(Stage::kParts % 2 == 0 && Stage::kHeld == Stage::kSteps && Stage::kRead == 0);

  // The first value of K that a warp multiplies, and how many there are.
  static constexpr int kPartValues = Stage::kSteps * kStepValues;
  KOG_DEVICE static int first_value(const Block& b) { return b.warp % Stage::kParts * kPartValues; }

  // Narrow ones: whose words a thread has, its token in a set, and the first value of a step.
  KOG_DEVICE static int holder(int thread) { return thread / kSetColumns * kTokens + thread % kSetColumns % kTokens; }
  KOG_DEVICE static int token(int holder) { return holder % kTokens; }
  KOG_DEVICE static int value(int holder) { return holder / kTokens * kThreadValues; }
  // Of word j of those, the first value from there on, and the set.
  KOG_DEVICE static int value_of(int j) { return 2 * (j % kPieceValueWords); }
  KOG_DEVICE static int set_of(int j) { return j / kPieceValueWords; }
};

// Where word `word` (two values) of Stage's inputs is for a token, in words from the first step.
template <class Stage>
KOG_DEVICE int narrow_offset(int word, int token) {
  using S = OperandLayout<Stage>;
  int piece = word / kPieceValueWords;
  return ((piece * S::kTokens + token % S::kTokens) * S::kSets + token / S::kTokens) * kPieceValueWords +
         word % kPieceValueWords;
}

// Wide operands of eight values of K lie in as many places of four words as there are columns' parts; which has which
// changes from eight to eight, so that threads that stage a column meet banks of their own.
constexpr int kPlaces = 2 * kColumns, kBankPlaces = 8;  // 32 banks
KOG_DEVICE int wide_offset(int piece, int token, int low) {
  constexpr int kAlike = kPlaces < kBankPlaces ? kBankPlaces / kPlaces : 1;  // pieces that share the banks
  int place = (2 * token + low) ^ piece / kAlike % (kPlaces < kBankPlaces ? kPlaces : kBankPlaces);
  return (piece * kPlaces + place) * kPieceValueWords;
}
// As the columns' walk names them (columns/stream.h): steps of kFragK values, whatever the stage.
struct Wide {};
template <>
struct OperandLayout<Wide> {
  static constexpr int kStepWords = kColumns * kFragK, kSetWords = 0;
};
constexpr bool kSwapped = false;
KOG_DEVICE int bank_swizzle(int) { return 0; }
// Where word `word` (two values) of a step is for a token, its high and low parts, in words from the step's.
struct WideOffset {
  int high, low;

  KOG_DEVICE WideOffset(int step, int token, int word) {
    int first = step * (kFragK / kThreadValues), piece = first + word / kPieceValueWords;
    int at = word % kPieceValueWords - step * OperandLayout<Wide>::kStepWords;
    high = wide_offset(piece, token, 0) + at;
    low = wide_offset(piece, token, 1) + at;
  }
};
// One value of a column's operands, element e of a stage's inputs.
KOG_DEVICE void stage_value(const Block& b, int column, int e, float v) {
  HighLow parts(v, 0);
  u32* scratch = reinterpret_cast<u32*>(b.scratch);
  int piece = e / kThreadValues, at = e % kThreadValues;
  reinterpret_cast<u16*>(scratch + wide_offset(piece, column, 0))[at] = static_cast<u16>(parts.high);
  reinterpret_cast<u16*>(scratch + wide_offset(piece, column, 1))[at] = static_cast<u16>(parts.low);
}

template <class Stage>
constexpr bool kHeldFirst = false;

// What a warp's part of K is multiplied with.
template <class Stage>
struct Operands {
  using S = OperandLayout<Stage>;
  using Row = WordVector<S::kRowWords>;  // a thread's words of a step
  static constexpr int kLast = Stage::kSteps;
  Row held[Stage::kSteps];

  const Block& b;

  KOG_DEVICE explicit Operands(const Block& block) : b(block) {}
  KOG_DEVICE const Row& at(int step) const { return held[step]; }
  // Wide ones, which come by scratch.
  KOG_DEVICE void hold() {
    int column = b.in_warp % S::kSetColumns, first = S::first_value(b) / kThreadValues + b.in_warp / S::kSetColumns;
#pragma unroll
    for (int step = 0; step < Stage::kSteps; step++)
#pragma unroll
      for (int set = 0; set < S::kSets; set++) {
        int token = set * S::kTokens + column / 2 % S::kTokens;
        int at = wide_offset(first + step * S::kValuePieces, token, column % 2);
        uint4 v = *reinterpret_cast<const uint4*>(reinterpret_cast<const u32*>(b.scratch) + at);
#pragma unroll
        for (int j = 0; j < kPieceValueWords; j++) held[step].w[set * kPieceValueWords + j] = word_of(v, j);
      }
  }
  // None lies in scratch behind those that are held, and none is read from memory unit by unit.
  KOG_DEVICE void store(int, const Row&) const {}
  KOG_DEVICE void find_in_memory(const Block&, const u32*) {}
};
template <class Stage>
KOG_DEVICE Operands<Stage> held_operands(const Block& b) {
  Operands<Stage> x(b);
  x.hold();
  return x;
}

template <class... Stages>
constexpr bool kOperandLayoutsAgree =
    ((OperandLayout<Stages>::kStepWords * Stages::kParts * 4 == Stages::kStepBytes &&
      OperandLayout<Stages>::kRowWords == Stages::kRowWords && OperandLayout<Stages>::kPieces == Stages::kPieces) &&
     ...);
static_assert(kOperandLayoutsAgree<QkvProj, OProj, GateUpProj, DownProj, LmHead>,
              "mma/operands.h and layout/batches.py lay out operands and sums otherwise");

}  // namespace kog
