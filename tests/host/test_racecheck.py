"""What is read out of racecheck's reports, on reports as it writes them; tests/gpu runs the tool itself."""

import pytest

from tests.lib.racecheck import races_in, unexplained

REPORT = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at kog::bulk_load(void *, unsigned long long)+0x5190 in ptx.h:313
=========     and Read access at kog::Words<(int)2>::load(const unsigned char *)+0xa090 in matvec.h:157 [47616 hazards]
=========     and Read access at kog::Words<(int)2>::load(const unsigned char *)+0xa0a0 in matvec.h:157 [11904 hazards]
=========
========= Error: Race reported between Read access at kog::load_volatile(const unsigned int *)+0x9a0 in ptx.h:316
=========     and Write access at kog::store_volatile(unsigned int *, unsigned int)+0x5140 in ptx.h:317 [208 hazards]
=========     and Write access at kog_decode+0xb700 [72 hazards]
=========
========= Error: Race reported between Write access at kog::end_step(kog::Block &)+0x10 in decode.h:61
=========     and Read access at kog::StepOrder::position(const kog::Block &) const+0x2fe0 in cursor.h:26 [132 hazards]
=========     and Write access at kog::columns::end_column(kog::Block &)+0x10950 in decode.h:25 [508 hazards]
=========
========= Error: Race reported between Write access at kog_columns+0xb700
=========     and Read access at kog::load_volatile(const unsigned int *)+0x9a0 in ptx.h:316 [8 hazards]
told of [5, 6]
========= RACECHECK SUMMARY: 4 hazards displayed (4 errors, 0 warnings)
"""
RING = ("bulk_load", "load")
TABLE = {("kog_decode", 0xB700): "store_volatile", ("kog_columns", 0xB700): "store_volatile"}
OTHER = {("kog_decode", 0xB700): "mix", ("kog_columns", 0xB700): "store_volatile"}


def test_races_are_pairs_of_functions():
    assert races_in(REPORT, TABLE) == [
        RING,
        RING,
        ("store_volatile", "load_volatile"),
        ("store_volatile", "load_volatile"),
        ("end_step", "position"),
        ("end_step", "end_column"),
        ("store_volatile", "load_volatile"),
    ]
    assert races_in(REPORT)[3] == ("kog_decode", "load_volatile")


def test_a_report_that_names_no_two_accesses_is_told():
    with pytest.raises(AssertionError, match="a report without two accesses:  Write access at tol"):
        races_in(REPORT.replace("kog::bulk_load", "tol\nd").replace("kog::Words", "kog::Wo\nrds"))


def test_a_pair_is_explained_by_both_its_names_in_one_kernel():
    left = {RING, ("end_step", "end_column")}
    assert unexplained(REPORT, [TABLE]) == unexplained(REPORT, [OTHER, TABLE]) == left
    assert unexplained(REPORT, [OTHER]) == left | {("mix", "load_volatile")}
    assert unexplained(REPORT) >= {("kog_decode", "load_volatile"), ("kog_columns", "load_volatile")}
