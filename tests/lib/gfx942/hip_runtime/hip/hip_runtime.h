// Of ROCm's header, what the kernels of test_hip_kccl.py take.
#pragma once
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __launch_bounds__(threads) __attribute__((amdgpu_flat_work_group_size(threads, threads)))
struct Index {
  unsigned x;
};
#define threadIdx (Index{__builtin_amdgcn_workitem_id_x()})
#define blockIdx (Index{__builtin_amdgcn_workgroup_id_x()})
struct alignas(16) float4 {
  float x, y, z, w;
};
inline __attribute__((device, always_inline)) float4 make_float4(float x, float y, float z, float w) {
  return {x, y, z, w};
}
inline __attribute__((device, always_inline)) void __syncthreads() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
inline __attribute__((device, always_inline)) int __syncthreads_and(int p) {
  static __shared__ int all;
  __syncthreads();
  if (threadIdx.x == 0) all = 1;
  __syncthreads();
  if (!p) all = 0;
  __syncthreads();
  return all;
}
