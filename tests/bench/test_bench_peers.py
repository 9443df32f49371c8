"""The peers of `kog bench` are the same model, and llama-bench's answers are read with care.

On a CPU nothing is captured in a graph or compiled for a GPU: the maths and the loops are the same.
"""

import json
import os
import stat
from pathlib import Path

import numpy as np
import pytest
import torch

from kog_triton.bench.kl_limit import PEER
from kog_triton.bench.peers import Setting, find_peer, llama_bench, transformers_compiled
from kog_triton.bench.timing import summarize
from kog_triton.checkpoint.narrow_random import NarrowRandomWeights
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.errors import ModelError, RequestError, RunError
from kog_triton.model.families import read_spec
from kog_triton.model.shapes import named_shape, with_format
from kog_triton.model.spec import DType
from kog_triton.model.weight_format import FORMATS, Code, Offset, Scale, WeightFormat
from tests.lib.bench_models import MODELS, PROMPT, SMALL, judge_of

pytestmark = pytest.mark.usefixtures("one_thread")
ZERO_POINTS = WeightFormat(Code.UINT4, 1, 32, Scale.F16, Offset.ZERO_POINT)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("peer", ["transformers", "transformers-compiled", "transformers-tuned", "torch-graph"])
def test_a_peer_is_the_same_model(model, peer):
    """On a CPU nothing is compiled or captured; the maths and the loop are those of a GPU."""
    weights = RandomWeights(read_spec(SMALL | MODELS[model]))
    setting = Setting(weights, torch.device("cpu"), len(PROMPT) + 16)
    engine = find_peer(peer)(setting)
    check = judge_of(weights).examine(engine, PEER)
    assert check.passed and check.top1 == 1 and check.kl_max < 1e-9 and check.largest_gap < 1e-4
    runs = [engine.generate(PROMPT, 16) for _ in range(2)]
    assert runs[0].tokens == runs[1].tokens and len(runs[0].tokens) == 16
    assert runs[0].arrivals == sorted(runs[0].arrivals)
    assert engine.memory_bytes()["weights"] == weights.spec.num_parameters * 4
    engine.close()


NARROW = {"int4-g32": "cpu", "int4-g32-zp": "cpu", "fp8-channel": "cpu", "fp8-block": "cuda"}


def narrow_setting(name: str, device: str, shape=None) -> Setting:
    """A model whose layers' matrices are narrow, and whose widths are fours of blocks of 128 x 128."""
    how = ZERO_POINTS if name == "int4-g32-zp" else FORMATS[name]
    wide = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "num_attention_heads": 8}
    spec = read_spec(SMALL | MODELS["qwen2"] | wide | {"num_key_value_heads": 2})
    spec = spec.replace(dtype=DType.BF16)
    return Setting(NarrowRandomWeights(with_format(spec, how), 0, device), torch.device(device), len(PROMPT) + 16)


@pytest.mark.parametrize(
    ("name", "device"),
    [
        pytest.param(name, device, marks=[pytest.mark.gpu] if device == "cuda" else [])
        for name, only in NARROW.items()
        for device in ("cpu", "cuda")
        if only in ("cpu", device)
    ],
)
def test_the_baseline_multiplies_by_narrow_weights(name, device):
    """By torch's own products, which lose what bf16 and, with FP8, 3 bits of an activation's mantissa lose."""
    setting = narrow_setting(name, device)
    engine = find_peer("torch-narrow")(setting)
    ids = PROMPT[:8]
    exact = judge_of(setting.weights, ids).logits
    error = np.linalg.norm(engine.logits(ids) - exact) / np.linalg.norm(exact)
    assert error < (0.03 if name.startswith("int4") else 0.15), error
    assert engine.spec.narrow and engine.spec.bytes_per_token < setting.wide_spec.bytes_per_token
    layers = engine.memory_bytes()["weights"] - 2 * setting.weights.load("embed").numel()
    wide_layers = find_peer("torch-graph")(setting).memory_bytes()["weights"]
    assert layers < 0.75 * wide_layers
    run = engine.generate(PROMPT, 16)
    assert len(run.tokens) == 16
    engine.close()


def test_other_peers_of_narrow_weights_read_their_values():
    """Their bytes a token are those of 16 bits: by the narrow ones' the share of the bandwidth would come out small."""
    setting = narrow_setting("int4-g32", "cpu")
    for name in ("torch-graph", "transformers"):
        engine = find_peer(name)(setting)
        assert not engine.spec.narrow and engine.spec.dtype is DType.BF16
        engine.close()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("q4_1", "torch's int4 product has zero points, not minimums"),
        ("mxfp4", "torch has no product of mxfp4 weights"),
        ("q8_0", "torch has no product of int8 g32 weights"),
        ("int4-g128", ""),
        ("fp8-block", ""),
    ],
)
def test_torch_s_products_of_narrow_weights(name, reason):
    setting = Setting(
        NarrowRandomWeights(with_format(named_shape("qwen3-0.6b"), FORMATS[name])), torch.device("cuda"), 8
    )
    assert find_peer("torch-narrow").absent(setting) == reason


def test_torch_s_product_of_blocks_takes_fours_of_them():
    spec = named_shape("qwen3-0.6b").replace(intermediate_size=3200)
    setting = Setting(NarrowRandomWeights(with_format(spec, FORMATS["fp8-block"])), torch.device("cuda"), 8)
    why = "torch's product of FP8 blocks takes fours of them, not 3200 columns"
    assert find_peer("torch-narrow").absent(setting) == why


def test_wide_weights_have_their_own_baseline():
    setting = Setting(RandomWeights(named_shape("qwen3-0.6b")), torch.device("cuda"), 8)
    assert find_peer("torch-narrow").absent(setting) == "it is for narrow weights: --weights"


def test_what_a_graph_would_hold_is_traced_in_one_piece(monkeypatch):
    """Traced once a length and never again: whatever changes from token to token is on the device."""
    tries = []

    def traced(work, before, device, options=None):
        compiled = torch.compile(work, fullgraph=True, dynamic=False, backend="eager")
        for _ in range(2):
            before()
            compiled()
        tries.append(compiled)
        return compiled

    monkeypatch.setattr(transformers_compiled, "captured", traced)
    weights = RandomWeights(read_spec(SMALL | MODELS["mistral"]))  # with a window
    engine = find_peer("transformers-compiled")(Setting(weights, torch.device("cpu"), len(PROMPT) + 16))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        check = judge_of(weights).examine(engine, PEER)
    assert check.passed and check.largest_gap < 1e-4 and len(tries) == 2


def test_weights_without_a_place_are_refused():
    """Qwen3 has norms that a spec without `qk_norm` does not bring."""
    weights = RandomWeights(read_spec(SMALL | MODELS["qwen3"]).replace(qk_norm=False))
    with pytest.raises(ModelError, match="also wants"):
        find_peer("transformers")(Setting(weights, torch.device("cpu"), 64))


# ---- llama-bench ----


ANSWER = {  # what llama-bench prints about a test, as one of its builds did: of 42 fields those that count
    "build_commit": "0c1e570",
    "build_number": 1,
    "gpu_info": "",
    "backends": "CPU",
    "model_filename": "tiny.gguf",
    "model_type": "llama ?B all F32",
    "n_gpu_layers": 99,
    "n_prompt": 20,
    "n_gen": 0,
    "n_depth": 0,
    "test_time": "2026-11-21T16:11:18Z",
    "stddev_ns": 0,
    "avg_ts": 11337.836344,
    "samples_ns": [1764005],
}


@pytest.fixture
def llama_cpp(tmp_path, monkeypatch):
    """A llama-bench on the PATH that answers with ANSWER, and a setting of a model of its size."""
    weights = RandomWeights(read_spec(SMALL | MODELS["llama"]))
    count = weights.spec.num_parameters

    def install(**changes):
        answer = ANSWER | {"model_n_params": count, "model_size": 4 * count} | changes
        program = tmp_path / "llama-bench"
        program.write_text(
            '#!/bin/sh\ncase "$*" in\n'
            '*"-p 0 -n 3 -d 20"*) ns=6000000;;\n*"-p 20 -n 0 -d 0"*) ns=9000000;;\n*) ns=1;;\nesac\n'
            f"echo '[ {json.dumps(answer)[:-1]}, \"avg_ns\": '$ns'}} ]'\n"
        )
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        return Setting(weights, torch.device("cpu"), 64, gguf=Path("m.gguf"))

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return install


def test_llama_bench_is_asked_and_read(llama_cpp):
    setting = llama_cpp()
    assert llama_bench.LlamaBench.absent(setting) == ""
    assert "--gguf" in llama_bench.LlamaBench.absent(Setting(setting.weights, setting.device, 64))
    engine = llama_bench.LlamaBench(setting)
    assert engine.version == "llama.cpp 0c1e570 (CPU), llama ?B all F32"
    assert engine.memory_bytes() == {"weights": 4 * setting.weights.spec.num_parameters}
    got = summarize([engine.generate(PROMPT, 4)], 20)
    assert got["ttft_us"] == pytest.approx(9000)
    assert got["host"]["itl_p50_us"] == pytest.approx(2000, abs=0.1)


@pytest.mark.parametrize("text", ["nothing", "[]", "[3]", '[{"avg_ns": 1}]', "{}"])
def test_what_llama_bench_does_not_print_is_refused(text):
    with pytest.raises(RunError, match="llama-bench"):
        llama_bench.only_result(text)


@pytest.mark.parametrize("field", ["model_n_params", "model_size"])
def test_a_gguf_of_another_model_or_type_is_refused(llama_cpp, field):
    right = RandomWeights(read_spec(SMALL | MODELS["llama"])).spec.num_parameters
    right *= 4 if field == "model_size" else 1
    llama_bench.LlamaBench(llama_cpp(**{field: round(right * 1.005)}))  # tables for RoPE
    for factor in (0.5, 1.02):
        with pytest.raises(RunError, match=f"its {field} is .* convert it as f32"):
            llama_bench.LlamaBench(llama_cpp(**{field: round(right * factor)}))


def test_an_unknown_peer_is_refused():
    with pytest.raises(RequestError, match="no peer is named 'vllm': have transformers"):
        find_peer("vllm")
