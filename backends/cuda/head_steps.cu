// The fourth entry point: steps that begin at the head. The generated header stands before this text.
#include <kog/head_steps.h>
#include <kog/roles.h>

KOG_KERNEL void __launch_bounds__(kog::kThreads, 1)
    kog_head_steps(const __grid_constant__ kog::Pointers p) {
  kog::Block b(p);
  kog::init_ring(b);
  kog::load_cursors(b);
  __syncthreads();
  kog::run_roles(b, [&] { kog::head_steps::consume(b); }, [&] { kog::head_steps::produce(b); });
}
