// There is no ring, and no kernel of deep positions (in the place of CUDA's header of this name).
#pragma once
#include <kog/heads.h>
#include <kog/ring.h>

namespace kog {

KOG_DEVICE void walk_deep_span(Block&, Ring&, const Span&, int, u32, const NewRows&) {}

}  // namespace kog
