// Weight @ activations: activations staged once a stage, weights multiplied as their chunks arrive.
//
// A fragment is 8 rows by kFragK values of K. The tensor core multiplies it with 8 rows of
// activations, of which one vector needs one: so float32 activations come as two 16-bit rows, x =
// high + low, and keep 16 bits of mantissa or more. Values that came as 16-bit words need no second
// row.
//
//   wide    scratch holds, a fragment: kFragK highs, kFragK lows      narrow: kFragK values
//   partial sums [part of K][row], summed over the parts in order by the thread that owns the row
#pragma once
#include <kog/ring.h>
#include <kog/words.h>

namespace kog {

// The residual stream, a copy in every block. Warp w holds elements [w * kSlice, (w + 1) * kSlice),
// a lane four side by side; kSlice is what warp w multiplies where K is cut in 16 parts, so that it
// stages for itself.
constexpr int kSlice = (kHidden + kWarps * kFragK - 1) / (kWarps * kFragK) * kFragK;
constexpr int kGroups = (kSlice + 127) / 128;
constexpr int kHeld = 4 * kGroups;
constexpr int kHiddenStride = (kHidden + 3) / 4 * 4;

// Index of the first element of a lane's group i; kHidden or more if it has none.
KOG_DEVICE int element(const Block& b, int i) {
  int local = i * 128 + b.in_warp * 4;
  return local < kSlice ? b.warp * kSlice + local : kHiddenStride;
}

template <bool kOwnSlice>
KOG_DEVICE void sync_staged() {
  if constexpr (kOwnSlice)
    sync_warp();
  else
    sync_consumers();
}

// Stage x * gain for Stage, and leave the warps' sums of squares for `inverse_rms`.
template <class Stage>
KOG_DEVICE void stage_x(Block& b, const float (&x)[kHeld], const float (&gain)[kHeld]) {
  static_assert(Stage::kWide);
  u16* to = reinterpret_cast<u16*>(b.scratch);
  float square = 0;
#pragma unroll
  for (int i = 0; i < kGroups; i++) {
    int local = i * 128 + b.in_warp * 4, e = b.warp * kSlice + local;
    float v[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      square += x[4 * i + j] * x[4 * i + j];
      v[j] = x[4 * i + j] * gain[4 * i + j];
    }
    uint2 high = {round_pair<kF16>(v[0], v[1]), round_pair<kF16>(v[2], v[3])};
    uint2 low = {round_pair<kF16>(v[0] - low_of(high.x), v[1] - second_of(high.x)),
                 round_pair<kF16>(v[2] - low_of(high.y), v[3] - second_of(high.y))};
    if (local < kSlice && e < Stage::kPaddedK) {
      u16* at = to + e / kFragK * (2 * kFragK) + e % kFragK;
      *reinterpret_cast<uint2*>(at) = high;
      *reinterpret_cast<uint2*>(at + kFragK) = low;
    }
  }
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) square += shuffle_xor(square, mask);
  if (b.in_warp == 0) b.small->squares[b.warp] = square;
  sync_staged<Stage::kParts == kWarps>();
}

// 1 / rms(x) of the x staged last; after a barrier that all warps have passed since.
KOG_DEVICE float inverse_rms(const Block& b) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kWarps; i++) sum += b.small->squares[i];
  return rsqrt_of(sum / kHidden + kNormEps);
}

// Wait for Stage's inputs, pair words at `base`, and stage them.
template <class Stage>
KOG_DEVICE void stage_words(Block& b, Step step, const u32* base, u32 phase) {
  static_assert(!Stage::kWide);
  constexpr bool kOwnSlice = Stage::kParts == kWarps;
  constexpr int kPart =
      kOwnSlice ? Stage::kPaddedK / kWarps : Stage::kPaddedK;  // values of one warp, or of all
  constexpr int kStride = kOwnSlice ? 256 : 8 * 32 * kWarps;
  constexpr int kCount = (kPart + kStride - 1) / kStride;
  constexpr int kWords = (Stage::kCols + 1) / 2;
  int first = kOwnSlice ? b.warp * kPart : 0, lane = kOwnSlice ? b.in_warp : b.thread;
  int at[kCount];
  uint4 q[kCount];
#pragma unroll
  for (int i = 0; i < kCount; i++) {
    int local = i * kStride + lane * 8;
    at[i] = local < kPart ? (first + local) / 2 : kWords;
  }
  poll(b, step, base, at, kWords, phase, q);
#pragma unroll
  for (int i = 0; i < kCount; i++) {
    int local = i * kStride + lane * 8;
    uint4 v = {at[i] < kWords ? q[i].x & ~1u : 0, at[i] + 1 < kWords ? q[i].y & ~1u : 0,
               at[i] + 2 < kWords ? q[i].z & ~1u : 0, at[i] + 3 < kWords ? q[i].w & ~1u : 0};
    if (local < kPart) *reinterpret_cast<uint4*>(b.scratch + 2 * (first + local)) = v;
  }
  sync_staged<kOwnSlice>();
}

// kFragK / 4 values of 16 bits: what one lane holds of a fragment.
template <int kWords>
struct Quarter {
  u32 w[kWords];
};
template <>
struct Quarter<2> {
  u32 w[2];
  KOG_DEVICE static Quarter load(const u8* p) {
    uint2 v = *reinterpret_cast<const uint2*>(p);
    return {{v.x, v.y}};
  }
};
template <>
struct Quarter<4> {
  u32 w[4];
  KOG_DEVICE static Quarter load(const u8* p) {
    uint4 v = *reinterpret_cast<const uint4*>(p);
    return {{v.x, v.y, v.z, v.w}};
  }
};
using Fragment = Quarter<kFragK / 8>;

template <class Stage>
constexpr int kBatchRows = Stage::kBatch * Stage::kUnitRows;  // rows of a batch

// The sums of one unit and one part of K: rows 0 (and 1, the lows) of the accumulators to shared
// memory.
template <class Stage>
KOG_DEVICE void put_sums(const Block& b, float (&c)[2][4], float* to) {
  float v0 = c[0][0] + c[1][0], v1 = c[0][1] + c[1][1];
  if constexpr (Stage::kWide) {
    v0 += shuffle_down(v0, 4);
    v1 += shuffle_down(v1, 4);
  }
  if (b.in_warp < 4) *reinterpret_cast<float2*>(to + 2 * b.in_warp) = float2{v0, v1};
#pragma unroll
  for (int i = 0; i < 4; i++) c[0][i] = c[1][i] = 0;
}

// Partial sums of `units` units, all warps together; takes whole chunks from the ring.
template <class Stage>
KOG_DEVICE void multiply(Block& b, Ring& ring, int units, float* partials) {
  constexpr int kFragmentBytes = 8 * kFragK * 2, kStepBytes = kFragK * (Stage::kWide ? 4 : 2);
  constexpr int kQuarterBytes = kFragK / 2;
  int part = b.warp % Stage::kParts, group = b.warp / Stage::kParts;
  const u8* x = b.scratch + part * Stage::kSteps * kStepBytes + (b.in_warp & 3) * kQuarterBytes;
  if (Stage::kWide) x += (b.in_warp >> 2 & 1) * kFragK * 2;
  int mine = b.warp * kFragments * kFragmentBytes + b.in_warp * kQuarterBytes;
  float* to = partials + part * kBatchRows<Stage> + group * 8;
  float c[2][4] = {};
  int step = 0;
  for (int left = units * Stage::kSteps; left > 0; left -= kFragments) {
    const u8* chunk = ring.wait(b) + mine;
    Fragment w[kFragments];
#pragma unroll
    for (int f = 0; f < kFragments; f++) w[f] = Fragment::load(chunk + f * kFragmentBytes);
    ring.release(b);
#pragma unroll
    for (int f = 0; f < kFragments; f++) {
      if (Stage::kSteps % kFragments != 0 && f >= left) break;  // the stage's last chunk is padded
      Fragment a = Fragment::load(x + step * kStepBytes);
#pragma unroll
      for (int i = 0; i < kFragK / 16; i++)
        multiply_add<kF16>(c[(f + i) & 1], a.w[2 * i], a.w[2 * i + 1], w[f].w[2 * i],
                           w[f].w[2 * i + 1]);
      if (++step == Stage::kSteps) {
        put_sums<Stage>(b, c, to);
        to += Stage::kUnitRows;
        step = 0;
      }
    }
  }
}

// All rows of the block, batch by batch: before(row) -> what a row's owner asks for early, then
// after(row, sum, asked, count) by whole warps, thread t with row first + t of the block's order;
// rows >= count of the stage are padding.
template <class Stage, class Before, class After>
KOG_DEVICE void run_rows(Block& b, Ring& ring, int& turn, Units units, Before before, After after) {
  if (units.first == units.last) sync_consumers();  // what a stage staged is never overtaken
  for (int first = units.first; first < units.last; first += Stage::kBatch) {
    int count = units.last - first < Stage::kBatch ? units.last - first : Stage::kBatch;
    float* partials = b.partials + (turn++ & 1) * (kPartialBytes / 8);
    int row = first * Stage::kUnitRows + b.thread;
    bool owner = b.thread < count * Stage::kUnitRows && row < Stage::kRows;
    auto asked = before(row, owner);
    multiply<Stage>(b, ring, count, partials);
    sync_consumers();
    if (b.warp * 32 < count * Stage::kUnitRows) {
      float sum = 0;
      if (owner)
#pragma unroll
        for (int i = 0; i < Stage::kParts; i++) sum += partials[i * kBatchRows<Stage> + b.thread];
      after(row, owner, sum, asked);
    }
  }
}

}  // namespace kog
