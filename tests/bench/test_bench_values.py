"""Figures and cells of a record by hand, at their edges."""

import numpy as np
import pytest

from kog_triton.bench import check, kl_limit, record, table, timing


def row(**changed):
    return {
        "name": "cuda", "kind": "backend", "version": "1", "dtype": "bf16", "ttft_us": 2345.0, "over_one": None,
        "host": {"tokens_per_s": 1234.4, "itl_p50_us": 810.2, "itl_p99_us": 1820.6},
        "floor": {"measured_mbu": 0.876},
        "check": {"top1": 0.98765, "kl_mean": 0.00123, "positions": 128},
    } | changed  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "depth", "cells"),
    [
        ({}, 128, ("**cuda**", "1,234", "810 / 1,821", "2.3", "88%", "top-1 0.988, KL 1e-03")),
        ({"dtype": "f32"}, 1, ("**cuda**, f32", "1,234", "810 / 1,821", "2.3", "88%", "top-1 0.988, KL 1e-03")),
        (
            {"kind": "peer", "check": None, "version": "vLLM 1"}, 1,
            ("vLLM 1", "1,234", "810 / 1,821", "2.3", "88%", "not checked"),
        ),
        ({"kind": "peer", "check": None, "version": None}, 1,
         ("cuda", "1,234", "810 / 1,821", "2.3", "88%", "not checked")),
        ({"host": None, "ttft_us": 1_234_567.0}, 1,
         ("**cuda**", "-", "-", "1,234.6", "-", "top-1 0.988, KL 1e-03")),
        ({"floor": {"measured_mbu": None}}, 1,
         ("**cuda**", "1,234", "810 / 1,821", "2.3", "-", "top-1 0.988, KL 1e-03")),
        ({}, 129, ("**cuda**", "1,234", "810 / 1,821", "2.3", "88%",
                   "top-1 0.988, KL 1e-03; tokens judged behind 128")),
        ({"check": {"top1": 1.0, "kl_mean": 0.5, "positions": 128, "depth": 32768}, "over_one": 1.25}, 32769,
         ("**cuda**", "1,234", "810 / 1,821", "2.3", "88%",
          "top-1 1.000, KL 5e-01; tokens judged behind 32,768; 1.25 times one's tokens")),
    ],
)  # fmt: skip
def test_cells_of_a_row(changed, depth, cells):
    assert table._cells(row(**changed), depth) == cells


def made(rows=(), gpu="NVIDIA H200", name="p32", gpus=1, **test):
    return {
        "kind": "decode", "created": "2026-01-01T00:00:00+00:00", "conditions": None, "rows": [*rows],
        "machine": {"gpu": gpu}, "model": {"name": "m", "weights": "random", "dtype": "bf16"},
        "test": {"num_gpus": gpus, "name": name, "prompt_tokens": 32} | test,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({}, ("H200", "m bf16", "p32")),
        ({"gpus": 2}, ("2 x H200", "m bf16", "p32")),
        ({"gpu": None}, ("CPU", "m bf16", "p32")),
        ({"sampling": "greedy"}, ("H200", "m bf16", "p32")),
        ({"sampling": "top-p 0.9"}, ("H200", "m bf16", "p32, top-p 0.9")),
    ],
)
def test_what_makes_two_records_one_measurement(changed, key):
    assert table._key(made(**changed)) == key


def test_what_held_a_gpu_back_is_said_once():
    whys = ["power", "power for 3 s", "heat", "heat"]
    assert table._held_back({"conditions": {"throttled": whys}}) == "power for 3 s, heat, heat"
    assert table._held_back({"conditions": None}) == ""
    assert table._held_back({"conditions": {"throttled": None}}) == ""


def test_rows_in_the_order_of_their_speed():
    fast, slow = row(), row(host={"tokens_per_s": 1.0})
    prompt, four = row(host=None, ttft_us=5.0), row(requests=4)
    assert [table._order(r) for r in (fast, slow, prompt, four)] == [
        (1, -1234.4), (1, -1.0), (1, 5.0), (4, -1234.4),
    ]  # fmt: skip
    assert [table.is_timed(row(host=h, ttft_us=t)) for h, t in ((None, None), (None, 0.0), ({"a": 1}, None))] == [
        False, True, True,
    ]  # fmt: skip


def engine(name, rate, kind="backend"):
    return {"name": name, "kind": kind, "host": rate and {"tokens_per_s": rate}}


@pytest.mark.parametrize(
    ("rows", "target"),
    [
        ([], {"reached": 0.0, "by": None, "met": False}),
        ([engine("a", None)], {"reached": 0.0, "by": None, "met": False}),
        ([engine("p", 200.0, "peer")], {"reached": 0.0, "by": None, "met": False}),
        ([engine("a", 99.9), engine("f", None), engine("p", 500.0, "peer")],
         {"reached": 99.9, "by": "a", "met": False}),
        ([engine("a", 90.0), engine("b", 100.0)], {"reached": 100.0, "by": "b", "met": True}),
        ([engine("a", 100.1)], {"reached": 100.1, "by": "a", "met": True}),
    ],
)  # fmt: skip
def test_a_target_is_reached_by_the_fastest_of_ours(rows, target):
    assert record.target_of(rows, 100.0) == {"tokens_per_s": 100.0} | target
    assert record.target_of(rows, None) is None


def test_where_a_record_is_kept(tmp_path):
    one = made() | {"created": "2026-02-03T04:05:06+00:00"}
    assert record.kept_file(one, "a.b", tmp_path) == tmp_path / "h200" / "2026-02-03-a.b.json"
    amd = one | {"machine": {"gpu": "AMD Instinct MI300X (x)"}}
    assert record.kept_file(amd, "a", tmp_path).parent == tmp_path / "instinct-mi300x-x"
    assert record.kept_file(one | {"machine": {"gpu": None}}, "a", tmp_path).parent == tmp_path / "cpu"
    for name in ("", "-a", "A", "a/b", "a b"):
        with pytest.raises(record.RequestError, match="a name of a-z"):
            record.kept_file(one, name, tmp_path)
    size = len(record.text_of(one))
    padded = one | {"argv": "x" * (record.LONG - size - len('  "argv": "",\n'))}
    assert len(record.text_of(padded)) == record.LONG
    assert record.kept_file(padded, "a", tmp_path).suffix == ".json"
    longer = padded | {"argv": padded["argv"] + "x"}
    assert record.kept_file(longer, "a", tmp_path).name.endswith("-a.json.xz")


def test_what_a_row_says_of_an_error():
    assert record.note_of(record.RequestError("too\n  many")) == "too many"
    assert record.note_of(ValueError("x")) == "ValueError: x"
    assert len(record.note_of(ValueError("x" * 400))) == record.MOST_NOTE == 300
    empty = record.make_row("a", "peer", "absent", "why")
    assert (empty["name"], empty["kind"], empty["status"], empty["note"]) == ("a", "peer", "absent", "why")
    assert all(empty[name] is None for name in record.MEASURED)


def test_figures_of_two_requests_by_hand():
    stamps = [[[0.0, 10.0, 30.0], [5.0, 25.0, 45.0]], [[0.0, 10.0, 20.0], [0.0, 10.0, 20.0]]]
    found = timing.figures(stamps)
    assert found["tokens_per_s_rounds"] == [5 / 45 * 1e6, 5 / 20 * 1e6]
    assert found["tokens_per_s"] == (5 / 45 * 1e6 + 5 / 20 * 1e6) / 2
    assert found["itl_us"] == [[10.0, 20.0], [20.0, 20.0], [10.0, 10.0], [10.0, 10.0]]
    assert (found["itl_p50_us"], found["itl_max_us"], found["p99_over_p50"]) == (10.0, 20.0, None)
    assert timing.figures([[[1.0]]]) is None
    assert timing.figures([[[1.0, 1.0]]])["tokens_per_s"] == 1e9  # no gap is shorter than a nanosecond


@pytest.mark.parametrize(("count", "there"), [(99, False), (100, True)])
def test_a_99th_percentile_takes_a_hundred_gaps(count, there):
    found = timing.jitter([[1.0] * count])
    assert found == (1.0 if there else None)
    assert (timing.jitter([[1.0] * (count // 2), [1.0] * (count - count // 2)]) == 1.0) is there


def test_bandwidth_s_own_time():
    assert timing.roofline(1000, 2e6, 4e9, 2e9) == {
        "bytes": 1000, "datasheet_us": 0.25, "datasheet_mbu": 0.5, "measured_us": 0.5, "measured_mbu": 1.0,
    }  # fmt: skip
    assert timing.roofline(1000, None, None, 2e9) == {
        "bytes": 1000, "datasheet_us": None, "datasheet_mbu": None, "measured_us": 0.5, "measured_mbu": None,
    }  # fmt: skip


def test_the_numbers_that_judge():
    """Each is a promise of benchmarks/README.md or of an issue: none moves by itself."""
    assert (check.CHECK_POSITIONS, check.CHECK_DEPTH, check.CHECK_TOKENS, check.PASS) == (128, 32768, 32, 256)
    assert check.MAX_GAP == 0.5
    assert (kl_limit.FACTOR, kl_limit.LEAST, kl_limit.LANES, kl_limit.PEER) == (1.5, 0.02, 0.005, 0.25)
    assert (kl_limit.UNPACKED, kl_limit.LARGE, kl_limit.MOST_OF_LARGE) == (1.1, 7e9, 1e-3)
    assert (timing.WINDOW, timing.LEAST, record.LONG) == (64, 100, 8192)


def test_logits_of_another_number_of_positions_are_an_error():
    two = np.eye(2, 3)
    same, kl = check.compare(two, two)
    assert same.tolist() == [True, True] and kl.tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match=r"longer|shorter"):
        check.compare(two, two[:1])
    assert check.token_gaps(np.array([[0.0, 1.0, 2.0]]), [0]).tolist() == [2 / np.std([0.0, 1.0, 2.0])]
