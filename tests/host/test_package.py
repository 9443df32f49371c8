"""sdist and wheel hold what they need, and the wheel runs in an environment away from the checkout, types and all."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import BytesParser
from pathlib import Path

import numpy
import pytest

import kog_triton
from tests import ROOT

MAX_WHEEL_BYTES = 20 << 20
FOLDERS = {".ci", "backends", "benchmarks", "constraints", "docs", "examples", "kog_triton", "tests"}
USER = """
from kog_triton import LLM, SamplingParams

with LLM() as llm:
    reveal_type(llm.generate("x", SamplingParams(max_tokens=1))[0].outputs[0].text)
    for delta in llm.stream("x"):
        reveal_type(delta.token_ids)
SamplingParams(max_tokenz=1)
"""
MYPY = """[mypy]
[mypy-torch.*,numpy.*,triton.*,jinja2.*,tokenizers.*,safetensors.*,huggingface_hub.*,rich.*,llguidance.*]
follow_imports = skip
"""


def run(*argv, cwd, ok=True):
    """A process that cannot see the checkout, by neither its folder nor its environment."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    env |= {"OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run([str(a) for a in argv], cwd=cwd, env=env, capture_output=True, text=True, timeout=120)
    assert not ok or done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the checkout, so that it stays clean."""
    tree = tmp_path_factory.mktemp("package") / "tree"
    skip = shutil.ignore_patterns(
        "__pycache__", ".git", ".venv", ".*_cache", ".hypothesis", "*.egg-info", "build", "dist"
    )
    # what lies in the checkout beside the project: a folder with a name of its own, such as an environment
    others = {path.name for path in ROOT.iterdir() if path.is_dir()} - FOLDERS
    shutil.copytree(
        ROOT, tree, symlinks=True, ignore=lambda at, names: skip(at, names) | (others if Path(at) == ROOT else set())
    )
    return tree


@pytest.fixture(scope="module")
def built(tree):
    """The sdist of that copy, and the wheel that is built from the sdist alone."""
    files = {path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file()}
    run(sys.executable, "-m", "build", "--no-isolation", "-o", "dist", cwd=tree)
    (sdist,), (wheel,) = (tree / "dist").glob("*.tar.gz"), (tree / "dist").glob("*.whl")
    return files, sdist, wheel


@pytest.fixture(scope="module")
def wheel(built):
    return built[2]


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
    for folder, pattern in (
        ("", "*.py"),
        ("demo/checkpoint", "*"),
        ("demo", "*.json"),
        ("server/playground", "*.*"),
        ("server/playground", "LICENSE"),
        ("backends/cuda", "*.h"),
        ("backends/hip", "*.h*"),
    ):
        for file in (ROOT / "kog_triton" / folder).rglob(pattern):
            assert file.relative_to(ROOT).as_posix() in names
    kernel = (f"backends/cuda/{name}" for name in ("decode.cu", "stage.cu", "include/kog/decode.h"))
    for needed in ("py.typed", "generate.schema.json", "demo/README.md", *kernel):
        assert f"kog_triton/{needed}" in names
    assert any(name.endswith("/LICENSE") for name in names)
    assert {name.split("/")[0] for name in names if "dist-info" not in name} == {"kog_triton"}


def test_the_sdist_holds_the_whole_tree(built):
    """But for what building added."""
    files, sdist, _ = built
    with tarfile.open(sdist) as archive:
        names = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
    added = {name for name in names if "egg-info/" in name} | {"PKG-INFO", "setup.cfg"}
    # what a link leads to is there in its place
    added |= {n for n in names if n.removeprefix("kog_triton/") in files} - files
    assert names - added == files
    assert {"constraints/ci.txt", "examples/stream.py", "tests/faults.py", ".ci/run"} <= names


def test_the_metadata_say_what_it_is(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = BytesParser().parsebytes(archive.read(name))
    assert metadata["Version"] == kog_triton.__version__ and metadata["Version"].startswith("0.")
    assert metadata["Author"] == "The kog_triton authors"
    assert metadata["License-Expression"] == "Apache-2.0"
    classifiers = metadata.get_all("Classifier")
    least = metadata["Requires-Python"].removeprefix(">=")
    assert f"Programming Language :: Python :: {least}" in classifiers
    assert "Typing :: Typed" in classifiers
    assert metadata.get_payload().startswith("# kog_triton\n")
    # nothing has run on an AMD GPU
    assert "AMD" not in metadata["Summary"]


def test_the_wheel_runs_away_from_the_checkout(python, tmp_path):
    code = "import kog_triton; print(kog_triton.__file__)"
    assert Path(run(python, "-c", code, cwd=tmp_path).stdout.strip()).is_relative_to(python.parents[1])
    argv = ("-m", "kog_triton.generate", "-p", "def add(a, b):", "-m", "8", "--temp", "0")
    done = run(python, *argv, cwd=tmp_path)
    assert done.stdout.startswith("\n    ") and "backend reference" in done.stderr
    assert run(python, *argv, "--quiet", cwd=tmp_path).stdout == done.stdout
    plan = run(python.parent / "kog", "plan", cwd=tmp_path)
    assert plan.stdout.startswith("demo (laneformer) on 1 x h200")
    assert run(python.parent / "kog", "fly", cwd=tmp_path, ok=False).returncode == 2


def test_an_example_runs_away_from_the_checkout(python, tmp_path):
    """As whoever has the wheel and one file would run it."""
    shutil.copy(ROOT / "examples" / "stream.py", tmp_path)
    done = run(python, "stream.py", cwd=tmp_path)
    assert done.stdout.startswith("\n    ") and "[48 tokens, ended by length]" in done.stderr


@pytest.fixture(scope="module")
def editable(tree, tmp_path_factory):
    """The interpreter of an environment with an editable install, the README's."""
    return environment(tmp_path_factory.mktemp("editable") / "venv", "-e", tree)


@pytest.fixture(scope="module")
def pyright(tmp_path_factory):
    """pyright's program, of the version in its package-lock.json."""
    if shutil.which("npm") is None:
        pytest.skip("needs node and npm: install them")
    folder = tmp_path_factory.mktemp("pyright")
    for file in (ROOT / "tests" / "data" / "pyright").iterdir():
        shutil.copy(file, folder)
    run("npm", "ci", "--no-audit", "--no-fund", "--silent", cwd=folder)
    return folder / "node_modules" / "pyright" / "index.js"


def says_mypy(python, cwd, request):
    """It does not look into the dependencies."""
    (cwd / "mypy.ini").write_text(MYPY)
    argv = ("-m", "mypy", "--python-executable", python, "user.py")
    return run(sys.executable, *argv, cwd=cwd, ok=False).stdout


def says_pyright(python, cwd, request):
    program = request.getfixturevalue("pyright")
    return run("node", program, "--pythonpath", python, "user.py", cwd=cwd, ok=False).stdout


@pytest.mark.parametrize("install", ["python", "editable"])
@pytest.mark.parametrize(
    "says, wrong",
    [
        pytest.param(says_mypy, 'Unexpected keyword argument "max_tokenz"', id="mypy"),
        pytest.param(says_pyright, 'No parameter named "max_tokenz"', id="pyright"),
    ],
)
def test_type_checkers_see_our_types_in_a_user_s_script(says, wrong, install, tmp_path, request):
    """In a wheel as in an editable install, whose folders they read: they follow no import hook."""
    (tmp_path / "user.py").write_text(USER)
    said = says(request.getfixturevalue(install), tmp_path, request)
    found = [line for line in said.splitlines() if "user.py:" in line]
    assert len(found) == 3, said
    assert '"str"' in found[0] and '"list[int]"' in found[1] and wrong in found[2]


def test_an_editable_install_has_the_cuda_backend(editable, tmp_path):
    run(editable, "-c", "import kog_triton.backends.cuda.jit", cwd=tmp_path)


TASKS = sorted((ROOT / "tests" / "tasks").glob("*.py"))


def test_there_are_ten_tasks():
    assert len(TASKS) == 10


@pytest.mark.parametrize("task", TASKS, ids=lambda file: file.stem)
def test_a_task_is_done_with_the_wheel_in_an_empty_folder(task, python, tmp_path):
    run(python, "-W", "always", task, cwd=tmp_path)
