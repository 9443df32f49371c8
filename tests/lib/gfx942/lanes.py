"""Which lanes are off, and when they are on again: a walk over the masks of a kernel's machine code.

An instruction writes the lanes that EXEC has on; the others keep what they had. So whoever follows values through
vector registers has to know where lanes go off and where those come back: at the end of a condition, of a loop, behind
an else.

What a mask in scalar registers can switch on is known by moments: instructions that compared, or saved EXEC, and of
whose lanes it is a part or the whole. Of each moment the walk keeps where lanes went off since. EXEC that is widened by
a mask of unknown lanes is an error: Untraced.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

WHOLE, PART = "whole", "part"
NONE, ANY = (None, PART), ("any", PART)  # of masks: no lanes; lanes of which nothing is known
EXEC = 126
NOTHING: frozenset = frozenset()
COMBINES = ("AND", "ANDN1", "ANDN2", "OR", "ORN1", "ORN2", "XOR", "XNOR", "NAND", "NOR", "NOT")
Blocks = dict[int, tuple[int, list[int]]]  # of a block's first instruction: behind its last; where the flow goes on
# Of a scalar register or a lane of a vector register: (moment, WHOLE or PART). Of off(moment): where lanes went off
# since; off(moment, earlier one): where those of an earlier moment had gone off by then; beyond(moment): not empty if
# EXEC may since have had lanes that the moment had not.
State = dict[Any, frozenset]


class Of(tuple):
    """A key of moments: by its type, since a walk looks through its keys millions of times."""


def off(*moments: int) -> Of:
    return Of(("off", *moments))


def beyond(moment: int) -> Of:
    return Of(("beyond", moment))


class Untraced(ValueError):
    """Machine code that a walk cannot follow."""


class Mask(NamedTuple):
    """What an instruction does to masks; a mask is the code of the first of two registers, EXEC is 126."""

    how: str  # COMPARE, COPY, CLEAR, COMBINES, or UNKNOWN
    written: tuple[Any, ...] = ()  # registers, of 32 bits each
    masks: tuple[Any, ...] = ()
    saves: bool = False  # EXEC to the registers, before it is written


def needed(blocks: Blocks, need: Callable[[int, set], Iterable[int] | None]) -> dict[int, set]:
    """Of each block, what is needed before it. `need` takes the set behind an instruction to that before it, in place,
    and may name blocks that are to be looked at again."""
    before: dict[int, set] = {first: set() for first in blocks}
    readers: dict[int, list[int]] = {first: [] for first in blocks}
    for first, (_, following) in blocks.items():
        for i in following:
            readers[i].append(first)
    waiting = set(blocks)
    while waiting:
        first = max(waiting)
        waiting.remove(first)
        last, following = blocks[first]
        held = set().union(*(before[i] for i in following))
        for i in reversed(range(first, last)):
            waiting.update(need(i, held) or ())
        if not held <= before[first]:
            before[first] = held
            waiting.update(readers[first])
    return before


class Lanes:
    """Where lanes go off and on in the blocks of a flow; `masks` is of every instruction.

    rejoined   of an instruction that widens EXEC, those at which its lanes may have gone off
    """

    def __init__(self, masks: list[Mask], blocks: Blocks, begins: list[int]) -> None:
        self.masks = masks
        self.rejoined: dict[int, set[int]] = {}
        needs = needed(blocks, self._need)  # no other mask is followed
        before: dict[int, State] = {i: {} for i in begins}
        waiting = set(begins)
        while waiting:
            first = min(waiting)
            waiting.remove(first)
            state = dict(before[first])
            last, following = blocks[first]
            for i in range(first, last):
                self._step(i, state)
            for i in following:
                new = i not in before
                if join(before.setdefault(i, {}), _kept(state, needs[i])) or new:
                    waiting.add(i)

    def _need(self, i: int, held: set) -> None:
        """From the registers that EXEC may be made of behind an instruction to those before it."""
        mask = self.masks[i]
        used = EXEC in mask.written or mask.saves or not held.isdisjoint(mask.written)
        held.difference_update(mask.written)
        if used:
            held.update(_registers(mask))

    def _step(self, i: int, state: State) -> None:
        mask = self.masks[i]
        if EXEC in mask.written or mask.saves:
            self._set(i, state, mask)
        elif mask.written:
            value = _value(state, mask, i)
            for code in mask.written:
                state.pop(code, None)
            if any(moment == i for moment, _ in value):
                _begin(state, i)
            for code in mask.written if value else ():
                state[code] = value

    def _set(self, i: int, state: State, mask: Mask) -> None:
        """EXEC is written: it narrows, widens, or both."""
        how, others = mask.how, [code for code in mask.masks if code != EXEC]
        if how not in ("COPY", "AND", "ANDN1", "ANDN2", "OR", "XOR") or len(others) != (2 if how == "COPY" else 1):
            raise Untraced(f"EXEC is {how} of {mask.masks}")
        lanes = _mask(state, others[0])
        first = mask.masks[0] == EXEC
        if mask.saves:
            for code in mask.written:
                state.pop(code, None)
            _begin(state, i)
            for code in mask.written:
                state[code] = frozenset({(i, WHOLE)})
        if not (how == "AND" or (how == "ANDN2" and first) or (how == "ANDN1" and mask.saves)):
            if ANY in lanes:
                raise Untraced("EXEC is widened by unknown lanes")
            self.rejoined.setdefault(i, set()).update(*(state.get(off(moment), NOTHING) for moment, _ in lanes))
            _widen(state, lanes)
        if how != "OR":
            for moment in _moments(state):
                state[off(moment)] = state.get(off(moment), NOTHING) | {i}


def _widen(state: State, lanes: frozenset) -> None:
    """Lanes of some moments are on again. If it is all of one, what went off since is as it was then."""
    moments = _moments(state)
    (moment, how), *more = lanes or {NONE}
    if how == WHOLE and not more and not state.get(beyond(moment)):
        for one in moments:
            state[off(one)] = state.get(off(moment, one), NOTHING)
    given = {moment for moment, _ in lanes}
    for one in moments - given:
        if any(off(one, earlier) in state for earlier in given):
            state[beyond(one)] = frozenset({True})


def _begin(state: State, moment: int) -> None:
    """A moment comes; nothing is left of an earlier time it came, but what a mask still holds."""
    if moment in _moments(state):
        state[beyond(moment)] = frozenset({True})
    else:
        _forget(state, {moment})
        for earlier in _moments(state):
            state[off(moment, earlier)] = state.get(off(earlier), NOTHING)


def _forget(state: State, moments: set[int]) -> None:
    for key in [k for k in state if type(k) is Of and not moments.isdisjoint(k[1:])]:
        del state[key]


def _moments(state: State) -> set[int]:
    """Those whose lanes a mask may hold."""
    return {moment for key, value in state.items() if type(key) is not Of for moment, _ in value} - {None, "any"}


def _kept(state: State, needs: set) -> State:
    state = {key: value for key, value in state.items() if type(key) is Of or key in needs}
    held = _moments(state)
    _forget(state, {k[1] for k in state if type(k) is Of} - held)
    return state


def join(into: State, other: State) -> bool:
    """Unite two states, into the first: whether that grew."""
    grew = False
    for key, value in other.items():
        if key not in into or not value <= into[key]:
            into[key] = into.get(key, NOTHING) | value
            grew = True
    return grew


def _registers(mask: Mask) -> set:
    """Those that hold what the instruction combines."""
    pairs = mask.how in COMBINES
    return {code + k if pairs else code for code in mask.masks for k in range(1 + pairs)} - {EXEC, EXEC + 1}


def _mask(state: State, code: Any) -> frozenset:
    """Lanes that a pair of scalar registers may hold."""
    low, high = (state.get(code + k, NOTHING) for k in (0, 1))
    return (low | high) - {NONE} if low and high else frozenset({ANY})


def _value(state: State, mask: Mask, i: int) -> frozenset:
    """What registers that are not EXEC hold after instruction `i`, at which EXEC is its own whole."""
    if mask.how == "COMPARE":
        return frozenset({(i, PART)})
    if mask.how == "CLEAR":
        return frozenset({NONE})
    if mask.how == "COPY":
        if EXEC in mask.masks:
            return frozenset({(i, WHOLE)})
        return NOTHING.union(*(state.get(code, NOTHING) for code in mask.masks))
    if mask.how not in COMBINES:
        return NOTHING
    given = [frozenset({(i, WHOLE)}) if code == EXEC else _mask(state, code) for code in mask.masks]
    if mask.how == "AND":
        known = [one for one in given if ANY not in one]
        lanes = min(known, key=lambda one: (len(one), (i, WHOLE) not in one)) if known else frozenset({ANY})
    elif mask.how == "ANDN2":
        lanes = given[0]
    elif mask.how in ("OR", "XOR"):
        lanes = given[0] | given[1]
    else:
        lanes = frozenset({ANY})
    return frozenset((moment, PART) for moment, _ in lanes) or frozenset({NONE})
