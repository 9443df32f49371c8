// Words that carry their own readiness (kog_triton/schedule/wire.py defines them) and the polls
// that wait for them.
#pragma once
#include <kog/ranks.h>

namespace kog {

constexpr u32 kNanF32 = 0x7fc00000u;

KOG_DEVICE u32 phase_of(int iteration) { return static_cast<u32>(iteration + 1) & 1; }

KOG_DEVICE u32 pack_f32(float v, u32 phase) {
  return ((v != v ? kNanF32 : bits_of(v)) & ~1u) | phase;
}
KOG_DEVICE float unpack_f32(u32 w) { return float_of(w & ~1u); }
// A value as its readers will find it.
KOG_DEVICE float sent_f32(float v) { return unpack_f32(pack_f32(v, 0)); }

// 16 bits of the model's type.
KOG_DEVICE float widen(u32 bits) {
  if constexpr (kF16) return widen_f16(static_cast<u16>(bits));
  return float_of(bits << 16);
}
KOG_DEVICE float low_of(u32 both) { return widen(both & 0xffffu); }
KOG_DEVICE float high_of(u32 both) { return widen(both >> 16); }

// Two values as the 16-bit pairs whose sums they are.
struct HighLow {
  u32 high, low;

  KOG_DEVICE HighLow(float first, float second) : high(round_pair<kF16>(first, second)) {
    low = round_pair<kF16>(first - low_of(high), second - high_of(high));
  }
};
// An operand is a pair as the tensor core takes it, first in the low half. Both values are multiplied
// by kPairScale: sums over operands are multiplied by kPairUnit in the end.
constexpr float kPairUnit = 1 / kPairScale;
KOG_DEVICE u32 round_operand(float first, float second) {
  return round_pair<kF16>(first * kPairScale, second * kPairScale);
}
KOG_DEVICE u32 rotate_left(u32 w, int by) { return w << by | w >> (32 - by); }

KOG_DEVICE u32 pack_operand(u32 both, u32 phase) {
  if constexpr (kF16) {
    u32 low = both & 0xffffu;
    low = (both & 0x7c00u) == 0x7c00u ? low : low + ((low >> 1) & 1);
    return (both & 0xffff0000u) | (low & 0xfffeu) | phase;
  }
  u32 small = both & 0xffff8000u;  // a first whose exponent lacks the bit that readers set
  return (rotate_left((both & kExponentTop) != 0 ? both : small, 32 - kPairRotation) & ~1u) | phase;
}
KOG_DEVICE u32 pack_pair(float first, float second, u32 phase) {
  return pack_operand(round_operand(first, second), phase);
}
KOG_DEVICE u32 operand_of(u32 w) {
  if constexpr (kF16) return w & ~1u;
  return rotate_left(w, kPairRotation) | kExponentTop;
}
// An operand as its readers will find it.
KOG_DEVICE u32 sent_operand(u32 both) { return operand_of(pack_operand(both, 0)); }
KOG_DEVICE float first_of(u32 w) { return low_of(operand_of(w)) * kPairUnit; }
KOG_DEVICE float second_of(u32 w) { return high_of(operand_of(w)) * kPairUnit; }

KOG_DEVICE u32 word_of(const uint4& q, int i) {
  return i == 0 ? q.x : i == 1 ? q.y : i == 2 ? q.z : q.w;
}

// Words of q that are below `count` and lack the phase; `at` is the index of the first.
KOG_DEVICE u32 stale(const uint4& q, int at, int count, u32 phase) {
  u32 bad = q.x ^ phase;
  if (at + 1 < count) bad |= q.y ^ phase;
  if (at + 2 < count) bad |= q.z ^ phase;
  if (at + 3 < count) bad |= q.w ^ phase;
  return at < count ? bad & 1 : 0;
}

KOG_DEVICE u32 word_index(const Block& b, const u32* word) {
  return static_cast<u32>(word - b.p.words);
}

// Where the lane's part of a region begins, of its first buffer.
template <class Words>
KOG_DEVICE int lane_offset(const Block& b) {
  return Words::kOffset + lane_of(b) * (Words::kRows / kLanes * Words::kStride);
}
template <class Words>
KOG_DEVICE u32* lane_words(const Block& b) {
  return b.p.words + lane_offset<Words>(b);
}

// What a warp waits for other ranks' words alone: from the try that finds all of its own rank's to the one that finds
// the others'. Nothing unless stamps are taken.
constexpr bool kTimesPeers = kProfile && kRanks > 1;
struct PeerWait {
  i64 since = 0;

  KOG_DEVICE void tried(Block& b, bool own_late, bool peers_late) {
    if constexpr (kTimesPeers) {
      bool waits = any_in_warp(peers_late) && !any_in_warp(own_late);
      if (waits == (since != 0)) return;
      i64 now = clock_ticks();
      if (!waits) b.peer_ticks += now - since;
      since = waits ? now : 0;
    }
  }
};
// Whether another rank sends a lane's words, or a block's of all ranks.
KOG_DEVICE bool lane_of_peer(const Block& b, int lane) { return lane / kRankLanes != rank_of(b.p); }
KOG_DEVICE bool block_of_peer(const Block& b, int block) { return block / kBlocks != rank_of(b.p); }
struct OfThisRank {
  KOG_DEVICE bool operator()(int) const { return false; }
};

// What is asked for between the looks of a wait, in so many pieces: here nothing (hip/include/kog/between.h has others).
struct NothingBetween {
  static constexpr int kPieces = 0;
  KOG_DEVICE void take_all() {}
};
// Looks with a piece behind each, until the words are there; then the other pieces alone. Whether words are late.
template <int kPiece, class Look, class Late, class Between>
KOG_DEVICE bool late_between(Look look, Late late, Between& between, bool waits) {
  if constexpr (kPiece == Between::kPieces) {
    return waits;
  } else {
    if (waits) look();
    between.template take<kPiece>();
    if (waits) waits = any_in_wave(late() != 0);
    return late_between<kPiece + 1>(look, late, between, waits);
  }
}

// Until no thread's late() finds words that lack the phase: it returns what differs of theirs, 0 or 1, and
// look() asks again only for those: polls and weights share the way from the L2. One loop: the code that
// runs once the words are there has been fetched while they were not.
template <class WordIndex, class Look, class Late, class Between = NothingBetween>
KOG_DEVICE void poll_until(Block& b, Step step, WordIndex word_index, u32 phase, Look look, Late late,
                           Between between = {}) {
  rejoin();
  if constexpr (Between::kPieces > 0)
    if (!late_between<0>(look, late, between, true)) return;
#pragma unroll 1
  for (bool waits = false;; waits = true) {
    look();
    u32 bad = late();
    if (!any_in_wave(bad != 0)) break;
    if (!waits && late_itself(bad != 0)) begin_wait(b);
    if (give_up(b, step, word_index(), phase ^ bad, phase)) break;
  }
  end_wait(b);
}

// N vectors of 4 words a thread: address(i) is where; need(i, j) is 1 if word j of it is waited for, else
// 0, and 0 of its first word if nothing is to be loaded; of_peer(i) whether another rank sends it.
template <int N, class Address, class Need, class OfPeer = OfThisRank, class Between = NothingBetween>
KOG_DEVICE void poll_vectors(Block& b, Step step, Address address, Need need, u32 phase,
                             uint4 (&q)[N], OfPeer of_peer = {}, Between between = {}) {
  u32 late[N];
  PeerWait wait;
#pragma unroll
  for (int i = 0; i < N; i++) {
    q[i] = uint4{0, 0, 0, 0};
    late[i] = need(i, 0);
  }
  auto look = [&] {
#pragma unroll
    for (int i = 0; i < N; i++)
      if (late[i] != 0) q[i] = load_relaxed4(address(i));
  };
  poll_until(b, step, [&] { return word_index(b, address(0)); }, phase, look, [&] {
    u32 bad = 0;
#pragma unroll
    for (int i = 0; i < N; i++) {
      late[i] = 0;
#pragma unroll
      for (int j = 0; j < 4; j++) late[i] |= (word_of(q[i], j) ^ phase) & need(i, j);
      bad |= late[i];
    }
    if constexpr (kTimesPeers) {
      bool own = false, peers = false;
#pragma unroll
      for (int i = 0; i < N; i++) (of_peer(i) ? peers : own) |= late[i] != 0;
      wait.tried(b, own, peers);
    }
    return bad;
  }, between);
}
// Polls kCount words at `base`: at[i] is the index of the first word of vector i.
template <int kCount, int N, class Between = NothingBetween>
KOG_DEVICE void poll(Block& b, Step step, const u32* base, const int (&at)[N], u32 phase,
                     uint4 (&q)[N], Between between = {}) {
  poll_vectors(
      b, step, [&](int i) { return base + at[i]; },
      [&](int i, int j) {  // vectors begin at multiples of 4
        return at[i] + (kCount % 4 == 0 ? 0 : j) < kCount ? 1u : 0u;
      },
      phase, q, OfThisRank(), between);
}

// N single words a thread: address(i) says where, need(i) whether the thread asks for it. Two functions:
// of an address that may be null, NVRTC 13.0.88 made code that reads the null before it is written
// and loads from there (decode of laneformer-2b in chunks of 24 KB: tests/sass_hazards.py). What no
// thread needs is never loaded. For the record of a wait that expires address(0) is made a
// number, needed or not: counted from the words, it is none that could fault, though it may be that
// of a word beside the late one. To pick the late one took 40 instructions more of Llama-3.2-1B's
// decode, and 184 of Laneformer-2B's.
template <int N, class Address, class Need, class OfPeer = OfThisRank>
KOG_DEVICE void poll_words(Block& b, Step step, Address address, Need need, u32 phase,
                           u32 (&w)[N], OfPeer of_peer = {}) {
  PeerWait wait;
  // A word that nobody waits for has the phase from the start.
#pragma unroll
  for (int i = 0; i < N; i++) w[i] = need(i) ? ~phase : phase;
  auto look = [&] {
#pragma unroll
    for (int i = 0; i < N; i++)
      if ((w[i] ^ phase) & 1) w[i] = load_relaxed(address(i));
  };
  poll_until(b, step, [&] { return word_index(b, address(0)); }, phase, look, [&] {
    u32 bad = 0;
#pragma unroll
    for (int i = 0; i < N; i++) bad |= (w[i] ^ phase) & 1;
    if constexpr (kTimesPeers) {
      bool own = false, peers = false;
#pragma unroll
      for (int i = 0; i < N; i++) (of_peer(i) ? peers : own) |= ((w[i] ^ phase) & 1) != 0;
      wait.tried(b, own, peers);
    }
    return bad;
  });
}

// N pairs (put_pair) a thread: address(i) says where, need(i) whether the thread asks for it; others are zero.
template <int N, class Address, class Need, class OfPeer = OfThisRank>
KOG_DEVICE void poll_pairs(Block& b, Step step, u64 number, Address address, Need need,
                           u64 (&v)[N], OfPeer of_peer = {}) {
  PeerWait wait;
  const u32 wanted = static_cast<u32>(number >> 32);
  rejoin();
  u32 seen;
  const u64* late_at = nullptr;
  auto ask = [&] {
    bool bad = false, of_peers = false, of_own = false;
    seen = wanted;
#pragma unroll
    for (int i = 0; i < N; i++) {
      const u64* at = address(i);
      ulonglong2 w = {number, number};
      if (need(i)) w = load_relaxed_pair(at);
      bool late = (w.x ^ number) >> 32 != 0 || (w.y ^ number) >> 32 != 0;
      if (late && !bad) {
        seen = static_cast<u32>((kPairAtOnce || (w.x ^ number) >> 32 != 0 ? w.x : w.y) >> 32);
        late_at = at;
      }
      bad |= late;
      if constexpr (kTimesPeers) (of_peer(i) ? of_peers : of_own) |= late;
      v[i] = w.x << 32 | (w.y & 0xffffffffu);
    }
    wait.tried(b, of_own, of_peers);
    return any_in_wave(bad);
  };
  if (ask()) {
    if (late_itself(late_at != nullptr)) begin_wait(b);
    while (!give_up(b, step, word_index(b, reinterpret_cast<const u32*>(late_at)), seen, wanted) && ask()) {
    }
    end_wait(b);
  }
}
KOG_DEVICE u64 poll_pair(Block& b, Step step, u64 number, const u64* at, bool needed) {
  u64 v[1];
  poll_pairs(b, step, number, [&](int) { return at; }, [&](int) { return needed; }, v);
  return v[0];
}

}  // namespace kog
