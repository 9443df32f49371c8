"""`kog cache` and what `kog doctor` says of caches, memory and a model: by value."""

import json
import os
from types import SimpleNamespace

import pytest

from kog_triton import cache, doctor
from kog_triton.checkpoint.folder import Checkpoint
from kog_triton.cli import caches
from kog_triton.model.shapes import named_shape
from tests.lib.fake_checkpoint import make_checkpoint


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Every cache in a folder of its own."""
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    kernels, typed = (tmp_path / "XDG_CACHE_HOME/kog_triton/cuda", tmp_path / "XDG_STATE_HOME/kog_triton")
    for folder in (kernels, typed, tmp_path / "hub" / "deep", tmp_path / "TRITON_CACHE_DIR"):
        folder.mkdir(parents=True)
    (kernels / "a.cubin").write_bytes(b"x" * 1_500_000)
    (kernels / "b.cubin").write_bytes(b"x" * 500_000)
    (typed / "history").write_bytes(b"say\n")
    (tmp_path / "hub" / "deep" / "weights").write_bytes(b"x" * 250_000)
    return tmp_path


def test_caches_are_listed_with_place_and_size(places, capsys):
    assert cache.main(["--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert {n: (r["files"], r["bytes"], r["cleared_by_kog"]) for n, r in rows.items()} == {
        "cuda": (2, 2_000_000, True),
        "history": (1, 4, True),
        "triton": (0, 0, False),
        "hub": (1, 250_000, False),
    }
    assert rows["cuda"]["path"] == str(places / "XDG_CACHE_HOME/kog_triton/cuda")
    assert cache.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()) for line in lines[3:5]] == [
        "cuda 2 2.0 XDG_CACHE_HOME",
        "history 1 0.0 XDG_STATE_HOME",
    ]
    assert f"hub: models of the Hugging Face hub: hf cache ls, hf cache rm, {places / 'hub'}" in lines


def test_only_what_is_ours_is_cleared(places, capsys):
    assert cache.main(["clear", "cuda"]) == 0
    assert capsys.readouterr().out == "2 files deleted\n"
    left = {p.name for p in places.rglob("*") if p.is_file()}
    assert left == {"history", "weights"}
    assert cache.main(["clear"]) == 0
    assert {p.name for p in places.rglob("*") if p.is_file()} == {"weights"}
    capsys.readouterr()
    for argv, says in (
        (["clear", "hub"], "no cache named 'hub' is kog's to clear: have cuda, history"),
        (["list", "x"], "list takes no names: 'x' is for clear"),
    ):
        assert cache.main(argv) == 2 and says in capsys.readouterr().err


def test_a_user_without_a_home_has_no_caches(monkeypatch, capsys):
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pathlib.Path.home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    found = {c.name: (c.path, c.files()) for c in caches.caches()}
    assert [found[n] for n in ("cuda", "history", "triton")] == [(None, [])] * 3
    assert cache.main([]) == 0 and "cuda: compiled kernels of cuda, nowhere" in capsys.readouterr().out


def test_doctor_shows_caches_memory_and_optional_packages(places, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "memory", lambda: {"total_bytes": 25_300_000_000, "available_bytes": 20_100_000_000})
    real = os.access
    monkeypatch.setattr("os.access", lambda p, m: "STATE" not in str(p) and real(p, m))
    assert doctor.main([]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "20.1 GB free of 25.3" in lines
    assert f"cuda 2.0 MB {places / 'XDG_CACHE_HOME/kog_triton/cuda'}" in lines
    assert f"history 0.0 MB {places / 'XDG_STATE_HOME/kog_triton/history'} cannot be written" in lines
    assert any(line.startswith("llguidance ") and "--regex" in line for line in lines)
    assert doctor.memory and set(doctor.examine()["optional"]) == {"llguidance", "gguf", "transformers", "matplotlib"}


def test_memory_is_the_machine_s():
    found = doctor.memory()
    assert 0 < found["available_bytes"] <= found["total_bytes"]
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert found["total_bytes"] == pytest.approx(pages, rel=0.001)


def test_doctor_says_what_each_backend_would_do_with_a_model(tmp_path, monkeypatch):
    model = make_checkpoint(tmp_path)
    found = {
        "gpus": [{"memory_bytes": 30_000}],
        "memory": {"available_bytes": 10**10},
        "backends": [
            {"name": "cuda", "available": True, "reason": ""},
            {"name": "hip", "available": False, "reason": "not installed"},
            {"name": "reference", "available": True, "reason": ""},
        ],
    }
    told = doctor.fits(str(model), found)
    cache_bytes = 512 * 64  # positions, and float32 keys and values of 1 head of 8 in 1 layer
    weights = told["num_parameters"] * 4
    assert [row["bytes"] for row in told["backends"]] == [weights + cache_bytes] * 3
    assert [row["says"] for row in told["backends"]] == [
        "would run out of memory: 0.0 MB of 0.0 MB: see --max-model-len",
        "would not run it: not installed",
        "would take 0.0 MB of 10.0 GB",
    ]
    # weights of 16 bits stay so on a GPU, and are float32 in the reference; the cache is as the model says
    spec = named_shape("llama-3.2-1b")
    monkeypatch.setattr(Checkpoint, "open", lambda model, revision: SimpleNamespace(spec=spec))
    cache_bytes = spec.kv_bytes_per_position * spec.max_context
    wide = [row["bytes"] - cache_bytes for row in doctor.fits("x", found)["backends"]]
    assert [n // spec.num_parameters for n in wide] == [2, 2, 4]
