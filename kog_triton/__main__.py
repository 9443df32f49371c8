"""`kog` and `python -m kog_triton`: hands over to the command that the first word names.

    kog generate -p "def add(a, b):"        kog doctor        kog --version

A command is a module of this package with a `main(argv) -> exit code`; one that is not part of this
installation is not listed. Nothing heavy is imported before the command is known.
"""

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from typing import NoReturn

from kog_triton import __version__
from kog_triton.cli.command import end_process, run
from kog_triton.errors import RequestError

COMMANDS = {
    "generate": "continue a text or hold a conversation",
    "serve": "serve the OpenAI API and a playground page",
    "plan": "show how a model is laid out on a GPU, without a GPU",
    "quantize": "write a narrow checkpoint: FP8, int8 or int4",
    "bench": "measure tokens/s beside the roofline that memory sets",
    "profile": "show where the time of a step goes",
    "cache": "list or clear what is kept on disk between runs",
    "doctor": "show what can run on this machine, and what is missing",
}
OTHERS = {  # what other engines call them
    "chat": "generate --interactive",
    "run": "generate --interactive",
    "complete": "generate",
    "convert": "quantize",
}


def commands() -> dict[str, str]:
    """The commands that are installed."""
    return {name: line for name, line in COMMANDS.items() if find_spec(f"kog_triton.{name}")}


def usage() -> str:
    lines = ["usage: kog COMMAND [options]", "       kog --version", "", "commands:"]
    lines += [f"  {name:<10}{line}" for name, line in commands().items()]
    return "\n".join([*lines, "", "kog COMMAND --help shows the options of one command."])


def main(argv: Sequence[str] | None = None) -> int:
    return run(_body, sys.argv[1:] if argv is None else argv)


def _body(argv: Sequence[str] | None) -> int:
    args = list(argv or ())
    first = args[0] if args else ""
    if first in ("-h", "--help"):
        print(usage())
        return 0
    if first == "--version":
        print(f"kog {__version__}")
        return 0
    if not first:
        print(usage(), file=sys.stderr)
        return 2
    if first not in commands():
        close = OTHERS.get(first) or next(iter(get_close_matches(first, commands(), 1)), None)
        hint = f": did you mean {close}?" if close else ""
        raise RequestError(f"no command named {first!r}: one of {', '.join(commands())}{hint}")
    code: int = import_module(f"kog_triton.{first}").main(args[1:])
    return code


def entry() -> NoReturn:
    """The `kog` of a shell."""
    end_process(main)


if __name__ == "__main__":
    entry()
