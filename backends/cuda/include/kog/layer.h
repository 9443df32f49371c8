// One layer, as one block walks it.
//
//   x --norm--> qkv_proj ==> attention ==> o_proj ==> x --norm--> gate_up_proj ==> down_proj ==> x
//                       words         words     words                         words         words
//
// The 1 / rms of a norm is applied to the result: the multiplication starts before it is known.
#pragma once
#include <kog/join.h>
#include <kog/produce.h>
#include <kog/residual.h>

namespace kog {

// Of a batch thread t has row t.
template <class Stage>
struct ThreadRow {
  static constexpr int kRounds = 1;
  static constexpr bool kAll = true;
  int first, count;

  KOG_DEVICE ThreadRow(const Block&, const Units& units)
      : first(units.first * Stage::kUnitRows),
        count((units.last - units.first) * Stage::kUnitRows) {}
  KOG_DEVICE bool has(const Block& b, int) const { return b.warp * kWarpThreads < count; }
  KOG_DEVICE int number(int) const { return 0; }
  KOG_DEVICE Item item(const Block& b, int) const {
    int row = first + b.thread;
    return {row, 0, b.thread < count && row < Stage::kRows};
  }
  KOG_DEVICE int at(const Block& b, int r) const { return item(b, r).there ? b.thread : 0; }
};
// Of one consumer thread, from the first token to the last.
struct Walk {
  template <class Stage>
  using Share = ThreadRow<Stage>;

  Ring ring;
  int partial_buffer = 0;       // which partial sums are free
  int iteration = 0;  // layers run: the phase of every layer exchange
  int heads = 0;      // heads run: the phase of the head's
  ReduceCounts attention_out, mlp_out;
  float x[kHeld], gain[kHeld];
  Embedded embedded;  // the next token's
  Ending ending;

  KOG_DEVICE Ring& take_ring(const Block&) { return ring; }
  KOG_DEVICE void put_ring(const Block&, const Ring&) {}
  template <class Stage>
  KOG_DEVICE float* sums(const Block& b, int) {
    return b.partials + (partial_buffer++ & 1) * (kPartialBytes / 8);
  }
  template <class Stage>
  KOG_DEVICE Units units(const Block& b) const {
    return units_of<Stage>(b.group_index, b.layer);
  }
};

template <class Taken>
KOG_DEVICE void qkv_proj(Block& b, Walk& walk, const Taken& ahead) {
  stamp(b, Point::kStart);
  b.begin_stage();
  stage_x<QkvProj>(b, walk.x, walk.gain);
  qkv_rows(b, walk, held_operands<QkvProj>(b), ahead, phase_of(walk.iteration));
  stamp(b, Point::kQkvProj);
}

KOG_DEVICE void gate_up_proj(Block& b, Walk& walk, const Ahead<GateUpProj>& ahead) {
  b.begin_stage();
  stage_x<GateUpProj>(b, walk.x, walk.gain);
  gate_up_rows(b, walk, held_operands<GateUpProj>(b), ahead, phase_of(walk.iteration));
}

KOG_DEVICE AttentionOut attention_out(Block& b, Walk& walk) {
  return {b, walk.attention_out, kReduceAttention[b.layer], walk.iteration};
}
KOG_DEVICE MlpOut mlp_out(Block& b, Walk& walk) {
  return {b, walk.mlp_out, kReduceMlp[b.layer], walk.iteration};
}

// Whose inputs are staged. The next stage's gains come with both.
KOG_DEVICE void o_proj(Block& b, Walk& walk, const Ahead<OProj>& ahead) {
  load_gains(b, 2 * b.layer + 1, walk.gain);
  b.begin_stage();
  module_rows(b, walk, held_operands<OProj>(b), ahead, attention_out(b, walk));
  stamp(b, Point::kOProj);
}

KOG_DEVICE void join_attention_out(Block& b, Walk& walk) {
  attention_out(b, walk).join(Step::kAttentionOut, walk.x);
  if (b.layer == kLayers - 1) drain_stores();  // rows of the cache, ahead of the barriers before their release
  stamp(b, Point::kAttentionOut);
}

// To the words of its outputs. In the last layer the threads that send rows release this token's rows of the
// cache, while they would wait for inputs, behind the barriers of all who append (docs/SYNC.md, Fences).
KOG_DEVICE void down_proj(Block& b, Walk& walk, const Ahead<DownProj, true>& ahead) {
  b.begin_stage();
  bool sends = b.thread < DownProj::kBatch * DownProj::kUnitRows;
  if (b.layer == kLayers - 1 && sends) release_gpu();  // pairs with acquire_cache
  stage_words<DownProj, MlpWords>(b, Step::kDownProjInput, phase_of(walk.iteration));
  stamp(b, Point::kDownProjInput);
  load_gains(b, 2 * b.layer + 2, walk.gain);
  b.begin_stage();
  module_rows(b, walk, held_operands<DownProj>(b), ahead, mlp_out(b, walk));
  stamp(b, Point::kDownProj);
}

// Ends the layer.
KOG_DEVICE void join_mlp_out(Block& b, Walk& walk) {
  mlp_out(b, walk).join(Step::kMlpOut, walk.x);
  stamp(b, Point::kMlpOut);
  count_join(b, b.small->position);
  walk.iteration++;
}

using OWeights = Ahead<OProj>;
// So many of o_proj's weights are taken behind qkv_proj's, where those alone are fewer than kLeastOnWay; and as many of
// gate_up_proj's are left for the wait behind o_proj.
constexpr int kQkvAhead = Ahead<QkvProj, true>::kCount;
constexpr int kBehindQkv = kStreams && OWeights::kWhole && kQkvAhead > 0 && kQkvAhead < kLeastOnWay
                               ? kLeast<kLeastOnWay - kQkvAhead, OWeights::kCount>
                               : 0;

// From the words of q, k and v to those of the layer's outputs.
KOG_DEVICE void run_layer(Block& b, Walk& walk, OWeights& o_weights) {
  b.begin_stage();
  attention(b, b.small->position, phase_of(walk.iteration));
  stamp(b, Point::kAttention);
  // While some blocks attend the rings fill up: behind all of o_proj's weights the next stage's are taken,
  // as many as there are registers for, and the others when those are free.
  using GateUpWeights = Ahead<GateUpProj>;
  constexpr int kLeft = kLeast<kMostAheadOf<GateUpProj::Weights> - OWeights::kCount, GateUpWeights::kCount - kLeastOnWay>;
  constexpr int kEarly = kStreams && OWeights::kWhole && kLeft > 0 ? kLeft : 0;
  GateUpWeights gate_up_weights;
  o_weights.template take<kBehindQkv, OWeights::kCount, kStreams>(b, walk.ring, b.layer);
  gate_up_weights.template take<0, kEarly, kStreams>(b, walk.ring, b.layer);
  b.begin_stage();
  stage_attention<OProj>(b, Step::kOProjInput, b.small->position, phase_of(walk.iteration));
  stamp(b, Point::kOProjInput);
  o_proj(b, walk, o_weights);
  gate_up_weights.template take<kEarly, GateUpWeights::kCount, kStreams>(b, walk.ring, b.layer);
  join_attention_out(b, walk);
  gate_up_proj(b, walk, gate_up_weights);
  stamp(b, Point::kGateUpProj);
  Ahead<DownProj, true> down_weights;
  down_weights.take(b, walk.ring, b.layer);
  down_proj(b, walk, down_weights);
}

// After a token's last outputs were received, before a barrier: acquires what other blocks have appended to
// the cache (docs/SYNC.md, Fences).
KOG_DEVICE void acquire_cache() { acquire_gpu(); }

// All layers.
KOG_DEVICE void run_layers_in_order(Block& b, Walk& walk) {
  for (b.layer = 0; b.layer < kLayers; b.layer++) {
    qkv_proj(b, walk, NothingAhead());
    OWeights o_weights;
    run_layer(b, walk, o_weights);
    join_mlp_out(b, walk);
  }
}
// All layers, with qkv_proj's weights taken from the ring ahead of the wait for the layer before. In one
// pass of the loop: a register that lived from one pass to the next would be spilled.
KOG_DEVICE void run_layers_ahead(Block& b, Walk& walk) {
  b.layer = 0;
  OWeights o_weights;
  if constexpr (kBehindQkv > 0) {
    Ahead<QkvProj, true> qkv_weights;
    qkv_weights.take(b, walk.ring, 0);
    o_weights.template take<0, kBehindQkv, false>(b, walk.ring, 0);
    qkv_proj(b, walk, qkv_weights);
  } else {
    qkv_proj(b, walk, NothingAhead());
  }
  while (true) {
    run_layer(b, walk, o_weights);
    if (b.layer == kLayers - 1) break;
    Ahead<QkvProj, true> qkv_weights;
    qkv_weights.take(b, walk.ring, b.layer + 1);
    o_weights.template take<0, kBehindQkv, false>(b, walk.ring, b.layer + 1);
    join_mlp_out(b, walk);
    b.layer++;
    qkv_proj(b, walk, qkv_weights);
  }
  join_mlp_out(b, walk);
  b.layer++;
}

}  // namespace kog
