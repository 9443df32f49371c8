// The draw (kog_triton/sampling/definition.py, bit for bit): what ids compete with, and which is the argmax.
//
// Every block scores its own rows of the head and publishes its best key; all blocks read all
// candidates and pick the same one. Keys are float64: a product of a float32 logit and a 24-bit
// scale is exact, so is the noise term, and their sum rounds once, whether the compiler fuses or
// not.
#pragma once
#include <kog/fixed.h>
#include <kog/words.h>

namespace kog {

// Tokens that are none: the logits are not finite, or every id is banned.
constexpr int kNoNumber = -1, kNothing = -2;

KOG_DEVICE bool beats(const Candidate& a, const Candidate& b) {
  return a.key > b.key || (a.key == b.key && a.id < b.id);
}
KOG_DEVICE Candidate nobody() { return {-infinity(), 0x7fffffff}; }

// What a logit competes with. One that is not finite must win.
KOG_DEVICE Candidate candidate(const u32* r, float logit, int id, int position) {
  if (!(logit < float_of(kInfinity))) return {infinity(), kNoNumber};
  if ((r[Request::kFlags] & kGreedy) != 0) return {static_cast<double>(logit), id};
  u32 word = random_word(static_cast<u32>(id), static_cast<u32>(position), r[Request::kSample],
                         r[Request::kSeed], r[Request::kSeed + 1]);
  double scale = static_cast<double>(float_of(r[Request::kScale]));
  return {static_cast<double>(logit) * scale + static_cast<double>(gumbel(word)) * kNoiseScale, id};
}

// The better of the best so far and the id whose logit this is, of a token at `position`.
KOG_DEVICE void compete(Candidate& best, const u32* request, float logit, int id, int position) {
  Candidate c = candidate(request, logit, id, position);
  if (beats(c, best)) best = c;
}

// The best of kCount threads side by side, to all of them.
KOG_DEVICE Candidate shuffle_xor(const Candidate& c, int mask) {
  return {double_of(shuffle_xor(bits_of(c.key), mask)), static_cast<int>(shuffle_xor(static_cast<u32>(c.id), mask))};
}
template <int kCount>
KOG_DEVICE Candidate best_of_threads(const Candidate& c) {
  return over_threads<kCount>(c, [](Candidate best, const Candidate& other) {
    if (beats(other, best)) best = other;
    return best;
  });
}
KOG_DEVICE Candidate best_of_warp(const Candidate& c) { return best_of_threads<kWarpThreads>(c); }

// The number of a head's exchange.
KOG_DEVICE u64 head_number(int heads) { return static_cast<u64>(heads + 1) << 32; }
// A block's best as words: its key, its id and what is reported with it.
KOG_DEVICE void put_candidate(const Block& b, u64* to, u64 number, const Candidate& c, u32 reported) {
  u64 key = bits_of(c.key);
  put_pair(b, to, number, static_cast<u32>(key >> 32), static_cast<u32>(key));
  put_pair(b, to + 2, number, static_cast<u32>(c.id), reported);
}
// The best of a warp's candidates, N a thread: at(i) says where, there(i) whether there is one; and the
// host's word of the first.
template <int N, class At, class There, class OfPeer = OfThisRank>
KOG_DEVICE Candidate poll_candidates(Block& b, u64 number, At at, There there, u32& control, OfPeer of_peer = {}) {
  u64 v[2 * N];
  poll_pairs(
      b, Step::kArgmax, number, [&](int i) { return at(i / 2) + i % 2 * 2; },
      [&](int i) { return there(i / 2); }, v, [&](int i) { return of_peer(i / 2); });
  control = static_cast<u32>(v[1]);
  Candidate best = nobody();
#pragma unroll
  for (int i = 0; i < N; i++) {
    Candidate c = {double_of(v[2 * i]), static_cast<int>(v[2 * i + 1] >> 32)};
    if (there(i) && beats(c, best)) best = c;
  }
  return best_of_warp(best);
}
KOG_DEVICE int token_of(const Candidate& c) { return c.key == -infinity() ? kNothing : c.id; }

// A block's words of one head: two buffers, because lanes that never meet may be a token apart.
KOG_DEVICE u64* argmax_words(const Block& b, int heads, int block) {
  return words_of_block<ArgmaxWords, 4>(b, block, heads & 1);
}

// A warp's best, for `best_of_block` behind a barrier.
KOG_DEVICE void keep_best(Block& b, Candidate mine) {
  mine = best_of_warp(mine);
  if (b.in_warp == 0) b.small->local[b.warp] = mine;
}
KOG_DEVICE Candidate best_of_block(const Block& b) {
  return best_of_warp(b.in_warp < kWarps ? b.small->local[b.in_warp] : nobody());
}

// Publish the best of what the warps have kept.
KOG_DEVICE void publish_candidate(Block& b, int heads, u32 control) {
  sync_consumers();
  if (b.warp != 0) return;
  Candidate best = best_of_block(b);
  if (b.in_warp != 0 || must_leave(b)) return;  // a block that gave up lets no token come about
  put_candidate(b, argmax_words(b, heads, block_of_all(b)), head_number(heads), best, control);
}

// The best of all blocks, known to every thread after the barrier at the token's end (`agreed`).
KOG_DEVICE void gather_candidates(Block& b, int heads) {
  if (b.warp < kCandidateWarps) {
    u32 control;
    auto block = [&](int i) { return b.thread + i * kTakers; };
    Candidate c = poll_candidates<kBlocksAThread>(
        b, head_number(heads), [&](int i) { return argmax_words(b, heads, block(i)); },
        [&](int i) { return block(i) < kAllBlocks; }, control, [&](int i) { return block_of_peer(b, block(i)); });
    if (b.thread == 0) b.small->control = control;
    if (b.in_warp == 0) b.small->global[b.warp] = c;
  }
}
KOG_DEVICE int agreed(const Block& b) {
  Candidate best = b.small->global[0];
  for (int w = 1; w < kCandidateWarps; w++)
    if (beats(b.small->global[w], best)) best = b.small->global[w];
  return token_of(best);
}

}  // namespace kog
