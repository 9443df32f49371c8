"""`kog generate` and `python -m kog_triton.generate`: continue a text, or hold a conversation.

stdout gets the text and nothing else, as it is made; what is chosen, measured or wrong goes to
stderr. `--json FILE` writes a record that generate.schema.json describes. Exit codes: command.py.
"""

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kog_triton.cli.arguments import Parser, check_output, positive
from kog_triton.cli.command import INTERRUPTED, run
from kog_triton.cli.stderr_log import STDERR_LOG, say
from kog_triton.errors import RequestError

if TYPE_CHECKING:
    from kog_triton.llm import LLM
    from kog_triton.sampling.params import SamplingParams
    from kog_triton.sampling.structured import StructuredOutputs


def build_parser() -> Parser:
    from kog_triton.backends import PREFILLS  # imported inside `run`, where Ctrl-C is one line
    from kog_triton.backends.choose import known_names

    parser = Parser(
        prog="kog generate",
        description="Continue a text or hold a conversation: text on stdout, all else on stderr.",
        epilog="Exit codes: 0 done, 2 usage or request, 3 model, 4 device, 5 run, 130 Ctrl-C.",
    )
    what = parser.add_argument_group("what to generate")
    what.add_argument("--model", help="folder, .gguf file or Hugging Face id (default: the demo)")
    what.add_argument(
        "-p", "--prompt", metavar="TEXT|-|@FILE", help="the prompt, - for stdin, @FILE for a file"
    )
    what.add_argument("--chat", action="store_true", help="send it through the chat template")
    what.add_argument("--system", metavar="TEXT", help="system message of a conversation")
    what.add_argument(
        "--interactive", action="store_true", help="ask again and again: /reset, /exit, Ctrl-C"
    )
    what.add_argument(
        "--raw", action="store_true", help="with --interactive: continue texts, no chat template"
    )
    what.add_argument(
        "-m",
        "--max-tokens",
        type=int,
        help="most tokens to make (default: the rest of the context)",
    )
    sampling = parser.add_argument_group("sampling (default: the checkpoint's generation_config)")
    sampling.add_argument("--temp", "--temperature", dest="temperature", type=float)
    sampling.add_argument("--top-p", type=float)
    sampling.add_argument("--top-k", type=int)
    sampling.add_argument("--min-p", type=float)
    sampling.add_argument("--seed", type=int, help="repeat a run (default: drawn, and reported)")
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="may be given repeatedly")
    sampling.add_argument("--repetition-penalty", type=float)
    sampling.add_argument("--presence-penalty", type=float)
    sampling.add_argument("--frequency-penalty", type=float)
    sampling.add_argument("--ignore-eos", action="store_true", default=None)
    sampling.add_argument("--logprobs", type=int, metavar="K", help="keep the K best in --json")
    shape = parser.add_argument_group("shape of the answer, one of").add_mutually_exclusive_group()
    shape.add_argument("--json-schema", metavar="FILE|TEXT", help="JSON that fits this schema")
    shape.add_argument("--regex", help="a regular expression for the whole answer")
    shape.add_argument("--choice", action="append", metavar="TEXT", help="give it repeatedly")
    shape.add_argument("--grammar", metavar="FILE", help="a Lark grammar with a rule start")
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--backend", default="auto", help=f"auto, {', '.join(known_names())} (default: auto)"
    )
    machine.add_argument("--device", help="cpu, nvidia, amd or a GPU such as h200")
    machine.add_argument("--gpus", type=positive, default=1, metavar="N")
    machine.add_argument("--dtype", default="auto", help="weights: auto, fp32, bf16 or fp16")
    machine.add_argument(
        "--max-model-len", type=int, metavar="N", help="positions to make room for"
    )
    machine.add_argument(
        "--prefill",
        default="auto",
        choices=PREFILLS,
        help="prompts in the backend's kernel, by torch's matrix products, or whichever is faster",
    )
    machine.add_argument(
        "--walk", default="stage", choices=("stage", "block"), help="reference only"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", type=Path, metavar="FILE", help="write a record of the run")
    output.add_argument("--quiet", action="store_true", help="only errors on stderr")
    return parser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, or a usage error for those that contradict each other."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.interactive and (args.prompt is not None or args.json or args.chat):
        parser.error("--interactive asks for its prompts: leave out --prompt, --chat and --json")
    if args.raw and not args.interactive:
        parser.error("--raw goes with --interactive; a prompt without --chat is raw already")
    if not args.interactive and args.prompt is None:
        parser.error("a prompt is needed: -p TEXT, -p - for stdin, -p @FILE, or --interactive")
    if args.system is not None and (args.raw or not (args.chat or args.interactive)):
        parser.error("--system needs a conversation: --chat or --interactive")
    if args.json:
        check_output("--json", args.json)
    return args


def read_prompt(said: str) -> str:
    """The text behind -p."""
    if said.startswith("@@"):
        return said[1:]
    if said.startswith("@"):
        return read_file("--prompt", said, Path(said[1:]))
    if said == "-" and sys.stdin is None:
        raise RequestError("--prompt -: standard input is closed")
    try:
        return sys.stdin.read() if said == "-" else said
    except UnicodeDecodeError as error:
        raise RequestError(f"--prompt {said}: not UTF-8 at byte {error.start}") from error


def read_file(flag: str, said: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{flag} {said}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{flag} {said}: not UTF-8 at byte {error.start}") from error


def structured_outputs(args: argparse.Namespace) -> "StructuredOutputs | None":
    """What --json-schema, --regex, --choice or --grammar asks for."""
    from kog_triton.sampling.structured import StructuredOutputs

    if (schema := args.json_schema) is not None:
        if not schema.lstrip().startswith("{"):
            schema = read_file("--json-schema", schema, Path(schema))
        return StructuredOutputs(json=schema)
    if args.regex is not None:
        return StructuredOutputs(regex=args.regex)
    if args.choice is not None:
        return StructuredOutputs(choice=args.choice)
    if args.grammar is not None:
        text = read_file("--grammar", args.grammar, Path(args.grammar))
        return StructuredOutputs(grammar=text)
    return None


def sampling_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of SamplingParams that were given, checked before a model is opened for them.

    A flag that is not given leaves the checkpoint's default.
    """
    from kog_triton.sampling.params import SamplingParams

    fields = SamplingParams.__dataclass_fields__
    explicit = {name: value for name, value in vars(args).items() if name in fields}
    explicit["structured_outputs"] = structured_outputs(args)
    explicit = {name: value for name, value in explicit.items() if value is not None}
    SamplingParams(**explicit)
    return explicit


def open_llm(args: argparse.Namespace) -> "LLM":
    """Open the model and say on stderr what is compiled, what was chosen and which defaults apply."""
    from kog_triton.precompile import precompile

    logging.getLogger("kog_triton").addHandler(STDERR_LOG)  # the same one again is none
    compilers = logging.getLogger("kog_triton.compilers")
    compilers.setLevel(logging.WARNING if args.quiet else logging.INFO)
    logging.getLogger("kog_triton.llm").setLevel(logging.ERROR if args.quiet else logging.INFO)
    precompile(
        args.backend,
        args.model,
        device=args.device or "",
        num_gpus=args.gpus,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
    )
    from kog_triton.llm import LLM  # and torch, which takes seconds

    llm = LLM(
        args.model,
        backend=args.backend,
        devices=f"{args.device or ''}:{args.gpus}",
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        prefill=args.prefill,
        walk=args.walk,
    )
    if not args.quiet:
        say(f"backend {llm.choice.name} ({llm.choice.reason})")
        spec = llm.checkpoint.spec
        size = f"{spec.num_parameters / 1e6:,.1f} M parameters"
        size += f", {spec.narrow_formats}" if spec.narrow else ""
        say(
            f"model   {llm.checkpoint.folder} ({spec.family}, {size}), loaded in {llm.load_s:.2f} s"
        )
        generation = llm.checkpoint.generation
        shown = ", ".join(f"{k} {v}" for k, v in generation.items() if not k.endswith("_token_id"))
        say(f"generation_config: {shown or 'no sampling defaults'}")
    return llm


def _body(argv: Sequence[str] | None) -> int:
    args = parse(argv)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a sign shows "?"
    flags = sampling_flags(args)
    if args.interactive:
        with open_llm(args) as llm:
            from kog_triton.cli.interactive import converse  # behind what imports torch

            chat = llm.tokenizer.has_chat_template and not args.raw
            if args.system is not None and not chat:
                raise RequestError("--system needs a chat template, and this model has none")
            if not chat and not args.raw and not args.quiet:
                say("no chat template: every line is a text to continue")
            return converse(llm, llm.default_params(**flags), args.system, chat, args.quiet)
    text = read_prompt(args.prompt)
    with open_llm(args) as llm:
        return _generate(args, llm, llm.default_params(**flags), text)


def _generate(args: argparse.Namespace, llm: "LLM", params: "SamplingParams", text: str) -> int:
    """One prompt: stream its text, then show and record the figures."""
    from kog_triton.cli.interactive import show
    from kog_triton.cli.stats import record, stats

    prompt: Any = text
    if args.chat:
        system = [{"role": "system", "content": args.system}] if args.system is not None else []
        prompt = llm.chat_prompt([*system, {"role": "user", "content": text}])
    # a pipe gets the text to the letter
    output = show(llm.stream(prompt, params), end="\n" if sys.stdout.isatty() else "")
    if not args.quiet:
        say(stats(output))
    if args.json:
        document = json.dumps(record(llm, params, output), indent=2, allow_nan=False)
        try:
            args.json.write_text(document + "\n", encoding="utf-8")
        except OSError as error:
            raise RequestError(f"--json {args.json}: {error.strerror}") from error
    return INTERRUPTED if output.outputs[0].finish_reason == "abort" else 0


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return run(_body, argv)
    finally:  # a compiler that is not done says nothing behind the last line, unless it warns
        logging.getLogger("kog_triton").removeHandler(STDERR_LOG)


if __name__ == "__main__":
    sys.exit(main())
