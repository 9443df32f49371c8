// What a module's outputs of all lanes add to a lane's streams, where they are owed at once (NOW) or
// some layers later (DELAYED).
//
//   words   [buffer][lane][unit][column][row of the unit]: an output that some lane will need, sent by the row's owner
//           to all ranks; [column][row] where the last unit is not whole
//
// Blocks of the same group index own the same rows, on all ranks. An owner receives what the others owe
// its rows, adds it up in the order of lanes, as a kernel of one token does, and keeps the sums in
// scratch:
//
//   DELAYED   before the stage waits for its inputs: those words came layers ago
//   NOW       behind the stage, whose own outputs they are; the streams follow then
//
// backends/cuda/layout/exchanges.py says which outputs are sent, and that buffers suffice.
#pragma once
#include <kog/columns/stream.h>

namespace kog::columns {

// A module by its last stage, OfStage: whose streams it joins, where its rows and the hints of those go, what it
// sends to other lanes, and how many such outputs come before each layer.
template <class OfStage, class OfWords, class OfHints, class OfSent, bool kHasBias>
struct ModuleOf {
  using Stage = OfStage;
  using Words = OfWords;
  using Hints = OfHints;
  using Sent = OfSent;
  static constexpr bool kBias = kHasBias, kEndsLayer = Stage::kId == StageId::kDownProj;
  KOG_DEVICE static Streams streams(const Block& b) { return kEndsLayer ? inner_streams(b) : layer_streams(b); }
  KOG_DEVICE static int how(const Block& b) { return (kEndsLayer ? kReduceMlp : kReduceAttention)[b.layer]; }
  KOG_DEVICE static int before(int layer) { return (kEndsLayer ? kMlpSends : kAttentionSends)[layer]; }
};
using AttentionModule =
    ModuleOf<OProj, AttentionOutWords, AttentionOutFlagsWords, AttentionOutSentWords, kOBias>;
using MlpModule = ModuleOf<DownProj, MlpOutWords, MlpOutFlagsWords, MlpOutSentWords, kMlpBias>;

// One layer's reduction of a module's outputs, of several lanes.
template <class Module>
struct Reduction {
  using Stage = typename Module::Stage;
  using Words = typename Module::Sent;
  static constexpr int kPieces = OperandLayout<Stage>::kPieces;
  static constexpr int kMost = (Stage::kUnits + Stage::kGroup - 1) / Stage::kGroup * kPieces;
  // Items that a warp asks for in one round trip: their words are in registers meanwhile.
  static constexpr int kEach = (kMost + kWarps - 1) / kWarps, kRoom = kLanes < 32 ? 32 / kLanes : 1;
  static constexpr int kAtOnce = kEach < kRoom ? kEach : kRoom;
  static constexpr int kOfLane = kColumns * Words::kStride;
  int how;
  int first, last;  // pieces of this block

  KOG_DEVICE explicit Reduction(const Block& b) : how(Module::how(b)) {
    Units units = units_of<Stage>(b.group_index, b.layer);
    first = units.first * kPieces, last = units.last * kPieces;
  }

  // Outputs that a lane has sent before this layer's.
  KOG_DEVICE static int send_index(const Block& b, int layer) {
    return steps_of(b) * Module::before(kLayers) + Module::before(layer);
  }
  KOG_DEVICE static u32* words(const Block& b, int index) {
    return b.p.words + Words::kOffset + index % Words::kBuffers * (kLanes * kOfLane);
  }
  KOG_DEVICE static u32 phase(int index) { return phase_of(index / Words::kBuffers); }
  // A unit's outputs of all columns lie together, as a warp's threads have them: a warp's store to another rank is
  // one line, not a sector a column. A vector whose last unit is not whole has no room for that.
  static constexpr bool kByUnits = Stage::kRows % Stage::kUnitRows == 0;
  KOG_DEVICE static int offset(const Item& item) {
    constexpr int kRows = Stage::kUnitRows;
    if constexpr (kByUnits) return (item.row / kRows * kColumns + item.column) * kRows + item.row % kRows;
    return item.column * Words::kStride + item.row;
  }

  // The sum of a thread of piece n of this block's.
  KOG_DEVICE static float* joined(const Block& b, int n) {
    return reinterpret_cast<float*>(b.scratch + kJoinedAt) + n * kWarpThreads + b.in_warp;
  }

  // An output to whoever needs it.
  KOG_DEVICE void send(const Block& b, const Item& item, float y) const {
    if constexpr (kSends) {
      int index = send_index(b, b.layer);
      if (item.there && Module::before(b.layer + 1) > Module::before(b.layer))
        push(b, words(b, index) + b.lane * kOfLane + offset(item), pack_f32(y, phase(index)));
    }
  }

  // Sums of what the lanes sent in `layer`: the others' alone or, behind x, all lanes'.
  KOG_DEVICE void join(Block& b, int layer, bool all, const Streams& x) const {
    const u32* base = words(b, send_index(b, layer));
    u32 phase_there = phase(send_index(b, layer));
    int count = last - first;
#pragma unroll 1
    for (int next = b.warp; next < count; next += kWarps * kAtOnce) {
      int from[kAtOnce];  // in words: pointers take registers that are missing
      bool mine[kAtOnce];
      float sum[kAtOnce];
#pragma unroll
      for (int a = 0; a < kAtOnce; a++) {
        int n = next + a * kWarps;
        Item item = item_of<Stage>(b, first + n);
        mine[a] = n < count && item.there;
        from[a] = offset(item);
        sum[a] = mine[a] && all ? x.value(b, item.column, item.row) : 0;
      }
      u32 w[kAtOnce * kLanes];
      poll_words(
          b, Step::kDelayedOutputs,
          [&](int i) { return base + (from[i / kLanes] + i % kLanes * kOfLane); },
          [&](int i) { return mine[i / kLanes] && (all || i % kLanes != b.lane); }, phase_there,
          w);
#pragma unroll
      for (int a = 0; a < kAtOnce; a++) {
        sum[a] = add_lanes(
            sum[a], [&](int lane) { return all || lane != b.lane; },
            [&](int lane) { return w[a * kLanes + lane]; });
        int n = next + a * kWarps;
        if (n < count) *joined(b, n) = sum[a];
      }
    }
  }

  // Before the stage's wait.
  KOG_DEVICE void begin(Block& b, const Streams& x) const {
    if constexpr (kSends)
      if (how == kDelayed) join(b, b.layer - kDelay, false, x);
  }
  // What joins the stream for an output, unless it is reduced NOW.
  KOG_DEVICE float owed(const Block& b, const Item& item, float y) const {
    return reduced(how, y, [&] { return *joined(b, piece_of<Stage>(item) - first); });
  }
  // Behind the stage, whose rows go where `sink` sends them.
  template <class Sink>
  KOG_DEVICE void end(Block& b, const Streams& x, const Sink& sink) const {
    if constexpr (kSends) {
      if (how != kNow) return;
      join(b, b.layer, true, x);
      sync_consumers();  // pieces may be joined by other warps than put them
      b.begin_stage();
      Reduction again(b);  // kept while words are waited for, its pieces would be spilled
#pragma unroll 1
      for (int piece = again.first + b.warp; piece < again.last; piece += kWarps) {
        sink.put_stream(item_of<Stage>(b, piece), *joined(b, piece - again.first));
        sink.raise(piece);
      }
      sync_consumers();  // the sums have been read
    }
  }
};

}  // namespace kog::columns
