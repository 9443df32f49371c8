"""What a backend that takes stamps gives back: when every warp had done what, over a few tokens.

A backend offers it by one more method, `profile` (`Profiler`); the others are refused by name. Stamps count
ticks of the clock of a block's own SM: `clocks` says how those stand to nanoseconds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

HEAD = -1  # the layer of spans that run once a token


@dataclass(frozen=True)
class Span:
    """What a warp does between two stamps; it begins where the one before it ended."""

    name: str
    layer: int
    waits: bool = False  # for other blocks, and computes next to nothing


@dataclass(frozen=True)
class Recording:
    """Stamps of consecutive decode steps.

    A span that a warp did not take has 0 ticks; every block takes the first span.
    """

    spans: tuple[Span, ...]  # of one token, in the order of the walk
    ticks: np.ndarray  # int64 [tokens, blocks, warps, spans]: when each span ended
    weight_ticks: np.ndarray  # int64, the same shape: what the warp had waited for weights by then
    ring_slots_asked: np.ndarray  # int64, the same shape: what its block had asked for by then
    # int64, the same shape: what the warp had waited for other GPUs' words alone by then
    peer_ticks: np.ndarray
    # int64 [tokens + 1, blocks, 2]: ticks and nanoseconds as each token begins, and as the launch ends
    clocks: np.ndarray
    stage_bytes: Mapping[str, float]  # weights that all blocks read in one run of a span, by name
    plain_step_ns: np.ndarray  # int64 [tokens - 1]: the same steps by the kernel without stamps

    @property
    def token_bytes(self) -> float:
        """Weight bytes of one token, padding included."""
        return sum(self.stage_bytes.get(span.name, 0.0) for span in self.spans)


@dataclass(frozen=True)
class RankRecording:
    """The same decode steps as each of several GPUs saw them, and how their clocks stand to each other.

    Before and behind the steps the first GPU asked every other one for its clock, so many times: int64
    [GPUs - 1, rounds, 3], ns, the first one's clock as it asks, the other's as it answers, the first one's as it
    hears the answer.
    """

    each: tuple[Recording, ...]
    before: np.ndarray
    behind: np.ndarray


@runtime_checkable
class Profiler(Protocol):
    """A backend whose kernel can take stamps."""

    def profile(self, prompt: Sequence[int], tokens: int) -> Recording:
        """Decode `tokens` greedy tokens behind the prompt in a slot of its own, with stamps.

        RequestError if they do not fit the context.
        """
        ...


@runtime_checkable
class RankProfiler(Protocol):
    """A Profiler that may be opened on several GPUs."""

    def profile_ranks(self, prompt: Sequence[int], tokens: int) -> RankRecording:
        """As `profile`, of every GPU, their clocks read beside each other."""
        ...
