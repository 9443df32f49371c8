// The choice of a token that takes more than every row's logit once: edited, cut, or
// with log-probabilities.
//
//   logits --edit--> a draw, peaks ==> top-p checks ==> (cut ==> candidates ==>) token, log-probabilities
//                              all blocks, each arrow one exchange or a few
#pragma once
#include <kog/logprob.h>
#include <kog/top_p_check.h>

namespace kog {

// What a token takes that is chosen here.
constexpr u32 kWantsMore = kEdited | kCut | kLogprobs;

// One head: which of the launch, at what position, and the host's word.
struct HeadStep {
  int heads, position;
  u32 control;
  int column = 0;     // whose logits, in a kernel of columns
  bool drawn = true;  // the warps have kept the best of its logits as they are
};

// What a column's raw logits are kept in; the edited ones of the token in hand lie before them.
KOG_DEVICE float* raw_scores(const Pointers& p, int column) {
  return p.scores + static_cast<u64>(1 + column) * kVocab;
}

// The ids that a draw is among: all, or those of the field whose logits are above a bound.
struct Reach {
  bool all = true;
  u32 bound = 0;  // an ordered integer

  KOG_DEVICE bool holds(const Field& f, float logit) const {
    return all || (ordered(logit) > bound && f.holds(logit));
  }
};

// The best of a thread's ids.
KOG_DEVICE Candidate draw(const Block& b, const Field& f, const Reach& reach, const float* raw,
                          int position) {
  Candidate mine = nobody();
  each_own_id(b, f.rows, [&](int id) {
    if (!reach.holds(f, f.logits[id])) return;
    bool finite = raw[id] < float_of(kInfinity);
    compete(mine, b.request, finite ? f.logits[id] : raw[id], id, position + 1);
  });
  return mine;
}

// A top-p check to its end: whether the argmax survives, which ids the next draw reaches if not.
KOG_DEVICE Verdict check_argmax(Block& b, const Field& f, u64 number, Reach& reach, u64* scratch) {
  TopPCheck t = gather_top_p_check(b, number, reinterpret_cast<u32*>(scratch));
  publish_shares(b, f, t.logit, number, scratch);
  reach = {false, t.logit};
  return verdict_of(b, f, t.logit, gather_shares(b, number, scratch));
}

// The token that all blocks agree on where logits are edited, cut or reported to the host. They lie in
// memory, each row by its owner's store. Out of line, and with a Block of its own: it must cost the
// loops that stream weights no register.
KOG_DEVICE_NOINLINE void choose(const Pointers& p, const u32* request, HeadStep h) {
  Block b(p);
  b.request = request;
  sync_consumers();  // all logits are there, and the partial sums are free
  u32 flags = request[Request::kFlags];
  const float* raw = raw_scores(p, h.column);
  Field field = {own_rows(b), raw, 0, double_at(request + Request::kDistance),
                 double_at(request + Request::kMinP)};
  if ((flags & kEdited) != 0) {
    edit_logits(b, field.rows, b.small->token, h.position, raw, p.scores);
    field.logits = p.scores;
  }
  u64* scratch = reinterpret_cast<u64*>(b.partials);
  bool drawn = h.drawn && (flags & kEdited) == 0;
  int left = (flags & kCut) != 0 ? kTopPChecks : 0;
  Peaks peaks = {0, 0, false};
  Verdict verdict = Verdict::kOpen;
  Reach reach;
#pragma unroll 1
  for (bool first = true;; first = false) {
    if (!drawn) keep_best(b, draw(b, field, reach, raw, h.position));
    drawn = false;
    u64 number = exchange_number(h.heads, 1 + kTopPChecks - left);
    if (left > 0) publish_top_p_check(b, field, number, h.control);
    if (first && (flags & (kCut | kLogprobs)) != 0) {
      peaks = find_peaks(b, field.rows, raw, field.logits, h.heads, reinterpret_cast<u32*>(scratch));
      field.top = peaks.edited;
      // Nothing is cut where nothing can be chosen. A check that is gathered must not end without
      // shares: they tell a block that all others have read it.
      if (!peaks.finite || peaks.edited == -float_of(kInfinity)) left = 0;
    }
    if (left == 0) break;
    verdict = check_argmax(b, field, number, reach, scratch);
    if (verdict == Verdict::kSurvives) break;
    left = verdict == Verdict::kFalls ? left - 1 : 0;
    if (left > 0) continue;
    Search search = {field, reinterpret_cast<Level*>(scratch), h.heads};
    reach.bound = bound_of(field, cut_depth(b, search));
  }
  bool tells = (flags & kLogprobs) != 0 && peaks.finite;
  if (tells) publish_best(b, field.rows, raw, peaks.raw, h.heads, scratch);
  if (verdict != Verdict::kSurvives) {
    publish_candidate(b, h.heads, h.control);
    gather_candidates(b, h.heads);
  }
  if (tells) {
    int made = tokens_made(b, h.position);
    sync_consumers();
    int token = agreed(b);
    if (token < 0) return;  // nothing was allowed
    publish_ahead(b, field.rows, raw, token, h.heads, made, scratch);
    if (block_of_all(b) == 0) tell_best(b, peaks.raw, h.heads, made, scratch);
  }
}

}  // namespace kog
