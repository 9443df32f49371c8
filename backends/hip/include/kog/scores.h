// The two products of a warp's softmax (softmax.h), in float32, two by one instruction: queries on the keys of a tile,
// and weights on its values. Threads hold a score of head thread / 4, as CUDA's do.
#pragma once
#include <kog/cache.h>

namespace kog {

// Two of a query's values, as Scores takes them.
KOG_DEVICE uint2 query_pair(float2 v) { return {bits_of(v.x), bits_of(v.y)}; }

// Four threads side by side hold the same dimensions of other rows each. So many of them add up outputs of heads of
// their own, two each, over the rows of all these; the others of the four do so for the same heads over their own rows,
// and what a thread has is a part of a sum until join_parts.
constexpr int kHeadThreads = kGroupHeads <= 2 ? 1 : kGroupHeads <= 4 ? 2 : 4;
// The first of the two heads whose outputs a thread adds up.
KOG_DEVICE int first_output(const Block& b) { return b.in_warp % kHeadThreads * 2; }
KOG_DEVICE void join_parts(float (&out)[kDimSteps][4]) {
#pragma unroll
  for (int mask = kHeadThreads; mask < 4; mask <<= 1)
#pragma unroll
    for (int t = 0; t < kDimSteps; t++)
#pragma unroll
      for (int i = 0; i < 4; i++) out[t][i] += shuffle_xor(out[t][i], mask);
}

// s[h]: this thread's quarter of head h's sum, the others of which are the other three threads'. Returns the whole sum
// of head thread % 4.
KOG_DEVICE float share_sums(const Block& b, const float (&s)[4]) {
  bool high = (b.in_warp & 2) != 0, odd = (b.in_warp & 1) != 0;
  float two[2];
#pragma unroll
  for (int i = 0; i < 2; i++) two[i] = (high ? s[2 + i] : s[i]) + shuffle_xor(high ? s[i] : s[2 + i], 2);
  return (odd ? two[1] : two[0]) + shuffle_xor(odd ? two[0] : two[1], 1);
}

// Heads whose queries are in registers at once: of more, some would be spilled.
constexpr int kHeadsAtOnce = kGroupHeads < 4 ? kGroupHeads : 4;

// Scores of the keys of a tile. at(j, i): of head thread / 4, on position 8 j + 2 (thread % 4) + i.
struct Scores {
  float p[kTileRows / 8][2];

  KOG_DEVICE Scores(const Block& b, const uint4* queries, const Keys& keys) {
    // Read anew for each tile: kept from one to the next, they would take every register.
    const uint4* of_quarter = queries - b.in_warp + unknown(b.in_warp % 4);
    float2 sums[kTileRows / 8][kGroupHeads] = {};
#pragma unroll
    for (int t = 0; t < kDimSteps; t++) {
      float2 key[kTileRows / 8][2];
#pragma unroll
      for (int j = 0; j < kTileRows / 8; j++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          u32 both = keys.w[j][2 * t + i];
          key[j][i] = {low_of(both), high_of(both)};
        }
#pragma unroll
      for (int first = 0; first < kGroupHeads; first += kHeadsAtOnce) {
        uint4 q[kHeadsAtOnce];
#pragma unroll
        for (int h = 0; h < kHeadsAtOnce; h++)
          if (first + h < kGroupHeads) q[h] = of_quarter[t * kWarpThreads + 4 * (first + h)];
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
          for (int h = 0; h < kHeadsAtOnce; h++) {
            if (first + h >= kGroupHeads) continue;
            float2 query = {float_of(word_of(q[h], 2 * i)), float_of(word_of(q[h], 2 * i + 1))};
#pragma unroll
            for (int j = 0; j < kTileRows / 8; j++) fuse_two(key[j][i], query, sums[j][first + h]);
          }
      }
      keep_order();
    }
#pragma unroll
    for (int j = 0; j < kTileRows / 8; j++) {
      float s[8] = {};
#pragma unroll
      for (int h = 0; h < kGroupHeads; h++) s[h] = sums[j][h].x + sums[j][h].y;
      float mine[2] = {share_sums(b, {s[0], s[1], s[2], s[3]}), 0};
      if constexpr (kGroupHeads > 4) mine[1] = share_sums(b, {s[4], s[5], s[6], s[7]});
      // The thread of that key's four which has this thread's head.
      int head = b.in_warp / 4, from = 8 * (b.in_warp % 4) + head % 4;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        p[j][i] = shuffle(mine[0], from + 4 * i);
        if constexpr (kGroupHeads > 4) {
          float other = shuffle(mine[1], from + 4 * i);
          p[j][i] = head < 4 ? p[j][i] : other;
        }
      }
    }
  }
  KOG_DEVICE float at(int j, int i) const { return p[j][i]; }
};

// Adds up the rows of thread number kThread of each kHeadThreads side by side, then those of the threads behind it.
template <int kThread>
KOG_DEVICE void add_rows(const Block& b, const Values& values, const float (&p)[kTileRows / 8][2],
                         float (&out)[kDimSteps][4]) {
  int whose = b.in_warp % 4 / kHeadThreads * kHeadThreads + kThread;
#pragma unroll
  for (int j = 0; j < kTileRows / 4; j++) {
    float mine = p[j / 2][j % 2], weight[2];
#pragma unroll
    for (int i = 0; i < 2; i++) weight[i] = shuffle(mine, (first_output(b) + i) * 4 + whose);
#pragma unroll
    for (int t = 0; t < kDimSteps; t++) {
      u32 both = of_neighbors<kThread, kHeadThreads>(values.w[j][t]);
      float value[2] = {low_of(both), high_of(both)};
#pragma unroll
      for (int n = 0; n < 2; n++) {
        float2 sum = {out[t][2 * n], out[t][2 * n + 1]};
        fuse_two(float2{weight[0], weight[1]}, float2{value[n], value[n]}, sum);
        out[t][2 * n] = sum.x, out[t][2 * n + 1] = sum.y;
      }
    }
    keep_order();
  }
  if constexpr (kThread + 1 < kHeadThreads) add_rows<kThread + 1>(b, values, p, out);
}
KOG_DEVICE void add_values(const Block& b, const Values& values, const float (&p)[kTileRows / 8][2],
                           float (&out)[kDimSteps][4]) {
  add_rows<0>(b, values, p, out);
}

}  // namespace kog
