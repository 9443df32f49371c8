"""What `LLM` and its methods are given, checked and brought into one form; RequestError for each wrong thing."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kog_triton.errors import RequestError, shown, wrong
from kog_triton.sampling.params import SamplingParams
from kog_triton.text.chat import MAX_TEMPLATE_CHARS


def check_integer(name: str, value: Any, low: int, high: int) -> None:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or not low <= value <= high:
        raise wrong(name, value, f"an integer from {low} to {high}")


def check_share(name: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= 1:
        raise wrong(name, value, "above 0 and at most 1")


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise wrong(name, value, "true or false")


def one_of(default: int, **named: int | None) -> int:
    """The value of several names for one thing."""
    given = {name: value for name, value in named.items() if value is not None}
    if len(set(given.values())) > 1:
        said = " and ".join(f"{name} is {shown(value)}" for name, value in given.items())
        raise RequestError(f"{said}: they are the same thing, give one of them")
    return next(iter(given.values()), default)


def device_and_count(said: str | int | None) -> tuple[str, int | None]:
    """(device, count) of what the caller calls `devices`; None if it has no count."""
    if not isinstance(said, str):
        return "", said
    name, _, count = said.partition(":")
    if count and not (count.isdecimal() and len(count) < 9):
        raise RequestError(f"devices is {said!r}: behind the colon belongs a number, as in h200:4")
    return name, int(count) if count else None


def template_text(said: str | Path | None) -> str | None:
    """A chat template, given as its file or as its text."""
    if said is None:
        return None
    if isinstance(said, str) and ("{" in said or "\n" in said):
        return said
    try:
        with Path(said).open(encoding="utf-8") as file:
            return file.read(MAX_TEMPLATE_CHARS + 1)
    except (OSError, ValueError, TypeError) as error:
        raise RequestError(
            f"chat_template is {shown(said)}: neither a template's text nor a readable file of one"
        ) from error


def one_each(params: SamplingParams | Sequence[SamplingParams], count: int) -> Sequence[SamplingParams]:
    """A SamplingParams for each of `count` prompts."""
    if isinstance(params, SamplingParams):
        return [params] * count
    each: list[Any] = list(params) if isinstance(params, Iterable) else [params]
    if not all(isinstance(p, SamplingParams) for p in each):
        raise RequestError("sampling_params must be a SamplingParams, or a list with one for each prompt")
    if len(each) != count:
        raise RequestError(f"{len(each)} sampling params for {count} prompts: give one for each")
    return each
