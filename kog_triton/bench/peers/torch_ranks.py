"""The baseline of torch_graph.py by tensor parallelism: a process a GPU, a CUDA graph of a step on each, sums by NCCL.

What a rank computes is torch_shards.py's. The processes wait for orders between requests; rank 0 answers with tokens
and the times at which it had read them, on the clock that all processes of a machine share.

A graph that holds NCCL's sums may fail as it is captured. Then all processes begin anew, the next of WAYS, and
`version` says which one runs and why not the one before: a baseline that is slower than it could be is named so.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from kog_triton.backends import WeightSource
from kog_triton.bench.engines import Run
from kog_triton.bench.peers import Setting
from kog_triton.bench.peers.torch_graph import TorchGraph
from kog_triton.bench.peers.torch_shards import LibrarySums, RankDecoder, SymmetricSums, why_not
from kog_triton.errors import RunError
from kog_triton.model.spec import ModelSpec

log = logging.getLogger(__name__)


class Way(NamedTuple):
    """How a step runs on every GPU."""

    sums: str  # library: the process group's; symmetric: torch's symmetric memory
    captured: bool
    says: str


WAYS = (
    Way("library", True, "CUDA graph a GPU, sums by NCCL"),
    Way("symmetric", True, "CUDA graph a GPU, sums by symmetric memory in one shot"),
    Way("library", False, "no CUDA graph, sums by NCCL"),
)
# Seconds that an answer may take, the first when all ranks have loaded and captured, and that a process may take to
# end.
PATIENCE_S, CLOSE_S = 300, 10


class RankGraph(TorchGraph):
    """One rank, in its process."""

    def __init__(self, setting: Setting, way: Way) -> None:
        self._way = way
        super().__init__(setting)

    def open(self, setting: Setting) -> tuple[ModelSpec, RankDecoder]:
        device = setting.device
        sums = SymmetricSums(device) if self._way.sums == "symmetric" else LibrarySums()
        self._ranked = RankDecoder(setting.weights, device, setting.max_context, sums)
        return setting.wide_spec, self._ranked

    def _capture(self) -> torch.cuda.CUDAGraph | None:
        return super()._capture() if self._way.captured else None

    @torch.inference_mode()
    def _step(self) -> None:
        logits = self._decoder.forward(self._token, self._position)
        self._token.copy_(self._ranked.best(logits))
        self._position.add_(1)

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        out: np.ndarray = self._ranked.whole(self._decoder.prompt(token_ids)).cpu().numpy()
        return out

    def first_token(self, prompt: Sequence[int]) -> torch.Tensor:
        return self._ranked.best(self._decoder.prompt(prompt)[-1][-1:])

    def close(self) -> None:
        del self._ranked
        super().close()


def serve(
    rank: int, ranks: int, address: str, weights: WeightSource, kind: str, context: int, way: Way, orders: Connection
) -> None:
    """A process's life: open, then an answer an order, (value, error)."""
    cuda = kind == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    engine = None
    try:
        dist.init_process_group("nccl" if cuda else "gloo", init_method=address, rank=rank, world_size=ranks)
        engine = RankGraph(Setting(weights, device, context), way)
        orders.send((engine.memory_bytes(), ""))
        while True:
            name, *arguments = orders.recv()
            if name == "close":
                break
            found = getattr(engine, name)(*arguments)
            orders.send((found if rank == 0 else None, ""))
    except Exception as error:
        orders.send((None, f"rank {rank}: {type(error).__name__}: {error}".splitlines()[0]))
    finally:
        if engine is not None:
            engine.close()
        if dist.is_initialized():
            dist.destroy_process_group()


class TorchRanks:
    name = "torch-ranks"
    checks_text = True
    several_gpus = True
    ran = "this adapter has run on a CPU and on two H200s"

    @staticmethod
    def absent(setting: Setting) -> str:
        if setting.num_gpus == 1:
            return "it runs on several GPUs, and torch-graph on one"
        if setting.device.type == "cpu":
            return "graphs are captured on a GPU only"
        if setting.weights.spec.num_lanes > 1:
            return "it has one residual stream, not lanes"
        return why_not(setting.weights.spec, setting.num_gpus)

    def __init__(self, setting: Setting) -> None:
        self.spec = setting.wide_spec
        self._ranks: list[tuple[Any, Connection]] = []
        refused = ""
        for way in WAYS:
            self.version = f"torch {torch.__version__}, {way.says}{refused}"
            try:
                opened = self._begin(setting, way)
                break
            except RunError as error:
                self.close()
                if way is WAYS[-1]:
                    raise
                log.warning("%s: not with %s: %s", self.name, way.says, error)
                refused += f"; not with {way.says}: {error}"
            except BaseException:
                self.close()
                raise
        self._bytes = {name: sum(one[name] for one in opened) for name in opened[0]}

    def _begin(self, setting: Setting, way: Way) -> list[Any]:
        """Start all processes; what each answers once it has loaded and captured."""
        self._folder = TemporaryDirectory()
        address = f"file://{Path(self._folder.name) / 'rendezvous'}"
        spawn, ranks, kind = get_context("spawn"), setting.num_gpus, setting.device.type
        for rank in range(ranks):
            ours, theirs = spawn.Pipe()
            arguments = (rank, ranks, address, setting.weights, kind, setting.max_context, way)
            process = spawn.Process(target=serve, args=(*arguments, theirs), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))
        return self._answers()

    def _ask(self, *order: Any) -> Any:
        for _, orders in self._ranks:
            with suppress(OSError):  # of a process that has ended `_answers` tells
                orders.send(order)
        return self._answers()[0]

    def _answers(self) -> list[Any]:
        """Of all ranks; RunError with the first complaint, or of a rank that is silent."""
        deadline, found = time.monotonic() + PATIENCE_S, [None] * len(self._ranks)
        missing = set(range(len(self._ranks)))
        while missing:
            for rank in sorted(missing):
                orders = self._ranks[rank][1]
                try:
                    if not orders.poll(0.01):
                        if time.monotonic() > deadline:
                            raise RunError(f"rank {rank} said nothing for {PATIENCE_S} s")
                        continue
                    found[rank], complaint = orders.recv()
                except (EOFError, OSError) as error:
                    raise RunError(f"the process of rank {rank} ended") from error
                if complaint:
                    raise RunError(complaint)
                missing.remove(rank)
        return found

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        found: np.ndarray = self._ask("logits", list(token_ids))
        return found

    def generate(self, prompt: Sequence[int], count: int) -> Run:
        found: Run = self._ask("generate", list(prompt), count)
        return found

    def memory_bytes(self) -> dict[str, int]:
        """Of all GPUs together."""
        return self._bytes

    def close(self) -> None:
        for _, orders in self._ranks:
            with suppress(OSError):  # it has ended
                orders.send(("close",))
        for process, orders in self._ranks:
            process.join(CLOSE_S)
            if process.is_alive():  # one that failed leaves the others waiting
                process.kill()
                process.join()
            orders.close()
        self._ranks = []
        self._folder.cleanup()
