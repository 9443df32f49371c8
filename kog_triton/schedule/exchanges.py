"""What the blocks of a kernel exchange, as data: the room it takes, and the proof that no block overtakes another.

A kernel is a walk: steps that every block takes in one order, a layer's and then one of the ends of a token. In a step
a block waits for the exchanges that it reads, and then writes those that it produces. An exchange has rows, which
blocks own; its `buffers` rotate. `lay_out_regions` gives every exchange its words, `check_kernel` proves, by one
argument for all of them (docs/SYNC.md says what it rests on):

    order    a block that has read a word knows all that the writer knew when it wrote it
    needed   before a word is written again, its writer knows that all readers have read it
             and that the owner of the last use has written it, as does whoever waits for a phase
    wait     every word that a step waits for was written earlier in the walk: no wait is circular

Blocks are followed through the walk, PLACES a lane in two lanes, or in two ranks of as many: more of each pass on more
knowledge, not less.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache

import numpy as np

from kog_triton.errors import ModelError
from kog_triton.model.spec import ModelSpec
from kog_triton.schedule.schedule import Schedule, Scope

Array = np.ndarray
Token = tuple[range, tuple[str, ...]]  # its layers and its end
PLACES = 7  # blocks of a lane that the proof follows, among which owners of rows rotate
TOKENS = 4  # that the proof follows


class Mark(IntEnum):
    """How a reader knows that a word is the one it waits for."""

    PHASE = 0  # a bit that flips whenever its buffer is used again
    NUMBER = 1  # the number of the exchange, which never comes again
    GUARDED = 2  # it does not wait: another exchange, between two fences, tells of it


class Who(IntEnum):
    """Which blocks write an exchange, or read it."""

    EACH = 0  # every block; of a layer's rows the owners rotate
    FEW = 1  # the same blocks every time
    ONE = 2
    SOME = 3  # any: whoever reads from them, or as one of them, has learned nothing


class Of(IntEnum):
    """Which rows a reader reads: of its lane or of all lanes, as the exchange's scope says."""

    WHOLE = 0
    LANE = 1  # all of its own lane
    OWN = 2  # in every lane the rows that it owns itself
    SOME = 3


@dataclass(frozen=True)
class Reader:
    """A step that waits for an exchange: in the layers that write it, or in `layers`, for what was written
    `delay` layers or `tokens` tokens earlier."""

    step: str
    of: Of = Of.WHOLE
    who: Who = Who.EACH
    layers: tuple[int, ...] | None = None
    delay: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Exchange:
    """Words that blocks of one step write, its producer, and blocks of other steps read; without a producer, mere room.

    words    of a row; 0 if this model exchanges nothing here, None if it lies outside the words
    rows     of a buffer
    layers   in which it is written; None: in all
    """

    name: str
    producer: str
    readers: tuple[Reader, ...]
    words: int | None
    rows: int = 1
    buffers: int = 1  # 0: no word is ever written again
    mark: Mark = Mark.PHASE
    who: Who = Who.EACH
    scope: Scope = Scope.SHARD
    layers: tuple[int, ...] | None = None
    restarts: bool = False  # every token begins with the first buffer
    region: str = ""  # that it shares with others; its own if empty

    @property
    def is_used(self) -> bool:
        return self.words != 0 and self.producer != ""


@dataclass(frozen=True)
class Fence:
    """Between what blocks wait for in a step and what they write, in all layers or in those given."""

    step: str
    layers: tuple[int, ...] | None = None
    who: Who = Who.EACH


@dataclass(frozen=True)
class Kernel:
    """The walk of a kernel's blocks: the steps of a layer, then one of the ends of a token."""

    lanes: int
    layers: int
    exchanges: tuple[Exchange, ...]
    layer: tuple[str, ...]
    ends: tuple[tuple[str, ...], ...]
    fences: tuple[Fence, ...] = ()
    ranks: int = 1  # that hold as many lanes each

    def exchange(self, name: str) -> Exchange:
        return next(e for e in self.exchanges if e.name == name)


@dataclass(frozen=True)
class Region:
    """Words of one exchange: `buffers` x `rows` of `stride` words, the first at `offset`."""

    offset: int
    stride: int
    rows: int = 1
    buffers: int = 1

    @property
    def size(self) -> int:
        return self.stride * self.rows * self.buffers

    @property
    def end(self) -> int:
        return self.offset + self.size


def lay_out_regions(exchanges: Sequence[Exchange], align: int) -> dict[str, Region]:
    """Where every exchange lies: regions begin on lines of 32 words, rows at multiples of `align`."""
    regions: dict[str, Region] = {}
    at = 0
    for exchange in exchanges:
        if exchange.words is None:
            continue
        name = exchange.region or exchange.name
        stride = -(-exchange.words // align) * align
        buffers = max(1, exchange.buffers)
        if name in regions:  # after the buffers of the exchange that shares its region
            regions[name] = replace(regions[name], buffers=regions[name].buffers + buffers)
        else:
            regions[name] = Region(at, stride, exchange.rows, buffers)
        at = -(-regions[name].end // 32) * 32
    return regions


def layer_steps(schedule: Schedule, parts: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The schedule's stages of a layer in their order, each as the steps that a kernel makes of it."""
    stages = schedule.layer_stages
    return tuple(step for stage in stages for step in parts.get(stage.name, (stage.name,)))


def some(name: str, producer: str, readers: Sequence[str], words: int, rows: int, mark: Mark = Mark.PHASE) -> Exchange:
    """Of a lane, by some of its blocks for some of them."""
    to = tuple(Reader(step, Of.SOME) for step in readers)
    return Exchange(name, producer, to, words, rows, mark=mark, who=Who.SOME)


def cache_of(step: str) -> Exchange:
    """Keys and values of the tokens before: plain memory, in which a launch writes each row once."""
    before = (Reader(step, tokens=1),)
    return Exchange("cache", step, before, None, buffers=0, mark=Mark.GUARDED)


def distinct_layers(spec: ModelSpec) -> int:
    """Layers to follow: with lanes each may exchange something else."""
    return spec.num_layers if spec.num_lanes > 1 else min(2, spec.num_layers)


def check_kernel(kernel: Kernel, ends: bool = False) -> None:
    """ModelError naming the first exchange that nobody reads or writes, or whose buffers do not suffice.

    `ends`: those of tokens as well, which are the same for every model; the tests ask for them.
    """
    steps = set(kernel.layer).union(*kernel.ends)
    used = [e for e in kernel.exchanges if e.is_used]
    for exchange in used:
        readers = [r.step for r in exchange.readers]
        if exchange.producer not in steps:
            raise ModelError(f"{exchange.name}: nothing named {exchange.producer} writes it")
        if not readers or not steps.issuperset(readers):
            lost = [f" named {r}" for r in readers if r not in steps] or [""]
            raise ModelError(f"{exchange.name}: nothing{lost[0]} reads it")
    apart = distances(kernel, ends)
    for exchange in used:
        if exchange.mark is Mark.GUARDED and 0 in apart[exchange.name]:
            raise ModelError(f"{exchange.name}: {exchange.producer} and its readers lack a fence")
        if not _fit(apart[exchange.name], exchange.buffers):
            raise ModelError(
                f"{exchange.name}: {exchange.buffers} buffers rotate, and {exchange.producer} could "
                f"rewrite one before {', '.join(r.step for r in exchange.readers)} has read it"
            )


def fewest_buffers(kernel: Kernel, name: str) -> int:
    """The fewest buffers that suffice for an exchange, and no fewer than it has."""
    apart = distances(kernel)[name]
    least = kernel.exchange(name).buffers
    return next((b for b in range(least, max(apart, default=0) + 2) if _fit(apart, b)), least)


def _fit(apart: frozenset[int], buffers: int) -> bool:
    """Whether no two uses that must not share a buffer do; those 0 apart do whatever the number."""
    return 0 not in apart and all(buffers == 0 or distance % buffers for distance in apart)


def distances(kernel: Kernel, ends: bool = False) -> dict[str, frozenset[int]]:
    """Of each exchange by name: how many uses apart two may be that must not share a buffer."""
    used = (replace(e, words=1, rows=1, buffers=1) for e in kernel.exchanges if e.is_used)
    ranks = min(2, kernel.ranks)
    lanes = ranks * min(2, kernel.lanes // kernel.ranks) if ranks > 1 else min(2, kernel.lanes)
    return _distances(replace(kernel, lanes=lanes, ranks=ranks, exchanges=tuple(used)), ends)


@lru_cache(maxsize=64)
def _distances(kernel: Kernel, ends: bool) -> dict[str, frozenset[int]]:
    shortest = min(kernel.ends, key=len)
    runs: list[list[Token]] = [[(range(kernel.layers), shortest)] * TOKENS]
    if ends:
        # Two buffers take three tokens to come round. Layers between their ends would add knowledge alone.
        for three in itertools.product(kernel.ends, repeat=3):
            runs.append([(range(0), end) for end in three])
    found: dict[str, set[int]] = {e.name: set() for e in kernel.exchanges}
    for run in runs:
        _Run(kernel, found).walk(run)
    return {name: frozenset(apart) for name, apart in found.items()}


@dataclass
class _Use:
    """One use of an exchange. Row r is owner[r]'s; `read` says when a block last read a row, or -1."""

    token: int
    layer: int
    at: int  # when it was written
    last: int  # when it was last written or read
    owner: Array
    known: Array  # what each block knew then
    released: Array  # and what fences let pass on
    read: Array  # [row, block]


class _Run:
    """Blocks in step through a walk. known[b, c]: when c was where b knows that it has been; ordered[b, c]: the same of
    what c wrote outside of the words, which takes a fence of c's and one of b's."""

    def __init__(self, kernel: Kernel, found: dict[str, set[int]]) -> None:
        self.kernel, self.found, self.time = kernel, found, 0
        self.blocks = np.arange(kernel.lanes * PLACES)
        self.place, lane = self.blocks % PLACES, self.blocks // PLACES
        everywhere = np.ones((len(self.blocks), len(self.blocks)), bool)
        rank = lane // (kernel.lanes // kernel.ranks)
        self.near = {Scope.SHARD: lane[:, None] == lane, Scope.RANK: rank[:, None] == rank, Scope.ALL: everywhere}
        self.taking = {
            Who.EACH: self.place >= 0,
            Who.SOME: self.place >= 0,
            Who.FEW: self.place < 2,
            Who.ONE: self.blocks == 0,
        }
        self.known, self.ordered, self.released, self.heard = (-1 * everywhere for _ in range(4))
        self.uses: dict[str, list[_Use]] = {e.name: [] for e in kernel.exchanges}

    def walk(self, tokens: Sequence[Token]) -> None:
        for token, (layers, end) in enumerate(tokens):
            for layer in layers:
                for step in self.kernel.layer:
                    self.take(step, token, layer)
            for step in end:
                self.take(step, token, -1)

    def take(self, step: str, token: int, layer: int) -> None:
        """A step of all blocks: what they wait for, a fence, what is read after it, then what they write."""
        reads = list(self.reads_of(step, token, layer))
        self.pass_time()
        for exchange, reader, n in reads:
            if exchange.mark is not Mark.GUARDED:
                self.read(exchange, reader, n, layer)
        for fence in self.kernel.fences:
            if fence.step == step and (fence.layers is None or layer in fence.layers):
                who = self.part(layer) if fence.who is Who.SOME else self.taking[fence.who]
                own = self.blocks[who]
                self.ordered[own] = np.maximum(self.ordered, self.heard)[own]
                self.ordered[own, own] = self.time
                self.released[own] = self.ordered[own]
        for exchange, reader, n in reads:
            if exchange.mark is Mark.GUARDED:
                self.read(exchange, reader, n, layer)
        self.pass_time()
        for exchange in self.kernel.exchanges:
            if exchange.producer == step and (exchange.layers is None or layer in exchange.layers):
                self.write(exchange, token, layer)

    def pass_time(self) -> None:
        self.time += 1
        self.known[self.blocks, self.blocks] = self.time

    def reads_of(self, step: str, token: int, layer: int) -> Iterator[tuple[Exchange, Reader, int]]:
        """What the step reads, and which use of it."""
        for exchange in self.kernel.exchanges:
            for reader in exchange.readers:
                layers = exchange.layers if reader.layers is None else reader.layers
                if reader.step != step or not (layers is None or layer in layers):
                    continue
                wanted = token - reader.tokens, layer - reader.delay
                if wanted[0] < 0:
                    continue  # the cache before the first token
                uses = self.uses[exchange.name]
                n = len(uses) - 1
                if reader.delay or reader.tokens:  # not the last use
                    while n >= 0 and (uses[n].token, uses[n].layer) != wanted:
                        n -= 1
                if n < 0:
                    raise ModelError(f"{exchange.name}: {step} waits for it before anybody has written it")
                yield exchange, reader, n

    def owners(self, exchange: Exchange, layer: int) -> Array:
        """The block that owns each row."""
        if exchange.who is not Who.EACH or layer < 0:
            return self.blocks
        return self.blocks - self.place + (self.place + layer) % PLACES

    def read(self, exchange: Exchange, reader: Reader, n: int, layer: int) -> None:
        use = self.uses[exchange.name][n]
        scope = Scope.SHARD if reader.of is Of.LANE else exchange.scope
        rows = self.near[scope] & self.taking[reader.who]  # [row, block]
        rows = rows & self.taking[exchange.who][use.owner][:, None]
        if reader.of is Of.OWN:
            rows = rows & ((self.owners(exchange, layer) % PLACES)[:, None] == self.place)
        if exchange.mark is Mark.PHASE:
            self.keep_apart(exchange, n, rows, reads=False)
        # A use that is read late may be gone by then.
        self.found[exchange.name].update(range(1, len(self.uses[exchange.name]) - n))
        use.read[rows] = use.last = self.time
        some = Who.SOME in (reader.who, exchange.who) or reader.of is Of.SOME
        if some:
            rows = rows & self.part(layer)[:, None] & self.part(layer)
        if exchange.mark is Mark.GUARDED:
            if not (use.at <= self.ordered.T)[use.owner][rows].all():
                self.found[exchange.name].add(0)
            return
        if not some:
            self.learn(self.known, use.known, use, rows)
        self.learn(self.heard, use.released, use, rows)

    def part(self, layer: int) -> Array:
        """The blocks that take part where SOME do."""
        return (self.place - layer) % PLACES < 2

    def learn(self, mine: Array, theirs: Array, use: _Use, rows: Array) -> None:
        """What the owners of rows[row, block] knew when they wrote them, the blocks know."""
        np.maximum(mine, np.where(rows.T[:, :, None], theirs[use.owner], -1).max(1), out=mine)

    def write(self, exchange: Exchange, token: int, layer: int) -> None:
        owner = self.owners(exchange, layer)
        rows = self.taking[exchange.who][owner][:, None] & (
            self.near[exchange.scope] if exchange.who is Who.SOME else owner[:, None] == self.blocks
        )
        uses = self.uses[exchange.name]
        blank = np.full(rows.shape, -1)
        known, released = self.known.copy(), self.released.copy()
        uses.append(_Use(token, layer, self.time, self.time, owner, known, released, blank))
        self.keep_apart(exchange, len(uses) - 1, rows, reads=True)

    def keep_apart(self, exchange: Exchange, n: int, rows: Array, reads: bool) -> None:
        """Note the earlier uses whose buffer use n must not share: a block of rows[row, block] does not know that they
        were written or, if it is about to write (`reads`), that they were read."""
        uses = self.uses[exchange.name]
        sure = self.known[self.near[exchange.scope]].min()
        for m in range(n - 1, -1, -1):
            use = uses[m]
            if use.last <= sure or self.has_come(exchange, use, rows, reads):
                continue
            again = exchange.restarts and use.token != uses[n].token
            self.found[exchange.name].add(0 if again else n - m)

    def has_come(self, exchange: Exchange, use: _Use, rows: Array, reads: bool) -> bool:
        """Whether blocks [row, block] know that each row of a use was written and, with `reads`, read."""
        known = self.known
        if exchange.who is Who.SOME:
            near = self.near[exchange.scope]
            written = (known >= use.at)[near].all()
        else:
            written = (use.at <= known.T)[use.owner][rows].all()
        if not reads or not written:
            return bool(written)
        # of every row: the block that is about to write it, and whoever read it
        return bool((~rows.T[:, :, None] | (known[:, None, :] >= use.read)).all())
