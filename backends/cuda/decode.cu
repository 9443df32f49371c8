// The entry point. The generated header (header.py) stands before this text.
#include <kog/decode.h>
#include <kog/watchdog.h>

// 16 warps consume; of four more one fills the ring and one watches. Those give their registers to
// the consumers: 20 x 96 make 16 x 112 + 4 x 24.
KOG_KERNEL void __launch_bounds__(kog::kThreads, 1)
    kog_decode(const __grid_constant__ kog::Pointers p) {
  kog::Block b(p);
  kog::init_ring(b);
  kog::take_seats(b);
  __syncthreads();
  if (b.warp < kog::kWarps) {
    kog::take_registers<112>();
    kog::consume(b);
  } else {
    kog::give_registers<24>();
    if (b.warp == kog::kWarps) {
      if (b.in_warp == 0) kog::produce(b);
    } else if (b.warp == kog::kWarps + 1) {
      kog::watch(b);
    }
  }
}
