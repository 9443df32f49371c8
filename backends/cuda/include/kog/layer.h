// One layer, as one block walks it.
//
//   x --norm--> qkv_proj ==> attention ==> o_proj ==> x --norm--> gate_up_proj ==> down_proj ==> x
//                       words         words     words                         words         words
//
// The 1 / rms of a norm is applied to the result: the multiplication starts before it is known.
#pragma once
#include <kog/between.h>
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
    constexpr int kFirst = kPartialBytes / 4 - 2 * Stage::kBufferFloats;  // 0, unless inputs run on over others' sums
    return b.partials + kFirst + (partial_buffer++ & 1) * Stage::kBufferFloats;
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

template <class Taken>
KOG_DEVICE void gate_up_proj(Block& b, Walk& walk, const Taken& ahead) {
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
template <class Taken>
KOG_DEVICE void o_proj(Block& b, Walk& walk, const Taken& ahead) {
  load_gains(b, 2 * b.layer + 1, walk.gain);
  b.begin_stage();
  module_rows(b, walk, held_operands<OProj>(b), ahead, attention_out(b, walk));
  stamp(b, Point::kOProj);
}

template <class Between = NothingBetween>
KOG_DEVICE void join_attention_out(Block& b, Walk& walk, Between between = {}) {
  attention_out(b, walk).join(Step::kAttentionOut, walk.x, between);
  if (b.layer == kLayers - 1) drain_stores();  // rows of the cache, ahead of the barriers before their release
  stamp(b, Point::kAttentionOut);
}

// To the words of its outputs. In the last layer the threads that send rows release this token's rows of the
// cache, while they would wait for inputs, behind the barriers of all who append (docs/SYNC.md, Fences).
using DownWeights = Ahead<DownProj, true>;
constexpr int kDownInTail = kInTailOfWait<GateUpProj, DownWeights::kCount>;
template <class Tail>
KOG_DEVICE void down_proj(Block& b, Walk& walk, DownWeights& ahead, Tail& behind) {
  using Rest = Part<DownWeights, kDownInTail, DownWeights::kCount>;
  auto between = taken_between(b, walk.ring, b.layer, Rest{ahead});
  b.begin_stage();
  bool sends = b.thread < DownProj::kBatch * DownProj::kUnitRows;
  if (b.layer == kLayers - 1 && sends) release_gpu();  // pairs with acquire_cache
  stage_words<DownProj, MlpWords>(b, Step::kDownProjInput, phase_of(walk.iteration), between);
  stamp(b, Point::kDownProjInput);
  load_gains(b, 2 * b.layer + 2, walk.gain);
  b.begin_stage();
  module_rows(b, walk, held_operands<DownProj>(b), with_tail(ahead, b.layer, behind), mlp_out(b, walk));
  stamp(b, Point::kDownProj);
}

// Ends the layer.
template <class Between = NothingBetween>
KOG_DEVICE void join_mlp_out(Block& b, Walk& walk, Between between = {}) {
  mlp_out(b, walk).join(Step::kMlpOut, walk.x, between);
  stamp(b, Point::kMlpOut);
  count_join(b, b.small->position);
  walk.iteration++;
}

using QkvWeights = Ahead<QkvProj, true>;
using OWeights = Ahead<OProj>;
using GateUpWeights = Ahead<GateUpProj>;
// Weights are taken in the order of the walk, as many as there are registers for. Behind qkv_proj's, if they are all, come
// o_proj's, up to twice kLeastOnWay: a piece for each of two looks; then, while some blocks attend, the others of o_proj's
// and gate_up_proj's, of which kLeastOnWay are left for o_proj's end and the wait behind it.
constexpr int kQkvAhead = QkvWeights::kCount;
constexpr bool kFarAhead = kStreams && OWeights::kWhole;
constexpr int kBehindQkv = kFarAhead && QkvWeights::kWhole && kQkvAhead > 0 && kQkvAhead < 2 * kLeastOnWay
                               ? kLeast<2 * kLeastOnWay - kQkvAhead, OWeights::kCount>
                               : 0;
constexpr int kRoomEarly =
    kLeast<kMostAheadOf<GateUpProj::Weights> - OWeights::kCount, GateUpWeights::kCount - kLeastOnWay>;
constexpr int kEarly = kFarAhead && kRoomEarly > 0 ? kRoomEarly : 0;  // of gate_up_proj's
// Ahead of attention's wait, by those who wait for no head.
constexpr int kOAtAttention = kLeast<kBehindQkv + kAtAttention, OWeights::kCount>;
constexpr int kOAttending = kBehindQkv + kInTail<QkvProj, kOAtAttention - kBehindQkv>;  // asked for by all, before
constexpr int kOfGateUp = kLeast<kBehindQkv + kAtAttention - kOAtAttention,
                                 kEarly + OWeights::kCount - kOAtAttention - kLeastOnWay>;
constexpr int kGateUpAtAttention = kOfGateUp > 0 ? kLeast<kOfGateUp, kEarly> : 0;

// From the words of q, k and v to those of the layer's outputs. `behind`: what comes first then.
template <class Tail>
KOG_DEVICE void run_layer(Block& b, Walk& walk, OWeights& o_weights, Tail& behind) {
  GateUpWeights gate_up_weights;
  b.begin_stage();
  auto rest = taken_at_attention(b, walk.ring, b.layer, Part<OWeights, kOAttending, kOAtAttention>{o_weights},
                                 Part<GateUpWeights, 0, kGateUpAtAttention>{gate_up_weights});
  attention(b, walk.ring, b.small->position, phase_of(walk.iteration));
  stamp(b, Point::kAttention);
  rest.take();
  auto early = taken_between(b, walk.ring, b.layer,
                             Part<OWeights, kOAtAttention, OWeights::kCount, kStreams>{o_weights},
                             Part<GateUpWeights, kGateUpAtAttention, kEarly, kStreams>{gate_up_weights});
  b.begin_stage();
  stage_attention<OProj>(b, Step::kOProjInput, b.small->position, phase_of(walk.iteration), early);
  stamp(b, Point::kOProjInput);
  constexpr int kLateFrom = kEarly + kInTailOfWait<OProj, GateUpWeights::kCount - kEarly>;
  Part<GateUpWeights, kEarly, kLateFrom, kStreams> in_tail{gate_up_weights};
  o_proj(b, walk, with_tail(o_weights, b.layer, in_tail));
  using Late = Part<GateUpWeights, kLateFrom, GateUpWeights::kCount, kStreams>;
  join_attention_out(b, walk, taken_between(b, walk.ring, b.layer, Late{gate_up_weights}));
  DownWeights down_weights;
  Part<DownWeights, 0, kDownInTail> down_in_tail{down_weights};
  gate_up_proj(b, walk, with_tail(gate_up_weights, b.layer, down_in_tail));
  stamp(b, Point::kGateUpProj);
  down_proj(b, walk, down_weights, behind);
}

// After a token's last outputs were received, before a barrier: acquires what other blocks have appended to
// the cache (docs/SYNC.md, Fences).
KOG_DEVICE void acquire_cache(const Block& b, const Walk& walk) {
  acquire_gpu();
  walk.ring.tell_acquired(b);
}

// All layers.
KOG_DEVICE void run_layers_in_order(Block& b, Walk& walk) {
  for (b.layer = 0; b.layer < kLayers; b.layer++) {
    qkv_proj(b, walk, NothingAhead());
    OWeights o_weights;
    NothingBehind behind;
    run_layer(b, walk, o_weights, behind);
    join_mlp_out(b, walk);
  }
}
// All layers, with qkv_proj's weights taken from the ring ahead of the wait for the layer before. In one
// pass of the loop: a register that lived from one pass to the next would be spilled.
KOG_DEVICE void run_layers_ahead(Block& b, Walk& walk) {
  b.layer = 0;
  qkv_proj(b, walk, NothingAhead());
  while (true) {
    OWeights o_weights;
    NothingBehind behind;
    run_layer(b, walk, o_weights, behind);
    if (b.layer == kLayers - 1) break;
    QkvWeights qkv_weights;
    qkv_weights.take(b, walk.ring, b.layer + 1);
    join_mlp_out(b, walk);
    b.layer++;
    qkv_proj(b, walk, qkv_weights);
  }
  join_mlp_out(b, walk);
  b.layer++;
}
// All layers but for the last one's join, every wait with the weights behind it between its looks. The first layer's are
// asked for ahead of what is made of the embedding, which comes at the same time. `behind`: the head's first ones, then.
using Behind = BehindLayer<kQkvAhead, kBehindQkv>;
KOG_DEVICE void run_layers_between(Block& b, Walk& walk, Behind& behind) {
  have_come(walk.gain);  // of the first layer, in no pass of the loop
  behind.take(b, walk.ring);
#pragma unroll 1
  for (int layer = 0; layer < kLayers; layer++) {
    QkvWeights qkv_weights;
    OWeights o_weights;
    behind.give(qkv_weights);
    auto next = taken_between(b, walk.ring, layer, Part<QkvWeights, Behind::kCount, kQkvAhead>{qkv_weights},
                              Part<OWeights, 0, kBehindQkv>{o_weights});
    if (layer == 0) {
      next.take_all();
#pragma unroll
      for (auto& quad : walk.embedded.quads) quad.hide();  // not looked at ahead of that
      walk.embedded.unpack(b, walk.x);
    } else {
      join_mlp_out(b, walk, next);
    }
    b.layer = layer;
    Part<OWeights, kBehindQkv, kOAttending> in_tail{o_weights};
    qkv_proj(b, walk, with_tail(qkv_weights, layer, in_tail));
    run_layer(b, walk, o_weights, behind);
    have_come(walk.gain);
  }
}

}  // namespace kog
