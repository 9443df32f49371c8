"""A recording in the Trace Event Format that Perfetto and Chrome open: a track a block, a slice a span.

Times are microseconds from the first stamp on. A slice's arguments say what the block waited for weights
within it and how many ring slots of its stream it had asked for by its end; waits have a category of
their own.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from kog_triton.backends.recording import HEAD, Recording
from kog_triton.cli.arguments import write_text
from kog_triton.profiling.analysis import Timeline

PROCESS = 0


def trace(recording: Recording, line: Timeline, about: dict[str, Any]) -> dict[str, Any]:
    """The document; `about` is kept in its metadata."""
    events = block_events(recording, line, PROCESS)
    return {"displayTimeUnit": "ns", "traceEvents": events, "otherData": about | clock_facts(line)}


def block_events(recording: Recording, line: Timeline, process: int) -> list[dict[str, Any]]:
    """Of one GPU: the names of its tracks, and their slices."""
    tokens, blocks, _ = line.ends.shape
    asked = recording.ring_slots_asked.max(2)
    events: list[dict[str, Any]] = []
    for block in range(blocks):
        name = {"name": f"block {block}"}
        events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": block, "args": name})
        for token in range(tokens):
            for i in np.flatnonzero(line.seen[token, block]):
                span, start = line.spans[i], line.starts[token, block, i]
                events.append(
                    {
                        "ph": "X",
                        "name": span.name,
                        "cat": "wait" if span.waits else "work",
                        "pid": process,
                        "tid": block,
                        "ts": round(start / 1e3, 3),
                        "dur": round((line.ends[token, block, i] - start) / 1e3, 3),
                        "args": {
                            "token": token,
                            "layer": "head" if span.layer == HEAD else span.layer,
                            "weight_wait_us": round(line.weights[token, block, i] / 1e3, 3),
                            "ring_slots_asked": int(asked[token, block, i]),
                        }
                        | _peer_wait(float(line.peers[token, block, i])),
                    }
                )
    return events


def _peer_wait(ns: float) -> dict[str, float]:
    return {"peer_wait_us": round(ns / 1e3, 3)} if ns else {}


def clock_facts(line: Timeline) -> dict[str, Any]:
    strayed = line.clock_error
    error = None if strayed is None else round(strayed, 1)
    return {"clock_step_ns": line.clock_step, "clock_error_ns": error}


def write(document: dict[str, Any], file: Path) -> None:
    write_text(file, json.dumps(document, allow_nan=False) + "\n")
