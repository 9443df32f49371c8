"""The HIP backend's self-test of a GPU, in the executor: it passes in a memory as weak as AMD's, tells where blocks
lie, and fails where the kernel could not be trusted."""

import threading
from dataclasses import replace

import pytest
import torch

from kog_triton.backends.hip import selftest, toolchain
from kog_triton.backends.hip.backend import HipBackend
from kog_triton.errors import DeviceError
from kog_triton.model.shapes import named_shape
from kog_triton.model.small import small_model
from kog_triton.schedule.topology import GPUS
from kog_triton.stage_check import check_stages
from tests.lib.compiled import FOLDER
from tests.lib.cuda_planting import plant
from tests.lib.fake_hip import FakeHip
from tests.lib.gfx942.executor import PLAIN, WEAK
from tests.lib.gfx942.hip_kernel import INCLUDES

CPU = torch.device("cpu")
GPU = replace(GPUS["mi300x"], num_blocks=8)
# What is taken from the seam (include/kog/ptx.h) -> what the self-test then says.
PLANTED = {
    ("store_scoped<kAgent>(p, v)", "*in_memory(p) = v"): "blocks read old rows of each other",
    ('asm volatile("buffer_inv sc1"', 'asm volatile(""'): "blocks read old rows",
    (
        "constexpr int kWordScope = kAgent",
        "constexpr int kWordScope = __HIP_MEMORY_SCOPE_WORKGROUP",
    ): "words of some blocks did not reach others",
}


@pytest.fixture
def check(monkeypatch):
    """Run the self-test on a GPU of these conditions."""

    def run(gpu=GPU, rounds=5, wait_ns=selftest.WAIT_NS, gate=None, **conditions):
        fake = run.fake = FakeHip(**conditions)
        if gate:
            fake.meanwhile = gate.wait
        fake.least = {}  # the self-test is what finds a narrow scope
        fake.install(monkeypatch)
        monkeypatch.setenv("XDG_CACHE_HOME", str(FOLDER / "hip"))
        monkeypatch.setattr(selftest, "ROUNDS", rounds)
        monkeypatch.setattr(selftest, "WAIT_NS", wait_ns)
        return selftest.check_gpu(CPU, gpu)

    return run


@pytest.mark.parametrize("memory", [PLAIN, WEAK], ids=["plain", "adversarial"])
def test_it_passes_and_tells_where_blocks_lie(check, memory):
    xcds = check(memory=memory, xcc=lambda group: group * 5 % 7)
    assert xcds == [group * 5 % 7 for group in range(8)]
    assert selftest.xcds_in_words(xcds) == (
        "8 blocks on 7 XCDs: 2 on 0, 1 on 1, 1 on 2, 1 on 3, 1 on 4, 1 on 5, 1 on 6"
    )


def test_words_that_cross_no_xcd_prove_nothing(check):
    with pytest.raises(DeviceError, match="on mi300x: all 8 blocks lie on XCD 3, and 304 CUs are of several"):
        check(replace(GPU, dies=1), memory=WEAK, xcc=lambda group: 3)  # which a GPU without a row has
    xcds = check(replace(GPU, num_sms=38), xcc=lambda group: 3)  # a partition in CPX mode
    assert selftest.xcds_in_words(xcds) == "8 blocks on XCD 3, and nothing was tried between XCDs"


@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: fault[0])
def test_what_the_kernel_relies_on_is_missed(check, monkeypatch, tmp_path, fault):
    text = (INCLUDES[0] / "kog/ptx.h").read_text()
    assert text.count(fault[0]) == 1
    (tmp_path / "kog").mkdir()
    (tmp_path / "kog/ptx.h").write_text(text.replace(*fault))
    monkeypatch.setattr(toolchain, "INCLUDES", (tmp_path, *INCLUDES))
    with pytest.raises(DeviceError, match=rf"self-test fails on mi300x: {PLANTED[fault]}.*--backend triton"):
        check(rounds=20, wait_ns=20_000_000, memory=WEAK)


def test_a_host_that_is_not_heard_is_said(check, monkeypatch):
    monkeypatch.setattr(selftest, "answer", lambda mailbox, ended, *_: _wait(ended))
    with pytest.raises(DeviceError, match="the kernel did not hear the host, or the host the kernel"):
        check(wait_ns=1_000_000)


def _wait(ended):
    while not ended():
        pass


def test_a_kernel_that_never_ends_is_said(check, monkeypatch):
    """It stays loaded, and so does what it may write."""
    gate, kept = threading.Event(), []
    monkeypatch.setattr(selftest, "DEADLINE_S", 0.2)
    monkeypatch.setattr(selftest, "_unended", kept)
    with pytest.raises(DeviceError) as told:
        check(wait_ns=1_000_000, gate=gate)
    assert str(told.value) == (
        "the hip backend's self-test has not ended in 0.2 s: the host waits for its kernel, and has heard of 0 of 5 "
        "rounds: choose --backend triton, and report this"
    )
    gate.set()
    check.fake._queue[-1].join()
    assert check.fake._modules and not check.fake.broken, check.fake.why
    ((tensors,),) = kept
    assert tensors["mailbox"][1] > 0


# ---- every stage's numbers ----


@pytest.fixture
def stages(check, monkeypatch):
    """How many stages of a small model agree with the reference."""
    check()
    monkeypatch.setattr(HipBackend, "_gpu_here", lambda: ("AMD Instinct", "gfx942"))
    monkeypatch.setattr(HipBackend, "_find_gpus", staticmethod(lambda count=1: [(CPU, GPU)]))
    return lambda spec: check_stages(HipBackend, small_model(spec, "fp16"), "an executor")


@pytest.mark.parametrize("name", ["llama-3.2-1b", pytest.param("laneformer-2b", marks=pytest.mark.slow)])
def test_every_stage_agrees_with_the_reference(stages, name):
    assert stages(named_shape(name)) >= 12


@pytest.mark.slow
def test_a_stage_that_is_wrong_is_named(stages, monkeypatch, tmp_path):
    include = plant(tmp_path, ("join.h", "kWindows[b.layer]", "0"))
    monkeypatch.setattr(toolchain, "INCLUDES", (INCLUDES[0], include))
    spec = named_shape("llama-3.2-1b").replace(windows=(16,) * 16)
    with pytest.raises(DeviceError, match="backend hip computes attention wrong on an executor"):
        stages(spec)


@pytest.mark.slow
def test_threads_that_part_ahead_of_a_cut_choose_wrong(stages, monkeypatch, tmp_path):
    """As they did until 2026-11-28: no stage was wrong. In plain memory, where a lane that is off gives 0."""
    adds = "if (b.in_warp == 0) {\n      u64 sum"
    stays = "rejoin();  // else"
    cut = ("cut.h", adds, "if (b.in_warp != 0) continue; {\n      u64 sum")
    include = plant(tmp_path, cut, ("cut.h", stays, "// else"))
    monkeypatch.setattr(toolchain, "INCLUDES", (INCLUDES[0], include))
    with pytest.raises(DeviceError, match=r"backend hip chooses token \d+ where \d+ is right"):
        stages(named_shape("llama-3.2-1b"))
