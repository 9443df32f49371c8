"""Which operations of a template could make much out of little, refused before they run.

Each check raises jinja2's SecurityError. Values are strings, numbers, lists and dicts: a sandboxed
template has nothing else that grows.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jinja2.exceptions import SecurityError

MAX_CHARS = 16 << 20  # of one value, and of everything printed
MAX_SLOW_CHARS = 1 << 16  # that SLOW_FILTERS take
MAX_WIDTH = 10_000  # padding, indentation, digits
MAX_ITEMS = 1 << 17  # of a list, a tuple or a dict, each way to an item counted
MAX_NESTING = 200  # of lists: what hashes a tuple in a tuple in a tuple counts no levels
MAX_ARGUMENTS = 1000
MAX_SEARCH = 1 << 28  # characters of a text times those looked for, where a search takes so long
MAX_INTEGER_BITS = 4096
ITEM_WEIGHT = 32  # bytes that an item of a list, with its own object, weighs as

# these pass a list on or look at its items, so a nested one costs nothing
STRUCTURAL_FILTERS = frozenset(
    (
        "attr",
        "batch",
        "count",
        "d",
        "default",
        "dictsort",
        "first",
        "groupby",
        "items",
        "last",
        "length",
        "list",
        "map",
        "max",
        "min",
        "random",
        "reject",
        "rejectattr",
        "reverse",
        "select",
        "selectattr",
        "slice",
        "sort",
        "sum",
        "unique",
    )
)
# of the structural ones these do not look at each character of a text
CONSTANT_FILTERS = frozenset(
    ("attr", "count", "d", "default", "first", "last", "length", "random", "reverse")
)
# what these take grows with the square of a word or a list: no clock is looked at meanwhile
SLOW_FILTERS = frozenset(("pprint", "striptags", "title", "urlize", "wordwrap"))
# numbers given to these are values or can only shorten the result
NUMBER_FILTERS = frozenset(("attr", "d", "default", "float", "int", "map", "sum", "truncate"))
PADDING_METHODS = frozenset(("center", "expandtabs", "ljust", "rjust", "zfill"))
# these may compare the whole at every place; searches from the start do not
SLOW_SEARCHES = frozenset(
    ("lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip", "trim")
)
# these lead to bytes, which have no checks, or to any expansion of single characters
REFUSED_METHODS = frozenset(("encode", "to_bytes", "translate"))
COMPUTED_WIDTH = re.compile(r"%[^%{}a-zA-Z]*\*|\{[^{}]*\{")
DIGITS = re.compile(r"\d+")


def size(value: Any) -> int:
    """About how many characters a value prints as; stops counting beyond MAX_CHARS.

    Every way to an item counts: lists that share items can print exponentially long.
    """
    total, stack = 0, [value]
    while stack and total <= MAX_CHARS:
        item = stack.pop()
        total += 8
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, int):
            total += item.bit_length() // 3
        elif isinstance(item, Mapping):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple)):
            stack += item
        else:
            total += 30
    return total


def weight(value: Any) -> int:
    """About how much memory making this value took, in bytes; its items were there before."""
    if isinstance(value, str):
        return len(value) if value.isascii() else 4 * len(value)
    if _is_container(value):
        return ITEM_WEIGHT * len(value)
    return 1


def _is_container(value: Any) -> bool:
    return isinstance(value, (list, tuple, Mapping))


def check_made(value: Any) -> None:
    """For what an operation, a filter, a call or a display made.

    Lists that hold the same list twice, again and again, take no memory, but exponential time to
    print, compare or hash; so do the same long text many times, and division by long numbers.
    """
    if isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
        raise SecurityError(f"a number would have more than {MAX_INTEGER_BITS} bits")
    stack, num_items, num_chars = [(value, 1)] if _is_container(value) else [], 0, 0
    while stack:
        item, depth = stack.pop()
        if depth > MAX_NESTING:
            raise SecurityError(f"a value would be nested deeper than {MAX_NESTING} levels")
        num_items += len(item)
        if num_items > MAX_ITEMS:
            raise SecurityError(f"a value would hold more than {MAX_ITEMS} items")
        for child in (*item, *item.values()) if isinstance(item, Mapping) else item:
            if isinstance(child, str):
                num_chars += len(child)
            elif _is_container(child):
                stack.append((child, depth + 1))
        bound(num_chars)


def bound(num_chars: int) -> None:
    if num_chars > MAX_CHARS:
        raise SecurityError(f"a value would have more than {MAX_CHARS} characters")


def check_operator(operator: str, left: Any, right: Any) -> None:
    """For + * ** and %."""
    if isinstance(left, int) and isinstance(right, int):
        bits, factor = left.bit_length(), abs(right) if operator == "**" else 1
        if operator == "*":
            bits += right.bit_length()
        if bits * factor > MAX_INTEGER_BITS:
            raise SecurityError(f"a number would have more than {MAX_INTEGER_BITS} bits")
    elif operator == "+" and isinstance(left, (str, list, tuple)):
        bound(len(left) + (len(right) if isinstance(right, (str, list, tuple)) else 0))
    elif operator == "*":
        for sequence, times in ((left, right), (right, left)):
            if isinstance(sequence, (str, list, tuple)) and isinstance(times, int):
                bound(len(sequence) * times)
    elif operator == "%" and isinstance(left, str):
        _check_format(left, [right])


def check_method(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
    """For a call of anything; returns the arguments to call it with."""
    function = getattr(function, "__wrapped__", function)  # jinja2 wraps str.format
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    given = [*args, *kwargs.values()]
    if owner is not None:
        bound(size(given))  # an error may print them
    if isinstance(owner, (str, int)) and name in REFUSED_METHODS:
        raise SecurityError(f"the method {name} is not available to templates")
    if not isinstance(owner, str):
        return args
    if name in SLOW_SEARCHES:
        _check_search(owner, given)
    elif name in PADDING_METHODS:
        _check_widths(given)
        bound(len(owner) + owner.count("\t") * max([8, *(a for a in args if isinstance(a, int))]))
    elif name == "replace" and len(args) >= 2:
        _check_replace(owner, args[0], args[1])
    elif name == "join" and len(args) == 1:
        return [_check_join(args[0], owner)]
    elif name in ("format", "format_map"):
        _check_format(owner, given)
    return args


def check_filter(name: str, value: Any, args: Sequence[Any]) -> Any:
    """For value|name(args), the named ones too, in any order; returns the value to filter."""
    bound(size(args))  # an error may print them
    if name not in NUMBER_FILTERS:
        _check_widths(args)
    if isinstance(value, str) and name in STRUCTURAL_FILTERS - CONSTANT_FILTERS:
        _check_count(len(value))
    if name == "join":
        return _check_join(value, max(args, key=size, default=""))
    if name in ("batch", "slice", "sum") and any(map(_is_container, args)):
        raise SecurityError(f"the filter {name} takes no list: it would be copied again and again")
    if name not in STRUCTURAL_FILTERS:
        bound(size(value))
    if name in SLOW_FILTERS and size(value) > MAX_SLOW_CHARS:
        raise SecurityError(f"the filter {name} takes at most {MAX_SLOW_CHARS} characters")
    if name == "replace" and len(args) >= 2:
        _check_replace(str(value), args[0], args[1])
        _check_replace(str(value), args[1], args[0])
    elif name in SLOW_SEARCHES:
        _check_search(str(value), args)
    elif name in ("indent", "tojson", "wordwrap"):
        # each line or word may get this much more
        widest = max([4, *(a if isinstance(a, int) else size(a) for a in args)])
        lines = size(value) if name != "indent" else str(value).count("\n") + 1
        bound(lines * (widest if name != "wordwrap" else _longest_text(args)))
    elif name == "format":
        _check_format(str(value), args)
    return value


def check_test(name: str, value: Any) -> None:
    """For value is name; lower and upper look at what the value prints as."""
    if name in ("lower", "upper"):
        bound(size(value))


def _check_count(num_items: int) -> None:
    if num_items > MAX_ITEMS:
        raise SecurityError(f"an operation takes at most {MAX_ITEMS} items or characters")


def _check_search(text: str, args: Iterable[Any]) -> None:
    if len(text) * _longest_text(args) > MAX_SEARCH:
        raise SecurityError("a text is too long to search for a text of this length")


def _longest_text(args: Iterable[Any]) -> int:
    return max([1, *(len(a) for a in args if isinstance(a, str))])


def _check_widths(args: Iterable[Any]) -> None:
    for number in args:
        if isinstance(number, int) and abs(number) > MAX_WIDTH:
            raise SecurityError(f"the width {number} is more than {MAX_WIDTH}")


def _check_replace(text: str, old: Any, new: Any) -> None:
    count = text.count(old) if isinstance(old, str) else 0
    bound(len(text) + count * len(new if isinstance(new, str) else str(new)))


def _check_join(items: Any, separator: Any) -> list[Any]:
    items = list(items)
    _check_count(len(items))
    bound(sum(map(size, items)) + len(items) * size(separator))
    return items


def _check_format(pattern: str, args: Sequence[Any]) -> None:
    if COMPUTED_WIDTH.search(pattern):
        raise SecurityError("a format has a computed width")
    # any number may be a width: fill characters and names in parentheses make it hard to tell
    numbers = DIGITS.findall(pattern)
    if any(len(number) > 9 for number in numbers):
        raise SecurityError("a format has a width that is too large")
    fields = pattern.count("%") + pattern.count("{")
    bound(len(pattern) + sum(map(int, numbers)) + fields * max([1, *map(size, args)]))
