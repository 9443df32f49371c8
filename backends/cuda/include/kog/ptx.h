// One wrapper per instruction. The rest of the kernel is plain C++ over these, so that a host build
// can bring its own versions (tests/lib/cuda_host) and run the same stages on a CPU.
#pragma once

#define KOG_ASSUME(x) __builtin_assume(x)
#define KOG_OFFSET(T, member) __INTADDR__(&((T*)0)->member)  // NVRTC has no offsetof
#define KOG_EITHER(first, a, b) (first ? a : b)
#define KOG_DEVICE __device__ __forceinline__
#define KOG_DEVICE_NOINLINE __device__ __noinline__
#define KOG_KERNEL extern "C" __global__
#define KOG_CONSTANT __constant__
// Of words that blocks exchange (layout/header.py): "sys" where those of several GPUs do.
#ifndef KOG_WORD_SCOPE
#define KOG_WORD_SCOPE "gpu"
#endif

namespace kog {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

// A pointer among a kernel's arguments.
template <class T>
using Memory = T*;

constexpr u32 kWholeWarp = 0xffffffffu;
constexpr int kWarpThreads = 32;
constexpr bool kMaskInRegister = true;  // a register can hold shuffle_xor's mask (threads.h)

// ---- where am I, what time is it ----

// Volatile: asked again, they are read again (Block::begin_stage says why).
KOG_DEVICE int thread_index() {
  int i;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(i));
  return i;
}
struct BlockPlace {};  // what a block knows of where it stands: here its index says all
KOG_DEVICE int block_index(BlockPlace = {}) {
  int i;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(i));
  return i;
}
KOG_DEVICE void sleep_a_while() { asm volatile("nanosleep.u32 1000;"); }
// Between two looks at a word of shared memory, at once: on a CPU the others need their turns.
KOG_DEVICE void look_again() {}
// How many registers each thread of four warps has from here on.
template <int kCount>
KOG_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
KOG_DEVICE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
KOG_DEVICE i64 clock_ticks() { return clock64(); }
KOG_DEVICE u64 nanoseconds() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
KOG_DEVICE u8* shared_memory() {
  extern __shared__ __align__(1024) u8 memory[];
  return memory;
}
KOG_DEVICE u32 shared_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}

// ---- words that other blocks (gpu; of several ranks sys) or the host (sys) write and read (docs/SYNC.md): relaxed,
// past the L1 ----

KOG_DEVICE uint4 load_relaxed4(const u32* p) {
  uint4 v;
  asm volatile("ld.relaxed." KOG_WORD_SCOPE ".global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
// Four words if they are `there`, else so many of another. One statement, as load_cache.
KOG_DEVICE uint4 load_relaxed4(const u32* p, bool there, u32 other) {
  uint4 v;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n"
      "mov.u32 %0, %6;\nmov.u32 %1, %6;\nmov.u32 %2, %6;\nmov.u32 %3, %6;\n"
      "@p ld.relaxed." KOG_WORD_SCOPE ".global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(p), "r"(static_cast<u32>(there)), "r"(other)
      : "memory");
  return v;
}
KOG_DEVICE uint2 load_relaxed2(const u32* p) {
  uint2 v;
  asm volatile("ld.relaxed." KOG_WORD_SCOPE ".global.v2.u32 {%0, %1}, [%2];"
               : "=r"(v.x), "=r"(v.y)
               : "l"(p)
               : "memory");
  return v;
}
KOG_DEVICE u32 load_relaxed(const u32* p) {
  u32 v;
  asm volatile("ld.relaxed." KOG_WORD_SCOPE ".global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
KOG_DEVICE ulonglong2 load_relaxed_pair(const u64* p) {
  ulonglong2 v;
  asm volatile("ld.relaxed." KOG_WORD_SCOPE ".global.v2.u64 {%0, %1}, [%2];"
               : "=l"(v.x), "=l"(v.y)
               : "l"(p)
               : "memory");
  return v;
}
KOG_DEVICE void store_relaxed(u32* p, u32 v) {
  asm volatile("st.relaxed." KOG_WORD_SCOPE ".global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
KOG_DEVICE void store_relaxed_pair(u64* p, u64 a, u64 b) {
  asm volatile("st.relaxed." KOG_WORD_SCOPE ".global.v2.u64 [%0], {%1, %2};" ::"l"(p), "l"(a), "l"(b) : "memory");
}
KOG_DEVICE void store_pair(u64* p, u64 a, u64 b) {
  asm volatile("st.global.v2.u64 [%0], {%1, %2};" ::"l"(p), "l"(a), "l"(b) : "memory");
}
KOG_DEVICE u64 load_system(const u64* p) {
  u64 v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
KOG_DEVICE void store_system(u64* p, u64 v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
KOG_DEVICE void store_system_pair(u64* p, u64 a, u64 b) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(p), "l"(a), "l"(b) : "memory");
}
KOG_DEVICE u32 compare_and_swap(u32* p, u32 expected, u32 v) { return atomicCAS(p, expected, v); }
// Stores of all warps are known to whoever has met them at a barrier.
KOG_DEVICE void drain_stores() {}
KOG_DEVICE void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
// Its uses, which are not one instruction on AMD: ahead of the word that tells of what the block has stored; behind such
// a word, ahead of plain loads, or of relaxed ones.
KOG_DEVICE void release_gpu() { fence_gpu(); }
KOG_DEVICE void acquire_gpu() { fence_gpu(); }
KOG_DEVICE void acquire_words() { fence_gpu(); }

// ---- the cache of keys and values: read once a token, ordered by release_gpu and acquire_gpu (docs/SYNC.md) ----

KOG_DEVICE void store_cache(u32* p, u32 v) { *p = v; }
// Zero where there is nothing to load. One statement: were zero and the loaded value joined by the
// compiler, a move between registers would wait for the load on the spot.
KOG_DEVICE uint4 load_cache(const uint4* p, bool there) {
  uint4 v;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n"
      "mov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
      "@p ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(p), "r"(static_cast<u32>(there))
      : "memory");
  return v;
}
KOG_DEVICE uint2 load_cache(const uint2* p, bool there) {
  uint2 v;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\nmov.u32 %0, 0;\nmov.u32 %1, 0;\n"
      "@p ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];\n}"
      : "=&r"(v.x), "=&r"(v.y)
      : "l"(p), "r"(static_cast<u32>(there))
      : "memory");
  return v;
}
KOG_DEVICE u32 load_cache(const u32* p, bool there) {
  u32 v;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\nmov.u32 %0, 0;\n"
      "@p ld.global.L1::no_allocate.u32 %0, [%1];\n}"
      : "=&r"(v)
      : "l"(p), "r"(static_cast<u32>(there))
      : "memory");
  return v;
}

// ---- a warp ----

KOG_DEVICE void sync_warp() { __syncwarp(); }
// Between what some threads of a warp publish and a wait of others: here each thread goes on by itself.
KOG_DEVICE void rejoin() {}
// A number that warps side by side have, where they run the same instructions.
KOG_DEVICE u32 of_wave(u32 v) { return v; }
KOG_DEVICE bool any_in_warp(bool p) { return __any_sync(kWholeWarp, p); }
KOG_DEVICE bool any_in_wave(bool p) { return any_in_warp(p); }  // a wave is one warp
KOG_DEVICE bool late_itself(bool) { return true; }              // whether this warp is late, where its wave is
constexpr bool kPairAtOnce = true;                              // whether load_relaxed_pair is one access
KOG_DEVICE u32 threads_with(bool p) { return __ballot_sync(kWholeWarp, p); }
KOG_DEVICE float shuffle_xor(float v, int mask) { return __shfl_xor_sync(kWholeWarp, v, mask); }
KOG_DEVICE u32 shuffle_xor(u32 v, int mask) { return __shfl_xor_sync(kWholeWarp, v, mask); }
KOG_DEVICE u64 shuffle_xor(u64 v, int mask) { return __shfl_xor_sync(kWholeWarp, v, mask); }
KOG_DEVICE float shuffle_down(float v, int by) { return __shfl_down_sync(kWholeWarp, v, by); }
KOG_DEVICE float shuffle(float v, int thread) { return __shfl_sync(kWholeWarp, v, thread); }
KOG_DEVICE u32 shuffle(u32 v, int thread) { return __shfl_sync(kWholeWarp, v, thread); }
KOG_DEVICE u64 shuffle(u64 v, int thread) { return __shfl_sync(kWholeWarp, v, thread); }
KOG_DEVICE u32 largest_of_warp(u32 v) { return __reduce_max_sync(kWholeWarp, v); }
KOG_DEVICE u32 sum_of_warp(u32 v) { return __reduce_add_sync(kWholeWarp, v); }

// ---- the consumer warps of a block ----

KOG_DEVICE void sync_consumers() { asm volatile("barrier.cta.sync 1, %0;" ::"n"(kConsumers) : "memory"); }
// A barrier that also says whether any thread brought `p`.
KOG_DEVICE bool any_consumer(bool p) {
  u32 out;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbarrier.cta.red.or.pred q, 1, %2, p;\n"
      "selp.u32 %0, 1, 0, q;\n}"
      : "=r"(out)
      : "r"(static_cast<u32>(p)), "n"(kConsumers)
      : "memory");
  return out != 0;
}

KOG_DEVICE void add_shared(u32* p, u32 v) { atomicAdd(p, v); }
KOG_DEVICE void add_shared(u64* p, u64 v) { atomicAdd(p, v); }

// A warp of its own watches over the others' waits (watchdog.h).
template <class Block>
KOG_DEVICE void watch_own_wait(const Block&, bool) {}

// ---- arithmetic ----

KOG_DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
KOG_DEVICE float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Quotients to 2 units in the last place, without a subroutine.
KOG_DEVICE float divide(float a, float b) {
  float y;
  asm("div.full.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
// Rounded as written: what the compiler may fuse, or not, would differ from kernel to kernel.
KOG_DEVICE float product(float a, float b) { return __fmul_rn(a, b); }
KOG_DEVICE float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
// Of one that is not negative and any other; NaN if one is.
KOG_DEVICE float larger_magnitude(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(fabsf(b)));
  return y;
}
KOG_DEVICE float rsqrt_of(float x) { return rsqrtf(x); }
KOG_DEVICE u32 bits_of(float x) { return __float_as_uint(x); }
KOG_DEVICE float float_of(u32 x) { return __uint_as_float(x); }
KOG_DEVICE u64 bits_of(double x) { return static_cast<u64>(__double_as_longlong(x)); }
KOG_DEVICE double double_of(u64 x) { return __longlong_as_double(static_cast<i64>(x)); }
KOG_DEVICE int bit_length(u64 x) { return 64 - __clzll(static_cast<i64>(x)); }

// Two float32 rounded to 16-bit values, to nearest, ties to even; `low` in the low half.
template <bool kF16>
KOG_DEVICE u32 round_pair(float low, float high) {
  u32 w;
  if constexpr (kF16)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
  return w;
}
// (q & mask) | base in one instruction: of two numbers that are known, the compiler made two.
KOG_DEVICE u32 and_or(u32 q, u32 mask, u32 base) {
  u32 out;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(q), "r"(mask), "r"(base));
  return out;
}
KOG_DEVICE float widen_f16(u16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}

// The low 16 bits of two words, the second's above; and the high ones.
KOG_DEVICE u32 low_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x5410); }
KOG_DEVICE u32 high_halves(u32 a, u32 b) { return __byte_perm(a, b, 0x7632); }

// Each nibble of the selector picks a byte, of the second word from 4 on; from 8 on, that byte's sign in all bits.
KOG_DEVICE u32 pick_bytes(u32 a, u32 b, u32 selector) {
  u32 out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(selector));
  return out;
}

// c[16][8] += a[16][32] * b[32][8] of bytes.
KOG_DEVICE void multiply_bytes(int (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// c[16][8] += a[16][16] * b[16][8], and the same with 8 values of K: their words in `ab`, which are `operands`.
#define KOG_MULTIPLY_ADD(shape, type, operands, ab...)                                              \
  asm volatile("mma.sync.aligned." shape ".row.col.f32." type "." type ".f32 {%0, %1, %2, %3}, " operands \
               ", {%0, %1, %2, %3};"                                                                \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                     \
               : ab)
#define KOG_MULTIPLY_ADD_EITHER(shape, operands, ab...) \
  if constexpr (kF16)                                   \
    KOG_MULTIPLY_ADD(shape, "f16", operands, ab);       \
  else                                                  \
    KOG_MULTIPLY_ADD(shape, "bf16", operands, ab)
template <bool kF16>
KOG_DEVICE void multiply_add(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  KOG_MULTIPLY_ADD_EITHER("m16n8k16", "{%4, %5, %6, %7}, {%8, %9}", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]),
                          "r"(b[0]), "r"(b[1]));
}
template <bool kF16>
KOG_DEVICE void multiply_add(float (&c)[4], const u32 (&a)[2], const u32 (&b)[1]) {
  KOG_MULTIPLY_ADD_EITHER("m16n8k8", "{%4, %5}, {%6}", "r"(a[0]), "r"(a[1]), "r"(b[0]));
}

// ---- mbarriers and bulk copies ----

KOG_DEVICE void barrier_init(u64* b, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals));
}
KOG_DEVICE void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
KOG_DEVICE void barrier_expect(u64* b, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)),
               "r"(bytes)
               : "memory");
}
KOG_DEVICE void barrier_arrive(u64* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}
// Whether the phase of this parity has ended: barrier_try may wait a little for it, barrier_test does not.
#define KOG_ASK_BARRIER(name, ask)                                                                            \
  KOG_DEVICE bool name(u64* b, u32 parity) {                                                                  \
    u32 ok;                                                                                                   \
    asm volatile("{\n.reg .pred p;\nmbarrier." ask ".parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}" \
                 : "=r"(ok)                                                                                   \
                 : "r"(shared_address(b)), "r"(parity)                                                        \
                 : "memory");                                                                                 \
    return ok != 0;                                                                                           \
  }
KOG_ASK_BARRIER(barrier_try, "try_wait")
KOG_ASK_BARRIER(barrier_test, "test_wait")
// How the L2 treats what is read once a token: it leaves first.
KOG_DEVICE u64 read_once() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
KOG_DEVICE void fetch_to_l2(const void* from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
KOG_DEVICE void fetch_to_l2(const void* from, u32 bytes, u64 policy) {
  asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, %2;" ::"l"(from),
               "r"(bytes), "l"(policy)
               : "memory");
}
// Bulk copies read what threads had acquired that told so: each adds to a word of shared memory, and the thread that
// copies has read the sum.
KOG_DEVICE void add_released(u32* p, u32 v) {
  asm volatile("fence.acq_rel.cta;" ::: "memory");
  atomicAdd(p, v);
}
KOG_DEVICE void acquire_for_copies(const u32*) {
  asm volatile("fence.acq_rel.cta;\nfence.proxy.async.global;" ::: "memory");
}
KOG_DEVICE void bulk_load(void* to, const void* from, u32 bytes, u64* barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], %2, [%3], %4;" ::"r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}
// A number that the compiler does not know: no code is laid out for it alone.
KOG_DEVICE u32 unknown(u32 v) {
  asm volatile("" : "+r"(v));
  return v;
}
KOG_DEVICE u32 load_volatile(const u32* p) { return *static_cast<const volatile u32*>(p); }
KOG_DEVICE void store_volatile(u32* p, u32 v) { *static_cast<volatile u32*>(p) = v; }

}  // namespace kog
