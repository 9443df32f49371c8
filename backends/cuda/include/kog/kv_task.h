// A KV task, which one block works on: a key/value head and one split of the context. Which
// part of the context that is, where its words lie, and what it keeps in shared memory.
#pragma once
#include <kog/cache.h>

namespace kog {

constexpr int kQueries = kHeads / kKvHeads;  // query heads of one key/value head
constexpr int kWarpsAGroup = kWarps / kHeadGroups;
// Positions that the warps of a group take at once, a tile each: a round of a span.
constexpr int kRoundRows = kWarpsAGroup * kTileRows;
constexpr int kKvTasks = kKvHeads * kSplits;

// Scratch behind o_proj's inputs, which other warps stage while some still merge: queries as
// Scores takes them, the new keys and values as rows of the cache, results of all warps. The
// results may run on over the partial sums: those of qkv_proj have been read when the first result is
// put, and nobody puts o_proj's before the last one was read (leave_results).
template <class T>
KOG_DEVICE T* scratch_at(const Block& b, int place) {
  return reinterpret_cast<T*>(b.scratch + kAttentionScratchAt + place);
}
struct AttentionScratch {
  uint4* queries;  // [head groups][kDimSteps][32 threads]
  u16 *key, *value;  // [new rows][kRowDim]: those of one step, several in a chunk of a prompt
  float* results;  // [head group][warp result][head][kResultStride]
  float2* tops;    // [head group][warp result][head]: maximum and sum

  KOG_DEVICE explicit AttentionScratch(const Block& b)
      : queries(scratch_at<uint4>(b, ScratchPlaces::kQueries)),
        key(scratch_at<u16>(b, ScratchPlaces::kKey)),
        value(scratch_at<u16>(b, ScratchPlaces::kValue)),
        results(scratch_at<float>(b, ScratchPlaces::kResults)),
        tops(scratch_at<float2>(b, ScratchPlaces::kTops)) {}
};

// By whole blocks that attend, behind their last look at results or joins.
KOG_DEVICE void leave_results() {
  if constexpr (kResultsOverSums) sync_consumers();
}

// Which part of the context a KV task walks: [start, end), the newest position included.
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
// Tiles of positions of a span.
KOG_DEVICE int tiles_of(const Span& span) {
  return (span.end - span.start + kTileRows - 1) / kTileRows;
}
// The words of `attention` change with each step that joins, not with each layer: layers without a join would
// write words that nobody reads, and such may land in either order (docs/SYNC.md).
KOG_DEVICE u32 join_phase(const Block& b) {
  return phase_of(static_cast<int>(load_volatile(&b.small->joins)));
}
// At the end of a layer: the next one reads it behind a barrier.
KOG_DEVICE void count_join(const Block& b, int position) {
  if (b.thread == 0 && has_join(b, position))
    store_volatile(&b.small->joins, load_volatile(&b.small->joins) + 1);
}
// One split's outputs, and the logarithms of its sums. Those of four splits lie side by side, a line of the
// L2 for each query: a reader gets four of them at once, and polls of one line wait for each other.
static_assert(kMerged <= kBundle);
KOG_DEVICE u32* tops_of(const Block& b, int head, int query, int split) {
  int at = (b.column * kKvHeads + head) * ((kSplits + kBundle - 1) / kBundle) + split / kBundle;
  return lane_words<SplitTopsWords>(b) + at * SplitTopsWords::kStride + query * kQueryTops + split % kBundle;
}
KOG_DEVICE u32* split_words(const Block& b, int head, int query, int split) {
  int at = (b.column * kKvHeads + head) * kSplits + split;
  return lane_words<SplitsWords>(b) + at * SplitsWords::kStride + query * (kHeadDim / 2);
}

// A split's output and the logarithms of its sums as words.
KOG_DEVICE void publish_split(const Block& b, const Span& span, int query, int pair, float2 v,
                              float top, u32 phase) {
  store_relaxed(split_words(b, span.head, query, span.split) + pair, pack_pair(v.x, v.y, phase));
  if (pair == 0)
    store_relaxed(tops_of(b, span.head, query, span.split), pack_f32(top, phase));
}

// How the outputs of a head's splits, few of them, are joined: by the shares of their sums, in order.
struct Join {
  float share[kMerged], scale;
  int used;

  // Of splits [0, used), whose sums have these logarithms.
  KOG_DEVICE Join(const float (&top)[kMerged], int splits) : used(splits) {
    float best = top[0], total = 0;
#pragma unroll
    for (int s = 1; s < kMerged; s++)
      if (s < used) best = top[s] > best ? top[s] : best;
#pragma unroll
    for (int s = 0; s < kMerged; s++) {
      share[s] = 0;  // on every path: else that of the last join would be kept
      if (s >= used) continue;
      share[s] = exp2_fast(top[s] - best);
      total += share[s];
    }
    scale = divide(1.f, total);
  }
  // An operand of each split to that of the head, as its readers take it.
  KOG_DEVICE u32 of(const u32 (&both)[kMerged]) const {
    float first = 0, second = 0;
#pragma unroll
    for (int s = 0; s < kMerged; s++) {
      if (s >= used) continue;
      first = fused(share[s], low_of(both[s]), first);
      second = fused(share[s], high_of(both[s]), second);
    }
    return sent_operand(round_pair<kF16>(first * scale, second * scale));
  }
};

}  // namespace kog
