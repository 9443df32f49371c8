// Collectives inside a kernel, over the memory of all ranks. What a block has to keep to: channel.h.
//
//     kccl::AllReduce<kccl::PhaseWords, 2> sums{comm, 0, vectors};
//     sums.clear(epoch, at);
//     sums.send(epoch, at, mine);              // a thread's vector, of its rank's part of the sum
//     float all[1][sums.kValues];
//     if (!sums.fetch(epoch, [&](int) { return at; }, all)) return;   // by whole warps
//
//   AllReduce          the sum of all ranks' vectors, in rank order: equal bits on all ranks
//   DelayedAllReduce   that of kDelay uses ago, for whoever sends now and needs it later
//   AllGather          all ranks' vectors
//   Broadcast          a number that one rank chose
#pragma once
#include <kccl/channel.h>

namespace kccl {

template <class Policy, int kRanks, int kAhead = 1>
struct AllReduce : Channel<Policy, kRanks, kAhead> {
  using Base = Channel<Policy, kRanks, kAhead>;

  template <int N, class At>
  KCCL_DEVICE bool fetch(u64 epoch, At at, float (&sums)[N][Base::kValues]) const {
    float values[kRanks][N][Base::kValues];
    bool found = Base::fetch(epoch, at, values);
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
      for (int j = 0; j < Base::kValues; j++) {
        sums[i][j] = values[0][i][j];
#pragma unroll
        for (int from = 1; from < kRanks; from++) sums[i][j] += values[from][i][j];
      }
    return found;
  }
};

// In the step of use `epoch`: fetch(epoch) first, which finds use epoch - kDelay, or zeros before there was one; then
// clear(epoch) and send(epoch).
template <class Policy, int kRanks, int kDelay>
struct DelayedAllReduce : AllReduce<Policy, kRanks, kDelay> {
  using Base = AllReduce<Policy, kRanks, kDelay>;

  template <int N, class At>
  KCCL_DEVICE bool fetch(u64 epoch, At at, float (&sums)[N][Base::kValues]) const {
    if (epoch >= kDelay) return Base::fetch(epoch - kDelay, at, sums);
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
      for (int j = 0; j < Base::kValues; j++) sums[i][j] = 0;
    return true;
  }
};

template <class Policy, int kRanks>
using AllGather = Channel<Policy, kRanks>;

// A word for all ranks, beside the number of its use. Any rank may send a use, each to a place of its own: a sender's
// own store may land after another rank's next one, which must not be lost under it. Nobody answers, so a rank may send
// its next only when it has since read something that each reader sent after it found this one, such as an all-reduce's
// vectors.
//
//     words of each rank   rank that sent [kRanks] > value, number of the use
template <int kRanks>
struct Broadcast {
  static constexpr u32 kWords = 2 * kRanks;

  const Comm& comm;
  u32 offset;  // among a rank's words, a multiple of 2

  KCCL_DEVICE static u32 mark(u64 epoch) { return static_cast<u32>(epoch + 1); }
  KCCL_DEVICE u32 place(int from) const { return offset + 2 * static_cast<u32>(from); }

  // By one thread of one rank.
  KCCL_DEVICE void send(u64 epoch, u32 value) const {
#pragma unroll
    for (int rank = 0; rank < kRanks; rank++) store_pair(comm.words[rank] + place(comm.rank), join(value, mark(epoch)));
  }
  // By whole warps; `from` is the rank that sends.
  KCCL_DEVICE bool fetch(u64 epoch, int from, u32& value) const {
    u64 pair = 0;
    bool found = wait_until(
        comm,
        [&] {
          pair = load_pair(comm.words[comm.rank] + place(from));
          return static_cast<u32>(pair >> 32) != mark(epoch);
        },
        [&] { return Late{from, place(from), static_cast<u32>(pair >> 32), mark(epoch)}; });
    value = static_cast<u32>(pair);
    return found;
  }
};

}  // namespace kccl
