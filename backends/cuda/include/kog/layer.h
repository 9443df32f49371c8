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

// Of one consumer thread, from the first token to the last.
struct Walk {
  Ring ring;
  int turn = 0;       // which partial sums are free
  int iteration = 0;  // layers run: the phase of every layer exchange
  int heads = 0;      // heads run: the phase of the head's
  Turns attention_out, mlp_out;
  float x[kHeld], gain[kHeld];
  Embedded embedded;  // the next token's
  Ending ending;
};

template <class Stage>
KOG_DEVICE const float* bias_of(const Block& b) {
  return b.p.biases + static_cast<u64>(b.layer) * kBiasRows + Stage::kBiasAt +
         b.lane * Stage::kRows;
}
template <class Stage>
KOG_DEVICE Units layer_units(const Block& b) {
  return units_of<Stage>(b.place, b.layer);
}

template <class Taken>
KOG_DEVICE void qkv_proj(Block& b, Walk& k, const Taken& ahead) {
  stamp(b, Point::kStart);
  b.begin_stage();
  stage_x<QkvProj>(b, k.x, k.gain);
  u32* to = b.p.words + QkvWords::kOffset + b.lane * QkvWords::kStride;
  u32 phase = phase_of(k.iteration);
  const float* bias = bias_of<QkvProj>(b);
  float scale = 0;
  run_rows<QkvProj>(
      b, k.ring, k.turn, layer_units<QkvProj>(b), ahead,
      [&](int row, bool owner) { return kQkvBias ? bias[owner ? row : 0] : 0.f; },
      [&](int row, bool owner, float sum, float asked) {
        if (scale == 0) scale = inverse_rms(b);
        float v = sum * scale + asked, next = shuffle_down(v, 1);
        if (owner && row % 2 == 0)
          store_relaxed(to + row / 2, pack_pair(v, row + 1 < QkvProj::kRows ? next : 0, phase));
      });
  stamp(b, Point::kQkvProj);
}

KOG_DEVICE void gate_up_proj(Block& b, Walk& k, const Ahead<GateUpProj>& ahead) {
  b.begin_stage();
  stage_x<GateUpProj>(b, k.x, k.gain);
  u32* to = b.p.words + MlpWords::kOffset + b.lane * MlpWords::kStride;
  u32 phase = phase_of(k.iteration);
  const float* bias = bias_of<GateUpProj>(b);
  float scale = 0;
  run_rows<GateUpProj>(
      b, k.ring, k.turn, layer_units<GateUpProj>(b), ahead,
      [&](int row, bool owner) { return kMlpBias ? bias[owner ? row : 0] : 0.f; },
      [&](int row, bool owner, float sum, float asked) {
        if (scale == 0) scale = inverse_rms(b);
        float v = sum * scale + asked, up = shuffle_down(v, 1);
        float h = divide(v, 1.f + exp2_fast(v * -1.4426950408889634f)) * up,
              next = shuffle_down(h, 2);
        if (owner && row % 4 == 0)
          store_relaxed(to + row / 4, pack_pair(h, row + 2 < GateUpProj::kRows ? next : 0, phase));
      });
}

// o_proj or down_proj, whose inputs are staged: rows to the residual streams.
template <class Stage, class Out, bool kBias, class Taken>
KOG_DEVICE void module_rows(Block& b, Walk& k, const Taken& taken, const Turns& turns, int how) {
  b.begin_stage();
  const float* bias = bias_of<Stage>(b);
  struct Asked {
    float bias;
    typename Out::Old old;
  };
  run_rows<Stage>(
      b, k.ring, k.turn, layer_units<Stage>(b), taken,
      [&](int row, bool owner) {
        return Asked{kBias ? bias[owner ? row : 0] : 0.f, Out::ask(b, how, k.iteration, row, owner)};
      },
      [&](int row, bool owner, float sum, Asked& asked) {
        float y = sum * kPairUnit + asked.bias;
        Out::publish(b, how, k.iteration, turns, row, owner, y, asked.old);
      });
}

// Whose inputs are staged. The next stage's gains come with both.
KOG_DEVICE void o_proj(Block& b, Walk& k, const Ahead<OProj>& ahead) {
  load_gains(b, 2 * b.layer + 1, k.gain);
  module_rows<OProj, AttentionOut, kOBias>(b, k, ahead, k.attention_out, kReduceAttention[b.layer]);
  stamp(b, Point::kOProj);
}

KOG_DEVICE void join_attention_out(Block& b, Walk& k) {
  AttentionOut::join(b, Step::kAttentionOut, kReduceAttention[b.layer], k.iteration,
                     k.attention_out, k.x);
  stamp(b, Point::kAttentionOut);
}

// To the words of its outputs. In the last layer this token's rows of the cache become visible with
// them: the threads that send rows see to it while they would wait for inputs, behind the barriers
// that all who append have passed.
KOG_DEVICE void down_proj(Block& b, Walk& k, const Ahead<DownProj, true>& ahead) {
  b.begin_stage();
  bool sends = b.thread < kBatchRows<DownProj>;
  if (b.layer == kLayers - 1 && sends) fence_gpu();  // pairs with acquire_cache
  stage_words<DownProj>(b, Step::kDownProjInput,
                        b.p.words + MlpWords::kOffset + b.lane * MlpWords::kStride,
                        phase_of(k.iteration));
  stamp(b, Point::kDownProjInput);
  load_gains(b, 2 * b.layer + 2, k.gain);
  module_rows<DownProj, MlpOut, kMlpBias>(b, k, ahead, k.mlp_out, kReduceMlp[b.layer]);
  stamp(b, Point::kDownProj);
}

// Ends the layer.
KOG_DEVICE void join_mlp_out(Block& b, Walk& k) {
  MlpOut::join(b, Step::kMlpOut, kReduceMlp[b.layer], k.iteration, k.mlp_out, k.x);
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
KOG_DEVICE void run_layers_in_turn(Block& b, Walk& k) {
  for (b.layer = 0; b.layer < kLayers; b.layer++) {
    qkv_proj(b, k, NothingAhead<QkvProj>());
    run_layer(b, k);
    join_mlp_out(b, k);
  }
}
// The same with qkv_proj's weights taken from the ring ahead of the wait for the layer before. In one
// pass of the loop: a register that lived from one pass to the next would be spilled.
KOG_DEVICE void run_layers_ahead(Block& b, Walk& k) {
  b.layer = 0;
  qkv_proj(b, k, NothingAhead<QkvProj>());
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
