"""What the Triton kernel may do with the memory behind each of its arguments, access by access.

By LLVM's memory model for gfx942 a load or store is of agent scope with sc1, of system scope with sc0 and sc1; an
atomic acts in the L2 of all XCDs, and is of system scope with sc1 (its sc0 asks for the old value).
"""

from collections import Counter
from collections.abc import Iterable
from functools import cache

from kog_triton.backends.triton.kernel.pointers import Pointers
from tests.lib.gfx942.addresses import Access, accesses
from tests.lib.gfx942.code_object import CodeObject
from tests.lib.gfx942.gates import PLAIN, STREAMED, SYSTEM

KERNEL = "decode_kernel"
NAMES = (*Pointers._fields, "scratch", "profile scratch")  # Triton adds two, which these kernels do not use
AGENT = (0, 1, 0)
# What is allowed, by the kind of access; a scalar load goes through a cache that no fence of this kernel empties.
FIXED = {"S_LOAD": {PLAIN}, "LOAD": {PLAIN, STREAMED}}  # nobody writes it while a kernel runs
WORDS = {"LOAD": {AGENT, SYSTEM}, "STORE": {AGENT, SYSTEM}}  # blocks exchange them
HOST = {"LOAD": {SYSTEM}, "STORE": {SYSTEM}}
FENCED = {"LOAD": {PLAIN}, "STORE": {PLAIN, AGENT, SYSTEM}}  # written by other blocks, behind two fences (docs/SYNC.md)
OWN = {"LOAD": {PLAIN}, "STORE": {PLAIN}}  # a block reads what it alone wrote, or all blocks wrote alike
COUNTS = {"ATOMIC": {PLAIN, SYSTEM}}
FENCES = COUNTS | {"STORE": {PLAIN}}  # of a word that nobody reads (sync.py)
RULES = {
    "model": (
        FIXED,
        ("kernarg", "weights", "half_weights", "embed", "half_embed", "gains", "biases", "qk_gains", "rope", "windows",
         "reduces"),
    ),
    "request": (FIXED, ("slot_order", "requests", "bias")),
    "words": (WORDS, ("words", "wide")),
    "host": (HOST, ("mailbox",)),
    "fenced": (FENCED, ("kv", "chunk", "half_chunk")),
    "own": (OWN, ("states", "tokens", "marks", "bans", "logits")),
    "waits": (OWN | COUNTS, ("error",)),  # a block's own record; who was first, by an atomic
    "fences": (FENCES, ("fences",)),
}  # fmt: skip
CLASS_OF = {name: kind for kind, (_, names) in RULES.items() for name in names}
SHARED = ("words", "host")


@cache
def accesses_of(code_object: CodeObject) -> list[Access]:
    return accesses(code_object, KERNEL, NAMES)


def wrong(found: Iterable[Access]) -> list[str]:
    """Every access whose argument is not known, or that its argument does not allow. One that may point into several
    has to be allowed by all."""
    out = []
    for one in found:
        what = f"{one.name} at {one.at:#x}"
        if not one.arguments:
            out.append(f"{what}: nothing is known of its address")
        for name in sorted(one.arguments):
            rule = RULES[CLASS_OF[name]][0] if name in CLASS_OF else {}
            if one.form not in rule.get(one.kind, ()):
                out.append(f"{what}: {one.kind} of {name} with sc0, sc1, nt {one.form}")
    return out


def counted(found: Iterable[Access]) -> dict[str, int]:
    """How many accesses of each class there are, by kind and scope bits."""
    counts: Counter[str] = Counter()
    for one in found:
        classes = "+".join(sorted({CLASS_OF.get(name, name) for name in one.arguments}))
        bits = [bit for bit, on in zip(("sc0", "sc1", "nt"), one.form, strict=True) if on]
        counts[" ".join([f"{classes}: {one.kind}", *bits])] += 1
    return dict(sorted(counts.items()))
