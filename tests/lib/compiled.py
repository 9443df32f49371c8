"""What compilers made, kept by content in a temporary folder of this user's: made once, however many processes ask.

Whoever asks first makes it, and those who ask meanwhile wait. A file appears whole or not at all; a lock ends
with its process. What a run of pytest-xdist shares lies in a folder of its own, which a later run removes.
"""

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

FOLDER = Path(tempfile.gettempdir()) / f"kog-tests-compiled-{os.getuid()}"
LONGEST_RUN = 24 * 3600  # s: folders of runs that began before are nobody's


def made_once(parts: Iterable[bytes], make: Callable[[Path], None], folder: Path = FOLDER) -> Path:
    """The file that `make` writes; `parts` are all that it depends on."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    FOLDER.mkdir(mode=0o700, exist_ok=True)
    assert FOLDER.stat().st_uid == os.getuid(), f"{FOLDER} is somebody else's: its code is not run"
    folder.mkdir(mode=0o700, exist_ok=True)
    made = folder / digest.hexdigest()[:24]
    if made.exists():
        return made
    with open(made.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            draft = made.with_suffix(f".{os.getpid()}")
            make(draft)
            os.replace(draft, made)
    return made


Arrays = dict[str, np.ndarray]


def made_in_run(what: str, make: Callable[[], Arrays]) -> Arrays:
    """The arrays that `make` gives: made once for all processes of a run of pytest-xdist, during which nothing changes
    that they depend on. Any other process makes them itself."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        return make()

    def keep(draft: Path) -> None:
        with open(draft, "wb") as file:
            np.savez_compressed(file, **make())

    folder = FOLDER / f"run-{run}"
    for other in FOLDER.glob("run-*"):
        if other != folder and time.time() - other.stat().st_mtime > LONGEST_RUN:
            shutil.rmtree(other, ignore_errors=True)
    with np.load(made_once([what.encode()], keep, folder), allow_pickle=False) as arrays:
        return dict(arrays)


def from_own_end(names: Sequence[str]) -> list[str]:
    """In an order of this process's own: where processes of a run ask for all by `made_in_run`, each makes some while
    the others make theirs."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    return [*names] if int(worker.removeprefix("gw")) % 2 == 0 else [*reversed(names)]


@functools.cache
def version_of(tool: str) -> bytes:
    """What a compiler says of itself."""
    return subprocess.run([tool, "--version"], check=True, capture_output=True).stdout
