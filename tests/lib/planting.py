"""Planted faults in the Triton kernel: one edit of its source, seen by every module that imports from it.

A gate that nobody has seen red is not known to work. The edited module is a file of its own, because
Triton reads a function's source from its file.
"""

import importlib.util
import sys
from pathlib import Path

import pytest

from kog_triton.backends.triton.kernel import (
    all_reduce,
    attention,
    chunk,
    chunk_attention,
    codes,
    columns,
    decode,
    edits,
    head,
    layer,
    logprobs,
    matvec,
    noise,
    residual,
    sample,
    shared_step,
    slots,
    sync,
    words,
)

DEVICE_MODULES = (
    sync, words, codes, matvec, attention, residual, layer, noise, slots, sample, all_reduce, edits,
    logprobs, head, columns, chunk_attention, chunk, decode, shared_step,
)  # fmt: skip
MODULES = {m.__name__.rpartition(".")[2]: m for m in DEVICE_MODULES}


def plant(patch: pytest.MonkeyPatch, folder: Path, module: str, before: str, after: str) -> None:
    """Replace the one place in `module` that reads `before`, and rebind its functions everywhere."""
    original = MODULES[module]
    assert original.__file__ is not None
    source = Path(original.__file__).read_text()
    assert source.count(before) == 1, f"{module}: {before!r} stands there {source.count(before)} times"
    path = folder / f"planted_{module}.py"
    path.write_text(source.replace(before, after))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    planted = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, path.stem, planted)
    spec.loader.exec_module(planted)
    for name, old in list(vars(original).items()):
        device_function = getattr(old, "fn", None)
        if getattr(device_function, "__module__", None) != original.__name__:
            continue
        for user in MODULES.values():
            if vars(user).get(name) is old:
                patch.setattr(user, name, getattr(planted, name))
