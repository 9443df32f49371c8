"""What `kog bench` says of the machine, by clocks, bandwidth and source; and the microbenchmarks."""

import importlib
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton

from kog_triton.bench import bulk_read, machine
from kog_triton.bench.bandwidth import measure_bandwidth
from kog_triton.bench.read_kernel import read_kernel
from tests import ROOT
from tests.lib.concurrent_interpreter import concurrent

PACKAGE = ROOT / "kog_triton" / "bench"


def test_a_line_of_nvidia_smi():
    sample = machine.parse("1980, 3201, 41, 312.52, 0x0000000000000024\n", machine.QUERY)
    assert sample["sm_mhz"] == 1980 and sample["power_w"] == 312.52 and sample["reasons"] == 0x24
    assert machine.parse("1980, 3201, [N/A], 1, 0x0", machine.QUERY)["temperature_c"] is None
    assert machine.parse("no devices were found", machine.QUERY) is None
    assert machine.parse(None, machine.QUERY) is None and machine.parse("", machine.QUERY) is None


def test_counters_of_a_driver_that_has_them_and_of_one_that_has_not(monkeypatch):
    answers = {"clocks.sm": "1980, 3201, 41, 312.5, 0x1", "counters.sw_power_cap": "7, 0, 0, 20"}

    def say(argv):
        assert argv[:3] == ["nvidia-smi", "-i", "GPU-1a2b-3c"]  # torch's own, not the machine's first
        (query,) = [word for word in argv if word.startswith("--query-gpu=")]
        return next((answers[key] for key in answers if key in query), None)

    monkeypatch.setattr(machine, "_say", say)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    seen = SimpleNamespace(uuid="1a2b-3c")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: seen)
    slowed = machine.sample()["slowed_us"]
    assert slowed["power cap"] == 7 and slowed["hardware power brake"] == 20 and len(slowed) == 4
    answers["counters.sw_power_cap"] = "7, 0, [N/A], 20"
    assert machine.sample()["slowed_us"] is None
    del answers["counters.sw_power_cap"]
    assert machine.sample()["slowed_us"] is None and machine.sample()["sm_mhz"] == 1980
    answers.clear()
    assert machine.sample() is None


def test_throttling():
    fast = {"sm_mhz": 1980.0, "reasons": 1.0}
    assert machine.throttling([fast, fast]) == [] and machine.throttling([]) is None
    assert machine.throttling([fast, fast | {"reasons": float(0x44)}]) == ["power cap", "hardware thermal slowdown"]
    (why,) = machine.throttling([fast, fast | {"sm_mhz": 1700.0}])
    assert "1980 to 1700" in why
    slowed = dict.fromkeys(machine.COUNTERS, 5.0)
    calm, held = fast | {"slowed_us": slowed}, fast | {"slowed_us": slowed | {"power cap": 12_505}}
    assert machine.throttling([calm, calm]) == []
    assert machine.throttling([calm, held]) == ["power cap for 12.5 ms"], "between two calm moments"
    assert machine.throttling([fast | {"slowed_us": None}, held]) == []
    assert machine.conditions([None, fast, None]) == {"samples": [fast], "throttled": []}
    assert machine.conditions([None]) == {"samples": [], "throttled": None}


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without a GPU")
@pytest.mark.parametrize("name, code", [("read_bandwidth", 0), ("launch_cost", 1), ("exchange", 1)])
def test_a_microbenchmark_without_a_gpu_measures_the_cpu_or_says_what_is_missing(name, code, tmp_path):
    file = tmp_path / "record.json"
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "micro" / f"{name}.py", "--json", file],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == code
    assert "TB/s" in done.stdout if code == 0 else done.stderr.startswith("a GPU is needed")
    assert done.stderr.count("\n") == code
    assert file.is_file() == (code == 0)
    if code == 0:
        record = json.loads(file.read_text())
        assert (record["name"], record["unit"]) == (name, "TB/s") and record["machine"]["source"]
        assert f"{record['figures']['torch']:.3f} TB/s" in done.stdout


@pytest.fixture
def figures(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "micro"))
    return importlib.import_module("figures")


def test_a_microbenchmark_stands_beside_what_kog_reports(figures, tmp_path, capsys):
    file = tmp_path / "record.json"
    for name, said in (("launch_cost", "4.5"), ("exchange", "cut from 7.8")):
        figures.finish(name, "us", {"plain": 15.5}, file, "each")
        assert "plain       15.500 us" in (out := capsys.readouterr().out) and said in out
        record = json.loads(file.read_text())
        assert record["figures"] == {"plain": 15.5}
        assert record["reported_by_kog_us"] == figures.REPORTED[name]
        assert record["reported_in"] == figures.SOURCE and f"in: {figures.SOURCE}\n" in out


def test_the_lab_log_has_what_kog_reports_and_its_source(figures):
    log = " ".join((ROOT / "benchmarks" / "cuda-log.md").read_text().split()).replace('"', "")
    said = log[log.index("Kog reports") : log.index("What an H200 gives to the same")]
    assert figures.SOURCE in said
    reported = " ".join(f for all_of in figures.REPORTED.values() for f in all_of.values())
    assert set(re.findall(r"[\d.]+", reported)) <= set(re.findall(r"\d[\d.]*", said))


def test_a_record_that_cannot_be_written_is_told_first(tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks/micro/exchange.py", "--json", tmp_path / "no" / "x"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 2 and done.stderr.endswith(f"there is no folder {tmp_path / 'no'}\n")


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


def test_a_run_of_a_commit_is_told_from_one_with_changes(tmp_path, monkeypatch):
    """Of sources: a record that was kept since, or a file's mode, changes nothing."""
    package, cuda = tmp_path / "kog_triton", tmp_path / "backends" / "cuda"
    for folder in (package, cuda):
        folder.mkdir(parents=True)
    (package / "a.py").write_text("one\n")
    (package / "gone.py").write_text("two\n")
    (cuda / "ring.h").write_text("three\n")
    files = {"a.py": package / "a.py", "gone.py": package / "gone.py"}
    files["backends/cuda/ring.h"] = cuda / "ring.h"
    monkeypatch.setattr(machine, "source_files", lambda: files)
    assert machine.changed_files(tmp_path) is None, "no git"
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for argv in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "x"]):
        subprocess.run(["git", "-C", tmp_path, *argv], check=True)
    (tmp_path / "record.json").write_text("{}")
    (package / "a.py").chmod(0o755)
    assert machine.changed_files(tmp_path) == []
    (cuda / "ring.h").write_text("3\n")
    (package / "new.py").write_text("four\n")
    files["new.py"] = package / "new.py"
    del files["gone.py"]
    assert machine.changed_files(tmp_path) == ["backends/cuda/ring.h", "gone.py", "new.py"]


def test_every_source_of_every_backend_is_told():
    """Else a record of an exact commit says that files were changed."""
    beside = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "backends").rglob("*")
        if path.suffix in (".py", ".cu", ".h", ".hip")
    }
    assert {name.split("/")[1] for name in beside} == {"cuda", "hip"}
    files = machine.source_files()
    assert beside == {name for name in files if name.startswith(("backends/cuda/", "backends/hip/"))}


def test_the_digest_of_the_source_covers_the_kernels(monkeypatch, tmp_path):
    files = machine.source_files()
    assert {"bench/machine.py", "backends/cuda/decode.cu", "backends/cuda/include/kog/ring.h"} <= set(files)
    whole = machine.source_digest()
    changed = tmp_path / "ring.h"
    changed.write_bytes(files["backends/cuda/include/kog/ring.h"].read_bytes() + b"\n")
    files["backends/cuda/include/kog/ring.h"] = changed
    monkeypatch.setattr(machine, "source_files", lambda: files)
    assert machine.source_digest() != whole


def test_a_start_is_told_step_by_step():
    program = ROOT / "benchmarks/micro/start_timeline.py"
    flags = ("--backend", "reference", "-p", "a", "-m", "2", "--temp", "0", "--quiet")
    done = subprocess.run([sys.executable, program, *flags], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout, done.stderr
    lines = [line for line in done.stderr.splitlines() if re.match(r"[ \d.]{26}  ", line)]
    spans = {line[28:].strip(): line[:26].split() for line in lines}
    first, torch = float(spans["the first text"][0]), [float(t) for t in spans["import torch"]]
    assert 0 < torch[0] < torch[1] < first < float(spans["the end of Python"][0])
    assert torch[2] == pytest.approx(torch[1] - torch[0], abs=0.002)
    assert float(spans["import kog_triton.llm"][0]) < torch[0]
    assert any(re.match(r"Checkpoint\.load, \d+ times", name) for name in spans)


def test_every_step_of_a_start_is_there():
    """A function of another name would not be told, and nobody would miss it."""
    code = (
        "import importlib, importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('start_timeline', sys.argv[1])\n"
        "timeline = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(timeline)\n"
        "for name, steps in timeline.STEPS.items():\n"
        "    if name.startswith('kog_triton') and not name.endswith('fused'):\n"
        "        timeline.wrap(importlib.import_module(name), steps)\n"
        "names = {n for steps in timeline.STEPS.values() for n in steps}\n"
        "assert timeline.OFTEN <= names, timeline.OFTEN - names\n"
    )
    program = ROOT / "benchmarks/micro/start_timeline.py"
    done = subprocess.run([sys.executable, "-c", code, program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_machine_whose_only_clock_is_unknown_did_not_slow_down():
    for first, last in ((None, 1000.0), (1980.0, None), (0.0, 1000.0), (1980.0, 0.0)):
        samples = [{"reasons": 0.0, "sm_mhz": mhz} for mhz in (first, last)]
        assert machine.throttling(samples) == []
