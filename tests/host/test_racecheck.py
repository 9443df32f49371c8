"""What is read out of racecheck's reports, on reports as it writes them; tests/gpu runs the tool itself."""

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
EXPLAINED = [
    ("store_volatile", "load_volatile"),
    ("store_volatile", "load_volatile"),
    ("end_step", "position"),
    ("store_volatile", "load_volatile"),
]


def test_races_are_pairs_of_functions():
    ring = [("bulk_load", "load")] * 2
    assert races_in(REPORT) == [*ring, *EXPLAINED[:3], ("end_step", "end_column"), EXPLAINED[3]]


def test_a_pair_is_explained_by_both_its_names():
    assert unexplained(races_in(REPORT)) == {("bulk_load", "load"), ("end_step", "end_column")}
    assert not unexplained(EXPLAINED)
    assert unexplained([("store_volatile", "load"), ("bulk_load", "load_volatile")])
