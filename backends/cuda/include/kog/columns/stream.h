// The residual streams, one a column. Whoever computes a row of a module's output adds it to the stream and
// publishes the sum: no block keeps a stream, each reads the whole of all of them at the next norm.
#pragma once
#include <kog/columns/matvec.h>

namespace kog::columns {

// Where the streams lie before a stage: in the embedding, or as words.
struct Streams {
  const u32* words;  // [column][kHiddenStride], or nullptr: at the start of a step

  KOG_DEVICE const u16* embedding(const Block& b, int column) const {
    int token = b.small->seats[column].token;  // below 0: the request ends, and why
    return b.p.embed + static_cast<u64>(token > 0 ? token : 0) * kHiddenStride;
  }
  KOG_DEVICE float4 quad(const Block& b, int column, int e) const {
    if (words == nullptr) {
      uint2 w = *reinterpret_cast<const uint2*>(embedding(b, column) + e);
      return {low_of(w.x), second_of(w.x), low_of(w.y), second_of(w.y)};
    }
    uint4 w = load_relaxed4(words + column * kHiddenStride + e);
    return {float_of(w.x), float_of(w.y), float_of(w.z), float_of(w.w)};
  }
  KOG_DEVICE float value(const Block& b, int column, int e) const {
    if (words == nullptr) return widen(embedding(b, column)[e]);
    return float_of(load_relaxed(words + column * kHiddenStride + e));
  }
};
template <class Words>
KOG_DEVICE u32* stream_words(const Block& b) {
  static_assert(Words::kStride == kHiddenStride);
  return b.p.words + Words::kOffset;
}

// Until this warp's slice of the streams is there.
template <class Stage, class Flags>
KOG_DEVICE void await_streams(Block& b, Step step, u32 epoch) {
  int first = b.warp * kSlice, last = first + kSlice;
  await_rows<Stage, Flags, kSlice>(b, step, first, last < kHidden ? last : kHidden, epoch);
}

// Stage this warp's slice of x * gain as Stage's operands, and leave its sums of squares for
// `inverse_rms`. wait() comes once the gains are asked for.
template <class Stage, class Wait>
KOG_DEVICE void stage_streams(Block& b, Operands<Stage>& to, const Streams& x, int norm, Wait wait) {
  using S = Shape<Stage>;
  static_assert(Stage::kWide && Stage::kPaddedK <= kWarps * kSlice);
  float4 gain[kGroups];
#pragma unroll
  for (int i = 0; i < kGroups; i++) {
    int e = element(b, i);
    gain[i] = float4{0, 0, 0, 0};
    if (e < kHidden) gain[i] = *reinterpret_cast<const float4*>(b.p.gains + norm * kHiddenStride + e);
  }
  wait();
  float square[kColumns] = {};
#pragma unroll
  for (int i = 0; i < kGroups; i++) {
    int local = i * 128 + b.in_warp * 4, e = b.warp * kSlice + local;
    bool staged = local < kSlice && e < Stage::kPaddedK;
    float4 v[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; c++) {
      v[c] = float4{0, 0, 0, 0};
      if (c < b.p.num_seats && staged && e < kHidden) v[c] = x.quad(b, c, e);
    }
    const float g[4] = {gain[i].x, gain[i].y, gain[i].z, gain[i].w};
    int in_step = e % kFragK / 2, quarter = in_step / kLaneWords, at = in_step % kLaneWords / 2;
    u32* step = reinterpret_cast<u32*>(b.scratch) + e / kFragK * S::kStaged + at;
#pragma unroll
    for (int c = 0; c < kColumns; c++) {
      const float values[4] = {v[c].x, v[c].y, v[c].z, v[c].w};
      float scaled[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        square[c] += values[j] * values[j];
        scaled[j] = values[j] * g[j];
      }
      if (!staged) continue;
#pragma unroll
      for (int odd = 0; odd < 2; odd++) {
        u32 high = round_pair<kF16>(scaled[2 * odd], scaled[2 * odd + 1]);
        u32 low = round_pair<kF16>(scaled[2 * odd] - low_of(high), scaled[2 * odd + 1] - second_of(high));
        int lane = (c % 2 * 4 + odd * 2) * 4 + quarter;
        u32* words = step + c / 2 * S::kSetWords;
        words[lane * kOperandWords] = high;
        words[(lane + 4) * kOperandWords] = low;
      }
    }
  }
#pragma unroll
  for (int c = 0; c < kColumns; c++) {
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) square[c] += shuffle_xor(square[c], mask);
    if (b.in_warp == 0) b.small->squares[c * kWarps + b.warp] = square[c];
  }
  sync_staged<Stage::kParts == kWarps>();
#pragma unroll
  for (int step = 0; step < Stage::kHeld; step++)
#pragma unroll
    for (int set = 0; set < S::kSets; set++) to.held[step][set] = to.load(step, set);
}

// 1 / rms of the column's stream staged last; after a barrier that all warps have passed since.
KOG_DEVICE float inverse_rms(const Block& b, int column) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kWarps; i++) sum += b.small->squares[column * kWarps + i];
  return rsqrt_of(sum * (1.f / kHidden) + kNormEps);
}

}  // namespace kog::columns
