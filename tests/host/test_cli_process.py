"""`kog generate` as a process of its own: signals, closed pipes, what an import drags in."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys

import jsonschema
import pytest

from tests import ROOT
from tests.lib.fake_checkpoint import END, make_checkpoint

SCHEMA = json.loads((ROOT / "kog_triton" / "generate.schema.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("fake"), temperature=0.5)


def start(plugins, *argv, **options):
    """A process of its own that sees the fake backend."""
    path = os.pathsep.join([str(plugins), str(ROOT)])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *argv],
        env=env,
        # What a shell runs in the background ignores Ctrl-C, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options,
    )


def test_help_and_import_need_no_torch(plugins):
    code = (
        "import sys, kog_triton\n"
        "from kog_triton import __main__ as kog\n"
        "try: kog.main(['generate', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    process = start(plugins, "-c", code)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert b"--max-tokens" in out


def test_ctrl_c_keeps_the_text_so_far_and_exits_130(plugins, folder, tmp_path):
    file = tmp_path / "run.json"
    argv = ["-m", "kog_triton", "generate", "--model", str(folder), "--backend", "fake"]
    process = start(plugins, *argv, "-p", "slow Hi", "--json", str(file), "--ignore-eos")
    first = os.read(process.stdout.fileno(), 1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and b"Traceback" not in err
    record = json.loads(file.read_text())
    jsonschema.validate(record, SCHEMA)
    done = record["output"]["outputs"][0]
    assert done["finish_reason"] == "abort" and done["text"] == (first + out).decode()
    assert 0 < len(done["token_ids"]) < 300 and END not in done["token_ids"]


@pytest.mark.parametrize(
    ("closed", "prompt", "want"),
    [
        (0, "-", (2, b"", b"error: --prompt -: standard input is closed\n")),
        (1, "say:x", (2, b"", b"error: standard output is closed\n")),
        (2, "say:x", (0, b"x", b"")),  # what belongs to stderr does not go to stdout instead
    ],
)
def test_a_stream_that_is_closed_from_the_start(plugins, folder, closed, prompt, want):
    argv = [sys.executable, "-m", "kog_triton.generate", "--model", str(folder)]
    argv += ["--backend", "fake", "-p", prompt]
    code = f"import os; os.close({closed}); os.execv({sys.executable!r}, {argv!r})"
    process = start(plugins, "-c", code)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == want


def test_an_early_ctrl_c_is_one_line(plugins, folder):
    """While torch and numpy are being imported: no traceback of theirs."""
    code = (
        "import os, signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'numpy':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from kog_triton.generate import main\n"
        "sys.exit(main(['-p', 'x']))\n"
    )
    process = start(plugins, "-c", code)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"interrupted\n")


def test_a_closed_pipe_ends_quietly(plugins, folder):
    argv = ["-m", "kog_triton.generate", "--model", str(folder), "--backend", "fake"]
    process = start(plugins, *argv, "-p", "slow Hi", "--ignore-eos", "--quiet")
    os.read(process.stdout.fileno(), 1)
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")


def test_a_table_that_nobody_reads_ends_quietly(plugins):
    process = start(plugins, "-m", "kog_triton", "plan")
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")


def test_on_a_terminal_the_lines_of_a_log_wait_for_the_end_of_the_text(plugins, folder):
    """A kernel may be compiled while the first request runs; text and lines meet on one terminal."""
    ours, theirs = pty.openpty()
    argv = ["-m", "kog_triton", "generate", "--model", str(folder), "--backend", "fake"]
    argv += ["-p", "slow logs say:one line", "--temp", "0"]
    process = start(plugins, *argv, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    with contextlib.suppress(OSError):  # EIO: nobody holds the other end any more
        while piece := os.read(ours, 4096):
            seen += piece
    os.close(ours)
    assert process.wait(60) == 0
    lines = seen.decode().split("\r\n")
    at = lines.index("one line")
    assert lines[at + 1 : at + 3] == ["compiled columns.cu in 5.1 s", "no kernel of chunks"]
    assert "tokens/s" in lines[at + 3]


def panicking(folder):
    """A fake checkpoint whose pattern takes a text of many x apart for ever, until the library panics."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return str(folder)


@pytest.mark.parametrize("talk", [False, True])
def test_a_panic_of_the_tokenizer_is_one_line(plugins, tmp_path, talk):
    """Not the Rust library's own lines before ours; what others write to stderr meanwhile is not lost."""
    model = panicking(make_checkpoint(tmp_path))
    say = ["--interactive", "--raw", "--quiet"] if talk else ["-p", "x" * 400]
    process = start(
        plugins, "-m", "kog_triton", "generate", "--model", model, "--backend", "fake", *say,
        stdin=subprocess.PIPE,
    )  # fmt: skip
    out, err = process.communicate(b"x" * 400 + b"\n", timeout=60)
    assert (process.returncode, out) == (3, b"")
    lines = [line for line in err.decode().splitlines() if not line.endswith(" ...")]
    assert len(lines) == 1 and lines[0].startswith("error: tokenizer.json cannot encode this text: ")


@pytest.mark.parametrize(
    ("error", "kept"), [("None", True), ("RequestError('no')", True), ("PanicException('no')", False)]
)
def test_what_others_write_to_stderr_is_kept_but_for_a_panic(error, kept):
    code = (
        "import os, sys\n"
        "from kog_triton.cli.panics import panics_unsaid\n"
        "from kog_triton.errors import ModelError, RequestError\n"
        "class PanicException(BaseException): pass\n"
        "try:\n"
        "    with panics_unsaid():\n"
        "        os.write(2, b'lines\\n')\n"
        "        print('at once', file=sys.stderr)\n"
        f"        error = {error}\n"
        "        if isinstance(error, PanicException): raise ModelError('said') from error\n"
        "        if error: raise error\n"
        "except Exception as error: print(error, file=sys.stderr)\n"
        "print('after', file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    said = {"None": [], "RequestError('no')": ["no"]}.get(error, ["said"])
    lines = ["at once", *(["lines"] if kept else []), *said, "after"]
    assert (done.returncode, done.stderr.splitlines()) == (0, lines)
