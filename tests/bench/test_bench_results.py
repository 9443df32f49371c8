"""Kept results of `kog bench`: read, tabled, and the tables of README.md and RESULTS.md are what they say."""

import json
import lzma
from pathlib import Path

import jsonschema
import pytest

from kog_triton.bench import cli as bench
from kog_triton.bench.record import kept_file, make_row, read, read_all, record_files, write
from kog_triton.bench.show import notes, stage_table
from kog_triton.bench.table import (
    HEADLINE,
    OTHER_SCHEMAS,
    TABLES,
    between,
    headline,
    markers,
    read_results,
    table,
    write_tables,
)
from kog_triton.errors import RequestError
from tests import ROOT

SCHEMA = json.loads((ROOT / "kog_triton/bench/result.schema.json").read_text())


def test_the_newest_of_equal_measurements_counts(tmp_path):
    base = json.loads(json.dumps(a_record()))
    for day, rate in (("02", 200.0), ("01", 100.0), ("03", 300.0)):
        base["created"] = f"2026-01-{day}T00:00:00+00:00"
        base["rows"][0]["host"]["tokens_per_s"] = rate
        base["test"]["name"] = "tg8 @ d4" if day != "03" else "tg8 @ d9"
        (tmp_path / f"{day}.json").write_text(json.dumps(base))
    lines = table(read_results(tmp_path)).splitlines()
    assert [line.split("|")[5].strip() for line in lines[2:4]] == ["200", "300"]


def test_a_sampled_answer_is_another_test_than_a_greedy_one():
    sampled = json.loads(json.dumps(a_record()))
    sampled["test"]["sampling"] = "temperature 1"
    text = table([a_record(), sampled])
    assert "| tg8 @ d4 | **triton**" in text and "| tg8 @ d4, temperature 1 | **triton**" in text


def test_several_requests_stand_below_each_other_with_what_they_gain():
    record = json.loads(json.dumps(a_record())) | {"kind": "concurrency"}
    record["test"]["name"] = "1, 2, 8 x tg8 @ d4"
    one = record["rows"][0]
    record["rows"] = [
        one | {"requests": n, "over_one": n / 2, "host": one["host"] | {"tokens_per_s": 100.0 * n}} for n in (8, 1, 2)
    ]
    cells = [line.split(" | ")[2:5] for line in table([record]).splitlines()[2:]]
    assert cells == [["2 x tg8 @ d4", "**triton**", "200"], ["8 x tg8 @ d4", "**triton**", "800"]]
    assert "not checked; 4.00 times one's tokens |" in table([record])


def test_a_prompt_alone_has_its_time_and_no_rate():
    record = json.loads(json.dumps(a_record())) | {"kind": "prefill"}
    record["test"]["name"], record["rows"][0]["host"] = "pp4", None
    record["conditions"]["throttled"] = ["power cap"]
    (line,) = (line for line in table([record]).splitlines() if "triton" in line)
    assert line == "| H200 | llama-3.2-1b bf16 | pp4 | **triton** | - | - | 2.0 [1] | - | not checked |"


@pytest.mark.parametrize(
    ("seconds", "said"), [([9.0], "9.0 s."), ([9.0, 6.0, 5.0], "9.0 s, 5.0 with kernels kept from before.")]
)
def test_starts_stand_below_the_table(seconds, said):
    record = json.loads(json.dumps(a_record())) | {"kind": "startup", "conditions": None}
    row = make_row("cuda", "backend", "timed", "") | {"startup": {"total_s": seconds}}
    record["rows"], record["test"]["name"] = [row], "startup"
    last = table([record]).splitlines()[-1]
    assert last == f"From nothing to the first token of llama-3.2-1b bf16 on H200, cuda: {said}"


def test_an_interrupted_record_counts_nowhere(tmp_path):
    record = json.loads(json.dumps(a_record()))
    for name, interrupted in (("1", False), ("2", True)):
        record["created"], record["test"]["interrupted"] = f"2026-01-0{name}", interrupted
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    (kept,) = read_results(tmp_path)
    assert kept["created"] == "2026-01-01"


def a_record():
    row = make_row("triton", "backend", "timed", "")
    row |= {"dtype": "bf16", "ttft_us": 2e3, "floor": {"measured_mbu": 0.5}}
    row["host"] = {"tokens_per_s": 1.0, "itl_p50_us": 1.0, "itl_p99_us": 2.0}
    gone = make_row("llama-bench", "peer", "absent", "not on the PATH")
    return {
        "schema": "kog_triton.bench/1",
        "kind": "compare",
        "created": "2026-01-01T00:00:00+00:00",
        "model": {"name": "llama-3.2-1b", "dtype": "bf16", "weights": "random, seed 0"},
        "machine": {"gpu": "NVIDIA H200"},
        "test": {"name": "tg8 @ d4", "num_gpus": 1, "prompt_tokens": 4},
        "conditions": {"samples": [], "throttled": []},
        "rows": [row, gone],
    }


def test_the_table_tells_who_was_not_timed():
    text = table([a_record()])
    assert "| H200 | llama-3.2-1b bf16 | tg8 @ d4 | **triton** | 1 | 1 / 2 | 2.0 | 50% |" in text
    assert "Not timed with llama-3.2-1b bf16, tg8 @ d4 on H200: llama-bench (absent: not" in text
    assert table([]) == "No results are kept yet."


def test_layers_that_were_rounded_are_another_model():
    """A record of narrow weights never stands in the row of wide ones."""
    narrow = a_record()
    narrow["model"]["weights"] = "random, seed 0, made on cuda, layers round to nearest int4-g128"
    text = table([a_record(), narrow])
    assert "| H200 | llama-3.2-1b bf16 | " in text and "| H200 | llama-3.2-1b int4-g128 | " in text


def test_a_gpu_that_was_held_back_marks_its_rows():
    """One mark a reason, and a sentence to it; of a reason that was timed only the time."""
    records = []
    for depth, why in enumerate(([], ["power cap", "power cap for 3.0 ms"], ["hot"], ["hot"]), 4):
        record = json.loads(json.dumps(a_record()))
        record["test"] |= {"name": f"tg8 @ d{depth}", "prompt_tokens": depth}
        record["conditions"]["throttled"] = why
        records.append(record)
    records[0]["conditions"]["throttled"] = None
    text = table(records)
    rates = [line.split("|")[5].strip() for line in text.splitlines()[2:6]]
    assert rates == ["1", "1 [1]", "1 [2]", "1 [2]"]
    said = "The GPU was held back while these rows were timed:"
    assert f"[1] {said} power cap for 3.0 ms.\n" in text and f"[2] {said} hot.\n" in text
    assert "[3]" not in text


@pytest.mark.parametrize(("depths", "said"), [((20, 20), ""), ((20, 8), "; tokens judged behind 8"), ((20,), " 5")])
def test_a_text_judged_elsewhere_than_timed_says_where(depths, said):
    """Old records have no depth: they judged behind the positions whose logits they compared."""
    record = a_record()
    record["test"]["prompt_tokens"] = depths[0]
    check = {"top1": 1.0, "kl_mean": 0.001, "positions": 5}
    record["rows"][0]["check"] = check | ({"depth": depths[1]} if len(depths) > 1 else {})
    cell = table([record]).splitlines()[2].split("|")[9].strip()
    assert cell.startswith("top-1 1.000, KL 1e-03") and cell.endswith(said)
    assert ("judged" in cell) == (depths != (20, 20))


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": "other/2"}'])
def test_a_file_that_is_no_record_is_named(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(RequestError, match=r"x\.json"):
        read_results(tmp_path)


@pytest.mark.parametrize("key", ["kind", "machine", "model", "test", "rows", "created"])
def test_a_record_that_lacks_something_is_named(tmp_path, key):
    record = a_record()
    (tmp_path / "whole.json").write_text(json.dumps(record))
    assert len(read_results(tmp_path)) == 1
    del record[key]
    (tmp_path / "x.json").write_text(json.dumps(record))
    with pytest.raises(RequestError, match=rf"x\.json: not a whole record.*{key}"):
        read_results(tmp_path)


@pytest.mark.parametrize("created", [None, 5, "yesterday"])
def test_a_record_of_no_day_is_named(tmp_path, created):
    (tmp_path / "x.json").write_text(json.dumps(a_record() | {"created": created}))
    with pytest.raises(RequestError, match=r"x\.json: not a whole record"):
        read_results(tmp_path)


@pytest.mark.parametrize("key", ["host", "name", "check"])
def test_a_record_whose_row_lacks_something_is_named(tmp_path, key):
    record = a_record()
    del record["rows"][0][key]
    (tmp_path / "x.json").write_text(json.dumps(record))
    with pytest.raises(RequestError, match=rf"x\.json: not a whole record.*{key}"):
        read_results(tmp_path)


def test_markers():
    first, last = markers("results")
    assert between("no markers") is None and between(f"{last}{first}") is None
    assert between(f"a {first}\nb\n{last} c") == "b"
    assert between(f"a {first}\nb\n{last} c", "headline") is None


def test_a_file_without_markers_is_left_alone(tmp_path):
    file = tmp_path / "README.md"
    file.write_text("nothing")
    with pytest.raises(RequestError, match="are missing"):
        write_tables(file, [a_record()])
    assert file.read_text() == "nothing"


def test_each_table_goes_between_its_own_markers(tmp_path):
    file = tmp_path / "README.md"
    lines = [f"{markers(name)[0]}\nold\n{markers(name)[1]}\n" for name in TABLES]
    file.write_text("a\n" + "b\n".join(lines) + "c\n")
    write_tables(file, [a_record()])
    text = file.read_text()
    for name, made in TABLES.items():
        assert between(text, name) == made([a_record()])
    assert text.startswith("a\n") and text.endswith("-->\nc\n") and "old" not in text


def test_the_headline_has_its_rows_in_its_order_and_its_own_notes():
    """Rows of which nothing is kept are left out; a mark counts among the rows that are shown."""
    records = []
    for test, throttled in (("tg9 @ d4", "heat"), (HEADLINE[4][2], "power"), (HEADLINE[0][2], "")):
        record = json.loads(json.dumps(a_record()))
        record["test"]["name"] = test
        record["conditions"]["throttled"] = [throttled] if throttled else []
        record["rows"][0]["name"] = "cuda"
        records.append(record)
    lines = headline(records).splitlines()
    assert [line.split(" | ")[2] for line in lines[2:4]] == [HEADLINE[0][2], HEADLINE[4][2]]
    assert " [1] | " in lines[3] and "[" not in lines[2]
    assert lines[4:] == ["", "[1] The GPU was held back while these rows were timed: power."]
    assert "heat" in table(records)


def test_no_results_never_take_the_place_of_some(tmp_path, capsys):
    """A folder that is not there is a slip of the pen, not an empty one."""
    file = tmp_path / "README.md"
    file.write_text("{}\nold\n{}\n".format(*markers("results")))
    argv = ["table", "--into", str(file), "--results", str(tmp_path / "none")]
    assert bench.main(argv) == 2 and "none: no such folder" in capsys.readouterr().err
    assert "old" in file.read_text()


def test_a_file_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    file = tmp_path / "README.md"
    file.write_text("{}\nold\n{}\n".format(*markers("results")))

    def refuse(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(RequestError, match=r"README\.md: cannot be written: Permission denied"):
        write_tables(file, [a_record()])


def test_where_results_are_kept():
    record = {"machine": {"gpu": "NVIDIA H100 80GB HBM3"}, "created": "2026-01-02T03:04:05+00:00"}
    assert kept_file(record, "a-b", Path("r")) == Path("r/h100-80gb-hbm3/2026-01-02-a-b.json")


def test_rounds_that_differ_are_told():
    record = a_record() | {"bandwidth": None, "kind": "startup"}
    record["machine"] |= {"packages": {}, "commit": None, "dirty": None, "source": "0" * 64}
    record["machine"] |= {"python": "3", "driver": None}
    record["rows"][0]["repeatable"] = False
    assert any("did not give the same tokens" in line for line in notes(record))


def test_a_long_record_is_kept_compressed(tmp_path):
    record = a_record() | {"created": "2026-01-02T03:04:05+00:00"}
    record["machine"]["gpu"] = "NVIDIA H200"
    assert kept_file(record, "a", tmp_path).suffix == ".json"
    record["rows"] = [record["rows"][0] | {"samples": [float(i) for i in range(20_000)]}]
    file = kept_file(record, "a", tmp_path)
    write(record, file)
    assert file.name == "2026-01-02-a.json.xz" and record_files(tmp_path) == [file]
    assert read(file) == record and file.stat().st_size < 64 << 10
    day = tmp_path / "2026-01-02.jsonl.xz"  # of two, a line each
    day.write_bytes(lzma.compress(2 * f"{json.dumps(record)}\n".encode()))
    assert record_files(tmp_path) == [day, file] and read_all(day) == [record, record]
    assert read_results(tmp_path) == 3 * [record]
    for damaged in (file, day):
        whole = damaged.read_bytes()
        damaged.write_bytes(whole[:-9])
        with pytest.raises(RequestError, match=f"{damaged.name}: not a record"):
            read_results(tmp_path)
        damaged.write_bytes(whole)


def test_kept_results_are_records():
    validator = jsonschema.Draft202012Validator(SCHEMA)
    files = record_files(ROOT / "benchmarks" / "results")
    assert any(file.suffix == ".xz" for file in files)
    records = [record for file in files for record in read_all(file)]
    ours = [record for record in records if record["schema"] not in OTHER_SCHEMAS]
    assert len(ours) > 30
    for record in ours:
        validator.validate(record)
    for record in records:
        assert {"created", "machine", "schema"} <= set(record)


@pytest.mark.parametrize(("file", "name"), [("README.md", "headline"), ("benchmarks/RESULTS.md", "results")])
def test_the_tables_are_the_results(file, name):
    records = read_results(ROOT / "benchmarks" / "results")
    assert records
    inside = between((ROOT / file).read_text(encoding="utf-8"), name)
    again = "python -m kog_triton.bench table --into README.md benchmarks/RESULTS.md"
    assert inside == TABLES[name](records), again


def test_the_readme_shows_eight_rows():
    inside = between((ROOT / "README.md").read_text(encoding="utf-8"), "headline")
    rows = [line for line in inside.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + len(HEADLINE) == 10


def test_a_record_holds_no_figure_that_is_no_number(tmp_path):
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="JSON"):
            write({"figure": value}, tmp_path / "a.json")
    assert not (tmp_path / "a.json").exists()


def test_stages_have_a_row_each_and_their_sum():
    stage = {"stage": "qkv", "runs": 3, "error": 1e-3, "us": 2.0, "floor_us": 1.0, "ratio": 0.5, "bytes": 4_000_000}
    rows = [
        {"name": "cuda", "status": "timed", "stages": [stage, stage | {"stage": "o", "runs": 2}]},
        {"name": "late", "status": "absent"},
    ]
    table = stage_table({"rows": rows})
    cells = [list(column.cells) for column in table.columns]
    assert list(zip(*cells, strict=True)) == [
        ("cuda", "qkv", "3", "1.0e-03", "2.00", "1.00", "50.0%", "4.00", "6.0"),
        ("cuda", "o", "2", "1.0e-03", "2.00", "1.00", "50.0%", "4.00", "4.0"),
        ("cuda", "all", "", "", "", "", "", "", "10.0"),
    ]
