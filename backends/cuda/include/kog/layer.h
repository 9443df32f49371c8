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

static_assert(kSame<LayerMatrices, Matrices<QkvProj, OProj, GateUpProj, DownProj>>,
              "run_layer's order");

// Of a batch thread t has row t.
template <class Stage>
struct ThreadRow {
  static constexpr int kRounds = 1;
  static constexpr bool kAll = true;
  int first, count;

  KOG_DEVICE ThreadRow(const Block&, const Units& units)
      : first(units.first * Stage::kUnitRows),
        count((units.last - units.first) * Stage::kUnitRows) {}
  KOG_DEVICE bool has(const Block& b, int) const { return b.warp * 32 < count; }
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
    return layer_units<Stage>(b);
  }
};

template <class Taken>
KOG_DEVICE void qkv_proj(Block& b, Walk& k, const Taken& ahead) {
  stamp(b, Point::kStart);
  b.begin_stage();
  stage_x<QkvProj>(b, k.x, k.gain);
  qkv_rows(b, k, held_operands<QkvProj>(b), ahead, phase_of(k.iteration));
  stamp(b, Point::kQkvProj);
}

KOG_DEVICE void gate_up_proj(Block& b, Walk& k, const Ahead<GateUpProj>& ahead) {
  b.begin_stage();
  stage_x<GateUpProj>(b, k.x, k.gain);
  gate_up_rows(b, k, held_operands<GateUpProj>(b), ahead, phase_of(k.iteration));
}

KOG_DEVICE AttentionOut attention_out(Block& b, Walk& k) {
  return {b, k.attention_out, kReduceAttention[b.layer], k.iteration};
}
KOG_DEVICE MlpOut mlp_out(Block& b, Walk& k) {
  return {b, k.mlp_out, kReduceMlp[b.layer], k.iteration};
}

// Whose inputs are staged. The next stage's gains come with both.
KOG_DEVICE void o_proj(Block& b, Walk& k, const Ahead<OProj>& ahead) {
  load_gains(b, 2 * b.layer + 1, k.gain);
  b.begin_stage();
  module_rows(b, k, held_operands<OProj>(b), ahead, attention_out(b, k));
  stamp(b, Point::kOProj);
}

KOG_DEVICE void join_attention_out(Block& b, Walk& k) {
  attention_out(b, k).join(Step::kAttentionOut, k.x);
  stamp(b, Point::kAttentionOut);
}

// To the words of its outputs. In the last layer this token's rows of the cache become visible with
// them: the threads that send rows see to it while they would wait for inputs, behind the barriers
// that all who append have passed.
KOG_DEVICE void down_proj(Block& b, Walk& k, const Ahead<DownProj, true>& ahead) {
  b.begin_stage();
  bool sends = b.thread < DownProj::kBatch * DownProj::kUnitRows;
  if (b.layer == kLayers - 1 && sends) fence_gpu();  // pairs with acquire_cache
  stage_words<DownProj>(b, Step::kDownProjInput,
                        b.p.words + MlpWords::kOffset + b.lane * MlpWords::kStride,
                        phase_of(k.iteration));
  stamp(b, Point::kDownProjInput);
  load_gains(b, 2 * b.layer + 2, k.gain);
  b.begin_stage();
  module_rows(b, k, held_operands<DownProj>(b), ahead, mlp_out(b, k));
  stamp(b, Point::kDownProj);
}

// Ends the layer.
KOG_DEVICE void join_mlp_out(Block& b, Walk& k) {
  mlp_out(b, k).join(Step::kMlpOut, k.x);
  stamp(b, Point::kMlpOut);
  count_join(b, b.small->position);
  k.iteration++;
}

// From the words of q, k and v to those of the layer's outputs.
KOG_DEVICE void run_layer(Block& b, Walk& k) {
  b.begin_stage();
  attention(b, b.small->position, phase_of(k.iteration));
  stamp(b, Point::kAttention);
  // While some blocks attend the rings fill up: behind all of o_proj's weights the next stage's are taken,
  // as many as there are registers for, and the others when those are free.
  using OWeights = Ahead<OProj>;
  using GateUpWeights = Ahead<GateUpProj>;
  constexpr int kEarly =
      kStreams && OWeights::kWhole ? kLeast<kMostAhead - OWeights::kCount, GateUpWeights::kCount> : 0;
  OWeights o_weights;
  GateUpWeights gate_up_weights;
  o_weights.template take<0, OWeights::kCount, kStreams>(b, k.ring, b.layer);
  gate_up_weights.template take<0, kEarly, kStreams>(b, k.ring, b.layer);
  b.begin_stage();
  stage_attention<OProj>(b, Step::kOProjInput, b.small->position, phase_of(k.iteration));
  stamp(b, Point::kOProjInput);
  o_proj(b, k, o_weights);
  gate_up_weights.template take<kEarly, GateUpWeights::kCount, kStreams>(b, k.ring, b.layer);
  join_attention_out(b, k);
  gate_up_proj(b, k, gate_up_weights);
  stamp(b, Point::kGateUpProj);
  Ahead<DownProj, true> down_weights;
  down_weights.take(b, k.ring, b.layer);
  down_proj(b, k, down_weights);
}

// After a token's last outputs were received and before a barrier: what other blocks have appended to
// the cache by then is read from behind the barrier on.
KOG_DEVICE void acquire_cache() { fence_gpu(); }

// All of them.
KOG_DEVICE void run_layers_in_order(Block& b, Walk& k) {
  for (b.layer = 0; b.layer < kLayers; b.layer++) {
    qkv_proj(b, k, NothingAhead());
    run_layer(b, k);
    join_mlp_out(b, k);
  }
}
// The same with qkv_proj's weights taken from the ring ahead of the wait for the layer before. In one
// pass of the loop: a register that lived from one pass to the next would be spilled.
KOG_DEVICE void run_layers_ahead(Block& b, Walk& k) {
  b.layer = 0;
  qkv_proj(b, k, NothingAhead());
  while (true) {
    run_layer(b, k);
    if (b.layer == kLayers - 1) break;
    Ahead<QkvProj, true> qkv_weights;
    qkv_weights.take(b, k.ring, b.layer + 1);
    join_mlp_out(b, k);
    b.layer++;
    qkv_proj(b, k, qkv_weights);
  }
  join_mlp_out(b, k);
  b.layer++;
}

}  // namespace kog
