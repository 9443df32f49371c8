"""The parts of `kog bench`: wrong text is found, peers are the same model, figures by hand.

On a CPU nothing is captured in a graph or compiled for a GPU: the maths and the loops are the same.
"""

import importlib
import json
import os
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
from concurrent_interpreter import concurrent

from kog_triton.backends import BackendOptions, find_backend
from kog_triton.bench import bulk_read, machine
from kog_triton.bench.bandwidth import measure_bandwidth
from kog_triton.bench.check import Judge, compare, token_gaps
from kog_triton.bench.model import open_model
from kog_triton.bench.peers import Setting, find_peer, llama_bench, transformers_compiled
from kog_triton.bench.read_kernel import read_kernel
from kog_triton.bench.record import make_row, target_of
from kog_triton.bench.subjects import BackendSubject, Run
from kog_triton.bench.timing import decode_bytes, figures, floor, summarize
from kog_triton.bench.trace import count
from kog_triton.errors import ModelError, RequestError, RunError
from kog_triton.model.families import read_spec
from kog_triton.model.shapes import named_shape
from kog_triton.model.spec import DType
from kog_triton.random_weights import RandomWeights

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "kog_triton" / "bench"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---- right text ----


def test_kl_and_top1_are_torch_s():
    rng = np.random.default_rng(0)
    want, got = rng.normal(0, 4, (6, 50)), rng.normal(0, 4, (6, 50))
    got[0] = want[0] + 7  # a constant changes nothing
    same, kl = compare(want, got)
    log_p, log_q = (torch.log_softmax(torch.from_numpy(x), -1) for x in (want, got))
    expected = torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    np.testing.assert_allclose(kl, expected.numpy(), atol=1e-12)
    assert same[0] and same.tolist() == (want.argmax(1) == got.argmax(1)).tolist()


def test_the_gap_of_a_token():
    rows = np.array([[1.0, 3.0, -1.0, 1.0], [0.0, 0.0, 4.0, 0.0]])
    gaps = token_gaps(rows, [0, 2])
    assert gaps.tolist() == [pytest.approx(2 / np.sqrt(2.0)), 0.0]


class Liar:
    """Right logits, wrong text: what a forward pass alone would not find."""

    checks_text = True

    def __init__(self, honest, swap):
        self.honest, self.swap = honest, swap
        self.logits = honest.logits

    def generate(self, prompt, count):
        run = self.honest.generate(prompt, count)
        run.tokens[self.swap] = (run.tokens[self.swap] + 1) % 97
        return run


SMALL = {
    "num_hidden_layers": 3,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": 97,
    "max_position_embeddings": 128,
    "dtype": "float32",
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS = {
    "llama": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 32},
    },
    "yarn": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "mistral": {"model_type": "mistral", "sliding_window": 7},
    "qwen2": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True},
}
PROMPT = [int(i) for i in np.random.default_rng(1).integers(0, 97, 20)]


def judge_of(weights, count=16):
    reference = find_backend("reference")(weights, BackendOptions(max_context=64))
    return Judge(reference, PROMPT, count)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "peer", ["transformers", "transformers-compiled", "transformers-tuned", "torch-graph"]
)
def test_a_peer_is_the_same_model(model, peer):
    """On a CPU nothing is compiled or captured; the maths and the loop are those of a GPU."""
    weights = RandomWeights(read_spec(SMALL | MODELS[model]))
    setting = Setting(weights, torch.device("cpu"), len(PROMPT) + 16)
    subject = find_peer(peer).open_peer(setting)
    check = judge_of(weights).examine(subject)
    assert check.passed and check.top1 == 1 and check.kl_max < 1e-9 and check.largest_gap < 1e-4
    runs = [subject.generate(PROMPT, 16) for _ in range(2)]
    assert runs[0].tokens == runs[1].tokens and len(runs[0].tokens) == 16
    assert runs[0].arrivals == sorted(runs[0].arrivals)
    assert subject.memory_bytes()["weights"] == weights.spec.num_parameters * 4
    subject.close()


def test_what_a_graph_would_hold_is_traced_in_one_piece(monkeypatch):
    """Traced once a length and never again: whatever changes from token to token is on the device."""
    trials = []

    def traced(work, before, device, options=None):
        compiled = torch.compile(work, fullgraph=True, dynamic=False, backend="eager")
        for _ in range(2):
            before()
            compiled()
        trials.append(compiled)
        return compiled

    monkeypatch.setattr(transformers_compiled, "captured", traced)
    weights = RandomWeights(read_spec(SMALL | MODELS["mistral"]))  # with a window
    subject = find_peer("transformers-compiled").open_peer(
        Setting(weights, torch.device("cpu"), len(PROMPT) + 16)
    )
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        check = judge_of(weights).examine(subject)
    assert check.passed and check.largest_gap < 1e-4 and len(trials) == 2


@pytest.mark.parametrize("swap", [0, 7, 15])
def test_wrong_text_behind_right_logits_is_found(swap):
    weights = RandomWeights(read_spec(SMALL | MODELS["llama"]))
    backend = find_backend("reference")
    honest = BackendSubject(backend, weights, BackendOptions(max_context=64))
    judge = judge_of(weights)
    assert judge.examine(honest).passed
    check = judge.examine(Liar(honest, swap))
    assert not check.passed and check.kl_mean == 0 and check.tokens_top1 < 1


def test_text_is_judged_behind_the_whole_prompt(monkeypatch):
    """A subject that loses what lies deeper than the positions whose logits are compared."""
    monkeypatch.setattr("kog_triton.bench.check.CHECK_POSITIONS", 8)
    monkeypatch.setattr("kog_triton.bench.check.CHUNK", 7)
    weights = RandomWeights(read_spec(SMALL | MODELS["llama"]))
    honest = BackendSubject(find_backend("reference"), weights, BackendOptions(max_context=64))
    judge = judge_of(weights)
    check = judge.examine(honest)
    assert check.passed and (check.positions, check.depth, check.largest_gap) == (8, 20, 0)
    lost = Liar(honest, 0)
    lost.generate = lambda prompt, count: honest.generate(prompt[:8] + prompt[9:], count)
    check = judge.examine(lost)
    assert not check.passed and check.kl_mean == 0 and check.tokens_top1 < 1


def test_wrong_logits_behind_right_text_are_found():
    weights = RandomWeights(read_spec(SMALL | MODELS["llama"]))
    honest = BackendSubject(find_backend("reference"), weights, BackendOptions(max_context=64))
    flat = Liar(honest, 0)
    flat.generate = honest.generate
    flat.logits = lambda ids: honest.logits(ids) / 2  # the same choices, with less confidence
    check = judge_of(weights).examine(flat)
    assert not check.passed and check.top1 == 1 and check.largest_gap == 0


def test_nan_is_an_error():
    weights = RandomWeights(read_spec(SMALL | MODELS["llama"]))
    honest = BackendSubject(find_backend("reference"), weights, BackendOptions(max_context=64))
    liar = Liar(honest, 0)
    liar.logits = lambda ids: np.full((len(ids), 97), np.nan)
    with pytest.raises(RunError, match="NaN"):
        judge_of(weights).examine(liar)


def test_weights_without_a_place_are_refused():
    """Qwen3 has norms that a spec without `qk_norm` does not bring."""
    weights = RandomWeights(read_spec(SMALL | MODELS["qwen3"]).replace(qk_norm=False))
    with pytest.raises(ModelError, match="also wants"):
        find_peer("transformers").open_peer(Setting(weights, torch.device("cpu"), 64))


# ---- figures ----


def test_figures_by_hand():
    stamps = [[1000.0, 1100.0, 1400.0], [0.0, 200.0, 400.0], [5.0, 5.0 + 50, 5.0 + 100]]
    got = figures(stamps)
    assert got["tokens_per_s_rounds"] == [5000.0, 5000.0, 20000.0]
    assert got["tokens_per_s"] == 5000.0 and got["itl_us"] == [[100, 300], [200, 200], [50, 50]]
    assert (got["itl_p50_us"], got["itl_p99_us"], got["itl_max_us"]) == (100, 300, 300)
    assert figures([[3.0]]) is None


def test_the_first_token_is_ttft_s_alone():
    run = Run(10.0, [4, 5, 6], [10.5, 10.6, 10.7], [0, 1, 2])
    got = summarize([run, run, run], prompt_tokens=8)
    assert got["ttft_us"] == pytest.approx(5e5) and got["prompt_tokens_per_s"] == pytest.approx(16)
    assert got["host"]["tokens_per_s"] == pytest.approx(10) and got["repeatable"]
    assert got["device"] is None, "a stamp of zero is no stamp"
    other = Run(0.0, [4, 5, 7], [1.0, 2.0, 3.0], [10, 20, 30])
    assert not summarize([run, other], 8)["repeatable"]
    assert summarize([other], 8)["device"]["tokens_per_s"] == pytest.approx(1e8)


def test_the_floor_by_hand():
    spec = named_shape("llama-3.2-1b")
    size = decode_bytes(spec, prompt_tokens=100, tokens=22)
    assert size == 1_235_814_400 * 2 + 32_768 * 111  # positions 100 .. 120, the mean sees 111 keys
    got = floor(size, 1000.0, 4.8e12, 4.4e12)
    assert got["datasheet_us"] == pytest.approx(size / 4.8e6)
    assert got["measured_mbu"] == pytest.approx(size * 1000 / 4.4e12)
    assert floor(size, None, None, 1e12)["measured_mbu"] is None


def test_the_target_is_about_our_backends():
    rows = [make_row(n, k, "timed", "") for n, k in (("a", "backend"), ("b", "peer"))]
    for row, rate in zip(rows, (10.0, 99.0), strict=True):
        row["host"] = {"tokens_per_s": rate}
    assert target_of(rows, 50)["met"] is False and target_of(rows, 10)["by"] == "a"
    assert target_of(rows[1:], 5) == {"tokens_per_s": 5, "reached": 0.0, "by": None, "met": False}
    assert target_of(rows, None) is None


def test_kernels_are_told_from_copies():
    names = ["decode_kernel", "Memcpy HtoD (Pageable -> Device)", "Memset (Device)", "fill", "fill"]
    assert count(names) == {
        "launches": 3,
        "kernels": {"fill": 2, "decode_kernel": 1},
        "copies": 1,
        "fills": 1,
    }


# ---- the machine ----


def test_a_line_of_nvidia_smi():
    sample = machine.parse_sample("1980, 3201, 41, 312.52, 0x0000000000000024\n")
    assert sample["sm_mhz"] == 1980 and sample["power_w"] == 312.52 and sample["reasons"] == 0x24
    assert machine.parse_sample("1980, 3201, [N/A], 1, 0x0")["temperature_c"] is None
    assert machine.parse_sample("no devices were found") is None


def test_throttling():
    fast = {"sm_mhz": 1980.0, "reasons": 1.0}
    assert machine.throttling([fast, fast]) == [] and machine.throttling([]) is None
    assert machine.throttling([fast, fast | {"reasons": float(0x44)}]) == [
        "power cap",
        "hardware thermal slowdown",
    ]
    (why,) = machine.throttling([fast, fast | {"sm_mhz": 1700.0}])
    assert "1980 to 1700" in why


def test_bandwidth_on_a_cpu_has_no_scale():
    found = measure_bandwidth(torch.device("cpu"), None, 1)
    assert found["measured"] == found["methods"]["torch"] > 1e8
    assert found["scale"] is None and found["datasheet"] is None


def test_the_bulk_kernel_and_its_launcher_agree():
    source = (PACKAGE / "bulk_read.cu").read_text()
    defined = dict(line.split()[1:3] for line in source.splitlines() if line.startswith("#define"))
    assert int(defined["CHUNK"]) == bulk_read.CHUNK and int(defined["STAGES"]) == bulk_read.STAGES
    assert 32 * (int(defined["READERS"]) + 1) == bulk_read.THREADS


@pytest.fixture
def exchange(monkeypatch):
    """The microbenchmark with a vector of 16 words, in Triton's interpreter."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles its kernels where there is a GPU")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "micro"))
    module = importlib.import_module("exchange")
    monkeypatch.setattr(module, "WORDS", 16)
    return module


@pytest.mark.parametrize("memory", ["sc", "stale"])
@pytest.mark.parametrize("method", ["counter", "gather", "phase"])
def test_an_exchange_computes_its_recurrence(exchange, method, memory):
    with concurrent(seed=1, memory=memory):
        assert exchange.right(method, 3, 5, "cpu")


@pytest.mark.parametrize("method", ["gather", "phase"])
def test_an_exchange_that_does_not_wait_is_wrong(exchange, method, monkeypatch):
    monkeypatch.setattr(exchange, "LIMIT", triton.language.constexpr(0))
    with concurrent(seed=1, memory="sc"):
        assert not exchange.right(method, 3, 5, "cpu")


@pytest.mark.parametrize("program", [0, 1, 2])
def test_the_read_kernel_reads_every_word(exchange, program):
    """A program stores one sum only, 0x12345678: spread that over its blocks, then take 1 away."""
    blocks = np.random.default_rng(0).integers(1, 1 << 18, (7, 64)).astype(np.int32)
    mine = blocks[program::3]
    mine[-1, -1] += 0x12345678 - mine.sum()
    for taken, stored in ((0, 0x12345678), (1, 0)):
        mine[-1, 0] -= taken
        out = torch.zeros(1, dtype=torch.int32)
        with concurrent(seed=0):
            read_kernel[(3,)](torch.from_numpy(blocks).flatten(), out, 7, BLOCK=64)
        assert out.item() == stored


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
    assert llama_bench.absent(setting) == ""
    assert "--gguf" in llama_bench.absent(Setting(setting.weights, setting.device, 64))
    subject = llama_bench.open_peer(setting)
    assert subject.version == "llama.cpp 0c1e570 (CPU), llama ?B all F32"
    assert subject.memory_bytes() == {"weights": 4 * setting.weights.spec.num_parameters}
    got = summarize([subject.generate(PROMPT, 4)], 20)
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
    llama_bench.open_peer(llama_cpp(**{field: round(right * 1.005)}))  # tables for RoPE
    for factor in (0.5, 1.02):
        with pytest.raises(RunError, match=f"its {field} is .* convert it as f32"):
            llama_bench.open_peer(llama_cpp(**{field: round(right * factor)}))


def test_an_unknown_peer_is_refused():
    with pytest.raises(RequestError, match="no peer is named 'vllm': have transformers"):
        find_peer("vllm")


# ---- on a GPU ----


@pytest.mark.gpu
def test_bandwidth_on_a_gpu():
    found = measure_bandwidth(torch.device("cuda"), machine.gpu_row(), 1)
    assert "triton" in found["methods"] and found["scale"] > 0
    if found["datasheet"]:
        assert 0.5 < found["measured"] / found["datasheet"] < 1.02


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["counter", "gather", "phase"])
def test_an_exchange_on_a_gpu(method, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "micro"))
    module = importlib.import_module("exchange")
    blocks = torch.cuda.get_device_properties("cuda").multi_processor_count
    assert module.right(method, blocks, 300, "cuda")


@pytest.mark.parametrize(
    "shape, name, dtype, torch_dtype",
    [(None, "bf16", DType.BF16, torch.bfloat16), ("qwen3-0.6b", "fp16", DType.F16, torch.float16)],
)
def test_a_dtype_is_that_of_every_weight(shape, name, dtype, torch_dtype):
    """Neither is the model's own."""
    own = open_model(None, shape, torch.device("cpu"))
    model = open_model(None, shape, torch.device("cpu"), name)
    assert model.weights.spec.dtype is dtype is not own.weights.spec.dtype
    assert model.weights.load("layers.0.attention_norm").dtype == torch_dtype


def test_the_digest_of_the_source_covers_the_kernels(monkeypatch, tmp_path):
    files = machine.source_files()
    assert {
        "bench/machine.py",
        "backends/cuda/decode.cu",
        "backends/cuda/include/kog/ring.h",
    } <= set(files)
    whole = machine.source_digest()
    changed = tmp_path / "ring.h"
    changed.write_bytes(files["backends/cuda/include/kog/ring.h"].read_bytes() + b"\n")
    files["backends/cuda/include/kog/ring.h"] = changed
    monkeypatch.setattr(machine, "source_files", lambda: files)
    assert machine.source_digest() != whole
