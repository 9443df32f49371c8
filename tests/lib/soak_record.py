"""What a soak keeps of its requests, so that an answer that differs tells its cause: how its prompt ran and what ran
meanwhile, and by kind of request how many differ."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from kog_triton.backends.mailbox import Request
from kog_triton.backends.prefill.slices import Piece, PromptRun

MOST_KEPT = 40  # differing answers that are told one by one


@dataclass
class Way:
    """How one prompt ran.

    by        the class of its run; "kernel" without one
    slices    of each its pieces; a graph is none
    inside    the last of them is not the prompt's
    at_once   the first of them was asked for whole
    between   slices of other prompts since its first one, by the positions that those fill
    rows      tokens of its pieces, and how many pieces had so many
    """

    by: str = "kernel"
    slices: list[int] = field(default_factory=list)
    inside: bool = False
    at_once: bool = False
    between: Counter[int] = field(default_factory=Counter)
    rows: Counter[int] = field(default_factory=Counter)

    @property
    def line(self) -> str:
        if not self.slices:
            return self.by
        cut = "in slices" if len(self.slices) > 1 else "one slice"
        return f"{self.by}, {cut}{', at once' if self.at_once else ''}{', others between' if self.between else ''}"


class Ways:
    """How prompts run on a backend: the last one of every slot, while `watched`. It keeps no run: one that is called
    off inside its prompt holds tensors of all GPUs."""

    def __init__(self) -> None:
        self.of_slot: dict[int, Way] = {}
        self._open: list[tuple[Way, weakref.ref[PromptRun]]] = []

    @contextmanager
    def watched(self, backend: Any) -> Iterator[None]:
        right = backend._prompt

        def prompt(request: Request) -> PromptRun | None:
            way = self.of_slot[request.slot] = Way()
            run: PromptRun | None = right(request)
            if run is not None:
                self._watch(run, way)
            return run

        backend._prompt = prompt
        try:
            yield
        finally:
            del backend._prompt

    def _watch(self, run: PromptRun, way: Way) -> None:
        begin, kind, held = run._begin, type(run), weakref.ref(run)
        way.by = kind.__name__

        def pieces(at_once: bool) -> Iterator[Piece]:
            for piece in begin(at_once):
                yield piece
                if not piece.begins:
                    way.slices[-1] += 1
                    way.rows[piece.rows] += 1

        def sliced(seconds: float, at_once: bool = False) -> bool:
            one = held()
            assert one is not None, "who calls it has it"
            for other, ref in self._open:
                theirs = ref()
                if theirs is not None and theirs is not one and theirs._pieces is not None:
                    other.between[one.end] += 1
            way.at_once = at_once if not way.slices else way.at_once
            way.slices.append(0)
            ended = True
            try:
                ended = kind.advance(one, seconds, at_once)
            finally:
                way.inside = not ended
                if ended:
                    self._open = [(way, ref) for way, ref in self._open if ref() not in (None, one)]
            return ended

        run._begin, run.advance = pieces, sliced  # type: ignore[method-assign]
        self._open = [*((way, ref) for way, ref in self._open if ref() is not None), (way, held)]


@dataclass
class Difference:
    """An answer that is not what its request says alone.

    which    number of the request
    kind, prompt, cached  of it; tokens of its prompt, and of those that the slot held
    way      Way.line
    slices, rows, between  Way's
    beside   requests that ran at any time meanwhile
    yields   of the engine meanwhile
    at       the first token that differs; -1: one is the other's beginning
    got, expected  that token
    again    what asking once more gave (Soak.ask_again)
    """

    which: int
    kind: str
    prompt: int
    cached: int
    way: str
    slices: list[int]
    rows: dict[int, int]
    between: dict[int, int]
    beside: list[str]
    yields: int
    at: int
    got: int
    expected: int
    again: dict[str, Any] = field(default_factory=dict)

    @property
    def line(self) -> str:
        return (
            f"{named(self.kind, self.prompt, self.cached)}, at {self.at}: {self.got} for {self.expected}; {self.way}; "
            f"slices {self.slices[:12]}, rows {self.rows}, between {self.between}; beside {self.beside}; "
            f"{self.yields} yields; again {self.again}"
        )


def named(kind: str, prompt: int, cached: int) -> str:
    return f"{kind} {prompt}" + (f" behind {cached}" if cached else "")


class Tally:
    """Answers by kind of request and way of its prompt: how many, and how many differ."""

    def __init__(self) -> None:
        self.all: Counter[tuple[str, str]] = Counter()
        self.differ: Counter[tuple[str, str]] = Counter()
        self.kept: list[Difference] = []

    def add(self, what: str, way: str, difference: Callable[[], Difference] | None) -> None:
        self.all[what, way] += 1
        if difference is not None:
            self.differ[what, way] += 1
            if len(self.kept) < MOST_KEPT:
                self.kept.append(difference())

    def lines(self) -> list[str]:
        """Of kinds that differ, every way that they took; then by way alone."""
        bad = {what for what, _ in self.differ}
        out = [
            f"  {self.differ[key]} of {count} differ: {key[0]}; {key[1]}"
            for key, count in sorted(self.all.items())
            if key[0] in bad
        ]
        ways: Counter[str] = Counter()
        wrong: Counter[str] = Counter()
        for (what, way), count in self.all.items():
            ways[way] += count
            wrong[way] += self.differ[what, way]
        return out + [f"  {wrong[way]} of {n} differ: all of {way}" for way, n in sorted(ways.items())]

    def told(self) -> dict[str, Any]:
        rows = [[*key, n, self.differ[key]] for key, n in sorted(self.all.items())]
        return {"answers": rows, "differing": [asdict(one) for one in self.kept]}
