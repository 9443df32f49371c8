// One launch serves a request from its first prompt token to its stop: the walk of one block.
//
//   x --norm--> qkv_proj ==> attention ==> o_proj ==> x --norm--> gate_up_proj ==> down_proj ==> x
//                       words         words     words                         words         words
//
// The 1 / rms of a norm is applied to the result: the multiplication starts before it is known.
#pragma once
#include <kog/join.h>
#include <kog/residual.h>
#include <kog/sample.h>

namespace kog {

// Of one consumer thread, from the first token to the last.
struct Walk {
  Ring ring;
  int turn = 0;       // which partial sums are free
  int iteration = 0;  // layers run: the phase of every layer exchange
  int heads = 0;      // heads run: the phase of the head's
  Turns attention_out, mlp_out;
  float x[kHeld], gain[kHeld];
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

KOG_DEVICE void qkv_proj(Block& b, Walk& k) {
  b.begin_stage();
  stage_x<QkvProj>(b, k.x, k.gain);
  u32* to = b.p.words + QkvWords::kOffset + b.lane * QkvWords::kStride;
  u32 phase = phase_of(k.iteration);
  const float* bias = bias_of<QkvProj>(b);
  float scale = 0;
  run_rows<QkvProj>(
      b, k.ring, k.turn, layer_units<QkvProj>(b),
      [&](int row, bool owner) { return kQkvBias && owner ? bias[row] : 0.f; },
      [&](int row, bool owner, float sum, float asked) {
        if (scale == 0) scale = inverse_rms(b);
        float v = sum * scale + asked, next = shuffle_down(v, 1);
        if (owner && row % 2 == 0)
          store_relaxed(to + row / 2, pack_pair(v, row + 1 < QkvProj::kRows ? next : 0, phase));
      });
}

KOG_DEVICE void gate_up_proj(Block& b, Walk& k) {
  b.begin_stage();
  stage_x<GateUpProj>(b, k.x, k.gain);
  u32* to = b.p.words + MlpWords::kOffset + b.lane * MlpWords::kStride;
  u32 phase = phase_of(k.iteration);
  const float* bias = bias_of<GateUpProj>(b);
  float scale = 0;
  run_rows<GateUpProj>(
      b, k.ring, k.turn, layer_units<GateUpProj>(b),
      [&](int row, bool owner) { return kMlpBias && owner ? bias[row] : 0.f; },
      [&](int row, bool owner, float sum, float asked) {
        if (scale == 0) scale = inverse_rms(b);
        float v = sum * scale + asked, up = shuffle_down(v, 1);
        float h = divide(v, 1.f + exp2_fast(v * -1.4426950408889634f)) * up,
              next = shuffle_down(h, 2);
        if (owner && row % 4 == 0)
          store_relaxed(to + row / 4, pack_pair(h, row + 2 < GateUpProj::kRows ? next : 0, phase));
      });
}

// o_proj or down_proj, whose inputs are staged: rows to the residual streams. `last`: this token's
// rows of the cache become visible with them.
template <class Stage, class Out, bool kBias>
KOG_DEVICE void module_rows(Block& b, Walk& k, const Turns& turns, int how, bool last) {
  b.begin_stage();
  const float* bias = bias_of<Stage>(b);
  struct Asked {
    float bias;
    typename Out::Old old;
  };
  run_rows<Stage>(
      b, k.ring, k.turn, layer_units<Stage>(b),
      [&](int row, bool owner) {
        return Asked{kBias && owner ? bias[row] : 0.f, Out::ask(b, how, k.iteration, row, owner)};
      },
      [&](int row, bool owner, float sum, Asked& asked) {
        if (last) fence_gpu();  // pairs with the one after the gather
        Out::publish(b, how, k.iteration, turns, row, owner, sum + asked.bias, asked.old);
      });
}

KOG_DEVICE void run_layer(Block& b, Walk& k, int position) {
  u32 phase = phase_of(k.iteration);
  bool last = b.layer == kLayers - 1;
  qkv_proj(b, k);
  b.begin_stage();
  attention(b, position, phase);
  b.begin_stage();
  stage_words<OProj>(b, Step::kOProjInput,
                     b.p.words + AttentionWords::kOffset + b.lane * AttentionWords::kStride, phase);
  load_gains(b, 2 * b.layer + 1, k.gain);
  int how = kReduceAttention[b.layer];
  module_rows<OProj, AttentionOut, kOBias>(b, k, k.attention_out, how, false);
  AttentionOut::join(b, Step::kAttentionOut, how, k.attention_out, k.x);
  gate_up_proj(b, k);
  b.begin_stage();
  stage_words<DownProj>(b, Step::kDownProjInput,
                        b.p.words + MlpWords::kOffset + b.lane * MlpWords::kStride, phase);
  load_gains(b, 2 * b.layer + 2, k.gain);
  how = kReduceMlp[b.layer];
  module_rows<DownProj, MlpOut, kMlpBias>(b, k, k.mlp_out, how, last);
  MlpOut::join(b, Step::kMlpOut, how, k.mlp_out, k.x);
  if (last) fence_gpu();
  k.iteration++;
}

// The head's input from all lanes, in two small hops: rows of each lane, then sums of rows. It
// becomes x.
KOG_DEVICE void mix_lanes(Block& b, Walk& k) {
  u32 phase = phase_of(k.heads);
  float scale = 1;
  if constexpr (kMean) {
    stage_x<LmHead>(b, k.x, k.gain);
    sync_consumers();
    scale = inverse_rms(b);
  }
  u32* part = b.p.words + PartWords::kOffset;
#pragma unroll
  for (int i = 0; i < kGroups; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      int e = element(b, i) + j;
      float v = kMean ? k.x[4 * i + j] * k.gain[4 * i + j] * scale : k.x[4 * i + j];
      if (e < kHidden && e * kGroup / kHidden == b.place)
        store_relaxed(part + b.lane * PartWords::kStride + e, pack_f32(v, phase));
      k.x[4 * i + j] = 0;
      if (kMean) k.gain[4 * i + j] = 1;
    }
  constexpr int kRows = (kHidden + kBlocks - 1) / kBlocks;
  for (int first = 0; first < kRows; first += 32 * kWarps) {
    int row = b.block * kRows + first + b.thread;
    if (first + b.warp * 32 >= kRows) continue;
    bool mine = first + b.thread < kRows && row < kHidden;
    u32 w[kLanes];
    poll_words(
        b, Step::kMixLanes,
        [&](int j) {
          return mine ? part + j * PartWords::kStride + row : static_cast<const u32*>(nullptr);
        },
        phase, w);
    float sum = 0;
#pragma unroll
    for (int j = 0; j < kLanes; j++) sum += unpack_f32(w[j]);
    if (mine)
      store_relaxed(b.p.words + YWords::kOffset + row, pack_f32(kMean ? sum / kLanes : sum, phase));
  }
  gather(b, Step::kMixGather, b.p.words + YWords::kOffset, phase, k.x);
  sync_consumers();  // all warps have read the sums of squares
}

// Logits and the token that all blocks agree on; `control` is the host's word, asked for by one
// thread of all.
KOG_DEVICE void run_head(Block& b, Walk& k, int position) {
  u32 control = 0;
  if (b.block == 0 && b.thread == 0) control = static_cast<u32>(load_system(b.p.mailbox));
  b.begin_stage();
  if constexpr (kMixes) mix_lanes(b, k);
  stage_x<LmHead>(b, k.x, k.gain);
  int first = kHeadByLane ? b.lane * LmHead::kRows : 0;
  bool all = b.p.request[Request::kAllLogits] != 0;
  float* logits = b.p.logits + static_cast<u64>(k.heads) * kVocab + first;
  Candidate mine = nobody();
  float scale = kMixes && kMean ? 1.f : 0.f;
  run_rows<LmHead>(
      b, k.ring, k.turn, units_of<LmHead>(stage_place<LmHead>(b), 0), [](int, bool) { return 0; },
      [&](int row, bool owner, float sum, int) {
        if (scale == 0) scale = inverse_rms(b);
        if (!owner) return;
        if (all) logits[row] = sum * scale;
        Candidate c = candidate(b, sum * scale, first + row, position + 1);
        if (beats(c, mine)) mine = c;
      });
  publish_candidate(b, mine, k.heads, control);
  gather_candidates(b, k.heads);
}

// What the token means for the request: kRunning, or why it ends.
KOG_DEVICE int outcome_of(const Block& b, int token, int made) {
  const u32* r = b.p.request;
  if (token < 0) return kNotFinite;
  for (u32 i = 0; i < r[Request::kNumStops]; i++)
    if (static_cast<int>(r[Request::kStopIds + i]) == token) return kStop;
  if (made >= static_cast<int>(r[Request::kMost])) return kLength;
  return static_cast<int>(b.small->control);
}

KOG_DEVICE void tell_host(const Block& b, int token, int made) {
  if (b.block != 0 || b.thread != 32 * kWarps - 1) return;
  u64 word = static_cast<u64>(made) << 32 | static_cast<u32>(token);
  store_system_pair(b.p.mailbox + 8 + 2 * (made - 1), word, nanoseconds());
}

KOG_DEVICE void consume(Block& b) {
  Walk k;
  int position = static_cast<int>(b.p.request[Request::kFirst]);
  int prompt = static_cast<int>(b.p.request[Request::kPrompt]);
  bool all = b.p.request[Request::kAllLogits] != 0;
  int token = b.p.tokens[position], outcome = kRunning;
  while (outcome == kRunning) {
    bool has_head = position + 1 >= prompt || all;
    b.begin_stage();
    load_gains(b, 0, k.gain);
    embed(b, token, k.x);
    for (b.layer = 0; b.layer < kLayers; b.layer++) run_layer(b, k, position);
    if (has_head) run_head(b, k, position);
    // The one place where the warps of a block learn of each other's expired waits.
    if (any_consumer(b.dead)) {
      outcome = kFailed;
      break;
    }
    position++;
    if (has_head) {
      token = agreed(b);
      k.heads++;
      tell_host(b, token, k.heads);
      outcome = outcome_of(b, token, k.heads);
    }
    if (position < prompt) token = b.p.tokens[position];
  }
  if (b.thread == 0) store_volatile(&b.small->stop, 1);
  if (b.block == 0 && b.thread == 0)
    store_system_pair(b.p.mailbox + 2, static_cast<u64>(outcome), k.heads);
}

}  // namespace kog
