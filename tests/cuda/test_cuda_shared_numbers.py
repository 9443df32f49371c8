"""What host and kernel both compute: a kernel whose numbers are not the host's does not compile."""

import re
import subprocess

import pytest
import torch

from tests.lib import column_cases, cuda_walk
from tests.lib.cuda_walk import FLAGS, HERE, INCLUDE, header
from tests.lib.ring_walker import spec_of

SPEC = spec_of(hidden_size=64)
# What stands in the generated header, what is planted there instead, what the compiler says of it.
PLANTED = {
    "members in another order": (
        r"Memory<const u16> embed; Memory<const float> gains;",
        "Memory<const float> gains; Memory<const u16> embed;",
        "KOG_OFFSET(Pointers, embed)",
    ),
    "a shorter member": ("i64 limit;", "int limit;", "sizeof(Pointers::limit)"),
    "a member more": ("int position; }", "int position, other[4]; }", "sizeof(StageCall)"),
    "other units": (
        r"(struct OProj .*kShift = )\d+",
        r"\g<1>1",
        "block.h deals out other units than schedule/lowering.py",
    ),
    "fewer words of a block": (
        r"(struct ArgmaxWords .*kStride = )\d+",
        r"\g<1>4",
        "a block has another number of words than the layout gives it",
    ),
    "other steps of operands": (
        r"(struct QkvProj .*kStepBytes = )\d+",
        r"\g<1>4",
        "operands.h and layout/batches.py lay out operands and sums otherwise",
    ),
}


def refused(text, tmp_path):
    """What g++ says of the kernel of several columns behind this header; nothing if it takes it."""
    (tmp_path / "generated.h").write_text(text)
    command = ["g++", "-std=c++20", "-Wno-unknown-pragmas", "-fsyntax-only", *FLAGS["columns.cu"]]
    command += [f'-DGENERATED="{tmp_path / "generated.h"}"', f"-I{HERE}", f"-I{INCLUDE}"]
    done = subprocess.run([*command, str(HERE / "run.cpp")], capture_output=True, text=True)
    return done.stderr if done.returncode else ""


@pytest.fixture(scope="module")
def generated():
    return header.render(column_cases.layout_of(SPEC, 2))


def test_the_kernel_of_the_hosts_own_numbers_compiles(generated, tmp_path):
    assert refused(generated, tmp_path) == ""


@pytest.mark.parametrize("name", PLANTED)
def test_a_kernel_with_other_numbers_than_the_hosts_does_not_compile(generated, tmp_path, name):
    before, after, said = PLANTED[name]
    text, count = re.subn(before, after, generated)
    assert count == 1 and text != generated
    assert said in refused(text, tmp_path)


def test_a_tensor_of_another_type_than_the_kernels_is_not_launched():
    walk = cuda_walk.memory.Memory(
        **{name: torch.zeros(1, dtype=torch.int16) for name in cuda_walk.memory.protocol.TENSORS}
    )
    with pytest.raises(AssertionError, match="weights: 2 bytes an element, the kernel sees 1"):
        walk.pointers([0], 1, 1)
