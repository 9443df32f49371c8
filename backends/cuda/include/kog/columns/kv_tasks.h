// Who attends to what: the KV tasks of a layer (column, key/value head and, of a short context, some of its
// queries, of a longer one a split) are dealt out to a lane's blocks, and each keeps its own in shared
// memory.
#pragma once
#include <kog/columns/chunk.h>
#include <kog/columns/stream.h>

namespace kog::columns {

// Positions that a column's token sees in this layer.
KOG_DEVICE int length_of(const Block& b, int column, int steps) {
  int position = position_of(b, column, steps);
  return position + 1 - first_position(position, kWindows[b.layer]);
}

// Blocks that walk a head's splits: a context so short has one, which joins them as well.
KOG_DEVICE int blocks_of(int length) {
  return length <= kMergedLength ? 1 : splits_in_use(length);
}
// KV tasks of a head whose context so many blocks share: a split each, or some of its queries.
KOG_DEVICE int kv_tasks_of_head(int blocks) { return blocks > 1 ? blocks : kHeadParts; }
// What the block of KV task n of a column's walks.
KOG_DEVICE Span span_of_kv_task(int n, int blocks, int position, int window) {
  if (blocks > 1) {
    int head = static_cast<int>(divided(static_cast<u32>(n), blocks));
    return span_of(head, n - head * blocks, position, window);
  }
  Span span = span_of(n / kHeadParts, 0, position, window);
  span.end = position + 1;
  span.newest = true;
  return span;
}

// How a layer's KV tasks are dealt out: those of column c in thread c.
struct Deal {
  int blocks, before, count;  // of a head; KV tasks of columns ahead of it; its own

  KOG_DEVICE Deal(const Block& b, int steps) : blocks(0), count(0) {
    if (b.in_warp < b.p.num_requests) {
      blocks = blocks_of(length_of(b, b.in_warp, steps));
      count = kv_tasks_of_head(blocks) * kKvHeads;
    }
    u32 sum = static_cast<u32>(count);
#pragma unroll
    for (int by = 1; by < kColumns; by *= 2) {
      u32 other = shuffle(sum, (b.in_warp - by) & (kWarpThreads - 1));
      sum += b.in_warp < by ? 0 : other;
    }
    before = static_cast<int>(sum) - count;
  }
};
// KV task number i of this block's; none behind the last. By whole warps.
KOG_DEVICE KvTask find_kv_task(const Block& b, int steps, int i) {
  Deal deal(b, steps);
  int n = b.group_index + i * kGroup;
  u32 whose = threads_with(n >= deal.before && n < deal.before + deal.count);
  if (whose == 0) return {};
  int column = bit_length(static_cast<u64>(whose)) - 1;
  n -= static_cast<int>(shuffle(static_cast<u32>(deal.before), column));
  u32 blocks = shuffle(static_cast<u32>(deal.blocks), column);
  Span span =
      span_of_kv_task(n, static_cast<int>(blocks), position_of(b, column, steps), kWindows[b.layer]);
  auto word = [](int v) { return static_cast<u32>(v); };
  int query = blocks > 1 ? 0 : n % kHeadParts * kPartQueries;
  return {word(column),     blocks,          word(span.head),  word(query),
          word(span.split), word(span.used), word(span.start), word(span.end)};
}
// Lay out this block's KV tasks, by its last warp, ahead of a layer, while all wait for x: in each layer of a step
// they are the same ones. They took 1.5 us a layer of Qwen3-0.6B where every warp found them when it came.
KOG_DEVICE void keep_kv_tasks(const Block& b) {
  if ((kSameWindows && b.layer != 0) || b.warp != kWarps - 1) return;
  u32 shares = 0;
#pragma unroll 1
  for (int i = 0; i < kBlockKvTasks; i++) {
    KvTask kv_task = find_kv_task(b, steps_of(b), i);
    if (b.in_warp == 0) b.small->kv_tasks[i] = kv_task;
    if (kv_task.blocks == 0) break;
    shares |= kv_task.blocks > 1;
  }
  if (b.in_warp == 0) b.small->shares = shares;
}
// The KV task in hand, by its number: in a register it would be spilled.
KOG_DEVICE int kv_task_in_hand(const Block& b) {
  return static_cast<int>(load_state(b, &WarpState::kv_task));
}
// Take KV task i in hand: blocks that share its head, 0 behind the last; behind a barrier. By all warps.
KOG_DEVICE int enter_kv_task(const Block& b, int i) {
  save_state(b, &WarpState::kv_task, static_cast<u32>(i));
  return static_cast<int>(load_volatile(&b.small->kv_tasks[i].blocks));
}
KOG_DEVICE int first_query(const Block& b) {
  return static_cast<int>(load_volatile(&b.small->kv_tasks[kv_task_in_hand(b)].query));
}
// Its span, and its column as the one in hand. Asked anew where it is needed: kept, it would be spilled.
KOG_DEVICE Span take_kv_task(Block& b) {
  const KvTask& kv_task = b.small->kv_tasks[kv_task_in_hand(b)];
  auto number = [](const u32& v) { return static_cast<int>(load_volatile(&v)); };
  b.column = number(kv_task.column);
  KOG_ASSUME(b.column >= 0 && b.column < kColumns);
  Span span = {number(kv_task.head),  number(kv_task.split), number(kv_task.used),
               number(kv_task.start), number(kv_task.end),   true};
  span.newest = number(kv_task.blocks) == 1 || span.split == span.used - 1;
  return span;
}

}  // namespace kog::columns
