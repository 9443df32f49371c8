// One stage alone, for tests and timing: the functions of the decode kernel on vectors and words
// that the host has laid out (stages.py), which finds there what the stage has made of them.
#pragma once
#include <kog/head.h>
#include <kog/produce.h>
#include <kog/runs.h>
#include <kog/staged.h>

namespace kog {

// Layers that a stage alone pretends to have run: even, so that no zeroed word seems ready, and
// enough for a delayed output to lie behind.
constexpr int kStageIteration = 2 * kDelay;

// By one block a lane.
KOG_DEVICE void store_streams(const Block& b, const float (&x)[kHeld], float* streams) {
  if (b.group_index != 0) return;
#pragma unroll
  for (int i = 0; i < kHeld; i++) {
    int e = element(b, i / 4) + i % 4;
    if (e < kHidden) streams[b.lane * kHiddenStride + e] = x[i];
  }
}

// The head's input as everybody names it: with the norm that the head itself would apply. Streams
// side by side stay in their words.
KOG_DEVICE void run_mix(Block& b, Walk& walk) {
  mix_lanes(b, walk);
  float scale = kNormedMix ? 1 : inverse_rms_of_x(b, walk);
#pragma unroll
  for (int i = 0; i < kHeld; i++) walk.x[i] *= walk.gain[i] * scale;
}

// What o_proj would multiply, as the words that a join of many splits sends; by one block a lane.
KOG_DEVICE void publish_staged(const Block& b, u32 phase) {
  u32* to = lane_words<AttentionWords>(b);
  sync_consumers();
  if (b.group_index != 0) return;
  for (int word = b.thread; word < OProj::kCols / 2; word += kConsumers)
    store_relaxed(to + word, pack_operand(staged_word(b, word), phase));
}

// Which run of the stream is the stage's; -1 if it has no weights.
KOG_DEVICE int run_of(StageId which, int layer) {
  if (which == LmHead::kId) return kRuns;
  int number = LayerMatrices::number(which);
  return number < 0 ? -1 : layer * LayerMatrices::kCount + number;
}

KOG_DEVICE void consume_stage(Block& b, const StageCall& c) {
  Walk walk;
  walk.iteration = kStageIteration;
  b.small->slot = 0;  // every thread writes the same
  load_streams(b, c.x, walk.x);
  if (int run = run_of(static_cast<StageId>(c.which), b.layer); run >= 0) walk.ring.begin_at(ring_slots_of_runs(b, run));
  Ahead<QkvProj, true> qkv_weights;
  Ahead<OProj> o_weights;
  Ahead<GateUpProj> gate_up_weights;
  DownWeights down_weights;
  NothingBehind nothing_behind;
  switch (static_cast<StageId>(c.which)) {
    case StageId::kEmbed:
      walk.embedded.load(b, c.token);
      walk.embedded.unpack(b, walk.x);
      break;
    case StageId::kQkvProj:
      load_gains(b, 2 * b.layer, walk.gain);
      qkv_weights.take(b, walk.ring, b.layer);
      qkv_proj(b, walk, qkv_weights);
      break;
    case StageId::kAttention:
      attention(b, walk.ring, c.position, phase_of(walk.iteration));
      stage_attention<OProj>(b, Step::kOProjInput, c.position, phase_of(walk.iteration));
      publish_staged(b, phase_of(walk.iteration));
      break;
    case StageId::kOProj:
      o_weights.take(b, walk.ring, b.layer);
      stage_words<OProj, AttentionWords>(b, Step::kOProjInput, join_phase(b));
      o_proj(b, walk, o_weights);
      join_attention_out(b, walk);
      break;
    case StageId::kGateUpProj:
      load_gains(b, 2 * b.layer + 1, walk.gain);
      gate_up_weights.take(b, walk.ring, b.layer);
      gate_up_proj(b, walk, gate_up_weights);
      break;
    case StageId::kDownProj:
      if constexpr (kDownInTail > 0) down_weights.take<0, kDownInTail, false>(b, walk.ring, b.layer);
      down_proj(b, walk, down_weights, nothing_behind);
      join_mlp_out(b, walk);
      break;
    case StageId::kMix:
      load_gains(b, 2 * kLayers, walk.gain);
      if constexpr (kMixes) run_mix(b, walk);
      break;
    case StageId::kLmHead:
      load_gains(b, 2 * kLayers, walk.gain);
#pragma unroll
      for (int i = 0; i < kHeld; i++)
        if (kMean) walk.gain[i] = 1;
      run_head<false>(b, walk, c.position);
      break;
  }
  any_consumer(must_leave(b));
  store_streams(b, walk.x, c.out);
  if (b.thread == 0) store_volatile(&b.small->stop, 1);
}

}  // namespace kog
