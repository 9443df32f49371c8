"""Stamps to times, and times to the answer: which spans a step spends its time in, and which of it counts.

    stamps --one line a block--> nanoseconds of the GPU --last warp--> a block's spans, end to end

A block has ended a span when its last warp has. The spans of a block follow each other without a gap, so
that their means add up to the token. The critical path goes from wait to wait: of all blocks the one
that waits least came last, and its work and its wait are what the step took.
"""

from dataclasses import dataclass
from math import gcd

import numpy as np

from kog_triton.backends.recording import Recording, Span


@dataclass(frozen=True)
class Timeline:
    """Of every block, in ns from the first stamp on."""

    spans: tuple[Span, ...]
    starts: np.ndarray  # float64 [tokens, blocks, spans]; NaN: before the recording began
    ends: np.ndarray  # float64, the same shape
    taken: np.ndarray  # bool, the same shape: whether the block took the span
    weights: np.ndarray  # float64, the same shape: a warp's mean wait for weights
    # float64, the same shape: the longest wait of a warp for other GPUs' words alone; all warps' is no longer
    peers: np.ndarray
    clock_step: int  # ns: the grain of the GPU's clock
    # ns: how far a reading may lie from the line through those beside it; None with one token
    clock_error: float | None

    @property
    def took(self) -> np.ndarray:
        """float64 [tokens, blocks, spans], ns; 0 for what a block left out."""
        return self.ends - self.starts

    @property
    def seen(self) -> np.ndarray:
        """bool [tokens, blocks, spans]: whether the block took the span and the recording saw it begin."""
        return self.taken & ~np.isnan(self.starts)

    @property
    def token_ns(self) -> float:
        """From the end of a token to the end of the next, a mean; of one token, its own time."""
        last = self.ends[:, :, -1].mean(1)
        if len(last) > 1:
            return float((last[-1] - last[0]) / (len(last) - 1))
        return float(last[0] - self.ends[0, :, 0].mean())


@dataclass(frozen=True)
class Figure:
    """A span by name. ns; means over layers, tokens and the blocks that took it."""

    name: str
    waits: bool
    runs: int  # a token
    mean: float  # of one run
    largest: float
    token: float  # what a mean block spends on it in a token: these add up
    weights: float  # of `token`: a mean warp's wait for weights
    critical: float  # what a token's critical path spends on it
    num_bytes: float  # that all blocks read in one run


def timeline(recording: Recording, origin_ns: int | None = None) -> Timeline:
    """Map every stamp to nanoseconds by the pairs of clock readings of its block before it and behind it; from a moment
    of the GPU's clock on, if one is given."""
    clocks = recording.clocks
    first_tick = clocks[0, :, 0]
    first_ns = clocks[0, :, 1].min() if origin_ns is None else origin_ns
    ticks = (clocks[:, :, 0] - first_tick).T.astype(np.float64)  # [blocks, tokens + 1]
    nanoseconds = (clocks[:, :, 1] - first_ns).T.astype(np.float64)
    rate = ((nanoseconds[:, -1] - nanoseconds[:, 0]) / ticks[:, -1])[:, None]  # ns a tick

    def in_order(stamps: np.ndarray) -> np.ndarray:  # [blocks, warps, tokens x spans]
        return stamps.transpose(1, 2, 0, 3).reshape(*stamps.shape[1:3], -1)

    def by_token(values: np.ndarray) -> np.ndarray:  # [tokens, blocks, spans]
        return values.reshape(len(values), -1, len(recording.spans)).transpose(1, 0, 2)

    last = in_order(recording.ticks).max(1)
    taken = last > 0
    known = zip(last - first_tick[:, None], ticks, nanoseconds, strict=True)
    ends = np.where(taken, [np.interp(*block) for block in known], -np.inf)
    ends = np.maximum.accumulate(ends, 1)  # a span that is left out ends where it begins
    if origin_ns is None:
        ends -= ends.min()
    starts = np.concatenate([np.full((len(ends), 1), np.nan), ends[:, :-1]], 1)

    def waits(ticks: np.ndarray) -> np.ndarray:  # [blocks, warps, tokens x spans]: within each span
        waited = np.maximum.accumulate(in_order(ticks), 2)
        return np.diff(waited, axis=2, prepend=waited[:, :, :1])

    return Timeline(
        spans=recording.spans,
        starts=by_token(starts),
        ends=by_token(ends),
        taken=by_token(taken),
        weights=by_token(waits(recording.weight_ticks).mean(1) * rate),
        peers=by_token(waits(recording.peer_ticks).max(1) * rate),
        clock_step=gcd(*np.diff(np.unique(clocks[:, :, 1])).tolist()),
        clock_error=_strayed(ticks, nanoseconds),
    )


def _strayed(ticks: np.ndarray, nanoseconds: np.ndarray) -> float | None:
    """The farthest that a reading lies from the line between its neighbours; both [blocks, readings]."""
    if ticks.shape[1] < 3:
        return None
    share = (ticks[:, 1:-1] - ticks[:, :-2]) / (ticks[:, 2:] - ticks[:, :-2])
    line = nanoseconds[:, :-2] + share * (nanoseconds[:, 2:] - nanoseconds[:, :-2])
    return float(np.abs(nanoseconds[:, 1:-1] - line).max())


def figures(recording: Recording, line: Timeline) -> list[Figure]:
    """One a name, in the order of the walk; without those that the recording saw only begin."""
    critical = critical_path(line)
    out = []
    for name in dict.fromkeys(span.name for span in line.spans):
        at = [i for i, span in enumerate(line.spans) if span.name == name]
        took = line.took[:, :, at]
        seen = line.seen[:, :, at]
        if not seen.any():
            continue
        tokens = seen.any((1, 2))
        out.append(
            Figure(
                name=name,
                waits=line.spans[at[0]].waits,
                runs=len(at),
                mean=float(took[seen].mean()),
                largest=float(took[seen].max()),
                token=float(took[tokens].sum(2).mean()),
                weights=float(line.weights[:, :, at][tokens].sum(2).mean()),
                critical=float(critical[tokens][:, at].sum(1).mean()),
                num_bytes=recording.stage_bytes.get(name, 0.0),
            )
        )
    return out


def critical_path(line: Timeline) -> np.ndarray:
    """float64 [tokens, spans], ns: each span on the block that waits least at the next wait."""
    took = line.took
    out = np.zeros((len(took), len(line.spans)))
    work: list[tuple[int, int]] = []  # since the last wait
    for token in range(len(took)):
        for i, span in enumerate(line.spans):
            work.append((token, i))
            if not span.waits or not line.taken[token, :, i].any():
                continue
            waits = np.where(line.taken[token, :, i], took[token, :, i], np.inf)
            for at in work:
                out[at] = took[at[0], np.argmin(waits), at[1]]
            work = []
    return out
