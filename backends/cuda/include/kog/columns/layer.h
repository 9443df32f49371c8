// One layer of all columns, as one block walks it.
//
//   x --norm--> qkv_proj ==> attention ==> o_proj ==> x --norm--> gate_up_proj ==> down_proj ==> x
//                       words         words     words                         words         words
//
// What a block may overwrite, and when, is as in a kernel of one token: before it writes an exchange,
// it has received a module's rows, which every block sent after it had read.
#pragma once
#include <kog/columns/attention.h>
#include <kog/columns/gather.h>
#include <kog/columns/lanes.h>

namespace kog::columns {

static_assert(kSame<LayerMatrices, Matrices<QkvProj, OProj, GateUpProj, DownProj>>,
              "run_layer's order");

KOG_DEVICE void enter_layer(const Block& b, int layer) {
  keep(b, &Kept::layer, static_cast<u32>(layer));
}
KOG_DEVICE void begin_stage(Block& b) {
  b.begin_stage();
  b.layer = static_cast<int>(kept(b, &Kept::layer));
  KOG_ASSUME(b.layer >= 0 && b.layer < kLayers);
}

// The streams at a layer's start, and behind its attention.
KOG_DEVICE Streams layer_streams(const Block& b) {
  if (b.layer == 0) return {nullptr, 0};
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
KOG_DEVICE Units layer_units(Block& b) {
  begin_stage(b);
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

KOG_DEVICE void qkv_proj(Block& b, const LayerAhead& ahead) {
  begin_stage(b);
  Operands<QkvProj> x(b);
  x.hold();
  u32 phase = phase_of(iteration_of(b));
  const float* bias = bias_of<QkvProj>(b);
  float scale = 0;
  run_units<QkvProj>(
      b, [&] { return layer_units<QkvProj>(b); }, x, ahead,
      [&](int, const Item& item) { return kQkvBias && item.there ? bias[item.row] : 0.f; },
      [&](const Item& item, float sum, float asked) {
        if (scale == 0) scale = inverse_rms(b, item.column);
        float v = sum * scale + asked, next = shuffle_down(v, 1);
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

KOG_DEVICE void gate_up_proj(Block& b, const LayerAhead& ahead) {
  begin_stage(b);
  Operands<GateUpProj> x(b);
  x.hold();
  int iteration = iteration_of(b);
  u32* to = lane_words<MlpWords>(b);
  u32 phase = phase_of(iteration);
  const float* bias = bias_of<GateUpProj>(b);
  float scale = 0;
  run_units<GateUpProj>(
      b, [&] { return layer_units<GateUpProj>(b); }, x, ahead,
      [&](int, const Item& item) { return kMlpBias && item.there ? bias[item.row] : 0.f; },
      [&](const Item& item, float sum, float asked) {
        if (scale == 0) scale = inverse_rms(b, item.column);
        float v = sum * scale + asked, up = shuffle_down(v, 1);
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

// What an output of o_proj or down_proj joins. Loaded by all lanes, of a value that exists: one that were
// either loaded or zero would be moved between registers, and so waited for, at once.
struct Base {
  float bias;
  u32 x;
};
template <class Stage, bool kBias>
KOG_DEVICE Base ask_base(const Block& b, const Streams& x, const Item& item) {
  int row = item.there ? item.row : 0, column = item.there ? item.column : 0;
  return {kBias ? bias_of<Stage>(b)[row] : 0.f, x.ask(b, column, row)};
}
// Those of all pieces that a warp finishes, on their way before it waits for the stage's inputs. Asked for
// behind those, they were waited for before the first weight (benchmarks/README.md). Of several batches each
// asks for its own.
template <class Stage, bool kBias>
struct Bases {
  static constexpr int kCount = kOneBatch<Stage> ? Cut<Stage>::kRounds : 1;
  Base of[kCount];

  KOG_DEVICE Bases(Block& b, const Streams& x) {
    if constexpr (!kOneBatch<Stage>) return;
    Pieces<Stage> mine(b, layer_units<Stage>(b));
#pragma unroll
    for (int r = 0; r < kCount; r++) {
      int piece = mine.first + r * kWarps;
      Item item = item_of<Stage>(b, mine.from + piece);
      item.there &= piece < mine.count;
      of[r] = ask_base<Stage, kBias>(b, x, item);
    }
  }
};

// o_proj or down_proj: rows to the streams, from `x` on. With those of the last layer this step's rows of
// the cache become visible.
template <class Stage, class Words, class Hints, class Sends, bool kBias, bool kEndsLayer>
KOG_DEVICE void module_rows(Block& b, const Operands<Stage>& operands, const Streams& x,
                            const Bases<Stage, kBias>& bases) {
  u32* to = lane_words<Words>(b);
  auto put = [&](const Item& item, float stream) {
    bool last = kEndsLayer && kept(b, &Kept::layer) == kLayers - 1;
    if (last) fence_gpu();  // pairs with the one behind the last layer
    u32 word = pack_f32(stream, phase_of(iteration_of(b)));
    if (item.there) store_relaxed(to + item.column * kHiddenStride + item.row, word);
  };
  auto done = [&](int piece) {
    raise_rows<Stage, Hints>(b, piece, epoch_of(iteration_of(b)));
  };
  run_units<Stage>(
      b, [&] { return layer_units<Stage>(b); }, operands, NothingTaken(),
      [&](int r, const Item& item) {
        if constexpr (kOneBatch<Stage>) return bases.of[r];
        return ask_base<Stage, kBias>(b, x, item);
      },
      [&](const Item& item, float sum, const Base& base) {
        float y = sum * kPairUnit + base.bias;
        if constexpr (kLanes > 1) {
          Reduction<Stage, Sends> lanes(b);
          lanes.send(b, item, y);
          if (lanes.how == kNow) return;
          y = lanes.owed(b, item, y);
        }
        // Rounded as a word that carries its readiness: a kernel of one token sends such.
        put(item, x.read(base.x) + unpack_f32(pack_f32(y, 0)));
      },
      [&](int piece) {
        if (kLanes == 1 || Sends::how(b) != kNow) done(piece);
      });
  begin_stage(b);
  Reduction<Stage, Sends>(b).end(b, x, put, done);
}

KOG_DEVICE void o_proj(Block& b) {
  begin_stage(b);
  Reduction<OProj, AttentionSends>(b).begin(b, layer_streams(b));
  Bases<OProj, kOBias> bases(b, layer_streams(b));
  Operands<OProj> operands(b);
  int iteration = iteration_of(b);
  stage_words<OProj, AttentionWords>(b, Step::kOProjInput, operands, phase_of(iteration),
                                     [&] { await_attention<OProj>(b, epoch_of(iteration)); });
  stamp(b, Point::kOProjInput);
  begin_stage(b);
  module_rows<OProj, AttentionOutWords, AttentionOutFlagsWords, AttentionSends, kOBias, false>(
      b, operands, layer_streams(b), bases);
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
  int from = turned_owner<GateUpProj>(2 * first / kRows), to = turned_owner<GateUpProj>((2 * last - 1) / kRows);
#pragma unroll
  for (int i = 0; i < kFlags; i++) {
    int place = from + i * 32 + b.in_warp;
    at[i] = first < last && place <= to ? mlp_flag(b, place) : -1;
  }
  await<true>(b, Step::kDownProjInput, at, epoch);
}

// Wait for this warp's part of gate_up_proj's outputs and make it down_proj's operands.
KOG_DEVICE void stage_mlp(Block& b, Operands<DownProj>& to, int iteration) {
  using S = Cut<DownProj>;
  if constexpr (DownProj::kRead > 0) {
    int first = S::first_value(b) / S::kStepValues;
    to.in_memory = lane_words<MlpWords>(b) + first * S::kStepWords + to.lane;
  }
  stage_words<DownProj, MlpWords>(b, Step::kDownProjInput, to, phase_of(iteration),
                                  [&] { await_mlp(b, epoch_of(iteration)); });
}

KOG_DEVICE void down_proj(Block& b) {
  begin_stage(b);
  Reduction<DownProj, MlpSends>(b).begin(b, inner_streams(b));
  Bases<DownProj, kMlpBias> bases(b, inner_streams(b));
  Operands<DownProj> operands(b);
  stage_mlp(b, operands, iteration_of(b));
  stamp(b, Point::kDownProjInput);
  begin_stage(b);
  module_rows<DownProj, MlpOutWords, MlpOutFlagsWords, MlpSends, kMlpBias, true>(
      b, operands, inner_streams(b), bases);
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
KOG_DEVICE void stage_half(Block& b, u32 second, LayerAhead& ahead) {
  int half = second != 0 ? 1 : 0;
  stage_streams<kLayerK, kLayerOwn>(b, half == 0 ? Step::kMlpOut : Step::kAttentionOut,
                                    half == 0 ? layer_streams(b) : inner_streams(b),
                                    2 * b.layer + half, iteration_of(b) - 1 + half, [&] {
                                      Ring ring = take_back(b);
                                      ahead.take(b, ring);
                                      put_away(b, ring);
                                    });
}

KOG_DEVICE void run_layer(Block& b) {
  begin_stage(b);
  stamp(b, Point::kStart);
  keep_units(b);
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
