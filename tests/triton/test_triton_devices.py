"""GPUs without a row in the table that the Triton backend takes, and those it refuses: torch is faked."""

from types import SimpleNamespace

import pytest
import torch

from kog_triton.backends import BackendOptions
from kog_triton.backends.device import gpu_of
from kog_triton.backends.nvidia_driver import arch_of
from kog_triton.backends.triton import TritonBackend
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.errors import DeviceError, ModelError
from kog_triton.model.shapes import named_shape
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import Seen
from kog_triton.schedule.triton import lower_tiles
from tests.lib.ring_walker import spec_of

DEVICE = torch.device("cuda", 0)
# name, capability, multiprocessors; of a row where there is one
NEWER = {
    "NVIDIA A100-PCIE-40GB": ((8, 0), 108),
    "NVIDIA GeForce RTX 3060": ((8, 6), 28),
    "NVIDIA GeForce RTX 4060 Laptop GPU": ((8, 9), 24),
    "NVIDIA GeForce RTX 4090": ((8, 9), 128),
    "NVIDIA B200": ((10, 0), 148),
    "NVIDIA GeForce RTX 5090": ((12, 0), 170),
}
OLDER = {"Tesla T4": (7, 5), "Tesla V100-SXM2-16GB": (7, 0)}


@pytest.fixture
def pretend(monkeypatch):
    """Let torch see one GPU, of this name, capability and size."""

    def see(name, capability, multiprocessors=80):
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        properties = SimpleNamespace(multi_processor_count=multiprocessors)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
        seen = Seen(name, "nvidia", arch_of(*capability), multiprocessors, 99 * 1024, 24 * 10**9)
        monkeypatch.setattr("kog_triton.backends.device.read_gpu", lambda index: seen)

    return see


@pytest.mark.parametrize("name", NEWER)
def test_a_newer_gpu_has_a_block_on_nearly_each_multiprocessor(pretend, name):
    capability, multiprocessors = NEWER[name]
    pretend(name, capability, multiprocessors)
    assert TritonBackend.availability().ok
    gpu = gpu_of(DEVICE)
    assert (gpu.num_blocks, gpu.proven) == (multiprocessors, False)
    for shape in ("llama-3.2-1b", "qwen3-0.6b", "qwen2.5-coder-1.5b"):
        tiles = lower_tiles(build(named_shape(shape)), multiprocessors, 4096, "nvidia")
        assert 0.75 * multiprocessors <= tiles.num_blocks <= multiprocessors
        for tiling in tiles.stages:
            blocks = tiles.num_blocks if tiling.name == "lm_head" else tiles.group
            assert tiling.block_rows * blocks >= tiling.rows  # every row has a block
            if tiling.name in ("o_proj", "down_proj"):  # and every block rows of the residual stream
                assert tiling.block_rows * (blocks - 1) < tiling.rows


@pytest.mark.parametrize("blocks", [82, 108, 114, 132, 144])  # RTX 3090, A100, H100 PCIe and SXM, L40S nearly
@pytest.mark.parametrize("shape", ["llama-3.1-8b", "mistral-7b", "qwen2.5-7b", "qwen3-8b"])
def test_models_of_7b_and_8b_run_on_every_size_of_gpu(shape, blocks):
    """A block reads little more than its share, and the code of a stage has few tiles, if need be by a loop."""
    spec = named_shape(shape)
    tiles = lower_tiles(build(spec), blocks, 4096, "nvidia")
    assert 0.75 * blocks <= tiles.num_blocks <= blocks
    read = 0
    for tiling in tiles.stages:
        assert tiling.block_rows * tiles.num_blocks >= tiling.rows
        assert 2 * tiling.row_words >= tiling.cols
        read += 4 * tiling.words * (1 if tiling.name == "lm_head" else spec.num_layers)
        if tiling.name in ("o_proj", "down_proj"):
            assert tiling.block_rows * (tiles.num_blocks - 1) < tiling.rows
            written = tiling.loop_units + tiling.units % tiling.loop_units if tiling.loop_units else tiling.units
            assert written * tiling.k_tiles <= 32
    rows = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim + 3 * spec.intermediate_size
    layer = rows * spec.hidden_size + spec.num_heads * spec.head_dim * spec.hidden_size
    whole = 2 * (spec.num_layers * layer + spec.vocab_size * spec.hidden_size)
    assert whole / blocks <= read < 1.35 * whole / blocks


def test_fewer_blocks_than_asked_for_where_they_share_rows_in_larger_tiles():
    """Llama-3.1-8B on an A100: 108 blocks would own 38 rows, in tiles of two; 103 own 40, in tiles of eight."""
    tiles = lower_tiles(build(named_shape("llama-3.1-8b")), 108, 4096, "nvidia")
    down = tiles.stages[3]
    assert (tiles.num_blocks, down.units, down.tile_rows) == (103, 5, 8)
    assert down.k_tiles * down.units > 32 and down.loop_units == 2


@pytest.mark.parametrize(
    ("shape", "blocks", "said"),
    [
        ("llama-3.1-8b", 4, "no tiles for hidden_size 4096 over 4 blocks"),
        ("laneformer-2b", 4, "needs a block for each of 8 lanes"),
    ],
)
def test_too_few_blocks_are_refused_with_what_to_do(shape, blocks, said):
    with pytest.raises(ModelError, match=said) as told:
        lower_tiles(build(named_shape(shape)), blocks, 4096, "nvidia")
    assert "\n" not in str(told.value) and "more multiprocessors, or --backend reference" in str(told.value)


def test_a_gpu_with_a_row_has_the_blocks_that_it_says(pretend):
    pretend("NVIDIA H200", (9, 0), 132)
    gpu = gpu_of(DEVICE)
    assert (gpu.name, gpu.num_sms, gpu.num_blocks) == ("h200", 132, 128)


@pytest.mark.parametrize("name", OLDER)
def test_an_older_gpu_is_refused_by_its_name(pretend, name):
    pretend(name, OLDER[name])
    seen = TritonBackend.availability()
    assert not seen.ok and name in seen.reason and "sm_80 or newer" in seen.reason
    with pytest.raises(DeviceError, match=rf"{name} is sm_7\d, and it takes sm_80 or newer") as told:
        TritonBackend(RandomWeights(spec_of()), BackendOptions())
    assert "\n" not in str(told.value) and "--backend reference" in str(told.value)


@pytest.mark.parametrize(("arch", "taken"), [("gfx942:sramecc+:xnack-", True), ("gfx90a", True), ("gfx1100", False)])
def test_an_amd_gpu_is_asked_for_its_architecture_and_not_for_sm_80(pretend, monkeypatch, arch, taken):
    pretend("AMD Instinct MI300X", (9, 4), 304)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: pytest.fail())
    properties = SimpleNamespace(gcnArchName=arch)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    seen = TritonBackend.availability()
    assert seen.ok == taken
    assert taken or "is gfx1100, and it takes gfx90a, gfx942, gfx950" in seen.reason
