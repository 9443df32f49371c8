"""GPUs without a row in the table that the Triton backend takes, and those it refuses: torch is faked."""

from types import SimpleNamespace

import pytest
import torch
from ring_walker import spec_of

from kog_triton.backends import BackendOptions
from kog_triton.backends.triton import TritonBackend
from kog_triton.backends.triton.backend import _blocks, _known_gpu
from kog_triton.errors import DeviceError, ModelError
from kog_triton.model.shapes import named_shape
from kog_triton.random_weights import RandomWeights
from kog_triton.schedule.schedule import build
from kog_triton.schedule.tiles import lower_tiles
from kog_triton.schedule.topology import GPUS

DEVICE = torch.device("cuda")
# name, capability, multiprocessors; none has a row
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

    return see


@pytest.mark.parametrize("name", NEWER)
def test_a_gpu_without_a_row_has_a_block_on_nearly_each_multiprocessor(pretend, name):
    capability, multiprocessors = NEWER[name]
    pretend(name, capability, multiprocessors)
    assert TritonBackend.availability().ok
    assert _known_gpu(DEVICE) is None and _blocks(None, DEVICE) == multiprocessors
    for shape in ("llama-3.2-1b", "qwen3-0.6b", "qwen2.5-coder-1.5b"):
        tiles = lower_tiles(build(named_shape(shape)), multiprocessors, 4096, "nvidia", 1)
        assert 0.75 * multiprocessors <= tiles.num_blocks <= multiprocessors
        for cut in tiles.stages:
            blocks = tiles.num_blocks if cut.name == "lm_head" else tiles.group
            assert cut.block_rows * blocks >= cut.rows  # every row has a block
            if cut.name in ("o_proj", "down_proj"):  # and every block rows of the residual stream
                assert cut.block_rows * (blocks - 1) < cut.rows


def test_fewer_blocks_than_asked_for_where_rows_divide_badly():
    """Rows of 8B over 108 blocks would take more tiles than are laid out; over 103 they do not."""
    assert lower_tiles(build(named_shape("qwen3-8b")), 108, 4096, "nvidia", 1).num_blocks == 103
    with pytest.raises(ModelError, match="no tiling for hidden_size 4096 over 8 blocks or fewer"):
        lower_tiles(build(named_shape("qwen3-8b")), 8, 4096, "nvidia", 1)


def test_a_gpu_with_a_row_has_the_blocks_that_it_says(pretend):
    pretend("NVIDIA H200", (9, 0), 132)
    gpu = _known_gpu(DEVICE)
    assert gpu is GPUS["h200"] and _blocks(gpu, DEVICE) == 128


@pytest.mark.parametrize("name", OLDER)
def test_an_older_gpu_is_refused_by_its_name(pretend, name):
    pretend(name, OLDER[name])
    seen = TritonBackend.availability()
    assert not seen.ok and name in seen.reason and "sm_80 or newer" in seen.reason
    with pytest.raises(
        DeviceError, match=rf"{name} is sm_7\d, and it takes sm_80 or newer"
    ) as told:
        TritonBackend(RandomWeights(spec_of()), BackendOptions())
    assert "\n" not in str(told.value) and "--backend reference" in str(told.value)


def test_an_amd_gpu_is_not_asked_for_sm_80(pretend, monkeypatch):
    pretend("AMD Instinct MI300X", (9, 4), 304)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: pytest.fail())
    assert TritonBackend.availability().ok
