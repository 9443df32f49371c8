"""Requests to the CUDA backend, on the emulated GPU or a real one: made, served, and what they say and leave.

`run` serves them at once and takes no error; `serve` takes errors too; a Server runs beside its test. A request
alone in one launch of the kernel of one token is what every other way to serve it is compared with.
"""

import itertools
import re
import threading
from contextlib import contextmanager
from dataclasses import replace

import torch

from kog_triton.backends import BackendOptions
from kog_triton.backends.cuda import launcher
from kog_triton.backends.mailbox import Failure, Mailbox, Request
from kog_triton.errors import RunError
from kog_triton.sampling import SamplingParams
from tests.lib.cuda_walk import FiberBackend
from tests.lib.narrow_stream import random_weights
from tests.lib.ring_walker import f16_spec

GREEDY = SamplingParams(temperature=0)
PROMPTS = ((5, 17, 60), (5, 90), (31, 2, 8, 77), (9, 9, 9), (4, 77, 4, 1, 3), (8, 1), (3, 3, 60), (1,))
COUNT = 5


def prompt_of(count, first=3):
    """So many ids below 101."""
    return [(first + 7 * i) % 101 for i in range(count)]


def make(kind, spec=None, num_slots=3, num_blocks=2, seed=0, **options):
    """A backend on the emulated GPU."""
    spec = spec or f16_spec()
    slots = BackendOptions(num_slots=num_slots)
    return kind(random_weights(spec), slots, num_blocks, seed, **options)


def request(slot, prompt, count=COUNT, params=GREEDY, **options):
    return Request(slot, tuple(prompt), params, params.seed or 0, count, **options)


# ---- served ----


def serve(backend, *requests):
    """What requests that were posted at once end with: {slot: steps}, the last a Failure where one failed."""
    mailbox = Mailbox()
    for r in requests:
        mailbox.post(r)
    backend.generate(mailbox)
    return {r.slot: mailbox.read(r.slot) for r in requests}


def run(backend, *requests):
    """What `serve` gives for requests that go well, without the times of their tokens."""
    return {slot: timeless(steps) for slot, steps in serve(backend, *requests).items()}


def timeless(steps):
    assert not (failed := [step for step in steps if isinstance(step, Failure)]), failed
    return [step._replace(device_ns=0) for step in steps]


def tokens_of(steps):
    """Tokens of a request that went well."""
    return [step.token for step in timeless(steps)]


def error_of(steps):
    """What a request that said nothing else failed with."""
    (failure,) = steps
    assert isinstance(failure, Failure)
    return failure.error


def ended(steps):
    return steps and (isinstance(steps[-1], Failure) or steps[-1].finish)


class Server:
    """`generate` in a thread, and what its slots said."""

    def __init__(self, backend, *requests):
        self.backend, self.mailbox, self.steps = backend, Mailbox(), {}
        self.post(*requests)
        self.start()

    def post(self, *requests):
        for r in requests:
            self.steps[r.slot] = []
            self.mailbox.post(r)

    def start(self):
        self.thread = threading.Thread(target=self.backend.generate, args=(self.mailbox,), daemon=True)
        self.thread.start()

    def read(self, slot, count=1):
        """Wait until a slot has said so many steps or ended."""
        steps = self.steps[slot]
        while len(steps) < count and not ended(steps):
            steps += self.mailbox.read(slot, 20)
        return steps

    def finish(self):
        """All steps of all slots."""
        self.thread.join(60)
        assert not self.thread.is_alive()
        for slot, steps in self.steps.items():
            steps += self.mailbox.read(slot, 0)
        return self.steps


def idle(backend):
    """A server that serves nobody yet."""
    server = Server(backend)
    server.thread.join(60)
    assert not server.thread.is_alive()
    return server


def at_token(server, slot, number, act):
    """Call `act` in the backend's thread as it says this token of a slot: the test's own may be late."""
    push, said = server.mailbox.push, itertools.count(1)

    def say(to, step):
        push(to, step)
        if to == slot and next(said) == number:
            act()

    server.mailbox.push = say


def join(backend, first, second):
    """All steps of two requests of which the second comes when the first has said three: the kernel waits for what
    the fourth may be."""
    server = idle(backend)

    def anything(output):
        if len(output) == 3 and second.slot not in server.steps:
            server.post(second)

    server.post(replace(first, mask=anything))
    server.start()
    return server.finish()


def interrupt(backend, monkeypatch, word, *requests):
    """Serves requests, of which the third token of slot 0 says a word to the mailbox; launches of 4 steps."""
    monkeypatch.setattr(launcher, "_most_steps", lambda running, slots: 4)
    server = idle(backend)
    at_token(server, 0, 3, lambda: word(server.mailbox))
    server.post(*requests)
    server.start()
    return server


def staggered(backend, requests):
    """The requests' steps where every other slot begins with its prompt in the cache already."""
    out = []
    for r in requests:
        cached = len(r.prompt) - 1 if r.slot % 2 else 0
        if cached:
            run(backend, request(r.slot, r.prompt[:cached], 1))
        out.append(replace(r, cached=cached))
    return out


@contextmanager
def without_a_block(backend, kernel):
    """While inside, one block of an emulated kernel never comes, and the others wait for it shortly."""
    before = backend.wait_ns
    backend.wait_ns, kernel.absent = 2000, 1
    yield
    backend.wait_ns, kernel.absent = before, -1


# ---- compared with the same request alone ----


def held(backend, slot, positions):
    """Keys and values of a slot's first positions."""
    return backend.memory.cache[slot][..., :positions, :].clone()


def alone(spec, requests, num_blocks=2):
    """What each request says alone in a slot of its own, and the cache that all leave."""
    backend = make(FiberBackend, spec, len(requests), num_blocks)
    steps = {r.slot: run(backend, r)[r.slot] for r in requests}
    return steps, backend.memory.cache.clone()


def alone_by_prompt(spec, prompts, count):
    """{prompt: (tokens, keys and values)} of requests alone."""
    steps, cache = alone(spec, [request(i, prompt, count) for i, prompt in enumerate(prompts)])
    return {prompt: (tokens_of(steps[i]), cache[i]) for i, prompt in enumerate(prompts)}


def assert_alone(backend, slot, prompt, steps, expected, count=None):
    """A request said what `alone_by_prompt` expects, all of it or `count` tokens, and left it in its slot.

    Of a request for more tokens than were expected the first are judged.
    """
    tokens, cache = expected[prompt]
    assert tokens_of(steps)[: len(tokens)] == tokens[:count]
    positions = len(prompt) + min(len(steps), len(tokens)) - 1
    assert torch.equal(held(backend, slot, positions), cache[..., :positions, :])


def assert_nan_ends_one_request(backend, expected):
    """Its error names it; those before and behind it in the step say what they say alone."""
    backend.memory.embed[99, 3] = torch.nan
    prompts = [PROMPTS[0], (7, 99), PROMPTS[1]]
    steps = serve(backend, *(request(slot, prompt) for slot, prompt in enumerate(prompts)))
    for slot in (0, 2):
        assert_alone(backend, slot, prompts[slot], steps[slot], expected, COUNT)
    error = error_of(steps[1])
    assert isinstance(error, RunError) and "hold NaN or +inf: the run is void" in str(error)


def assert_cancelled_slot_goes_on(backend, count):
    """A request of `count` tokens that is cancelled after two of them leaves a slot that another one goes on from."""
    server = Server(backend, request(0, PROMPTS[0], count))
    server.read(0, 2)
    server.mailbox.cancel(0)
    steps = server.finish()[0]
    assert steps[-1].finish == "cancel" and len(steps) < count
    prompt = [*PROMPTS[0], *(s.token for s in steps[:-1])]
    again = run(backend, request(0, prompt, 3, cached=steps[-1].held))[0]
    assert again == run(backend, request(1, prompt, 3))[1]


def assert_expired(error, *places):
    """A wait of the first block in vain, in one of these places of the first layer."""
    assert isinstance(error, RunError)
    at = "|".join(places)
    assert re.search(rf"expired: rank 0, block 0, layer 0, ({at}), seen 0, wanted 1", str(error))
