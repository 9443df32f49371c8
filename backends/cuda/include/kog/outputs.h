// What the rows of a layer's stages become: the arithmetic behind the sums (rows.h), of both kernels.
//
//   qkv_proj       pairs of rows as words
//   gate_up_proj   pairs of silu(gate) * up as words
//   o_proj, down_proj   a module's output for the residual streams: a sink asks for what it needs, and sends it
#pragma once
#include <kog/rows.h>

namespace kog {

// The gains of one norm: two a layer, then the last.
KOG_DEVICE const float* gains_of(const Block& b, int norm) {
  return b.p.gains + (kLaneNorms ? norm * kLanes + lane_of(b) : norm) * kHiddenStride;
}
// Loaded by all threads, of a row that exists: a value that were either loaded or zero would be moved between
// registers, and so waited for, at once.
template <class Stage, bool kBias>
KOG_DEVICE float bias_of(const Block& b, const Item& item) {
  const float* of_lane = b.p.biases + static_cast<u64>(b.layer) * kBiasRows + Stage::kBiasAt +
                         lane_of(b) * Stage::kRows;
  return kBias ? of_lane[item.there ? item.row : 0] : 0.f;
}

KOG_DEVICE float silu(float v) { return divide(v, 1.f + exp2_fast(v * -1.4426950408889634f)); }

// A word of two rows' values, which are kApart rows apart; by whole warps.
template <class Stage, int kApart>
KOG_DEVICE void put_two(u32* to, const Item& item, float v, u32 phase) {
  float next = shuffle_down(v, kApart);
  if (item.there && item.row % (2 * kApart) == 0)
    store_relaxed(to, pack_pair(v, item.row + kApart < Stage::kRows ? next : 0, phase));
}

// Of a stage that multiplies x * gain, whose sums are multiplied by 1 / rms(x): put(item, value).
template <class Stage, bool kBias, class Walk, class Ahead, class Put>
KOG_DEVICE void normed_rows(Block& b, Walk& walk, const Operands<Stage>& x, const Ahead& ahead, Put put) {
  float scale = 0;
  run_rows<Stage>(
      b, walk, [&] { return walk.template units<Stage>(b); }, x, ahead,
      [&](int, const Item& item) { return bias_of<Stage, kBias>(b, item); },
      [&](const Item& item, float sum, float bias) {
        if (scale == 0) scale = inverse_rms(b, item.column);
        put(item, scaled_sum<Stage>(b, item, sum, b.layer) * scale + bias);
      },
      [](int) {});
}
template <class Walk, class Ahead>
KOG_DEVICE void qkv_rows(Block& b, Walk& walk, const Operands<QkvProj>& x, const Ahead& ahead,
                         u32 phase) {
  normed_rows<QkvProj, kQkvBias>(b, walk, x, ahead, [&](const Item& item, float v) {
    u32* to = lane_words<QkvWords>(b) + item.column * QkvWords::kStride + item.row / 2;
    put_two<QkvProj, 1>(to, item, v, phase);
  });
}
template <class Walk, class Ahead>
KOG_DEVICE void gate_up_rows(Block& b, Walk& walk, const Operands<GateUpProj>& x, const Ahead& ahead,
                             u32 phase) {
  normed_rows<GateUpProj, kMlpBias>(b, walk, x, ahead, [&](const Item& item, float v) {
    float up = shuffle_down(v, 1);
    u32* to = lane_words<MlpWords>(b) + narrow_offset<DownProj>(item.row / 4, item.column);
    put_two<GateUpProj, 2>(to, item, silu(v) * up, phase);
  });
}
// Of o_proj or down_proj.
template <class Stage, class Walk, class Ahead, class Sink>
KOG_DEVICE void module_rows(Block& b, Walk& walk, const Operands<Stage>& x, const Ahead& ahead,
                            Sink sink) {
  run_rows<Stage>(
      b, walk, [&] { return walk.template units<Stage>(b); }, x, ahead,
      [&](int r, const Item& item) { return sink.ask(r, item); },
      [&](const Item& item, float sum, typename Sink::Asked& asked) {
        sink.put(item, scaled_sum<Stage>(b, item, sum, b.layer) + asked.bias, asked);
      },
      [&](int piece) { sink.done(piece); });
}

// Of the head: take(item, id, logit) of each id of the block's.
template <class Walk, class Ahead, class Take>
KOG_DEVICE void head_rows(Block& b, Walk& walk, const Operands<LmHead>& x, const Ahead& ahead, Take take) {
  float scale = kNormedMix ? 1.f : 0.f;
  int first = first_id(b);
  run_rows<LmHead>(
      b, walk, [&] { return head_units(b); }, x, ahead, [](int, const Item&) { return 0; },
      [&](const Item& item, float sum, int) {
        if (scale == 0) scale = inverse_rms(b, item.column);
        float logit = scaled_sum<LmHead>(b, item, sum, kLayers) * scale;
        if (item.there) take(item, first + item.row, logit);
      },
      [](int) {});
}

// A module's output as it joins its lane's stream: a lane that reduces alone scales it, others add what the
// other lanes sent kDelay layers ago.
template <class Late>
KOG_DEVICE float reduced(int how, float y, Late late) {
  if (kLanes > 1 && how == kOwn) return y * kRootLanes;
  return how == kDelayed ? y + late() : y;
}
// sum + the lanes' words, in their order, of those that count.
template <class Counts, class Word>
KOG_DEVICE float add_lanes(float sum, Counts counts, Word word) {
#pragma unroll
  for (int lane = 0; lane < kLanes; lane++)
    if (counts(lane)) sum += unpack_f32(word(lane));
  return sum;
}

}  // namespace kog
