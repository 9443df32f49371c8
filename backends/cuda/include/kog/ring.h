// The weight stream: one warp keeps a ring of chunks in shared memory full, whatever the others
// wait for.
#pragma once
#include <kog/block.h>

namespace kog {

// The consumers' side. All lanes wait; one says that the warp is done.
struct Ring {
  u32 slot = 0, parity = 0;

  KOG_DEVICE const u8* wait(Block& b) {
    Patience patience;
    while (any_lane(
        !barrier_try(&b.full[slot], parity)))  // lanes may not agree on a chunk that lands just now
      if (patience.expired(b, Step::kRing, slot, ~slot)) break;
    return b.ring + slot * kChunkBytes;
  }
  KOG_DEVICE void release(Block& b) {
    sync_warp();
    if (b.in_warp == 0) barrier_arrive(&b.empty[slot]);
    if (++slot == kRingChunks) {
      slot = 0;
      parity ^= 1;
    }
  }
};

KOG_DEVICE void init_ring(Block& b) {
  if (b.thread == 0) {
    for (int i = 0; i < kRingChunks; i++) {
      barrier_init(&b.full[i], 1);
      barrier_init(&b.empty[i], kWarps);
    }
    b.small->stop = 0;
    barrier_init_fence();
  }
}

// The producer's side: chunk `count` goes to slot count % kRingChunks.
struct Producer {
  u32 count = 0, slot = 0;

  // False once the consumers have left.
  KOG_DEVICE bool wait(Block& b, u64* barrier, u32 parity) {
    while (!barrier_try(barrier, parity))
      if (load_volatile(&b.small->stop) != 0) return false;
    return true;
  }
  KOG_DEVICE bool fill(Block& b, const u8* from) {
    if (count >= kRingChunks && !wait(b, &b.empty[slot], (count / kRingChunks - 1) & 1))
      return false;
    if (count >= kWindowChunks) {  // few bytes in flight: polls queue behind them
      u32 oldest = count - kWindowChunks;
      if (!wait(b, &b.full[oldest % kRingChunks], (oldest / kRingChunks) & 1)) return false;
    }
    barrier_expect(&b.full[slot], kChunkBytes);
    bulk_load(b.ring + slot * kChunkBytes, from, kChunkBytes, &b.full[slot]);
    count++;
    slot = slot + 1 == kRingChunks ? 0 : slot + 1;
    return true;
  }
  // What is in flight must land before the block may leave.
  KOG_DEVICE void drain(Block& b) {
    u32 first = count > kRingChunks ? count - kRingChunks : 0;
    for (u32 i = first; i < count; i++)
      while (!barrier_try(&b.full[i % kRingChunks], (i / kRingChunks) & 1)) {
      }
  }
};

// Chunks of one token: all layers, then the head if the token has one. Runs ahead until the
// consumers leave.
KOG_DEVICE void produce(Block& b) {
  int layers = 0;
  for (int i = 0; i < kLayers; i++)
    layers += chunks_of<QkvProj>(b.place, i) + chunks_of<OProj>(b.place, i) +
              chunks_of<GateUpProj>(b.place, i) + chunks_of<DownProj>(b.place, i);
  int head = chunks_of<LmHead>(stage_place<LmHead>(b), 0);
  int prompt = b.request[Request::kPrompt];
  bool all_logits = b.request[Request::kAllLogits] != 0;
  Producer producer;
  for (int position = b.request[Request::kFirst];; position++) {
    const u8* from = b.p.weights + static_cast<u64>(b.block) * kChunkBytes;
    int chunks = layers + (position + 1 >= prompt || all_logits ? head : 0);
    for (int i = 0; i < chunks; i++, from += static_cast<u64>(kBlocks) * kChunkBytes)
      if (!producer.fill(b, from)) return producer.drain(b);
    if (load_volatile(&b.small->stop) != 0) return producer.drain(b);
  }
}

}  // namespace kog
