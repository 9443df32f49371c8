// A stage's weights in 16 bits, out of the stream, for the products of prompts that prompt.cu does not read itself: a
// fragment of codes becomes kPack fragments in the order in which those of 16-bit weights lie. Plain C++: tests run it on
// a CPU. The generated header (layout/unpack.py) has kRowScales and what values.h asks for.
#pragma once
#include <kog/prompt/values.h>

namespace kog {

struct Unpack {  // the kernel's argument (unpacking.py)
  const u8* arena;
  const u64* fragments;     // of each shard's each unit: the byte of the arena at which each of them begins
  const float* row_scales;  // of each shard's rows, if they have one scale each
  u8* out;
  int unit_fragments, shard_units, rows;  // a unit's; a shard's units and rows
  int parts;                              // into which K is cut
};

// What one thread of 16 warps makes of fragment `index` of all units.
KOG_DEVICE void unpack_fragment(const Unpack& p, int index, int thread) {
  int warp = thread / 32, lane = thread % 32;
  const u8* from = p.arena + p.fragments[index];
  auto codes = *reinterpret_cast<const ThreadWords*>(from + warp * kFragmentBytes + lane * sizeof(ThreadWords));
  u8* to = p.out + (static_cast<u64>(index) * Weights::kPack * kWarps + warp) * kFragmentBytes + lane * sizeof(codes);
  if constexpr (Weights::kCodes < 0) {
    *reinterpret_cast<ThreadWords*>(to) = codes;
  } else {
    const u8* record = from + kWarps * kFragmentBytes + warp * Weights::kRecordBytes;
    Beside beside;
    if constexpr (kRowScales) {
      int unit = index / p.unit_fragments;
      int row = ((unit % p.shard_units) * (kWarps / p.parts) + warp / p.parts) * 8 + lane / 4;
      if (row < p.rows) beside.scale = p.row_scales[static_cast<u64>(unit / p.shard_units) * p.rows + row];
    }
#pragma unroll
    for (int step = 0; step < Weights::kPack; step++) {
      if constexpr (!kRowScales) beside.load(record, lane / 4, step * Weights::kGranules / Weights::kPack);
      *reinterpret_cast<ThreadWords*>(to + step * kWarps * kFragmentBytes) = wide_words(codes, step, beside);
    }
  }
}

}  // namespace kog
