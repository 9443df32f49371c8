"""KCCL's collectives on CPU threads: values, waits that end, ThreadSanitizer, and faults that are seen."""

import shutil

import pytest

from tests.lib.kccl_runs import COLLECTIVES, POLICIES, RACE, assert_right, build, plant, run

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
BLOCKS, STEPS = 2, 40
LIMIT = 400  # ms of a wait, where some expire
ALWAYS = {("PhaseWords", 2), ("PhaseWords", 4), ("PhaseWords", 8), ("EpochPairs", 4), ("PoisonWords", 4)}  # fmt: skip


def cases():
    found = []
    for policy in POLICIES:
        for ranks in (2, 4, 8):
            slow = (policy, ranks) not in ALWAYS
            marks = [pytest.mark.slow] if slow else []
            found.append(pytest.param(policy, ranks, marks=marks, id=f"{policy}-{ranks}"))
    return found


@pytest.mark.parametrize("what", COLLECTIVES)
@pytest.mark.parametrize(("policy", "ranks"), cases())
def test_every_block_finds_the_sums_in_rank_order(policy, ranks, what):
    """Two launches, with nothing done to the words between them."""
    ended = run(build(policy, ranks), what, BLOCKS, STEPS)
    assert_right(ended, policy, what, ranks, BLOCKS, STEPS)


@pytest.mark.parametrize("what", COLLECTIVES)
@pytest.mark.parametrize("policy", POLICIES)
def test_threads_race_for_nothing(policy, what):
    ended = run(build(policy, 2, judged=True), what, BLOCKS, 24)
    assert_right(ended, policy, what, 2, BLOCKS, 24)


@pytest.mark.slow
@pytest.mark.parametrize("what", COLLECTIVES)
@pytest.mark.parametrize("policy", POLICIES)
def test_many_seeds(policy, what):
    for seed in range(2, 12):
        for blocks in (1, 3, 5):
            ended = run(build(policy, 4), what, blocks, 100, seed)
            assert_right(ended, policy, what, 4, blocks, 100)


@pytest.mark.parametrize("what", ["reduce", "chosen"])
def test_ranks_leave_when_one_is_absent(what):
    """Each says whose word it waited for, and which mark it had; the absent one is told to leave as well."""
    ended = run(build("EpochPairs", 4), what, BLOCKS, STEPS, limit_ms=LIMIT, absent=2)
    assert ended.code == 1
    assert all(leave == 1 for leave, *_ in ended.reports)
    told = [report for report in ended.reports if report[1]]
    assert told and ended.reports[2][1] == 0
    for _, _, late_rank, place, seen, wanted in told:
        assert (late_rank, seen, wanted) == (2, 0, 1)
        assert place // (4 * 5) % 4 == 2  # of the rank's vectors in the first buffer


def noticed(folder, policy, what, header, before, after, judged=False):
    """Whether a planted fault shows in one of a few runs: as a wait that expires or as a value that is wrong."""
    program = build(policy, 2, judged, plant(folder, header, before, after))
    for seed in range(1, 7):
        ended = run(program, what, 3, 60, seed, limit_ms=LIMIT)
        if judged and ended.code == RACE:
            return "race"
        if ended.code == 1:
            return "expired"
        try:
            assert_right(ended, policy, what, 2, 3, 60)
        except AssertionError:
            return "wrong"
    return ""


ALL_FOUR = "((q.w[0] ^ mark) | (q.w[1] ^ mark) | (q.w[2] ^ mark) | (q.w[3] ^ mark))"
BUFFERS = "kBuffers = Policy::kBuffers * kAhead;"
FAULTS = {
    "a phase that does not flip": (
        "PhaseWords", "reduce", "policies.h", "return static_cast<u32>(n + 1) & 1;", "return n ? 1 : 1;",
    ),
    "a phase of the first word alone": ("PhaseWords", "reduce", "policies.h", ALL_FOUR, "((q.w[0] ^ mark))"),
    "an epoch of the first pair alone": (
        "EpochPairs", "reduce", "policies.h", "(q.w[1] ^ mark) | (q.w[3] ^ mark)", "q.w[1] ^ mark",
    ),
    "one buffer for two": ("PhaseWords", "reduce", "channel.h", BUFFERS, "kBuffers = kAhead;"),
    "one buffer for two, epochs": ("EpochPairs", "gather", "channel.h", BUFFERS, "kBuffers = kAhead;"),
    "two buffers for three": ("PoisonWords", "reduce", "channel.h", BUFFERS, "kBuffers = 2 * kAhead;"),
    "a buffer too few of delayed sums": ("EpochPairs", "delayed", "channel.h", BUFFERS, "kBuffers = 3;"),
    "a buffer that is not emptied": (
        "PoisonWords", "reduce", "channel.h", "constexpr u32 e = Policy::kEmpty;", "constexpr u32 e = 0;",
    ),
    "emptied without a fence": ("PoisonWords", "reduce", "channel.h", "      fence();\n", ""),
    "a sentinel compared as a float": (
        "PoisonWords", "reduce", "policies.h", "return q.w[3] == kEmpty ? 1 : 0;",
        "return float_of(q.w[3]) != float_of(q.w[3]);",
    ),
    "a value that is the sentinel": (
        "PoisonWords", "reduce", "policies.h", "last == kEmpty ? 0x7fc00000u : last", "last",
    ),
    "16 bytes that land apart": (
        "PoisonWords", "reduce", "policies.h", "{ store_whole(p, q); }", "{ store_words(p, q); }",
    ),
    "sums in another order": (
        "PhaseWords", "reduce", "collectives.h", "+= values[from][i][j];", "+= values[kRanks - 1 - from][i][j];",
    ),
    "a broadcast whose pair is not waited for": (
        "PhaseWords", "chosen", "collectives.h",
        "return static_cast<u32>(pair >> 32) != mark(epoch);", "return pair == 0;",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_noticed(name, tmp_path):
    assert noticed(tmp_path, *FAULTS[name]) in ("expired", "wrong")


def test_a_place_that_several_senders_share_loses_a_number(tmp_path):
    """A sender's own store lands after the next sender's, which nobody then finds: in one run of 40 or so."""
    place = ("collectives.h", "return offset + 2 * static_cast<u32>(from);", "(void)from;\n    return offset;")
    program = build("EpochPairs", 4, include=plant(tmp_path, *place))
    assert any(run(program, "chosen", 1, 100, seed, limit_ms=LIMIT).code == 1 for seed in range(1, 400))


def test_a_plain_load_is_a_race(tmp_path):
    plain = "policies.h", "return load_words(p);", "return *reinterpret_cast<const Vector*>(p);"
    assert noticed(tmp_path, "PhaseWords", "reduce", *plain, judged=True) == "race"
