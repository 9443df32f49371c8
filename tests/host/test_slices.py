"""A prompt in slices leaves the bits that it leaves at once; how long slices are."""

import math
from contextlib import nullcontext

import pytest
import torch

from kog_triton.backends import watchdog
from kog_triton.backends.prefill.share import GAP_S, GAP_STEPS, Share
from kog_triton.backends.prefill.slices import UNTIMED, Piece, PromptRun, Rate
from kog_triton.backends.watchdog import Stalled
from tests.lib.prefill_cases import BF16, CPU, SPECS, assert_filled, empty_cache, prefill_of, tokens_of


def in_slices(ours, tokens, first, held, stop=math.inf):
    """A piece a slice, up to `stop` filled positions; the counts of filled positions."""
    run = ours.begin(tokens[first:], first, held)
    filled = []
    while run.filled < stop:
        ended = run.advance(0)
        filled.append(run.filled)
        if ended:
            break
    return filled


@pytest.mark.parametrize("name", ["llama", "mistral", "lanes of all kinds"])
@pytest.mark.parametrize("count", [3, 13, 40])
def test_slices_leave_the_bits_of_a_run_at_once(name, count):
    """In buckets and in chunks; of every product and attention one slice. Positions count once their last one is
    queued."""
    ours, whole, held = (
        prefill_of(name, BF16), empty_cache(name, BF16), empty_cache(name, BF16),
    )  # fmt: skip
    tokens = tokens_of(count)
    ours.run(tokens, 0, whole)
    filled = in_slices(ours, tokens, 0, held)
    assert torch.equal(whole[..., :count, :], held[..., :count, :])
    assert_filled(held, name, BF16, count)
    chunks = 1 if count <= 16 else -(-count // 7)
    # the last layer stops at its keys and values
    assert len(filled) == chunks * (5 * SPECS[name].num_layers - 4)
    assert filled == sorted(filled) and filled[-1] == count


@pytest.mark.parametrize("count", [13, 40])
def test_slices_leave_the_streams_of_a_run_at_once(count):
    ours, tokens = prefill_of("qwen3", BF16, to_head=True), tokens_of(count)
    whole, cut = (torch.zeros(1, SPECS["qwen3"].hidden_size) for _ in range(2))
    ours.begin(tokens, 0, empty_cache("qwen3", BF16), whole).advance(math.inf, at_once=True)
    run, slices = ours.begin(tokens, 0, empty_cache("qwen3", BF16), cut), 1
    while not run.advance(0):
        assert not cut.any()
        slices += 1
    chunks = 1 if count <= 16 else -(-count // 7)
    assert slices == chunks * (5 * SPECS["qwen3"].num_layers - 4) + 5
    assert whole.any() and torch.equal(whole, cut)


@pytest.mark.parametrize("cut", [7, 21])
def test_a_prompt_that_goes_on_where_it_was_cut_leaves_the_same_bits(cut):
    """Chunks end at multiples of their length, wherever a run begins."""
    ours, tokens = prefill_of("qwen3", BF16), tokens_of(40)
    whole, held = empty_cache("qwen3", BF16), empty_cache("qwen3", BF16)
    ours.run(tokens, 0, whole)
    assert set(in_slices(ours, tokens, 0, held, cut)) <= {0, 7, 14, 21}
    held[..., cut:, :] = torch.nan  # what lies behind was not told to be there
    filled = in_slices(ours, tokens, cut, held)
    assert set(filled) == {*range(cut, 40, 7), 40}
    assert torch.equal(whole[..., :40, :], held[..., :40, :])
    odd = empty_cache("qwen3", BF16)
    ours.run(tokens[:10], 0, odd)
    assert set(in_slices(ours, tokens, 10, odd)) == {10, 14, 21, 28, 35, 40}


class Device:
    """Times by hand, in seconds: the host's, and until when the device is busy."""

    def __init__(self):
        self.host = self.busy = 0.0

    def queue(self, seconds, host_s=0.0):
        self.host += host_s
        self.busy = max(self.busy, self.host) + seconds

    def wait(self, until):
        self.host = max(self.host, until)


class Timed(PromptRun):
    """On such a device. `pieces`: seconds, work and perhaps the kind of each."""

    def __init__(self, device, pieces, rate, host_s=0.0):
        def queued(at_once):
            for i, (seconds, *told) in enumerate(pieces):
                yield Piece(i, *told)
                device.queue(seconds, host_s)

        self.clock = device
        super().__init__(0, len(pieces), queued, nullcontext, CPU, rate)

    def _mark(self):
        return max(self.clock.busy, self.clock.host)

    def _reached(self, mark):
        return mark <= self.clock.host

    def wait(self):
        if self._before is not None:
            self.clock.wait(self._before.ended)
        super().wait()

    def _seconds(self, first, last):
        return last - first


def test_a_slice_is_as_long_as_its_work_was_said_to_be():
    """By the rate of the slices before; one piece is always queued, and one alone while nothing was timed."""
    device, rate = Device(), Rate()
    run = Timed(device, [(0.5, 1.0)] * 12 + [(1.5, 3.0)] * 3, rate)
    filled = []
    for seconds in (9.0, 2.4, 0.0, 3.6):
        assert not run.advance(seconds)
        filled.append(run.filled)
        device.wait(device.busy)
    assert filled == [1, 5, 6, 12] and rate.seconds == 0.5
    assert not run.advance(2.9) and run.filled == 13
    assert run.advance(math.inf) and run.filled == 15
    assert device.busy == 10.5


def test_pieces_take_what_others_of_their_kind_took():
    """A slice of one kind behind slices of another one; pieces that ran at once tell of no kind."""
    device, rate, slow, fast = Device(), Rate(), (2.0, 1.0, "slow"), (1.0, 1.0, "fast")
    run = Timed(device, [slow, slow, fast, fast, *[slow] * 6, *[fast] * 12], rate)
    filled = []
    for seconds in (2.0, 6.0, 6.0, 6.0, 6.0, 6.0):
        run.advance(seconds)
        filled.append(run.filled)
        device.wait(device.busy)
    # nothing timed: a piece; then a fast one is taken for slower than the slow ones, and from then on for what it is
    assert filled == [1, 3, 6, 9, 14, 20]
    assert rate.of(Piece(0, 3.0, "slow")) == 6.0 and rate.of(Piece(0, 3.0, "fast")) == 3.0
    other = Rate()
    run = Timed(Device(), [slow, fast], other)
    assert run.advance(math.inf, at_once=True)
    run.wait()
    assert other.of(Piece(0, 1.0, "slow")) == other.of(Piece(0, 1.0, "new")) == UNTIMED * 1.5


def test_pieces_of_other_rows_are_taken_for_slower_until_they_were_timed():
    rate = Rate()
    rate.told([(Piece(0, 2.0, "attention", 2048), 2.0, 1.0)])
    assert rate.of(Piece(0, 2.0, "attention", 2048)) == 1.0
    assert rate.of(Piece(0, 2.0, "attention", 1024)) == UNTIMED
    rate.told([(Piece(0, 2.0, "attention", 1024), 2.0, 1.1)])
    assert rate.of(Piece(0, 2.0, "attention", 1024)) == 1.1


def test_the_host_is_two_slices_ahead_and_no_more():
    device = Device()
    run = Timed(device, [(1.0, 1.0)] * 40, Rate())
    run.advance(5.0)
    run.advance(5.0)
    ahead = []
    while not run.advance(5.0):
        ahead.append(device.busy - device.host)
    assert max(ahead) == min(ahead) == 5.0  # and five more once the next slice is queued


def test_what_was_queued_before_a_failure_is_waited_for():
    marks, waited = [], []

    class Marked(PromptRun):
        is_timed = False

        def _mark(self):
            marks.append(len(marks))
            return marks[-1]

        def _reached(self, mark):
            waited.append(mark)
            return True

    def pieces(at_once):
        yield Piece(1, 1.0, "a")
        raise RuntimeError("no memory")

    run = Marked(0, 2, pieces, nullcontext, CPU, Rate())
    with pytest.raises(RuntimeError, match="no memory"):
        run.advance(math.inf)
    assert marks and not waited
    run.wait()
    assert waited == marks[-1:], "a mark behind all that was queued"


def test_a_slice_that_never_ends_is_waited_for_no_longer_than_a_silent_kernel(monkeypatch):
    monkeypatch.setattr(watchdog, "SILENCE_S", 0.05)
    monkeypatch.setattr(Timed, "_reached", lambda self, mark: False)
    run = Timed(Device(), [(1.0, 1.0)] * 4, Rate())
    assert not run.advance(0)
    with pytest.raises(Stalled, match="has not finished a slice of a prompt in 0 s: open a new LLM"):
        run.advance(0)


# Of an H200, development runs (benchmarks/cuda-log.md#slices): layers, seconds of a layer's products for a token, and
# of a key that a token sees; and the others' step, one and seven of them.
MODELS = {
    "1B": (16, 5.7e-6 / 16, 3.5e-10 / 16, (0.00056, 0.00067)),
    "8B": (32, 29.5e-6 / 32, 1.26e-9 / 32, (0.00335, 0.0039)),
}


def pieces_of(layers, token_s, key_s, count=30000, chunk=2048, wrong=1.0):
    """Of each layer the attention between its products: seconds, work in a unit of its own, that of keys and of one
    product `wrong` by a factor, and kind."""
    out = []
    for first in range(0, count, chunk):
        tokens = min(chunk, count - first)
        keys = tokens * (first + tokens / 2) * key_s
        products = [tokens * token_s * part for part in (0.15, 0.12, 0.49, 0.24)]
        calls = 2 if first + tokens > 8192 else 1
        seen = [(keys / calls, 1e9 * wrong * keys / calls, "attention")] * calls
        kinds = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
        factors = (wrong, 1.0, 1.0, 1 / wrong)
        qkv, *rest = [(s, 1e9 * s * f, kind) for s, f, kind in zip(products, factors, kinds, strict=True)]
        out += [qkv, *seen, *rest] * layers
    return out


@pytest.mark.parametrize("wrong", [0.8, 1.0, 1.25])
@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("model", MODELS)
def test_a_long_prompt_beside_streams(model, others, wrong):
    """Others wait 12 ms or three of their steps and get 0.3 of the time; the prompt takes 1.6 times as long."""
    *shape, steps = MODELS[model]
    step, share, device = steps[others], Share(), Device()
    pieces = pieces_of(*shape, wrong=wrong)
    share.told(300 * step, 300, beside=False)
    run = Timed(device, pieces, Rate(), host_s=7e-5)
    gaps, given, token = [], 0.0, 0.0
    ended = run.advance(share.slice_s(device.host))
    while True:
        device.host += 2e-4  # it lays out the launch
        tokens, begun = share.tokens(), max(device.busy, device.host)
        gaps.append(begun + step - token)
        device.queue(tokens * step)
        token = device.busy
        given += tokens * step
        if ended:
            break
        ended = run.advance(share.slice_s(device.host))
        device.wait(token)
        device.host += 5e-5  # until it sees the end
        share.told(tokens * step, tokens, beside=True)
        device.host += 2.5e-4
    alone = sum(seconds for seconds, *_ in pieces)
    assert sorted(gaps)[int(len(gaps) * 0.99)] <= max(0.012, 3 * step)
    assert given / device.busy >= 0.3
    assert device.busy / alone <= 1.6


@pytest.mark.parametrize("step", [0.0006, 0.0034, 0.006, 0.03])
def test_others_get_a_third_of_the_time_and_no_long_gap(step):
    share = Share()
    assert share.tokens() == 1 and share.slice_s(0.0) > 0
    share.alone()
    for tokens in (3, 1):
        share.told(tokens * step, tokens, beside=True)
    beside, own = share.slice_s(1.0), share.tokens() * step
    assert 0.3 <= own / (own + beside) <= 0.37 and (own + beside) / beside <= 1.6
    assert beside + step <= max(GAP_S, GAP_STEPS * step)
    share.told(own, share.tokens(), beside=True)
    # the next slice is shorter by half of what this one was too long
    assert share.slice_s(1.0 + own + beside + own) < beside - 0.05 * own
    share.told(1.0, 0, beside=True)  # a launch that was called off
    share.alone()
    assert share.slice_s(9.0) == pytest.approx(beside)


def test_a_launch_between_slices_that_takes_longer_allows_no_longer_gap():
    """Three steps are the requests' own, as they go with no prompt beside them."""
    share = Share()
    share.told(300 * 0.0039, 300, beside=False)
    for _ in range(5):
        share.told(0.0044, 1, beside=True)
    assert share.slice_s(0.0) + 0.0044 <= 0.012
    slow = Share()
    slow.told(300 * 0.006, 300, beside=False)
    assert 0.017 < slow.slice_s(0.0) + 0.006 <= 0.018


def test_a_launch_that_something_held_up_makes_no_slice_longer():
    share = Share()
    for seconds in (0.0052, 0.0051, 0.0053):
        share.told(seconds, 1, beside=True)
    right = share.slice_s(0.0)
    share.alone()
    share.told(0.0067, 1, beside=True)
    assert share.slice_s(1.0) == pytest.approx(right, rel=0.03)


def test_a_slice_that_was_too_long_shortens_those_behind_it_and_is_forgotten():
    """Each slice is queued while the slice before it runs: what is known is two slices old."""
    share, step, now, queued = Share(), 0.003, 0.0, []
    share.told(step, 1, beside=True)
    for number in range(36):
        queued.append(share.slice_s(now))
        share.told(step, 1, beside=True)
        now += step + (queued[-2] if number else 0.0) + (1e-3 if number == 12 else 0.0)
    due = queued[0]
    assert min(queued[12:18]) < 0.95 * due
    assert max(abs(seconds - due) for seconds in queued[-8:]) < 0.01 * due
