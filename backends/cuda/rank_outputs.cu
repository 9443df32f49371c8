// Module outputs of a prompt's pass from each GPU to all (layout/rank_outputs.py, rank_outputs.py; docs/SYNC.md): a GPU's
// blocks store them into every GPU's memory, each behind its own share the number of the exchange; what comes next on a
// GPU's stream waits for all numbers. The generated header stands before this text.
#include <kog/prompt/hopper.h>

namespace kog {

constexpr int kMostRanks = 8;

struct Push {
  const uint4* from;
  i64 count;  // of 16 bytes
  uint4* to[kMostRanks];     // this GPU's place in the memory of each
  u64* arrived[kMostRanks];  // likewise its words: [kBlocks]
  const u64* gave_up;        // this GPU's, see Await
  const u32* pass;           // its number
  int index, ranks;          // of the exchange in the pass
};
struct Await {
  const u64* arrived;  // [ranks, kBlocks]
  u64* gave_up;        // number of the last exchange that a wait was given up in; block and rank it was for
  i64 limit;           // nanoseconds of a wait
  u16* every;          // what is awaited, [rows, width]
  i64 rows, width;
  const u32* pass;
  int index, ranks;
};
static_assert(sizeof(Push) == kPushBytes && sizeof(Await) == kAwaitBytes);

KOG_DEVICE u64 number_of(const u32* pass, int index) { return static_cast<u64>(*pass) << 16 | static_cast<u64>(index); }

// Nothing of a pass is stored where the end of the one before was waited for in vain: a GPU may still read that one.
KOG_DEVICE void push(const Push& p) {
  if (p.count != 0 && load_acquire_system(p.gave_up) + 1 == number_of(p.pass, 0)) return;
  int thread = thread_index(), block = block_index();
  for (i64 i = static_cast<i64>(block) * kThreads + thread; i < p.count; i += kBlocks * kThreads) {
    uint4 v = p.from[i];
    for (int rank = 0; rank < p.ranks; rank++) p.to[rank][i] = v;
  }
  sync_block();
  if (thread < p.ranks) store_release_system(p.arrived[thread] + block, number_of(p.pass, p.index));
}

// Once a wait of a pass was in vain no other one of that pass is begun; behind an end in vain, but that for the end.
KOG_DEVICE bool came(const Await& p, int word) {
  u64 number = number_of(p.pass, p.index), first = number_of(p.pass, 0) - (p.rows != 0 ? 1 : 0);
  i64 since = 0;
  while (load_acquire_system(p.arrived + word) < number) {
    i64 now = static_cast<i64>(nanoseconds());
    if (since == 0) since = now;
    if (load_acquire_system(p.gave_up) >= first) return false;
    if (now - since <= p.limit) continue;
    store_release_system(p.gave_up + 1, static_cast<u64>(word));
    store_release_system(p.gave_up, number);
    return false;
  }
  return true;
}
// What is void is no number: of each row the first value.
KOG_DEVICE void await(const Await& p) {
  int thread = thread_index();
  bool all = true;
  for (int word = thread; word < p.ranks * kBlocks; word += kThreads) all = came(p, word) && all;
  u32* lost = reinterpret_cast<u32*>(shared_memory());
  if (thread == 0) *lost = 0;
  sync_block();
  if (!all) *lost = 1;
  sync_block();
  if (load_volatile(lost) == 0) return;
  for (i64 row = thread; row < p.rows; row += kThreads) p.every[row * p.width] = 0x7fff;
}

}  // namespace kog

#define KOG_ENTRY(name, Call, run)                                                                     \
  KOG_KERNEL void __launch_bounds__(kog::kThreads) name(const __grid_constant__ kog::Call p) {         \
    kog::start_launch_behind();                                                                        \
    kog::wait_for_launch_before();                                                                     \
    kog::run(p);                                                                                       \
  }
KOG_ENTRY(kog_push, Push, push)
KOG_ENTRY(kog_await, Await, await)
