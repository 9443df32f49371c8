"""What the conformance suite's tests of requests share: models, the backends opened on them, and ways to serve.

The backends are those of test_conformance.py; all is asked through the Backend protocol.
"""

import contextlib
import functools
import itertools
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from kog_triton.backends import BackendOptions, BackgroundCompiler, serving
from kog_triton.backends.cuda.backend import CudaBackend
from kog_triton.backends.mailbox import Failure, Mailbox, Request, Step
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.checkpoint.narrow_random import NarrowRandomWeights
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.model.spec import DType, Head
from kog_triton.model.weight_format import FORMATS
from kog_triton.sampling import SamplingParams
from tests.lib.conformance_backends import BACKENDS, DELAYED, HIP, NOW, ON_GPU, OWN, SLOW, TWO_GPUS, marks
from tests.lib.cuda_planting import plant
from tests.lib.cuda_walk import ColumnBackend, FiberBackend
from tests.lib.hip_walk import OWN as HIP_INCLUDE
from tests.lib.hip_walk import HipColumnBackend, HipFiberBackend, HipFiberKernel
from tests.lib.lowering_cases import mixed_lanes
from tests.lib.narrow_stream import narrow_spec
from tests.lib.ring_walker import spec_of
from tests.lib.two_gpus import skip_without_two

# Log-probabilities of kernels that round otherwise: words of 16 bits fall to another neighbour. Measured: 2.0e-3.
NEAR = 5e-3
VOID = 99  # the token behind which nothing is finite, in the models "void" and "void lane"
SHORT = (1, 2, 3, 2)  # no longer: a chunk of a prompt may round otherwise than a token at a time
SEED = (1 << 63) + (5 << 33) + 7
GREEDY = SamplingParams(temperature=0.0, logprobs=2)
WARM = SamplingParams(temperature=0.9, seed=SEED)  # all that the smallest kernels know
RULED = SamplingParams(
    temperature=1.3, seed=SEED, top_k=40, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.4,
    logit_bias={5: 3.0, 60: -100.0}, logprobs=3,
)  # fmt: skip


class VoidWeights(RandomWeights):
    """The embedding of VOID is NaN; its logit is 0, so that nobody chooses it unasked."""

    def load(self, name):
        tensor = super().load(name)
        if name in ("embed", "lm_head"):
            tensor[VOID] = torch.nan if name == "embed" else 0
        return tensor


class VoidLaneWeights(RandomWeights):
    """VOID alone has a value in a column that no module writes; in the last layer one lane makes of it values
    beyond float16. That lane's logits are then NaN, the other lanes' are not."""

    LANE, COLUMN = 1, 5

    def load(self, name):
        tensor, kind = super().load(name), name.rpartition(".")[2]
        if kind in ("embed", "lm_head"):
            tensor.view(-1, tensor.shape[-1])[VOID] = 0
        if kind in ("o_proj", "down_proj"):
            tensor[:, self.COLUMN] = 0
        if kind == "embed":
            tensor[:, self.COLUMN] = 0
            tensor[VOID, self.COLUMN] = 1000  # far more than modules add: normalized, the root of the width
        if name == f"layers.{self.spec.num_layers - 1}.v_proj":
            tensor[self.LANE, :, self.COLUMN] = 60_000
        return tensor


ONE_LANE = spec_of(dtype=DType.F16, num_layers=2, qk_norm=True, windows=(4, 0), max_context=512)
LANES = mixed_lanes(
    Head.VOCAB_PARALLEL, num_layers=3, hidden_size=48, intermediate_size=96, vocab_size=104,
    reduce_attention=(OWN, NOW, DELAYED), reduce_mlp=(NOW, OWN, DELAYED), max_context=512,
)  # fmt: skip
# Groups of 128 that two ranks divide.
WHOLE_GROUPS = {"dtype": DType.F16, "num_layers": 2, "hidden_size": 128, "intermediate_size": 256, "num_heads": 8,
                "num_kv_heads": 4, "head_dim": 32, "windows": (4, 0), "max_context": 512}  # fmt: skip
NARROW = {
    "fp8 blocks": (NarrowRandomWeights, narrow_spec(FORMATS["fp8-block"], **WHOLE_GROUPS)),
    "int4 g128": (NarrowRandomWeights, narrow_spec(FORMATS["int4-g128"], **WHOLE_GROUPS)),
}
MODELS = NARROW | {
    "one lane": (RandomWeights, ONE_LANE),
    "lanes": (RandomWeights, LANES),
    "void": (VoidWeights, ONE_LANE),
    "void lane": (VoidLaneWeights, LANES),
}


def together(kind, round_alike):
    """A backend on a CPU with requests in columns and prompts in chunks, of which a long prompt takes two.

    round_alike  its kernels of one and of several columns are to give the same bits; else about the same
    """

    class TogetherBackend(kind):
        chunk_positions, rounds_alike = 4, round_alike

        def __init__(self, weights, options):
            super().__init__(weights, options, counts=(4,))

    return TogetherBackend


TOGETHER = {
    "cuda on a CPU, together": together(ColumnBackend, True),
    f"{HIP}, together": together(HipColumnBackend, False),
}
RANKS = {"cuda on a CPU, two ranks": FiberBackend, f"{HIP}, two ranks": HipFiberBackend}
KINDS = BACKENDS | TOGETHER | RANKS | {TWO_GPUS: CudaBackend}
ON_RANKS = (*RANKS, TWO_GPUS)


@dataclass(frozen=True)
class Sizes:
    """What a backend has the time for."""

    context: int = 24
    long: int = 7  # tokens of a prompt that no backend runs in one piece
    count: int = 6  # tokens of an answer


GPU_SIZES = Sizes(2048, 1500, 100)  # a prompt that takes milliseconds, so that the host can speak within it
SLOW_SIZES = Sizes(16, 7, 4)


def sizes_of(name):
    return GPU_SIZES if name in ON_GPU else SLOW_SIZES if name in SLOW else Sizes()


@functools.cache
def made(name, model):
    weights, spec = MODELS[model]
    device = "nvidia" if name in ON_GPU else ""
    if name == TWO_GPUS:
        skip_without_two()
    if name in ON_RANKS and spec.vocab_size % 2:
        spec = spec.replace(vocab_size=spec.vocab_size - 1)  # an id that no test asks for
    context = sizes_of(name).context
    # A library rounds otherwise, so that its keys and values would not give the logits compared with.
    options = BackendOptions(3, context, 2 if name in ON_RANKS else 1, device, prefill="kernel")
    backend = KINDS[name](weights(spec), options)
    if isinstance(backend, BackgroundCompiler):
        backend.settle()  # so that it is always the same kernel that is judged
    return backend


def opened(name, model="one lane"):
    """A backend of three slots, one for all tests. The weights are made on the CPU: all have the same."""
    return made(name, model)


@functools.cache
def reference(model):
    weights, spec = MODELS[model]
    return ReferenceBackend(weights(spec), BackendOptions())


def marked(name, *values, always=()):
    return pytest.param(name, *values, marks=marks(name, always=always))


def marked_narrow(name, model, *values, always=()):
    """Of a model of NARROW: slow where it runs on a CPU, but for (name, model) that `always` has."""
    (mark,) = marks(name) or (pytest.mark.slow,)
    return pytest.param(name, model, *values, marks=() if (name, model) in always else mark)


every_backend = pytest.mark.parametrize("name", [marked(name) for name in BACKENDS])


def every_backend_on(*models, names=tuple(BACKENDS), narrow=(), hip=(), always=()):
    """narrow  names of backends that also run NARROW; `always` has which of those always do
    hip     names of HIP's that always run
    """
    return pytest.mark.parametrize(
        ("name", "model"),
        [
            *(marked(name, model, always=hip) for name in names for model in models),
            *(marked_narrow(name, model, always=always) for name in narrow for model in NARROW),
        ],
    )


def request(slot, prompt, params, count, **fields):
    return Request(slot, tuple(prompt), params, params.seed or 0, count, **fields)


def long_prompt(name, first=0):
    return [(first + 7 * i) % VOID for i in range(sizes_of(name).long)]


def said(mailbox, slot):
    """All steps that were not read before, without the times at which they were made."""
    steps = mailbox.read(slot, 0)
    assert not any(isinstance(step, Failure) for step in steps), steps
    return [step._replace(device_ns=0) for step in steps]


def served(backend, *requests):
    """What requests say that are posted at once; after it nobody is left and nothing follows."""
    mailbox = Mailbox()
    for r in requests:
        mailbox.post(r)
    backend.generate(mailbox)
    out = [said(mailbox, r.slot) for r in requests]
    assert mailbox.resumed == {}
    backend.generate(mailbox)
    assert all(mailbox.read(r.slot, 0) == [] for r in requests)
    for r, steps in zip(requests, out, strict=True):
        assert [s.finish is None for s in steps] == [True] * (len(steps) - 1) + [False]
        assert steps[-1].held == len(r.prompt) + len(steps) - 1  # all but the last token
    return out


class Near(Step):
    """A step, equal to those whose log-probabilities are as near as kernels that round otherwise leave them."""

    def __eq__(self, other):
        exact, values = zip(*((
            (s.token, s.finish, s.held, s.rank, s.logprob is None, [i for i, _ in s.top]),
            [s.logprob or 0.0, *(value for _, value in s.top)],
        ) for s in (self, other)), strict=True)  # fmt: skip
        return exact[0] == exact[1] and np.allclose(*values, rtol=0, atol=NEAR)

    __hash__ = Step.__hash__


def as_exact(backend, steps):
    """Steps to compare with what a backend says of the same request beside others."""
    return steps if getattr(backend, "rounds_alike", True) else [Near(*step) for step in steps]


def alone(backend, r, slot=2):
    """What a request says with the backend to itself, in another slot."""
    return as_exact(backend, served(backend, replace(r, slot=slot, mask=None))[0])


def scored(backend, r):
    """What is told of a request's prompt, and what it says, with the backend to itself."""
    mailbox = Mailbox()
    mailbox.post(r)
    backend.generate(mailbox)
    return mailbox.read_prompt(r.slot), as_exact(backend, said(mailbox, r.slot))


def at_look(mailbox, number, act):
    """Call `act` when the backend looks for arrivals that often: at its second look it has begun to serve."""
    looks = itertools.count(1)

    def look(how):
        if next(looks) == number:
            act()
        return how(mailbox)

    mailbox.take = partial(look, type(mailbox).take)
    mailbox.waiting = partial(look, type(mailbox).waiting)


def resolved(vocab, bad=(), end=(), **settings):
    """Parameters of a request; bad words and end tokens are given as ids."""
    params = SamplingParams(**({"temperature": 2.0, "seed": SEED, "max_tokens": None} | settings))
    return replace(params.resolve(vocab), bad_words_token_ids=bad, end_token_ids=end)


def impatient(name, backend, monkeypatch):
    """A mask may take a fifth of a second, and a wait of the CUDA or HIP kernel on a CPU much less.

    Triton's interpreter runs in the thread that brings the masks: there a kernel waits for none (but in
    test_triton_serving.py).
    """
    monkeypatch.setattr(serving, "MASK_S", 0.2)
    if name.startswith(("cuda", HIP)):
        monkeypatch.setattr(backend, "wait_ns", 2 * 10**8 if name in ON_GPU else backend.wait_ns >> 9)
    elif name in ON_GPU:
        pointers = backend.memory.pointers._replace(limit=200_000)  # of 1,024 ns
        monkeypatch.setattr(backend.memory, "pointers", pointers)


@contextlib.contextmanager
def planted(name, model, *edit):
    """A backend of fibers with an edit (cuda_planting.plant) of the kernels that serve."""
    backend = opened(name, model)
    backend.kernels_of_several()  # opens them all
    with contextlib.ExitStack() as stack:
        for kernel in backend._kernels:
            stack.enter_context(planted_in(kernel, edit))
        yield


@contextlib.contextmanager
def planted_in(kernel, edit):
    """One kernel of a backend of fibers with an edit: of HIP's own header, where it has one of that name."""
    own = isinstance(kernel, HipFiberKernel) and (HIP_INCLUDE / "kog" / edit[0]).exists()
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(kernel, "library"):
        if own:
            kernel.library = kernel.compiled(own=plant(Path(folder), edit, source=HIP_INCLUDE))
        else:
            kernel.library = kernel.compiled(plant(Path(folder), edit))
        yield
