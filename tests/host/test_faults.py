"""The command line of faults.py; that the faults are caught is for .ci/run and for whoever runs it by hand."""

import pytest

from tests import faults


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
