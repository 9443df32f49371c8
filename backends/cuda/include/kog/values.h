// What threads hold of vectors, and how they add up: of all kernels, whatever multiplies.
#pragma once
#include <kog/words.h>

namespace kog {

// N words that one thread reads or writes side by side, so many at once as it can.
template <int N>
struct alignas(N < 4 ? 4 * N : 16) WordVector {
  u32 w[N];
  KOG_DEVICE static WordVector load(const void* p) { return *static_cast<const WordVector*>(p); }
  KOG_DEVICE void store(void* p) const { *static_cast<WordVector*>(p) = *this; }
  // Whether one of them lacks the phase, 0 or 1.
  KOG_DEVICE u32 stale(u32 phase) const {
    u32 bad = 0;
#pragma unroll
    for (int i = 0; i < N; i++) bad |= w[i] ^ phase;
    return bad & 1;
  }
};

// Words side by side, as another block has stored them.
template <int N>
KOG_DEVICE void load_row(const u32* from, WordVector<N>& v) {
  if constexpr (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      uint4 w = load_relaxed4(from + i);
      v.w[i] = w.x, v.w[i + 1] = w.y, v.w[i + 2] = w.z, v.w[i + 3] = w.w;
    }
  } else if constexpr (N == 2) {
    uint2 w = load_relaxed2(from);
    v.w[0] = w.x, v.w[1] = w.y;
  } else {
    v.w[0] = load_relaxed(from);
  }
}

// The residual stream. Warp w holds elements [w * kSlice, (w + 1) * kSlice),
// a thread four side by side; kSlice is what warp w multiplies where K is cut in 16 parts, so that it
// stages for itself.
constexpr int kGroups = (kSlice + 127) / 128;
constexpr int kHeld = 4 * kGroups;
constexpr int kHiddenStride = (kHidden + 3) / 4 * 4;

// Whether a stage's inputs run on over others' partial sums, and the stage's own lie behind (backends/hip/layout.py).
template <class Stage>
constexpr bool kOverSums = 8 * Stage::kBufferFloats < kPartialBytes;

template <bool kOwnSlice>
KOG_DEVICE void sync_staged() {
  if constexpr (kOwnSlice)
    sync_warp();
  else
    sync_consumers();
}

// v[0] + v[1] + ... in pairs, then pairs of pairs: a sum that waits for log2(N) additions.
template <int N>
KOG_DEVICE float sum_of(float (&v)[N]) {
#pragma unroll
  for (int by = 1; by < N; by *= 2)
#pragma unroll
    for (int i = 0; i + by < N; i += 2 * by) v[i] += v[i + by];
  return v[0];
}
// The sums of all parts of K, `stride` apart, as one.
template <class Stage>
KOG_DEVICE float sum_of_parts(const float* from, int stride) {
  float v[Stage::kParts];
#pragma unroll
  for (int i = 0; i < Stage::kParts; i++) v[i] = from[i * stride];
  return sum_of(v);
}

// Four values side by side times their gains. Returns `square` and the squares of the values, added one by one.
KOG_DEVICE float scale_four(const float (&x)[4], const float (&gain)[4], float square, float (&scaled)[4]) {
#pragma unroll
  for (int j = 0; j < 4; j++) {
    square = fused(x[j], x[j], square);
    scaled[j] = product(x[j], gain[j]);
  }
  return square;
}
// The same, and put(i, parts) of each pair, if they are staged.
template <class Put>
KOG_DEVICE float scale_four(const float (&x)[4], const float (&gain)[4], float square, bool staged, Put put) {
  float scaled[4];
  square = scale_four(x, gain, square, scaled);
  if (staged)
#pragma unroll
    for (int i = 0; i < 2; i++) put(i, HighLow(scaled[2 * i], scaled[2 * i + 1]));
  return square;
}
// A warp's sums of one value of each of N columns, which kSharing parts of it have each for themselves:
// thread t gets that of column t * N * kSharing / kWarpThreads. The same pairs are added as if all threads added all
// columns, but each thread goes on with half of them.
template <int kSharing, int N>
KOG_DEVICE float sum_columns(const Block& b, float (&v)[N]) {
#pragma unroll
  for (int mask = 16 / kSharing, left = N; mask; mask >>= 1) {
    bool upper = (b.in_warp & mask) != 0;
    if (left > 1) {
      left /= 2;
#pragma unroll
      for (int c = 0; c < left; c++) {
        float mine = KOG_EITHER(upper, v[left + c], v[c]), theirs = KOG_EITHER(upper, v[c], v[left + c]);
        v[c] = mine + shuffle_xor(theirs, mask);
      }
    } else {
      v[0] += shuffle_xor(v[0], mask);
    }
  }
  return v[0];
}

// 1 / rms(x) of the x staged last, of one column; after a barrier that all warps have passed since.
KOG_DEVICE float inverse_rms(const Block& b, int column = 0) {
  float v[kWarps];
#pragma unroll
  for (int i = 0; i < kWarps; i += 4) {
    float4 q = *reinterpret_cast<const float4*>(b.small->squares + column * kWarps + i);
    v[i] = q.x, v[i + 1] = q.y, v[i + 2] = q.z, v[i + 3] = q.w;
  }
  return rsqrt_of(sum_of(v) * (1.f / kHidden) + kNormEps);
}

}  // namespace kog
