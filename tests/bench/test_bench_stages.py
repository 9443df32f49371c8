"""`kog bench stages`: every stage timed alone, after it was found right, beside the bytes it must read."""

import json
from pathlib import Path

import jsonschema
import pytest
import torch

from kog_triton.backends import BackendOptions, StageTimer
from kog_triton.backends.choose import Choice
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.bench import cli as bench
from kog_triton.bench import stages
from kog_triton.bench import task as bench_task
from kog_triton.bench.model import Model
from kog_triton.bench.record import make_row
from kog_triton.bench.show import stage_table
from kog_triton.bench.stages import StageTask, inputs, largest_error, measure_stages, stage_bytes
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.errors import RunError
from kog_triton.model.shapes import named_shape, with_format
from kog_triton.model.spec import DType, Head, Reduce
from kog_triton.model.weight_format import FORMATS
from kog_triton.schedule.schedule import Op, build
from tests.lib.cuda_walk import FiberBackend, noting
from tests.lib.ring_walker import spec_of

SCHEMA = json.loads((Path(bench.__file__).parent / "result.schema.json").read_text())
CPU = torch.device("cpu")
PLAIN = ["embed", "qkv_proj", "attention", "o_proj", "gate_up_proj", "down_proj", "lm_head"]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def known_bandwidth(monkeypatch):
    found = {"datasheet": None, "methods": {}, "absent": {}, "measured": 2e9, "scale": None}
    monkeypatch.setattr(bench_task, "measure_bandwidth", lambda *_: found)


def measured(backend, spec):
    """The only row, of a model with random weights."""
    model = Model("tiny", RandomWeights(spec), "random")
    chosen = [Choice(backend, "ours", "asked for")]
    task = StageTask(
        model=model, device=CPU, device_word="", num_gpus=1, rounds=2, warmup=1, backends=chosen,
        depth=5,
    )  # fmt: skip
    out = measure_stages(task, lambda line: None)
    row_schema = {"$ref": "#/$defs/row", "$defs": SCHEMA["$defs"]}
    (row,) = out["rows"]
    jsonschema.Draft202012Validator(row_schema).validate(row)
    return row, out["failures"]


def test_stages_of_the_demo(tmp_path, capsys):
    file = tmp_path / "record.json"
    argv = ["stages", "--rounds=3", "--warmup=1", "--depth=20", "--json", str(file)]
    assert bench.main(argv) == 0
    record = json.loads(file.read_text())
    jsonschema.Draft202012Validator(SCHEMA).validate(record)
    assert record["kind"] == "stages" and record["test"]["name"] == "stages @ d20"
    (row,) = record["rows"]
    assert (row["name"], row["status"], row["check"]) == ("reference", "timed", None)
    assert [s["stage"] for s in row["stages"]] == [*PLAIN[:-1], "mix", "lm_head"]
    for s in row["stages"]:
        assert s["error"] == 0 and s["clock"] == "call"  # the reference beside itself
        assert s["us"] == sorted(s["us_rounds"])[1] > 0 and len(s["us_rounds"]) == 3
        if s["bytes"]:
            assert s["floor_us"] == pytest.approx(s["bytes"] / 2e9 * 1e6)
            assert s["ratio"] == pytest.approx(s["floor_us"] / s["us"])
    assert row["stages"][-2]["floor_us"] is None  # a mix reads gains alone
    out, err = capsys.readouterr()
    assert "gate_up_proj" in out and "around run_stage" in out and "reference: lm_head" in err


def test_a_kernel_is_timed_without_its_tensors():
    assert issubclass(FiberBackend, StageTimer) and not issubclass(ReferenceBackend, StageTimer)
    row, failures = measured(FiberBackend, spec_of(dtype=DType.F16))
    assert (row["status"], row["dtype"], failures) == ("timed", "f16", [])
    assert [s["stage"] for s in row["stages"]] == PLAIN
    assert all(s["clock"] == "kernel" and 0 < s["error"] < 8e-3 for s in row["stages"][1:])


def test_no_kernel_of_prompts_is_compiled():
    """None would run, and a compiler takes seconds for one."""
    sources = []
    row, _ = measured(noting(sources), spec_of(dtype=DType.F16))
    assert row["status"] == "timed" and sources == ["decode.cu"]


def test_what_precedes_a_launch_is_called_for_each():
    backend = FiberBackend(RandomWeights(spec_of(dtype=DType.F16)), BackendOptions())
    state, calls = {"token_ids": torch.tensor([3, 4, 5])}, []
    seconds = backend.time_stage("embed", 0, state, lambda: calls.append(1))
    assert len(seconds) == len(calls) == 3 and all(s > 0 for s in seconds)
    assert len(backend.time_stage("embed", 0, state, lambda: None)) == 3  # not those before


class Astray(ReferenceBackend):
    """Its o_proj is wrong."""

    def run_stage(self, stage, layer, state):
        out = super().run_stage(stage, layer, state)
        return {n: 1.1 * t for n, t in out.items()} if stage == "o_proj" else out


class Broken(ReferenceBackend):
    def run_stage(self, stage, layer, state):
        raise RunError("a wait expired")


def test_a_wrong_stage_is_not_timed():
    row, failures = measured(Astray, spec_of())
    assert row["status"] == "wrong" and failures == ["ours: o_proj is off by 0.1: not timed"]
    assert [s["stage"] for s in row["stages"]] == PLAIN[:3]


def test_a_broken_backend_is_told():
    row, failures = measured(Broken, spec_of())
    assert (row["status"], failures) == ("failed", ["ours: a wait expired"])


def test_not_a_number_is_not_right():
    assert not largest_error(
        {"x": torch.tensor([1.0, torch.nan])}, {"x": torch.ones(2)}
    ) <= stages.MAX_ERROR  # fmt: skip


@pytest.mark.parametrize("shape", ["llama-3.2-1b", "qwen3-0.6b", "laneformer-2b", "qwen3-8b,int4-g128"])
def test_bytes_of_the_stages_are_those_of_a_token(shape):
    shape, _, how = shape.partition(",")
    spec = with_format(named_shape(shape), FORMATS[how]) if how else named_shape(shape)
    schedule = build(spec)
    walked = [(stage, segment.repeat) for segment, stage in schedule.walk()]
    weights = sum(n * stage_bytes(spec, stage, 0, 100) for stage, n in walked if stage.op is Op.MATVEC)
    assert weights == pytest.approx(spec.bytes_per_token, rel=1e-3)  # gains and biases are small
    (keys,) = [stage for stage, _ in walked if stage.op is Op.ATTENTION]
    assert stage_bytes(spec, keys, 0, 100) * spec.num_layers == spec.kv_bytes_read(99)


def test_a_window_bounds_what_attention_reads():
    spec = spec_of(dtype=DType.F16, windows=(5, 0, 5))
    stage = build(spec).stage("attention")
    row = 2 * spec.num_kv_heads * spec.head_dim * 2
    assert [stage_bytes(spec, stage, layer, 50) // row for layer in range(3)] == [5, 50, 5]


def test_delayed_outputs_are_given_where_they_are_read():
    spec = spec_of(
        num_layers=3, num_lanes=2, delay=1, num_heads=4, num_kv_heads=2, head=Head.MEAN,
        reduce_attention=(Reduce.NOW, Reduce.DELAYED, Reduce.DELAYED),
        reduce_mlp=(Reduce.OWN, Reduce.DELAYED, Reduce.OWN),
    )  # fmt: skip
    schedule = build(spec)
    given = {n: inputs(schedule, schedule.stage(n), 2, 7, CPU) for n in ("o_proj", "down_proj")}
    assert set(given["o_proj"]) == {"attention", "x", "delayed"}
    assert set(given["down_proj"]) == {"mlp", "x"}
    assert given["o_proj"]["delayed"].shape == (2, 1, spec.hidden_size)
    keys = inputs(schedule, schedule.stage("attention"), 2, 7, CPU)["keys"]
    assert keys.shape == (2, 1, 7, spec.head_dim)


def test_the_table_adds_up_the_runs_of_a_token():
    stage = {"runs": 1, "error": 0.0, "floor_us": None, "ratio": None, "bytes": 0}
    row = make_row("cuda", "backend", "timed", "")
    row["stages"] = [stage | {"stage": "embed", "us": 2.0}, stage | {"stage": "o_proj", "us": 3.5, "runs": 16}]
    gone = make_row("triton", "backend", "failed", "no")
    table = stage_table({"rows": [row, gone]})
    assert list(table.columns[-1].cells) == ["2.0", "56.0", "58.0"]
