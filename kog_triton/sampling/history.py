"""What one request has seen so far: the ids its penalties apply to, and the output's tail.

Grows by one token at a time; nothing here costs more as the context gets longer, except that an id
seen for the first time takes one more place in the arrays.
"""

from collections.abc import Sequence

import numpy as np


class History:
    """Prompt ids and output ids of one request. `append` each token once it is chosen."""

    def __init__(self, prompt: Sequence[int]) -> None:
        distinct = np.unique(np.asarray(prompt, np.int64))
        self._ids = np.zeros(max(16, 2 * distinct.size), np.int64)
        self._counts = np.zeros(self._ids.size, np.int64)
        self._ids[: distinct.size] = distinct
        self._place = {int(token): place for place, token in enumerate(distinct)}
        self.output: list[int] = []

    def append(self, token: int) -> None:
        place = self._place.setdefault(token, len(self._place))
        if place == self._ids.size:
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token
        self._counts[place] += 1
        self.output.append(token)

    @property
    def seen(self) -> np.ndarray:
        """Distinct ids of prompt and output: int64 [seen]."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> np.ndarray:
        """How often each of `seen` is in the output: int64 [seen]."""
        return self._counts[: len(self._place)]

    def ends_with(self, ids: Sequence[int]) -> bool:
        """Whether the output ends with these ids (true of none)."""
        return not ids or tuple(self.output[-len(ids) :]) == tuple(ids)
