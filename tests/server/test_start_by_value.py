"""What a start of the server reads and holds, by value and without a process: flags, the environment, a template, its
socket's file."""

import asyncio
import json
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from kog_triton import serve
from kog_triton.errors import ModelError, RequestError
from kog_triton.server import run
from kog_triton.server.run import Settings, bind
from kog_triton.server.wire import Opened


def test_every_flag_reaches_its_setting(monkeypatch, tmp_path):
    monkeypatch.delenv("KOG_API_KEY", raising=False)
    flags = {
        "--model": "m", "--max-model-len": 100, "--max-num-seqs": 3, "--gpu-memory-utilization": 0.5, "--dtype": "bf16",
        "--backend": "reference", "--device": "cpu", "-tp": 2, "--prefill": "kernel", "--seed": 7, "--host": "::1",
        "--port": 81, "--uds": tmp_path / "s", "--tool-call-parser": "hermes", "--reasoning-parser": "think",
        "--chat-template": "{{ x }}", "--default-chat-template-kwargs": '{"enable_thinking": false}',
        "--max-num-queued-reqs": 9, "--shutdown-timeout": 11.5, "--sse-keep-alive-interval": 12.5,
        "--revision": "v1",
        "--blocks": 304, "--engine-timeout": 13.5, "--stream-interval": 6, "--stream-interval-ms": 14,
    }  # fmt: skip
    argv = [word for flag, value in flags.items() for word in (flag, str(value))]
    argv += ["--served-model-name", "a", "b", "--api-key", "k1", "k2", "--enable-auto-tool-choice"]
    settings = serve.parse(argv)
    assert settings.llm == {
        "model": "m", "backend": "reference", "devices": "cpu:2", "dtype": "bf16", "max_model_len": 100,
        "num_slots": 3, "gpu_memory_utilization": 0.5, "seed": 7, "prefill": "kernel",
        "num_blocks": 304, "revision": "v1",
    }  # fmt: skip
    assert vars(settings) == vars(settings) | {
        "host": "::1", "port": 81, "uds": tmp_path / "s", "keys": ("k1", "k2"), "names": ("a", "b"),
        "tool_call_parser": "hermes", "reasoning_parser": "think", "chat_template": "{{ x }}",
        "template_kwargs": {"enable_thinking": False}, "max_queued": 9, "keep_alive_s": 12.5, "drain_s": 11.5,
        "silent_s": 13.5,
    }  # fmt: skip
    assert (settings.interval.seconds, settings.interval.tokens) == (0.014, 6)
    every = {word for action in serve.build_parser()._actions for word in action.option_strings}
    others = {"-h", "--help", "--gpus", "--tensor-parallel-size", "--served-model-name", "--api-key"}
    assert every == {*flags, *others, "--enable-auto-tool-choice"}


@pytest.mark.parametrize(("template", "starts"), [("{{ x ", False), ("{{ raise_exception('no') }}", True)])
def test_a_template_that_is_none_ends_the_start(checkpoint, template, starts):
    begun = []

    class Engine:
        async def start(self):
            begun.append(self)
            return Opened(str(checkpoint), None, {}, [], "b", "", 2, 512, None, None, 0.0, 0)

    settings, service = Settings(llm={}, chat_template=template), SimpleNamespace(opened=None)
    if starts:
        asyncio.run(run._open(Engine(), service, settings))
        assert service.opened.tokenizer.chat_templates == {"default": template}
    else:
        with pytest.raises(RequestError, match="the chat template, line 1: "):
            asyncio.run(run._open(Engine(), service, settings))
    assert bool(begun) is starts, "a model that takes long to load"


def test_who_enters_finds_room_in_the_engines_line(monkeypatch):
    """As many samples of each request wait there as there are slots."""
    told = []

    class Engine:
        def __init__(self, options, *others):
            told.append(options["max_waiting"])
            raise ModelError("enough")

    monkeypatch.setattr(run, "Supervisor", Engine)
    for queued in (None, 3, 1 << 20):
        with pytest.raises(ModelError, match="enough"):
            asyncio.run(run.serve(Settings(llm={"num_slots": 16}, port=0, max_queued=queued)))
    assert told == [(16 + 64) * 16, (16 + 3) * 16, 1 << 16]


def test_a_socket_file_is_replaced_and_no_other_file_is(tmp_path):
    place = Path(tmp_path / "s")
    settings = Settings(llm={}, uds=place)
    bind(settings).close()
    assert place.is_socket()
    listener = bind(settings)
    with listener, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(place))
        with pytest.raises(RequestError, match="a server listens there: choose another --uds"):
            bind(settings)
        with socket.socket(socket.AF_UNIX) as another:
            another.connect(str(place))
    place.unlink()
    place.write_text(json.dumps("mine"))
    with pytest.raises(RequestError, match=f"cannot listen on {place}.*: choose another --uds"):
        bind(settings)
    assert place.read_text() == '"mine"'


def test_a_server_that_ends_takes_its_socket_file_with_it(tmp_path, monkeypatch):
    """Here by a model that does not open; uvicorn and the engine are fakes."""

    class Engine:
        def __init__(self, *arguments):
            pass

        async def start(self):
            raise ModelError("no weights")

        async def close(self):
            assert place.is_socket()

    async def serve_nothing(self, sockets):
        while not self.should_exit:
            await asyncio.sleep(0.01)

    place = tmp_path / "s"
    monkeypatch.setattr(run, "Supervisor", Engine)
    monkeypatch.setattr(run.Server, "serve", serve_nothing)
    with pytest.raises(ModelError, match="no weights"):
        asyncio.run(run.serve(Settings(llm={"num_slots": 1}, uds=place)))
    assert not place.exists()
