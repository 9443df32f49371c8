"""`kog generate` asked as people ask: refused before the weights load, shown as it goes, talked to for long."""

import argparse
import importlib
import io
import json
import re
import sys
import time
from types import SimpleNamespace

import jsonschema
import pytest

from kog_triton import LLM, SamplingParams, profile
from kog_triton.__main__ import commands
from kog_triton.backends.choose import Choice
from kog_triton.cli import activity, foreign_flags, generate_arguments
from kog_triton.cli.activity import activity as shown_activity
from kog_triton.cli.arguments import Parser
from kog_triton.cli.stats import report, summary
from kog_triton.cli.stderr_log import STDERR_LOG
from kog_triton.errors import ModelError
from tests import ROOT
from tests.lib import gguf_cases
from tests.lib.fake_checkpoint import make_checkpoint
from tests.lib.text_samples import make_tokenizer

SCHEMA = json.loads((ROOT / "kog_triton" / "generate.schema.json").read_text())


# ---- before the weights load ----


@pytest.fixture
def unopened(cli, monkeypatch):
    """The command where no model may be opened."""

    def opened(self, *args, **options):
        raise AssertionError("the model was opened")

    monkeypatch.setattr(LLM, "__init__", opened)
    return cli


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["-p", "x", "--regex", "("], "structured_outputs.regex '(' is invalid"),
        (["-p", "x", "--json-schema", "{bad"], "is invalid: not JSON"),
        (["-p", "x", "--json-schema", '{"type": 5}'], "structured_outputs.json"),
        (["-p", "\udcff\udcfe"], "--prompt: not UTF-8 at byte 0"),
        (["-p", "x" * 512], "the prompt has 512 tokens and the context holds 512"),
        (["-p", "x" * 9, "--max-model-len", "9"], "the prompt has 9 tokens and the context holds 9"),
        (["-p", "x" * 500, "--chat"], "the prompt has 518 tokens and the context holds 512"),
        (["-p", ""], "the prompt is empty"),
        (["-p", "x", "--json", "/proc/x.json"], "--json /proc/x.json: "),
        (["-p", "x", "--json", "/no/such/folder/x"], "no folder /no/such/folder"),
        (["-p", "x", "--chat", "--tools", "[{]"], "--tools: not JSON"),
        (["-p", "x", "--chat", "--tools", "gone.json"], "--tools gone.json: No such file"),
        (["-p", "x", "--chat", "--tools", "[1]"], "--tools: entry 0 is 1: it must be an object"),
        (["-p", "x", "--chat", "--tools", '{"a": 1}'], "--tools: {'a': 1} is no JSON list"),
        (["-p", "x", "--chat", "--tools", '[{"a": 1}]', "--chat-template", "{{ messages }}"],
         "the chat template knows no tools: leave out --tools"),
        (["-p", "x", "--chat", "--chat-template-kwargs", "[1]"], "--chat-template-kwargs: [1] is no JSON object"),
        (["-p", "x", "--tools", "[]"], "--tools needs a conversation: --chat or --interactive"),
        (["-p", "x", "--logprobs", "2"], "--logprobs goes with --json"),
        (["-p", "x", "-p", "y"], "--prompt was given twice"),
        (["-p", "--hello"], "expected one argument: one that begins with - is given as FLAG=VALUE"),
        (["hello"], "unrecognized arguments: hello: a prompt is given with -p"),
        (["-p", "x", "--logit-bias", "5"], "'5' is not ID=BIAS, as in 15=-2.5"),
        (["-p", "x", "--logit-bias", "5=inf"], "'5=inf' is not ID=BIAS"),
        (["-p", "x", "--n", "0"], "0 is below 1"),
        (["-p", "x", "--n", "2", "--temp", "0"], "n is 2: it must be 1 when temperature is 0"),
        (["-p", "x", "--interactive"], "leave out --prompt"),
        (["-p", "x", "--quiet", "-v"], "contradict each other"),
        (["-p", "x", "--foo", "a\nb\x1b[2Jc"], "unrecognized arguments: --foo a b\\x1b[2Jc"),
    ],
)  # fmt: skip
def test_what_can_be_known_is_refused_before_the_weights_load(unopened, flags, says):
    code, out, err = unopened(*flags)
    assert (code, out) == (2, "") and says in err
    assert len(err.splitlines()) == 1 and err.strip("\n").isprintable()


def test_a_model_without_a_template_is_known_before_its_weights(unopened, tmp_path, monkeypatch):
    plain = make_checkpoint(tmp_path / "plain")
    (plain / "tokenizer_config.json").unlink()
    code, _, err = unopened("-p", "x", "--chat", model=plain)
    assert code == 2 and "the model has no chat template" in err
    for flags in (["--system", "s"], ["--tools", "[]"], ["--chat-template-kwargs", '{"a": 1}']):
        code, _, err = unopened("--interactive", *flags, model=plain)
        assert code == 2 and f"{flags[0]} needs a chat template" in err


def test_a_missing_library_is_known_before_the_weights(unopened, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr("kog_triton.text.grammar.find_spec", lambda name: None if name == "llguidance" else real(name))
    code, _, err = unopened("-p", "x", "--choice", "a", "--choice", "b")
    assert code == 2 and "structured_outputs needs llguidance: pip install" in err


def test_stdin_is_read_as_bytes_and_up_to_a_bound(unopened, monkeypatch):
    """In the C locale and in containers Python's own reading hides which bytes are no text."""
    for data, says in ((b"ab\xffcd", "--prompt -: not UTF-8 at byte 2"), (b"a" * 101, "--prompt -: longer than 0 MiB")):
        stdin = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8", errors="surrogateescape")
        monkeypatch.setattr("sys.stdin", stdin)
        monkeypatch.setattr("kog_triton.cli.request.MAX_PROMPT_BYTES", 100)
        code, _, err = unopened("-p", "-")
        assert code == 2 and says in err
    code, _, err = unopened("-p", "@/dev/zero")
    assert code == 2 and "--prompt @/dev/zero: longer than 0 MiB" in err


def test_the_tokenizer_that_checked_the_prompt_is_the_model_s(cli, monkeypatch):
    loaded = []
    real = LLM.__init__

    def noted(self, *args, **options):
        loaded.append(options["tokenizer"])
        real(self, *args, **options)
        assert self.tokenizer is loaded[-1]

    monkeypatch.setattr(LLM, "__init__", noted)
    assert cli("-p", "say:x", "--quiet") == (0, "x", "") and loaded[0] is not None


def test_a_gguf_file_is_looked_at_before_its_weights_load(unopened, tmp_path):
    path, tokenizer = tmp_path / "x.gguf", make_tokenizer("byte_level")
    gguf_cases.write(path, text=gguf_cases.byte_level_text(tokenizer), vocab_size=tokenizer.get_vocab_size())
    for flags, says in (
        (["-p", ""], "the prompt is empty"),
        (["-p", "word " * 3000], "the context holds"),
        (["-p", "x", "--chat", "--chat-template", "{% if %}"], "the chat template, line 1"),
    ):
        code, out, err = unopened(*flags, "--quiet", model=path)
        assert (code in (2, 3), out) == (True, "") and says in err
    code, out, err = unopened("-p", "x", model=tmp_path / "gone.gguf")
    assert (code, out) == (3, "") and "gone.gguf" in err and "o such file" in err


def test_a_template_of_the_callers(cli, tmp_path, monkeypatch):
    template = tmp_path / "mine.jinja"
    template.write_text("say:{{ messages[-1].content }}!")
    for given in (str(template), template.read_text()):
        code, out, _ = cli("-p", "hi", "--chat", "--chat-template", given)
        assert (code, out) == (0, "hi!")
    bare = make_checkpoint(tmp_path / "bare")
    (bare / "tokenizer_config.json").unlink()
    monkeypatch.setattr(sys, "stdin", io.StringIO("yes\n/exit\n"))
    code, out, err = cli("--interactive", "--chat-template", str(template), model=bare)
    assert code == 0 and out == "yes!\n" and "each text is answered" in err
    code, _, err = cli("-p", "x", "--chat", "--chat-template", "gone.jinja")
    assert code == 2 and "chat_template is 'gone.jinja': neither" in err


# ---- flags of other engines ----

LLAMA_CPP = """-m model.gguf -p x | -p x -n 8 | -p x --n-predict 8 | -p x -c 256 | -p x --ctx-size 256
-p x -ngl 99 | -p x --repeat-penalty 1.1 | -f prompt.txt | -p x -cnv | -p x -sys brief | -p x -s 1 | -p x -t 4
-hf org/name -p x | -p x --grammar-file x.gbnf | -p x -j {} | -p x --predict=9 | -p x --max-num-seqs 2"""
MLX_LM = """--prompt x --max-kv-size 256 | --prompt x --system-prompt y | --prompt x --adapter-path z
--prompt x --chat-template-config {} | --prompt x --ignore-chat-template | --prompt x --extra-eos-token y"""


@pytest.mark.parametrize("line", re.split(r" \| |\n", f"{LLAMA_CPP}\n{MLX_LM}"))
def test_a_flag_of_another_engine_says_what_it_is_here(unopened, line):
    code, out, err = unopened(*line.split())
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    words = [word.partition("=")[0] for word in line.split()]
    flag = next((word for word in words if word in foreign_flags.INSTEAD), None)
    if flag is None:
        assert "-m is how many tokens to make, a model is given with --model" in err
    else:
        assert f"{flag} is -" in err or f"there is no {flag}: " in err


def test_none_of_them_is_a_flag_of_ours_and_all_lead_to_one():
    parser = generate_arguments.build_parser()
    ours = {flag for action in parser._actions for flag in action.option_strings}
    assert not ours & foreign_flags.INSTEAD.keys()
    for instead in foreign_flags.INSTEAD.values():
        assert not instead.startswith("-") or instead.split()[0].rstrip(",") in ours


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("generate -p x -n 2", "-n is -m N (tokens) or --n N (samples) here"),
        ("plan --weights mxfp4", "--weights is --format FORMAT here"),
        ("quantize --weights int4-g32", "--weights is --format FORMAT here"),
        ("bench decode --format mxfp4", "--format is --weights FORMAT here"),
    ],
)
def test_a_flag_of_another_command_says_what_it_is_here(line, said, capsys):
    name, *words = line.split()
    with pytest.raises(SystemExit):
        importlib.import_module(f"kog_triton.{name}").main(words)
    assert f"error: {said} (see " in capsys.readouterr().err


def test_a_flag_is_meant_by_its_whole_name(unopened):
    """--chat-template once was taken for --chat-template-kwargs."""
    for flag in ("--max-tok", "--sys", "--json-sch"):
        code, _, err = unopened("-p", "x", flag, "1")
        assert code == 2 and f"unrecognized arguments: {flag} 1" in err


# ---- flags ----


@pytest.mark.parametrize("name", commands())
def test_every_flag_of_every_command_has_help(name, monkeypatch):
    seen = []

    def parse_args(parser, *args):
        seen.append(parser)
        raise SystemExit

    monkeypatch.setattr(Parser, "parse_args", parse_args)
    with pytest.raises(SystemExit):
        importlib.import_module(f"kog_triton.{name}").main([])
    for parser in seen:  # which grows
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                seen += [one for one in action.choices.values() if one not in seen]
            else:
                assert action.help, (parser.prog, action.option_strings or action.dest)


def test_every_flag_has_help():
    parser = generate_arguments.build_parser()
    assert [a.option_strings for a in parser._actions if not a.help] == []
    text = parser.format_help()
    for name in ("XDG_CACHE_HOME", "HF_HOME", "KOG_DEBUG", "kog cache"):
        assert name in text


def test_a_revision_is_asked_of_the_hub(cli, folder, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download",
        lambda hub_id, **how: asked.append((hub_id, how["revision"])) or str(folder),
    )
    assert cli("-p", "say:x", "--quiet", "--revision", "v1", model="org/name")[:2] == (0, "x")
    assert set(asked) == {("org/name", "v1")}
    for place, kind in ((folder, "folder"), (folder / "config.json", "file")):
        code, _, err = cli("-p", "say:x", "--revision", "v1", model=place)
        assert code == 3 and f"is a local {kind}: it has no revision 'v1'" in err


COMMANDS = ("doctor", "plan", "profile", "quantize --out x --format int8-channel", "bench decode")


@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_that_takes_a_hub_id_takes_its_revision(words, monkeypatch, capsys):
    """And says so where nothing is named that could have one."""
    asked = []

    def folder(hub_id, revision=None):
        asked.append((hub_id, revision))
        raise ModelError("not found")

    profiler = Choice(SimpleNamespace, "cuda", "")
    monkeypatch.setattr(profile, "choose", lambda *_: profiler)
    monkeypatch.setattr(profile, "Profiler", SimpleNamespace)
    monkeypatch.setattr("kog_triton.checkpoint.folder.model_folder", folder)
    command, *argv = [*words.split(), "--revision", "v1"]
    main = importlib.import_module(f"kog_triton.{command}").main
    assert main([*argv, "--model", "org/name"]) == 3 and asked == [("org/name", "v1")]
    if command != "quantize":
        capsys.readouterr()
        assert main(argv) == 2
        assert "--revision goes with --model, a Hugging Face id" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["generate -p x", "serve"])
def test_a_revision_of_no_model_is_refused(words, capsys):
    command, *argv = [*words.split(), "--revision", "v1"]
    assert importlib.import_module(f"kog_triton.{command}").main(argv) == 2
    assert "--revision goes with --model, a Hugging Face id" in capsys.readouterr().err


def test_tools_and_arguments_reach_the_template(cli, tmp_path):
    own = make_checkpoint(tmp_path / "own")
    config = json.loads((own / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ tools[0].name }}{{ enable_thinking }} {{ messages[-1].content }}"
    (own / "tokenizer_config.json").write_text(json.dumps(config))
    tools, run = tmp_path / "tools.json", tmp_path / "run.json"
    tools.write_text('[{"name": "look_up"}]')
    flags = ["--tools", str(tools), "--chat-template-kwargs", '{"enable_thinking": false}']
    code, out, _ = cli("-p", "say:x", "--chat", *flags, "--json", str(run), model=own)
    assert (code, out) == (0, "x")
    assert json.loads(run.read_text())["output"]["prompt"] == "look_upFalse say:x"


def test_several_samples_come_one_after_the_other(cli, tmp_path):
    file = tmp_path / "run.json"
    flags = ["--n", "3", "--temp", "1", "--seed", "5", "-m", "6", "--json", str(file)]
    code, out, err = cli("-p", "abc", *flags)
    record = json.loads(file.read_text())
    jsonschema.validate(record, SCHEMA)
    texts = [done["text"] for done in record["output"]["outputs"]]
    assert code == 0 and out == "".join(f"{text}\n" for text in texts) and len(set(texts)) == 3
    assert [f"sample {i} of 3: length" in err for i in (1, 2, 3)] == [True] * 3
    assert err.splitlines()[-2].startswith("sample 1 of 3: 6 tokens at ")


def test_a_record_on_stdout_takes_the_place_of_the_text(cli):
    code, out, err = cli("-p", "say:hello", "--json", "-")
    record = json.loads(out)
    jsonschema.validate(record, SCHEMA)
    assert code == 0 and record["output"]["outputs"][0]["text"] == "hello" and "5 tokens" not in out
    assert "6 tokens" in err  # with the one that ended it


# ---- what stderr says ----


def test_two_lines_after_a_text_say_how_fast_and_by_which_parameters(cli):
    flags = ["-m", "9", "--top-k", "7", "--seed", "3", "--stop", "zz", "--presence-penalty", "0.5"]
    err = cli("-p", "abc", *flags, "--temp", "0.5")[2].splitlines()
    assert re.fullmatch(r"9 tokens at [\d.,]+ tokens/s, first after \d+ ms; prompt 3; length", err[-2])
    assert err[-1] == (
        "temperature 0.5, seed 3, top_k 7, stop ('zz',), presence_penalty 0.5, max_tokens 9; backend fake"
    )
    cut = cli("-p", "abc", "-m", "5000", "--temp", "0")[2]
    assert "max_tokens 509 (the context has no room for 5000); backend" in cut
    greedy = cli("-p", "say:x", "--temp", "0", "--top-k", "7")[2].splitlines()
    assert greedy[-1] == "temperature 0; backend fake"
    told = cli("-p", "abc", *flags, "--temp", "0.5", "-v")[2]
    assert "MBU unknown" in told and "KV depth" in told and "between tokens" in told
    assert told.splitlines()[-1] == err[-1]  # whoever asks for more gets no less


def test_the_first_line_says_how_much_of_the_prompt_was_there_already(llm):
    llm.generate("abcdefgh", SamplingParams(temperature=0, max_tokens=2))
    params = SamplingParams(temperature=0, max_tokens=2)
    output = llm.generate("abcdefghij", params)[0]
    assert 0 < output.num_cached_tokens < 10
    said = summary(output)
    assert f"; prompt 10 ({output.num_cached_tokens} cached); " in said
    # and the last one of max_tokens what the context had room for
    much = SamplingParams(temperature=0, max_tokens=10**8)
    for verbose in (False, True):
        told = report(output, much, llm.engine.max_context, verbose)
        assert f"max_tokens {llm.engine.max_context - 10} (" in told.splitlines()[-1]


def test_what_takes_half_a_second_is_told(capsys):
    with shown_activity("loading the model"):
        time.sleep(0.5)
    assert capsys.readouterr().err == "loading the model ...\n"


def test_what_takes_long_is_told_and_gone_again(monkeypatch, capsys):
    monkeypatch.setattr(activity, "PATIENCE_S", 0.01)
    monkeypatch.setattr(activity, "REFRESH_S", 0.01)
    with shown_activity("loading the model"):
        time.sleep(0.1)
    assert capsys.readouterr().err == "loading the model ...\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with shown_activity("loading the model"):
        time.sleep(0.1)
        STDERR_LOG.tell("a line")
        time.sleep(0.1)
    said = capsys.readouterr().err
    assert re.search(r"\r\x1b\[Kloading the model, 0\.\d s\r\x1b\[K", said)
    assert "\r\x1b[Ka line\n" in said  # over the status, which comes again below
    after = said.partition("a line\n")[2]
    assert after.startswith("\r\x1b[Kloading the model, ") and after.endswith("\r\x1b[K")
    with shown_activity("loading the model", quiet=True):
        time.sleep(0.1)
    monkeypatch.setattr(activity, "PATIENCE_S", 5)
    with shown_activity("loading the model"):
        pass
    assert capsys.readouterr().err == ""


def test_a_terminal_is_shown_control_characters_not_sent_them(cli, monkeypatch):
    said = "a\x1b]0;x\x07b\x9b1mc\n\td\r"
    assert cli("-p", f"say:{said}", "--quiet")[1] == said  # a pipe gets the text to the letter

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    cli("-p", f"say:{said}", "--quiet")
    assert terminal.getvalue() == "a\\x1b]0;x\\x07b\\x9b1mc\n\td\\r\n"


def test_a_model_s_name_drives_no_terminal(cli, tmp_path):
    evil = make_checkpoint(tmp_path / "ev\x1b]0;pwned\x07il\x1b[31m")
    code, out, err = cli("-p", "say:x", model=evil)
    assert (code, out) == (0, "x") and "ev\\x1b]0;pwned\\x07il" in err
    assert all(line.isprintable() for line in err.splitlines())
