// The integers of sampling (kog_triton/sampling/{philox,fixed}.py): random words, noise, weights
// and distances, the same bits as on any other backend.
#pragma once
#include <kog/ptx.h>

namespace kog {

constexpr u32 kInfinity = 0x7f800000u;

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

// 2^40 * 2^(-e / 2^26), 0 <= e < kMaxDistance.
KOG_DEVICE u64 weight_of(u32 e) {
  u32 x = (e & ((1u << kDistanceBits) - 1)) << 6, a = kExp2[7];
#pragma unroll
  for (int k = 6; k >= 0; k--) a = kExp2[k] - static_cast<u32>(static_cast<u64>(a) * x >> 32);
  return (static_cast<u64>(a) << 9) >> (e >> kDistanceBits);
}

// e before it is rounded down.
KOG_DEVICE double distance_of(float top, float logit, double scale) {
  return (static_cast<double>(top) - static_cast<double>(logit)) * scale;
}
// The weight of a distance; 0 from kMaxDistance on.
KOG_DEVICE u64 weight_at(double distance) {
  return distance < static_cast<double>(kMaxDistance) ? weight_of(static_cast<u32>(distance)) : 0;
}

// A float as an integer of the same order; both zeros are one.
KOG_DEVICE u32 ordered(float v) {
  u32 bits = v == 0 ? 0 : bits_of(v);
  return bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}
KOG_DEVICE float from_ordered(u32 v) { return float_of(v >> 31 != 0 ? v & 0x7fffffffu : ~v); }

KOG_DEVICE double double_at(const u32* words) {
  return double_of(static_cast<u64>(words[1]) << 32 | words[0]);
}

}  // namespace kog
