// One launch gives each of its requests the first token: a step that begins at the head, with the streams of a prompt's
// last token that the host has run through all layers. None that ends its request ends the launch.
//
// A kernel of its own: with a way past the layers that of one token spilled 36 registers more, of Llama-3.2-1B.
#pragma once
#include <kog/decode.h>

namespace kog::head_steps {

struct Steps : kog::Steps {
  KOG_DEVICE void run() {
    const RequestCursor& cursor = order.of(b);
    slot = cursor.slot;
    select_request(b, cursor, order.position(b));
    b.layer = kLayers;
    load_streams(b, b.p.streams + static_cast<u64>(slot) * kLanes * kHiddenStride, walk.x);
    load_gains(b, 2 * kLayers, walk.gain);
    run_head(b, walk, b.small->position);
  }
  KOG_DEVICE int end() {
    int outcome = end_step(b, walk, order);
    order.steps++;
    if (order.steps < b.p.num_requests) return kRunning;
    return outcome == kRunning ? static_cast<int>(kYield) : outcome;
  }
};

KOG_DEVICE void consume(Block& b) {
  Steps steps{{b}};
  run_steps(b, steps);
}

// The head's part of the block's stream, again for each request.
KOG_DEVICE void produce(Block& b) {
  b.begin_stage();
  int first = ring_slots_of_runs(b, kRuns), slots = ring_slots_of_runs(b, kRuns + 1) - first;
  Producer producer;
  for (int n = 0; n < b.p.num_requests; n++)
    if (Stream stream(b, first, slots); !stream.fill_run(b, producer, kRuns)) break;
  producer.drain(b);
}

}  // namespace kog::head_steps
