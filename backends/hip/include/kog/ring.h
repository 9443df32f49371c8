// The weight stream of one token, straight from memory to registers. A block's fragments lie in the order of its walk,
// so where the next one is needs no table: a thread's place in the stream moves on by one fragment of all blocks.
#pragma once
#include <kog/cursor.h>

namespace kog {

// In the place of CUDA's ring, by its name.
struct Ring {
  u64 offset = 0;  // of the next fragment, from the block's first

  KOG_DEVICE void begin_token() { offset = 0; }
  // Of a stage alone: behind so many fragments.
  KOG_DEVICE void begin_at(int fragments) { offset = static_cast<u64>(fragments) * kBlocks * kRingSlotBytes; }
  // The thread's 16 bytes of the next fragment; on its way until they are used.
  KOG_DEVICE uint4 take(const Block& b) {
    const u8* first = b.p.weights + static_cast<u64>(b.block) * kRingSlotBytes + offset;
    offset += static_cast<u64>(kBlocks) * kRingSlotBytes;
    return load_streamed(first + b.thread * 16);
  }
};

// Small things, before the block's first barrier.
KOG_DEVICE void init_block(Block& b) {
  if (b.thread == 0) b.small->stop = b.small->leave = b.small->joins = b.small->walks = 0;
  if (b.thread < kWarps) b.small->waits[b.thread] = 0;
}

}  // namespace kog
