// The head: the lanes' streams mixed, logits, and the token that all blocks agree on.
#pragma once
#include <kog/choose.h>
#include <kog/layer.h>
#include <kog/mix.h>

namespace kog {

KOG_DEVICE float inverse_rms_of_x(Block& b, const Walk& walk) {
  stage_x<LmHead>(b, walk.x, walk.gain);
  sync_consumers();
  return inverse_rms(b);
}
// This block's rows of its lane's stream.
KOG_DEVICE void publish_stream(Block& b, Walk& walk) {
  float scale = kNormedMix ? inverse_rms_of_x(b, walk) : 1;
  u32* part = lane_words<PartWords>(b);
#pragma unroll
  for (int i = 0; i < kHeld; i++) {
    int e = element(b, i / 4) + i % 4;
    float v = part_of(walk.x[i], walk.gain[i], [&] { return scale; });
    if (e < kHidden && e * kGroup / kHidden == b.group_index)
      push(b, part + e, pack_f32(v, phase_of(walk.heads)));
  }
}

// x becomes the mix.
KOG_DEVICE void sum_streams(Block& b, Walk& walk) {
  u32 phase = phase_of(walk.heads);
  sum_parts(b, phase, [](int) {});
#pragma unroll
  for (int i = 0; i < kHeld; i++) {
    walk.x[i] = 0;
    if (kMean) walk.gain[i] = 1;
  }
  gather(b, Step::kMixGather, b.p.words + YWords::kOffset, phase, walk.x);
  sync_consumers();  // all warps have read the sums of squares
}

KOG_DEVICE void mix_lanes(Block& b, Walk& walk) {
  publish_stream(b, walk);
  if constexpr (!kConcat) sum_streams(b, walk);
}

// Where the logits of one head are kept for whoever wants more than the token.
KOG_DEVICE float* kept_logits(const Block& b, u32 flags, int heads) {
  if ((flags & kAllLogits) != 0) return b.p.logits + static_cast<u64>(heads) * kVocab;
  return raw_scores(b.p, 0);
}

// Logits and the token that all blocks agree on, and acquire_cache; the host's word is asked for by one
// thread of all. `kMix` false: the lanes' mix is there already, in x or in its words.
template <bool kMix = kMixes, class Taken = NothingAhead>
KOG_DEVICE void run_head(Block& b, Walk& walk, int position, const Taken& ahead = {}) {
  u32 control = 0;
  stamp(b, Point::kStart);
  if (b.block == 0 && b.thread == 0) control = static_cast<u32>(load_system(b.p.mailbox));
  b.begin_stage();
  if constexpr (kMix) mix_lanes(b, walk);
  if constexpr (kConcat) {
    sync_consumers();  // what the norms left in the scratch has been read
    stage_parts(b, phase_of(walk.heads));
  } else {
    stage_x<LmHead>(b, walk.x, walk.gain);
  }
  u32 flags = b.request[Request::kFlags];
  Candidate mine = nobody();
  head_rows(b, walk, held_operands<LmHead>(b), ahead, [&](const Item&, int id, float logit) {
    if ((flags & (kAllLogits | kWantsMore)) != 0) kept_logits(b, flags, walk.heads)[id] = logit;
    if ((flags & kEdited) == 0) compete(mine, b.request, logit, id, position + 1);
  });
  stamp(b, Point::kQkvProj);
  walk.ending.load(b);
  keep_best(b, mine);
  if (!kTokensOnly && (flags & kWantsMore) != 0) {
    choose(b.p, b.request, {walk.heads, position, control});
    acquire_cache(b, walk);
  } else {
    publish_candidate(b, walk.heads, control);
    acquire_cache(b, walk);  // while the others' candidates are on their way
    auto first = fetch_first(b);
    gather_candidates(b, walk.heads);
    first.there();
  }
  stamp(b, Point::kAttention);
}

}  // namespace kog
