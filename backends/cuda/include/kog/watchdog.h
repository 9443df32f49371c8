// One warp a block that bounds all waits of the others, so that they need no clocks of their own.
#pragma once
#include <kog/ranks.h>

namespace kog {

// Thread w watches warp w: a wait that has gone on for p.limit nanoseconds ends the block's work, and through
// p.error that of all blocks. Returns when the consumers have left.
KOG_DEVICE void watch(Block& b) {
  b.begin_stage();  // what it watches with is not kept from before
  u32 seen = 0;
  i64 since = 0;
  while (load_volatile(&b.small->stop) == 0) {
    sleep_a_while();
    u32 began = b.in_warp < kWarps ? load_volatile(&b.small->waits[b.in_warp]) : 0;
    i64 now = static_cast<i64>(nanoseconds());  // of the GPU: an SM's clock changes its speed
    if (began != seen) since = now;
    seen = began;
    bool late = began != 0 && now - since > b.p.limit;
    if (late && compare_and_swap(b.p.error, 0, 1) == 0) {
      store_relaxed(b.p.error + 1, static_cast<u32>(b.block));
      compare_and_swap(&b.small->waits[b.in_warp], began, kExpired);  // unless it has ended
      store_volatile(&b.small->leave, 1);
      tell_ranks_to_leave(b.p);
    }
    sync_warp();
    if (b.in_warp == 0 && load_volatile(&b.small->leave) == 0 && (load_relaxed(b.p.error) != 0 || told_to_leave(b.p)))
      store_volatile(&b.small->leave, 1);
  }
}

}  // namespace kog
