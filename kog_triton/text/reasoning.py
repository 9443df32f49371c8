"""What a model thinks before it answers, told apart from the answer as the text streams in.

    <think> reasoning </think> answer

Some templates open the block in the prompt: then the text begins inside. White space around the reasoning and before
the answer is dropped. What may still become a tag is held back, so how a stream was cut cannot change the result.
"""

from enum import Enum, auto
from typing import NamedTuple

from kog_triton.text.stop import overlap

OPEN, CLOSE = "<think>", "</think>"


class ReasoningDelta(NamedTuple):
    reasoning: str = ""
    content: str = ""


class _State(Enum):
    BEFORE = auto()  # a block may open
    INSIDE = auto()
    GAP = auto()  # behind the block, nothing but white space so far
    ANSWER = auto()


class ReasoningParser:
    """`feed` text as it comes, then `finish`. One for each answer; `inside`: the prompt has opened the block."""

    def __init__(self, inside: bool = False) -> None:
        self._state = _State.INSIDE if inside else _State.BEFORE
        self._held = ""
        self._thinks = False  # some reasoning is out

    def feed(self, text: str) -> ReasoningDelta:
        self._held += text
        reasoning = content = ""
        if self._state is _State.BEFORE:
            self._open()
        if self._state is _State.INSIDE:
            reasoning = self._think()
        if self._state is _State.GAP:
            self._held = self._held.lstrip()
            if self._held:
                self._state = _State.ANSWER
        if self._state is _State.ANSWER:
            content, self._held = self._held, ""
        return ReasoningDelta(reasoning, content)

    def finish(self) -> ReasoningDelta:
        """The rest, once no more text comes: a block that never ended is reasoning."""
        held, self._held = self._held, ""
        if self._state is _State.INSIDE:
            held = held.rstrip() if self._thinks else held.strip()
            return ReasoningDelta(held)
        return ReasoningDelta(content=held)

    def _open(self) -> None:
        seen = self._held.lstrip()
        if seen.startswith(OPEN):
            self._state, self._held = _State.INSIDE, seen[len(OPEN) :]
        elif not OPEN.startswith(seen):
            self._state = _State.ANSWER

    def _think(self) -> str:
        """The reasoning that is certain; white space at its end waits for what follows."""
        if not self._thinks:
            self._held = self._held.lstrip()
        end = self._held.find(CLOSE)
        if end >= 0:
            said, self._held = self._held[:end].rstrip(), self._held[end + len(CLOSE) :]
            self._state = _State.GAP
            return said
        said = self._held[: len(self._held) - overlap(self._held, CLOSE)].rstrip()
        self._held = self._held[len(said) :]
        self._thinks |= bool(said)
        return said
