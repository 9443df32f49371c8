"""Names of modules in a config.json: exact, or regular expressions, which come from whoever made the checkpoint.

A regular expression can take exponential time, so only simple ones are run: no quantifier behind a group, and at most
MAX_WAYS to match. Those in use ("re:.*mlp.(gate|up)_proj$" has 64) are far below.
"""

import re
from collections.abc import Iterable

from kog_triton.errors import ModelError, shown
from kog_triton.model.config import Config

MAX_PATTERN = 200  # characters
MAX_WAYS = 1 << 22  # to look at them all takes 0.15 s a name
REPEAT = 32  # ways of an unbounded quantifier: three in a name of 60 characters have as many
MAX_REGEXES = 64
_ATOM = r"(?:\\[.dwW_-]|\[\^?[\w.-]+\]|[\w.-])"
_SIMPLE = re.compile(rf"(?:\^|\$|\||\((?:\?:)?|\)|{_ATOM}[*+]?\??)*")
_PART = re.compile(rf"\((?:\?:)?|[)|^$]|{_ATOM}[*+]?\??")


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


def _ways(pattern: str) -> int:
    """To match: the product of those of its parts, and of branches the sum."""
    outer: list[tuple[int, int]] = []  # the two below, of the groups around
    before, ways = 0, 1  # of the branches before, of this one
    for part in _PART.findall(pattern):
        if part[0] == "(":
            outer.append((before, ways))
            before, ways = 0, 1
        elif part == "|":
            before, ways = before + ways, 1
        elif part == ")" and outer:
            group = before + ways
            before, ways = outer.pop()
            ways *= group
        elif {*"*+"} & {*part}:
            ways *= REPEAT
        elif part[-1] == "?":
            ways *= 2
    return before + ways


def _compile(pattern: str, field: str) -> re.Pattern[str]:
    said = f"{field} has the pattern {shown(pattern)}"
    if len(pattern) > MAX_PATTERN or not _SIMPLE.fullmatch(pattern):
        raise ModelError(f"{said}: it is not one that is run")
    if (ways := _ways(pattern)) > MAX_WAYS:
        raise ModelError(f"{said}: it has {ways} ways to match, at most {MAX_WAYS} are tried")
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ModelError(f"{said}: {error}") from None


class Excluded:
    """`modules_to_not_convert` and its kin, as transformers reads them.

    A name excludes the modules that begin with it, up to a dot, and those that end with it.
    """

    def __init__(self, values: object, field: str) -> None:
        self.names = names(values, field)

    def __contains__(self, module: str) -> bool:
        return any(module == n or module.startswith(f"{n.rstrip('.')}.") or module.endswith(n) for n in self.names if n)


def group_and_excluded(config: Config) -> tuple[int, Excluded]:
    """What AWQ and GPTQ say alike: columns of a group, 0 for all, and the modules left wide."""
    group = config.integer("group_size", low=-1, high=1 << 16, default=128)
    if group == 0:
        raise config.error(["group_size"], "-1 or a positive integer")
    field = "modules_to_not_convert"
    return max(group, 0), Excluded(config.get(field), config.label(field))
