// Dependent all-reduces in one kernel on every GPU, timed by the GPU: `kog bench kccl` (kog_triton/bench/kccl.py).
//
// Compiled with POLICY, RANKS, THREADS that reduce and VECTORS, those that each asks for in one poll. Every block
// fetches all vectors, as the blocks of a decode kernel do, and owns some, whose sums it sends again as means: each
// all-reduce needs the one before. Beside them one thread a block may stream weights, with as many bytes in flight as
// the decode kernel's ring.
#include <kccl/collectives.h>

namespace kog {
constexpr int kConsumers = THREADS;  // that reduce; ptx.h counts them in its barrier
}
#include <kog/ptx.h>

namespace {

constexpr unsigned kSlotBytes = 16384, kSlots = 3;
constexpr unsigned kMostOwn = 256;  // vectors of a block
using Sums = kccl::AllReduce<kccl::POLICY, RANKS>;

// Until the others are done. Bytes that were read.
__device__ __forceinline__ kog::u64 stream(const char* weights, kog::u64 slots, volatile const int* done) {
  __shared__ kog::u64 full[kSlots];
  kog::u8* ring = kog::shared_memory();
  for (unsigned s = 0; s < kSlots; s++) kog::barrier_init(&full[s], 1);
  kog::barrier_init_fence();
  kog::u64 policy = kog::read_once(), count = 0;
  for (; *done == 0; count++) {
    unsigned s = count % kSlots;
    if (count >= kSlots)
      while (!kog::barrier_try(&full[s], (count / kSlots - 1) & 1)) {
      }
    kog::barrier_expect(&full[s], kSlotBytes);
    const char* from = weights + (count * gridDim.x + blockIdx.x) % slots * kSlotBytes;
    kog::bulk_load(ring + s * kSlotBytes, from, kSlotBytes, &full[s], policy);
  }
  for (kog::u64 i = count < kSlots ? 0 : count - kSlots; i < count; i++)  // copies that were begun have to land
    while (!kog::barrier_try(&full[i % kSlots], (i / kSlots) & 1)) {
    }
  return count * kSlotBytes;
}

}  // namespace

// peers.py has it too.
struct Argument {
  kccl::Comm comm;
  kog::u64 epoch, uses;
  float* found;         // the last sums / RANKS of every block, [blocks, vectors, kValues]
  kog::u64* times;      // nanoseconds and streamed bytes of every block, [blocks, 2]
  const char* weights;
  kog::u64 slots;       // of the weights, 0 for no stream
  kog::u64 vectors;     // a multiple of the blocks
};

extern "C" __global__ void __launch_bounds__(kog::kConsumers + 32) kccl_bench(const __grid_constant__ Argument a) {
  const kccl::Comm& comm = a.comm;
  const kog::u64 epoch = a.epoch, uses = a.uses;
  const unsigned vectors = static_cast<unsigned>(a.vectors);
  __shared__ volatile int done;
  __shared__ kog::u64 began;  // of one thread, which keeps no registers for it meanwhile
  __shared__ float own[kMostOwn][Sums::kValues];
  const unsigned thread = threadIdx.x, count = vectors / gridDim.x, first = blockIdx.x * count;
  if (thread == 0) done = 0;
  if (thread < count)
    for (int j = 0; j < Sums::kValues; j++)
      own[thread][j] = static_cast<float>((first + thread) * Sums::kValues + j + comm.rank * RANKS);
  __syncthreads();
  if (thread >= kog::kConsumers) {
    if (thread == kog::kConsumers) a.times[2 * blockIdx.x + 1] = a.slots != 0 ? stream(a.weights, a.slots, &done) : 0;
    return;
  }
  Sums sums{comm, 0, vectors};
  if (thread == 0) began = kog::nanoseconds();
  bool there = true;
  for (kog::u64 n = 0; n < uses && there; n++) {
    if (thread < count) {
      sums.clear(epoch + n, first + thread);
      sums.send(epoch + n, first + thread, own[thread]);
    }
    kog::sync_consumers();  // own is read before it is written
    for (unsigned base = thread; base - thread < vectors && there; base += kog::kConsumers * VECTORS) {
      auto at = [&](int i) {
        unsigned place = base + kog::kConsumers * static_cast<unsigned>(i);
        return place < vectors ? static_cast<int>(place) : -1;
      };
      float x[VECTORS][Sums::kValues];
      there = sums.fetch(epoch + n, at, x);
#pragma unroll
      for (int i = 0; i < VECTORS; i++) {
        unsigned place = static_cast<unsigned>(at(i));
        if (at(i) < 0) continue;
#pragma unroll
        for (int j = 0; j < Sums::kValues; j++) {
          float mean = x[i][j] * (1.f / RANKS);
          if (place - first < count) own[place - first][j] = mean;
          if (n + 1 == uses) a.found[(blockIdx.x * static_cast<kog::u64>(vectors) + place) * Sums::kValues + j] = mean;
        }
      }
    }
    there = !kog::any_consumer(!there);  // all of the block, or it leaves
  }
  if (thread == 0) a.times[2 * blockIdx.x] = kog::nanoseconds() - began;
  kog::sync_consumers();
  if (thread == 0) done = 1;
}
