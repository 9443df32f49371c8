// The third entry point: several tokens a step, one each of several requests or a chunk of a
// prompt (kChunk). The generated header stands before this text.
#include <kog/columns/decode.h>
#include <kog/columns/produce.h>
#include <kog/roles.h>

// The consumers' walk, which must not become a function of its own: it would keep its block in memory.
struct Consume {
  kog::Block& b;
  KOG_DEVICE void operator()() const { kog::columns::consume(b); }
};

KOG_KERNEL void __launch_bounds__(kog::kThreads, 1)
    kog_columns(const __grid_constant__ kog::Pointers p) {
  kog::Block b(p);
  kog::init_ring(b);
  kog::load_cursors(b);
  __syncthreads();
  kog::run_roles(b, Consume{b}, [&] { kog::columns::produce(b); });
}
