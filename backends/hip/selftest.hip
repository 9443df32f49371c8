// What the kernel relies on of the machine, tried on it before a model is opened (selftest.py): words reach every block
// whatever its XCD, rows written through and read behind an acquire are never old ones, the host and the kernel hear
// each other while it runs. A header with kThreads stands before this text.
#include <kog/ptx.h>

namespace kog {

constexpr int kRowWords = 64;
constexpr u32 kNoWord = 1, kOldRow = 2, kNoHost = 4;

struct SelfTest {
  u32* words;  // one a block: the half round that it has ended
  u32* rows;   // [blocks, kRowWords]
  u64* mailbox;  // mapped: the host's word, then the kernel's
  u32* found;  // [blocks, 2]: the XCD, what went wrong
  u64 limit;   // nanoseconds of a wait
  int blocks, rounds;
};

KOG_DEVICE u32 row_word(int block, int i, int round) {
  u32 v = static_cast<u32>(block * kRowWords + i) * 2654435761u + static_cast<u32>(round) * 40503u;
  return v ^ v >> 15;
}

template <class There>
KOG_DEVICE bool comes(const SelfTest& t, There there) {
  u64 begun = nanoseconds();
  while (!there())
    if (nanoseconds() - begun > t.limit) return false;
  return true;
}

// Whether all blocks have come to a half round. By all threads.
KOG_DEVICE bool meet(const SelfTest& t, int block, int thread, u32 half) {
  drain_stores();
  sync_consumers();
  if (thread == 0) store_relaxed(t.words + block, half);
  rejoin();
  bool late = false;
  for (int i = thread; i < t.blocks; i += kThreads) late |= !comes(t, [&] { return load_relaxed(t.words + i) >= half; });
  late = any_consumer(late);
  acquire_gpu();
  sync_consumers();
  return !late;
}

KOG_DEVICE u32 run(const SelfTest& t, int block, int thread) {
  u32 wrong = 0;
  for (int round = 1; round <= t.rounds; round++) {
    u64 number = static_cast<u64>(round);
    if (block == 0 && thread == 0) {
      store_system(t.mailbox + 1, number);
      if (!comes(t, [&] { return load_system(t.mailbox) == number; })) wrong |= kNoHost;
    }
    if (thread < kRowWords) store_cache(t.rows + block * kRowWords + thread, row_word(block, thread, round));
    if (!meet(t, block, thread, 2 * static_cast<u32>(round) - 1)) return wrong | kNoWord;
    for (int i = thread; i < t.blocks * kRowWords; i += kThreads)
      if (load_cache(t.rows + i, true) != row_word(i / kRowWords, i % kRowWords, round)) wrong |= kOldRow;
    if (!meet(t, block, thread, 2 * static_cast<u32>(round))) return wrong | kNoWord;
  }
  return wrong;
}

}  // namespace kog

KOG_KERNEL void kog_selftest(const kog::SelfTest t) {
  using namespace kog;
  int block = workgroup_index(), thread = thread_index();
  u32 wrong = run(t, block, thread);
  u32 all = 0;
  for (u32 bit = kNoWord; bit <= kNoHost; bit *= 2) all |= any_consumer((wrong & bit) != 0) ? bit : 0;
  if (thread == 0) {
    t.found[2 * block] = static_cast<u32>(die_index());
    t.found[2 * block + 1] = all;
  }
}
