// Waits that bound themselves, in the place of CUDA's watchdog; part of the seam, over whose clock and words it stands.
#pragma once

namespace kog {

// A wait that has failed looks at the clock itself: a wave that watched over the others would take a third of the
// registers. From a millisecond on it hears of other blocks' expired waits too. A warp whose own words have come (`late`
// of no thread) waits no longer, though its wave goes round: what expires is the other's wait, which can say for what.
template <class Block>
KOG_DEVICE void watch_own_wait(const Block& b, bool late) {
  bool waits = late_itself(late);
  if (b.in_warp != 0) return;
  u32* began = &b.small->waits[b.warp];
  if (!waits) return store_volatile(began, 0);
  u32* error = b.p.error;  // named once, since LLVM copies a kernel's arguments to memory where more than 300 places name one
  u32 since = load_volatile(began);
  if ((since & 1) == 0) return;  // it has expired
  // Signed: made odd, `since` may be a tick ahead.
  i64 waited = static_cast<i64>(static_cast<int>(static_cast<u32>(clock_ticks()) - since)) * kTickNs;
  if (waited > 1000000 && (load_relaxed(error) != 0 || told_to_leave(b.p))) store_volatile(&b.small->leave, 1);
  if (waited > b.p.limit && compare_and_swap(error, 0, 1) == 0) {
    store_relaxed(error + 1, static_cast<u32>(b.block));
    store_volatile(began, 2);  // kExpired
    store_volatile(&b.small->leave, 1);
    tell_ranks_to_leave(b.p);
  }
}

}  // namespace kog
