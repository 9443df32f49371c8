// Hopper's instructions of a prompt's pass on a CPU. Stands in for backends/cuda/include/kog/prompt/hopper.h. A product of
// a warpgroup is done where it is asked for, each warp its own 16 rows: what is proved is layout, arithmetic and
// barriers, not that nobody writes over what a product still reads.
#pragma once
#include <kog/ptx.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

struct int2 {
  int x, y;
};
struct int4 {
  int x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

#define KOG_KERNEL static
#define __launch_bounds__(...)
#define __grid_constant__
#define threadIdx (kog::host::Index{kog::thread_index()})
#define blockIdx (kog::host::Index{kog::block_index()})
#define gridDim (kog::host::Index{kog::host::num_blocks})
#define __syncthreads kog::sync_block
#define __trap std::abort

namespace kog {
namespace host {

struct Index {
  int x;
};
static int num_blocks;
void sync_all(BlockState& block);

inline u8* at_shared(u32 address) { return current->block->shared + address; }

}  // namespace host

inline void sync_block() { host::sync_all(*host::current->block); }
inline u32 shared_address(const void* p) {
  return static_cast<u32>(static_cast<const u8*>(p) - host::current->block->shared);
}
inline bool elected() { return host::thread() == 0; }
inline void need_aligned(u32 to, const void* from, u32 bytes) {
  if ((to | bytes | static_cast<u32>(reinterpret_cast<uintptr_t>(from))) % 16 != 0) std::abort();
}
inline void bulk_copy(u32 to, const void* from, int bytes, u32 barrier) {
  need_aligned(to, from, static_cast<u32>(bytes));
  bulk_load(host::at_shared(to), from, static_cast<u32>(bytes), reinterpret_cast<u64*>(host::at_shared(barrier)), 0);
}
inline void copy_16(u32 to, const void* from) {
  need_aligned(to, from, 16);
  std::memcpy(host::at_shared(to), from, 16);
}
inline void arrive_behind_copies(u32 barrier) { barrier_arrive(reinterpret_cast<u64*>(host::at_shared(barrier))); }
inline void wait_for_launch_before() {}
inline void start_launch_behind() {}
// All ranks' kernels run here one after another: who waits for what nobody has sent waits until its time is up.
inline void store_release_system(u64* p, u64 v) { *p = v; }
inline u64 load_acquire_system(const u64* p) {
  host::yield();
  return *p;
}
inline uint4 load_shared(u32 at) { return *reinterpret_cast<uint4*>(host::at_shared(at)); }

// Of kernels whose blocks join parts, which do not run here.
inline void store_matrices(u32, u32, u32, u32, u32) { std::abort(); }
template <int>
void sync_threads(int) {
  std::abort();
}
inline int atomicAdd(int*, int) { std::abort(); }
inline float4 __ldcg(const float4*) { std::abort(); }

// The four warps of a group wait for each other here (WARPGROUP.ARRIVE): one of them releases a stage for all.
KOG_EMULATED void products_begin() {
  static int arrived[8];
  static u64 generation[8];
  int group = thread_index() / 128;
  u64 mine = generation[group];
  if (++arrived[group] == 128) arrived[group] = 0, generation[group]++;
  while (generation[group] == mine) host::yield();
}
inline void products_commit() {}
template <int>
void products_wait() {}
inline u64 swizzled_rows(u32 at) { return at / 16; }

// sums[64][kCount * 2] += a[64][16] * x[kCount * 2][16], as PTX lays out wgmma.m64nNk16: a in registers, rows of x of
// 128 bytes whose pieces of 16 are swizzled by their row.
template <bool kF16, int kCount>
KOG_EMULATED void multiply_group(float (&sums)[kCount], u32 a, u32 b, u32 c, u32 d, u64 x) {
  host::Warp& w = host::warp();
  auto& rows = w.a[w.generation % 2];
  const u32 words[4] = {a, b, c, d};
  for (int i = 0; i < 8; i++)
    rows[host::thread()][i] = host::from_half(words[i / 2] >> 16 * (i % 2) & 0xffff, kF16);
  host::meet();
  int row = host::thread() / 4;
  for (int j = 0; j < kCount; j++) {
    int half = j / 2 % 2, token = j / 4 * 8 + 2 * (host::thread() % 4) + j % 2;
    double sum = 0;
    for (int k = 0; k < 16; k++) {
      u32 at = static_cast<u32>(x) * 16 + static_cast<u32>(token) * 128 + static_cast<u32>(k) * 2;
      u16 value = *reinterpret_cast<u16*>(host::at_shared(at ^ (at >> 7 & 7) << 4));
      // of row + 8 * half: words 0 and 1 are the first eight of K, of both rows
      float weight = rows[4 * row + k % 8 / 2][k / 8 * 4 + half * 2 + k % 2];
      sum += static_cast<double>(weight) * host::from_half(value, kF16);
    }
    sums[j] += static_cast<float>(sum);
  }
}

}  // namespace kog
