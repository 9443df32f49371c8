// The third entry point: several tokens a step, one each of several requests or a chunk of a prompt (kChunk). The generated
// header stands before this text.
#define KOG_COLUMNS
#include <kog/columns/decode.h>
#include <kog/place.h>

KOG_KERNEL void kog_columns(const kog::Pointers p) {
  kog::begin_place();
  kog::Block b(kog::by_address<(kog::kRanks > 1)>(p));
  kog::init_block(b);
  kog::sync_consumers();
  kog::find_place(b);
  kog::load_cursors(b);
  kog::sync_consumers();
  kog::columns::consume(b);
}
