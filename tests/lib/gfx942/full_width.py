"""A model of full width and few layers, whose HIP kernel walks one token in the executor: what every stage issues and
has in flight. Its weights are zeros that take no memory; values do not matter here, instructions do."""

import math
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from unittest import mock

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
SLOW = (  # issued at a quarter of the rate, on CDNA3 as on CDNA2
    "V_EXP", "V_LOG", "V_RCP", "V_RSQ", "V_SQRT", "V_SIN", "V_COS",
)  # fmt: skip
# By what an instruction stands in, the first that is found; below them the stage is that of the template.
STAGES = {
    "qkv_proj": "qkv_proj",
    "attention": "attention",
    "stage_attention": "attention",
    "o_proj": "o_proj",
    "join_attention_out": "o_proj",
    "gate_up_proj": "gate_up_proj",
    "down_proj": "down_proj",
    "join_mlp_out": "down_proj",
    "head_rows": "lm_head",
    "run_head": "choice",
    "find_place": "once a launch",
}
ONCE = ("lm_head", "choice", "between")  # a token; all others once a layer


@dataclass(frozen=True)
class StageUse:
    """Of one run of a stage, a SIMD's share.

    slots   instructions issued, those of a quarter's rate as four; a wait's first look is in, all others are not
    flying  bytes of weights that a block has on their way at most as it waits for anything in this stage
    left    the least that a look for words leaves on its way when it is answered, of those that weights are asked for
            behind; None if there are none
    """

    slots: float
    flying: int
    left: float | None


@dataclass(frozen=True)
class Use:
    spec: ModelSpec  # of all its layers
    layers: int  # that ran
    lowering: CudaLowering
    stages: dict[str, StageUse]
    walk: float  # slots of a SIMD in a layer's walk of keys and values
    cache: float  # bytes of keys and values in a layer, of an average block
    object: str  # SHA-256
    vgprs: int
    spilled: int

    def bytes_of(self, stage: str) -> float:
        """Weights of one run, of an average block; 0 where there are none."""
        lo = self.lowering
        of = {s.name: s for s in matrix_stages(lo.schedule)}.get(stage)
        return lo.stage_bytes(of, 0, 0) / lo.num_blocks if of else 0


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


def narrowed(name: str) -> ModelSpec:
    """The model of that name with few layers."""
    whole = named_shape(name)
    layers = LAYERS + whole.delay
    cut = {field: getattr(whole, field)[:layers] for field in ("windows", "reduce_attention", "reduce_mlp")}
    return whole.replace(num_layers=layers, **cut)


def object_of(name: str) -> CodeObject:
    """What `use` runs."""
    return compiled(render(layout_of(narrowed(name), max_context=CONTEXT)))


@cache
def use(name: str, num_blocks: int = 0, position: int = 0) -> Use:
    """Of a model by its name; it runs one token, at a position below CONTEXT, and takes minutes."""
    spec = narrowed(name)
    layers = spec.num_layers
    with mock.patch.object(memory, "pack_arena", arena):
        one = HipWalk(spec, NoWeights(spec), num_blocks, CONTEXT)
    one.conditions = {"memory": Memory(adversarial=True, early=0.5, evict=0, hold=0, quantum=400), "steps": 1 << 34}
    lo = one.layout.lowering
    assert num_blocks in (0, lo.num_blocks), f"{name} takes {lo.num_blocks} blocks"
    prompt = [1] * (position + 1)
    assert one.run(one.words(prompt, 1, cached=position), prompt) > 0
    assert one.last is not None
    waves = lo.num_blocks * one.layout.threads // 64
    names, places = one.kernel.mnemonics(), chains(one.kernel.code_object, KERNEL)
    slots: Counter[str] = Counter()
    flying: Counter[str] = Counter()
    left: dict[str, float] = {}
    walk = 0
    for i, chain in enumerate(places):
        stage, count = stage_of(chain), int(one.last.executed[i])
        waits, behind = int(one.last.weights[i, 0]), int(one.last.weights[i, 2])
        if waits and looks_between(chain):
            left[stage] = min(left.get(stage, math.inf), behind / waits)
        if awaits(chain):
            count = 0 if looks_again(chain) else min(count, layers * waves)
        count *= 4 if names[i].startswith(SLOW) else 1
        slots[stage] += count
        if any(name.startswith("walk_tiles") for name in chain):
            walk += count
        flying[stage] = max(flying[stage], int(one.last.in_flight[i, 2]))
    assert walk, "no instruction that ran stands in walk_tiles"
    facts = one.kernel.code_object.kernels[KERNEL]
    runs = {stage: 1 if stage in (*ONCE, "once a launch") else layers for stage in slots}
    a_block = 1024 * one.layout.threads // 64
    stages = {
        stage: StageUse(
            slots[stage] / runs[stage] / (4 * lo.num_blocks),
            flying[stage] * a_block,
            left[stage] * a_block if stage in left else None,
        )
        for stage in slots
    }
    object_hash = one.kernel.code_object.sha256
    return Use(
        named_shape(name),
        layers,
        lo,
        stages,
        walk / layers / (4 * lo.num_blocks),
        spec.kv_bytes_read(position) / layers / lo.num_blocks,
        object_hash,
        facts[".vgpr_count"],
        facts[".vgpr_spill_count"],
    )
