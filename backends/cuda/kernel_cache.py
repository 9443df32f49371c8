"""Compiled kernels on disk: a file a key, found damaged or not at all rather than wrong, and no more of them than fit.

    file    the cubin, then the SHA-256 of it
    place   $XDG_CACHE_HOME/kog_triton/cuda, or ~/.cache/kog_triton/cuda

A kernel is written beside its place and renamed into it, so that a reader never sees half of one. What cannot be
read, or written for the next process, costs a compilation: the log `kog_triton.compilers` says so, and nothing fails.
"""

import hashlib
import logging
import os
import time
from contextlib import suppress
from pathlib import Path

log = logging.getLogger("kog_triton.compilers")
MOST_BYTES = 256 << 20  # of all kernels: some hundred, of 0.2 to 2 MB each
DRAFT = ".part"
DRAFT_S = 3600.0  # after which a draft is a dead process's
DIGEST_BYTES = hashlib.sha256().digest_size
_unwritten: dict[str, bytes] = {}  # by key: this process compiles them once all the same


class Damaged(Exception):
    """Of a file that is not what `write` wrote."""


def cache_folder() -> Path:
    """Where kernels are kept; RuntimeError without XDG_CACHE_HOME for a user who has no home."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kog_triton" / "cuda"


def load(key: str) -> bytes | None:
    """The kernel that was kept under a key, which makes it the one used last; None if there is none."""
    if key in _unwritten:
        return _unwritten[key]
    try:
        place = _place(key)
        cubin = read(place)
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError) as error:
        log.warning("no kept kernel can be read: %s", error)
        return None
    except Damaged as error:
        log.warning("the kept kernel %s: it is compiled again", error)
        with suppress(OSError):
            place.unlink()
        return None
    with suppress(OSError):
        os.utime(place)
    return cubin


def keep(key: str, cubin: bytes) -> None:
    """Keep a kernel under a key; those that were used longest ago make room for it."""
    try:
        write(_place(key), cubin)
        _make_room(cache_folder())
    except (OSError, RuntimeError) as error:
        if not _unwritten:  # of several kernels the reason is the same
            log.warning(
                "compiled kernels cannot be kept, so that the next start compiles them again: %s; set XDG_CACHE_HOME "
                "to a folder that can be written to",
                error,
            )
        _unwritten[key] = cubin


def _place(key: str) -> Path:
    return cache_folder() / f"{key}.cubin"


def read(place: Path) -> bytes:
    """The kernel in a file. OSError, or Damaged."""
    data = place.read_bytes()
    cubin, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    if hashlib.sha256(cubin).digest() != digest:
        raise Damaged(f"{place} is damaged")
    return cubin


def write(place: Path, cubin: bytes) -> None:
    """A kernel's file, which others may read as any other that this user writes."""
    place.parent.mkdir(parents=True, exist_ok=True)
    draft = place.with_name(f"{os.urandom(8).hex()}{DRAFT}")
    number = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)  # less the umask
    try:
        with os.fdopen(number, "wb") as file:
            file.write(cubin + hashlib.sha256(cubin).digest())
        os.replace(draft, place)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft)
        raise


def _make_room(folder: Path) -> None:
    """Remove what dead processes left, and what was used longest ago until the others fit MOST_BYTES."""
    kept = []
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # another process makes room
            found = path.stat()
            if path.suffix == ".cubin":
                kept.append((found.st_mtime_ns, found.st_size, path))
            elif path.suffix == DRAFT and time.time() - found.st_mtime > DRAFT_S:
                path.unlink()
    held = 0
    for _, size, path in sorted(kept, reverse=True):
        held += size
        if held > MOST_BYTES:
            path.unlink(missing_ok=True)
