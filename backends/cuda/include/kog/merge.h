// What the warps of a KV task have found, joined in shared memory in their order.
#pragma once
#include <kog/softmax.h>
#include <kog/kv_task.h>

namespace kog {

// Where one warp's results of kHeadsKept heads lie: its thread keeps the outputs of its head i piece by piece.
template <int kHeadsKept>
struct WarpResult {
  static constexpr int kPiece = Values::Share::kPiece;  // words whose dimensions lie side by side
  float* results;
  float2* tops;

  KOG_DEVICE WarpResult(float* all_results, float2* all_tops, int number)
      : results(all_results + number * kHeadsKept * kResultStride), tops(all_tops + number * kHeadsKept) {}
  // each(where, t): the kPiece words from t on of head i, which lie there.
  template <class Each>
  KOG_DEVICE void each_piece(const Block& b, int i, Each each) const {
    int head = b.in_warp % 4 * 2 + i;
    if (head >= kHeadsKept) return;
#pragma unroll
    for (int t = 0; t < kDimSteps; t += kPiece)
      each(results + head * kResultStride + Values::dimension(b, t), t);
  }

  KOG_DEVICE void put(const Block& b, const Softmax& s) const {
    float total = s.total();
#pragma unroll
    for (int i = 0; i < 2; i++)
      each_piece(b, i, [&](float* at, int t) {
        if constexpr (kPiece == 4) {  // wide stores: threads of other heads meet in the same banks
          float4* wide = reinterpret_cast<float4*>(at);
          wide[0] = {s.out[t][i], s.out[t][i + 2], s.out[t + 1][i], s.out[t + 1][i + 2]};
          wide[1] = {s.out[t + 2][i], s.out[t + 2][i + 2], s.out[t + 3][i], s.out[t + 3][i + 2]};
        } else {
#pragma unroll
          for (int n = 0; n < kPiece; n++)
            *reinterpret_cast<float2*>(at + 2 * n) = {s.out[t + n][i], s.out[t + n][i + 2]};
        }
      });
    if (b.in_warp % 4 == 0 && b.in_warp / 4 < kHeadsKept)
      tops[b.in_warp / 4] = {s.top, total};
  }

  // Add what another warp put there to `s`.
  KOG_DEVICE void absorb(const Block& b, Softmax& s) const {
    int head = b.in_warp / 4;
    float2 theirs = tops[head < kHeadsKept ? head : 0];
    float top = larger(s.top, theirs.x), share = exp2_fast(theirs.x - top);
    s.rescale(b, exp2_fast(s.top - top));
    s.top = top;
    if (b.in_warp % 4 == 0) s.sum = fused(share, theirs.y, s.sum);  // a sum of all threads of the head
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
    sync_warp();  // all threads have read
  }
};

// A warp's softmax to its result, of `walked` that walk a span: those that find no room are added to others
// first.
template <int kHeadsKept>
KOG_DEVICE void put_result(const Block& b, const WarpResult<kHeadsKept>& result, bool walks, int walker,
                           int walked, Softmax& softmax) {
  if (walks) join_parts(softmax.out);
  if (walked > kWarpResults) {
    if (walks && walker >= kWarpResults) result.put(b, softmax);
    sync_consumers();
    if (walks && walker + kWarpResults < walked) result.absorb(b, softmax);
  }
  if (walks && walker < kWarpResults) result.put(b, softmax);
}
// The results of the warps of each group to shared memory, for merge_warps.
KOG_DEVICE void put_results(const Block& b, bool walks, int walked, Softmax& softmax,
                            const AttentionScratch& scratch) {
  int walker = b.warp % kWarpsAGroup;
  WarpResult<kGroupHeads> result(scratch.results, scratch.tops,
                                 b.warp / kWarpsAGroup * kWarpResults + walker % kWarpResults);
  put_result(b, result, walks, walker, walked, softmax);
  sync_consumers();
}

// Threads that share a pair of values in merge_warps: all threads have one, if there are pairs enough.
constexpr int kSharers = kQueries * kHeadDim / 2 * 4 <= kConsumers   ? 4
                         : kQueries * kHeadDim / 2 * 2 <= kConsumers ? 2
                                                                      : 1;
constexpr int kSharedResults = (kWarpResults + kSharers - 1) / kSharers;  // of one of them

// Results of some warps as one: their sums, and a pair of their outputs.
struct Merged {
  float y, x, sum;

  // One more, whose maximum and sum are `tops`, of those whose largest maximum is `top`.
  KOG_DEVICE void add(float2 tops, const float* pair, float top) {
    float2 v = *reinterpret_cast<const float2*>(pair);
    float share = exp2_fast(tops.x - top);
    sum = fused(share, tops.y, sum);
    x = fused(share, v.x, x);
    y = fused(share, v.y, y);
  }
  // Those of another: of(member) brings each.
  template <class Of>
  KOG_DEVICE void join(Of of) {
    sum += of(&Merged::sum);
    x += of(&Merged::x);
    y += of(&Merged::y);
  }
  KOG_DEVICE float2 output() const { return {divide(x, sum), divide(y, sum)}; }
  // The logarithm of the sum.
  KOG_DEVICE float log(float top) const { return top + log2_fast(sum); }
};

// Merge the warps' results in order: put(head, pair, values, log) for each pair of a head's outputs, by
// one thread.
template <class Put>
KOG_DEVICE void merge_warps(const Block& b, int walked, const AttentionScratch& scratch, Put put) {
  constexpr int kPairs = kQueries * kHeadDim / 2, kAtOnce = kWarpThreads / kSharers;  // of a warp
  walked = walked < kWarpResults ? walked : kWarpResults;
  for (int first = b.warp * kAtOnce; first < kPairs; first += kAtOnce * kWarps) {
    int i = first + b.in_warp / kSharers, head = i / (kHeadDim / 2), pair = i % (kHeadDim / 2);
    bool inside = i < kPairs;
    int at = head / kGroupHeads * kWarpResults * kGroupHeads + head % kGroupHeads;
    float top = kNoScore;
#pragma unroll
    for (int n = 0; n < kSharedResults; n++) {
      int w = n * kSharers + b.in_warp % kSharers;
      if (!inside || w >= walked) continue;
      top = larger(top, scratch.tops[at + w * kGroupHeads].x);
    }
#pragma unroll
    for (int mask = 1; mask < kSharers; mask <<= 1) top = larger(top, shuffle_xor(top, mask));
    Merged merged = {};
#pragma unroll
    for (int n = 0; n < kSharedResults; n++) {
      int w = n * kSharers + b.in_warp % kSharers;
      if (!inside || w >= walked) continue;
      merged.add(scratch.tops[at + w * kGroupHeads],
                 scratch.results + (at + w * kGroupHeads) * kResultStride + 2 * pair, top);
    }
#pragma unroll
    for (int mask = 1; mask < kSharers; mask <<= 1)
      merged.join([&](float Merged::*m) { return shuffle_xor(merged.*m, mask); });
    if (inside && b.in_warp % kSharers == 0) put(head, pair, merged.output(), merged.log(top));
    rejoin();
  }
}

}  // namespace kog
