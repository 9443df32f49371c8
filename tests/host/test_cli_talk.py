"""A talk by `kog generate --interactive`, and the lines of a log beside a text that comes."""

import contextlib
import io
import logging
import os
import re
import sys
from contextlib import suppress

import pytest

from kog_triton import LLM
from kog_triton.cli import interactive
from kog_triton.cli.history import history_file, kept_lines
from kog_triton.cli.stderr_log import STDERR_LOG, StderrLog
from tests.lib.fake_checkpoint import make_checkpoint


def test_interactive_holds_a_conversation(cli, monkeypatch):
    lines = "say:one\n\nsay:more\n/reset\nsay:two\n" + "x" * 600 + "\nsay:three\n/exit\nsay:four\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    asked, rendered = [], LLM.chat_prompt

    def noted(self, messages, **how):
        asked.append([f"{m['role']} {m['content']}" for m in messages])
        return rendered(self, messages, **how)

    monkeypatch.setattr(LLM, "chat_prompt", noted)
    code, out, err = cli("--interactive", "--quiet", "--system", "s")
    one, more, two, three = (f"{word}\n[assistant]" for word in ("one", "more", "two", "three"))
    assert code == 0 and out == "".join(f"{answer}\n" for answer in (one, more, two, three))
    assert err.count("error:") == 1
    assert "the text has 628 tokens and the context holds 512: shorten the text" in err
    assert asked == [
        ["system s", "user say:one"],
        ["system s", "user say:one", f"assistant {one}", "user say:more"],
        ["system s", "user say:two"],
        ["system s", "user say:two", f"assistant {two}", f"user {'x' * 600}"],
        ["system s", f"user {'x' * 600}"],  # without what is oldest: it does not fit either
        ["system s", "user say:two", f"assistant {two}", "user say:three"],
    ]


def test_interactive_raw_continues_each_line_alone(cli, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("say:one\nsay:two\n"))
    assert cli("--interactive", "--raw", "--quiet") == (0, "one\ntwo\n", "")


def test_interactive_without_a_chat_template(cli, monkeypatch, tmp_path):
    plain = make_checkpoint(tmp_path / "plain")
    (plain / "tokenizer_config.json").unlink()
    monkeypatch.setattr(sys, "stdin", io.StringIO("say:one\n"))
    code, out, err = cli("--interactive", model=plain)
    assert (code, out) == (0, "one\n") and "every text is continued" in err
    code, out, err = cli("--interactive", "--system", "s", model=plain)
    assert code == 2 and "--system needs a chat template" in err


def test_interactive_answers_are_not_broken_by_the_lines_of_a_log(cli, monkeypatch):
    """As on a terminal, where stdout and stderr are one."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("slow logs say:one\nsay:two\n"))
    monkeypatch.setattr(sys, "stderr", sys.stdout)
    code, out, _ = cli("--interactive", "--raw")
    lines = out.splitlines()
    assert code == 0 and lines.index("one") < lines.index("two")
    after = lines[lines.index("one") + 1 :]
    assert after[:2] == ["compiled columns.cu in 5.1 s", "no kernel of chunks"]


@pytest.mark.parametrize("how", ["prompt", "interactive"])
def test_a_compiler_speaks_before_the_text_that_waits_for_it(cli, monkeypatch, how):
    """Triton's takes 11 to 48 s in a first request, which sat silent: its lines waited for the text's end."""
    seen = []

    class Terminal(io.StringIO):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def write(self, text):
            seen.append((self.name, text))
            return len(text)

    monkeypatch.setattr(sys, "stdin", io.StringIO("compile say:one\n"))
    monkeypatch.setattr(sys, "stdout", Terminal("stdout"))
    monkeypatch.setattr(sys, "stderr", Terminal("stderr"))
    flags = ["-p", "compile say:one"] if how == "prompt" else ["--interactive", "--raw"]
    assert cli(*flags)[0] == 0
    text = next(at for at, (stream, words) in enumerate(seen) if stream == "stdout" and words)
    assert ("stderr", "compiling the kernel\n") in seen[:text]


@pytest.fixture
def spoken():
    return logging.makeLogRecord({"msg": "compiled"})


def test_a_line_of_a_log_waits_for_the_end_of_a_text_however_it_ends(spoken, capsys):
    handler = StderrLog()
    for error in (None, KeyboardInterrupt):
        with contextlib.suppress(KeyboardInterrupt), handler.held():
            handler.handle(spoken)
            assert capsys.readouterr().err == ""
            if error:
                raise error
        assert capsys.readouterr().err == "compiled\n"
        handler.handle(spoken)
        assert capsys.readouterr().err == "compiled\n"


def test_a_log_does_not_speak_while_a_line_is_typed(spoken, capsys, monkeypatch):
    def typed(question):
        STDERR_LOG.handle(spoken)
        assert (question, capsys.readouterr().err) == ("> ", "")
        return "a line"

    monkeypatch.setattr("builtins.input", typed)
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    assert interactive._ask() == "a line"
    assert capsys.readouterr().err == "compiled\n"


def talk(cli, monkeypatch, lines, *flags):
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return cli("--interactive", *flags)


def test_a_talk_greets_and_has_commands(cli, monkeypatch):
    lines = "/help\n/fly\nsay:one\n/set max_tokens 2\nsay:two\n/set top_p 7\n/set nothing 1\n/set top_p\n/reset\n"
    code, out, err = talk(cli, monkeypatch, lines + "/exit\nsay:never\n")
    assert code == 0 and out == "one\n[assistant]\ntw\n"
    for words in (
        "each text is answered: /help lists commands",
        "/set NAME VALUE",
        "error: no command /fly: /help lists them",
        "max_tokens is 2",
        "error: top_p is 7: it must be from 0 to 1",
        "error: /set takes a sampling parameter",
        "the talk begins anew",
    ):
        assert words in err
    assert err.count("error: ") == 4


@pytest.mark.parametrize("value", ["warm", "[" * 100_000])
def test_a_value_that_is_no_json_says_what_is(cli, monkeypatch, value):
    code, out, err = talk(cli, monkeypatch, f"/set stop {value}\nsay:one\n", "--raw", "--quiet")
    assert (code, out) == (0, "one\n")
    assert err.startswith("error: /set stop: '") and err.count("\n") == 1
    assert err.endswith(""" is no JSON, as 0.5, true, null, "text" and ["a", "b"] are\n""")


def test_an_error_behind_a_text_begins_a_line(cli, monkeypatch):
    code, out, err = talk(cli, monkeypatch, "slow fail\n", "--raw", "--quiet")
    assert (code, out) == (5, f"{out.strip()}\n") and len(out) > 1 and err.startswith("error: ")


def test_a_text_of_several_lines(cli, monkeypatch):
    lines = '"""\nfirst\n\nsay:last\n"""\nsay:one\n"""\nsay:unfinished'
    code, out, _ = talk(cli, monkeypatch, lines, "--raw", "--quiet")
    assert (code, out) == (0, "last\none\nunfinished\n")


def test_an_answer_is_part_of_the_talk(cli, monkeypatch):
    prompts = []
    real = LLM.stream

    def noted(self, prompt, params):
        prompts.append(prompt["prompt"])
        return real(self, prompt, params)

    monkeypatch.setattr(LLM, "stream", noted)
    talk(cli, monkeypatch, "say:one\nsay:two\n", "--quiet", "-m", "3")
    assert prompts == ["[user]say:one\n[assistant]", "[user]say:one\n[assistant]one\n[user]say:two\n[assistant]"]


def test_a_full_context_forgets_what_is_oldest(cli, monkeypatch):
    prompts = []
    real = LLM.stream

    def noted(self, prompt, params):
        prompts.append(prompt)
        return real(self, prompt, params)

    monkeypatch.setattr(LLM, "stream", noted)
    lines = "".join(f"{i} {'x' * 60} say:{i}\n" for i in range(8))
    code, _, err = talk(cli, monkeypatch, lines, "--system", "be brief", "-m", "40")
    assert code == 0 and "error" not in err
    assert "the context is full: the oldest 2 messages are forgotten" in err
    assert len(prompts) == 8
    for i, prompt in enumerate(prompts):
        assert len(prompt["prompt_token_ids"]) + 40 <= 512
        assert prompt["prompt"].startswith("[system]be brief\n[user]")
        assert prompt["prompt"].endswith(f"say:{i}\n[assistant]")
    assert "[user]0 x" in prompts[3]["prompt"] and "[user]0 x" not in prompts[7]["prompt"]
    assert "[user]6 x" in prompts[7]["prompt"]


def test_a_talk_keeps_a_quarter_of_the_context_at_most_for_an_answer(cli, monkeypatch):
    """However long an answer may be: two questions of 150 characters stay together in 512 positions."""
    code, _, err = talk(cli, monkeypatch, f"{'x' * 150} say:a\n{'y' * 150} say:b\n", "-m", "300")
    assert code == 0 and "the context is full" not in err
    code, _, err = talk(cli, monkeypatch, f"{'x' * 190} say:a\n{'y' * 190} say:b\n", "-m", "300")
    assert code == 0 and "the oldest 2 messages are forgotten" in err


def test_ctrl_c_at_the_prompt_drops_the_line_and_keeps_the_talk(monkeypatch, capsys):
    typed = iter([KeyboardInterrupt, '"""', "half", KeyboardInterrupt, "whole"])

    def line(question):
        said = next(typed)
        if said is KeyboardInterrupt:
            raise said
        return said

    monkeypatch.setattr("builtins.input", line)
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    assert interactive._ask() == "whole" and capsys.readouterr().out == "\n\n"


def test_what_was_typed_is_kept_for_the_user_alone(monkeypatch, tmp_path):
    readline = pytest.importorskip("readline")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    readline.clear_history()
    with suppress(KeyboardInterrupt), kept_lines():
        readline.add_history("say:one")
        raise KeyboardInterrupt
    assert history_file().read_text().strip() == "say:one"
    assert history_file().stat().st_mode & 0o77 == 0
    history_file().unlink()  # and before anything is written into it
    with monkeypatch.context() as patched, kept_lines():
        patched.setattr(readline, "write_history_file", lambda file: None)
    assert history_file().stat().st_mode & 0o77 == 0
    readline.clear_history()
    readline.add_history("say:one")
    readline.write_history_file(history_file())
    readline.clear_history()
    with kept_lines():
        assert readline.get_history_item(1) == "say:one"
    readline.clear_history()
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr("pathlib.Path.home", lambda: (_ for _ in ()).throw(RuntimeError))
    assert history_file() is None and os.path.exists(tmp_path)
    with kept_lines():
        pass


def test_a_log_says_what_failed_and_where(capsys, monkeypatch):
    """A server's answer says no more than that its log does."""
    log = logging.getLogger("kog_triton.a_test")
    log.addHandler(STDERR_LOG)
    monkeypatch.setattr(log, "propagate", False)
    for debug, pattern in (
        ("", r"it failed: KeyError: 'gone\\x1b' \(.*test_cli_talk\.py:\d+\)\n"),
        ("1", r"it failed\nTraceback .*\n(.*\n)+KeyError: 'gone.*\n"),
    ):
        monkeypatch.setenv("KOG_DEBUG", debug)
        try:
            raise KeyError("gone\x1b")
        except KeyError:
            log.exception("it failed")
        assert re.fullmatch(pattern, capsys.readouterr().err)
    log.error("no more")
    assert capsys.readouterr().err == "no more\n"
