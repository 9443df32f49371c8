"""Which lanes are off, and when they are on again: a walk over the masks of a kernel's machine code.

An instruction writes the lanes that EXEC has on; the others keep what they had. So whoever follows values through
vector registers has to know where lanes go off and where those come back: at the end of a condition, of a loop, behind
an else.

A region is an instruction that wrote EXEC, or a place where paths of different EXEC meet, and stands for the lanes that
were on from there. A mask in scalar registers is known by regions of whose lanes it is a part, or the whole. EXEC that
is widened by a mask of unknown lanes is an error: Untraced.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

BEFORE = -1  # the region in which a kernel begins: all lanes
WHOLE, PART = "whole", "part"
NONE, ANY = (None, PART), ("any", PART)  # of masks: no lanes; lanes of which nothing is known
NOTHING: frozenset = frozenset()
COMBINES = ("AND", "ANDN1", "ANDN2", "OR", "ORN1", "ORN2", "XOR", "XNOR", "NAND", "NOR", "NOT")
Blocks = dict[int, tuple[int, list[int]]]  # of a block's first instruction: behind its last; where the flow goes on
State = dict[Any, Any]  # of a scalar register, a lane of a vector register, "exec", ("up", region), ("off", region)


class Untraced(ValueError):
    """Machine code that a walk cannot follow."""


class Mask(NamedTuple):
    """What an instruction does to masks; a mask is the code of the first of two registers, EXEC is 126."""

    how: str  # COMPARE, COPY, CLEAR, COMBINES, or UNKNOWN
    written: tuple[Any, ...] = ()  # registers, of 32 bits each
    masks: tuple[int, ...] = ()
    saves: bool = False  # EXEC to the registers, before it is written


EXEC = 126
KILLS = Mask("UNKNOWN")


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

    rejoined   of an instruction that widens EXEC, the instructions at which its lanes may have gone off
    """

    def __init__(self, masks: list[Mask], blocks: Blocks, begins: list[int]) -> None:
        self.masks, self.blocks = masks, blocks
        self.needed = needed(blocks, self._need)  # no other mask is followed
        self.meetings: set[int] = set()  # leaders at which paths of different EXEC meet
        known = -1
        while known < len(self.meetings):
            known = len(self.meetings)
            self.rejoined: dict[int, set[int]] = {}
            self._follow(begins)

    def _need(self, i: int, held: set) -> None:
        """From the registers that EXEC may be made of behind an instruction to those before it."""
        mask = self.masks[i]
        used = EXEC in mask.written or mask.saves or not held.isdisjoint(mask.written)
        held.difference_update(mask.written)
        if used:
            held.update(_registers(mask))

    def _follow(self, begins: list[int]) -> None:
        before: dict[int, State] = {}
        waiting = set()
        for i in begins:
            self._arrive(before, i, {"exec": BEFORE})
            waiting.add(i)
        while waiting:
            first = min(waiting)
            waiting.remove(first)
            state = dict(before[first])
            last, following = self.blocks[first]
            for i in range(first, last):
                self._step(i, state)
            waiting.update(i for i in following if self._arrive(before, i, state))

    def _arrive(self, before: dict[int, State], leader: int, state: State) -> bool:
        """Join a state to what is known before a leader: whether that grew."""
        there = before.setdefault(leader, {})
        new = not there
        here = ("meet", leader)
        if not new and there["exec"] not in (state["exec"], here):
            self.meetings.add(leader)
        needed = self.needed[leader]
        state = {k: v for k, v in state.items() if k in needed or _of_regions(k)}
        if leader in self.meetings and state["exec"] != here:
            _begin(state, here, frozenset({state["exec"]}))
        if there.get("exec") != state["exec"]:
            new, there["exec"] = True, state["exec"]
        for key, value in state.items():
            if key != "exec" and not value <= there.get(key, NOTHING):
                there[key] = there.get(key, NOTHING) | value
                new = True
        return new

    def _step(self, i: int, state: State) -> None:
        mask = self.masks[i]
        if EXEC in mask.written or mask.saves:
            self._set(i, state, mask)
        elif mask.written:
            value = _value(state, mask)
            for code in mask.written:
                if value:
                    state[code] = value
                else:
                    state.pop(code, None)

    def _set(self, i: int, state: State, mask: Mask) -> None:
        now, how = state["exec"], mask.how
        others = [code for code in mask.masks if code != EXEC]
        lanes = _mask(state, others[0]) if others else NOTHING
        if (len(others) > 1 and how != "COPY") or how not in ("COPY", "AND", "ANDN1", "ANDN2", "OR", "XOR"):
            raise Untraced(f"EXEC is {how} of {mask.masks}")
        if mask.saves:
            for code in mask.written:
                state[code] = frozenset({(now, WHOLE)})
        first = mask.masks[0] == EXEC
        # Of the lanes that are on: some. (ANDN1 with EXEC first is of no compiler's.)
        part = how == "AND" or (how == "ANDN2" and first) or (how == "ANDN1" and mask.saves)
        part = part or (how == "COPY" and {region for region, _ in lanes} <= {now})
        one = next(iter(lanes)) if len(lanes) == 1 else NONE
        rest = how == "XOR" and one[1] == WHOLE and state.get(("up", one[0])) == {now}  # an else
        part = part or rest
        to = None  # a region of which all lanes are on then
        if how in ("OR", "COPY") and one[1] == WHOLE:
            to = one[0]
        if how == "OR" and one[1] == now:
            to = one[0]
        if how == "OR" and one[1] == WHOLE and state.get(("rest", now)) == {one[0]}:
            to = next(iter(state["up", now])) if state["up", now] == state.get(("up", one[0])) else None
        if not part and ANY in lanes:
            raise Untraced("EXEC is widened by unknown lanes")
        if how != "OR":
            state["off", now] = state.get(("off", now), NOTHING) | {i}
        if how == "ANDN2" and mask.saves and one[1] == now:  # an else in one instruction
            self.rejoined.setdefault(i, set()).update(state.get(("off", one[0]), NOTHING))
            state["off", one[0]] = state.pop(("off", now))
            _begin(state, i, frozenset({one[0]}), now)
        elif part and to != now:
            _begin(state, i, frozenset({now}), one[0] if rest else None)
        elif not part:
            above = frozenset({to}) if to is not None else frozenset(region for region, _ in lanes)
            back = _passed(state, now, above)
            self.rejoined.setdefault(i, set()).update(*(state.get(("off", r), NOTHING) for r in back))
            if to is not None:
                for region in back:
                    state.pop(("off", region), None)
                _forget(state, back - above - ({now} if mask.saves else set()), above)
                state["exec"] = to
            else:
                for region in above | {now}:
                    state["off", region] = state.get(("off", region), NOTHING) | {i}
                _begin(state, i, above | {now})


def _inside(state: State, first: frozenset, second: frozenset) -> bool:
    """Whether the first mask is EXEC, and the second the whole region above it."""
    (region, how), *more = second or {NONE}
    return first == {(state["exec"], WHOLE)} and not more and how == WHOLE and state.get(("up", state["exec"])) == {region}


def _begin(state: State, region: Any, above: frozenset, all_but: Any = None) -> None:
    """Enter a region: its lanes are of those of the regions above, or all of theirs but those of another."""
    before = state.get(("up", region), NOTHING)
    _forget(state, {region}, before)
    if region in above:  # once more, of what it was
        above = above - {region} | before
    state["up", region], state["rest", region] = above, frozenset({all_but})
    state["exec"] = region
    alive, rest = {region, all_but}, [region]
    while rest:
        for one in state.get(("up", rest.pop()), NOTHING):
            if one not in alive:
                alive |= {one, *state.get(("rest", one), NOTHING)}
                rest.append(one)
    for dead in {k[1] for k in state if _of_regions(k) and k != "exec"} - alive:
        _forget(state, {dead}, state.get(("up", dead), NOTHING) - {dead})


def _forget(state: State, regions: set, above: frozenset) -> None:
    """What is known of the regions becomes that of those above, which had all of their lanes on."""
    for key, value in list(state.items()):
        if key == "exec":
            continue
        if isinstance(key, tuple) and key[0] == "off":
            if key[1] in regions:
                del state[key]
                for region in above:
                    state["off", region] = state.get(("off", region), NOTHING) | value
        elif isinstance(key, tuple) and key[0] in ("up", "rest"):
            if key[1] in regions or (key[0] == "rest" and not regions.isdisjoint(value)):
                del state[key]
            elif not regions.isdisjoint(value):
                state[key] = value - regions | above
        elif any(region in regions or part in regions for region, part in value):
            kept = frozenset(a for a in value if regions.isdisjoint(a))
            gone = frozenset(a[0] for a in value - kept)
            state[key] = kept | {(region, PART) for region in (above if gone <= regions else above | gone - regions)}


def _passed(state: State, now: Any, to: frozenset) -> set:
    """The regions whose lanes may come back on the way from one up to others."""
    passed, rest = {now, *to}, [now]
    while rest:
        region = rest.pop()
        for above in state.get(("up", region), NOTHING) if region not in to else ():
            if above not in passed:
                passed.add(above)
                rest.append(above)
    return passed


def _of_regions(key: Any) -> bool:
    return key == "exec" or (isinstance(key, tuple) and key[0] in ("off", "up", "rest"))


def _registers(mask: Mask) -> set:
    """Those that hold what the instruction combines."""
    pairs = mask.how in COMBINES
    return {code + k if pairs else code for code in mask.masks for k in range(1 + pairs)} - {EXEC, EXEC + 1}


def _mask(state: State, code: int) -> frozenset:
    """Lanes that a pair of scalar registers may hold."""
    if code == EXEC:
        return frozenset({(state["exec"], WHOLE)})
    low, high = (state.get(code + k, NOTHING) for k in (0, 1))
    return (low | high) - {NONE} if low and high else frozenset({ANY})


def _value(state: State, mask: Mask) -> frozenset:
    """What registers that are not EXEC hold after the instruction."""
    if mask.how == "COMPARE":
        return frozenset({(state["exec"], PART)})
    if mask.how == "CLEAR":
        return frozenset({NONE})
    if mask.how == "COPY":
        if EXEC in mask.masks:
            return _mask(state, EXEC)
        return frozenset().union(*(state.get(code, NOTHING) for code in mask.masks))
    if mask.how not in COMBINES:
        return NOTHING
    given = [_mask(state, code) for code in mask.masks]
    if mask.how == "AND":
        known = [one for one in given if ANY not in one]
        lanes = min(known, key=len) if known else frozenset({ANY})
        exact = [one for code, one in zip(mask.masks, given, strict=True) if code == EXEC]
        lanes = exact[0] if exact else lanes
    elif mask.how == "ANDN2":
        lanes = given[0]
    elif mask.how == "XOR" and _inside(state, *given):
        return frozenset({(next(iter(given[1]))[0], state["exec"])})
    elif mask.how in ("OR", "XOR"):
        lanes = given[0] | given[1]
    else:
        lanes = frozenset({ANY})
    return frozenset((region, PART) for region, _ in lanes) or frozenset({NONE})
