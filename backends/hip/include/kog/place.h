// Which of the kernel's blocks a workgroup is, by the XCD that it lies on: blocks side by side work on one lane, or on
// one key/value head, and are to share an L2. Where workgroups lie is read, not assumed, at every launch; XCDs that
// have more workgroups than others, or fewer, change who is neighbours with whom, and nothing else.
//
//   XCDs that have workgroups, in the order of their numbers: each the next of equal runs of blocks; who finds its
//   XCD's run full takes what another's has left
#pragma once
#include <kog/words.h>

namespace kog {

static_assert(kBlocks <= kConsumers, "a thread looks at one workgroup");

// Workgroups of each XCD: all, and those before this one. In shared memory, behind a word a workgroup.
struct DieCounts {
  int all[kDies], before[kDies];
};
constexpr int kCountsAt = kBlocks * 4;
static_assert(kScratchBytes >= kCountsAt + static_cast<int>(sizeof(DieCounts)));

// Before the first Block is made.
KOG_DEVICE void begin_place() {
  if (wave_index() == 0 && in_wave() == 0) *in_shared(place_in_shared()) = workgroup_index();
  sync_consumers();
}

// The block that a workgroup is: number `own` of those of `die`.
KOG_DEVICE int block_of(const DieCounts& counts, int die) {
  // Rolled: it runs once a launch.
  int dies = 0, beyond = 0, number = 0, first = 0, last = 0;
#pragma unroll 1
  for (int d = 0; d < kDies; d++) dies += counts.all[d] > 0;
  // How many before this one found no room, and this one's run.
#pragma unroll 1
  for (int d = 0, n = 0; d < kDies; d++) {
    if (counts.all[d] == 0) continue;
    int room = (n + 1) * kBlocks / dies - n * kBlocks / dies;
    if (d == die) number = counts.before[d], first = n * kBlocks / dies, last = first + room;
    beyond += counts.before[d] > room ? counts.before[d] - room : 0;
    n++;
  }
  if (first + number < last) return first + number;
#pragma unroll 1
  for (int d = 0, n = 0; d < kDies; d++) {
    if (counts.all[d] == 0) continue;
    int end = (n + 1) * kBlocks / dies, begin = n * kBlocks / dies + counts.all[d];
    int left = end > begin ? end - begin : 0;
    if (beyond < left) return begin + beyond;
    beyond -= left;
    n++;
  }
  return 0;  // nobody comes here: there are as many places as workgroups
}

// By all threads, before anything is done for which the block's number counts.
KOG_DEVICE void find_place(Block& b) {
  u32* dies = b.p.words + PlacesWords::kOffset;
  if (b.thread == 0) store_relaxed(dies + b.block, static_cast<u32>(die_index()) << 1 | 1);
  rejoin();
  u32 w[1], *found = reinterpret_cast<u32*>(b.scratch);
  poll_words(b, Step::kPlaces, [&](int) { return dies + b.thread; }, [&](int) { return b.thread < kBlocks; }, 1, w);
  auto* counts = reinterpret_cast<DieCounts*>(b.scratch + kCountsAt);
  if (b.thread < kBlocks) found[b.thread] = w[0] >> 1 & (kDies - 1);
  sync_consumers();
  if (b.thread < kDies) {
    int all = 0, before = 0;
#pragma unroll 1
    for (int i = 0; i < kBlocks; i++) {
      bool here = found[i] == static_cast<u32>(b.thread);
      all += here, before += here && i < b.block;
    }
    counts->all[b.thread] = all, counts->before[b.thread] = before;
  }
  sync_consumers();
  b.place.index = static_cast<int>(of_wave(static_cast<u32>(block_of(*counts, die_index()))));
  if (b.thread == 0) *in_shared(place_in_shared()) = b.place.index;
  sync_consumers();
  b.begin_stage();
}

}  // namespace kog
