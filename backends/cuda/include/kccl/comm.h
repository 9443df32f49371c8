// The ranks of one collective, and waits that end.
//
// A rank is one GPU. Each holds words, which the others write and it alone reads, and a report. Where all of a
// rank's blocks are resident, no wait lasts for ever: it expires after `limit`, says who waited for whose word, and
// makes the blocks of all ranks leave.
#pragma once
#include <kccl/ptx.h>

namespace kccl {

constexpr int kMostRanks = 8;

// A rank's report, 8 words that are zero before a launch. Read it when the kernels of all ranks have ended.
enum Report {
  kLeave,    // 1: a wait has expired, here or elsewhere
  kExpired,  // 1: here; then
  kFrom,     // the rank whose word was late
  kPlace,    // that word's place among this rank's words
  kSeen,     // the mark that it had (policies.h)
  kWanted,   // the mark that was waited for
  kReportWords = 8
};

// A kernel's argument, the same on all ranks but for `rank`.
struct Comm {
  u32* words[kMostRanks];    // every rank's, as this GPU reaches them; 16-byte aligned
  u32* reports[kMostRanks];  // every rank's
  u64 limit;                 // nanoseconds that a wait may take
  int ranks, rank;
};

// What a late word looked like.
struct Late {
  int from;
  u32 place, seen, wanted;
};

KCCL_DEVICE void expire(const Comm& c, const Late& late) {
  u32* own = c.reports[c.rank];
  if (compare_and_swap(own + kExpired, 0, 1) == 0) {
    store_word(own + kFrom, static_cast<u32>(late.from));
    store_word(own + kPlace, late.place);
    store_word(own + kSeen, late.seen);
    store_word(own + kWanted, late.wanted);
  }
#pragma unroll 1
  for (int rank = 0; rank < c.ranks; rank++) store_word(c.reports[rank] + kLeave, 1);
}

constexpr u32 kAsksBetweenClocks = 64;  // a poll takes about a microsecond: no limit is as short as 64 of them

// By whole warps, until no thread's ask() says that something of its own is late. False if the wait expired, here or
// elsewhere: then nothing is known of what was waited for, and the block leaves. tell() is the thread's Late.
template <class Ask, class Tell>
KCCL_DEVICE bool wait_until(const Comm& c, Ask ask, Tell tell) {
  u64 since = 0;
#pragma unroll 1
  for (u32 asked = 0;; asked++) {
    bool late = ask();
    if (!any_in_warp(late)) return true;
    if (asked == 0) since = nanoseconds();
    if ((asked + 1) % kAsksBetweenClocks != 0) continue;
    bool over = nanoseconds() - since > c.limit;
    if (over && late) expire(c, tell());
    if (any_in_warp(over || load_word(c.reports[c.rank] + kLeave) != 0)) return false;
  }
}

}  // namespace kccl
