"""Which block a workgroup becomes by the XCD that it lies on: the kernel's own code in the executor."""

from collections import Counter

import numpy as np
import pytest
import torch

from kog_triton.backends.cuda import memory
from kog_triton.backends.cuda.launcher import UNLIMITED
from kog_triton.backends.cuda.layout.header import render
from kog_triton.backends.cuda.layout.protocol import TENSORS
from kog_triton.backends.hip.layout import lay_out_hip
from kog_triton.model.shapes import named_shape
from kog_triton.plan import placement
from kog_triton.schedule.hip import lower_hip, place_blocks
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import GPUS
from tests.lib.gfx942 import clang
from tests.lib.gfx942.executor import PLAIN, WEAK, Kernel
from tests.lib.gfx942.hip_kernel import INCLUDES, UNLIMITED_NS, launch, layout_of
from tests.lib.lowering_cases import ArrayWeights
from tests.lib.triton_cases import plain

MI300X = GPUS["mi300x"]
# Says which block each workgroup is.
KERNEL = """
#include <kog/place.h>
#include <kog/ring.h>
KOG_KERNEL void kog_places(const kog::Pointers p) {
  kog::begin_place();
  kog::Block b(p);
  kog::init_block(b);
  kog::sync_consumers();
  kog::find_place(b);
  if (b.thread == 0) p.logits[kog::workgroup_index()] = static_cast<float>(b.block);
}
"""
LIE = {
    "in turn": lambda group: group % 8,
    "side by side": lambda group: group // 2,
    "one XCD": lambda group: 3,
    "numbers with holes": lambda group: (0, 2, 7)[group % 3],
    "one has most": lambda group: 5 if group < 11 else group % 3,
}


@pytest.fixture(scope="module")
def places():
    """The blocks of 16 workgroups that lie so."""
    spec = plain(1, hidden_size=128)
    layout = layout_of(spec, 16)
    assert layout.lowering.num_blocks == 16
    kernel = Kernel(clang.text_object(render(layout) + KERNEL, INCLUDES), "kog_places")
    m = memory.allocate(layout, ArrayWeights(spec), 1, torch.device("cpu"))

    def run(lie, seed, how):
        for tensor in (m.words, m.error):
            tensor.zero_()
        others = {"logits": torch.full((16,), torch.nan)}
        pointers = m.pointers([0], UNLIMITED_NS, UNLIMITED, **others)
        tensors = {name: getattr(m, name) for name in TENSORS} | others
        launch(kernel, layout, pointers, tensors, how, seed, lie)
        return others["logits"].int().tolist()

    return run


@pytest.mark.parametrize("memory", [PLAIN, WEAK], ids=["plain", "adversarial"])
@pytest.mark.parametrize("lie", LIE.values(), ids=LIE)
def test_every_block_is_there_once_and_neighbours_share_an_xcd(places, lie, memory):
    blocks = places(lie, 7, memory)
    assert sorted(blocks) == [*range(16)]
    xcds = [lie(group) for group in range(16)]
    counts = Counter(xcds)
    dies = sorted(counts)
    runs = np.linspace(0, 16, len(dies) + 1).astype(int)
    for n, die in enumerate(dies):
        own = sorted(block for block, xcd in zip(blocks, xcds, strict=True) if xcd == die)
        room = range(runs[n], runs[n + 1])
        assert own[: len(room)] == [*room][: len(own)] or (len(own) > len(room) and {*room} <= {*own})


def test_the_rest_of_a_full_xcd_fills_what_others_left(places):
    """Eleven on XCD 5, the others on 0 to 2: four runs of four, the last of them XCD 5's."""
    blocks = places(LIE["one has most"], 3, PLAIN)
    assert blocks[:11] == [12, 13, 14, 15, *blocks[4:11]]
    assert sorted(blocks[4:11]) == sorted({*range(12)} - {*blocks[11:]})


# ---- the plan ----


def test_a_lane_lives_on_an_xcd():
    dies = place_blocks(lower_hip(build(named_shape("laneformer-2b")), MI300X))
    assert [(die.lanes, len(die.blocks), die.base) for die in dies] == [(range(i, i + 1), 32, i // 2) for i in range(8)]


def test_a_kv_head_of_a_plain_model_lives_on_an_xcd():
    lowering = lower_hip(build(named_shape("llama-3.2-1b")), MI300X)
    assert [die.kv_heads for die in place_blocks(lowering)] == [range(i, i + 1) for i in range(8)]
    told = placement(lowering).splitlines()
    assert told[1] == "  XCD 0 (IOD 0): blocks 0 to 31, KV head 0"
    assert told[8] == "  XCD 7 (IOD 3): blocks 224 to 255, KV head 7"


@pytest.mark.parametrize(
    ("name", "gpus", "said"),
    [
        ("llama-3.2-1b", 1, "9,216 words, 9.4 MB a GPU;"),
        ("llama-3.1-8b", 1, "17,408 words, 17.8 MB a GPU;"),
        ("llama-3.2-1b", 4, "17,664 words, 18.1 MB a GPU."),  # what modules give comes from all ranks
        ("laneformer-2b", 1, "7,104 words, 7.3 MB a GPU, and where other lanes' outputs join 1,344 more."),
        ("laneformer-2b", 8, "7,104 words, 7.3 MB a GPU, and where other lanes' outputs join 168 more."),
    ],
)
def test_what_blocks_gather_is_what_the_layout_has_room_for(name, gpus, said):
    lowering = lower_hip(build(named_shape(name), gpus), MI300X)
    regions = lay_out_hip(lowering, 64).regions
    outputs = gpus * regions["mlp_out_now"].stride or regions["mlp_out"].stride
    words = regions["attention"].stride + regions["mlp"].stride + 2 * outputs
    assert said.startswith(f"{words:,} words") and f"gathers {said}" in placement(lowering).splitlines()[-1]


def test_what_is_dealt_out_is_each_block_once():
    for name in ("qwen3-0.6b", "llama-3.1-8b", "laneformer-2b"):
        lowering = lower_hip(build(named_shape(name)), MI300X)
        blocks = [block for die in place_blocks(lowering) for block in die.blocks]
        assert blocks == [*range(lowering.num_blocks)]
