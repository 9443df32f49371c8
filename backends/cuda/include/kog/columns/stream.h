// The residual streams, one a lane and column. Whoever computes a row of a module's output adds it
// to the stream and publishes the sum: no block keeps a stream, each reads the whole of all those of
// its lane at the next norm. What lanes owe each other is lanes.h's.
//
//   words   [lane][column][row]: a float32 whose lowest bit is the phase
//   marks   [lane][4 rows][4 columns]: those bits, four a column, under the number of the run, which
//           is the hint as well (flags.h)
#pragma once
#include <kog/columns/matvec.h>
#include <kog/seat.h>

namespace kog::columns {

constexpr int kMarks = (kColumns + 3) / 4;  // words of 4 rows

// Layers that the launch has run before this one; and what their flags carry.
KOG_DEVICE int iteration_of(const Block& b, int steps) { return steps * kLayers + b.layer; }
KOG_DEVICE u32 epoch_of(int iteration) { return static_cast<u32>(iteration) + 1; }

KOG_DEVICE u32 mark_bit(u32 mark, int column, int row) {
  return mark >> (4 * (column % 4) + row % 4) & 1;
}

// The streams as one exchange holds them, or the embedding.
struct Streams {
  const u32* words;  // nullptr: at the start of a step
  const u32* marks;

  template <class Words, class Marks>
  KOG_DEVICE static Streams of(const Block& b) {
    static_assert(Words::kStride == kHiddenStride);
    return {lane_words<Words>(b), lane_words<Marks>(b)};
  }
  KOG_DEVICE const u16* embedding(const Block& b, int column) const {
    int token = b.small->seats[column].token;  // below 0: the request ends, and why
    return b.p.embed + static_cast<u64>(token > 0 ? token : 0) * kHiddenStride;
  }
  // A value that some warp of this block has received.
  KOG_DEVICE float value(const Block& b, int column, int e) const {
    if (words == nullptr) return widen(embedding(b, column)[e]);
    u32 word = load_relaxed(words + column * kHiddenStride + e);
    u32 mark = load_relaxed(marks + e / 4 * kMarks + column / 4);
    return float_of((word & ~1u) | mark_bit(mark, column, e));
  }
};

// This lane's four values of each column from element e on, by a whole warp; zeros where there are
// none.
struct Quads {
  uint4 w[kColumns];

  KOG_DEVICE float value(int column, int j) const { return float_of(word_of(w[column], j)); }

  KOG_DEVICE void embed(const Block& b, const Streams& x, int e) {
#pragma unroll
    for (int c = 0; c < kColumns; c++) {
      w[c] = uint4{0, 0, 0, 0};
      if (c >= b.p.num_seats || e >= kHidden) continue;
      uint2 v = *reinterpret_cast<const uint2*>(x.embedding(b, c) + e);
      w[c] = {bits_of(low_of(v.x)), bits_of(high_of(v.x)), bits_of(low_of(v.y)),
              bits_of(high_of(v.y))};
    }
  }
  KOG_DEVICE void receive(Block& b, Step step, const Streams& x, int e, int iteration,
                          const u32 (&mark)[kMarks]) {
    const u32 phase = phase_of(iteration);
    ask_until_ready(b, step, place_of(b, x.words + e), phase ^ 1, phase, [&] {
      u32 bad = 0;
#pragma unroll
      for (int c = 0; c < kColumns; c++) {
        w[c] = uint4{phase, phase, phase, phase};
        if (c < b.p.num_seats && e < kHidden) w[c] = load_relaxed4(x.words + c * kHiddenStride + e);
      }
#pragma unroll
      for (int c = 0; c < kColumns; c++) bad |= stale(w[c], e, kHidden, phase);
      return any_lane(bad != 0);
    });
#pragma unroll
    for (int c = 0; c < kColumns; c++) {
      u32 low = c < b.p.num_seats ? mark[c / 4] >> 4 * (c % 4) : 0;
      w[c] = {(w[c].x & ~1u) | (low & 1), (w[c].y & ~1u) | (low >> 1 & 1),
              (w[c].z & ~1u) | (low >> 2 & 1), (w[c].w & ~1u) | (low >> 3 & 1)};
    }
  }
};

// The marks of this lane's values from each of the elements e[] on, in one round trip.
struct SliceMarks {
  u32 w[kGroups][kMarks];

  KOG_DEVICE void receive(Block& b, Step step, const Streams& x, const int (&e)[kGroups],
                          int iteration) {
    const u32 epoch = epoch_of(iteration);
    const u32* from = x.marks;
    ask_until_ready(b, step, place_of(b, from + e[0] / 4 * kMarks), epoch - 1, epoch, [&] {
      u32 late = 0;
#pragma unroll
      for (int g = 0; g < kGroups; g++) {
#pragma unroll
        for (int i = 0; i < kMarks; i++) w[g][i] = epoch << 16;
        if (e[g] < kHidden) load(from + e[g] / 4 * kMarks, w[g]);
      }
#pragma unroll
      for (int g = 0; g < kGroups; g++)
#pragma unroll
        for (int i = 0; i < kMarks; i++)
          if (4 * i < b.p.num_seats) late |= (w[g][i] >> 16) ^ (epoch & 0xffffu);
      return any_lane(late != 0);
    });
  }

 private:
  KOG_DEVICE static void load(const u32* from, u32 (&mark)[kMarks]) {
    if constexpr (kMarks == 2) {
      uint2 v = load_relaxed2(from);
      mark[0] = v.x, mark[1] = v.y;
    } else {
#pragma unroll
      for (int i = 0; i < kMarks; i++) mark[i] = load_relaxed(from + i);
    }
  }
};

// A warp's sums of one value of each column, in lane `lane` that of column lane * kColumns / 32.
// The same pairs are added as if all lanes added all columns, but each lane goes on with half of
// them.
KOG_DEVICE float sum_columns(const Block& b, float (&v)[kColumns]) {
#pragma unroll
  for (int mask = 16, left = kColumns; mask; mask >>= 1) {
    bool upper = (b.in_warp & mask) != 0;
    if (left > 1) {
      left /= 2;
#pragma unroll
      for (int c = 0; c < left; c++) {
        float mine = upper ? v[left + c] : v[c], theirs = upper ? v[c] : v[left + c];
        v[c] = mine + shuffle_xor(theirs, mask);
      }
    } else {
      v[0] += shuffle_xor(v[0], mask);
    }
  }
  return v[0];
}

// The gains of one norm: two a layer, then the last.
KOG_DEVICE const float* gains_of(const Block& b, int norm) {
  return b.p.gains + (kLaneNorms ? norm * kLanes + lane_of(b) : norm) * kHiddenStride;
}

// Stage this warp's slice of x * gain as the operands of wide stages, of which the longest
// multiplies kPaddedK values, and leave its sums of squares for Scales. `iteration`: the run whose
// outputs complete x. kOwn: the stages' warps multiply what they staged themselves.
// Without kGains they are 1.
template <int kPaddedK, bool kOwn, bool kGains = true>
KOG_DEVICE void stage_streams(Block& b, Step wait, const Streams& x, int norm, int iteration) {
  using S = Cut<Wide>;
  static_assert(kPaddedK <= kWarps * kSlice);
  float4 gain[kGroups];
#pragma unroll
  for (int i = 0; i < kGroups; i++) {
    int e = element(b, i);
    // Lanes without an element multiply zeros with them (../residual.h says why they load at all).
    const float* from = gains_of(b, norm) + (e < kHidden ? e : 0);
    gain[i] = kGains ? *reinterpret_cast<const float4*>(from) : float4{1, 1, 1, 1};
  }
  int from[kGroups];
#pragma unroll
  for (int i = 0; i < kGroups; i++) {
    int local = i * 128 + b.in_warp * 4, e = b.warp * kSlice + local;
    from[i] = local < kSlice && e < kPaddedK ? e : kHiddenStride;
  }
  // Unless they begin somewhere on every path, registers are kept for them throughout the layer.
  SliceMarks marks = {};
  if (x.words != nullptr) marks.receive(b, wait, x, from, iteration);
  float square[kColumns] = {};
#pragma unroll
  for (int i = 0; i < kGroups; i++) {
    int local = i * 128 + b.in_warp * 4, e = b.warp * kSlice + local;
    bool staged = local < kSlice && e < kPaddedK;
    Quads v;
    if (x.words == nullptr)
      v.embed(b, x, from[i]);
    else
      v.receive(b, wait, x, from[i], iteration, marks.w[i]);
    const float g[4] = {gain[i].x, gain[i].y, gain[i].z, gain[i].w};
    int in_step = e % kFragK / 2, quarter = in_step / kLaneWords, at = in_step % kLaneWords / 2;
    u32* step = reinterpret_cast<u32*>(b.scratch) + e / kFragK * S::kStepWords;
#pragma unroll
    for (int c = 0; c < kColumns; c++) {
      float scaled[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        square[c] = fused(v.value(c, j), v.value(c, j), square[c]);
        scaled[j] = product(v.value(c, j), g[j]);
      }
      if (!staged) continue;
#pragma unroll
      for (int odd = 0; odd < 2; odd++) {
        u32 high = round_pair<kF16>(scaled[2 * odd], scaled[2 * odd + 1]);
        u32 low = round_pair<kF16>(scaled[2 * odd] - low_of(high),
                                   scaled[2 * odd + 1] - high_of(high));
        int lane = (c % 2 * 4 + odd * 2) * 4 + quarter;
        u32* words = step + c / 2 * S::kSetWords;
        words[(lane * kOperandWords + at) ^ wide_turn(e / kFragK)] = high;
        words[((lane + 4) * kOperandWords + at) ^ wide_turn(e / kFragK)] = low;
      }
    }
  }
  int lanes = 32 / kColumns;  // that share a column's sum
  float sum = sum_columns(b, square);
  if (b.in_warp % lanes == 0) b.small->squares[b.warp * kColumns + b.in_warp / lanes] = sum;
  sync_staged<kOwn>();
}

// Until this warp's slice of the streams has come, which it does not need.
KOG_DEVICE void await_streams(Block& b, Step step, const Streams& x, int iteration) {
  int from[kGroups];
#pragma unroll
  for (int i = 0; i < kGroups; i++) from[i] = element(b, i);
  SliceMarks marks;
  marks.receive(b, step, x, from, iteration);
  Quads v;
#pragma unroll
  for (int i = 0; i < kGroups; i++) v.receive(b, step, x, from[i], iteration, marks.w[i]);
}

// 1 / rms of the streams staged last, found at the first question, behind a barrier that all warps
// have passed since; by whole warps.
struct Scales {
  float mine = 0;  // of column lane % kColumns

  KOG_DEVICE float of(const Block& b, int column) {
    if (any_lane(mine == 0)) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kWarps; i++)
        sum += b.small->squares[i * kColumns + b.in_warp % kColumns];
      mine = rsqrt_of(sum * (1.f / kHidden) + kNormEps);
    }
    return shuffle(mine, column % kColumns);
  }
};

// Publish the marks of a piece of Stage's rows, of whose items `low[i]` are the lowest bits.
template <class Stage, class Marks>
KOG_DEVICE void publish_marks(const Block& b, int piece, const u32 (&low)[Cut<Stage>::kItems],
                              u32 epoch) {
  constexpr int kItems = Cut<Stage>::kItems, kRows = Cut<Stage>::kPieceRows;
  u32 bits[kItems];
#pragma unroll
  for (int i = 0; i < kItems; i++) bits[i] = lanes_with(low[i] != 0);
  // Asked anew: known ahead of a loop of batches, the masks would be kept while it multiplies.
  int lane = thread_index() % 32;
  int group = lane / kMarks, word = lane % kMarks, row = piece * kRows + 4 * group;
  if (group >= kRows / 4 || row >= kHidden) return;
  u32 mark = epoch << 16;
#pragma unroll
  for (int k = 0; k < 4 && k < kColumns; k++) {
    int first = (4 * word + k) * kRows + 4 * group;
#pragma unroll
    for (int i = 0; i < kItems; i++) {
      u32 mine = first / 32 == i ? 0xfu : 0;
      mark |= (bits[i] >> first % 32 & mine) << 4 * k;
    }
  }
  store_relaxed(lane_words<Marks>(b) + row / 4 * kMarks + word, mark);
}

}  // namespace kog::columns
