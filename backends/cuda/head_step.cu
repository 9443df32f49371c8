// The fifth entry point: the first token of several requests in one step that begins at the head. The generated header
// stands before this text.
#include <kog/columns/head_step.h>
#include <kog/roles.h>

KOG_KERNEL void __launch_bounds__(kog::kThreads, 1)
    kog_head_step(const __grid_constant__ kog::Pointers p) {
  kog::Block b(p);
  kog::init_ring(b);
  kog::load_cursors(b);
  __syncthreads();
  kog::run_roles(b, [&] { kog::columns::head_step::consume(b); }, [&] { kog::columns::head_step::produce(b); });
}
