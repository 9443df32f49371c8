"""A first start's kernels that make tokens and no more: who is served by them, and until when."""

import threading
from dataclasses import replace

import pytest

from kog_triton.backends import BackendOptions
from kog_triton.backends.cuda import early, jit, kernel_cache
from kog_triton.backends.cuda.layout.header import render
from kog_triton.backends.request_words import WANTS_MORE, Flag
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.errors import DeviceError
from kog_triton.sampling import SamplingParams
from tests.lib.cuda_requests import PROMPTS, Server, request, run, timeless
from tests.lib.cuda_walk import FiberBackend, layout_of
from tests.lib.ring_walker import f16_spec

SPEC = f16_spec(num_layers=2)
MORE = {
    "cut": SamplingParams(temperature=1, top_p=0.9, seed=3),
    "edited": SamplingParams(temperature=0, repetition_penalty=1.5),
    "told": SamplingParams(temperature=0, logprobs=2),
}


class EarlyBackend(FiberBackend):
    """Whole kernels compile once the test says so; early ones at once, unless they are refused."""

    early_kernels = True

    def __init__(self, *arguments, refused="", **options):
        self.go_on, self.refused, self.asked = threading.Event(), refused, []
        super().__init__(*arguments, **options)

    def _compile(self, source, layout):
        self.asked.append((source, layout.tokens_only))
        if not layout.tokens_only:
            assert self.go_on.wait(60)
        if self.refused:
            raise DeviceError(self.refused)
        super()._compile(source, layout)


@pytest.fixture(autouse=True)
def first_start(monkeypatch):
    monkeypatch.setattr(early, "is_kept", lambda *_: False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(16))


def opened(prefill="kernel", kind=EarlyBackend, **options):
    told = BackendOptions(num_slots=2, prefill=prefill)
    return kind(RandomWeights(SPEC), told, 2, **options)


def launches(one):
    """Of a source's early kernel and of its whole one."""
    return [one._loaded[whole].launches if whole in one._loaded else 0 for whole in (False, True)]


@pytest.mark.parametrize("prefill", ["kernel", "library"])
def test_who_wants_tokens_alone_is_served_before_the_whole_kernel_is_there(prefill):
    asked = [request(0, PROMPTS[0]), request(0, PROMPTS[1], params=SamplingParams(seed=5))]
    expected = [timeless(run(opened(prefill, FiberBackend), one)[0]) for one in asked]
    backend = opened(prefill)
    assert [timeless(run(backend, one)[0]) for one in asked] == expected
    assert launches(backend.first.decode) == [2, 0]
    assert backend.first.heads is None or launches(backend.first.heads) == [2, 0]
    backend.go_on.set()
    backend.settle()
    assert [timeless(run(backend, one)[0]) for one in asked] == expected
    assert launches(backend.first.decode) == [2, 2]
    assert backend.first.heads is None or launches(backend.first.heads) == [2, 2]
    assert backend.kernel is backend.first.decode._loaded[True]


@pytest.mark.parametrize("params", MORE.values(), ids=MORE)
@pytest.mark.parametrize("prefill", ["kernel", "library"])
def test_who_wants_more_waits_for_the_whole_kernel(prefill, params):
    asked = request(0, PROMPTS[0], params=params)
    expected = timeless(run(opened(prefill, FiberBackend), asked)[0])
    backend = opened(prefill)
    server = Server(backend, asked)
    server.thread.join(0.3)
    assert server.thread.is_alive()
    assert launches(backend.first.heads or backend.first.decode) == [0, 0]
    backend.go_on.set()
    assert timeless(server.finish()[0]) == expected
    early_one, whole = launches(backend.first.decode)
    assert early_one == 0 < whole


def test_both_of_a_step_wait_for_what_one_of_them_wants():
    backend = opened()
    backend._admit(request(0, PROMPTS[0]), 0)
    backend._admit(request(1, PROMPTS[1], params=MORE["told"]), 0)
    assert [backend.first.want_more(slots) for slots in ([0], [1], [0, 1])] == [False, True, True]


def test_the_early_kernels_are_asked_for_first():
    backend = opened("library")
    backend.go_on.set()
    backend.settle()
    assert {*backend.asked} == {(s, e) for s in ("decode.cu", "head_steps.cu") for e in (0, 1)}
    noted, layout = Noting(), backend.layout
    first = replace(layout, tokens_only=True)
    assert early.OneToken("decode.cu", layout, first, print, print, noted).early
    assert noted.begun == [(print, "decode.cu", first), (print, "decode.cu", layout)]
    noted.begun.clear()
    assert not early.OneToken("decode.cu", layout, None, print, print, noted).early
    assert noted.begun == [(print, "decode.cu", layout)]


class Noting:
    """In the place of what works beside the caller."""

    def __init__(self):
        self.begun = []

    def submit(self, *work):
        self.begun.append(work)
        return work


def test_what_the_compiler_says_ends_the_opening():
    with pytest.raises(DeviceError, match="no such instruction"):
        opened(refused="no such instruction")


@pytest.mark.parametrize(("cores", "there"), [(1, False), (5, False), (6, True), (16, True)])
def test_few_cores_compile_nothing_twice(monkeypatch, cores, there):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(cores))
    layout = layout_of(SPEC)
    found = early.tokens_only("decode.cu", layout)
    assert found == (replace(layout, tokens_only=True) if there else None)


def test_a_kept_kernel_has_none_beside_it(monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(16))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("kog_triton.backends.cuda.toolchain.compiler_name", lambda: "nvrtc 13.0")
    layout = layout_of(SPEC)
    arch = layout.lowering.gpu.arch
    assert early.tokens_only("decode.cu", layout) is not None
    kernel_cache.keep(jit._named(render(layout), "decode.cu", arch)[-1], b"machine code")
    assert jit.is_kept(render(layout), "decode.cu", arch)
    assert early.tokens_only("decode.cu", layout) is None
    assert early.tokens_only("head_steps.cu", layout) is not None


def test_one_constant_tells_the_two_texts_apart():
    layout = layout_of(SPEC)
    whole, early_one = (render(replace(layout, tokens_only=x)).splitlines() for x in (False, True))
    (line,) = [(a, b) for a, b in zip(whole, early_one, strict=True) if a != b]
    assert "kTokensOnly = false" in line[0] and "kTokensOnly = true" in line[1]


def test_more_than_a_token_is_what_the_kernel_chooses_otherwise():
    text = (jit.toolchain.INCLUDE / "kog/choose.h").read_text()
    assert "kWantsMore = kEdited | kCut | kLogprobs;" in text
    assert WANTS_MORE == Flag.EDITED | Flag.CUT | Flag.LOGPROBS
