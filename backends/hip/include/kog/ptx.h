// One wrapper per instruction of CDNA3, in the place of CUDA's ptx.h: the one file with inline assembly and AMD's
// builtins. No ROCm header is needed. A warp is half a wave of 64 (docs/HIP.md).
#pragma once

#define KOG_ASSUME(x) __builtin_assume(x)
#define KOG_OFFSET(T, member) __builtin_offsetof(T, member)
// By value: which of two places it is would be an index, and an array that has one lies in scratch memory.
#define KOG_EITHER(first, a, b) [&](auto x, auto y) { return first ? x : y; }(a, b)
#define KOG_DEVICE inline __attribute__((device, always_inline))
// A call would need a stack in memory: what CUDA keeps out of line is inlined.
#define KOG_DEVICE_NOINLINE KOG_DEVICE
#define KOG_CONSTANT static __attribute__((device)) const
// Two waves a SIMD: each has half of its registers.
#define KOG_KERNEL \
  extern "C" __attribute__((global, amdgpu_flat_work_group_size(kog::kThreads, kog::kThreads), amdgpu_waves_per_eu(2, 2)))

namespace kog {

// hipRTC and hipcc put ROCm's headers before every text, which have types of these names outside.
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct ulonglong2 {
  unsigned long long x, y;
};

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr bool kMaskInRegister = false;  // shuffle_xor's mask is part of the instruction (threads.h)
constexpr int kWaveThreads = 64, kWaves = kConsumers / kWaveThreads;
constexpr int kWarpThreads = kWaveThreads / 2;
constexpr int kAgent = __HIP_MEMORY_SCOPE_AGENT, kSystem = __HIP_MEMORY_SCOPE_SYSTEM;
// Of words that blocks exchange (layout/header.py): of several ranks the host's.
#ifdef KOG_WORD_SCOPE
constexpr int kWordScope = kSystem;
#else
constexpr int kWordScope = kAgent;
#endif

// What a pointer points into, where the compiler could not tell: memory, or shared memory.
template <class T>
KOG_DEVICE __attribute__((address_space(1))) T* in_memory(T* p) {
  return (__attribute__((address_space(1))) T*)p;
}
template <class T>
KOG_DEVICE __attribute__((address_space(3))) T* in_shared(T* p) {
  return (__attribute__((address_space(3))) T*)p;
}

// A pointer among a kernel's arguments: so much is known of it.
template <class T>
struct Memory {
  __attribute__((address_space(1))) T* address;

  KOG_DEVICE Memory() = default;
  KOG_DEVICE Memory(T* p) : address(in_memory(p)) {}
  KOG_DEVICE operator T*() const { return (T*)address; }
};

// A kernel's only parameter, by its address if kSo: where more than 300 places name it, as pushes to eight ranks do,
// LLVM would copy it to scratch memory.
template <bool kSo, class T>
KOG_DEVICE const T& by_address(const T& p) {
  if constexpr (kSo) return *(const T*)__builtin_amdgcn_kernarg_segment_ptr();
  return p;
}

// ---- where am I, what time is it ----

KOG_DEVICE int wave_index() { return __builtin_amdgcn_readfirstlane(__builtin_amdgcn_workitem_id_y()); }
KOG_DEVICE int in_wave() { return static_cast<int>(__builtin_amdgcn_workitem_id_x()); }
// A number that the compiler does not know: no code is laid out for it alone, and what follows from it is not kept.
KOG_DEVICE u32 unknown(u32 v) {
  asm volatile("" : "+v"(v));
  return v;
}
// Two sums that are made here: what makes them moves behind no later branch.
KOG_DEVICE void stay(float a, float b) { asm volatile("" ::"v"(a), "v"(b)); }
// Nothing moves across: what is loaded early takes registers.
KOG_DEVICE void keep_order() { __builtin_amdgcn_sched_barrier(0); }
// Asked again, they are new numbers (Block::begin_stage says why).
KOG_DEVICE int thread_index() { return static_cast<int>(unknown(wave_index() * kWaveThreads + in_wave())); }
KOG_DEVICE int workgroup_index() { return static_cast<int>(__builtin_amdgcn_workgroup_id_x()); }
// Which block of the kernel's a workgroup is: its own index until all know on which XCD each lies (place.h). Every Block
// that is made finds it in shared memory, and keeps it in a register.
KOG_DEVICE int* place_in_shared() {
  static __attribute__((shared)) int index;
  return &index;
}
struct BlockPlace {
  int index = __builtin_amdgcn_readfirstlane(*in_shared(place_in_shared()));
};
KOG_DEVICE int block_index(BlockPlace place) {
  asm volatile("" : "+s"(place.index));
  return place.index;
}
// The XCD that this workgroup lies on: hwreg(HW_REG_XCC_ID), its four bits.
constexpr int kDies = 16, kXccIdRegister = 20 | 3 << 11;
KOG_DEVICE int die_index() { return static_cast<int>(__builtin_amdgcn_s_getreg(kXccIdRegister)); }
// The constant clock of all XCDs, 100 MHz.
constexpr int kTickNs = 160;
KOG_DEVICE u64 nanoseconds() { return __builtin_amdgcn_s_memrealtime() * 10; }
// Of 160 ns: 32 bits of them hold every wait.
KOG_DEVICE i64 clock_ticks() { return static_cast<i64>(__builtin_amdgcn_s_memrealtime() / (kTickNs / 10)); }
KOG_DEVICE u8* shared_memory() {
  extern __attribute__((shared, aligned(128))) u8 memory[];
  return memory;
}

// ---- words that other blocks or the host write and read (docs/SYNC.md): relaxed, past the caches that are not
// theirs. Eight bytes at most are one access ----

template <int kScope, class T>
KOG_DEVICE T load_scoped(const T* p) {
  return __hip_atomic_load(in_memory(p), __ATOMIC_RELAXED, kScope);
}
template <int kScope, class T>
KOG_DEVICE void store_scoped(T* p, T v) {
  __hip_atomic_store(in_memory(p), v, __ATOMIC_RELAXED, kScope);
}
KOG_DEVICE uint2 load_relaxed2(const u32* p) {
  u64 v = load_scoped<kWordScope>(reinterpret_cast<const u64*>(p));
  return {static_cast<u32>(v), static_cast<u32>(v >> 32)};
}
KOG_DEVICE uint4 load_relaxed4(const u32* p) {
  uint2 low = load_relaxed2(p), high = load_relaxed2(p + 2);
  return {low.x, low.y, high.x, high.y};
}
// The same word four times where there is nothing to ask for.
KOG_DEVICE uint4 load_relaxed4(const u32* p, bool there, u32 otherwise) {
  uint4 v = {otherwise, otherwise, otherwise, otherwise};
  if (there) v = load_relaxed4(p);
  return v;
}
KOG_DEVICE u32 load_relaxed(const u32* p) { return load_scoped<kWordScope>(p); }
KOG_DEVICE ulonglong2 load_relaxed_pair(const u64* p) {
  return {load_scoped<kWordScope>(p), load_scoped<kWordScope>(p + 1)};
}
KOG_DEVICE void store_relaxed(u32* p, u32 v) { store_scoped<kWordScope>(p, v); }
KOG_DEVICE void store_relaxed_pair(u64* p, u64 a, u64 b) {
  store_scoped<kWordScope>(p, a);
  store_scoped<kWordScope>(p + 1, b);
}
KOG_DEVICE void store_pair(u64* p, u64 a, u64 b) { in_memory(p)[0] = a, in_memory(p)[1] = b; }
KOG_DEVICE u64 load_system(const u64* p) { return load_scoped<kSystem>(p); }
KOG_DEVICE void store_system(u64* p, u64 v) { store_scoped<kSystem>(p, v); }
// All that this wave has stored is where others find it.
KOG_DEVICE void drain_stores() { asm volatile("s_waitcnt vmcnt(0)" ::: "memory"); }
// The host looks at the first of two words: that one lands last.
KOG_DEVICE void store_system_pair(u64* p, u64 a, u64 b) {
  store_system(p + 1, b);
  drain_stores();
  store_system(p, a);
}
KOG_DEVICE u32 compare_and_swap(u32* p, u32 expected, u32 v) {
  __hip_atomic_compare_exchange_strong(in_memory(p), &expected, v, __ATOMIC_RELAXED, __ATOMIC_RELAXED, kWordScope);
  return expected;
}
// Ahead of the word that tells of what the block has stored. What others read is stored past the caches, so there is
// nothing to write back; and each wave has drained its own stores ahead of a barrier.
KOG_DEVICE void release_gpu() { asm volatile("" ::: "memory"); }
// Behind the wait for such a word, ahead of plain loads: what they may find in the caches is old. The wait has ended, so
// its loads have; of what may bring lines behind it, weights and requests, nothing is ever old.
KOG_DEVICE void acquire_gpu() { asm volatile("buffer_inv sc1" ::: "memory"); }
// Ahead of relaxed loads, which find nothing old.
KOG_DEVICE void acquire_words() { asm volatile("" ::: "memory"); }

// ---- memory of nobody else, weights, and the cache of keys and values ----

using Words4 = u32 __attribute__((ext_vector_type(4)));
using Words2 = u32 __attribute__((ext_vector_type(2)));

// 16 bytes that are read once a token.
KOG_DEVICE uint4 load_streamed(const u8* p) {
  Words4 v = __builtin_nontemporal_load(in_memory(reinterpret_cast<const Words4*>(p)));
  return {v.x, v.y, v.z, v.w};
}
// Zero where there is nothing to load.
KOG_DEVICE uint4 load_cache(const uint4* p, bool there) {
  Words4 v = {0, 0, 0, 0};
  if (there) v = *in_memory(reinterpret_cast<const Words4*>(p));
  return {v.x, v.y, v.z, v.w};
}
KOG_DEVICE uint2 load_cache(const uint2* p, bool there) {
  Words2 v = {0, 0};
  if (there) v = *in_memory(reinterpret_cast<const Words2*>(p));
  return {v.x, v.y};
}
KOG_DEVICE u32 load_cache(const u32* p, bool there) { return there ? *in_memory(p) : 0; }
KOG_DEVICE void store_cache(u32* p, u32 v) { store_scoped<kAgent>(p, v); }
// There is no instruction for it.
KOG_DEVICE void fetch_to_l2(const void*, u32) {}

// ---- a warp: half a wave ----

KOG_DEVICE void sync_warp() {
  __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
  __builtin_amdgcn_wave_barrier();
}
// Between what some threads of a wave publish and a wait of others. A compiler may part threads at a branch for as long
// as it likes, into a loop's next pass even, where some wait for what the others have yet to store; past this it may not.
KOG_DEVICE void rejoin() { __builtin_amdgcn_wave_barrier(); }
// A number that all threads of a wave have, so that the compiler knows.
KOG_DEVICE u32 of_wave(u32 v) { return static_cast<u32>(__builtin_amdgcn_readfirstlane(static_cast<int>(v))); }
KOG_DEVICE u32 threads_with(bool p) {
  u64 wave = __builtin_amdgcn_ballot_w64(p);
  return static_cast<u32>(in_wave() < kWarpThreads ? wave : wave >> kWarpThreads);
}
KOG_DEVICE bool any_in_warp(bool p) { return threads_with(p) != 0; }
// Of those that come here: waits of one token go round by whole waves, so that ways out of them are one for LLVM, too.
KOG_DEVICE bool any_in_wave(bool p) { return __builtin_amdgcn_ballot_w64(p) != 0; }
// Of a wave that waits, whether this warp does: it has a wait that may expire.
KOG_DEVICE bool late_itself(bool late) { return any_in_warp(late); }
constexpr bool kPairAtOnce = false;  // the first of two may be there without the other

// Permutations that a thread of a row of 16 takes part in without memory (DPP).
constexpr int kQuadXor1 = 0xb1, kQuadXor2 = 0x4e, kRowRotate8 = 0x128;
template <int kControl>
KOG_DEVICE u32 permuted(u32 v) {
  return static_cast<u32>(__builtin_amdgcn_update_dpp(0, static_cast<int>(v), kControl, 0xf, 0xf, true));
}
// By the crossbar of shared memory, without its memory: thread exclusive or kMask.
template <int kMask>
KOG_DEVICE u32 swizzled(u32 v) {
  return static_cast<u32>(__builtin_amdgcn_ds_swizzle(static_cast<int>(v), kMask << 10 | 0x1f));
}
KOG_DEVICE u32 of_thread(u32 v, int thread) {
  int lane = (in_wave() & kWarpThreads) | (thread & (kWarpThreads - 1));
  return static_cast<u32>(__builtin_amdgcn_ds_bpermute(4 * lane, static_cast<int>(v)));
}
KOG_DEVICE u32 shuffle_xor(u32 v, int mask) {
  switch (mask) {
    case 1: return permuted<kQuadXor1>(v);
    case 2: return permuted<kQuadXor2>(v);
    case 8: return permuted<kRowRotate8>(v);
    case 4: return swizzled<4>(v);
    case 16: return swizzled<16>(v);
    default: return of_thread(v, (in_wave() ^ mask) & (kWarpThreads - 1));
  }
}
KOG_DEVICE u32 bits_of(float x) { return __builtin_bit_cast(u32, x); }
KOG_DEVICE float float_of(u32 x) { return __builtin_bit_cast(float, x); }
KOG_DEVICE float shuffle_xor(float v, int mask) { return float_of(shuffle_xor(bits_of(v), mask)); }
KOG_DEVICE u64 shuffle_xor(u64 v, int mask) {
  return shuffle_xor(static_cast<u32>(v), mask) | static_cast<u64>(shuffle_xor(static_cast<u32>(v >> 32), mask)) << 32;
}
KOG_DEVICE float shuffle_down(float v, int by) {
  int from = (in_wave() & (kWarpThreads - 1)) + by;
  return float_of(of_thread(bits_of(v), from < kWarpThreads ? from : from - by));
}
KOG_DEVICE u32 shuffle(u32 v, int thread) { return of_thread(v, thread); }
KOG_DEVICE float shuffle(float v, int thread) { return float_of(of_thread(bits_of(v), thread)); }
KOG_DEVICE u64 shuffle(u64 v, int thread) {
  return of_thread(static_cast<u32>(v), thread) | static_cast<u64>(of_thread(static_cast<u32>(v >> 32), thread)) << 32;
}
// Of kOf threads side by side, 1, 2 or 4, what the one of this number has.
template <int kThread, int kOf>
KOG_DEVICE u32 of_neighbors(u32 v) {
  constexpr auto from = [](int thread) { return thread / kOf * kOf + kThread; };
  if constexpr (kOf == 1) return v;
  return permuted<from(0) | from(1) << 2 | from(2) << 4 | from(3) << 6>(v);
}

}  // namespace kog
#include <kog/threads.h>  // over what stands above, for what stands below
namespace kog {

KOG_DEVICE u32 largest_of_warp(u32 v) { return largest_of_threads(v); }
KOG_DEVICE u32 sum_of_warp(u32 v) { return sum_of_threads(v); }

// ---- the waves of a block ----

// Of shared memory alone: what is on its way to and from memory stays there.
KOG_DEVICE void sync_consumers() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
// A barrier that also says whether any thread brought `p`.
KOG_DEVICE bool any_consumer(bool p) {
  static __attribute__((shared)) u32 brought[kWaves];
  bool any = __builtin_amdgcn_ballot_w64(p) != 0;
  if (in_wave() == 0) brought[wave_index()] = any;
  sync_consumers();
  u32 out = 0;
#pragma unroll
  for (int i = 0; i < kWaves; i++) out |= brought[i];
  sync_consumers();
  return out != 0;
}

template <class T>
KOG_DEVICE void add_shared(T* p, T v) {
  __hip_atomic_fetch_add(in_shared(p), v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}
KOG_DEVICE u32 load_volatile(const u32* p) { return *in_shared(static_cast<const volatile u32*>(p)); }
KOG_DEVICE void store_volatile(u32* p, u32 v) { *in_shared(static_cast<volatile u32*>(p)) = v; }

}  // namespace kog
#include <kog/own_waits.h>
namespace kog {

// ---- arithmetic ----

KOG_DEVICE float exp2_fast(float x) { return __builtin_amdgcn_exp2f(x); }
KOG_DEVICE float log2_fast(float x) { return __builtin_amdgcn_logf(x); }
// Quotients to 2 units in the last place, without a subroutine.
KOG_DEVICE float divide(float a, float b) { return a * __builtin_amdgcn_rcpf(b); }
// Rounded as written: what the compiler may fuse, or not, would differ from kernel to kernel.
KOG_DEVICE float product(float a, float b) {
#pragma clang fp contract(off)
  return a * b;
}
KOG_DEVICE float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
// Two of them, made here, not where they are needed: what is added would take registers until then.
using TwoFloats = float __attribute__((ext_vector_type(2)));
KOG_DEVICE void fuse_two(float2 a, float2 b, float2& c) {
  TwoFloats sum = __builtin_elementwise_fma(TwoFloats{a.x, a.y}, TwoFloats{b.x, b.y}, TwoFloats{c.x, c.y});
  asm volatile("" : "+v"(sum));
  c = {sum.x, sum.y};
}
KOG_DEVICE float rsqrt_of(float x) { return __builtin_amdgcn_rsqf(x); }
KOG_DEVICE u64 bits_of(double x) { return __builtin_bit_cast(u64, x); }
KOG_DEVICE double double_of(u64 x) { return __builtin_bit_cast(double, x); }
// A wave's matrix of 16 rows and columns: a thread's column, and four rows of it (mma/products.h).
using FourFloats = float __attribute__((ext_vector_type(4)));
struct Matrix {
  FourFloats v;
};
// c += rows * columns over 16 values of K, of which a thread has four. By whole waves: who is left out multiplies, too.
template <bool kF16>
KOG_DEVICE void multiply_add(Matrix& c, uint2 rows, uint2 columns) {
  if constexpr (kF16) {
    using Halves = _Float16 __attribute__((ext_vector_type(4)));
    c.v = __builtin_amdgcn_mfma_f32_16x16x16f16(__builtin_bit_cast(Halves, rows), __builtin_bit_cast(Halves, columns),
                                                c.v, 0, 0, 0);
  } else {
    using Shorts = short __attribute__((ext_vector_type(4)));
    c.v = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(__builtin_bit_cast(Shorts, rows),
                                                    __builtin_bit_cast(Shorts, columns), c.v, 0, 0, 0);
  }
}
// Ahead of what reads its sums: seven wait states behind the last product, which the GPU does not wait for. LLVM counts
// them by one way alone where two meet, and takes the longer one's (docs/AMD.md).
KOG_DEVICE void settle(Matrix& c) { asm volatile("s_nop 6" : "+v"(c.v)); }
// The same of dot products, which take three.
KOG_DEVICE void settle(float& a, float& b) { asm volatile("s_nop 2" : "+v"(a), "+v"(b)); }
KOG_DEVICE int bit_length(u64 x) { return x == 0 ? 0 : 64 - __builtin_clzll(x); }

using Half2 = _Float16 __attribute__((ext_vector_type(2)));

KOG_DEVICE u32 rounded_bf16(float x) {
  u32 bits = bits_of(x);
  return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
// Two float32 rounded to 16-bit values, to nearest, ties to even; `low` in the low half.
template <bool kF16>
KOG_DEVICE u32 round_pair(float low, float high) {
  if constexpr (kF16) {
    Half2 both = {static_cast<_Float16>(low), static_cast<_Float16>(high)};
    return __builtin_bit_cast(u32, both);
  } else {
    return rounded_bf16(high) << 16 | rounded_bf16(low);
  }
}
KOG_DEVICE float widen_f16(u16 x) { return static_cast<float>(__builtin_bit_cast(_Float16, x)); }

// c + a.low * b.low + a.high * b.high, of 16-bit values. gfx942 has no such instruction of bfloat16.
template <bool kF16>
KOG_DEVICE float dot2(u32 a, u32 b, float c) {
  if constexpr (kF16) {
    return __builtin_amdgcn_fdot2(__builtin_bit_cast(Half2, a), __builtin_bit_cast(Half2, b), c, false);
  } else {
    c = fused(float_of(a << 16), float_of(b << 16), c);
    return fused(float_of(a & 0xffff0000u), float_of(b & 0xffff0000u), c);
  }
}

}  // namespace kog
