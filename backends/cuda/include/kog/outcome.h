// Why a request ends with a token, and what the host is told of it.
#pragma once
#include <kog/sample.h>
#include <kog/seat.h>

namespace kog {

// What the token means for the request: kRunning, or why it ends; by whole warps.
KOG_DEVICE int outcome_of(const Block& b, const Ending& ending, int token, int made) {
  if (token < 0) return token == kNothing ? kNothingAllowed : kNotFinite;
  if (ending.stops_at(b, token)) return kStop;
  if (made >= static_cast<int>(ending.most)) return kLength;
  return static_cast<int>(b.small->control);
}

// A token, its number and what it means for its request in the request's outbox (token_words.py).
KOG_DEVICE void tell_token(const Block& b, int slot, int token, int outcome, int made, u64 now) {
  u64 at = static_cast<u64>(slot) * (kMaxContext + 1) + static_cast<u64>(made - 1);
  u64 high = static_cast<u64>(outcome << kOutcomeShift | made);
  store_system_pair(b.p.outbox + 2 * at, high << 32 | static_cast<u32>(token), now);
}

}  // namespace kog
