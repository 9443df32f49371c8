"""The reference backend with a switch: a file in $KOG_FAULTS makes the next pass go wrong, and is gone.

nan     the residual stream holds NaN after the first layer's attention
inf     it holds infinities
memory  the allocator gives nothing more
"""

import os
from pathlib import Path
from typing import Any

import torch

from kog_triton.backends.reference import ReferenceBackend

VALUES = {"nan": torch.nan, "inf": torch.inf}


class FaultyReference(ReferenceBackend):
    name = "faulty"

    def run(self, stage: Any, layer: int, values: dict[str, torch.Tensor], *rest: Any) -> None:
        super().run(stage, layer, values, *rest)
        if stage.name != "attention" or layer:
            return
        for fault in Path(os.environ["KOG_FAULTS"]).iterdir():
            fault.unlink()
            if fault.name == "memory":
                raise MemoryError("the allocator has nothing left")
            values["x"] = values["x"] * VALUES[fault.name]
