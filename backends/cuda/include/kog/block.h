// What one block knows: where it stands in its lane, its shared memory, its patience. The generated
// header declares what host and kernel tell each other: Pointers, Request, Mailbox, Outcome.
#pragma once
#include <kog/threads.h>

namespace kog {

struct Candidate {
  double key;
  int id;
};

// One request of the launch: its slot, the position it was at when the launch began, the position
// from which its steps have a head, and its next token.
struct RequestCursor {
  int slot, first, first_head, token;
};

// What a block does of a layer's attention in a kernel of columns (columns/kv_tasks.h): of which column, how
// many blocks share the head's context (0: no more KV tasks), its first query, and what the block walks.
struct KvTask {
  u32 column, blocks, head, query, split, used, start, end;
};
// What a warp of a kernel of columns keeps from stage to stage (columns/warp_state.h). In registers from the
// first layer to the last it was spilled: one load of such a value on the way out of attention took 1.9 us a
// layer of Qwen3-0.6B.
struct WarpState {
  u32 layer, steps, heads, mixes;  // where it is; exchanges of heads and of the lanes' streams
  u32 slot, parity;  // of the ring, while it does not multiply
  u32 kv_task;          // of attention
};

constexpr int kAllBlocks = kRanks * kBlocks;  // of all ranks
// Threads that may receive what each of all blocks has sent, warps of them that do, and blocks of one.
constexpr int kTakers = kConsumers;
constexpr int kCandidateWarps = ((kAllBlocks < kTakers ? kAllBlocks : kTakers) + kWarpThreads - 1) / kWarpThreads;
constexpr int kBlocksAThread = (kAllBlocks + kTakers - 1) / kTakers;

// The end of shared memory: small things that warps tell each other.
struct Small {
  alignas(16) float squares[kColumns * kWarps];  // [column][warp]
  Candidate local[kWarps];
  Candidate global[kCandidateWarps];
  RequestCursor cursors[kMaxRequests];
  int chosen[kColumns], outcomes[kColumns];  // of this step, column by column (columns/)
  KvTask kv_tasks[kBlockKvTasks];  // the last is none
  int slot, token, position;  // of the request in hand: its token stands at this position
  u32 control;
  u32 stop;   // the consumers have left: the producer may
  u32 leave;   // no wait of this block waits any longer
  u32 joins;   // attentions whose splits were joined in a step of their own
  u32 walks;   // 1 while a long span is walked
  u32 shares;  // whether other blocks have splits of a KV task's head, in a kernel of columns
  u32 issued;  // ring slots that the producer has asked for, if kProfile
  u32 waits[kWarps];  // when a warp's wait began, an odd number, or kExpired; 0: it does not wait
  WarpState warp_states[kColumns > 1 ? kWarps : 1];
  u32 acquired;  // how often a warp has acquired a step's rows of the cache, if kDeep (acquire_cache)
};
constexpr u32 kExpired = 2;
static_assert(sizeof(Small) <= kSmallBytes, "Small outgrew SMALL_BYTES of layout/layout.py");

// The rank of this launch. A template, since the argument of one rank does not say.
template <class Argument>
KOG_DEVICE int rank_of(const Argument& p) {
  if constexpr (kRanks > 1)
    return p.rank;
  else
    return 0;
}

struct Block {
  const Pointers& p;
  const u32* request;  // the words of the request in hand
  BlockPlace place;
  int block, lane, group_index;  // of the grid; the lane, of all, it works for; its index in that lane's group
  int thread, warp, in_warp;
  u8* ring;
  u64* full;
  u64* empty;
  float* partials;
  u8* scratch;
  Small* small;
  int layer;
  int column = 0;      // of the token in hand, in a kernel of columns (columns/)
  i64 ring_ticks = 0;  // that this warp waited for weights, if kProfile
  i64 peer_ticks = 0;  // that it waited for words of other ranks while it had all of its own rank's, if kProfile
  int profile_row = 0;        // of the profile: which of its tokens this is

  KOG_DEVICE explicit Block(const Pointers& pointers)
      : p(pointers), request(pointers.request), layer(0) {
    begin_stage();
    ring = shared_memory();
    full = reinterpret_cast<u64*>(ring + kRingSlots * kRingSlotBytes);
    empty = full + kRingSlots;
    scratch = reinterpret_cast<u8*>(empty + kRingSlots);
    // Behind it: results of attention run on over the partial sums (kv_task.h).
    partials = reinterpret_cast<float*>(scratch + (kPartialBytes > 0 ? kScratchBytes : 0));
    small = reinterpret_cast<Small*>(scratch + kScratchBytes + kPartialBytes);
  }

  // At the start of a stage: where the thread stands is asked anew, so that what a stage derives
  // from it is computed there. Moved out of the layer loop, as the compiler likes to do, all of it
  // would not fit in registers.
  KOG_DEVICE void begin_stage() {
    block = block_index(place);
    lane = kLanes > 1 ? rank_of(p) * kRankLanes + block / kGroup : 0;
    group_index = kRankLanes > 1 ? block % kGroup : block;
    thread = thread_index();
    KOG_ASSUME(block >= 0 && block < kBlocks && thread >= 0 && thread < kThreads);
    warp = thread / kWarpThreads;
    in_warp = thread % kWarpThreads;
  }
};

// A wait of a whole warp, or of a wave, once its first try has failed. The watchdog (watchdog.h) bounds it: what
// every wait needs in line is one word of shared memory to look at.
KOG_DEVICE void begin_wait(const Block& b) {
  if (b.in_warp == 0) store_volatile(&b.small->waits[b.warp], static_cast<u32>(clock_ticks()) | 1);
}
KOG_DEVICE void end_wait(const Block& b) {
  if (b.in_warp == 0) store_volatile(&b.small->waits[b.warp], 0);
}
KOG_DEVICE bool must_leave(const Block& b) { return load_volatile(&b.small->leave) != 0; }
// Whether to end the wait in vain. The first thread of the expired wait whose own word is stale reports
// it; `word_index` is the first word that it waits for, by its number, or the ring's slot. Word 7 says that
// it was reported: the wait may have ended meanwhile, and the warp stand in another.
KOG_DEVICE bool give_up(const Block& b, Step step, u32 word_index, u32 seen, u32 wanted, bool late) {
  watch_own_wait(b, late);
  if (!any_in_wave(must_leave(b))) return false;
  if (load_volatile(&b.small->waits[b.warp]) == kExpired && seen != wanted &&
      compare_and_swap(b.p.error + 7, 0, 1) == 0) {
    store_relaxed(b.p.error + 2, static_cast<u32>(step));
    u32 layer = kColumns > 1 ? load_volatile(&b.small->warp_states[b.warp].layer) : static_cast<u32>(b.layer);
    store_relaxed(b.p.error + 3, layer);
    store_relaxed(b.p.error + 4, word_index);
    store_relaxed(b.p.error + 5, seen);
    store_relaxed(b.p.error + 6, wanted);
  }
  return true;
}
KOG_DEVICE bool give_up(const Block& b, Step step, u32 word_index, u32 seen, u32 wanted) {
  return give_up(b, step, word_index, seen, wanted, seen != wanted);
}

// When a warp passed a point of the walk, and how long it had waited for weights, and for other ranks, by then.
// The head's points follow the layers'.
KOG_DEVICE void stamp(const Block& b, Point point) {
  if constexpr (kProfile) {
    if (b.in_warp != 0) return;
    u64 at = (static_cast<u64>(b.profile_row % kProfileTokens) * kBlocks + b.block) * kWarps + b.warp;
    at = at * ((kLayers + 1) * kPoints) + b.layer * kPoints + static_cast<int>(point);
    u64 waited = static_cast<u64>(b.ring_ticks), issued = load_volatile(&b.small->issued);
    u64* to = b.p.profile + kStampWords * at;
    store_pair(to, static_cast<u64>(clock_ticks()), waited | issued << 32);
    if constexpr (kRanks > 1) store_pair(to + 2, static_cast<u64>(b.peer_ticks), 0);
  }
}

// One moment on two clocks, as a token begins, in the row of its stamps, and as the launch ends, behind
// those: the ticks that stamps count, each SM's own, and the nanoseconds of the whole GPU, taken as they
// step on: their grain is coarse.
KOG_DEVICE void pair_clocks(const Block& b, int row) {
  if constexpr (kProfile) {
    if (b.thread != 0) return;
    u64 before = nanoseconds(), now = before;
    for (int tries = 0; tries < 4096 && now == before; tries++) now = nanoseconds();
    store_pair(b.p.clocks + 2 * (static_cast<u64>(row) * kBlocks + b.block),
               static_cast<u64>(clock_ticks()), now);
  }
}

// The lane in a kernel of columns, known where there is one.
KOG_DEVICE int lane_of(const Block& b) { return kLanes > 1 ? b.lane : 0; }

// A region as 64-bit words.
template <class Words>
KOG_DEVICE u64* pairs_of(const Block& b) {
  return reinterpret_cast<u64*>(b.p.words + Words::kOffset);
}
// The block among those of all ranks.
KOG_DEVICE int block_of_all(const Block& b) { return rank_of(b.p) * kBlocks + b.block; }
// 64-bit words of one of a region's buffers, in which every block of all ranks has kCount.
template <class Words, int kCount>
KOG_DEVICE u64* words_of_block(const Block& b, int block, int buffer = 0) {
  static_assert(Words::kStride == (2 * kCount * kAllBlocks + 3) / 4 * 4,
                "a block has another number of words than the layout gives it");
  return pairs_of<Words>(b) + buffer * (Words::kStride / 2) + kCount * block;
}

// Units of a stage that this block computes: those that one block has more rotate over the layers.
struct Units {
  int first, last;
};
template <class Stage>
KOG_DEVICE constexpr int rotated_group_index(int group_index, int layer) {
  return (group_index + 2 * Stage::kGroup - Stage::kShift - layer % Stage::kGroup) % Stage::kGroup;
}
template <class Stage>
KOG_DEVICE constexpr Units units_of(int group_index, int layer) {
  int rotated = rotated_group_index<Stage>(group_index, layer);
  return {rotated * Stage::kUnits / Stage::kGroup, (rotated + 1) * Stage::kUnits / Stage::kGroup};
}
KOG_DEVICE Units head_units(const Block& b) { return units_of<LmHead>(b.block % LmHead::kGroup, 0); }
// The first id whose row of the head this block's lane or rank has.
KOG_DEVICE int first_id(const Block& b) { return (kHeadByLane ? b.lane : rank_of(b.p)) * LmHead::kRows; }
// The rotated index of the block that has a unit.
template <class Stage>
KOG_DEVICE constexpr int rotated_owner(int unit) {
  return ((unit + 1) * Stage::kGroup - 1) / Stage::kUnits;
}
// Fragments that a warp multiplies in one run of a stage.
template <class Stage>
KOG_DEVICE int fragments_of(int group_index, int layer) {
  Units u = units_of<Stage>(group_index, layer);
  return (u.last - u.first) * Stage::kUnitFragments;
}

// A number that the host makes of all blocks' units in the same way; 0 if rotated_owner gives another block.
template <class Stage>
KOG_DEVICE constexpr int checked_units() {
  u64 n = 1;
  for (int i = 0; i < 2 * Stage::kGroup; i++) {
    int group_index = i % Stage::kGroup, layer = i / Stage::kGroup * (kLayers - 1);
    Units units = units_of<Stage>(group_index, layer);
    bool owns = rotated_owner<Stage>(units.last - 1) == rotated_group_index<Stage>(group_index, layer);
    if (units.first < units.last && !owns) return 0;
    n = (31 * n + static_cast<u64>(units.first)) % 0x7fffffff;
  }
  return static_cast<int>(n);
}
template <class... Stages>
constexpr bool kUnitsAgree = ((checked_units<Stages>() == Stages::kCheckedUnits) && ...);
static_assert(kUnitsAgree<QkvProj, OProj, GateUpProj, DownProj, LmHead>,
              "block.h deals out other units than schedule/lowering.py");

}  // namespace kog
