// The head: the lanes' streams mixed, logits, and the token that all blocks agree on.
#pragma once
#include <kog/layer.h>
#include <kog/sample.h>

namespace kog {

// The head's input from all lanes, in two small hops: rows of each lane, then sums of rows. It
// becomes x.
KOG_DEVICE void mix_lanes(Block& b, Walk& k) {
  u32 phase = phase_of(k.heads);
  float scale = 1;
  if constexpr (kMean) {
    stage_x<LmHead>(b, k.x, k.gain);
    sync_consumers();
    scale = inverse_rms(b);
  }
  u32* part = b.p.words + PartWords::kOffset;
#pragma unroll
  for (int i = 0; i < kGroups; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      int e = element(b, i) + j;
      float v = kMean ? k.x[4 * i + j] * k.gain[4 * i + j] * scale : k.x[4 * i + j];
      if (e < kHidden && e * kGroup / kHidden == b.place)
        store_relaxed(part + b.lane * PartWords::kStride + e, pack_f32(v, phase));
      k.x[4 * i + j] = 0;
      if (kMean) k.gain[4 * i + j] = 1;
    }
  constexpr int kRows = (kHidden + kBlocks - 1) / kBlocks;
  for (int first = 0; first < kRows; first += 32 * kWarps) {
    int row = b.block * kRows + first + b.thread;
    if (first + b.warp * 32 >= kRows) continue;
    bool mine = first + b.thread < kRows && row < kHidden;
    u32 w[kLanes];
    poll_words(
        b, Step::kMixLanes,
        [&](int j) {
          return mine ? part + j * PartWords::kStride + row : static_cast<const u32*>(nullptr);
        },
        phase, w);
    float sum = 0;
#pragma unroll
    for (int j = 0; j < kLanes; j++) sum += unpack_f32(w[j]);
    if (mine)
      store_relaxed(b.p.words + YWords::kOffset + row, pack_f32(kMean ? sum / kLanes : sum, phase));
  }
  gather(b, Step::kMixGather, b.p.words + YWords::kOffset, phase, k.x);
  sync_consumers();  // all warps have read the sums of squares
}

// Logits and the token that all blocks agree on; `control` is the host's word, asked for by one
// thread of all.
KOG_DEVICE void run_head(Block& b, Walk& k, int position) {
  u32 control = 0;
  if (b.block == 0 && b.thread == 0) control = static_cast<u32>(load_system(b.p.mailbox));
  b.begin_stage();
  if constexpr (kMixes) mix_lanes(b, k);
  stage_x<LmHead>(b, k.x, k.gain);
  int first = kHeadByLane ? b.lane * LmHead::kRows : 0;
  bool all = b.request[Request::kAllLogits] != 0;
  float* logits = b.p.logits + static_cast<u64>(k.heads) * kVocab + first;
  Candidate mine = nobody();
  float scale = kMixes && kMean ? 1.f : 0.f;
  run_rows<LmHead>(
      b, k.ring, k.turn, units_of<LmHead>(stage_place<LmHead>(b), 0), [](int, bool) { return 0; },
      [&](int row, bool owner, float sum, int) {
        if (scale == 0) scale = inverse_rms(b);
        if (!owner) return;
        if (all) logits[row] = sum * scale;
        Candidate c = candidate(b, sum * scale, first + row, position + 1);
        if (beats(c, mine)) mine = c;
      });
  publish_candidate(b, mine, k.heads, control);
  gather_candidates(b, k.heads);
}

}  // namespace kog
