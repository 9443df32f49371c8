"""What a kernel takes of a multiprocessor, as the driver that loaded it says.

A backend offers it by one more method, `resources` (`ResourceReporter`); of the others nothing is said.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class Resources:
    registers: int  # of a thread
    local_bytes: int  # of a thread: its stack, with what the compiler spilled from registers
    shared_bytes: int  # of a block

    def __str__(self) -> str:
        return (
            f"{self.registers} registers and {self.local_bytes} bytes of local memory a thread, "
            f"{self.shared_bytes:,} bytes of shared memory a block"
        )


@runtime_checkable
class ResourceReporter(Protocol):
    """A backend whose kernel's resources are known."""

    def resources(self) -> Resources | None:
        """Of the kernel that decodes, as it was launched last; None before that, and off a GPU."""
        ...
