"""The command line of `kog generate`."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from kog_triton.backends import PREFILLS, backend_names
from kog_triton.cli.arguments import Parser, check_output, positive
from kog_triton.cli.foreign_flags import INSTEAD, own_words
from kog_triton.cli.model import add_checkpoint, check_revision

EPILOG = """Exit codes: 0 done, 1 a bug of ours, 2 usage, request or full disk, 3 model, 4 device, 5 run, 130 Ctrl-C.
Environment: XDG_CACHE_HOME (compiled kernels; `kog cache` lists them), XDG_STATE_HOME (what was typed into
--interactive), HF_HOME and HF_TOKEN (models of the hub), COLUMNS, KOG_DEBUG=1 (tracebacks)."""


class _Generate(Parser):
    def error(self, message: str) -> NoReturn:
        name, _, words = message.partition(": ")
        if name == "unrecognized arguments" and not words.startswith("-"):
            message += ": a prompt is given with -p, a model with --model"
        if name == "argument -m/--max-tokens":
            message += ": -m is how many tokens to make, a model is given with --model"
        super().error(message)


def build_parser() -> Parser:
    parser = _Generate(
        prog="kog generate",
        description="Continue a text or hold a conversation: text on stdout, all else on stderr.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what to generate")
    add_checkpoint(what)
    add = what.add_argument
    add(
        "-p", "--prompt", action="append", metavar="TEXT|-|@FILE",
        help="the prompt, - for stdin, @FILE for a file, @@TEXT for a text that begins with @",
    )  # fmt: skip
    add("--chat", action="store_true", help="send it through the chat template")
    add("--system", metavar="TEXT", help="system message of a conversation")
    add("--tools", metavar="FILE|JSON", help="a JSON list of tools, for the chat template")
    add("--chat-template", metavar="FILE|TEXT", help="a chat template, instead of the checkpoint's")
    add(
        "--chat-template-kwargs", metavar="FILE|JSON",
        help='what the chat template takes, such as \'{"enable_thinking": false}\'',
    )  # fmt: skip
    add("--interactive", action="store_true", help="ask again and again; /help there lists commands")
    add("--raw", action="store_true", help="with --interactive: continue texts, no chat template")
    add("-m", "--max-tokens", type=int, help="most tokens to make (default: the rest of the context)")
    add("--min-tokens", type=int, metavar="N", help="tokens before the text may end (default: 0)")
    add("--n", type=positive, help="samples of the prompt, printed one after the other (default: 1)")

    add = parser.add_argument_group("sampling (default: the checkpoint's generation_config)").add_argument
    add("--temp", "--temperature", dest="temperature", type=float, help="0 takes the likeliest token")
    add("--top-p", type=float, help="sample among the likeliest that hold this share, up to 1")
    add("--top-k", type=int, help="sample among the K likeliest; 0 for all")
    add("--min-p", type=float, help="leave out what is less likely than this share of the likeliest")
    add("--seed", type=int, help="repeat a run (default, or -1: drawn, and reported; below that 2^64 is added)")
    add("--stop", action="append", metavar="TEXT", help="end before this text; may be given repeatedly")
    add("--repetition-penalty", type=float, help="above 1: fewer tokens of prompt and answer again")
    add("--presence-penalty", type=float, help="above 0: fewer tokens of the answer again")
    add("--frequency-penalty", type=float, help="above 0: the fewer, the more often they came")
    add("--logit-bias", action="append", type=bias, metavar="ID=BIAS", help="add to a token's logit; repeatable")
    add("--bad-words", action="append", metavar="TEXT", help="never say this; may be given repeatedly")
    add("--ignore-eos", action="store_true", default=None, help="go on after the end of the text")
    add("--logprobs", type=int, metavar="K", help="keep the K best of each token, with --json")

    group = parser.add_argument_group("shape of the answer, one of (needs llguidance: kog doctor)")
    add = group.add_mutually_exclusive_group().add_argument
    add("--json-schema", metavar="FILE|TEXT", help="JSON that fits this schema")
    add("--regex", help="a regular expression for the whole answer")
    add("--choice", action="append", metavar="TEXT", help="one of these; give it repeatedly")
    add("--grammar", metavar="FILE", help="a Lark grammar with a rule start, or GBNF with a rule root")

    add = parser.add_argument_group("machine").add_argument
    add("--backend", default="auto", help=f"auto, {', '.join(backend_names())} (default: auto)")
    add("--device", help="cpu, nvidia, amd or a GPU such as h200")
    add("--gpus", type=positive, default=1, metavar="N", help="how many of them (default: 1)")
    add("--dtype", default="auto", help="weights: auto, fp32, bf16 or fp16")
    add("--max-model-len", type=int, metavar="N", help="positions to make room for (default: the model's)")
    add("--num-slots", type=positive, metavar="N", help="samples that run at once (default: as many as --n, up to 8)")
    add(
        "--prefill", default="auto", choices=PREFILLS,
        help="prompts in the backend's kernel, by torch's matrix products, or whichever is faster",
    )  # fmt: skip
    add("--blocks", type=positive, metavar="N", help="of a GPU (hip only; MI300X: 256, up to 304)")
    add("--walk", default="stage", choices=("stage", "block"), help="reference only")

    add = parser.add_argument_group("output").add_argument
    add("--json", type=Path, metavar="FILE|-", help="write a record of the run; - for stdout, instead of the text")
    add("-v", "--verbose", action="store_true", help="all figures on stderr")
    add("--quiet", action="store_true", help="only errors on stderr")
    return parser


def bias(text: str) -> tuple[int, float]:
    """A `type` of argparse: a token id and what is added to its logit."""
    token, equals, value = text.partition("=")
    try:
        found = int(token), float(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=BIAS, as in 15=-2.5") from error
    if not equals or not math.isfinite(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=BIAS, as in 15=-2.5")
    return found


def parse(argv: Sequence[str] | None) -> Any:
    """The arguments, or a usage error for those that contradict each other."""
    parser = build_parser()
    args = parser.parse_args(own_words(parser, argv, INSTEAD))
    check_revision(args.model, args.revision)
    if args.prompt is not None and len(args.prompt) > 1:
        parser.error("--prompt was given twice: one run has one prompt")
    args.prompt = args.prompt[0] if args.prompt else None
    talks = args.chat or args.interactive
    if args.interactive and (args.prompt is not None or args.json or args.chat or args.n):
        parser.error("--interactive asks for its prompts: leave out --prompt, --chat, --n and --json")
    if args.raw and not args.interactive:
        parser.error("--raw goes with --interactive; a prompt without --chat is raw already")
    if not args.interactive and args.prompt is None:
        parser.error("a prompt is needed: -p TEXT, -p - for stdin, -p @FILE, or --interactive")
    for flag in ("system", "tools", "chat_template", "chat_template_kwargs"):
        if getattr(args, flag) is not None and (args.raw or not talks):
            parser.error(f"--{flag.replace('_', '-')} needs a conversation: --chat or --interactive")
    if args.logprobs is not None and not args.json:
        parser.error("--logprobs goes with --json, where they are written")
    if args.verbose and args.quiet:
        parser.error("--verbose and --quiet contradict each other")
    if args.json:
        check_output("--json", args.json)
    return args
