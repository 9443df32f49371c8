"""KCCL's machine code: accesses to words are of scope .sys and as wide as they were written. And the host's numbers."""

import ctypes
import re
import shutil
import subprocess
from collections import Counter

import pytest

from kog_triton.backends.cuda import toolchain
from kog_triton.backends.cuda.layout.collectives import MOST_RANKS, POLICIES, REPORT, REPORT_WORDS
from kog_triton.backends.cuda.peers import Argument, source_header
from tests import ROOT
from tests.lib.machine_code import instructions, is_local, sass_of_text

KCCL = ROOT / "backends/cuda/include/kccl"
BENCH = (ROOT / "backends/cuda/kccl_bench.cu").read_text()
EXAMPLE = ROOT / "backends/cuda/kccl_example.cu"
VECTORS, HELD_TWICE = 2, 384  # a thread's in one poll; that many of a rank take 256 threads twice
WAITS = Counter({"LDG.E.STRONG.SYS": 1, "STG.E.STRONG.SYS": 5, "ATOMG.E.CAS.STRONG.GPU": 1})  # a wait that expires


def strong(code):
    """Of each kind, the accesses to memory that others see, and whether any register lies in memory."""
    names = [re.sub(r"^@!?U?P\w+\s+", "", what).split()[0] for _, what in code]
    return Counter(name for name in names if "STRONG" in name or is_local(name))


def bench(policy, ranks):
    header = source_header(POLICIES[policy], ranks, HELD_TWICE)
    assert f"#define VECTORS {VECTORS}\n" in header
    return header + BENCH


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow), 8])
@pytest.mark.parametrize("policy", POLICIES)
def test_words_move_16_bytes_at_once_at_system_scope(policy, ranks):
    """One load for each rank and vector, in one poll; one store for each rank, and one more that empties its row."""
    code = instructions(sass_of_text(bench(policy, ranks)))
    stores = ranks * (2 if policy == "poison" else 1)
    wide = Counter({"LDG.E.128.STRONG.SYS": ranks * VECTORS, "STG.E.128.STRONG.SYS": stores})
    assert strong(code) == wide + WAITS
    assert any("MEMBAR.ALL.SYS" in what for _, what in code) == (policy == "poison")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("ld.relaxed.sys.global.v4", "ld.relaxed.gpu.global.v4"),
        ("st.relaxed.sys.global.v4", "st.relaxed.gpu.global.v4"),
        ("ld.relaxed.sys.global.v4", "ld.global.v4"),
    ],
)
def test_another_scope_is_seen(before, after):
    text = (KCCL / "ptx.h").read_text()
    assert text.count(before) == 1
    planted = text.replace("#pragma once", "").replace(before, after)
    source = bench("phase", 2).replace("#include <kccl/collectives.h>", planted + headers())
    code = strong(instructions(sass_of_text(source)))
    assert code["LDG.E.128.STRONG.SYS"] != 4 or code["STG.E.128.STRONG.SYS"] != 2


def headers():
    """All but ptx.h as one text."""
    names = ("comm.h", "policies.h", "channel.h", "collectives.h")
    text = "\n".join((KCCL / name).read_text() for name in names)
    return re.sub(r"#include <kccl/\w+\.h>|#pragma once", "", text)


def test_the_example_compiles():
    code = strong(instructions(sass_of_text(EXAMPLE.read_text())))
    assert code == Counter({"LDG.E.128.STRONG.SYS": 2, "STG.E.128.STRONG.SYS": 2}) + WAITS


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no GPU toolkit: NVRTC has compiled the kernel")
def test_the_example_is_a_program(tmp_path):
    command = re.search(r"nvcc (.*?) -o", EXAMPLE.read_text())[1].split()
    command = ["nvcc", *command, "-o", str(tmp_path / "example"), str(EXAMPLE)]
    subprocess.run(command, cwd=ROOT, check=True)


def test_the_host_has_the_numbers_of_the_headers():
    text = "".join(path.read_text() for path in sorted(KCCL.glob("*.h")))
    assert f"kMostRanks = {MOST_RANKS};" in text and f"kReportWords = {REPORT_WORDS}\n" in text
    names = re.search(r"enum Report \{(.*?)\}", text, re.DOTALL)[1]
    assert re.findall(r"^  k(\w+),", names, re.MULTILINE) == [n.capitalize() for n in REPORT]
    for policy in POLICIES.values():
        body = text.split(f"struct {policy.name} {{")[1].split("\n};")[0]
        assert f"kValues = {policy.values}, kBuffers = {policy.buffers};" in body
        empty = int(re.search(r"kEmpty = (\w+?)u?;", body)[1], 0)
        assert empty == policy.empty
    assert KCCL.parent == toolchain.INCLUDE


def test_the_host_has_the_argument_of_the_kernel():
    fields = re.search(r"struct Argument \{(.*?)\};", BENCH, re.DOTALL)[1]
    names = re.findall(r"\b(\w+)[,;]", re.sub(r"//.*", "", fields))
    assert names == [name for name, _ in Argument._fields_]
    same = f"static_assert(sizeof(Argument) == {ctypes.sizeof(Argument)});\n"
    assert sass_of_text(bench("phase", 2) + same)
