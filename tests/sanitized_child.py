"""A process to run under compute-sanitizer: requests and a stage of a tiny model; prints what came of them.

argv: a fault of FAULTS or "none", and a folder for the planted headers.
"""

import sys
from pathlib import Path

import torch
from cuda_planting import plant
from kog_triton.backends.cuda import CudaBackend, jit, serving
from ring_walker import spec_of

from kog_triton.backends import BackendOptions
from kog_triton.backends.mailbox import Request
from kog_triton.model.spec import DType
from kog_triton.random_weights import RandomWeights
from kog_triton.sampling import SamplingParams

BLOCKS = 4
PATIENCE = 200  # instrumented code is that much slower, or a little less
PARTIALS = "scratch = reinterpret_cast<u8*>(partials) + kPartialBytes;\n"
IN_WARP = "in_warp = thread % 32;\n"
FAULTS = {
    "memcheck": (
        "block.h",
        IN_WARP,
        IN_WARP + "if (thread == 0) *(volatile u32*)(1ull << 46) = 1;\n",
    ),
    "racecheck": ("block.h", PARTIALS, PARTIALS + "if (thread % 32 == 0) partials[0] += thread;\n"),
    "synccheck": ("block.h", IN_WARP, IN_WARP + "if (in_warp < 16) __syncwarp(0xffff0000u);\n"),
}
REQUESTS = {
    "greedy": SamplingParams(temperature=0),
    "all rules": SamplingParams(
        temperature=1, seed=3, top_k=20, top_p=0.9, min_p=0.01, frequency_penalty=0.5, logprobs=3
    ),
}


def main(fault: str, folder: str) -> None:
    if fault in FAULTS:
        jit.INCLUDE = plant(Path(folder), FAULTS[fault])
    spec = spec_of(dtype=DType.F16)
    options = BackendOptions(device="nvidia", prefill="kernel")
    backend = CudaBackend(RandomWeights(spec), options, BLOCKS)
    backend.wait_ticks *= PATIENCE
    serving.SILENCE_S *= PATIENCE
    if fault == "initcheck":
        gains = backend.memory.gains
        gains.set_(torch.empty(gains.shape, dtype=gains.dtype, device=gains.device))
    for name, params in REQUESTS.items():
        mailbox = backend.new_mailbox()
        mailbox.post(Request(0, (5, 17, 60), params, 3, 3))
        backend.generate(mailbox)
        print(name, [getattr(step, "token", step) for step in mailbox.read(0)], flush=True)
    x = torch.ones(1, 1, spec.hidden_size)
    out = backend.run_stage("qkv_proj", 0, {"x": x})["q"]
    print("stage", float(torch.as_tensor(out).double().abs().sum()), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
