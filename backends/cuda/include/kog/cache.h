// Tiles of the cache of keys and values, as the tensor core takes them straight from memory.
//
// A warp takes kTileRows positions at once. Scores: heads are the rows of one operand, 8 positions the
// columns of the other, so a lane holds a quarter of one key a group of 8. Outputs: dimensions are the
// rows, positions the depth, heads the columns, so a lane holds an eighth of the values at 2 positions
// a group of 8. Which dimension stands in which row or step is ours to choose: each lane's are side by
// side. Rows of the cache are padded with zeros to kRowDim.
#pragma once
#include <kog/words.h>

namespace kog {

constexpr int kRowDim = (kHeadDim + 15) / 16 * 16;
constexpr int kDimSteps = kRowDim / 16;
constexpr int kKeyWords = kRowDim / 8;     // of one key in one lane
constexpr int kValueWords = kRowDim / 16;  // of one value in one lane
// Wider heads take half as many positions: two tiles have to fit into registers.
constexpr int kTileRows = kRowDim <= 64 ? 16 : 8;

template <int N>
KOG_DEVICE void load_cache_words(u32 (&w)[N], const u16* from) {
  if constexpr (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
      uint4 v = load_cache(reinterpret_cast<const uint4*>(from) + i);
      w[4 * i] = v.x, w[4 * i + 1] = v.y, w[4 * i + 2] = v.z, w[4 * i + 3] = v.w;
    }
  } else if constexpr (N % 2 == 0) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
      uint2 v = load_cache(reinterpret_cast<const uint2*>(from) + i);
      w[2 * i] = v.x, w[2 * i + 1] = v.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) w[i] = load_cache(reinterpret_cast<const u32*>(from) + i);
  }
}

// Keys of one tile: group j holds the key at position 8 * j + lane / 4 of the tile.
struct Keys {
  u32 w[kTileRows / 8][kKeyWords];

  KOG_DEVICE static int row(const Block& b, int j) { return 8 * j + b.in_warp / 4; }
  KOG_DEVICE static int column(const Block& b) { return b.in_warp % 4 * (kRowDim / 4); }
  // Positions [at, end) of `from`; zeros behind them.
  KOG_DEVICE void load(const Block& b, const u16* from, int at, int end) {
#pragma unroll
    for (int j = 0; j < kTileRows / 8; j++) {
      int position = at + row(b, j);
#pragma unroll
      for (int i = 0; i < kKeyWords; i++) w[j][i] = 0;
      if (position < end)
        load_cache_words(w[j], from + static_cast<u64>(position) * kRowDim + column(b));
    }
  }
  // The tile's key number `which` is this one, in shared memory.
  KOG_DEVICE void patch(const Block& b, int which, const u16* key) {
    const u32* from = reinterpret_cast<const u32*>(key + column(b));
#pragma unroll
    for (int j = 0; j < kTileRows / 8; j++)
      if (row(b, j) == which)
#pragma unroll
        for (int i = 0; i < kKeyWords; i++) w[j][i] = from[i];
  }
};

// Values of one tile: row i holds the value at position `row` of the tile.
struct Values {
  u32 w[kTileRows / 4][kValueWords];

  KOG_DEVICE static int row(const Block& b, int i) {
    return i / 2 * 8 + b.in_warp % 4 * 2 + i % 2;
  }
  KOG_DEVICE static int column(const Block& b) { return b.in_warp / 4 * (kRowDim / 8); }
  KOG_DEVICE void load(const Block& b, const u16* from, int at, int end) {
#pragma unroll
    for (int i = 0; i < kTileRows / 4; i++) {
      int position = at + row(b, i);
#pragma unroll
      for (int n = 0; n < kValueWords; n++) w[i][n] = 0;
      if (position < end)
        load_cache_words(w[i], from + static_cast<u64>(position) * kRowDim + column(b));
    }
  }
  KOG_DEVICE void patch(const Block& b, int which, const u16* value) {
    const u32* from = reinterpret_cast<const u32*>(value + column(b));
#pragma unroll
    for (int i = 0; i < kTileRows / 4; i++)
      if (row(b, i) == which)
#pragma unroll
        for (int n = 0; n < kValueWords; n++) w[i][n] = from[n];
  }
};

KOG_DEVICE u16* cache_of(const Block& b, int head) {
  u64 home = (static_cast<u64>(b.layer) * kLanes + b.lane) * kKvHeads + head;
  return b.p.cache + b.small->slot * kCacheStride + home * 2 * kMaxContext * kRowDim;
}

}  // namespace kog
