"""Text on a terminal: a stream shown as it comes, and the talk behind `--interactive`.

Ctrl-C during an answer cancels the answer; what was said so far stays in the talk. At the prompt it drops the line.
"""

import argparse
import contextlib
import json
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from kog_triton.cli.activity import activity
from kog_triton.cli.history import kept_lines
from kog_triton.cli.panics import panics_unsaid
from kog_triton.cli.stats import report
from kog_triton.cli.stderr_log import STDERR_LOG, say
from kog_triton.errors import KogError, RequestError, printable, shown
from kog_triton.generation import Generation
from kog_triton.llm import LLM
from kog_triton.outputs import RequestOutput
from kog_triton.sampling.params import SamplingParams

HELP = """/help              this
/reset             forget the talk
/set NAME VALUE    a sampling parameter, as in: /set temperature 0.2, /set max_tokens 200
/exit              leave, as Ctrl-D
\"\"\"                begins a text of several lines, and ends it
Ctrl-C             ends an answer, or drops the line"""


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


def show(generation: Generation, end: str, quiet: bool = False, visible: bool = True) -> RequestOutput:
    """Write the text to stdout as it comes, and `end` after it, if it is `visible`; the final output.

    Logs wait from its first sign on: before, a compiler may take long and say so.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(cancel_on_interrupt(generation))
        waiting = stack.enter_context(contextlib.ExitStack())
        waiting.enter_context(activity("reading the prompt", quiet))
        opened = False
        try:
            for delta in generation:
                waiting.close()
                if delta.text and not opened and visible:
                    opened = True
                    stack.enter_context(STDERR_LOG.held())
                if visible:
                    write(delta.text)
        except KogError:  # what it says begins a line
            write(end if opened else "")
            raise
        if visible:
            write(end)
    return generation.output()


def show_samples(output: RequestOutput, quiet: bool, visible: bool) -> RequestOutput:
    """Write every sample to stdout, each on lines of its own; stderr says which."""
    for done in output.outputs if visible else ():
        if not quiet:
            say(f"sample {done.index + 1} of {len(output.outputs)}: {done.finish_reason}")
        write(done.text + "\n")
    return output


def write(text: str) -> None:
    """Text of a model on stdout; a terminal is shown control characters, not sent them."""
    sys.stdout.write(printable(text, keep="\n\t") if sys.stdout.isatty() else text)
    sys.stdout.flush()


class Talk:
    """Ask, answer, repeat, until /exit or the end of the input.

    Raw, or where the model has no chat template, each text is one of its own to continue.
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        system: str | None,
        how: Mapping[str, Any],
        *,
        raw: bool,
        args: argparse.Namespace,
    ) -> None:
        self._llm, self._params, self._how = llm, params, how
        has_template = llm.tokenizer.has_chat_template or args.chat_template is not None
        self._chats = has_template and not raw
        self._quiet, self._verbose = args.quiet, args.verbose
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self._messages: list[dict[str, Any]] = list(self._start)
        self._raw = raw

    def hold(self) -> int:
        self._tell(
            "each text is answered: /help lists commands"
            if self._chats
            else "each text is continued: /help lists commands"
            if self._raw
            else "no chat template, so that every text is continued: /help lists commands"
        )
        with kept_lines():
            while (text := _ask()) is not None and text != "/exit":
                try:
                    if text.startswith("/") and "\n" not in text:
                        self._command(text)
                    elif text:
                        self._answer(text)
                except RequestError as error:
                    print(f"error: {printable(str(error))}", file=sys.stderr)
        return 0

    def _tell(self, line: str) -> None:
        if not self._quiet:
            say(line)

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name == "/help":
            say(HELP)
        elif name == "/reset":
            self._messages = list(self._start)
            self._tell("the talk begins anew")
        elif name == "/set":
            field, _, value = rest.strip().partition(" ")
            if field not in SamplingParams.__dataclass_fields__ or not value:
                raise RequestError("/set takes a sampling parameter and its value: /set top_p 0.9")
            setattr(self._params, field, _json_of(field, value))
            self._tell(f"{field} is {getattr(self._params, field)}")
        else:
            raise RequestError(f"no command {name}: /help lists them")

    def _answer(self, text: str) -> None:
        asked = [*self._messages, {"role": "user", "content": text}]
        with panics_unsaid():
            if self._chats:
                prompt, asked = self._fitting(asked)
            else:
                prompt = self._llm.tokenizer.encode(text, most=self._llm.engine.max_context)
        output = show(self._llm.stream(prompt, self._params), end="\n", quiet=self._quiet)
        if self._chats:
            self._messages = [*asked, {"role": "assistant", "content": output.outputs[0].text}]
        context = self._llm.engine.max_context
        self._tell(report(output, self._params, context, self._verbose))

    def _fitting(self, messages: list[dict[str, Any]]) -> tuple[Any, list[dict[str, Any]]]:
        """The talk as a prompt, and its messages: without the oldest if there would be too little room to answer."""
        context = self._llm.engine.max_context
        room = min(self._params.max_tokens or context, context // 4)
        first, dropped = len(self._start), 0
        while True:
            kept = [*messages[:first], *messages[first + dropped :]]
            last = len(kept) == first + 1
            try:
                prompt = self._llm.chat_prompt(kept, **self._how)
                if last or len(prompt["prompt_token_ids"]) <= context - room:
                    break
            except RequestError:
                if last:
                    raise
            dropped += 2  # a question with its answer
        length = len(prompt["prompt_token_ids"])
        if length >= context:
            raise RequestError(f"the text has {length} tokens and the context holds {context}: shorten the text")
        if dropped:
            self._tell(f"the context is full: the oldest {dropped} messages are forgotten")
        return prompt, kept


def _json_of(field: str, value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f'/set {field}: {shown(value)} is no JSON, as 0.5, true, null, "text" and ["a", "b"] are'
        ) from error


def _ask() -> str | None:
    """One text of input, None at its end. A terminal gets a prompt and line editing."""
    while True:
        try:
            line = _line("> ")
            if line is None or line.strip() != '"""':
                return None if line is None else line.rstrip()
            lines = []
            while (line := _line(". ")) is not None and line.strip() != '"""':
                lines.append(line.rstrip("\n"))
            return "\n".join(lines)
        except KeyboardInterrupt:
            if not _is_terminal():
                raise
            print()  # the line is dropped, the talk goes on


def _line(question: str) -> str | None:
    if _is_terminal():
        try:
            with STDERR_LOG.held():
                return input(question)
        except EOFError:
            return None
    return sys.stdin.readline() or None


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()
