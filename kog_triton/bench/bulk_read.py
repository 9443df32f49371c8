"""bulk_read.cu compiled by cupy and launched on torch's stream over a torch buffer."""

from pathlib import Path
from typing import Any

import torch

CHUNK, STAGES, THREADS = 16384, 12, 288  # as in bulk_read.cu


class BulkReader:
    """`read()` passes once over `buffer`, whose bytes are a multiple of CHUNK; one block an SM."""

    def __init__(self, buffer: torch.Tensor) -> None:
        import cupy

        self._cupy = cupy
        self._buffer = buffer
        self._out = torch.zeros(1, dtype=torch.int32, device=buffer.device)
        self._blocks = torch.cuda.get_device_properties(buffer.device).multi_processor_count
        code = Path(__file__).with_suffix(".cu").read_text()
        module = cupy.RawModule(code=code, options=("-std=c++17",))  # cupy names the architecture
        self._kernel: Any = module.get_function("bulk_read")
        self._kernel.max_dynamic_shared_size_bytes = CHUNK * STAGES

    def read(self) -> None:
        cupy = self._cupy
        arguments = (
            cupy.uint64(self._buffer.data_ptr()),
            cupy.int64(self._buffer.nbytes // CHUNK),
            cupy.uint64(self._out.data_ptr()),
        )
        stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
        with stream:
            self._kernel((self._blocks,), (THREADS,), arguments, shared_mem=CHUNK * STAGES)
