// Codes of narrow weights as the stream has them (kog_triton/schedule/narrow_packing.py), as 16-bit values.
#pragma once
#include <kog/ptx.h>

namespace kog {

// Two codes of E4M3 of four, woven, as 16-bit values: those that lie in place, and the others, in two parts. They are
// off by what the exponents' biases differ; subnormal codes become subnormal values.
KOG_DEVICE u32 e4m3_first(u32 q) { return q & (kF16 ? 0xbf80bf80u : 0x87f087f0u); }
KOG_DEVICE u32 e4m3_second(u32 q) {
  if constexpr (kF16) return and_or(q << 7, 0x3f803f80u, (q << 1) & 0x80008000u);
  return and_or(q << 4, 0x80f080f0u, (q >> 4) & 0x07000700u);
}

}  // namespace kog
