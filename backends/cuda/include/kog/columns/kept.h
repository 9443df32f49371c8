// What a warp keeps from stage to stage, in shared memory (Kept in ../block.h).
#pragma once
#include <kog/ring.h>

namespace kog::columns {

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

}  // namespace kog::columns
