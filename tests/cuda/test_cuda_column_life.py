"""The life of requests in token columns of the CUDA kernel, its own C++ on a CPU (cuda_walk.py).

They come, wait, are cancelled and end beside each other, go from the kernel of columns to that of one token and
back, and each leaves the bits that it leaves alone.
"""

import threading

import pytest
import torch

from kog_triton.backends.cuda import backend as cuda_backend
from kog_triton.backends.cuda import launcher
from kog_triton.backends.cuda.backend import CudaBackend
from kog_triton.backends.mailbox import Mailbox
from kog_triton.errors import DeviceError
from kog_triton.sampling import SamplingParams
from tests.lib.cuda_requests import (
    COUNT,
    PROMPTS,
    Server,
    alone,
    alone_by_prompt,
    assert_alone,
    assert_expired,
    assert_nan_ends_one_request,
    ended,
    error_of,
    interrupt,
    join,
    make,
    request,
    run,
    serve,
    timeless,
    without_a_block,
)
from tests.lib.cuda_walk import ColumnBackend, FiberBackend, layout_of
from tests.lib.ring_walker import f16_spec


@pytest.fixture(scope="module")
def spec():
    return f16_spec()


@pytest.fixture
def backend(spec):
    return make(ColumnBackend, spec, 3, counts=(2, 4))


@pytest.fixture(scope="module")
def expected(spec):
    return alone_by_prompt(spec, PROMPTS, 8)


def launches(backend):
    """Of the kernel of one token and of those of columns."""
    return backend.kernel.launches, {k.layout.columns: k.kernel.launches for k in backend.columns.kernels}


def test_requests_run_together_until_one_is_left(backend, expected):
    """Three, then two, then one: every launch has a kernel that fits, and all make a token a step."""
    counts = (3, 5, 8)
    mailbox = Mailbox()
    for slot, count in enumerate(counts):
        mailbox.post(request(slot, PROMPTS[slot], count))
    backend.generate(mailbox)
    steps = [mailbox.read(slot) for slot in range(3)]
    for slot, count in enumerate(counts):
        assert_alone(backend, slot, PROMPTS[slot], steps[slot], expected, count)
        assert steps[slot][-1].finish == "length"
    assert launches(backend) == (1, {4: 1, 2: 1})
    held = [len(PROMPTS[i]) + c - 1 for i, c in enumerate(counts)]
    assert [steps[slot][-1].held for slot in range(3)] == held


def test_a_request_joins_one_that_runs(backend, expected):
    steps = join(backend, request(1, PROMPTS[0], 40), request(0, PROMPTS[1]))
    assert_alone(backend, 0, PROMPTS[1], steps[0], expected, COUNT)
    assert_alone(backend, 1, PROMPTS[0], steps[1], expected)
    assert len(steps[1]) == 40 and launches(backend) == (2, {2: 1})


class LateBackend(FiberBackend):
    """A backend whose compiler waits for a word."""

    column_counts = (4,)

    def __init__(self, *arguments, compiled):
        self._compiled = compiled
        super().__init__(*arguments)

    def _compile(self, source, layout):
        assert source == "decode.cu" or self._compiled.wait(60)
        super()._compile(source, layout)


def test_requests_take_turns_while_their_kernel_is_compiled(spec, expected, backend):
    """`backend` has compiled it already: what is waited for is the word."""
    compiled = threading.Event()
    late = make(LateBackend, spec, compiled=compiled)
    server = Server(late, *(request(slot, PROMPTS[slot], 40) for slot in range(3)))
    server.read(0, 3)
    assert not late.columns.kernels  # three tokens came in turn
    compiled.set()
    steps = server.finish()
    for slot in range(3):
        assert_alone(late, slot, PROMPTS[slot], steps[slot], expected)
    assert late.kernel.launches >= 1 and launches(late)[1][4] >= 1


class FailingBackend(FiberBackend):
    """A backend whose compiler refuses kernels of columns."""

    column_counts = (4,)

    def _compile(self, source, layout):
        if source != "decode.cu":
            raise DeviceError("the compiler is out of room")
        super()._compile(source, layout)


def test_requests_take_turns_where_the_compiler_fails(spec, expected, caplog):
    backend = make(FailingBackend, spec)
    for _ in range(2):  # the second time it has failed before
        server = Server(backend, *(request(slot, PROMPTS[slot], 12) for slot in range(3)))
        steps = server.finish()
        for slot in range(3):
            assert_alone(backend, slot, PROMPTS[slot], steps[slot], expected)
    assert not backend.columns.kernels
    assert "no kernel of 4 columns, requests take turns: the compiler is out" in caplog.text


def test_what_was_compiled_ahead_is_loaded_as_it_is(spec, monkeypatch):
    """To render a layout again and to find its kernel would take the thread that launches 0.1 s."""
    compiled, layout = [], layout_of(spec)

    def compile_it(self, source, layout):
        compiled.append(source)
        return source.encode()

    monkeypatch.setattr(CudaBackend, "_compile", compile_it)
    monkeypatch.setattr(cuda_backend, "RankKernel", lambda cubin, *_: cubin)
    backend = object.__new__(CudaBackend)
    backend._ahead, backend.devices = {}, [torch.device("cpu")]
    backend._compile_ahead("columns.cu", layout)
    for source in ("columns.cu", "decode.cu", "columns.cu"):
        assert backend._load(source, "", layout) == source.encode()
    assert compiled == ["columns.cu", "decode.cu", "columns.cu"]  # of the last one nothing was kept


class UnloadableBackend(FiberBackend):
    """A backend whose kernel of four columns is compiled and finds no room on the GPU."""

    column_counts = (2, 4)
    error = DeviceError("the GPU is out of room")

    def _load(self, source, entry, layout):
        if layout.columns == 4:
            raise self.error
        return super()._load(source, entry, layout)


@pytest.mark.parametrize("kind", [DeviceError, torch.OutOfMemoryError])
def test_requests_take_turns_where_the_kernel_cannot_be_loaded(spec, expected, caplog, kind):
    """Those for which another kernel fits still share it."""
    backend = make(UnloadableBackend, spec)
    backend.error = kind("the GPU is out of room")
    for number in (3, 3, 2):  # the second time it has failed before
        backend.columns.ready(number)  # begins to compile
        backend.columns.settle()
        steps = run(backend, *(request(slot, PROMPTS[slot], 12) for slot in range(number)))
        for slot in range(number):
            assert_alone(backend, slot, PROMPTS[slot], steps[slot], expected)
    assert [kernel.layout.columns for kernel in backend.columns.kernels] == [2]
    told = "no kernel of 4 columns, requests take turns: the GPU is out of room"
    assert caplog.text.count(told) == 1


def test_one_that_may_say_nothing_ends_alone(spec, expected):
    """The other's token is chosen right behind: blocks that lag still read what the first one's trial left."""
    backend = make(ColumnBackend, spec, 2, 3, counts=(2,))
    nothing = SamplingParams(seed=3, top_p=0.9, allowed_token_ids=(7,), bad_words_token_ids=((7,),))
    other = request(1, PROMPTS[1], 3, SamplingParams(seed=4, top_p=0.9))
    backend.wait_ns = 1 << 17
    said = run(backend, other)[1]
    for seed in range(-3, -33, -7):
        (kernel,) = backend.columns.kernels or (backend.columns.take(2, backend.devices),)
        kernel.kernel.seed = seed
        steps = serve(backend, request(0, PROMPTS[0], 3, nothing), other)
        assert "no token is allowed" in str(steps[0][-1].error)
        assert timeless(steps[1]) == said


def test_a_cancel_ends_one_of_them(backend, expected, monkeypatch):
    requests = [request(slot, PROMPTS[slot], 12) for slot in range(3)]
    server = interrupt(backend, monkeypatch, lambda mailbox: mailbox.cancel(0), *requests)
    steps = server.finish()
    assert steps[0][-1].finish == "cancel" and len(steps[0]) < 12
    for slot in (1, 2):
        assert_alone(backend, slot, PROMPTS[slot], steps[slot], expected)
        assert len(steps[slot]) == 12


def test_a_yield_returns_at_a_step_and_all_resume(backend, expected, monkeypatch):
    requests = [request(slot, PROMPTS[slot], 12) for slot in range(3)]
    server = interrupt(backend, monkeypatch, lambda mailbox: mailbox.yield_now(), *requests)
    assert not any(ended(steps) for steps in server.finish().values())
    backend.forward_logits([1, 2, 3])  # leaves all slots alone
    server.mailbox.resume()
    server.start()
    steps = server.finish()
    for slot in range(3):
        assert_alone(backend, slot, PROMPTS[slot], steps[slot], expected)
        assert len(steps[slot]) == 12


def test_requests_that_end_in_the_same_step_all_end(backend, expected):
    stop = expected[PROMPTS[0]][0][4]
    got = run(backend, request(0, PROMPTS[0], 8, stop_token_ids=frozenset({stop})), request(1, PROMPTS[3], 5))
    assert [got[0][-1].finish, got[1][-1].finish] == ["stop", "length"]
    assert launches(backend) == (0, {2: 1})


def test_a_nan_is_an_error_of_its_request_alone(backend, expected):
    assert_nan_ends_one_request(backend, expected)


def test_more_requests_than_columns_all_progress(spec, expected, monkeypatch):
    monkeypatch.setattr(launcher, "MOST_SILENT", 4)
    backend = make(ColumnBackend, spec, 5, counts=(2,))
    steps = run(backend, *(request(i, PROMPTS[i], 8) for i in range(5)))
    for i in range(5):
        assert_alone(backend, i, PROMPTS[i], steps[i], expected)
    assert set(launches(backend)[1]) == {2}


def test_a_long_prompt_beside_an_answer(spec):
    """A column without logits beside one that has them, and steps in which none has."""
    requests = [request(0, range(3, 43), 3), request(1, range(9, 21), 30)]
    steps, cache = alone(spec, requests)
    backend = make(ColumnBackend, spec, 2, counts=(2,), seed=5)
    assert run(backend, *requests) == steps
    assert torch.equal(backend.memory.cache, cache)


def test_an_expired_wait_names_its_place_and_the_next_requests_run(backend, expected):
    requests = [request(slot, PROMPTS[slot], 8) for slot in range(2)]
    run(backend, *requests)  # loads the kernel
    (kernel,) = (k.kernel for k in backend.columns.kernels)
    places = r"attention_qkv, word \d+ of qkv", r"o_proj_input, word \d+ of tops"
    with without_a_block(backend, kernel):
        for steps in serve(backend, *requests).values():
            assert_expired(error_of(steps), *places)
    assert_alone(backend, 1, PROMPTS[1], run(backend, *requests)[1], expected)
