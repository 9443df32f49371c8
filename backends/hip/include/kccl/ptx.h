// KCCL's instructions on CDNA3, in the place of CUDA's (the include path decides). No ROCm header is needed.
//
// Every access to a word is relaxed and of system scope (sc0 sc1) on both ends, in memory that no GPU caches
// (hipDeviceMallocUncached): in other memory AMD has system scope act as the GPU's own. One access moves 8 bytes whole
// at most. A warp is a wave of 64.
#pragma once

#define KCCL_DEVICE inline __attribute__((device, always_inline))

namespace kccl {

using u32 = unsigned int;
using u64 = unsigned long long;

struct alignas(16) Vector {
  u32 w[4];
};
constexpr int kWholeWords = 2;  // that load_whole and store_whole move whole

// The compiler could not tell that a pointer does not point into shared memory.
template <class T>
KCCL_DEVICE __attribute__((address_space(1))) T* in_memory(T* p) {
  return (__attribute__((address_space(1))) T*)p;
}
template <class T>
KCCL_DEVICE T load_system(const T* p) {
  return __hip_atomic_load(in_memory(p), __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
// Threads of a wave that ask for one place at once may find different things there. LLVM takes what is at one address
// for one thing, and ended a wait when any thread had found its word: so an address is a thread's own.
KCCL_DEVICE const u32* of_thread(const u32* p) {
  asm("" : "+v"(p));
  return p;
}
template <class T>
KCCL_DEVICE void store_system(T* p, T v) {
  __hip_atomic_store(in_memory(p), v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}

KCCL_DEVICE u64 join(u32 low, u32 high) { return static_cast<u64>(high) << 32 | low; }
KCCL_DEVICE u64 load_pair(const u32* p) { return load_system(reinterpret_cast<const u64*>(of_thread(p))); }
KCCL_DEVICE void store_pair(u32* p, u64 v) { store_system(reinterpret_cast<u64*>(p), v); }
KCCL_DEVICE u32 load_word(const u32* p) { return load_system(of_thread(p)); }
KCCL_DEVICE void store_word(u32* p, u32 v) { store_system(p, v); }

KCCL_DEVICE Vector load_pairs(const u32* p) {
  const u64* pairs = reinterpret_cast<const u64*>(of_thread(p));
  u64 a = load_system(pairs), b = load_system(pairs + 1);
  return {{static_cast<u32>(a), static_cast<u32>(a >> 32), static_cast<u32>(b), static_cast<u32>(b >> 32)}};
}
KCCL_DEVICE void store_pairs(u32* p, const Vector& v) {
  store_pair(p, join(v.w[0], v.w[1]));
  store_pair(p + 2, join(v.w[2], v.w[3]));
}
KCCL_DEVICE Vector load_words(const u32* p) { return load_pairs(p); }
KCCL_DEVICE void store_words(u32* p, const Vector& v) { store_pairs(p, v); }
KCCL_DEVICE Vector load_whole(const u32* p) { return load_pairs(p); }
KCCL_DEVICE void store_whole(u32* p, const Vector& v) { store_pairs(p, v); }

KCCL_DEVICE u32 compare_and_swap(u32* p, u32 expected, u32 v) {
  __hip_atomic_compare_exchange_strong(in_memory(p), &expected, v, __ATOMIC_RELAXED, __ATOMIC_RELAXED,
                                       __HIP_MEMORY_SCOPE_SYSTEM);
  return expected;
}
// What this wave has stored is where all GPUs find it: past the caches, so there is nothing to write back.
KCCL_DEVICE void fence() { asm volatile("s_waitcnt vmcnt(0)" ::: "memory"); }

KCCL_DEVICE bool any_in_warp(bool p) { return __builtin_amdgcn_ballot_w64(p) != 0; }
// The constant clock, 100 MHz.
KCCL_DEVICE u64 nanoseconds() { return __builtin_amdgcn_s_memrealtime() * 10; }
KCCL_DEVICE u32 bits_of(float x) { return __builtin_bit_cast(u32, x); }
KCCL_DEVICE float float_of(u32 x) { return __builtin_bit_cast(float, x); }

}  // namespace kccl
