// Attention of one new token a column, by the KV tasks that are this block's (kv_tasks.h).
//
//   a short context   all of a head's splits by one block, which joins them (splits.h)
//   a longer one      words, each split walked as in a kernel of one token (../attention.h), then joined by
//                     the blocks that made them
//
// Either way what o_proj takes are words where its warps find them (operands.h), and a hint a query head
// and column.
#pragma once
#include <kog/columns/splits.h>
#include <kog/join.h>

namespace kog::columns {

KOG_DEVICE int split_flag(const Block& b, int column, int head, int split) {
  return lane_offset<AttentionFlagsWords>(b) + (column * kKvHeads + head) * kSplits + split;
}
// By all warps: the words of one of many splits are there. Their phases do not keep step, only the flag says
// that they are there: publish_block of docs/SYNC.md.
KOG_DEVICE void finish_split(Block& b) {
  drain_stores();  // each warp its own: a barrier alone does not wait for them on AMD
  sync_consumers();
  Span span = take_kv_task(b);
  u32 epoch = epoch_of(iteration_of(b));
  if (b.warp == 0) {
    release_gpu();  // pairs with acquire_words in await_splits
    raise_flag(b, b.p.words + split_flag(b, b.column, span.head, span.split), epoch);
  }
  rejoin();
}
KOG_DEVICE void await_splits(Block& b, const Span& span, u32 epoch) {
  constexpr int kFlags = (kSplits + kWarpThreads - 1) / kWarpThreads;
  int at[kFlags];
#pragma unroll
  for (int i = 0; i < kFlags; i++) {
    int split = i * kWarpThreads + b.in_warp;
    at[i] = split < span.used ? split_flag(b, b.column, span.head, split) : -1;
  }
  await<false>(b, Step::kAttentionJoin, at, epoch);
  acquire_words();  // pairs with release_gpu in finish_split
  sync_warp();
}

// Whether splits that several blocks walk can be few (join.h takes many).
constexpr bool kDealsFew = kSplits <= kMerged || kMerged * kSplitLeast > kMergedLength;

// Few splits of a head, each of another block: this one's share of its queries.
template <class Put>
KOG_DEVICE void join_few(Block& b, const Span& span, u32 phase, Put put) {
  int pairs = (kQueries - span.split + span.used - 1) / span.used * (kHeadDim / 2);
#pragma unroll 1
  for (int n = kWarpThreads * b.warp; n < pairs; n += kConsumers) {
    int i = n + b.in_warp, pair = i % (kHeadDim / 2);
    int query = span.split + i / (kHeadDim / 2) * span.used;
    u32 w[2 * kMerged], both[kMerged];
    float top[kMerged];
    poll_words(
        b, Step::kAttentionJoin,
        [&](int w) {
          return w < kMerged ? split_words(b, span.head, query, w) + pair
                             : tops_of(b, span.head, query, w - kMerged);
        },
        [&](int w) { return i < pairs && w % kMerged < span.used; }, phase, w);
#pragma unroll
    for (int s = 0; s < kMerged; s++) both[s] = operand_of(w[s]), top[s] = unpack_f32(w[kMerged + s]);
    if (i < pairs) put(span.head * kQueries + query, pair, Join(top, span.used).of(both));
    rejoin();
  }
}

// One split of a head, to words of its own, and their flag.
KOG_DEVICE void walk_shared(Block& b) {
  b.begin_stage();
  Span span = take_kv_task(b);
  int position = position_of(b, b.column, steps_of(b));
  u32 phase = phase_of(iteration_of(b));
  select_request(b, b.small->cursors[b.column], position);
  Ring none;
  walk_span(b, none, span, position, phase, NewRows{position_of(b, 0, steps_of(b))});
  finish_split(b);
}

// The joins of the KV task's head that are this block's.
KOG_DEVICE void join_kv_task(Block& b) {
  Span span = take_kv_task(b);
  if (span.split >= kQueries) return;
  u32 phase = phase_of(iteration_of(b)), epoch = epoch_of(iteration_of(b));
  await_splits(b, span, epoch);
  auto put = [&](int query_head, int pair, u32 both) {
    put_output(b, query_head, pair, both, phase, epoch);
  };
  if (kDealsFew && span.used <= kMerged) return join_few(b, span, phase, put);
  join_many(b, span, phase, [&](int query_head, int pair, float2 v) {
    put(query_head, pair, round_operand(v.x, v.y));
  });
  sync_consumers();  // what the warps joined in is free
}

KOG_DEVICE void attention(Block& b) {
  int blocks = enter_kv_task(b, 0);
#pragma unroll 1
  while (blocks != 0) {
    if (blocks == 1)
      walk_head(b);
    else
      walk_shared(b);
    blocks = enter_kv_task(b, kv_task_in_hand(b) + 1);
  }
  if (load_volatile(&b.small->shares) == 0) return;
  blocks = enter_kv_task(b, 0);
#pragma unroll 1
  while (blocks != 0) {
    if (blocks > 1) join_kv_task(b);
    blocks = enter_kv_task(b, kv_task_in_hand(b) + 1);
  }
}

// Until the hints of the heads in this warp's part of Stage's inputs are there, of every column.
template <class Stage>
KOG_DEVICE void await_attention(Block& b, u32 epoch) {
  using S = OperandLayout<Stage>;
  constexpr bool kWholeHeads = S::kPartValues % kHeadDim == 0;
  constexpr int kCount = S::kPartValues / kHeadDim + (kWholeHeads ? 0 : 2);
  constexpr int kFlags = (kCount * kColumns + kWarpThreads - 1) / kWarpThreads;
  int first = S::first_value(b) / kHeadDim, last = S::first_value(b) + S::kPartValues, at[kFlags];
  last = last < Stage::kCols ? last : Stage::kCols;
#pragma unroll
  for (int i = 0; i < kFlags; i++) {
    int n = i * kWarpThreads + b.in_warp, head = first + n / kColumns, column = n % kColumns;
    at[i] = column < b.p.num_requests && head * kHeadDim < last ? head_flag(b, column, head) : -1;
  }
  await<true>(b, Step::kOProjInput, at, epoch);
}

}  // namespace kog::columns
