"""A recording of several GPUs: all on the first one's clock, and what of the step is waiting for each other.

Exposed communication is what a token takes longer because GPUs exchange words: time in which all warps of a block
wait for words of other GPUs alone, those of their own being there; a mean over blocks. The stamps say how long each
warp has waited so; what is shown is the longest wait of a warp in each span, which all warps' cannot exceed. It takes
ticks of a block's own clock: how well GPUs' clocks are brought together does not enter it.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kog_triton.backends.recording import HEAD, RankRecording
from kog_triton.profiling.analysis import Timeline, timeline
from kog_triton.profiling.clocks import Alignment, align
from kog_triton.profiling.trace import block_events, clock_facts


@dataclass(frozen=True)
class RankTimeline:
    """Of every GPU, in ns of the first one's clock from the first stamp of any on."""

    each: tuple[Timeline, ...]
    clocks: tuple[Alignment, ...]  # of all but the first

    @property
    def token_ns(self) -> float:
        """A mean over GPUs."""
        return float(np.mean([line.token_ns for line in self.each]))


@dataclass(frozen=True)
class Exposed:
    """Exposed communication of one GPU within the spans of one name; ns, a mean block's."""

    gpu: int
    name: str
    runs: int  # a token
    token: float  # in a token
    largest: float  # in one run, of any block
    share: float  # of the token


def rank_timeline(recording: RankRecording) -> RankTimeline:
    pairs = zip(recording.before, recording.behind, strict=True)
    clocks = tuple(align(before, behind) for before, behind in pairs)
    first = timeline(recording.each[0], clocks[0].first_ns[0])
    each = [first]
    for one, clock in zip(recording.each[1:], clocks, strict=True):
        line = timeline(one, clock.own_ns[0])
        later = clock.first_ns[0] - clocks[0].first_ns[0]
        starts, ends = (clock.on_first(times) + later for times in (line.starts, line.ends))
        each.append(replace(line, starts=starts, ends=ends))
    begin = min(line.ends.min() for line in each)
    shifted = (replace(li, starts=li.starts - begin, ends=li.ends - begin) for li in each)
    return RankTimeline(tuple(shifted), clocks)


def exposed(lines: RankTimeline) -> list[Exposed]:
    """A row for each GPU and name of a span in which any block waited for another GPU."""
    out = []
    for gpu, line in enumerate(lines.each):
        for name in dict.fromkeys(span.name for span in line.spans):
            at = [i for i, span in enumerate(line.spans) if span.name == name]
            waits = line.peers[:, :, at]  # [tokens, blocks, runs]
            if not waits.any():
                continue
            token = float(waits.sum(2).mean())
            share = token / lines.token_ns
            out.append(Exposed(gpu, name, len(at), token, float(waits.max()), share))
    return out


GPUS = 0  # the process of a trace with a track a GPU; that of GPU g's blocks is 1 + g


def rank_trace(recording: RankRecording, lines: RankTimeline, about: dict[str, Any]) -> dict[str, Any]:
    """The document: a track a GPU, side by side, with arrows for exchanges; below them, a process a GPU, its blocks.

    A GPU's slice of a span ends when its last block's does. An arrow goes from the work behind which a GPU sent to the
    span in which another one waited for it. `about` is kept in its metadata.
    """
    events: list[dict[str, Any]] = [_name("process_name", GPUS, 0, "GPUs")]
    for gpu, line in enumerate(lines.each):
        events.append(_name("thread_name", GPUS, gpu, f"GPU {gpu}"))
        events += _gpu_events(line, gpu)
    events += _arrows(lines)
    for gpu, (one, line) in enumerate(zip(recording.each, lines.each, strict=True)):
        events.append(_name("process_name", GPUS + 1 + gpu, 0, f"blocks of GPU {gpu}"))
        events += block_events(one, line, GPUS + 1 + gpu)
    clocks = [
        {
            "gpu": gpu,
            "offset_ns": clock.offset,
            "drift": clock.drift,
            "drift_error": clock.drift_error,
            "error_ns": clock.error,
        }
        for gpu, clock in enumerate(lines.clocks, 1)
    ]
    facts = [clock_facts(line) for line in lines.each]
    return {"displayTimeUnit": "ns", "traceEvents": events, "otherData": about | {"gpus": facts, "clocks": clocks}}


def _name(what: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": track, "args": {"name": name}}


def _last_ends(line: Timeline) -> np.ndarray:
    """float64 [tokens, spans], ns: when the last block that took a span had ended it, or all before; NaN where nobody
    took it or saw it begin."""
    ends = np.where(line.seen, line.ends, -np.inf).max(1)
    reached = np.maximum.accumulate(ends.reshape(-1)).reshape(ends.shape)
    return np.where(np.isfinite(ends), reached, np.nan)


def _gpu_events(line: Timeline, gpu: int) -> list[dict[str, Any]]:
    """Slices of one GPU's track, end to end from its first block's first start on."""
    events: list[dict[str, Any]] = []
    begun = float(np.nanmin(line.starts)) if line.seen.any() else 0.0
    for token, ends in enumerate(_last_ends(line)):
        for i in np.flatnonzero(np.isfinite(ends)):
            span, end = line.spans[i], float(ends[i])
            waits = np.where(line.seen[token, :, i], line.peers[token, :, i], 0.0)
            events.append(
                {
                    "ph": "X",
                    "name": span.name,
                    "cat": "wait" if span.waits else "work",
                    "pid": GPUS,
                    "tid": gpu,
                    "ts": round(begun / 1e3, 3),
                    "dur": round((end - begun) / 1e3, 3),
                    "args": {
                        "token": token,
                        "layer": "head" if span.layer == HEAD else span.layer,
                        "blocks": int(line.seen[token, :, i].sum()),
                        "peer_wait_us": round(float(waits.mean()) / 1e3, 3),
                        "longest_peer_wait_us": round(float(waits.max()) / 1e3, 3),
                    },
                }
            )
            begun = end
    return events


def _arrows(lines: RankTimeline) -> list[dict[str, Any]]:
    """Of every span in which a block waited for another GPU: each other one's end of the work before it, to its end."""
    events: list[dict[str, Any]] = []
    spans, ends = lines.each[0].spans, [_last_ends(line) for line in lines.each]
    for token in range(len(ends[0])):
        for i in range(1, len(spans)):
            for to, reader in enumerate(lines.each):
                waited = np.where(reader.seen[token, :, i], reader.peers[token, :, i], 0.0).any()
                if not waited:
                    continue
                for of, sent in enumerate(ends):
                    if of == to or not np.isfinite(sent[token, i - 1]):
                        continue
                    arrow = {"name": spans[i].name, "cat": "exchange", "id": len(events)}
                    events.append(arrow | {"ph": "s"} | _inside(of, sent, token, i - 1))
                    events.append(arrow | {"ph": "f", "bp": "e"} | _inside(to, ends[to], token, i))
    return events


def _inside(gpu: int, ends: np.ndarray, token: int, i: int) -> dict[str, Any]:
    """Where an arrow's end binds to a slice: a viewer takes the one around its time, so just before the slice's end."""
    before = ends.reshape(-1)[: token * ends.shape[1] + i]
    known, end = before[np.isfinite(before)], float(ends[token, i])
    start = float(known[-1]) if len(known) else end
    return {"pid": GPUS, "tid": gpu, "ts": round(max((start + end) / 2, end - 1) / 1e3, 6)}
