// The third entry point: several requests, a token of each a step. The generated header stands before this
// text.
#include <kog/columns/decode.h>
#include <kog/watchdog.h>

// Registers are dealt out as in decode.cu.
KOG_KERNEL void __launch_bounds__(kog::kThreads, 1)
    kog_columns(const __grid_constant__ kog::Pointers p) {
  kog::Block b(p);
  kog::init_ring(b);
  kog::take_seats(b);
  __syncthreads();
  if (b.warp < kog::kWarps) {
    kog::take_registers<112>();
    kog::columns::consume(b);
  } else {
    kog::give_registers<24>();
    if (b.warp == kog::kWarps) {
      if (b.in_warp == 0) kog::columns::produce(b);
    } else if (b.warp == kog::kWarps + 1) {
      kog::watch(b);
    }
  }
}
