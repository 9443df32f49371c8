"""The figures of one request: times, rates, bytes and how much of the peak bandwidth they are.

Decode rates leave the first token out, since it waits for the prompt:
    decode tokens/s = (tokens - 1) / (t_last - t_first)
    GB/s            = decode tokens/s * (weight bytes + KV bytes at the mean depth) / 1e9
    MBU             = GB/s / peak, the peak being the datasheet figure of the named GPU
Times between tokens come from the backend's stamps where it gives every step one (`clock` "device":
of a GPU by its clock, of a token loop on the host by the CPU's), else from the arrival of the token in
the caller's thread ("host").
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kog_triton.model.spec import ModelSpec
from kog_triton.schedule.topology import Gpu


@dataclass(frozen=True)
class Peak:
    """A named memory bandwidth to compare with, in bytes / s, over all GPUs in use."""

    name: str
    bandwidth: float

    @classmethod
    def of(cls, gpu: Gpu, num_gpus: int) -> "Peak":
        name = f"{gpu.name} datasheet" if num_gpus == 1 else f"{num_gpus} x {gpu.name} datasheet"
        return cls(name, gpu.bandwidth * num_gpus)


@dataclass(frozen=True)
class RequestMetrics:
    """None where a figure has no meaning: no token yet, one token only, an unknown peak."""

    backend: str
    seed: int
    prompt_tokens: int
    cached_tokens: int  # leading prompt tokens whose keys and values were already in the slot
    output_tokens: int
    total_s: float  # from submission to the last token's arrival
    queue_s: float | None  # of TTFT, until it had a slot
    ttft_s: float | None
    prompt_tokens_per_s: float | None  # tokens computed (not cached) over the rest of TTFT
    decode_tokens_per_s: float | None
    itl_p50_us: float | None
    itl_p99_us: float | None
    itl_max_us: float | None
    clock: str  # of the decode rate and the ITL: "device", the backend's stamps, or "host", their arrival
    bytes_per_token: int  # weights, plus keys and values at the mean depth
    gb_per_s: float | None
    peak: str  # what MBU compares with; "unknown" without a GPU whose bandwidth is known
    mbu: float | None
    kv_depth_start: int  # positions held when the first token was made
    kv_depth_end: int

    @property
    def prefill_s(self) -> float | None:
        """From its slot to the first token."""
        if self.ttft_s is None or self.queue_s is None:
            return None
        return self.ttft_s - self.queue_s


def percentile(values: Sequence[float], q: float) -> float:
    """Nearest-rank percentile: the smallest value that at least q percent do not exceed."""
    rank = -(-len(values) * q // 100)
    return sorted(values)[max(int(rank), 1) - 1]


def measure(
    *,
    spec: ModelSpec,
    backend: str,
    seed: int,
    prompt_tokens: int,
    cached_tokens: int,
    submitted: float,
    queue_s: float | None,
    arrivals: Sequence[float],
    device_ns: Sequence[int],
    peak: Peak | None,
) -> RequestMetrics:
    """The metrics of one sample.

    `submitted` and `arrivals` (one a token) are seconds of one host clock, `queue_s` those until it had a slot;
    `device_ns` are the steps' own stamps, used if every step has one.
    """
    tokens = len(arrivals)
    on_device = tokens > 0 and all(device_ns)
    times = [ns / 1e9 for ns in device_ns] if on_device else list(arrivals)
    gaps_us = [(b - a) * 1e6 for a, b in pairwise(times)]
    ttft = arrivals[0] - submitted if tokens else None
    prefill = ttft - queue_s if ttft is not None and queue_s is not None else None
    rate = (tokens - 1) / (times[-1] - times[0]) if tokens > 1 and times[-1] > times[0] else None
    depth_end = prompt_tokens + max(tokens - 1, 0)
    bytes_per_token = spec.bytes_per_token + spec.kv_bytes_read((prompt_tokens + depth_end) // 2)
    gb_per_s = rate * bytes_per_token / 1e9 if rate else None
    return RequestMetrics(
        backend=backend,
        seed=seed,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        output_tokens=tokens,
        total_s=arrivals[-1] - submitted if tokens else 0.0,
        queue_s=queue_s,
        ttft_s=ttft,
        prompt_tokens_per_s=(prompt_tokens - cached_tokens) / prefill if prefill else None,
        decode_tokens_per_s=rate,
        itl_p50_us=percentile(gaps_us, 50) if gaps_us else None,
        itl_p99_us=percentile(gaps_us, 99) if gaps_us else None,
        itl_max_us=max(gaps_us) if gaps_us else None,
        clock="device" if on_device else "host",
        bytes_per_token=bytes_per_token,
        gb_per_s=gb_per_s,
        peak=peak.name if peak else "unknown",
        mbu=gb_per_s * 1e9 / peak.bandwidth if gb_per_s and peak else None,
        kv_depth_start=prompt_tokens,
        kv_depth_end=depth_end,
    )
