// Weight @ activations: fragments as they come from memory, multiplied by what operands.h says.
//
//   partial sums [part of K][unit][token][row], summed over the parts by the thread that owns the row
#pragma once
#include <kog/operands.h>
#include <kog/ring.h>
#ifdef KOG_COLUMNS
#include <kog/mma/products.h>
#else
#include <kog/dot/products.h>
#endif

namespace kog {

// Fragments that a wave takes before its activations are there: 4 registers each.
// Operands of several columns are registers, too.
constexpr int kMostAhead = kColumns > 1 ? 12 : kHeld <= 4 ? 24 : 21;
template <class Weights>
constexpr int kMostAheadOf = kMostAhead;
template <int kA, int kB>
constexpr int kLeast = kA < kB ? kA : kB;

// Of a stage's fragments, how many are on their way at once: whole units, or a whole part of one. Of loops that may end at
// every unit, the head's above all, more would spill registers.
template <class Stage>
constexpr int depth_of() {
  constexpr int kUnit = Stage::kUnitFragments, kLongest = (Stage::kUnits + Stage::kGroup - 1) / Stage::kGroup;
  constexpr int kAll = kLeast<kLongest, Stage::kBatch> * kUnit;
  constexpr int kRoom = Stage::kId == LmHead::kId          ? kLeast<kMostAhead, 12>
                        : kEven<Stage> || kUnit > 16 ? kMostAhead
                                                     : kLeast<kMostAhead, 16>;
  constexpr int kMost = kLeast<kRoom, kAll>;
  if (kUnit <= kMost) return kMost / kUnit * kUnit;
  int depth = kMost;
  while (kUnit % depth != 0) depth--;
  return depth;
}

// What was asked for ahead of weights that have come is there as well: said here, since a compiler that cannot tell would
// wait for all that is asked for later.
template <class T>
KOG_DEVICE void have_come(const T& v) {
  static_assert(sizeof(T) % 4 == 0);
  if constexpr (kColumns > 1) return;
  const float* word = reinterpret_cast<const float*>(&v);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T) / 4); i++) stay(word[i], word[i]);
}

// The next fragments of a stage, ahead of their use; kMost of them at most.
template <class Stage, bool kAllOrNone = false, int kMost = kMostAhead>
struct Ahead {
  static constexpr int kCount = kLeast<depth_of<Stage>(), kMost>;
  static constexpr int kSure = Stage::kUnits / Stage::kGroup;  // units of every block
  static constexpr int kLongest = (Stage::kUnits + Stage::kGroup - 1) / Stage::kGroup;
  static constexpr bool kWhole = kLongest * Stage::kUnitFragments <= kCount;
  static constexpr int kUnits = (kCount + Stage::kUnitFragments - 1) / Stage::kUnitFragments;
  uint4 w[kCount];  // each begins on every path: else registers would be kept for it throughout

  KOG_DEVICE void take(Block& b, Ring& ring, int layer) { take<0, kCount, false>(b, ring, layer); }
  template <int kFirst, int kLast, bool>
  KOG_DEVICE void take(Block& b, Ring& ring, int layer) {
    const u8* from = thread_weights<Stage::kFragmentRows>(b);
    int group_index = Stage::kId == LmHead::kId ? b.block % LmHead::kGroup : b.group_index;
#pragma unroll
    for (int i = kFirst; i < kLast; i++)
      w[i] = i < kSure * Stage::kUnitFragments || i < fragments_of<Stage>(group_index, layer) ? ring.take(b, from) : uint4{};
  }
  KOG_DEVICE void take_one(Block& b, Ring& ring, int layer, int i) {
    int group_index = Stage::kId == LmHead::kId ? b.block % LmHead::kGroup : b.group_index;
    bool there = i < kSure * Stage::kUnitFragments || i < fragments_of<Stage>(group_index, layer);
    w[i] = there ? ring.take(b, thread_weights<Stage::kFragmentRows>(b)) : uint4{};
  }
};

// What a stage has taken ahead, and what of the next one it asks for at its end.
template <class Taken, class Tail>
struct WithTail {
  static constexpr int kCount = Taken::kCount, kUnits = Taken::kUnits, kSure = Taken::kSure;
  const uint4 (&w)[kCount];
  int layer;
  Tail& tail;
};
template <class Taken, class Tail>
KOG_DEVICE WithTail<Taken, Tail> with_tail(const Taken& taken, int layer, Tail& tail) {
  return {taken.w, layer, tail};
}
struct NothingBehind {};
template <class Taken>
KOG_DEVICE const Taken& with_tail(const Taken& taken, int, NothingBehind&) {
  return taken;
}
// What takes the place of fragment i of a stage's last ones: number i - kFirst of the tail, where it has one.
struct NoTail {
  KOG_DEVICE void operator()(int) const {}
};
template <int kFirst, class Taken>
KOG_DEVICE NoTail tail_of(const Taken&, Block&, Ring&) {
  return {};
}
template <int kFirst, class Tail>
struct TailFrom {
  Block& b;
  Ring& ring;
  int layer;
  Tail& tail;
  KOG_DEVICE void operator()(int i) const { tail.take_one(b, ring, layer, i - kFirst); }
};
template <int kFirst, class Taken, class Tail>
KOG_DEVICE TailFrom<kFirst, Tail> tail_of(const WithTail<Taken, Tail>& taken, Block& b, Ring& ring) {
  return {b, ring, taken.layer, taken.tail};
}
struct NothingAhead {
  static constexpr int kCount = 0, kUnits = 0, kSure = 0;
};

// A stage's fragments of one warp on their way, multiplied in their order: as one is, the one that takes its registers is
// asked for.
template <class Stage>
struct Stream {
  static constexpr int kUnit = Stage::kUnitFragments, kDepth = depth_of<Stage>();
  // Operands in registers have no index: all of a unit has code of its own.
  static constexpr int kRound = kColumns > 1 && kUnit > kDepth ? kUnit : kDepth;
  float* to;  // where the warp's sums of the next unit go
  const u8* from;
  uint4 w[kDepth];
  UnitSums<Stage> c = {};
  int done = 0;
  int first = 0;  // step of the unit with which a round begins, where a unit is several

  // kCount fragments: more(i) whether one is asked for in the place of fragment i, ended(i) whether there is no unit that
  // begins with it; tail(i) asks for what is not the stage's.
  template <int kCount, class More, class Ended, class Tail = NoTail>
  KOG_DEVICE void multiply(Block& b, Ring& ring, const Operands<Stage>& x, More more, Ended ended, Tail tail = {}) {
#pragma unroll
    for (int i = 0; i < kCount; i++) {
      if (i % kUnit == 0 && i > 0 && ended(i)) break;
      int step = kUnit <= kRound ? i % kUnit : first + i;
      multiply_fragment<Stage>(w[i % kDepth], x.at(step), c);
      if (more(i)) w[i % kDepth] = ring.take(b, from);
      tail(i);
      bool ends = kUnit <= kRound ? i % kUnit == kUnit - 1 : i == kDepth - 1 && first + kDepth == kUnit;
      if (ends) {
        put_sums<Stage>(b, c, to);
        to += OperandLayout<Stage>::kUnitWords;
        clear<Stage>(c);
      }
    }
    if constexpr (kUnit > kRound) first = first + kDepth == kUnit ? 0 : first + kDepth;
    done += kCount;
  }
};

// Sums of `units` units, all warps together, of whose fragments the first may be on their way. `to`: where the warp's sums
// of the first unit go. Rounds whose fragments all have one behind them are a loop of their own: behind a load that may
// not have been asked for a compiler waits for all that are on their way.
template <class Stage, class Taken>
KOG_DEVICE void multiply(Block& b, Ring& ring, int units, const Operands<Stage>& x, const Taken& taken, float* to) {
  using S = Stream<Stage>;
  constexpr int kDepth = S::kDepth, kRound = S::kRound;
  constexpr int kLongest = (Stage::kUnits + Stage::kGroup - 1) / Stage::kGroup;
  constexpr int kMost = kLeast<kLongest, Stage::kBatch> * S::kUnit;
  const int count = kEven<Stage> ? kMost : units * S::kUnit;
  S stream{to, thread_weights<Stage::kFragmentRows>(b)};
  auto all = [](int) { return true; };
  auto none = [](int) { return false; };
  auto begin = [&](auto there) {
#pragma unroll
    for (int i = 0; i < kDepth; i++) {
      if constexpr (Taken::kCount > 0)
        if (i < Taken::kCount) {
          stream.w[i] = taken.w[i];
          continue;
        }
      stream.w[i] = there(i) ? ring.take(b, stream.from) : uint4{};
    }
  };
  constexpr int kRounds = kMost > kDepth ? (kMost - kDepth) / kRound : 0, kLast = kMost - kRounds * kRound;
  if constexpr (kEven<Stage>) {
    begin(all);
#pragma unroll 1
    for (int round = 0; round < kRounds; round++) stream.template multiply<kRound>(b, ring, x, all, none);
    constexpr int kTail = kLast < kRound ? kLast : kRound, kFree = kLast - kDepth;  // from there on none is behind
    stream.template multiply<kTail>(b, ring, x, [](int i) { return i < kFree; }, none, tail_of<kFree>(taken, b, ring));
    if constexpr (kTail < kLast)
      stream.template multiply<kLast - kTail>(b, ring, x, none, none, tail_of<kFree - kTail>(taken, b, ring));
  } else {
    // of_wave: else both ways out of the loop become one, whose count nobody knows, and w is memory with an index.
    auto more = [&](int i) { return stream.done + i + kDepth < count; };
    auto ended = [&](int i) { return stream.done + i >= static_cast<int>(of_wave(count)); };
    if (kRounds > 0 && static_cast<int>(of_wave(count)) >= kRound + kDepth) {
      begin(all);
#pragma unroll 1
      while (stream.done + kRound + kDepth <= count) stream.template multiply<kRound>(b, ring, x, all, none);
    } else {
      begin([&](int i) { return i < count; });
    }
    if constexpr (kMost > kDepth) stream.template multiply<kRound>(b, ring, x, more, ended);
    if (kMost <= kDepth || of_wave(stream.done) < of_wave(count))
      stream.template multiply<kRound>(b, ring, x, none, ended);
  }
}

}  // namespace kog
