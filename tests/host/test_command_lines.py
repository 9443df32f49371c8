"""What the command lines of `kog generate` and `kog serve` give, value by value, and at their edges."""

from pathlib import Path

import pytest

from kog_triton import serve
from kog_triton.cli.generate_arguments import bias, parse
from kog_triton.errors import RequestError

NOTHING_SAID = {
    "model": None, "revision": None, "prompt": "a", "chat": False, "system": None, "tools": None,
    "chat_template": None, "chat_template_kwargs": None, "interactive": False, "raw": False, "max_tokens": None,
    "min_tokens": None, "n": None, "temperature": None, "top_p": None, "top_k": None, "min_p": None, "seed": None,
    "stop": None, "repetition_penalty": None, "presence_penalty": None, "frequency_penalty": None,
    "logit_bias": None, "bad_words": None, "ignore_eos": None, "logprobs": None, "json_schema": None, "regex": None,
    "choice": None, "grammar": None, "backend": "auto", "device": None, "gpus": 1, "dtype": "auto",
    "max_model_len": None, "num_slots": None, "prefill": "auto", "walk": "stage", "json": None, "verbose": False,
    "quiet": False, "blocks": None,
}  # fmt: skip


def test_what_generate_takes_where_nothing_is_said():
    assert vars(parse(["-p", "a"])) == NOTHING_SAID


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        (["--prompt", ""], {"prompt": ""}),
        (["-p", "a", "--chat", "--system", "s"], {"chat": True, "system": "s"}),
        (["-p", "a", "--chat", "--tools", "[]"], {"chat": True, "tools": "[]"}),
        (["-p", "a", "--stop", "x", "--stop", "y"], {"stop": ["x", "y"]}),
        (["-p", "a", "--logit-bias", "1=2", "--logit-bias", "3=-4"], {"logit_bias": [(1, 2.0), (3, -4.0)]}),
        (["-p", "a", "--bad-words", "x"], {"bad_words": ["x"]}),
        (["-p", "a", "--ignore-eos"], {"ignore_eos": True}),
        (["-p", "a", "--logprobs", "0", "--json", "-"], {"logprobs": 0, "json": Path("-")}),
        (["-p", "a", "--temp", "0.5"], {"temperature": 0.5}),
        (["-p", "a", "--temperature", "0.5", "--n", "2"], {"temperature": 0.5, "n": 2}),
        (["-p", "a", "--choice", "x", "--choice", "y"], {"choice": ["x", "y"]}),
        (["-p", "a", "-v"], {"verbose": True}),
        (["-p", "a", "--quiet"], {"quiet": True}),
        (["--interactive"], {"prompt": None, "interactive": True}),
        (["--interactive", "--raw", "-m", "3"], {"prompt": None, "interactive": True, "raw": True, "max_tokens": 3}),
        (["--interactive", "--system", "s"], {"prompt": None, "interactive": True, "system": "s"}),
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_generate_makes_of_flags(words, changed):
    assert vars(parse(words)) == NOTHING_SAID | changed


TALKS = "--interactive asks for its prompts: leave out --prompt, --chat, --n and --json"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-p", "a", "-p", "b"], "--prompt was given twice: one run has one prompt"),
        (["--interactive", "-p", ""], TALKS),
        (["--interactive", "--json", "x"], TALKS),
        (["--interactive", "--chat"], TALKS),
        (["--interactive", "--n", "1"], TALKS),
        (["-p", "a", "--raw"], "--raw goes with --interactive; a prompt without --chat is raw already"),
        ([], "a prompt is needed: -p TEXT, -p - for stdin, -p @FILE, or --interactive"),
        (["--chat"], "a prompt is needed: -p TEXT, -p - for stdin, -p @FILE, or --interactive"),
        (["-p", "a", "--system", ""], "--system needs a conversation: --chat or --interactive"),
        (["-p", "a", "--tools", "[]"], "--tools needs a conversation: --chat or --interactive"),
        (["-p", "a", "--chat-template", "t"], "--chat-template needs a conversation: --chat or --interactive"),
        (
            ["--interactive", "--raw", "--chat-template-kwargs", "{}"],
            "--chat-template-kwargs needs a conversation: --chat or --interactive",
        ),
        (["-p", "a", "--logprobs", "0"], "--logprobs goes with --json, where they are written"),
        (["-p", "a", "-v", "--quiet"], "--verbose and --quiet contradict each other"),
        (["-p", "a", "--n", "0"], "argument --n: 0 is below 1"),
        (["-p", "a", "--gpus", "0"], "argument --gpus: 0 is below 1"),
        (["-p", "a", "--num-slots", "0"], "argument --num-slots: 0 is below 1"),
        (["-p", "a", "--regex", "a", "--choice", "b"], "argument --choice: not allowed with argument --regex"),
        (["hello"], "unrecognized arguments: hello: a prompt is given with -p, a model with --model"),
        (["-p", "a", "--no-such"], "unrecognized arguments: --no-such"),
        (
            ["-p", "a", "-m", "llama"],
            "argument -m/--max-tokens: invalid int value: 'llama': -m is how many tokens to make, a model is given "
            "with --model",
        ),
        (["-p", "a", "--n", "many"], "argument --n: 'many' is no whole number"),
        (["-p", "a", "--max-tokens"], "argument -m/--max-tokens: expected one argument: one that begins with - is "
         "given as FLAG=VALUE: -m is how many tokens to make, a model is given with --model"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)  # fmt: skip
def test_what_generate_refuses(words, said, capsys):
    with pytest.raises(SystemExit) as exit:
        parse(words)
    shown = capsys.readouterr().err
    assert exit.value.code == 2
    if "expected one argument" in said:
        assert "one that begins with - is given as FLAG=VALUE" in shown
    else:
        assert shown == f"error: {said} (see kog generate --help)\n"


def test_a_bias_is_an_id_and_a_finite_number():
    assert bias("15=-2.5") == (15, -2.5) and bias("0=0") == (0, 0.0)
    for wrong in ("15", "=1", "1=", "1=inf", "1=nan", "a=1", "1.5=1"):
        with pytest.raises(Exception, match=r"is not ID=BIAS, as in 15=-2\.5"):
            bias(wrong)


LLM_OF_SERVE = {
    "model": None, "revision": None, "backend": "auto", "devices": ":1", "dtype": "auto", "max_model_len": None,
    "num_slots": 4, "gpu_memory_utilization": None, "seed": None, "prefill": "auto", "num_blocks": None,
}  # fmt: skip
SETTINGS_OF_SERVE = {
    "host": "127.0.0.1", "port": 8000, "uds": None, "keys": (), "names": (), "tool_call_parser": "auto",
    "reasoning_parser": "auto", "chat_template": None, "template_kwargs": {}, "max_queued": None,
    "keep_alive_s": 15.0, "drain_s": 30.0, "silent_s": None,
}  # fmt: skip


def served(words, monkeypatch):
    monkeypatch.delenv("KOG_API_KEY", raising=False)
    settings = serve.parse(words)
    found = {name: getattr(settings, name) for name in SETTINGS_OF_SERVE}
    return found | {"interval": (settings.interval.seconds, settings.interval.tokens)}, settings.llm


def test_what_serve_takes_where_nothing_is_said(monkeypatch):
    found, llm = served([], monkeypatch)
    assert llm == LLM_OF_SERVE and found == SETTINGS_OF_SERVE | {"interval": (0.01, 0)}


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        (["/m"], {"model": "/m"}),
        (["--model", "/m", "--revision", "v1"], {"model": "/m", "revision": "v1"}),
        (["--device", "nvidia", "-tp", "2"], {"devices": "nvidia:2"}),
        (["--gpus", "3"], {"devices": ":3"}),
        (["--gpu-memory-utilization", "1"], {"gpu_memory_utilization": 1.0}),
        (["--seed", "0", "--prefill", "library"], {"seed": 0, "prefill": "library"}),
    ],
    ids=" ".join,
)
def test_what_serve_opens(monkeypatch, words, changed):
    assert served(words, monkeypatch)[1] == LLM_OF_SERVE | changed


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        (["--host", "0.0.0.0", "--port", "0"], {"host": "0.0.0.0", "port": 0}),
        (["--port", "65535"], {"port": 65535}),
        (["--max-num-queued-reqs", "0"], {"max_queued": 0}),
        (["--shutdown-timeout", "0", "--engine-timeout", "2.5"], {"drain_s": 0.0, "silent_s": 2.5}),
        (["--sse-keep-alive-interval", "0"], {"keep_alive_s": 0.0}),
        (["--stream-interval", "2", "--stream-interval-ms", "250"], {"interval": (0.25, 2)}),
        (["--stream-interval", "0"], {}),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)  # fmt: skip
def test_how_serve_serves(monkeypatch, words, changed):
    before = SETTINGS_OF_SERVE | {"interval": (0.01, 0)}
    assert served(words, monkeypatch)[0] == before | changed


def test_a_key_of_the_environment_stands_for_none_that_is_given(monkeypatch, tmp_path):
    monkeypatch.setenv("KOG_API_KEY", "secret")
    assert serve.parse([]).keys == ("secret",) and serve.parse(["--api-key", "a"]).keys == ("a",)
    monkeypatch.setenv("KOG_API_KEY", "")
    assert serve.parse([]).keys == ()
    file = tmp_path / "t"
    file.write_bytes("é".encode())
    assert serve.parse(["--chat-template", str(file)]).chat_template == "é"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["/a", "--model", "/b"], "MODEL and --model name a model each: leave out one"),
        (["--port", "65536"], "--port 65536: ports run from 0 to 65535"),
        (["--port", "-1"], "--port -1: ports run from 0 to 65535"),
        (["--device", "h200:4"], "--device h200:4: a number of GPUs is --tensor-parallel-size"),
        (["--max-num-queued-reqs", "-1"], "--max-num-queued-reqs must be 0 or more"),
        (["--api-key", "a", ""], "--api-key is empty: give a key, or leave the flag out"),
        (["--api-key", ""], "--api-key is empty: give a key, or leave the flag out"),
        (["--served-model-name", "a", ""], "--served-model-name is empty: give a name, or leave the flag out"),
        (["--max-num-seqs", "0"], "argument --max-num-seqs: 0 is below 1"),
        (["--stream-interval", "-1"], "argument --stream-interval: -1 is below 0"),
        (["--gpu-memory-utilization", "0"], "argument --gpu-memory-utilization: 0 is not above 0 and at most 1"),
        (["--gpu-memory-utilization", "1.01"], "argument --gpu-memory-utilization: 1.01 is not above 0 and at most 1"),
        (["--engine-timeout", "-1"], "argument --engine-timeout: -1 is no number from 0 on"),
        (["--engine-timeout", "0"], "argument --engine-timeout: 0 is not above 0"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)  # fmt: skip
def test_what_serve_refuses(words, said, capsys):
    with pytest.raises(SystemExit) as exit:
        serve.parse(words)
    assert exit.value.code == 2
    assert capsys.readouterr().err == f"error: {said} (see kog serve --help)\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--default-chat-template-kwargs", "[]"], "--default-chat-template-kwargs must be a JSON object"),
        (["--default-chat-template-kwargs", "{"], "--default-chat-template-kwargs: not JSON: "),
        (["--chat-template", "/no/file"], "--chat-template /no/file: cannot be read: "),
    ],
)  # fmt: skip
def test_what_serve_cannot_read(words, said):
    with pytest.raises(RequestError) as error:
        serve.parse(words)
    assert str(error.value).startswith(said)
