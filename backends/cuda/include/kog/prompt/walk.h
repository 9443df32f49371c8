// Which tiles of a product a block computes: whole ones, round by round, then its even share of the K
// steps of those that are left: of fewer than there are blocks, at most parts of two tiles. Plain C++: tests run it on a
// CPU.
#pragma once
#include <kog/ptx.h>

namespace kog {

struct Product {  // the kernel's argument (products.py)
  const u8* arena;
  const int4* groups;  // of 8 rows: where their run begins, their unit's first slab in it, their first warp (products.py)
  const u8* x;         // arranged
  u16* y;
  float4* partials;           // in a pass of short prompts [part][kTokens][rows of a tile] (short_pass.h)
  int* arrived;               // of each tile that several blocks share; zero before and after
  const float* row_scales;    // of the matrix' rows, if they have one scale each
  int tokens, padded, rows;   // `padded` tokens of x; rows of the matrix
  int row_tiles, token_tiles;
  int steps;                  // K steps of a tile
  int whole;                  // tiles that one block computes
  int slab_shift;             // log2 of parts of K, of which a slab, a fragment of all 16 warps, has one fragment each
  int ring_slot, ring_slot_step;  // slabs a ring slot; from one to the next of a block's stream, in kPlaceBytes
};

struct Segment {
  int tile, first, last;  // K steps [first, last)
  int slot;               // of the block's two places for parts
};

constexpr int kTokenTilesTogether = 8;  // that pass over rows together: their x stays in the L2

struct Walk {
  int block, blocks, wholes, count;
  int rest, shares;     // K steps of the tiles that blocks share; how many blocks do
  int first, last, edge;  // of `rest`, the block's own; where the next tile begins

  KOG_DEVICE Walk(const Product& p, int index, int num_blocks) : block(index), blocks(num_blocks) {
    wholes = block < p.whole ? (p.whole - block - 1) / blocks + 1 : 0;
    rest = (p.row_tiles * p.token_tiles - p.whole) * p.steps;
    shares = rest < blocks ? rest : blocks;
    first = block < shares ? begin_of(block) : 0;
    last = block < shares ? begin_of(block + 1) : 0;
    edge = (first / p.steps + 1) * p.steps;
    count = wholes + (last > first ? (last - 1) / p.steps - first / p.steps + 1 : 0);
  }
  KOG_DEVICE int begin_of(int share) const {
    return static_cast<int>(static_cast<i64>(share) * rest / shares);
  }
  KOG_DEVICE int share_of(int step) const {
    return static_cast<int>((static_cast<i64>(step + 1) * shares - 1) / rest);
  }
  KOG_DEVICE Segment at(const Product& p, int i) const {
    if (i < wholes) return {block + i * blocks, 0, p.steps, 0};
    int begin = edge + (i - wholes - 1) * p.steps, left = last - begin;
    return {p.whole + begin / p.steps, i == wholes ? first - begin : 0, left < p.steps ? left : p.steps, i > wholes};
  }
  // Where the part of a shared tile is that another block has computed.
  KOG_DEVICE int slot_of(const Product& p, int share, int shared_tile) const {
    return begin_of(share) / p.steps == shared_tile ? 0 : 1;
  }
};

struct Place {
  int row_tile, token_tile;
};
KOG_DEVICE Place place_of(const Product& p, int tile) {
  int most = kTokenTilesTogether < p.token_tiles ? kTokenTilesTogether : p.token_tiles;
  int per = most * p.row_tiles, group = tile / per, inside = tile % per;
  int left = p.token_tiles - group * most, wide = left < most ? left : most;
  return {inside / wide, group * most + inside % wide};
}

}  // namespace kog
