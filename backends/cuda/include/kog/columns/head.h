// The head of all columns: logits of one pass over its rows, then a token a column that all blocks
// agree on.
//
//   plain requests   every block publishes its best of each column to all ranks; of each rank one block a
//                    column picks the argmax, the same on all, and publishes it there
//   the others       edited, cut or with log-probabilities: ../choose.h, column after column
#pragma once
#include <kog/choose.h>
#include <kog/columns/mix.h>

namespace kog::columns {

KOG_DEVICE const u32* request_of(const Block& b, int column) {
  return b.p.request + b.small->cursors[column].slot * kRequestWords;
}
// For sm_100a and sm_120a NVRTC 13.0 spills where the thread stands around the call of `choose`, and reads it back all
// over the head: 92 loads and stores of Qwen3-8B's chunks for 29 that ask anew. For sm_90a it does not
// (benchmarks/cuda-log.md#blackwell).
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr bool kBlackwell = true;
#else
constexpr bool kBlackwell = false;
#endif
// A column whose next token takes nothing but every row's logit once.
KOG_DEVICE bool is_plain(const Block& b, int column) {
  return (request_of(b, column)[Request::kFlags] & kWantsMore) == 0;
}

// Of a block among those of all ranks. Lanes that never meet may be a token apart, on ranks: two buffers there.
KOG_DEVICE u64* best_of_column(const Block& b, u64 epoch, int column, int block) {
  int buffer = static_cast<int>(epoch >> 32) % ColumnBestWords::kBuffers;
  return pairs_of<ColumnBestWords>(b) + buffer * (ColumnBestWords::kStride / 2) +
         4 * (column * kAllBlocks + block);
}
KOG_DEVICE u64* argmax_of_column(const Block& b, int column) {
  return pairs_of<ColumnArgmaxWords>(b) + 2 * column;
}

// This block's best of every column, from its threads' best of their own, and beside each the host's word, which
// thread 0 of block 0 brings: whichever columns have logits, all hear it. Threads of a column lie side by side.
KOG_DEVICE void publish_best(Block& b, const Candidate& mine, int column, u64 epoch, u32 control) {
  constexpr int kRows = LmHead::kUnitRows < kWarpThreads ? LmHead::kUnitRows : kWarpThreads;
  Candidate* local = reinterpret_cast<Candidate*>(b.scratch);  // [column][warp]
  u32* said = reinterpret_cast<u32*>(local + kColumns * kWarps);
  static_assert(kColumns * kWarps * sizeof(Candidate) + sizeof(u32) <= kScratchBytes);
  if (b.thread == 0) *said = control;
  if (b.in_warp < kColumns) local[b.in_warp * kWarps + b.warp] = nobody();
  sync_warp();
  Candidate own = best_of_threads<kRows>(mine);
  bool leads = b.in_warp % kRows == 0 && b.in_warp < OperandLayout<LmHead>::kPieceWords;
  if (leads) local[column * kWarps + b.warp] = own;
  sync_consumers();
  if (b.warp >= b.p.num_requests) return;
  Candidate best = best_of_warp(b.in_warp < kWarps ? local[b.warp * kWarps + b.in_warp] : nobody());
  if (b.in_warp != 0 || must_leave(b)) return;  // a block that gave up lets no token come about
  put_candidate(b, best_of_column(b, epoch, b.warp, block_of_all(b)), epoch, best, *said);
}

// The block whose warp 0 picks a column's argmax.
KOG_DEVICE int column_argmax_block(int column) { return column * kBlocks / kColumns; }

// The best of a rank's blocks, and the host's word, which block 0 of rank 0 brought.
KOG_DEVICE Candidate best_of_rank(Block& b, int rank, int column, u64 epoch, u32& control) {
  constexpr int kEach = (kBlocks + kWarpThreads - 1) / kWarpThreads;  // of a thread, on their way together
  return poll_candidates<kEach>(
      b, epoch,
      [&](int i) { return best_of_column(b, epoch, column, rank * kBlocks + kWarpThreads * i + b.in_warp); },
      [&](int i) { return kWarpThreads * i + b.in_warp < kBlocks; }, control);
}
KOG_DEVICE void pick_argmax(Block& b, int column, u64 epoch) {
  u32 control;
  Candidate best = best_of_rank(b, 0, column, epoch, control);
#pragma unroll 1
  for (int rank = 1; rank < kRanks; rank++) {
    u32 none;
    Candidate other = best_of_rank(b, rank, column, epoch, none);
    if (beats(other, best)) best = other;
  }
  if (b.in_warp != 0 || must_leave(b)) return;
  put_own_pair(argmax_of_column(b, column), epoch, static_cast<u32>(token_of(best)), control);
}

// The tokens of plain columns to all threads, behind the next barrier; by one warp.
KOG_DEVICE void gather_argmaxes(Block& b, bool mine, u64 epoch) {
  u64 v = poll_pair(b, Step::kArgmax, epoch, argmax_of_column(b, b.in_warp % kColumns), mine);
  if (!mine) return;
  b.small->chosen[b.in_warp] = static_cast<int>(v >> 32);
  b.small->control = static_cast<u32>(v);
}

// The tokens of the columns that have logits in this step into small->chosen, for every thread.
template <class From = FromLayers>
KOG_DEVICE void run_head(Block& b) {
  u32 control = 0;
  if (b.block == 0 && b.thread == 0) control = static_cast<u32>(load_system(b.p.mailbox));
  b.begin_stage();
  Operands<LmHead> x = head_operands<From>(b);
  int column = item_of<LmHead>(b, b.warp).column;  // of all pieces that the warp finishes
  Candidate mine = nobody();
  Walk walk;
  head_rows(b, walk, x, NothingAhead(), [&](const Item& item, int id, float logit) {
    if (!has_head(b, item.column, steps_of(b))) return;
    const u32* request = request_of(b, item.column);
    if ((request[Request::kFlags] & kWantsMore) != 0)
      raw_scores(b.p, item.column)[id] = logit;
    else
      compete(mine, request, logit, id, position_of(b, item.column, steps_of(b)) + 1);
  });
  b.begin_stage();
  stamp(b, Point::kQkvProj);
  bool plain = false;
  for (int c = 0; c < b.p.num_requests; c++) plain |= is_plain(b, c) && has_head(b, c, steps_of(b));
  if (plain) {
    u64 epoch = static_cast<u64>(count_up(b, &WarpState::heads)) << 32;
    publish_best(b, mine, column, epoch, control);
    rejoin();
    if (b.warp == 0) {
      for (int c = 0; c < b.p.num_requests; c++)
        if (column_argmax_block(c) == b.block && is_plain(b, c) && has_head(b, c, steps_of(b)))
          pick_argmax(b, c, epoch);
      rejoin();
      bool waits = b.in_warp < b.p.num_requests && is_plain(b, b.in_warp) &&
                   has_head(b, b.in_warp, steps_of(b));
      gather_argmaxes(b, waits, epoch);
    }
  }
  for (int c = 0; c < b.p.num_requests; c++) {
    if (is_plain(b, c) || !has_head(b, c, steps_of(b))) continue;
    sync_consumers();  // the request in hand is the last one's for nobody
    int position = position_of(b, c, steps_of(b));
    select_request(b, b.small->cursors[c], position);
    int heads = static_cast<int>(count_up(b, &WarpState::heads)) - 1;
    choose(b.p, b.request, {heads, position, control, c, false});
    if constexpr (kBlackwell) b.begin_stage();
    sync_consumers();
    b.small->chosen[c] = agreed(b);  // every thread writes the same
  }
  stamp(b, Point::kAttention);
}

}  // namespace kog::columns
