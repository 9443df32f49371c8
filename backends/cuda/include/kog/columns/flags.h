// Readiness of what many blocks read, told apart from it: a word a unit of rows, which carries the number
// of the layer's run. A reader polls the flags of what it needs, then reads once, as much as it likes:
// words of several columns that carry their own readiness would be polled by the megabyte.
#pragma once
#include <kog/words.h>

namespace kog::columns {

// By a whole warp, after what its lanes have stored, or what the block had stored before a barrier.
KOG_DEVICE void raise_flag(const Block& b, u32* flag, u32 epoch) {
  sync_warp();
  if (b.in_warp == 0) store_release(flag, epoch);
}

// Until the flags at these places among the words, N a lane, below 0 for none, carry the epoch: the warp
// can then read what was stored before they did.
template <int N>
KOG_DEVICE void await(Block& b, Step step, const int (&at)[N], u32 epoch) {
  u32 seen[N], late = 0;
#pragma unroll
  for (int i = 0; i < N; i++) seen[i] = at[i] >= 0 ? load_relaxed(b.p.words + at[i]) : epoch;
#pragma unroll
  for (int i = 0; i < N; i++) late |= seen[i] ^ epoch;
  if (any_lane(late != 0)) {
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
  fence_gpu();  // pairs with the release
  sync_warp();
}

// The flags of the units that hold rows [first, last) of Stage's outputs, at most kMost rows.
template <class Stage, class Flags, int kMost>
KOG_DEVICE void await_rows(Block& b, Step step, int first, int last, u32 epoch) {
  constexpr int kUnitsMost = kMost / Stage::kUnitRows + 2, kFlags = (kUnitsMost + 31) / 32;
  int from = first / Stage::kUnitRows, at[kFlags];
  int to = last > first ? (last + Stage::kUnitRows - 1) / Stage::kUnitRows : from;
#pragma unroll
  for (int i = 0; i < kFlags; i++) {
    int unit = from + i * 32 + b.in_warp;
    at[i] = unit < to ? Flags::kOffset + unit : -1;
  }
  await(b, step, at, epoch);
}

}  // namespace kog::columns
