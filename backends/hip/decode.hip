// The entry point. The generated header (cuda/layout/header.py) stands before this text.
#include <kog/decode.h>
#include <kog/place.h>

KOG_KERNEL void kog_decode(const kog::Pointers p) {
  kog::begin_place();
  kog::Block b(kog::by_address<(kog::kRanks > 1)>(p));
  kog::init_block(b);
  kog::sync_consumers();
  kog::find_place(b);
  kog::load_cursors(b);
  kog::sync_consumers();
  kog::consume(b);
}
