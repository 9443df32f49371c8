// The weight stream of one token, straight from memory to registers. A block's fragments lie in the order of its walk,
// so where the next one is needs no table: a thread's place in the stream moves on by one fragment of all blocks.
#pragma once
#include <kog/cursor.h>

namespace kog {

// Whose 16 bytes of all warps' a thread takes. Those of a fragment lie row by row; matrix products want a row's in
// threads kRows apart (mma/operands.h).
template <int kRows>
KOG_DEVICE int thread_in_stream(const Block& b) {
  if constexpr (kColumns == 1) return b.thread;
  return b.warp * kWarpThreads + b.in_warp % kRows * (kWarpThreads / kRows) + b.in_warp / kRows;
}

// In the place of CUDA's ring, by its name.
struct Ring {
  u64 offset = 0;  // of the next fragment, from the block's first

  KOG_DEVICE void begin_token() { offset = 0; }
  // Of a stage alone: behind so many fragments.
  KOG_DEVICE void begin_at(int fragments) { offset = static_cast<u64>(fragments) * kBlocks * kRingSlotBytes; }
  // The thread's 16 bytes of the next fragment, of kRows rows; on its way until they are used.
  template <int kRows>
  KOG_DEVICE uint4 take(const Block& b) {
    return take(b, thread_in_stream<kRows>(b));
  }
  KOG_DEVICE uint4 take(const Block& b, int thread) {
    const u8* first = b.p.weights + static_cast<u64>(b.block) * kRingSlotBytes + offset;
    offset += static_cast<u64>(kBlocks) * kRingSlotBytes;
    return load_streamed(first + thread * 16);
  }
};

// Where the stream is, while a warp of a kernel of columns does not multiply: as CUDA's (columns/warp_state.h).
KOG_DEVICE void save_ring(const Block& b, const Ring& ring) {
  store_volatile(&b.small->warp_states[b.warp].slot, static_cast<u32>(ring.offset));
  store_volatile(&b.small->warp_states[b.warp].parity, static_cast<u32>(ring.offset >> 32));
}
KOG_DEVICE Ring load_ring(const Block& b) {
  u32 low = of_wave(load_volatile(&b.small->warp_states[b.warp].slot));
  return {low | static_cast<u64>(of_wave(load_volatile(&b.small->warp_states[b.warp].parity))) << 32};
}
KOG_DEVICE void begin_ring(const Block& b) { save_ring(b, Ring()); }

// Small things, before the block's first barrier.
KOG_DEVICE void init_block(Block& b) {
  if (b.thread == 0) b.small->stop = b.small->leave = b.small->joins = b.small->walks = 0;
  if (b.thread < kWarps) b.small->waits[b.thread] = 0;
}

}  // namespace kog
