"""`kog bench stages`: each stage of a decode step alone, against the roofline of the bytes it must read.

Every stage runs through `run_stage` on random tensors of one token, in the last layer, and is first compared
with the fp32 reference on the same tensors. Two clocks:

    kernel  the GPU's own, around the launch alone, of a backend that offers it (StageTimer)
    call    around run_stage as a whole, with the laying out and reading back of its tensors

On a GPU the L2 is overwritten before each run, so that weights come from memory as they do in a step. A
launch of its own is part of either: stages alone add up to more than a step of one kernel.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from kog_triton.backends import STAGE_READS, Backend, BackendOptions, BackgroundCompiler, StageTimer, find_backend
from kog_triton.backends.choose import Choice
from kog_triton.backends.device import Clock
from kog_triton.bench.engines import check_devices
from kog_triton.bench.model import SEED
from kog_triton.bench.task import Common, Say
from kog_triton.model.spec import ModelSpec, Reduce
from kog_triton.schedule.schedule import Op, Schedule, Stage, build
from kog_triton.schedule.shards import canonical

# Many times any L2, and 0.2 ms or more of writing: by its end the host has queued the launch that is timed.
FLUSH_BYTES = 1 << 30
# Relative root mean square error: words of 16 bits leave 0.008 (tests/conformance/test_conformance.py).
MAX_ERROR = 0.03
State = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class StageTask(Common):
    """What to measure; `depth` positions are in the cache."""

    depth: int


def measure_stages(task: StageTask, say: Say) -> dict[str, Any]:
    """The parts of a record that this measurement makes: bandwidth, conditions, rows, failures."""
    bandwidth = task.read_bandwidth(say)
    schedule = build(task.model.weights.spec, task.num_gpus)
    options = BackendOptions(
        max_context=task.depth + 1,
        num_gpus=task.num_gpus,
        device=task.device_word,
        prefill="decode",  # no kernel of prompts is compiled beside: none would run
    )
    say("the reference's stages")
    states, expected = _expected(task, schedule, options)

    def rows_of(choice: Choice, row: dict[str, Any]) -> list[dict[str, Any]]:
        _fill(task, row, choice, options, states, expected, bandwidth["measured"], say)
        return [row]

    return task.measure(bandwidth, rows_of)


def _expected(
    task: StageTask, schedule: Schedule, options: BackendOptions
) -> tuple[dict[str, State], dict[str, State]]:
    """What every stage is given, and what the reference makes of it."""
    reference = find_backend("reference")(task.model.weights, options)
    states, expected = {}, {}
    try:
        for stage, layer, _ in stages_of(schedule):
            states[stage.name] = inputs(schedule, stage, layer, task.depth, task.device)
            expected[stage.name] = reference.run_stage(stage.name, layer, states[stage.name])
    finally:
        reference.close()
    return states, expected


def _fill(
    task: StageTask,
    row: dict[str, Any],
    choice: Choice,
    options: BackendOptions,
    states: dict[str, State],
    expected: dict[str, State],
    bandwidth: float | None,
    say: Say,
) -> None:
    """Check, then time every stage of one backend; its row says how that went."""
    say(f"open {choice.name}")
    started = time.perf_counter()
    backend = choice.backend(task.model.weights, options)
    check_devices(backend, task.num_gpus)
    try:
        row["load_s"] = time.perf_counter() - started
        if isinstance(backend, BackgroundCompiler):
            backend.settle()  # no stage is timed while kernels are compiled beside
        row["dtype"] = backend.spec.dtype.name.lower()
        row["memory_bytes"] = backend.memory_bytes()
        row["stages"] = []
        for stage, layer, runs in stages_of(build(backend.spec, task.num_gpus)):
            say(f"{choice.name}: {stage.name}")
            state = states[stage.name]
            error = largest_error(backend.run_stage(stage.name, layer, state), expected[stage.name])
            if not error <= MAX_ERROR:
                row |= {"status": "wrong", "note": f"{stage.name} is off by {error:.3g}: not timed"}
                return
            clock, seconds = stage_seconds(backend, stage.name, layer, state, task.device, task.warmup, task.rounds)
            num_bytes = stage_bytes(backend.spec, stage, layer, task.depth)
            took = median(seconds)
            roofline = num_bytes / bandwidth if num_bytes and bandwidth else None
            row["stages"].append(
                {
                    "stage": stage.name,
                    "layer": layer,
                    "runs": runs,
                    "clock": clock,
                    "error": error,
                    "us": took * 1e6,
                    "us_rounds": [s * 1e6 for s in seconds],
                    "bytes": num_bytes,
                    "floor_us": None if roofline is None else roofline * 1e6,
                    "ratio": None if roofline is None else roofline / took,
                }
            )
    finally:
        backend.close()


def stages_of(schedule: Schedule) -> list[tuple[Stage, int, int]]:
    """Every stage that run_stage knows: itself, the last layer it runs in, its runs a token."""
    return [
        (stage, segment.repeat - 1, segment.repeat) for segment, stage in schedule.walk() if stage.op is not Op.SAMPLE
    ]


def stage_bytes(spec: ModelSpec, stage: Stage, layer: int, depth: int) -> int:
    """Bytes that one run must read: weights of all shards, of `attention` keys and values.

    A mix reads gains alone, which do not count.
    """
    if stage.op is Op.EMBED:
        return spec.weight_bytes("embed") // spec.vocab_size
    if stage.op is Op.ATTENTION:
        seen = min(depth, spec.windows[layer] or depth)
        return seen * spec.kv_bytes_per_position // spec.num_layers
    if stage.op is not Op.MATVEC:
        return 0
    return sum(spec.weight_bytes(canonical(stage, name, layer)) for name in stage.weights)


def inputs(schedule: Schedule, stage: Stage, layer: int, depth: int, device: torch.device) -> State:
    """Random tensors of one token that the stage reads, by name, float32."""
    spec, shards = schedule.spec, schedule.num_shards
    heads, kv_heads, d = spec.num_heads // shards, spec.num_kv_heads // shards, spec.head_dim
    shapes = {
        "x": (shards, 1, spec.hidden_size),
        "q": (shards, 1, heads, d),
        "k": (shards, 1, kv_heads, d),
        "v": (shards, 1, kv_heads, d),
        "keys": (shards, kv_heads, depth, d),
        "values": (shards, kv_heads, depth, d),
        "attention": (shards, 1, heads * d),
        "delayed": (shards, 1, spec.hidden_size),
        "mlp": (shards, 1, spec.intermediate_size // shards),
        "y": (1, 1, stage.cols),
    }
    names = list(STAGE_READS[stage.name])
    if stage.name == "lm_head":
        names = [stage.source]
    elif "delayed" in names and schedule.reduce(stage.name, layer) is not Reduce.DELAYED:
        names.remove("delayed")
    generator = torch.Generator().manual_seed(SEED)
    if names == ["token_ids"]:
        return {"token_ids": torch.randint(spec.vocab_size, (1,), generator=generator).to(device)}
    return {name: torch.randn(shapes[name], generator=generator).to(device) for name in names}


def largest_error(got: State, expected: State) -> float:
    """Of the tensors that a stage gives: rms(got - expected) / rms(expected); NaN stays NaN."""
    errors = []
    for name, want in expected.items():
        want = want.float().cpu()
        off = got[name].float().cpu() - want
        errors.append(float(off.square().mean().sqrt() / want.square().mean().sqrt()))
    return float(torch.tensor(errors).max())


def stage_seconds(
    backend: Backend, stage: str, layer: int, state: State, device: torch.device, warmup: int, rounds: int
) -> tuple[str, list[float]]:
    """The clock's name, and the seconds of every round."""
    before = l2_flush(device)

    def once() -> float:
        if isinstance(backend, StageTimer):
            return sum(backend.time_stage(stage, layer, state, before))
        before()
        took = Clock(device)
        backend.run_stage(stage, layer, state)
        return took()

    seconds = [once() for _ in range(warmup + rounds)][warmup:]
    return "kernel" if isinstance(backend, StageTimer) else "call", seconds


def l2_flush(device: torch.device) -> Callable[[], Any]:
    """Overwrites what the L2 holds, on the current stream; nothing on a CPU."""
    if device.type != "cuda":
        return lambda: None
    buffer = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    return buffer.zero_
