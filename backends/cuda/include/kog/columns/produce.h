// The producer's walk in a kernel of columns: the weights of one step after the other (../produce.h).
#pragma once
#include <kog/columns/kv_tasks.h>
#include <kog/produce.h>

namespace kog::columns {

// Bring what this block's warps ask for first in a layer's attention into the L2 (../produce.h); by
// the thread that fills the ring.
KOG_DEVICE void fetch_kv_tasks(const Block& b, int layer, int steps) {
  int n = b.group_index;
#pragma unroll 1
  for (int c = 0; c < b.p.num_requests; c++) {
    int position = position_of(b, c, steps), window = kWindows[layer];
    if (position >= b.p.positions) continue;  // ahead of the end of a request
    int blocks = blocks_of(position + 1 - first_position(position, window));
#pragma unroll 1
    for (; n < kv_tasks_of_head(blocks) * kKvHeads; n += kGroup)
      fetch_span(b, b.small->cursors[c].slot, layer, span_of_kv_task(n, blocks, position, window));
    n -= kv_tasks_of_head(blocks) * kKvHeads;
  }
}

KOG_DEVICE void produce(Block& b) {
  produce_steps(
      b, [&](int steps) { return any_head(b, steps); },
      [&](int layer, int steps) { fetch_kv_tasks(b, layer, steps); },
      [](Producer&, int, int) { return true; });
}

}  // namespace kog::columns
