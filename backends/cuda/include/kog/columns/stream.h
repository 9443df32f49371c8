// The residual streams, one a lane and column. Whoever computes a row of a module's output adds it
// to the stream and publishes the sum: no block keeps a stream, each reads the whole of all those of
// its lane at the next norm. What lanes owe each other is lanes.h's.
//
//   words   [lane][column][row]: a float32 whose lowest bit is the phase. In every kernel a stream's is
//           zero (../residual.h)
//   hints   [lane][4 rows]: the number of the run (flags.h)
#pragma once
#include <kog/columns/rows.h>
#include <kog/cursor.h>
#include <kog/embedded.h>

namespace kog::columns {

// Where a slice has no more elements than half of a warp's threads take, the other half has the other
// columns.
constexpr int kSharing = kSlice <= 64 ? 2 : 1;
constexpr int kMine = kColumns / kSharing;  // columns of a thread
KOG_DEVICE int first_column(const Block& b) { return b.in_warp / (kWarpThreads / kSharing) * kMine; }
// The first of this thread's elements of group i of its warp's slice, counted from there.
KOG_DEVICE int in_slice(const Block& b, int i) { return i * 128 + b.in_warp % (kWarpThreads / kSharing) * 4; }

// Layers that the launch has run before this one; and what their flags carry.
KOG_DEVICE int iteration_of(const Block& b) { return steps_of(b) * kLayers + b.layer; }
KOG_DEVICE u32 epoch_of(int iteration) { return static_cast<u32>(iteration) + 1; }

// The streams as one exchange holds them, or the embedding.
struct Streams {
  static constexpr bool kHeld = false;
  const u32* words;  // nullptr: at the start of a step
  int hints;         // the first one's place among the words

  template <class Words, class Hints>
  KOG_DEVICE static Streams of(const Block& b) {
    static_assert(Words::kStride == kHiddenStride);
    return {lane_words<Words>(b), lane_offset<Hints>(b)};
  }
  KOG_DEVICE const EmbeddingUnit* embedding(const Block& b, int column) const {
    int token = b.small->cursors[column].token;  // below 0: the request ends, and why
    return embedding_row(b, token > 0 ? token : 0);
  }
  // A value that some warp of this block has received, as it comes, and as a number.
  KOG_DEVICE u32 ask(const Block& b, int column, int e) const {
    if (words == nullptr) return EmbeddedQuad<>::one(embedding(b, column), e);
    return load_relaxed(words + column * kHiddenStride + e);
  }
  KOG_DEVICE float read(u32 w) const { return words == nullptr ? widen(w) : unpack_f32(w); }
  KOG_DEVICE float value(const Block& b, int column, int e) const { return read(ask(b, column, e)); }
};

// The streams at a layer's start, or behind the last one, and behind its attention.
KOG_DEVICE Streams layer_streams(const Block& b) {
  if (b.layer == 0) return {nullptr, 0};
  return Streams::of<MlpOutWords, MlpOutFlagsWords>(b);
}
KOG_DEVICE Streams inner_streams(const Block& b) {
  return Streams::of<AttentionOutWords, AttentionOutFlagsWords>(b);
}

// Those of a prompt's last token behind all layers, which the host has left in each column's slot.
struct HeldStreams {
  static constexpr bool kHeld = true;

  KOG_DEVICE const float* of(const Block& b, int column) const {
    return b.p.streams + static_cast<u64>(b.small->cursors[column].slot) * kLanes * kHiddenStride;
  }
};

// Four values of each of this thread's columns from element e on, by a whole warp; zeros where there are
// none.
struct Quads {
  uint4 w[kMine];

  KOG_DEVICE float value(int c, int j) const { return float_of(word_of(w[c], j)); }
  // Of the thread's first column.
  KOG_DEVICE static const u32* words(const Block& b, const Streams& x, int e) {
    return x.words + first_column(b) * kHiddenStride + e;
  }

  KOG_DEVICE void embed(const Block& b, const Streams& x, int e) {
#pragma unroll
    for (int c = 0; c < kMine; c++) {
      int column = first_column(b) + c;
      w[c] = uint4{0, 0, 0, 0};
      if (column >= b.p.num_requests || e >= kHidden) continue;
      EmbeddedQuad<> quad;
      quad.load(x.embedding(b, column), e);
      uint2 v = quad.values();
      w[c] = {bits_of(low_of(v.x)), bits_of(high_of(v.x)), bits_of(low_of(v.y)),
              bits_of(high_of(v.y))};
    }
  }
  KOG_DEVICE void load(const Block& b, const HeldStreams& x, int e) {
#pragma unroll
    for (int c = 0; c < kMine; c++) {
      int column = first_column(b) + c;
      w[c] = uint4{0, 0, 0, 0};
      if (column < b.p.num_requests && e < kHidden) w[c] = *reinterpret_cast<const uint4*>(x.of(b, column) + e);
    }
  }
  // Asked for before a hint: the block that the others wait for finds all rows there.
  KOG_DEVICE void ask(const Block& b, const Streams& x, int e, int iteration) {
    const u32 phase = phase_of(iteration);
    int first = first_column(b);
    const u32* from = words(b, x, e);
#pragma unroll
    for (int c = 0; c < kMine; c++) {
      bool there = x.words != nullptr && first + c < b.p.num_requests && e < kHidden;
      w[c] = load_relaxed4(from + c * kHiddenStride, there, phase);
    }
  }
  // What was asked for. Who finds nothing there waits for hints, others ask again for what is late.
  KOG_DEVICE void receive(Block& b, Step step, const Streams& x, int e, int iteration) {
    const u32 phase = phase_of(iteration);
    int first = first_column(b);
    const u32* from = words(b, x, e);
    const int hint[1] = {e < kHidden ? x.hints + e / 4 : -1};
    bool hinted = false;
    u32 late = 0;
    ask_until_ready(b, step, word_index(b, from), phase ^ 1, phase, [&] {
#pragma unroll
      for (int c = 0; c < kMine; c++)
        if (late != 0 && first + c < b.p.num_requests && e < kHidden)
          w[c] = load_relaxed4(from + c * kHiddenStride);
      late = 0;
#pragma unroll
      for (int c = 0; c < kMine; c++) late |= stale(w[c], e, kHidden, phase);
      bool again = any_in_warp(late != 0);
      if (again && !hinted && !any_in_warp(late == 0 && e < kHidden && first < b.p.num_requests))
        await<true>(b, step, hint, epoch_of(iteration));
      hinted = true;
      return again;
    });
#pragma unroll
    for (int c = 0; c < kMine; c++)
      w[c] = {w[c].x & ~1u, w[c].y & ~1u, w[c].z & ~1u, w[c].w & ~1u};
  }
};

// Stage this warp's slice of x * gain as the operands of Stage, or of wide stages that take the same, of which the
// longest multiplies kPaddedK values, and leave its sums of squares for inverse_rms. `iteration`: the run whose
// outputs complete x. kOwn: the stages' warps multiply what they staged themselves.
// Without kGains they are 1. meanwhile(): what can be done while the first values are on their way. hold(): called when
// the steps that stay in registers are staged, if the others take their place.
template <class Stage, int kPaddedK, bool kOwn, bool kGains = true, class From, class Meanwhile, class Hold>
KOG_DEVICE void stage_streams(Block& b, Step wait, const From& x, int norm, int iteration,
                              Meanwhile meanwhile, Hold hold) {
  using S = OperandLayout<Wide>;
  static_assert(kPaddedK <= kWarps * kSlice);
  constexpr int kHeldValues = Stage::kHeld * kFragK;
  static_assert(!kHeldFirst<Stage> || (kOwn && kHeldValues % 128 == 0 && Stage::kSteps * kFragK == kSlice));
  float4 gain[kGroups];
  int from[kGroups];
  Quads v;
#pragma unroll
  for (int i = 0; i < kGroups; i++) {
    int local = in_slice(b, i), e = b.warp * kSlice + local;
    bool staged = local < kSlice && e < kPaddedK;
    from[i] = staged ? e : kHiddenStride;
    if constexpr (!From::kHeld)
      if (i == 0) v.ask(b, x, from[0], iteration);
    // Threads without an element multiply zeros with them (../residual.h says why they load at all).
    const float* gains = gains_of(b, norm) + (staged && e < kHidden ? e : 0);
    gain[i] = kGains ? *reinterpret_cast<const float4*>(gains) : float4{1, 1, 1, 1};
  }
  meanwhile();
  float square[kMine] = {};
  int first = first_column(b);
#pragma unroll
  for (int i = 0; i < kGroups; i++) {
    int local = in_slice(b, i), e = b.warp * kSlice + local;
    bool staged = local < kSlice && e < kPaddedK;
    if constexpr (From::kHeld) {
      v.load(b, x, from[i]);
    } else if (x.words == nullptr) {
      v.embed(b, x, from[i]);
    } else {
      if (i > 0) v.ask(b, x, from[i], iteration);
      v.receive(b, wait, x, from[i], iteration);
    }
    const float g[4] = {gain[i].x, gain[i].y, gain[i].z, gain[i].w};
    int place = e / kFragK;  // of the step
    if constexpr (kHeldFirst<Stage>)
      place = b.warp * (Stage::kSteps - Stage::kHeld) + local / kFragK - (i * 128 < kHeldValues ? 0 : Stage::kHeld);
    u32* step = reinterpret_cast<u32*>(b.scratch) + place * S::kStepWords;
    // Where the first column lies, to which known numbers are added: twice, as the swizzle differs between
    // even and odd columns.
    static_assert(!kSwapped || kMine % 2 == 0);
    int swizzle = bank_swizzle(e / kFragK), high = WideOffset(0, first, e % kFragK / 2).high;
    u32* even = step + high + swizzle;
    u32* odd = step + high - swizzle;
#pragma unroll
    for (int c = 0; c < kMine; c++) {
      int column = first + c;
      const float four[4] = {v.value(c, 0), v.value(c, 1), v.value(c, 2), v.value(c, 3)};
      if constexpr (Stage::Weights::kInteger) {
        float scaled[4];
        square[c] = scale_four(four, g, square[c], scaled);
        put_bytes<Stage>(b, column, e, scaled, staged);
        continue;
      }
      square[c] = scale_four(four, g, square[c], staged, [&](int i, const HighLow& parts) {
        if constexpr (kSwapped) {
          u32* to = (c % 2 == 0 ? even : odd) + c * 16 + i * S::kSetWords;
          *reinterpret_cast<uint2*>(to) = {parts.high, parts.low};
        } else {
          WideOffset at(e / kFragK, column, e % kFragK / 2 + i);
          step[at.high] = parts.high, step[at.low] = parts.low;
        }
      });
    }
    if (kHeldFirst<Stage> && (i + 1) * 128 == kHeldValues) {
      sync_warp();
      hold();
      sync_warp();  // all have read what is overwritten
    }
  }
  int sharers = kWarpThreads / kColumns;  // that share a column's sum
  float sum = sum_columns<kSharing>(b, square);
  if (b.in_warp % sharers == 0) b.small->squares[b.in_warp / sharers * kWarps + b.warp] = sum;
  sync_staged<kOwn>();
}

// Until this warp's slice of the streams has come, which it does not need.
KOG_DEVICE void await_streams(Block& b, Step step, const Streams& x, int iteration) {
  int from[kGroups];
#pragma unroll
  for (int i = 0; i < kGroups; i++)
    from[i] = in_slice(b, i) < kSlice ? b.warp * kSlice + in_slice(b, i) : kHiddenStride;
  Quads v;
#pragma unroll
  for (int i = 0; i < kGroups; i++) {
    v.ask(b, x, from[i], iteration);
    v.receive(b, step, x, from[i], iteration);
  }
}

// Publish the hints of the rows of a piece's unit, behind what the warp has stored of them.
template <class Stage, class Hints>
KOG_DEVICE void raise_rows(const Block& b, int piece, u32 epoch) {
  constexpr int kRows = Stage::kUnitRows;
  sync_warp();
  // Asked anew: known ahead of a loop of batches, what is derived from it would be kept while it multiplies.
  int quad = thread_index() % kWarpThreads, row = piece / OperandLayout<Stage>::kPieces * kRows + 4 * quad;
  if (quad < kRows / 4 && row < kHidden) store_relaxed(lane_words<Hints>(b) + row / 4, epoch);
  rejoin();
}

}  // namespace kog::columns
