// Hints that a vector which many blocks read is there: a word a unit, which carries the number of
// the layer's run. Words of several columns would be polled by the megabyte; a reader that finds none of
// what it needs polls its hints, then reads. The words themselves still say whether they are there
// (docs/SYNC.md).
#pragma once
#include <kog/words.h>

namespace kog::columns {

// Behind what the warp has stored.
KOG_DEVICE void raise_flag(const Block& b, u32* flag, u32 epoch) {
  sync_warp();
  if (b.in_warp == 0) store_relaxed(flag, epoch);
  rejoin();
}

// Ask until ask() finds nothing late: it returns, for the whole warp, whether anything is. In one
// place, so that its code is there once. `word_index` and `seen` are what an error reports.
template <class Ask>
KOG_DEVICE void ask_until_ready(Block& b, Step step, u32 word_index, u32 seen, u32 wanted, Ask ask) {
  bool waits = false;
  rejoin();
  while (ask()) {
    if (!waits) begin_wait(b);
    waits = true;
    if (give_up(b, step, word_index, seen, wanted)) break;
  }
  if (waits) end_wait(b);
}

// Until the flags at these places among the words, N a thread, below 0 for none, carry the epoch; of hints,
// until one of the warp's does (kFirst): what the hint is about is asked for then, and again where it is
// late. That way the last answer costs one round trip, not two (benchmarks/cuda-log.md#hint-first).
template <bool kFirst, int N>
KOG_DEVICE void await(Block& b, Step step, const int (&at)[N], u32 epoch) {
  u32 seen[N];
#pragma unroll
  for (int i = 0; i < N; i++) seen[i] = at[i] >= 0 ? ~epoch : epoch;
  int word_index = -1;
#pragma unroll
  for (int i = 0; i < N; i++)
    if (at[i] >= 0) word_index = at[i];
  // A thread that waits for nothing has nothing to report: to it, what it wants has been seen.
  u32 before = word_index >= 0 ? epoch - 1 : epoch;
  ask_until_ready(b, step, static_cast<u32>(word_index), before, epoch, [&] {
    u32 late = 0;
    bool there = false;
#pragma unroll
    for (int i = 0; i < N; i++)
      if (seen[i] != epoch) seen[i] = load_relaxed(b.p.words + at[i]);
#pragma unroll
    for (int i = 0; i < N; i++) {
      late |= seen[i] ^ epoch;
      there |= at[i] >= 0 && seen[i] == epoch;
    }
    return any_in_warp(late != 0) && !(kFirst && any_in_warp(there));
  });
}

}  // namespace kog::columns
