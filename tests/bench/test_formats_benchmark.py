"""benchmarks/formats.py runs, and docs/FORMATS.md says what its kept records say."""

import argparse

import pytest

from kog_triton.bench.record import read_all, record_files
from kog_triton.demo import checkpoint_path
from kog_triton.model.shapes import SHAPES
from tests import ROOT
from tests.lib import narrow_cases, tiny

DOCS = (ROOT / "docs" / "FORMATS.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "results"
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def formats(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import formats

    return formats


def kept(kind):
    """The newest record of a kind."""
    records = [record for file in record_files(RESULTS) for record in read_all(file)]
    ours = [r for r in records if r["schema"] == "kog_triton.formats/1" and r["kind"] == kind]
    return max(ours, key=lambda record: record["created"])


def test_the_quality_table_is_the_record_s(formats):
    record = kept("quality")
    table = "\n".join(formats.quality_table(record))
    assert table in DOCS
    assert record["rows"][0]["format"] == "its own"
    assert f"{record['text']['tokens']:,} tokens" in DOCS


def test_the_streaming_figure_is_the_record_s(formats):
    record = kept("stream")
    assert formats.stream_line(record) in DOCS
    assert record["bytes_read"] > 16e9 and record["peak_resident_bytes"] <= 4e9


def test_quality_of_the_demo(formats, capsys, monkeypatch):
    """Eight bits change less than four; a format that does not go with the model is named."""
    monkeypatch.setattr(formats, "WINDOW", 64)
    monkeypatch.setattr(formats, "QUALITY", ("int8-channel", "fp8-block", "int4-g32"))
    text = '"""Read lines."""\n\ndef read_lines(path):\n    with open(path) as f:\n        return f\n' * 40
    monkeypatch.setattr(formats, "held_out_text", lambda: text)
    model = checkpoint_path() / "model-00001-of-00002.safetensors"
    monkeypatch.setattr(formats, "sha256", lambda path: str(model))
    found = formats.quality(argparse.Namespace(model=str(checkpoint_path()), tokens=128))
    own, eight, four = found["rows"]
    assert own["kl_mean"] == 0 and 0 < eight["kl_mean"] < four["kl_mean"]
    assert own["perplexity"] > 1 and eight["top1"] >= four["top1"]
    assert [a["format"] for a in found["absent"]] == ["fp8-block"]
    assert len(formats.quality_table(found)) == 5


def test_a_stream_of_a_small_shape(formats, monkeypatch, tmp_path):
    small = tiny.LLAMA | narrow_cases.SIZES | {"dtype": "bfloat16"}
    monkeypatch.setitem(SHAPES, "small", small)
    found = formats.stream(argparse.Namespace(folder=tmp_path, shape="small", format="int4-g32"))
    assert 2 < found["bytes_read"] / found["bytes_written"] < 4
    assert 50e6 < found["peak_resident_bytes"] < 2e9 and not list(tmp_path.iterdir())
