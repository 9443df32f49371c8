"""The figures of a request against numbers worked out by hand."""

import pytest

from kog_triton.metrics import Peak, measure, percentile
from kog_triton.model.spec import ModelSpec

SPEC = ModelSpec(
    family="llama",
    num_layers=2,
    hidden_size=8,
    intermediate_size=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    vocab_size=10,
    max_context=64,
    norm_eps=1e-5,
    rope=None,
    windows=(0, 4),
    reduce_attention=(0, 0),
    reduce_mlp=(0, 0),
    tied_embeddings=True,
)


def figures(**changes):
    given = {
        "spec": SPEC,
        "backend": "fake",
        "seed": 1,
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "submitted": 100.0,
        "queue_s": 0.1,
        "arrivals": [100.5, 100.6, 100.7, 101.0],
        "device_ns": [0, 0, 0, 0],
        "peak": None,
    }
    return measure(**(given | changes))


def test_figures_follow_their_formulas():
    m = figures(peak=Peak("toy", 1e6))
    assert m.ttft_s == pytest.approx(0.5) and m.total_s == pytest.approx(1.0)
    assert (m.queue_s, m.prefill_s) == (0.1, pytest.approx(0.4))
    assert m.prompt_tokens_per_s == pytest.approx(6 / 0.4)
    assert m.decode_tokens_per_s == pytest.approx(3 / 0.5)
    assert m.itl_p50_us == pytest.approx(1e5) and m.itl_p99_us == pytest.approx(3e5)
    assert (m.kv_depth_start, m.kv_depth_end, m.clock) == (10, 13, "host")
    # By hand: bf16; two layers of 3*8*16 + 8*8 + 2*4*8 + 8*8 weights and 16 gains, 10*8 + 8 more;
    # at depth 11 the first layer reads 12 positions, the second 4, each of 2*1*4 values.
    weights = 2 * (2 * (384 + 64 + 64 + 64 + 16) + 80 + 8)
    assert m.bytes_per_token == weights + 2 * 8 * (12 + 4)
    assert m.gb_per_s == pytest.approx(6 * m.bytes_per_token / 1e9)
    assert m.mbu == pytest.approx(6 * m.bytes_per_token / 1e6) and m.peak == "toy"


def test_the_longest_gap_is_no_percentile():
    arrivals = [*range(102), 110]
    m = figures(arrivals=arrivals, device_ns=[0] * len(arrivals), submitted=-1.0)
    assert m.itl_max_us == pytest.approx(9e6) and m.itl_p99_us == m.itl_p50_us == pytest.approx(1e6)


def test_device_stamps_are_used_when_every_step_has_one():
    m = figures(device_ns=[1_000_000, 2_000_000, 3_000_000, 5_000_000])
    assert m.clock == "device" and m.decode_tokens_per_s == pytest.approx(3 / 4e-3)
    assert m.itl_max_us == pytest.approx(2000) and m.ttft_s == pytest.approx(0.5)
    assert m.peak == "unknown" and m.mbu is None
    assert figures(device_ns=[1, 0, 3, 4]).clock == "host"


@pytest.mark.parametrize("tokens", [0, 1])
def test_figures_without_meaning_are_none(tokens):
    m = figures(arrivals=[100.5][:tokens], device_ns=[7][:tokens])
    assert m.decode_tokens_per_s is None and m.itl_p50_us is None and m.gb_per_s is None
    assert (m.ttft_s is None) == (m.prefill_s is None) == (tokens == 0)
    assert m.output_tokens == tokens and m.queue_s == 0.1
    assert m.total_s == pytest.approx(0.5 * tokens)
    waits = figures(queue_s=None, arrivals=[], device_ns=[])
    assert (waits.queue_s, waits.prefill_s, waits.prompt_tokens_per_s) == (None, None, None)


def test_percentile_is_nearest_rank():
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, q) for q in (0, 20, 50, 99, 100)] == [1, 1, 3, 5, 5]
