// The argmax of all ids, and whether min_p, top_k and top_p would have let it compete: an id that
// survives them is the argmax of the survivors, too, so that most tokens need no cut (cut.h).
//
//   draw ==> the argmax and its logit ==> sums of the ids before it, and of all ==> it survives
//                                             not: draw again, among the ids before it
//
// With top_p alone an argmax survives with probability top_p at least.
#pragma once
#include <kog/cut.h>

namespace kog {

// Then the cut is found: a third would be for about one token in 800 at top-p 0.95.
constexpr int kTopPChecks = 2;
static_assert(kFirstLevel == 1 + kTopPChecks, "the exchanges of top-p checks come before those of levels");

// The argmax of all blocks, and its logit as an ordered integer.
struct TopPCheck {
  Candidate argmax;
  u32 logit;
};

// The best of what the warps have kept, for the check of a number; the host's word comes with it.
KOG_DEVICE void publish_top_p_check(Block& b, const Field& f, u64 number, u32 control) {
  sync_consumers();
  if (b.warp != 0) return;
  Candidate best = best_of_block(b);
  if (b.in_warp != 0 || must_leave(b)) return;  // as in publish_candidate
  u64* to = words_of_block<TopPCheckWords, 6>(b, block_of_all(b));
  u32 logit = f.rows.hold(best.id) ? ordered(f.logits[best.id]) : 0;
  put_candidate(b, to, number, best, logit);
  put_pair(b, to + 4, number, control, 0);
}

// The argmax of a check, known to every thread; `agreed` knows it, too. `scratch` holds a word a warp.
KOG_DEVICE TopPCheck gather_top_p_check(Block& b, u64 number, u32* scratch) {
  if (b.warp < kCandidateWarps) {
    auto block = [&](int i) { return b.thread + i / 3 * kTakers; };
    u64 v[3 * kBlocksAThread];
    poll_pairs(
        b, Step::kTopPCheck, number,
        [&](int i) { return words_of_block<TopPCheckWords, 6>(b, block(i)) + i % 3 * 2; },
        [&](int i) { return i % 3 < 2 ? block(i) < kAllBlocks : b.thread + i == 2; }, v);
    Candidate c = nobody();
    u32 logit = 0;
#pragma unroll
    for (int i = 0; i < 3 * kBlocksAThread; i += 3) {
      Candidate other = {double_of(v[i]), static_cast<int>(v[i + 1] >> 32)};
      if (block(i) < kAllBlocks && (i == 0 || beats(other, c))) c = other, logit = static_cast<u32>(v[i + 1]);
    }
    Candidate best = best_of_warp(c);
    if (b.thread < kAllBlocks && c.id == best.id) scratch[b.warp] = logit;
    if (b.in_warp == 0) b.small->global[b.warp] = best;
    if (b.thread == 0) b.small->control = static_cast<u32>(v[2] >> 32);
  }
  sync_consumers();
  TopPCheck t = {b.small->global[0], scratch[0]};
  for (int w = 1; w < kCandidateWarps; w++)
    if (beats(b.small->global[w], t.argmax)) t = {b.small->global[w], scratch[w]};
  sync_consumers();
  return t;
}

// Sums of the ids before a logit, and of all that min_p leaves.
struct Shares {
  Sums before, all;
};

// Of this block's ids. The counts of both are halves of one number.
KOG_DEVICE void publish_shares(Block& b, const Field& f, u32 logit, u64 number, u64* scratch) {
  u64 sums[3] = {0, 0, 0};  // weight before, weight of all, counts
  each_own_id(b, f.rows, [&](int id) {
    if (!f.holds(f.logits[id])) return;
    u64 weight = weight_at(distance_of(f.top, f.logits[id], f.scale));
    bool before = ordered(f.logits[id]) > logit;
    sums[0] += before ? weight : 0;
    sums[1] += weight;
    sums[2] += before ? 1ull << 32 | 1 : 1;
  });
  sum_over_block(b, sums, scratch);
  if (b.thread != 0 || must_leave(b)) return;  // as in publish_candidate
  u64* to = words_of_block<SharesWords, 6>(b, block_of_all(b));
#pragma unroll
  for (int i = 0; i < 3; i++)
    put_pair(b, to + 2 * i, number, static_cast<u32>(sums[i] >> 32), static_cast<u32>(sums[i]));
}

// Of all blocks' ids, known to every thread.
KOG_DEVICE Shares gather_shares(Block& b, u64 number, u64* scratch) {
  u64 sums[3] = {0, 0, 0};
  sync_consumers();  // warp 0 has read this block's sums: the scratch is free
  if (b.warp < kCandidateWarps) {
    auto block = [&](int i) { return b.thread + i / 3 * kTakers; };
    u64 v[3 * kBlocksAThread];
    poll_pairs(
        b, Step::kShares, number, [&](int i) { return words_of_block<SharesWords, 6>(b, block(i)) + i % 3 * 2; },
        [&](int i) { return block(i) < kAllBlocks; }, v);
#pragma unroll
    for (int i = 0; i < 3 * kBlocksAThread; i++) sums[i % 3] += v[i];
#pragma unroll
    for (int i = 0; i < 3; i++) {
      sums[i] = sum_of_warp(sums[i]);
      if (b.in_warp == 0) scratch[3 * b.warp + i] = sums[i];
    }
  }
  sync_consumers();
  sums[0] = sums[1] = sums[2] = 0;
  for (int i = 0; i < 3 * kCandidateWarps; i++) sums[i % 3] += scratch[i];
  return {{sums[0], static_cast<u32>(sums[2] >> 32)}, {sums[1], static_cast<u32>(sums[2])}};
}

// Whether the argmax survives; with top_k and top_p both it may take the cut of top_k to know (kOpen).
enum class Verdict { kSurvives, kFalls, kOpen };

KOG_DEVICE Verdict verdict_of(const Block& b, const Field& f, u32 logit, const Shares& s) {
  if (!f.holds(from_ordered(logit))) return Verdict::kFalls;
  u32 k = b.request[Request::kTopK], share = b.request[Request::kTopP];
  bool by_count = k != 0 && s.all.count > k;
  if (by_count && s.before.count >= k) return Verdict::kFalls;
  if ((b.request[Request::kFlags] & kTopP) == 0) return Verdict::kSurvives;
  if (s.before.weight >= share_of(s.all.weight, share)) return Verdict::kFalls;
  if (!by_count) return Verdict::kSurvives;
  u64 own = weight_at(distance_of(f.top, from_ordered(logit), f.scale));  // top_k leaves that at least
  return s.before.weight < share_of(s.before.weight + own, share) ? Verdict::kSurvives : Verdict::kOpen;
}

}  // namespace kog
