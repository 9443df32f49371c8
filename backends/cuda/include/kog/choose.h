// The choice of a token that takes more than every row's logit once: edited, cut, or told to the
// host.
//
//   logits --edit--> peaks ==> cut ==> candidates ==> token, log-probabilities
//                       all blocks, each arrow one exchange or, for a cut, a few
#pragma once
#include <kog/cut.h>
#include <kog/logprob.h>

namespace kog {

// One head: which of the launch, at what position, and the host's word.
struct HeadStep {
  int heads, position;
  u32 control;
  int column = 0;  // whose logits, in a kernel of columns
};

// What a column's raw logits are kept in; the edited ones of the token in hand lie before them.
KOG_DEVICE float* raw_scores(const Pointers& p, int column) {
  return p.scores + static_cast<u64>(1 + column) * kVocab;
}

// The token that all blocks agree on where logits are edited, cut or told to the host. They lie in
// memory, each row by its owner's store. Out of line, and with a Block of its own: it must cost the
// loops that stream weights no register.
KOG_DEVICE_NOINLINE void choose(const Pointers& p, const u32* request, HeadStep h) {
  Block b(p);
  b.request = request;
  sync_consumers();  // all logits are there, and the partial sums are free
  u32 flags = request[Request::kFlags];
  Rows rows = own_rows(b);
  const float* raw = raw_scores(p, h.column);
  const float* logits = raw;
  if ((flags & kEdited) != 0) {
    edit_logits(b, rows, b.small->token, h.position, raw, p.scores);
    logits = p.scores;
  }
  Peaks peaks = {0, 0, false};
  u32* room = reinterpret_cast<u32*>(b.partials);
  if ((flags & (kCut | kLogprobs)) != 0) peaks = find_peaks(b, rows, raw, logits, h.heads, room);
  Field field = {rows, logits, peaks.edited, double_at(request + Request::kDistance),
                 double_at(request + Request::kMinP)};
  u32 cut = 0xffffffffu;
  bool cuts = (flags & kCut) != 0 && peaks.finite;
  if (cuts) {
    Search search = {field, reinterpret_cast<Level*>(b.partials), h.heads};
    cut = cut_depth(b, search);
  }
  Candidate mine = nobody();
  for (int id = rows.first + b.thread; id < rows.last; id += 32 * kWarps) {
    if (cuts && !(field.holds(logits[id]) && field.depth(logits[id]) <= cut)) continue;
    bool finite = raw[id] < float_of(kInfinity);
    Candidate c = candidate(request, finite ? logits[id] : raw[id], id, h.position + 1);
    if (beats(c, mine)) mine = c;
  }
  bool tells = (flags & kLogprobs) != 0 && peaks.finite;
  if (tells) publish_best(b, rows, raw, peaks.raw, h.heads, reinterpret_cast<u64*>(room));
  publish_candidate(b, mine, h.heads, h.control);
  gather_candidates(b, h.heads);
  if (tells) {
    int made = tokens_made(b, h.position);
    sync_consumers();
    int token = agreed(b);
    if (b.thread == 0 && rows.hold(token))
      store_system(record_of(b, made), static_cast<u64>(made + 1) << 32 | bits_of(raw[token]));
    if (b.block == 0) tell_best(b, peaks.raw, h.heads, made, reinterpret_cast<u64*>(room));
  }
}

}  // namespace kog
