"""What is skipped may be missing by accident: KOG_TESTS_NO_SKIPS, which CI sets, makes that red (conftest.py)."""

import os
import subprocess
import sys

import pytest

from tests import ROOT

MACHINE_CODE = """
import shutil

import triton

from tests.lib import machine_code, nvrtc
from tests.lib.cuda_walk import layout_of
from tests.lib.ring_walker import spec_of

LAYOUT = layout_of(spec_of())

def test_without_a_compiler(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(nvrtc, "load", lambda: None)
    machine_code.sass_of(LAYOUT)

def test_without_a_disassembler(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(nvrtc, "load", object)
    monkeypatch.setattr(triton, "__file__", "/nowhere/triton/__init__.py")
    machine_code.sass_of(LAYOUT)
"""
OTHERS = """
import pytest

def test_that_needs_a_gpu():
    pytest.skip("needs a GPU: torch sees none")

@pytest.mark.xfail(strict=True)
def test_that_is_known_to_fail():
    assert False
"""
MODULE = """
import pytest

pytest.importorskip("a_package_that_nobody_has")
"""


def outcome(tmp_path, text, no_skips):
    """Exit code and last line of pytest on one file, behind this folder's conftest."""
    file = tmp_path / "test_written.py"
    file.write_text(text)
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.conftest", file]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    env |= {"KOG_TESTS_NO_SKIPS": no_skips}
    done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines()[-1].rpartition(" in ")[0]


@pytest.mark.parametrize(
    ("text", "allowed", "demanded"),
    [
        (MACHINE_CODE, (0, "2 skipped"), (1, "2 failed")),
        (OTHERS, (0, "1 skipped, 1 xfailed"), (0, "1 skipped, 1 xfailed")),
        (MODULE, (5, "1 skipped"), (2, "1 error")),
    ],
    ids=["machine code", "a GPU", "a module"],
)
def test_a_skip_is_red_where_none_may_be(tmp_path, text, allowed, demanded):
    assert outcome(tmp_path, text, "0") == allowed
    assert outcome(tmp_path, text, "1") == demanded


@pytest.mark.parametrize("name", ["run", "slow"])
def test_ci_allows_none(name):
    assert "\nexport KOG_TESTS_NO_SKIPS=1" in (ROOT / ".ci" / name).read_text()
