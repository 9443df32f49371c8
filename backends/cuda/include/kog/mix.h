// What the head scores of the lanes' residual streams: their mean or sum, made in two small hops,
// which becomes x; or all of them side by side, which every block stages for itself.
#pragma once
#include <kog/layer.h>

namespace kog {

// This block's rows of its lane's stream.
KOG_DEVICE void publish_stream(Block& b, Walk& k) {
  float scale = 1;
  if constexpr (kNormedMix) {
    stage_x<LmHead>(b, k.x, k.gain);
    sync_consumers();
    scale = inverse_rms(b);
  }
  u32* part = b.p.words + PartWords::kOffset + b.lane * PartWords::kStride;
#pragma unroll
  for (int i = 0; i < kHeld; i++) {
    int e = element(b, i / 4) + i % 4;
    float v = kNormedMix ? k.x[i] * k.gain[i] * scale : k.x[i];
    if (e < kHidden && e * kGroup / kHidden == b.place)
      store_relaxed(part + e, pack_f32(v, phase_of(k.heads)));
  }
}

// Rows of each lane, then sums of rows; x becomes the mix.
KOG_DEVICE void sum_streams(Block& b, Walk& k) {
  u32 phase = phase_of(k.heads);
  const u32* part = b.p.words + PartWords::kOffset;
  constexpr int kRows = (kHidden + kBlocks - 1) / kBlocks;
  for (int first = 0; first < kRows; first += 32 * kWarps) {
    int row = b.block * kRows + first + b.thread;
    if (first + b.warp * 32 >= kRows) continue;
    bool mine = first + b.thread < kRows && row < kHidden;
    u32 w[kLanes];
    poll_words(
        b, Step::kMixLanes,
        [&](int j) { return part + j * PartWords::kStride + row; }, [&](int) { return mine; },
        phase, w);
    float sum = 0;
#pragma unroll
    for (int j = 0; j < kLanes; j++) sum += unpack_f32(w[j]);
    if (mine)
      store_relaxed(b.p.words + YWords::kOffset + row, pack_f32(kMean ? sum / kLanes : sum, phase));
  }
#pragma unroll
  for (int i = 0; i < kHeld; i++) {
    k.x[i] = 0;
    if (kMean) k.gain[i] = 1;
  }
  gather(b, Step::kMixGather, b.p.words + YWords::kOffset, phase, k.x);
  sync_consumers();  // all warps have read the sums of squares
}

KOG_DEVICE void mix_lanes(Block& b, Walk& k) {
  publish_stream(b, k);
  if constexpr (!kConcat) sum_streams(b, k);
}

// One activation of the head as its high and low part (matvec.h).
KOG_DEVICE void stage_value(const Block& b, int e, float v) {
  int in_fragment = e % kFragK, word = in_fragment % (2 * kLaneWords) / 2;
  int column = e / kFragK * 4 + word % 2 * 2;
  u16* at = reinterpret_cast<u16*>(b.scratch) + 2 * column * kColumnWords +
            2 * (in_fragment / (2 * kLaneWords) * (kLaneWords / 2) + word / 2) + in_fragment % 2;
  u32 high = round_pair<kF16>(v, 0);
  at[0] = static_cast<u16>(high);
  at[2 * kColumnWords] = static_cast<u16>(round_pair<kF16>(v - low_of(high), 0));
}

// The lanes' streams side by side as the head's activations, once their words carry the phase.
KOG_DEVICE void stage_streams(Block& b, u32 phase) {
  const u32* part = b.p.words + PartWords::kOffset;
  sync_consumers();  // what the norms left in the scratch has been read
  for (int first = b.warp * 128; first < kHidden; first += 128 * kWarps) {
    int at = first + 4 * b.in_warp;
    uint4 q[kLanes];
    poll_vectors(
        b, Step::kMixGather, [&](int j) { return part + j * PartWords::kStride + at; },
        [&](int, int i) { return at + i < kHidden ? 1u : 0u; }, phase, q);
#pragma unroll
    for (int j = 0; j < kLanes; j++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (at + i < kHidden) stage_value(b, j * kHidden + at + i, unpack_f32(word_of(q[j], i)));
  }
  for (int e = kLanes * kHidden + b.thread; e < LmHead::kPaddedK; e += 32 * kWarps)
    stage_value(b, e, 0);
  sync_consumers();
}

}  // namespace kog
