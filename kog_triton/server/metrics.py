"""What /metrics tells: figures of the server by names of its own, and by vLLM's what is the same there: routers and
dashboards read them.

Times between tokens are counted as they come, in buckets from 50 us: at 3,000 tokens/s those of other engines, from
2 or 10 ms on, would hold them all in the first.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kog_triton.claim import Claim
from kog_triton.errors import RunError
from kog_triton.outputs import RequestOutput
from kog_triton.server.admission import Admission
from kog_triton.server.supervisor import Supervisor

ITL_BUCKETS = (
    *(50e-6, 100e-6, 200e-6, 300e-6, 500e-6, 750e-6, 1e-3, 1.5e-3, 2e-3, 3e-3, 5e-3, 7.5e-3),
    *(10e-3, 20e-3, 50e-3, 100e-3, 0.25, 0.5, 1.0, 2.5, 5.0),
)
TIME_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
FINISH_REASONS = ("stop", "length", "abort")
# Names that mean in vLLM (0.33) what they mean here: told under both prefixes.
OF_VLLM = frozenset(
    [
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
        *("prompt_tokens", "generation_tokens", "request_success", "inter_token_latency_seconds"),
        *("request_queue_time_seconds", "request_prefill_time_seconds"),
        *("time_to_first_token_seconds", "request_decode_time_seconds"),
        "e2e_request_latency_seconds",
    ]
)


def names(name: str) -> list[str]:
    """Under which a figure is told."""
    return [f"{prefix}:{name}" for prefix in ("kog", "vllm") if prefix == "kog" or name in OF_VLLM]


class Counts:
    """A histogram of seconds."""

    def __init__(self, buckets: Sequence[float]) -> None:
        self._bounds = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def families(self, name: str, text: str) -> Iterator[Metric]:
        bounds, total, buckets = [*map(str, self._bounds), "+Inf"], 0, []
        for bound, count in zip(bounds, self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        for told in names(name):
            yield HistogramMetricFamily(told, text, buckets=buckets, sum_value=self._sum)


class ServerMetrics(Collector):
    """Counts what happens, and asks the others how they are when it is read."""

    def __init__(self) -> None:
        self.inter_token = Counts(ITL_BUCKETS)
        self._queue, self._prefill, self._first_token, self._decode, self._whole = (
            Counts(TIME_BUCKETS) for _ in range(5)
        )
        self._ended = dict.fromkeys(FINISH_REASONS, 0)
        self._prompt_tokens = self._cached_tokens = self._output_tokens = 0
        self.num_errors = 0
        self.num_corrupted = 0
        self.supervisor: Supervisor | None = None
        self.admission: Admission | None = None

    def finished(self, output: RequestOutput) -> None:
        """One sample has ended without an error."""
        m = output.metrics
        self._ended[output.outputs[0].finish_reason or "abort"] += 1
        self._count(m.prompt_tokens, m.cached_tokens, m.output_tokens)
        if m.queue_s is not None:
            self._queue.observe(m.queue_s)
        if m.prefill_s is not None:
            self._prefill.observe(m.prefill_s)
        if m.ttft_s is not None:
            self._first_token.observe(m.ttft_s)
            self._decode.observe(m.total_s - m.ttft_s)
        self._whole.observe(m.total_s)

    def aborted(self, claim: Claim) -> None:
        """One sample was ended, as its client left or its request failed: its tokens count, its times do not."""
        self._ended["abort"] += 1
        self.broken_off(claim)

    def broken_off(self, claim: Claim) -> None:
        """One sample has ended by an error of its own, which `failed` counts: its tokens count."""
        began, asked = claim.queue_s is not None, claim.request
        prompt = len(asked.prompt) if began else 0  # of one that waited still, nothing was computed
        self._count(prompt, asked.cached, claim.num_made)

    def _count(self, prompt: int, cached: int, output: int) -> None:
        self._prompt_tokens += prompt
        self._cached_tokens += cached
        self._output_tokens += output

    def failed(self, error: BaseException) -> None:
        """One request has ended with an error."""
        self.num_errors += 1
        self.num_corrupted += isinstance(error, RunError) and "NaN" in str(error)

    def collect(self) -> Iterator[Metric]:
        yield from self._counters()
        yield from self.inter_token.families("inter_token_latency_seconds", "between two tokens")
        for name, text, times in (
            ("request_queue_time", "until a sample has a slot", self._queue),
            ("request_prefill_time", "from its slot to its first token", self._prefill),
            ("time_to_first_token", "to the first token", self._first_token),
            ("request_decode_time", "from the first token to the last", self._decode),
            ("e2e_request_latency", "to the last token", self._whole),
        ):
            yield from times.families(f"{name}_seconds", text)
        if self.supervisor is not None:
            yield from self._state(self.supervisor)

    def _counters(self) -> Iterator[Metric]:
        for told in names("request_success"):
            ended = CounterMetricFamily(told, "samples that ended", labels=["finished_reason"])
            for reason, count in self._ended.items():
                ended.add_metric([reason], count)
            yield ended
        for name, text, value in (
            ("prompt_tokens", "tokens of prompts", self._prompt_tokens),
            ("cached_prompt_tokens", "tokens of prompts that were in the slot", self._cached_tokens),
            ("generation_tokens", "tokens that were made", self._output_tokens),
            ("request_errors", "requests that ended with an error", self.num_errors),
            ("corrupted_requests", "requests whose logits held NaN or inf", self.num_corrupted),
        ):
            for told in names(name):
                yield CounterMetricFamily(told, text, value=value)

    def _state(self, supervisor: Supervisor) -> Iterator[Metric]:
        refused = self.admission.num_refused if self.admission else 0
        for name, text, value in (
            ("admission_rejections", "requests that found no place", refused),
            ("engine_restarts", "engines that were started again", supervisor.num_restarts),
            ("decode_steps", "heartbeats of the backend", supervisor.beats_total),
        ):
            yield CounterMetricFamily(f"kog:{name}", text, value=value)
        yield GaugeMetricFamily("kog:engine_up", "whether an engine serves", value=supervisor.state == "ready")
        yield GaugeMetricFamily(
            "kog:device_heartbeat_age_seconds", "since the engine gave a sign", value=supervisor.heartbeat_age_s
        )
        for name, text, held in (
            ("num_requests_running", "requests that have a slot", supervisor.num_running),
            ("num_requests_waiting", "requests that wait for a slot", supervisor.num_waiting),
            ("kv_cache_usage_perc", "share of the slots' positions in use", supervisor.kv_usage),
        ):
            for told in names(name):
                yield GaugeMetricFamily(told, text, value=held)
