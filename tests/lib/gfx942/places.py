"""Where in the source each instruction of a kernel comes from: the functions that were inlined into each other."""

import functools
import io
import re
from collections.abc import Iterator
from typing import Any

from elftools.elf.elffile import ELFFile

from tests.lib.gfx942.code_object import CodeObject
from tests.lib.gfx942.decode import instructions

DEBUG = "-gline-tables-only"  # what clang is told: no instruction changes by it
LAMBDA = re.compile(r"\(lambda at [^)]*/([^/)]*):(\d+):\d+\)")
Chain = tuple[str, ...]


@functools.cache
def chains(code_object: CodeObject, kernel: str) -> list[Chain]:
    """Of every instruction the functions that it stands in, outermost first, by their names as DWARF has them."""
    first, code = code_object.code(kernel)
    places = [at for at, _ in instructions(code)]
    index = {at: i for i, at in enumerate(places)}
    found: list[Chain] = [()] * len(places)
    dwarf = ELFFile(io.BytesIO(code_object.blob)).get_dwarf_info()
    for unit in dwarf.iter_CUs():
        for chain, start, end in _inlined(dwarf, unit, unit.get_top_DIE(), ()):
            for at in range(start - first, end - first, 4):
                if at in index and len(found[index[at]]) < len(chain):
                    found[index[at]] = chain
    return found


def _inlined(dwarf: Any, unit: Any, parent: Any, chain: Chain) -> Iterator[tuple[Chain, int, int]]:
    for die in parent.iter_children():
        below = chain
        if die.tag == "DW_TAG_inlined_subroutine":
            origin = die.get_DIE_from_attribute("DW_AT_abstract_origin")
            below = (*chain, _short(origin.attributes["DW_AT_name"].value.decode()))
            for start, end in _ranges(dwarf, unit, die.attributes):
                yield below, start, end
        yield from _inlined(dwarf, unit, die, below)


def _short(name: str) -> str:
    return LAMBDA.sub(r"\1:\2", name).replace("kog::", "")


def _ranges(dwarf: Any, unit: Any, attributes: Any) -> Iterator[tuple[int, int]]:
    if "DW_AT_ranges" in attributes:
        at = attributes["DW_AT_ranges"].value
        base = unit.get_top_DIE().attributes["DW_AT_low_pc"].value
        for one in dwarf.range_lists().get_range_list_at_offset(at, unit):
            origin = 0 if one.is_absolute else base
            yield origin + one.begin_offset, origin + one.end_offset
    elif "DW_AT_low_pc" in attributes:
        start, end = attributes["DW_AT_low_pc"].value, attributes["DW_AT_high_pc"]
        yield start, end.value if end.form.startswith("DW_FORM_addr") else start + end.value
