// The clocks of several ranks beside each other: rank 0 asks each of the others in turn, `rounds` times.
//
//     rank 0    reads its clock, asks rank r, finds the answer, reads its clock
//     rank r    finds the question, reads its clock, answers
//
// So rank r's reading was taken between rank 0's two: half of what lies between those is how well it is known.
//
//     words of each rank   rank that sent [ranks] > pair: nothing, number of the message; zero before the launch
#pragma once
#include <kccl/comm.h>

namespace kccl {

constexpr u32 kClockWords = 2 * kMostRanks;

// By one warp of every rank; `writes` in one thread of it. readings [ranks, rounds, 2]: of rank 0 both its clock's in
// the row of the rank that it asked, of another the first, in its own row. False if a wait expired.
KCCL_DEVICE bool read_clocks(const Comm& comm, u32 rounds, u64* readings, bool writes) {
  auto tell = [&](int rank, u32 number) {
    if (writes) store_pair(comm.words[rank] + 2 * comm.rank, join(0, number));
  };
  auto hear = [&](int from, u32 number) {
    u32 seen = 0, place = 2 * static_cast<u32>(from);
    return wait_until(
        comm,
        [&] {
          seen = static_cast<u32>(load_pair(comm.words[comm.rank] + place) >> 32);
          return seen != number;
        },
        [&] { return Late{from, place, seen, number}; });
  };
  for (int other = 1; other < comm.ranks; other++) {
    if (comm.rank != 0 && comm.rank != other) continue;
    for (u32 round = 0; round < rounds; round++) {
      u64* at = readings + 2 * (static_cast<u64>(other) * rounds + round);
      if (comm.rank == 0) {
        u64 asked = nanoseconds();
        tell(other, round + 1);
        if (!hear(other, round + 1)) return false;
        u64 heard = nanoseconds();
        if (writes) at[0] = asked, at[1] = heard;
      } else {
        if (!hear(0, round + 1)) return false;
        u64 answered = nanoseconds();
        tell(0, round + 1);
        if (writes) at[0] = answered;
      }
    }
  }
  return true;
}

}  // namespace kccl
