// Fragments that are on their way while a wave of a kernel of columns waits for what they multiply (../matvec.h).
#pragma once
#include <kog/columns/warp_state.h>
#include <kog/runs.h>

namespace kog::columns {

// Of the stage of either half of a layer, which one piece of code asks for (layer.h).
struct LayerAhead {
  static constexpr int kQkv = depth_of<QkvProj>(), kGateUp = depth_of<GateUpProj>();
  static constexpr int kCount = kQkv > kGateUp ? kQkv : kGateUp, kUnits = 1, kSure = 0;
  uint4 w[kCount];
};
KOG_DEVICE void take_ahead(Block& b, LayerAhead& ahead, int half) {
  int qkv = fragments_of<QkvProj>(b.group_index, b.layer), gate_up = fragments_of<GateUpProj>(b.group_index, b.layer);
  qkv = qkv < LayerAhead::kQkv ? qkv : LayerAhead::kQkv;
  gate_up = gate_up < LayerAhead::kGateUp ? gate_up : LayerAhead::kGateUp;
  int count = half == 0 ? qkv : gate_up;
  constexpr int kQkvRows = QkvProj::kFragmentRows, kGateUpRows = GateUpProj::kFragmentRows;
  const u8* from = half == 0 ? thread_weights<kQkvRows>(b) : thread_weights<kGateUpRows>(b);
  Ring ring = load_ring(b);
#pragma unroll
  for (int i = 0; i < LayerAhead::kCount; i++) ahead.w[i] = i < count ? ring.take(b, from) : uint4{};
  save_ring(b, ring);
}
// Of a module's last stage.
template <class Stage>
using ModuleAhead = Ahead<Stage>;
template <class Stage>
KOG_DEVICE void take_ahead(Block& b, Ahead<Stage>& ahead) {
  Ring ring = load_ring(b);
  ahead.take(b, ring, b.layer);
  save_ring(b, ring);
}

}  // namespace kog::columns
