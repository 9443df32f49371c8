"""Claims that wait for a slot: first come, first served, and no more of them than a bound.

Whoever has many requests keeps only as many in line as there are slots (LLM.generate), so that others come in between.
"""

from collections import deque

from kog_triton.backends.mailbox import Step
from kog_triton.claim import Claim
from kog_triton.errors import RequestError


class QueueFull(RequestError):
    """As many requests wait as may."""


class RequestQueue:
    """The caller holds a lock around every call."""

    def __init__(self, most: int) -> None:
        self._most, self._claims = most, deque[Claim]()

    def __len__(self) -> int:
        return len(self._claims)

    def add(self, claim: Claim) -> None:
        """To the end of the line; QueueFull if it is as long as it may be."""
        self.end_cancelled()
        if len(self) >= self._most:
            raise QueueFull(
                f"every slot is busy and {self._most} requests wait: try again later, or open the LLM "
                "with a larger num_slots or max_waiting"
            )
        self._claims.append(claim)

    def next(self) -> Claim:
        """The claim that has waited longest, which leaves the line."""
        return self._claims.popleft()

    def end_cancelled(self) -> None:
        """Cancelled claims leave the line."""
        claims, self._claims = self._claims, deque()
        for claim in claims:
            if claim.cancelled:
                claim.push(Step(-1, "cancel"))
            else:
                self._claims.append(claim)
