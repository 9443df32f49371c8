// The entry point. The generated header (layout/header.py) stands before this text.
#include <kog/decode.h>
#include <kog/roles.h>

KOG_KERNEL void __launch_bounds__(kog::kThreads, 1)
    kog_decode(const __grid_constant__ kog::Pointers p) {
  kog::Block b(p);
  kog::init_ring(b);
  kog::load_cursors(b);
  __syncthreads();
  kog::run_roles(b, [&] { kog::consume(b); }, [&] { kog::produce(b); });
}
