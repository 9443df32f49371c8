// When a kernel of one token asks for the weights that it takes ahead: between the looks of its waits.
#pragma once
#include <kog/heads.h>
#include <kog/matvec.h>

namespace kog {

// At a wait: 1.5 times what 4.2 TB/s bring in 2 us, of 256 blocks (docs/HIP.md, Budget).
constexpr int kLeastOnWay = 7;
constexpr int kLeastLeft = 5;  // 1.2 times, when a look for words is answered
// Waves that receive no head while their block attends, the first ones (heads.h), and what each takes then, as if all took
// kLeastOnWay; but no more than spills no register in attention's walk beside x, its gains and the queries.
constexpr int kFreeWaves = kWaves > (kQueries + 3) / 2 ? kWaves - (kQueries + 3) / 2 : 0;
constexpr int kMostAtAttention = kHeld > 16 ? 0 : kQueries > 4 ? 5 : kHeld <= 4 ? 12 : kHeld == 8 ? 8 : 4;
constexpr int kWantedAtAttention = kFreeWaves > 0 ? (kLeastOnWay * kWaves + kFreeWaves - 1) / kFreeWaves : 0;
constexpr int kAtAttention = kWantedAtAttention < kMostAtAttention ? kWantedAtAttention : kMostAtAttention;
// More of the head's would be spilled, beside x and what is staged of it.
using HeadWeights = Ahead<LmHead, false, kLeastOnWay + 1>;

// Fragments [kFirst, kLast) of what is taken ahead.
template <class Weights, int kFirst, int kLast, bool = false>
struct Part {
  static constexpr int kCount = kLast - kFirst;
  Weights& of;

  // Number n of the part's own, if it has one. n: of a loop that is unrolled.
  KOG_DEVICE void take_one(Block& b, Ring& ring, int layer, int n) const {
    if (n >= 0 && n < kCount) of.take_one(b, ring, layer, kFirst + n);
  }
  // Of the part's own, those of [kFrom, kTo).
  template <int kFrom, int kTo>
  KOG_DEVICE void take(Block& b, Ring& ring, int layer) const {
    constexpr int kBegin = kFrom > 0 ? kFirst + kFrom : kFirst, kEnd = kTo < kCount ? kFirst + kTo : kLast;
    if constexpr (kBegin < kEnd) of.template take<kBegin, kEnd, false>(b, ring, layer);
  }
};
struct NoPart {
  static constexpr int kCount = 0;
  template <int, int>
  KOG_DEVICE void take(Block&, Ring&, int) const {}
};
// What the looks of a wait have between them (words.h). `vmcnt` counts in order: a look is answered behind all that was
// asked for ahead of it, while what was asked for behind it is on its way. So a wait looks, takes a piece of about
// kLeastOnWay, looks again, and finds words that came meanwhile before the memory is idle (docs/HIP.md, Weights).
template <class First, class Second = NoPart>
struct Between {
  static constexpr int kCount = First::kCount + Second::kCount;
  static constexpr int kPieces = kCount == 0 ? 0 : kCount < 11 ? 1 : (kCount + kLeastOnWay / 2) / kLeastOnWay;
  Block& b;
  Ring& ring;
  int layer;
  First first;
  Second second;

  template <int kPiece>
  KOG_DEVICE void take() {
    constexpr int kFrom = kPiece * kCount / kPieces, kTo = (kPiece + 1) * kCount / kPieces;
    keep_order();
    first.template take<kFrom, kTo>(b, ring, layer);
    second.template take<kFrom - First::kCount, kTo - First::kCount>(b, ring, layer);
    keep_order();
  }
  KOG_DEVICE void take_all() {
    first.template take<0, First::kCount>(b, ring, layer);
    second.template take<0, Second::kCount>(b, ring, layer);
  }
};
template <class First, class Second = NoPart>
KOG_DEVICE Between<First, Second> taken_between(Block& b, Ring& ring, int layer, First first, Second second = {}) {
  return {b, ring, layer, first, second};
}
// As a stage multiplies its last fragments, some of what follows take their registers: so many, of kAll.
template <class Stage, int kAll>
constexpr int kInTail = kColumns == 1 && kEven<Stage> && Ahead<Stage>::kLongest <= Stage::kBatch && kAll > 0
                            ? kLeast<kLeast<kAll, kLeastOnWay>, depth_of<Stage>()>
                            : 0;
// The same, with enough left for the wait behind the stage.
template <class Stage, int kAll>
constexpr int kInTailOfWait = kInTail<Stage, kAll - kLeastLeft>;
// The first fragments behind a layer, the next one's or the head's: as many as every block has of either. Taken ahead there
// are kQkv of qkv_proj and kMore.
template <int kQkv, int kMore>
struct BehindLayer {
  template <class Stage>
  static constexpr int kSure = Stage::kUnits / Stage::kGroup * Stage::kUnitFragments;
  static constexpr int kCount = kLeast<kInTailOfWait<DownProj, kLeast<kQkv + kMore, HeadWeights::kCount>>,
                                       kLeast<kLeast<kQkv, kSure<QkvProj>>, kSure<LmHead>>>;
  uint4 w[kCount > 0 ? kCount : 1];

  KOG_DEVICE void take(Block& b, Ring& ring) {
#pragma unroll
    for (int i = 0; i < kCount; i++) take_one(b, ring, 0, i);
  }
  KOG_DEVICE void take_one(Block& b, Ring& ring, int, int n) {
    if (n >= 0 && n < kCount) w[n] = ring.take(b, thread_weights<QkvProj::kFragmentRows>(b));
  }
  template <class Weights>
  KOG_DEVICE void give(Weights& to) const {
#pragma unroll
    for (int i = 0; i < kCount; i++) to.w[i] = w[i];
  }
};
// The next token's first weights, brought near while it is chosen (docs/HIP.md, Weights): of every line of 128 bytes a
// thread loads one word, those of waves that wait for no candidate where there are some. Registers are for none of them.
constexpr int kLineBytes = 128;
struct Fetched {
  static constexpr int kFirst = kCandidateWarps < kWarps ? kCandidateWarps : 0, kThreads = (kWarps - kFirst) * kWarpThreads;
  static constexpr int kBytes = QkvProj::kUnits / QkvProj::kGroup * QkvProj::kUnitFragments * kRingSlotBytes;
  static constexpr int kWanted = kBytes < kLeastOnWay * kRingSlotBytes ? kBytes : kLeastOnWay * kRingSlotBytes;
  static constexpr int kCount = (kWanted / kLineBytes + kThreads - 1) / kThreads;
  u32 word[kCount > 0 ? kCount : 1] = {};

  KOG_DEVICE explicit Fetched(const Block& b) {
    if (b.warp < kFirst) return;
#pragma unroll
    for (int i = 0; i < kCount; i++) {
      int at = (i * kThreads + b.thread - kFirst * kWarpThreads) * kLineBytes;
      int slot = at / kRingSlotBytes * kBlocks + b.block;
      const u8* line = b.p.weights + static_cast<u64>(slot) * kRingSlotBytes + at % kRingSlotBytes;
      word[i] = load_cache(reinterpret_cast<const u32*>(line), at < kWanted);
    }
  }
  KOG_DEVICE void there() const {
#pragma unroll
    for (int i = 0; i < kCount; i++) stay(float_of(word[i]), 0);
  }
};
KOG_DEVICE Fetched fetch_first(const Block& b) { return Fetched(b); }
// Ahead of attention's wait, by waves that receive no head; by the others when they have attended.
template <class First, class Second>
struct AtAttention {
  Between<First, Second> between;
  bool receives;

  KOG_DEVICE void take() {
    if (receives) between.take_all();
  }
};
template <class First, class Second>
KOG_DEVICE AtAttention<First, Second> taken_at_attention(Block& b, Ring& ring, int layer, First first, Second second) {
  bool receives = wave_index() >= kFreeWaves;
  AtAttention<First, Second> out = {{b, ring, layer, first, second}, receives};
  if (!receives) out.between.take_all();
  return out;
}

}  // namespace kog
