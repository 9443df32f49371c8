// Tiles of the cache of keys and values, as the tensor core takes them straight from memory.
//
// A warp takes kTileRows positions at once. Scores: heads are the rows of one operand, 8 positions the
// columns of the other, so a thread holds a quarter of one key a group of 8. Outputs: dimensions are the
// rows, positions the depth, heads the columns, so a thread holds an eighth of the values at 2 positions
// a group of 8. Which dimension stands in which row or step is ours to choose (RowShare). Rows of the
// cache are padded with zeros to kRowDim.
#pragma once
#include <kog/words.h>

namespace kog {

constexpr int kDimSteps = kRowDim / 16;
constexpr int kKeyWords = kRowDim / 8;     // of one key in one thread
constexpr int kValueWords = kRowDim / 16;  // of one value in one thread

// A thread's words of a row come in pieces of a load each; the pieces of the threads that share the row lie
// side by side, so that one load of a warp reads whole sectors.
template <int kWords>
constexpr int kPieceOf = kWords % 4 == 0 ? 4 : kWords % 2 == 0 ? 2 : 1;
template <int kWords, int kSharers>
struct RowShare {
  static constexpr int kPiece = kPieceOf<kWords>, kCount = kWords / kPiece,
                       kStride = kSharers * kPiece;
  // Where in the row word `word` of sharer `which` is, in words.
  KOG_DEVICE static int at(int which, int word) {
    return word / kPiece * kStride + which * kPiece + word % kPiece;
  }
  KOG_DEVICE static void load(u32 (&w)[kWords], const u16* row, int which, bool there) {
    const u32* from = reinterpret_cast<const u32*>(row) + which * kPiece;
#pragma unroll
    for (int i = 0; i < kCount; i++, from += kStride) {
      if constexpr (kPiece == 4) {
        uint4 v = load_cache(reinterpret_cast<const uint4*>(from), there);
        w[4 * i] = v.x, w[4 * i + 1] = v.y, w[4 * i + 2] = v.z, w[4 * i + 3] = v.w;
      } else if constexpr (kPiece == 2) {
        uint2 v = load_cache(reinterpret_cast<const uint2*>(from), there);
        w[2 * i] = v.x, w[2 * i + 1] = v.y;
      } else {
        w[i] = load_cache(from, there);
      }
    }
  }
  // Of a row in shared memory; zeros if it is not `there`.
  KOG_DEVICE static void take(u32 (&w)[kWords], const u16* row, int which, bool there) {
    const u32* from = reinterpret_cast<const u32*>(row) + which * kPiece;
#pragma unroll
    for (int i = 0; i < kCount; i++, from += kStride) {
      if constexpr (kPiece == 4) {
        uint4 v = there ? *reinterpret_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
        w[4 * i] = v.x, w[4 * i + 1] = v.y, w[4 * i + 2] = v.z, w[4 * i + 3] = v.w;
      } else if constexpr (kPiece == 2) {
        uint2 v = there ? *reinterpret_cast<const uint2*>(from) : uint2{0, 0};
        w[2 * i] = v.x, w[2 * i + 1] = v.y;
      } else {
        w[i] = there ? *from : 0;
      }
    }
  }
};

// Rows of one tile, kRows of them a thread, a share of each; Of::row says which rows, Of::share which share.
template <class Of, int kRows, int kWords, int kSharers>
struct TileRows {
  using Share = RowShare<kWords, kSharers>;
  u32 w[kRows][kWords];

  // Positions [at, end) of `from`; zeros behind them.
  KOG_DEVICE void load(const Block& b, const u16* from, int at, int end) {
#pragma unroll
    for (int i = 0; i < kRows; i++) {
      int position = at + Of::row(b, i);
      Share::load(w[i], from + static_cast<u64>(position) * kRowDim, Of::share(b), position < end);
    }
  }
  // A tile in shared memory, of which `count` rows are there; zeros behind them.
  KOG_DEVICE void take(const Block& b, const u8* tile, int count) {
    const u16* rows = reinterpret_cast<const u16*>(tile);
#pragma unroll
    for (int i = 0; i < kRows; i++)
      Share::take(w[i], rows + Of::row(b, i) * kRowDim, Of::share(b), Of::row(b, i) < count);
  }
  // Rows that lie in shared memory: word_of(row) says at which of its words, below 0 for none.
  template <class WordOf>
  KOG_DEVICE void patch(const Block& b, const u16* rows, WordOf word_of) {
#pragma unroll
    for (int i = 0; i < kRows; i++) {
      int word = word_of(Of::row(b, i));
      if (word < 0) continue;
      const u32* from = reinterpret_cast<const u32*>(rows) + word;
#pragma unroll
      for (int n = 0; n < kWords; n++) w[i][n] = from[Share::at(Of::share(b), n)];
    }
  }
};
// Keys: group j holds the key at position 8 * j + thread / 4 of the tile, a quarter a thread.
struct Keys : TileRows<Keys, kTileRows / 8, kKeyWords, 4> {
  KOG_DEVICE static int row(const Block& b, int j) { return 8 * j + b.in_warp / 4; }
  KOG_DEVICE static int share(const Block& b) { return b.in_warp % 4; }
};
// Values: row i holds the value at position `row` of the tile, an eighth a thread.
struct Values : TileRows<Values, kTileRows / 4, kValueWords, 8> {
  KOG_DEVICE static int row(const Block& b, int i) {
    return i / 2 * 8 + b.in_warp % 4 * 2 + i % 2;
  }
  KOG_DEVICE static int share(const Block& b) { return b.in_warp / 4; }
  // The first of the two dimensions of word `word` of this thread.
  KOG_DEVICE static int dimension(const Block& b, int word) { return 2 * Share::at(share(b), word); }
};

KOG_DEVICE u16* cache_at(const Block& b, int slot, int layer, int head) {
  int lane = b.lane - rank_of(b.p) * kRankLanes;  // of this rank's, which keep their own heads
  u64 home = (static_cast<u64>(layer) * kRankLanes + lane) * kKvHeads + head, plane = static_cast<u32>(b.p.plane);
  // Counted in 64 bits a kernel of columns spills less, and one of a token more: benchmarks/cuda-log.md#context-argument
  if constexpr (kColumns > 1) return b.p.cache + slot * (kCachePlanes * plane) + 2 * home * plane;
  return b.p.cache + (slot * kCachePlanes + 2 * static_cast<u32>(home)) * plane;
}
KOG_DEVICE u16* cache_of(const Block& b, int head) {
  return cache_at(b, b.small->slot, b.layer, head);
}

// What a layer's cache holds of a head.
struct Cached {
  const u16 *keys, *values;

  KOG_DEVICE Cached(const Block& b, int head)
      : keys(cache_of(b, head)), values(keys + static_cast<u32>(b.p.plane)) {}
};

}  // namespace kog
