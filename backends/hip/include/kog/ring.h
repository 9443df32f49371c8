// The weight stream of one token, straight from memory to registers. A block's fragments lie in the order of its walk,
// so where the next one is needs no table: a thread's place in the stream moves on by one fragment of all blocks.
#pragma once
#include <kog/cursor.h>

namespace kog {

// Where a thread's 16 bytes are, of the first fragment of all blocks. Those of a fragment lie row by row; matrix products
// want a row's in threads kRows apart (mma/operands.h).
template <int kRows>
KOG_DEVICE const u8* thread_weights(const Block& b) {
  int thread = b.thread;
  if constexpr (kColumns > 1)
    thread = b.warp * kWarpThreads + b.in_warp % kRows * (kWarpThreads / kRows) + b.in_warp / kRows;
  return b.p.weights + static_cast<u32>(thread) * 16u;
}

// In the place of CUDA's ring, by its name.
struct Ring {
  u32 next = 0;  // of the block's fragments

  KOG_DEVICE void begin_token() { next = 0; }
  KOG_DEVICE void tell_acquired(const Block&) const {}  // a warp loads what it has acquired itself
  // Of a stage alone: behind so many fragments.
  KOG_DEVICE void begin_at(int fragments) { next = static_cast<u32>(fragments); }
  // The thread's 16 bytes of the next fragment, on its way until they are used. `from`: thread_weights.
  KOG_DEVICE uint4 take(const Block& b, const u8* from) {
    // of_wave: else the compiler keeps an address of two registers a thread for every load of a loop.
    u32 slot = of_wave(next++ * kBlocks + static_cast<u32>(b.block));
    return load_streamed(from + static_cast<u64>(slot) * kRingSlotBytes);
  }
};

// Where the stream is, while a warp of a kernel of columns does not multiply: as CUDA's (columns/warp_state.h).
KOG_DEVICE void save_ring(const Block& b, const Ring& ring) {
  store_volatile(&b.small->warp_states[b.warp].slot, ring.next);
}
KOG_DEVICE Ring load_ring(const Block& b) { return {of_wave(load_volatile(&b.small->warp_states[b.warp].slot))}; }
KOG_DEVICE void begin_ring(const Block& b) { save_ring(b, Ring()); }

// Small things, before the block's first barrier.
KOG_DEVICE void init_block(Block& b) {
  if (b.thread == 0) b.small->stop = b.small->leave = b.small->joins = b.small->walks = 0;
  if (b.thread < kWarps) b.small->waits[b.thread] = 0;
}

}  // namespace kog
