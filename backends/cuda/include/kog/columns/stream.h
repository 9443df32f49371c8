// The residual streams, one a lane and column. Whoever computes a row of a module's output adds it
// to the stream and publishes the sum: no block keeps a stream, each reads the whole of all those of
// its lane at the next norm. What lanes owe each other is lanes.h's.
//
//   words   [lane][column][row]: a float32 whose lowest bit is the phase. In every kernel a stream's is
//           zero (../residual.h)
//   hints   [lane][4 rows]: the number of the run (flags.h)
#pragma once
#include <kog/columns/matvec.h>
#include <kog/seat.h>

namespace kog::columns {

// Where a slice has no more elements than half of a warp's lanes take, the other half has the other columns.
constexpr int kSharing = kSlice <= 64 ? 2 : 1;
constexpr int kMine = kColumns / kSharing;  // columns of a lane
KOG_DEVICE int first_column(const Block& b) { return b.in_warp / (32 / kSharing) * kMine; }
// The first of this lane's elements of group i of its warp's slice, counted from there.
KOG_DEVICE int in_slice(const Block& b, int i) { return i * 128 + b.in_warp % (32 / kSharing) * 4; }

// Layers that the launch has run before this one; and what their flags carry.
KOG_DEVICE int iteration_of(const Block& b) { return steps_of(b) * kLayers + b.layer; }
KOG_DEVICE u32 epoch_of(int iteration) { return static_cast<u32>(iteration) + 1; }

// The streams as one exchange holds them, or the embedding.
struct Streams {
  const u32* words;  // nullptr: at the start of a step
  int hints;         // the first one's place among the words

  template <class Words, class Hints>
  KOG_DEVICE static Streams of(const Block& b) {
    static_assert(Words::kStride == kHiddenStride);
    return {lane_words<Words>(b), lane_place<Hints>(b)};
  }
  KOG_DEVICE const u16* embedding(const Block& b, int column) const {
    int token = b.small->seats[column].token;  // below 0: the request ends, and why
    return b.p.embed + static_cast<u64>(token > 0 ? token : 0) * kHiddenStride;
  }
  // A value that some warp of this block has received.
  KOG_DEVICE float value(const Block& b, int column, int e) const {
    if (words == nullptr) return widen(embedding(b, column)[e]);
    return unpack_f32(load_relaxed(words + column * kHiddenStride + e));
  }
};

// Four values of each of this lane's columns from element e on, by a whole warp; zeros where there are
// none.
struct Quads {
  uint4 w[kMine];

  KOG_DEVICE float value(int c, int j) const { return float_of(word_of(w[c], j)); }

  KOG_DEVICE void embed(const Block& b, const Streams& x, int e) {
#pragma unroll
    for (int c = 0; c < kMine; c++) {
      int column = first_column(b) + c;
      w[c] = uint4{0, 0, 0, 0};
      if (column >= b.p.num_seats || e >= kHidden) continue;
      uint2 v = *reinterpret_cast<const uint2*>(x.embedding(b, column) + e);
      w[c] = {bits_of(low_of(v.x)), bits_of(high_of(v.x)), bits_of(low_of(v.y)),
              bits_of(high_of(v.y))};
    }
  }
  KOG_DEVICE void receive(Block& b, Step step, const Streams& x, int e, int iteration) {
    const u32 phase = phase_of(iteration);
    int first = first_column(b);
    const u32* from = x.words + first * kHiddenStride + e;
    u32 late = 1;
#pragma unroll
    for (int c = 0; c < kMine; c++) w[c] = uint4{phase, phase, phase, phase};
    ask_until_ready(b, step, place_of(b, from), phase ^ 1, phase, [&] {
#pragma unroll
      for (int c = 0; c < kMine; c++)
        if (late != 0 && first + c < b.p.num_seats && e < kHidden)
          w[c] = load_relaxed4(from + c * kHiddenStride);
      late = 0;
#pragma unroll
      for (int c = 0; c < kMine; c++) late |= stale(w[c], e, kHidden, phase);
      return any_lane(late != 0);
    });
#pragma unroll
    for (int c = 0; c < kMine; c++)
      w[c] = {w[c].x & ~1u, w[c].y & ~1u, w[c].z & ~1u, w[c].w & ~1u};
  }
};

// Until this lane's rows from each of the elements e[] on are said to be there.
KOG_DEVICE void await_rows(Block& b, Step step, const Streams& x, const int (&e)[kGroups],
                           int iteration) {
  int at[kGroups];
#pragma unroll
  for (int g = 0; g < kGroups; g++) at[g] = e[g] < kHidden ? x.hints + e[g] / 4 : -1;
  await<true>(b, step, at, epoch_of(iteration));
}

// A warp's sums of one value of each column, in lane `lane` that of column lane * kColumns / 32.
// The same pairs are added as if all lanes added all columns, but each lane goes on with half of
// them.
KOG_DEVICE float sum_columns(const Block& b, float (&v)[kMine]) {
#pragma unroll
  for (int mask = 16 / kSharing, left = kMine; mask; mask >>= 1) {
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
  int from[kGroups];
#pragma unroll
  for (int i = 0; i < kGroups; i++) {
    int local = in_slice(b, i), e = b.warp * kSlice + local;
    bool staged = local < kSlice && e < kPaddedK;
    from[i] = staged ? e : kHiddenStride;
    // Lanes without an element multiply zeros with them (../residual.h says why they load at all).
    const float* gains = gains_of(b, norm) + (staged && e < kHidden ? e : 0);
    gain[i] = kGains ? *reinterpret_cast<const float4*>(gains) : float4{1, 1, 1, 1};
  }
  if (x.words != nullptr) await_rows(b, wait, x, from, iteration);
  float square[kMine] = {};
  int first = first_column(b);
#pragma unroll
  for (int i = 0; i < kGroups; i++) {
    int local = in_slice(b, i), e = b.warp * kSlice + local;
    bool staged = local < kSlice && e < kPaddedK;
    Quads v;
    if (x.words == nullptr)
      v.embed(b, x, from[i]);
    else
      v.receive(b, wait, x, from[i], iteration);
    const float g[4] = {gain[i].x, gain[i].y, gain[i].z, gain[i].w};
    int in_step = e % kFragK / 2, quarter = in_step / kLaneWords, at = in_step % kLaneWords / 2;
    u32* step = reinterpret_cast<u32*>(b.scratch) + e / kFragK * S::kStepWords;
#pragma unroll
    for (int c = 0; c < kMine; c++) {
      int column = first + c;
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
        int lane = (column % 2 * 4 + odd * 2) * 4 + quarter;
        u32* words = step + column / 2 * S::kSetWords;
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
  for (int i = 0; i < kGroups; i++)
    from[i] = in_slice(b, i) < kSlice ? b.warp * kSlice + in_slice(b, i) : kHiddenStride;
  await_rows(b, step, x, from, iteration);
  Quads v;
#pragma unroll
  for (int i = 0; i < kGroups; i++) v.receive(b, step, x, from[i], iteration);
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

// Publish the hints of a piece of Stage's rows, behind what the warp has stored.
template <class Stage, class Hints>
KOG_DEVICE void raise_rows(const Block& b, int piece, u32 epoch) {
  constexpr int kRows = Cut<Stage>::kPieceRows;
  sync_warp();
  // Asked anew: known ahead of a loop of batches, what is derived from it would be kept while it multiplies.
  int quad = thread_index() % 32, row = piece * kRows + 4 * quad;
  if (quad < kRows / 4 && row < kHidden) store_relaxed(lane_words<Hints>(b) + row / 4, epoch);
}

}  // namespace kog::columns
