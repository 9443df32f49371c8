"""A backend without a model: the next byte is a hash of what its slot holds, or what it is told.

It runs a prompt in chunks and, as a real one does, holds no keys for the last token it made. About
positions that the engine calls cached it believes its own memory, never the prompt, so that a wrong
claim changes the text. Words in the prompt steer it:

    say:TEXT   answer TEXT, then end            slow    20 ms a pass
    fail       an error after two tokens        crash   `generate` itself raises after two tokens
    logs       a compiler and another log speak after two tokens
    compile    a compiler speaks before the first
    leave      `generate` forgets all and returns after two tokens
"""

import hashlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kog_triton import LLM, CompletionOutput, SamplingParams
from kog_triton.backends import Availability, BackendOptions, WeightSource
from kog_triton.backends.mailbox import Failure, Mailbox, PromptLogprob, Request, Step
from kog_triton.errors import RunError
from tests.lib.fake_checkpoint import END, VOCAB_SIZE

log = logging.getLogger("kog_triton.backends.fake")
compilers = logging.getLogger("kog_triton.compilers")
PRINTABLE = np.arange(32, 127)
CHUNK = 8
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@dataclass
class Running:
    request: Request
    pending: list[int]  # tokens still to be run
    made: int = 0
    said: bool = False


class FakeBackend:
    name = "fake"
    gpu = None
    num_devices = 1

    @classmethod
    def availability(cls) -> Availability:
        return Availability(True)

    def __init__(self, weights: WeightSource, options: BackendOptions) -> None:
        self.spec = weights.spec
        self.options = options
        self.kv: list[list[int]] = [[] for _ in range(options.num_slots)]
        self.most_at_once = 0
        self.computed: list[int] = []  # prompt tokens that each request had to run
        self.inside = False
        self.closed = False

    def generate(self, mailbox: Mailbox) -> None:
        assert not self.inside, "generate runs twice at once"
        self.inside = True
        try:
            self._serve(mailbox, mailbox.resumed)
        finally:
            self.inside = False

    def _serve(self, mailbox: Mailbox, running: dict[int, Running]) -> None:
        while not (mailbox.closed or mailbox.yielding):
            for r in mailbox.take():
                assert r.slot not in running, "two requests in one slot"
                assert len(self.kv[r.slot]) >= r.cached, "the slot never held that much"
                del self.kv[r.slot][r.cached :]
                self.computed.append(len(r.prompt) - r.cached)
                running[r.slot] = Running(r, list(r.prompt[r.cached :]))
            if not running:
                return
            self.most_at_once = max(self.most_at_once, len(running))
            for slot, state in list(running.items()):
                words = bytes(t for t in state.request.prompt if t < 256)
                if state.made == 2 and b"leave" in words:
                    running.clear()
                    return
                if state.made == 0 and b"compile" in words and not state.said:
                    state.said = True
                    time.sleep(0.1)  # a compiler begins when its caller waits for the text
                    compilers.info("compiling the kernel")
                if state.made == 2 and b"logs" in words:
                    compilers.info("compiled columns.cu in 5.1 s")
                    log.warning("no kernel of chunks")
                if state.made == 2 and b"crash" in words:
                    raise RuntimeError("the device is gone")
                if self._advance(mailbox, state, words):
                    del running[slot]

    def _advance(self, mailbox: Mailbox, state: Running, words: bytes) -> bool:
        """One pass for one slot; True when its request has ended."""
        r, kv = state.request, self.kv[state.request.slot]
        if mailbox.cancelled(r.slot):
            mailbox.push(r.slot, Step(-1, "cancel", held=len(kv)))
            return True
        if state.made == 2 and b"fail" in words:
            kv[:] = [END] * len(kv)
            mailbox.push(r.slot, Failure(RunError("NaN in layer 3")))
            return True
        if b"slow" in words:
            time.sleep(0.02)
        kv += state.pending[:CHUNK]
        del state.pending[:CHUNK]
        if state.pending:
            return False
        if r.prompt_logprobs is not None and not state.made:
            self._judge_prompt(mailbox, r)
        step = self._draw(r, state.made + 1)
        state.made, state.pending = state.made + 1, [step.token]
        mailbox.push(r.slot, step)
        return step.finish is not None

    def _judge_prompt(self, mailbox: Mailbox, r: Request) -> None:
        assert r.cached == 0, "nothing is known about tokens that are not run"
        for i in range(1, len(r.prompt)):
            logits = next_logits(list(r.prompt[:i]), i)
            logprobs = logits - np.log(np.exp(logits).sum())
            best = np.argsort(-logprobs)[: r.prompt_logprobs]
            top = tuple((int(t), float(logprobs[t])) for t in best)
            token = r.prompt[i]
            mailbox.push_prompt(r.slot, [PromptLogprob(token, float(logprobs[token]), top)])

    def _draw(self, r: Request, count: int) -> Step:
        held = self.kv[r.slot]
        logits = next_logits(held, len(r.prompt))
        if r.mask is not None:
            words = r.mask(held[len(r.prompt) :])
            allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
            logits[allowed == 0] = -1e9
        logprobs = logits - np.log(np.exp(logits).sum())
        token = int(np.argmax(logits))
        if r.params.temperature > 0:
            rng = np.random.default_rng([r.seed, r.sample_idx, len(held)])
            noise = rng.gumbel(size=VOCAB_SIZE)
            token = int(np.argmax(logits / r.params.temperature + noise))
        finish = "length" if count == r.max_tokens else None
        finish = "stop" if token in r.stop_token_ids else finish
        best = np.argsort(-logprobs)[: r.params.logprobs or 0]
        top = tuple((int(i), float(logprobs[i])) for i in best)
        return Step(token, finish, float(logprobs[token]), top, time.perf_counter_ns(), len(held))

    def run_stage(self, stage: str, layer: int, state: Any) -> dict[str, Any]:
        raise NotImplementedError

    def forward_logits(self, token_ids: Sequence[int]) -> np.ndarray:
        assert not self.inside, "generate runs"
        rows = [next_logits(list(token_ids[: i + 1]), i + 1) for i in range(len(token_ids))]
        return np.stack(rows).astype(np.float32)

    def memory_bytes(self) -> dict[str, int]:
        return {"weights": 0, "kv_cache": 0, "other": 0}

    def close(self) -> None:
        self.closed = True


class BrokenBackend(FakeBackend):
    name = "broken"

    @classmethod
    def availability(cls) -> Availability:
        return Availability(False, "it has no wheels", "fit four wheels")


def next_logits(held: list[int], prompt_length: int) -> np.ndarray:
    """Logits [vocab] of the token after `held`."""
    logits = np.full(VOCAB_SIZE, -30.0)
    script = say(held[:prompt_length])
    if script is not None:
        at = len(held) - prompt_length
        logits[script[at] if at < len(script) else END] = 0.0
    else:
        seed = hashlib.sha256(np.array(held, np.int32).tobytes()).digest()[:8]
        rng = np.random.default_rng(int.from_bytes(seed))
        logits[PRINTABLE] = rng.normal(size=len(PRINTABLE))
    return logits


def say(prompt: list[int]) -> bytes | None:
    """What the prompt asks to be answered."""
    _, marker, text = bytes(t for t in prompt if t < 256).rpartition(b"say:")
    return text if marker else None


def install(folder: Path) -> Path:
    """A folder that, on sys.path, offers both backends by entry point as a package would."""
    info = folder / "kog_fake-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kog-fake\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[kog_triton.backends]\n"
        "fake = tests.lib.fake_backend:FakeBackend\n"
        "broken = tests.lib.fake_backend:BrokenBackend\n"
    )
    return folder


def open_llm(folder: Path, **options: Any) -> LLM:
    return LLM(folder, backend=FakeBackend, **options)


def cold(folder: Path, prompt: str, params: SamplingParams = GREEDY) -> CompletionOutput:
    """The output on an engine that has seen nothing."""
    with open_llm(folder) as llm:
        return llm.generate(prompt, params)[0].outputs[0]
