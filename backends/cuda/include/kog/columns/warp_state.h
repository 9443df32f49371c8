// What a warp keeps from stage to stage, in shared memory (WarpState in ../block.h).
#pragma once
#include <kog/ring.h>

namespace kog::columns {

KOG_DEVICE u32 load_state(const Block& b, u32 WarpState::* what) {
  return load_volatile(&(b.small->warp_states[b.warp].*what));
}
KOG_DEVICE void save_state(const Block& b, u32 WarpState::* what, u32 v) {
  sync_warp();  // all threads have read what was there
  if (b.in_warp == 0) store_volatile(&(b.small->warp_states[b.warp].*what), v);
  sync_warp();
}
// The next of those that this warp counts.
KOG_DEVICE u32 count_up(const Block& b, u32 WarpState::* what) {
  u32 next = load_state(b, what) + 1;
  save_state(b, what, next);
  return next;
}
// Steps that the launch has done.
KOG_DEVICE int steps_of(const Block& b) { return static_cast<int>(of_wave(load_state(b, &WarpState::steps))); }

}  // namespace kog::columns
