"""What can be timed: one request at batch 1, token ids in, token ids out, each one stamped.

Our backends are driven through their own entry point, the mailbox, without a tokenizer: the time of a token
is the time until its id is in the caller's thread. Peers (peers/) keep the same contract.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kog_triton import __version__
from kog_triton.backends import Backend, BackendOptions, BackgroundCompiler, WeightSource
from kog_triton.backends.mailbox import Failure, Mailbox, Request
from kog_triton.backends.recording import Profiler
from kog_triton.backends.resources import ResourceReporter, Resources
from kog_triton.errors import DeviceError, KogError, RunError, run_error
from kog_triton.model.spec import ModelSpec
from kog_triton.profiling.analysis import Figure, figures, timeline
from kog_triton.sampling.params import SamplingParams


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
            f"the {backend.name} backend uses {backend.num_devices} GPU, not {num_gpus}: leave --gpus out"
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

    def __init__(self, backend: type[Backend], weights: WeightSource, options: BackendOptions) -> None:
        self.name, self.version = backend.name, f"kog_triton {__version__}"
        self._backend = backend(weights, options)
        check_devices(self._backend, options.num_gpus)
        self.spec = self._backend.spec
        self._server = ThreadPoolExecutor(1, "bench-backend")

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        return self._backend.forward_logits(token_ids)

    def generate(self, prompt: Sequence[int], count: int, sampling: Sampling = GREEDY) -> Run:
        (run,) = self.generate_all([prompt], count, sampling)
        return run

    def generate_all(
        self, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling = GREEDY, seed: int = 0
    ) -> list[Run]:
        """A request a prompt, all posted before the backend begins; each stamped in a thread of its own.

        Unless greedy, request i is sampled with seed + i. No more prompts than the backend has slots.
        """
        mailbox, runs = Mailbox(), [Run(time.perf_counter()) for _ in prompts]
        for slot, prompt in enumerate(prompts):
            params = SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                max_tokens=count,
                ignore_eos=True,
                seed=seed + slot,
            ).resolve(self.spec.vocab_size, (), lambda text: [])
            mailbox.post(Request(slot, tuple(prompt), params, seed=seed + slot, max_tokens=count))
        served = self._server.submit(self._serve, mailbox, len(runs))
        with ThreadPoolExecutor(max(len(runs) - 1, 1), "bench-reader") as readers:
            try:
                others = [readers.submit(_read, mailbox, slot, runs[slot], count) for slot in range(1, len(runs))]
                _read(mailbox, 0, runs[0], count)
                for other in others:
                    other.result()
            finally:  # Ctrl-C: no thread may stay inside a backend that closes
                for slot in range(len(runs)):
                    mailbox.cancel(slot)
                served.result()
        return runs

    def _serve(self, mailbox: Mailbox, slots: int) -> None:
        """Behind the last token of each slot, or in its place, comes an error."""
        error: KogError = RunError("it made too few tokens")
        try:
            self._backend.generate(mailbox)
        except BaseException as crash:
            error = run_error(crash)
        for slot in range(slots):
            mailbox.push(slot, Failure(error))

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


def _read(mailbox: Mailbox, slot: int, run: Run, count: int) -> None:
    """A request's tokens as they come; its error if it has one."""
    while len(run.tokens) < count:
        for step in mailbox.read(slot):
            if isinstance(step, Failure):
                if len(run.tokens) < count:
                    raise run_error(step.error)
                return
            run.add(step.token)
            run.device_ns.append(step.device_ns)
