// The rows of a stage, batch by batch: all warps multiply some units, then each adds the parts' sums of a
// piece of a unit, a sum a lane, and finishes it.
#pragma once
#include <kog/columns/matvec.h>

namespace kog::columns {

// One value of a piece, a lane each: its row, of the stage, and whose token it is of. `there`: neither
// padding nor a column without a request.
struct Item {
  int row, column;
  bool there;
};
template <class Stage>
KOG_DEVICE Item item_of(const Block& b, int piece) {
  using S = Cut<Stage>;
  constexpr int kRows = Stage::kUnitRows;
  int n = piece % S::kPieces * S::kPieceWords + b.in_warp % S::kPieceWords;  // of the unit
  Item item = {piece / S::kPieces * kRows + n % kRows, n / kRows, false};
  item.there = b.in_warp < S::kPieceWords && item.row < Stage::kRows && item.column < b.p.num_seats;
  return item;
}
template <class Stage>
KOG_DEVICE int piece_of(const Item& item) {
  constexpr int kRows = Stage::kUnitRows;
  int n = item.column * kRows + item.row % kRows;
  return item.row / kRows * Cut<Stage>::kPieces + n / Cut<Stage>::kPieceWords;
}
// What a warp finishes of a batch of pieces [from, from + count): number `first` of it and every kWarps-th
// from there on, which are of the same tokens whatever the batch.
template <class Stage>
struct Pieces {
  int from, first, count;

  KOG_DEVICE Pieces(const Block& b, const Units& units)
      : from(units.first * Cut<Stage>::kPieces),
        count((units.last - units.first) * Cut<Stage>::kPieces) {
    first = static_cast<int>(static_cast<u32>(b.warp - from) % kWarps);
  }
};

// Whether no block has more units than one batch holds.
template <class Stage>
constexpr bool kOneBatch = (Stage::kUnits + Stage::kGroup - 1) / Stage::kGroup <= Stage::kBatch;

// One batch of units: a warp finishes a piece. before(r, item) -> what the owner of its r-th piece's item asks
// for early, then after(item, sum, asked) by whole warps, rows side by side in lanes, then done(piece).
// Batches take turns with `room` where there are two: then only the last one's sums are waited for.
// which() says which units.
template <class Stage, class Which, class Ahead, class Before, class After, class Done>
KOG_DEVICE void run_batch(Block& b, Which which, const Operands<Stage>& x, const Ahead& ahead,
                          int room, bool last, Before before, After after, Done done) {
  using S = Cut<Stage>;
  float* partials = reinterpret_cast<float*>(b.scratch + Stage::kSumsAt);
  if constexpr (Stage::kRooms > 1) partials += room * (Stage::kParts * S::kPartStride);
  Units units = which();
  int count = units.last - units.first;
  // Unless it begins on every path, registers are kept for it throughout the layer.
  decltype(before(0, Item{})) asked[S::kRounds] = {};
  Pieces<Stage> mine(b, units);
#pragma unroll
  for (int r = 0; r < S::kRounds; r++)
    if (mine.first + r * kWarps < mine.count)
      asked[r] = before(r, item_of<Stage>(b, mine.from + mine.first + r * kWarps));
  float* to = partials + b.warp % Stage::kParts * S::kPartStride +
              b.warp / Stage::kParts * Stage::kFragmentRows;
  Ring ring = take_back(b);
  ahead.multiply(b, x, to);
#pragma unroll 1
  for (int n = Ahead::kUnits; n < count; n += Stage::kPeriod)
    multiply_period<Stage>(b, ring, x, count - n, to + n * S::kUnitWords);
  put_away(b, ring);
  sync_consumers();
#pragma unroll
  for (int r = 0; r < S::kRounds; r++) {
    int piece = mine.first + r * kWarps;
    if (piece >= mine.count) break;
    // Without a condition: what nobody has asked for is there as well, and no lane waits for a branch.
    const float* from = partials + piece * S::kPieceWords + b.in_warp % S::kPieceWords;
    float sum = sum_of_parts<Stage>(from, S::kPartStride);
    after(item_of<Stage>(b, mine.from + piece), sum, asked[r]);
    done(mine.from + piece);
  }
  if (Stage::kRooms == 1 || last) sync_consumers();  // the sums have been read
}

// All units of the block, batch by batch; the first begins with what was taken ahead.
template <class Stage, class Which, class Ahead, class Before, class After, class Done>
KOG_DEVICE void run_units(Block& b, Which which, const Operands<Stage>& x, const Ahead& ahead,
                          Before before, After after, Done done) {
  // What a stage staged is never overtaken; where sums take the place of other warps' operands, all
  // hold theirs before one of them puts its sums there.
  constexpr bool kShared = Stage::kSumsOver || (Stage::kSumsInPlace && Stage::kParts != kWarps);
  Units units = which();
  if (kShared || units.first == units.last) sync_consumers();
  if constexpr (kOneBatch<Stage>) {
    // No loop: what each turn of one needs would be found ahead of it and kept while it multiplies.
    if (Ahead::kUnits > 0 || units.first < units.last)
      run_batch<Stage>(b, which, x, ahead, Ahead::kUnits > 0, true, before, after, done);
  } else {
    int first = units.first;
    auto left = [&] { return which().last - first; };
    auto batch = [&] {
      int count = left();
      return Units{first, first + (count < Stage::kBatch ? count : Stage::kBatch)};
    };
    if constexpr (Ahead::kUnits > 0) {
      run_batch<Stage>(b, batch, x, ahead, 1, left() <= Stage::kBatch, before, after, done);
      first += Stage::kBatch;
    }
#pragma unroll 1
    for (int room = 0; left() > 0; first += Stage::kBatch, room ^= 1)
      run_batch<Stage>(b, batch, x, NothingTaken(), room, left() <= Stage::kBatch, before, after,
                       done);
  }
}

}  // namespace kog::columns
