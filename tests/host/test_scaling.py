"""The prediction for several GPUs: its constants are the best fit, its page prints what it says."""

import importlib.util
import re
import sys

import numpy as np
import pytest

from kog_triton.model.shapes import named_shape
from kog_triton.plan import main
from kog_triton.schedule import scaling
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import GPUS
from tests import ROOT

BANDWIDTH = GPUS[scaling.PROTOTYPE_GPU].bandwidth
PAGE, MEASURED = (ROOT / "docs" / "SCALING.md").read_text().split("## What was measured")
RECORDS = ROOT / "benchmarks" / "results" / "h200"


def rate(shape, gpus, **fitted):
    spec = named_shape(shape)
    return 1 / scaling.predict(build(spec, gpus), spec.bytes_per_token / gpus, BANDWIDTH, **fitted)


def misses(**fitted):
    return [rate(shape, gpus, **fitted) / found - 1 for shape, gpus, found in scaling.PROTOTYPES]


def test_the_constants_are_the_best_fit():
    grid = [(b, h) for b in np.arange(1.5, 3.5, 0.1) for h in np.arange(2e-7, 2e-6, 1e-7)]
    best = min(grid, key=lambda g: np.square(np.log1p(misses(blend=g[0], hop=g[1]))).sum())
    assert best == pytest.approx((scaling.BLEND, scaling.HOP))
    assert scaling.WORST_MISS - 0.01 < max(map(abs, misses())) <= scaling.WORST_MISS
    assert max(gpus for _, gpus, _ in scaling.PROTOTYPES) == scaling.MOST_FITTED


def test_exchanges_are_counted():
    llama, lanes = named_shape("llama-3.2-1b"), named_shape("laneformer-2b")
    assert scaling.exchanges(build(llama)) == (5 * 16 + 1, 0)
    assert scaling.exchanges(build(llama, 2)) == (5 * 16 + 1, 2 * 16 + 1)
    assert scaling.exchanges(build(lanes, 4)) == (5 * 15 + 2, 2)  # delayed sums wait for nobody


def test_the_page_has_what_the_formula_says():
    number = r"([\d,]+)"
    rows = re.findall(
        rf"^\| ([\w.-]+) \| (\d) \| {number} \| {number} \| (\S+)% \|$", PAGE, re.MULTILINE
    )
    assert len(rows) == len(scaling.PROTOTYPES)
    for row, (shape, gpus, found), miss in zip(rows, scaling.PROTOTYPES, misses(), strict=True):
        assert row == (
            shape,
            str(gpus),
            f"{found:,}",
            f"{rate(shape, gpus):,.0f}",
            f"{100 * miss:+.1f}",
        )
    others = re.findall(
        rf"^\| ([\w.-]+) \| {number} \| {number} \| {number} \|$", PAGE, re.MULTILINE
    )
    assert len(others) == 6
    for shape, *rates in others:
        assert rates == [f"{rate(shape, gpus):,.0f}" for gpus in (2, 4, 8)], shape
    assert f"^{scaling.BLEND} + chain" in PAGE and f"{scaling.HOP * 1e6} us x (GPUs - 1)" in PAGE


def test_the_page_has_what_was_measured():
    spec = importlib.util.spec_from_file_location(
        "scaling_records", ROOT / "benchmarks" / "scaling.py"
    )
    records = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = records  # where dataclass looks for it
    spec.loader.exec_module(records)
    measured = [row for file in RECORDS.glob("*-two-gpus-*") for row in records.rows_of(file)]
    assert measured and records.table(measured, scaling.BLEND, scaling.HOP) in MEASURED


def test_plan_predicts_for_several_gpus_alone(capsys):
    assert main(["--shape", "laneformer-2b", "--gpus", "2"]) == 0
    out = capsys.readouterr().out
    said = float(re.search(r"Predicted: ([\d,]+) tokens/s", out)[1].replace(",", ""))
    assert said == pytest.approx(rate("laneformer-2b", 2), rel=0.01) and "beyond" not in out
    for argv in (["--gpus", "1"], ["--gpus", "2", "--device", "mi300x"]):
        assert main(["--shape", "laneformer-2b", *argv]) == 0
        assert "Predicted" not in capsys.readouterr().out
    assert main(["--shape", "llama-3.2-1b", "--gpus", "8"]) == 0
    assert "8 GPUs are beyond them" in capsys.readouterr().out
