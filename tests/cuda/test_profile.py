"""`kog profile`: stamps of the emulated kernel, the analysis of a recording worked out by hand, the command."""

import json
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from kog_triton import __main__ as kog
from kog_triton import profile
from kog_triton.backends import BackendOptions
from kog_triton.backends.choose import Choice
from kog_triton.backends.cuda.recording import stage_bytes
from kog_triton.backends.mailbox import Mailbox, Request
from kog_triton.backends.recording import HEAD, Profiler, Recording, Span
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.backends.resources import Resources
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.errors import DeviceError, RequestError
from kog_triton.model.spec import DType, Head, Reduce
from kog_triton.profiling import show
from kog_triton.profiling.analysis import critical_path, figures, timeline
from kog_triton.profiling.picture import draw, need_matplotlib
from kog_triton.profiling.trace import trace, write
from kog_triton.sampling import SamplingParams
from kog_triton.schedule.topology import GPUS
from tests.lib.cuda_walk import FiberBackend, layout_of, noting
from tests.lib.ring_walker import spec_of

# When each block ended each span, ns from the earliest start of a block: [tokens][blocks][spans].
# Block 1 takes no part in "split".
SPANS = (Span("begin", 0), Span("rows", 0), Span("gather", 0, True), Span("split", 0), Span("argmax", HEAD, True))
ENDS = [
    [[100, 200, 230, 260, 300], [100, 210, 232, 0, 300], [110, 150, 228, 290, 301]],
    [[310, 400, 440, 480, 520], [320, 420, 442, 0, 521], [310, 405, 441, 500, 519]],
]
RATES = (2, 4, 1)  # ticks a ns: every block's clock runs at its own


def by_hand():
    """The times above on clocks that agree about nothing; the second of two warps is ahead."""
    ends = np.array(ENDS)
    starts_ns, starts = np.array([50_000, 50_008, 50_004]), np.array([7_000, 90, 1 << 40])
    rates = np.array(RATES)
    last = starts[:, None] + (ends - (starts_ns - 50_000)[:, None]) * rates[:, None]
    ticks = np.stack([last, last - 3], 2)
    ticks[:, 1, :, 3] = 0
    clocks = np.array([np.stack([starts + n * rates, starts_ns + n], 1) for n in (0, 300, 1_000)])
    waited = np.zeros_like(ticks)
    waited[0, :, 0, 1:] = 4 * rates[:, None]  # the first warp, 4 ns in each "rows"
    waited[1, :, 0, :1], waited[1, :, 0, 1:] = 4 * rates[:, None], 8 * rates[:, None]
    waited[:, 1, :, 3] = 0
    return Recording(
        SPANS, ticks, waited, np.ones_like(ticks), np.zeros_like(ticks), clocks, {"rows": 6000.0}, np.array([200])
    )


def test_clocks_of_blocks_are_brought_together():
    line = timeline(by_hand())
    ends = np.array(ENDS, float)
    ends[:, 1, 3] = ends[:, 1, 2]
    assert line.ends == pytest.approx(ends - 100)
    assert line.taken.sum() == 2 * 3 * 5 - 2 and not line.taken[:, 1, 3].any()
    assert line.token_ns == pytest.approx(520 - 901 / 3)
    assert line.clock_step == 4


def test_a_clock_that_strays_is_told():
    recording = by_hand()
    assert timeline(recording).clock_error == pytest.approx(0)
    recording.clocks[1, 1, 1] += 3
    line = timeline(recording)
    assert line.clock_error == pytest.approx(3) and line.clock_step == 1


def test_clocks_may_change_their_rate_between_tokens():
    """Twice as fast from the second token on, on one block: where it was, and when, is the same."""
    recording, line = by_hand(), timeline(by_hand())
    change = recording.clocks[1, 0, 0]

    def bent(ticks):
        return np.where(ticks > change, change + 2 * (ticks - change), ticks)

    recording.ticks[:, 0], recording.clocks[:, 0, 0] = (bent(recording.ticks[:, 0]), bent(recording.clocks[:, 0, 0]))
    assert timeline(recording).ends == pytest.approx(line.ends)
    assert timeline(recording).clock_error > 100


def test_figures_of_a_recording():
    recording = by_hand()
    rows = {row.name: row for row in figures(recording, timeline(recording))}
    assert list(rows) == [span.name for span in SPANS]
    rounded = {n: (row.mean, row.largest, row.token, row.weights) for n, row in rows.items()}
    for name, wanted in {
        "begin": (13, 20, 13, 0),  # of the second token alone: (10 + 20 + 9) / 3
        "rows": (535 / 6, 110, 535 / 6, 2),
        "gather": (38, 78, 38, 0),
        "split": (191 / 4, 62, 191 / 6, 0),
        "argmax": (257 / 6, 79, 257 / 6, 0),
    }.items():
        assert rounded[name] == pytest.approx(wanted), name
    assert rows["rows"].num_bytes == 6000 and rows["split"].num_bytes == 0


def test_the_critical_path_follows_the_block_that_waits_least():
    recording = by_hand()
    path = critical_path(timeline(recording))
    assert path[0, 1:] == pytest.approx([110, 22, 62, 11])  # rows of block 1, split of block 2
    assert path[1] == pytest.approx([20, 100, 22, 59, 19])
    rows = {row.name: row.critical for row in figures(recording, timeline(recording))}
    assert rows["begin"] == pytest.approx(20) and rows["split"] == pytest.approx(60.5)


def test_one_token_knows_no_step_before_it():
    one = by_hand()
    one = replace(one, ticks=one.ticks[:1], weight_ticks=one.weight_ticks[:1], clocks=one.clocks[::2])
    line = timeline(one)
    assert line.clock_error is None
    assert trace(one, line, {})["otherData"]["clock_error_ns"] is None
    assert [row.name for row in figures(one, line)] == ["rows", "gather", "split", "argmax"]
    assert line.token_ns == pytest.approx(901 / 3 - 310 / 3)


def test_the_trace_is_one_slice_a_span_without_gaps():
    recording = by_hand()
    document = json.loads(json.dumps(trace(recording, timeline(recording), {"model": "m"})))
    assert document["otherData"] == {"model": "m", "clock_step_ns": 4, "clock_error_ns": 0.0}
    names = [e["args"]["name"] for e in document["traceEvents"] if e["ph"] == "M"]
    assert names == ["block 0", "block 1", "block 2"]
    for block in range(3):
        slices = [e for e in document["traceEvents"] if e["ph"] == "X" and e["tid"] == block]
        assert len(slices) == 9 - 2 * (block == 1)
        for before, after in pairwise(slices):
            assert after["ts"] == pytest.approx(before["ts"] + before["dur"])
        first = slices[0]
        assert (first["name"], first["cat"]) == ("rows", "work")
        assert first["args"] == {
            "token": 0, "layer": 0, "weight_wait_us": 0.002, "ring_slots_asked": 1,
        }  # fmt: skip
        assert slices[-1]["cat"] == "wait" and slices[-1]["args"]["layer"] == "head"
        assert slices[-1]["dur"] == pytest.approx([0.04, 0.079, 0.019][block])


# ---- the kernel ----


@pytest.fixture(scope="module")
def backend():
    spec = spec_of(dtype=DType.F16)
    return FiberBackend(RandomWeights(spec), BackendOptions(max_context=64), num_blocks=2)


@pytest.fixture(scope="module")
def recording(backend):
    """Five steps, of which two are kept: the rows of tokens have rotated."""
    return backend.profile((5, 17, 60, 9), 2)


def test_the_kernel_stamps_every_span(backend, recording):
    tokens, blocks, warps, spans = recording.ticks.shape
    assert (tokens, blocks, warps) == (2, 2, 16)
    layers = [s.name for s in recording.spans if s.layer == 1]
    assert layers[:2] == ["qkv_proj", "attention_qkv"] and layers[-1] == "mlp_out"
    assert spans == 1 + backend.spec.num_layers * len(layers) + 2
    always = [i for i, s in enumerate(recording.spans) if not s.name.startswith("attention_")]
    seen = recording.ticks[..., always]
    assert (seen > 0).all()
    in_order = seen.transpose(1, 2, 0, 3).reshape(blocks, warps, -1)
    assert (np.diff(in_order, axis=2) >= 0).all()
    split = [i for i, s in enumerate(recording.spans) if s.name == "attention_split"]
    assert (recording.ticks[..., split] > 0).any((1, 2)).all()


def test_clocks_stand_around_the_stamps(recording):
    read = recording.clocks[:, :, 0]
    for token, (begun, ended) in enumerate(pairwise(read)):
        for block, stamps in enumerate(recording.ticks[token, :, 0]):  # of the warp that reads
            taken = stamps[stamps > 0]
            assert len(taken) and begun[block] <= taken.min() and taken.max() <= ended[block]
    line = timeline(recording)
    assert line.clock_error == pytest.approx(0)  # the emulator has one clock
    steps = np.diff(np.unique(recording.clocks[:, :, 1])) / line.clock_step
    assert len(steps) and (steps == steps.round()).all() and np.gcd.reduce(steps.astype(int)) == 1
    assert sum(row.token for row in figures(recording, line)) > 0


def test_bytes_are_those_of_the_stream(backend, recording):
    assert recording.token_bytes == backend.layout.lowering.stream_bytes()
    assert recording.ring_slots_asked.max() * backend.layout.lowering.ring_slot_bytes > 0
    assert recording.plain_step_ns.shape == (1,) and (recording.plain_step_ns > 0).all()


def test_bytes_of_lanes_are_those_of_the_stream():
    spec = spec_of(
        num_layers=2, num_lanes=2, delay=1, num_heads=4, num_kv_heads=2, head=Head.MEAN,
        dtype=DType.F16, reduce_attention=(Reduce.NOW,) * 2, reduce_mlp=(Reduce.NOW,) * 2,
    )  # fmt: skip
    layout = layout_of(spec, num_blocks=6)
    of_stages = stage_bytes(layout)
    head = of_stages.pop("lm_head")
    assert head + 2 * sum(of_stages.values()) == layout.lowering.stream_bytes()


def test_a_profile_leaves_slots_alone(backend):
    mailbox = Mailbox()
    mailbox.post(Request(0, (3, 50), SamplingParams(temperature=0), 0, 3))
    backend.generate(mailbox)
    before = backend.memory.cache.clone(), backend.memory.states.clone()
    kernels = len(backend._kernels)
    backend.profile((1, 2), 1)
    assert before[0].equal(backend.memory.cache) and before[1].equal(backend.memory.states)
    assert len(backend._kernels) == kernels


def test_a_profile_beyond_the_context_is_refused(backend):
    with pytest.raises(RequestError, match="2 prompt tokens and 63 more do not fit"):
        backend.profile((1, 2), 63)


# ---- the command ----


class Recorded:
    """A backend that gives what was recorded by hand."""

    name, gpu = "recorded", GPUS["h200"]

    def __init__(self, weights, options):
        assert options.max_context == 7 + 2

    def profile(self, prompt, tokens):
        assert len(prompt) == 7 and tokens == 2
        return by_hand()

    def close(self):
        pass


class Reporting(Recorded):
    def resources(self):
        return Resources(168, 16, 230_400)


@pytest.fixture
def command(monkeypatch, capsys):
    def call(*argv, backend=Recorded):
        choice = Choice(backend, "recorded", "")
        monkeypatch.setattr(profile, "choose", lambda name, device: choice)
        code = profile.main(["--shape=llama-3.2-1b", "--depth=7", "--tokens=2", *argv])
        return code, *capsys.readouterr()

    return call


def test_the_table_says_where_the_time_goes(command):
    code, out, err = command()
    assert code == 0 and not err
    rows = {line.split()[0]: line.split() for line in out.splitlines() if "%" in line}
    assert rows["rows"][1:] == [
        "1", "0.09", "0.11", "0.1", "41.5%", "0.0", "0.1", "67", "0.00",
    ]  # fmt: skip
    assert rows["gather"][1] == "(wait)"
    for text in ("a mean block waits 37.6% of it", "a mean warp 0.9% of it", "the stamps cost +9.8%"):
        assert text in " ".join(out.split()), text


def test_no_kernel_of_prompts_is_compiled(command, monkeypatch):
    """None would run: the prompt goes a token at a time through the kernels that are compared."""
    sources, spec = [], spec_of(dtype=DType.F16)
    monkeypatch.setattr(profile, "_open_weights", lambda *_: ("tiny", RandomWeights(spec)))
    code, out, _ = command(backend=noting(sources))
    assert code == 0 and "qkv_proj" in out and sources == ["decode.cu"]


def test_the_trace_is_written(command, tmp_path):
    code, out, _ = command("--out", str(tmp_path / "trace.json"))
    document = json.loads((tmp_path / "trace.json").read_text())
    assert code == 0 and out == command()[1], "the table comes, too"
    assert document["otherData"]["model"] == "llama-3.2-1b" and document["otherData"]["depth"] == 7
    assert sum(e["ph"] == "X" for e in document["traceEvents"]) == 9 + 7 + 9
    with pytest.raises(RequestError, match=r"trace\.json: cannot be written"):
        write(document, tmp_path / "none" / "trace.json")


@pytest.mark.parametrize("flag", ["--out", "--picture"])
def test_a_file_without_a_folder_is_refused_before_a_gpu_is_opened(flag, command, tmp_path):
    def opened(weights, options):
        raise AssertionError

    code, _, err = command(flag, str(tmp_path / "none" / "trace.json"), backend=opened)
    assert code == 2 and "none/trace.json: there is no folder" in err and err.startswith(f"error: {flag}")


def test_what_the_kernel_takes_is_told_if_the_backend_knows(command, tmp_path):
    """Below the title, and in the trace's metadata."""
    _, out, _ = command(backend=Reporting)
    assert out.splitlines()[1].rstrip() == (
        "168 registers and 16 bytes of local memory a thread, 230,400 bytes of shared memory a block"
    )
    assert "registers" not in command()[1]
    for backend in (Recorded, Reporting):
        command("--out", str(tmp_path / "trace.json"), backend=backend)
        about = json.loads((tmp_path / "trace.json").read_text())["otherData"]
        held = {"registers": 168, "local_bytes": 16, "shared_bytes": 230_400}
        assert about.get("resources") == (held if backend is Reporting else None)


@pytest.mark.parametrize("argv", [("--backend=reference",), ("--device=cpu",)])
def test_a_backend_without_stamps_is_refused_in_a_line(argv, capsys):
    assert profile.main(argv) == 4
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert "the reference backend takes no stamps: choose --backend cuda" in err
    assert issubclass(FiberBackend, Profiler) and not issubclass(ReferenceBackend, Profiler)


def test_a_picture_needs_matplotlib(command, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = command("--picture", str(tmp_path / "token.png"))
    assert (code, out) == (4, "") and err.count("\n") == 1
    assert 'pip install "kog-triton[bench]"' in err
    with pytest.raises(DeviceError):
        need_matplotlib()


def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    line = timeline(by_hand())
    draw(line, 1, tmp_path / "token.png", "by hand")
    assert (tmp_path / "token.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(RequestError, match="cannot be written"):
        draw(line, 1, tmp_path / "none" / "token.png", "by hand")


def test_kog_knows_the_command():
    assert "profile" in kog.commands()
    recording = by_hand()
    line = timeline(recording)
    lines = show.notes(recording, line, figures(recording, line), None)
    assert not any("datasheet" in text for text in lines)  # of a GPU that has no row
