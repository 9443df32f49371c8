"""A prompt in slices leaves the bits that it leaves at once; how long slices are."""

import math
from contextlib import nullcontext

import pytest
import torch

from kog_triton.backends.prefill.slices import PromptRun
from kog_triton.backends.serving import GAP_S, SLICE, Share
from tests.lib.prefill_cases import (
    BF16,
    CPU,
    SPECS,
    assert_filled,
    empty_cache,
    prefill_of,
    tokens_of,
)


def in_slices(ours, tokens, first, held, stop=math.inf):
    """A layer a slice, up to `stop` filled positions; the counts of filled positions."""
    run = ours.begin(tokens[first:], first, held)
    filled = []
    while run.filled < stop and not run.advance(0):
        filled.append(run.filled)
    return filled


@pytest.mark.parametrize("name", ["llama", "mistral", "lanes of all kinds"])
@pytest.mark.parametrize("count", [3, 13, 40])
def test_slices_leave_the_bits_of_a_run_at_once(name, count):
    """In buckets and in chunks; of every layer one slice, and positions count once their last layer is queued."""
    ours, whole, held = (
        prefill_of(name, BF16), empty_cache(name, BF16), empty_cache(name, BF16),
    )  # fmt: skip
    tokens = tokens_of(count)
    ours.run(tokens, 0, whole)
    filled = in_slices(ours, tokens, 0, held)
    assert torch.equal(whole[..., :count, :], held[..., :count, :])
    assert_filled(held, name, BF16, count)
    chunks = 1 if count <= 16 else -(-count // 7)
    # a slice a layer, and one that says that the chunk is there
    assert len(filled) == chunks * (SPECS[name].num_layers + 1)
    assert filled == sorted(filled) and filled[-1] == count


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


def test_a_slice_ends_when_its_time_is_up(monkeypatch):
    """By what a piece has taken so far; one is always queued."""
    now = iter(range(1000))  # a mark a second
    monkeypatch.setattr(PromptRun, "_mark", lambda self: float(next(now)))
    run = PromptRun(0, lambda at_once: iter(range(1, 13)), nullcontext, CPU)
    filled = []
    for seconds in (5.5, 1.5, 0.0, 3.5):
        assert not run.advance(seconds)
        filled.append(run.filled)
    assert filled == [5, 6, 7, 10]
    assert run.advance(math.inf) and run.filled == 12


@pytest.mark.parametrize("step", [0.0006, 0.0034, 0.006, 0.03])
def test_others_get_a_third_of_the_time_and_no_long_gap(step):
    share = Share()
    assert share.tokens() == 1 and share.slice_s() > 0
    for tokens in (3, 1):
        share.told(tokens * step, tokens)
    beside, own = share.slice_s(), share.tokens() * step
    assert 0.3 <= own / (own + beside) <= 0.37 and (own + beside) / beside <= 1.6
    assert beside + step <= max(GAP_S, 3 * step)
    assert own + beside <= GAP_S or share.tokens() == 1
    share.told(1.0, 0)  # a launch that was called off
    assert share.slice_s() == pytest.approx(SLICE * own)
