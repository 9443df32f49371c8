"""The commands as a shell sees them: stdout, stderr, exit codes and the JSON record.

They are called in this process with the fake backend on the path; what only a process of its own
shows is in test_cli_process.py.
"""

import io
import json
import logging
import os
import platform
import subprocess
import sys
import tomllib
from dataclasses import replace
from datetime import UTC, datetime

import jsonschema
import pytest
import torch

import kog_triton
from kog_triton import LLM
from kog_triton import __main__ as kog
from kog_triton.checkpoint.folder import Checkpoint
from kog_triton.cli import generate_arguments
from kog_triton.cli.command import run
from kog_triton.cli.console import Output, plain_table
from kog_triton.cli.stats import stats
from kog_triton.demo import checkpoint_path
from kog_triton.errors import DeviceError, KogError, ModelError, RequestError, RunError
from kog_triton.sampling.params import SamplingParams
from tests import ROOT
from tests.lib.fake_checkpoint import END, make_checkpoint

SCHEMA = json.loads((ROOT / "kog_triton" / "generate.schema.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("fake"), temperature=0.5)


# ---- text and figures ----


def test_stdout_is_the_text_and_nothing_else(cli):
    code, out, err = cli("-p", "say:héllo\n🙂 ")
    assert (code, out) == (0, "héllo\n🙂 ")
    for word in ("backend fake (asked for)", "temperature 0.5, seed", "tokens/s", "seed"):
        assert word in err


def test_a_terminal_that_cannot_show_a_sign_shows_a_question_mark(cli, monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    monkeypatch.setattr("sys.stdout", terminal)
    assert cli("-p", "say:h\u00e9llo", "--quiet")[0] == 0
    assert terminal.buffer.getvalue() == b"h?llo"


def test_figures_are_shown_by_value_and_unit(llm):
    output = llm.generate("say:x")[0]
    metrics = replace(
        output.metrics, backend="fake", seed=5, prompt_tokens=7, cached_tokens=3, output_tokens=9,
        total_s=1.25, queue_s=0.0, ttft_s=0.5, prompt_tokens_per_s=8.0, decode_tokens_per_s=64.0, itl_p50_us=2_000.0,
        itl_p99_us=4_000.0, itl_max_us=9_000.0, clock="device", bytes_per_token=3_000_000,
        gb_per_s=6.5, peak="h200 datasheet", mbu=0.75, kv_depth_start=7, kv_depth_end=15,
    )  # fmt: skip
    assert stats(replace(output, metrics=metrics)).splitlines() == [
        "prompt  7 tokens, 3 of them cached; 8.00 tokens/s; first token after 500.00 ms",
        "output  9 tokens, 64.00 tokens/s without the first; between tokens p50 2.00 ms, p99 4.00 ms, "
        "by the backend's stamps",
        "memory  3.0 MB a token, 6.50 GB/s, MBU 75.00 % of h200 datasheet; KV depth 7 to 15",
        "end     stop; 1.25 s",
    ]
    metrics = replace(metrics, clock="host", ttft_s=None, gb_per_s=None, mbu=None)
    text = stats(replace(output, metrics=metrics))
    assert "first token after - ms" in text and "- GB/s, MBU unknown;" in text
    assert "as they arrived" in text


def test_stderr_says_what_is_compiled(cli, monkeypatch):
    """A compiler takes seconds before the first token."""
    opened = LLM.__init__

    def compiling(self, *arguments, **options):
        logging.getLogger("kog_triton.compilers").info("compiling %s", "decode.cu")
        opened(self, *arguments, **options)

    monkeypatch.setattr(LLM, "__init__", compiling)
    for _ in range(2):
        assert cli("-p", "say:x")[2].splitlines().count("compiling decode.cu") == 1
    assert cli("-p", "say:x", "--quiet") == (0, "x", "")


def test_quiet_says_nothing_else(cli):
    assert cli("-p", "say:x", "--quiet") == (0, "x", "")


def test_what_is_compiled_beforehand_is_what_is_opened(cli, folder, monkeypatch):
    asked = []
    monkeypatch.setattr("kog_triton.precompile.precompile", lambda *names, **how: asked.append((*names, how)))
    flags = ("--device", "cpu", "--gpus", "2", "--dtype", "fp16", "--max-model-len", "64")
    flags += ("--num-slots", "3", "--prefill", "library")
    assert cli("-p", "say:x", "--quiet", *flags)[0] == 0
    how = {"revision": None, "device": "cpu", "num_gpus": 2, "dtype": "fp16", "max_model_len": 64}
    how |= {"num_slots": 3, "prefill": "library"}
    assert asked == [("fake", str(folder), how)]


def test_blocks_reach_the_model(cli):
    code, out, err = cli("-p", "say:x", "--blocks", "5")
    assert (code, out) == (2, "") and "5 blocks: backend fake chooses its own, hip" in err


@pytest.mark.parametrize(
    ("flags", "backend"),
    [
        (["--prefill", "library"], "reference"),
        (["--blocks", "4"], "reference"),
        (["--chat", "--chat-template", "{% for"], "fake"),
        (["--chat", "--chat-template", "{{ 1/0 }}"], "fake"),
    ],
)
def test_a_flag_that_asks_for_what_is_not_there_is_the_request_s_error(flags, backend, cli):
    code, out, err = cli("-p", "x", *flags, backend=backend, model=checkpoint_path())
    assert (code, out) == (2, "") and err.startswith("error: "), err


def test_ranks_of_one_process_are_said(cli):
    flags = ("-p", "x", "-m", "1", "--temp", "0", "--gpus", "2", "--device", "cpu")
    err = cli(*flags, backend="reference", model=checkpoint_path())[2]
    assert err.count("2 ranks run in one process on a CPU\n") == 1


def test_every_flag_reaches_the_model_or_the_sampling(cli, tmp_path):
    sampling = {
        "temperature": 0.25, "top_p": 0.75, "top_k": 7, "min_p": 0.125, "seed": 11, "max_tokens": 3,
        "repetition_penalty": 1.25, "presence_penalty": 0.5, "frequency_penalty": -0.5, "logprobs": 2,
        "min_tokens": 2, "n": 2,
    }  # fmt: skip
    machine = {"device": "cpu", "gpus": 2, "dtype": "fp16", "max_model_len": 64, "prefill": "kernel"}
    machine |= {"walk": "block"}
    said = [f"--{name.replace('_', '-')}={value}" for name, value in (sampling | machine).items()]
    file = tmp_path / "run.json"
    flags = [*said, "--stop", "zz", "--ignore-eos", "--json", str(file)]
    flags += ["--bad-words", "no", "--bad-words=never", "--logit-bias", "5=-2.5", "--logit-bias=7=1"]
    assert cli("-p", "abc", "--quiet", *flags)[0] == 0
    record = json.loads(file.read_text())
    wanted = sampling | {"stop": ["zz"], "ignore_eos": True, "bad_words": ["no", "never"]}
    wanted |= {"logit_bias": {"5": -2.5, "7": 1}}
    parsed = vars(generate_arguments.parse(["-p", "x"]))
    assert set(wanted) == set(parsed) & set(SamplingParams.__dataclass_fields__)
    params = {name: record["params"][name] for name in wanted}
    assert params | {"stop": list(params["stop"])} == wanted
    renamed = {"gpus": "num_gpus", "max_model_len": "max_context"}
    options = {renamed.get(name, name): value for name, value in machine.items()}
    assert record["backend"]["options"] == options | {"num_slots": 2, "num_blocks": 0, "memory_share": 1.0}
    assert record["model"]["max_context"] == 64 and len(record["output"]["outputs"]) == 2
    cli("-p", "abc", "--quiet", "--num-slots", "3", "--json", str(file))
    assert json.loads(file.read_text())["backend"]["options"]["num_slots"] == 3


def test_flags_reach_the_sampling(cli):
    assert cli("-p", "say:abcdef", "-m", "3", "--quiet")[1] == "abc"
    assert cli("-p", "say:abcdef", "--stop", "zz", "--stop", "cd", "--quiet")[1] == "ab"
    assert len(cli("-p", "say:ab", "-m", "5", "--ignore-eos", "--quiet")[1]) == 2
    texts = {cli("-p", "abc", "-m", "9", "--temp", "1", "--seed", s, "--quiet")[1] for s in "1231"}
    assert len(texts) == 3
    assert cli("-p", "abc", "-m", "9", "--temp", "0", "--quiet") == cli(
        "-p", "abc", "-m", "9", "--temperature", "0", "--quiet"
    )


def test_flags_shape_the_answer(cli, tmp_path):
    pytest.importorskip("llguidance")
    schema, grammar = tmp_path / "schema.json", tmp_path / "two.lark"
    schema.write_text('{"enum": [[12, "é"]]}', encoding="utf-8")
    grammar.write_text('start: "a" "b"', encoding="utf-8")
    for flags, want in (
        (["--json-schema", str(schema)], [12, "é"]),
        (["--json-schema", ' {"const": [3]}'], [3]),
        (["--regex", "12{3}"], 1222),
        (["--grammar", str(grammar)], "ab"),
    ):
        code, out, err = cli("-p", "abcde", "--temp", "0", "--quiet", *flags)
        assert (code, err) == (0, "")
        assert (out if want == "ab" else json.loads(out)) == want
    picked = cli("-p", "abcde", "--choice", "no", "--choice", "perhaps", "--quiet")[1]
    assert picked in ("no", "perhaps")
    file = tmp_path / "run.json"
    cli("-p", "abc", "--regex", "[ab]{2}", "--json", str(file))
    record = json.loads(file.read_text())
    jsonschema.validate(record, SCHEMA)
    assert record["params"]["structured_outputs"]["regex"] == "[ab]{2}"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--regex", "a", "--choice", "b"], "not allowed with"),
        (["--json-schema", "gone.json"], "--json-schema gone.json: No such file"),
        (["--grammar", "gone.lark"], "--grammar gone.lark: No such file"),
        (["--json-schema", "{1}"], "structured_outputs.json '{1}' is invalid: not JSON"),
        (["--regex", "(a"], "structured_outputs.regex '(a' is invalid"),
        (["--regex", "a", "--ignore-eos"], "ignore_eos is True"),
    ],
)
def test_a_shape_that_cannot_be_is_a_usage_error(cli, flags, says):
    pytest.importorskip("llguidance")
    code, out, err = cli("-p", "abc", "--quiet", *flags)
    assert (code, out) == (2, "") and says in err.splitlines()[-1]


def test_the_prompt_may_be_a_file_or_stdin(cli, tmp_path, monkeypatch):
    file = tmp_path / "prompt.txt"
    file.write_text("say:from a file", encoding="utf-8")
    assert cli("-p", f"@{file}", "--quiet")[1] == "from a file"
    monkeypatch.setattr(sys, "stdin", io.StringIO("say:from stdin"))
    assert cli("-p", "-", "--quiet")[1] == "from stdin"
    assert cli("-p", "@@say:@home", "--quiet")[1] == "@home"
    file = tmp_path / "run.json"
    cli("-p", "@@x", "-m", "1", "--quiet", "--json", str(file))
    assert json.loads(file.read_text())["output"]["prompt"] == "@x"


def test_chat_goes_through_the_template(cli, tmp_path):
    file = tmp_path / "run.json"
    code, out, _ = cli("-p", "say:hi", "--chat", "--system", "brief", "--json", str(file))
    record = json.loads(file.read_text())
    assert code == 0 and out == "hi\n[assistant]"
    assert record["output"]["prompt"] == "[system]brief\n[user]say:hi\n[assistant]"


def test_the_record_follows_its_schema(cli, tmp_path):
    file = tmp_path / "run.json"
    code, out, err = cli("-p", "abc", "-m", "6", "--temp", "1", "--logprobs", "2", "--json", str(file))
    record = json.loads(file.read_text())
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(record, SCHEMA)
    done, metrics = record["output"]["outputs"][0], record["output"]["metrics"]
    assert code == 0 and done["text"] == out and len(done["logprobs"]) == 6
    assert record["params"]["seed"] == metrics["seed"] and f"seed {metrics['seed']}" in err
    rate = metrics["decode_tokens_per_s"] * metrics["bytes_per_token"] / 1e9
    assert metrics["gb_per_s"] == pytest.approx(rate)
    del record["output"]["metrics"]["seed"]
    with pytest.raises(jsonschema.ValidationError, match="seed"):
        jsonschema.validate(record, SCHEMA)


def test_the_record_says_what_ran_where(cli, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["kog", "generate", "-p", "abc"])
    file = tmp_path / "run.json"
    before = datetime.now(UTC).replace(microsecond=0)
    assert cli("-p", "say:ab", "--max-model-len", "100", "--stop", "x", "--seed", "5", "--json", str(file))[0] == 0
    record = json.loads(file.read_text())
    assert before <= datetime.fromisoformat(record["created"]) <= datetime.now(UTC)
    spec = Checkpoint.open(folder).spec
    assert record["model"] == {
        "path": str(folder), "family": "llama", "num_parameters": spec.num_parameters, "dtype": "f32",
        "max_context": 100,
    }  # fmt: skip
    assert (record["backend"]["name"], record["backend"]["reason"]) == ("fake", "asked for")
    assert record["backend"]["memory_bytes"] == {"weights": 0, "kv_cache": 0, "other": 0}
    where = record["environment"]
    assert where["argv"] == ["generate", "-p", "abc"] and where["kog_triton"] == kog_triton.__version__
    assert (where["python"], where["platform"]) == (platform.python_version(), platform.platform())
    assert where["torch"] == torch.__version__ and record["load_s"] > 0
    unresolved = set(SamplingParams.__dataclass_fields__) - {"end_token_ids", "bad_words_token_ids"}
    assert set(record["params"]) == unresolved
    # the checkpoint's own default, what was said, and the rest of the context
    params = record["params"]
    assert (params["temperature"], params["seed"], params["max_tokens"]) == (0.5, 5, None)
    output = record["output"]
    assert output["prompt_token_ids"] == list(b"say:ab") and output["finished"] is True
    assert output["outputs"][0]["token_ids"] == [*b"ab", END] and output["outputs"][0]["index"] == 0


# ---- exit codes ----


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        ([], 2, "a prompt is needed"),
        (["-p", "x", "--interactive"], 2, "leave out"),
        (["-p", "x", "--raw"], 2, "--raw goes with"),
        (["-p", "x", "--system", "s"], 2, "--system needs a conversation"),
        (["-p", "x", "--json", "/no/such/folder/x.json"], 2, "no folder /no/such/folder"),
        (["-p", "say:", "--json", "/"], 2, "--json /: Is a directory"),
        (["-p", "say:", "--json", "/dev/full"], 2, "--json /dev/full: cannot be written: No space left"),
        (["-p", "x", "--bogus"], 2, "unrecognized arguments: --bogus"),
        (["-p", "x", "--top-k", "many"], 2, "invalid int value: 'many'"),
        (["-p", "x", "--model", ""], 3, "the model has no name"),
        (["-p", "x", "--model", "/no/such/model", "-m", "0"], 2, "max_tokens is 0"),
        (["-p", "x", "--top-p", "many"], 2, "--top-p"),
        (["-p", "x", "--top-p", "1.5"], 2, "top_p is 1.5"),
        (["-p", ""], 2, "the prompt is empty"),
        (["-p", "@/no/such/file"], 2, "No such file"),
        (["-p", "x", "--dtype", "int3"], 2, "dtype is 'int3'"),
        (["-p", "x", "--backend", "abacus"], 2, "no backend named 'abacus'"),
        (["-p", "x", "--model", "/no/such/model"], 3, "/no/such/model"),
        (["-p", "x", "--backend", "broken"], 4, "it has no wheels; fit four wheels"),
        (["-p", "fail"], 5, "NaN in layer 3"),
        (["-p", "crash"], 5, "the device is gone"),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(cli, argv, code, says):
    got, out, err = cli(*argv, "--quiet")
    assert got == code and says in err and "Traceback" not in err
    assert len(err.splitlines()) == 1 and err.startswith("error: ")
    assert out == "" or code == 5 or "/dev/full" in argv


def test_a_prompt_that_is_not_text_is_refused(cli, tmp_path):
    file = tmp_path / "bad"
    file.write_bytes(b"ab\xff")
    code, _, err = cli("-p", f"@{file}")
    assert code == 2 and "not UTF-8 at byte 2" in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RequestError("a\nb"), 2),
        (RequestError("a\x1b[2J b"), 2),
        (ModelError("a b"), 3),
        (DeviceError("a b"), 4),
        (RunError("a b"), 5),
        (KogError("a b"), 1),
        (ValueError("a b"), 1),
        (PermissionError(13, "a b"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_every_error_has_its_code(error, code, capsys, monkeypatch):
    def body(argv):
        raise error

    assert run(body, []) == code
    line = capsys.readouterr().err
    assert len(line.splitlines()) == 1 and line.strip("\n").isprintable()
    monkeypatch.setenv("KOG_DEBUG", "1")
    assert run(body, []) == code
    assert "Traceback" in capsys.readouterr().err


# ---- the other commands ----


def test_kog_hands_over_to_its_commands(cli, capsys):
    assert kog.main(["--version"]) == 0
    assert capsys.readouterr().out == f"kog {kog_triton.__version__}\n"
    assert kog.main(["--help"]) == 0
    assert "generate" in capsys.readouterr().out
    assert kog.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["backends"]
    assert (kog.main([]), kog.main(["fly"])) == (2, 2)
    assert "no command named 'fly'" in capsys.readouterr().err


def test_a_command_of_another_engine_leads_to_ours(capsys):
    for word, ours in (("chat", "generate --interactive"), ("quantise", "quantize"), ("serv", "serve")):
        assert kog.main([word]) == 2
        assert capsys.readouterr().err.endswith(f": did you mean {ours}?\n")
    assert kog.main(["fly"]) == 2 and "did you mean" not in capsys.readouterr().err


def test_a_command_that_is_not_installed_is_not_listed(monkeypatch):
    monkeypatch.setitem(kog.COMMANDS, "teleport", "not yet")
    assert "teleport" not in kog.commands() and {"generate", "doctor"} <= set(kog.commands())


def test_one_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project.get("version", kog_triton.__version__) == kog_triton.__version__


def test_unknown_names_are_attribute_errors():
    assert {"LLM", "SamplingParams"} <= set(dir(kog_triton))
    with pytest.raises(AttributeError, match="nothing"):
        _ = kog_triton.nothing


def test_columns_of_figures_stand_at_the_right_and_the_terminal_wraps_lines(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "20")
    table = plain_table(["name", "figure"])
    table.add_row("a", "1")
    table.add_row("longer", "12345678")
    console = Output()
    console.write_table(table)
    console.write_line("word " * 9 + "end")
    *_, first, second, _, line = capsys.readouterr().out.splitlines()
    assert (first.split(), second.split()) == (["a", "1"], ["longer", "12345678"])
    assert first.index("a") == second.index("longer") and len(first) == len(second)
    assert line == "word " * 9 + "end"


def test_files_are_utf8_whatever_the_locale_says(tmp_path):
    code = "import sys, pathlib; from kog_triton.cli.arguments import write_text; "
    code += "write_text(pathlib.Path(sys.argv[1]), '\\u00e4\\u4e2d')"
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code, tmp_path / "a"], env=environment, check=True, timeout=60)
    assert (tmp_path / "a").read_bytes() == "ä中".encode()
