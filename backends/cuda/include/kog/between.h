// When the weights that a kernel of one token takes ahead come to registers: ahead of the waits. The ring keeps the memory
// busy while those last.
#pragma once
#include <kog/matvec.h>

namespace kog {

constexpr int kLeastOnWay = 0;   // at a wait: none of those
constexpr int kAtAttention = 0;  // ahead of attention's wait: none, either
using HeadWeights = Ahead<LmHead>;
// Slots [kFirst, kLast) of what is taken ahead; kTogether where a ring that is full has them all.
template <class Weights, int kFirst, int kLast, bool kTogether = false>
struct Part {
  Weights& of;

  KOG_DEVICE void take(Block& b, Ring& ring, int layer) const {
    of.template take<kFirst, kLast, kTogether>(b, ring, layer);
  }
};
// Ahead of a wait, whose looks need nothing between them: the ring is full when they begin.
template <class... Parts>
KOG_DEVICE NothingBetween taken_between(Block& b, Ring& ring, int layer, const Parts&... parts) {
  (parts.take(b, ring, layer), ...);
  return {};
}
// As a stage ends: nothing of the next, which the ring has.
template <class, int>
constexpr int kInTail = 0;
template <class, int>
constexpr int kInTailOfWait = 0;
template <class Taken, class Tail>
KOG_DEVICE const Taken& with_tail(const Taken& taken, int, const Tail&) { return taken; }
struct NothingBehind {};
template <int, int>
struct BehindLayer {
  static constexpr int kCount = 0;
  KOG_DEVICE void take(Block&, Ring&) {}
  template <class Weights>
  KOG_DEVICE void give(Weights&) const {}
};
// The next token's first weights, brought near while it is chosen: they are in the ring.
struct NothingFetched {
  KOG_DEVICE void there() const {}
};
KOG_DEVICE NothingFetched fetch_first(const Block&) { return {}; }
// Ahead of attention's wait: nothing (kAtAttention).
struct NothingLeft {
  KOG_DEVICE void take() {}
};
template <class... Parts>
KOG_DEVICE NothingLeft taken_at_attention(Block&, Ring&, int, const Parts&...) {
  return {};
}

}  // namespace kog
