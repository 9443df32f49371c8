// Which position a column's token stands at, and whether its logits are wanted.
//
//   requests   each column a request of its own, at its next position
//   a chunk    (kChunk) kColumns positions in a row of one prompt; behind its end the last one
//              again: such a column computes what that one does and leaves nothing but words
#pragma once
#include <kog/cursor.h>

namespace kog::columns {

// Of a chunk's column, were the prompt longer.
KOG_DEVICE int ahead_of(const Block& b, int column, int steps) {
  return b.small->cursors[column].first + steps * kColumns + column;
}
KOG_DEVICE int position_of(const Block& b, int column, int steps) {
  const RequestCursor& cursor = b.small->cursors[column];
  if constexpr (!kChunk) return cursor.first + steps;
  int ahead = ahead_of(b, column, steps);
  return ahead < cursor.first_head ? ahead : cursor.first_head;
}

// Tokens that the request has with this step's, 0 while its prompt goes on.
KOG_DEVICE int made_by(const Block& b, int column, int steps) {
  int last = b.small->cursors[column].first_head;
  if constexpr (kChunk) return ahead_of(b, column, steps) == last;
  return position_of(b, column, steps) - last + 1;
}
KOG_DEVICE bool has_head(const Block& b, int column, int steps) {
  return made_by(b, column, steps) > 0;
}
KOG_DEVICE bool any_head(const Block& b, int steps) {
  bool any = false;
#pragma unroll 1
  for (int c = 0; c < b.p.num_requests; c++) any |= has_head(b, c, steps);
  return any;
}

}  // namespace kog::columns
