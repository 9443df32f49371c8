// The head: the lanes' streams mixed, logits, and the token that all blocks agree on.
#pragma once
#include <kog/choose.h>
#include <kog/mix.h>

namespace kog {

// Where the logits of one head are kept for whoever wants more than the token.
KOG_DEVICE float* kept_logits(const Block& b, u32 flags, int heads) {
  if ((flags & kAllLogits) != 0) return b.p.logits + static_cast<u64>(heads) * kVocab;
  return raw_scores(b.p, 0);
}

// Logits and the token that all blocks agree on, and acquire_cache; the host's word is asked for by one thread of all.
// `kMix` false: the lanes' mix is in its place already, in x or in its words.
template <bool kMix = kMixes>
KOG_DEVICE void run_head(Block& b, Walk& k, int position) {
  u32 control = 0;
  stamp(b, Point::kStart);
  if (b.block == 0 && b.thread == 0) control = static_cast<u32>(load_system(b.p.mailbox));
  b.begin_stage();
  if constexpr (kMix) mix_lanes(b, k);
  if constexpr (kConcat)
    stage_streams(b, phase_of(k.heads));
  else
    stage_x<LmHead>(b, k.x, k.gain);
  int first = kHeadByLane ? b.lane * LmHead::kRows : 0;
  constexpr u32 kWantsMore = kEdited | kCut | kLogprobs;
  u32 flags = b.request[Request::kFlags];
  Candidate mine = nobody();
  float scale = kNormedMix ? 1.f : 0.f;
  run_rows<LmHead>(
      b, k, [&] { return units_of<LmHead>(stage_place<LmHead>(b), 0); }, InScratch(), NothingAhead(),
      [](int, const Item&) { return 0; },
      [&](const Item& item, float sum, int) {
        int row = item.row;
        if (scale == 0) scale = inverse_rms(b);
        if (!item.there) return;
        if ((flags & (kAllLogits | kWantsMore)) != 0)
          kept_logits(b, flags, k.heads)[first + row] = sum * scale;
        if ((flags & kEdited) != 0) return;
        Candidate c = candidate(b.request, sum * scale, first + row, position + 1);
        if (beats(c, mine)) mine = c;
      },
      [](int) {});
  stamp(b, Point::kQkvProj);
  k.ending.load(b);
  keep_best(b, mine);
  if ((flags & kWantsMore) != 0) {
    choose(b.p, b.request, {k.heads, position, control});
    acquire_cache();
  } else {
    publish_candidate(b, k.heads, control);
    acquire_cache();  // while the others' candidates are on their way
    gather_candidates(b, k.heads);
  }
  stamp(b, Point::kAttention);
}

}  // namespace kog
