// Why a request ends with a token, and what the host is told of it.
#pragma once
#include <kog/sample.h>
#include <kog/cursor.h>

namespace kog {

// What the token means for the request: kRunning, or why it ends; by whole warps.
KOG_DEVICE int outcome_of(const Block& b, const Ending& ending, int token, int made) {
  if (token < 0) return token == kNothing ? kNothingAllowed : kNotFinite;
  if (ending.stops_at(b, token)) return kStop;
  if (made >= static_cast<int>(ending.most)) return kLength;
  return static_cast<int>(b.small->control);
}

// The token that a step has made of a request, if it has, its number and what it means for the request, in
// the request's outbox (token_words.py); and, if the step `ends`, how many have.
KOG_DEVICE void tell_host(const Block& b, int slot, int token, int outcome, int made, int steps,
                          bool ends) {
  u64 now = nanoseconds();
  if (made > 0) {
    u64 at = static_cast<u64>(slot) * (b.p.positions + 1) + static_cast<u64>(made - 1);
    u64 high = static_cast<u64>(outcome << kOutcomeShift | made);
    store_system_pair(b.p.outbox + 2 * at, high << 32 | static_cast<u32>(token), now);
  }
  if (ends) store_system_pair(b.p.mailbox + Mailbox::kSteps, static_cast<u64>(steps), now);
}

// Steps until one ends a request or the launch: run(), then end(), which says whether it does. Block 0 then
// saves how all requests stand: save() returns the slot of the one that ended. Methods, since a lambda so
// long may become a function, which keeps its block in memory.
template <class Steps>
KOG_DEVICE void run_steps(Block& b, Steps& steps) {
  int outcome = kRunning;
  while (outcome == kRunning) {
    pair_clocks(b, b.profile_row % kProfileTokens);
    steps.run();
    b.profile_row++;
    // The one place where the warps of a block learn of each other's expired waits.
    outcome = any_consumer(must_leave(b)) ? static_cast<int>(kFailed) : steps.end();
    rejoin();
  }
  pair_clocks(b, kProfileTokens);
  if (b.thread == 0) store_volatile(&b.small->stop, 1);
  if (b.block != 0) return;
  int slot = steps.save();
  if (b.thread == 0)
    store_system_pair(b.p.mailbox + Mailbox::kOutcome, static_cast<u64>(outcome), static_cast<u64>(slot));
}

}  // namespace kog
