// The heads of q, k and v that a KV task waits for: received by a warp each, normalized and
// rotated; queries go where Scores finds them, the new key and value into the cache.
#pragma once
#include <kog/kv_task.h>
#include <kog/scores.h>

namespace kog {

// Of a head, a thread: two pairs half a head apart.
constexpr int kQuads = (kHeadDim / 4 + kWarpThreads - 1) / kWarpThreads;
constexpr float kScoreScale = 1.4426950408889634f;  // scores in powers of two

// What a head is rotated with: this thread's pairs of neighbors (2 i, 2 i + 1) and those half a head on.
struct Rotation {
  float2 cos[kQuads], sin[kQuads], gain[kQuads], gain_far[kQuads];
};
KOG_DEVICE Rotation load_rotation(const Block& b, int position, bool is_key) {
  Rotation r;
  const float2* angle =
      reinterpret_cast<const float2*>(b.p.rope + static_cast<u64>(position) * kHeadDim);
  const float2* gains =
      reinterpret_cast<const float2*>(b.p.qk_gains + (2 * b.layer + is_key) * kHeadDim);
#pragma unroll
  for (int n = 0; n < kQuads; n++) {
    int i = n * kWarpThreads + b.in_warp;
    bool inside = i < kHeadDim / 4;
    r.cos[n] = inside ? angle[i] : float2{0, 0};
    r.sin[n] = inside ? angle[kHeadDim / 4 + i] : float2{0, 0};
    r.gain[n] = inside && kQkNorm ? gains[i] : float2{1, 1};
    r.gain_far[n] = inside && kQkNorm ? gains[kHeadDim / 4 + i] : float2{1, 1};
  }
  return r;
}

// (a * cos + z * sin) * scale, rounded alike in every kernel.
KOG_DEVICE float rotate_rope(float a, float cos, float z, float sin, float scale) {
  return product(fused(a, cos, product(z, sin)), scale);
}

// One head of q, k or v: neighbors and those half a head on, a thread.
struct Head {
  float2 near[kQuads], far[kQuads];

  KOG_DEVICE void unpack(const u32* w) {
#pragma unroll
    for (int n = 0; n < kQuads; n++) {
      near[n] = {first_of(w[2 * n]), second_of(w[2 * n])};
      far[n] = {first_of(w[2 * n + 1]), second_of(w[2 * n + 1])};
    }
  }
  // Normalize if the model asks, rotate, scale.
  KOG_DEVICE void rotate(const Block& b, const Rotation& r, float scale) {
    if constexpr (kQkNorm) {
      float square = 0;
#pragma unroll
      for (int n = 0; n < kQuads; n++)
        if (n * kWarpThreads + b.in_warp < kHeadDim / 4) {
          square = fused(near[n].x, near[n].x, square);
          square = fused(near[n].y, near[n].y, square);
          square = fused(far[n].x, far[n].x, square);
          square = fused(far[n].y, far[n].y, square);
        }
      scale *= rsqrt_of(sum_of_threads(square) / kHeadDim + kNormEps);
    }
#pragma unroll
    for (int n = 0; n < kQuads; n++) {
      if constexpr (kQkNorm) {
        near[n] = {product(near[n].x, r.gain[n].x), product(near[n].y, r.gain[n].y)};
        far[n] = {product(far[n].x, r.gain_far[n].x), product(far[n].y, r.gain_far[n].y)};
      }
      float2 a = near[n], z = far[n];
      near[n] = {rotate_rope(a.x, r.cos[n].x, -z.x, r.sin[n].x, scale),
                 rotate_rope(a.y, r.cos[n].y, -z.y, r.sin[n].y, scale)};
      far[n] = {rotate_rope(z.x, r.cos[n].x, a.x, r.sin[n].x, scale),
                rotate_rope(z.y, r.cos[n].y, a.y, r.sin[n].y, scale)};
    }
  }
  // put(word, pair) for every word of a row of the cache; those behind the head are zero.
  template <class Put>
  KOG_DEVICE void each(const Block& b, Put put) const {
#pragma unroll
    for (int n = 0; n < kQuads; n++) {
      int i = n * kWarpThreads + b.in_warp;
      if (i >= kHeadDim / 4) continue;
      put(i, near[n]);
      put(kHeadDim / 4 + i, far[n]);
    }
    if (b.in_warp < (kRowDim - kHeadDim) / 2) put(kHeadDim / 2 + b.in_warp, float2{0, 0});
  }
};

// A rotated query, where Scores finds it.
KOG_DEVICE void put_query(const Block& b, const Head& head, int query, uint4* queries) {
  u32* to = reinterpret_cast<u32*>(queries + query / kGroupHeads * kDimSteps * kWarpThreads +
                                   query % kGroupHeads * 4);
  head.each(b, [&](int word, float2 v) {
    using Quarter = Keys::Share;
    int thread = word % Quarter::kStride / Quarter::kPiece,
        in_thread = word / Quarter::kStride * Quarter::kPiece + word % Quarter::kPiece;
    *reinterpret_cast<uint2*>(to + (in_thread / 2 * kWarpThreads + thread) * 4 + in_thread % 2 * 2) = query_pair(v);
  });
}
KOG_DEVICE float query_scale() { return kScoreScale * rsqrt_of(static_cast<float>(kHeadDim)); }
// Two 16-bit values, NaNs for infinities: a key's could weigh nothing, and nobody would know.
KOG_DEVICE u32 inf_to_nan(u32 both) {
  constexpr u32 kInfinite = kF16 ? 0x7c00u : 0x7f80u, kQuiet = kF16 ? 0x0200u : 0x0040u;
  if ((both & kInfinite) == kInfinite) both |= kQuiet;
  if ((both >> 16 & kInfinite) == kInfinite) both |= kQuiet << 16;
  return both;
}
// Two values of a key or value, rounded as everybody will read them.
KOG_DEVICE u32 cached_pair(float2 v) { return inf_to_nan(round_pair<kF16>(v.x, v.y)); }
// The new key or value to scratch and, by who `keeps` it, to the cache.
KOG_DEVICE void append(const Block& b, const Head& head, u16* scratch, u16* cache, bool keeps) {
  head.each(b, [&](int word, float2 v) {
    u32 w = cached_pair(v);
    reinterpret_cast<u32*>(scratch)[word] = w;
    if (keeps) store_cache(reinterpret_cast<u32*>(cache) + word, w);
  });
}

// Which of the heads that a split waits for a warp receives first.
KOG_DEVICE int first_received(const Block& b) { return kWarps - 1 - b.warp; }

// A head of a column's words and, if `paired`, the one that lies kKvHeads behind it: the value of a key. Both in
// one wait.
KOG_DEVICE void receive_pair(Block& b, int column, int head, bool paired, u32 phase, Head& first, Head& second) {
  constexpr int kOne = 2 * kQuads, kBoth = kChunk ? 2 : 1;  // words of a head, a thread; heads
  const u32* words = lane_words<QkvWords>(b) + column * QkvWords::kStride + head * (kHeadDim / 2);
  auto quad = [&](int n) { return n % kOne / 2 * kWarpThreads + b.in_warp; };
  u32 w[kBoth * kOne];
  poll_words(
      b, Step::kAttentionQkv,
      [&](int n) {
        return words + n / kOne * kKvHeads * (kHeadDim / 2) + quad(n) + n % 2 * (kHeadDim / 4);
      },
      [&](int n) { return (n < kOne || paired) && quad(n) < kHeadDim / 4; }, phase, w);
  first.unpack(w);
  if constexpr (kChunk) second.unpack(w + kOne);
}

// Positions that the cache does not hold yet, the newest of a request or, in a chunk of a prompt, those from its
// first column on: their keys and values come as words. A KV task receives them with so many of its head's
// queries, from one on.
struct NewRows {
  int first;  // the position of a chunk's first column
  int first_query = 0, queries = kQueries;

  // How many of a span there are, at its end, and where they begin: the cache holds what is ahead of them.
  KOG_DEVICE int count(const Span& span) const {
    if constexpr (!kChunk) return span.newest;
    int start = span.start > first ? span.start : first;
    return span.end > start ? span.end - start : 0;
  }
  KOG_DEVICE int start(const Span& span) const { return span.end - count(span); }

  // What a warp receives, by its number: a query, then the key and value of a new position. Of one position they
  // have a warp each.
  KOG_DEVICE int position_of_item(const Span& span, int position, int item) const {
    int row = start(span) + item - queries;
    // A warp without one loads a rotation that exists, and that nobody takes.
    return !kChunk || item < queries || row > position ? position : row;
  }
  KOG_DEVICE bool is_key(int item) const { return kChunk ? item >= queries : item == queries; }
  KOG_DEVICE Rotation rotation(const Block& b, const Span& span, int position, int item) const {
    return load_rotation(b, position_of_item(span, position, item), is_key(item));
  }

  // By all warps, behind a barrier. What a warp's first head is rotated with is asked for before the wait.
  KOG_DEVICE void receive(Block& b, const Span& span, int position, u32 phase) const {
    AttentionScratch scratch(b);
    Rotation r = rotation(b, span, position, first_received(b));
    for (int item = first_received(b); item < queries + (kChunk ? count(span) : 2); item += kWarps) {
      bool is_query = item < queries, is_value = !kChunk && item > queries;
      if (!kChunk && !is_query && !span.newest) continue;
      int at = position_of_item(span, position, item);
      if (item >= kWarps) r = rotation(b, span, position, item);
      Head head, value;
      receive_pair(b, is_query || !kChunk ? b.column : at - first,
                   is_query ? span.head * kQueries + first_query + item
                            : kHeads + (kChunk ? 0 : item - queries) * kKvHeads + span.head,
                   kChunk && !is_query, phase, head, value);
      if (!is_value) head.rotate(b, r, is_query ? query_scale() : 1.f);
      if (is_query) {
        put_query(b, head, item, scratch.queries);
        continue;
      }
      // Each position is appended once: not by columns behind it, nor by those that repeat it.
      bool own = first_query == 0 && (!kChunk || (at == position && at - first == b.column));
      int row = kChunk ? (item - queries) * kRowDim : 0;
      u16* cache = cache_of(b, span.head) + static_cast<u64>(at) * kRowDim;
      if (!is_value) append(b, head, scratch.key + row, cache, own);
      cache += static_cast<u32>(b.p.plane);
      if (kChunk || is_value) append(b, kChunk ? value : head, scratch.value + row, cache, own);
    }
    stamp(b, Point::kAttentionQkv);
    sync_consumers();
  }
};

}  // namespace kog
