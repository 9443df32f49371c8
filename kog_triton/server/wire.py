"""What server and engine process say to each other: one message a frame, a frame behind its length.

    server  Open ......... Start(id) ............................ Cancel(id)            Weigh
    engine       Opened          Accepted(id) Began(id) Steps(id) ...          Ended(id)      Held   Beat, always

A request ends with the Steps that hold a finish, or with Ended, which says what went wrong.
"""

from typing import Any, TypeAlias

import msgspec

from kog_triton import errors
from kog_triton.backends.mailbox import PromptLogprob, Step
from kog_triton.errors import KogError, RunError, TooLong, first_line
from kog_triton.metrics import Peak
from kog_triton.model.spec import ModelSpec
from kog_triton.request_queue import QueueFull
from kog_triton.sampling.params import SamplingParams

LENGTH_BYTES = 4


class Open(msgspec.Struct, tag=True, array_like=True):
    """The first word: arguments of `LLM`."""

    options: dict[str, Any]


class Start(msgspec.Struct, tag=True, array_like=True):
    """One sample. `params` have a seed."""

    id: int
    prompt: list[int]
    params: SamplingParams
    sample_idx: int
    cache_salt: str


class Cancel(msgspec.Struct, tag=True, array_like=True):
    id: int


class Weigh(msgspec.Struct, tag=True, array_like=True):
    """Asks for Held."""


class Opened(msgspec.Struct, tag=True, array_like=True):
    """What the engine process opened: the model as it runs."""

    folder: str
    spec: ModelSpec
    generation: dict[str, Any]
    eos_token_ids: list[int]
    backend: str
    reason: str
    num_slots: int
    max_context: int
    gpu: str | None  # as schedule/topology.py names it; None on a CPU and on a GPU without a row
    peak: Peak | None
    load_s: float
    kv_bound_bytes: int


class NotOpened(msgspec.Struct, tag=True, array_like=True):
    """Why there is no engine, and the exit code for it."""

    kind: str
    message: str


class Accepted(msgspec.Struct, tag=True, array_like=True):
    """The request was checked and is in line."""

    id: int


class Began(msgspec.Struct, tag=True, array_like=True):
    """The request has a slot, after `queue_s` seconds in line; it holds the first `cached` tokens of its prompt."""

    id: int
    slot: int
    cached: int
    queue_s: float


class Steps(msgspec.Struct, tag=True, array_like=True):
    """Tokens as they were made."""

    id: int
    steps: list[Step]


class Scores(msgspec.Struct, tag=True, array_like=True):
    """Tokens of a prompt; before the first Steps."""

    id: int
    tokens: list[PromptLogprob]


class Ended(msgspec.Struct, tag=True, array_like=True):
    """A request that was refused or failed."""

    id: int
    kind: str
    message: str


class Held(msgspec.Struct, tag=True, array_like=True):
    """What the backend holds now."""

    memory_bytes: dict[str, int]


class Beat(msgspec.Struct, tag=True, array_like=True):
    """The engine's heartbeat: `beats` changes while the backend goes on with what runs, or is `compiling`."""

    beats: int
    running: int
    compiling: bool


FromServer: TypeAlias = Open | Start | Cancel | Weigh
FromEngine: TypeAlias = Opened | NotOpened | Accepted | Began | Steps | Scores | Ended | Held | Beat

_encoder = msgspec.msgpack.Encoder()
from_server = msgspec.msgpack.Decoder(FromServer)
from_engine = msgspec.msgpack.Decoder(FromEngine)


def frame(message: FromServer | FromEngine) -> bytes:
    body = _encoder.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


class Frames:
    """Cuts a stream of bytes into the bodies of its frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies that are whole now, in order."""
        buffer, bodies, at = self._buffer, [], 0
        buffer += data
        while len(buffer) >= at + LENGTH_BYTES:
            end = at + LENGTH_BYTES + int.from_bytes(buffer[at : at + LENGTH_BYTES], "little")
            if len(buffer) < end:
                break
            bodies.append(bytes(buffer[at + LENGTH_BYTES : end]))
            at = end
        del buffer[:at]
        return bodies


# ---- errors, by the name of their class ----

KINDS = {kind.__name__: kind for kind in (*KogError.__subclasses__(), QueueFull, TooLong)}


def ended(request: int, error: BaseException) -> Ended:
    found = errors.run_error(error)
    kind = next(c.__name__ for c in type(found).__mro__ if c.__name__ in KINDS)
    return Ended(request, kind, first_line(found))


def error_of(kind: str, message: str) -> KogError:
    """The error that the other process told."""
    return KINDS.get(kind, RunError)(message)
