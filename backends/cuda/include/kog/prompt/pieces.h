// What a product reads of the stream: eight rows by the K of a stage of its ring, a piece of codes and one of scales.
// Plain C++: tests run it on a CPU. The generated header is layout/prompt.py's.
#pragma once
#include <kog/prompt/values.h>
#include <kog/prompt/walk.h>

namespace kog {

constexpr bool kNarrow = Weights::kCodes >= 0;
constexpr int kStageBlocks = kBlocks * kHalves, kFragments = kStageBlocks / Weights::kPack;
constexpr int kPieceBytes = kFragments * kFragmentBytes;
// Scales, by the 16 bytes that a copy can begin with and be a multiple of.
constexpr int kRecord = Weights::kRecordBytes, kOdd = kFragments * kRecord % 16;
constexpr int kScaleBytes = kFragments * kRecord + (kOdd ? 16 - kOdd : 0);
constexpr int kSlabBytes = kWarps * (kFragmentBytes + kRecord);  // of a fragment of all warps
static_assert((kOdd == 0 || 16 % kOdd == 0) && kSlabBytes % kPlaceBytes == 0);
static_assert(kStageBlocks % Weights::kPack == 0);

constexpr int kSlab = kSlabBytes / kPlaceBytes;

struct Pieces {
  u32 from;  // where these rows' first part of K is, were their run without other stages' slots, in kPlaceBytes
  int fragment, warp;

  Pieces() = default;
  KOG_DEVICE explicit Pieces(const int4& group)
      : from(static_cast<u32>(group.x) + static_cast<u32>(group.y * kSlab + group.z * (kFragmentBytes / kPlaceBytes))),
        fragment(group.y),
        warp(group.z) {}
  // From these rows' fragment `index` on, counted through all parts of K of a slab, then of the next one.
  KOG_DEVICE const u8* codes(const Product& p, int index, u32 reciprocal) const {
    int ahead = index >> p.slab_shift, slot = (fragment + ahead) * reciprocal >> 16;
    u32 others = p.ring_slot_step - p.ring_slot * kSlab;  // between two of the block's slots
    u32 at = from + slot * others + (ahead * kSlab + inside(p, index) * (kFragmentBytes / kPlaceBytes));
    return p.arena + static_cast<u64>(at) * kPlaceBytes;
  }
  // Of that fragment, whose codes these are: 16 bytes that its scales begin in.
  KOG_DEVICE const u8* scales(const Product& p, int index, const u8* codes) const {
    int owner = warp + inside(p, index);
    return codes + (kWarps - owner) * kFragmentBytes + (owner * kRecord & ~15);
  }
  KOG_DEVICE static int inside(const Product& p, int index) { return index & ((1 << p.slab_shift) - 1); }
};
// Of p.ring_slot, times 65,536: exact below 32,768 fragments, for 4 a ring slot.
KOG_DEVICE u32 ring_slot_reciprocal(const Product& p) { return (65535 + p.ring_slot) / p.ring_slot; }

// Step k of a thread's codes of a fragment in 16 bits. `scales` are the piece's of this stage of K.
KOG_DEVICE ThreadWords widen(const ThreadWords& codes, const u8* scales, int stage, int fragment, int k, int row,
                             float row_scale) {
  Beside beside;
  beside.scale = row_scale;
  if constexpr (kRecord > 0) {
    const u8* record = scales + (stage * kFragments * kRecord & 15) + fragment * kRecord;
    beside.load(record, row, k * Weights::kGranules / Weights::kPack);
  }
  return wide_words(codes, k, beside);
}

}  // namespace kog
