"""An event loop whose time passes only while everybody sleeps, and then at once."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class FakeTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        select = self._selector.select

        def skip(timeout: float | None = None) -> Any:
            assert timeout is not None, "everybody waits for what will not come"
            self._now += timeout
            return select(0)

        self._selector.select = skip

    def time(self) -> float:
        return self._now


def run(work: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=FakeTimeLoop) as runner:
        return runner.run(work)
