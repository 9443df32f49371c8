// What the warps of a block do: 16 consume; of four more one fills the ring and one watches.
#pragma once
#include <kog/watchdog.h>

namespace kog {

// Registers of an SM, and of a thread as it starts and as it helps: what the helpers give away the consumers
// take. Counted by eights: of 640 threads with 96 each, 512 have 112 then and 128 have 32.
constexpr int kRegisterFile = 65536, kStartRegisters = kRegisterFile / kThreads / 8 * 8, kHelperRegisters = 32;
constexpr int kConsumerRegisters =
    (kStartRegisters * kThreads - kHelperRegisters * (kThreads - kConsumers)) / kConsumers / 8 * 8;

template <class Consume, class Produce>
KOG_DEVICE void run_roles(Block& b, Consume consume, Produce produce) {
  if (b.warp < kWarps) {
    take_registers<kConsumerRegisters>();
    consume();
  } else {
    give_registers<kHelperRegisters>();
    if (b.warp == kWarps) {
      if (b.in_warp == 0) produce();
    } else if (b.warp == kWarps + 1) {
      watch(b);
    }
  }
}

}  // namespace kog
