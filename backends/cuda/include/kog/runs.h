// A token's weight stream as a list of runs, one a matrix, and how long each is.
#pragma once
#include <kog/matvec.h>

namespace kog {

template <class A, class B>
constexpr bool kSame = false;
template <class A>
constexpr bool kSame<A, A> = true;

// The matrices of a layer in the schedule's order, which is that of their weights in the stream.
template <class... Stages>
struct Matrices {
  static constexpr int kCount = sizeof...(Stages);

  // Of number n, in one run by the block of a group index.
  KOG_DEVICE static int fragments(int n, int group_index, int layer) {
    int i = 0, found = 0;
    ((found = i++ == n ? fragments_of<Stages>(group_index, layer) : found), ...);
    return found;
  }
  // Bytes of one, of all warps.
  KOG_DEVICE static int fragment_bytes(int n) {
    int i = 0, found = 0;
    ((found = i++ == n ? kFragmentOfAll<typename Stages::Weights> : found), ...);
    return found;
  }
  // The number of a stage; below 0 if it has no weights.
  KOG_DEVICE static int number(StageId id) {
    int i = 0, found = -1;
    ((found = Stages::kId == id ? i : found, i++), ...);
    return found;
  }
};
static_assert(kSame<LayerMatrices, Matrices<QkvProj, OProj, GateUpProj, DownProj>>, "run_layer's order");

// A token's stream is a list of runs: the matrices of each layer, then the head.
constexpr int kRuns = LayerMatrices::kCount * kLayers;
KOG_DEVICE int layer_of_run(int run) { return run / LayerMatrices::kCount; }
KOG_DEVICE bool begins_layer(int run) { return run < kRuns && run % LayerMatrices::kCount == 0; }
KOG_DEVICE int fragments_of_run(const Block& b, int run) {
  if (run == kRuns) return fragments_of<LmHead>(b.block % LmHead::kGroup, 0);
  return LayerMatrices::fragments(run % LayerMatrices::kCount, b.group_index, layer_of_run(run));
}
KOG_DEVICE int ring_slots_of_runs(const Block& b, int runs) {
  int slots = 0;
  for (int run = 0; run < runs; run++)
    slots += (fragments_of_run(b, run) + kFragments - 1) / kFragments;
  return slots;
}

}  // namespace kog
