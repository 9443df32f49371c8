// One layer of all columns, as one block walks it.
//
//   x --norm--> qkv_proj ==> attention ==> o_proj ==> x --norm--> gate_up_proj ==> down_proj ==> x
//                       words         flags     flags                         flags         flags
//
// What a block may overwrite, and when, is as in a kernel of one token: before it writes an exchange, it
// has seen the flags of a module's rows that every block raised after it had read.
#pragma once
#include <kog/columns/attention.h>
#include <kog/columns/stream.h>

namespace kog::columns {

// Of one consumer thread, from the first step to the last.
struct Walk {
  Ring ring;
  int turn = 0;   // which partial sums are free
  int heads = 0;  // exchanges of heads: their numbers
  int steps = 0;
};

// The streams at a layer's start.
KOG_DEVICE Streams layer_streams(const Block& b) {
  return {b.layer == 0 ? nullptr : stream_words<MlpOutWords>(b)};
}

template <class Stage>
KOG_DEVICE const float* bias_of(const Block& b) {
  return b.p.biases + static_cast<u64>(b.layer) * kBiasRows + Stage::kBiasAt;
}
template <class Stage>
KOG_DEVICE Units layer_units(const Block& b) {
  return units_of<Stage>(b.place, b.layer);
}

KOG_DEVICE void qkv_proj(Block& b, Walk& k) {
  b.begin_stage();
  Operands<QkvProj> x(b);
  stage_streams(b, x, layer_streams(b), 2 * b.layer, [&] {
    if (b.layer > 0) await_streams<DownProj, MlpOutFlagsWords>(b, Step::kMlpOut, epoch_of(b, k.steps) - 1);
  });
  u32 phase = phase_of(iteration_of(b, k.steps));
  const float* bias = bias_of<QkvProj>(b);
  float scale[Shape<QkvProj>::kItems] = {};
  run_units<QkvProj>(
      b, k.ring, k.turn, layer_units<QkvProj>(b), x,
      [&](const Item& item) { return kQkvBias && item.there ? bias[item.row] : 0.f; },
      [&](int i, const Item& item, float sum, float asked) {
        if (scale[i] == 0 && item.there) scale[i] = inverse_rms(b, item.column);
        float v = sum * scale[i] + asked, next = shuffle_down(v, 1);
        u32* to = b.p.words + QkvWords::kOffset + item.column * QkvWords::kStride + item.row / 2;
        if (item.there && item.row % 2 == 0)
          store_relaxed(to, pack_pair(v, item.row + 1 < QkvProj::kRows ? next : 0, phase));
      },
      [](int) {});
}

KOG_DEVICE void gate_up_proj(Block& b, Walk& k) {
  b.begin_stage();
  Operands<GateUpProj> x(b);
  stage_streams(b, x, {stream_words<AttentionOutWords>(b)}, 2 * b.layer + 1, [&] {
    await_streams<OProj, AttentionOutFlagsWords>(b, Step::kAttentionOut, epoch_of(b, k.steps));
  });
  u32* to = b.p.words + MlpWords::kOffset;
  const float* bias = bias_of<GateUpProj>(b);
  float scale[Shape<GateUpProj>::kItems] = {};
  run_units<GateUpProj>(
      b, k.ring, k.turn, layer_units<GateUpProj>(b), x,
      [&](const Item& item) { return kMlpBias && item.there ? bias[item.row] : 0.f; },
      [&](int i, const Item& item, float sum, float asked) {
        if (scale[i] == 0 && item.there) scale[i] = inverse_rms(b, item.column);
        float v = sum * scale[i] + asked, up = shuffle_down(v, 1);
        float h = divide(v, 1.f + exp2_fast(v * -1.4426950408889634f)) * up,
              next = shuffle_down(h, 2);
        if (item.there && item.row % 4 == 0)
          store_relaxed(to + narrow_place(item.row / 4, item.column),
                        pack_pair(h, item.row + 2 < GateUpProj::kRows ? next : 0, 0));
      },
      [&](int unit) { raise_flag(b, b.p.words + MlpFlagsWords::kOffset + unit, epoch_of(b, k.steps)); });
}

// o_proj or down_proj: rows to the streams, from `x` on.
template <class Stage, class Words, class Flags, bool kBias>
KOG_DEVICE void module_rows(Block& b, Walk& k, const Operands<Stage>& operands, const Streams& x) {
  const float* bias = bias_of<Stage>(b);
  struct Asked {
    float bias, x;
  };
  run_units<Stage>(
      b, k.ring, k.turn, layer_units<Stage>(b), operands,
      [&](const Item& item) {
        return Asked{kBias && item.there ? bias[item.row] : 0.f,
                     item.there ? x.value(b, item.column, item.row) : 0.f};
      },
      [&](int, const Item& item, float sum, const Asked& asked) {
        // Rounded as a word that carries its readiness: a kernel of one token sends such.
        float y = unpack_f32(pack_f32(sum + asked.bias, 0));
        if (item.there)
          store_relaxed(stream_words<Words>(b) + item.column * kHiddenStride + item.row,
                        bits_of(asked.x + y));
      },
      [&](int unit) { raise_flag(b, b.p.words + Flags::kOffset + unit, epoch_of(b, k.steps)); });
}

KOG_DEVICE void o_proj(Block& b, Walk& k) {
  b.begin_stage();
  Operands<OProj> operands(b);
  stage_attention(b, operands, k.steps);
  stamp(b, Point::kOProjInput);
  module_rows<OProj, AttentionOutWords, AttentionOutFlagsWords, kOBias>(b, k, operands,
                                                                  layer_streams(b));
}

// Wait for this warp's part of gate_up_proj's outputs and make it down_proj's operands.
KOG_DEVICE void stage_mlp(Block& b, Operands<DownProj>& to, u32 epoch) {
  using S = Shape<DownProj>;
  constexpr int kAtOnce = 4;  // steps on their way to scratch
  int first = S::first_value(b), last = first + S::kPartValues;
  last = last < DownProj::kCols ? last : DownProj::kCols;
  await_rows<GateUpProj, MlpFlagsWords, 2 * S::kPartValues>(b, Step::kDownProjInput, 2 * first,
                                                           2 * last, epoch);
  const u32* from = b.p.words + MlpWords::kOffset + first / kFragK * S::kStepWords +
                    b.in_warp % S::kLanes * kOperandWords;
#pragma unroll
  for (int step = 0; step < DownProj::kHeld; step++)
#pragma unroll
    for (int set = 0; set < S::kSets; set++)
      load_operand(from + step * S::kStepWords + set * S::kSetWords, to.held[step][set]);
#pragma unroll 1
  for (int step = DownProj::kHeld; step < DownProj::kSteps; step += kAtOnce) {
    Activation w[kAtOnce][S::kSets];
#pragma unroll
    for (int i = 0; i < kAtOnce; i++)
#pragma unroll
      for (int set = 0; set < S::kSets; set++)
        if (step + i < DownProj::kSteps)
          load_operand(from + (step + i) * S::kStepWords + set * S::kSetWords, w[i][set]);
#pragma unroll
    for (int i = 0; i < kAtOnce; i++)
#pragma unroll
      for (int set = 0; set < S::kSets; set++)
        if (step + i < DownProj::kSteps) to.store(step + i, set, w[i][set]);
  }
  sync_warp();
}

KOG_DEVICE void down_proj(Block& b, Walk& k) {
  b.begin_stage();
  Operands<DownProj> operands(b);
  stage_mlp(b, operands, epoch_of(b, k.steps));
  stamp(b, Point::kDownProjInput);
  module_rows<DownProj, MlpOutWords, MlpOutFlagsWords, kMlpBias>(
      b, k, operands, {stream_words<AttentionOutWords>(b)});
}

KOG_DEVICE void run_layer(Block& b, Walk& k) {
  stamp(b, Point::kStart);
  qkv_proj(b, k);
  stamp(b, Point::kQkvProj);
  b.begin_stage();
  attention(b, k.steps);
  stamp(b, Point::kAttention);
  o_proj(b, k);
  stamp(b, Point::kOProj);
  gate_up_proj(b, k);
  stamp(b, Point::kGateUpProj);
  down_proj(b, k);
  stamp(b, Point::kDownProj);
}

}  // namespace kog::columns
