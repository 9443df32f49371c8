"""A GPU that this project never ran on: every stage and sampling are tested when a model is opened, and what is
wrong is named."""

import re

import pytest
import torch

from kog_triton import LLM, stage_check
from kog_triton.backends import STAGE_READS, BackendOptions
from kog_triton.backends.mailbox import Failure
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.errors import DeviceError
from kog_triton.model.shapes import SHAPES, named_shape
from kog_triton.model.small import small_model
from kog_triton.model.spec import DType
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import describe
from kog_triton.stage_check import CHOICES, LIMIT, check_new_gpu, check_stages, mixes
from tests.lib.gpus import H200_SEEN, SEEN

LANES, PLAIN = named_shape("laneformer-2b"), named_shape("qwen2.5-0.5b")


class Gpu(ReferenceBackend):
    """A backend of GPUs alone, by the reference's arithmetic; it counts what it ran and closed."""

    vendors = ("nvidia",)
    ran: list[tuple[str, int]]

    def __init__(self, weights, options):
        super().__init__(weights, BackendOptions(max_context=options.max_context))
        type(self).ran = []

    def run_stage(self, stage, layer, state):
        self.ran.append((stage, layer))
        return super().run_stage(stage, layer, state)

    def close(self):
        self.ran.append(("closed", 0))


def wrong_in(broken, at_layer, name, damage):
    """A backend one of whose stages gives one tensor damaged, in one layer."""

    class Wrong(Gpu):
        def run_stage(self, stage, layer, state):
            out = super().run_stage(stage, layer, state)
            if (stage, layer) == (broken, at_layer):
                out[name] = damage(out[name].clone())
            return out

    return Wrong


def one_row_wrong(value):
    value[..., 0] += value.std()
    return value


@pytest.mark.parametrize("spec", [PLAIN, LANES], ids=["plain", "lanes"])
def test_every_stage_of_every_layer_is_run_once(spec):
    small = small_model(spec)
    count = check_stages(Gpu, small, "here")
    once = {"embed", "lm_head"} | ({"mix"} if mixes(spec) else set())
    each = {s for s in STAGE_READS if s not in once and s != "mix"}
    wanted = {(s, 0) for s in once} | {(s, n) for s in each for n in range(small.num_layers)}
    assert Gpu.ran[-1] == ("closed", 0) and set(Gpu.ran[:-1]) == wanted
    assert count == len(wanted) == len(Gpu.ran) - 1


@pytest.mark.parametrize(
    ("stage", "layer", "name"),
    [
        ("embed", 0, "x"),
        ("qkv_proj", 1, "v"),
        ("attention", 0, "attention"),
        ("attention", 1, "values"),
        ("o_proj", 1, "x"),
        ("gate_up_proj", 0, "mlp"),
        ("down_proj", 1, "mlp_out"),
        ("lm_head", 0, "logits"),
    ],
)
@pytest.mark.parametrize("damage", [one_row_wrong, lambda v: v * torch.nan, lambda v: v * 1.03])
def test_a_wrong_stage_is_named_and_everything_closed(stage, layer, name, damage):
    wrong = wrong_in(stage, layer, name, damage)
    with pytest.raises(DeviceError) as told:
        check_stages(wrong, small_model(PLAIN), "rtx-5090")
    said = str(told.value)
    assert said.startswith(f"backend reference computes {stage} wrong on rtx-5090 ({name} is off by")
    assert f"in layer {layer}" in said and "\n" not in said
    assert wrong.ran[-1] == ("closed", 0)


@pytest.mark.parametrize("rules", CHOICES, ids=str)
def test_a_token_that_is_not_the_definitions_is_named(rules, monkeypatch):
    """Of a backend whose logits are not those that it chooses by."""

    class Wrong(Gpu):
        def forward_logits(self, token_ids):
            return super().forward_logits(token_ids)[:, ::-1].copy()

    monkeypatch.setattr(stage_check, "CHOICES", (rules,))
    with pytest.raises(DeviceError) as told:
        check_stages(Wrong, small_model(PLAIN), "rtx-5090")
    assert re.fullmatch(
        r"backend reference chooses token \d+ where \d+ is right on rtx-5090 \(sampling by .*\): "
        "choose another backend, and report this",
        str(told.value),
    )
    assert Wrong.ran[-1] == ("closed", 0)


def test_an_error_of_what_is_chosen_comes_through():
    class Failing(Gpu):
        def generate(self, mailbox):
            (request,) = mailbox.take()
            mailbox.push(request.slot, Failure(DeviceError("the GPU is lost")))

    with pytest.raises(DeviceError, match="the GPU is lost"):
        check_stages(Failing, small_model(PLAIN), "here")
    assert Failing.ran[-1] == ("closed", 0)


def test_what_16_bits_cost_is_not_wrong():
    rounded = wrong_in("gate_up_proj", 0, "mlp", lambda v: v.bfloat16().float())
    assert check_stages(rounded, small_model(PLAIN), "here") and LIMIT > 3 * 6.0e-3


@pytest.mark.parametrize("name", [*SHAPES])
def test_the_small_model_has_what_the_large_one_has(name):
    spec = named_shape(name)
    small = small_model(spec, "fp16")
    kept = ("head_dim", "group", "rope", "qkv_bias", "qk_norm", "tied_embeddings", "num_lanes", "delay", "head")
    assert all(getattr(small, field) == getattr(spec, field) for field in kept)
    assert small.dtype is DType.F16 and small_model(spec).dtype is spec.dtype
    assert any(small.windows) == any(spec.windows) and set(small.reduce_mlp) == set(spec.reduce_mlp)


# ---- when it is asked for ----


@pytest.fixture
def on(monkeypatch):
    """Lets torch see a GPU; the tests of stages that were asked for."""
    asked = []

    def see(seen):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: seen is not None)
        monkeypatch.setattr(stage_check, "gpu_of", lambda device: describe(seen))
        monkeypatch.setattr(stage_check, "check_stages", lambda *what: asked.append(what) or 14)
        monkeypatch.setattr(stage_check, "check_requests", lambda *what: asked.append(what) or ["the kernel of a test"])
        return asked

    return see


@pytest.mark.parametrize("which", ["RTX 5090", "H100 SXM", "H200 slice", "H200 share"])
def test_a_new_gpu_is_tested_and_stderr_says_so(on, caplog, which):
    asked = on(SEEN[which])
    check_new_gpu(Gpu, PLAIN, BackendOptions(dtype="fp16"))
    (backend, small, where), requests = asked
    assert (backend, small) == (Gpu, small_model(PLAIN, "fp16"))
    assert requests == (Gpu, small, where, 1, 1)
    said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert said[0] == f"{where}: this project has never run on it: every stage and kernel is tested"
    assert said[1].startswith(f"{where}")
    assert ": 14 stages and sampling, the kernel of a test agree with the reference, in " in said[1]
    assert where.startswith(describe(SEEN[which]).name) and describe(SEEN[which]).share in where


def test_several_new_gpus_are_tested_together(on):
    asked = on(SEEN["RTX 5090"])
    check_new_gpu(Gpu, PLAIN, BackendOptions(num_slots=4, num_gpus=8))
    small = small_model(PLAIN, num_gpus=8)
    assert asked == [(Gpu, small, "rtx-5090"), (Gpu, small, "8 x rtx-5090", 4, 8)]
    for name in SHAPES:  # of which each GPU has some heads, if they are not of lanes
        spec = named_shape(name)
        for gpus in (2, 4, 8):
            build(small_model(spec, num_gpus=gpus), gpus)


@pytest.mark.parametrize("seen", [None, H200_SEEN])
def test_nothing_is_tested_on_a_cpu_and_where_it_has_run(on, caplog, seen):
    asked = on(seen)
    check_new_gpu(Gpu, PLAIN, BackendOptions())
    check_new_gpu(ReferenceBackend, PLAIN, BackendOptions())
    assert asked == [] and caplog.records == []


def test_opening_a_model_asks_for_it(monkeypatch):
    seen = []
    monkeypatch.setattr("kog_triton.llm.check_new_gpu", lambda *what: seen.append(what))
    with LLM(backend="reference") as llm:
        assert [(b, s) for b, s, _ in seen] == [(ReferenceBackend, llm.checkpoint.spec)]
