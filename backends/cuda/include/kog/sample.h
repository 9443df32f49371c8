// The draw (kog_triton/sampling/definition.py, bit for bit): what ids compete with, and who wins.
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

// The best of kLanes lanes side by side, to all of them.
template <int kLanes>
KOG_DEVICE Candidate best_of_lanes(Candidate c) {
#pragma unroll
  for (int mask = kLanes / 2; mask; mask >>= 1) {
    u64 bits = bits_of(c.key);
    u32 high = shuffle_xor(static_cast<u32>(bits >> 32), mask),
        low = shuffle_xor(static_cast<u32>(bits), mask);
    Candidate other = {double_of(static_cast<u64>(high) << 32 | low),
                       static_cast<int>(shuffle_xor(static_cast<u32>(c.id), mask))};
    if (beats(other, c)) c = other;
  }
  return c;
}
KOG_DEVICE Candidate best_of_warp(const Candidate& c) { return best_of_lanes<32>(c); }

// A block's words of one head: two slots, because lanes that never meet may be a token apart.
KOG_DEVICE u64* winner_words(const Block& b, int heads, int block) {
  return words_of_block<WinnerWords, 4>(b, block, heads & 1);
}

// A warp's best, for `best_of_block` behind a barrier.
KOG_DEVICE void keep_best(Block& b, Candidate mine) {
  mine = best_of_warp(mine);
  if (b.in_warp == 0) b.small->local[b.warp] = mine;
}
KOG_DEVICE Candidate best_of_block(const Block& b) {
  return best_of_warp(b.in_warp < kWarps ? b.small->local[b.in_warp] : nobody());
}

// Publish the best of what the warps have kept: key high, key low, id and the host's word, each
// with its epoch above it.
KOG_DEVICE void publish_candidate(Block& b, int heads, u32 control) {
  sync_consumers();
  if (b.warp != 0) return;
  Candidate best = best_of_block(b);
  if (b.in_warp != 0 || must_leave(b)) return;  // a block that gave up lets no token come about
  u64 epoch = static_cast<u64>(heads + 1) << 32, bits = bits_of(best.key);
  u64* to = winner_words(b, heads, b.block);
  store_relaxed_pair(to, epoch | bits >> 32, epoch | (bits & 0xffffffffu));
  store_relaxed_pair(to + 2, epoch | static_cast<u32>(best.id), epoch | control);
}

// The best of all blocks, known to every thread after the barrier at the token's end (`agreed`).
KOG_DEVICE void gather_candidates(Block& b, int heads) {
  if (b.warp * 32 < kBlocks) {
    const u64* from = winner_words(b, heads, b.thread);
    u64 epoch = static_cast<u64>(heads + 1);
    ulonglong2 key = {epoch << 32, epoch << 32}, rest = key;
    u64 oldest = epoch;
    auto ask = [&] {
      if (b.thread < kBlocks) key = load_relaxed_pair(from), rest = load_relaxed_pair(from + 2);
      oldest = key.x < key.y ? key.x : key.y;
      oldest = rest.x < oldest ? rest.x : oldest;
      oldest = (rest.y < oldest ? rest.y : oldest) >> 32;
      return any_lane(oldest != epoch);
    };
    if (ask()) {
      begin_wait(b);
      while (!give_up(b, Step::kWinner, place_of(b, reinterpret_cast<const u32*>(from)),
                      static_cast<u32>(oldest), static_cast<u32>(epoch)) &&
             ask()) {
      }
      end_wait(b);
    }
    Candidate c = nobody();
    if (b.thread < kBlocks)
      c = {double_of(key.x << 32 | (key.y & 0xffffffffu)), static_cast<int>(rest.x)};
    if (b.thread == 0) b.small->control = static_cast<u32>(rest.y);
    c = best_of_warp(c);
    if (b.in_warp == 0) b.small->global[b.warp] = c;
  }
}
KOG_DEVICE int agreed(const Block& b) {
  Candidate best = b.small->global[0];
  for (int w = 1; w < kWinners; w++)
    if (beats(b.small->global[w], best)) best = b.small->global[w];
  return best.key == -infinity() ? kNothing : best.id;
}

}  // namespace kog
