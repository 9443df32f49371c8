"""`kog doctor`: what can run here, by value."""

import json
from types import SimpleNamespace

import pytest
import torch

import kog_triton
from kog_triton import doctor
from kog_triton.backends import device, nvidia_driver
from kog_triton.schedule.topology import Seen


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
        "driver": "580.1", "unseen_gpu": None,
        "gpus": [
            {"name": "G", "arch": "sm_90", "memory_bytes": 150_600_000_000, "share": ""},
            {"name": "H", "arch": "sm_90", "memory_bytes": 18_000_000_000, "share": "a slice"},
        ],
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
        "  1  H  sm_90  18 GB  a slice",
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
    bare = doctor.report(found | {"gpus": [], "driver": None, "demo": {"path": "/d", "present": True}})
    assert "  none seen by torch 2.9\n  driver: none\n" in bare and bare.endswith("present, /d")
    unseen = doctor.report(found | {"gpus": [], "unseen_gpu": "NVIDIA H200: install it"})
    assert "  none seen by torch 2.9\n  but there is: NVIDIA H200: install it\n" in unseen


@pytest.mark.parametrize(
    ("name", "percent", "share"),
    [
        ("NVIDIA H200", "", ""),
        ("NVIDIA H200", "25", "an MPS share of 33 of 132 multiprocessors"),
        ("NVIDIA H200 MIG 1g.18gb", "", "a MIG slice of 16 of 132 multiprocessors"),
    ],
)
def test_doctor_says_which_part_of_a_gpu_is_ours(monkeypatch, name, percent, share):
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", percent)
    sms = 16 if "MIG" in name else 132
    seen = SimpleNamespace(name=name, major=9, minor=0, total_memory=18_000_000_000)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: seen)
    asked = []

    def read_gpu(index):
        asked.append(index)
        percent = nvidia_driver.mps_percent()
        return Seen(name, "nvidia", "sm_90a", sms, 227 << 10, 18_000_000_000, percent=percent)

    monkeypatch.setattr(device, "read_gpu", read_gpu)
    rows = doctor.gpus()
    assert asked == [0, 1] and [(g["name"], g["share"]) for g in rows] == [(name, share)] * 2
    assert "unseen_gpu" in doctor.examine() and doctor.unseen() is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.126.09  Release\nGCC 13.2", "580.126.09"),
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


@pytest.mark.parametrize(("hip", "arch"), [("6.4", "gfx942"), (None, "sm_94")])
def test_doctor_names_a_gpus_architecture_as_its_vendor_does(monkeypatch, hip, arch):
    seen = SimpleNamespace(name="G", major=9, minor=4, total_memory=1, gcnArchName="gfx942")
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: seen)
    monkeypatch.setattr(device, "gpu_of", lambda device: None)
    assert doctor.gpus() == [{"name": "G", "arch": arch, "memory_bytes": 1, "share": ""}]
