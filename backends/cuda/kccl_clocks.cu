// Reads the clocks of several GPUs beside each other (include/kccl/clocks.h): a warp a GPU, for `kog profile --gpus`.
#include <kccl/clocks.h>

// rank_clocks.py has it too.
struct Argument {
  kccl::Comm comm;
  kccl::u64 rounds;
  kccl::u64* readings;
};

extern "C" __global__ void __launch_bounds__(32) kccl_clocks(const __grid_constant__ Argument a) {
  kccl::read_clocks(a.comm, static_cast<kccl::u32>(a.rounds), a.readings, threadIdx.x == 0);
}
