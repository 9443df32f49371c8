// What the warps of a block do: 16 consume; of four more one fills the ring and one watches.
#pragma once
#include <kog/watchdog.h>

namespace kog {

// Those four give their registers to the consumers: 20 x 96 make 16 x 112 + 4 x 32.
template <class Consume, class Produce>
KOG_DEVICE void run_roles(Block& b, Consume consume, Produce produce) {
  if (b.warp < kWarps) {
    take_registers<112>();
    consume();
  } else {
    give_registers<32>();
    if (b.warp == kWarps) {
      if (b.in_warp == 0) produce();
    } else if (b.warp == kWarps + 1) {
      watch(b);
    }
  }
}

}  // namespace kog
