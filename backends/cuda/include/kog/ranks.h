// The ranks of one launch each. Every rank has words of its own at the same places, which all ranks write and it
// alone reads: what crosses ranks is stored into all of them (docs/SYNC.md, From rank to rank).
#pragma once
#include <kog/block.h>

namespace kog {

// The same word of another rank. A template, since the argument of one rank has no peers.
template <class Argument, class Word>
KOG_DEVICE Word* word_at_rank(const Argument& p, int rank, Word* own) {
  if constexpr (kRanks > 1)
    return (Word*)static_cast<u32*>(p.peers[rank]) + (own - (Word*)static_cast<u32*>(p.words));
  else
    return own;
}
KOG_DEVICE void push(const Block& b, u32* own, u32 v) {
#pragma unroll
  for (int rank = 0; rank < kRanks; rank++) store_relaxed(word_at_rank(b.p, rank, own), v);
}

// Two words under the number of an exchange of all blocks, which grows from one to the next (exchange.h).
KOG_DEVICE void put_own_pair(u64* own, u64 number, u32 x, u32 y) {
  store_relaxed_pair(own, number | x, number | y);
}
KOG_DEVICE void put_pair_at_rank(const Block& b, int rank, u64* own, u64 number, u32 x, u32 y) {
  put_own_pair(word_at_rank(b.p, rank, own), number, x, y);
}
KOG_DEVICE void put_pair(const Block& b, u64* own, u64 number, u32 x, u32 y) {
#pragma unroll
  for (int rank = 0; rank < kRanks; rank++) put_pair_at_rank(b, rank, own, number, x, y);
}

// A wait of this rank has expired: all ranks leave. In a word of its own, beside each rank's own record.
constexpr int kPeerExpired = 8;
template <class Argument>
KOG_DEVICE void tell_ranks_to_leave(const Argument& p) {
  if constexpr (kRanks > 1)
#pragma unroll 1
    for (int rank = 0; rank < kRanks; rank++)
      if (rank != p.rank) store_relaxed(p.errors[rank] + kPeerExpired, 1);
}
template <class Argument>
KOG_DEVICE bool told_to_leave(const Argument& p) {
  if constexpr (kRanks > 1) return load_relaxed(p.error + kPeerExpired) != 0;
  return false;
}

}  // namespace kog
