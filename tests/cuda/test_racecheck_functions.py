"""Functions of shared accesses, out of the line tables of a small kernel."""

from tests.lib import nvrtc
from tests.lib.machine_code import tool
from tests.lib.racecheck import functions_in

HEADER = """\
#define KOG_DEVICE __device__ __forceinline__
KOG_DEVICE void put_there(volatile unsigned* to, unsigned v) {
  to[threadIdx.x] = v;
}
KOG_DEVICE unsigned get_from(
    volatile unsigned* from, unsigned i) {
  return from[i];
}
"""
KERNEL = """\
#include <small.h>
extern "C" __global__ void kog_small(unsigned* out) {
  __shared__ volatile unsigned words[64], others[64];
  others[out[threadIdx.x + 128]] = 1;
  __syncthreads();
  put_there(words, out[threadIdx.x] + others[threadIdx.x]);
  __syncthreads();
  out[threadIdx.x] = get_from(words, out[threadIdx.x + 64]);
}
"""


def test_an_access_has_the_function_whose_line_it_is(tmp_path):
    library = nvrtc.needed()
    (tmp_path / "small.h").write_text(HEADER)
    flags = ("--gpu-architecture=sm_90a", "-lineinfo", f"-I{tmp_path}")
    cubin = tmp_path / "small.cubin"
    cubin.write_bytes(nvrtc.compile_cubin(library, KERNEL, flags))
    found = functions_in(cubin, tool("nvdisasm"))
    assert {kernel for kernel, _ in found} == {"kog_small"}
    assert len(found) == 4
    own = "decode.cu"  # what the kernel's text is called
    assert [found[at] for at in sorted(found)] == [own, own, "put_there", "get_from"]
