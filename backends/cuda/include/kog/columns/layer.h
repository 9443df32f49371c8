// One layer of all columns, as one block walks it.
//
//   x --norm--> qkv_proj ==> attention ==> o_proj ==> x --norm--> gate_up_proj ==> down_proj ==> x
//                       words         words     words                         words         words
//
// Why a block may overwrite an exchange: docs/SYNC.md.
#pragma once
#include <kog/columns/ahead.h>
#include <kog/columns/attention.h>
#include <kog/columns/gather.h>
#include <kog/columns/lanes.h>

namespace kog::columns {

// The stages that multiply x: what is staged serves either, or (kSameOperands) both.
constexpr int kLayerK =
    QkvProj::kPaddedK > GateUpProj::kPaddedK ? QkvProj::kPaddedK : GateUpProj::kPaddedK;
constexpr bool kSameOperands =
    QkvProj::Weights::kInteger == GateUpProj::Weights::kInteger &&
    (!QkvProj::Weights::kInteger || (QkvProj::Weights::kPack == GateUpProj::Weights::kPack &&
                                     QkvProj::Weights::kSharedSteps == GateUpProj::Weights::kSharedSteps &&
                                     kSums<QkvProj::Weights> == kSums<GateUpProj::Weights>));
constexpr bool kLayerOwn = QkvProj::kParts == kWarps && GateUpProj::kParts == kWarps;

KOG_DEVICE void qkv_proj(Block& b, const LayerAhead& ahead) {
  begin_stage(b);
  Walk walk;
  qkv_rows(b, walk, held_operands<QkvProj>(b), ahead, phase_of(iteration_of(b)));
}

// The hint of the block at this rotated index (rotated_group_index): those that one warp waits for lie
// together, others in other lines, so that all blocks' questions spread over the L2.
KOG_DEVICE int mlp_flag(const Block& b, int group_index) {
  return lane_offset<MlpFlagsWords>(b) + group_index / kFlagsTogether * kLineWords +
         group_index % kFlagsTogether;
}

KOG_DEVICE void gate_up_proj(Block& b, const LayerAhead& ahead) {
  begin_stage(b);
  auto x = held_operands<GateUpProj>(b);
  int iteration = iteration_of(b);
  Walk walk;
  gate_up_rows(b, walk, x, ahead, phase_of(iteration));
  // One hint of a block for all its units: many warps of all blocks wait for the same ones.
  if (b.warp == 0)
    raise_flag(b, b.p.words + mlp_flag(b, rotated_group_index<GateUpProj>(b.group_index, b.layer)),
               epoch_of(iteration));
  rejoin();
}

// What a module's output joins; loaded as biases are (../outputs.h).
struct Base {
  float bias;
  u32 x;
};
template <class Module>
KOG_DEVICE Base ask_base(const Block& b, const Streams& x, const Item& item) {
  int row = item.there ? item.row : 0, column = item.there ? item.column : 0;
  return {bias_of<typename Module::Stage, Module::kBias>(b, item), x.ask(b, column, row)};
}
// Those of all pieces that a warp finishes, on their way before it waits for the stage's inputs. Asked for
// behind those, they were waited for before the first weight (benchmarks/cuda-log.md#bases-first). Of several
// batches each asks for its own.
template <class Module>
struct Bases {
  using Stage = typename Module::Stage;
  static constexpr int kCount = kOneBatch<Stage> ? OperandLayout<Stage>::kRounds : 1;
  Base of[kCount];

  KOG_DEVICE Bases(Block& b, const Streams& x) {
    if constexpr (!kOneBatch<Stage>) return;
    Pieces<Stage> mine(b, Walk().units<Stage>(b));
#pragma unroll
    for (int r = 0; r < kCount; r++) {
      Item item = mine.item(b, r);
      item.there &= mine.has(b, r);
      of[r] = ask_base<Module>(b, x, item);
    }
  }
};

// A module's rows to the streams, from `x` on. With those of the last layer this step's rows of the cache
// become visible.
template <class Module>
struct Sink {
  using Asked = Base;
  using Stage = typename Module::Stage;
  Block& b;
  const Streams& x;
  const Bases<Module>& bases;

  KOG_DEVICE Base ask(int r, const Item& item) const {
    if constexpr (kOneBatch<Stage>) return bases.of[r];
    return ask_base<Module>(b, x, item);
  }
  KOG_DEVICE void put(const Item& item, float y, const Base& base) const {
    if constexpr (kLanes > 1) {
      Reduction<Module> lanes(b);
      lanes.send(b, item, y);
      if (lanes.how == kNow) return;
      y = lanes.owed(b, item, y);
    }
    // Rounded as a word that carries its readiness: a kernel of one token sends such.
    put_stream(item, x.read(base.x) + sent_f32(y));
  }
  KOG_DEVICE void put_stream(const Item& item, float stream) const {
    bool last = Module::kEndsLayer && load_state(b, &WarpState::layer) == kLayers - 1;
    if (last) release_gpu();  // pairs with the one behind the last layer
    u32 word = pack_f32(stream, phase_of(iteration_of(b)));
    u32* to = lane_words<typename Module::Words>(b) + item.column * kHiddenStride + item.row;
    if (item.there) store_relaxed(to, word);
  }
  KOG_DEVICE void raise(int piece) const {
    raise_rows<Stage, typename Module::Hints>(b, piece, epoch_of(iteration_of(b)));
  }
  KOG_DEVICE void done(int piece) const {
    if (kLanes == 1 || Module::how(b) != kNow) raise(piece);
  }
};

// The last stage of a module; stage(operands) waits for its inputs.
template <class Module, class Inputs>
KOG_DEVICE void end_module(Block& b, Point staged, Inputs stage) {
  begin_stage(b);
  Reduction<Module>(b).begin(b, Module::streams(b));
  Bases<Module> bases(b, Module::streams(b));
  ModuleAhead<typename Module::Stage> ahead;
  take_ahead(b, ahead);
  Operands<typename Module::Stage> operands(b);
  stage(operands);
  stamp(b, staged);
  begin_stage(b);
  Streams x = Module::streams(b);
  Sink<Module> sink{b, x, bases};
  Walk walk;
  module_rows(b, walk, operands, ahead, sink);
  begin_stage(b);
  Reduction<Module>(b).end(b, x, sink);
}

KOG_DEVICE void o_proj(Block& b) {
  end_module<AttentionModule>(b, Point::kOProjInput, [&](Operands<OProj>& operands) {
    int iteration = iteration_of(b);
    stage_words<OProj, AttentionWords>(b, Step::kOProjInput, operands, phase_of(iteration),
                                       [&] { await_attention<OProj>(b, epoch_of(iteration)); });
  });
}

// Until the blocks that compute this warp's part of down_proj's inputs have done so.
KOG_DEVICE void await_mlp(Block& b, u32 epoch) {
  using S = OperandLayout<DownProj>;
  constexpr int kRows = GateUpProj::kUnitRows, kUnits = GateUpProj::kUnits,
                kGroup = GateUpProj::kGroup;
  constexpr int kMost = (2 * S::kPartValues / kRows + 1) * kGroup / kUnits + 2;  // blocks
  constexpr int kFlags = ((kMost < kGroup ? kMost : kGroup) + kWarpThreads - 1) / kWarpThreads;
  int first = S::first_value(b), last = first + S::kPartValues, at[kFlags];
  last = last < DownProj::kCols ? last : DownProj::kCols;
  int from = rotated_owner<GateUpProj>(2 * first / kRows);
  int to = rotated_owner<GateUpProj>((2 * last - 1) / kRows);
#pragma unroll
  for (int i = 0; i < kFlags; i++) {
    int group_index = from + i * kWarpThreads + b.in_warp;
    at[i] = first < last && group_index <= to ? mlp_flag(b, group_index) : -1;
  }
  await<true>(b, Step::kDownProjInput, at, epoch);
}

KOG_DEVICE void down_proj(Block& b) {
  if (b.layer == kLayers - 1) drain_stores();  // rows of the cache, ahead of the barriers before put_stream
  end_module<MlpModule>(b, Point::kDownProjInput, [&](Operands<DownProj>& operands) {
    int iteration = iteration_of(b);
    operands.find_in_memory(b, lane_words<MlpWords>(b));
    stage_words<DownProj, MlpWords>(b, Step::kDownProjInput, operands, phase_of(iteration),
                                    [&] { await_mlp(b, epoch_of(iteration)); });
  });
}

KOG_DEVICE void attend(Block& b, const LayerAhead& ahead) {
  qkv_proj(b, ahead);
  stamp(b, Point::kQkvProj);
  begin_stage(b);
  attention(b);
  stamp(b, Point::kAttention);
  o_proj(b);
  stamp(b, Point::kOProj);
}

// x of the half of the layer that the warp is in.
template <class Stage>
KOG_DEVICE void stage_half_for(Block& b, int half, LayerAhead& ahead) {
  constexpr int kStagedK = kSameOperands ? kLayerK : Stage::kPaddedK;
  stage_streams<Stage, kStagedK, kLayerOwn>(b, half == 0 ? Step::kMlpOut : Step::kAttentionOut,
                                            half == 0 ? layer_streams(b) : inner_streams(b),
                                            2 * b.layer + half, iteration_of(b) - 1 + half,
                                            [&] { take_ahead(b, ahead, half); }, [] {});
}
KOG_DEVICE void stage_half(Block& b, u32 second, LayerAhead& ahead) {
  int half = second != 0 ? 1 : 0;
  if constexpr (!kSameOperands)
    if (half == 0) return stage_half_for<QkvProj>(b, half, ahead);
  stage_half_for<GateUpProj>(b, half, ahead);
}

KOG_DEVICE void run_layer(Block& b) {
  begin_stage(b);
  stamp(b, Point::kStart);
  keep_kv_tasks(b);
  // One piece of code stages x for both halves of the layer: all of a layer's code has to fit into
  // the instruction cache.
  LayerAhead ahead;
  u32 second = unknown(0);
#pragma unroll 1
  while (true) {
    begin_stage(b);
    stage_half(b, second, ahead);
    stamp(b, second == 0 ? Point::kMlpOut : Point::kAttentionOut);
    if (second != 0) break;  // here: behind attend() the compiler would keep `ahead` throughout it
    attend(b, ahead);
    second = unknown(1);
  }
  gate_up_proj(b, ahead);
  stamp(b, Point::kGateUpProj);
  down_proj(b);
  stamp(b, Point::kDownProj);
}

}  // namespace kog::columns
