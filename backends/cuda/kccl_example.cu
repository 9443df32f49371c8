// KCCL in a kernel of your own: two to eight GPUs add up vectors, from one launch a GPU.
//
//     nvcc -std=c++20 -arch=sm_90a -I backends/cuda/include -o kccl_example backends/cuda/kccl_example.cu
//     ./kccl_example            two GPUs that reach each other's memory
//
// For AMD's:
//
//     hipcc -std=c++20 --offload-arch=gfx942 -I backends/hip/include -I backends/cuda/include -o kccl_example \
//         -x hip backends/cuda/kccl_example.cu
//
// One block a GPU. Step by step every GPU sends its part of a vector of 1,024 floats and gets the sum of all parts, of
// which it makes its next part: nothing but the words themselves says when they are there.
#ifdef __HIP__
#include <hip/hip_runtime.h>
#define __grid_constant__
#endif
#include <kccl/collectives.h>

constexpr int kRanks = 2, kThreads = 256, kSteps = 1000;
using Sums = kccl::AllReduce<kccl::PhaseWords, kRanks>;

// out: float4 [kThreads], the last sum / kRanks. epoch: uses of the channel before this launch.
extern "C" __global__ void __launch_bounds__(kThreads)
    add_up(const __grid_constant__ kccl::Comm comm, kccl::u64 epoch, float4* out) {
  Sums sums{comm, 0, kThreads};
  const int thread = static_cast<int>(threadIdx.x);
  float x[1][4] = {{static_cast<float>(comm.rank), static_cast<float>(thread), 1.f, 2.f}};
  bool there = true;
  for (int step = 0; step < kSteps && there; step++) {
    sums.clear(epoch + step, thread);
    sums.send(epoch + step, thread, x[0]);
    there = sums.fetch(epoch + step, [&](int) { return thread; }, x);
    for (float& value : x[0]) value *= 1.f / kRanks;
    there = __syncthreads_and(there);  // a block sends a use when all of it has found the one before
  }
  out[thread] = make_float4(x[0][0], x[0][1], x[0][2], x[0][3]);
}

#ifndef __CUDACC_RTC__
#include <cstdio>
#include <cstdlib>

#ifdef __HIP__
#define cudaError_t hipError_t
#define cudaSuccess hipSuccess
#define cudaGetErrorString hipGetErrorString
#define cudaGetLastError hipGetLastError
#define cudaSetDevice hipSetDevice
#define cudaDeviceEnablePeerAccess hipDeviceEnablePeerAccess
#define cudaDeviceSynchronize hipDeviceSynchronize
#define cudaMemset hipMemset
#define cudaMemcpy hipMemcpy
#define cudaMemcpyDeviceToHost hipMemcpyDeviceToHost
// What no GPU caches: elsewhere words of system scope stay where one GPU has them.
#define cudaMalloc(to, bytes) hipExtMallocWithFlags(reinterpret_cast<void**>(to), bytes, hipDeviceMallocUncached)
#endif

static void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  exit(1);
}

int main() {
  kccl::Comm comm{};
  comm.ranks = kRanks, comm.limit = 2'000'000'000;
  float4* out[kRanks];
  for (int rank = 0; rank < kRanks; rank++) {
    check(cudaSetDevice(rank), "cudaSetDevice");
    for (int peer = 0; peer < kRanks; peer++)
      if (peer != rank) check(cudaDeviceEnablePeerAccess(peer, 0), "cudaDeviceEnablePeerAccess");
    size_t words = Sums::kWords * kThreads * sizeof(kccl::u32), report = kccl::kReportWords * sizeof(kccl::u32);
    check(cudaMalloc(&comm.words[rank], words), "cudaMalloc");
    check(cudaMemset(comm.words[rank], Sums::Policy::kEmpty ? 0xff : 0, words), "cudaMemset");
    check(cudaMalloc(&comm.reports[rank], report), "cudaMalloc");
    check(cudaMemset(comm.reports[rank], 0, report), "cudaMemset");
    check(cudaMalloc(&out[rank], kThreads * sizeof(float4)), "cudaMalloc");
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  for (kccl::u64 launch = 0; launch < 2; launch++) {  // words need nothing between launches but the next epoch
    for (int rank = 0; rank < kRanks; rank++) {
      check(cudaSetDevice(rank), "cudaSetDevice");
      comm.rank = rank;
      add_up<<<1, kThreads>>>(comm, launch * kSteps, out[rank]);
      check(cudaGetLastError(), "add_up");
    }
    for (int rank = 0; rank < kRanks; rank++) {
      check(cudaSetDevice(rank), "cudaSetDevice");
      check(cudaDeviceSynchronize(), "add_up");
      kccl::u32 r[kccl::kReportWords];
      check(cudaMemcpy(r, comm.reports[rank], sizeof r, cudaMemcpyDeviceToHost), "cudaMemcpy");
      if (r[kccl::kExpired])
        fprintf(stderr, "GPU %d waited for word %u of GPU %u: %#x, not %#x\n", rank, r[kccl::kPlace], r[kccl::kFrom],
                r[kccl::kSeen], r[kccl::kWanted]);
      if (r[kccl::kLeave]) return 1;
      float4 found[kThreads];
      check(cudaMemcpy(found, out[rank], sizeof found, cudaMemcpyDeviceToHost), "cudaMemcpy");
      for (int thread = 0; thread < kThreads; thread++) {
        float4 v = found[thread];
        if (v.x != (kRanks - 1) / 2.f || v.y != thread || v.z != 1 || v.w != 2) return 2;
      }
    }
  }
  printf("%d GPUs agree after %d sums each\n", kRanks, 2 * kSteps);
}
#endif
