// The producer's walk: the weights of one token after the other, and ahead of each layer's attention the first tiles of
// its keys and values; or, between q, k and v's weights and o_proj's, all keys and values (deep.h).
#pragma once
#include <kog/attention.h>
#include <kog/runs.h>

namespace kog {

// Bring what the warps ask for first of a span into the L2: from the memory it would come late, and
// answers to polls wait behind it.
KOG_DEVICE void fetch_span(const Block& b, int slot, int layer, const Span& span) {
  int rows = span.end - span.start;
  if (rows > kRoundRows) rows = kRoundRows;
  const u16* keys = cache_at(b, slot, layer, span.head) + static_cast<u64>(span.start) * kRowDim;
  fetch_to_l2(keys, static_cast<u32>(rows) * kRowDim * 2);
  fetch_to_l2(keys + static_cast<u32>(b.p.plane), static_cast<u32>(rows) * kRowDim * 2);
}

// Bring this block's part of a layer's attention into the L2.
KOG_DEVICE void fetch_tiles(const Block& b, int slot, int layer, int position) {
  if (position >= b.p.positions) return;  // ahead of the end of a request
  for (int kv_task = b.group_index; kv_task < kKvTasks; kv_task += kGroup) {
    Span span = span_of(kv_task / kSplits, kv_task % kSplits, position, kWindows[layer]);
    if (span.split < span.used) fetch_span(b, slot, layer, span);
  }
}

// Until all warps have acquired what the launch's first `steps` steps have appended to the cache (acquire_cache). False
// once the consumers have left.
KOG_DEVICE bool wait_for_rows(const Block& b, int steps) {
  while (static_cast<int>(load_volatile(&b.small->acquired)) < kWarps * steps) {
    if (load_volatile(&b.small->stop) != 0) return false;
    look_again();
  }
  acquire_for_copies(&b.small->acquired);
  return true;
}
// A span's rows that the cache holds at `position`, in step number `steps`; the row of the step before comes last. False
// once the consumers have left.
KOG_DEVICE bool fill_span(Block& b, Producer& producer, int slot, int layer, const Span& span, int position, int steps) {
  const u16* keys = cache_at(b, slot, layer, span.head) + static_cast<u64>(span.start) * kRowDim;
  int end = span.newest ? position : span.end;
  for (int left = end - span.start; left > 0; left -= kSlotRows, keys += kSlotRows * kRowDim) {
    if (end == position && left <= kSlotRows && !wait_for_rows(b, steps)) return false;
    u32 bytes = static_cast<u32>(left < kSlotRows ? left : kSlotRows) * kRowDim * 2;
    if (!producer.begin_slot(b, nullptr, 2 * bytes, 0)) return false;
    producer.copy(b, 0, keys, bytes);
    producer.copy(b, kValuesAt, keys + static_cast<u32>(b.p.plane), bytes);
    producer.end_slot(b);
  }
  return true;
}
// The rows of all spans that this block walks in a layer.
KOG_DEVICE bool fill_spans(Block& b, Producer& producer, int slot, int layer, int position, int steps) {
  if (position >= b.p.positions) return true;  // ahead of the end of a request
  if (!wait_for_rows(b, steps - 1)) return false;
  for (int kv_task = b.group_index; kv_task < kKvTasks; kv_task += kGroup) {
    Span span = span_of(kv_task / kSplits, kv_task % kSplits, position, kWindows[layer]);
    if (span.split < span.used && !fill_span(b, producer, slot, layer, span, position, steps)) return false;
  }
  return true;
}

template <class... Stages>
constexpr bool kFragmentsAlike = ((kFragmentOfAll<typename Stages::Weights> == kWarps * kFragmentBytes) && ...);
// Bytes of a fragment of all warps, in a run.
KOG_DEVICE int fragment_bytes_of_run(int run) {
  if constexpr (kFragmentsAlike<QkvProj, OProj, GateUpProj, DownProj, LmHead>) return kWarps * kFragmentBytes;
  if (run == kRuns) return kFragmentOfAll<LmHead::Weights>;
  return LayerMatrices::fragment_bytes(run % LayerMatrices::kCount);
}

// Where a block's stream of one token has got to, and how many ring slots of it are left.
struct Stream {
  const u8* from;
  int left;

  KOG_DEVICE Stream(const Block& b, int first, int slots) : left(slots) {
    u64 slot = static_cast<u64>(first) * kBlocks + static_cast<u64>(b.block);
    from = b.p.weights + slot * kRingSlotBytes;
  }
  // False once the consumers have left.
  KOG_DEVICE bool fill_run(Block& b, Producer& producer, int run) {
    const int fragment_bytes = fragment_bytes_of_run(run);
    for (int n = fragments_of_run(b, run); n > 0; n -= kFragments, left--) {
      int bytes = (n < kFragments ? n : kFragments) * fragment_bytes;
      if (!producer.fill(b, from, static_cast<u32>(bytes), left)) return false;
      from += static_cast<u64>(kBlocks) * kRingSlotBytes;
    }
    return true;
  }
};

// Ring slots of one step after the other: all layers, then the head if has_head(steps). fetch(layer, steps): ahead of a
// layer's first. fill(producer, layer, steps): behind its first run, if kDeep; false once the consumers have left. Runs
// ahead until they leave.
template <class HasHead, class Fetch, class Fill>
KOG_DEVICE void produce_steps(Block& b, HasHead has_head, Fetch fetch, Fill fill) {
  b.begin_stage();  // a block's number that the watching warp shares would be spilled there as well
  int layers = ring_slots_of_runs(b, kRuns), all = ring_slots_of_runs(b, kRuns + 1);
  Producer producer;
  for (int steps = 0;; steps++) {
    Stream stream(b, 0, has_head(steps) ? all : layers);
    for (int run = 0; stream.left > 0; run++) {
      b.begin_stage();
      if (begins_layer(run)) fetch(layer_of_run(run), steps);
      if (!stream.fill_run(b, producer, run)) return producer.drain(b);
      if constexpr (kDeep)
        if (begins_layer(run) && !fill(producer, layer_of_run(run), steps)) return producer.drain(b);
    }
    if (load_volatile(&b.small->stop) != 0) return producer.drain(b);
  }
}
// The head's part of the block's stream, so many times.
KOG_DEVICE void produce_heads(Block& b, int count) {
  b.begin_stage();
  int first = ring_slots_of_runs(b, kRuns), slots = ring_slots_of_runs(b, kRuns + 1) - first;
  Producer producer;
  for (int n = 0; n < count; n++)
    if (Stream stream(b, first, slots); !stream.fill_run(b, producer, kRuns)) break;
  producer.drain(b);
}
KOG_DEVICE void produce(Block& b) {
  produce_steps(
      b, [&](int steps) { return StepOrder{steps}.has_head(b); },
      [&](int layer, int steps) {
        StepOrder order{steps};
        if constexpr (!kDeep) fetch_tiles(b, order.of(b).slot, layer, order.position(b));
      },
      [&](Producer& producer, int layer, int steps) {
        StepOrder order{steps};
        return fill_spans(b, producer, order.of(b).slot, layer, order.position(b), steps);
      });
}

}  // namespace kog
