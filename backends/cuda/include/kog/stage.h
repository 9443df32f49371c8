// One stage alone, for tests and timing: the functions of the decode kernel on vectors and words
// that the host has laid out (stages.py), which finds there what the stage has made of them.
#pragma once
#include <kog/head.h>
#include <kog/roles.h>

namespace kog {

// By value, like Pointers.
struct StageCall {
  Pointers p;
  const float* x;  // [lanes][kHiddenStride]: the residual streams, or the head's input
  float* out;      // the same after the stage, if it changes them
  int which, layer, token, position;
};

// Layers that a stage alone pretends to have run: even, so that no zeroed word seems ready, and
// enough for a delayed output to lie behind.
constexpr int kStageIteration = 2 * kDelay;

KOG_DEVICE void load_streams(const Block& b, const float* streams, float (&x)[kHeld]) {
#pragma unroll
  for (int i = 0; i < kHeld; i++) {
    int e = element(b, i / 4) + i % 4;
    x[i] = e < kHidden ? streams[b.lane * kHiddenStride + e] : 0;
  }
}

// By one block a lane.
KOG_DEVICE void store_streams(const Block& b, const float (&x)[kHeld], float* streams) {
  if (b.place != 0) return;
#pragma unroll
  for (int i = 0; i < kHeld; i++) {
    int e = element(b, i / 4) + i % 4;
    if (e < kHidden) streams[b.lane * kHiddenStride + e] = x[i];
  }
}

// The head's input as everybody names it: with the norm that the head itself would apply. Streams
// side by side stay in their words.
KOG_DEVICE void run_mix(Block& b, Walk& k) {
  mix_lanes(b, k);
  float scale = 1;
  if constexpr (!kNormedMix) {
    stage_x<LmHead>(b, k.x, k.gain);
    sync_consumers();
    scale = inverse_rms(b);
  }
#pragma unroll
  for (int i = 0; i < kHeld; i++) k.x[i] *= k.gain[i] * scale;
}

// What o_proj would multiply, as the words that a join of many splits sends; by one block a lane.
KOG_DEVICE void publish_staged(const Block& b, u32 phase) {
  u32* to = b.p.words + AttentionWords::kOffset + b.lane * AttentionWords::kStride;
  sync_consumers();
  if (b.place != 0) return;
  for (int word = b.thread; word < OProj::kCols / 2; word += 32 * kWarps) {
    int in_fragment = 2 * word % kFragK, in_lane = word % kLaneWords;
    const u32* from = reinterpret_cast<const u32*>(b.scratch) +
                      (2 * word / kFragK * 2 + in_lane % 2) * kColumnWords +
                      in_fragment / (2 * kLaneWords) * (kLaneWords / 2) + in_lane / 2;
    store_relaxed(to + word, pack_operand(*from, phase));
  }
}

KOG_DEVICE void consume_stage(Block& b, const StageCall& c) {
  Walk k;
  k.iteration = kStageIteration;
  b.small->slot = 0;  // every thread writes the same
  load_streams(b, c.x, k.x);
  Ahead<OProj> o_weights;
  Ahead<GateUpProj> gate_up_weights;
  switch (static_cast<StageId>(c.which)) {
    case StageId::kEmbed:
      k.embedded.load(b, c.token);
      k.embedded.unpack(b, k.x);
      break;
    case StageId::kQkvProj:
      load_gains(b, 2 * b.layer, k.gain);
      qkv_proj(b, k);
      break;
    case StageId::kAttention:
      attention(b, c.position, phase_of(k.iteration));
      stage_attention<OProj>(b, Step::kOProjInput, c.position, phase_of(k.iteration));
      publish_staged(b, phase_of(k.iteration));
      break;
    case StageId::kOProj:
      o_weights.take(b, k.ring);
      stage_words<OProj>(b, Step::kOProjInput,
                         b.p.words + AttentionWords::kOffset + b.lane * AttentionWords::kStride,
                         join_phase(b));
      o_proj(b, k, o_weights);
      join_attention_out(b, k);
      break;
    case StageId::kGateUpProj:
      load_gains(b, 2 * b.layer + 1, k.gain);
      gate_up_weights.take(b, k.ring);
      gate_up_proj(b, k, gate_up_weights);
      break;
    case StageId::kDownProj:
      down_proj(b, k);
      break;
    case StageId::kMix:
      load_gains(b, 2 * kLayers, k.gain);
      if constexpr (kMixes) run_mix(b, k);
      break;
    case StageId::kLmHead:
      load_gains(b, 2 * kLayers, k.gain);
#pragma unroll
      for (int i = 0; i < kHeld; i++)
        if (kMean) k.gain[i] = 1;
      run_head<false>(b, k, c.position);
      break;
  }
  any_consumer(must_leave(b));
  store_streams(b, k.x, c.out);
  if (b.thread == 0) store_volatile(&b.small->stop, 1);
}

// Chunks of one layer's stages before `which`; of all four where it is none of them.
KOG_DEVICE int chunks_before(StageId which, int place, int layer) {
  int sum = 0;
  if (which == StageId::kQkvProj) return sum;
  sum += chunks_of<QkvProj>(place, layer);
  if (which == StageId::kOProj) return sum;
  sum += chunks_of<OProj>(place, layer);
  if (which == StageId::kGateUpProj) return sum;
  sum += chunks_of<GateUpProj>(place, layer);
  if (which == StageId::kDownProj) return sum;
  return sum + chunks_of<DownProj>(place, layer);
}

KOG_DEVICE int stage_chunks(const Block& b, StageId which) {
  switch (which) {
    case StageId::kQkvProj:
      return chunks_of<QkvProj>(b.place, b.layer);
    case StageId::kOProj:
      return chunks_of<OProj>(b.place, b.layer);
    case StageId::kGateUpProj:
      return chunks_of<GateUpProj>(b.place, b.layer);
    case StageId::kDownProj:
      return chunks_of<DownProj>(b.place, b.layer);
    case StageId::kLmHead:
      return chunks_of<LmHead>(stage_place<LmHead>(b), 0);
    default:
      return 0;
  }
}

// The stage's part of the block's stream.
KOG_DEVICE void produce_stage(Block& b, StageId which) {
  int first = chunks_before(which, b.place, b.layer), count = stage_chunks(b, which);
  if (which == StageId::kLmHead) first = 0;
  for (int i = 0; i < (which == StageId::kLmHead ? kLayers : b.layer); i++)
    first += chunks_before(StageId::kLmHead, b.place, i);
  Producer producer;
  for (int i = first; i < first + count; i++) {
    u64 chunk = static_cast<u64>(i) * kBlocks + static_cast<u64>(b.block);
    if (!producer.fill(b, b.p.weights + chunk * kChunkBytes, first + count - i)) break;
  }
  producer.drain(b);
}

KOG_DEVICE void run_stage(Block& b, const StageCall& c) {
  b.layer = c.layer;
  run_roles(
      b, [&] { consume_stage(b, c); },
      [&] { produce_stage(b, static_cast<StageId>(c.which)); });
}

}  // namespace kog
