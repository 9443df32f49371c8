"""The kernels of steps that requests share, for 2, 4 and 8 of them, each with all sampling rules or without.

Compiled when first wanted, beside the requests, which take turns meanwhile. Lanes have none: they exchange more than a
column does.
"""

from collections.abc import Callable

import torch

from kog_triton.backends.compiled_beside import CompiledBeside
from kog_triton.backends.triton.kernel.matvec import sums_width
from kog_triton.backends.triton.kernel.pointers import Pointers
from kog_triton.schedule.triton import SUMS, Tiles

COUNTS = (2, 4, 8)
Key = tuple[int, bool]  # columns, and whether all sampling rules are known


def most_columns(tiles: Tiles, num_slots: int) -> int:
    """Columns of the widest kernel that a model on so many slots has, each with a block at least; 1 if none."""
    if tiles.lanes > 1 or num_slots < 2:
        return 1
    wanted = next((count for count in COUNTS if count >= num_slots), COUNTS[-1])
    fitting = (c for c in COUNTS if c * _sums(tiles) <= SUMS)
    return max((c for c in fitting if c <= min(wanted, tiles.num_blocks)), default=1)


def _sums(tiles: Tiles) -> int:
    """Registers of a thread that hold the sums of a block's rows, of one column."""
    most = 0
    for stage, t in enumerate(tiles.stages):
        values = t.tile_rows * sums_width(tiles, stage) * (t.units if t.wired else 1)
        most = max(most, values // (32 * tiles.sizes.warps))
    return most


class SharedSteps:
    """compile: puts a kernel where its launch finds it; None where there is nothing to compile."""

    def __init__(self, most: int, compile: Callable[[Key], object] | None) -> None:
        self.most, self._never = most, compile is None
        self._kernels: CompiledBeside[Key] = CompiledBeside(
            compile or (lambda key: None), lambda key: kernel_name(*key), inside=True
        )

    def ready(self, requests: int, rules: bool) -> int:
        """Columns of the kernel in which so many requests share a step; 1 while they take turns."""
        if min(requests, self.most) < 2:
            return 1
        count = next(c for c in COUNTS if c >= min(requests, self.most))
        return count if self._never or self._kernels.ready((count, rules)) else 1

    def settle(self) -> None:
        """Wait for what compiles."""
        self._kernels.settle()


def kernel_name(columns: int, rules: bool) -> str:
    return f"{columns} columns" + " with sampling rules" * rules


def without_memory(pointers: Pointers) -> Pointers:
    """Pointers of the same types, sizes and alignment to nothing: what compiles keeps no memory of the GPU."""
    return Pointers(*(torch.empty_like(p, device="meta") if isinstance(p, torch.Tensor) else p for p in pointers))
