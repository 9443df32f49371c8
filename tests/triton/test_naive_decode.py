"""docs/naive_decode.py makes the reference's tokens, and is as short as it says."""

import ast
import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton compiles for the GPU here: run on a machine without one", allow_module_level=True)

from kog_triton.backends import BackendOptions
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.model.spec import DType
from kog_triton.schedule.rope import rope_table
from tests import ROOT
from tests.lib.concurrent_interpreter import concurrent
from tests.lib.lowering_cases import ArrayWeights
from tests.lib.triton_cases import plain

SOURCE = ROOT / "docs/naive_decode.py"
MOST_LINES = 60
PROMPT, LIMIT = (3, 17, 12), 6


class Weights(NamedTuple):
    embed: Any
    layers: Any
    norm: Any
    lm_head: Any
    rope: Any


class Scratch(NamedTuple):
    x: Any
    qkv: Any
    a: Any
    gate_up: Any
    logits: Any
    cache: Any
    counter: Any


@pytest.fixture(scope="module")
def naive():
    spec = importlib.util.spec_from_file_location("naive_decode", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(naive, spec, weights, stop, seed, memory):
    """Tokens, and the logits of the last position that ran."""

    heads, kv_heads, d, f = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.intermediate_size
    wide, h = (heads + 2 * kv_heads) * d, spec.hidden_size
    norms, names = ("attention_norm", "mlp_norm"), ("q", "k", "v", "o", "gate", "up", "down")
    layers = [
        weights.load(f"layers.{i}.{name}").flatten()
        for i in range(spec.num_layers)
        for name in (*norms, *(f"{n}_proj" for n in names))
    ]
    rope = torch.from_numpy(rope_table(spec.rope, d, 16))
    ends = (weights.load("embed"), torch.cat(layers), weights.load("norm"), weights.load("lm_head"))
    cache = torch.full((spec.num_layers, 2, kv_heads, 16, d), torch.nan)
    vectors = (torch.full((n,), torch.nan) for n in (h, wide, heads * d, 2 * f, spec.vocab_size))
    s = Scratch(*vectors, cache, torch.zeros(1, dtype=torch.int32))
    at = [2 * h]
    for size in (wide * h, h * heads * d, 2 * f * h, h * f):
        at.append(at[-1] + size)
    sizes = SimpleNamespace(
        H=h, HEADS=heads, KV_HEADS=kv_heads, D=d, F=f, V=spec.vocab_size, LAYERS=spec.num_layers,
        QKV=at[0], O=at[1], GATE_UP=at[2], DOWN=at[3], LAYER=at[4],
        CONTEXT=16, EPS=spec.norm_eps, WIDE=64, PROGRAMS=2,
    )  # fmt: skip
    tokens = torch.zeros(LIMIT, dtype=torch.int32)
    tokens[: len(PROMPT)] = torch.tensor(PROMPT)
    with concurrent(seed, memory):
        naive.decode_kernel[(2,)](tokens, len(PROMPT), LIMIT, stop, Weights(*ends, rope), s, sizes)
    return tokens.tolist(), s.logits.numpy()


@pytest.mark.parametrize("memory", ["sc", "stale"])
def test_it_makes_the_reference_s_tokens(naive, memory):
    spec = plain(2, hidden_size=16, num_heads=2, num_kv_heads=1, intermediate_size=12, vocab_size=20)
    spec = spec.replace(dtype=DType.F32)
    weights = ArrayWeights(spec.replace(dtype=DType.F16))
    weights.spec = spec
    reference = ReferenceBackend(weights, BackendOptions())
    known = list(PROMPT)
    while len(known) < LIMIT:
        rows = reference.forward_logits(known)
        known.append(int(rows[-1].argmax()))
    tokens, logits = run(naive, spec, weights, -1, 1, memory)
    assert tokens == known
    np.testing.assert_allclose(logits, rows[-1], atol=1e-4 * rows.std())
    stopped, _ = run(naive, spec, weights, known[4], 2, memory)
    assert stopped == [*known[:5], 0]


COMPILES = """
from collections import namedtuple
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import naive_decode

w = namedtuple("W", "embed layers norm lm_head rope")(*["*fp32"] * 5)
s = namedtuple("S", "x qkv a gate_up logits cache counter")(*["*fp32"] * 6, "*i32")
sizes = dict(H=64, HEADS=4, KV_HEADS=2, D=16, F=96, V=100, LAYERS=2, CONTEXT=16, EPS=1e-5, WIDE=128, PROGRAMS=132)
sizes |= dict(QKV=128, O=8320, GATE_UP=12416, DOWN=24704, LAYER=30848)
M = namedtuple("M", sizes)(**sizes)
types = {"tokens": "*i32", "prompt": "i32", "limit": "i32", "stop": "i32", "w": w, "s": s, "M": "constexpr"}
for target in (GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)):
    print(compile(ASTSource(naive_decode.decode_kernel, types, {(6,): M}), target=target).metadata.shared)
"""


def test_it_compiles_for_both_vendors(tmp_path):
    left = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    environ = left | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(SOURCE.parent)}
    command = [sys.executable, "-c", COMPILES]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 2


def test_it_is_short():
    """Lines of code: neither empty nor comments, docstrings or imports."""
    text = SOURCE.read_text()
    left = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            left.add(node.lineno)
        if isinstance(node, (ast.FunctionDef, ast.Module)) and ast.get_docstring(node):
            left |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate(text.splitlines(), 1)
    assert (
        sum(bool(line.strip()) and not line.strip().startswith("#") and n not in left for n, line in lines)
        <= MOST_LINES
    )
