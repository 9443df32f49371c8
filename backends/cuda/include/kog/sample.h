// Sampling in the kernel: the definition of kog_triton/sampling, bit for bit, for greedy and plain
// temperature.
//
// Every block scores its own rows of the head and publishes its best key; all blocks read all
// candidates and pick the same one. Keys are float64: a product of a float32 logit and a 24-bit
// scale is exact, so is the noise term, and their sum rounds once, whether the compiler fuses or
// not.
#pragma once
#include <kog/block.h>

namespace kog {

constexpr double kNoiseScale = -726817.0 / 17592186044416.0;  // -ln 2 / 2^24 rounded to 20 bits
constexpr i64 kLog2Log2E = 8871228;

KOG_DEVICE double infinity() { return double_of(0x7ff0000000000000ull); }

// Philox4x32-10 of (id >> 2, position, sample, 0) under the seed: word id & 3.
KOG_DEVICE u32 random_word(u32 id, u32 position, u32 sample, u32 seed_low, u32 seed_high) {
  u32 c0 = id >> 2, c1 = position, c2 = sample, c3 = 0, k0 = seed_low, k1 = seed_high;
#pragma unroll 1
  for (int i = 0; i < 10; i++) {
    u64 a = static_cast<u64>(c0) * 0xD2511F53u, b = static_cast<u64>(c2) * 0xCD9E8D57u;
    c0 = static_cast<u32>(b >> 32) ^ c1 ^ k0;
    c1 = static_cast<u32>(b);
    c2 = static_cast<u32>(a >> 32) ^ c3 ^ k1;
    c3 = static_cast<u32>(a);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  u32 word = id & 3;
  return word == 0 ? c0 : word == 1 ? c1 : word == 2 ? c2 : c3;
}

// The first `bits` bits of log2(m / 2^31), 2^31 <= m < 2^32 (kog_triton/sampling/fixed.py).
KOG_DEVICE i64 log2_bits(u64 m, int bits) {
  i64 out = 0;
#pragma unroll 1
  for (int i = 0; i < bits; i++) {
    m = (m * m) >> 32;
    u64 bit = m >> 31;
    if (bit == 0) m <<= 1;
    out = (out << 1) | static_cast<i64>(bit);
  }
  return out;
}

// 2^24 * log2(x), rounded down on the leading 32 bits.
KOG_DEVICE i64 log2_fixed(u64 x) {
  int top = bit_length(x) - 1;
  u64 m = top < 31 ? x << (31 - top) : x >> (top - 31);
  return (static_cast<i64>(top) << 24) + log2_bits(m, 24);
}

// G of a random word (kog_triton/sampling/fixed.py).
KOG_DEVICE i64 gumbel(u32 word) {
  u64 r = word, v = 2 * (0xFFFFFFFFull - r) + 1;
  if (v < (1ull << 23)) {
    u64 square = ((v << 3) * (v << 3)) >> 32;
    return log2_fixed((v << 8) + square) - (41ll << 24) + kLog2Log2E;
  }
  int n = bit_length(r);
  u64 m = n == 32 ? r : (2 * r + 1) << (31 - n);
  u64 y = (static_cast<u64>(33 - n) << 31) - static_cast<u64>(log2_bits(m, 31));
  return log2_fixed(y) - (31ll << 24);
}

KOG_DEVICE bool beats(const Candidate& a, const Candidate& b) {
  return a.key > b.key || (a.key == b.key && a.id < b.id);
}
KOG_DEVICE Candidate nobody() { return {-infinity(), 0x7fffffff}; }

// What a logit competes with. One that is not finite must win: id -1 says what it was.
KOG_DEVICE Candidate candidate(const Block& b, float logit, int id, int position) {
  if (!(logit < float_of(0x7f800000u))) return {infinity(), -1};
  const u32* r = b.request;
  if (r[Request::kGreedy] != 0) return {static_cast<double>(logit), id};
  u32 word = random_word(static_cast<u32>(id), static_cast<u32>(position), r[Request::kSample],
                         r[Request::kSeedLow], r[Request::kSeedHigh]);
  double scale = static_cast<double>(float_of(r[Request::kScale]));
  return {static_cast<double>(logit) * scale + static_cast<double>(gumbel(word)) * kNoiseScale, id};
}

KOG_DEVICE Candidate best_of_warp(Candidate c) {
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) {
    u64 bits = bits_of(c.key);
    u32 high = shuffle_xor(static_cast<u32>(bits >> 32), mask),
        low = shuffle_xor(static_cast<u32>(bits), mask);
    Candidate other = {double_of(static_cast<u64>(high) << 32 | low),
                       static_cast<int>(shuffle_xor(static_cast<u32>(c.id), mask))};
    if (beats(other, c)) c = other;
  }
  return c;
}

// Words of one head: two slots, because lanes that never meet may be a token apart.
KOG_DEVICE u64* winner_words(const Block& b, int heads) {
  u64* all = reinterpret_cast<u64*>(b.p.words + WinnerWords::kOffset);
  return all + (heads & 1) * (WinnerWords::kStride / 2);
}

// Publish the block's best: key high, key low, id and the host's word, each with its epoch above
// it.
KOG_DEVICE void publish_candidate(Block& b, Candidate mine, int heads, u32 control) {
  mine = best_of_warp(mine);
  if (b.in_warp == 0) b.small->local[b.warp] = mine;
  sync_consumers();
  if (b.warp != 0) return;
  Candidate best = best_of_warp(b.in_warp < kWarps ? b.small->local[b.in_warp] : nobody());
  if (b.in_warp != 0 || b.dead) return;  // a block that gave up lets no token come about
  u64 epoch = static_cast<u64>(heads + 1) << 32, bits = bits_of(best.key);
  u64* to = winner_words(b, heads) + 4 * b.block;
  store_relaxed_pair(to, epoch | bits >> 32, epoch | (bits & 0xffffffffu));
  store_relaxed_pair(to + 2, epoch | static_cast<u32>(best.id), epoch | control);
}

// The best of all blocks, known to every thread after the barrier at the token's end (`agreed`).
KOG_DEVICE void gather_candidates(Block& b, int heads) {
  if (b.warp * 32 < kBlocks) {
    const u64* from = winner_words(b, heads) + 4 * b.thread;
    u64 epoch = static_cast<u64>(heads + 1);
    ulonglong2 key = {epoch << 32, epoch << 32}, rest = key;
    Patience patience;
    bool bad;
    do {
      if (b.thread < kBlocks) key = load_relaxed_pair(from), rest = load_relaxed_pair(from + 2);
      bad = key.x >> 32 != epoch || key.y >> 32 != epoch || rest.x >> 32 != epoch ||
            rest.y >> 32 != epoch;
    } while (any_lane(bad) && !patience.expired(b, Step::kWinner, static_cast<u32>(rest.x >> 32),
                                                static_cast<u32>(epoch)));
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
  for (int w = 1; w < (kBlocks + 31) / 32; w++)
    if (beats(b.small->global[w], best)) best = b.small->global[w];
  return best.id;
}

}  // namespace kog
