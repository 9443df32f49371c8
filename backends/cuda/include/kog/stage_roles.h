// What the warps of a block do in a stage alone.
#pragma once
#include <kog/roles.h>
#include <kog/stage.h>

namespace kog {

// The stage's part of the block's stream, and behind it the next one's, of which o_proj may read the
// first ring slot (SlotWeights); attention's tiles. Consumers that leave end it.
KOG_DEVICE void produce_stage(Block& b, const StageCall& c) {
  StageId which = static_cast<StageId>(c.which);
  int run = run_of(which, b.layer);
  Producer producer;
  if (kDeep && which == StageId::kAttention) fill_spans(b, producer, 0, b.layer, c.position, 0);
  if (run >= 0) {
    int first = ring_slots_of_runs(b, run), end = run < kRuns ? run + 2 : run + 1;
    Stream stream(b, first, ring_slots_of_runs(b, end) - first);
    while (run < end && stream.fill_run(b, producer, run)) run++;
  }
  producer.drain(b);
}

KOG_DEVICE void run_stage(Block& b, const StageCall& c) {
  b.layer = c.layer;
  run_roles(
      b, [&] { consume_stage(b, c); },
      [&] { produce_stage(b, c); });
}

}  // namespace kog
