"""A small machine with weak memory, of which every interleaving is tried, and programs made of a kernel's walk.

    store    waits on its way: a thread's stores land in any order, those to one word in theirs
    wait     until the word has the phase of a use, or its number; it must be that use
    reach    until the word has the number of a use or a later one
    load     takes what is there, or was at some time since the thread's last fence; it must be that use
    fence    until the thread's own stores have landed and, on NVIDIA, those that a barrier has shown it of its block
    drain    until the thread's own stores have landed (AMD: s_waitcnt)
    barrier  of all threads of a block

What has landed is the same for all. A store lands before its thread has done `patience` more operations; 0: it may
be on its way for ever.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kog_triton.schedule.exchanges import Exchange, Kernel, Mark, Of
from kog_triton.schedule.schedule import Scope

Word = tuple[str, int, int]  # exchange, buffer, row
Value = tuple[int, int]  # use, phase
NOTHING: Value = (-1, 0)


@dataclass(frozen=True)
class Op:
    kind: str
    word: Word = ("", 0, 0)
    value: Value = NOTHING
    marked: bool = True  # a wait goes by the phase; else by the number


@dataclass(frozen=True)
class Flying:
    """A store on its way: since which place in its thread, and whether a barrier has shown it to the block."""

    word: Word
    value: Value
    since: int
    shown: bool = False


@dataclass(frozen=True)
class Thread:
    """Where a thread is, its stores on their way, what it has loaded ahead."""

    place: int = 0
    flying: tuple[Flying, ...] = ()
    ahead: Value | None = None


State = tuple[tuple[Thread, ...], tuple[Value, ...]]  # and the words


class Machine:
    """`programs`: of each thread; `blocks`: which block it is of."""

    def __init__(
        self, programs: Sequence[Sequence[Op]], blocks: Sequence[int] = (), vendor: str = "nvidia", patience: int = 0
    ) -> None:
        self.programs, self.blocks = programs, blocks or tuple(range(len(programs)))
        self.vendor, self.patience, self.states = vendor, patience, 0
        words = sorted({op.word for program in programs for op in program})
        self.index = {word: i for i, word in enumerate(words)}

    def explore(self) -> str:
        """What goes wrong in some interleaving; "" if nothing does."""
        start: State = ((Thread(),) * len(self.programs), (NOTHING,) * len(self.index))
        seen, todo = {start}, [start]
        while todo:
            state = todo.pop()
            following = list(self.moves(state))
            for new in following:
                if isinstance(new, str):
                    return new
                if new not in seen:
                    seen.add(new)
                    todo.append(new)
            ends = (t.place == len(p) for t, p in zip(state[0], self.programs, strict=True))
            if not following and not all(ends):
                return "all wait for ever"
        self.states = len(seen)
        return ""

    def moves(self, state: State) -> Iterator[State | str]:
        threads, memory = state
        for i, thread in enumerate(threads):
            own, ops = thread.flying, self.programs[i]
            for n, store in enumerate(own):
                if not any(other.word == store.word for other in own[:n]):
                    landed = _put(memory, self.index[store.word], store.value)
                    left = Thread(thread.place, own[:n] + own[n + 1 :], thread.ahead)
                    yield _put(threads, i, left), landed
            if thread.place == len(ops):
                continue
            word = self.next_load(ops[thread.place :])
            if word and thread.ahead is None:
                early = Thread(thread.place, own, self.seen(thread, word, memory))
                yield _put(threads, i, early), memory
            if not (self.patience and own and thread.place - own[0].since >= self.patience):
                yield from self.step(state, i, ops[thread.place])

    def step(self, state: State, i: int, op: Op) -> Iterator[State | str]:
        threads, memory = state
        thread = threads[i]
        after = Thread(thread.place + 1, thread.flying, thread.ahead)
        if op.kind == "store":
            flying = (*thread.flying, Flying(op.word, op.value, thread.place))
            after = Thread(thread.place + 1, flying, thread.ahead)
        elif op.kind == "reach":
            if memory[self.index[op.word]][0] < op.value[0]:
                return
        elif op.kind in ("wait", "load"):
            value = self.seen(thread, op.word, memory)
            if op.kind == "load":
                value = value if thread.ahead is None else thread.ahead
                after = Thread(thread.place + 1, thread.flying)
            elif value[1] != op.value[1] if op.marked else value != op.value:
                return
            if value != op.value:
                yield f"{op.word[0]}: use {value[0]} taken for {op.value[0]}"
                return
        elif op.kind == "barrier":
            mates = [j for j, block in enumerate(self.blocks) if block == self.blocks[i]]
            here = [threads[j].place for j in mates]
            if any(
                at == len(self.programs[j]) or self.programs[j][at] != op for j, at in zip(mates, here, strict=True)
            ):
                return
            for j in mates:
                shown = tuple(Flying(s.word, s.value, s.since, True) for s in threads[j].flying)
                threads = _put(threads, j, Thread(threads[j].place + 1, shown, threads[j].ahead))
            yield threads, memory
            return
        elif thread.flying or (op.kind == "fence" and self.owes(threads, i)):
            return
        elif op.kind == "fence":
            after = Thread(thread.place + 1)
        yield _put(threads, i, after), memory

    def owes(self, threads: tuple[Thread, ...], i: int) -> bool:
        """Whether stores that thread i has been shown are on their way: its fence is behind them on NVIDIA alone."""
        block = [t for t, b in zip(threads, self.blocks, strict=True) if b == self.blocks[i]]
        return self.vendor == "nvidia" and any(s.shown for t in block for s in t.flying)

    def seen(self, thread: Thread, word: Word, memory: tuple[Value, ...]) -> Value:
        own = [s.value for s in thread.flying if s.word == word]
        return own[-1] if own else memory[self.index[word]]

    @staticmethod
    def next_load(ops: Sequence[Op]) -> Word | None:
        """The next load's word, if no fence stands before it."""
        for op in ops:
            if op.kind in ("load", "fence"):
                return op.word if op.kind == "load" else None
        return None


def _put(values: tuple, i: int, value: object) -> tuple:
    return (*values[:i], value, *values[i + 1 :])


def programs_of(
    kernel: Kernel, names: Sequence[str], tokens: int = 1, blocks: int = 2, end: int = 0, ranks: bool = False
) -> list[list[Op]]:
    """A program a block, `blocks` a lane: its walk through tokens, of these exchanges. A block owns a row of each, and
    where SOME take part it does. `ranks`: a lane is one, with words of its own, into each of which a block stores."""
    chosen = [e for e in kernel.exchanges if e.name in names]
    assert len(chosen) == len(names)
    programs: list[list[Op]] = [[] for _ in range(kernel.lanes * blocks)]

    def of_rank(lane: int) -> str:
        return f" of rank {lane}" if ranks else ""

    uses: dict[str, list[tuple[int, int]]] = {name: [] for name in names}
    for token in range(tokens):
        steps = [(step, layer) for layer in range(kernel.layers) for step in kernel.layer]
        for step, layer in steps + [(step, -1) for step in kernel.ends[end]]:
            reads = list(_reads(chosen, uses, step, token, layer))
            fenced = any(f.step == step and (f.layers is None or layer in f.layers) for f in kernel.fences)
            for block, program in enumerate(programs):
                for guarded in (False, True):
                    for e, of, n in reads:
                        if (e.mark is Mark.GUARDED) == guarded:
                            own = of_rank(block // blocks)
                            program += _waits(e, of, n, block, blocks, len(programs), own)
                    if fenced and not guarded:
                        program.append(Op("fence"))
            for e in chosen:
                if e.producer == step and (e.layers is None or layer in e.layers):
                    uses[e.name].append((token, layer))
                    for block, program in enumerate(programs):
                        crosses = ranks and e.scope is Scope.ALL
                        for lane in range(kernel.lanes) if crosses else [block // blocks]:
                            use = len(uses[e.name]) - 1
                            program.append(_op("store", e, use, block, of_rank(lane)))
    return programs


def _reads(
    chosen: Sequence[Exchange], uses: dict, step: str, token: int, layer: int
) -> Iterator[tuple[Exchange, Of, int]]:
    for e in chosen:
        for reader in e.readers:
            layers = e.layers if reader.layers is None else reader.layers
            if reader.step == step and (layers is None or layer in layers):
                wanted = (token, layer - reader.delay)
                late = [n for n, at in enumerate(uses[e.name]) if at == wanted]
                yield e, reader.of, late[0] if reader.delay else len(uses[e.name]) - 1


def _waits(e: Exchange, of: Of, n: int, block: int, blocks: int, count: int, where: str) -> list[Op]:
    """For the rows of other blocks."""
    lane = range(block // blocks * blocks, block // blocks * blocks + blocks)
    rows = lane if of is Of.LANE or e.scope is Scope.SHARD else range(count)
    kind = "load" if e.mark is Mark.GUARDED else "wait"
    mine = (r for r in rows if r != block and (of is not Of.OWN or r % blocks == block % blocks))
    return [_op(kind, e, n, row, where) for row in mine]


def _op(kind: str, e: Exchange, n: int, row: int, where: str) -> Op:
    phase = (n // e.buffers + 1) & 1 if e.mark is Mark.PHASE else 0
    return Op(kind, (f"{e.name}{where}", n % e.buffers, row), (n, phase), e.mark is Mark.PHASE)
