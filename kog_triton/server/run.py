"""Runs the server: the socket first, then the model, then requests, and a drain at the end.

SIGTERM or SIGINT: /ready turns to 503 and new requests are refused, what runs may end within `drain_s`; a second
signal ends it at once.
"""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

import uvicorn

from kog_triton.checkpoint.gguf.file import Directory
from kog_triton.checkpoint.hub import gguf_file
from kog_triton.engine import MAX_SLOTS
from kog_triton.errors import ModelError, RequestError
from kog_triton.server.admission import Admission
from kog_triton.server.app import make_app
from kog_triton.server.http_protocol import BoundedProtocol
from kog_triton.server.metrics import ServerMetrics
from kog_triton.server.model import ServedModel
from kog_triton.server.pacing import Interval
from kog_triton.server.service import Service
from kog_triton.server.supervisor import Supervisor
from kog_triton.text import Tokenizer
from kog_triton.text.chat import render
from kog_triton.text.gguf_tokenizer import tokenizer_of_gguf

log = logging.getLogger(__name__)
BACKLOG = 2048
# That wait in the kernel for a client's network: 0.7 s of an event a token at 3,000 tokens/s. Without a bound they were
# up to 4 MB for a client that reads nothing.
UNSENT_BYTES = 512 << 10
KEEP_ALIVE_S = 75  # of an idle connection: clients and proxies keep theirs for a minute


@dataclass(frozen=True)
class Settings:
    """llm  arguments of LLM; the others as `kog serve --help` has them"""

    llm: dict[str, Any]
    host: str = "127.0.0.1"
    port: int = 8000
    uds: Path | None = None
    keys: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    chat_template: str | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    max_queued: int | None = None
    interval: Interval = field(default_factory=Interval)
    keep_alive_s: float = 15.0
    drain_s: float = 30.0
    silent_s: float | None = None


class Server(uvicorn.Server):
    """uvicorn's, without its own signals: it would close the door before the drain."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(settings: Settings) -> socket.socket:
    """The listening socket; RequestError if it cannot be had."""
    try:
        if settings.uds is not None:
            if settings.uds.is_socket():
                if _is_heard(settings.uds):
                    raise OSError(errno.EADDRINUSE, "a server listens there")
                settings.uds.unlink()  # of a server that has gone
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(settings.uds))
        else:
            family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
            listener = socket.socket(family)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # every connection has it of the listener
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
            listener.bind((settings.host, settings.port))
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        where = settings.uds or f"{settings.host}:{settings.port}"
        other = "--port or --host" if settings.uds is None else "--uds"
        raise RequestError(f"cannot listen on {where}: {error}: choose another {other}") from error
    listener.set_inheritable(False)
    return listener


def _is_heard(place: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(place)) == 0


async def serve(settings: Settings) -> int:
    """Until a signal; the exit code. KogError if the model cannot be opened."""
    listener = bind(settings)
    metrics = ServerMetrics()
    num_slots = settings.llm["num_slots"]
    queued = max(8, 4 * num_slots) if settings.max_queued is None else settings.max_queued
    # Each request has as many samples in line as there are slots (samples.py): who has entered finds room there.
    in_line = min(MAX_SLOTS, (num_slots + queued) * num_slots)
    options = settings.llm | {"max_waiting": in_line}
    supervisor = Supervisor(options, settings.silent_s, metrics.inter_token.observe)
    service = Service(supervisor, metrics, Admission(num_slots + queued), settings.interval, settings.keep_alive_s)
    metrics.supervisor, metrics.admission = supervisor, service.admission
    config = uvicorn.Config(
        make_app(service, settings.keys),
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=logging.ERROR,  # its warnings are about what clients send
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    server = Server(config)
    ending = Ending(server, service, settings.drain_s)
    ending.listen()
    where = where_of(listener)
    log.info("loading %s: until then %s answers 503", names_of(settings)[0], where)
    opening = asyncio.create_task(_open(supervisor, service, settings))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await asyncio.wait({opening, serving}, return_when=asyncio.FIRST_COMPLETED)
        if opening.done():
            await opening
            log.info("serving %s (pid %d)", where, os.getpid())
        await serving
    finally:
        opening.cancel()
        server.should_exit = server.force_exit = True
        await supervisor.close()
        await asyncio.wait({serving})
        if settings.uds is not None:
            settings.uds.unlink(missing_ok=True)
    return 0


def _tokenizer_of(place: str) -> Tokenizer:
    """Of a checkpoint's folder, or of its GGUF file."""
    gguf = gguf_file(place)
    if gguf is None:
        return Tokenizer.load(place)
    return tokenizer_of_gguf(Directory(gguf).metadata, gguf)


async def _open(supervisor: Supervisor, service: Service, settings: Settings) -> None:
    template = settings.chat_template
    if template is not None:
        words = {"messages": [{"role": "user", "content": "x"}]}
        # A template may refuse these words; what is none is refused ahead of a model that takes long to load.
        try:
            await asyncio.to_thread(render, template, words, True)
        except RequestError:
            pass
        except ModelError as error:
            raise RequestError(str(error)) from error
    opened = await supervisor.start()
    tokenizer = await asyncio.to_thread(_tokenizer_of, opened.folder)
    if template is not None:
        tokenizer.chat_templates = {"default": template}
    names = names_of(settings)
    service.opened = ServedModel(
        opened,
        tokenizer,
        names,
        settings.tool_call_parser,
        settings.reasoning_parser,
        settings.template_kwargs,
        SystemRandom() if (seed := settings.llm.get("seed")) is None else Random(seed),
    )
    log.info("backend %s (%s)", opened.backend, opened.reason)
    log.info(
        "model   %s, loaded in %.2f s, %d slots of %d", names[0], opened.load_s, opened.num_slots, opened.max_context
    )


def names_of(settings: Settings) -> tuple[str, ...]:
    """What clients may call the model; the first is told."""
    return settings.names or (str(settings.llm.get("model") or "demo"),)


def where_of(listener: socket.socket) -> str:
    name = listener.getsockname()
    return name if isinstance(name, str) else f"http://{name[0]}:{name[1]}"


class Ending:
    """What signals do."""

    def __init__(self, server: Server, service: Service, drain_s: float) -> None:
        self._server, self._service, self._drain_s = server, service, drain_s
        self._task: asyncio.Task[None] | None = None

    def listen(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signal)

    def _signal(self) -> None:
        if self._task is not None or self._service.admission.num_inside == 0:
            self._server.should_exit = self._server.force_exit = True
        else:
            self._task = asyncio.create_task(self._drain())
        self._service.admission.draining = True

    async def _drain(self) -> None:
        log.info("draining: what runs may end within %g s", self._drain_s)
        end = asyncio.get_running_loop().time() + self._drain_s
        while self._service.admission.num_inside and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.05)
        self._server.should_exit = self._server.force_exit = True
