// Attention of one new token: a block takes one key/value head and one split of the context.
//
//   before the wait   the first tile of keys and values, rotation and gains
//   the wait          one poll a warp, the last warps first, which have no tile in a short context:
//                     a query head each, then the new key, then the new value
//   walk              16 warps over the tiles (cache.h, softmax.h)
//   merge             over the warps in shared memory; the split's output and the logarithm of its
//                     sum become words
//
// The last split takes the new key and value, which travel in words like the queries, and appends
// them. Few splits are joined by those who read them (stage_attention), many in a step of their own
// (join.h).
#pragma once
#include <kog/matvec.h>
#include <kog/softmax.h>

namespace kog {

constexpr int kQueries = kHeads / kKvHeads;  // query heads of one key/value head
constexpr int kHeadGroups = (kQueries + kGroupHeads - 1) / kGroupHeads;
constexpr int kWarpsAGroup = kWarps / kHeadGroups;
// The results of half of the warps find room at once.
constexpr int kSlots = (kWarpsAGroup + 1) / 2;  // of a group of warps
constexpr int kQuads = (kHeadDim / 4 + 31) / 32;  // of a head, a lane: two pairs half a head apart
constexpr int kUnits = kKvHeads * kSplits;
constexpr int kResultStride = kRowDim + 4;
constexpr float kScoreScale = 1.4426950408889634f;  // scores in powers of two

// Positions of one step that a unit receives as words: a chunk of a prompt has several (columns/chunk.h).
constexpr int kNewRows = kChunk ? kColumns : 1;

// Scratch behind o_proj's inputs, which other warps stage while some still merge: queries as the
// tensor core takes them, the new key and value as rows of the cache, results of all warps.
struct AttentionScratch {
  uint4* queries;  // [head groups][kDimSteps][32 lanes]
  u16* key;        // [kNewRows][kRowDim]
  u16* value;
  float* results;  // [head group][slot][head][kResultStride]
  float2* tops;    // [head group][slot][head]: maximum and sum
  KOG_DEVICE explicit AttentionScratch(const Block& b) {
    queries = reinterpret_cast<uint4*>(b.scratch + kAttentionScratchAt);
    key = reinterpret_cast<u16*>(queries + kHeadGroups * kDimSteps * 32);
    value = key + kNewRows * kRowDim;
    results = reinterpret_cast<float*>(value + kNewRows * kRowDim);
    tops = reinterpret_cast<float2*>(results + kHeadGroups * kSlots * kGroupHeads * kResultStride);
  }
};

// Which part of the context a unit walks: [start, end), the newest position included.
struct Span {
  int head, split, used, start, end;
  bool newest;
};
KOG_DEVICE int first_position(int position, int window) {
  return window > 0 && position + 1 > window ? position + 1 - window : 0;
}
KOG_DEVICE int splits_in_use(int length) {
  int used = (length + kSplitLeast - 1) / kSplitLeast;
  if (used <= kMerged) return used;
  return length <= kMergedLength ? kMerged : kSplits;
}
// Whether the layer's splits are joined in a step of their own (join.h).
KOG_DEVICE bool has_join(const Block& b, int position) {
  int first = first_position(position, kWindows[b.layer]);
  return splits_in_use(position + 1 - first) > kMerged;
}
// n / used, by one of the few numbers that splits_in_use can be: known ones divide fast.
KOG_DEVICE u32 divided(u32 n, int used) {
  u32 quotient = n / kSplits;
#pragma unroll
  for (int i = 1; i <= kMerged; i++)
    if (used == i) quotient = n / static_cast<u32>(i);
  return quotient;
}
KOG_DEVICE Span span_of(int head, int split_of_head, int position, int window) {
  Span s;
  s.head = head;
  s.split = split_of_head;
  int first = first_position(position, window);
  int length = position + 1 - first;
  s.used = splits_in_use(length);
  // At most 2^8 splits of 2^23 positions: 32 bits hold the products.
  u32 parts = static_cast<u32>(length), split = static_cast<u32>(s.split);
  s.start = first + static_cast<int>(divided(split * parts, s.used));
  s.end = first + static_cast<int>(divided((split + 1) * parts, s.used));
  s.newest = s.split == s.used - 1;
  return s;
}
// The words of `attention` change with each step that joins, not with each layer. If layers without
// one wrote them to keep step, nobody would read that, and two blocks' stores to a word, a layer apart,
// could land in either order.
KOG_DEVICE u32 join_phase(const Block& b) {
  return phase_of(static_cast<int>(load_volatile(&b.small->joins)));
}
// At the end of a layer: the next one reads it behind a barrier.
KOG_DEVICE void count_join(const Block& b, int position) {
  if (b.thread == 0 && has_join(b, position))
    store_volatile(&b.small->joins, load_volatile(&b.small->joins) + 1);
}
// One split's outputs, and the logarithms of its sums. Those of four splits lie side by side, a sector
// a query: a reader gets four of them at once, and readers of other queries poll elsewhere.
static_assert(kMerged <= kBundle);
KOG_DEVICE u32* tops_of(const Block& b, int head, int query, int split) {
  int at = (words_row(b) * kKvHeads + head) * ((kSplits + kBundle - 1) / kBundle) + split / kBundle;
  return b.p.words + SplitTopsWords::kOffset + at * SplitTopsWords::kStride + query * kQueryTops +
         split % kBundle;
}
KOG_DEVICE u32* split_words(const Block& b, int head, int query, int split) {
  int at = (words_row(b) * kKvHeads + head) * kSplits + split;
  return b.p.words + SplitsWords::kOffset + at * SplitsWords::kStride + query * (kHeadDim / 2);
}

// What a head is rotated with: this lane's pairs of neighbors (2 i, 2 i + 1) and those half a head on.
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
    int i = n * 32 + b.in_warp;
    bool inside = i < kHeadDim / 4;
    r.cos[n] = inside ? angle[i] : float2{0, 0};
    r.sin[n] = inside ? angle[kHeadDim / 4 + i] : float2{0, 0};
    r.gain[n] = inside && kQkNorm ? gains[i] : float2{1, 1};
    r.gain_far[n] = inside && kQkNorm ? gains[kHeadDim / 4 + i] : float2{1, 1};
  }
  return r;
}

// (a * cos + z * sin) * scale, rounded alike in every kernel.
KOG_DEVICE float turn(float a, float cos, float z, float sin, float scale) {
  return product(fused(a, cos, product(z, sin)), scale);
}

// One head of q, k or v: neighbors and those half a head on, a lane.
struct Head {
  float2 near[kQuads], far[kQuads];

  KOG_DEVICE void receive(Block& b, int row, u32 phase) {
    const u32* words = b.p.words + QkvWords::kOffset + words_row(b) * QkvWords::kStride + row / 2;
    u32 w[2 * kQuads];
    poll_words(
        b, Step::kAttentionQkv, [&](int n) { return word_at(b, words, n); }, phase, w);
    unpack(w);
  }
  // Where word n of a lane is, of a head's that lie from `words` on; and the values of all of them.
  KOG_DEVICE static const u32* word_at(const Block& b, const u32* words, int n) {
    int i = n / 2 * 32 + b.in_warp;
    return i < kHeadDim / 4 ? words + i + n % 2 * (kHeadDim / 4) : nullptr;
  }
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
        if (n * 32 + b.in_warp < kHeadDim / 4) {
          square = fused(near[n].x, near[n].x, square);
          square = fused(near[n].y, near[n].y, square);
          square = fused(far[n].x, far[n].x, square);
          square = fused(far[n].y, far[n].y, square);
        }
#pragma unroll
      for (int mask = 16; mask; mask >>= 1) square += shuffle_xor(square, mask);
      scale *= rsqrt_of(square / kHeadDim + kNormEps);
    }
#pragma unroll
    for (int n = 0; n < kQuads; n++) {
      if constexpr (kQkNorm) {
        near[n] = {product(near[n].x, r.gain[n].x), product(near[n].y, r.gain[n].y)};
        far[n] = {product(far[n].x, r.gain_far[n].x), product(far[n].y, r.gain_far[n].y)};
      }
      float2 a = near[n], z = far[n];
      near[n] = {turn(a.x, r.cos[n].x, -z.x, r.sin[n].x, scale),
                 turn(a.y, r.cos[n].y, -z.y, r.sin[n].y, scale)};
      far[n] = {turn(z.x, r.cos[n].x, a.x, r.sin[n].x, scale),
                turn(z.y, r.cos[n].y, a.y, r.sin[n].y, scale)};
    }
  }
  // put(word, pair) for every word of a row of the cache; those behind the head are zero.
  template <class Put>
  KOG_DEVICE void each(const Block& b, Put put) const {
#pragma unroll
    for (int n = 0; n < kQuads; n++) {
      int i = n * 32 + b.in_warp;
      if (i >= kHeadDim / 4) continue;
      put(i, near[n]);
      put(kHeadDim / 4 + i, far[n]);
    }
    if (b.in_warp < (kRowDim - kHeadDim) / 2) put(kHeadDim / 2 + b.in_warp, float2{0, 0});
  }
};

// A rotated query in two 16-bit parts, where the tensor core's lanes find it.
KOG_DEVICE void put_query(const Block& b, const Head& head, int query, uint4* queries) {
  u32* to = reinterpret_cast<u32*>(queries + query / kGroupHeads * kDimSteps * 32 +
                                   query % kGroupHeads * 4);
  head.each(b, [&](int word, float2 v) {
    u32 high = round_pair<kF16>(v.x, v.y);
    u32 low = round_pair<kF16>(v.x - low_of(high), v.y - high_of(high));
    using Quarter = Keys::Quarter;
    int lane = word % Quarter::kStride / Quarter::kPiece,
        in_lane = word / Quarter::kStride * Quarter::kPiece + word % Quarter::kPiece;
    *reinterpret_cast<uint2*>(to + (in_lane / 2 * 32 + lane) * 4 + in_lane % 2 * 2) = {high, low};
  });
}
KOG_DEVICE float query_scale() { return kScoreScale * rsqrt_of(static_cast<float>(kHeadDim)); }
// Two 16-bit values, NaNs for infinities: a key's could weigh nothing, and nobody would know.
KOG_DEVICE u32 infinities_void(u32 both) {
  constexpr u32 kInfinite = kF16 ? 0x7c00u : 0x7f80u, kQuiet = kF16 ? 0x0200u : 0x0040u;
  if ((both & kInfinite) == kInfinite) both |= kQuiet;
  if ((both >> 16 & kInfinite) == kInfinite) both |= kQuiet << 16;
  return both;
}
// Two values of a key or value, rounded as everybody will read them.
KOG_DEVICE u32 cached_pair(float2 v) { return infinities_void(round_pair<kF16>(v.x, v.y)); }
// The new key or value.
KOG_DEVICE void append(const Block& b, const Head& head, u16* scratch, u16* cache) {
  head.each(b, [&](int word, float2 v) {
    u32 w = cached_pair(v);
    reinterpret_cast<u32*>(scratch)[word] = w;
    reinterpret_cast<u32*>(cache)[word] = w;
  });
}

// Which of the heads that a split waits for a warp receives first.
KOG_DEVICE int first_received(const Block& b) { return kWarps - 1 - b.warp; }

// What is not in the cache yet, where a step computes one position of a request: the newest.
struct Newest {
  // The end of what the cache holds of a span.
  KOG_DEVICE static int cached(const Span& span) { return span.newest ? span.end - 1 : span.end; }

  // What a warp's first head is rotated with.
  KOG_DEVICE static Rotation rotation(const Block& b, const Span&, int position) {
    return load_rotation(b, position, first_received(b) == kQueries);
  }

  // Heads of q by warps, the new k and v by two more where this block takes the newest position.
  KOG_DEVICE static void receive(Block& b, const Span& span, int position, u32 phase,
                                 const AttentionScratch& scratch, const Rotation& rotation) {
    u16* cache = cache_of(b, span.head) + static_cast<u64>(position) * kRowDim;
    for (int h = first_received(b); h < kQueries + 2; h += kWarps) {
      if (h >= kQueries && !span.newest) continue;
      bool is_key = h == kQueries;
      int row =
          h < kQueries ? span.head * kQueries + h : kHeads + (h - kQueries) * kKvHeads + span.head;
      Head head;
      head.receive(b, row * kHeadDim, phase);
      if (h > kQueries) {
        append(b, head, scratch.value, cache + static_cast<u64>(kMaxContext) * kRowDim);
        continue;
      }
      // Rotations were asked for before the wait, for each warp's first head.
      Rotation r = h < kWarps ? rotation : load_rotation(b, position, is_key);
      head.rotate(b, r, is_key ? 1.f : query_scale());
      if (is_key)
        append(b, head, scratch.key, cache);
      else
        put_query(b, head, h, scratch.queries);
    }
  }

  // The tile at `at` has it as well, if it is there.
  KOG_DEVICE static void patch(const Block& b, const Span& span, int position, int at,
                               const AttentionScratch& scratch, Keys& key, Values& value) {
    int newest = span.newest ? position - at : kTileRows;
    if (newest >= kTileRows) return;
    key.patch(b, newest, scratch.key);
    value.patch(b, newest, scratch.value);
  }
};

// One warp's place among the results: where its lane keeps the outputs of its head i, piece by piece.
struct Slot {
  static constexpr int kPiece = Values::Eighth::kPiece;  // words whose dimensions lie side by side
  float* results;
  float2* tops;

  KOG_DEVICE Slot(const Block& b, const AttentionScratch& scratch) {
    int slot = (b.warp / kWarpsAGroup * kSlots + b.warp % kWarpsAGroup % kSlots) * kGroupHeads;
    results = scratch.results + slot * kResultStride;
    tops = scratch.tops + slot;
  }
  // each(where, t): the kPiece words from t on of head i, which lie there.
  template <class Each>
  KOG_DEVICE void each_piece(const Block& b, int i, Each each) const {
    int head = b.in_warp % 4 * 2 + i;
    if (head >= kGroupHeads) return;
#pragma unroll
    for (int t = 0; t < kDimSteps; t += kPiece)
      each(results + head * kResultStride + Values::dimension(b, t), t);
  }

  KOG_DEVICE void put(const Block& b, const Softmax& s) const {
    float total = s.total();
#pragma unroll
    for (int i = 0; i < 2; i++)
      each_piece(b, i, [&](float* at, int t) {
        if constexpr (kPiece == 4) {  // wide stores: lanes of other heads meet in the same banks
          float4* wide = reinterpret_cast<float4*>(at);
          wide[0] = {s.out[t][i], s.out[t][i + 2], s.out[t + 1][i], s.out[t + 1][i + 2]};
          wide[1] = {s.out[t + 2][i], s.out[t + 2][i + 2], s.out[t + 3][i], s.out[t + 3][i + 2]};
        } else {
#pragma unroll
          for (int n = 0; n < kPiece; n++)
            *reinterpret_cast<float2*>(at + 2 * n) = {s.out[t + n][i], s.out[t + n][i + 2]};
        }
      });
    if (b.in_warp % 4 == 0 && b.in_warp / 4 < kGroupHeads)
      tops[b.in_warp / 4] = {s.top, total};
  }

  // Add what another warp put there to `s`.
  KOG_DEVICE void absorb(const Block& b, Softmax& s) const {
    int head = b.in_warp / 4;
    float2 theirs = tops[head < kGroupHeads ? head : 0];
    float top = theirs.x > s.top ? theirs.x : s.top, share = exp2_fast(theirs.x - top);
    s.rescale(b, exp2_fast(s.top - top));
    s.top = top;
    if (b.in_warp % 4 == 0) s.sum = fused(share, theirs.y, s.sum);  // a sum of all lanes of the head
    float shares[2] = {shuffle(share, b.in_warp % 4 * 8), shuffle(share, b.in_warp % 4 * 8 + 4)};
#pragma unroll
    for (int i = 0; i < 2; i++)
      each_piece(b, i, [&](const float* at, int t) {
#pragma unroll
        for (int n = 0; n < kPiece; n++) {
          s.out[t + n][i] = fused(shares[i], at[2 * n], s.out[t + n][i]);
          s.out[t + n][i + 2] = fused(shares[i], at[2 * n + 1], s.out[t + n][i + 2]);
        }
      });
    sync_warp();  // all lanes have read
  }
};

// The results of `walked` warps of each group to shared memory, for merge_warps: those that find no room
// are added to others first.
KOG_DEVICE void put_results(const Block& b, bool walks, int walked, Softmax& softmax,
                            const AttentionScratch& scratch) {
  int walker = b.warp % kWarpsAGroup;
  Slot slot(b, scratch);
  if (walked > kSlots) {
    if (walks && walker >= kSlots) slot.put(b, softmax);
    sync_consumers();
    if (walker + kSlots < walked && walks) slot.absorb(b, softmax);
  }
  if (walks && walker < kSlots) slot.put(b, softmax);
  sync_consumers();
}

// Lanes that share a pair of values in merge_warps: all threads have one, if there are pairs enough.
constexpr int kSharers = kQueries * kHeadDim / 2 * 4 <= 32 * kWarps   ? 4
                         : kQueries * kHeadDim / 2 * 2 <= 32 * kWarps ? 2
                                                                      : 1;

// Merge the warps' results in order: put(head, pair, values, top) for each pair of a head's outputs, by
// one lane.
template <class Put>
KOG_DEVICE void merge_warps(const Block& b, int walked, const AttentionScratch& scratch, Put put) {
  constexpr int kPairs = kQueries * kHeadDim / 2, kAtOnce = 32 / kSharers;  // of a warp
  constexpr int kEach = (kSlots + kSharers - 1) / kSharers;  // results of one lane
  walked = walked < kSlots ? walked : kSlots;
  for (int first = b.warp * kAtOnce; first < kPairs; first += kAtOnce * kWarps) {
    int i = first + b.in_warp / kSharers, head = i / (kHeadDim / 2), pair = i % (kHeadDim / 2);
    bool inside = i < kPairs;
    int at = head / kGroupHeads * kSlots * kGroupHeads + head % kGroupHeads;
    float top = kNoScore, sum = 0;
    float2 out = {0, 0};
#pragma unroll
    for (int n = 0; n < kEach; n++) {
      int w = n * kSharers + b.in_warp % kSharers;
      if (!inside || w >= walked) continue;
      float t = scratch.tops[at + w * kGroupHeads].x;
      top = t > top ? t : top;
    }
#pragma unroll
    for (int mask = 1; mask < kSharers; mask <<= 1) {
      float other = shuffle_xor(top, mask);
      top = other > top ? other : top;
    }
#pragma unroll
    for (int n = 0; n < kEach; n++) {
      int w = n * kSharers + b.in_warp % kSharers;
      if (!inside || w >= walked) continue;
      float2 t = scratch.tops[at + w * kGroupHeads];
      float2 v = *reinterpret_cast<const float2*>(
          scratch.results + (at + w * kGroupHeads) * kResultStride + 2 * pair);
      float share = exp2_fast(t.x - top);
      sum += share * t.y;
      out.x += share * v.x;
      out.y += share * v.y;
    }
#pragma unroll
    for (int mask = 1; mask < kSharers; mask <<= 1) {
      sum += shuffle_xor(sum, mask);
      out.x += shuffle_xor(out.x, mask);
      out.y += shuffle_xor(out.y, mask);
    }
    if (!inside || b.in_warp % kSharers != 0) continue;
    put(head, pair, float2{divide(out.x, sum), divide(out.y, sum)}, top + log2_fast(sum));
  }
}

// A split's output and the logarithms of its sums as words.
KOG_DEVICE void publish_split(const Block& b, const Span& span, int query, int pair, float2 v,
                              float top, u32 phase) {
  store_relaxed(split_words(b, span.head, query, span.split) + pair, pack_pair(v.x, v.y, phase));
  if (pair == 0)
    store_relaxed(tops_of(b, span.head, query, span.split), pack_f32(top, phase));
}

// A key/value head over one span of the context; `put` gets what merge_warps finds. `fresh`: what is
// not in the cache yet (Newest).
template <class Fresh, class Put>
KOG_DEVICE void walk_span(Block& b, const Span& span, int position, u32 phase, Fresh fresh,
                          Put put) {
  AttentionScratch scratch(b);
  const u16* keys = cache_of(b, span.head);
  const u16* values = keys + static_cast<u64>(kMaxContext) * kRowDim;
  int head_group = b.warp / kWarpsAGroup, walker = b.warp % kWarpsAGroup;
  int tiles = (span.end - span.start + kTileRows - 1) / kTileRows;
  int walked = tiles < kWarpsAGroup ? tiles : kWarpsAGroup;
  bool walks = head_group < kHeadGroups && walker < walked;
  int cached = walks ? fresh.cached(span) : 0;
  int at = span.start + walker * kTileRows;
  // Nothing here depends on other blocks: on its way while we wait for the queries.
  Keys key;
  Values value;
  key.load(b, keys, at, cached);
  value.load(b, values, at, cached);
  Rotation rotation = fresh.rotation(b, span, position);
  fresh.receive(b, span, position, phase, scratch, rotation);
  stamp(b, Point::kAttentionQkv);
  sync_consumers();

  Softmax softmax;
  if (walks) {
    const uint4* queries = scratch.queries + head_group * kDimSteps * 32 + b.in_warp;
    for (; at < span.end; at += kWarpsAGroup * kTileRows) {
      int next = at + kWarpsAGroup * kTileRows;
      fresh.patch(b, span, position, at, scratch, key, value);
      float p[kTileRows / 8][2];
      softmax.weigh(b, queries, key, span.end - at, p);
      key.load(b, keys, next, cached);  // on its way while the values are added
      softmax.add(value, p);
      value.load(b, values, next, cached);
    }
  }
  put_results(b, walks, walked, softmax, scratch);
  merge_warps(b, walked, scratch, put);
  stamp(b, Point::kAttentionSplit);
}

// One unit: a key/value head over one split. Splits not in use publish too, so that all phases keep
// step.
KOG_DEVICE void walk_split(Block& b, int unit, int position, int window, u32 phase) {
  Span span = span_of(unit / kSplits, unit % kSplits, position, window);
  if (span.split >= span.used) {
    u32* words = split_words(b, span.head, 0, span.split);
    for (int i = b.thread; i < kQueries * kHeadDim / 2; i += 32 * kWarps)
      store_relaxed(words + i, phase);
    if (b.thread < kQueries)
      store_relaxed(tops_of(b, span.head, b.thread, span.split), phase);
    return;
  }
  walk_span(b, span, position, phase, Newest{}, [&](int query, int pair, float2 v, float top) {
    publish_split(b, span, query, pair, v, top, phase);
  });
}

// Wait for the attention's output, joining its splits if they are few, and stage it for Stage.
template <class Stage>
KOG_DEVICE void stage_attention(Block& b, Step step, int position, u32 phase) {
  int length = position + 1 - first_position(position, kWindows[b.layer]);
  int used = splits_in_use(length);
  if (used > kMerged)
    return stage_words<Stage>(
        b, step, b.p.words + AttentionWords::kOffset + b.lane * AttentionWords::kStride,
        join_phase(b));
  // Four values a lane: two words of each split, and the logarithms of all.
  using In = Inputs<Stage, 4>;
  In in(b);
  uint2 w[In::kCount][kMerged];
  uint4 logarithms[In::kCount];
  u32 late[In::kCount][kMerged + 1], in_use[kMerged];
#pragma unroll
  for (int i = 0; i < In::kCount; i++) {
    u32 there = in.value(i) < Stage::kCols ? 1 : 0;
    logarithms[i] = uint4{0, 0, 0, 0};
    late[i][kMerged] = there;
#pragma unroll
    for (int s = 0; s < kMerged; s++) {
      w[i][s] = uint2{0, 0};
      late[i][s] = in_use[s] = s < used ? 1 : 0;
      late[i][s] &= there;
    }
  }
  poll_until(
      b, step, [&] { return place_of(b, split_words(b, in.value(0) / kHeadDim / kQueries, 0, 0)); },
      phase, [&] {
        u32 bad = 0;
#pragma unroll
        for (int i = 0; i < In::kCount; i++) {
          int value = in.value(i), query_head = value / kHeadDim;
          int head = query_head / kQueries, query = query_head % kQueries;
          const u32* from = split_words(b, head, query, 0) + value % kHeadDim / 2;
#pragma unroll
          for (int s = 0; s < kMerged; s++, from += SplitsWords::kStride)
            if (late[i][s] != 0) w[i][s] = load_relaxed2(from);
          if (late[i][kMerged] != 0) logarithms[i] = load_relaxed4(tops_of(b, head, query, 0));
        }
#pragma unroll
        for (int i = 0; i < In::kCount; i++) {
          u32 there = in.value(i) < Stage::kCols ? 1 : 0, late_tops = 0;
#pragma unroll
          for (int s = 0; s < kMerged; s++) {
            late[i][s] = ((w[i][s].x ^ phase) | (w[i][s].y ^ phase)) & in_use[s] & there;
            late_tops |= (word_of(logarithms[i], s) ^ phase) & in_use[s];
            bad |= late[i][s];
          }
          late[i][kMerged] = late_tops & there;
          bad |= late[i][kMerged];
        }
        return bad;
      });
#pragma unroll
  for (int i = 0; i < In::kCount; i++) {
    float top[kMerged];
#pragma unroll
    for (int s = 0; s < kMerged; s++) top[s] = unpack_f32(word_of(logarithms[i], s));
    float best = top[0], total = 0, sum[4] = {};
#pragma unroll
    for (int s = 1; s < kMerged; s++)
      if (s < used) best = top[s] > best ? top[s] : best;
#pragma unroll
    for (int s = 0; s < kMerged; s++) {
      if (s >= used) continue;
      float share = exp2_fast(top[s] - best);
      total += share;
#pragma unroll
      for (int j = 0; j < 2; j++) {
        u32 both = operand_of(j == 0 ? w[i][s].x : w[i][s].y);
        sum[2 * j] += share * low_of(both);
        sum[2 * j + 1] += share * high_of(both);
      }
    }
    float scale = divide(1.f, total);
    bool inside = in.value(i) < Stage::kCols;
    u32 joined[2];
#pragma unroll
    for (int j = 0; j < 2; j++)
      joined[j] = inside ? round_pair<kF16>(sum[2 * j] * scale, sum[2 * j + 1] * scale) : 0;
    in.put(b, i, joined);
  }
  sync_staged<In::kOwnSlice>();
}

}  // namespace kog
