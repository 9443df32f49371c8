"""What every measurement of `kog bench` is told, and the bandwidth that it begins with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kog_triton.backends import BackendOptions
from kog_triton.backends.choose import Choice
from kog_triton.bench import machine
from kog_triton.bench.bandwidth import measure_bandwidth
from kog_triton.bench.check import CHECK_POSITIONS, Judge
from kog_triton.bench.kl_limit import kl_limit, unpacked_kl_limit
from kog_triton.bench.model import Model
from kog_triton.bench.record import make_row, note_of

Row = dict[str, Any]
Say = Callable[[str], None]  # told of each step, in a line


@dataclass(frozen=True, kw_only=True)
class Common:
    """The part of a task that all kinds share."""

    model: Model
    device: torch.device
    device_word: str  # as backends take it
    num_gpus: int
    rounds: int
    warmup: int
    backends: Sequence[Choice]

    def judged_ids(self) -> list[int]:
        """Of the positions whose logits are compared, however short the prompts are that are timed."""
        return self.model.prompt(min(CHECK_POSITIONS, self.model.weights.spec.max_context))

    def room(self, positions: int) -> int:
        """Positions that an engine is opened with: those that are timed and those that are judged."""
        return max(positions, len(self.judged_ids()))

    def kl_limit(self, judge: Judge, say: Say) -> float:
        """Of our backends, by what transformers make of the same weights in bf16; of narrow weights, by what the
        first backend's own kernel of 16-bit weights makes of what they stand for."""
        weights, ids = self.model.weights, self.judged_ids()
        if weights.spec.narrow:
            first = self.backends[0]
            say(f"logits of {first.name} on the unpacked weights")
            options = BackendOptions(device=self.device_word, max_context=len(ids))
            limit = unpacked_kl_limit(weights, first.backend, options, ids, judge.logits)
        else:
            say("transformers' logits")
            limit = kl_limit(weights, self.device, ids, judge.logits)
        say(f"KL of our backends: at most {limit.backend:.1e}, {limit.reason}")
        return limit.backend

    def read_bandwidth(self, say: Say) -> dict[str, Any]:
        """What memory gives on this machine now, beside the datasheet's figure of a GPU that is known."""
        say("read bandwidth")
        gpu = machine.gpu_row() if self.device.type == "cuda" else None
        return measure_bandwidth(self.device, gpu, self.num_gpus)

    def measure(self, bandwidth: dict[str, Any], rows_of: Callable[[Choice, Row], list[Row]]) -> dict[str, Any]:
        """The parts of a record that a measurement makes: bandwidth, conditions, rows, failures.

        rows_of  times one backend: its rows, made of the one that it is given; that one says what went wrong
        """
        samples = [machine.sample()]
        rows: list[Row] = []
        for choice in self.backends:
            row = make_row(choice.name, "backend", "timed", choice.reason)
            try:
                rows += rows_of(choice, row)
            except Exception as error:
                rows.append(row | {"status": "failed", "note": note_of(error)})
        samples.append(machine.sample())
        return {
            "bandwidth": bandwidth,
            "conditions": machine.conditions(samples),
            "rows": rows,
            "failures": [f"{r['name']}: {r['note']}" for r in rows if r["status"] != "timed"],
        }
