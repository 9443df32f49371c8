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

// Until the flags at flag(i), N a lane, nullptr for none, carry the epoch: the warp can then read what
// was stored before they did.
template <int N, class Flag>
KOG_DEVICE void await(Block& b, Step step, Flag flag, u32 epoch) {
  u32 seen[N], late = 0;
#pragma unroll
  for (int i = 0; i < N; i++) seen[i] = flag(i) != nullptr ? load_relaxed(flag(i)) : epoch;
#pragma unroll
  for (int i = 0; i < N; i++) late |= seen[i] ^ epoch;
  if (any_lane(late != 0)) {
    begin_wait(b);
    do {
      u32 place = ~0u;
#pragma unroll
      for (int i = 0; i < N; i++)
        if (seen[i] != epoch) place = place_of(b, flag(i));
      if (give_up(b, step, place, epoch ^ late, epoch)) break;
#pragma unroll
      for (int i = 0; i < N; i++)
        if (seen[i] != epoch) seen[i] = load_relaxed(flag(i));
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
  const u32* flags = b.p.words + Flags::kOffset;
  int from = first / Stage::kUnitRows;
  int to = last > first ? (last + Stage::kUnitRows - 1) / Stage::kUnitRows : from;
  await<kFlags>(
      b, step,
      [&](int i) {
        int unit = from + i * 32 + b.in_warp;
        return unit < to ? flags + unit : nullptr;
      },
      epoch);
}

}  // namespace kog::columns
