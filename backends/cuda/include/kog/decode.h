// One launch serves its requests, a token each in turn, until one ends or the host wants to speak:
// the walk of one block.
#pragma once
#include <kog/head.h>
#include <kog/outcome.h>
#include <kog/produce.h>

namespace kog {

// The one thread that writes to the host while the kernel runs: late to have work of its own.
KOG_DEVICE bool is_speaker(const Block& b) { return b.block == 0 && b.thread == 32 * kWarps - 1; }

// What a step begins with.
KOG_DEVICE void begin_step(Block& b, Walk& k, const Turn& turn) {
  b.begin_stage();
  load_gains(b, 0, k.gain);
  int token = turn.of(b).token;
  k.embedded.load(b, token > 0 ? token : 0);  // below 0: the request ends, and why
}

// All layers of one token, and the head if its logits are wanted.
KOG_DEVICE void run_step(Block& b, Walk& k, const Turn& turn) {
  serve_seat(b, turn.of(b), turn.position(b));
  k.embedded.unpack(b, k.x);
  if constexpr (Ahead<QkvProj, true>::kCount > 0)
    run_layers_ahead(b, k);
  else
    run_layers_in_turn(b, k);
  if (turn.has_head(b))
    run_head(b, k, b.small->position);
  else
    acquire_cache();
}

// After the step of a seat: its next token, and whether the request goes on. What the next step
// begins with is on its way while that is decided.
KOG_DEVICE int end_step(Block& b, Walk& k, const Turn& turn) {
  Seat& seat = turn.of(b);
  int position = turn.position(b), made = position - seat.first_head + 1;
  int token = 0;
  if (made > 0) {
    token = agreed(b);
    k.heads++;
  }
  bool in_prompt = made <= 0;
  if (seat.first_head == 0)  // one token, or the logits of all
    in_prompt = position + 1 < static_cast<int>(b.request[Request::kPrompt]);
  int next = in_prompt ? prompt_token(b, seat, position + 1) : token;
  // Every thread writes what every thread has computed, and reads its own; a thread that is a
  // step ahead has met the others since they read.
  seat.token = next;
  begin_step(b, k, Turn{turn.steps + 1});
  int outcome = made > 0 ? outcome_of(b, k.ending, token, made) : static_cast<int>(kRunning);
  if (is_speaker(b)) tell_host(b, seat.slot, token, outcome, made, turn.steps + 1, true);
  return outcome;
}

// The steps of a launch, a request's each.
struct Steps {
  Block& b;
  Walk k;
  Turn turn;
  int slot = 0;

  KOG_DEVICE void run() {
    run_step(b, k, turn);
    slot = turn.of(b).slot;
  }
  KOG_DEVICE int end() {
    int outcome = end_step(b, k, turn);
    turn.steps++;
    return turn.steps == b.p.most_steps && outcome == kRunning ? static_cast<int>(kYield) : outcome;
  }
  KOG_DEVICE int save() const {
    save_seats(b, [&](int seat) { return (turn.steps + b.p.num_seats - 1 - seat) / b.p.num_seats; });
    return slot;
  }
};

KOG_DEVICE void consume(Block& b) {
  Steps steps{b};
  begin_step(b, steps.k, steps.turn);
  run_steps(b, steps);
}

}  // namespace kog
