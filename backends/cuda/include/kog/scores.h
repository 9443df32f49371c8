// The two products of a warp's softmax (softmax.h), on the tensor core: queries on the keys of a tile, and weights on its
// values. Queries and weights are split in two 16-bit parts each.
#pragma once
#include <kog/cache.h>

namespace kog {

// Two of a query's values, as Scores takes them.
KOG_DEVICE uint2 query_pair(float2 v) {
  HighLow parts(v.x, v.y);
  return {parts.high, parts.low};
}

// The first of the two heads whose outputs a thread adds up; it adds up all rows.
KOG_DEVICE int first_output(const Block& b) { return b.in_warp % 4 * 2; }
KOG_DEVICE void join_parts(float (&)[kDimSteps][4]) {}

// Scores of the keys of a tile. at(j, i): of head thread / 4, on position 8 j + 2 (thread % 4) + i.
struct Scores {
  float c[2][kTileRows / 8][4] = {};  // two chains of sums: each product waits for the one before it in its chain

  KOG_DEVICE Scores(const Block&, const uint4* queries, const Keys& keys) {
#pragma unroll
    for (int t = 0; t < kDimSteps; t++) {
      uint4 q = queries[t * 32];
      u32 a[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
      for (int j = 0; j < kTileRows / 8; j++)
        multiply_add<kF16>(c[t % 2][j], a, {keys.w[j][2 * t], keys.w[j][2 * t + 1]});
    }
  }
  KOG_DEVICE float at(int j, int i) const { return c[0][j][i] + c[1][j][i] + (c[0][j][i + 2] + c[1][j][i + 2]); }
};

KOG_DEVICE void add_values(const Block&, const Values& values, const float (&p)[kTileRows / 8][2],
                           float (&out)[kDimSteps][4]) {
  u32 high[kTileRows / 8], low[kTileRows / 8];
#pragma unroll
  for (int j = 0; j < kTileRows / 8; j++) {
    HighLow parts(p[j][0], p[j][1]);
    high[j] = parts.high, low[j] = parts.low;
  }
#pragma unroll
  for (int t = 0; t < kDimSteps; t++) {
    u32 a[kTileRows / 4];
#pragma unroll
    for (int j = 0; j < kTileRows / 8; j++) {
      a[2 * j] = low_halves(values.w[2 * j][t], values.w[2 * j + 1][t]);
      a[2 * j + 1] = high_halves(values.w[2 * j][t], values.w[2 * j + 1][t]);
    }
    multiply_add<kF16>(out[t], a, high);
    multiply_add<kF16>(out[t], a, low);
  }
}

}  // namespace kog
