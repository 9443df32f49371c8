"""The backends of the conformance suite, and how far each may be from the reference."""

import os

import pytest

from kog_triton.backends.cuda.backend import CudaBackend
from kog_triton.backends.triton import TritonBackend
from kog_triton.model.spec import DType, Reduce
from tests.lib.cuda_walk import FiberBackend
from tests.lib.hip_walk import HipFiberBackend

NOW, OWN, DELAYED = Reduce.NOW, Reduce.OWN, Reduce.DELAYED
HIP = "hip on a CPU"
BACKENDS = {"cuda on a CPU": FiberBackend, HIP: HipFiberBackend, "cuda": CudaBackend, "triton": TritonBackend}
if os.environ.get("TRITON_INTERPRET") == "1":  # else Triton compiles for the GPU here
    from tests.lib.triton_cases import InterpretedBackend

    BACKENDS["triton on a CPU"] = InterpretedBackend
OF_FIBERS = ("cuda on a CPU", HIP)  # what they are compiled from a test can edit
TWO_GPUS = "cuda, two GPUs"  # of the suite's requests alone
ON_GPU = {"cuda", "triton", TWO_GPUS}
SLOW = {"triton on a CPU"}  # a step takes seconds: test_triton_interpreter.py has smaller ones
# Root mean square of the error over that of what is expected. Measured: 5.4e-4 and 2.0e-3, what words
# of 16 bits cost; in attention, where Triton rounds queries and weights as well, 1.3e-3 and 6.0e-3.
LIMITS = {DType.F16: 7e-4, DType.BF16: 2.5e-3}
# Times as much in logits, whose deviation is 6 to 8. Measured on a CPU: 7 to 10 of the CUDA kernel, 9 to 11 of Triton's
# (15 in bfloat16, which its interpreter truncates); over 120 positions 9 and 11, at the last ones as at the first.
IN_LOGITS = 20


def marks(name, steps=True, always=()):
    """Of a test of the backend: that it needs a GPU, or is slow, where `steps` are. HIP's are slow tests but for those
    that name it in `always`: what runs always of its kernels is in tests/gfx942."""
    if name in ON_GPU:
        return (pytest.mark.gpu,)
    slow = (name.startswith(HIP) and name not in always) or (steps and name in SLOW)
    return (pytest.mark.slow,) if slow else ()
