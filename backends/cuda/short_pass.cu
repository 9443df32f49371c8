// Kernels between the products of a pass of short prompts, and behind it (include/kog/prompt/short_pass.h). The generated header
// (layout/prompt.py) stands before this text. Each starts early and waits for the one before.
#include <kog/prompt/hopper.h>
#include <kog/prompt/short_pass.h>

namespace kog {
static_assert(sizeof(Join) == kJoinBytes && sizeof(Heads) == kHeadsBytes);
static_assert(sizeof(Send) == kSendBytes && sizeof(Meet) == kMeetBytes);
static_assert(sizeof(Attend) == kAttendBytes && sizeof(Gate) == kGateBytes && sizeof(Place) == kPlaceBytes);

}  // namespace kog

#define KOG_BETWEEN(name, Call, run, threads)                                                      \
  KOG_KERNEL void __launch_bounds__(threads) name(const __grid_constant__ kog::Call p) {           \
    kog::start_launch_behind();                                                                    \
    kog::wait_for_launch_before();                                                                 \
    kog::run(p);                                                                                   \
  }
KOG_BETWEEN(kog_join, Join, join, kog::kJoinThreads)
KOG_BETWEEN(kog_send, Send, send, kog::kJoinThreads)
KOG_BETWEEN(kog_meet, Meet, meet, kog::kJoinThreads)
KOG_BETWEEN(kog_heads, Heads, heads, kog::kHeadThreads)
KOG_BETWEEN(kog_attend, Attend, attend, kog::kAttendThreads)
KOG_BETWEEN(kog_gate, Gate, gate, kog::kGateThreads)
KOG_BETWEEN(kog_place, Place, place, kog::kPlaceThreads)
