// What the head scores of the lanes' streams, for all columns: their mean or sum (../mix.h), made in
// two small hops; or all of them side by side, which every block stages for itself.
//
//   part   [lane][column][row]: a lane's own streams, normed but for the sum, by the lane's blocks
//   y      [column][row]: the mix, by all blocks, with hints, so that it is staged as streams are
#pragma once
#include <kog/columns/layer.h>

namespace kog::columns {

// The streams behind the last layer, or of the mix.
KOG_DEVICE Streams last_streams(const Block& b) {
  return Streams::of<MlpOutWords, MlpOutFlagsWords>(b);
}
KOG_DEVICE Streams mixed_streams(const Block& b) {
  return {b.p.words + YWords::kOffset, YFlagsWords::kOffset};
}

// This block's rows of its lane's streams, once the lane's are staged.
KOG_DEVICE void publish_parts(Block& b, u32 phase) {
  Streams x = last_streams(b);
  const float* gains = gains_of(b, 2 * kLayers);
  u32* to = lane_words<PartWords>(b);
  int first = b.place * kHidden / kGroup, rows = (b.place + 1) * kHidden / kGroup - first;
#pragma unroll 1
  for (int n = b.warp * 32; n < rows * b.p.num_seats; n += kWarps * 32) {
    int item = n + b.in_warp, column = item / rows, row = first + item % rows;
    bool mine = column < b.p.num_seats;
    float v = mine ? x.value(b, column, row) : 0;
    if constexpr (kNormedMix) v = v * gains[row] * inverse_rms(b, mine ? column : 0);
    if (mine) store_relaxed(to + column * PartWords::kStride + row, pack_f32(v, phase));
  }
}

// The lanes' sums of this block's rows: four rows of all columns, or several times that, a warp.
KOG_DEVICE void sum_parts(Block& b, int mixes) {
  constexpr int kQuads = 32 / (4 * kColumns), kRounds = (kHidden + 4 * kQuads - 1) / (4 * kQuads);
  u32 phase = phase_of(mixes);
  int column = b.in_warp / 4 % kColumns;
#pragma unroll 1
  for (int n = b.block + kBlocks * b.warp; n < kRounds; n += kBlocks * kWarps) {
    int quad = n * kQuads + b.in_warp / (4 * kColumns), row = 4 * quad + b.in_warp % 4;
    bool mine = row < kHidden && column < b.p.num_seats;
    const u32* from = b.p.words + PartWords::kOffset + column * PartWords::kStride + row;
    u32 w[kLanes];
    poll_words(
        b, Step::kMixLanes,
        [&](int lane) { return from + lane * kColumns * PartWords::kStride; },
        [&](int) { return mine; }, phase, w);
    float sum = 0;
#pragma unroll
    for (int lane = 0; lane < kLanes; lane++) sum += unpack_f32(w[lane]);
    if (!mine) continue;
    store_relaxed(b.p.words + YWords::kOffset + column * YWords::kStride + row,
                  pack_f32(kMean ? sum / kLanes : sum, phase));
    if (row % 4 == 0 && column == 0)
      store_relaxed(b.p.words + YFlagsWords::kOffset + quad, epoch_of(mixes));
  }
}

// Value e of a column's operands of the head (stream.h): its high and low part.
KOG_DEVICE void stage_value(const Block& b, int column, int e, float v) {
  u32* step = reinterpret_cast<u32*>(b.scratch) + e / kFragK * Cut<Wide>::kStepWords;
  WidePlace place(e / kFragK, column, e % kFragK / 2);
  u32 high = round_pair<kF16>(v, 0), low = round_pair<kF16>(v - low_of(high), 0);
  reinterpret_cast<u16*>(step + place.high)[e % 2] = static_cast<u16>(high);
  reinterpret_cast<u16*>(step + place.low)[e % 2] = static_cast<u16>(low);
}

// The lanes' parts side by side as the head's operands, once their words carry the phase.
KOG_DEVICE void stage_parts(Block& b, u32 phase) {
  constexpr int kSpans = (kHidden + 127) / 128;
  int columns = b.p.num_seats;
#pragma unroll 1
  for (int n = b.warp; n < kSpans * columns; n += kWarps) {
    int column = n % columns, row = n / columns * 128 + 4 * b.in_warp;
    const u32* from = b.p.words + PartWords::kOffset + column * PartWords::kStride + row;
    uint4 q[kLanes];
    poll_vectors(
        b, Step::kMixGather,
        [&](int lane) { return from + lane * kColumns * PartWords::kStride; },
        [&](int, int i) { return row + i < kHidden ? 1u : 0u; }, phase, q);
#pragma unroll
    for (int lane = 0; lane < kLanes; lane++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (row + i < kHidden)
          stage_value(b, column, lane * kHidden + row + i, unpack_f32(word_of(q[lane], i)));
  }
  constexpr int kPadding = LmHead::kPaddedK - LmHead::kCols;
#pragma unroll 1
  for (int n = b.thread; n < kPadding * columns; n += 32 * kWarps)
    stage_value(b, n % columns, LmHead::kCols + n / columns, 0);
  sync_consumers();
}

// The head's operands, and their sums of squares; behind it this step's rows of the cache are
// there for all that comes.
KOG_DEVICE void stage_head(Block& b) {
  constexpr bool kOwn = LmHead::kParts == kWarps;
  constexpr int kStaged = kConcat ? kLayerK : LmHead::kPaddedK;  // of one stream
  int last = iteration_of(b) - 1;
  stage_streams<kStaged, kOwn && !kMixes>(b, Step::kMlpOut, last_streams(b), 2 * kLayers, last, [] {});
  fence_gpu();
  if constexpr (kMixes) {
    int mixes = static_cast<int>(count_up(b, &Kept::mixes)) - 1;
    publish_parts(b, phase_of(mixes));
    if constexpr (!kConcat) sum_parts(b, mixes);
    sync_consumers();  // the lane's sums of squares, and its operands, have been read
    if constexpr (kConcat)
      stage_parts(b, phase_of(mixes));
    else
      stage_streams<kStaged, kOwn, !kMean>(b, Step::kMixGather, mixed_streams(b), 2 * kLayers, mixes, [] {});
  }
}
// What a sum of the head is multiplied with, unless the streams have been normed.
KOG_DEVICE float head_scale(const Block& b, int column) {
  return kNormedMix ? 1.f : inverse_rms(b, column);
}

}  // namespace kog::columns
