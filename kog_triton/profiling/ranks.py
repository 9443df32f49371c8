"""A recording of several GPUs: all on the first one's clock, and what of the step is waiting for each other.

Exposed communication is what a token takes longer because GPUs exchange words: time in which all warps of a block
wait for words of other GPUs alone, those of their own being there; a mean over blocks. The stamps say how long each
warp has waited so; what is shown is the longest wait of a warp in each span, which all warps' cannot exceed. It takes
ticks of a block's own clock: how well GPUs' clocks are brought together does not enter it.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kog_triton.backends.recording import RankRecording
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


def rank_trace(
    recording: RankRecording, lines: RankTimeline, about: dict[str, Any]
) -> dict[str, Any]:
    """The document: a process a GPU, a track a block; an arrow from the block of each GPU that sent last to the block
    of each other GPU that waited longest for it. `about` is kept in its metadata."""
    events: list[dict[str, Any]] = []
    for gpu, (one, line) in enumerate(zip(recording.each, lines.each, strict=True)):
        name = {"name": f"GPU {gpu}"}
        events.append({"ph": "M", "name": "process_name", "pid": gpu, "args": name})
        events += block_events(one, line, gpu)
    events += _arrows(lines)
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
    return {
        "displayTimeUnit": "ns",
        "traceEvents": events,
        "otherData": about | {"gpus": facts, "clocks": clocks},
    }


def _arrows(lines: RankTimeline) -> list[dict[str, Any]]:
    """Of every span in which a block waited for another GPU: the sender's end is the end of the work before it."""
    events: list[dict[str, Any]] = []
    spans = lines.each[0].spans
    for token in range(len(lines.each[0].ends)):
        for i in range(1, len(spans)):
            for to, reader in enumerate(lines.each):
                waits = np.where(reader.seen[token, :, i], reader.peers[token, :, i], 0.0)
                block = int(waits.argmax())
                if waits[block] == 0:
                    continue
                for of, sender in enumerate(lines.each):
                    if of == to:
                        continue
                    sent = np.where(
                        sender.seen[token, :, i - 1], sender.ends[token, :, i - 1], -np.inf
                    )
                    last = int(sent.argmax())
                    if sent[last] == -np.inf:
                        continue
                    arrow = {"name": spans[i].name, "cat": "exchange", "id": len(events)}
                    begun = sender.starts[token, last, i - 1], sent[last]
                    events.append(arrow | {"ph": "s"} | _inside(of, last, *begun))
                    ended = reader.starts[token, block, i], reader.ends[token, block, i]
                    events.append(arrow | {"ph": "f", "bp": "e"} | _inside(to, block, *ended))
    return events


def _inside(gpu: int, block: int, start: float, end: float) -> dict[str, Any]:
    """Where an arrow's end binds to a slice: a viewer takes the one around its time, so just before the slice's end."""
    at = max((start + end) / 2, end - 1)
    return {"pid": gpu, "tid": block, "ts": round(at / 1e3, 6)}
