// A stage's narrow weights in 16 bits, ahead of a prompt's product with them; the header is layout/unpack.py's. A block
// takes one fragment of all warps.
#include <kog/prompt/hopper.h>
#include <kog/prompt/unpack.h>

static_assert(sizeof(kog::Unpack) == kog::kUnpackBytes);

KOG_KERNEL void __launch_bounds__(32 * kog::kWarps) kog_unpack(const __grid_constant__ kog::Unpack p) {
  kog::start_launch_behind();
  kog::wait_for_launch_before();  // what is written here may still be read
  kog::unpack_fragment(p, blockIdx.x, threadIdx.x);
}
