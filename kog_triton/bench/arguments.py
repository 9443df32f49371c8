"""The command line of `kog bench`, and what of it is checked before anything is measured."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kog_triton.backends import backend_names
from kog_triton.bench.kccl import GPUS, KIB, USES
from kog_triton.bench.peers import PEERS
from kog_triton.bench.record import RESULTS, check_name
from kog_triton.cli.arguments import Parser, check_output, not_negative, positive, share
from kog_triton.cli.foreign_flags import own_words
from kog_triton.cli.model import add_checkpoint
from kog_triton.errors import RequestError
from kog_triton.model.weight_format import FORMATS

DEPTH, MAX_TOKENS, PROMPT_TOKENS = 32, 128, 512
REQUESTS = (1, 2, 4, 8)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments. RequestError for files and names that would fail only after the measurement."""
    parser = build_parser()
    args = parser.parse_args(own_words(parser, argv, {"--format": "--weights FORMAT"}))
    if args.kind is None:
        parser.print_help(sys.stderr)
        parser.exit(2)
    if args.kind == "table":
        return args
    for one in each_depth(args):
        if one.json is not None:
            check_output("--json", one.json)
        if getattr(one, "save", None) is not None:
            check_name(one.save)
    if getattr(args, "top_p", 1) != 1 and not args.temperature:
        raise RequestError(f"--top-p {args.top_p:g} without --temperature: greedy needs none")
    if getattr(args, "gguf", None) and not args.gguf.is_file():
        raise RequestError(f"--gguf {args.gguf}: no such file")
    return args


def each_depth(args: argparse.Namespace) -> Iterator[argparse.Namespace]:
    """The arguments of each record: one depth of those asked for, beside the `deepest`.

    Of several depths each record goes to files whose names end in the depth.
    """
    depths: list[int] = list(dict.fromkeys(getattr(args, "depth", ())))
    if not depths:
        yield args
    for depth in depths:
        own: dict[str, Any] = {"depth": depth, "deepest": max(depths)}
        if len(depths) > 1:
            own["json"] = args.json and args.json.with_stem(f"{args.json.stem}-d{depth}")
            own["save"] = args.save and f"{args.save}-d{depth}"
        yield argparse.Namespace(**vars(args) | own)


def build_parser() -> Parser:
    parser = Parser(
        prog="kog bench",
        description="Measure one request at batch 1: text first, then time, beside the roofline.",
        epilog="Exit codes: 0 done, 2 usage or request, 3 model, 4 device, 5 wrong text, failed "
        "run or missed target, 130 Ctrl-C.",
    )
    kinds = parser.add_subparsers(dest="kind", metavar="KIND")
    common = _common()
    timed = _timed()
    deep = Parser(add_help=False)
    deep.add_argument(
        "--depth",
        type=positive,
        nargs="+",
        default=[DEPTH],
        metavar="N",
        help=f"ids of the prompt ({DEPTH}); of several each is measured, with a record of its own",
    )
    decoding = Parser(add_help=False, parents=[deep])
    _number(decoding, "--max-tokens", MAX_TOKENS)
    decoding.add_argument(
        "--target-tps", type=not_negative, metavar="X", help="fail unless a backend reaches X tokens/s"
    )
    decoding.add_argument(
        "--profile",
        type=positive,
        default=0,
        metavar="N",
        help="and show where N tokens spend their time, of backends that take stamps",
    )
    sampled = Parser(add_help=False)
    sampled.add_argument(
        "--temperature",
        type=not_negative,
        default=0.0,
        metavar="X",
        help="of what is timed, of our backends (%(default)s: greedy); peers are greedy, and text is checked greedily",
    )
    sampled.add_argument("--top-p", type=share, default=1.0, metavar="X", help="beside it (%(default)s: all)")
    both = [common, timed, decoding]
    kinds.add_parser("decode", parents=[*both, sampled], help="tokens/s behind a prompt: tg128 @ d32")
    kinds.add_parser("compare", parents=[*both, sampled], help="decode, with every backend and peer in turn")
    crowd = kinds.add_parser(
        "concurrency",
        parents=[common, _repeated(), sampled],
        help="all tokens/s of several requests at a time, over those of one",
    )
    _number(crowd, "--prompt-tokens", DEPTH)
    _number(crowd, "--max-tokens", MAX_TOKENS)
    crowd.add_argument(
        "--requests",
        type=positive,
        nargs="+",
        default=list(REQUESTS),
        metavar="N",
        help=f"at a time ({' '.join(map(str, REQUESTS))})",
    )
    prefill = kinds.add_parser("prefill", parents=[common, timed], help="the prompt alone: pp512")
    _number(prefill, "--prompt-tokens", PROMPT_TOKENS)
    kinds.add_parser(
        "stages", parents=[common, _repeated(), deep], help="each stage alone, against the roofline of its own bytes"
    )
    startup = kinds.add_parser("startup", parents=[common], help="from nothing to a token")
    _number(startup, "--rounds", 2, "processes (%(default)s)")
    _add_serving(kinds)
    between = kinds.add_parser("kccl", help="all-reduces inside a kernel, beside NCCL's and symmetric memory's")
    between.add_argument("--gpus", type=int, default=2, choices=GPUS, help="(%(default)s)")
    between.add_argument(
        "--kib", type=int, nargs="+", default=list(KIB), choices=KIB, metavar="N",
        help=f"of a vector: {', '.join(map(str, KIB))} (all)",
    )  # fmt: skip
    _number(between, "--uses", USES, "all-reduces in one kernel (%(default)s)")
    between.add_argument("--json", type=Path, metavar="FILE", help="write the record of the run")
    table = kinds.add_parser("table", help="the results kept so far, in Markdown")
    table.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="of kept records (%(default)s)")
    table.add_argument(
        "--into",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="write between the markers of these files: <!-- results --> all, <!-- headline --> eight rows",
    )
    return parser


def _add_serving(kinds: Any) -> None:
    """Of a server: serving.py."""
    server = Parser(add_help=False)
    server.add_argument("--url", default="http://127.0.0.1:8000/v1", metavar="URL", help="(%(default)s)")
    server.add_argument("--model", metavar="NAME", help="(default: the first that it serves)")
    server.add_argument("--api-key", metavar="KEY", help="(default: $KOG_API_KEY)")
    server.add_argument("--json", type=Path, metavar="FILE", help="write the record of the run")
    server.add_argument("--quiet", action="store_true", help="no table and no progress")
    serve = kinds.add_parser("serve", parents=[server], help="a server of OpenAI's API, as several clients see it")
    serve.add_argument(
        "--clients",
        type=positive,
        nargs="+",
        default=list(REQUESTS),
        metavar="N",
        help=f"at a time ({' '.join(map(str, REQUESTS))})",
    )
    _number(serve, "--max-tokens", 256)
    _number(serve, "--prompt-words", 64)
    _number(serve, "--rounds", 5)
    serve.add_argument("--ignore-eos", action="store_true", help="where the server knows it")
    agent = kinds.add_parser("agent", parents=[server], help="a server, in a conversation that grows by tool calls")
    _number(agent, "--tokens", 50_000, "to be made in all (%(default)s)")
    _number(agent, "--call-tokens", 512, "most of one answer (%(default)s)")
    _number(agent, "--result-words", 200, "of a tool's result (%(default)s)")


def _common() -> Parser:
    out = Parser(add_help=False)
    add_checkpoint(out, shape="random weights")
    out.add_argument("--backend", action="append", metavar="NAME", help=f"{', '.join(backend_names())}; repeatable")
    out.add_argument("--dtype", default="auto", choices=("auto", "bf16", "fp16"), help="of the weights (%(default)s)")
    out.add_argument(
        "--weights",
        metavar="FORMAT",
        choices=FORMATS,
        help=f"with --shape, what the layers' matrices are rounded to: {', '.join(FORMATS)}",
    )
    out.add_argument("--device", default="", help="cpu, nvidia, amd or a GPU such as h200")
    out.add_argument("--gpus", type=positive, default=1, metavar="N", help="how many (%(default)s)")
    out.add_argument("--json", type=Path, metavar="FILE", help="write the record of the run")
    out.add_argument("--save", metavar="NAME", help=f"keep the record as {RESULTS}/<gpu>/<date>-NAME.json")
    out.add_argument("--quiet", action="store_true", help="no table and no progress")
    return out


def _number(parser: Parser, flag: str, default: int, help: str = "(%(default)s)") -> None:
    parser.add_argument(flag, type=positive, default=default, metavar="N", help=help)


def _repeated() -> Parser:
    out = Parser(add_help=False)
    _number(out, "--rounds", 5)
    _number(out, "--warmup", 2)
    return out


def _timed() -> Parser:
    out = Parser(add_help=False, parents=[_repeated()])
    out.add_argument("--peer", action="append", metavar="NAME", choices=PEERS, help=f"{', '.join(PEERS)}")
    out.add_argument("--gguf", type=Path, metavar="FILE", help="this model, for llama-bench")
    out.add_argument(
        "--no-check", action="store_true", help="compare nothing with the fp32 reference; the record says so"
    )
    out.add_argument(
        "--no-kernel-switches",
        action="store_true",
        help="prompts by the kernel that decodes, in the same launch; fail unless a profiler sees one kernel a "
        "GPU for a whole request like those timed, of each backend",
    )
    return out
