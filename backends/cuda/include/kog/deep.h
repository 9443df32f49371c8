// Attention in a kernel of deep positions (kDeep): keys and values come through the ring of the weights. They have come
// when the queries do, and the memory stays busy while blocks wait for those and while they join what they have found.
// In short contexts the other kernel, whose warps load tiles themselves, is quicker (benchmarks/cuda-log.md#deep-kernel);
// both add in one order, and find the same bits.
//
// A ring slot holds kSlotTiles tiles of keys, then as many of values.
#pragma once
#include <kog/heads.h>
#include <kog/merge.h>
#include <kog/ring.h>

namespace kog {

constexpr int kTileBytes = kTileRows * kRowDim * 2;  // of keys, or of values
// As many as there is room for, of which a round of a group's warps takes whole slots.
KOG_DEVICE constexpr int slot_tiles() {
  int room = kRingSlotBytes / (2 * kTileBytes), tiles = room < kWarpsAGroup ? room : kWarpsAGroup;
  while (tiles > 1 && kWarpsAGroup % tiles != 0) tiles--;
  return tiles < 1 ? 1 : tiles;
}
constexpr int kSlotTiles = slot_tiles(), kSlotRows = kSlotTiles * kTileRows, kRoundSlots = kWarpsAGroup / kSlotTiles;
constexpr int kValuesAt = kSlotTiles * kTileBytes;  // of a ring slot
static_assert(!kDeep || 2 * kValuesAt <= kRingSlotBytes);

// Leaves `count` ring slots, whose tiles are other warps', as they come.
KOG_DEVICE void leave_slots(Block& b, Ring& ring, int count) {
#pragma unroll 1
  for (; count > 0; count--) {
    ring.wait_for<1>(b);
    ring.release(b);
  }
}
// A warp's tiles of a span, whose first `cached` rows come through the ring, in `slots` slots; the last row may be new.
// Returns how many of the slots lie behind the warp's last tile.
KOG_DEVICE int walk_ring(Block& b, Ring& ring, const Span& span, int cached, int slots, Softmax& softmax) {
  int walker = b.warp % kWarpsAGroup, rows = span.end - span.start, others = walker / kSlotTiles;
  AttentionScratch scratch(b);
  const uint4* queries = scratch.queries + b.warp / kWarpsAGroup * kDimSteps * kWarpThreads + b.in_warp;
#pragma unroll 1
  for (int at = walker * kTileRows; at < rows; at += kRoundRows) {
    bool comes = at < cached;  // or the tile has but the new row
    if (comes) {
      leave_slots(b, ring, others);
      ring.wait_for<1>(b);
      slots -= others + 1;
      others = kRoundSlots - 1;
    }
    auto word_of = [&](int row) { return at + row == cached && cached < rows ? 0 : -1; };  // of the new row
    const u8* tile = ring.weights(b) + walker % kSlotTiles * kTileBytes;
    Keys keys;
    keys.take(b, tile, cached - at);
    keys.patch(b, scratch.key, word_of);
    float p[kTileRows / 8][2];
    softmax.weigh(b, queries, keys, rows - at, p);
    Values values;
    values.take(b, tile + kValuesAt, cached - at);
    values.patch(b, scratch.value, word_of);
    if (comes) ring.release(b);
    add_values(b, values, p, softmax.out);
  }
  return slots;
}
// walk_span (attention.h) of a kernel of deep positions.
KOG_DEVICE void walk_deep_span(Block& b, Ring& ring, const Span& span, int position, u32 phase, const NewRows& rows) {
  int cached = rows.start(span) - span.start, slots = (cached + kSlotRows - 1) / kSlotRows;
  int tiles = tiles_of(span), walked = tiles < kWarpsAGroup ? tiles : kWarpsAGroup;
  bool walks = b.warp / kWarpsAGroup < kHeadGroups && b.warp % kWarpsAGroup < walked;
  rows.receive(b, span, position, phase);

  Softmax softmax;
  if (walks) slots = walk_ring(b, ring, span, cached, slots, softmax);
  leave_slots(b, ring, slots);  // ahead of every barrier: the others may need slots that these make room for
  AttentionScratch scratch(b);
  put_results(b, walks, walked, softmax, scratch);
  merge_warps(b, walked, scratch, [&](int query, int pair, float2 v, float log) {
    publish_split(b, span, query, pair, v, log, phase);
  });
  stamp(b, Point::kAttentionSplit);
  leave_results();
}

}  // namespace kog
