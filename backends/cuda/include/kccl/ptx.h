// KCCL's instructions, one wrapper each. HIP brings its own (backends/hip/include/kccl), and so does a host build
// (tests/lib/cuda_host/kccl): the rest compiles as it stands.
//
// Every access to a word is relaxed and of scope .sys on both ends: a word written by another GPU is only sure to be
// seen by a load of that scope, even in the reader's own memory.
#pragma once

#define KCCL_DEVICE __device__ __forceinline__

namespace kccl {

using u32 = unsigned int;
using u64 = unsigned long long;

// 16 bytes, of which the instructions below differ in what they promise to move whole.
struct alignas(16) Vector {
  u32 w[4];
};
constexpr int kWholeWords = 4;  // that load_whole and store_whole move whole

// Four words, each whole: they may be seen in any order.
KCCL_DEVICE Vector load_words(const u32* p) {
  Vector v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
               : "l"(p)
               : "memory");
  return v;
}
KCCL_DEVICE void store_words(u32* p, const Vector& v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.w[0]), "r"(v.w[1]),
               "r"(v.w[2]), "r"(v.w[3])
               : "memory");
}
KCCL_DEVICE u64 join(u32 low, u32 high) { return static_cast<u64>(high) << 32 | low; }
KCCL_DEVICE Vector split(u64 a, u64 b) {
  return {{static_cast<u32>(a), static_cast<u32>(a >> 32), static_cast<u32>(b), static_cast<u32>(b >> 32)}};
}
// Two pairs of words, each pair whole.
KCCL_DEVICE Vector load_pairs(const u32* p) {
  u64 a, b;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(p) : "memory");
  return split(a, b);
}
KCCL_DEVICE void store_pairs(u32* p, const Vector& v) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(p), "l"(join(v.w[0], v.w[1])),
               "l"(join(v.w[2], v.w[3]))
               : "memory");
}
// All 16 bytes whole: to PTX one access (.b128), not four that go together.
KCCL_DEVICE Vector load_whole(const u32* p) {
  u64 a, b;
  asm volatile("{\n.reg .b128 v;\nld.relaxed.sys.global.b128 v, [%2];\nmov.b128 {%0, %1}, v;\n}"
               : "=l"(a), "=l"(b)
               : "l"(p)
               : "memory");
  return split(a, b);
}
KCCL_DEVICE void store_whole(u32* p, const Vector& v) {
  asm volatile("{\n.reg .b128 v;\nmov.b128 v, {%1, %2};\nst.relaxed.sys.global.b128 [%0], v;\n}" ::"l"(p),
               "l"(join(v.w[0], v.w[1])), "l"(join(v.w[2], v.w[3]))
               : "memory");
}
// One pair.
KCCL_DEVICE u64 load_pair(const u32* p) {
  u64 v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
KCCL_DEVICE void store_pair(u32* p, u64 v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
KCCL_DEVICE u32 load_word(const u32* p) {
  u32 v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
KCCL_DEVICE void store_word(u32* p, u32 v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
// Of this GPU's own memory, among its own threads.
KCCL_DEVICE u32 compare_and_swap(u32* p, u32 expected, u32 v) { return atomicCAS(p, expected, v); }
// This thread's stores before it are seen before those behind it, by all GPUs.
KCCL_DEVICE void fence() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

KCCL_DEVICE bool any_in_warp(bool p) { return __any_sync(0xffffffffu, p); }
KCCL_DEVICE u64 nanoseconds() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
KCCL_DEVICE u32 bits_of(float x) { return __float_as_uint(x); }
KCCL_DEVICE float float_of(u32 x) { return __uint_as_float(x); }

}  // namespace kccl
