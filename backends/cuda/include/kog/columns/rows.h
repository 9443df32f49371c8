// What a warp of a kernel of columns finishes of a batch: pieces of units, a sum a thread, a warp a piece.
#pragma once
#include <kog/columns/flags.h>
#include <kog/columns/warp_state.h>
#include <kog/outputs.h>

namespace kog::columns {

template <class Stage>
KOG_DEVICE Item item_of(const Block& b, int piece) {
  using S = OperandLayout<Stage>;
  constexpr int kRows = Stage::kUnitRows;
  int n = piece % S::kPieces * S::kPieceWords + b.in_warp % S::kPieceWords;  // of the unit
  Item item = {piece / S::kPieces * kRows + n % kRows, n / kRows, false};
  item.there = b.in_warp < S::kPieceWords && item.row < Stage::kRows && item.column < b.p.num_requests;
  return item;
}
template <class Stage>
KOG_DEVICE int piece_of(const Item& item) {
  constexpr int kRows = Stage::kUnitRows;
  int n = item.column * kRows + item.row % kRows;
  return item.row / kRows * OperandLayout<Stage>::kPieces + n / OperandLayout<Stage>::kPieceWords;
}
// Of pieces [from, from + count) number `first` and every kWarps-th from there on, which are of the same
// tokens whatever the batch.
template <class Stage>
struct Pieces {
  static constexpr int kRounds = OperandLayout<Stage>::kRounds;
  static constexpr bool kAll = false;
  int from, first, count;

  KOG_DEVICE Pieces(const Block& b, const Units& units)
      : from(units.first * OperandLayout<Stage>::kPieces),
        count((units.last - units.first) * OperandLayout<Stage>::kPieces) {
    first = static_cast<int>(static_cast<u32>(b.warp - from) % kWarps);
  }
  KOG_DEVICE bool has(const Block&, int r) const { return first + r * kWarps < count; }
  KOG_DEVICE int number(int r) const { return from + first + r * kWarps; }
  KOG_DEVICE Item item(const Block& b, int r) const { return item_of<Stage>(b, number(r)); }
  // Where the thread's sums are.
  KOG_DEVICE int at(const Block& b, int r) const {
    constexpr int kWords = OperandLayout<Stage>::kPieceWords;
    return (first + r * kWarps) * kWords + b.in_warp % kWords;
  }
};

KOG_DEVICE void enter_layer(const Block& b, int layer) {
  save_state(b, &WarpState::layer, static_cast<u32>(layer));
}
KOG_DEVICE void begin_stage(Block& b) {
  b.begin_stage();
  b.layer = static_cast<int>(of_wave(load_state(b, &WarpState::layer)));
  KOG_ASSUME(b.layer >= 0 && b.layer < kLayers);
}

// What a warp keeps lies in shared memory.
struct Walk {
  template <class Stage>
  using Share = Pieces<Stage>;

  template <class Stage>
  KOG_DEVICE Units units(Block& b) const {
    begin_stage(b);
    return units_of<Stage>(b.group_index, b.layer);
  }
  KOG_DEVICE Ring take_ring(const Block& b) const { return load_ring(b); }
  KOG_DEVICE void put_ring(const Block& b, const Ring& ring) const { save_ring(b, ring); }
  template <class Stage>
  KOG_DEVICE float* sums(const Block& b, int buffer) const {
    float* first = reinterpret_cast<float*>(b.scratch + Stage::kSumsAt);
    if constexpr (Stage::kSumBuffers > 1)
      first += buffer * (Stage::kParts * OperandLayout<Stage>::kPartStride);
    return first;
  }
};

}  // namespace kog::columns
