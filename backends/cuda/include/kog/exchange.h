// What all blocks tell each other about one token's logits: 32 bits a word under the number of the
// exchange, two words to a pair. Numbers grow from one exchange to the next, so that a word left
// over is never taken for a new one.
#pragma once
#include <kog/edit.h>

namespace kog {

constexpr int kExchanges = 16;  // of one token, at most

// A number that no earlier exchange of this launch had.
KOG_DEVICE u64 exchange_number(int heads, int n) {
  return (static_cast<u64>(heads) * kExchanges + n + 1) << 32;
}

KOG_DEVICE u64 sum_of_warp(u64 v) { return sum_of_threads(v); }
KOG_DEVICE u64 largest_of_warp(u64 v) {
  u32 high = largest_of_warp(static_cast<u32>(v >> 32));
  u32 low = largest_of_warp(static_cast<u32>(v >> 32) == high ? static_cast<u32>(v) : 0);
  return static_cast<u64>(high) << 32 | low;
}

// The sums over the block's threads of kCount numbers, to its first thread. `scratch` holds as many a warp.
template <int kCount>
KOG_DEVICE void sum_over_block(const Block& b, u64 (&sums)[kCount], u64* scratch) {
#pragma unroll
  for (int i = 0; i < kCount; i++) {
    sums[i] = sum_of_warp(sums[i]);
    if (b.in_warp == 0) scratch[kCount * b.warp + i] = sums[i];
  }
  sync_consumers();
  if (b.warp != 0) return;
#pragma unroll
  for (int i = 0; i < kCount; i++)
    sums[i] = sum_of_warp(b.in_warp < kWarps ? scratch[kCount * b.in_warp + i] : 0);
}

// The largest raw and edited logits of all ids, known to all blocks. A raw logit that is not finite
// comes before all others.
struct Peaks {
  float raw, edited;
  bool finite;
};

// `at` is a place in shared memory, two words a warp.
KOG_DEVICE Peaks find_peaks(Block& b, Rows rows, const float* raw, const float* edited, int heads,
                            u32* at) {
  u32 top = 0, edited_top = 0;
  auto raise = [&](u32 x, u32 y) { top = x > top ? x : top, edited_top = y > edited_top ? y : edited_top; };
  each_own_id(b, rows, [&](int id) {
    raise(raw[id] < float_of(kInfinity) ? ordered(raw[id]) : 0xffffffffu, ordered(edited[id]));
  });
  auto join = [&](u32 x, u32 y) {  // of all warps
    x = largest_of_warp(x), y = largest_of_warp(y);
    if (b.in_warp == 0) at[2 * b.warp] = x, at[2 * b.warp + 1] = y;
    sync_consumers();
    top = largest_of_warp(b.in_warp < kWarps ? at[2 * b.in_warp] : 0);
    edited_top = largest_of_warp(b.in_warp < kWarps ? at[2 * b.in_warp + 1] : 0);
    sync_consumers();
  };
  join(top, edited_top);
  u64 number = exchange_number(heads, 0);
  if (b.thread == 0)
    put_pair(b, words_of_block<PeakWords, 2>(b, block_of_all(b)), number, top, edited_top);
  top = edited_top = 0;
  for (int first = b.warp * kWarpThreads; first < kAllBlocks; first += kConsumers) {
    int block = first + b.in_warp;
    u64 v = poll_pair(b, Step::kPeaks, number, words_of_block<PeakWords, 2>(b, block),
                      block < kAllBlocks);
    raise(static_cast<u32>(v >> 32), static_cast<u32>(v));
  }
  join(top, edited_top);
  return {from_ordered(top), from_ordered(edited_top), top != 0xffffffffu};
}

}  // namespace kog
