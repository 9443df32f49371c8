// Weights that a warp of a kernel of columns takes while it waits for what they multiply.
#pragma once
#include <kog/columns/warp_state.h>
#include <kog/runs.h>

namespace kog::columns {

// Units of either that every block has, in kTakenWords registers.
constexpr bool kAlike = QkvProj::kFragmentRows == Wide::kFragmentRows &&
                        GateUpProj::kFragmentRows == Wide::kFragmentRows &&
                        QkvProj::kPeriod == 1 && GateUpProj::kPeriod == 1 &&
                        QkvProj::kHeld == QkvProj::kSteps && GateUpProj::kHeld == GateUpProj::kSteps &&
                        QkvProj::kSteps == GateUpProj::kSteps &&
                        kSame<QkvProj::Weights, GateUpProj::Weights>;
constexpr int kRoomAhead = kTakenWords / (kFragments * kThreadWords) / kPeriodSlots<GateUpProj>;
constexpr int kFewest = kLeast<QkvProj::kUnits / QkvProj::kGroup, GateUpProj::kUnits / GateUpProj::kGroup>;
constexpr int kUnitsAhead = kAlike ? kLeast<kRoomAhead, kFewest> : 0;
using LayerAhead = Taken<GateUpProj, kUnitsAhead, kPeriodSlots<GateUpProj>>;
KOG_DEVICE void take_ahead(Block& b, LayerAhead& ahead, int) {
  Ring ring = load_ring(b);
  ahead.take(b, ring);
  save_ring(b, ring);
}
// Before the inputs of a module's last stage: none, the ring fills up meanwhile.
template <class Stage>
using ModuleAhead = NothingAhead;
KOG_DEVICE void take_ahead(Block&, const NothingAhead&) {}

}  // namespace kog::columns
