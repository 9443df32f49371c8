"""Other engines on the same weights, prompt, dtype and number of tokens, greedy, batch 1.

A peer is a class (`Peer`) in a module of its own, which is imported when the peer is asked for.
"""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import ClassVar, Protocol

import torch

from kog_triton.backends import WeightSource
from kog_triton.bench.engines import EngineUnderTest
from kog_triton.errors import RequestError
from kog_triton.model.spec import ModelSpec

PEERS = {  # module and class
    "transformers": ("transformers_eager", "TransformersEager"),
    "transformers-compiled": ("transformers_compiled", "TransformersCompiled"),
    "transformers-tuned": ("transformers_tuned", "TransformersTuned"),
    "torch-graph": ("torch_graph", "TorchGraph"),
    "torch-ranks": ("torch_ranks", "TorchRanks"),
    "torch-narrow": ("torch_narrow", "TorchNarrow"),
    "llama-bench": ("llama_bench", "LlamaBench"),
}


@dataclass(frozen=True)
class Setting:
    """What a peer is opened with. `max_context` is exactly what the timed request needs."""

    weights: WeightSource
    device: torch.device
    max_context: int
    gguf: Path | None = None  # the same model for llama-bench
    num_gpus: int = 1

    @property
    def wide_spec(self) -> ModelSpec:
        """The model as an engine runs it that has no narrow weights: by their values in the model's own type."""
        return self.weights.spec.replace(narrow=())


class Peer(EngineUnderTest, Protocol):
    """`ran` says where the adapter itself has run so far: a record in which the peer is absent repeats it, so that
    nobody takes untried code for a measurement that was left out.
    """

    ran: ClassVar[str]
    several_gpus: ClassVar[bool] = False  # whether it runs on more than one

    @staticmethod
    def absent(setting: Setting) -> str:
        """Why it cannot run here; "" if it can."""
        ...

    def __init__(self, setting: Setting) -> None: ...


def find_peer(name: str) -> type[Peer]:
    """RequestError with the known names if there is none of that name."""
    if name not in PEERS:
        raise RequestError(f"no peer is named {name!r}: have {', '.join(PEERS)}")
    module, peer = PEERS[name]
    found: type[Peer] = getattr(import_module(f"kog_triton.bench.peers.{module}"), peer)
    return found
