// The streams of all columns as the head's operands. The mix of several lanes' (../mix.h) comes with hints,
// so that it is staged as streams are.
#pragma once
#include <kog/columns/layer.h>
#include <kog/mix.h>

namespace kog::columns {

// This block's rows of its lane's streams, once the lane's are staged.
KOG_DEVICE void publish_parts(Block& b, u32 phase) {
  Streams x = layer_streams(b);
  const float* gains = gains_of(b, 2 * kLayers);
  u32* to = lane_words<PartWords>(b);
  int first = b.group_index * kHidden / kGroup, rows = (b.group_index + 1) * kHidden / kGroup - first;
#pragma unroll 1
  for (int n = b.warp * kWarpThreads; n < rows * b.p.num_requests; n += kConsumers) {
    int item = n + b.in_warp, column = item / rows, row = first + item % rows;
    bool mine = column < b.p.num_requests;
    float v = part_of(mine ? x.value(b, column, row) : 0, gains[row],
                      [&] { return inverse_rms(b, mine ? column : 0); });
    if (mine) push(b, to + column * PartWords::kStride + row, pack_f32(v, phase));
    rejoin();
  }
}

// Where the head finds the streams: in the words of the last layer.
struct FromLayers {
  KOG_DEVICE static Streams streams(const Block& b) { return layer_streams(b); }
};

// The head's operands, and their sums of squares; acquires this step's rows of the cache (docs/SYNC.md,
// Fences). hold(): stage_streams'.
template <class From, class Hold>
KOG_DEVICE void stage_head(Block& b, Hold hold) {
  constexpr bool kOwn = LmHead::kParts == kWarps;
  constexpr int kStaged = kConcat ? kLayerK : LmHead::kPaddedK;  // of one stream
  int last = iteration_of(b) - 1;
  stage_streams<LmHead, kStaged, kOwn && !kMixes>(b, Step::kMlpOut, From::streams(b), 2 * kLayers, last, [] {},
                                                  hold);
  acquire_gpu();
  if constexpr (kMixes) {
    int mixes = static_cast<int>(count_up(b, &WarpState::mixes)) - 1;
    publish_parts(b, phase_of(mixes));
    if constexpr (!kConcat)
      sum_parts(b, phase_of(mixes), [&](int quad) {
        store_relaxed(b.p.words + YFlagsWords::kOffset + quad, epoch_of(mixes));
      });
    sync_consumers();  // the lane's sums of squares, and its operands, have been read
    Streams y = {b.p.words + YWords::kOffset, YFlagsWords::kOffset};
    if constexpr (kConcat)
      stage_parts(b, phase_of(mixes));
    else
      stage_streams<LmHead, kStaged, kOwn, !kMean>(b, Step::kMixGather, y, 2 * kLayers, mixes, [] {}, hold);
  }
}
template <class From>
KOG_DEVICE Operands<LmHead> head_operands(Block& b) {
  if constexpr (kHeldFirst<LmHead>) {
    Operands<LmHead> x(b);
    stage_head<From>(b, [&] { x.hold(); });
    b.begin_stage();
    return x;
  } else {
    stage_head<From>(b, [] {});
    b.begin_stage();
    return held_operands<LmHead>(b);
  }
}

}  // namespace kog::columns
