// The producer's walk: the weights of one token after the other, and ahead of each layer's attention
// the first tiles of its keys and values.
#pragma once
#include <kog/attention.h>

namespace kog {

// Bring what the warps ask for first of a span into the L2: from the memory it would come late, and
// answers to polls wait behind it.
KOG_DEVICE void fetch_span(const Block& b, int slot, int layer, const Span& span) {
  int rows = span.end - span.start;
  if (rows > kWarpsAGroup * kTileRows) rows = kWarpsAGroup * kTileRows;
  const u16* keys = cache_at(b, slot, layer, span.head) + static_cast<u64>(span.start) * kRowDim;
  fetch_to_l2(keys, static_cast<u32>(rows) * kRowDim * 2);
  fetch_to_l2(keys + static_cast<u64>(kMaxContext) * kRowDim, static_cast<u32>(rows) * kRowDim * 2);
}
// The same for this block's part of a layer's attention.
KOG_DEVICE void fetch_tiles(const Block& b, int slot, int layer, int position) {
  if (position >= kMaxContext) return;  // ahead of the end of a request
  for (int unit = b.place; unit < kUnits; unit += kGroup) {
    Span span = span_of(unit / kSplits, unit % kSplits, position, kWindows[layer]);
    if (span.split < span.used) fetch_span(b, slot, layer, span);
  }
}

// Chunks of one token: all layers, then the head if the token has one. Runs ahead until the
// consumers leave.
KOG_DEVICE void produce(Block& b) {
  int layers = 0;
  auto chunks_of_layer = [&](int i) {
    return chunks_of<QkvProj>(b.place, i) + chunks_of<OProj>(b.place, i) +
           chunks_of<GateUpProj>(b.place, i) + chunks_of<DownProj>(b.place, i);
  };
  for (int i = 0; i < kLayers; i++) layers += chunks_of_layer(i);
  int head = chunks_of<LmHead>(stage_place<LmHead>(b), 0);
  Producer producer;
  for (Turn turn;; turn.steps++) {
    const u8* from = b.p.weights + static_cast<u64>(b.block) * kChunkBytes;
    int left = layers + (turn.has_head(b) ? head : 0);
    for (int layer = 0; left > 0; layer++) {
      int count = left;
      if (layer < kLayers) {
        count = chunks_of_layer(layer);
        fetch_tiles(b, turn.of(b).slot, layer, turn.position(b));
      }
      for (; count > 0; count--, left--, from += static_cast<u64>(kBlocks) * kChunkBytes)
        if (!producer.fill(b, from, left)) return producer.drain(b);
    }
    if (load_volatile(&b.small->stop) != 0) return producer.drain(b);
  }
}

}  // namespace kog
