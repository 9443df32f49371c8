"""Other engines on the same weights, prompt, dtype and number of tokens, greedy, batch 1.

A peer is a module with `absent(setting)`, why it cannot run here ("" if it can), and
`open_peer(setting)`, a `Subject`. `RAN` says where the adapter itself has run so far: a record in which
the peer is absent repeats it, so that nobody takes untried code for a measurement that was left out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from kog_triton.backends import WeightSource
from kog_triton.bench.engines import EngineUnderTest
from kog_triton.errors import RequestError

MODULES = {
    "transformers": "transformers_eager",
    "transformers-compiled": "transformers_compiled",
    "transformers-tuned": "transformers_tuned",
    "torch-graph": "torch_graph",
    "llama-bench": "llama_bench",
}


@dataclass(frozen=True)
class Setting:
    """What a peer is opened with. `max_context` is exactly what the timed request needs."""

    weights: WeightSource
    device: torch.device
    max_context: int
    gguf: Path | None = None  # the same model for llama-bench


@dataclass(frozen=True)
class Peer:
    name: str
    absent: Callable[[Setting], str]
    open_peer: Callable[[Setting], EngineUnderTest]
    ran: str  # where the adapter has run, in words


def find_peer(name: str) -> Peer:
    """RequestError with the known names if there is none of that name."""
    if name not in MODULES:
        raise RequestError(f"no peer is named {name!r}: have {', '.join(MODULES)}")
    module: Any = import_module(f"kog_triton.bench.peers.{MODULES[name]}")
    return Peer(name, module.absent, module.open_peer, module.RAN)
