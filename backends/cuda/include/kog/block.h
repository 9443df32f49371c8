// What one block knows: where it stands in its lane, its shared memory, its patience.
#pragma once
#include <kog/ptx.h>

namespace kog {

// Filled by the host (memory.py); passed by value.
struct Pointers {
  const u8* weights;      // chunks, those of all blocks side by side
  const u16* embed;       // [vocab][hidden, up to 4]
  const float* gains;     // [2 * layers + 1][lanes or 1][hidden, up to 4]
  const float* biases;    // [layers][kBiasRows]: stage by stage, lane by lane; gate and up woven
  const float* qk_gains;  // [layers][2][head_dim]
  const float* rope;      // [positions][2][head_dim / 2]
  u16* cache;             // [layers][lanes][kv_heads][2][positions][head_dim]
  u32* words;             // zero at launch
  float* logits;          // [rows][vocab], if asked for
  const int* tokens;      // the prompt
  const u32* request;     // see Request
  u64* mailbox;  // mapped: [0] the host's word, [2] outcome and tokens, [8 ..] token and time, in
                 // pairs
  u32* error;    // [0] set by the first wait that expires, [1 ..] what it waited for
  i64 limit;     // clock ticks that a wait may take
};

// One request, as words.
struct Request {
  static constexpr int kFirst = 0, kPrompt = 1, kMost = 2, kNumStops = 3, kGreedy = 4, kSeedLow = 5,
                       kSeedHigh = 6, kSample = 7, kScale = 8, kAllLogits = 9, kStopIds = 16;
};

enum Outcome : int {
  kRunning = 0,
  kStop = 1,
  kLength = 2,
  kCancel = 3,
  kFailed = 4,
  kNotFinite = 5
};

struct Candidate {
  double key;
  int id;
};

// The end of shared memory: small things that warps tell each other.
struct Small {
  float squares[kWarps];
  Candidate local[kWarps];
  Candidate global[kWarps];
  u32 control;
  u32 stop;  // the consumers have left: the producer may
};
static_assert(sizeof(Small) <= 1024, "Small outgrew its room in header.py");

struct Block {
  const Pointers& p;
  const u32* request;  // the words of the request in hand
  int block, lane, place;  // of the grid; the lane it works for; its place in that lane's group
  int thread, warp, in_warp;
  u8* ring;
  u64* full;
  u64* empty;
  float* partials;
  u8* scratch;
  Small* small;
  int layer;
  bool dead;  // a wait expired: no wait of this warp waits again, and the block leaves after this
              // token

  KOG_DEVICE explicit Block(const Pointers& pointers)
      : p(pointers), request(pointers.request), layer(0), dead(false) {
    begin_stage();
    ring = shared_memory();
    full = reinterpret_cast<u64*>(ring + kRingChunks * kChunkBytes);
    empty = full + kRingChunks;
    partials = reinterpret_cast<float*>(empty + kRingChunks);
    scratch = reinterpret_cast<u8*>(partials) + kPartialBytes;
    small = reinterpret_cast<Small*>(scratch + kScratchBytes);
  }

  // At the start of a stage: where the thread stands is asked anew, so that what a stage derives
  // from it is computed there. Moved out of the layer loop, as the compiler likes to do, all of it
  // would not fit in registers.
  KOG_DEVICE void begin_stage() {
    block = block_index();
    lane = block / kGroup;
    place = block % kGroup;
    thread = thread_index();
    warp = thread / 32;
    in_warp = thread % 32;
  }
};

// How long a warp has waited. `expired` is asked by the whole warp after a try that failed.
struct Patience {
  u32 tries = 0;
  i64 since = 0;

  KOG_DEVICE bool expired(Block& b, Step step, u32 seen, u32 wanted) {
    if (b.dead) return true;
    if ((++tries & 255) != 0) return false;
    i64 now = clock_ticks();
    if (since == 0) since = now;
    bool late = now - since > b.p.limit;
    if (!any_lane(late || load_relaxed(b.p.error) != 0)) return false;
    b.dead = true;
    // The lane whose own word is stale says so; if all words came late, none does.
    if (late && seen != wanted && compare_and_swap(b.p.error, 0, 1) == 0) {
      store_relaxed(b.p.error + 1, static_cast<u32>(b.block));
      store_relaxed(b.p.error + 2, static_cast<u32>(step));
      store_relaxed(b.p.error + 3, static_cast<u32>(b.layer));
      store_relaxed(b.p.error + 4, seen);
      store_relaxed(b.p.error + 5, wanted);
    }
    return true;
  }
};

template <class Stage>
KOG_DEVICE int stage_place(const Block& b) {
  return b.block % Stage::kGroup;
}

// Units of a stage that this block computes: those that one block has more rotate over the layers.
struct Units {
  int first, last;
};
template <class Stage>
KOG_DEVICE Units units_of(int place, int layer) {
  int turned = (place + Stage::kGroup - layer % Stage::kGroup) % Stage::kGroup;
  return {turned * Stage::kUnits / Stage::kGroup, (turned + 1) * Stage::kUnits / Stage::kGroup};
}
template <class Stage>
KOG_DEVICE int chunks_of(int place, int layer) {
  Units u = units_of<Stage>(place, layer);
  return ((u.last - u.first) * Stage::kSteps + kFragments - 1) / kFragments;
}

}  // namespace kog
