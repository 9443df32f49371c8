"""Names of modules in a config.json: exact, or regular expressions, which come from whoever made the checkpoint.

A regular expression can take exponential time, so only simple ones are run: no quantifier behind a group, at most
MAX_REPEATS unbounded ones and MAX_OPTIONS of one or none. Those in use ("re:.*mlp.(gate|up)_proj$") are far below.
"""

import re
from collections.abc import Iterable

from kog_triton.errors import ModelError, shown
from kog_triton.model.config import Config

MAX_PATTERN = 200  # characters
MAX_REPEATS = 3
MAX_OPTIONS = 4
MAX_REGEXES = 64
_ATOM = r"(?:\\[.dwW_-]|\[\^?[\w.-]+\]|[\w.-])"
_SIMPLE = re.compile(rf"(?:\^|\$|\||\((?:\?:)?|\)|{_ATOM}[*+]?\??)*")
_REPEAT = re.compile(r"(?<!\\)[*+]")
_OPTION = re.compile(r"(?<![\\(*+?])\?")


def names(values: object, field: str) -> tuple[str, ...]:
    """A list of module names; () if it is absent or null."""
    if values is None:
        return ()
    if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
        raise ModelError(f"{field} is {shown(values)}: it must be a list of module names")
    return tuple(values)


def regexes(patterns: Iterable[str], field: str) -> tuple[re.Pattern[str], ...]:
    """Compiled; ModelError for what is no regular expression, or could run for ever."""
    found = tuple(dict.fromkeys(patterns))
    if len(found) > MAX_REGEXES:
        raise ModelError(f"{field} has {len(found)} patterns: at most {MAX_REGEXES} are read")
    return tuple(_compile(pattern, field) for pattern in found)


def is_simple(pattern: str) -> bool:
    return (
        len(pattern) <= MAX_PATTERN
        and _SIMPLE.fullmatch(pattern) is not None
        and len(_REPEAT.findall(pattern)) <= MAX_REPEATS
        and len(_OPTION.findall(pattern)) <= MAX_OPTIONS
    )


def _compile(pattern: str, field: str) -> re.Pattern[str]:
    if not is_simple(pattern):
        raise ModelError(f"{field} has the pattern {shown(pattern)}: it is not one that is run")
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ModelError(f"{field} has the pattern {shown(pattern)}: {error}") from None


class Excluded:
    """`modules_to_not_convert` and its kin, as transformers reads them.

    A name excludes the modules that begin with it, up to a dot, and those that end with it.
    """

    def __init__(self, values: object, field: str) -> None:
        self.names = names(values, field)

    def __contains__(self, module: str) -> bool:
        return any(
            module == n or module.startswith(f"{n.rstrip('.')}.") or module.endswith(n)
            for n in self.names
            if n
        )


def group_and_excluded(config: Config) -> tuple[int, Excluded]:
    """What AWQ and GPTQ say alike: columns of a group, 0 for all, and the modules left wide."""
    group = config.integer("group_size", low=-1, high=1 << 16, default=128)
    if group == 0:
        raise config.error(["group_size"], "-1 or a positive integer")
    field = "modules_to_not_convert"
    return max(group, 0), Excluded(config.get(field), config.label(field))
