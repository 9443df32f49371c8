"""What can be timed: one request at batch 1, token ids in, token ids out, each one stamped.

Our backends are driven through their own entry point, the mailbox, without a tokenizer: the time of a token
is the time until its id is in the caller's thread. Peers (peers/) keep the same contract.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kog_triton import __version__
from kog_triton.backends import Backend, BackendOptions, BackgroundCompiler, WeightSource
from kog_triton.backends.mailbox import Failure, Request
from kog_triton.backends.recording import Profiler
from kog_triton.backends.resources import ResourceReporter, Resources
from kog_triton.errors import DeviceError, KogError, RunError
from kog_triton.model.spec import ModelSpec
from kog_triton.profiling.analysis import Figure, figures, timeline
from kog_triton.sampling.params import SamplingParams

POLL_S = 0.05  # how soon a backend that ended without a last token is noticed


@dataclass
class Run:
    """One request: stamps in seconds of one host clock, `device_ns` of the backend's own or empty."""

    submitted: float
    tokens: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    device_ns: list[int] = field(default_factory=list)

    def add(self, token: int) -> None:
        self.tokens.append(token)
        self.arrivals.append(time.perf_counter())


class EngineUnderTest(Protocol):
    """`spec` is the model as it runs: its dtypes are what a step reads."""

    name: str
    version: str
    spec: ModelSpec
    checks_text: bool  # False: it shows neither logits nor tokens, so that nothing can be compared

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Logits of every position, float32 [tokens, vocab]."""
        ...

    def generate(self, prompt: Sequence[int], count: int) -> Run:
        """Exactly `count` greedy tokens after the prompt, computed from nothing."""
        ...

    def memory_bytes(self) -> dict[str, int]: ...

    def close(self) -> None: ...


def check_devices(backend: Backend, num_gpus: int) -> None:
    """DeviceError, and the backend is closed, if it does not use as many GPUs as the record would say."""
    if backend.num_devices != num_gpus:
        backend.close()
        raise DeviceError(
            f"the {backend.name} backend uses {backend.num_devices} GPU, not {num_gpus}: "
            "leave --gpus out"
        )


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen from logits: by SamplingParams' fields of the same names."""

    temperature: float = 0.0
    top_p: float = 1.0

    def __str__(self) -> str:
        if self.temperature == 0:
            return "greedy"
        top = f", top-p {self.top_p:g}" if self.top_p != 1 else ""
        return f"temperature {self.temperature:g}{top}"


GREEDY = Sampling()


class BackendUnderTest:
    """One of our backends, by the class that `choose` found."""

    checks_text = True

    def __init__(
        self, backend: type[Backend], weights: WeightSource, options: BackendOptions
    ) -> None:
        self.name, self.version = backend.name, f"kog_triton {__version__}"
        self._backend = backend(weights, options)
        check_devices(self._backend, options.num_gpus)
        self.spec = self._backend.spec
        self._mailbox = self._backend.new_mailbox()
        self._server = ThreadPoolExecutor(1, "bench-backend")

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        return self._backend.forward_logits(token_ids)

    def generate(self, prompt: Sequence[int], count: int, sampling: Sampling = GREEDY) -> Run:
        (run,) = self.generate_all([prompt], count, sampling)
        return run

    def generate_all(
        self,
        prompts: Sequence[Sequence[int]],
        count: int,
        sampling: Sampling = GREEDY,
        seed: int = 0,
    ) -> list[Run]:
        """A request a prompt, all posted before the backend begins; each stamped in a thread of its own.

        Unless greedy, request i is sampled with seed + i. No more prompts than the backend has slots.
        """
        runs = [Run(time.perf_counter()) for _ in prompts]
        for slot, prompt in enumerate(prompts):
            params = SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                max_tokens=count,
                ignore_eos=True,
                seed=seed + slot,
            ).resolve(self.spec.vocab_size, (), lambda text: [])
            self._mailbox.post(
                Request(slot, tuple(prompt), params, seed=seed + slot, max_tokens=count)
            )
        served = self._server.submit(self._backend.generate, self._mailbox)
        try:
            with ThreadPoolExecutor(max(len(runs) - 1, 1), "bench-reader") as readers:
                try:
                    others = [
                        readers.submit(self._read, slot, runs[slot], count, served)
                        for slot in range(1, len(runs))
                    ]
                    self._read(0, runs[0], count, served)
                    for other in others:
                        other.result()
                finally:  # Ctrl-C: no thread may stay inside a backend that closes
                    for slot, run in enumerate(runs):
                        if len(run.tokens) < count:
                            self._mailbox.cancel(slot)
        finally:
            if served.exception():  # what a crash left behind is not trusted
                self._mailbox = self._backend.new_mailbox()
        return runs

    def _read(self, slot: int, run: Run, count: int, served: Future[None]) -> None:
        """A request's tokens as they come; its error if it has one."""
        while len(run.tokens) < count:
            alive = not served.done()  # before reading: it pushes nothing after it has ended
            steps = self._mailbox.read(slot, POLL_S if alive else 0)
            for step in steps:
                if isinstance(step, Failure):
                    raise _as_error(step.error)
                run.add(step.token)
                run.device_ns.append(step.device_ns)
            if not steps and not alive:
                raise _as_error(served.exception() or RunError("it made too few tokens"))

    def profile(self, prompt: Sequence[int], tokens: int) -> list[Figure] | None:
        """Where so many tokens after the prompt spend their time, span by span; None: it takes no stamps."""
        if not isinstance(self._backend, Profiler):
            return None
        recording = self._backend.profile(prompt, tokens)
        return figures(recording, timeline(recording))

    def resources(self) -> Resources | None:
        """Of the kernel that ran; None if the backend does not know."""
        backend = self._backend
        return backend.resources() if isinstance(backend, ResourceReporter) else None

    def settle(self) -> None:
        """Wait for kernels that are compiled beside it."""
        if isinstance(self._backend, BackgroundCompiler):
            self._backend.settle()

    def memory_bytes(self) -> dict[str, int]:
        return self._backend.memory_bytes()

    def close(self) -> None:
        self._server.shutdown()
        self._backend.close()


def _as_error(error: BaseException) -> KogError:
    if isinstance(error, KogError):
        return error
    return RunError(f"the backend failed: {type(error).__name__}: {error}")
