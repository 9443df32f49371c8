"""The Triton megakernel in the concurrent interpreter: whole steps of four to six blocks, without a GPU.

Logits are compared, not only tokens, with the torch reference; several seeds and memory models must agree
bit for bit. Planted faults show that each of these gates closes.
"""

import os
import sys
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "Triton compiles for the GPU here: run on a machine without one", allow_module_level=True
    )

import triton
import triton.language as tl
from concurrent_interpreter import Deadlock, concurrent
from planting import plant
from ring_walker import spec_of
from test_lowering import ArrayWeights

from kog_triton.backends import BackendOptions
from kog_triton.backends.mailbox import Failure, Request, Step
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.backends.triton import TritonBackend, attention
from kog_triton.backends.triton.backend import CANCEL
from kog_triton.backends.triton.memory import MAILBOX_HEAD
from kog_triton.backends.triton.sample import gumbel, random_word
from kog_triton.errors import RunError
from kog_triton.model.spec import DType, Head, ModelSpec, Reduce
from kog_triton.sampling import History, SamplingParams, fixed, sample
from kog_triton.sampling.philox import random_words

NOW, OWN, DELAYED = Reduce.NOW, Reduce.OWN, Reduce.DELAYED
F16, BF16 = DType.F16, DType.BF16
CPU = torch.device("cpu")
TOLERANCE = {F16: 0.01, BF16: 0.06}  # root mean square of the error over the logits' deviation
PROMPT = (3, 42, 12)


def plain(layers: int = 1, **changes) -> ModelSpec:
    """One lane; 50 rows of the head divide by nothing."""
    base = {
        "hidden_size": 32,
        "intermediate_size": 44,
        "num_heads": 4,
        "vocab_size": 50,
        "dtype": F16,
    }
    return spec_of(num_layers=layers, **(base | changes))


def lanes(reduce: tuple[Reduce, ...], delay: int, head: Head = Head.MEAN, **changes) -> ModelSpec:
    """Two lanes of two blocks each; both modules of a layer reduce alike."""
    base = {"intermediate_size": 64, "num_lanes": 2, "delay": delay, "head": head}
    return plain(len(reduce), reduce_attention=reduce, reduce_mlp=reduce, **(base | changes))


@dataclass(frozen=True)
class Case:
    spec: ModelSpec
    num_blocks: int = 4
    depth: int = 1
    tokens: tuple[int, ...] = PROMPT
    split_least: int = 16  # attention.SPLIT_LEAST and BLOCK_N: small ones give a short context what
    block_n: int = 64  # a long one has


CASES = {
    "llama": Case(plain(2, intermediate_size=64), depth=2),
    "qwen2": Case(plain(qkv_bias=True, tied_embeddings=True, dtype=BF16), 6),
    "qwen3": Case(plain(qk_norm=True), 6),
    "long": Case(plain(num_heads=6), 4, 1, (*PROMPT, 7, 8), 1, 2),
    "window": Case(plain(windows=(3,)), 4, 1, (*PROMPT, 7, 8), 1, 2),
    "biases": Case(plain(qkv_bias=True, o_bias=True, mlp_bias=True, hidden_size=36)),
    "lanes at once": Case(lanes((NOW,), 0)),
    "lanes, own then late": Case(lanes((OWN, DELAYED), 1, o_bias=True, mlp_bias=True)),
    "lanes, at once then late": Case(lanes((NOW, DELAYED), 1, Head.SUM_THEN_NORM)),
    "lanes, vocabulary cut": Case(
        lanes((OWN, DELAYED), 1, Head.VOCAB_PARALLEL, lane_norms=True, dtype=BF16)
    ),
}  # fmt: skip


class Planted(ArrayWeights):
    """Weights with one value set by hand."""

    def __init__(self, spec: ModelSpec, name: str, at: tuple[int, ...], value: float):
        super().__init__(spec)
        self.arrays[name][at] = value


@cache
def expected(case: Case) -> np.ndarray:
    return ReferenceBackend(ArrayWeights(case.spec), BackendOptions()).forward_logits(case.tokens)


def backend_of(case: Case, weights=None, limit: int = 1 << 22) -> TritonBackend:
    options = BackendOptions(max_context=16)
    weights = weights or ArrayWeights(case.spec)
    backend = TritonBackend(weights, options, case.num_blocks, case.depth, CPU)
    backend.memory.pointers = backend.memory.pointers._replace(limit=limit)
    return backend


def logits_of(
    case: Case, seed: int, memory: str, patch: pytest.MonkeyPatch, **change
) -> np.ndarray:
    """The kernel's logits; `change` replaces fields of its tiles."""
    for module in filter(None, (attention, sys.modules.get("planted_attention"))):
        patch.setattr(module, "SPLIT_LEAST", tl.constexpr(case.split_least))
        patch.setattr(module, "BLOCK_N", tl.constexpr(case.block_n))
    backend = backend_of(case)
    backend.tiles = replace(backend.tiles, **change)
    with concurrent(seed, memory):
        return backend.forward_logits(case.tokens)


def error_of(case: Case, logits: np.ndarray) -> float:
    """In units of what is allowed; NaN if the logits are."""
    want = expected(case)
    assert want.std() >= 1
    error = np.sqrt(np.mean((logits - want) ** 2)) / want.std()
    return float(error) / TOLERANCE[case.spec.dtype]


# ---- whole steps ----


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_the_reference(name, monkeypatch):
    """Under both memory models; what another block did first leaves no trace in the bits."""
    case = CASES[name]
    first = logits_of(case, 0, "sc", monkeypatch)
    assert error_of(case, first) < 1
    np.testing.assert_array_equal(logits_of(case, 1, "stale", monkeypatch), first)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_the_reference_in_many_runs(name, seed, monkeypatch):
    case = CASES[name]
    logits = logits_of(case, seed, ("sc", "stale")[seed % 2], monkeypatch)
    assert error_of(case, logits) < 1


def test_blocks_and_ring_depth_leave_the_function_alone(monkeypatch):
    case = CASES["qwen3"]
    for num_blocks, depth in ((1, 1), (6, 2)):
        other = replace(case, num_blocks=num_blocks, depth=depth)
        assert error_of(case, logits_of(other, 0, "stale", monkeypatch)) < 1


# ---- planted faults ----


@dataclass(frozen=True)
class Fault:
    """An edit of a module of the kernel that a case must notice under a memory model."""

    module: str
    before: str
    after: str
    case: str
    memory: str = "sc"


FAULTS = {
    "a publication is not written through": Fault(
        "sync", 'tl.store(ptr, value, mask=mask, cache_modifier=".wt")',
        "tl.store(ptr, value, mask=mask)", "qwen3", "stale",
    ),
    "a poll reads its own cache": Fault(
        "sync", 'tl.load(ptr, mask=mask, other=other, cache_modifier=".cv")',
        "tl.load(ptr, mask=mask, other=other)", "qwen3", "stale",
    ),
    "fences acquire nothing, and cached keys are old": Fault(
        "sync", 'tl.atomic_add(word, 1, sem="acq_rel"', 'tl.atomic_add(word, 1, sem="release"',
        "long", "stale",
    ),
    "no phase flips": Fault(
        "kernel", "phase = (it + 1) & 1\n\n    stamp", "phase = it * 0 + 1\n\n    stamp", "llama",
    ),
    "outputs reduced at once stand where late layers write": Fault(
        "kernel", "if S.delay > 0:\n            # Lanes", "if S.delay < 0:\n            # Lanes",
        "lanes, at once then late",
    ),
    "rope turns backwards": Fault(
        "attention", "return a * cos + b * sin", "return a * cos - b * sin", "llama",
    ),
    "gate and up are swapped": Fault(
        "kernel", "h = gate / (1.0 + tl.exp(-gate)) * up", "h = up / (1.0 + tl.exp(-up)) * gate",
        "qwen3",
    ),
    "the window is one position short": Fault(
        "attention", "tl.maximum(position + 1 - window, 0)", "tl.maximum(position + 2 - window, 0)",
        "window",
    ),
    "every split takes the new key": Fault(
        "attention", "newest = split == used - 1", "newest = split < used", "long",
    ),
    "splits are added as if their maxima were equal": Fault(
        "attention", "tl.exp2(top - tl.max(top, axis=0)[None, :])", "top * 0 + 1", "long",
    ),
    "a lane hears itself twice": Fault(
        "kernel", "tl.sum(tl.where(others,", "tl.sum(tl.where(mask,", "lanes, own then late",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_seen(name, monkeypatch, tmp_path):
    fault = FAULTS[name]
    plant(monkeypatch, tmp_path, fault.module, fault.before, fault.after)
    assert is_red(CASES[fault.case], fault.memory, monkeypatch)


def test_a_ring_of_late_outputs_that_is_too_short_is_seen(monkeypatch):
    case = CASES["lanes, own then late"]
    assert is_red(case, "sc", monkeypatch, past_slots=case.spec.delay)


def is_red(case: Case, memory: str, patch: pytest.MonkeyPatch, **change) -> bool:
    """Whether any of a few seeds gives other logits, or hangs."""
    for seed in range(4):
        try:
            logits = logits_of(case, seed, memory, patch, **change)
        except Exception as error:  # Triton wraps what a program raises
            assert Deadlock.__name__ in repr(error)
            return True
        if not error_of(case, logits) < 1:
            return True
    return False


# ---- requests ----


def serve(
    backend: TritonBackend, request: Request, seed: int = 0, host=None
) -> list[Step | Failure]:
    mailbox = backend.new_mailbox()
    mailbox.post(request)
    with concurrent(seed, "stale", host):
        backend.generate(mailbox)
    return mailbox.read(request.slot)


GREEDY = SamplingParams(temperature=0.0)


@pytest.mark.parametrize("name", ["qwen3", "lanes, vocabulary cut"])
@pytest.mark.parametrize("temperature", [0.0, 1.7])
def test_tokens_are_the_definitions_own(name, temperature):
    """The ids that kog_triton.sampling draws from the kernel's own logits, bit for bit."""
    case, params = CASES[name], SamplingParams(temperature=temperature, seed=2**63 + 11)
    backend = backend_of(case)
    steps = serve(backend, Request(0, (3, 42), params, params.seed, 3, sample_idx=2))
    tokens = [step.token for step in steps]
    assert [step.finish for step in steps] == [None, None, "length"]
    with concurrent(1, "sc"):
        logits = backend.forward_logits([3, 42, *tokens[:-1]])
    for i, token in enumerate(tokens):
        drawn = sample(logits[1 + i], params, History((3, 42)), 2 + i, 2)
        assert token == drawn.token


def test_stop_ids_and_kept_keys():
    """A stop id ends the request and is its last token; a prompt's known part is not run again."""
    backend = backend_of(CASES["qwen3"])
    whole = [s.token for s in serve(backend, Request(0, (3, 42), GREEDY, 0, 3))]
    stop = frozenset({49 - whole[1], whole[1]} - {whole[0]})
    again = serve(backend, Request(0, (3, 42), GREEDY, 0, 3, stop_token_ids=stop, cached=1), 5)
    assert [(s.token, s.finish) for s in again] == [(whole[0], None), (whole[1], "stop")]


def test_cancel_ends_at_a_token():
    backend = backend_of(CASES["qwen3"])
    words = backend.memory.mailbox.numpy()

    def host() -> None:
        if words[MAILBOX_HEAD]:
            words[0] = CANCEL

    steps = serve(backend, Request(0, (3, 42), GREEDY, 0, 12), 0, host)
    assert steps[-1].finish == "cancel"
    assert 1 <= len(steps) - 1 <= 3  # in the sampling that read the word, or the one after


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name, at", [("lm_head", (7, 0)), ("layers.0.down_proj", (0, 2, 1))])
def test_a_number_that_is_none_voids_the_run(name, at, value):
    case = CASES["qwen3"]
    weights = Planted(case.spec, name, at, value)
    if name == "lm_head":  # plus infinity for one token of two at most: keep its sign
        weights.arrays[name][8] = -weights.arrays[name][7]
    (failure,) = serve(backend_of(case, weights), Request(0, (3, 42), GREEDY, 0, 2))
    assert isinstance(failure.error, RunError)
    assert "NaN" in str(failure.error) and "inf" in str(failure.error)


@pytest.mark.parametrize("name", ["qwen3", "lanes, own then late"])
def test_a_wait_that_expires_says_where(name):
    """One block never starts: the others give up, leave, and name stage and layer."""
    backend = backend_of(CASES[name], limit=5)
    with concurrent(0, "sc", stalled=1), pytest.raises(RunError, match=r"layer 0") as caught:
        backend.forward_logits(PROMPT)
    assert "words" in str(caught.value) or "attention" in str(caught.value)


# ---- random numbers ----


@triton.jit
def noise_kernel(ids, at, words, noise, N: tl.constexpr):
    """`at`: position, sample index, seed (low, high)."""
    i = tl.arange(0, N)
    r = random_word(
        tl.load(ids + i), tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    )
    tl.store(words + i, r.to(tl.int64))
    tl.store(noise + i, gumbel(r))


@triton.jit
def gumbel_kernel(words, noise, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(noise + i, gumbel(tl.load(words + i).to(tl.uint32)))


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**63 + 5, 2**64 - 1])
@pytest.mark.parametrize("position, sample_idx", [(0, 0), (131071, 3), (2**31 - 1, 2**16)])
def test_random_words_are_the_definitions_own(seed, position, sample_idx):
    ids = torch.cat([torch.arange(60), torch.tensor([151935, 2**17, 2**31 - 4, 2**31 - 1])]).int()
    at = np.array([position, sample_idx, seed & 0xFFFFFFFF, seed >> 32], np.uint32).view(np.int32)
    words, noise = torch.zeros(64, dtype=torch.int64), torch.zeros(64, dtype=torch.int64)
    with concurrent():
        noise_kernel[(1,)](ids, torch.from_numpy(at), words, noise, 64)
    want = random_words(ids.numpy().astype(np.int64), position, sample_idx, seed)
    np.testing.assert_array_equal(words.numpy(), want)
    np.testing.assert_array_equal(noise.numpy(), fixed.gumbel(want))


def test_gumbel_on_edge_words():
    """Powers of two, where the series takes over from the logarithm, both ends, and many between."""
    edges = [0, 2**32 - 1 - 2**22, *(2**k for k in range(32)), *(2**32 - 2**k for k in range(33))]
    near = {(e + d) % 2**32 for e in edges for d in (-2, -1, 0, 1, 2)}
    random = np.random.default_rng(0).integers(0, 2**32, 1024 - len(near))
    words = np.concatenate([np.array(sorted(near)), random]).astype(np.int64)
    noise = torch.zeros(1024, dtype=torch.int64)
    with concurrent():
        gumbel_kernel[(1,)](torch.from_numpy(words), noise, 1024)
    np.testing.assert_array_equal(noise.numpy(), fixed.gumbel(words.astype(np.uint32)))
