"""The parts of `kog bench`: wrong text is found, figures by hand."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kog_triton.backends import BackendOptions, find_backend, reference
from kog_triton.backends.choose import choose
from kog_triton.bench import check, measure, timing
from kog_triton.bench import kl_limit as kl_limits
from kog_triton.bench.check import compare, token_gaps
from kog_triton.bench.engines import BackendUnderTest, Run
from kog_triton.bench.kl_limit import FACTOR, LANES, LEAST, KlLimit, kl_limit
from kog_triton.bench.model import Model, Retyped, open_model
from kog_triton.bench.peers import transformers_model
from kog_triton.bench.peers.transformers_model import load_model
from kog_triton.bench.record import make_row, target_of
from kog_triton.bench.timing import roofline, summarize
from kog_triton.bench.trace import count
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.errors import DeviceError, RunError
from kog_triton.model.families import read_spec
from kog_triton.model.shapes import named_shape
from kog_triton.model.spec import DType
from tests.lib.bench_models import MODELS, PROMPT, SMALL, judge_of

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


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


@pytest.mark.parametrize("swap", [0, 7, 15])
def test_wrong_text_behind_right_logits_is_found(swap):
    weights = RandomWeights(read_spec(SMALL | MODELS["llama"]))
    backend = find_backend("reference")
    honest = BackendUnderTest(backend, weights, BackendOptions(max_context=64))
    judge = judge_of(weights)
    check = judge.examine(honest, LEAST)
    assert check.passed and check.tokens_top1 == 1
    check = judge.examine(Liar(honest, swap), LEAST)
    assert not check.passed and check.kl_mean == 0 and 0 < check.tokens_top1 < 1


def test_text_is_judged_behind_the_whole_prompt(monkeypatch):
    """An engine that loses what lies deeper than the positions whose logits are compared."""
    monkeypatch.setattr("kog_triton.bench.check.PASS", 7)
    weights = RandomWeights(read_spec(SMALL | MODELS["llama"]))
    honest = BackendUnderTest(find_backend("reference"), weights, BackendOptions(max_context=64))
    judge = judge_of(weights, PROMPT[:8])
    check = judge.examine(honest, LEAST)
    assert check.passed and (check.positions, check.depth, check.largest_gap) == (8, 20, 0)
    lost = Liar(honest, 0)
    lost.generate = lambda prompt, count: honest.generate(prompt[:8] + prompt[9:], count)
    check = judge.examine(lost, LEAST)
    assert not check.passed and check.kl_mean == 0 and check.tokens_top1 < 1


def test_wrong_logits_behind_right_text_are_found():
    weights = RandomWeights(read_spec(SMALL | MODELS["llama"]))
    honest = BackendUnderTest(find_backend("reference"), weights, BackendOptions(max_context=64))
    flat = Liar(honest, 0)
    flat.generate = honest.generate
    flat.logits = lambda ids: honest.logits(ids) / 2  # the same choices, with less confidence
    check = judge_of(weights).examine(flat, LEAST)
    assert not check.passed and check.top1 == 1 and check.largest_gap == 0


def test_nan_is_an_error():
    weights = RandomWeights(read_spec(SMALL | MODELS["llama"]))
    honest = BackendUnderTest(find_backend("reference"), weights, BackendOptions(max_context=64))
    liar = Liar(honest, 0)
    liar.logits = lambda ids: np.full((len(ids), 97), np.nan)
    with pytest.raises(RunError, match="NaN"):
        judge_of(weights).examine(liar, LEAST)


def test_as_many_positions_are_judged_of_a_short_prompt(monkeypatch):
    found = {"datasheet": None, "methods": {}, "absent": {}, "measured": 2e9, "scale": None}
    monkeypatch.setattr("kog_triton.bench.task.measure_bandwidth", lambda *_: found)
    spec = read_spec(SMALL | MODELS["llama"])
    task = measure.Task(
        model=Model("tiny", RandomWeights(spec), ""), device=CPU, device_word="", num_gpus=1, test="tg4 @ d5",
        prompt_tokens=5, tokens=4, rounds=1, warmup=0, backends=[choose("reference")], peers=[],
    )  # fmt: skip
    (row,) = measure.measure(task, lambda line: None)["rows"]
    assert (row["check"]["positions"], row["check"]["depth"]) == (128, 5)
    assert task.options().max_context == 128 and row["check"]["kl_limit"] >= LEAST
    deep = replace(task, prompt_tokens=100, tokens=60)
    assert deep.options().max_context == 160 and len(deep.judged_ids()) == 128
    short = Model("short", RandomWeights(replace(spec, max_context=40)), "")
    assert len(replace(task, model=short).judged_ids()) == 40


def test_the_limit_is_what_transformers_make_of_the_same_weights_in_bf16():
    weights = RandomWeights(read_spec(SMALL | MODELS["llama"]))
    judge = judge_of(weights)
    limit = kl_limit(weights, CPU, PROMPT, judge.logits)
    model = load_model(Retyped(weights, DType.BF16), CPU)
    with torch.inference_mode():
        theirs = model(torch.tensor([PROMPT])).logits[0].float().numpy()
    kl = compare(judge.logits, theirs)[1].mean()
    assert limit.backend == max(FACTOR * kl, LEAST) and f"{kl:.1e} in bf16" in limit.reason
    assert kl > 0
    loud = judge.logits * 3  # a reference that transformers are far from
    far = compare(loud, theirs)[1].mean()
    assert FACTOR * far > LEAST
    assert kl_limit(weights, CPU, PROMPT, loud).backend == FACTOR * far


def test_the_limit_without_transformers(monkeypatch):
    lanes = SimpleNamespace(spec=named_shape("laneformer-2b"))
    assert kl_limit(lanes, CPU, [1, 2], np.zeros((2, 4))).backend == LANES < LEAST
    weights = RandomWeights(read_spec(SMALL | MODELS["llama"]))
    want = np.zeros((20, 97))
    monkeypatch.setattr(kl_limits.Plain, "logits", out_of_memory)
    assert kl_limit(weights, CPU, PROMPT, want) == KlLimit(LEAST, "the least: no memory for transformers")
    monkeypatch.setattr(transformers_model, "find_spec", lambda name: None)
    limit = kl_limit(weights, CPU, PROMPT, want)
    assert limit.backend == LEAST and "not installed" in limit.reason


def test_a_reference_that_does_not_fit_reads_its_weights_as_they_are_used(monkeypatch):
    weights = RandomWeights(read_spec(SMALL | MODELS["llama"]))
    loads, load = [], weights.load
    monkeypatch.setattr(weights, "load", lambda name: loads.append(name) or load(name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(reference, "_device", lambda word: CPU)
    enough = check.ROOM + 4 * weights.spec.num_parameters + 1
    found = []
    for free in (enough, enough - 1):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, enough))
        oracle = check.open_oracle(weights, BackendOptions(max_context=64))
        loads.clear()
        found.append(oracle.forward_logits(PROMPT))
        held = oracle.memory_bytes()["weights"]
        assert (held > 0) is (loads == []) is (free == enough)
    assert np.array_equal(*found)
    assert len(loads) == len(set(loads)) + weights.spec.tied_embeddings  # each matrix once


def test_the_limit_without_memory_for_the_unpacked_weights(monkeypatch):
    def no_room(*arguments):
        raise DeviceError("not even the weights fit")

    monkeypatch.setattr(kl_limits, "BackendUnderTest", no_room)
    given = None, BackendOptions(), [1], np.zeros((1, 4))
    large, small = (RandomWeights(named_shape(name)) for name in ("llama-3.1-8b", "llama-3.2-1b"))
    limit = kl_limits.unpacked_kl_limit(large, *given)
    assert limit.backend == kl_limits.MOST_OF_LARGE and limit.reason.endswith("not even the weights fit")
    with pytest.raises(DeviceError):
        kl_limits.unpacked_kl_limit(small, *given)


def out_of_memory(*arguments):
    raise torch.OutOfMemoryError("of a GPU")


# ---- figures ----


def figures(rounds):
    """Of rounds of one request."""
    return timing.figures([[stamps] for stamps in rounds])


def test_figures_by_hand():
    stamps = [[1000.0, 1100.0, 1400.0], [0.0, 200.0, 400.0], [5.0, 5.0 + 50, 5.0 + 100]]
    got = figures(stamps)
    assert got["tokens_per_s_rounds"] == [5000.0, 5000.0, 20000.0]
    assert got["tokens_per_s"] == 5000.0 and got["itl_us"] == [[100, 300], [200, 200], [50, 50]]
    assert (got["itl_p50_us"], got["itl_p99_us"], got["itl_max_us"]) == (100, 300, 300)
    assert figures([[3.0]]) is None


def stamps_of(gaps):
    return np.concatenate([[0.0], np.cumsum(gaps)]).tolist()


def test_jitter_is_not_the_growth_of_an_answer():
    """Gaps that grow by half over 256 tokens are even at constant depth; two in a hundred late ones are p99."""
    growing = 1000 + 2.0 * np.arange(255)
    even = figures([stamps_of(growing)] * 3)
    assert even["itl_p99_us"] / even["itl_p50_us"] > 1.15
    assert 1.03 < even["p99_over_p50"] < 1 + 64 / 1064  # what a window itself grows by
    late = growing.copy()
    late[7::50] *= 1.5
    assert figures([stamps_of(late)] * 3)["p99_over_p50"] == pytest.approx(1.5, rel=0.05)
    late = growing.copy()
    late[7::200] *= 1.5  # two of 255: less than one in a hundred
    assert figures([stamps_of(late)] * 3)["p99_over_p50"] < 1.1


def test_a_stall_of_one_round_is_jitter_however_long():
    """Longer than a window, and of requests of one gap each."""
    even, stalled = [10.0] * 255, [10.0] * 100 + [500.0] * 100 + [10.0] * 55
    assert figures([stamps_of(g) for g in (even, stalled, even)])["p99_over_p50"] == 50.0
    assert figures([stamps_of([10.0])] * 97 + [stamps_of([80.0])] * 3)["p99_over_p50"] == 8.0


def test_too_few_gaps_have_no_99th_percentile():
    assert figures([stamps_of([10.0] * 33)] * 3)["p99_over_p50"] is None
    assert figures([stamps_of([10.0] * 34)] * 3)["p99_over_p50"] == 1.0
    assert figures([stamps_of([10.0] * 127)])["p99_over_p50"] == 1.0


def test_the_first_token_is_ttft_s_alone():
    run = Run(10.0, [4, 5, 6], [10.5, 10.6, 10.7], [0, 1, 2])
    got = summarize([run, run, run], prompt_tokens=8)
    assert got["ttft_us"] == pytest.approx(5e5) and got["prompt_tokens_per_s"] == pytest.approx(16)
    assert got["host"]["tokens_per_s"] == pytest.approx(10) and got["repeatable"]
    assert got["device"] is None, "a stamp of zero is no stamp"
    other = Run(0.0, [4, 5, 7], [1.0, 2.0, 3.0], [10, 20, 30])
    assert not summarize([run, other], 8)["repeatable"]
    assert summarize([other], 8)["device"]["tokens_per_s"] == pytest.approx(1e8)


def test_the_roofline_by_hand():
    spec = named_shape("llama-3.2-1b")
    size = spec.decode_bytes(prompt_tokens=100, tokens=22)
    assert size == 1_235_814_400 * 2 + 32_768 * 111  # positions 100 .. 120, the mean sees 111 keys
    got = roofline(size, 1000.0, 4.8e12, 4.4e12)
    assert got["datasheet_us"] == pytest.approx(size / 4.8e6)
    assert got["measured_mbu"] == pytest.approx(size * 1000 / 4.4e12)
    assert roofline(size, None, None, 1e12)["measured_mbu"] is None


def test_the_target_is_about_our_backends():
    rows = [make_row(n, k, "timed", "") for n, k in (("a", "backend"), ("b", "peer"))]
    for row, rate in zip(rows, (10.0, 99.0), strict=True):
        row["host"] = {"tokens_per_s": rate}
    assert target_of(rows, target_of(rows, 10)["reached"])["met"]  # just reached
    assert target_of(rows, 50)["met"] is False and target_of(rows, 10)["by"] == "a"
    assert target_of(rows[1:], 5) == {"tokens_per_s": 5, "reached": 0.0, "by": None, "met": False}
    assert target_of(rows, None) is None


def test_kernels_are_told_from_copies():
    names = ["decode_kernel", "Memcpy HtoD (Pageable -> Device)", "Memset (Device)", "fill", "fill"]
    assert count(names) == {"launches": 3, "kernels": {"fill": 2, "decode_kernel": 1}, "copies": 1, "fills": 1}


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
