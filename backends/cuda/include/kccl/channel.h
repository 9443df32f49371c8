// Vectors that every rank sends to all ranks, itself included: pushed in one step, and found in one poll.
//
//     words of each rank   buffer [kBuffers] > rank that sent it [kRanks] > vector [vectors] > 4 words
//
// Uses are numbered 0, 1, 2, ... by an epoch that only grows, in one order on all ranks, from launch to launch. A
// rank has one or several blocks, and this is what they must keep to:
//
//   1. A block that fetches a use fetches all vectors of all ranks.
//   2. Every block of every rank sends something of each use.
//   3. A block sends use n only when it has fetched use n - kAhead. With kAhead 1 that is the all-reduce whose sum is
//      needed at once: send n, fetch n. With more, n - kAhead is fetched in the step that sends n, before it is sent.
//   4. Between the two the thread that will send a vector of use n clears it. Only PoisonWords does something then.
//
// Then kBuffers, as policies.h gives it for each of kAhead uses under way, suffice: docs/SYNC.md.
#pragma once
#include <kccl/comm.h>
#include <kccl/policies.h>

namespace kccl {

template <class Policy_, int kRanks_, int kAhead_ = 1>
struct Channel {
  using Policy = Policy_;
  static constexpr int kRanks = kRanks_, kAhead = kAhead_, kValues = Policy::kValues;
  static constexpr int kBuffers = Policy::kBuffers * kAhead;
  static constexpr u32 kWords = kBuffers * kRanks * 4;  // that it takes of every rank for each of `vectors`
  static_assert(kAhead >= 1 && kRanks >= 1 && kRanks <= kMostRanks);

  const Comm& comm;
  u32 offset;   // of the channel among a rank's words, a multiple of 4
  u32 vectors;  // of one rank

  KCCL_DEVICE u32 place(u64 epoch, int from, u32 at) const {
    u32 buffer = static_cast<u32>(epoch % kBuffers);
    return offset + ((buffer * kRanks + static_cast<u32>(from)) * vectors + at) * 4;
  }
  KCCL_DEVICE static u32 mark(u64 epoch) { return Policy::mark(epoch / kBuffers); }

  // Make the vector's buffer empty for use epoch + kAhead, which no rank sends before it has found use `epoch`. The
  // fence is needed: else a word of that use could land before what empties its place, and be lost.
  KCCL_DEVICE void clear(u64 epoch, u32 at) const {
    if constexpr (Policy::kClears) {
      constexpr u32 e = Policy::kEmpty;
#pragma unroll
      for (int from = 0; from < kRanks; from++)
        Policy::store(comm.words[comm.rank] + place(epoch + kAhead, from, at), Vector{{e, e, e, e}});
      fence();
    }
  }
  // One vector of this rank, to all.
  KCCL_DEVICE void send(u64 epoch, u32 at, const float (&values)[kValues]) const {
    Vector q = Policy::pack(values, mark(epoch));
    u32 to = place(epoch, comm.rank, at);
#pragma unroll
    for (int rank = 0; rank < kRanks; rank++) Policy::store(comm.words[rank] + to, q);
  }

  // N vectors a thread of every rank, by whole warps: at(i) is the i-th one's place, or negative for none. All are
  // asked for before one is looked at, and again only those that were late. False if the wait expired.
  template <int N, class At>
  KCCL_DEVICE bool fetch(u64 epoch, At at, float (&values)[kRanks][N][kValues]) const {
    const u32 wanted = mark(epoch), *own = comm.words[comm.rank];
    Vector q[kRanks][N];
    u32 late[kRanks][N];
#pragma unroll
    for (int from = 0; from < kRanks; from++)
#pragma unroll
      for (int i = 0; i < N; i++) late[from][i] = at(i) >= 0 ? 1 : 0, q[from][i] = Vector{};
    bool found = wait_until(
        comm,
        [&] {
          u32 any = 0;
#pragma unroll
          for (int from = 0; from < kRanks; from++)
#pragma unroll
            for (int i = 0; i < N; i++)
              if (late[from][i] != 0) q[from][i] = Policy::load(own + place(epoch, from, static_cast<u32>(at(i))));
#pragma unroll
          for (int from = 0; from < kRanks; from++)
#pragma unroll
            for (int i = 0; i < N; i++) {
              late[from][i] = late[from][i] != 0 ? Policy::stale(q[from][i], wanted) : 0;
              any |= late[from][i];
            }
          return any != 0;
        },
        [&] {
          Late one{};
#pragma unroll
          for (int from = kRanks - 1; from >= 0; from--)
#pragma unroll
            for (int i = N - 1; i >= 0; i--)
              if (late[from][i] != 0)
                one = {from, place(epoch, from, static_cast<u32>(at(i))), Policy::seen(q[from][i], wanted), wanted};
          return one;
        });
#pragma unroll
    for (int from = 0; from < kRanks; from++)
#pragma unroll
      for (int i = 0; i < N; i++) Policy::unpack(q[from][i], values[from][i]);
    return found;
  }
};

}  // namespace kccl
