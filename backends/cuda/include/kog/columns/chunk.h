// A chunk of a prompt: the columns of a step are positions in a row of one request, so that a
// column sees what those ahead of it append. Their keys and values come to it as its own do: as
// words of qkv_proj, rotated and rounded by each KV task for itself. No step waits for the cache, and
// each column computes what a kernel of one token does at its position, bit for bit.
//
//   [0, first)          in the cache, by steps or launches before this one
//   [first, position]   words of the columns up to the KV task's own, of this step
#pragma once
#include <kog/attention.h>
#include <kog/columns/flags.h>
#include <kog/columns/position.h>

namespace kog::columns {

// The tokens of a chunk's columns: the host's states tell that of the first. By the first warp,
// ahead of a barrier.
KOG_DEVICE void spread_cursors(const Block& b) {
  if (b.thread >= b.p.num_requests) return;
  RequestCursor& cursor = b.small->cursors[b.thread];
  cursor.token = prompt_token(b, cursor, position_of(b, b.thread, 0));
}

// Where the request stands behind `steps` chunks, for the next launch; by one thread.
KOG_DEVICE void save_chunks(const Block& b, int steps) {
  const RequestCursor& cursor = b.small->cursors[0];
  int next = ahead_of(b, 0, steps), last = cursor.first_head;
  // Behind the prompt comes the token of the column that stood at its end.
  int column = next > last ? (last - cursor.first) % kColumns : 0;
  b.p.states[2 * cursor.slot] = next > last ? last + 1 : next;
  b.p.states[2 * cursor.slot + 1] = b.small->cursors[column].token;
}

}  // namespace kog::columns
