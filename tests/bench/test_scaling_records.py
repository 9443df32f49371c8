"""benchmarks/scaling.py: kept records beside the formula, and a fit that finds what made them. Rates are made up."""

import json
import runpy

import pytest

from tests import ROOT

SCALING = runpy.run_path(str(ROOT / "benchmarks" / "scaling.py"), run_name="scaling")
Measured, main = SCALING["Measured"], SCALING["main"]
FITTED = ("llama-3.2-1b", "qwen3-8b", "laneformer-2b")


def keep(folder, shape, gpus, rate, **changes):
    """A record as `kog bench decode` writes it, as far as it is read."""
    device = {"tokens_per_s": rate}
    record = {
        "kind": "decode",
        "model": {"name": shape},
        "test": {"num_gpus": gpus, "prompt_tokens": 32, "tokens": 256},
        "bandwidth": {"measured": 4.58e12 * gpus},
        "rows": [{"name": "reference", "device": None}, {"name": "cuda", "device": device}],
    }
    file = folder / f"{shape}-{gpus}.json"
    file.write_text(json.dumps(record | changes))
    return file


def made_by(blend, kept, shape, gpus):
    return Measured(shape, gpus, 32, 256, 4.58e12, 1.0).predicted(blend, kept)


def test_a_fit_finds_the_constants_that_made_the_rates(tmp_path, capsys):
    shapes = (*FITTED, "qwen3-14b")
    files = [
        keep(tmp_path, shape, gpus, made_by(3.1, 0.97, shape, gpus) * (1.05 if shape == "qwen3-14b" else 1))
        for shape in shapes
        for gpus in (1, 2)
    ]  # fmt: skip
    assert main([*map(str, files), "--fit", *FITTED]) == 0
    out = capsys.readouterr().out
    before, after = out.split("BLEND 3.1, KEPT 0.97, fitted to")
    rows = [line for line in after.splitlines() if line.startswith("| ") and "%" in line]
    assert len(rows) == 8
    for row in rows:
        assert row.endswith("| -4.8% |" if "qwen3-14b" in row else "| +0.0% |")
    assert before.count("%") == 8 and "| +0.0% |" not in before


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kind": "prefill"}, "no decode on a GPU"),
        ({"bandwidth": {"measured": None}}, "no decode on a GPU"),
        ({"rows": [{"name": "cuda", "device": None}]}, "no times of the cuda backend"),
        ({"model": {"name": "demo"}}, "demo"),
    ],
)
def test_what_is_no_record_of_a_shape_is_named(tmp_path, capsys, changes, says):
    file = keep(tmp_path, "qwen3-8b", 2, 500.0, **changes)
    assert main([str(file)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {file}: not a record of kog bench decode --shape: ")
    assert says in err and err.count("\n") == 1


def test_a_shape_to_fit_that_no_record_has_is_named(tmp_path, capsys):
    file = keep(tmp_path, "qwen3-8b", 2, 500.0)
    assert main([str(file), "--fit", "llama-3.2-1b"]) == 2
    assert capsys.readouterr().err == "error: --fit llama-3.2-1b: no record has it\n"
