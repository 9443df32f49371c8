// The residual stream: embedded, sent as module outputs, gathered by every block into its own copy.
#pragma once
#include <kog/embedded.h>
#include <kog/inputs.h>
#include <kog/outputs.h>

namespace kog {

// What is asked for before a wait and used after it is loaded by every thread, even those that have no
// element, from a place that exists: a value that were either loaded or zero would be moved between
// registers, and so waited for, at once.
KOG_DEVICE int place_of_element(const Block& b, int i) {
  int e = element(b, i);
  return e < kHidden ? e : 0;
}

// A token's row of the embedding.
struct Embedded {
  EmbeddedQuad<> quads[kGroups];

  KOG_DEVICE void load(const Block& b, int token) {
    const EmbeddingUnit* row = embedding_row(b, token);
#pragma unroll
    for (int i = 0; i < kGroups; i++) quads[i].load(row, place_of_element(b, i));
  }
  KOG_DEVICE void unpack(const Block& b, float (&x)[kHeld]) const {
#pragma unroll
    for (int i = 0; i < kGroups; i++) {
      bool inside = element(b, i) < kHidden;
      uint2 w = quads[i].values();
      float four[4] = {low_of(w.x), high_of(w.x), low_of(w.y), high_of(w.y)};
#pragma unroll
      for (int j = 0; j < 4; j++) x[4 * i + j] = inside ? four[j] : 0;
    }
  }
};

// The lane's stream, of streams [lanes, kHiddenStride].
KOG_DEVICE void load_streams(const Block& b, const float* streams, float (&x)[kHeld]) {
#pragma unroll
  for (int i = 0; i < kHeld; i++) {
    int e = element(b, i / 4) + i % 4;
    x[i] = e < kHidden ? streams[b.lane * kHiddenStride + e] : 0;
  }
}

// Threads without an element multiply zeros with these gains of a norm.
KOG_DEVICE void load_gains(const Block& b, int norm, float (&gain)[kHeld]) {
#pragma unroll
  for (int i = 0; i < kGroups; i++) {
    auto g = WordVector<4>::load(gains_of(b, norm) + place_of_element(b, i));
#pragma unroll
    for (int j = 0; j < 4; j++) gain[4 * i + j] = float_of(g.w[j]);
  }
}

// x += the words of some lanes' vectors, one's or those of kCount lanes from `lane` on in their order, once all of this
// warp's carry the phase.
template <int kCount = 1, int kStride = 0, class Between = NothingBetween>
KOG_DEVICE void gather(Block& b, Step step, const u32* base, u32 phase, float (&x)[kHeld], int lane = 0,
                       Between between = {}) {
  constexpr int kVectors = kCount * kGroups;
  int at[kVectors];
  uint4 q[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; i++)
    at[i] = kCount == 1 || lane + i / kGroups < kLanes ? element(b, i % kGroups) : kHiddenStride;
  poll_vectors(
      b, step, [&](int i) { return base + i / kGroups * kStride + at[i]; },
      [&](int i, int j) {  // vectors begin at multiples of 4
        return at[i] + (kHidden % 4 == 0 ? 0 : j) < kHidden ? 1u : 0u;
      },
      phase, q, [&](int i) { return kCount > 1 && lane_of_peer(b, lane + i / kGroups); }, between);
#pragma unroll
  for (int i = 0; i < kVectors; i++)
#pragma unroll
    for (int j = 0; j < 4; j++)
      if (at[i] + j < kHidden) x[4 * (i % kGroups) + j] += unpack_f32(word_of(q[i], j));
}
// Lanes whose words are asked for in one poll, as many as there are registers for: those that other ranks sent take
// longer.
constexpr int kLanesAtOnce = kRanks == 1 ? 1 : kLanes * kGroups <= 4 ? kLanes : kGroups < 4 ? 4 / kGroups : 1;

// A stream as kernels of columns send it, in words that carry their phase: without its lowest bit.
KOG_DEVICE void drop_phase_bit(float (&x)[kHeld]) {
#pragma unroll
  for (int i = 0; i < kHeld; i++) x[i] = unpack_f32(bits_of(x[i]));
}

// How many of a module's outputs went to all lanes at once: that gives buffer and phase of the
// next one, and with the layers run the phase of the next one for the lane alone.
struct ReduceCounts {
  int now = 0;
  KOG_DEVICE int own(int iteration) const { return iteration - now; }
};

// A module's outputs, rows of its last stage, in one layer: words own for the lane, now for all lanes at
// once, delayed for later layers.
template <class Stage, class Own, class Now, class Delayed, bool kBias>
struct Module {
  // With the words of the other lanes' outputs of kDelay layers ago, in lane order: asked for before the
  // multiplication.
  struct Asked {
    float bias;
    u32 old[kHasDelayed ? kLanes : 1];
  };
  Block& b;
  ReduceCounts& counts;
  int how, iteration;

  KOG_DEVICE u32* delayed(int when, int lane, int row) const {
    int buffer = when % Delayed::kBuffers;
    return b.p.words + Delayed::kOffset + (buffer * kLanes + lane) * Delayed::kStride + row;
  }
  KOG_DEVICE static u32 delayed_phase(int when) { return phase_of(when / Delayed::kBuffers); }

  // Whether lane j's output is needed.
  KOG_DEVICE bool needs(const Item& item, int j) const {
    return how == kDelayed && item.there && j != b.lane;
  }
  KOG_DEVICE Asked ask(int, const Item& item) const {
    Asked asked{bias_of<Stage, kBias>(b, item)};
    if constexpr (kHasDelayed)
#pragma unroll
      for (int j = 0; j < kLanes; j++)
        if (needs(item, j)) asked.old[j] = load_relaxed(delayed(iteration - kDelay, j, item.row));
    return asked;
  }

  // Send one row's output as the layer's reduction asks; by whole warps. First what others sent is received:
  // with that the proof of layout/exchanges.py gets by on three times kDelay buffers.
  KOG_DEVICE void put(const Item& item, float y, Asked& asked) const {
    float own = y;
    y = reduced(how, y, [&] { return kHasDelayed ? others(item, asked) : 0.f; });
    if constexpr (kHasDelayed)
      if (item.there)
        push(b, delayed(iteration, b.lane, item.row), pack_f32(own, delayed_phase(iteration)));
    u32* to = lane_words<Own>(b);
    u32 phase = phase_of(counts.own(iteration));
    bool to_all = kHasNow && how == kNow;
    if (to_all) {
      to = b.p.words + Now::kOffset + ((counts.now & 1) * kLanes + b.lane) * Now::kStride;
      phase = phase_of(counts.now >> 1);
    }
    if (!item.there) return;
    if (kRanks > 1 && to_all)
      push(b, to + item.row, pack_f32(y, phase));
    else
      store_relaxed(to + item.row, pack_f32(y, phase));
  }
  KOG_DEVICE void done(int) const {}

  KOG_DEVICE float others(const Item& item, Asked& asked) const {
    auto need = [&](int j) { return needs(item, j); };
    u32 phase = delayed_phase(iteration - kDelay), bad = 0;
#pragma unroll
    for (int j = 0; j < kLanes; j++)
      if (need(j)) bad |= (asked.old[j] ^ phase) & 1;
    if (any_in_wave(bad != 0))
      poll_words(
          b, Step::kDelayedOutputs, [&](int j) { return delayed(iteration - kDelay, j, item.row); }, need,
          phase, asked.old, [&](int j) { return lane_of_peer(b, j); });
    return add_lanes(0, need, [&](int j) { return asked.old[j]; });
  }

  // x joined with the module's outputs of the lane, or of all lanes.
  template <class Between>
  KOG_DEVICE void join(Step step, float (&x)[kHeld], Between between) const {
    if (kHasNow && how == kNow) {
      between.take_all();
      const u32* base = b.p.words + Now::kOffset + (counts.now & 1) * kLanes * Now::kStride;
      u32 phase = phase_of(counts.now >> 1);
#pragma unroll 1
      for (int j = 0; j < kLanes; j += kLanesAtOnce)
        gather<kLanesAtOnce, Now::kStride>(b, step, base + j * Now::kStride, phase, x, j);
      counts.now++;
    } else {
      gather(b, step, lane_words<Own>(b), phase_of(counts.own(iteration)), x, 0, between);
    }
    drop_phase_bit(x);
  }
};

using AttentionOut =
    Module<OProj, AttentionOutWords, AttentionOutNowWords, AttentionOutDelayedWords, kOBias>;
using MlpOut = Module<DownProj, MlpOutWords, MlpOutNowWords, MlpOutDelayedWords, kMlpBias>;

}  // namespace kog
