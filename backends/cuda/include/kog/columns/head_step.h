// One step gives up to kColumns requests, whose prompts the host has run through all layers, the first token: it begins
// at the head, with the streams of each one's last token. The head's weights are read once for all of them, where
// ../head_steps.h reads them for each.
#pragma once
#include <kog/columns/decode.h>
#include <kog/produce.h>

namespace kog::columns::head_step {
static_assert(kLanes == 1, "the streams of lanes come from words");

struct FromSlots {
  KOG_DEVICE static HeldStreams streams(const Block&) { return {}; }
};

struct OneStep : columns::Steps {
  KOG_DEVICE void run() {
    b.layer = kLayers;
    run_head<FromSlots>(b);
  }
};

KOG_DEVICE void consume(Block& b) { columns::consume<OneStep>(b); }
KOG_DEVICE void produce(Block& b) { produce_heads(b, 1); }

}  // namespace kog::columns::head_step
