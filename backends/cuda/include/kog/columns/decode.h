// One launch serves up to kColumns requests together, a token of each a step, until one ends or the
// host wants control: the walk of one block. Who is served does not change while it runs. Or it
// serves one prompt, kColumns positions a step, until its first token (chunk.h).
#pragma once
#include <kog/columns/head.h>
#include <kog/outcome.h>

namespace kog::columns {

// All layers of one token a column, and the head if any column has logits.
KOG_DEVICE void run_step(Block& b) {
  enter_layer(b, 0);
  begin_ring(b);
  do {
    run_layer(b);
    enter_layer(b, b.layer + 1);
  } while (b.layer + 1 < kLayers);
  b.layer = kLayers;  // as a number that is known, it takes no register in what follows
  if (any_head(b, steps_of(b))) return run_head(b);
  // What the next step overwrites has been read by those who wait here.
  await_streams(b, Step::kMlpOut, layer_streams(b), iteration_of(b) - 1);
  acquire_gpu();  // acquires this step's rows of the cache: docs/SYNC.md, Fences
}

// After a step: a warp a column says what its token means and what comes next.
KOG_DEVICE void end_column(Block& b, int column) {
  RequestCursor& cursor = b.small->cursors[column];
  int made = made_by(b, column, steps_of(b));
  int token = made > 0 ? b.small->chosen[column] : 0;
  b.request = request_of(b, column);
  Ending ending;
  ending.load(b);
  int outcome = made > 0 ? outcome_of(b, ending, token, made) : static_cast<int>(kRunning);
  int next = made > 0 ? token : prompt_token(b, cursor, position_of(b, column, steps_of(b) + 1));
  if (kChunk && made > 0 && outcome == kRunning) outcome = kYield;  // the prompt is done
  if (b.in_warp != 0) return;
  cursor.token = next;
  b.small->outcomes[column] = outcome;
  if (b.block == 0)
    tell_host(b, cursor.slot, token, outcome, made, steps_of(b) + 1, column == 0);
}

// The steps of a launch, all requests' each.
struct Steps {
  Block& b;
  int last = 0;  // a column that ends its request

  KOG_DEVICE void run() { run_step(b); }
  KOG_DEVICE int end() {
    if (b.warp < b.p.num_requests) end_column(b, b.warp);
    rejoin();
    count_up(b, &WarpState::steps);
    sync_consumers();
    int outcome = kRunning;
    for (int c = b.p.num_requests - 1; c >= 0; c--)
      if (b.small->outcomes[c] != kRunning) outcome = b.small->outcomes[c], last = c;
    return steps_of(b) == b.p.most_steps && outcome == kRunning ? static_cast<int>(kYield) : outcome;
  }
  KOG_DEVICE int save() const {
    if constexpr (kChunk) {
      if (b.thread == 0) save_chunks(b, steps_of(b));
    } else {
      save_cursors(b, [&](int) { return steps_of(b); });
    }
    return b.small->cursors[last].slot;
  }
};

template <class OfLaunch = Steps>
KOG_DEVICE void consume(Block& b) {
  if (b.thread < kColumns) b.small->outcomes[b.thread] = kRunning;
  save_state(b, &WarpState::steps, 0);
  save_state(b, &WarpState::heads, 0), save_state(b, &WarpState::mixes, 0);
  save_ring(b, Ring());
  if constexpr (kChunk) {
    spread_cursors(b);
    sync_consumers();
  }
  OfLaunch steps{{b}};
  run_steps(b, steps);
}

}  // namespace kog::columns
