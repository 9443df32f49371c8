"""The command line of faults.py; that the faults are caught is for .ci/run and for whoever runs it by hand."""

import pytest

from tests import faults
from tests.planted import draw


def test_faults_are_chosen_by_quick_and_by_words():
    assert faults.asked([]) == faults.FAULTS
    quick = faults.asked(["--quick"])
    assert 1 < len(quick) < len(faults.FAULTS) and all(f.quick for f in quick)
    named = faults.asked(["top-p", "Philox"])
    assert [f.what.split()[0] for f in named] == ["top-p", "Philox"]
    assert set(faults.asked(["--quick", "RoPE"])) == set(quick) & set(faults.asked(["RoPE"]))


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--fast"], "unrecognized arguments: --fast"),
        (["magic"], "'magic' stands in no fault's sentence"),
        (["--quick", "Philox"], "none of the quick faults has 'Philox' in it"),
    ],
)
def test_what_it_does_not_know_is_refused_with_its_usage(capsys, argv, said):
    with pytest.raises(SystemExit) as exit:
        faults.asked(argv)
    err = capsys.readouterr().err
    assert exit.value.code == 2 and err.startswith("usage: tests/faults.py") and said in err


def test_faults_are_listed(capsys):
    with pytest.raises(SystemExit) as exit:
        faults.asked(["--list"])
    assert exit.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) == len(faults.FAULTS)


def test_each_fault_has_one_place_and_tests():
    for fault in faults.FAULTS:
        text = (faults.ROOT / faults.place(fault)).read_text()
        assert text.count(fault.before) == 1 and fault.before != fault.after, fault.what
        assert (faults.ROOT / "tests" / fault.tests).is_file(), fault.what
    assert len({fault.what for fault in faults.FAULTS}) == len(faults.FAULTS)


def test_a_draw_is_told_by_its_seed():
    package = faults.ROOT / "kog_triton"
    one, again, other = (draw.draw(package, seed, 12) for seed in (1, 1, 2))
    assert one == again and one != other and len({(d.path, d.line) for d in one}) == 12
    assert one[:5] == draw.draw(package, 1, 5)
    for drawn in one:
        assert drawn.changed != (package / drawn.path).read_text()
        assert "  ->  " in faults.described(drawn)
        compile(drawn.changed, drawn.path, "exec")


def test_every_file_of_a_draw_has_tests():
    found = draw.files(faults.ROOT / "kog_triton")
    assert {"plan.py", "llm.py", "cli/request.py", "checkpoint/gguf/file.py"} <= {*found}
    for tests in found.values():
        assert tests and all((faults.ROOT / "tests" / one).is_file() for one in tests)


OPERATORS = {
    "a < b": {"((a) <= (b))"},
    "a in b": {"((a) not in (b))"},
    "a and b": {"((a) or (b))"},
    "not a": {"(a)"},
    "a // b": {"((a) * (b))"},
    "3": {"4"},
    "0.5": {"1.0"},
    "True": {"False"},
    "a if b else c": {"a if (not (b)) else c"},
    "f(a, b=c)": {"f(a)"},
}


@pytest.mark.parametrize("text", OPERATORS)
def test_operators(text):
    source = f"x = {text}\n"
    raw = source.encode()
    made = {(raw[:a] + now.encode() + raw[b:]).decode() for _, a, b, now in draw.changes(source)}
    assert made == {f"x = {one}\n" for one in OPERATORS[text]}


def test_what_no_operator_changes():
    assert not [*draw.changes('"""Text."""\nimport a\ndef f(x: 3) -> 4: ...\nx = f"{a + 1}"\nassert a < b\n')]
    calls = [now for *_, now in draw.changes("f(a)\n")]
    assert calls == ["pass"]


@pytest.mark.parametrize("argv", [["--draw", "1"], ["--draw", "1", "0"], ["--draw", "1", "2", "RoPE"]])
def test_what_a_draw_does_not_take(argv, capsys):
    with pytest.raises(SystemExit) as exit:
        faults.main(argv)
    assert exit.value.code == 2
