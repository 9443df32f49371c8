// What the head scores of the lanes' residual streams: their mean or sum, made in two small hops; or all of
// them side by side, which every block stages for itself.
//
//   part   [lane][column][row]: a lane's own streams, normed but for the sum, by the lane's blocks
//   y      [column][row]: the mix, by all blocks of a rank for themselves
#pragma once
#include <kog/outputs.h>

namespace kog {

KOG_DEVICE int columns_of(const Block& b) { return kColumns == 1 ? 1 : b.p.num_requests; }
// One value of a lane's part. The 1 / rms is asked for where it is needed.
template <class Scale>
KOG_DEVICE float part_of(float x, float gain, Scale scale) {
  if constexpr (kNormedMix) return x * gain * scale();
  return x;
}

// The lanes' sums of this block's rows: four rows of all columns, or several times that, a warp. said(n):
// quad n is there.
template <class Said>
KOG_DEVICE void sum_parts(Block& b, u32 phase, Said said) {
  constexpr int kQuads = kWarpThreads / (4 * kColumns), kRounds = (kHidden + 4 * kQuads - 1) / (4 * kQuads);
  int column = b.in_warp / 4 % kColumns;
#pragma unroll 1
  for (int n = b.block + kBlocks * b.warp; n < kRounds; n += kBlocks * kWarps) {
    int quad = n * kQuads + b.in_warp / (4 * kColumns), row = 4 * quad + b.in_warp % 4;
    bool mine = row < kHidden && column < columns_of(b);
    const u32* from = b.p.words + PartWords::kOffset + column * PartWords::kStride + row;
    u32 w[kLanes];
    poll_words(
        b, Step::kMixLanes,
        [&](int lane) { return from + lane * kColumns * PartWords::kStride; },
        [&](int) { return mine; }, phase, w, [&](int lane) { return lane_of_peer(b, lane); });
    float sum = add_lanes(0, [](int) { return true; }, [&](int lane) { return w[lane]; });
    if (mine) {
      store_relaxed(b.p.words + YWords::kOffset + column * YWords::kStride + row,
                    pack_f32(kMean ? sum / kLanes : sum, phase));
      if (row % 4 == 0 && column == 0) said(quad);
    }
    rejoin();
  }
}

// The lanes' parts side by side as the head's operands, once their words carry the phase.
KOG_DEVICE void stage_parts(Block& b, u32 phase) {
  constexpr int kSpans = (kHidden + 127) / 128;
  int columns = columns_of(b);
#pragma unroll 1
  for (int n = b.warp; n < kSpans * columns; n += kWarps) {
    int column = n % columns, row = n / columns * 128 + 4 * b.in_warp;
    const u32* from = b.p.words + PartWords::kOffset + column * PartWords::kStride + row;
    uint4 q[kLanes];
    poll_vectors(
        b, Step::kMixGather,
        [&](int lane) { return from + lane * kColumns * PartWords::kStride; },
        [&](int, int i) { return row + i < kHidden ? 1u : 0u; }, phase, q,
        [&](int lane) { return lane_of_peer(b, lane); });
#pragma unroll
    for (int lane = 0; lane < kLanes; lane++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (row + i < kHidden)
          stage_value(b, column, lane * kHidden + row + i, unpack_f32(word_of(q[lane], i)));
  }
  constexpr int kPadding = LmHead::kPaddedK - LmHead::kCols;
#pragma unroll 1
  for (int n = b.thread; n < kPadding * columns; n += kConsumers)
    stage_value(b, n % columns, LmHead::kCols + n / columns, 0);
  sync_consumers();
}

}  // namespace kog
