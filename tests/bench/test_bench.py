"""`kog bench`: every subcommand on a CPU, exit codes, records by the schema."""

import importlib
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import torch
from huggingface_hub.constants import HF_HOME

from kog_triton import __main__ as kog
from kog_triton.backends import BackendOptions
from kog_triton.backends.choose import choose
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.bench import cli as bench
from kog_triton.bench import measure, one_start
from kog_triton.bench.engines import GREEDY, BackendUnderTest, Sampling
from kog_triton.bench.model import Model
from kog_triton.bench.peers import PEERS
from kog_triton.bench.peers.transformers_eager import TransformersEager
from kog_triton.bench.spans import read, written
from kog_triton.bench.startup import CACHES, PHASES
from kog_triton.bench.table import markers, read_results, table
from kog_triton.checkpoint.folder import Checkpoint
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.demo import checkpoint_path
from kog_triton.errors import RunError
from kog_triton.model.shapes import SHAPES
from kog_triton.model.spec import DType
from kog_triton.model.weight_format import FORMATS
from tests.lib.cuda_walk import FiberBackend
from tests.lib.fake_backend import FakeBackend, install
from tests.lib.fake_checkpoint import make_checkpoint
from tests.lib.ring_walker import spec_of

SCHEMA = json.loads(Path(bench.__file__).with_name("result.schema.json").read_text())
FEW = ("--rounds", "2", "--warmup", "1", "--max-tokens", "4", "--depth", "5")
SMALL = {
    **SHAPES["qwen3-0.6b"],
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 128,
}  # of a shape
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def cli(tmp_path, capsys):
    """`kog bench`: (exit code, the record, stdout, stderr)."""

    def call(*argv):
        file = tmp_path / "record.json"
        try:
            code = bench.main([*argv, "--json", str(file)] if argv[0] != "table" else argv)
        except SystemExit as exit:
            code = exit.code
        record = json.loads(file.read_text()) if file.is_file() else None
        if record:
            jsonschema.Draft202012Validator(SCHEMA).validate(record)
            file.unlink()
        return code, record, *capsys.readouterr()

    return call


def rows_of(record):
    return {row["name"]: row for row in record["rows"]}


# ---- subcommands ----


def test_decode_on_the_demo(cli):
    code, record, out, err = cli("decode", *FEW)
    assert code == 0 and "round 2 of 2" in err
    (row,) = record["rows"]
    assert (row["name"], row["status"], row["repeatable"]) == ("reference", "timed", True)
    assert row["check"]["passed"] and row["check"]["top1"] == 1
    assert [len(gaps) for gaps in row["host"]["itl_us"]] == [3, 3]
    # its token loop stamps the steps itself, before a reader sees them
    assert [len(gaps) for gaps in row["device"]["itl_us"]] == [3, 3]
    assert row["ttft_us"] > 0 and row["floor"]["bytes"] > 30e6
    assert 0 < row["floor"]["measured_mbu"] < 2 and row["floor"]["datasheet_us"] is None
    assert record["test"]["name"] == "tg4 @ d5" and record["machine"]["python"]
    assert "tg4 @ d5" in out and "right" in out and "read bandwidth measured" in out


def test_what_is_not_compared_says_so(cli):
    code, record, out, _ = cli("decode", *FEW, "--no-check")
    (row,) = record["rows"]
    assert code == 0 and (row["status"], row["check"]) == ("timed", None)
    assert row["note"] == "not compared with the reference: --no-check" and "right" not in out


def test_every_depth_has_a_record_of_its_own(cli, llama, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = ("decode", "--model", str(llama), "--rounds=2", "--warmup=1", "--max-tokens=3")
    rest = ("--depth", "9", "5", "9", "--save", "deep", "--target-tps", "1e9")
    code, record, out, err = cli(*argv, *rest)
    assert code == 5 and record is None, "no record has the name without a depth"
    assert "tg3 @ d9: target of 1e+09" in err and "; tg3 @ d5: target" in err
    for depth in (9, 5):
        record = json.loads((tmp_path / f"record-d{depth}.json").read_text())
        jsonschema.Draft202012Validator(SCHEMA).validate(record)
        assert record["test"]["name"] == f"tg3 @ d{depth}" and f"tg3 @ d{depth}" in out
        assert record["test"]["prompt_tokens"] == depth and not record["target"]["met"]
        (kept,) = (tmp_path / "benchmarks" / "results" / "cpu").glob(f"*-deep-d{depth}.json")
        assert json.loads(kept.read_text()) == record


def test_the_deepest_is_refused_before_anything_is_measured(cli):
    code, _, out, err = cli("decode", *FEW[:-1], "5", "2000")
    assert code == 2 and out == "" and "do not fit the 1024 of demo" in err
    assert "bench: " not in err


def test_prefill_times_the_prompt_alone(cli):
    code, record, out, _ = cli(
        "prefill", "--prompt-tokens", "40", "--rounds", "3", "--warmup", "1", "--backend=reference"
    )
    (row,) = record["rows"]
    assert code == 0 and "pp40" in out and row["host"] is None and "roofline ms" in out
    assert "tokens/s are the prompt's" in out
    weights = Checkpoint.open(checkpoint_path()).spec.replace(dtype=DType.F32).bytes_per_token
    assert row["floor"]["bytes"] == weights, "one pass over them, in the reference's own type"
    assert row["floor"]["measured_mbu"] == pytest.approx(row["floor"]["measured_us"] / row["ttft_us"])
    times = sorted(row["ttft_us_rounds"])
    assert len(times) == 3 and row["ttft_us"] == times[1]
    assert row["prompt_tokens_per_s"] == pytest.approx(40e6 / times[1])


def test_our_backends_sample_beside_peers_that_are_greedy(cli, llama):
    argv = ["compare", "--model", str(llama), "--peer=transformers", *FEW, "--backend=reference"]
    _, greedy, _, _ = cli(*argv)
    code, record, out, _ = cli(*argv, "--temperature=0.7", "--top-p=0.9")
    assert code == 0 and record["test"]["sampling"] == "temperature 0.7, top-p 0.9"
    assert "batch 1, temperature 0.7, top-p 0.9, random ids" in out
    ours, theirs = (rows_of(record)[name] for name in ("reference", "transformers"))
    alone = rows_of(greedy)
    assert theirs["version"] == alone["transformers"]["version"] + ", greedy"
    assert ours["version"] == alone["reference"]["version"]
    assert theirs["repeatable"] and ours["repeatable"]


def test_compare_takes_all_and_says_who_is_absent(cli, llama):
    code, record, out, _ = cli("compare", "--model", str(llama), *FEW)
    rows = rows_of(record)
    assert code == 0 and set(rows) == {"cuda", "hip", "triton", "reference", *PEERS}
    for name in ("reference", "transformers"):
        assert rows[name]["status"] == "timed" and rows[name]["check"]["passed"]
        assert len(rows[name]["host"]["tokens_per_s_rounds"]) == 2
    assert rows["transformers"]["version"].startswith("transformers 5")
    for name in ("cuda", "llama-bench", "torch-graph"):
        assert rows[name]["status"] == "absent" and f"{name}: absent: {rows[name]['note']}" in out
    assert "with a tiny model" in rows["llama-bench"]["note"]
    assert "has run on a CPU" in rows["torch-graph"]["note"]


def test_a_laneformer_has_no_transformers(cli):
    code, record, _, _ = cli("compare", "--backend=reference", "--peer=transformers", *FEW)
    row = rows_of(record)["transformers"]
    assert code == 0 and row["status"] == "absent" and "no laneformer" in row["note"]


def test_every_round_begins_with_another(cli, llama, monkeypatch):
    begun = []
    of_ours, of_theirs = BackendUnderTest.generate, TransformersEager.generate

    def seen(name, generate):
        return lambda self, *asked: begun.append(name) or generate(self, *asked)

    monkeypatch.setattr(BackendUnderTest, "generate", seen("reference", of_ours))
    monkeypatch.setattr(TransformersEager, "generate", seen("transformers", of_theirs))
    rest = ("--rounds=3", "--warmup=1", "--max-tokens=2", "--depth=3")
    only = ("--backend=reference", "--peer=transformers")
    assert cli("compare", "--model", str(llama), *only, *rest)[0] == 0
    pair = ["reference", "transformers"]
    assert begun[-6:] == [*pair, *reversed(pair), *pair]


@pytest.mark.parametrize("kind", ["decode", "stages", "concurrency"])
def test_more_gpus_than_a_backend_uses_are_no_measurement(cli, kind):
    """The reference computes all ranks in one process: its row would say 2 GPUs."""
    rest = ("--rounds=1", "--warmup=1") + (("--peer=transformers",) if kind == "decode" else ())
    code, record, _, err = cli(kind, "--backend=reference", "--gpus=2", *rest)
    rows = rows_of(record)
    assert code == 5 and "uses 1 GPU, not 2: leave --gpus out" in err
    assert rows["reference"]["status"] == "failed" and rows["reference"]["host"] is None
    if kind == "decode":
        assert rows["transformers"]["status"] == "absent"
        assert rows["transformers"]["note"].startswith("this adapter runs on one GPU")


def test_a_start_that_never_ends_is_an_error(cli, monkeypatch):
    def run(argv, timeout, **options):
        raise subprocess.TimeoutExpired(argv, timeout)

    monkeypatch.setattr("subprocess.run", run)
    code, record, _, err = cli("startup", "--rounds=1")
    assert code == 5 and record is None
    assert err == "bench: start 1 of 1: reference\nerror: a start took more than 900 s\n"


def test_the_first_start_finds_nothing_compiled_and_the_next_ones_what_it_kept(cli, monkeypatch):
    found, hubs, real = [], [], subprocess.run

    def run(argv, env=None, **options):
        if "kog_triton.bench.one_start" not in argv:
            return real(argv, env=env, **options)
        folders = [Path(env[name]) for name in CACHES]
        assert not any(f.is_relative_to(Path.home()) for f in folders)
        found.append([list(f.iterdir()) if f.exists() else None for f in folders])
        hubs.append(env["HF_HOME"])
        assert env["CUDA_CACHE_DISABLE"] == "1"
        for folder in folders:
            folder.mkdir(exist_ok=True)
            (folder / "kept").touch()
        phases = json.dumps(dict.fromkeys(PHASES, 1.0))
        return subprocess.CompletedProcess(argv, 0, phases, "")

    monkeypatch.setattr("subprocess.run", run)
    assert cli("startup", "--rounds=2")[0] == 0
    first, second = found
    assert first == [None] * len(CACHES)
    assert [[path.name for path in paths] for paths in second] == [["kept"]] * len(CACHES)
    assert hubs == [HF_HOME] * 2 and not any(path.exists() for paths in second for path in paths)


def test_startup_is_timed_in_its_own_process(cli):
    code, record, out, _ = cli("startup", "--rounds", "1")
    (row,) = record["rows"]
    phases = {name: values[0] for name, values in row["startup"].items()}
    assert code == 0 and "first_token" in out and all(s > 0 for s in phases.values())
    parts = phases["import_s"] + phases["load_s"] + phases["first_token_s"]
    assert phases["total_s"] == pytest.approx(parts) and phases["compiled_s"] >= phases["total_s"]


def test_a_start_opens_weights_of_the_format_that_is_asked_for(cli, monkeypatch):
    begun, opened, real = [], [], subprocess.run

    def run(argv, **options):
        """The child's work in this process, where what it opens is seen."""
        if "kog_triton.bench.one_start" not in argv:
            return real(argv, **options)
        phases = one_start.one_start(**json.loads(argv[-1]))
        return subprocess.CompletedProcess(argv, 0, json.dumps(phases))

    def under_test(backend, weights, options):
        opened.append(weights)
        return BackendUnderTest(backend, weights, options)

    monkeypatch.setitem(SHAPES, "small", SMALL)
    monkeypatch.setattr("subprocess.run", run)
    monkeypatch.setattr("kog_triton.bench.engines.BackendUnderTest", under_test)
    monkeypatch.setattr(one_start, "precompile", lambda *_, **asked: begun.append(asked))
    asked = ("--shape=small", "--weights=int4-g32", "--backend=reference", "--device=cpu")
    code, record, _, err = cli("startup", *asked, "--rounds=1")
    assert code == 0, err
    (weights,) = opened
    assert weights.spec.narrow and {how for _, how in weights.spec.narrow} == {FORMATS["int4-g32"]}
    assert begun[0]["weights"] == "int4-g32"
    assert record["model"]["weights"].endswith("int4-g32")


def test_what_a_start_says_is_progress_and_its_last_line_the_error(cli, monkeypatch):
    real = subprocess.run

    def run(argv, **options):
        if "kog_triton.bench.one_start" not in argv:
            return real(argv, **options)
        said = "import sys; sys.exit('compiling\\n\\nerror: no GPU is free')"
        return real([sys.executable, "-c", said], **options)

    monkeypatch.setattr("subprocess.run", run)
    wrong = "error: a start failed: no GPU is free\n"
    lines = ("start 1 of 1: reference", "compiling", "error: no GPU is free")
    code, _, _, err = cli("startup", "--rounds=1")
    assert code == 5 and err == "".join(f"bench: {line}\n" for line in lines) + wrong
    assert cli("startup", "--rounds=1", "--quiet")[3] == wrong


def test_kog_knows_the_command(capsys):
    assert "bench" in kog.commands()
    with pytest.raises(SystemExit) as end:
        kog.main(["bench", "--help"])
    assert end.value.code == 0 and "compare" in capsys.readouterr().out


def test_quiet_prints_nothing(cli):
    assert cli("decode", "--quiet", *FEW)[2:] == ("", "")


# ---- exit codes ----


@pytest.mark.parametrize(("target", "code"), [("0.001", 0), ("1e9", 5)])
def test_the_target_decides_the_exit_code(cli, target, code):
    got, record, _, err = cli("decode", "--target-tps", target, *FEW)
    assert got == code and record["target"]["met"] == (code == 0)
    assert record["target"]["by"] == "reference"
    assert ("not met: reference reached" in err) == (code == 5)


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["decode", "--shape", "gpt-9"], 3, "no shape is named 'gpt-9'"),
        (["decode", "--model", "/nowhere/model"], 3, "/nowhere/model"),
        (["decode", "--backend", "magic"], 2, "no backend named 'magic'"),
        (["decode", "--peer", "magic"], 2, "invalid choice"),
        (["decode", "--rounds", "0"], 2, "below 1"),
        (["decode", "--max-tokens", "1"], 2, "use kog bench prefill"),
        (["decode", "--depth", "2000"], 2, "do not fit the 1024 of demo"),
        (["decode", "--no-kernel-switches"], 2, "there is none in use"),
        (["decode", "--device", "h200"], 4, "torch sees no GPU"),
        (["decode", "--device", "h2000"], 4, "no device 'h2000'"),
        (["decode", "--backend", "triton"], 4, "torch sees no GPU"),
        (["decode", "--save", "../up", *FEW], 2, "--save ../up: a name of a-z"),
        (["decode", "--save", "", *FEW], 2, "a name of a-z"),
        (["decode", "--target-tps", "-5"], 2, "argument --target-tps: -5 is no number from 0 on"),
        (["decode", "--target-tps", "nan"], 2, "nan is no number"),
        (["decode", "--warmup", "x"], 2, "argument --warmup: 'x' is no whole number"),
        (["decode", "--top-p", "0.9"], 2, "--top-p 0.9 without --temperature: greedy needs none"),
        (["decode", "--temperature=1", "--top-p=1.5"], 2, "--top-p: 1.5 is not above 0 and at most 1"),
        (["decode", "--gguf", "/nowhere.gguf"], 2, "--gguf /nowhere.gguf: no such file"),
        (["table", "--results", "/nowhere"], 2, "/nowhere: no such folder"),
        (["phases"], 2, "invalid choice"),
        (["table", "--into", "/nowhere/README.md"], 2, "cannot be read"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without a GPU")
def test_mistakes_are_told_in_one_line(cli, argv, code, said):
    got, _, out, err = cli(*argv)
    assert (got, out) == (code, "") and said in err
    assert err.count("\n") == 1, "nothing was measured before"


def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(llama, tmp_path, capsys):
    for file in (tmp_path, tmp_path / "none" / "x.json"):
        assert bench.main(["decode", "--model", str(llama), *FEW, "--json", str(file)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith(f"error: --json {file}: ") and err.count("\n") == 1


def test_a_wrong_backend_is_not_timed(cli, llama, tmp_path, monkeypatch):
    """The fake backend computes some other function: a model that is wrong, but answers."""
    monkeypatch.syspath_prepend(str(install(tmp_path / "site")))
    importlib.invalidate_caches()
    code, record, _, err = cli("decode", "--model", str(llama), "--backend", "fake", *FEW)
    (row,) = record["rows"]
    assert code == 5 and "fake: its text is wrong" in err
    assert row["status"] == "wrong" and row["host"] is None and row["check"]["kl_mean"] > 0.15


@pytest.mark.parametrize(("word", "said"), [("fail", "NaN in layer 3"), ("crash", "gone"), ("leave", "few")])
def test_a_backend_that_breaks_ends_with_its_reason(llama, word, said):
    """The fake backend obeys words in its prompt; the request after a crash is served again."""
    engine = BackendUnderTest(FakeBackend, Checkpoint.open(llama), BackendOptions(max_context=64))
    with pytest.raises(RunError, match=said):
        engine.generate(list(word.encode()), 5)
    assert len(engine.generate(list(b"abc"), 5).tokens) == 5


def test_a_peer_that_breaks_fails_nobody_else(cli, llama, tmp_path, monkeypatch):
    program = tmp_path / "llama-bench"
    program.write_text("#!/bin/sh\necho no such model >&2\nexit 1\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "model.gguf").touch()
    gguf = (f"--gguf={tmp_path}/model.gguf", "--peer=llama-bench", "--backend=reference")
    code, record, out, _ = cli("compare", "--model", str(llama), *gguf, *FEW)
    rows = rows_of(record)
    assert code == 0 and rows["reference"]["status"] == "timed"
    assert rows["llama-bench"]["status"] == "failed" and "no such model" in out


def test_a_profile_is_recorded_of_backends_that_take_stamps(cli, monkeypatch):
    """The emulated kernel's stamps stand in for the reference's, which takes none."""
    argv = ("decode", "--backend", "reference", "--max-tokens", "3", "--rounds", "1", "--profile", "2")
    _, record, _, _ = cli(*argv)
    assert "profile" not in record["rows"][0]
    stamped = FiberBackend(RandomWeights(spec_of()), BackendOptions(max_context=64), num_blocks=2)
    monkeypatch.setattr(ReferenceBackend, "profile", lambda self, *asked: stamped.profile((5, 17), asked[1]), False)
    code, record, out, _ = cli(*argv)
    spans = record["rows"][0]["profile"]
    assert code == 0 and "where a token goes" in out and "gate_up_proj" in out
    monkeypatch.setattr(ReferenceBackend, "profile", lambda self, *asked: 1 // 0)
    code, broken, _, _ = cli(*argv)
    assert code == 0 and broken["rows"][0]["status"] == "timed", "what was timed stays"
    assert broken["rows"][0]["note"] == "not profiled: ZeroDivisionError: integer division or modulo by zero"
    assert {"qkv_proj", "o_proj", "down_proj"} <= {span["name"] for span in spans}
    assert written(read(spans)) == spans
    assert all(span["mean_ns"] <= span["largest_ns"] for span in spans)
    assert sum(span["token_ns"] for span in spans) > 0


@pytest.mark.parametrize(("request_of", "rounds"), [(3, 0), (5, 1), (6, 2)])
def test_an_interrupt_keeps_the_rounds_that_are_whole(cli, llama, monkeypatch, request_of, rounds):
    """Of two engines: a warm-up each, then two requests a round."""
    asked, one = [], measure._request

    def request(*what):
        asked.append(what)
        if len(asked) == request_of + 1:
            raise KeyboardInterrupt
        return one(*what)

    monkeypatch.setattr(measure, "_request", request)
    engines = ("--backend=reference", "--peer=transformers", "--profile=2")
    code, record, out, err = cli("compare", "--model", str(llama), *engines, *FEW, "--rounds=3")
    assert code == 130 and err.endswith("interrupted\n")
    if not rounds:
        assert record is None
        return
    assert record["test"]["rounds"] == rounds and f"{rounds} of 3 rounds are kept" in err
    assert record["test"]["interrupted"] and "profile" not in err
    assert {len(row["ttft_us_rounds"]) for row in record["rows"]} == {rounds}
    assert "reference" in out


def test_a_time_limit_behind_the_rounds_keeps_them(cli, monkeypatch):
    def terminate(*_):
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(BackendUnderTest, "profile", terminate)
    code, record, out, err = cli("decode", "--backend", "reference", "--profile", "2", *FEW)
    assert signal.getsignal(signal.SIGTERM) is before
    assert code == 130 and "interrupted: the rounds are kept" in err and "reference" in out
    assert (record["test"]["rounds"], record["test"]["interrupted"]) == (2, True)


@pytest.mark.parametrize(("launches", "failures"), [(1, 0), (3, 1)])
def test_kernels_of_a_request_like_those_timed_are_counted(llama, monkeypatch, launches, failures):
    """What a profiler would see stands in for a GPU; the request runs in the reference."""
    asked, generate = [], BackendUnderTest.generate

    def seen(self, prompt, count, sampling=GREEDY):
        asked.append((len(prompt), count, sampling, self._backend.options.prefill))
        return generate(self, prompt, count, sampling)

    def traced(request):
        asked.append("traced")
        request()
        return {"launches": launches, "kernels": {"k": 1, "j": 2}, "copies": 4, "fills": 0}

    monkeypatch.setattr(BackendUnderTest, "generate", seen)

    monkeypatch.setattr(measure, "trace_kernels", traced)
    task = measure.Task(
        model=Model("llama", Checkpoint.open(llama), "checkpoint"),
        device=torch.device("cpu"),
        device_word="",
        num_gpus=1,
        test="tg4 @ d5",
        prompt_tokens=5,
        tokens=4,
        rounds=1,
        warmup=1,
        backends=[choose("reference", "")],
        peers=[],
        one_kernel=True,
        sampling=(half := Sampling(0.5)),
    )
    got = measure.measure(task, lambda line: None)
    assert asked[-2:] == ["traced", (5, 4, half, "decode")] and asked[-3] == asked[-1]
    assert got["rows"][0]["kernels"]["launches"] == launches
    said = "reference: 3 kernels for one request, not 1: 1 x k, 2 x j"
    assert got["failures"] == [said][:failures]


def kernels_here():
    """Our backends that must run on this GPU."""
    return ("cuda", "triton") if torch.cuda.get_device_capability() == (9, 0) else ("triton",)


@pytest.mark.gpu
def test_compare_on_a_gpu(cli, monkeypatch):
    """Every backend and peer that can run there, at a real shape's sizes: each one's text is right. Four of its 28
    layers: peers compile every layer, and took minutes beside other tests."""
    monkeypatch.setitem(SHAPES, "qwen3-0.6b", SHAPES["qwen3-0.6b"] | {"num_hidden_layers": 4})
    argv = ("--rounds", "2", "--warmup", "1", "--max-tokens", "16")
    code, record, _, err = cli("compare", "--shape", "qwen3-0.6b", *argv)
    assert code == 0, err
    rows = rows_of(record)
    names = ["reference", "transformers", "transformers-compiled", "transformers-tuned"]
    for name in (*names, "torch-graph", *kernels_here()):
        assert rows[name]["status"] == "timed", rows[name]["note"]
        assert rows[name]["check"]["passed"], name


@pytest.mark.gpu
@pytest.mark.skipif(bool(torch.version.hip), reason="kernels have run on NVIDIA GPUs alone so far")
def test_a_request_is_one_kernel_on_a_gpu(cli):
    """Of either backend, prompt and all, by the profiler; and the text is right."""
    argv = ("--rounds", "2", "--warmup", "1", "--max-tokens", "16", "--depth", "200")
    ours = [f"--backend={name}" for name in kernels_here()]
    code, record, _, err = cli("decode", "--shape", "qwen3-0.6b", *ours, "--no-kernel-switches", *argv)
    assert code == 0, err
    assert record["test"]["name"] == "tg16 @ d200, one kernel"
    for name, row in rows_of(record).items():
        assert row["status"] == "timed" and row["check"]["passed"], name
        assert row["kernels"]["launches"] == 1, row["kernels"]
        assert row["device"]["tokens_per_s"] > 0


# ---- results ----


def test_a_result_is_kept_and_read_back(cli, llama, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    argv = ("decode", "--model", str(llama), "--backend=reference", "--peer=transformers", *FEW)
    _, record, _, _ = cli(*argv, "--save", "llama", "--quiet")
    (file,) = (tmp_path / "benchmarks" / "results" / "cpu").iterdir()
    assert file.name == f"{record['created'][:10]}-llama.json"
    text = table(read_results(tmp_path / "benchmarks" / "results"))
    names = [line.split("|")[4].strip() for line in text.splitlines()[2:]]
    assert sorted(names) == sorted(["**reference**, f32", f"{rows_of(record)['transformers']['version']}, f32"])
    readme = tmp_path / "README.md"
    first, last = markers("results")
    readme.write_text(f"before\n{first}\nold\n{last}\nafter\n")
    assert cli("table", "--into", str(readme))[0] == 0
    assert readme.read_text() == f"before\n{first}\n{text}\n{last}\nafter\n"
