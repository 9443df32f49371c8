"""What computes a number is written once: an edit of it is seen in the kernel of one token and in that of columns."""

import pytest
import torch

from tests.lib.cuda_planting import plant
from tests.lib.cuda_requests import PROMPTS, make, request, run
from tests.lib.cuda_walk import INCLUDE, ColumnBackend, FiberBackend, compile_walk
from tests.lib.ring_walker import f16_spec

CHOICES = 64  # of faults, by the lowest bits of a wait's limit, which mean nothing by themselves
LIMIT = 1 << 20


def chosen(number):
    return f"b.p.limit % {CHOICES} == {number}"


# name -> header, the one text, what it becomes
EDITS = {
    "SiLU": ("outputs.h", "silu(v) * up", f"silu({chosen(1)} ? 1.5f * v : v) * up"),
    "rope": (
        "heads.h",
        "float2 a = near[n], z = far[n];",
        f"float2 a = near[n], z = far[n];\n      if ({chosen(2)}) a.x = -a.x;",
    ),
    "1 / rms": ("values.h", "* (1.f / kHidden) + kNormEps", f"* (({chosen(3)} ? 1.1f : 1.f) / kHidden) + kNormEps"),
    "merge": ("merge.h", "float total = s.total();", f"float total = s.total() * ({chosen(4)} ? 2 : 1);"),
    "product": (
        "matvec.h",
        "      multiply_fragments<Stage, kKnown>(slot, x, f,",
        f"      if (f != 0 || !({chosen(5)})) multiply_fragments<Stage, kKnown>(slot, x, f,",
    ),
    "sums over parts of K": (
        "rows.h",
        "after(mine.item(b, r), sum, asked[r]);",
        f"after(mine.item(b, r), {chosen(6)} ? 0.5f * sum : sum, asked[r]);",
    ),
    "a module's output": (
        "outputs.h",
        "scaled_sum<Stage>(b, item, sum, b.layer) + asked.bias",
        f"scaled_sum<Stage>(b, item, sum, b.layer) * ({chosen(7)} ? 2 : 1) + asked.bias",
    ),
}


def test_what_is_edited_stands_in_one_place():
    texts = [path.read_text() for path in (INCLUDE / "kog").rglob("*.h")]
    arithmetic = ("-1.4426950408889634f", "rsqrt_of(sum_of(v)", "multiply_fragment(const Fragment&",
                  "join(v, shuffle_xor(v, mask))", "x[4 * (i % kGroups) + j] += unpack_f32(")  # fmt: skip
    for text in (*(before for _, before, _ in EDITS.values()), *arithmetic):
        assert sum(t.count(text) for t in texts) == 1, text


@pytest.fixture(scope="module")
def include(tmp_path_factory):
    return plant(tmp_path_factory.mktemp("edited"), *EDITS.values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one token", "columns"])
def test_an_edit_is_seen_in_both_kernels(kind, include):
    count = 1 if kind == "one token" else 2
    backend = make(*((FiberBackend,) if count == 1 else (ColumnBackend, f16_spec(), 2)))
    requests = [request(i, PROMPTS[i], 3) for i in range(count)]
    run(backend, *requests)  # loads the kernel
    kernel = backend.kernel if count == 1 else backend.columns.kernels[0].kernel
    kernel.library = compile_walk(kernel.layout, kernel.flags, include=include)
    found = []
    for fault in range(len(EDITS) + 1):
        backend.memory.cache.zero_()
        backend.wait_ns = LIMIT + fault
        found.append((run(backend, *requests), backend.memory.cache.clone()))
    steps, cache = found[0]
    for name, (other, held) in zip(EDITS, found[1:], strict=True):
        assert other != steps or not torch.equal(held, cache), name
