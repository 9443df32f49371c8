// One warp's softmax over the tiles that it walks (arXiv 2205.14135), for kGroupHeads query heads.
//
// A thread holds the maximum and its share of the sum for head thread / 4, and outputs of head first_output
// and the next: of as many rows as add_values takes, until join_parts (scores.h; called by merge.h). Only keys
// and values are rounded to 16 bits.
#pragma once
#include <kog/scores.h>

namespace kog {

constexpr float kNoScore = -1e30f;  // finite: what has no score weighs nothing

KOG_DEVICE float larger(float a, float b) { return b > a ? b : a; }

struct Softmax {
  float out[kDimSteps][4], top = kNoScore, sum = 0;

  KOG_DEVICE Softmax() {
#pragma unroll
    for (int t = 0; t < kDimSteps; t++)
#pragma unroll
      for (int i = 0; i < 4; i++) out[t][i] = 0;
  }

  // Weights of the tile's positions [0, count) against the maximum so far. `queries`: this thread's
  // words of the first step (query_pair).
  KOG_DEVICE void weigh(const Block& b, const uint4* queries, const Keys& keys, int count,
                        float (&p)[kTileRows / 8][2]) {
    Scores scores(b, queries, keys);
    float best = top;
#pragma unroll
    for (int j = 0; j < kTileRows / 8; j++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        p[j][i] = scores.at(j, i);
        bool valid = 8 * j + b.in_warp % 4 * 2 + i < count;
        if (!valid) p[j][i] = kNoScore;
        best = larger(best, p[j][i]);
      }
#pragma unroll
    for (int mask = 1; mask <= 2; mask <<= 1) best = larger(best, shuffle_xor(best, mask));
    if (any_in_warp(best > top && top != kNoScore)) rescale(b, exp2_fast(top - best));
    top = best;
#pragma unroll
    for (int j = 0; j < kTileRows / 8; j++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        bool valid = 8 * j + b.in_warp % 4 * 2 + i < count;
        p[j][i] = valid ? exp2_fast(p[j][i] - best) : 0;
        sum += p[j][i];
      }
  }

  // `share`: what the new maximum of head thread / 4 leaves of what was summed.
  KOG_DEVICE void rescale(const Block& b, float share) {
    sum = product(sum, share);
    float first = shuffle(share, first_output(b) * 4), second = shuffle(share, first_output(b) * 4 + 4);
#pragma unroll
    for (int t = 0; t < kDimSteps; t++) {
      out[t][0] *= first, out[t][1] *= second;
      out[t][2] *= first, out[t][3] *= second;
    }
  }

  KOG_DEVICE float total() const {
    float all = sum + shuffle_xor(sum, 1);
    return all + shuffle_xor(all, 2);
  }
};

}  // namespace kog
