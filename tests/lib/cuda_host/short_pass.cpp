// Runs one kernel of a prompt's pass (fibers.h, PASS), block after block; with a seed the last block first: no block of a
// pass counts on another's being earlier.
#include "fibers.h"

const kog::u32 *kog::host::late_first, *kog::host::late_last;
kog::i64 kog::host::late_rounds;
std::vector<kog::host::Fetch> kog::host::fetches;

// 0, or -1 if a block did not end within `most` rounds.
extern "C" long kog_run(const kog::host::Argument* call, int blocks, int seed, long most) {
  using namespace kog::host;
  argument = call, num_blocks = blocks;
  Dice dice(seed);
  for (int i = 0; i < blocks; i++) {
    BlockRunner block(0, seed != 0 ? blocks - 1 - i : i);
    for (ticks = 0; !block.ended(); ticks++) {
      if (ticks == most) return -1;
      block.round(seed != 0 ? &dice : nullptr, seed < 0);
    }
  }
  return 0;
}
