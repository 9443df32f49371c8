// One layer of all columns, as one block walks it.
//
//   x --norm--> qkv_proj ==> attention ==> o_proj ==> x --norm--> gate_up_proj ==> down_proj ==> x
//                       words         words     words                         words         words
//
// What a block may overwrite, and when, is as in a kernel of one token: before it writes an exchange,
// it has received a module's rows, which every block sent after it had read.
#pragma once
#include <kog/columns/attention.h>
#include <kog/columns/lanes.h>

namespace kog::columns {

// Of one consumer thread, from the first step to the last.
struct Walk {
  Ring ring;
  int heads = 0;  // exchanges of heads: their numbers
  int steps = 0;
  int mixes = 0;  // of the lanes' streams: their number
};

// A warp's layer is kept in shared memory and asked for at the start of each stage: in a register from
// the first layer to the last, it and the numbers of runs made of it were spilled into loops that wait.
KOG_DEVICE void enter_layer(const Block& b, int layer) {
  int thread = thread_index();
  sync_warp();
  if (thread % 32 == 0) store_volatile(&b.small->layers[thread / 32], static_cast<u32>(layer));
  sync_warp();
}
KOG_DEVICE int layer_of(const Block& b) {
  return static_cast<int>(load_volatile(&b.small->layers[b.warp]));
}
KOG_DEVICE void begin_stage(Block& b) {
  b.begin_stage();
  b.layer = layer_of(b);
  KOG_ASSUME(b.layer >= 0 && b.layer < kLayers);
}

// The streams at a layer's start, and behind its attention.
KOG_DEVICE Streams layer_streams(const Block& b) {
  if (b.layer == 0) return {nullptr, nullptr};
  return Streams::of<MlpOutWords, MlpOutFlagsWords>(b);
}
KOG_DEVICE Streams inner_streams(const Block& b) {
  return Streams::of<AttentionOutWords, AttentionOutFlagsWords>(b);
}

template <class Stage>
KOG_DEVICE const float* bias_of(const Block& b) {
  return b.p.biases + static_cast<u64>(b.layer) * kBiasRows + Stage::kBiasAt +
         lane_of(b) * Stage::kRows;
}
template <class Stage>
KOG_DEVICE Units layer_units(const Block& b) {
  return units_of<Stage>(b.place, b.layer);
}

// The stages that multiply x: what is staged serves either.
constexpr int kLayerK =
    QkvProj::kPaddedK > GateUpProj::kPaddedK ? QkvProj::kPaddedK : GateUpProj::kPaddedK;
constexpr bool kLayerOwn = QkvProj::kParts == kWarps && GateUpProj::kParts == kWarps;

// Units of either that every block has, in kTakenWords registers.
constexpr bool kAlike = QkvProj::kFragmentRows == Wide::kFragmentRows &&
                        GateUpProj::kFragmentRows == Wide::kFragmentRows &&
                        QkvProj::kPeriod == 1 && GateUpProj::kPeriod == 1 &&
                        QkvProj::kHeld == QkvProj::kSteps && GateUpProj::kHeld == GateUpProj::kSteps &&
                        QkvProj::kSteps == GateUpProj::kSteps;
constexpr int kRoomAhead = kTakenWords / (kFragments * kLaneWords) / kPeriodChunks<GateUpProj>;
constexpr int kFewest = QkvProj::kUnits / QkvProj::kGroup < GateUpProj::kUnits / GateUpProj::kGroup
                            ? QkvProj::kUnits / QkvProj::kGroup
                            : GateUpProj::kUnits / GateUpProj::kGroup;
constexpr int kUnitsAhead = !kAlike ? 0 : kRoomAhead < kFewest ? kRoomAhead : kFewest;
using LayerAhead = Taken<kUnitsAhead, kPeriodChunks<GateUpProj>>;

KOG_DEVICE void qkv_proj(Block& b, Walk& k, const LayerAhead& ahead) {
  begin_stage(b);
  Operands<QkvProj> x(b);
  x.hold();
  u32 phase = phase_of(iteration_of(b, k.steps));
  const float* bias = bias_of<QkvProj>(b);
  Scales scales;
  run_units<QkvProj>(
      b, k.ring, layer_units<QkvProj>(b), x, ahead,
      [&](const Item& item) { return kQkvBias && item.there ? bias[item.row] : 0.f; },
      [&](int, const Item& item, float sum, float asked) {
        float v = sum * scales.of(b, item.column) + asked, next = shuffle_down(v, 1);
        u32* to = lane_words<QkvWords>(b) + item.column * QkvWords::kStride + item.row / 2;
        if (item.there && item.row % 2 == 0)
          store_relaxed(to, pack_pair(v, item.row + 1 < QkvProj::kRows ? next : 0, phase));
      },
      [](int) {});
}

// The hint of the block at this place, as units_of turns it: those that one warp waits for lie
// together, others in other lines, so that all blocks' questions spread over the L2.
KOG_DEVICE int mlp_flag(const Block& b, int place) {
  return lane_place<MlpFlagsWords>(b) + place / kFlagsTogether * kLineWords + place % kFlagsTogether;
}

KOG_DEVICE void gate_up_proj(Block& b, Walk& k, const LayerAhead& ahead) {
  begin_stage(b);
  Operands<GateUpProj> x(b);
  x.hold();
  int iteration = iteration_of(b, k.steps);
  u32* to = lane_words<MlpWords>(b);
  u32 phase = phase_of(iteration);
  const float* bias = bias_of<GateUpProj>(b);
  Scales scales;
  run_units<GateUpProj>(
      b, k.ring, layer_units<GateUpProj>(b), x, ahead,
      [&](const Item& item) { return kMlpBias && item.there ? bias[item.row] : 0.f; },
      [&](int, const Item& item, float sum, float asked) {
        float v = sum * scales.of(b, item.column) + asked, up = shuffle_down(v, 1);
        float h = divide(v, 1.f + exp2_fast(v * -1.4426950408889634f)) * up,
              next = shuffle_down(h, 2);
        if (item.there && item.row % 4 == 0)
          store_relaxed(to + narrow_place<DownProj>(item.row / 4, item.column),
                        pack_pair(h, item.row + 2 < GateUpProj::kRows ? next : 0, phase));
      },
      [](int) {});
  // One hint of a block for all its units: many warps of all blocks wait for the same ones.
  if (b.warp == 0)
    raise_flag(b, b.p.words + mlp_flag(b, turned_place<GateUpProj>(b.place, b.layer)),
               epoch_of(iteration));
}

// o_proj or down_proj: rows to the streams, from `x` on. `last`: this step's rows of the cache
// become visible with them.
template <class Stage, class Words, class Marks, bool kBias, class Sends>
KOG_DEVICE void module_rows(Block& b, Walk& k, const Operands<Stage>& operands, const Streams& x,
                            bool last, const Reduction<Stage, Sends>& lanes) {
  const float* bias = bias_of<Stage>(b);
  u32* to = lane_words<Words>(b);
  u32 low[Cut<Stage>::kItems];
  auto put = [&](int i, const Item& item, float stream) {
    u32 phase = phase_of(iteration_of(b, k.steps));
    u32 word = bits_of(stream);
    low[i] = item.there ? word & 1 : 0;
    if (last) fence_gpu();  // pairs with the one behind the last layer
    if (item.there)
      store_relaxed(to + item.column * kHiddenStride + item.row, (word & ~1u) | phase);
  };
  auto done = [&](int piece) {
    publish_marks<Stage, Marks>(b, piece, low, epoch_of(iteration_of(b, k.steps)));
  };
  struct Asked {
    float bias, x;
  };
  run_units<Stage>(
      b, k.ring, layer_units<Stage>(b), operands, NothingTaken(),
      [&](const Item& item) {
        return Asked{kBias && item.there ? bias[item.row] : 0.f,
                     item.there ? x.value(b, item.column, item.row) : 0.f};
      },
      [&](int i, const Item& item, float sum, const Asked& asked) {
        float y = sum * kPairUnit + asked.bias;
        if constexpr (kLanes > 1) {
          lanes.send(b, item, y);
          low[i] = 0;  // begins on every path, as what is asked for ahead (matvec.h)
          if (lanes.how == kNow) return;
          y = lanes.owed(b, item, i, y);
        }
        // Rounded as a word that carries its readiness: a kernel of one token sends such.
        put(i, item, asked.x + unpack_f32(pack_f32(y, 0)));
      },
      [&](int piece) {
        if (kLanes == 1 || lanes.how != kNow) done(piece);
      });
  lanes.end(b, x, put, done);
}

KOG_DEVICE void o_proj(Block& b, Walk& k) {
  begin_stage(b);
  Reduction<OProj, AttentionSends> lanes(b, k.steps);
  lanes.begin(b, layer_streams(b));
  Operands<OProj> operands(b);
  stage_attention(b, operands, k.steps);
  stamp(b, Point::kOProjInput);
  module_rows<OProj, AttentionOutWords, AttentionOutFlagsWords, kOBias>(
      b, k, operands, layer_streams(b), false, lanes);
}

// Until the blocks that compute this warp's part of down_proj's inputs have done so.
KOG_DEVICE void await_mlp(Block& b, u32 epoch) {
  using S = Cut<DownProj>;
  constexpr int kRows = GateUpProj::kUnitRows, kUnits = GateUpProj::kUnits,
                kGroup = GateUpProj::kGroup;
  constexpr int kMost = (2 * S::kPartValues / kRows + 1) * kGroup / kUnits + 2;  // blocks
  constexpr int kFlags = ((kMost < kGroup ? kMost : kGroup) + 31) / 32;
  int first = S::first_value(b), last = first + S::kPartValues, at[kFlags];
  last = last < DownProj::kCols ? last : DownProj::kCols;
  // The place, as units_of turns it, of the block that has a unit.
  auto owner = [](int unit) { return ((unit + 1) * kGroup - 1) / kUnits; };
  int from = owner(2 * first / kRows), to = owner((2 * last - 1) / kRows);
#pragma unroll
  for (int i = 0; i < kFlags; i++) {
    int place = from + i * 32 + b.in_warp;
    at[i] = first < last && place <= to ? mlp_flag(b, place) : -1;
  }
  await(b, Step::kDownProjInput, at, epoch);
}

// Registers for words that are on their way to down_proj: steps of K, in as few turns as they allow, and no
// more than the first turn can leave in registers and scratch.
constexpr int kMostAsked = 64 / Cut<DownProj>::kRowWords;
constexpr int kTurns = (DownProj::kSteps + kMostAsked - 1) / kMostAsked;
constexpr int kEvenly = (DownProj::kSteps + kTurns - 1) / kTurns;
constexpr int kAskedHeld = kEvenly > DownProj::kHeld ? kEvenly : DownProj::kHeld;
constexpr int kKept = Operands<DownProj>::kLast;
constexpr int kAsked = kAskedHeld < kKept ? kAskedHeld : kKept;
static_assert(DownProj::kHeld <= kAsked);
using AskedRows = Words<Cut<DownProj>::kRowWords>[kAsked];

// Operands of kAsked steps from step `first` on.
KOG_DEVICE void receive_mlp(Block& b, int iteration, int first, AskedRows& w) {
  using S = Cut<DownProj>;
  // The lane's words of a step: every other one of a quarter.
  int lane = b.in_warp % S::kLanes, k = S::first_value(b) + first * S::kStepValues;
  int value = k + S::value(lane);
  const u32* from = lane_words<MlpWords>(b) + k / S::kStepValues * S::kStepWords +
                    lane * S::kLaneStride;
  receive<S>(b, Step::kDownProjInput, from, phase_of(iteration), w, [&](int i, int set, int word) {
    bool inside = DownProj::kPaddedK == DownProj::kCols ||
                  value + i * S::kStepValues + 4 * word < DownProj::kCols;
    return set * S::kTokens + S::token(lane) < b.p.num_seats && inside;
  });
}

// Wait for this warp's part of gate_up_proj's outputs and make it down_proj's operands.
KOG_DEVICE void stage_mlp(Block& b, Operands<DownProj>& to, int iteration) {
  using S = Cut<DownProj>;
  if constexpr (DownProj::kRead > 0) {
    int first = S::first_value(b) / S::kStepValues;
    to.in_memory = lane_words<MlpWords>(b) + first * S::kStepWords + to.lane;
  }
  await_mlp(b, epoch_of(iteration));
  AskedRows w;
#pragma unroll 1
  for (int step = kAsked; step < DownProj::kSteps; step += kAsked) {
    int first = step + kAsked <= DownProj::kSteps ? step : DownProj::kSteps - kAsked;
    receive_mlp(b, iteration, first, w);
#pragma unroll
    for (int i = 0; i < kAsked; i++)
      if (first + i >= DownProj::kHeld && (DownProj::kRead == 0 || first + i < to.kLast))
        to.store(first + i, w[i]);
  }
  // Those that stay in registers come last.
  receive_mlp(b, iteration, 0, w);
#pragma unroll
  for (int i = 0; i < kAsked; i++) {
    if (i < DownProj::kHeld)
      to.held[i] = w[i];
    else
      to.store(i, w[i]);
  }
  sync_warp();
}

KOG_DEVICE void down_proj(Block& b, Walk& k) {
  begin_stage(b);
  Reduction<DownProj, MlpSends> lanes(b, k.steps);
  lanes.begin(b, inner_streams(b));
  Operands<DownProj> operands(b);
  stage_mlp(b, operands, iteration_of(b, k.steps));
  stamp(b, Point::kDownProjInput);
  module_rows<DownProj, MlpOutWords, MlpOutFlagsWords, kMlpBias>(
      b, k, operands, inner_streams(b), b.layer == kLayers - 1, lanes);
}

KOG_DEVICE void attend(Block& b, Walk& k, const LayerAhead& ahead) {
  qkv_proj(b, k, ahead);
  stamp(b, Point::kQkvProj);
  begin_stage(b);
  attention(b, k.steps);
  stamp(b, Point::kAttention);
  o_proj(b, k);
  stamp(b, Point::kOProj);
}

KOG_DEVICE void run_layer(Block& b, Walk& k) {
  b.layer = layer_of(b);
  stamp(b, Point::kStart);
  // One piece of code stages x for both halves of the layer: all of a layer's code has to fit into
  // the instruction cache.
  LayerAhead ahead;
#pragma unroll 1
  for (int half = 0;; half++) {
    begin_stage(b);
    ahead.take(b, k.ring);
    stage_streams<kLayerK, kLayerOwn>(b, half == 0 ? Step::kMlpOut : Step::kAttentionOut,
                                      half == 0 ? layer_streams(b) : inner_streams(b),
                                      2 * b.layer + half, iteration_of(b, k.steps) - 1 + half);
    stamp(b, half == 0 ? Point::kMlpOut : Point::kAttentionOut);
    if (half == 1) break;  // here: behind attend() the compiler would keep `ahead` throughout it
    attend(b, k, ahead);
  }
  gate_up_proj(b, k, ahead);
  stamp(b, Point::kGateUpProj);
  down_proj(b, k);
  count_uses(b, k.steps);
  stamp(b, Point::kDownProj);
}

}  // namespace kog::columns
