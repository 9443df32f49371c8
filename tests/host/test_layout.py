"""The house rules that a reader relies on: which way imports point, small files, no dangerous calls.

Everything is read from the syntax trees, so an import inside a function counts like any other.
"""

import ast
import subprocess
import sys
import tomllib

import pytest

from tests import ROOT

PACKAGE = ROOT / "kog_triton"
MAX_LINES = 600

# room -> the rooms it may import from; the others (engine, LLM, entry points) may import any of these
BASE = {"errors", "json_file", "vllm_names"}
ARROWS = {
    "errors": set(),
    "json_file": {"errors"},
    "model": BASE,
    "schedule": BASE | {"model"},
    "sampling": BASE,
    "text": BASE,
    "demo": BASE,
    "backends": BASE | {"model", "schedule", "sampling"},
    "checkpoint": BASE | {"model", "schedule"},
}
# modules and packages below kog_triton
NO_TORCH = (
    "errors",
    "json_file",
    "model",
    "schedule",
    "sampling",
    "text",
    "precompile",
    "backends.choose",
    "backends.cuda.layout",
    "checkpoint.hub",
    "cli.command",
    "server",
)
ENTRY_POINTS = {"__main__", "cache", "generate", "quantize", "doctor", "plan", "prebuild", "serve", "bench", "profile"}
VAGUE = {"utils", "util", "helpers", "helper", "common", "misc", "tools", "stuff"}
FORBIDDEN = {"eval", "exec", "compile", "os.system", "os.popen", "torch.load", "yaml.load"}
CODE_RUNNERS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}


def sources(folder):
    return sorted(p for p in folder.rglob("*.py") if "__pycache__" not in p.parts)


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path):
    """Every module that the file names in an import; `from a import b` is both a and a.b."""
    out = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            out |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            out |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return out


def room(module):
    """The first name below the package; "" for the package itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def backend(module):
    """The backend a module belongs to, "" if it is shared by all of them."""
    parts = module.split(".")
    name = parts[2] if parts[:2] == ["kog_triton", "backends"] and len(parts) > 2 else ""
    return name if name in BACKENDS else ""


def entry_points():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["entry-points"]["kog_triton.backends"]


BACKENDS = {target.partition(":")[0].split(".")[2] for target in entry_points().values()}
MODULES = {module_of(path): path for path in sources(PACKAGE)}
# backends/<name> is the package kog_triton.backends.<name>
MODULES |= {f"kog_triton.{module_of(path)}": path for path in sources(ROOT / "backends")}


def offenders(among, wrong):
    """{module: what it must not import}, over the modules that `among` picks."""
    found = {m: sorted(n for n in imports(MODULES[m]) if wrong(m, n)) for m in MODULES if among(m)}
    return {module: names for module, names in found.items() if names}


def test_the_tree_is_read():
    assert {"kog_triton", "kog_triton.engine", "kog_triton.schedule.cuda"} <= set(MODULES)
    assert "kog_triton.model.spec" in imports(MODULES["kog_triton.schedule.schedule"])
    assert {"reference", "triton", "cuda"} <= BACKENDS
    assert "kog_triton.backends.cuda.layout.layout" in imports(MODULES["kog_triton.backends.cuda.memory"])
    assert set(ARROWS) <= {room(m) for m in MODULES}


def test_arrows_point_one_way():
    def beyond(module, name):
        allowed = ARROWS[room(module)] | {room(module), ""}
        return name in MODULES and room(name) not in allowed

    assert not offenders(lambda m: room(m) in ARROWS, beyond)


def test_no_files_import_each_other_in_a_circle():
    """An import inside a function, or for types alone, counts; `from package import file` names the file."""
    named = {}
    for module, path in MODULES.items():
        found = imports(path) & set(MODULES)
        packages = {name for name in found if MODULES[name].name == "__init__.py"}
        holding = {name for name in packages if any(n.startswith(f"{name}.") for n in found)}
        named[module] = found - holding

    def reached_from(module):
        seen, todo = set(), [module]
        while todo:
            new = named[todo.pop()] - seen
            seen |= new
            todo += new
        return seen

    assert not {module for module in MODULES if module in reached_from(module)}


def test_what_needs_no_torch_imports_none():
    def heavy(module, name):
        return name.split(".")[0] in ("torch", "triton", "cupy", "transformers")

    def light(module):
        return any(f"{module}.".startswith(f"kog_triton.{name}.") for name in NO_TORCH)

    assert not offenders(light, heavy)
    assert offenders(lambda m: room(m) == "backends" and not light(m), heavy)


def test_cuda_layouts_are_made_where_there_is_no_torch():
    """What those modules import in turn counts too, which the syntax trees do not tell."""
    names = [m for m in MODULES if m.startswith("kog_triton.backends.cuda.layout")]
    assert "kog_triton.backends.cuda.layout.columns" in names
    code = "import sys; sys.modules['torch'] = None\n" + "".join(f"import {m}\n" for m in names)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Both monokernels have one layout and one host side, which lies with CUDA's (docs/HIP.md).
SHARED = "kog_triton.backends.cuda."


def test_backends_never_import_each_other():
    def another(module, name):
        shared = module.startswith("kog_triton.backends.hip.") and f"{name}.".startswith(SHARED)
        return backend(name) not in ("", backend(module)) and not shared

    assert not offenders(lambda m: room(m) == "backends", another)


def test_only_entry_points_name_a_backend():
    """Doors, engine and LLM reach a backend through find_backend or choose alone."""
    assert not offenders(lambda m: room(m) != "backends", lambda m, name: backend(name))


def test_entry_points_are_at_the_end_of_the_arrows():
    """Only entry points and what they share import entry points, and `kog` finds its commands by name."""

    def entry_point(module, name):
        return name in MODULES and room(name) in ENTRY_POINTS - {room(module)}

    def shared_by_entry_points(module, name):
        return room(name) == "cli"

    assert not offenders(lambda m: room(m) not in ENTRY_POINTS | {"cli"}, entry_point)
    assert not offenders(lambda m: room(m) not in ENTRY_POINTS | {"cli", "profiling"}, shared_by_entry_points)
    assert not offenders(lambda m: room(m) == "__main__", entry_point)


def test_nothing_imports_the_tests():
    own = {path.stem for path in sources(ROOT / "tests")} | {"tests", "pytest"}
    assert not offenders(lambda m: True, lambda m, name: name.split(".")[0] in own)


def test_test_files_import_no_test_file():
    """But for the one that asks whether the faults of other tests can still be planted."""
    files = [path for path in sources(ROOT / "tests") if path.parent.name != "fuzz"]
    found = {path.name for path in files if any(".test_" in name for name in imports(path))}
    assert found == {"test_cuda_planting.py"}


def dangerous(node):
    """Why a syntax node may not be in this package, "" if it may."""
    if not isinstance(node, ast.Call):
        return ""
    name = ast.unparse(node.func)
    risky = [
        f"{k.arg}={ast.unparse(k.value)}"
        for k in node.keywords
        if k.arg in ("shell", "allow_pickle") and ast.unparse(k.value) != "False"
    ]
    return name if name in FORBIDDEN else " ".join(risky)


def test_the_tree_travels_light():
    """24 MiB, as the sum of the files."""
    files = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in ("kog_triton", "backends", "benchmarks", "constraints", "docs", "examples", "tests", ".ci"):
        files += (path for path in (ROOT / folder).rglob("*") if path.is_file())
    assert sum(path.stat().st_size for path in files if path.suffix != ".pyc") <= 24 * 2**20


def test_no_dangerous_calls():
    found = {
        f"{module}:{node.lineno}": dangerous(node)
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if dangerous(node)
    }
    assert not found
    assert not offenders(lambda m: True, lambda m, name: name.split(".")[0] in CODE_RUNNERS)


@pytest.mark.parametrize("call", ["eval('1')", "torch.load(f)", "subprocess.run(x, shell=True)", "os.system(x)"])
def test_a_dangerous_call_is_seen(call):
    assert dangerous(ast.parse(call).body[0].value)
    assert not dangerous(ast.parse("model.eval(re.compile(x))").body[0].value)


def chooses_by_vendor(node):
    """Whether a syntax node compares with a vendor's name, or is a table by such names."""
    names = {n.value for n in ast.iter_child_nodes(node) if isinstance(n, ast.Constant)}
    return isinstance(node, ast.Compare | ast.Dict) and bool({"nvidia", "amd"} & names)


def test_one_file_chooses_by_vendor():
    """Beside the one that describes GPUs, which says what all others read."""
    found = {
        module
        for module, path in MODULES.items()
        if module.startswith(("kog_triton.schedule", "kog_triton.backends.triton"))
        for node in ast.walk(ast.parse(path.read_text()))
        if chooses_by_vendor(node)
    }
    assert found == {"kog_triton.schedule.topology", "kog_triton.backends.triton.kernel.sync"}


def test_files_are_small_and_say_what_they_are():
    for module, path in MODULES.items():
        text = path.read_text()
        assert len(text.splitlines()) <= MAX_LINES, module
        assert ast.get_docstring(ast.parse(text)), f"{module} has no head"
        assert not set(module.split(".")) & VAGUE, module


def test_every_package_is_shipped():
    """pyproject lists packages by hand: a folder that is not listed would miss in the wheel."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {module for module, path in MODULES.items() if path.name == "__init__.py"}
    assert set(setuptools["packages"]) == folders
    holding_code = {module.rpartition(".")[0] for module in MODULES} - {"", *folders}
    assert not holding_code, f"code in folders that are no packages: {sorted(holding_code)}"


def test_entry_points_exist():
    for name, target in entry_points().items():
        module, _, attribute = target.partition(":")
        names = {getattr(node, "name", "") for node in ast.parse(MODULES[module].read_text()).body}
        names |= {name.rpartition(".")[2] for name in imports(MODULES[module])}
        assert attribute in names, f"{name}: {module} has no {attribute}"
