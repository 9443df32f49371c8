// How a reader knows that a vector of 16 bytes is there: three ways, with one interface.
//
//                values of 16 bytes    each value          whole     before the first use
//   PhaseWords   4                     less its last bit   word      0
//   EpochPairs   2                     all 32 bits         pair      0
//   PoisonWords  4                     all 32 bits         vector*   0xffffffff
//
// * Or each half of it, which then is poison by itself: kWholeWords, which AMD's GPUs have 2 of.
//
//   kValues      floats of a vector
//   kBuffers     that rotate for each use that may be under way (channel.h)
//   kEmpty       what every word holds before the first use
//   kClears      whether a buffer is made empty again before its next use
//   mark(n)      what distinguishes the n-th use of a buffer from its others
//   pack, unpack values to a vector and back;   store, load  by one instruction (AMD: two)
//   stale        0 where the vector that was loaded is there: a number, for a thread has seven predicates, and a poll
//                more vectors
//   seen         the mark that it had
#pragma once
#include <kccl/ptx.h>

namespace kccl {

// The lowest bit of every word is a phase, which flips from one use of the buffer to the next.
struct PhaseWords {
  static constexpr int kValues = 4, kBuffers = 2;
  static constexpr u32 kEmpty = 0;
  static constexpr bool kClears = false;

  KCCL_DEVICE static u32 mark(u64 n) { return static_cast<u32>(n + 1) & 1; }
  KCCL_DEVICE static Vector pack(const float (&v)[kValues], u32 mark) {
    Vector out;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      u32 bits = v[j] != v[j] ? 0x7fc00000u : bits_of(v[j]);  // a NaN stays one without its lowest bit
      out.w[j] = (bits & ~1u) | mark;
    }
    return out;
  }
  KCCL_DEVICE static void unpack(const Vector& q, float (&v)[kValues]) {
#pragma unroll
    for (int j = 0; j < 4; j++) v[j] = float_of(q.w[j] & ~1u);
  }
  KCCL_DEVICE static Vector load(const u32* p) { return load_words(p); }
  KCCL_DEVICE static void store(u32* p, const Vector& q) { store_words(p, q); }
  KCCL_DEVICE static u32 stale(const Vector& q, u32 mark) {
    return ((q.w[0] ^ mark) | (q.w[1] ^ mark) | (q.w[2] ^ mark) | (q.w[3] ^ mark)) & 1;
  }
  KCCL_DEVICE static u32 seen(const Vector& q, u32 mark) { return mark ^ stale(q, mark); }
};

// Each pair of words is a value and the number of the use.
struct EpochPairs {
  static constexpr int kValues = 2, kBuffers = 2;
  static constexpr u32 kEmpty = 0;
  static constexpr bool kClears = false;

  KCCL_DEVICE static u32 mark(u64 n) { return static_cast<u32>(n + 1); }
  KCCL_DEVICE static Vector pack(const float (&v)[kValues], u32 mark) {
    return {{bits_of(v[0]), mark, bits_of(v[1]), mark}};
  }
  KCCL_DEVICE static void unpack(const Vector& q, float (&v)[kValues]) {
    v[0] = float_of(q.w[0]), v[1] = float_of(q.w[2]);
  }
  KCCL_DEVICE static Vector load(const u32* p) { return load_pairs(p); }
  KCCL_DEVICE static void store(u32* p, const Vector& q) { store_pairs(p, q); }
  KCCL_DEVICE static u32 stale(const Vector& q, u32 mark) { return (q.w[1] ^ mark) | (q.w[3] ^ mark); }
  KCCL_DEVICE static u32 seen(const Vector& q, u32 mark) { return q.w[1] != mark ? q.w[1] : q.w[3]; }
};

// The last word is anything but the poison. Compared as bits: a NaN among the values is a value. Buffers are
// poisoned again by their rank, which takes a third one and a fence.
struct PoisonWords {
  static constexpr int kValues = 4, kBuffers = 3;
  static constexpr u32 kEmpty = 0xffffffffu;
  static constexpr bool kClears = true;

  KCCL_DEVICE static u32 mark(u64) { return 0; }  // any but kEmpty
  KCCL_DEVICE static Vector pack(const float (&v)[kValues], u32) {
    u32 second = bits_of(v[1]), last = bits_of(v[3]);
    if constexpr (kWholeWords == 2) second = second == kEmpty ? 0x7fc00000u : second;
    return {{bits_of(v[0]), second, bits_of(v[2]), last == kEmpty ? 0x7fc00000u : last}};
  }
  KCCL_DEVICE static void unpack(const Vector& q, float (&v)[kValues]) {
#pragma unroll
    for (int j = 0; j < 4; j++) v[j] = float_of(q.w[j]);
  }
  KCCL_DEVICE static Vector load(const u32* p) { return load_whole(p); }
  KCCL_DEVICE static void store(u32* p, const Vector& q) { store_whole(p, q); }
  KCCL_DEVICE static u32 stale(const Vector& q, u32) {
    if constexpr (kWholeWords == 2)
      if (q.w[1] == kEmpty) return 1;
    return q.w[3] == kEmpty ? 1 : 0;
  }
  KCCL_DEVICE static u32 seen(const Vector& q, u32) { return stale(q, 0) ? kEmpty : q.w[3]; }
};

}  // namespace kccl
