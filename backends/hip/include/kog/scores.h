// The two products of a warp's softmax (softmax.h): queries on the keys of a tile, and weights on its values. Threads
// hold what CUDA's tensor core gives them: a score of head thread / 4, outputs of heads 2 * (thread % 4) and the next.
#pragma once
#include <kog/cache.h>

namespace kog {

// A sum that is made here, not where it is needed: what is added would take registers until then.
KOG_DEVICE float added_here(float sum) { return float_of(unknown(bits_of(sum))); }

// Scores of kHeadsHeld heads, of which a thread of four has a quarter each, so that thread t of the four has those of
// heads t and t + 4.
template <int kHeadsHeld>
KOG_DEVICE void share_scores(const Block& b, float (&s)[8], float (&mine)[2]) {
#pragma unroll
  for (int h = 0; h < kHeadsHeld; h++) {
    s[h] += shuffle_xor(s[h], 1);
    s[h] += shuffle_xor(s[h], 2);
  }
  int which = b.in_warp % 4;
#pragma unroll
  for (int i = 0; i < 2; i++)
    mine[i] = which == 0 ? s[4 * i] : which == 1 ? s[4 * i + 1] : which == 2 ? s[4 * i + 2] : s[4 * i + 3];
}

// Scores of the keys of a tile. at(j, i): of head thread / 4, on position 8 j + 2 (thread % 4) + i.
struct Scores {
  float p[kTileRows / 8][2];

  KOG_DEVICE Scores(const Block& b, const uint4* queries, const Keys& keys) {
    // Read anew for each tile: kept from one to the next, they would take every register.
    const uint4* of_quarter = queries - b.in_warp + unknown(b.in_warp % 4);
    float s[kTileRows / 8][8] = {};
#pragma unroll
    for (int t = 0; t < kDimSteps; t++) {
#pragma unroll
      for (int h = 0; h < kGroupHeads; h++) {
        uint4 q = of_quarter[t * kWarpThreads + 4 * h];
#pragma unroll
        for (int j = 0; j < kTileRows / 8; j++) {
          s[j][h] = dot2<kF16>(keys.w[j][2 * t], q.x, s[j][h]);
          s[j][h] = dot2<kF16>(keys.w[j][2 * t], q.y, s[j][h]);
          s[j][h] = dot2<kF16>(keys.w[j][2 * t + 1], q.z, s[j][h]);
          s[j][h] = added_here(dot2<kF16>(keys.w[j][2 * t + 1], q.w, s[j][h]));
        }
      }
      keep_order();
    }
#pragma unroll
    for (int j = 0; j < kTileRows / 8; j++) {
      float mine[2];
      share_scores<kGroupHeads>(b, s[j], mine);
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

// One of the four threads that share a head's weights, and the rows of the tile that it has.
template <int kThread>
KOG_DEVICE void add_rows(const Block& b, const Values& values, const float (&p)[kTileRows / 8][2],
                         float (&out)[kDimSteps][4]) {
#pragma unroll
  for (int j = 0; j < kTileRows / 4; j++) {
    float mine = p[j / 2][j % 2], weight[2];
#pragma unroll
    for (int i = 0; i < 2; i++) weight[i] = shuffle(mine, (b.in_warp % 4 * 2 + i) * 4 + kThread);
#pragma unroll
    for (int t = 0; t < kDimSteps; t++) {
      u32 both = of_quad<kThread>(values.w[j][t]);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        out[t][i] = fused(weight[i], low_of(both), out[t][i]);
        out[t][i + 2] = fused(weight[i], high_of(both), out[t][i + 2]);
      }
    }
#pragma unroll
    for (int t = 0; t < kDimSteps; t++)
#pragma unroll
      for (int i = 0; i < 4; i++) out[t][i] = added_here(out[t][i]);
    keep_order();
  }
}
KOG_DEVICE void add_values(const Block& b, const Values& values, const float (&p)[kTileRows / 8][2],
                           float (&out)[kDimSteps][4]) {
  add_rows<0>(b, values, p, out);
  add_rows<1>(b, values, p, out);
  add_rows<2>(b, values, p, out);
  add_rows<3>(b, values, p, out);
}

}  // namespace kog
