"""Rounds of requests to figures. The first token is TTFT's; tokens/s and gaps start after it.

tokens/s of a round = (tokens - 1) / (t_last - t_first)
figure              = median over rounds; p50 and p99 of the gaps between tokens pool all rounds
p99 over p50        = p99, over all rounds, of a gap over the median of its window, which is the same about WINDOW
                      gaps of all rounds: the depth hardly grows there, and one round's stall is no median
"""

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from kog_triton.bench.engines import Run
from kog_triton.metrics import percentile

WINDOW = 64  # gaps
LEAST = 100  # gaps: of fewer the 99th percentile is the largest one


def figures(rounds: Sequence[Sequence[Sequence[float]]]) -> dict[str, Any] | None:
    """Decode figures of rounds of requests at a time, of stamps (one a token, us): tokens/s of all, gaps of each.

    None with fewer than two tokens.
    """
    if len(rounds[0][0]) < 2:
        return None
    gaps = [[round(b - a, 2) for a, b in pairwise(stamps)] for one in rounds for stamps in one]
    rates = [
        (sum(map(len, one)) - 1) / max(max(stamps[-1] for stamps in one) - min(stamps[0] for stamps in one), 1e-3) * 1e6
        for one in rounds
    ]
    pooled = [gap for some in gaps for gap in some]
    return {
        "tokens_per_s": median(rates),
        "tokens_per_s_rounds": rates,
        "itl_p50_us": percentile(pooled, 50),
        "itl_p99_us": percentile(pooled, 99),
        "itl_max_us": max(pooled),
        "p99_over_p50": jitter(gaps),
        "itl_us": gaps,
    }


def jitter(gaps: Sequence[Sequence[float]]) -> float | None:
    """p99 over p50 at constant depth, of the gaps of requests one by one; None of fewer than LEAST in all."""
    most = max(map(len, gaps))
    edges = np.linspace(0, most, max(round(most / WINDOW), 1) + 1).round().astype(int).tolist()
    ratios: list[float] = []
    for start, end in pairwise(edges):
        window = [gap for one in gaps for gap in one[start:end]]
        middle = median(window)
        ratios += [gap / middle for gap in window if middle > 0]
    return float(percentile(ratios, 99)) if len(ratios) >= LEAST else None


def times(rounds: Sequence[Sequence[Run]]) -> dict[str, Any]:
    """Decode by both clocks, and the prompt, of rounds of requests at a time."""
    runs = [run for one in rounds for run in one]
    ttft = [(run.arrivals[0] - run.submitted) * 1e6 for run in runs]
    on_device = all(run.device_ns and all(run.device_ns) for run in runs)
    host = [[[t * 1e6 for t in run.arrivals] for run in one] for one in rounds]
    device = [[[ns / 1e3 for ns in run.device_ns] for run in one] for one in rounds]
    return {
        "host": figures(host),
        "device": figures(device) if on_device else None,
        "ttft_us": median(ttft),
        "ttft_us_rounds": ttft,
    }


def summarize(runs: Sequence[Run], prompt_tokens: int) -> dict[str, Any]:
    """What a row of the record says about the times of one request."""
    row = times([[run] for run in runs])
    return row | {
        "prompt_tokens_per_s": prompt_tokens / row["ttft_us"] * 1e6,
        "repeatable": all(run.tokens == runs[0].tokens for run in runs),
    }


def roofline(
    num_bytes: int, tokens_per_s: float | None, datasheet: float | None, measured: float | None
) -> dict[str, Any]:
    """The time that bandwidth (bytes / s) alone asks for, and how much of it a rate uses (MBU)."""
    rate = num_bytes * tokens_per_s if tokens_per_s else None
    out: dict[str, Any] = {"bytes": num_bytes}
    for name, bandwidth in (("datasheet", datasheet), ("measured", measured)):
        out[f"{name}_us"] = num_bytes / bandwidth * 1e6 if bandwidth else None
        out[f"{name}_mbu"] = rate / bandwidth if rate and bandwidth else None
    return out
