"""KCCL's all-reduce between ranks as programs of the machine of protocol_model.py: each rank has words of its own.

A thread is a block of a rank. It sends its row of a use to every rank's words and waits for all rows in its own rank's.
"""

from kog_triton.backends.cuda.layout.collectives import Policy
from tests.lib.protocol_model import NOTHING, Op, Value, Word

POISON: Value = NOTHING


def all_reduces(
    policy: Policy,
    ranks: int = 2,
    blocks: int = 1,
    uses: int = 5,
    delay: int = 0,
    buffers: int = 0,
    fence: bool = True,
    clears: bool = True,
    still: bool = False,
) -> list[list[Op]]:
    """A program for each block of each rank.

    buffers  other than the policy's;  still   a phase that never flips
    clears   whether poison is put back, and `fence` whether behind a fence
    """
    ahead = max(1, delay)
    buffers = buffers or policy.buffers * ahead
    everyone = [(rank, block) for rank in range(ranks) for block in range(blocks)]

    def word(reader: int, use: int, row: int) -> Word:
        return f"rank {reader}", use % buffers, row

    def value(use: int) -> Value:
        phase = 1 if policy.empty or still else (use // buffers + 1) & 1
        return use, phase

    programs = []
    for me, (rank, block) in enumerate(everyone):
        program: list[Op] = []

        def fetch(use: int, to: list[Op], me: int = me, rank: int = rank) -> None:
            marked = policy.name != "EpochPairs"
            for row in range(len(everyone)):
                if row != me:
                    to.append(Op("wait", word(rank, use, row), value(use), marked))

        for use in range(uses):
            if delay and use >= delay:
                fetch(use - delay, program)
            if policy.empty and clears:  # among its rank's words the rows of the blocks with its place
                own = [row for row in range(block, len(everyone), blocks) if row != me or blocks > 1]
                program += [Op("store", word(rank, use + ahead, row), POISON) for row in own]
                program += [Op("fence")] if fence else []
            others = [to for to in range(ranks) if to != rank or blocks > 1]  # who reads that row
            program += [Op("store", word(to, use, me), value(use)) for to in others]
            if not delay:
                fetch(use, program)
        programs.append(program)
    return programs


def pass_exchanges(
    ranks: int = 2, uses: int = 5, buffers: int = 2, release: bool = True, acquire: bool = True
) -> list[list[Op]]:
    """The exchanges of a pass of short prompts (include/kog/prompt/short_pass.h), a token's: a program a rank, which
    stores its sums into every rank's memory, behind a fence their number, and reads all sums behind all numbers."""
    programs = []
    for rank in range(ranks):
        program: list[Op] = []
        others = [to for to in range(ranks) if to != rank]
        for use in range(uses):
            sums = use % buffers
            program += [Op("store", (f"sums of {to}", sums, rank), (use, 0)) for to in others]
            program += [Op("fence")] if release else []
            program += [Op("store", (f"arrived at {to}", 0, rank), (use, 0)) for to in others]
            program += [Op("reach", (f"arrived at {rank}", 0, of), (use, 0)) for of in others]
            program += [Op("fence")] if acquire else []
            program += [Op("load", (f"sums of {rank}", sums, of), (use, 0)) for of in others]
        programs.append(program)
    return programs
