"""What `kog doctor` says of memory, caches, packages and a model, by hand."""

import json
from types import SimpleNamespace

import pytest

from kog_triton import doctor
from kog_triton.checkpoint import folder
from kog_triton.model.spec import DType

FOUND = {
    "gpus": [{"memory_bytes": 80_000_000_000}, {"memory_bytes": 20_000_000_000}],
    "memory": {"total_bytes": 64_000_000_000, "available_bytes": 10_000_000_000},
    "backends": [
        {"name": "cuda", "available": True, "reason": ""},
        {"name": "reference", "available": True, "reason": ""},
        {"name": "hip", "available": False, "reason": "no such GPU"},
    ],
}


def fits(monkeypatch, found=FOUND, parameters=1_000_000_000, position=100_000, positions=1000):
    """Rows of a bf16 model of so many parameters and bytes of keys and values."""
    spec = SimpleNamespace(
        kv_bytes_per_position=position,
        max_context=positions,
        dtype=DType.BF16,
        num_parameters=parameters,
        family="llama",
    )
    monkeypatch.setattr(folder.Checkpoint, "open", lambda model, revision: SimpleNamespace(spec=spec, model=model))
    told = doctor.fits("/m", found)
    assert (told["path"], told["family"], told["num_parameters"]) == ("/m", "llama", parameters)
    return {row["name"]: (row["bytes"], row["says"]) for row in told["backends"]}


def test_what_each_backend_would_do_with_a_model(monkeypatch):
    assert fits(monkeypatch) == {
        "cuda": (2_100_000_000, "would take 2.1 GB of 80.0 GB"),  # of the largest GPU
        "reference": (4_100_000_000, "would take 4.1 GB of 10.0 GB"),
        "hip": (2_100_000_000, "would not run it: no such GPU"),
    }
    rows = fits(monkeypatch, parameters=39_950_000_000)
    assert rows["cuda"] == (80_000_000_000, "would take 80.0 GB of 80.0 GB")
    assert rows["reference"][1].startswith("would run out of memory: 159.9 GB of 10.0 GB: see")
    rows = fits(monkeypatch, parameters=39_950_000_001)
    assert rows["cuda"][1] == "would run out of memory: 80.0 GB of 80.0 GB: see --max-model-len"
    nothing_known = FOUND | {"gpus": [], "memory": {"total_bytes": None, "available_bytes": None}}
    assert fits(monkeypatch, nothing_known)["cuda"][1] == "would take 2.1 GB"
    assert fits(monkeypatch, nothing_known)["reference"][1] == "would take 4.1 GB"


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "0.0 MB"),
        (1_234_567, "1.2 MB"),
        (999_999_999, "1,000.0 MB"),
        (1_000_000_000, "1.0 GB"),
        (1_234_500_000_000, "1,234.5 GB"),
    ],
)
def test_sizes_are_decimal(count, said):
    assert doctor.size(count) == said


def test_main_memory_is_linux_s(monkeypatch, tmp_path):
    file = tmp_path / "meminfo"
    monkeypatch.setattr(doctor, "Path", lambda name: {"/proc/meminfo": file}[name])
    file.write_text("MemTotal:       2000 kB\nMemFree: 7 kB\nMemAvailable:   1000 kB\n")
    assert doctor.memory() == {"total_bytes": 2_048_000, "available_bytes": 1_024_000}
    for text in ("MemTotal: 2000 kB\n", "MemTotal: many kB\nMemAvailable: 1 kB\n", "MemTotal\n"):
        file.write_text(text)
        assert doctor.memory() == {"total_bytes": None, "available_bytes": None}
    file.unlink()
    assert doctor.memory() == {"total_bytes": None, "available_bytes": None}


def test_a_cache_is_as_large_as_its_files_and_writable_where_its_folder_is(tmp_path, monkeypatch):
    def cache(path, *sizes):
        return SimpleNamespace(name="c", path=path, files=lambda: [(None, size) for size in sizes])

    asked = []

    def access(place, how):
        asked.append((place, how))
        return True

    monkeypatch.setattr(doctor.os, "access", access)
    path = tmp_path / "a" / "b"
    expected = {"name": "c", "path": str(path), "bytes": 7, "writable": True}
    assert doctor.cache_found(cache(path, 3, 4)) == expected
    assert asked == [(tmp_path, doctor.os.W_OK)]  # which is there
    nowhere = {"name": "c", "path": None, "bytes": 0, "writable": False}
    assert doctor.cache_found(cache(None)) == nowhere
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)
    assert doctor.cache_found(cache(tmp_path)) == {"name": "c", "path": str(tmp_path), "bytes": 0, "writable": False}


ALL = {
    "kog_triton": "1.2", "python": "3.12.1", "platform": "Linux", "packages": {"torch": None}, "driver": None,
    "unseen_gpu": None, "gpus": [], "backends": [], "demo": {"path": "/d", "present": True},
    "findings": {"cuda": {"compiler": "nvrtc 13.0"}},
    "memory": {"total_bytes": 64_000_000_000, "available_bytes": 10_250_000_000},
    "optional": {"gguf": {"version": "1.0", "for": "files"}, "transformers": {"version": None, "for": "peers"}},
    "caches": [
        {"name": "kernels", "path": "/c", "bytes": 12_340_000, "writable": True},
        {"name": "models", "path": None, "bytes": 0, "writable": False},
    ],
    "model": {
        "path": "/m", "family": "llama", "num_parameters": 1_234_500_000,
        "backends": [{"name": "cuda", "bytes": 1, "says": "would take it"}],
    },
}  # fmt: skip


def test_all_that_it_found_is_told_by_value():
    assert doctor.report(ALL).splitlines() == [
        "kog_triton 1.2, Python 3.12.1, Linux",
        "torch (not installed)",
        "",
        "GPUs",
        "  none seen by torch (not installed)",
        "  driver: none",
        "",
        "backends",
        "",
        "cuda",
        "  compiler  nvrtc 13.0",
        "",
        "memory",
        "  10.2 GB free of 64.0",
        "",
        "optional packages",
        "  gguf          1.0              files",
        "  transformers  (not installed)  peers",
        "",
        "caches (kog cache lists and clears them)",
        "  kernels         12.3 MB  /c",
        "  models           0.0 MB  nowhere: no home  cannot be written",
        "",
        "/m (llama, 1,234.5 M parameters)",
        "  cuda      would take it",
        "",
        "demo checkpoint: present, /d",
    ]
    unknown = ALL | {"memory": {"total_bytes": None, "available_bytes": None}}
    assert "memory\n  not known here\n" in doctor.report(unknown)


def test_a_model_is_asked_of_where_one_is_named(cli, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "fits", lambda model, found, revision: {"path": model, "seen": [*found]})
    assert doctor.main(["--json", "--model", "/m"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"]["path"] == "/m" and "memory" in found["model"]["seen"]
    assert doctor.main(["--json"]) == 0
    assert "model" not in json.loads(capsys.readouterr().out)
    with pytest.raises(SystemExit):
        doctor.main(["--no-such"])
    assert capsys.readouterr().err.endswith("(see kog doctor --help)\n")


def test_a_platform_in_few_words(monkeypatch):
    monkeypatch.setattr(doctor.platform, "release", lambda: "6.18.3-x")
    monkeypatch.setattr(doctor.platform, "system", lambda: "Linux")
    monkeypatch.setattr(doctor.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(doctor.platform, "libc_ver", lambda: ("glibc", "2.39"))
    assert doctor.system() == "Linux 6.18 x86_64, glibc 2.39"
    monkeypatch.setattr(doctor.platform, "libc_ver", lambda: ("", ""))
    assert doctor.system() == "Linux 6.18 x86_64"


def test_what_a_backend_needs_is_told_of_those_that_say_so(monkeypatch):
    def broken():
        raise RuntimeError

    said = {"a": lambda: {"x": "1"}, "b": dict, "c": broken}
    monkeypatch.setattr(doctor, "backend_names", lambda: [*said, "d"])
    classes = {name: SimpleNamespace(findings=say) for name, say in said.items()}
    monkeypatch.setattr(doctor, "find_backend", lambda name: classes.get(name, object))
    assert doctor.findings() == {"a": {"x": "1"}}
    assert doctor.installed_version("pytest") and doctor.installed_version("no-such-package") is None
