// The second entry point: one stage alone. The generated header stands before this text.
#include <kog/stage_roles.h>

KOG_KERNEL void __launch_bounds__(kog::kThreads, 1)
    kog_stage(const __grid_constant__ kog::StageCall call) {
  kog::Block b(call.p);
  kog::init_ring(b);
  __syncthreads();
  kog::run_stage(b, call);
}
