"""Every flag of `kog bench` reaches the task that is measured, the record or the file that it is about."""

import json
from pathlib import Path

import pytest
import torch

from kog_triton.bench import cli as bench
from kog_triton.bench import model as bench_model
from kog_triton.bench import show
from kog_triton.bench.engines import GREEDY, Sampling
from kog_triton.bench.peers import find_peer
from kog_triton.errors import DeviceError
from kog_triton.schedule.topology import find_gpu

MEASURED = {
    "bandwidth": {
        "datasheet": 4.8e12, "measured": 4e12, "methods": {"loads": 4e12}, "absent": {"copies": "no GPU"}, "scale": 0.5,
    },
    "conditions": {"samples": [], "throttled": []},
    "rows": [],
    "failures": [],
}  # fmt: skip
WHERE = {
    "decode": "kog_triton.bench.measure.measure",
    "compare": "kog_triton.bench.measure.measure",
    "prefill": "kog_triton.bench.measure.measure",
    "concurrency": "kog_triton.bench.concurrency.measure_concurrency",
    "stages": "kog_triton.bench.stages.measure_stages",
}
SHARED = ("--shape=qwen3-0.6b", "--dtype=fp16", "--device=cpu", "--backend=reference")


@pytest.fixture
def asked(monkeypatch, tmp_path, capsys):
    """What a command line asks to be measured: the task, and the record that is written of it."""

    def call(kind, *argv):
        tasks = []

        def measure(task, say):
            tasks.append(task)
            rounds = {"rounds": task.rounds, "interrupted": False}
            return MEASURED | (rounds if WHERE[kind].endswith(".measure") else {})

        monkeypatch.setattr(WHERE[kind], measure)
        monkeypatch.setattr(show, "show", lambda record: None)
        file = tmp_path / "record.json"
        assert bench.main([kind, *SHARED, *argv, "--json", str(file)]) == 0, capsys.readouterr().err
        (task,) = tasks
        record = json.loads(file.read_text())
        assert record["kind"] == kind and record["argv"] == [kind, *SHARED, *argv]
        assert task.model.name == record["model"]["name"] == "qwen3-0.6b"
        assert record["model"]["dtype"] == "f16" and task.device == torch.device("cpu")
        assert task.device_word == "cpu" and [c.name for c in task.backends] == ["reference"]
        return task, record

    return call


def test_no_kind_is_answered_by_the_list_of_them(capsys):
    with pytest.raises(SystemExit):
        bench.main([])
    out, err = capsys.readouterr()
    assert out == "" and "tokens/s behind a prompt" in err and "the results kept so far" in err


def test_decode(asked):
    said = "--depth 48 --max-tokens 24 --rounds 3 --warmup 4 --temperature 0.5 --top-p 0.75 --gpus 2 --profile 5"
    task, record = asked("decode", *said.split(), "--peer=transformers", "--peer=transformers", "--target-tps=0")
    assert (task.prompt_tokens, task.tokens, task.rounds, task.warmup) == (48, 24, 3, 4)
    assert (task.num_gpus, task.profile_tokens, task.one_kernel) == (2, 5, False)
    assert task.sampling == Sampling(0.5, 0.75) and task.peers == [find_peer("transformers")]
    assert task.test == "tg24 @ d48" and task.gguf is None
    assert (task.options().num_gpus, task.options().device, task.options().prefill) == (2, "cpu", "auto")
    test = record["test"]
    wanted = {"name": "tg24 @ d48", "prompt_tokens": 48, "tokens": 24, "rounds": 3, "warmup": 4, "num_gpus": 2}
    assert {key: test[key] for key in wanted} == wanted
    assert (test["sampling"], test["batch"], test["interrupted"]) == ("temperature 0.5, top-p 0.75", 1, False)
    assert record["target"] == {"tokens_per_s": 0.0, "reached": 0.0, "by": None, "met": True}


def test_defaults_of_decode(asked):
    task, record = asked("decode")
    assert (task.prompt_tokens, task.tokens, task.rounds, task.warmup) == (32, 128, 5, 2)
    assert (task.sampling, task.peers, task.num_gpus, task.profile_tokens) == (GREEDY, [], 1, 0)
    assert record["target"] is None and record["test"]["sampling"] == "greedy"


def test_compare_takes_every_peer(asked):
    task, _ = asked("compare", "--depth=9")
    assert len(task.peers) == 7 and task.prompt_tokens == 9
    task, _ = asked("compare", "--peer=torch-graph")
    assert task.peers == [find_peer("torch-graph")]


def test_prefill(asked, tmp_path):
    gguf = tmp_path / "model.gguf"
    gguf.touch()
    task, record = asked("prefill", "--prompt-tokens=77", "--rounds=1", f"--gguf={gguf}")
    assert (task.prompt_tokens, task.tokens, task.rounds, task.gguf) == (77, 1, 1, gguf)
    assert task.test == record["test"]["name"] == "pp77" and task.sampling == GREEDY
    assert asked("prefill")[0].prompt_tokens == 512


def test_concurrency(asked):
    said = "--requests 4 2 4 --prompt-tokens 6 --max-tokens 7 --rounds 2 --warmup 1 --temperature 1"
    task, record = asked("concurrency", *said.split())
    assert (task.requests, task.prompt_tokens, task.tokens) == ([2, 4], 6, 7)
    assert (task.rounds, task.warmup, task.sampling) == (2, 1, Sampling(1.0))
    test = record["test"]
    assert (test["name"], test["batch"], test["sampling"]) == ("2, 4 x tg7 @ d6", 4, "temperature 1")
    assert asked("concurrency")[0].requests == [1, 2, 4, 8]


def test_stages(asked):
    task, record = asked("stages", "--depth", "50", "--rounds=3", "--warmup=1")
    assert (task.depth, task.rounds, task.warmup) == (50, 3, 1)
    assert record["test"]["name"] == "stages @ d50" and record["test"]["prompt_tokens"] == 50


def test_startup(monkeypatch, tmp_path, capsys):
    asked = []

    def start_rounds(backend, arguments, rounds, say):
        asked.append((backend, arguments, rounds))
        raise KeyboardInterrupt

    monkeypatch.setattr("kog_triton.bench.startup.start_rounds", start_rounds)
    assert bench.main(["startup", *SHARED, "--gpus=2", "--weights=mxfp4", "--rounds=4"]) == 130
    arguments = {
        "model": None,
        "revision": None,
        "shape": "qwen3-0.6b",
        "device": "cpu",
        "dtype": "fp16",
        "weights": "mxfp4",
        "num_gpus": 2,
    }
    assert asked == [("reference", arguments, 4)]


def test_quiet_shows_neither_progress_nor_table(asked, monkeypatch, capsys):
    asked("decode", "--quiet")
    assert capsys.readouterr() == ("", "")


def test_table_reads_and_writes_where_it_is_told(monkeypatch, tmp_path, capsys):
    read = []
    monkeypatch.setattr("kog_triton.bench.table.read_results", lambda folder: read.append(folder) or [])
    assert bench.main(["table", "--results", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "No results are kept yet.\n"
    readme = tmp_path / "README.md"
    readme.write_text("<!-- results -->\nold\n<!-- /results -->\n")
    assert bench.main(["table", "--into", str(readme)]) == 0
    assert "No results are kept yet." in readme.read_text()
    assert read == [tmp_path, Path("benchmarks/results")]


# ---- what is said below the table ----


def a_record(**changes):
    row = {"name": "ours", "kind": "backend", "status": "timed", "note": "", "repeatable": True, "kernels": None}
    sample = {"sm_mhz": 1980.0, "memory_mhz": 3201.0, "temperature_c": 40.0, "power_w": None}
    return {
        "kind": "decode",
        "rows": [
            row | {"kernels": {"launches": 3, "copies": 4, "fills": 5}},
            row | {"name": "gone", "status": "absent", "note": "not here"},
            row | {"name": "peer", "kind": "peer", "note": "odd"},
            row | {"name": "moody", "repeatable": False},
        ],
        "test": {
            "tokens": 9, "prompt_tokens": 32, "sampling": "greedy", "prompt": "random ids", "warmup": 2, "rounds": 5,
        },
        "model": {"weights": "random, seed 0"},
        "machine": {
            "packages": {"torch": "2.9", "triton": None}, "dirty": True, "changed": ["a", "b"], "commit": "c" * 40,
            "source": "s" * 40, "python": "3.12", "driver": "580",
        },
        "bandwidth": MEASURED["bandwidth"],
        "conditions": {"samples": [sample, sample | {"sm_mhz": None}], "throttled": ["hot"]},
    } | changes  # fmt: skip


def test_notes_say_each_thing_once():
    assert show.notes(a_record()) == [
        "gone: absent: not here",
        "peer: odd",
        "moody: rounds did not give the same tokens",
        "batch 1, greedy, random ids; 2 warm-up and 5 timed rounds, interleaved; medians; tokens/s without the first "
        "token; weights: random, seed 0",
        "p99/p50: at constant depth, as tokens arrived at the host / as the backend stamped them",
        "read bandwidth measured: loads 4.000 TB/s (datasheet 4.80); 0.500 of the "
        f"{show.TARGET_READ / 1e12} TB/s that targets assume; copies absent: no GPU",
        "SM 1980 MHz, memory 3201 MHz, 40 C, - W -> SM - MHz, memory 3201 MHz, 40 C, - W; throttling: hot",
        "ours: 3 kernel launches for one request, 4 copies, 5 fills",
        "python 3.12, torch 2.9; 580; commit cccccccccccc with 2 files changed, source ssssssssssss",
    ]


def test_notes_of_a_prompt_of_several_requests_and_of_nothing_known():
    record = a_record()
    prompt = show.notes(record | {"test": record["test"] | {"tokens": 1}})
    assert any("tokens/s are the prompt's, until the first token" in line for line in prompt)
    assert not any(line.startswith("p99/p50") for line in prompt)
    many = show.notes(record | {"kind": "concurrency"})
    assert any(line.startswith("greedy, random ids; 2 warm-up") for line in many)
    nothing = {"datasheet": None, "measured": None, "methods": {}, "absent": {}, "scale": None}
    bare = show.notes(record | {"bandwidth": nothing, "conditions": {"samples": [], "throttled": []}, "rows": []})
    assert "read bandwidth measured: nothing TB/s" in bare
    slow = nothing | {"measured": 1.7e10, "methods": {"loads": 1.7e10}}  # a CPU's
    assert "read bandwidth measured: loads 17.0 GB/s" in show.notes(record | {"bandwidth": slow})
    assert "clocks, temperature and power: not known here" in bare


@pytest.mark.parametrize(
    ("gpu", "name", "want"),
    [
        ("h200", "", "nvidia"),
        ("h200", "nvidia", "nvidia"),
        ("h200", "h200", "h200"),
        ("h200", "h100", None),
        (None, "", None),
        (None, "nvidia", None),
    ],
)
def test_a_device_that_is_not_the_one_here_is_refused(monkeypatch, gpu, name, want):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(bench_model, "gpu_of", lambda device: gpu and find_gpu(gpu))
    if want is None:
        with pytest.raises(DeviceError, match="torch sees a GPU"):
            bench_model.find_device(name)
    else:
        assert bench_model.find_device(name) == (torch.device("cuda"), want)
