// Waits that bound themselves, in the place of CUDA's watchdog; part of the seam, over whose clock and words it stands.
#pragma once

namespace kog {

// A wait that has failed looks at the clock itself: a wave that watched over the others would take a third of the
// registers. From a millisecond on it hears of other blocks' expired waits too.
template <class Block>
KOG_DEVICE void watch_own_wait(const Block& b) {
  if (b.in_warp != 0) return;
  u32* began = &b.small->waits[b.warp];
  u32 since = load_volatile(began);
  if ((since & 1) == 0) return;  // it has expired
  // Signed: made odd, `since` may be a tick ahead.
  i64 waited = static_cast<i64>(static_cast<int>(static_cast<u32>(clock_ticks()) - since)) * kTickNs;
  if (waited > 1000000 && (load_relaxed(b.p.error) != 0 || told_to_leave(b.p))) store_volatile(&b.small->leave, 1);
  if (waited > b.p.limit && compare_and_swap(b.p.error, 0, 1) == 0) {
    store_relaxed(b.p.error + 1, static_cast<u32>(b.block));
    store_volatile(began, 2);  // kExpired
    store_volatile(&b.small->leave, 1);
    tell_ranks_to_leave(b.p);
  }
}

}  // namespace kog
