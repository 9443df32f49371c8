// Which position a column's token stands at, and whether its logits are wanted.
//
//   requests   each column a request of its own, at its next position
//   a chunk    (kChunk) kColumns positions in a row of one prompt; behind its end the last one
//              again: such a column computes what that one does and leaves nothing but words
#pragma once
#include <kog/ring.h>

namespace kog::columns {

// What this warp keeps.
KOG_DEVICE u32 kept(const Block& b, u32 Kept::* what) {
  return load_volatile(&(b.small->kept[b.warp].*what));
}
KOG_DEVICE void keep(const Block& b, u32 Kept::* what, u32 v) {
  sync_warp();  // all lanes have read what was there
  if (b.in_warp == 0) store_volatile(&(b.small->kept[b.warp].*what), v);
  sync_warp();
}
// The next of those that this warp counts.
KOG_DEVICE u32 count_up(const Block& b, u32 Kept::* what) {
  u32 next = kept(b, what) + 1;
  keep(b, what, next);
  return next;
}
// The ring's place, while a warp does not multiply. Every lane stores the same and reads its own.
KOG_DEVICE void put_away(const Block& b, const Ring& ring) {
  store_volatile(&b.small->kept[b.warp].slot, ring.slot);
  store_volatile(&b.small->kept[b.warp].parity, ring.parity);
}
KOG_DEVICE Ring take_back(const Block& b) { return {kept(b, &Kept::slot), kept(b, &Kept::parity)}; }
// Steps that the launch has done.
KOG_DEVICE int steps_of(const Block& b) { return static_cast<int>(kept(b, &Kept::steps)); }

// Of a chunk's column, were the prompt longer.
KOG_DEVICE int ahead_of(const Block& b, int column, int steps) {
  return b.small->seats[column].first + steps * kColumns + column;
}
KOG_DEVICE int position_of(const Block& b, int column, int steps) {
  const Seat& seat = b.small->seats[column];
  if constexpr (!kChunk) return seat.first + steps;
  int ahead = ahead_of(b, column, steps);
  return ahead < seat.first_head ? ahead : seat.first_head;
}

// Tokens that the request has with this step's, 0 while its prompt goes on.
KOG_DEVICE int made_by(const Block& b, int column, int steps) {
  int last = b.small->seats[column].first_head;
  if constexpr (kChunk) return ahead_of(b, column, steps) == last;
  return position_of(b, column, steps) - last + 1;
}
KOG_DEVICE bool has_head(const Block& b, int column, int steps) {
  return made_by(b, column, steps) > 0;
}
KOG_DEVICE bool any_head(const Block& b, int steps) {
  bool any = false;
#pragma unroll 1
  for (int c = 0; c < b.p.num_seats; c++) any |= has_head(b, c, steps);
  return any;
}

}  // namespace kog::columns
