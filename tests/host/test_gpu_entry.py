"""Engines that share a GPU: who may launch, on which stream, and what closing gives back. The GPU is a fake."""

import ctypes
import math
import threading
import time
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from kog_triton.backends import launch_queue
from kog_triton.backends.gpu_entry import GpuEntry
from kog_triton.backends.launch_queue import KILLED_S, QUANTUM_S, LaunchQueue, kills_long_kernels, queue_of
from kog_triton.backends.watchdog import Stalled
from kog_triton.errors import DeviceError

GPU = torch.device("cuda", 5)


def await_line(queue, length):
    deadline = time.monotonic() + 20
    while len(queue._line) < length:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def waiter(queue, act):
    """A thread that does something when it is its queue."""

    def wait():
        with queue.first():
            act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


# ---- the line ----


def test_first_come_first_served():
    queue, took, threads = LaunchQueue(), [], []
    with queue.first():
        for number in range(5):
            threads.append(waiter(queue, partial(took.append, number)))
            await_line(queue, number + 2)
        assert took == []
    for thread in threads:
        thread.join(20)
    assert took == [0, 1, 2, 3, 4]


def test_a_launch_is_over_when_another_engine_waits_or_the_driver_would_kill_it():
    for queue, alone in ((LaunchQueue(), math.inf), (LaunchQueue(KILLED_S), KILLED_S)):
        with queue.first():
            assert not queue.over(min(alone, 1e9)) and queue.over(alone * 1.01) == (alone < math.inf)
            other = waiter(queue, list)
            await_line(queue, 2)
            assert not queue.over(QUANTUM_S) and queue.over(QUANTUM_S * 1.01)
        other.join(20)
    assert QUANTUM_S < KILLED_S < 2  # seconds that Windows waits for a kernel


def test_whoever_fails_leaves_the_line():
    queue = LaunchQueue()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), queue.first():
            raise ZeroDivisionError
    assert not queue._line


def test_nobody_waits_in_line_for_ever(monkeypatch):
    """The one who has it may wait for what this one does."""
    monkeypatch.setattr(launch_queue, "PATIENCE_S", 0.01)
    queue = LaunchQueue()
    with queue.first():
        with queue.first():
            assert len(queue._line) == 2
        assert len(queue._line) == 1
    assert not queue._line


@pytest.mark.parametrize("kills", [False, True])
def test_engines_of_one_gpu_share_a_line_and_those_of_a_cpu_have_their_own(monkeypatch, kills):
    monkeypatch.setattr(launch_queue, "_queues", {})
    monkeypatch.setattr(launch_queue, "kills_long_kernels", lambda index: kills and index == 5)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    queue = queue_of(GPU)
    assert queue_of(torch.device("cuda")) is queue_of(torch.device("cuda:5")) is queue
    other = queue_of(torch.device("cuda:4"))
    assert other is not queue and not other.over(1e9) and queue.over(1e9) == kills
    cpu = torch.device("cpu")
    assert queue_of(cpu) is not queue_of(cpu) and not queue_of(cpu).over(1e9)


class Driver:
    """libcuda with one attribute, of one device."""

    def __init__(self, says):
        self.says = says

    def cuDeviceGet(self, device, index):
        ctypes.cast(device, ctypes.POINTER(ctypes.c_int))[0] = 100 + index
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):
        assert (attribute, device.value) == (17, 103)
        ctypes.cast(value, ctypes.POINTER(ctypes.c_int))[0] = 1 if self.says else 0
        return 1 if self.says is None else 0


@pytest.mark.parametrize("says", [True, False, None])
def test_the_driver_is_asked_whether_it_kills_kernels(monkeypatch, says):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr("ctypes.CDLL", lambda name: Driver(says))
    assert kills_long_kernels(3) is bool(says)


def test_without_a_driver_nobody_kills_kernels(monkeypatch):
    def absent(name):
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", absent)
    assert kills_long_kernels(3) is False


# ---- a stream of its own, and what is given back ----


class Gpu:
    """torch.cuda's streams and memory, as far as an entry uses them; `log` is what was done."""

    def __init__(self, monkeypatch):
        self.log, self.current, self.made = [], "default", 0
        for name in ("Stream", "current_stream", "stream", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        clear = lambda: self.log.append("clear workspaces")  # noqa: E731
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", clear, raising=False)
        monkeypatch.setattr(launch_queue, "kills_long_kernels", lambda index: False)

    def Stream(self, device):
        self.made += 1
        return FakeStream(self, f"own {self.made}")

    def current_stream(self, device):
        assert device == GPU
        return self.current if isinstance(self.current, FakeStream) else FakeStream(self, "default")

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def empty_cache(self):
        self.log.append("empty cache")


class FakeStream:
    def __init__(self, gpu, name):
        self.gpu, self.name = gpu, name

    def wait_stream(self, other):
        self.gpu.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


@pytest.mark.parametrize("how", ["on_stream", "at_once", "serving"])
def test_what_an_entry_point_does_is_on_the_backends_own_stream(gpu, how):
    entry = GpuEntry(GPU)
    arguments = (lambda: None,) if how == "serving" else ()
    for _ in range(2):
        gpu.log.clear()
        with getattr(entry, how)(*arguments):
            assert gpu.current.name == "own 1"
            assert gpu.log == ["own 1 waits for default"]
            assert len(entry.queue._line) == (how == "at_once")
        assert gpu.log[1:] == ["default waits for own 1"]
    assert not entry.queue._line
    with getattr(GpuEntry(GPU), how)(*arguments):
        assert gpu.current.name == "own 3"  # another backend's is another; "own 2" is the first one's aside


def test_nobody_waits_for_what_failed(gpu):
    """The caller's stream would stand still behind a GPU that does not answer."""
    entry = GpuEntry(GPU)
    with pytest.raises(Stalled), entry.serving(lambda: None):
        raise Stalled("silent", lambda: True)
    assert gpu.log == ["own 1 waits for default"]
    with pytest.raises(DeviceError, match="the GPU fell silent"), entry.at_once():
        pass
    entry.close(lambda: gpu.log.append("freed"))
    assert "freed" not in gpu.log


def test_closing_gives_memory_back_and_the_last_one_cublas_workspaces(gpu):
    first, second = GpuEntry(GPU), GpuEntry(GPU)
    first.close(lambda: gpu.log.append("freed"))
    assert gpu.log == ["freed", "empty cache"]
    gpu.log.clear()
    second.close(lambda: gpu.log.append("freed"))
    assert gpu.log == ["freed", "clear workspaces", "empty cache"]


def test_a_cpu_has_no_streams(monkeypatch):
    entry = GpuEntry(torch.device("cpu"))
    with entry.at_once():
        pass
    freed = []
    entry.close(lambda: freed.append(True))
    assert freed
