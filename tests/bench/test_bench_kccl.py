"""`kog bench kccl` where there is no GPU: its arguments, its table, its errors, and torch's side over gloo."""

import json

import pytest
import torch

from kog_triton import bench
from kog_triton.backends.cuda.gpus import check_peers
from kog_triton.backends.cuda.layout.collectives import POLICIES
from kog_triton.backends.cuda.peers import Timed, check_reports, source_header
from kog_triton.bench import kccl
from kog_triton.errors import DeviceError, RunError


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--gpus", "3"], "argument --gpus: invalid choice: 3"),
        (["--kib", "3"], "argument --kib: invalid choice: 3"),
        (["--uses", "0"], "argument --uses: 0 is below 1"),
        (["--json", "/no/such/folder/x.json"], "/no/such/folder"),
    ],
)
def test_arguments(argv, says, capsys):
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(bench.main(["kccl", *argv]))
    assert ended.value.code == 2 and says in capsys.readouterr().err


def test_without_gpus_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(["kccl", "--kib", "8"]) == 4
    out, err = capsys.readouterr()
    assert out == "" and "2 GPUs were asked for, and torch sees 0" in err


def test_a_table_of_all_that_ran(monkeypatch, capsys, tmp_path):
    asked = []

    def ours(policy, gpus, floats, uses, streams):
        asked.append((policy, gpus, floats, uses, streams))
        return Timed(floats / 1024 + streams, 4321.0 * streams)

    def theirs(gpus, backend, sizes):
        assert (gpus, backend) == (4, "nccl")
        return {"nccl": dict.fromkeys(sizes, 23.5), "symmetric memory": dict.fromkeys(sizes, 6.5)}

    monkeypatch.setattr(kccl, "all_reduces", lambda: ours)
    monkeypatch.setattr(kccl, "torch_rows", theirs)
    file = tmp_path / "run.json"
    argv = ["kccl", "--gpus", "4", "--kib", "8", "64", "--uses", "50", "--json", str(file)]
    assert bench.main(argv) == 0
    assert asked[:2] == [("phase", 4, 2048, 50, False), ("phase", 4, 16384, 50, False)]
    assert len(asked) == 2 * 2 * len(POLICIES)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "all-reduce over 4 GPUs, us; ours: mean of 50 in one kernel"
    (row,) = [line.split() for line in lines if line.split()[:1] == ["64"]]
    assert row == ["64", *["16.00", "17.00", "at", "4,321", "GB/s"] * 3, "23.50", "6.50"]
    record = json.loads(file.read_text())
    assert record["microseconds"]["poison, streaming"] == {"8192": 3.0, "65536": 17.0}
    assert record["streamed_gb_per_s"]["epoch"]["8192"] == 4321.0


def seen(monkeypatch, names, reaches=lambda a, b: True):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: names[i])
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", reaches)


def test_gpus_that_cannot_be_ranks_are_named(monkeypatch):
    seen(monkeypatch, ["H200", "H200"])
    check_peers(2)
    with pytest.raises(DeviceError, match="4 GPUs were asked for, and torch sees 2"):
        check_peers(4)
    with pytest.raises(DeviceError, match="9 GPUs: collectives take 8 at most"):
        check_peers(9)
    seen(monkeypatch, ["H200", "H200", "H100", "H200"])
    with pytest.raises(DeviceError, match="GPU 2 is a H100 and GPU 0 a H200"):
        check_peers(4)
    seen(monkeypatch, ["H200"] * 4, lambda a, b: (a, b) != (3, 1))
    with pytest.raises(DeviceError, match="GPU 3 does not reach the memory of GPU 1: choose GPUs"):
        check_peers(4)


def test_a_wait_that_expired_is_told():
    quiet = [0] * 8
    check_reports([quiet, quiet])
    left = [1, 0, 0, 0, 0, 0, 0, 0]
    with pytest.raises(RunError, match="GPU 1 waited in vain for word 40 of GPU 0: saw 0xffffffff, wanted 0x0"):
        check_reports([left, [1, 1, 0, 40, -1, 0, 0, 0]])
    with pytest.raises(RunError, match="none says what it waited for"):
        check_reports([left, quiet])


@pytest.mark.parametrize(
    ("policy", "ranks", "floats", "threads", "held"),
    [
        ("phase", 2, 1024, 256, 1), ("phase", 2, 2048, 512, 1), ("epoch", 2, 2048, 512, 2),
        ("phase", 4, 4096, 512, 2), ("phase", 2, 8192, 256, 8), ("phase", 8, 16384, 256, 2),
    ],
)  # fmt: skip
def test_a_thread_asks_for_no_more_than_its_registers_hold(policy, ranks, floats, threads, held):
    header = source_header(POLICIES[policy], ranks, floats // POLICIES[policy].values)
    assert f"#define THREADS {threads}\n#define VECTORS {held}\n" in header


def test_the_policies_are_the_backends():
    assert tuple(POLICIES) == kccl.POLICIES
    assert kccl.all_reduces().__module__ == "kog_triton.backends.cuda.peers"


def test_torch_adds_up_in_processes():
    rows = kccl.torch_rows(2, "gloo", [1024, 65536])
    assert list(rows) == ["gloo"] and sorted(rows["gloo"]) == [1024, 65536]
    assert all(us > 0 for us in rows["gloo"].values())


def test_a_torch_that_fails_is_told():
    with pytest.raises(RunError, match=r"carrier pigeon through torch: .*pigeon"):
        kccl.torch_rows(1, "carrier pigeon", [1024])
