"""What answers in blocks share: reasoning, text and calls one after the other, each opened, filled and closed."""

from abc import ABC, abstractmethod
from typing import ClassVar

from kog_triton.server.samples import News
from kog_triton.server.told import Told
from kog_triton.text.tool_calls import ToolCall


class BlockStream(ABC):
    """Takes news in and gathers events. A subclass says how its API opens, fills and closes a block."""

    REASONING: ClassVar[str]  # kinds of blocks, by the API's names
    TEXT: ClassVar[str]

    def __init__(self, told: Told) -> None:
        self._told = told
        self._open = False  # the last block, to more text
        self._events: list[bytes] = []

    def event(self, news: list[News], elapsed_s: float) -> bytes:
        self.take(news)
        return self._take_events()

    def take(self, news: list[News]) -> None:
        for one in news:
            delta = self._told.take(one)
            if delta.reasoning:
                self._add_text(self.REASONING, delta.reasoning)
            if delta.content:
                self._add_text(self.TEXT, delta.content)
            for call in delta.calls:
                self._close()
                self._add_call(call)
            if self._told.output is not None:
                self._close(cut=self._told.finish_reason == "length")

    @abstractmethod
    def _add_text(self, kind: str, text: str) -> None:
        """Add to the open block if it is of this kind, else to a new one."""

    @abstractmethod
    def _add_call(self, call: ToolCall) -> None:
        """A block of its own, whole."""

    @abstractmethod
    def _close(self, cut: bool = False) -> None:
        """The open block, if one is. `cut`: there was no room for its end."""

    def _take_events(self) -> bytes:
        events, self._events = b"".join(self._events), []
        return events
