// The requests that one launch serves: one token of each, round robin, in the host's order.
//
// Who is served and from where does not change while the kernel runs, so every warp of every block
// knows each step's position by counting, and the one that fills the ring knows it ahead of time. A
// request that comes or goes ends the launch; the next one goes on with what `save_cursors` left.
#pragma once
#include <kog/block.h>

namespace kog {

// Lays out one request's cursor a thread; by one warp, before the block's first barrier.
KOG_DEVICE void load_cursors(Block& b) {
  if (b.thread >= b.p.num_requests) return;
  int slot = b.p.order[b.thread];
  const u32* request = b.p.request + slot * kRequestWords;
  bool all = (request[Request::kFlags] & kAllLogits) != 0;
  int first_head = all ? 0 : static_cast<int>(request[Request::kPrompt]) - 1;
  b.small->cursors[b.thread] = {slot, b.p.states[2 * slot], first_head, b.p.states[2 * slot + 1]};
}

// Whose step it is, by the number of steps before it.
struct StepOrder {
  int steps = 0;

  KOG_DEVICE RequestCursor& of(const Block& b) const { return b.small->cursors[steps % b.p.num_requests]; }
  KOG_DEVICE int position(const Block& b) const { return of(b).first + steps / b.p.num_requests; }
  KOG_DEVICE bool has_head(const Block& b) const { return position(b) >= of(b).first_head; }
};

// What says whether a token ends its request: asked for before the blocks agree on the token.
struct Ending {
  u32 most, count, first;  // tokens, stop ids, and of those the one of this thread
  Memory<const u32> stops;

  KOG_DEVICE void load(const Block& b) {
    u32 at = b.request[Request::kStopIds], mine = at + static_cast<u32>(b.in_warp);
    most = b.request[Request::kMost];
    count = b.request[Request::kStopIds + 1];
    stops = b.request + at;
    first = b.request[mine < kRequestWords ? mine : 0];
  }
  // By whole warps.
  KOG_DEVICE bool stops_at(const Block& b, int token) const {
    u32 thread = static_cast<u32>(b.in_warp);
    bool stop = thread < count && static_cast<int>(first) == token;
#pragma unroll 1
    for (u32 i = thread + kWarpThreads; i < count; i += kWarpThreads) stop |= static_cast<int>(stops[i]) == token;
    return any_in_warp(stop);
  }
};

// Make the cursor's request the one in hand; every thread writes the same.
KOG_DEVICE void select_request(Block& b, const RequestCursor& cursor, int position) {
  b.request = b.p.request + cursor.slot * kRequestWords;
  b.small->slot = cursor.slot;
  b.small->token = cursor.token;
  b.small->position = position;
}

// The token of a prompt at a position.
KOG_DEVICE int prompt_token(const Block& b, const RequestCursor& cursor, int position) {
  return b.p.tokens[static_cast<u64>(cursor.slot) * (b.p.positions + 1) + position];
}

// Where every request stands, for the next launch; by one block. done(i): steps of request i.
template <class Done>
KOG_DEVICE void save_cursors(const Block& b, Done done) {
  if (b.thread >= b.p.num_requests) return;
  const RequestCursor& cursor = b.small->cursors[b.thread];
  b.p.states[2 * cursor.slot] = cursor.first + done(b.thread);
  b.p.states[2 * cursor.slot + 1] = cursor.token;
}

}  // namespace kog
