"""`kog profile --gpus`: clocks that are wrong on purpose are brought together within the error that is stated, a delay
between GPUs shows as exposed communication and one within a GPU does not, the trace and the command."""

import ctypes
import json
import shutil
import subprocess
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from kog_triton import profile
from kog_triton.backends import BackendOptions
from kog_triton.backends.choose import Choice
from kog_triton.backends.cuda.layout.layout import lay_out
from kog_triton.backends.cuda.rank_clocks import joined_readings
from kog_triton.backends.cuda.recording import recording_of
from kog_triton.backends.recording import RankProfiler, RankRecording
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.errors import DeviceError
from kog_triton.model.spec import Head, Reduce
from kog_triton.profiling.analysis import timeline
from kog_triton.profiling.clocks import align
from kog_triton.profiling.ranks import exposed, rank_timeline, rank_trace
from tests.lib.compiled import made_once, version_of
from tests.lib.cuda_ranks import RankWalk
from tests.lib.cuda_walk import HERE, INCLUDE, FiberBackend
from tests.lib.kccl_runs import FLAGS
from tests.lib.ring_walker import f16_spec, spec_of
from tests.lib.slow import some_always

TOKENS = 3
TWO = f16_spec(vocab_size=100)
FOUR = f16_spec(num_heads=8, intermediate_size=90, vocab_size=100)
LATE = 3000  # rounds that a planted delay takes at most

# ---- clocks ----


def ping_pong(tmp_path, offsets, drifts, rounds=64, absent=-1, limit_ms=20_000):
    """Exit code, and readings before and behind, by threads whose clocks are so wrong."""
    source = HERE / "clocks.cpp"
    headers = [*(HERE / "kccl").glob("*.h"), *(INCLUDE / "kccl").glob("*.h")]
    parts = [version_of("g++"), " ".join(FLAGS).encode(), source.read_bytes()]

    def make(draft):
        command = ["g++", *FLAGS, f"-I{HERE}", f"-I{INCLUDE}", str(source), "-o", str(draft)]
        subprocess.run(command, check=True)

    program = made_once([*parts, *(path.read_bytes() for path in sorted(headers))], make)
    ranks, file = len(offsets), tmp_path / "readings"
    numbers = map(str, (ranks, rounds, 1, limit_ms, absent))
    done = subprocess.run([program, *numbers, file, *map(str, (*offsets, *drifts))], timeout=120)
    found = np.fromfile(file, np.int64).reshape(2, ranks, ranks, rounds, 2)
    return done.returncode, [joined_readings(list(one)) for one in found]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("ranks", [2, 4])
def test_clocks_that_are_wrong_are_brought_together(ranks, tmp_path):
    """Each planted offset and drift is found, within the error that is stated."""
    offsets = [0, 7_000_000_123, -555_000, 41][:ranks]
    drifts = [0, 0.3, -0.2, 0.5][:ranks]  # more than a busy CPU's slow answers hide
    code, (before, behind) = ping_pong(tmp_path, offsets, drifts)
    assert code == 0 and before.shape == (ranks - 1, 64, 3)
    for rank in range(1, ranks):
        clock = align(before[rank - 1], behind[rank - 1])
        elapsed = clock.first_ns[1] - clock.first_ns[0]
        assert elapsed > 40e6
        assert abs(clock.drift - drifts[rank]) <= clock.drift_error < abs(drifts[rank])
        # The clock began to drift when the program began: a moment before the first reading.
        begun = clock.offset - offsets[rank]
        assert -clock.error <= begun * np.sign(drifts[rank]) <= abs(drifts[rank]) * 60e9 + clock.error
        moments = np.linspace(0, elapsed, 7)
        own = moments * (1 + drifts[rank])
        assert np.abs(clock.on_first(own) - moments).max() <= 2 * clock.error


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_rank_that_never_answers_ends_the_ping_pong(tmp_path):
    code, _ = ping_pong(tmp_path, (0, 0), (0, 0), absent=1, limit_ms=100)
    assert code == 1


def test_the_quickest_answer_counts():
    slow = [1000, 5000, 3000]  # it came late: a middle of 2000 would be far off
    before = np.array([slow, [4000, 5104, 4200], [6000, 7900, 7000]])
    behind = before + np.array([[100_000, 100_010, 100_000]])
    clock = align(before, behind)
    assert (clock.own_ns, clock.first_ns) == ((5104, 105_114), (4100, 104_100))
    assert clock.offset == 1004 and clock.drift == pytest.approx(1e-4)
    assert clock.error == 100 + 200 + 2  # half the way there and back, and a step of each clock
    assert clock.drift_error == pytest.approx(604 * 100_010 / 100_000**2)


# ---- the kernel ----


class StampedWalk(RankWalk):
    """Ranks as fibers, by the kernel that takes stamps."""

    def _lay_out_ranks(self, lowering, max_context):
        return replace(lay_out(lowering, max_context), profile_tokens=TOKENS)

    def record(self, readings=None):
        """Of TOKENS tokens behind a prompt of two."""
        self.generate([3, 5], TOKENS)
        assert self.outcome == 2
        each = tuple(recording_of(self.layout, m.profile.numpy(), m.clocks.numpy(), np.array([1])) for m in self.ranks)
        return RankRecording(each, *agreeing(each))

    def delay(self, region, of, at):
        """Stores of lane `of`'s words at rank `at` land late, in the next run; of the region's first buffer."""
        words = self.layout.regions[region]
        first = self.ranks[at].words.data_ptr() + 4 * (words.offset + of * words.stride)
        self.library.kog_store_late(ctypes.c_void_p(first), ctypes.c_long(words.stride), ctypes.c_long(LATE))


def agreeing(each):
    """Readings around the stamps, of clocks that agree; a way there and back takes 6 rounds or more."""
    first = int(min(one.clocks[..., 1].min() for one in each)) - 500
    last = int(max(one.clocks[..., 1].max() for one in each)) + 500
    shape = np.array([[0, 3, 6], [10, 17, 20], [30, 31, 37]])
    return [np.stack([at - 40 * i + shape for i in range(1, len(each))]) for at in (first, last + 400)]


MODELS = {"two": (TWO, 2), "four": (FOUR, 4)}


@pytest.fixture(scope="module", params=some_always(MODELS, "two"))
def walk(request):
    spec, ranks = MODELS[request.param]
    return StampedWalk(spec, RandomWeights(spec), ranks, num_blocks=2)


def waits_of(recording, name):
    """ns of a mean token, each GPU's."""
    rows = exposed(rank_timeline(recording))
    return [sum(r.token for r in rows if (r.gpu, r.name) == (gpu, name)) for gpu in range(len(recording.each))]


def test_a_delay_between_gpus_shows_as_exposed_communication(walk):
    plain = waits_of(walk.record(), "attention_out")
    walk.delay("attention_out_now", of=0, at=1)
    late = waits_of(walk.record(), "attention_out")
    assert late[1] > plain[1] + LATE / 4, (plain, late)
    # A word that GPU 1 sends itself is no communication: what is late by as much is not counted there.
    walk.delay("attention_out_now", of=1, at=1)
    own = waits_of(walk.record(), "attention_out")
    assert own[1] < plain[1] + LATE / 8, (plain, own)


def test_each_rank_stamps_every_span(walk):
    recording = walk.record()
    assert len(recording.each) == len(walk.ranks)
    for one in recording.each:
        always = [i for i, s in enumerate(one.spans) if not s.name.startswith("attention_")]
        assert (one.ticks[..., always] > 0).all()
        assert (one.peer_ticks >= 0).all() and (one.weight_ticks >= 0).all()
    lines = rank_timeline(recording)
    assert min(line.ends.min() for line in lines.each) == 0
    assert all(np.isfinite(line.ends).all() for line in lines.each)
    rows = exposed(lines)
    assert {row.gpu for row in rows} == set(range(len(recording.each)))
    assert {row.name for row in rows} <= {"attention_out", "mlp_out", "argmax"}
    for row in rows:
        assert row.token <= row.runs * row.largest and 0 < row.share < 1


def test_wrong_clocks_change_no_time_by_more_than_is_stated(walk):
    """An offset and a drift, planted into stamps and readings of all GPUs but the first."""
    recording = walk.record()
    plain, begin = rank_timeline(recording), int(recording.before.min())
    # Clocks that agree need no line: every block's times are as its own GPU has them.
    ends = [timeline(one, begin).ends for one in recording.each]
    for line, own in zip(plain.each, ends, strict=True):
        assert np.abs(line.ends - (own - min(e.min() for e in ends))).max() <= 2

    def wrong(ns, gpu):
        drift = (0, 0.2, -0.1, 0.3)[gpu]
        return ns + 10**9 * gpu + ((ns - begin) * drift).round().astype(np.int64)

    each, readings = [], [recording.before.copy(), recording.behind.copy()]
    for gpu, one in enumerate(recording.each):
        clocks = one.clocks.copy()
        clocks[..., 1] = wrong(clocks[..., 1], gpu)
        each.append(replace(one, clocks=clocks))
        if gpu:
            for taken in readings:
                taken[gpu - 1, :, 1] = wrong(taken[gpu - 1, :, 1], gpu)
    found = rank_timeline(RankRecording(tuple(each), *readings))
    assert [round(clock.offset / 1e9) for clock in found.clocks] == list(range(1, len(each)))
    for line, other, error in zip(found.each, plain.each, [1, *(c.error for c in found.clocks)], strict=True):
        assert np.abs(line.ends - other.ends).max() <= error + 2  # two roundings
    span = plain.each[1].ends.max()
    assert 0.2 * span > found.clocks[0].error, "a drift forgotten would be seen"


def test_late_sums_are_waited_for_in_the_rows_that_add_them():
    """A Laneformer's words of an earlier layer: asked for before they are needed, waited for if they are late."""
    spec = spec_of(
        num_layers=4, vocab_size=100, num_lanes=2, delay=1, num_heads=4, num_kv_heads=2, head=Head.MEAN,
        reduce_attention=(Reduce.OWN, *[Reduce.DELAYED] * 3), reduce_mlp=(Reduce.OWN, *[Reduce.DELAYED] * 3),
    ).replace(dtype=TWO.dtype)  # fmt: skip
    walk = StampedWalk(spec, RandomWeights(spec), 2, num_blocks=4)
    plain = waits_of(walk.record(), "o_proj")
    walk.delay("attention_out_delayed", of=0, at=1)
    late = waits_of(walk.record(), "o_proj")
    assert late[1] > plain[1] + LATE / 40, (plain, late)
    names = {row.name for row in exposed(rank_timeline(walk.record()))}
    assert names <= {"o_proj", "down_proj", "lm_head", "argmax"}, "no join of a layer waits for a peer"


# ---- the trace and the command ----


def test_the_trace_has_a_track_a_gpu_with_arrows_between_and_their_blocks_below(walk):
    recording = walk.record()
    lines = rank_timeline(recording)
    document = json.loads(json.dumps(rank_trace(recording, lines, {"model": "m"})))
    gpus, events = len(recording.each), document["traceEvents"]
    names = [(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"]
    assert names == [(0, "GPUs"), *((1 + gpu, f"blocks of GPU {gpu}") for gpu in range(gpus))]
    tracks = [e for e in events if e["name"] == "thread_name" and e["pid"] == 0]
    assert [(e["tid"], e["args"]["name"]) for e in tracks] == [(g, f"GPU {g}") for g in range(gpus)]
    slices = {}
    for e in events:
        if e["ph"] == "X":
            slices.setdefault((e["pid"], e["tid"]), []).append(e)
    assert len(slices) == gpus + gpus * 2
    for track in slices.values():
        for before, after in pairwise(track):
            assert after["ts"] == pytest.approx(before["ts"] + before["dur"], abs=2e-3)
    for gpu, line in enumerate(lines.each):
        own = slices[0, gpu]
        ends = sorted(line.ends.max(1).reshape(-1)[1:] / 1e3)
        assert own[-1]["ts"] + own[-1]["dur"] == pytest.approx(ends[-1], abs=2e-3)
        assert all(s["dur"] >= 0 for s in own) and {s["name"] for s in own} >= {"attention_out"}
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts and starts.keys() == ends.keys()
    for number, start in starts.items():
        end = ends[number]
        assert start["pid"] == end["pid"] == 0 and start["tid"] != end["tid"] and end["bp"] == "e"
        for arrow in (start, end):
            around = [
                s
                for s in slices[arrow["pid"], arrow["tid"]]
                if s["ts"] - 1e-3 <= arrow["ts"] <= s["ts"] + s["dur"] + 1e-3
            ]
            assert around, arrow
    (first, *_) = document["otherData"]["clocks"]
    assert first["gpu"] == 1 and first["error_ns"] == lines.clocks[0].error
    assert len(document["otherData"]["gpus"]) == gpus


@pytest.fixture
def command(monkeypatch, capsys):
    def call(*argv, backend=FiberBackend):
        monkeypatch.setattr(profile, "choose", lambda *_: Choice(backend, "cuda", ""))
        monkeypatch.setattr(profile, "_open_weights", lambda *_: ("tiny", RandomWeights(TWO)))
        code = profile.main(["--gpus=2", "--depth=3", "--tokens=2", *argv])
        return code, *capsys.readouterr()

    return call


def test_the_command_tells_of_both_gpus(command, tmp_path):
    code, out, err = command("--out", str(tmp_path / "trace.json"))
    assert code == 0, err
    text = " ".join(out.split())
    assert "cuda on 2 x h200" in text.lower() and "exposed communication" in text
    for gpu in (0, 1):
        assert f": GPU {gpu}" in text
        assert any(row.split()[:2] == [str(gpu), "all"] for row in out.splitlines())
    assert "GPU 1's clock is +0 ns beside GPU 0's and drifts by +0.00e+00" in text
    document = json.loads((tmp_path / "trace.json").read_text())
    assert {e["pid"] for e in document["traceEvents"]} == {0, 1, 2}


def test_what_several_gpus_have_not_is_refused(command, tmp_path):
    class OneGpu:
        name = "one"

        def profile(self, prompt, tokens):
            raise AssertionError

    code, out, err = command(backend=OneGpu)
    assert (code, out) == (4, "") and "takes stamps of one GPU: leave --gpus out" in err
    code, out, err = command("--picture", str(tmp_path / "token.png"))
    assert (code, out) == (2, "") and "--picture draws one GPU" in err
    assert issubclass(FiberBackend, RankProfiler)


def test_one_gpu_has_no_clocks_to_bring_together():
    backend = FiberBackend(RandomWeights(TWO), BackendOptions(max_context=16), num_blocks=2)
    with pytest.raises(DeviceError, match="leave --gpus out"):
        backend.profile_ranks([1, 2], 2)
