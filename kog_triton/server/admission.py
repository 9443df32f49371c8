"""Which requests may enter: as many as there are slots and places in line, and none once the server drains."""

from collections.abc import Iterator
from contextlib import contextmanager

from kog_triton.server.problems import Problem


class Admission:
    """`most` requests at once; asked before a request costs anything."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.num_inside = 0
        self.num_refused = 0
        self.draining = False

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Inside, the request has its place; Problem 503 if there is none."""
        if self.draining:
            raise Problem(503, "the server is shutting down: send it elsewhere", code="draining", retry=True)
        if self.num_inside >= self._most:
            self.num_refused += 1
            raise Problem(503, f"{self._most} requests run or wait: try again later", code="queue_full", retry=True)
        self.num_inside += 1
        try:
            yield
        finally:
            self.num_inside -= 1
