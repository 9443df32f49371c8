"""What one run over one target found, and the memory a case may take."""

from dataclasses import dataclass, field

MEMORY_LIMIT = 4 << 30  # bytes of address space beyond what the child starts with


@dataclass
class Record:
    """What a run found. `faults` maps a signature to its first case and how often it came."""

    target: str
    seed: int
    cases: int = 0
    loaded: int = 0
    refused: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    slowest_case: int = -1
    peak_memory_mib: int = 0
    grown_memory_mib: int = 0  # the most that one child grew by
    faults: dict[str, dict[str, int]] = field(default_factory=dict)

    def add_fault(self, signature: str, case: int) -> None:
        self.faults.setdefault(signature, {"first_case": case, "count": 0})["count"] += 1
