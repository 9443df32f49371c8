"""The README's picture shows what the kept records say, in both themes, and says it to who cannot see it."""

import importlib
import re
from xml.etree import ElementTree

import pytest

from kog_triton.bench.record import read_all, record_files
from kog_triton.bench.table import read_results
from tests import ROOT

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def drawing():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        return importlib.import_module("picture")


def kept(theme):
    return (ROOT / "docs" / f"speed-{theme}.svg").read_text(encoding="utf-8")


def compared():
    """Of every kept greedy comparison: the timed rows of GPU backends and peers, tokens/s by name, and the limit."""
    files = record_files(ROOT / "benchmarks" / "results")
    for record in (record for file in files for record in read_all(file)):
        if record["kind"] != "compare" or record["test"]["name"] != "tg256 @ d32":
            continue
        if record["test"]["sampling"] == "greedy":
            rows = {r["name"]: r for r in record["rows"] if r["host"] and r["name"] != "reference"}
            limit = record["bandwidth"]["measured"] / rows["cuda"]["floor"]["bytes"]
            yield record, {name: row["host"]["tokens_per_s"] for name, row in rows.items()}, limit


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_is_drawn_from_the_records(drawing, theme):
    records = read_results(ROOT / "benchmarks" / "results")
    again = "python benchmarks/picture.py"
    assert kept(theme) == drawing.picture(records, drawing.THEMES[theme]), again


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_bars_are_as_long_as_the_records_say(theme):
    """Read back from the file, against tokens/s, bytes and bandwidth as they were recorded."""
    root = ElementTree.fromstring(kept(theme))
    (line,) = root.iter(f"{SVG}line")
    bars = list(root.iter(f"{SVG}rect"))
    left = float(bars[0].get("x"))
    lengths = sorted(float(bar.get("width")) / (float(line.get("x1")) - left) for bar in bars)
    wanted = []
    for _, rates, limit in compared():
        peers = [rate for name, rate in rates.items() if name not in ("cuda", "triton")]
        ours = [rates[name] for name in ("cuda", "triton") if name in rates]
        wanted += [rate / limit for rate in ours + ([max(peers)] if peers else [])]
    assert len(wanted) > 10 and lengths == pytest.approx(sorted(wanted), rel=2e-3)
    texts = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
    for record, rates, limit in compared():
        assert f"{limit:,.0f}" in texts
        assert any(text.startswith(f"{rates['cuda']:,.0f}") for text in texts), record["model"]


def test_nothing_is_drawn_outside(drawing):
    root = ElementTree.fromstring(kept("light"))
    height = float(root.get("height"))
    assert root.get("viewBox") == f"0 0 {drawing.WIDTH} {height:g}"
    for text in root.iter(f"{SVG}text"):
        assert 0 <= float(text.get("x")) <= drawing.WIDTH and 0 < float(text.get("y")) <= height - 3
    for bar in root.iter(f"{SVG}rect"):
        assert float(bar.get("x")) + float(bar.get("width")) < drawing.WIDTH


def test_the_readme_says_in_words_what_it_shows():
    (said,) = re.findall(r'<img src="docs/speed-light\.svg"[^>]* alt="([^"]*)"', (ROOT / "README.md").read_text())
    (_, rates, limit) = next(c for c in compared() if c[0]["model"]["name"] == "llama-3.2-1b")
    figures = (rates["cuda"], limit, rates["triton"], rates["transformers-tuned"])
    assert re.findall(r"\d,\d{3}|\b\d{3}\b", said) == [f"{figure:,.0f}" for figure in figures]
    assert figures[3] == max(rate for name, rate in rates.items() if name not in ("cuda", "triton"))
    assert "speed-dark.svg" in (ROOT / "README.md").read_text()
