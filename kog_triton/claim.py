"""One sample's claim on a slot: it waits in the queue, has a slot, has ended.

A claim is where the backend's steps arrive. It notes every token as it comes, whether or not anybody reads, so that
with the last step it knows what the slot holds and frees it at once.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from kog_triton.backends.mailbox import Failure, Inbox, Request, Step

log = logging.getLogger(__name__)
WAITS = -1  # the slot of a request that has none yet


class Claim(Inbox):
    """`request` has the slot WAITS and nothing cached until `admit`.

    salt      only prompts with the same one may share keys and values
    ended     called once, as the backend's last word arrives: the claim, and the ids that its slot holds now
    withdraw  called by a reader of a cancelled claim: ends those that still wait
    check     called by every reader: raises where nothing will ever come, in a forked process
    """

    def __init__(
        self,
        request: Request,
        salt: str,
        ended: "Callable[[Claim, list[int]], None]",
        withdraw: Callable[[], None],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self.request, self.salt, self.ended = request, salt, False
        self._on_end, self._withdraw, self._check = ended, withdraw, check
        self._on_news: Callable[[], None] | None = None
        self._made: list[int] = []
        self.submitted = time.perf_counter()
        self.queue_s: float | None = None  # that it waited for its slot; None as long as it waits

    def admit(self, slot: int, cached: int, queue_s: float | None = None) -> None:
        """`queue_s` as the engine says it, where that is another process."""
        self.queue_s = time.perf_counter() - self.submitted if queue_s is None else queue_s
        self.request = replace(self.request, slot=slot, cached=cached)
        self._tell_news()

    @property
    def num_made(self) -> int:
        """Tokens that the backend has made, read or not."""
        return len(self._made)

    def listen(self, news: Callable[[], None]) -> None:
        """Call `news` now and whenever there may be something to read, in whichever thread brings it.

        It must not wait: the thread may be the engine's and hold its lock. What it raises there is logged.
        """
        self._on_news = news
        news()

    def cancel(self) -> None:
        """Ask for an early end, from any thread, a signal handler or the collector."""
        self.cancelled = True
        self._steps.put(None)
        self._tell_news()

    def push(self, step: Step | Failure) -> None:
        if isinstance(step, Failure):
            self._end([])
        else:
            if step.token >= 0:
                self._made.append(step.token)
            if step.finish is not None:
                self._end([*self.request.prompt, *self._made][: step.held])
        super().push(step)
        self._tell_news()

    def read(self, timeout: float | None = None) -> list[Step | Failure]:
        self._check()
        if self.cancelled:
            self._withdraw()
        return super().read(timeout)

    def _tell_news(self) -> None:
        try:
            if self._on_news is not None:
                self._on_news()
        except Exception:  # the listener's own: other requests share this thread
            log.exception("a request's listener failed")

    def _end(self, held: list[int]) -> None:
        self.ended = True
        self._on_end(self, held)
