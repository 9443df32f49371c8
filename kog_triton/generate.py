"""`kog generate` and `python -m kog_triton.generate`: continue a text, or hold a conversation.

stdout gets the text and nothing else, as it is made; what is chosen, measured or wrong goes to
stderr. `--json FILE` writes a record that generate.schema.json describes. Exit codes: command.py.
"""

import argparse
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kog_triton.cli.activity import activity
from kog_triton.cli.command import INTERRUPTED, end_process, interruptible, run
from kog_triton.cli.stderr_log import STDERR_LOG, say

if TYPE_CHECKING:
    from kog_triton.llm import LLM
    from kog_triton.sampling.params import SamplingParams
    from kog_triton.text import Tokenizer

MOST_SLOTS = 8  # samples that run at once where nobody says how many


def begin_compiling(args: argparse.Namespace) -> None:
    """Begin the kernel's compiler, and say on stderr what is compiled."""
    from kog_triton.precompile import precompile

    logging.getLogger("kog_triton").addHandler(STDERR_LOG)  # the same one again is none
    compilers = logging.getLogger("kog_triton.compilers")
    compilers.setLevel(logging.WARNING if args.quiet else logging.INFO)
    logging.getLogger("kog_triton.llm").setLevel(logging.ERROR if args.quiet else logging.INFO)
    precompile(
        args.backend,
        args.model,
        revision=args.revision,
        device=args.device or "",
        num_gpus=args.gpus,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        num_slots=num_slots(args),
        prefill=args.prefill,
    )


def num_slots(args: argparse.Namespace) -> int:
    return args.num_slots or min(args.n or 1, MOST_SLOTS)


def open_llm(args: argparse.Namespace, tokenizer: "Tokenizer | None" = None) -> "LLM":
    """Open the model and say on stderr what was chosen."""
    with activity("loading the model", args.quiet):
        from kog_triton.llm import LLM  # and torch, which takes seconds

        llm = LLM(
            args.model,
            backend=args.backend,
            devices=f"{args.device or ''}:{args.gpus}",
            dtype=args.dtype,
            max_model_len=args.max_model_len,
            num_slots=num_slots(args),
            prefill=args.prefill,
            walk=args.walk,
            num_blocks=args.blocks,
            revision=args.revision,
            tokenizer=tokenizer,
            chat_template=args.chat_template,
        )
    if not args.quiet:
        say(f"backend {llm.choice.name} ({llm.choice.reason})")
        spec = llm.checkpoint.spec
        size = f"{spec.num_parameters / 1e6:,.1f} M parameters"
        size += f", {spec.narrow_formats}" if spec.narrow else ""
        say(f"model   {llm.checkpoint.folder} ({spec.family}, {size}), loaded in {llm.load_s:.2f} s")
    return llm


def _body(argv: Sequence[str] | None) -> int:
    # imported inside `run`, where Ctrl-C is one line
    from kog_triton.cli import generate_arguments, request

    args = generate_arguments.parse(argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a sign shows "?"
    flags = request.sampling_flags(args)
    how = request.conversation(args)
    text = None if args.interactive else request.read_prompt(args.prompt)
    begin_compiling(args)  # first of what takes long: a first start waits for it
    with activity("reading the tokenizer", args.quiet):
        tokenizer = request.check_request(args, text, how)
    with open_llm(args, tokenizer) as llm:
        interruptible()
        params = llm.get_default_sampling_params(**flags)
        if args.interactive:
            from kog_triton.cli.interactive import Talk  # behind what imports torch

            return Talk(llm, params, args.system, how, raw=args.raw, args=args).hold()
        prompt: Any = text
        if args.chat:
            prompt = llm.chat_prompt(request.messages_of(args, text or ""), **how)
        return _generate(args, llm, params, prompt)


def _generate(args: argparse.Namespace, llm: "LLM", params: "SamplingParams", prompt: str | Mapping[str, Any]) -> int:
    """One prompt: stream its text, or its samples one after the other; then show and record the figures."""
    from kog_triton.cli.arguments import write_text
    from kog_triton.cli.interactive import show, show_samples
    from kog_triton.cli.stats import record, report

    shown = str(args.json) != "-"
    # a pipe gets the text to the letter
    end = "\n" if sys.stdout.isatty() else ""
    if params.n == 1:
        output = show(llm.stream(prompt, params), end, args.quiet, shown)
    else:
        output = show_samples(llm.generate(prompt, params)[0], args.quiet, shown)
    if not args.quiet:
        say(report(output, params, llm.engine.max_context, args.verbose))
    if args.json:
        document = json.dumps(record(llm, params, output), indent=2, allow_nan=False) + "\n"
        if shown:
            write_text(args.json, document, f"--json {args.json}")
        else:
            sys.stdout.write(document)
    return INTERRUPTED if output.outputs[0].finish_reason == "abort" else 0


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return run(_body, argv)
    finally:  # a compiler that is not done says nothing behind the last line, unless it warns
        logging.getLogger("kog_triton").removeHandler(STDERR_LOG)


if __name__ == "__main__":
    end_process(main)
