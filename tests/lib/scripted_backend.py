"""A backend that plays given ids at a given rate, so that what a server makes of them is known to the letter.

The prompt says what to play: the last "play:NAME" in its bytes names the file NAME.json in the folder $KOG_SCRIPTS,

    {"ids": [...], "tokens_per_s": 3000, "wait_s": 0.1, "faults": {"3": "exit"}}

without a rate as fast as it can, after `wait_s`; with a fault instead of a token, counted from 0, or of the "prompt":
see FAULTS; with "pass" and "pass_s", tokens and seconds of a pass of the prompt; with "stamps", the name of a file for
the times of its tokens, in ns of time.perf_counter. Behind the ids comes END. A prompt that names nothing is answered
"ok" or, where a grammar does not allow that, the first token that it allows. The tokens are those of fake_checkpoint:
bytes.
"""

import json
import os
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kog_triton.backends import Availability, BackendOptions, WeightSource
from kog_triton.backends.compile_log import told_if_slow
from kog_triton.backends.mailbox import Failure, Mailbox, PromptLogprob, Request, Step
from kog_triton.backends.pace import exact_sleeps
from kog_triton.errors import DeviceError, RunError
from tests.lib.fake_checkpoint import END

NAMED = re.compile(rb"play:(\w+)")
CHUNK = 256  # prompt tokens of one pass
COMPILE_S = 5.0
LOGPROB, OTHER = -0.5, -1.5  # of the token that is played, and of a second one


@dataclass
class Playing:
    request: Request
    ids: list[int]
    faults: dict[str, str]
    rate: float
    start: float  # of time.perf_counter
    left: int  # prompt tokens to run
    named: bool  # its prompt says what to play
    stamps_file: str = ""
    pass_tokens: int = CHUNK
    pass_s: float = 0.0
    made: list[int] = field(default_factory=list)
    stamps: list[int] = field(default_factory=list)

    @property
    def due(self) -> float:
        return self.start + (len(self.made) / self.rate if self.rate else 0.0)


class ScriptedBackend:
    name = "scripted"
    gpu = None
    num_devices = 1
    gone = False

    @classmethod
    def availability(cls) -> Availability:
        return Availability(True)

    def __init__(self, weights: WeightSource, options: BackendOptions) -> None:
        if os.environ.get("KOG_SCRIPTED_REFUSES"):
            raise DeviceError("the model needs 99 GB and the device has 1 GB: take a smaller one")
        self.spec = weights.spec
        self.options = options
        self.held: list[list[int]] = [[] for _ in range(options.num_slots)]

    def generate(self, mailbox: Mailbox) -> None:
        if self.gone:
            raise RuntimeError("the device is gone")
        with exact_sleeps():
            self._serve(mailbox, mailbox.resumed)

    def _serve(self, mailbox: Mailbox, playing: dict[int, Playing]) -> None:
        while not mailbox.stops:
            for request in mailbox.take():
                held = self.held[request.slot]
                assert tuple(held[: request.cached]) == request.prompt[: request.cached]
                playing[request.slot] = self._begin(request)
            if not playing:
                return
            for slot, one in list(playing.items()):
                if mailbox.cancelled(slot):
                    del playing[slot]
                    mailbox.push(slot, Step(-1, "cancel", held=len(self.held[slot])))
                elif time.perf_counter() >= one.due and self._advance(mailbox, one):
                    del playing[slot]
            mailbox.beat()
            if playing:
                pause = min(one.due for one in playing.values()) - time.perf_counter()
                time.sleep(min(max(pause, 0.0), 0.001))

    def _begin(self, request: Request) -> Playing:
        script = script_of(request.prompt)
        del self.held[request.slot][request.cached :]
        start = time.perf_counter() + script.get("wait_s", 0.0)
        return Playing(
            request,
            [*script["ids"], END],
            script.get("faults", {}),
            script.get("tokens_per_s", 0.0),
            start,
            len(request.prompt) - request.cached,
            "free" not in script,
            script.get("stamps", ""),
            script.get("pass", CHUNK),
            script.get("pass_s", 0.0),
        )

    def _advance(self, mailbox: Mailbox, one: Playing) -> bool:
        """One pass for one slot; True when its request has ended."""
        request, held = one.request, self.held[one.request.slot]
        if one.left > 0:
            if (fault := one.faults.get("prompt")) is not None:
                FAULTS[fault](mailbox, request.slot)
            time.sleep(one.pass_s)
            first = len(request.prompt) - one.left
            held += request.prompt[first : first + one.pass_tokens]
            one.left -= one.pass_tokens
            if one.left > 0:
                return False
            if request.prompt_logprobs is not None:
                mailbox.push_prompt(request.slot, judged(request))
        elif one.made:
            held.append(one.made[-1])
        count = len(one.made)
        if (fault := one.faults.get(str(count))) is not None:
            FAULTS[fault](mailbox, request.slot)
            return True
        token = one.ids[count] if count < len(one.ids) else END
        if request.mask is not None:
            try:
                words = np.ascontiguousarray(request.mask(one.made))
            except Exception as error:  # the grammar's own: other requests go on
                mailbox.push(request.slot, Failure(error))
                return True
            allowed = np.unpackbits(words.view(np.uint8), bitorder="little").nonzero()[0]
            if token not in allowed and not one.named and len(allowed):
                token = int(allowed[0])
            if token not in allowed:
                error = RunError(f"the script plays {token}, which the grammar does not allow")
                mailbox.push(request.slot, Failure(error))
                return True
        one.made.append(token)
        finish = "length" if count + 1 == request.max_tokens else None
        finish = "stop" if token in request.stop_token_ids else finish
        top: tuple[tuple[int, float], ...] = ()
        if request.params.logprobs:
            top = ((token, LOGPROB), ((token + 1) % 256, OTHER))[: request.params.logprobs]
        stamp = time.perf_counter_ns()
        one.stamps.append(stamp)
        if finish is not None and one.stamps_file:  # before the client hears of the end
            Path(os.environ["KOG_SCRIPTS"], one.stamps_file).write_text(json.dumps(one.stamps))
        mailbox.push(request.slot, Step(token, finish, LOGPROB, top, stamp, len(held)))
        return finish is not None

    def run_stage(self, stage: str, layer: int, state: Any) -> dict[str, Any]:
        raise NotImplementedError

    def forward_logits(self, token_ids: Any) -> np.ndarray:
        raise NotImplementedError

    def memory_bytes(self) -> dict[str, int]:
        return {"weights": 0, "kv_cache": sum(map(len, self.held)), "other": 0}

    def close(self) -> None:
        pass


def script_of(prompt: tuple[int, ...]) -> dict[str, Any]:
    names = NAMED.findall(bytes(token for token in prompt if token < 256))
    if not names:
        return {"ids": list(b"ok"), "free": True}
    found: dict[str, Any] = json.loads(Path(os.environ["KOG_SCRIPTS"], f"{names[-1].decode()}.json").read_text())
    return found


def judged(request: Request) -> list[PromptLogprob]:
    best = request.prompt_logprobs or 0
    return [
        PromptLogprob(token, LOGPROB - i, ((token, LOGPROB - i),)[:best]) for i, token in enumerate(request.prompt[1:])
    ]


def _exit(mailbox: Mailbox, slot: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hang(mailbox: Mailbox, slot: int) -> None:
    """A device loop that stands still, while the process's other threads go on."""
    while True:
        time.sleep(1)


def _freeze(mailbox: Mailbox, slot: int) -> None:
    """The whole process stands still, not at once."""
    os.kill(os.getpid(), signal.SIGSTOP)
    _hang(mailbox, slot)


def _nan(mailbox: Mailbox, slot: int) -> None:
    mailbox.push(slot, Failure(RunError("the logits of position 7 hold NaN or +inf: the run is void")))


def _memory(mailbox: Mailbox, slot: int) -> None:
    mailbox.push(slot, Failure(DeviceError("out of memory: 3 GB needed, 1 GB free")))


def _crash(mailbox: Mailbox, slot: int) -> None:
    raise RuntimeError("the device is gone")


def _gone(mailbox: Mailbox, slot: int) -> None:
    ScriptedBackend.gone = True  # as long as this process lives
    _crash(mailbox, slot)


def _compile(mailbox: Mailbox, slot: int) -> None:
    """A compiler that takes its time, as in the first launch of a kernel."""
    with told_if_slow("a kernel"):
        time.sleep(COMPILE_S)


FAULTS = {
    "compile": _compile,
    "exit": _exit,
    "hang": _hang,
    "freeze": _freeze,
    "nan": _nan,
    "memory": _memory,
    "crash": _crash,
    "gone": _gone,
}


def install(folder: Path) -> Path:
    """A folder that, on sys.path, offers it and the faulty reference by entry point as a package would."""
    info = folder / "kog_scripted-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kog-scripted\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[kog_triton.backends]\n"
        "scripted = tests.lib.scripted_backend:ScriptedBackend\n"
        "faulty = tests.lib.faulty_reference:FaultyReference\n"
    )
    return folder
