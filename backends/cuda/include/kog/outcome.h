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

// A token and its number in the request's outbox.
KOG_DEVICE void tell_token(const Block& b, int slot, int token, int made, u64 now) {
  u64 at = static_cast<u64>(slot) * (kMaxContext + 1) + static_cast<u64>(made - 1);
  store_system_pair(b.p.outbox + 2 * at, static_cast<u64>(made) << 32 | static_cast<u32>(token), now);
}

}  // namespace kog
