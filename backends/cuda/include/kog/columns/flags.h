// Hints that a vector which many blocks read is there: a word a unit, which carries the number of the
// layer's run. Words of several columns would be polled by the megabyte; a reader polls the hints of what it
// needs, then reads once. Readiness is still in the words themselves (../words.h): what they are read as is
// never older than their phase says, whatever the hint says, and no store waits for another.
#pragma once
#include <kog/words.h>

namespace kog::columns {

// Behind what the warp has stored.
KOG_DEVICE void raise_flag(const Block& b, u32* flag, u32 epoch) {
  sync_warp();
  if (b.in_warp == 0) store_relaxed(flag, epoch);
}

// Until the flags at these places among the words, N a lane, below 0 for none, carry the epoch.
template <int N>
KOG_DEVICE void await(Block& b, Step step, const int (&at)[N], u32 epoch) {
  u32 seen[N], late = 0;
#pragma unroll
  for (int i = 0; i < N; i++) seen[i] = at[i] >= 0 ? load_relaxed(b.p.words + at[i]) : epoch;
#pragma unroll
  for (int i = 0; i < N; i++) late |= seen[i] ^ epoch;
  if (!any_lane(late != 0)) return;
  begin_wait(b);
  do {
    int place = -1;
#pragma unroll
    for (int i = 0; i < N; i++)
      if (seen[i] != epoch) place = at[i];
    if (give_up(b, step, static_cast<u32>(place), epoch ^ late, epoch)) break;
#pragma unroll
    for (int i = 0; i < N; i++)
      if (seen[i] != epoch) seen[i] = load_relaxed(b.p.words + at[i]);
    late = 0;
#pragma unroll
    for (int i = 0; i < N; i++) late |= seen[i] ^ epoch;
  } while (any_lane(late != 0));
  end_wait(b);
}

// Ask until ask() finds nothing stale: it returns, for the whole warp, whether anything is.
template <class Ask>
KOG_DEVICE void ask_until_ready(Block& b, Step step, const u32* place, u32 phase, Ask ask) {
  if (!ask()) return;
  begin_wait(b);
  while (!give_up(b, step, place_of(b, place), phase ^ 1, phase) && ask()) {
  }
  end_wait(b);
}

}  // namespace kog::columns
