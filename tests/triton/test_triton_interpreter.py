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

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton compiles for the GPU here: run on a machine without one", allow_module_level=True)

import triton.language as tl

from kog_triton.backends import BackendOptions
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.backends.triton.kernel import attention, codes, matvec, residual
from kog_triton.model.spec import DType, Head, Reduce
from kog_triton.schedule import triton as tiles
from kog_triton.schedule.topology import SIZES
from tests.lib.concurrent_interpreter import Deadlock, concurrent
from tests.lib.lowering_cases import ArrayWeights
from tests.lib.planting import plant
from tests.lib.slow import some_always
from tests.lib.triton_cases import PROMPT, Case, backend_of, lanes, plain

NOW, OWN, DELAYED = Reduce.NOW, Reduce.OWN, Reduce.DELAYED
F16, BF16 = DType.F16, DType.BF16
TOLERANCE = {F16: 0.01, BF16: 0.06}  # root mean square of the error over the logits' deviation


CASES = {
    "llama": Case(plain(2, intermediate_size=64)),
    "qwen2": Case(plain(qkv_bias=True, tied_embeddings=True, dtype=BF16), 6),
    "qwen3": Case(plain(qk_norm=True), 6),
    "long": Case(plain(num_heads=6), 4, (3, 42, 12, 7, 8), 1, 2),
    "longer": Case(plain(qk_norm=True, windows=(5,)), 2, (3, 42, 12, 7, 8, 1, 9), 9, 2, 2),
    "window": Case(plain(windows=(3,)), 4, (3, 42, 12, 7, 8), 1, 1),
    "more splits than are in use": Case(plain(num_kv_heads=1), 4, (3, 42, 12, 7, 8), 2, 2),
    "splits that move": Case(plain(num_heads=6), 8, (3, 42, 12, 7, 8, 1, 9), 1, 1, 1),
    "biases": Case(plain(qkv_bias=True, o_bias=True, mlp_bias=True, hidden_size=36)),
    "widths": Case(  # rows in tiles of several; lm_head's first tiles are fewer than qkv_proj has on its way
        plain(num_heads=3, num_kv_heads=3, hidden_size=288, intermediate_size=96, dtype=BF16), 4, PROMPT[:2],
        narrow_cost=0,
    ),
    "a width below a line": Case(
        plain(hidden_size=352, intermediate_size=160), 3, PROMPT[:2], narrow_cost=0
    ),
    "lanes at once": Case(lanes((NOW,), 0)),
    "lanes, splits": Case(lanes((OWN,), 0), 8, (3, 42, 12, 7), 1, 1),
    "lanes, own then late": Case(  # three blocks a lane: their rows in three tiles, which leave together
        lanes((OWN, DELAYED), 1, o_bias=True, mlp_bias=True), 6
    ),
    "lanes, at once then late": Case(lanes((NOW, DELAYED), 1, Head.SUM_THEN_NORM)),
    "lanes that never meet, concatenated": Case(lanes((OWN, OWN), 0, Head.CONCAT)),
    "lanes, vocabulary cut": Case(
        lanes((OWN, DELAYED), 1, Head.VOCAB_PARALLEL, lane_norms=True, dtype=BF16)
    ),
}  # fmt: skip


@cache
def expected(case: Case) -> np.ndarray:
    return ReferenceBackend(ArrayWeights(case.spec), BackendOptions()).forward_logits(case.tokens)


def logits_of(case: Case, seed: int, memory: str, patch: pytest.MonkeyPatch, **change) -> np.ndarray:
    """The kernel's logits; `change` replaces fields of its tiles."""
    for module in filter(None, (attention, sys.modules.get("planted_attention"))):
        patch.setattr(module, "SPLIT_LEAST", tl.constexpr(case.split_least))
        patch.setattr(module, "BLOCK_N", tl.constexpr(case.block_n))
        patch.setattr(module, "FEW", tl.constexpr(case.few))
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


# Run by the slow tests: each has what another has too.
RARE = (
    "qwen2", "longer", "more splits than are in use", "lanes at once", "lanes that never meet, concatenated",
)  # fmt: skip


@pytest.mark.parametrize("name", some_always(CASES, *(n for n in CASES if n not in RARE)))
def test_logits_equal_the_reference(name, monkeypatch):
    """Under both memory models; what another block did first leaves no trace in the bits."""
    case = CASES[name]
    first = logits_of(case, 0, "sc", monkeypatch)
    assert error_of(case, first) < 1
    np.testing.assert_array_equal(logits_of(case, 1, "stale", monkeypatch), first)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 20))
@pytest.mark.parametrize("name", CASES)
def test_logits_equal_the_reference_in_many_runs(name, seed, monkeypatch):
    case = CASES[name]
    logits = logits_of(case, seed, ("sc", "stale")[seed % 2], monkeypatch)
    assert error_of(case, logits) < 1


def test_one_block_computes_what_several_do(monkeypatch):
    case = CASES["qwen3"]
    alone = replace(case, num_blocks=1)
    assert error_of(case, logits_of(alone, 0, "stale", monkeypatch)) < 1


def test_matrices_of_several_tiles_along_k(monkeypatch):
    """Loops over row tiles and over K tiles, several of them on their way, and the last ones that ask for the next
    stage's."""
    monkeypatch.setattr(tiles, "WIDTHS", (32,))
    spec = plain(hidden_size=68, intermediate_size=132)
    case = Case(spec, tokens=PROMPT[:2])
    stages = backend_of(case).tiles.stages
    assert [(s.k_tiles, s.ahead) for s in stages] == [(2, 2), (1, 5), (2, 6), (3, 8), (2, 2)]
    assert error_of(case, logits_of(case, 1, "stale", monkeypatch)) < 1


@pytest.mark.parametrize("lines_axis", [0, 1])
def test_fewer_rows_than_warps(lines_axis, monkeypatch):
    """Whose lines the warps share: they are added once a unit, whichever axis they are on."""
    for module in (codes, matvec):
        monkeypatch.setattr(module, "LINES_AXIS", tl.constexpr(lines_axis))
    case = Case(plain(intermediate_size=1536), 8, PROMPT[:2])
    down = backend_of(case).tiles.stages[3]
    assert (down.tile_rows, down.widths) == (4, (512, 256))  # the two halves of eight warps
    assert error_of(case, logits_of(case, 1, "stale", monkeypatch)) < 1


@pytest.mark.parametrize("lines_axis", [0, 1])  # Triton from 3.7 on wants 0
def test_tiles_in_a_loop(lines_axis, monkeypatch):
    """Of a stage that has too many for straight code: iterations, what they leave over, and the tile across both."""
    monkeypatch.setattr(tiles, "WIDTHS", (32,))
    monkeypatch.setattr(tiles, "UNROLLED", 6)
    monkeypatch.setitem(SIZES, "cpu", replace(SIZES["cpu"], tile_bytes=4 * 4 * 32))
    for module in (codes, matvec):
        monkeypatch.setattr(module, "LINES_AXIS", tl.constexpr(lines_axis))
    spec = plain(num_heads=6, hidden_size=68, intermediate_size=132)
    case = Case(spec, tokens=PROMPT[:2])
    stages = backend_of(case).tiles.stages
    assert [(s.units, s.k_tiles, s.loop_units) for s in (stages[1], stages[3])] == [(5, 2, 2), (5, 3, 1)]
    assert error_of(case, logits_of(case, 2, "stale", monkeypatch)) < 1


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
        "splits that move", "stale",
    ),
    "fences release nothing, and cached keys come late": Fault(
        "sync", 'tl.atomic_add(word, 1, sem="acq_rel"', 'tl.atomic_add(word, 1, sem="acquire"',
        "long", "stale",
    ),
    "a candidate is not written through": Fault(
        "sample", "store_shared(own, tag", "tl.store(own, tag", "qwen3", "stale",
    ),
    "no phase flips": Fault(
        "layer", "phase = (it + 1) & 1\n", "phase = it * 0 + 1\n", "llama",
    ),
    "outputs reduced at once stand where late layers write": Fault(
        "residual", "if S.delay > 0:\n            # Lanes", "if S.delay < 0:\n            # Lanes",
        "lanes, at once then late",
    ),
    "rope rotates backwards": Fault(
        "attention", "a * cos - b * sin", "a * cos + b * sin", "llama",
    ),
    "gate and up are swapped": Fault(
        "layer", "value = silu(gate) * up", "value = silu(up) * gate",
        "qwen3",
    ),
    "the window is one position short": Fault(
        "attention", "tl.minimum(window, position + 1)", "tl.minimum(window - 1, position + 1)",
        "window",
    ),
    "every split takes the new key": Fault(
        "attention", "newest = split == used - 1", "newest = split < used", "long",
    ),
    "splits are added as if their maxima were equal": Fault(
        "attention", "tl.exp2(top - tl.max(top, axis=0)[None, :])", "top * 0 + 1", "long",
    ),
    "every split joins the first values of a head": Fault(
        "attention", "i, s = split * EACH + tl.arange(0, EACH)", "i, s = tl.arange(0, EACH)", "long",
    ),
    "splits that are not in use join nothing": Fault(
        "attention", "    joins = split * EACH < VALUES\n",
        "    joins = (split * EACH < VALUES) & (split < used)\n", "more splits than are in use",
    ),
    "one split of several publishes the outputs": Fault(
        "attention", "if (used == 1) & newest:", "if newest:", "long",
    ),
    "outputs walked alone are the first head's": Fault(
        "attention", "to + head * (GROUP * D // 2)", "to", "llama",
    ),
    "the value is rotated like a key": Fault(
        "attention", "quarters(w[4], w[5], kv_mask, phase, S), S)",
        "rotated(quarters(w[4], w[5], kv_mask, phase, S), k_gains, rope, S), S)", "qwen3",
    ),
    "a poll tests its first words alone": Fault(
        "words", "lacking = lacking | (ws[i] ^ wanted)", "lacking = lacking", "qwen3",
    ),
    "the narrow end of a row is left out": Fault(
        "matvec", "y += rests[i]\n", "y += rests[i] * 0.0\n", "a width below a line",
    ),
    "the norm sums the widest tiles alone": Fault(
        "residual", "rest += tl.sum(more)", "rest += 0.0", "widths",
    ),
    "a wait tests its widest words alone": Fault(
        "sync", "found = tl.maximum(found, tl.max(xs[i]))", "found = found", "widths",
    ),
    "rows of units are interleaved": Fault(
        "residual", "tl.reshape(tl.trans(both), (2 * LENGTH,))", "tl.reshape(both, (2 * LENGTH,))",
        "lanes, own then late",
    ),
    "the values of an output's pair are swapped": Fault(
        "residual", "even, odd = unpack_pair(ws[c]", "odd, even = unpack_pair(ws[c]", "qwen2",
    ),
    "a lane hears itself twice": Fault(
        "residual", "tl.sum(tl.where(others,", "tl.sum(tl.where(mask,", "lanes, own then late",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_seen(name, monkeypatch, tmp_path):
    fault = FAULTS[name]
    plant(monkeypatch, tmp_path, fault.module, fault.before, fault.after)
    assert is_red(CASES[fault.case], fault.memory, monkeypatch)


def test_squares_of_two_shapes_that_share_a_sum_are_all_in_it(monkeypatch, tmp_path):
    """As in rows of 1,536 values: here tensors of 128 and 16 words meet in sums of 16 threads."""
    monkeypatch.setattr(residual, "POLLED", tl.constexpr(16))
    assert error_of(CASES["widths"], logits_of(CASES["widths"], 0, "sc", monkeypatch)) < 1
    plant(monkeypatch, tmp_path, "residual", "            total += more\n", "            total += more * 0.0\n")
    monkeypatch.setattr(sys.modules["planted_residual"], "POLLED", tl.constexpr(16))
    assert is_red(CASES["widths"], "sc", monkeypatch)


def test_a_ring_of_late_outputs_that_is_too_short_is_seen(monkeypatch):
    case = CASES["lanes, own then late"]
    assert is_red(case, "sc", monkeypatch, delayed_buffers=case.spec.delay)


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
