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

// Again for each request.
KOG_DEVICE void produce(Block& b) { produce_heads(b, b.p.num_requests); }

}  // namespace kog::head_steps
