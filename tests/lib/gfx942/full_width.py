"""A model of full width and few layers, whose HIP kernel walks one token in the executor: what every stage issues and
has in flight. Its weights are zeros that take no memory; values do not matter here, instructions do."""

import re
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch

from kog_triton.backends.cuda import memory
from kog_triton.backends.cuda.layout.header import render
from kog_triton.model.shapes import named_shape
from kog_triton.model.spec import ModelSpec
from kog_triton.schedule.cuda import CudaLowering
from kog_triton.schedule.lowering import matrix_stages
from tests.lib.gfx942.code_object import CodeObject
from tests.lib.gfx942.executor import Memory
from tests.lib.gfx942.hip_kernel import KERNEL, HipWalk, compiled, layout_of
from tests.lib.gfx942.places import Chain, chains

LAYERS = 2  # of a model without lanes; else as many as its late sums take besides
CONTEXT = 4096
# Issued at a quarter of the rate, on CDNA3 as on CDNA2.
SLOW = ("V_EXP", "V_LOG", "V_RCP", "V_RSQ", "V_SQRT", "V_SIN", "V_COS")
# By what an instruction stands in, the first that is found; below them the stage is that of the template.
STAGES = {name: name for name in ("qkv_proj", "attention", "o_proj", "gate_up_proj", "down_proj")} | {
    "stage_attention": "attention",
    "join_attention_out": "o_proj",
    "join_mlp_out": "down_proj",
    "head_rows": "lm_head",
    "run_head": "choice",
    "find_place": "once a launch",
}
NEVER = 255
ONCE = ("lm_head", "choice", "between", "once a launch")  # all others once a layer


class NoWeights:
    """Zeros of every shape, of one value in memory."""

    def __init__(self, weights: ModelSpec) -> None:
        self.spec = weights

    def load(self, name: str) -> torch.Tensor:
        half = memory.HALF[self.spec.dtype]
        shape = self.spec.shapes[re.sub(r"\.\d+\.", ".{}.", name)]
        return torch.zeros((), dtype=half).expand(shape)


def arena(lo: CudaLowering, *_: object) -> torch.Tensor:
    return torch.zeros(lo.stream_ring_slots(0) * lo.num_blocks * lo.ring_slot_bytes, dtype=torch.uint8)


def stage_of(chain: Chain) -> str:
    for name in reversed(chain):
        short = name.partition("<")[0]
        if name in STAGES or short in STAGES:
            return STAGES.get(name) or STAGES[short]
    return "ahead" if any(name.startswith("take") for name in chain) else "between"


def awaits(chain: Chain) -> bool:
    return any(name.startswith("poll") for name in chain)


def looks_between(chain: Chain) -> int:
    """Which look for words with weights behind, from one on; 0 if it is none."""
    return sum(name.startswith("late_between") for name in chain)


def looks_again(chain: Chain) -> bool:
    """Whether it is of a later look than a wait's first, but for the weights behind."""
    if looks_between(chain):
        return looks_between(chain) > 1 and not any(name.startswith("take") for name in chain)
    return any(name.startswith("poll_until") and "Part<" in name for name in chain)


def most_on_way(passed: np.ndarray, stages: Sequence[str], waves: int) -> dict[str, int]:
    """By stage a block's loads on their way at one wait: each wave's own most there, added up, at the wait where most
    are, of the block with fewest."""
    waits = passed[passed[:, 4] <= passed[:, 3]]
    most = np.zeros((waits[:, 0].max() + 1, waves, len(stages)), int)
    np.maximum.at(most, tuple(waits[:, :3].T), waits[:, 3])
    return {s: int(most.sum(1)[:, [s == other for other in stages]].max(1).min()) for s in set(stages)}


def least_left(passed: np.ndarray, waves: int) -> int:
    """Loads that these waits leave a block: each wave's own least, added up, of the block with fewest."""
    least = np.full((passed[:, 0].max() + 1, waves), NEVER)
    np.minimum.at(least, tuple(passed[:, :2].T), passed[:, 4])
    return int((least % NEVER).sum(1)[np.unique(passed[:, 0])].min())


def idle(passed: np.ndarray, waves: int, latency: float, layers: int, of: int) -> float:
    """Of the time of a token of `of` layers, `layers` of which ran, what the memory has nothing to bring in. Only loads
    take time: each comes `latency` later, behind the one before, one of each wave in a unit of time."""
    sums = np.zeros(2)
    for block in range(passed[:, 0].max() + 1):
        own = passed[passed[:, 0] == block]
        rows = [iter(own[own[:, 1] == k, 2:].tolist()) for k in range(waves)]
        due: list[deque[float]] = [deque() for _ in rows]
        now, last, loads, marks, at = [0.0] * waves, 0.0, 0, [], 0
        while at >= 0:  # from barrier to barrier
            at, going = -1, set(range(waves))
            while going:
                k = min(going, key=now.__getitem__)
                here, before, behind = next(rows[k], (-1, 0, 1))
                while len(due[k]) < before:
                    last = max(now[k] + latency, last + 1 / waves)
                    due[k].append(last)
                if behind > before:
                    at, going = here, going - {k}
                    continue
                while len(due[k]) > behind:
                    now[k], loads = max(now[k], due[k].popleft()), loads + 1
            now = [max(now)] * waves
            marks.append((at, now[0], loads / waves))
        often = Counter(mark[0] for mark in marks)
        end = [at for at in often if often[at] == layers][-1]  # of a layer: nothing is on its way
        sums += marks[-1][1:]
        sums += (of - layers) / (layers - 1) * np.ptp([mark[1:] for mark in marks if mark[0] == end], 0)
    return float(1 - sums[1] / sums[0])


def narrowed(name: str) -> ModelSpec:
    """The model of that name with few layers."""
    whole = named_shape(name)
    layers = LAYERS + whole.delay
    cut = {field: getattr(whole, field)[:layers] for field in ("windows", "reduce_attention", "reduce_mlp")}
    return whole.replace(num_layers=layers, **cut)


def object_of(name: str) -> CodeObject:
    """What `use` runs."""
    return compiled(render(layout_of(narrowed(name), max_context=CONTEXT)))


def use(name: str, num_blocks: int, position: int, needed: float) -> dict[str, Any]:
    """What hip_budget.kept says of a model and depth: one token runs, at a position below CONTEXT, for minutes. needed:
    bytes that the memory brings in its latency."""
    whole, spec = named_shape(name), narrowed(name)
    layers = spec.num_layers
    with mock.patch.object(memory, "pack_arena", arena):
        one = HipWalk(spec, NoWeights(spec), num_blocks, CONTEXT)
    calm = Memory(adversarial=True, early=0.5, evict=0, hold=0, quantum=400, trace=True)
    one.conditions = {"memory": calm, "steps": 1 << 34}
    lo = one.layout.lowering
    blocks, waves = lo.num_blocks, one.layout.threads // 64
    assert num_blocks in (0, blocks), f"{name} takes {blocks} blocks"
    prompt = [1] * (position + 1)
    assert one.run(one.words(prompt, 1, cached=position), prompt) > 0
    assert one.last is not None
    passed, names, places = one.last.passed, one.kernel.mnemonics(), chains(one.kernel.code_object, KERNEL)
    in_stage = [stage_of(chain) for chain in places]
    slots: Counter[str] = Counter()
    for i, chain in enumerate(places):
        count = int(one.last.executed[i])
        if awaits(chain):
            count = 0 if looks_again(chain) else min(count, layers * blocks * waves)
        count *= 4 if names[i].startswith(SLOW) else 1
        slots[in_stage[i]] += count
        if any(name.startswith("walk_tiles") for name in chain):
            slots["walk"] += count
    assert slots["walk"], "no instruction that ran stands in walk_tiles"
    each = {s: round(n / (1 if s in ONCE else layers) / (4 * blocks)) for s, n in slots.items()}
    sizes = {s.name: round(lo.stage_bytes(s, 0, 0) / blocks) for s in matrix_stages(lo.schedule)}
    looks = passed[np.array([looks_between(chain) > 0 for chain in places])[passed[:, 2]]]
    looked = np.array(in_stage)[looks[:, 2]]
    most = most_on_way(passed, in_stage, waves)
    way = {s: [most[s]] for s in slots if s in sizes or s in looked}
    for s in {*looked}:
        way[s].append(least_left(looks[looked == s], waves))
    depth = {
        "position": position,
        "cache": round(spec.kv_bytes_read(position) / layers / blocks),
        "walk": each.pop("walk"),
        "attention": each["attention"],
        "layer": sum(n for s, n in each.items() if s not in ONCE),
        "idle": round(idle(passed, waves, needed / (blocks * waves * 1024), layers, whole.num_layers), 3),
        "way": way,
    }
    facts = one.kernel.code_object.kernels[KERNEL]
    return {
        "object": one.kernel.code_object.sha256,
        "blocks": blocks,
        "layers": layers,
        "of": whole.num_layers,
        "vgprs": facts[".vgpr_count"],
        "spilled": facts[".vgpr_spill_count"],
        "stages": {s: {"slots": each[s], "bytes": sizes.get(s, 0)} for s in way},
        "depths": [depth],
    }
