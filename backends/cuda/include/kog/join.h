// The splits of a head joined in their order, each block of the head for some of its query heads.
#pragma once
#include <kog/attention.h>

namespace kog {

constexpr int kPairs = (kHeadDim / 2 + kWarpThreads - 1) / kWarpThreads;  // pairs of values of a head, a thread

// One warp's share of a join: kJoined splits of one query head, from `first`; pair i of a thread in
// out[i].
KOG_DEVICE void join_part(Block& b, int head, int query, int used, int first, u32 phase,
                          float2 (&out)[kPairs]) {
  constexpr int kTops = (kSplits + kWarpThreads - 1) / kWarpThreads, kCount = kTops + kPairs * kJoined;
  // Logarithms of all splits, then outputs of kJoined of them.
  auto split_of = [&](int n) {
    return n < kTops ? n * kWarpThreads + b.in_warp : first + (n - kTops) / kPairs;
  };
  auto pair_of = [&](int n) { return (n - kTops) % kPairs * kWarpThreads + b.in_warp; };
  auto need = [&](int n) {
    return split_of(n) < used && (n < kTops || pair_of(n) < kHeadDim / 2);
  };
  auto at = [&](int n) -> const u32* {
    return n < kTops ? tops_of(b, head, query, split_of(n))
                     : split_words(b, head, query, split_of(n)) + pair_of(n);
  };
  u32 w[kCount];
  poll_words(b, Step::kAttentionJoin, at, need, phase, w);
  float top = kNoScore, total = 0, share[kTops], mine = 0;
#pragma unroll
  for (int n = 0; n < kTops; n++)
    if (need(n)) top = larger(top, unpack_f32(w[n]));
  top = largest_of_threads(top);
#pragma unroll
  for (int n = 0; n < kTops; n++) {
    share[n] = need(n) ? exp2_fast(unpack_f32(w[n]) - top) : 0;
    total += share[n];
    if (n == first / kWarpThreads) mine = share[n];
  }
  total = sum_of_threads(total);
#pragma unroll
  for (int n = 0; n < kPairs; n++) out[n] = float2{0, 0};
#pragma unroll
  for (int i = 0; i < kJoined * kPairs; i++) {
    float weight = divide(shuffle(mine, (first + i / kPairs) % kWarpThreads), total) * kPairUnit;
    if (!need(kTops + i)) continue;
    u32 both = operand_of(w[kTops + i]);
    out[i % kPairs].x += weight * low_of(both);
    out[i % kPairs].y += weight * high_of(both);
  }
}

// Join the splits of a head for query heads split, split + used, ...: put(query head, pair, values).
template <class Put>
KOG_DEVICE void join_many(Block& b, const Span& span, u32 phase, Put put) {
  int queries = (kQueries - span.split + span.used - 1) / span.used;
  int parts = (span.used + kJoined - 1) / kJoined;
  float* sums = AttentionScratch(b).results;
  sync_consumers();  // the results were merged
  for (int item = b.warp; item < queries * parts; item += kWarps) {
    int query = span.split + item / parts * span.used;
    float2 out[kPairs];
    join_part(b, span.head, query, span.used, item % parts * kJoined, phase, out);
#pragma unroll
    for (int n = 0; n < kPairs; n++) {
      int pair = n * kWarpThreads + b.in_warp;
      if (pair >= kHeadDim / 2) continue;
      if (parts == 1)
        put(span.head * kQueries + query, pair, out[n]);
      else
        *reinterpret_cast<float2*>(sums + item * kHeadDim + 2 * pair) = out[n];
    }
    rejoin();
  }
  if (kSplits <= kJoined || parts == 1) return;
  sync_consumers();
  for (int i = b.thread; i < queries * kHeadDim / 2; i += kConsumers) {
    int item = i / (kHeadDim / 2) * parts, pair = i % (kHeadDim / 2);
    float2 v = {0, 0};
    for (int n = 0; n < parts; n++) {
      v.x += sums[(item + n) * kHeadDim + 2 * pair];
      v.y += sums[(item + n) * kHeadDim + 2 * pair + 1];
    }
    int query = span.split + i / (kHeadDim / 2) * span.used;
    put(span.head * kQueries + query, pair, v);
    rejoin();
  }
  leave_results();
}

// A split's share of its head's join.
KOG_DEVICE void join_splits(Block& b, int kv_task, int position, int window, u32 phase) {
  Span span = span_of(kv_task / kSplits, kv_task % kSplits, position, window);
  if (span.split >= span.used) return;
  join_many(b, span, phase, [&](int query_head, int pair, float2 v) {
    u32* to = lane_words<AttentionWords>(b) + query_head * (kHeadDim / 2) + pair;
    store_relaxed(to, pack_pair(v.x, v.y, join_phase(b)));
  });
}

KOG_DEVICE void attention(Block& b, Ring& ring, int position, u32 phase) {
  int window = kWindows[b.layer];
  for (int kv_task = b.group_index; kv_task < kKvTasks; kv_task += kGroup)
    walk_split(b, ring, kv_task, position, window, phase);
  if (!has_join(b, position)) return;
  for (int kv_task = b.group_index; kv_task < kKvTasks; kv_task += kGroup)
    join_splits(b, kv_task, position, window, phase);
}

}  // namespace kog
