"""`kog bench` and `python -m kog_triton.bench`: tokens/s of one request beside roofline and peers.

    decode    tg128 @ d32: tokens after a prompt of --depth ids; several depths, a record each
    prefill   pp512: the prompt, as the time to its first token
    compare   decode over every backend and peer that can run here, round by round
    concurrency  several requests at a time, over one
    stages    each stage alone, against the roofline of its own bytes
    startup   from nothing to a token, in fresh processes
    serve     any server of OpenAI's API, as one to eight clients see it
    agent     such a server, in a conversation that grows by tool calls
    kccl      all-reduces between GPUs inside a kernel, beside NCCL's and symmetric memory's
    table     the results that were kept, as tables in Markdown

The table for people is on stdout, progress on stderr. Exit codes: command.py; 5 also if a text is
wrong or a target not met. Of decode, prefill and compare Ctrl-C and SIGTERM end the rounds: those that
are whole make the record, which --save keeps as NAME-interrupted and no table counts.
"""

import argparse
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kog_triton.backends import backend_names
from kog_triton.backends.choose import Choice, choose, look_at
from kog_triton.bench.arguments import each_depth, parse
from kog_triton.bench.peers import PEERS, find_peer
from kog_triton.bench.record import kept_file, make_record, target_of, write
from kog_triton.cli.command import interruptible, run
from kog_triton.errors import RequestError, RunError

if TYPE_CHECKING:  # they import torch, which a command line that is refused does not wait for
    from kog_triton.bench.model import Model
    from kog_triton.bench.task import Say


def _backends(args: argparse.Namespace, word: str) -> tuple[list[Choice], list[tuple[str, str]]]:
    """Those to time, and (name, reason) of those that cannot run here; only compare takes all."""
    if args.backend or args.kind != "compare":
        return [choose(name, word) for name in dict.fromkeys(args.backend or ["auto"])], []
    seen = [look_at(name) for name in backend_names()]
    chosen = [choose(one.name, word) for one in seen if one.available]
    return chosen, [(one.name, one.reason) for one in seen if not one.available]


def _common(args: argparse.Namespace, positions: int) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The part of a task that all kinds share (task.py), with room for so many positions; who is absent."""
    from kog_triton.bench.model import find_device, open_model

    device, word = find_device(args.device)
    backends, absent = _backends(args, word)
    model = open_model(args.model, args.shape, device, args.dtype, args.weights, args.revision)
    model.check_room(positions)
    shared = {
        "model": model,
        "device": device,
        "device_word": word,
        "num_gpus": args.gpus,
        "rounds": args.rounds,
        "warmup": args.warmup,
        "backends": backends,
    }
    return shared, absent


def _record(
    args: argparse.Namespace, argv: Sequence[str], model: "Model", test: dict[str, Any], measured: dict[str, Any]
) -> dict[str, Any]:
    """The record of what was measured on this machine; `test` says what was asked, but for what all kinds share."""
    from kog_triton.bench import machine

    shared = {name: getattr(args, name) for name in ("rounds", "warmup") if name in args}
    test = {**shared, "num_gpus": args.gpus, **test}
    target = target_of(measured["rows"], getattr(args, "target_tps", None))
    return make_record(args.kind, _asked(argv), model.describe(), machine.describe(), test, measured, target)


def _say(args: argparse.Namespace) -> "Say":
    return (lambda line: None) if args.quiet else _progress


def _measured(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """The record of decode, prefill or compare."""
    from kog_triton.bench.engines import GREEDY, Sampling
    from kog_triton.bench.measure import Task, measure
    from kog_triton.bench.model import SEED, find_device

    sampling = GREEDY if args.kind == "prefill" else Sampling(args.temperature, args.top_p)
    if args.kind == "prefill":
        prompt, tokens, deepest = args.prompt_tokens, 1, args.prompt_tokens
        test = f"pp{prompt}"
    else:
        prompt, tokens, deepest = args.depth, args.max_tokens, args.deepest
        if tokens < 2:
            raise RequestError("--max-tokens 1 leaves no time between tokens: use kog bench prefill")
        test = f"tg{tokens} @ d{prompt}"
    if args.no_kernel_switches:  # a prompt takes longer so: no figure of any other run
        test += ", one kernel"
        if find_device(args.device)[0].type == "cpu":  # known before a model is opened
            raise RequestError("--no-kernel-switches counts kernels on a GPU: there is none in use")
    common, absent = _common(args, deepest + tokens)
    peers = args.peer or (list(PEERS) if args.kind == "compare" else [])
    task = Task(
        **common,
        test=test,
        prompt_tokens=prompt,
        tokens=tokens,
        peers=[find_peer(name) for name in dict.fromkeys(peers)],
        absent=absent,
        gguf=args.gguf,
        one_kernel=args.no_kernel_switches,
        checked=not args.no_check,
        profile_tokens=getattr(args, "profile", 0),
        sampling=sampling,
    )
    measured = measure(task, _say(args))
    described = {
        "name": test,
        "prompt_tokens": prompt,
        "prompt": f"random ids, seed {SEED}",
        "tokens": tokens,
        "sampling": str(sampling),
        "prefill": task.options().prefill,
        "batch": 1,
        "rounds": measured.pop("rounds"),
        "interrupted": measured.pop("interrupted"),
    }
    return _record(args, argv, task.model, described, measured)


def _asked(argv: Sequence[str]) -> list[str]:
    """The command line for the record; where the record went besides is nobody else's affair."""
    out: list[str] = []
    words = iter(argv)
    for word in words:
        if word == "--json":
            next(words, None)
        elif not word.startswith("--json="):
            out.append(word)
    return out


def _crowded(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """The record of concurrency."""
    from kog_triton.bench.concurrency import ConcurrencyTask, measure_concurrency
    from kog_triton.bench.engines import Sampling
    from kog_triton.bench.model import SEED

    if args.max_tokens < 2:
        raise RequestError("--max-tokens 1 leaves no time between tokens: 2 or more")
    common, _ = _common(args, args.prompt_tokens + args.max_tokens)
    requests = sorted(set(args.requests))
    task = ConcurrencyTask(
        **common,
        requests=requests,
        prompt_tokens=args.prompt_tokens,
        tokens=args.max_tokens,
        sampling=Sampling(args.temperature, args.top_p),
    )
    measured = measure_concurrency(task, _say(args))
    described = {
        "name": f"{', '.join(map(str, requests))} x tg{args.max_tokens} @ d{args.prompt_tokens}",
        "prompt_tokens": args.prompt_tokens,
        "prompt": f"random ids, seeds from {SEED}",
        "tokens": args.max_tokens,
        "sampling": str(task.sampling),
        "batch": requests[-1],
    }
    return _record(args, argv, task.model, described, measured)


def _staged(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """The record of stages."""
    from kog_triton.bench.model import SEED
    from kog_triton.bench.stages import StageTask, measure_stages

    common, _ = _common(args, args.deepest + 1)
    task = StageTask(**common, depth=args.depth)
    measured = measure_stages(task, _say(args))
    described = {
        "name": f"stages @ d{args.depth}",
        "prompt_tokens": args.depth,
        "prompt": f"random tensors, seed {SEED}",
        "tokens": 1,
    }
    return _record(args, argv, task.model, described, measured)


def _started(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """The record of startup."""
    from kog_triton.bench.model import find_device, open_model
    from kog_triton.bench.one_start import PROMPT_TOKENS as STARTUP_PROMPT
    from kog_triton.bench.startup import start_rounds

    device, word = find_device(args.device)
    choices, _ = _backends(args, word)
    model = open_model(args.model, args.shape, device, args.dtype, args.weights, args.revision)
    given = ("model", "revision", "shape", "device", "dtype", "weights")
    asked = {name: getattr(args, name) for name in given} | {"num_gpus": args.gpus}
    rows = [start_rounds(choice.name, asked, args.rounds, _say(args)) for choice in choices]
    measured = {"bandwidth": None, "conditions": None, "rows": rows, "failures": []}
    described = {"name": "startup", "prompt_tokens": STARTUP_PROMPT, "tokens": 1}
    return _record(args, argv, model, described, measured)


MEASURES = {"concurrency": _crowded, "stages": _staged, "startup": _started}


def _progress(line: str) -> None:
    print(f"bench: {line}", file=sys.stderr, flush=True)


@contextmanager
def _time_limit_is_ctrl_c() -> Iterator[None]:
    """While inside, SIGTERM raises KeyboardInterrupt; where signals are heard, in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    interruptible()
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _body(argv: Sequence[str] | None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    if args.kind == "table":
        from kog_triton.bench.table import read_results, table, write_tables

        records = read_results(args.results)
        for file in args.into:
            write_tables(file, records)
        if not args.into:
            print(table(records))
        return 0
    if args.kind in ("serve", "agent"):
        return _served(args)
    if args.kind == "kccl":
        from kog_triton.bench.kccl import bench

        bench(args, _progress)
        return 0
    failures = []
    for one in each_depth(args):
        with _time_limit_is_ctrl_c():
            record = MEASURES.get(one.kind, _measured)(one, argv)
        interrupted = record["test"].get("interrupted")
        if one.json:
            write(record, one.json)
        if one.save:
            file = kept_file(record, one.save + "-interrupted" * bool(interrupted))
            write(record, file)
            _say(one)(f"kept as {file}")
        if not one.quiet:
            from kog_triton.bench.show import show

            show(record)
        if interrupted:
            raise KeyboardInterrupt  # what was measured until then is written
        failures += _failures(record)
    if failures:
        raise RunError("; ".join(failures))
    return 0


def _served(args: argparse.Namespace) -> int:
    from kog_triton.bench import serving

    measures = {"serve": serving.serve, "agent": serving.agent}
    with _time_limit_is_ctrl_c():
        record = measures[args.kind](args, _say(args))
    if args.json:
        write(record, args.json)
    if not args.quiet:
        serving.show(record)
    return 0


def _failures(record: dict[str, Any]) -> list[str]:
    """What makes the command fail, after the name of the test; a missed target is one of them."""
    failures, target = list(record["failures"]), record["target"]
    if target and not target["met"]:
        failures.append(
            f"target of {target['tokens_per_s']:g} tokens/s not met: "
            f"{target['by'] or 'no backend'} reached {target['reached']:,.1f}"
        )
    return [f"{record['test']['name']}: {line}" for line in failures]


def main(argv: Sequence[str] | None = None) -> int:
    return run(_body, argv)
