// Log-probabilities of one token, delivered as kog_triton/backends/logprob_words.py lays them out.
//
// Every block ranks its own raw logits and adds their weights; block 0 of rank 0 joins what they bring. Once the
// token is known, its block publishes its logit, and every block counts its own ids that are ahead of it.
// A rank is 64 bits: the logit as an ordered integer, then the id, the lower the better.
#pragma once
#include <kog/exchange.h>

namespace kog {

constexpr int kListed = kMostLogprobs * kWarps;
// Of other blocks, that a thread holds at once, 64 bits each: of more it holds each block's best alone. On an H200 two
// GPUs have 11. Of eight 42 took 86 loads and stores of spilled registers in the poll that asks for them
// (benchmarks/cuda-log.md#held-ranks).
constexpr int kMostHeldRanks = 16;

KOG_DEVICE u64 rank_of(float logit, int id) {
  return static_cast<u64>(ordered(logit)) << 32 | (0xffffffffu - static_cast<u32>(id));
}

// The largest rank below the last one taken, of those that are considered.
struct NextBest {
  u64 last, best;

  KOG_DEVICE void consider(u64 rank) {
    if (rank < last && rank > best) best = rank;
  }
};

// The k largest ranks of a warp into `to`, in order: each(next) lets it consider those that a thread has.
template <class Each>
KOG_DEVICE void take_best(const Block& b, int k, u64* to, Each each) {
  NextBest next = {~0ull, 0};
#pragma unroll 1
  for (int i = 0; i < k; i++, next.best = 0) {
    each(next);
    next.last = largest_of_warp(next.best);
    if (b.in_warp == 0) to[i] = next.last;
  }
}

// Those of all warps, each by one thread: take(i, rank). `lists` is kListed + kMostLogprobs words of shared memory.
template <class Each, class Take>
KOG_DEVICE void take_best_of_block(const Block& b, int k, u64* lists, Each each, Take take) {
  take_best(b, k, lists + b.warp * kMostLogprobs, each);
  sync_consumers();
  if (b.warp != 0) return;
  take_best(b, k, lists + kListed, [&](NextBest& next) {
    for (int i = b.in_warp; i < kListed; i += kWarpThreads)
      if (i % kMostLogprobs < k) next.consider(lists[i]);
  });
  sync_warp();
  for (int i = b.in_warp; i < k; i += kWarpThreads) take(i, lists[kListed + i]);
}

KOG_DEVICE u64* best_words(const Block& b, int heads, int block) {
  return words_of_block<BestWords, 2 * (kMostLogprobs + 1)>(b, block, heads & 1);
}

// What block 0 of rank 0 needs: the sum of this block's weights at temperature 1, and its best ranks. `scratch`
// is kListed + kMostLogprobs words of shared memory.
KOG_DEVICE void publish_best(Block& b, Rows rows, const float* raw, float top, int heads,
                             u64* scratch) {
  int k = static_cast<int>(b.request[Request::kLogprobs]);
  u64 sum[1] = {0}, number = exchange_number(heads, kExchanges - 1);
  sync_consumers();  // a cut or a top-p check used the scratch, and every warp has read it
  each_own_id(b, rows, [&](int id) { sum[0] += weight_at(distance_of(top, raw[id], kLog2eScale)); });
  sum_over_block(b, sum, scratch);
  u64* to = best_words(b, heads, block_of_all(b));
  if (b.thread == 0)
    put_pair_at_rank(b, 0, to, number, static_cast<u32>(sum[0] >> 32), static_cast<u32>(sum[0]));
  sync_consumers();
  take_best_of_block(
      b, k, scratch,
      [&](NextBest& next) {
        each_own_id(b, rows, [&](int id) { next.consider(rank_of(raw[id], id)); });
      },
      [&](int i, u64 rank) {
        put_pair_at_rank(b, 0, to + 2 + 2 * i, number, static_cast<u32>(rank >> 32), static_cast<u32>(rank));
      });
  sync_consumers();
}

KOG_DEVICE u64* record_of(const Block& b, int made) {
  u64 at = static_cast<u64>(b.small->slot) * (b.p.positions + 1) + static_cast<u64>(made);
  return b.p.logprobs + at * kRecordWords;
}

KOG_DEVICE u64* ahead_words(const Block& b, int heads, int block) {
  return words_of_block<AheadWords, 2>(b, block, heads & 1);
}

// How many of this block's ids are likelier than the token, or as likely and lower: from the raw logit of
// the token, which its own block tells the others and the host.
KOG_DEVICE void publish_ahead(Block& b, Rows rows, const float* raw, int token, int heads, int made,
                              u64* scratch) {
  u64 number = exchange_number(heads, kExchanges - 1);
  u64* chosen = pairs_of<ChosenWords>(b) + (heads & 1) * (ChosenWords::kStride / 2);
  if (b.thread == 0 && rows.hold(token)) {
    put_pair(b, chosen, number, 0, bits_of(raw[token]));
    store_system(record_of(b, made), static_cast<u64>(made + 1) << 32 | bits_of(raw[token]));
  }
  u64 logit = poll_pair(b, Step::kChosen, number, chosen, true);
  u64 rank = rank_of(float_of(static_cast<u32>(logit)), token), ahead[1] = {0};
  each_own_id(b, rows, [&](int id) { ahead[0] += rank_of(raw[id], id) > rank ? 1 : 0; });
  sum_over_block(b, ahead, scratch);
  if (b.thread == 0)
    put_pair_at_rank(b, 0, ahead_words(b, heads, block_of_all(b)), number, 0, static_cast<u32>(ahead[0]));
  sync_consumers();
}

// What the blocks of a thread published, of which each one's best that was not taken yet is held: a round trip of words
// for each that is, and few registers, however many ranks there are.
struct BlocksBest {
  static constexpr int kLists = (kAllBlocks + kConsumers - 1) / kConsumers;
  u64 number, held[kLists];
  int heads, at[kLists];

  KOG_DEVICE BlocksBest(int heads, u64 number) : number(number), heads(heads) {
#pragma unroll
    for (int i = 0; i < kLists; i++) held[i] = ~0ull, at[i] = -1;
  }
  // By whole warps.
  KOG_DEVICE void consider(Block& b, NextBest& next, int k) {
    u64 more[kLists];
    auto block = [&](int i) { return b.thread * kLists + i; };
#pragma unroll
    for (int i = 0; i < kLists; i++) at[i] += held[i] == next.last ? 1 : 0;  // from the start, too
    auto asks = [&](int i) { return held[i] == next.last && at[i] < k && block(i) < kAllBlocks; };
    poll_pairs(
        b, Step::kBest, number, [&](int i) { return best_words(b, heads, block(i)) + 2 + 2 * at[i]; }, asks, more);
#pragma unroll
    for (int i = 0; i < kLists; i++)
      if (held[i] == next.last) held[i] = asks(i) ? more[i] : 0;
#pragma unroll
    for (int i = 0; i < kLists; i++) next.consider(held[i]);
  }
};

// Block 0 of rank 0: what all blocks published, joined and told to the host.
KOG_DEVICE void tell_best(Block& b, float top, int heads, int made, u64* scratch) {
  int k = static_cast<int>(b.request[Request::kLogprobs]);
  u64 number = exchange_number(heads, kExchanges - 1), tag = static_cast<u64>(made + 1) << 32;
  u64* record = record_of(b, made);
  if (b.warp == 0) {
    u64 sum = 0, ahead = 0;
    for (int block = b.in_warp; block - b.in_warp < kAllBlocks; block += kWarpThreads) {
      bool there = block < kAllBlocks;
      u64 more = poll_pair(b, Step::kAhead, number, ahead_words(b, heads, block), there);
      sum += poll_pair(b, Step::kBest, number, best_words(b, heads, block), there);
      ahead += static_cast<u32>(more);
    }
    sum = sum_of_warp(sum), ahead = sum_of_warp(ahead);
    if (b.in_warp == 0) {
      store_system(record + 3, tag | (1 + ahead));
      store_system(record + 1, tag | bits_of(top));
      store_system(record + 2, tag | static_cast<u64>(log2_fixed(sum > 0 ? sum : 1)));
    }
  }
  auto tell = [&](int i, u64 rank) {
    u64 id = 0xffffffffu - static_cast<u32>(rank);
    u32 logit = bits_of(from_ordered(static_cast<u32>(rank >> 32)));
    store_system(record + 4 + i, (id + 1) << 32 | logit);
  };
  constexpr int kHeldRanks = (kAllBlocks * kMostLogprobs + kConsumers - 1) / kConsumers;
  if constexpr (kHeldRanks > kMostHeldRanks) {
    BlocksBest lists(heads, number);
    take_best_of_block(b, k, scratch, [&](NextBest& next) { lists.consider(b, next, k); }, tell);
    return;
  }
  u64 held[kHeldRanks];
  auto rank = [&](int i) { return i * kConsumers + b.thread; };
  poll_pairs(
      b, Step::kBest, number,
      [&](int i) {
        return best_words(b, heads, rank(i) / kMostLogprobs) + 2 + 2 * (rank(i) % kMostLogprobs);
      },
      [&](int i) { return rank(i) / kMostLogprobs < kAllBlocks && rank(i) % kMostLogprobs < k; },
      held);
  take_best_of_block(
      b, k, scratch,
      [&](NextBest& next) {
#pragma unroll
        for (int i = 0; i < kHeldRanks; i++) next.consider(held[i]);
      },
      tell);
}

}  // namespace kog
