// The weight stream: one warp keeps a ring in shared memory full, whatever the others
// wait for.
#pragma once
#include <kog/cursor.h>

namespace kog {

// The consumers' side. All threads wait; one says that the warp is done.
struct Ring {
  u32 slot = 0, parity = 0;

  KOG_DEVICE void begin_token() {}  // the producer knows
  KOG_DEVICE void begin_at(int) {}
  // The warp has acquired the rows of the cache that a step has appended (wait_for_rows).
  KOG_DEVICE void tell_acquired(const Block& b) const {
    if constexpr (kDeep) {
      sync_warp();
      if (b.in_warp == 0) add_released(&b.small->acquired, 1);
    }
  }
  KOG_DEVICE const u8* weights(const Block& b) const { return b.ring + slot * kRingSlotBytes; }
  // Until the next N are there: the code of a wait that lasts stands there once, not N times.
  template <int N>
  KOG_DEVICE void wait_for(Block& b) {
    i64 since = kProfile ? clock_ticks() : 0;
    bool there = true;
    Ring next = *this;
#pragma unroll
    for (int i = 0; i < N; i++, next.step()) there &= barrier_try(&b.full[next.slot], next.parity);
    if (any_in_warp(!there)) {
      next = *this;
#pragma unroll 1
      for (int i = 0; i < N; i++, next.step()) next.wait_on(b);
    }
    if constexpr (kProfile) b.ring_ticks += clock_ticks() - since;
  }
  KOG_DEVICE void wait_on(Block& b) const {
    begin_wait(b);
    while (any_in_warp(!barrier_try(&b.full[slot], parity)))
      if (give_up(b, Step::kRing, slot, parity ^ 1, parity)) break;
    end_wait(b);
  }
  KOG_DEVICE void step() {
    if (++slot == kRingSlots) {
      slot = 0;
      parity ^= 1;
    }
  }
  KOG_DEVICE void release(Block& b) {
    sync_warp();
    if (b.in_warp == 0) barrier_arrive(&b.empty[slot]);
    step();
  }
};

// Where the ring is, while a warp of a kernel of columns does not multiply (columns/warp_state.h). Every thread stores
// the same and reads its own.
KOG_DEVICE void save_ring(const Block& b, const Ring& ring) {
  store_volatile(&b.small->warp_states[b.warp].slot, ring.slot);
  store_volatile(&b.small->warp_states[b.warp].parity, ring.parity);
}
KOG_DEVICE Ring load_ring(const Block& b) {
  return {load_volatile(&b.small->warp_states[b.warp].slot), load_volatile(&b.small->warp_states[b.warp].parity)};
}
KOG_DEVICE void begin_ring(const Block&) {}  // of a step: the producer knows

KOG_DEVICE void init_ring(Block& b) {
  if (b.thread == 0) {
    for (int i = 0; i < kRingSlots; i++) {
      barrier_init(&b.full[i], 1);
      barrier_init(&b.empty[i], kWarps);
    }
    b.small->stop = b.small->leave = b.small->joins = b.small->walks = 0;
    if constexpr (kDeep) b.small->acquired = 0;
    if constexpr (kProfile) b.small->issued = 0;
    for (int i = 0; i < kWarps; i++) b.small->waits[i] = 0;
    barrier_init_fence();
  }
}

// The producer's side: bulk copy `count` goes to slot count % kRingSlots. While the ring is full the
// stream goes on into the L2, a little at a time: what it fetched there is quick to get later. Neither
// ring nor L2 is filled while a long span is walked: the memory is busy with keys and values then, and
// idle behind them, while the splits are joined (benchmarks/cuda-log.md#held-ring).
struct Producer {
  static_assert(kCalmSlots <= kWindowSlots && kWindowSlots <= kRingSlots);  // `passed` goes back once
  u32 count = 0;
  Ring next;
  u32 fetched = 0;  // slots' bytes that are in the ring or in the L2
  u64 policy = read_once();

  // Whether copy count - kBack has landed, or has been eaten.
  template <int kBack>
  KOG_DEVICE bool passed(u64* barriers) const {
    bool wraps = next.slot < kBack;
    return barrier_test(&barriers[next.slot + (wraps ? kRingSlots : 0) - kBack], next.parity ^ (wraps ? 1 : 0));
  }
  // Until the slot is free; `left` copies follow the one at `from`. False once the consumers have left.
  KOG_DEVICE bool wait_for_slot(Block& b, const u8* from, int left) {
    u32 last = count + (left < kAheadSlots ? left : kAheadSlots);
    if (fetched < count) fetched = count;
    i64 due = clock_ticks();
    while (!barrier_test(&b.empty[next.slot], next.parity ^ 1)) {
      if (load_volatile(&b.small->stop) != 0) return false;
      if (fetched >= last || clock_ticks() < due || load_volatile(&b.small->walks) != 0) continue;
      fetch_to_l2(from + static_cast<u64>(fetched - count) * (static_cast<u64>(kBlocks) * kRingSlotBytes),
                  kRingSlotBytes, policy);
      fetched++;
      due = clock_ticks() + kAheadTicks;
    }
    return true;
  }
  // Few bytes in flight, since polls queue behind them: kCalmSlots while the consumers have slots
  // to go on with, kWindowSlots when they have eaten all that came. All that the loop looks at in one pass
  // is asked for at once: a copy that may leave late leaves the memory idle.
  KOG_DEVICE bool wait_for_window(Block& b) {
    while (true) {
      bool calm = passed<kCalmSlots>(b.full), hungry = passed<kWindowSlots>(b.empty);
      u32 stop = load_volatile(&b.small->stop), walks = load_volatile(&b.small->walks);
      if ((calm | hungry) && walks == 0) return true;
      if (stop != 0) return false;
    }
  }
  // The next slot's bytes, from one place: `left` slots follow there, of which some may go to the L2 meanwhile. False
  // once the consumers have left.
  KOG_DEVICE bool fill(Block& b, const u8* from, u32 bytes, int left) {
    if (!begin_slot(b, from, bytes, left)) return false;
    copy(b, 0, from, bytes);
    end_slot(b);
    return true;
  }
  // A slot that is filled by several copies: its bytes in all, then each copy, then the end.
  KOG_DEVICE bool begin_slot(Block& b, const u8* from, u32 bytes, int left) {
    if (count >= kRingSlots && !wait_for_slot(b, from, left)) return false;
    barrier_expect(&b.full[next.slot], bytes);
    return count < kWindowSlots || wait_for_window(b);
  }
  KOG_DEVICE void copy(Block& b, u32 at, const void* from, u32 bytes) {
    bulk_load(b.ring + next.slot * kRingSlotBytes + at, from, bytes, &b.full[next.slot], policy);
  }
  KOG_DEVICE void end_slot(Block& b) {
    // A launch may have more copies than 2^32: numbers go back by two rings, which have the slots and
    // parities.
    if (++count == 4 * kRingSlots) {
      count -= 2 * kRingSlots;
      fetched -= fetched < 2 * kRingSlots ? fetched : 2 * kRingSlots;
    }
    if constexpr (kProfile) store_volatile(&b.small->issued, load_volatile(&b.small->issued) + 1);
    next.step();
  }
  // What is in flight must land before the block may leave.
  KOG_DEVICE void drain(Block& b) {
    u32 first = count > kRingSlots ? count - kRingSlots : 0;
    for (u32 i = first; i < count; i++)
      while (!barrier_try(&b.full[i % kRingSlots], (i / kRingSlots) & 1)) {
      }
  }
};

}  // namespace kog
