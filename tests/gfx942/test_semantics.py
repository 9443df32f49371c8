"""What the executor makes of each instruction, held to what another compiler, or numpy, makes of the same.

Arithmetic: one expression compiled for gfx942 and executed, for x86 and run. Lanes, LDS, memory, matrices: numpy.
Every operation that the executor knows must be among these tests.
"""

import re

import numpy as np
import pytest

from tests.lib.gfx942 import clang, cross_lane, differential, folding
from tests.lib.gfx942.cross_lane import DPP, LANE, LANES, SWIZZLE, run
from tests.lib.gfx942.executor import WEAK, Buffer, Fault, Kernel, Launch, operations

ROUNDS = (0, 1)
u32, f32 = np.uint32, np.float32


def words(seed: int, count: int = LANES) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, count, u32)


# ---- arithmetic ----


@pytest.mark.parametrize("seed", ROUNDS)
def test_arithmetic_is_what_x86_makes_of_it(seed):
    assert differential.wrong(differential.inputs(seed)) == {}


# What has no value of its own, or none that LLVM knows: lanes, memory, matrices, control; held to numpy below.
NOT_FOLDED = re.compile(
    r"(BUFFER|GLOBAL|DS)_|S_(LOAD|DCACHE|BUFFER)|S_(WAITCNT|BARRIER|NOP|SLEEP|ENDPGM|C?BRANCH|GETREG|SETREG|SETPRIO|MEM|SETPC"
    r"|GETPC|SWAPPC|ICACHE|TRAP)|V_(MFMA|ACCVGPR|READ|WRITE|MBCNT)|S_\w+_SAVEEXEC|V_CVT_PKRTZ"
)


def test_arithmetic_is_what_llvm_folds_it_to():
    """By LLVM's own integers and floats, no hardware; AMD's intrinsics where clang has them."""
    found, held = folding.wrong()
    assert found == {}
    seen = {m for name in held for m in Kernel(differential.code_object(), name).mnemonics() if not NOT_FOLDED.match(m)}
    rest = {m for m in operations() if not NOT_FOLDED.match(m)}
    assert rest - seen == set()


def test_a_bit_that_is_not_what_llvm_folds_to_is_seen(monkeypatch):
    constants = folding.folded()
    monkeypatch.setattr(folding, "folded", lambda: constants | {("f_perm", 3): constants["f_perm", 3] ^ 4})
    assert folding.wrong()[0].keys() == {"v_perm"}


def test_the_comparison_sees_a_bit():
    data = differential.inputs(0)
    got, _ = differential.executed("v_perm", "u32", data)
    want = differential.expected("perm", "u32", data)
    want[77] ^= 1 << 31
    assert differential.differing(got, want).tolist() == [77]


def test_every_operation_is_tested():
    seen = set()
    for source, names in (
        (differential.code_object(), [prefix + name for prefix, name, _ in differential.ROWS]),
        (cross_lane.code_object(), list(cross_lane.code_object().kernels)),
    ):
        for name in names:
            seen |= set(Kernel(source, name).mnemonics())
    assert operations().keys() - seen == set()


# ---- lanes ----


@pytest.mark.parametrize("name", DPP)
def test_dpp(name):
    """With a lane that reads nothing keeping what it has, or 0; with half of the lanes off, which give nothing."""
    source, there = DPP[name](LANE)
    source = np.clip(source, 0, 63)
    for form in ("keep", "zero"):
        for suffix, on in (("", np.ones(LANES, bool)), ("_odd", LANE % 2 == 1)):
            a, o = words(1), words(2)
            valid = there & on[source]
            want = np.where(on, np.where(valid, a[source], 0 if form == "zero" else o), o)
            run(f"dpp_{name}_{form}{suffix}", a, o)
            np.testing.assert_array_equal(o, want)


def test_dpp_masks_of_rows_and_banks():
    a, o = words(1), words(2)
    rows, banks = LANE // 16, LANE % 16 // 4
    chosen = (0x5 >> rows & 1) & (0x6 >> banks & 1)
    want = np.where(chosen, a[LANE // 16 * 16 + (LANE - 1) % 16], o)
    run("dpp_masks", a, o)
    np.testing.assert_array_equal(o, want)


def test_dpp_onto_its_own_source():
    a, o = words(1), words(2)
    want = np.where(LANE % 16 == 0, a, a + np.roll(a, 1))
    run("dpp_add", a, o)
    np.testing.assert_array_equal(o, want)


@pytest.mark.parametrize("name", SWIZZLE)
def test_swizzles(name):
    pattern, in_half = SWIZZLE[name], LANE & 31
    if name == "quad":
        source = (LANE & ~3) + (pattern >> 2 * (LANE & 3) & 3)
    else:
        source = (LANE & 32) + (((in_half & pattern & 31) | (pattern >> 5 & 31)) ^ (pattern >> 10 & 31))
    a, o = words(1), words(2)
    run(f"swizzle_{name}", a, o)
    np.testing.assert_array_equal(o, a[source])
    o, before = words(2), words(2)
    run(f"swizzle_{name}_low", a, o)
    np.testing.assert_array_equal(o, np.where(LANE < 40, np.where(source < 40, a[source], 0), before))


@pytest.mark.parametrize(("name", "lanes"), [("dpp_row_mirror_zero_odd", (1, 14)), ("swizzle_xor_16_low", (32, 48))])
def test_what_reads_a_lane_that_is_off_is_a_fault_in_adversarial_memory(name, lanes):
    with pytest.raises(Fault, match="lane {} reads lane {}, which is off".format(*lanes)):
        run(name, words(1), words(2), memory=WEAK)


def test_single_lanes_and_counts():
    a = words(3)
    for name, want in {
        "bpermute": a[a & 63],
        "readlane": np.full(LANES, a[a[1] & 63] + a[5], u32),
        "writelane": np.where((a[0] & 63) == LANE, a[1], a),
        "mbcnt": 7 + np.concatenate([[0], np.cumsum(a & 1)[:-1]]).astype(u32),
    }.items():
        o = words(4)
        run(name, a, o)
        np.testing.assert_array_equal(o, want, name)
    o, before = words(4), words(4)
    run("bpermute_low", a, o)
    np.testing.assert_array_equal(o, np.where(LANE < 40, np.where((a & 63) < 40, a[a & 63], 0), before))
    o = words(4)
    run("readfirstlane", a, o)
    np.testing.assert_array_equal(o, np.where(LANE > 20, a[21], before))


def test_lanes_that_leave_a_loop_at_different_times():
    a, o = words(5), words(6)

    def one(x: int, lane: int) -> int:
        total = 0
        while x:
            total += x if x & 1 else 1
            x >>= 1 + lane % 4
        return (total ^ 5 if lane % 3 == 0 else total) & 0xFFFFFFFF

    run("divergent", a, o)
    assert o.tolist() == [one(int(x), lane) for lane, x in enumerate(a)]


# ---- memory ----


def test_lds():
    back = LANES - 1 - LANE
    for memory, seed in ((None, 0), *((WEAK, seed) for seed in range(8))):
        extra = {"memory": memory, "seed": seed} if memory else {}
        a, o = words(7, 2 * LANES), words(8)
        first = a[:LANES]
        run("lds_words", a, o, **extra)
        np.testing.assert_array_equal(o, first[back] * u32(3) + ~first[back])
        run("lds_wide", a, o, **extra)
        x, pair = first[back], first[LANE ^ 1]
        y = [x, x + u32(1), x ^ u32(2), x * u32(3)]
        z = [pair ^ u32(2), pair]
        want = sum(u32(k) * v for k, v in zip((1, 5, 7, 11, 13, 17), y + z, strict=True))
        np.testing.assert_array_equal(o, want)
        run("lds_shorts", a, o, **extra)
        np.testing.assert_array_equal(o, first[back] & u32(0xFFFF) | (a[LANES:][back] & u32(0xFF)) << u32(16))
        wide = first.astype(np.uint64)[back]
        run("lds_pairs", a, o, **extra)
        total = wide + wide * np.uint64(3) + (wide * np.uint64(5) << np.uint64(13))
        np.testing.assert_array_equal(o, (total ^ total >> np.uint64(32)).astype(u32))
        run("lds_near", a, o, **extra)
        total = wide ^ (wide * np.uint64(3) + np.uint64(1))
        np.testing.assert_array_equal(o, (total ^ total >> np.uint64(32)).astype(u32))


def test_every_form_of_lds():
    a, o = words(17), words(18)
    run("lds_threes", a, o)
    with np.errstate(over="ignore"):
        x = a[::-1]
        np.testing.assert_array_equal(o, x + u32(5) * ~x + u32(21) * x + u32(11) * (x + u32(1)))
    run("lds_forms", a, o)
    # the second of its stores holds what the last lane's first does, 100 further
    with np.errstate(over="ignore"):
        want = a + u32(3) * a + u32(5) * a + u32(7) * a + u32(11) * ~a
        np.testing.assert_array_equal(o, want + u32(13) * ~a + u32(17) * a)


def test_branches_and_masks():
    a, o = words(19), words(20)
    run("branches", a, o)
    want = 1 + 8 * (LANE < 3) + 16 * ((LANE < 4) | (LANE > 60))
    assert o.tolist() == want.tolist()


def test_jumps_to_an_address():
    a, o = words(23), words(24)
    run("jumps", a, o)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(o, u32(3) * a)
    with pytest.raises(Fault, match="a jump to no instruction"):
        run("jumps_astray", a, o)


def test_constants_of_the_image():
    for n, constant in enumerate((7, 1000003, 5, 0xDEADBEEF, 42, 9, 77, 3)):
        o = words(24)
        run("constants", np.full(LANES, n, u32), o)
        np.testing.assert_array_equal(o, u32(constant) + LANE.astype(u32))


def test_two_waves_that_add_to_lds_do_not_race():
    a = words(25, 2 * LANES)
    sums = a.astype(np.uint64).reshape(-1, 8).sum(0)
    o = words(26)
    run("lds_sums", a, o, threads=2 * LANES)
    np.testing.assert_array_equal(o[:8], sums.astype(u32))
    wide = o[8:16] | o[16:24].astype(np.uint64) << np.uint64(32)
    np.testing.assert_array_equal(wide, sums << np.uint64(20))
    raced = Kernel(clang.code_object("cross_lane.hip", "-DRACE_WITH_SUMS"), "lds_sums")
    with pytest.raises(Fault, match="a race for byte"):
        raced.run(Launch([a.ctypes.data, o.ctypes.data], (1, 1, 1), (2 * LANES, 1, 1)), [Buffer(a), Buffer(o)])


def test_scalar_loads_and_fences():
    a, o = words(21, 16), words(22)
    run("eight_words", a, o)
    with np.errstate(over="ignore"):
        assert o.tolist() == [int(sum(a[8:] * np.array([1, 3, 5, 7, 11, 13, 17, 19], u32), start=u32(0)))] * LANES
    a, o = words(21, 32), words(22)
    run("sixteen_words", a, o)
    with np.errstate(over="ignore"):
        assert o.tolist() == [int((a[16:] * np.arange(1, 33, 2, u32)).sum(dtype=u32))] * LANES
    a, o = words(21), words(22)
    want = (a + u32(5))[LANE ^ 1]
    run("fences", a, o, memory=WEAK)
    np.testing.assert_array_equal(o, want)


def test_narrow_loads_and_stores():
    a = np.random.default_rng(9).integers(0, 256, 256, np.uint8)
    o = np.zeros(LANES * 2 + LANES // 2, np.uint16)
    run("narrow", a, o)
    halves = a.view(np.uint16)
    first = a[3 * LANE].astype(np.int32) + a.view(np.int8)[3 * LANE + 1]
    second = halves[LANE].astype(np.int32) + halves.view(np.int16)[LANE + 1]
    np.testing.assert_array_equal(o[: 2 * LANES : 2], first.astype(np.uint16))
    np.testing.assert_array_equal(o[1 : 2 * LANES : 2], second.astype(np.uint16))
    np.testing.assert_array_equal(o[2 * LANES :].view(np.uint8), a[LANE])


def test_halves_of_registers_and_threes():
    a, o = words(10, LANES + 1), np.zeros(4 * LANES, np.uint16)
    run("high_halves", a, o)
    low, after = (a[:LANES] & 0xFFFF).astype(np.uint16), a[1:]
    want = np.stack([after & 0xFFFF, low, low, after >> 16], 1).astype(np.uint16)
    np.testing.assert_array_equal(o.reshape(-1, 4), want)
    a, o = words(11, 3 * LANES), words(12, 3 * LANES)
    run("threes", a, o)
    np.testing.assert_array_equal(o.reshape(-1, 3), a.reshape(-1, 3)[:, [2, 0, 1]])


def test_buffers_end_where_they_say():
    """25 words to read, 30 to write: what lies behind reads as 0, and is not written."""
    a, o = words(13, LANES), np.zeros(LANES, u32)
    run("buffers", a, o)
    padded = np.concatenate([a[:25], np.zeros(LANES, u32)])

    def read(first: int, count: int) -> np.ndarray:
        return padded[first : first + count] if first + count <= 25 else np.zeros(count, u32)

    want = np.zeros(LANES, u32)
    for t in range(30):
        short = read(t, 1)[0] >> u32(16)
        four = np.bitwise_xor.reduce(read(t, 4))
        with np.errstate(over="ignore"):
            want[t] = read(t + 2, 1)[0] + u32(3) * read(t, 2)[0] + u32(5) * read(t, 2)[1] + u32(7) * four + short
    want[1] = want[1] & u32(0xFFFF0000) | u32(0x4567)
    want[2:8] = 0, 0, 1, 2, 3, 4  # of the last lane, which reads nothing
    np.testing.assert_array_equal(o, want)


def test_atomics():
    for memory, seed in ((None, 0), *((WEAK, seed) for seed in range(8))):
        a, o = np.zeros(32, u32), np.zeros(3 * LANES, u32)
        a[4] = 5
        run("atomics", a, o, **({"memory": memory, "seed": seed} if memory else {}))
        wide = a[8:].view(np.uint64)
        assert a[0] == 64 * 65 // 2 and sorted(o[:LANES] + LANE + 1) == sorted(np.cumsum(LANE + 1))
        assert a[1] == 0xFFFFFFFF and a[2] == 63
        assert sorted([*o[LANES : 2 * LANES], a[3]]) == sorted([0, *LANE])
        swapped = o[2 * LANES :]
        assert swapped.tolist() == ((LANE >= 5) & (a[4] > LANE)).tolist() and (memory or a[4] == 64)
        assert wide[:3].tolist() == [int(LANE.sum()) << 31, 2**64 - 1, 63 << 33]
        # Lanes come in any order, so that of swaps any may be last, and a chain of compared ones may end early.
        assert 2**64 - 1 - int(wide[3]) in LANE and (wide[4] == 64 if memory is None else wide[4] in range(65))


def test_matrices():
    """Small integers, whose sums no order of additions rounds."""
    rng = np.random.default_rng(14)
    for size, depth in ((16, 16), (32, 8)):
        for name, kind in (("f16", np.float16), ("bf16", f32)):
            a, b = (rng.integers(-8, 9, (size, depth)).astype(kind) for _ in "ab")
            c = rng.integers(-99, 99, (size, size)).astype(f32)
            per = size * depth // LANES
            held = [m[LANE[:, None] % size, per * (LANE[:, None] // size) + np.arange(per)] for m in (a, b)]
            if name == "bf16":
                held = [(m.view(u32) >> 16).astype(np.uint16) for m in held]
            r = np.arange(size * size // LANES)
            rows = 8 * (r // 4) + 4 * (LANE[:, None] // 32) + r % 4 if size == 32 else 4 * (LANE[:, None] // 16) + r
            place = rows, LANE[:, None] % size
            out = np.ascontiguousarray(c[place])
            run(f"mfma_{size}_{name}", *map(np.ascontiguousarray, held), out)
            np.testing.assert_array_equal(out, (a.astype(f32) @ b.astype(f32).T + c)[place])


def test_accumulators_and_clocks():
    a, o = words(15), words(16)
    run("accumulators", a, o)
    np.testing.assert_array_equal(o, a)
    both = np.zeros(2 * LANES, u32)
    run("accumulators_in_lds", a, both)
    np.testing.assert_array_equal(both, np.tile(a, 2))
    t, o = np.zeros(LANES, np.uint64), words(16)
    run("clocks", t, o)
    assert set(t.tolist()) <= set(range(1, 100)) and set(o.tolist()) == {0}  # and the XCC_ID of workgroup 0
