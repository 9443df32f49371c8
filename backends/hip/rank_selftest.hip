// What ranks rely on of GPUs that reach each other, tried on them before a model is opened on several
// (rank_selftest.py): words and pairs that a block stores into every GPU's memory come there whole while all kernels
// run, and the host's words come to all GPUs. A header with kThreads, kRanks and KOG_WORD_SCOPE stands before this text.
#include <kog/ptx.h>

namespace kog {

constexpr u32 kNoWord = 1, kTorn = 2, kNoHost = 4;
constexpr u64 kHostsPart = 4;  // of a wait's limit: who waits for the host is not late for others

struct RankTest {
  u32* words[kRanks];  // of each rank, as this GPU reaches them: a word for every block of every rank, the half round
                       // that it has ended; behind them a pair for each
  u64* mailbox;  // mapped, of all ranks: the host's word, then each rank's
  u32* found;    // [blocks, 2]: a bit for each rank of which something is wrong, and what
  u64 limit;     // nanoseconds of a wait
  int rank, blocks, rounds, unused;
};

KOG_DEVICE u64 value_of(int sender, int round, u32 salt) {
  u32 v = static_cast<u32>(sender) * 2654435761u + static_cast<u32>(round) * 40503u + salt;
  return static_cast<u64>(round) << 32 | (v ^ v >> 15);
}

KOG_DEVICE u64* pair_of(const RankTest& t, u32* words, int sender) {
  return reinterpret_cast<u64*>(words + (kRanks * t.blocks + 3) / 4 * 4) + 2 * sender;
}

struct Found {
  u32 ranks = 0, wrong = 0;

  KOG_DEVICE void note(int rank, u32 what) { ranks |= 1u << rank, wrong |= what; }
};

// Whether all blocks of all ranks have come to a half round. By all threads.
KOG_DEVICE bool meet(const RankTest& t, u32* own, int sender, int thread, u32 half, Found& found) {
  sync_consumers();
#pragma unroll
  for (int rank = 0; rank < kRanks; rank++)
    if (thread == 0) store_relaxed(t.words[rank] + sender, half);
  rejoin();
  bool late = false;
  u64 begun = nanoseconds();
  for (int i = thread; i < kRanks * t.blocks; i += kThreads)
    while (load_relaxed(own + i) < half)
      if (nanoseconds() - begun > t.limit) {
        late = true;
        found.note(i / t.blocks, kNoWord);
        break;
      }
  return !any_consumer(late);
}

KOG_DEVICE void run(const RankTest& t, int block, int thread, Found& found) {
  u32* own = t.words[0];
#pragma unroll
  for (int rank = 1; rank < kRanks; rank++)
    if (rank == t.rank) own = t.words[rank];
  int sender = t.rank * t.blocks + block;
  for (int round = 1; round <= t.rounds; round++) {
#pragma unroll
    for (int rank = 0; rank < kRanks; rank++)
      if (thread == 0)
        store_relaxed_pair(pair_of(t, t.words[rank], sender), value_of(sender, round, 1), value_of(sender, round, 2));
    rejoin();
    bool late = false;
    u64 begun = nanoseconds();
    for (int i = thread; i < kRanks * t.blocks; i += kThreads)
      while (true) {
        ulonglong2 v = load_relaxed_pair(pair_of(t, own, i));
        u64 number = static_cast<u64>(round);
        if (v.x >> 32 == number && v.y >> 32 == number) {
          if (v.x != value_of(i, round, 1) || v.y != value_of(i, round, 2)) found.note(i / t.blocks, kTorn);
          break;
        }
        if (nanoseconds() - begun > t.limit) {
          late = true;
          found.note(i / t.blocks, kNoWord);
          break;
        }
      }
    if (any_consumer(late)) return;
    if (!meet(t, own, sender, thread, 2 * static_cast<u32>(round) - 1, found)) return;
    if (block == 0 && thread == 0) {
      u64 number = static_cast<u64>(round), asked = nanoseconds();
      store_system(t.mailbox + 1 + t.rank, number);
      while (load_system(t.mailbox) < number)
        if (nanoseconds() - asked > t.limit / kHostsPart) {
          found.note(t.rank, kNoHost);
          break;
        }
    }
    if (!meet(t, own, sender, thread, 2 * static_cast<u32>(round), found)) return;
  }
}

}  // namespace kog

KOG_KERNEL void kog_rank_selftest(const kog::RankTest t) {
  using namespace kog;
  int block = workgroup_index(), thread = thread_index();
  Found found;
  run(t, block, thread, found);
  u32 ranks = 0, wrong = 0;
#pragma unroll
  for (int rank = 0; rank < kRanks; rank++) ranks |= any_consumer((found.ranks >> rank & 1) != 0) ? 1u << rank : 0;
  for (u32 bit = kNoWord; bit <= kNoHost; bit *= 2) wrong |= any_consumer((found.wrong & bit) != 0) ? bit : 0;
  if (thread == 0) {
    t.found[2 * block] = ranks;
    t.found[2 * block + 1] = wrong;
  }
}
