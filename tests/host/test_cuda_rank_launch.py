"""The host side of ranks without a GPU: which GPUs are taken, what is launched where, who is named when one is missing.

The GPUs are fakes that note what they are told.
"""

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kog_triton.backends import BackendOptions, launch_queue
from kog_triton.backends.cuda import driver, gpus, launcher, rank_kernel
from kog_triton.backends.cuda.backend import CudaBackend
from kog_triton.backends.cuda.layout.layout import lay_out
from kog_triton.backends.cuda.layout.names import STEPS
from kog_triton.backends.cuda.layout.protocol import RankPointers, Word
from kog_triton.backends.cuda.memory import plan_of
from kog_triton.backends.cuda.rank_kernel import RankKernel, RankLaunch
from kog_triton.backends.cuda.rank_memory import allocate_ranks
from kog_triton.backends.gpu_entry import GpuEntry
from kog_triton.backends.launch_queue import LaunchQueue, LaunchQueues, queue_of
from kog_triton.backends.memory_plan import WORKSPACE
from kog_triton.backends.serving import LateMask
from kog_triton.backends.token_words import Outcome
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.errors import DeviceError, RunError
from kog_triton.schedule.cuda import lower
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import GPUS
from tests.lib.ring_walker import f16_spec

TWO = f16_spec(vocab_size=100)
DEVICES = [torch.device("cuda", i) for i in range(2)]
CPUS = [torch.device("cpu")] * 2


# ---- one launch a GPU ----


class Stream:
    def __init__(self, log, device):
        self.log, self.device = log, device

    def record_event(self):
        self.log.append(f"record {self.device.index}")
        return f"of {self.device.index}"

    def wait_event(self, event):
        self.log.append(f"{self.device.index} waits for what is recorded {event}")


class End:
    def __init__(self, over=False):
        self.over, self.waited = over, False

    def query(self):
        return self.over

    def synchronize(self):
        self.waited = self.over = True


@pytest.fixture
def log(monkeypatch):
    """What two GPUs are told; a rank in `refused` cannot launch."""
    said, streams = [], {}

    class Kernel:
        def __init__(self, cubin, name, shared_bytes, device):
            assert said[-1] == f"on {device.index}"
            self.device = device
            said.append(f"load {name}")

        def launch(self, blocks, threads, argument):
            if argument == "refused":
                raise DeviceError("cuLaunchCooperativeKernel: CUDA error 720")
            said.append(f"launch {blocks} x {threads} on {self.device.index} with {argument}")
            return End()

        def close(self):
            said.append("close")

    @contextmanager
    def on(device):
        said.append(f"on {device.index}")
        yield

    monkeypatch.setattr(rank_kernel, "Kernel", Kernel)
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda d: streams.setdefault(d, Stream(said, d)))
    return said


def test_a_launch_is_one_a_gpu_behind_what_all_gpus_were_given(log):
    """No rank's kernel may write words that another's stream has yet to empty."""
    kernel = RankKernel(b"", "kog_decode", 0, DEVICES)
    assert log == ["on 0", "load kog_decode", "on 1", "load kog_decode"]
    log.clear()
    launch = kernel.launch(128, 544, ["a", "b"])
    recorded = {f"record {i}" for i in range(2)}
    assert set(log[:2]) == recorded and set(log[2:4]) == {
        "0 waits for what is recorded of 1",
        "1 waits for what is recorded of 0",
    }
    assert log[4:] == ["launch 128 x 544 on 0 with a", "launch 128 x 544 on 1 with b"]
    first, second = launch.ends
    for first.over, second.over in ((False, True), (True, False)):
        assert not launch.query()
    launch.synchronize()
    assert first.waited and second.waited and launch.query() and not launch.missing
    log.clear()
    kernel.close()
    assert log == ["close", "close"]


def test_a_kernel_is_unloaded_from_its_own_gpu(log):
    kernel = SimpleNamespace(_device=DEVICES[1], _module=7, _call=lambda *told: log.append(f"{told[0]} {told[1]}"))
    driver.Kernel.close(kernel)
    assert log == ["on 1", "cuModuleUnload 7"]


def test_on_one_gpu_a_launch_is_the_drivers_and_nothing_else(log):
    kernel = RankKernel(b"", "kog_decode", 0, DEVICES[:1])
    log.clear()
    assert isinstance(kernel.launch(1, 2, ["a"]), End)
    assert log == ["launch 1 x 2 on 0 with a"]
    with pytest.raises(DeviceError, match="720"):
        kernel.launch(1, 2, ["refused"])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_be_launched_is_told_by_the_launch_of_the_others(log, rank):
    kernel = RankKernel(b"", "kog_decode", 0, DEVICES)
    arguments = ["a", "b"]
    arguments[rank] = "refused"
    launch = kernel.launch(1, 2, arguments)
    assert len(launch.ends) == 1
    assert launch.missing == {rank: "cuLaunchCooperativeKernel: CUDA error 720"}


def test_streams_of_all_gpus_are_the_backends_and_the_first_gpu_is_current(monkeypatch):
    said, current = [], {d: f"callers {d.index}" for d in DEVICES}
    made = {d: [] for d in DEVICES}

    class Own:
        def __init__(self, device):
            self.device = device
            made[device].append(self)

        def wait_stream(self, other):
            said.append(f"own {self.device.index} waits for {other.name}")

    class Callers:
        def __init__(self, device):
            self.name, self.device = f"callers {device.index}", device

        def wait_stream(self, other):
            said.append(f"{self.name} waits for own {other.device.index}")

    @contextmanager
    def stream(own):
        before, current[own.device] = current[own.device], own
        said.append(f"current {own.device.index}")
        yield
        current[own.device] = before

    monkeypatch.setattr(launch_queue, "kills_long_kernels", lambda index: False)
    monkeypatch.setattr(torch.cuda, "Stream", Own)
    monkeypatch.setattr(torch.cuda, "current_stream", Callers)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    entry = GpuEntry(*DEVICES)
    with entry.on_stream():
        own = [current[d] for d in DEVICES]
        assert all(stream in made[d] for stream, d in zip(own, DEVICES, strict=True))
        assert said[-1] == "current 0"
        before = len(said)
        with entry.aside():
            assert not {current[d] for d in DEVICES} & set(own)
            assert said[before:] == ["current 1", "current 0"]  # and no stream waits
        assert [current[d] for d in DEVICES] == own and len(said) == before + 2
    assert said[-2:] == ["callers 0 waits for own 0", "callers 1 waits for own 1"]
    assert {"own 0 waits for callers 0", "own 1 waits for callers 1"} <= set(said[:4])


def test_an_engine_on_two_gpus_stands_in_both_lines(monkeypatch):
    monkeypatch.setattr(launch_queue, "_queues", {})
    monkeypatch.setattr(launch_queue, "kills_long_kernels", lambda index: index == 1)
    both = queue_of(*DEVICES)
    zero, one = (queue_of(d) for d in DEVICES)
    assert isinstance(both, LaunchQueues) and isinstance(zero, LaunchQueue)
    with both.first():
        assert (len(zero._line), len(one._line)) == (1, 1)
    assert not zero._line and not one._line
    assert not zero.over(1e9) and one.over(1e9) and both.over(1e9) and not both.over(0.5)


# ---- reports ----


@pytest.fixture(scope="module")
def layout():
    return lay_out(lower(build(TWO, 2), GPUS["h200"], 2), 64)


@pytest.fixture
def ranks(layout):
    """Memory of two ranks behind a launch that went well: a token each, ended by its length."""
    ranks = allocate_ranks(layout, RandomWeights(TWO), 1, CPUS)
    for memory in ranks.each:
        memory.mailbox[Word.OUTCOME], memory.mailbox[Word.STEPS] = Outcome.LENGTH, 7
    return ranks


def expire(ranks, rank, step="attention_out", reported=1):
    """A wait of this rank's expired, and every other rank was told."""
    for other, memory in enumerate(ranks.each):
        memory.mailbox[Word.OUTCOME] = Outcome.FAILED
        if other != rank:
            memory.error[8] = 1
    note = [1, 3, STEPS.index(step), 2, 5, 0, 1, reported]
    ranks.each[rank].error[:8] = torch.tensor(note, dtype=torch.int32)


def said(ranks, layout, missing=None):
    with pytest.raises(RunError) as error:
        launcher.check_launch(ranks, layout, RankLaunch([], missing or {}))
    return str(error.value)


def test_a_launch_that_went_well_says_so(ranks, layout):
    assert launcher.check_launch(ranks, layout, RankLaunch([])) == (Outcome.LENGTH, 0)


def test_a_wait_that_expired_names_rank_block_layer_and_word(ranks, layout):
    expire(ranks, 1)
    place = layout.place_of("attention_out", 5)
    assert said(ranks, layout) == (
        f"a wait of the kernel expired: rank 1, block 3, layer 2, {place}, seen 0, wanted 1, after 7 steps"
    )


def test_of_two_reports_the_one_with_a_place_is_told(ranks, layout):
    expire(ranks, 0, reported=0)
    assert "rank 0, block 3, for a word that came while it gave up" in said(ranks, layout)
    expire(ranks, 1)
    assert "rank 1, block 3, layer 2" in said(ranks, layout)


def test_a_mask_is_the_cause_of_what_other_ranks_waited_for(ranks, layout):
    expire(ranks, 0)
    expire(ranks, 1, "mask")
    with pytest.raises(LateMask, match="rank 1, block 3"):
        launcher.check_launch(ranks, layout, RankLaunch([]))


@pytest.mark.parametrize(
    ("outcome", "missing", "end"),
    [
        (Outcome.RUNNING, {}, "; the kernel of rank 0 told nothing after 0 steps"),
        (Outcome.RUNNING, {0: "no room"}, "; the kernel of rank 0 was not launched: no room"),
        (Outcome.YIELD, {}, "; rank 0 left after 4 steps"),
        (Outcome.FAILED, {}, "after 7 steps"),
    ],
)
def test_a_rank_that_others_waited_for_is_told(ranks, layout, outcome, missing, end):
    expire(ranks, 1)
    first = ranks.first.mailbox
    first[Word.OUTCOME], first[Word.STEPS] = outcome, 4 if outcome is Outcome.YIELD else 0
    assert said(ranks, layout, missing).endswith(end)


@pytest.mark.parametrize("outcome", [Outcome.RUNNING, Outcome.FAILED, Outcome.STOP])
def test_ranks_that_end_unlike_each_other_are_an_error(ranks, layout, outcome):
    ranks.each[1].mailbox[Word.OUTCOME] = outcome
    assert "ended without an outcome" in said(ranks, layout)


def test_what_is_taken_back_leaves_all_ranks_at_the_first_ones_token(ranks):
    for rank, memory in enumerate(ranks.each):
        memory.states[0] = torch.tensor([5 + rank, 60 + rank])
    ranks.take_back(0, [1, 2, 3, 4], [9, 60])
    for memory in ranks.each:
        assert memory.states[0].tolist() == [5, 60]
        assert memory.counts[0].nonzero().flatten().tolist() == [1, 2, 3, 4, 9]


def test_ranks_know_where_all_ranks_words_lie_and_share_what_the_host_writes(ranks):
    apart = ranks.apart()
    for some in (ranks, apart):
        arguments = some.arguments([0], 5, 6)
        for rank, argument in enumerate(arguments):
            assert isinstance(argument, RankPointers) and argument.rank == rank
            assert [*argument.peers[:2]] == [m.words.data_ptr() for m in some.each]
            assert [*argument.errors[:2]] == [m.error.data_ptr() for m in some.each]
            assert argument.masks == some.first.masks.data_ptr()
            assert argument.logprobs == some.first.logprobs.data_ptr()
        assert arguments[0].cache != arguments[1].cache
        assert arguments[0].mailbox != arguments[1].mailbox
    assert apart.first.cache.data_ptr() != ranks.first.cache.data_ptr()


# ---- which GPUs ----


@pytest.fixture
def machine(monkeypatch):
    """Two H200s; `reached` is who may read whom."""
    found = SimpleNamespace(reached=[], opened=[], kinds=[GPUS["h200"]] * 2)

    def zeros(*shape, device):
        found.opened.append(device.index)

    for name, value in (
        ("is_available", lambda: True),
        ("device_count", lambda: 2),
        ("current_device", lambda: 1),
        ("get_device_name", lambda i: "NVIDIA H200"),
        ("can_device_access_peer", lambda a, b: True),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(gpus, "gpu_of", lambda device: found.kinds[device.index])
    monkeypatch.setattr(gpus, "reach", lambda a, b: found.reached.append((a, b)))
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    return found


def test_one_gpu_is_the_current_one_and_several_are_the_first_which_reach_each_other(machine):
    assert gpus.open_gpus(1) == ([DEVICES[1]], GPUS["h200"]) and not machine.reached
    assert gpus.open_gpus(2) == (DEVICES, GPUS["h200"])
    assert machine.opened == [1, 0, 1] and machine.reached == [(0, 1), (1, 0)]


def test_gpus_of_unequal_parts_are_refused(machine):
    """Of one name, as where MPS or MIG gives a part of one."""
    machine.kinds[1] = replace(GPUS["h200"], num_sms=60)
    with pytest.raises(DeviceError) as error:
        gpus.open_gpus(2)
    assert str(error.value) == ("GPU 1 is h200 with 60 SMs and GPU 0 h200 with 132: ranks must be alike")


def test_a_gpu_that_another_process_keeps_to_itself_is_named(machine, monkeypatch):
    def busy(*shape, device):
        if device.index == 1:
            raise RuntimeError("CUDA error: devices are busy or unavailable\nmore lines")

    monkeypatch.setattr(torch, "zeros", busy)
    for count in (1, 2):
        with pytest.raises(DeviceError) as error:
            gpus.open_gpus(count)
        assert str(error.value) == (
            "GPU 1 cannot be opened, another process may keep it to itself (nvidia-smi shows whose): CUDA error: "
            "devices are busy or unavailable"
        )


@pytest.mark.parametrize("what", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_memory_that_no_other_gpu_reaches_is_refused(machine, monkeypatch, what):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", f"max_split_size_mb:64,{what}")
    gpus.open_gpus(1)
    with pytest.raises(DeviceError, match=f"^PYTORCH_CUDA_ALLOC_CONF asks for {what.lower()}"):
        gpus.open_gpus(2)


def test_too_little_memory_on_one_of_the_gpus_names_it(layout, monkeypatch):
    plan = plan_of(layout, 1, 1)
    free = {0: plan.total, 1: plan.total - 1}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda d: (free[d.index], 1 << 40))
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda d: 0)
    backend = SimpleNamespace(
        layout=layout,
        devices=DEVICES,
        device=DEVICES[0],
        num_devices=2,
        options=BackendOptions(num_slots=1),
        _passes_short=lambda lowering: False,
        _moves_outputs=lambda lowering: False,
    )
    with pytest.raises(DeviceError, match=r"^GPU 1: 0\.0 GiB of weights and 64 positions a slot"):
        CudaBackend._check_memory(backend)
    free[1] += 1
    CudaBackend._check_memory(backend)


def test_the_plan_of_a_rank_is_what_is_allocated_there(layout, ranks):
    for rank, memory in enumerate(ranks.each):
        plan = plan_of(layout, 1, rank)
        assert plan.weights == memory.weights.nbytes + memory.embed.nbytes
        assert plan.total - plan.weights - WORKSPACE == memory.cache.nbytes
