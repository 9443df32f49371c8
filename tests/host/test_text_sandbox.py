"""Hostile templates end soon in an error of one line, and the next template renders.

Limits are small here, so that a hole costs seconds or hundreds of megabytes, not the machine.
"""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kog_triton.errors import ModelError, RequestError
from kog_triton.text import Tokenizer, chat, sandbox
from kog_triton.text.sandbox import Renderer
from tests.lib.fake_checkpoint import byte_tokenizer

GROW = "{% set n = namespace(l=[1], m=[1]) %}{% for i in range(99999) %}"
ENDLESS = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
TIME, MEMORY, CHARS = ("took more than 1 s", "more than 96 MiB of memory", "more than 100000 characters")
HOSTILE = {
    # endless, in Python and inside of one call of C
    "loops": (ENDLESS, TIME),
    "a slow search": ("{{ ('a' * 4000000).rfind('ab' ~ 'a' * 200000) }}", TIME),
    "a slow filter": ("{{ ('ab' * 3000000)|wordwrap(1) }}", TIME),
    "lists that share": GROW + "{% set n.l = [n.l, n.l] %}{% set n.m = [n.m, n.m] %}"
    "{% if loop.index == 60 %}{{ n.l == n.m }}{% endif %}{% endfor %}",
    "sums of lists": "{{ range(99999)|batch(1)|sum(start=[])|length }}",
    # memory
    "a long text": ("{{ ('a' * 200000000)|length }}", MEMORY),
    "a long list": ("{{ ([1] * 30000000)|length }}", MEMORY),
    "doubled": (GROW.replace("99999", "26") + "{% set n.l = n.l + n.l %}{% endfor %}", MEMORY),
    "kept": (GROW.replace("99999", "300") + "{% set n.l = n.l + ['y' * 1000000 ~ i] %}{% endfor %}", MEMORY),
    "padding": ("{{ ['x']|map('center', 300000000)|list }}", MEMORY),
    "a width": ("{{ '%(a)300000000d' % {'a': 1} }}", MEMORY),
    "an integer": ("{{ 9 ** (9 ** 9) }}", f"{TIME}|{MEMORY}"),
    # output, depth, errors
    "a flood": ("{% for i in range(99999) %}text {% endfor %}", CHARS),
    "brackets": ("{{ " + "(" * 30000 + "1" + ")" * 30000 + " }}", "recurses too deep"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recurses too deep"),
    "a crash": GROW + "{% for j in 'abc' %}{% set n.l = (n.l,) %}{% endfor %}{% endfor %}"
    "{{ {n.l: 1}|length }}",
    "a long error": ("{{ raise_exception('x' * 9000000) }}", "refused: xxx"),
    "an escape": ("{{ cycler.__init__.__globals__.os }}", "refused: "),
    "a change of data": ("{{ messages.append(1) }}", "refused: "),
}  # fmt: skip
SOON = f"{TIME}|{MEMORY}|ended its process with status -11"  # whichever comes first


@pytest.fixture(scope="module")
def small():
    renderer = Renderer(seconds=1.0, memory=96 << 20, max_chars=100_000)
    yield renderer
    renderer.close()


def pid_of(renderer: Renderer) -> int:
    assert renderer._running
    return renderer._running[0].pid


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_ends_in_one_line_and_the_next_one_renders(small, name):
    source, why = HOSTILE[name] if isinstance(HOSTILE[name], tuple) else (HOSTILE[name], SOON)
    with pytest.raises(RequestError, match=rf"^the chat template (\w+ )?.*({why})") as error:
        chat.render(source, {"messages": []}, True, small)
    assert len(str(error.value)) <= 300 and str(error.value).isprintable()
    assert chat.render("{{ m }}", {"m": "next"}, True, small) == "next"


def test_a_template_beyond_the_allowed_length_is_the_models_error(tmp_path):
    for length, fits in ((chat.MAX_TEMPLATE_CHARS, True), (chat.MAX_TEMPLATE_CHARS + 1, False)):
        config = {"chat_template": "x" * length}
        if fits:
            assert chat.load_templates(tmp_path, config)["default"]
        else:
            with pytest.raises(ModelError, match="longer than 65536"):
                chat.load_templates(tmp_path, config)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ '%s-%05d|%(x)s'|replace('|%(x)s', '')|format('a', 3) }}", "a-00003"),
        ("{{ '%(a)s is %(b).2f' % {'a': 'pi', 'b': 3.14159} }}", "pi is 3.14"),
        ("{{ '{:>5}|{:x<4}'.format('ab', 1) }}", "   ab|1xxx"),
        ("{{ m.rsplit('</think>', 1)[-1].strip('\n ').rfind('b') }}", "1"),
        ("{{ m|trim|replace('think', 'thought')|length }}", "24"),
        ("{% for x in [1, 2, 3] if x is odd and x in [3, 4] %}{{ loop.index }}{{ x }}{% endfor %}", "13"),
        ("{{ [[1, 'a'], [2, 'b']] + [[3, 'c']] }}", "[[1, 'a'], [2, 'b'], [3, 'c']]"),
        ("{{ ([{'n': 2}, {'n': 1}]|sort(attribute='n')|map(attribute='n')|list) }}", "[1, 2]"),
        ("{{ 7 // 2 }}{{ '0x1f'|int(base=16) }}{{ (m, 1)|length }}", "3312"),
        ("{{ {'a': 'é\u2028😀\ud800\n'}['a'] }}{{ 1.5 }}{{ none }}", "é\u2028😀\ud800\n1.5None"),
    ],
)  # fmt: skip
def test_what_templates_do_still_works(source, text):
    assert chat.render(source, {"m": "<think>x</think>\n ab "}, True) == text


def test_what_a_template_says_does_not_drive_a_terminal():
    with pytest.raises(RequestError, match=r"refused: .\[2Jroles") as error:
        chat.render("{{ raise_exception('\x1b[2Jroles\nmust alternate') }}", {}, True)
    assert str(error.value).isprintable()


def test_an_integer_of_thousands_of_digits_is_refused(small):
    with pytest.raises(RequestError, match=r"was not rendered: .* digits"):
        chat.render("{{ m }}", {"m": 10**5000}, True, small)


# ---- the process ----


def test_a_tokenizer_with_a_template_starts_the_process_when_it_is_loaded(tmp_path):
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    sandbox.RENDERER.close()
    Tokenizer.load(tmp_path)
    assert sandbox.RENDERER._running is None
    (tmp_path / "chat_template.jinja").write_text("x")
    Tokenizer.load(tmp_path)
    assert sandbox.RENDERER._running


def test_threads_share_the_process(small):
    def texts(thread):
        return [chat.render("{{ m }}", {"m": f"{thread}.{i}"}, True, small) for i in range(20)]

    with ThreadPoolExecutor(8) as pool:
        for thread, got in enumerate(pool.map(texts, range(8))):
            assert got == [f"{thread}.{i}" for i in range(20)]


def test_the_process_inherits_no_environment_and_no_files(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("TZ", "UTC")
    renderer, mine = Renderer(), os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(mine, True)
    try:
        assert renderer.render("x", {}) == {"text": "x"}
        process = Path(f"/proc/{pid_of(renderer)}")
        names = {entry.split(b"=")[0] for entry in (process / "environ").read_bytes().split(b"\0")}
        assert b"TZ" in names and names <= {b"TZ", b"LD_LIBRARY_PATH", b"LC_CTYPE", b""}
        assert {fd.name for fd in (process / "fd").iterdir()} == {"0", "1", "2"}
    finally:
        renderer.close()
        os.close(mine)


def test_a_process_that_ended_leaves_no_zombie_and_the_next_rendering_starts_another(small):
    def kill():
        os.kill(pid_of(small), 9)
        small._running[0].wait()

    def stop():
        assert "took" in small.render(ENDLESS, {})["error"]

    for end in (small.close, kill, stop):
        assert small.render("x", {}) == {"text": "x"}
        pid = pid_of(small)
        end()
        assert not Path(f"/proc/{pid}").exists()
        assert small.render("y", {}) == {"text": "y"} and pid_of(small) != pid


def test_time_is_limited_whatever_the_caller_does_with_the_signal(small):
    small.close()
    handler = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    try:
        assert "took more than 1 s" in small.render(ENDLESS, {})["error"]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGALRM, handler)


def test_values_beyond_the_memory_do_not_end_a_caller_that_broken_pipes_end(small):
    handler = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        reply = small.render("{{ m|length }}", {"m": "a" * (150 << 20)})
    finally:
        signal.signal(signal.SIGPIPE, handler)
    assert MEMORY in reply["error"]


def test_an_interrupted_rendering_does_not_answer_the_next_one(small, monkeypatch):
    def interrupted(channel, line, max_chars):
        channel.sendall(line)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(sandbox, "_exchange", interrupted)
        small.render("first", {})
    assert small.render("second", {}) == {"text": "second"}


def test_a_forked_process_renders_in_a_process_of_its_own():
    assert chat.render("{{ m }}", {"m": 1}, True) == "1"
    parents = pid_of(sandbox.RENDERER)
    with sandbox.RENDERER._lock:  # as if another thread were rendering
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)  # not to wait for ever, should the lock be the parent's
            same = chat.render("{{ m }}", {"m": 2}, True) == "2"
            own = pid_of(sandbox.RENDERER) != parents
            sandbox.RENDERER.close()
            os._exit(0 if same and own else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert chat.render("{{ m }}", {"m": 3}, True) == "3"
    assert pid_of(sandbox.RENDERER) == parents


ORPHANS = """
import os, runpy, sys, threading, time
Renderer = runpy.run_path(sys.argv[1])["Renderer"]
idle, busy = Renderer(), Renderer(seconds=1.0)
idle.render("x", {}), busy.render("x", {})
threading.Thread(target=busy.render, args=(sys.argv[2], {}), daemon=True).start()
time.sleep(0.2)
print(idle._running[0].pid, busy._running[0].pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_the_process_dies_with_its_parent_idle_or_not():
    command = [sys.executable, "-c", ORPHANS, sandbox.__file__, ENDLESS]
    done = subprocess.run(command, capture_output=True, text=True)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2, done.stderr

    def lives(pid):  # a zombie of a parent that does not wait counts as dead
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        except OSError:
            return False

    end = time.monotonic() + 30
    while any(map(lives, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(lives, pids))
