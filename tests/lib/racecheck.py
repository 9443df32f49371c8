"""racecheck's reports of the CUDA kernels as pairs of functions, and the pairs that are no races.

racecheck names the function of some accesses and only the kernel of others, by no rule that is documented; those are
looked up in the line tables of the machine code.
"""

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

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


# kernel and offset -> the function whose line the instruction there is of
Functions = Mapping[tuple[str, int], str]


def races_in(output: str, functions: Functions | None = None) -> list[tuple[str, str]]:
    """Writer and reader of every pair of accesses; by function, without arguments and what stands before
    their names. Of two writers the second counts as the reader.
    """
    races: list[tuple[str, str]] = []
    for report in output.split("Race reported between")[1:]:
        accesses = [
            (kind, (functions or {}).get((name, int(offset, 16)), plain_name(name)))
            for kind, name, offset in re.findall(r"(Read|Write) access at (.*)\+0x(\w+)", report)
        ]
        assert len(accesses) > 1, f"a report without two accesses: {report[:400]}"
        (kind, one), *others = accesses
        for other_kind, other in others:
            assert "Write" in (kind, other_kind)
            races.append((one, other) if kind == "Write" else (other, one))
    return races


def functions_in(cubin: Path, disassembler: str) -> dict[tuple[str, int], str]:
    """The function of every load and store of shared memory, by kernel and offset, of a file's first kernel."""
    command = [disassembler, "-c", "-g", str(cubin)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[tuple[str, int], str] = {}
    place = kernel = ""
    for line in done.stdout.splitlines():
        if header := re.match(r"\s*\.section\s+\.text\.(\w+)", line):
            kernel = header[1]
        elif source := re.match(r'\s*//## File "(.*)", line (\d+)', line):
            place = f"{source[1]}:{source[2]}"
        elif access := re.match(r"\s*/\*([0-9a-f]+)\*/\s+(?:@\S+\s+)?(?:LDS|STS|ATOMS)", line):
            found[kernel, int(access[1], 16)] = place
    return {at: function_around(place) for at, place in found.items()}


def function_around(place: str) -> str:
    """The name of the function that "header:line" lies in; of the text that was compiled, which is no file, its own."""
    path, line = place.rsplit(":", 1)
    if not Path(path).exists():
        return Path(path).name
    for text in reversed(Path(path).read_text().splitlines()[: int(line)]):
        if named := re.search(r"KOG_DEVICE\b[^(=]*?(\w+)\(", text):
            return named[1]
    raise AssertionError(f"{place} lies in no function")


def plain_name(name: str) -> str:
    name = re.sub(r"<[^>]*>", "", name)  # template arguments
    return re.sub(r"[(+].*", "", name).split("::")[-1].strip()


def unexplained(output: str, cubins: Sequence[Functions] = ({},)) -> set[tuple[str, str]]:
    """The races that are no pair of ORDERED. racecheck does not say which of a process' kernels of one name it
    means: one in which both functions are a pair is enough."""
    assert cubins
    reports = zip(*(races_in(output, functions) for functions in cubins), strict=True)
    return {races[0] for races in reports if not any(r in ORDERED.get(w, ()) for w, r in races)}
