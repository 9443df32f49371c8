// The second entry point: one stage alone. The generated header stands before this text.
#include <kog/place.h>
#include <kog/stage.h>

KOG_KERNEL void kog_stage(const kog::StageCall call) {
  kog::begin_place();
  kog::Block b(call.p);
  kog::init_block(b);
  kog::sync_consumers();
  b.layer = call.layer;
  kog::consume_stage(b, call);
}
