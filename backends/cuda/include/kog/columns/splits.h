// A head of a column, or some of its queries, over a context that one block walks: it joins the splits as
// each reader of a kernel of one token does for itself, in the order and roundings of those.
//
//   round   two splits, a half of the warps each, where all of them have a tile a warp; else one
//   merge   of all splits' results, a pair of values a thread
//   join    of the splits, by way of shared memory
#pragma once
#include <kog/attention.h>
#include <kog/columns/kv_tasks.h>

namespace kog::columns {

constexpr int kPartPairs = kPartQueries * kHeadDim / 2;  // pairs of values of a KV task
constexpr bool kEvenGroup = kWarpsAGroup % 2 == 0;
static_assert(kPartQueries <= kGroupHeads);  // they are of one group of warps

// Behind what was received.
struct HeadScratch {
  float* results;  // [kMerged][warp result][query][kResultStride]
  float2* tops;    // [kMerged][warp result][query]
  u32* words;      // [kMerged][kPartPairs]: what the readers of a split would find
  float* logs;     // [kMerged][query]

  KOG_DEVICE explicit HeadScratch(const Block& b)
      : results(scratch_at<float>(b, HeadPlaces::kResults)),
        tops(scratch_at<float2>(b, HeadPlaces::kTops)),
        words(scratch_at<u32>(b, HeadPlaces::kWords)),
        logs(scratch_at<float>(b, HeadPlaces::kLogs)) {}
};

// Hints of a head lie together: many warps of all blocks wait for the same ones, and what they ask
// for meanwhile is few sectors.
KOG_DEVICE int head_flag(const Block& b, int column, int query_head) {
  return lane_offset<AttentionHeadsWords>(b) + query_head * kColumns + column;
}
// One pair of a query head's outputs, and with the first one the hint: others come at the same time.
KOG_DEVICE void put_output(const Block& b, int query_head, int pair, u32 both, u32 phase, u32 epoch) {
  int word = query_head * (kHeadDim / 2) + pair;
  store_relaxed(lane_words<AttentionWords>(b) + narrow_offset<OProj>(word, b.column),
                pack_operand(both, phase));
  if (pair == 0) store_relaxed(b.p.words + head_flag(b, b.column, query_head), epoch);
}

// One pair of a split's merged results, by one thread in the order of those that share it in a kernel of one
// token (../merge.h): `top` becomes the largest maximum.
KOG_DEVICE Merged merge_pair(const HeadScratch& scratch, int split, int walked, int query, int pair,
                             float& top) {
  int at = split * kWarpResults * kPartQueries + query;
  float2 tops[kWarpResults];
#pragma unroll
  for (int w = 0; w < kWarpResults; w++) {
    tops[w] = w < walked ? scratch.tops[at + w * kPartQueries] : float2{kNoScore, 0};
    top = larger(top, tops[w].x);
  }
  Merged merged[kSharers] = {};
#pragma unroll
  for (int n = 0; n < kSharedResults; n++)
#pragma unroll
    for (int sharer = 0; sharer < kSharers; sharer++) {
      int w = n * kSharers + sharer;
      if (w >= kWarpResults || w >= walked) continue;
      merged[sharer].add(tops[w < kWarpResults ? w : 0],
                       scratch.results + (at + w * kPartQueries) * kResultStride + 2 * pair, top);
    }
#pragma unroll
  for (int mask = 1; mask < kSharers; mask <<= 1)
#pragma unroll
    for (int sharer = 0; sharer < kSharers; sharer += 2 * mask) 
      merged[sharer].join([&](float Merged::*m) { return merged[sharer + mask].*m; });
  return merged[0];
}

// How a KV task's splits are walked.
struct Rounds {
  Span span;
  int position;
  bool halves;
  int at_once, walkers;  // splits of a round; warps of one of them

  KOG_DEVICE explicit Rounds(Block& b) : span(take_kv_task(b)) {
    position = position_of(b, b.column, steps_of(b));
    // A split is at most a position longer than another.
    halves = kEvenGroup && span.end - span.start <= span.used * (kWarpResults * kTileRows);
    at_once = halves ? 2 : 1, walkers = halves ? kWarpResults : kWarpsAGroup;
  }
  KOG_DEVICE int side(const Block& b) const { return b.warp % kWarpsAGroup / walkers; }
  KOG_DEVICE int walker(const Block& b) const { return b.warp % kWarpsAGroup % walkers; }
  // Of the round from split `split` on.
  KOG_DEVICE Tiles tiles(const Block& b, int split, const NewRows& rows) const {
    split += side(b);
    Span own = span_of(span.head, split, position, kWindows[b.layer]);
    if (b.warp >= kWarpsAGroup || split >= span.used) return {0, 0, 0};
    return {own.start + walker(b) * kTileRows, own.end, rows.start(own)};
  }
  KOG_DEVICE int walked(const Block& b, int split) const {
    int tiles = tiles_of(span_of(span.head, split, position, kWindows[b.layer]));
    return tiles < walkers ? tiles : walkers;
  }
};

// The results of a round from split `first` on (../merge.h).
KOG_DEVICE void put_round(Block& b, const Rounds& round, bool walks, int first, Softmax& softmax) {
  HeadScratch scratch(b);
  int walker = round.walker(b), walked = round.halves ? 1 : round.walked(b, first);
  WarpResult<kPartQueries> result(scratch.results, scratch.tops,
                                  (first + round.side(b)) * kWarpResults + walker % kWarpResults);
  put_result(b, result, walks, walker, walked, softmax);
}

// The results of all splits, to o_proj's inputs.
KOG_DEVICE void merge_head(Block& b) {
  b.begin_stage();
  Rounds all(b);
  int used = all.span.used, query_head = all.span.head * kQueries + first_query(b);
  u32 phase = phase_of(iteration_of(b)), epoch = epoch_of(iteration_of(b));
  HeadScratch scratch(b);
#pragma unroll 1
  for (int n = b.thread; n < used * kPartPairs; n += kConsumers) {
    int split = n / kPartPairs, query = n % kPartPairs / (kHeadDim / 2);
    int pair = n % kPartPairs % (kHeadDim / 2), walked = all.walked(b, split);
    float top = kNoScore;
    Merged merged =
        merge_pair(scratch, split, walked < kWarpResults ? walked : kWarpResults, query, pair, top);
    float2 v = merged.output();
    u32 both = operand_of(pack_pair(v.x, v.y, 0));
    if (used == 1 && query_head + query < (all.span.head + 1) * kQueries)
      put_output(b, query_head + query, pair, both, phase, epoch);
    scratch.words[n] = both;
    if (pair == 0) scratch.logs[split * kPartQueries + query] = unpack_f32(pack_f32(merged.log(top), 0));
  }
  rejoin();
  if (used == 1) return;
  sync_consumers();
#pragma unroll 1
  for (int n = b.thread; n < kPartPairs; n += kConsumers) {
    int query = n / (kHeadDim / 2);
    u32 both[kMerged];
    float top[kMerged];
#pragma unroll
    for (int s = 0; s < kMerged; s++) {
      both[s] = s < used ? scratch.words[s * kPartPairs + n] : 0;
      top[s] = s < used ? scratch.logs[s * kPartQueries + query] : 0;
    }
    if (query_head + query < (all.span.head + 1) * kQueries)
      put_output(b, query_head + query, n % (kHeadDim / 2), Join(top, used).of(both), phase, epoch);
  }
  rejoin();
}

KOG_DEVICE void walk_head(Block& b) {
  Tile tile;
  begin_stage(b);  // the layer's number as well: kept from the layer's start, it would be spilled around the walk
  Rounds all(b);
  select_request(b, b.small->cursors[b.column], all.position);
  int first = 0, query = first_query(b), left = kQueries - query;
  NewRows rows = {position_of(b, 0, steps_of(b)), query, left < kPartQueries ? left : kPartQueries};
  int start = rows.start(all.span);
  Tiles tiles = all.tiles(b, first, rows);
  // Nothing here depends on other blocks: on its way while we wait for the queries.
  tile.load(b, Cached(b, all.span.head), tiles.at, tiles.cached);
  rows.receive(b, all.span, all.position, phase_of(iteration_of(b)));

#pragma unroll 1
  while (true) {
    Softmax softmax;
    bool walks = tiles.at < tiles.end;
    if (walks) {
      int head = static_cast<int>(load_volatile(&b.small->kv_tasks[kv_task_in_hand(b)].head));
      walk_tiles<false>(b, start, tiles, Cached(b, head), 0, tile, softmax);
    }
    // What a KV task is and where a thread stands is asked anew: kept while tiles are walked, it would be
    // spilled.
    begin_stage(b);
    Rounds round(b);
    int next = first + round.at_once;
    bool more = next < round.span.used;
    if (more) {  // the next round's tiles are on their way while this one's results are put
      tiles = round.tiles(b, next, NewRows{position_of(b, 0, steps_of(b))});
      tile.load(b, Cached(b, round.span.head), tiles.at, tiles.cached);
    }
    put_round(b, round, walks, first, softmax);
    if (!more) break;
    first = next;
  }
  sync_consumers();
  merge_head(b);
  stamp(b, Point::kAttentionSplit);
}

}  // namespace kog::columns
