"""Requests that share steps of the Triton kernel, in the concurrent interpreter.

The bits and the state of each are those that it has alone, whoever joins, leaves, is cancelled or waits; and until a
kernel is compiled they take turns.
"""

import logging
import os
import threading
from types import SimpleNamespace

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton compiles for the GPU here: run on a machine without one", allow_module_level=True)

import triton.language as tl

from kog_triton.backends import serving
from kog_triton.backends.mailbox import Failure, Mailbox, Request
from kog_triton.backends.triton.host.shared_steps import SharedSteps, most_columns
from kog_triton.backends.triton.kernel import attention, shared_step, slots
from kog_triton.errors import RunError
from kog_triton.model.shapes import named_shape, with_format
from kog_triton.model.spec import DType, Head, Reduce
from kog_triton.model.weight_format import FORMATS
from kog_triton.sampling import SamplingParams
from kog_triton.schedule.schedule import build
from kog_triton.schedule.triton import lower_tiles
from tests.lib.concurrent_interpreter import Deadlock, concurrent
from tests.lib.planting import plant
from tests.lib.slow import some_always
from tests.lib.triton_cases import GREEDY, Case, backend_of, lanes, plain, serve

EDITED = SamplingParams(temperature=0.7, seed=5, frequency_penalty=1.5, top_k=9)
COUNTED = SamplingParams(temperature=0.7, seed=5, frequency_penalty=1.5)
LOGGED = SamplingParams(temperature=0.0, logprobs=2)
CASES = {
    "f16, two layers": Case(plain(2, qk_norm=True), 4),
    "bf16, a window": Case(plain(windows=(3,), dtype=DType.BF16), 3),
    "widths": Case(plain(hidden_size=68, intermediate_size=132), 2),
    "eight columns": Case(plain(), 8),
}
ONE = Case(plain(qk_norm=True), 4)


@pytest.fixture(autouse=True)
def splits_of_two_keys(monkeypatch):
    """One split walks two keys alone; more have one each, and join."""
    for name in ("SPLIT_LEAST", "BLOCK_N"):
        monkeypatch.setattr(attention, name, tl.constexpr(1))


def request(slot: int, params=GREEDY, count: int = 3, **more) -> Request:
    """Of a prompt of its own, too short for chunks."""
    prompt = tuple((7 * slot + 11 * i + 3) % 50 for i in range(1 + slot % 3))
    return Request(slot, prompt, params, params.seed or 0, count, **more)


def tokens(steps) -> list[int]:
    assert all(not isinstance(s, Failure) for s in steps), steps
    return [s.token for s in steps if s.token >= 0]


def watch_launches(backend, patch) -> list[int]:
    """The columns of every launch to come."""
    columns, run = [], backend.launcher.run

    def watched(rules, chunks, count):
        columns.append(count)
        return run(rules, chunks, count)

    patch.setattr(backend.launcher, "run", watched)
    return columns


def leave_outdated(backend, mailbox, columns) -> None:
    """What `serving` does while a launch runs, which in the interpreter has ended before it is told of it."""
    launcher, running = backend.launcher, mailbox.resumed
    outdated = running and launcher._can_share(running, launcher._ruled(running))
    if columns[-1] > 1:
        outdated = launcher._others_are_due(len(running) > columns[-1])
    if outdated:
        launcher.leave()


def alone(case: Case, one: Request):
    """Tokens, keys and values of the positions that ran, and the last row of logits."""
    backend = backend_of(case, num_slots=one.slot + 1)
    (steps,) = serve(backend, one)
    return tokens(steps), *state_of(backend, one, 0)


def state_of(backend, one: Request, column: int):
    ran = len(one.prompt) + one.max_tokens - 1
    p = backend.memory.pointers
    return p.kv[one.slot, ..., :ran, :].clone(), p.logits[column].clone()


def is_alike(backend, case: Case, requests, made, column_of) -> bool:
    for one, steps in zip(requests, made, strict=True):
        want, cache, logits = alone(case, one)
        mine, row = state_of(backend, one, column_of(one.slot))
        alike = torch.equal(mine, cache) and torch.equal(row, logits)
        if tokens(steps) != want or not alike:
            return False
    return True


@pytest.mark.parametrize(
    ("name", "count"),
    some_always(
        [("f16, two layers", 3), ("bf16, a window", 2), ("widths", 2), ("eight columns", 5)],
        "f16, two layers",
        "bf16, a window",
    ),
)
def test_bits_and_state_are_those_of_a_request_alone(name, count, monkeypatch):
    """As many tokens of each behind prompts of one length, so that all end in one step, whose logits are compared."""
    case = CASES[name]
    backend = backend_of(case, num_slots=count)
    columns = watch_launches(backend, monkeypatch)
    rules = (GREEDY, EDITED, LOGGED, COUNTED, GREEDY)
    requests = [Request(s, (3 + s, 42 - s), rules[s], 5, 3) for s in range(count)]
    made = serve(backend, *requests)
    assert columns == [{2: 2, 3: 4, 5: 8}[count]]
    assert is_alike(backend, case, requests, made, lambda slot: slot)


def test_each_request_comes_and_goes_when_it_likes(monkeypatch):
    """Prompts and answers of all lengths, one that joins late, one that is cancelled: the others have their own bits,
    in whatever column they are."""
    backend, joined = backend_of(ONE, num_slots=4), []
    columns = watch_launches(backend, monkeypatch)
    requests = [request(0, EDITED, 2), request(1, GREEDY, 5), request(2, LOGGED, 8)]
    late = request(3, COUNTED, 3)

    def host(mailbox):
        if mailbox._inboxes[1]._steps.qsize() == 2 and not joined:
            joined.append(mailbox)
            mailbox.post(late)
        if mailbox._inboxes[2]._steps.qsize() >= 4:
            mailbox.cancel(2)

    made = serve(backend, *requests, host=host)
    made.append(joined[0].read(3, 0))
    assert [tokens(made[n]) for n in (0, 1, 3)] == [alone(ONE, one)[0] for one in (*requests[:2], late)]
    assert made[2][-1].finish == "cancel"
    whole = alone(ONE, requests[2])[0]
    assert tokens(made[2]) == whole[: len(tokens(made[2]))] and len(made[2]) >= 5
    assert set(columns) >= {2, 4}


@pytest.mark.slow
def test_a_yield_at_any_step_leaves_all_to_go_on():
    backend, mailbox = backend_of(ONE, num_slots=2), Mailbox()
    requests = [request(0, EDITED, 5), request(1, count=5)]
    for one in requests:
        mailbox.post(one)
    ran = backend.memory.pointers.states[:, 0, 0]
    returns = 0

    def host():
        backend.poll()
        if int(ran.sum()) > before:
            mailbox.yield_now()

    while not returns or mailbox.resumed:
        mailbox.resume()
        before = int(ran.sum()) if returns else 0
        with concurrent(returns, "stale", host):
            backend.generate(mailbox)
        returns += 1
    assert returns >= 2
    for one in requests:
        assert tokens(mailbox.read(one.slot, 0)) == alone(ONE, one)[0]
        assert torch.equal(state_of(backend, one, 0)[0], alone(ONE, one)[1])


@pytest.mark.slow
def test_more_requests_than_columns_are_served_round_robin(monkeypatch):
    from kog_triton.backends.triton.host import launcher, shared_steps

    monkeypatch.setattr(shared_steps, "COUNTS", (2,))
    monkeypatch.setattr(launcher, "WHILE_OTHERS_WAIT", 1)
    backend, ahead = backend_of(ONE, num_slots=3), []
    columns = watch_launches(backend, monkeypatch)
    requests = [request(0, count=6), request(1, count=6), request(2, count=2)]

    def host(mailbox):
        made = [mailbox._inboxes[n]._steps.qsize() for n in range(3)]
        ahead.append(max(made) - min(made))
        leave_outdated(backend, mailbox, columns)

    made = serve(backend, *requests, host=host)
    assert columns[:2] == [2, 2]
    assert max(ahead) < 6  # the third does not wait for the end of the first
    assert [tokens(steps) for steps in made] == [alone(ONE, one)[0] for one in requests]


def test_long_prompts_run_in_chunks_first(monkeypatch):
    """In the kernel of one token, which leaves when all have a token; then all share steps."""
    backend = backend_of(ONE, num_slots=2)
    columns = watch_launches(backend, monkeypatch)
    long, short = Request(0, tuple(range(3, 12)), GREEDY, 0, 4), request(1, count=5)
    made = serve(backend, long, short, host=lambda m: leave_outdated(backend, m, columns))
    assert columns[:2] == [1, 2]
    assert tokens(made[0]) == alone(ONE, long)[0] and tokens(made[1]) == alone(ONE, short)[0]


# ---- masks ----


@pytest.mark.parametrize("when", some_always(["in time", "late"], "late"))
def test_a_mask_that_is_late_ends_its_request_alone(when, monkeypatch):
    """The others of the step go on, bit for bit, and the slot serves again."""
    seconds = [0.0]
    backend, mailbox = backend_of(ONE, limit=400, num_slots=3), Mailbox()
    clocks = SimpleNamespace(monotonic=lambda: seconds[0], sleep=lambda seconds: None)
    monkeypatch.setattr(serving, "time", clocks)
    words, at = backend.memory.pointers.mailbox, slots.mailbox_offsets(backend.tiles)["tokens"]
    launches, settle = [], backend.launcher._settle

    def masks(output):
        seconds[0] += 10 * (when == "late" and len(output) == 2)

    def host():
        running = mailbox.resumed.get(1)
        told = int(words[1, at + 1]) >> 32 == 2
        if told and running is not None and len(running.output) < 2:
            machine.still = 0  # the kernel waits for the host, which is busy
        else:
            backend.poll()

    def watched(*given):
        launches.append(settle(*given))
        return launches[-1]

    monkeypatch.setattr(backend.launcher, "_settle", watched)
    requests = [request(0, EDITED), request(1, COUNTED, 4, mask=masks), request(2)]
    for one in requests:
        mailbox.post(one)
    with concurrent(0, "stale", host) as machine:
        backend.generate(mailbox)
    made = [mailbox.read(n, 0) for n in range(3)]
    for n in (0, 2):
        assert tokens(made[n]) == alone(ONE, requests[n])[0]
    whole = alone(ONE, request(1, COUNTED, 4))[0]
    *first, last = made[1]
    if when == "late":
        assert tokens(first) == whole[:2] and isinstance(last.error, RunError)
    else:
        assert tokens(made[1]) == whole
    (again,) = serve(backend, request(1, count=2))
    assert tokens(again) == alone(ONE, request(1, count=2))[0]


# ---- waits that expire, and kernels that are not there ----


def test_a_wait_that_expires_says_where():
    backend, mailbox = backend_of(ONE, limit=5, num_slots=2), Mailbox()
    for slot in range(2):
        mailbox.post(request(slot))
    with concurrent(0, "sc", backend.poll, stalled=1):
        backend.generate(mailbox)
    for slot in range(2):
        (failure,) = mailbox.read(slot, 0)
        said = str(failure.error)
        assert isinstance(failure.error, RunError)
        assert "stage meeting, layer 0, for word" in said and "of arrivals" in said


@pytest.mark.slow
def test_requests_take_turns_until_the_kernel_is_compiled(monkeypatch):
    """The launch in flight leaves then, at a token; nothing waited for the compiler."""
    backend, done, wanted = backend_of(ONE, num_slots=2), threading.Event(), []

    def compile(key):
        wanted.append(key)
        done.wait()

    steps = SharedSteps(2, compile)
    monkeypatch.setattr(backend.launcher, "shared_steps", steps)
    columns = watch_launches(backend, monkeypatch)
    requests = [request(0, count=6), request(1, count=6)]

    def host(mailbox):
        if mailbox._inboxes[0]._steps.qsize() == 2 and not done.is_set():
            assert columns == [1]
            done.set()
            steps.settle()
        leave_outdated(backend, mailbox, columns)

    made = serve(backend, *requests, host=host)
    assert wanted == [(2, False)] and columns[:2] == [1, 2]
    assert [tokens(steps) for steps in made] == [alone(ONE, one)[0] for one in requests]


def test_requests_take_turns_if_there_is_no_kernel(monkeypatch, caplog):
    backend = backend_of(ONE, num_slots=2)

    def compile(key):
        raise ValueError("the compiler is out")

    steps = SharedSteps(2, compile)
    assert steps.ready(2, True) == 1
    steps.settle()
    monkeypatch.setattr(backend.launcher, "shared_steps", steps)
    columns = watch_launches(backend, monkeypatch)
    requests = [request(0, EDITED), request(1)]
    with caplog.at_level(logging.WARNING):
        made = serve(backend, *requests)
    assert set(columns) == {1}
    assert [tokens(steps) for steps in made] == [alone(ONE, one)[0] for one in requests]


def test_who_has_columns():
    """Lanes have none; nor has one slot; sums of a block's rows that outgrow registers leave fewer."""
    laned = backend_of(Case(lanes((Reduce.OWN,), 0, Head.MEAN), 4)).tiles
    assert most_columns(laned, 8) == 1
    tiles = backend_of(CASES["eight columns"]).tiles
    assert [most_columns(tiles, slots) for slots in (1, 2, 3, 8, 64)] == [1, 2, 4, 8, 8]
    assert most_columns(backend_of(ONE).tiles, 8) == 4  # of four blocks
    wide = lower_tiles(build(named_shape("qwen3-8b")), 60, 4096)
    assert most_columns(wide, 8) == 4


def test_memory_of_the_gpu_outlives_no_compiler():
    """What the compiler is given has the types and sizes of the pointers, and none of their memory."""
    from kog_triton.backends.triton.host.shared_steps import without_memory

    pointers = backend_of(ONE).memory.pointers
    for mine, other in zip(pointers, without_memory(pointers), strict=True):
        if isinstance(mine, torch.Tensor):
            assert other.device.type == "meta"
            assert (other.dtype, other.shape) == (mine.dtype, mine.shape)
        else:
            assert other == mine


# ---- planted faults ----

FAULTS = {
    "columns share their words": ("p.words + column * S.total_words, p.logits", "p.words, p.logits"),
    "all columns read the first one's cache": (
        "at, slot = nth(pos, column), nth(slots, column)",
        "at, slot = nth(pos, column), nth(slots, 0)",
    ),
    "nobody waits for the operands": (
        "        alive = met(number, 0, control, layer, alive, p, S)\n",
        "        number -= 0\n",
    ),
    "nobody waits for the splits": (
        "        alive = met(number, 2, control, layer, alive, p, S)\n",
        "        number -= 0\n",
    ),
    "the rows of columns are interleaved": (
        "return tl.reshape(tl.trans(y), (COLUMNS * ROWS,))",
        "return tl.reshape(y, (COLUMNS * ROWS,))",
        "matvec",
    ),
    "a column is normed as the first one": (
        "mine = at_column(p, own, p.group_index, S)",
        "mine = at_column(p, own * 0, p.group_index, S)",
    ),
    "every token's position is the first one's": ("nth(pos, column) + 1, epoch, slot", "nth(pos, 0) + 2, epoch, slot"),
}


@pytest.mark.parametrize("name", some_always(FAULTS, *list(FAULTS)[:4]))
def test_planted_faults_are_seen(name, monkeypatch, tmp_path):
    before, after, *module = FAULTS[name]
    plant(monkeypatch, tmp_path, (module or ["shared_step"])[0], before, after)
    assert is_red()


@pytest.mark.slow
def test_an_edit_that_is_no_fault_is_not_seen(monkeypatch, tmp_path):
    same = "        number += meetings(S, PARTS)\n"
    plant(monkeypatch, tmp_path, "shared_step", same, same)
    assert not is_red(seeds=1)


def is_red(seeds: int = 3) -> bool:
    """Whether a request beside another one has other tokens or keys than alone, or all hang."""
    case = CASES["bf16, a window"]
    requests = [Request(s, (3 + s, 42 - s)[: 1 + s], EDITED, 5, 3) for s in range(2)]
    expected = [alone(case, one) for one in requests]
    for seed in range(seeds):
        backend, mailbox = backend_of(case, limit=400, num_slots=2), Mailbox()
        for one in requests:
            mailbox.post(one)
        try:
            with concurrent(seed, "stale", backend.poll):
                backend.generate(mailbox)
        except Exception as error:  # Triton wraps what a program raises
            assert Deadlock.__name__ in repr(error)
            return True
        for one, (want, cache, _) in zip(requests, expected, strict=True):
            made = mailbox.read(one.slot, 0)
            if any(isinstance(s, Failure) for s in made) or [s.token for s in made] != want:
                return True
            if not torch.equal(state_of(backend, one, 0)[0], cache):
                return True
    return False


@pytest.mark.parametrize("format", [None, "int4-g128"])
def test_stamps_know_which_run_of_a_layer_they_are_of(format):
    """However many steps ran: each ends with a meeting that is no layer's."""
    spec = named_shape("llama-3.2-1b")
    spec = with_format(spec, FORMATS[format]) if format else spec
    tiles = lower_tiles(build(spec), 132, 64)
    each = shared_step.meetings(tiles, shared_step.LAYER_PARTS.value)
    assert each == (10 if format else 8)
    for step in range(40):
        first = step * (spec.num_layers * each + 1)
        runs = [shared_step.layer_run.fn(first + layer * each, tiles) for layer in range(spec.num_layers)]
        assert runs == list(range(step * spec.num_layers, (step + 1) * spec.num_layers))
