"""`kog profile`: where the time of a decode step goes, by stamps that the kernel itself takes.

    kog profile --shape llama-3.2-1b                       the table of spans
    kog profile --model DIR --out trace.json               also for https://ui.perfetto.dev: a track a block
    kog profile --model DIR --picture token.png            also one token, block by block
    kog profile --shape qwen3-8b --gpus 2                  of both GPUs, and what they wait for each other; its trace
                                                           has a track a GPU and arrows for exchanges

A second kernel is compiled that takes the stamps; the one that serves has none.
"""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from kog_triton.backends import BackendOptions, WeightSource, backend_names
from kog_triton.backends.choose import choose
from kog_triton.backends.recording import Profiler, RankProfiler, RankRecording, Recording
from kog_triton.backends.resources import ResourceReporter
from kog_triton.cli.arguments import Parser, check_output, positive
from kog_triton.cli.command import end_process, run
from kog_triton.cli.model import add_checkpoint, check_revision
from kog_triton.errors import DeviceError, RequestError
from kog_triton.schedule.topology import Gpu

TOKENS, DEPTH, SEED = 4, 32, 0


def build_parser() -> Parser:
    parser = Parser(prog="kog profile", description="Show where the time of a decode step goes, span by span.")
    add_checkpoint(parser, shape="random weights")
    parser.add_argument("--backend", default="auto", metavar="NAME", help=", ".join(backend_names()))
    parser.add_argument("--device", default="", help="nvidia, amd or a GPU such as h200")
    parser.add_argument("--gpus", type=positive, default=1, metavar="N", help="how many (%(default)s)")
    parser.add_argument("--depth", type=positive, default=DEPTH, metavar="N", help="ids of the prompt (%(default)s)")
    parser.add_argument("--tokens", type=positive, default=TOKENS, metavar="N", help="to record (%(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write a trace for Perfetto")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="also draw the last token (needs matplotlib)")
    return parser


def _open_weights(args: Namespace) -> tuple[str, WeightSource]:
    """The model's name and its weights; random ones are made where there is most memory for them."""
    model, shape = args.model, args.shape
    check_revision(model, args.revision)
    if shape:
        import torch

        from kog_triton.checkpoint.random_weights import RandomWeights
        from kog_triton.model.shapes import named_shape

        on_gpu = torch.cuda.is_available() and args.device != "cpu"
        return shape, RandomWeights(named_shape(shape), SEED, "cuda" if on_gpu else "cpu")
    from kog_triton.checkpoint.folder import Checkpoint
    from kog_triton.demo import checkpoint_path

    return Path(model).name if model else "demo", Checkpoint.open(model or checkpoint_path(), args.revision)


def _body(argv: Sequence[str] | None) -> int:
    args = build_parser().parse_args(argv)
    for flag, file in (("--out", args.out), ("--picture", args.picture)):
        if file:
            check_output(flag, file)
    choice = choose(args.backend, args.device)
    if not issubclass(choice.backend, Profiler):
        raise DeviceError(f"the {choice.name} backend takes no stamps: choose --backend cuda on a Hopper GPU")
    if args.gpus > 1 and not issubclass(choice.backend, RankProfiler):
        raise DeviceError(f"the {choice.name} backend takes stamps of one GPU: leave --gpus out")
    if args.picture:
        if args.gpus > 1:
            raise RequestError("--picture draws one GPU: leave --gpus out, or write a trace with --out")
        from kog_triton.profiling.picture import need_matplotlib

        need_matplotlib()
    name, weights = _open_weights(args)
    options = BackendOptions(
        max_context=args.depth + args.tokens,
        device=args.device,
        num_gpus=args.gpus,
        prefill="decode",  # no kernel of prompts is compiled beside: none would run
    )
    backend = choice.backend(weights, options)
    try:
        ids = np.random.default_rng(SEED).integers(0, weights.spec.vocab_size, args.depth)
        recording: Recording | RankRecording
        if args.gpus > 1 and isinstance(backend, RankProfiler):
            recording = backend.profile_ranks(ids.tolist(), args.tokens)
        else:
            recording = backend.profile(ids.tolist(), args.tokens)
        held = backend.resources() if isinstance(backend, ResourceReporter) else None
        gpu = backend.gpu
    finally:
        backend.close()
    where = gpu.name if gpu else "an unknown GPU"
    if args.gpus > 1:
        where = f"{args.gpus} x {where}"
    title = f"{name} ({weights.spec.family}), {choice.name} on {where}, {args.tokens} tokens @ d{args.depth}"
    about = {"model": name, "backend": choice.name, "gpu": where, "depth": args.depth}
    if held:
        about["resources"] = asdict(held)
    head = f"{title}\n{held}" if held else title
    if isinstance(recording, RankRecording):
        _tell_ranks(recording, about, args.out, gpu, head)
    else:
        _tell(recording, about, args, gpu, title, head)
    return 0


def _tell(recording: Recording, about: dict[str, Any], args: Namespace, gpu: Gpu | None, title: str, head: str) -> None:
    from kog_triton.profiling.analysis import figures, timeline
    from kog_triton.profiling.show import show
    from kog_triton.profiling.trace import trace, write

    line = timeline(recording)
    if args.out:
        write(trace(recording, line, about), args.out)
    if args.picture:
        from kog_triton.profiling.picture import draw

        draw(line, args.tokens - 1, args.picture, title)
    show(recording, line, figures(recording, line), gpu, head)


def _tell_ranks(recording: RankRecording, about: dict[str, Any], out: Path | None, gpu: Gpu | None, head: str) -> None:
    from kog_triton.profiling.ranks import rank_timeline, rank_trace
    from kog_triton.profiling.show import show_ranks
    from kog_triton.profiling.trace import write

    lines = rank_timeline(recording)
    if out:
        write(rank_trace(recording, lines, about), out)
    show_ranks(recording, lines, gpu, head)


def main(argv: Sequence[str] | None = None) -> int:
    return run(_body, argv)


if __name__ == "__main__":
    end_process(main)
