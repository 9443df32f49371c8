"""The clocks of several GPUs brought together: offset and drift of each beside the first one's, and the error of both.

The first GPU reads its clock, asks, and reads it again when it hears the answer (RankRecording). The other one's
reading was taken in between: at the middle, give or take half of what lies between, and a step of each clock.
"""

from dataclasses import dataclass
from math import gcd

import numpy as np


@dataclass(frozen=True)
class Alignment:
    """How one GPU's clock stands to the first one's: the line through two pairs of readings.

    `error` holds between the two pairs, for clocks that drift evenly.
    """

    own_ns: tuple[int, int]  # this GPU's clock, before and behind
    first_ns: tuple[int, int]  # the first one's, at the same moments
    error: float  # ns: how far a moment may lie from where the line has it
    drift_error: float  # of `drift`

    @property
    def offset(self) -> int:
        """ns: what this clock is ahead before."""
        return self.own_ns[0] - self.first_ns[0]

    @property
    def drift(self) -> float:
        """How much faster this clock runs: 1e-6 is a microsecond a second."""
        own, first = (behind - before for before, behind in (self.own_ns, self.first_ns))
        return (own - first) / first

    def on_first(self, ns: np.ndarray) -> np.ndarray:
        """Times from own_ns[0] on, as times from first_ns[0] on."""
        return ns / (1 + self.drift)


def align(before: np.ndarray, behind: np.ndarray) -> Alignment:
    """Of one GPU's readings, int64 [rounds, 3] each: the quickest answer counts."""
    quickest = [readings[np.argmin(readings[:, 2] - readings[:, 0])] for readings in (before, behind)]
    both = np.concatenate([before, behind])
    steps = sum(_step(both[:, at]) for at in ([0, 2], [1]))
    errors = [float(heard - asked) / 2 + steps for asked, _, heard in quickest]
    middles = [int(asked + (heard - asked) // 2) for asked, _, heard in quickest]
    own_ns, first_ns = (int(quickest[0][1]), int(quickest[1][1])), (middles[0], middles[1])
    own, first = own_ns[1] - own_ns[0], first_ns[1] - first_ns[0]
    drift_error = sum(errors) * own / first**2  # what an error of `first` is in own / first
    return Alignment(own_ns, first_ns, max(errors), drift_error)


def _step(readings: np.ndarray) -> int:
    """ns: the grain of a clock."""
    return gcd(*np.diff(np.unique(readings)).tolist())
