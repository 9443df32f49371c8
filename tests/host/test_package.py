"""The wheel holds what it needs and nothing else, and runs in an environment away from the checkout."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy
import pytest

from tests import ROOT

MAX_WHEEL_BYTES = 20 << 20


def run(*argv, cwd):
    """A process that cannot see the checkout, by neither its folder nor its environment."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    env |= {"OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(
        [str(a) for a in argv], cwd=cwd, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the checkout, which stays clean."""
    tree = tmp_path_factory.mktemp("tree")
    skip = shutil.ignore_patterns("__pycache__")
    for folder in ("kog_triton", "backends"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=skip, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    (tree / "tests").mkdir()
    (tree / "tests" / "__init__.py").touch()  # must stay behind
    return tree


@pytest.fixture(scope="module")
def wheel(tree):
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", "dist", cwd=tree)
    (found,) = (tree / "dist").glob("*.whl")
    return found


def environment(home, *what):
    """The interpreter of a new environment with `what` installed; the dependencies are ours."""
    run(sys.executable, "-m", "venv", "--without-pip", home, cwd=home.parent)
    new = home / "bin" / "python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run(new, "-c", code, cwd=home.parent).stdout.strip())
    # Named in a .pth file, the packages beside numpy are found while the .pth files among them are not read:
    # so the editable install of the checkout does not take part.
    (site / "dependencies.pth").write_text(f"{Path(numpy.__file__).parents[1]}\n")
    pip = (sys.executable, "-m", "pip", "--python", new, "install", "-q", "--no-deps", "--no-index")
    run(*pip, "--no-build-isolation", *what, cwd=home.parent)
    return new


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The interpreter of an environment that holds the wheel."""
    return environment(tmp_path_factory.mktemp("home") / "venv", wheel)


def test_the_wheel_holds_what_it_needs_and_nothing_else(wheel):
    assert wheel.stat().st_size <= MAX_WHEEL_BYTES
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, pattern in (("", "*.py"), ("demo/checkpoint", "*"), ("demo", "*.json")):
        for file in (ROOT / "kog_triton" / folder).rglob(pattern):
            assert file.relative_to(ROOT).as_posix() in names
    kernel = (f"backends/cuda/{name}" for name in ("decode.cu", "stage.cu", "include/kog/decode.h"))
    for needed in ("py.typed", "generate.schema.json", "demo/README.md", *kernel):
        assert f"kog_triton/{needed}" in names
    assert any(name.endswith("/LICENSE") for name in names)
    assert {name.split("/")[0] for name in names if "dist-info" not in name} == {"kog_triton"}


TASKS = sorted((ROOT / "tests" / "tasks").glob("*.py"))


def test_there_are_ten_tasks():
    assert len(TASKS) == 10


@pytest.mark.parametrize("task", TASKS, ids=lambda file: file.stem)
def test_a_task_is_done_with_the_wheel_in_an_empty_folder(task, python, tmp_path):
    run(python, "-W", "always", task, cwd=tmp_path)


def test_type_checkers_see_an_editable_install(tree, tmp_path):
    """They read folders on the path, and follow no import hook."""
    new = environment(tmp_path / "venv", "-e", tree)
    (tmp_path / "user.py").write_text("import kog_triton.llm, kog_triton.backends.cuda.jit\n")
    mypy = ("-m", "mypy", "--config-file=", "--python-executable", new, "--follow-imports=skip")
    run(sys.executable, *mypy, "user.py", cwd=tmp_path)
    run(new, "-c", "import kog_triton.backends.cuda.jit", cwd=tmp_path)
