"""racecheck's reports of the CUDA kernels as pairs of functions, and the pairs that are no races."""

import re

KERNEL = re.compile("kog_[a-z]+")
# The readers of a writer, of races that racecheck reports between threads of a block and that are none. The
# ring's copies are not among them.
ORDERED = {
    # flags between warps, words that are polled; no other data hangs on them
    "store_volatile": {"load_volatile", "stamp"},
    # every thread writes the value that every thread has computed, and reads what it wrote itself
    "end_step": {"position", "begin_step", "select_request", "save_cursors"},
    "select_request": {"cache_of"},
}


def races_in(output: str) -> list[tuple[str, str]]:
    """Writer and reader of every pair of accesses; by function, without arguments and what stands before
    their names. Of two writers the second counts as the reader.

    Some stores are reported by the kernel's name alone, without a line: where a volatile load reads
    what they wrote, they are `store_volatile`.
    """
    races: list[tuple[str, str]] = []
    for report in output.split("Race reported between")[1:]:
        (kind, one), *others = (
            (kind, plain_name(name))
            for kind, name in re.findall(r"(Read|Write) access at (.*)", report)
        )
        for other_kind, other in others:
            writer, reader = (one, other) if kind == "Write" else (other, one)
            if reader == "load_volatile" and KERNEL.fullmatch(writer):
                writer = "store_volatile"
            assert "Write" in (kind, other_kind)
            races.append((writer, reader))
    return races


def plain_name(name: str) -> str:
    name = re.sub(r"<[^>]*>", "", name)  # template arguments
    return re.sub(r"[(+].*", "", name).split("::")[-1].strip()


def unexplained(races: list[tuple[str, str]]) -> set[tuple[str, str]]:
    return {(writer, reader) for writer, reader in races if reader not in ORDERED.get(writer, ())}
