// The rows of a stage, batch by batch: all warps multiply some units, then the parts' sums of each value are
// added by one thread, which finishes the value. What the warp keeps meanwhile, and which values a thread
// finishes, its Walk knows:
//
//   take_ring, put_ring   where it is in the stream
//   sums<Stage>           where a batch's partial sums go
//   Share<Stage>          the thread's values, one a round
//   units<Stage>          the block's of a layer
#pragma once
#include <kog/matvec.h>

namespace kog {

// One value of a stage's output: its row and whose token it is of. `there`: neither padding nor a column
// without a request.
struct Item {
  int row, column;
  bool there;
};

// Whether no block has more units than one batch holds.
template <class Stage>
constexpr bool kOneBatch = (Stage::kUnits + Stage::kGroup - 1) / Stage::kGroup <= Stage::kBatch;

// One batch of units: before(r, item) -> what the owner of its r-th item asks for early, then
// after(item, sum, asked) by whole warps, rows side by side in threads, then done(piece). Batches alternate
// between two buffers where there are two: then only the last one's sums are waited for. which() says which
// units.
template <class Stage, class Walk, class Which, class Ahead, class Before, class After, class Done>
KOG_DEVICE void run_batch(Block& b, Walk& walk, Which which, const Operands<Stage>& x, const Ahead& ahead,
                          int buffer, bool last, Before before, After after, Done done) {
  using S = OperandLayout<Stage>;
  using Share = typename Walk::template Share<Stage>;
  float* partials = walk.template sums<Stage>(b, buffer);
  Units units = which();
  // Unless it begins on every path, registers are kept for it throughout the layer.
  decltype(before(0, Item{})) asked[Share::kRounds] = {};
  Share mine(b, units);
#pragma unroll
  for (int r = 0; r < Share::kRounds; r++)
    if (Share::kAll || mine.has(b, r)) asked[r] = before(r, mine.item(b, r));
  float* to = partials + b.warp % Stage::kParts * S::kPartStride +
              b.warp / Stage::kParts * Stage::kFragmentRows;
  auto&& ring = walk.take_ring(b);
  multiply<Stage>(b, ring, units.last - units.first, x, ahead, to);
  walk.put_ring(b, ring);
  sync_consumers();
#pragma unroll
  for (int r = 0; r < Share::kRounds; r++) {
    if (!mine.has(b, r)) break;
    // Without a condition: what nobody has asked for is there as well, and no thread waits for a branch.
    float sum = sum_of_parts<Stage>(partials + mine.at(b, r), S::kPartStride);
    after(mine.item(b, r), sum, asked[r]);
    done(mine.number(r));
  }
  have_come(asked);
  rejoin();
  if (!Share::kAll && (Stage::kSumBuffers == 1 || last)) sync_consumers();  // the sums have been read
}

// All units of the block, batch by batch; the first begins with what was taken ahead.
template <class Stage, class Walk, class Which, class Ahead, class Before, class After, class Done>
KOG_DEVICE void run_rows(Block& b, Walk& walk, Which which, const Operands<Stage>& x, const Ahead& ahead,
                         Before before, After after, Done done) {
  static_assert(Ahead::kUnits <= Stage::kBatch);
  // What a stage staged is never overtaken; where sums take the place of other warps' operands, all
  // hold theirs before one of them puts its sums there.
  constexpr bool kShared = Stage::kSumsOver || (Stage::kSumsInPlace && Stage::kParts != kWarps);
  Units units = which();
  if (kShared || units.first == units.last) sync_consumers();
  if constexpr (kOneBatch<Stage>) {
    // No loop: what each pass of one needs would be found ahead of it and kept while it multiplies.
    if (Ahead::kSure > 0 || units.first < units.last)
      run_batch<Stage>(b, walk, which, x, ahead, Ahead::kUnits > 0, true, before, after, done);
  } else {
    int first = units.first;
    auto left = [&] { return which().last - first; };
    auto batch = [&] {
      int count = left();
      return Units{first, first + (count < Stage::kBatch ? count : Stage::kBatch)};
    };
    if constexpr (Ahead::kUnits > 0) {
      run_batch<Stage>(b, walk, batch, x, ahead, 1, left() <= Stage::kBatch, before, after, done);
      first += Stage::kBatch;
    }
#pragma unroll 1
    for (int buffer = 0; left() > 0; first += Stage::kBatch, buffer ^= 1)
      run_batch<Stage>(b, walk, batch, x, NothingAhead(), buffer, left() <= Stage::kBatch, before, after,
                       done);
  }
  if constexpr (kOverSums<Stage>) sync_consumers();  // the next stage's buffers are elsewhere: over both of these
}

}  // namespace kog
