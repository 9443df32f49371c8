// Runs every block of the kernel on one CPU thread, as fibers (fibers.h).
#include "fibers.h"

const kog::u32 *kog::host::late_first, *kog::host::late_last;
kog::i64 kog::host::late_rounds;
std::vector<kog::host::Fetch> kog::host::fetches;

// In the next run stores to `count` words land late (kog/alone.h).
extern "C" void kog_store_late(const kog::u32* first, long count, long rounds) {
  kog::host::late_first = first;
  kog::host::late_last = first + count;
  kog::host::late_rounds = rounds;
}

// What the last run asked to come into the L2, `count` places and their bytes.
extern "C" const kog::host::Fetch* kog_fetches(long* count) {
  *count = static_cast<long>(kog::host::fetches.size());
  return kog::host::fetches.data();
}

// `call` is the argument of each rank. The number of rounds it took, or -1 if the blocks did not end within `most`. Warps run in an
// order that `seed` sets; in every round some blocks, drawn anew, do not run at all. Below 0 single
// warps are held back as well, for many rounds. Blocks [absent, absent + count), counted over all ranks, never run:
// the others must give up.
extern "C" long kog_run(const kog::host::Argument* call, int seed, int absent, int count, long most) {
  using namespace kog::host;
  argument = call;
  ticks = 0;
  fetches.clear();
  constexpr int kBlocks = kog::kRanks * kog::kBlocks;
  BlockRunner* blocks[kBlocks];
  for (int i = 0; i < kBlocks; i++) blocks[i] = new BlockRunner(i / kog::kBlocks, i % kog::kBlocks);
  Dice dice(seed);
  bool waits = true;
  while (waits && ticks < most) {
    ticks++;
    waits = false;
    for (BlockRunner* block : blocks) land_stores(block->state());
    for (int i = 0; i < kBlocks; i++) {
      if ((i >= absent && i < absent + count) || blocks[i]->ended()) continue;
      waits = true;
      if (seed == 0 || dice.below(4) != 0) blocks[i]->round(seed != 0 ? &dice : nullptr, seed < 0);
    }
  }
  late_last = late_first;
  for (BlockRunner* block : blocks) delete block;
  return waits ? -1 : static_cast<long>(ticks);
}
