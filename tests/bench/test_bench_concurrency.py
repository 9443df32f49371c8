"""`kog bench concurrency`: what all requests together make a second, and that each gets its own tokens."""

import json
from pathlib import Path

import jsonschema
import pytest
import torch

from kog_triton.backends.choose import Choice
from kog_triton.backends.mailbox import Step
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.bench import cli as bench
from kog_triton.bench import task as bench_task
from kog_triton.bench.concurrency import ConcurrencyTask, measure_concurrency
from kog_triton.bench.engines import GREEDY, Sampling
from kog_triton.bench.model import Model
from kog_triton.bench.show import concurrency_table, speed_table, startup_table
from kog_triton.bench.startup import PHASES
from kog_triton.bench.timing import figures
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.model.spec import DType
from tests.lib.ring_walker import spec_of

SCHEMA = json.loads((Path(bench.__file__).parent / "result.schema.json").read_text())
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def known_bandwidth(monkeypatch):
    found = {"datasheet": 4e9, "methods": {}, "absent": {}, "measured": 2e9, "scale": None}
    monkeypatch.setattr(bench_task, "measure_bandwidth", lambda *_: found)


def measured(backend, requests=(1, 3), sampling=GREEDY):
    model = Model("tiny", RandomWeights(spec_of()), "random")
    chosen = [Choice(backend, "ours", "asked for")]
    task = ConcurrencyTask(
        model=model, device=CPU, device_word="", num_gpus=1, rounds=2, warmup=1, backends=chosen,
        requests=requests, prompt_tokens=5, tokens=6, sampling=sampling,
    )  # fmt: skip
    out = measure_concurrency(task, lambda line: None)
    row_schema = {"$ref": "#/$defs/row", "$defs": SCHEMA["$defs"]}
    for row in out["rows"]:
        jsonschema.Draft202012Validator(row_schema).validate(row)
    return out["rows"], out["failures"]


def test_figures_by_hand():
    """Two rounds of two requests: 5 tokens from 0 to 40 us, then from 10 to 20 us."""
    rounds = [[[0.0, 10.0, 30.0], [5.0, 40.0]], [[10.0, 12.0, 20.0], [11.0, 19.0]]]
    out = figures(rounds)
    assert out["tokens_per_s_rounds"] == [pytest.approx(4 / 40e-6), pytest.approx(4 / 10e-6)]
    assert out["tokens_per_s"] == pytest.approx((4 / 40e-6 + 4 / 10e-6) / 2)
    assert out["itl_us"] == [[10, 20], [35], [2, 8], [8]] and out["itl_max_us"] == 35


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0, 0.9)], ids=str)
def test_a_row_for_each_number_of_requests(sampling):
    rows, failures = measured(ReferenceBackend, sampling=sampling)
    assert failures == [] and [row["requests"] for row in rows] == [1, 3]
    one, three = rows
    assert one["over_one"] == 1
    assert three["over_one"] == three["host"]["tokens_per_s"] / one["host"]["tokens_per_s"]
    assert [len(gaps) for gaps in three["host"]["itl_us"]] == [5] * 6
    assert all(row["repeatable"] and row["check"]["passed"] for row in rows)
    # five steps are timed, at positions 5 to 9; a step of three reads the weights once
    spec = spec_of().replace(dtype=DType.F32)
    kv = spec.kv_bytes_read(7)
    assert one["floor"]["bytes"] == spec.bytes_per_token + kv
    assert three["floor"]["bytes"] == spec.bytes_per_token + 3 * kv
    steps = three["host"]["tokens_per_s"] / 3
    assert three["floor"]["measured_mbu"] == pytest.approx(steps * three["floor"]["bytes"] / 2e9)


class Mixed(ReferenceBackend):
    """Right alone; of several requests the last one's tokens are off by one."""

    def generate(self, mailbox):
        push, slots = mailbox.push, {request.slot for request in mailbox._posted}

        def off(slot, step):
            if slot and slot == max(slots):
                step = Step(step.token ^ 1, step.finish)
            push(slot, step)

        mailbox.push = off
        try:
            super().generate(mailbox)
        finally:
            mailbox.push = push


def test_tokens_of_another_request_are_found():
    rows, failures = measured(Mixed)
    assert [row["status"] for row in rows] == ["timed", "wrong"]
    assert failures == ["ours: 3 at a time give other tokens than each alone"]


class Compiling(ReferenceBackend):
    """Takes note of who asks it to settle, and of requests."""

    def __init__(self, *args):
        super().__init__(*args)
        self.seen = SEEN
        self.seen.clear()

    def generate(self, mailbox):
        self.seen.append(len(mailbox._posted))
        super().generate(mailbox)

    def settle(self):
        self.seen.append("settled")


SEEN: list[object] = []


def test_kernels_that_compile_meanwhile_are_waited_for_before_a_round_is_timed():
    measured(Compiling)
    # check; what compiles beside; each of three alone; a warm-up, each number settled behind its first; two rounds
    assert SEEN == [1, "settled", 1, 1, 1, 1, "settled", 3, "settled", 1, 3, 1, 3]


class Broken(ReferenceBackend):
    def generate(self, mailbox):
        raise ValueError("no such thing")


def test_a_backend_that_breaks_says_so():
    rows, failures = measured(Broken)
    assert [row["status"] for row in rows] == ["failed"] and rows[0]["host"] is None
    assert len(failures) == 1 and "ValueError: no such thing" in failures[0]
    assert concurrency_table({"rows": rows}).row_count == 0


def test_the_tables_show_each_figure_in_its_column():
    host = {"tokens_per_s": 1234.5, "itl_p50_us": 600.0, "itl_p99_us": 900.0, "p99_over_p50": 1.5}
    row = {
        "name": "ours", "requests": 4, "dtype": "bf16", "repeatable": True, "over_one": 3.25, "ttft_us": 2500.0,
        "host": host, "device": host | {"tokens_per_s": 1300.0, "p99_over_p50": 1.25}, "status": "timed",
        "check": {"passed": True, "top1": 0.875, "kl_mean": 0.012}, "prompt_tokens_per_s": 7000.0,
        "floor": {"measured_us": 550.0, "measured_mbu": 0.5},
    }  # fmt: skip
    wrong = row | {"check": row["check"] | {"passed": False}, "repeatable": False, "device": None}

    def cells(table):
        """{column: its cells}"""
        return {column.header: list(column.cells) for column in table.columns}

    assert cells(concurrency_table({"rows": [row, wrong]})) == {
        "": ["ours", "ours"], "requests": ["4", "4"], "text": ["right", "WRONG"], "as alone": ["yes", "NO"],
        "tokens/s": ["1,234.5"] * 2, "device t/s": ["1,300.0", "none"], "over one": ["3.25"] * 2,
        "p50 us": ["600.0"] * 2, "p99 us": ["900.0"] * 2, "roofline us": ["550.0"] * 2, "MBU": ["50.0%"] * 2,
        "TTFT ms": ["2.50"] * 2,
    }  # fmt: skip
    shared = {"": ["ours"], "dtype": ["bf16"], "top-1": ["0.875"], "KL mean": ["1.2e-02"], "text": ["right"]}
    assert cells(speed_table({"test": {"tokens": 9}, "rows": [row]})) == shared | {
        "tokens/s": ["1,234.5"], "device t/s": ["1,300.0"], "p50 us": ["600.0"], "p99 us": ["900.0"],
        "p99/p50": ["1.500 / 1.250"], "roofline us": ["550.0"], "MBU": ["50.0%"], "TTFT ms": ["2.50"],
    }  # fmt: skip
    wrong_text = cells(speed_table({"test": {"tokens": 9}, "rows": [wrong]}))["text"]
    assert wrong_text == ["WRONG"]
    prompt = row | {"host": None, "device": None}
    assert cells(speed_table({"test": {"tokens": 1}, "rows": [prompt]})) == shared | {
        "tokens/s": ["7,000.0"], "roofline ms": ["0.55"], "TTFT ms": ["2.50"],
    }  # fmt: skip
    absent = {"status": "absent"}
    assert speed_table({"test": {"tokens": 1}, "rows": [absent]}).row_count == 0
    starts = {f"{phase}": [1.25 * n, 2.5 * n] for n, phase in enumerate(PHASES, 1)}
    shown = cells(startup_table({"test": {"rounds": 2}, "rows": [{"name": "ours", "startup": starts}]}))
    assert shown.pop("") == ["ours"] * 2 and shown.pop("round") == ["1", "2"]
    assert list(shown.values()) == [[f"{1.25 * n:.2f}", f"{2.5 * n:.2f}"] for n in range(1, len(PHASES) + 1)]
    del starts["compiled_s"]  # as in records of before it was timed
    older = cells(startup_table({"test": {"rounds": 2}, "rows": [{"name": "ours", "startup": starts}]}))
    assert older["compiled s"] == ["", ""] and older["total s"] == shown["total s"]


def test_the_subcommand_on_the_demo(tmp_path, capsys):
    file = tmp_path / "record.json"
    few = ["--rounds=1", "--warmup=1", "--max-tokens=3", "--prompt-tokens=4"]
    code = bench.main(["concurrency", *few, "--requests", "2", "1", "2", "--json", str(file)])
    record, out = json.loads(file.read_text()), capsys.readouterr().out
    jsonschema.Draft202012Validator(SCHEMA).validate(record)
    assert code == 0 and "over one" in out and "1, 2 x tg3 @ d4" in out
    assert [row["requests"] for row in record["rows"]] == [1, 2]
    assert record["test"]["batch"] == 2 and record["test"]["sampling"] == "greedy"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["concurrency", "--requests", "0"], "below 1"),
        (["concurrency", "--max-tokens", "1"], "--max-tokens 1"),
        (["concurrency", "--prompt-tokens", "5000"], "do not fit the 1024 of demo"),
        (["decode", "--temperature", "-1"], "no number from 0 on"),
    ],
)
def test_mistakes_are_told_in_one_line(argv, said, capsys):
    try:
        code = bench.main(argv)
    except SystemExit as exit:
        code = exit.code
    assert code == 2 and said in capsys.readouterr().err.splitlines()[-1]
