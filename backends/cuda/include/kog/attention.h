// Attention of one new token: a block takes one key/value head and one split of the context.
//
//   before the wait   the first tile of keys and values, rotation and gains
//   the wait          one poll a warp, the last warps first, which have no tile in a short context:
//                     a query head each, then the new key, then the new value (heads.h)
//   walk              16 warps over the tiles (cache.h, softmax.h); in a long context each tile goes
//                     to the L2 a round before a warp loads it; in a kernel of deep positions (deep.h) all come
//                     through the ring
//   merge             over the warps in shared memory (merge.h); the split's output and the
//                     logarithm of its sum become words
//
// The last split takes the new key and value, which travel in words like the queries, and appends
// them. Few splits are joined by those who read them (stage_attention), many in a step of their own
// (join.h).
#pragma once
#include <kog/deep.h>
#include <kog/heads.h>
#include <kog/inputs.h>
#include <kog/merge.h>

namespace kog {

constexpr int kShortRounds = 2;  // of a span that leaves the memory time for weights, at most

// Bring a warp's tile into the L2 if all of it is in the cache before `end`: a round before its
// loads, which alone keep too little in flight for all of the memory's bandwidth.
KOG_DEVICE void fetch_tile(const Block& b, const Cached& from, int at, int end) {
  if (b.in_warp != 0 || b.warp >= kWarpsAGroup || at + kTileRows > end) return;
  constexpr u32 kBytes = kTileRows * kRowDim * 2;
  fetch_to_l2(from.keys + static_cast<u64>(at) * kRowDim, kBytes);
  fetch_to_l2(from.values + static_cast<u64>(at) * kRowDim, kBytes);
}

// A tile of keys and values, a warp's.
struct Tile {
  Keys key;
  Values value;

  KOG_DEVICE void load(const Block& b, const Cached& from, int at, int end) {
    key.load(b, from.keys, at, end);
    value.load(b, from.values, at, end);
  }
  // The one at `at` of a span up to `end`, whose new rows (heads.h) begin at `start`, has those that lie in it.
  KOG_DEVICE void patch(const Block& b, int start, int end, int at) {
    int first = start < end ? start - at : kTileRows;  // of the tile
    if (kChunk ? at + kTileRows <= start : first >= kTileRows) return;
    auto word_of = [&](int row) {
      if constexpr (!kChunk) return row == first ? 0 : -1;
      return at + row < end ? (at + row - start) * (kRowDim / 2) : -1;
    };
    AttentionScratch scratch(b);
    key.patch(b, scratch.key, word_of);
    value.patch(b, scratch.value, word_of);
  }
};
// What a warp walks of a span: from its first tile on, up to the span's end; and the end of what the cache
// holds of it.
struct Tiles {
  int at, end, cached;
};

// A warp's tiles, of which the first is in `tile`, of a KV task whose new rows begin at `start`. kLong: as far as
// they go, those to come through the L2.
template <bool kLong>
KOG_DEVICE void walk_tiles(const Block& b, int start, const Tiles& tiles, const Cached& cache, int head_group,
                           Tile& tile, Softmax& softmax) {
  if constexpr (!kChunk) start = tiles.cached;  // a register less
  const uint4* queries = AttentionScratch(b).queries + head_group * kDimSteps * kWarpThreads + b.in_warp;
  for (int at = tiles.at; at < tiles.end; at += kRoundRows) {
    int next = at + kRoundRows;
    bool again = kLong || next < tiles.end;
    tile.patch(b, start, tiles.end, at);
    float p[kTileRows / 8][2];
    softmax.weigh(b, queries, tile.key, tiles.end - at, p);
    if constexpr (kLong) fetch_tile(b, cache, next + kRoundRows, tiles.cached);
    if (again) tile.key.load(b, cache.keys, next, tiles.cached);  // on its way while the values are added
    add_values(b, tile.value, p, softmax.out);
    if (again) tile.value.load(b, cache.values, next, tiles.cached);
  }
}

// A key/value head over one span of the context, to the words of the span's split.
KOG_DEVICE void walk_span(Block& b, Ring& ring, const Span& span, int position, u32 phase, const NewRows& rows) {
  if constexpr (kDeep) return walk_deep_span(b, ring, span, position, phase, rows);
  Cached cache(b, span.head);
  int head_group = b.warp / kWarpsAGroup, walker = b.warp % kWarpsAGroup;
  int all = tiles_of(span), walked = all < kWarpsAGroup ? all : kWarpsAGroup;
  bool walks = head_group < kHeadGroups && walker < walked;
  Tiles tiles = {span.start + walker * kTileRows, span.end, walks ? rows.start(span) : 0};
  bool first_of_long = b.thread == 0 && all > kShortRounds * kWarpsAGroup;
  if (first_of_long) store_volatile(&b.small->walks, 1);
  // Nothing here depends on other blocks: on its way while we wait for the queries.
  Tile tile;
  tile.load(b, cache, tiles.at, tiles.cached);
  fetch_tile(b, cache, tiles.at + kRoundRows, tiles.cached);
  rows.receive(b, span, position, phase);

  Softmax softmax;
  if (walks) walk_tiles<true>(b, rows.start(span), tiles, cache, head_group, tile, softmax);
  if (first_of_long) store_volatile(&b.small->walks, 0);
  AttentionScratch scratch(b);
  put_results(b, walks, walked, softmax, scratch);
  merge_warps(b, walked, scratch, [&](int query, int pair, float2 v, float log) {
    publish_split(b, span, query, pair, v, log, phase);
  });
  stamp(b, Point::kAttentionSplit);
  leave_results();
}

// One KV task: a key/value head over one split. Splits not in use publish too, so that all phases keep
// step.
KOG_DEVICE void walk_split(Block& b, Ring& ring, int kv_task, int position, int window, u32 phase) {
  Span span = span_of(kv_task / kSplits, kv_task % kSplits, position, window);
  if (span.split >= span.used) {
    u32* words = split_words(b, span.head, 0, span.split);
    for (int i = b.thread; i < kQueries * kHeadDim / 2; i += kConsumers)
      store_relaxed(words + i, phase);
    if (b.thread < kQueries) store_relaxed(tops_of(b, span.head, b.thread, span.split), phase);
    return rejoin();
  }
  walk_span(b, ring, span, position, phase, NewRows{position});
}

// Wait for the attention's output, joining its splits if they are few, and stage it for Stage.
template <class Stage, class Between = NothingBetween>
KOG_DEVICE void stage_attention(Block& b, Step step, int position, u32 phase, Between between = {}) {
  int length = position + 1 - first_position(position, kWindows[b.layer]);
  int used = splits_in_use(length);
  if (used > kMerged) return stage_words<Stage, AttentionWords>(b, step, join_phase(b), between);
  // Words of each split, and the logarithms of all. Eight values a thread where each has some, else four: half as many
  // joins and shuffles (benchmarks/cuda-log.md#narrow-32b).
  constexpr int kValues = Stage::kPaddedK >= 8 * kConsumers ? 8 : 4;
  using In = Inputs<Stage, kValues>;
  using Words = WordVector<kValues / 2>;
  In in(b);
  Words w[In::kCount][kMerged];
  uint4 logarithms[In::kCount];
  u32 late[In::kCount][kMerged + 1], in_use[kMerged];
#pragma unroll
  for (int i = 0; i < In::kCount; i++) {
    u32 there = in.value(i) < Stage::kCols ? 1 : 0;
    logarithms[i] = uint4{0, 0, 0, 0};
    late[i][kMerged] = there;
#pragma unroll
    for (int s = 0; s < kMerged; s++) {
      w[i][s] = Words{};
      late[i][s] = in_use[s] = s < used ? 1 : 0;
      late[i][s] &= there;
    }
  }
  poll_until(
      b, step, [&] { return word_index(b, split_words(b, in.value(0) / kHeadDim / kQueries, 0, 0)); },
      phase,
      [&] {
#pragma unroll
        for (int i = 0; i < In::kCount; i++) {
          int value = in.value(i), query_head = value / kHeadDim;
          int head = query_head / kQueries, query = query_head % kQueries;
          const u32* from = split_words(b, head, query, 0) + value % kHeadDim / 2;
#pragma unroll
          for (int s = 0; s < kMerged; s++, from += SplitsWords::kStride)
            if (late[i][s] != 0) load_row(from, w[i][s]);
          if (late[i][kMerged] != 0) logarithms[i] = load_relaxed4(tops_of(b, head, query, 0));
        }
      },
      [&] {
        u32 bad = 0;
#pragma unroll
        for (int i = 0; i < In::kCount; i++) {
          u32 there = in.value(i) < Stage::kCols ? 1 : 0, late_tops = 0;
#pragma unroll
          for (int s = 0; s < kMerged; s++) {
            late[i][s] = w[i][s].stale(phase) & in_use[s] & there;
            late_tops |= (word_of(logarithms[i], s) ^ phase) & in_use[s];
            bad |= late[i][s];
          }
          late[i][kMerged] = late_tops & there;
          bad |= late[i][kMerged];
        }
        return bad;
      },
      between);
#pragma unroll
  for (int i = 0; i < In::kCount; i++) {
    float top[kMerged];
#pragma unroll
    for (int s = 0; s < kMerged; s++) top[s] = unpack_f32(word_of(logarithms[i], s));
    Join join(top, used);
    bool inside = in.value(i) < Stage::kCols;
    u32 joined[kValues / 2];
#pragma unroll
    for (int j = 0; j < kValues / 2; j++) {
      u32 both[kMerged];
#pragma unroll
      for (int s = 0; s < kMerged; s++) both[s] = operand_of(w[i][s].w[j]);
      joined[j] = inside ? join.of(both) : 0;
    }
    in.put(b, i, joined);
  }
  sync_staged<In::kOwnSlice>();
}

}  // namespace kog
