"""`kog doctor`: what can run here, by value."""

import json

import pytest

import kog_triton
from kog_triton import doctor


def test_doctor_lists_every_backend(cli, capsys):
    assert doctor.main([]) == 0
    text = capsys.readouterr().out
    assert "it has no wheels" in text and "-> fit four wheels" in text
    assert doctor.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    backends = {b["name"]: b for b in found["backends"]}
    assert {"cuda", "reference", "triton"} <= set(backends) and backends["fake"]["available"]
    assert found["kog_triton"] == kog_triton.__version__ and found["packages"]["torch"]


def test_doctor_tells_what_it_found_by_value():
    found = {
        "kog_triton": "1.2", "python": "3.12.1", "platform": "Linux", "packages": {"torch": "2.9", "triton": None},
        "driver": "580.1", "gpus": [{"name": "G", "arch": "sm_90", "memory_bytes": 150_600_000_000}],
        "backends": [
            {"name": "cuda", "available": True, "reason": "", "advice": "do nothing"},
            {"name": "hip", "available": False, "reason": "not here", "advice": "buy one"},
            {"name": "odd", "available": False, "reason": "no idea", "advice": ""},
        ],
        "demo": {"path": "/d", "present": False},
    }  # fmt: skip
    assert doctor.report(found).splitlines() == [
        "kog_triton 1.2, Python 3.12.1, Linux",
        "torch 2.9, triton (not installed)",
        "",
        "GPUs",
        "  0  G  sm_90  151 GB",
        "  driver: 580.1",
        "",
        "backends",
        "  cuda      ready",
        "  hip       cannot run here  not here",
        "            -> buy one",
        "  odd       cannot run here  no idea",
        "",
        "demo checkpoint: missing, /d",
    ]
    bare = doctor.report(
        found | {"gpus": [], "driver": None, "demo": {"path": "/d", "present": True}}
    )
    assert "  none seen by torch 2.9\n  driver: none\n" in bare and bare.endswith("present, /d")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.126.09  Release\nGCC 13.2",
            "580.126.09",
        ),
        ("6.12.12\n", "6.12.12"),
        ("of a vendor without numbers\n", "of a vendor without numbers"),
        (None, None),
    ],
)
def test_doctor_reads_the_version_of_the_driver(tmp_path, monkeypatch, text, says):
    files = tmp_path / "nvidia", tmp_path / "amdgpu"
    monkeypatch.setattr(doctor, "DRIVERS", files)
    if text:
        files[1].write_text(text)
    assert doctor.driver() == says
