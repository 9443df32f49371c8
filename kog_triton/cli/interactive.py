"""Text on a terminal: a stream shown as it comes, and the loop behind `--interactive`.

Ctrl-C during an answer cancels the answer; what was said so far stays in the conversation. A second
Ctrl-C, or one at the prompt, leaves.
"""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from kog_triton.cli.stats import stats
from kog_triton.cli.stderr_log import STDERR_LOG
from kog_triton.errors import RequestError
from kog_triton.generation import Generation
from kog_triton.llm import LLM
from kog_triton.outputs import RequestOutput
from kog_triton.sampling.params import SamplingParams


@contextlib.contextmanager
def cancel_on_interrupt(generation: Generation) -> Iterator[None]:
    """While inside, the first Ctrl-C cancels the generation; the next is a KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)

    def cancel(number: int, frame: FrameType | None) -> None:
        generation.cancel()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, cancel)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def show(generation: Generation, end: str) -> RequestOutput:
    """Write the text to stdout as it comes, and `end` after it; the final output.

    Logs wait from its first sign on: before, a compiler may take long and say so.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(cancel_on_interrupt(generation))
        opened = False
        for delta in generation:
            if delta.text and not opened:
                opened = True
                stack.enter_context(STDERR_LOG.held())
            sys.stdout.write(delta.text)
            sys.stdout.flush()
        sys.stdout.write(end)
        sys.stdout.flush()
    return generation.output()


def converse(llm: LLM, params: SamplingParams, system: str | None, chat: bool, quiet: bool) -> int:
    """Ask, answer, repeat, until /exit or the end of the input.

    Without `chat` each line is a text of its own to continue.
    """
    start: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    messages = list(start)
    while (line := _ask()) is not None:
        if line == "/exit":
            break
        if line == "/reset":
            messages = list(start)
        elif line:
            messages.append({"role": "user", "content": line})
            try:
                prompt: Any = llm.chat_prompt(messages) if chat else line
                output = show(llm.stream(prompt, params), end="\n")
            except RequestError as error:
                messages.pop()
                print(f"error: {error}", file=sys.stderr)
                continue
            messages.append({"role": "assistant", "content": output.outputs[0].text})
            if not quiet:
                print(stats(output), file=sys.stderr)
    return 0


def _ask() -> str | None:
    """One line of input, None at its end. A terminal gets a prompt and line editing."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  input() edits lines once it is imported
        try:
            with STDERR_LOG.held():
                return input("> ").rstrip()
        except EOFError:
            return None
    line = sys.stdin.readline()
    return line.rstrip() if line else None
