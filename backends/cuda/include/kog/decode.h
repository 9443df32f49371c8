// One launch serves its requests round robin, a token each, until one ends or the host wants control:
// the walk of one block.
#pragma once
#include <kog/head.h>
#include <kog/outcome.h>
#include <kog/produce.h>

namespace kog {

// The one thread that writes to the host while the kernel runs: late to have work of its own.
KOG_DEVICE bool is_host_writer(const Block& b) { return b.block == 0 && b.thread == kConsumers - 1; }

// What a step begins with.
KOG_DEVICE void begin_step(Block& b, Walk& walk, const StepOrder& order) {
  b.begin_stage();
  load_gains(b, 0, walk.gain);
  int token = order.of(b).token;
  walk.embedded.load(b, token > 0 ? token : 0);  // below 0: the request ends, and why
}

// What run_step does, where weights are asked for between the looks of waits: the head's, too.
KOG_DEVICE void run_step_between(Block& b, Walk& walk, const StepOrder& order) {
  Behind behind;
  run_layers_between(b, walk, behind);
  if (order.has_head(b)) {
    HeadWeights weights;
    behind.give(weights);
    using Rest = Part<HeadWeights, Behind::kCount, HeadWeights::kCount>;
    join_mlp_out(b, walk, taken_between(b, walk.ring, 0, Rest{weights}));
    b.layer++;
    run_head(b, walk, b.small->position, weights);
  } else {
    join_mlp_out(b, walk);
    b.layer++;
    acquire_cache(b, walk);
  }
}

// All layers of one token, and the head if its logits are wanted.
KOG_DEVICE void run_step(Block& b, Walk& walk, const StepOrder& order) {
  select_request(b, order.of(b), order.position(b));
  walk.ring.begin_token();
  if constexpr (kLeastOnWay > 0) return run_step_between(b, walk, order);
  walk.embedded.unpack(b, walk.x);
  if constexpr (Ahead<QkvProj, true>::kCount > 0)
    run_layers_ahead(b, walk);
  else
    run_layers_in_order(b, walk);
  if (order.has_head(b))
    run_head(b, walk, b.small->position);
  else
    acquire_cache(b, walk);
}

// After a request's step: its next token, and whether the request goes on. What the next step
// begins with is on its way while that is decided.
KOG_DEVICE int end_step(Block& b, Walk& walk, const StepOrder& order) {
  RequestCursor& cursor = order.of(b);
  int position = order.position(b), made = position - cursor.first_head + 1;
  int token = 0;
  if (made > 0) {
    token = agreed(b);
    walk.heads++;
  }
  bool in_prompt = made <= 0;
  if (cursor.first_head == 0)  // one token, or the logits of all
    in_prompt = position + 1 < static_cast<int>(b.request[Request::kPrompt]);
  int next = in_prompt ? prompt_token(b, cursor, position + 1) : token;
  // Every thread writes what every thread has computed, and reads its own; a thread that is a
  // step ahead has met the others since they read.
  cursor.token = next;
  begin_step(b, walk, StepOrder{order.steps + 1});
  int outcome = made > 0 ? outcome_of(b, walk.ending, token, made) : static_cast<int>(kRunning);
  if (is_host_writer(b)) tell_host(b, cursor.slot, token, outcome, made, order.steps + 1, true);
  return outcome;
}

// The steps of a launch, a request's each.
struct Steps {
  Block& b;
  Walk walk;
  StepOrder order;
  int slot = 0;

  KOG_DEVICE void run() {
    run_step(b, walk, order);
    slot = order.of(b).slot;
  }
  KOG_DEVICE int end() {
    int outcome = end_step(b, walk, order);
    order.steps++;
    return order.steps == b.p.most_steps && outcome == kRunning ? static_cast<int>(kYield) : outcome;
  }
  KOG_DEVICE int save() const {
    save_cursors(
        b, [&](int cursor) { return (order.steps + b.p.num_requests - 1 - cursor) / b.p.num_requests; });
    return slot;
  }
};

KOG_DEVICE void consume(Block& b) {
  Steps steps{b};
  begin_step(b, steps.walk, steps.order);
  run_steps(b, steps);
}

}  // namespace kog
