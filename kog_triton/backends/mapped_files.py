"""Copies of the host's memory, in which the pages of mapped files are read and not touched.

A page that is touched first costs a fault, which one thread takes at 2 GB/s and many take no faster where a virtual
machine pays for each (benchmarks/cuda-log.md#upload). Reads of the same file copy out of the page cache without one, by
several threads at once. Which file memory belongs to, and where in it, is what Linux says of this process: so whoever
maps weights need not know of it. Other memory is copied as it is, and so are pages that were written to.
"""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kog_triton.backends.interrupts import interrupts_deferred
from kog_triton.errors import FileError, first_line

Tensor = torch.Tensor
MAPS = Path("/proc/self/maps")  # "first-last rights offset device inode      path", addresses in hexadecimal
# A number of 64 bits for each page. Bit 63: the page is in memory; 62: it is swapped out; 61: it is a file's still.
PAGEMAP = Path("/proc/self/pagemap")
THREADS = 8
LEAST_BYTES = 256 << 10  # of a thread's part


@dataclass(frozen=True)
class Mapping:
    """Addresses `first` to `last` of this process show a file from `offset` on."""

    first: int
    last: int
    offset: int
    path: str
    fd: int
    holder: Tensor  # a view of it: while there is one, no other memory can come to lie at these addresses

    def fill(self, to: memoryview, address: int) -> None:
        """Read what lies at the address; FileError if the file gives less."""
        at = address - self.first + self.offset
        while len(to):
            try:
                count = os.preadv(self.fd, [to], at)
            except OSError as error:
                raise FileError(f"{self.path}: cannot be read at byte {at}: {first_line(error)}") from error
            if not count:
                raise FileError(
                    f"{self.path}: ends at byte {at}, which held weights when it was opened: load the model again"
                )
            to, at = to[count:], at + count


class MappedFiles:
    """`copy` bytes of host memory. `close` ends the threads and closes the files; what was copied stays."""

    def __init__(self, threads: int = THREADS) -> None:
        self._threads = threads
        self._readers: ThreadPoolExecutor | None = None
        self._mappings: list[Mapping] = []
        self._pagemap: int | None = None
        self.bytes_read = 0  # that came from files

    def copy(self, source: Tensor, to: Tensor) -> None:
        """uint8 [n] each, contiguous, of the host; FileError if the file behind `source` cannot be read."""
        mapping = self._mapping(source)
        count, view = len(source), to.numpy().data
        if mapping is None or self._are_written(source.data_ptr(), count):
            to.copy_(source)
            return
        self.bytes_read += count
        each = max(LEAST_BYTES, -(-count // self._threads))
        if each >= count:
            mapping.fill(view, source.data_ptr())
            return
        first = source.data_ptr()
        with interrupts_deferred():
            self._fill(mapping, [(view[at : at + each], first + at) for at in range(0, count, each)])

    def close(self) -> None:
        with interrupts_deferred():
            self._close_readers()
            for mapping in self._mappings:
                os.close(mapping.fd)
            if self._pagemap is not None:
                os.close(self._pagemap)
            self._mappings, self._pagemap = [], None

    def _fill(self, mapping: Mapping, parts: list[tuple[memoryview, int]]) -> None:
        """Each part is memory and the address that it is a copy of. Behind an error no thread writes to any."""
        if self._readers is None:
            self._readers = ThreadPoolExecutor(self._threads, "kog-read")
        try:
            for part in [self._readers.submit(mapping.fill, *part) for part in parts]:
                part.result()
        except BaseException:
            self._close_readers()
            raise

    def _close_readers(self) -> None:
        if self._readers is not None:
            self._readers.shutdown(cancel_futures=True)
        self._readers = None

    def _are_written(self, address: int, count: int) -> bool:
        """Whether a page of a private mapping was written to, so that it is no longer what the file holds."""
        page = os.sysconf("SC_PAGE_SIZE")
        first, last = address // page, -(-(address + count) // page)
        try:
            if self._pagemap is None:
                self._pagemap = os.open(PAGEMAP, os.O_RDONLY | os.O_CLOEXEC)
            flags = np.frombuffer(os.pread(self._pagemap, 8 * (last - first), 8 * first), np.uint64)
        except OSError:
            return True
        states = flags >> np.uint64(61)
        return len(states) < last - first or bool(np.any((states == 4) | (states & 2 != 0)))

    def _mapping(self, source: Tensor) -> Mapping | None:
        first = source.data_ptr()
        last = first + len(source)
        for known in self._mappings:
            if known.first <= first and last <= known.last:
                return known
        found = _find(first, last, source)
        if found is not None:
            self._mappings.append(found)
        return found


def _find(first: int, last: int, holder: Tensor) -> Mapping | None:
    """The mapping of a file that holds these addresses, opened; None if they are no file's that can be opened again."""
    try:
        lines = MAPS.read_text().splitlines()
    except OSError:  # not Linux
        return None
    for line in lines:
        begin, _, rest = line.partition("-")
        if int(begin, 16) > first:
            break
        end, _, offset, device, inode, *path = rest.split(maxsplit=5)
        if last <= int(end, 16):
            if not path or inode == "0":
                return None
            fd = _open(path[0], device, int(inode))
            if fd is None:
                return None
            return Mapping(int(begin, 16), int(end, 16), int(offset, 16), path[0], fd, holder)
    return None


def _open(path: str, device: str, inode: int) -> int | None:
    """Opens a mapped file by its name, if that name is still the mapped file's: otherwise only the mapping shows it."""
    major, minor = (int(part, 16) for part in device.split(":"))
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return None  # pinned memory is a device's: to open that may do more than to read
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    said = os.fstat(fd)
    if (said.st_dev, said.st_ino) == (os.makedev(major, minor), inode):
        return fd
    os.close(fd)
    return None
