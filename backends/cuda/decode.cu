// The entry point. The generated header (header.py) stands before this text.
#include <kog/decode.h>

KOG_KERNEL void __launch_bounds__(kog::kWarps * 32 + 32, 1)
    kog_decode(const __grid_constant__ kog::Pointers p) {
  kog::Block b(p);
  kog::init_ring(b);
  __syncthreads();
  if (b.warp < kog::kWarps)
    kog::consume(b);
  else if (b.in_warp == 0)
    kog::produce(b);
}
