// One launch serves a request from its first prompt token to its stop: the walk of one block.
#pragma once
#include <kog/head.h>

namespace kog {

// What the token means for the request: kRunning, or why it ends.
KOG_DEVICE int outcome_of(const Block& b, int token, int made) {
  const u32* r = b.request;
  if (token < 0) return kNotFinite;
  for (u32 i = 0; i < r[Request::kNumStops]; i++)
    if (static_cast<int>(r[Request::kStopIds + i]) == token) return kStop;
  if (made >= static_cast<int>(r[Request::kMost])) return kLength;
  return static_cast<int>(b.small->control);
}

KOG_DEVICE void tell_host(const Block& b, int token, int made) {
  if (b.block != 0 || b.thread != 32 * kWarps - 1) return;
  u64 word = static_cast<u64>(made) << 32 | static_cast<u32>(token);
  store_system_pair(b.p.mailbox + 8 + 2 * (made - 1), word, nanoseconds());
}

KOG_DEVICE void consume(Block& b) {
  Walk k;
  int position = static_cast<int>(b.request[Request::kFirst]);
  int prompt = static_cast<int>(b.request[Request::kPrompt]);
  bool all = b.request[Request::kAllLogits] != 0;
  int token = b.p.tokens[position], outcome = kRunning;
  while (outcome == kRunning) {
    bool has_head = position + 1 >= prompt || all;
    b.begin_stage();
    load_gains(b, 0, k.gain);
    embed(b, token, k.x);
    for (b.layer = 0; b.layer < kLayers; b.layer++) run_layer(b, k, position);
    if (has_head) run_head(b, k, position);
    // The one place where the warps of a block learn of each other's expired waits.
    if (any_consumer(b.dead)) {
      outcome = kFailed;
      break;
    }
    position++;
    if (has_head) {
      token = agreed(b);
      k.heads++;
      tell_host(b, token, k.heads);
      outcome = outcome_of(b, token, k.heads);
    }
    if (position < prompt) token = b.p.tokens[position];
  }
  if (b.thread == 0) store_volatile(&b.small->stop, 1);
  if (b.block == 0 && b.thread == 0)
    store_system_pair(b.p.mailbox + 2, static_cast<u64>(outcome), k.heads);
}

}  // namespace kog
