"""The life of requests on the CUDA kernel: its own C++ on a CPU behind the backend that serves real GPUs.

Whatever happens to a request or beside it, its tokens, and the keys and values that it leaves, are those of the
same request alone in one launch, bit for bit.
"""

import gc
import re
import threading
import time
import weakref

import pytest
import torch

from kog_triton import LLM
from kog_triton.backends import BackendOptions, watchdog
from kog_triton.backends.cuda import backend as cuda_backend
from kog_triton.backends.cuda import launcher
from kog_triton.backends.cuda.layout import header
from kog_triton.backends.cuda.layout.protocol import Outcome, Word
from kog_triton.backends.mailbox import Mailbox
from kog_triton.backends.request_words import encode_logits
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.errors import DeviceError
from kog_triton.sampling import SamplingParams
from tests.lib import cuda_walk
from tests.lib.cuda_planting import plant
from tests.lib.cuda_requests import (
    COUNT,
    PROMPTS,
    Server,
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
    tokens_of,
    without_a_block,
)
from tests.lib.cuda_walk import FiberBackend, FiberLaunch, compile_walk
from tests.lib.fake_checkpoint import make_checkpoint
from tests.lib.ring_walker import f16_spec, spec_of
from tests.lib.silent_gpu import assert_shut

THREE = PROMPTS[:3]


@pytest.fixture(scope="module")
def expected():
    return alone_by_prompt(f16_spec(), THREE, COUNT)


@pytest.fixture
def backend():
    return make(FiberBackend)


def test_a_request_alone_is_one_launch():
    backend = make(FiberBackend, num_slots=1)
    for n, prompt in enumerate(THREE):
        assert len(run(backend, request(0, prompt))[0]) == COUNT
        assert backend.kernel.launches == n + 1


def test_requests_of_several_slots_take_turns(backend, expected):
    steps = serve(backend, *(request(slot, prompt) for slot, prompt in enumerate(THREE)))
    for slot, prompt in enumerate(THREE):
        assert_alone(backend, slot, prompt, steps[slot], expected)
    # The second has the shortest prompt: until it ended, everybody made progress in one launch.
    times = sorted((s.device_ns, slot) for slot in (0, 1, 2) for s in steps[slot][:2])
    assert [slot for _, slot in times] == [1, 0, 1, 0, 2, 2]
    assert backend.kernel.launches == 3


@pytest.mark.parametrize("most_steps", [1, 2])
def test_launches_of_a_few_steps_change_nothing(backend, expected, monkeypatch, most_steps):
    monkeypatch.setattr(launcher, "_most_steps", lambda running, slots: most_steps)
    steps = run(backend, *(request(slot, prompt) for slot, prompt in enumerate(THREE)))
    for slot, prompt in enumerate(THREE):
        assert_alone(backend, slot, prompt, steps[slot], expected)
    assert backend.kernel.launches >= sum(len(p) + COUNT - 1 for p in THREE) // most_steps


def test_logits_after_every_relaunch_are_those_of_one_run(backend):
    tokens = [5, 17, 60, 31, 2]
    expected = backend.forward_logits(tokens)
    ranks, rows = backend.ranks.apart(), []
    ranks.write_request(0, encode_logits(5), tokens, 0)
    for _ in tokens:
        row = torch.zeros(1, backend.spec.vocab_size)
        backend._launch(ranks, [0], 1, logits=row).synchronize()
        rows.append(row)
    assert torch.equal(torch.cat(rows), torch.from_numpy(expected))


def test_requests_at_different_depths_take_turns(monkeypatch):
    """From one token to the next, splits are joined by those who read them and by a step of their own."""
    monkeypatch.setattr(header, "split_least", lambda spec: 1)
    monkeypatch.setattr(header, "MERGED_LENGTH", 7)
    spec = f16_spec(hidden_size=40, num_kv_heads=1, windows=(3, 0, 6))
    backend = FiberBackend(RandomWeights(spec), BackendOptions(num_slots=2), 5, seed=3)
    assert backend.layout.splits > header.MERGED
    prompts = (3, 1), (9, 8, 7, 6, 5, 4, 3, 2)  # one reaches the many splits, one begins with them
    apart = [run(backend, request(0, prompt, 8))[0] for prompt in prompts]
    together = run(backend, *(request(i, prompt, 8) for i, prompt in enumerate(prompts)))
    assert [together[0], together[1]] == apart


def test_a_yield_returns_at_a_token_boundary_and_resumes(backend, expected, monkeypatch):
    requests = request(0, PROMPTS[0], 12), request(2, PROMPTS[2], 12)
    server = interrupt(backend, monkeypatch, Mailbox.yield_now, *requests)
    assert not ended(server.finish()[0])
    backend.forward_logits([1, 2, 3])  # leaves all slots alone
    server.mailbox.resume()
    server.start()
    steps = server.finish()
    for slot in (0, 2):
        assert_alone(backend, slot, PROMPTS[slot], steps[slot], expected)


def test_a_request_joins_one_that_runs(backend, expected):
    steps = join(backend, request(1, PROMPTS[0], 40), request(0, PROMPTS[1]))
    assert_alone(backend, 0, PROMPTS[1], steps[0], expected)
    assert_alone(backend, 1, PROMPTS[0], steps[1], expected)
    assert len(steps[1]) == 40
    assert backend.kernel.launches == 3  # alone, together, alone again


def test_a_cancel_ends_one_request_and_its_slot_keeps_what_it_computed(backend, expected):
    server = Server(backend, request(0, PROMPTS[0], 50), request(1, PROMPTS[1]))
    server.read(0, 2)
    server.mailbox.cancel(0)
    steps = server.finish()
    assert steps[0][-1].finish == "cancel" and len(steps[0]) < 50
    assert_alone(backend, 1, PROMPTS[1], steps[1], expected)
    prompt = [*PROMPTS[0], *(s.token for s in steps[0][:-1])]
    cached = steps[0][-1].held
    assert cached == len(prompt) - 1  # the last token was never written
    again = run(backend, request(0, prompt, 3, cached=cached))[0]
    assert again == run(make(FiberBackend, num_slots=1), request(0, prompt, 3))[0]


def test_a_cancel_is_heard_in_a_prompt(backend, monkeypatch):
    monkeypatch.setattr(launcher, "MOST_SILENT", 4)
    prompt = [3 + i % 50 for i in range(60)]
    server = Server(backend, request(0, prompt, 2))
    while backend.kernel.launches < 3:
        time.sleep(0.01)
    server.mailbox.cancel(0)
    (last,) = server.finish()[0]
    assert last.finish == "cancel"
    cached = last.held
    assert 8 <= cached < len(prompt) and cached % 4 == 0
    again = run(backend, request(0, prompt, 3, cached=cached))[0]
    assert again == run(make(FiberBackend, num_slots=1), request(0, prompt, 3))[0]


def test_more_requests_than_a_launch_serves_all_progress(expected, monkeypatch):
    monkeypatch.setattr(launcher, "MAX_REQUESTS", 2)
    monkeypatch.setattr(launcher, "MOST_SILENT", 4)
    prompts = [*THREE, PROMPTS[0], PROMPTS[1]]
    backend, order = make(FiberBackend, num_slots=5), []
    mailbox = Mailbox()
    push = mailbox.push

    def note(slot, step):
        order.append((slot, step.finish))
        push(slot, step)

    monkeypatch.setattr(mailbox, "push", note)
    for slot, prompt in enumerate(prompts):
        mailbox.post(request(slot, prompt))
    backend.generate(mailbox)
    for slot, prompt in enumerate(prompts):
        assert_alone(backend, slot, prompt, mailbox.read(slot), expected)
    begun = {slot for slot, _ in order[: [f for _, f in order].index("length")]}
    assert begun == set(range(5))  # before the first of them ended


def test_a_nan_is_an_error_of_its_request_alone(backend, expected):
    assert_nan_ends_one_request(backend, expected)


def test_an_expired_wait_names_its_place_and_the_next_request_runs(backend, expected):
    requests = [request(slot, PROMPTS[slot]) for slot in range(2)]
    with without_a_block(backend, backend.kernel):
        for steps in serve(backend, *requests).values():
            assert_expired(error_of(steps), r"attention_qkv, word \d+ of qkv")
    assert_alone(backend, 1, PROMPTS[1], run(backend, requests[1])[1], expected)


def test_a_wait_that_ends_as_it_is_given_up_is_not_blamed_on_another(backend, tmp_path):
    """The watchdog is held up until what it found late has come: the warp's next wait is not the one it means."""
    late = "compare_and_swap(&b.small->waits[b.in_warp], began"
    until = "while (load_volatile(&b.small->waits[b.in_warp]) == began) sleep_a_while();"
    include = plant(tmp_path, ("watchdog.h", late, f"{until}\n{late}"))
    backend.kernel.library = compile_walk(backend.layout, include=include)
    backend.wait_ns = 3
    error = error_of(serve(backend, request(0, PROMPTS[0]))[0])
    assert re.search(r"expired: rank 0, block \d, for a word that came while it gave up,", str(error))


def test_the_kernel_goes_on_from_a_library_prefill():
    """Prompts that torch runs into the cache lead to the tokens that the kernel's own prefill leads to."""
    weights, prompt = RandomWeights(f16_spec()), tuple(range(3, 20))
    ours = FiberBackend(weights, BackendOptions(prefill="library"))
    alone = FiberBackend(weights, BackendOptions())
    steps = run(ours, request(0, prompt))[0]
    assert steps == run(alone, request(0, prompt))[0]
    a, b = (x.memory.cache[0, ..., : len(prompt) - 1, :].float() for x in (ours, alone))
    assert 0 < (a - b).square().mean().sqrt() < 0.01 * b.square().mean().sqrt()
    assert ours.memory_bytes()["weights"] == alone.memory_bytes()["weights"]


def test_conversations_continue_in_their_slots(tmp_path):
    """Two conversations, a third that pushes the older one out, and each answer as from a cold engine."""
    folder = make_checkpoint(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(folder, backend=FiberBackend, num_slots=2, dtype="bf16") as llm:
        talks = {name: list(name) for name in (b"ab", b"cd", b"ef")}
        for name, cached in ((b"ab", 0), (b"cd", 0), (b"ab", 5), (b"ef", 0), (b"cd", 0), (b"ef", 5)):
            prompt = {"prompt_token_ids": talks[name]}
            out = llm.generate(prompt, params)[0]
            assert out.metrics.cached_tokens == cached
            with LLM(folder, backend=FiberBackend, dtype="bf16") as cold:
                fresh = cold.generate(prompt, params)[0]
            assert fresh.outputs[0].token_ids == out.outputs[0].token_ids
            talks[name] += [*out.outputs[0].token_ids, ord("!")]


class LateLaunch(FiberLaunch):
    """A launch that the GPU comes to when `begins` is set."""

    def __init__(self, *arguments):
        self.begins = threading.Event()
        super().__init__(*arguments)

    def run(self):
        if self.begins.wait(60):
            super().run()


def test_a_backend_whose_gpu_fell_silent_serves_no_more_and_keeps_what_may_be_written(expected, monkeypatch):
    """Its kernel runs after all, once everybody has let go of it; then another backend works."""
    monkeypatch.setattr(watchdog, "_kept", [])
    backend, late = make(FiberBackend, num_slots=2), []
    with monkeypatch.context() as patched, pytest.raises(watchdog.Stalled):
        patched.setattr(watchdog, "SILENCE_S", 0.05)
        patched.setattr(cuda_walk, "FiberLaunch", lambda *a: late.append(LateLaunch(*a)) or late[0])
        run(backend, request(0, PROMPTS[0]))
    assert_shut(backend)
    backend.close()
    memory = backend.memory
    assert memory.mailbox[Word.CONTROL] == Outcome.YIELD
    kept = [weakref.ref(t) for t in (memory.outbox, memory.masks, memory.cache, memory.words)]
    del memory, backend
    gc.collect()
    outbox = kept[0]()
    assert all(tensor() is not None for tensor in kept) and not outbox.any()
    with pytest.raises(DeviceError, match=r"^the GPU has not ended what another model .*$"):
        make(FiberBackend, num_slots=1)
    late[0].begins.set()
    late[0].join(60)
    assert outbox.any()  # by a kernel that nobody waited for
    del outbox
    other = make(FiberBackend, num_slots=1)
    assert all(tensor() is None for tensor in kept)
    assert tokens_of(serve(other, request(0, PROMPTS[1]))[0]) == expected[PROMPTS[1]][0]


FAULTS = {
    "a token that is not kept": ("cursor.h", "states[2 * cursor.slot + 1] = cursor.token", "states[0] += 0"),
    "a position counted for the wrong request": ("decode.h", "num_requests - 1 - cursor)", "num_requests - 1)"),
    "every request in one slot's cache": ("cursor.h", "small->slot = cursor.slot", "small->slot = 0"),
    "a launch that runs a step too far": ("decode.h", "== b.p.most_steps", "== b.p.most_steps + 1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(backend, expected, monkeypatch, tmp_path, name):
    include = plant(tmp_path, FAULTS[name])
    backend.kernel.library = compile_walk(backend.layout, include=include)
    with pytest.raises(AssertionError):
        test_launches_of_a_few_steps_change_nothing(backend, expected, monkeypatch, 2)


class RefusedBackend(FiberBackend):
    def _compile(self, source, layout):
        raise DeviceError("the compiler refuses")


def test_a_compiler_that_fails_leaves_no_weights_behind(monkeypatch):
    """Nor until the collector comes: another backend may be next."""
    packed, allocate = [], cuda_backend.allocate_ranks

    def watched(*arguments):
        ranks = allocate(*arguments)
        packed.append(weakref.ref(ranks.first.weights))
        return ranks

    monkeypatch.setattr(cuda_backend, "allocate_ranks", watched)
    gc.disable()
    try:
        with pytest.raises(DeviceError, match="refuses"):
            RefusedBackend(RandomWeights(spec_of()), BackendOptions(max_context=64), num_blocks=2)
        assert packed and packed[0]() is None
    finally:
        gc.enable()
