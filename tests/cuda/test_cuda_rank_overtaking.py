"""Short prompts that come while a long one is on its way on several ranks, before the CUDA kernel's own C++ on a CPU:
each request says what it says alone, and leaves its keys and values."""

import pytest
import torch

from kog_triton.backends import BackendOptions
from kog_triton.backends.mailbox import Mailbox
from kog_triton.backends.prefill import ranks
from kog_triton.backends.prefill.slices import PromptRun
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.sampling import SamplingParams
from tests.lib.cuda_requests import request, run, timeless
from tests.lib.rank_outputs import PushedBackend
from tests.lib.ring_walker import f16_spec
from tests.lib.soak_record import Ways

TOLD = SamplingParams(temperature=0, logprobs=3)
SIZES, SHORT, CHUNK = (6, 24), 6, 13
# One whose slices leave room, one that goes ahead, one padded to the longest bucket, one in chunks.
BESIDE, FIRST, PADDED, CHUNKED = 2, 5, 20, 40


def prompt_of(count):
    return tuple((count + 7 * i) % 100 for i in range(count))


@pytest.fixture(scope="module")
def backend():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ranks, "RANK_BUCKETS", SIZES)
        patched.setattr("kog_triton.backends.cuda.prompts_beside.RANK_BUCKETS", SIZES)
        patched.setattr(ranks, "SHORT", SHORT)
        asked = BackendOptions(num_slots=4, num_gpus=2, prefill="library")
        made = PushedBackend(RandomWeights(f16_spec(vocab_size=100, num_layers=2)), asked, 2)
        made.library.chunk = CHUNK
        yield made


def left(backend, slot, count):
    return [m.cache[slot][..., : count + 3, :].clone() for m in backend.ranks.each]


@pytest.fixture(scope="module")
def alone(backend):
    """{tokens of a prompt: what its request says, and leaves on each rank}."""
    return {
        count: (run(backend, request(0, prompt_of(count), 4, TOLD))[0], left(backend, 0, count))
        for count in (FIRST, PADDED, CHUNKED)
    }


def assert_as_alone(backend, mailbox, slot, count, alone):
    said, held = alone[count]
    assert timeless(mailbox.read(slot, 0)) == said
    assert all(map(torch.equal, left(backend, slot, count), held))


@pytest.mark.parametrize("cancelled", [False, True], ids=["to its end", "cancelled"])
@pytest.mark.parametrize("long", [PADDED, CHUNKED], ids=["padded", "in chunks"])
def test_a_short_prompt_that_comes_meanwhile_changes_nothing(backend, alone, monkeypatch, long, cancelled):
    """Some of the long one's products have run, and others are to follow: it waits for the end of that pass alone."""
    mailbox, right, ends, inside = Mailbox(), PromptRun.advance, [], []
    begin = backend.library._exchange.begin

    def advance(self, seconds, at_once=False):
        if self.end == BESIDE:
            return right(self, seconds, at_once)
        ends.append(self.end)
        if ends == [long] * 4:
            mailbox.post(request(2, prompt_of(FIRST), 4, TOLD))
        if ends.count(FIRST) == 7 and cancelled:
            mailbox.cancel(2)
        return right(self, 0.0, at_once)

    def begun():
        inside.append(backend.library._exchange._open)
        begin()

    monkeypatch.setattr(PromptRun, "advance", advance)
    monkeypatch.setattr(backend.library._exchange, "begin", begun)
    mailbox.post(request(0, prompt_of(BESIDE), 30))
    mailbox.post(request(1, prompt_of(long), 4, TOLD))
    ways = Ways()
    with ways.watched(backend):
        backend.generate(mailbox)
    way = ways.of_slot[1]
    assert way.by == "RankRun" and len(way.slices) == ends.count(long) and sum(way.slices) > 10
    assert (set(way.between) == {FIRST}) is (long == CHUNKED) is way.line.endswith("others between")
    # The first may end what a test before called off.
    assert ends.count(FIRST) > 6 and sum(inside[1:]) == (cancelled and long == CHUNKED)
    first = ends.index(FIRST)
    assert (long in ends[first:]) is (long == CHUNKED), "it goes ahead of passes that have not begun"
    assert_as_alone(backend, mailbox, 1, long, alone)
    if not cancelled:
        assert_as_alone(backend, mailbox, 2, FIRST, alone)
