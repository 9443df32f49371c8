"""A jinja2 sandbox with limits: a template can neither reach Python nor run or grow for ever.

jinja2's immutable sandbox keeps templates from Python's internals and from changing their data.
This one also counts. Loop bodies and macros count steps and look at the clock; whatever is printed,
to the output or into a variable, counts its characters; what operators, filters, calls, slices and
displays make counts too, kept or not, so that no sum of values floods memory; operations that can
make much out of little (repetition, powers, padding, replace, join) are refused if their result
would be too large.
"""

import time
from collections.abc import Callable
from contextvars import ContextVar, Token
from functools import wraps
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from kog_triton.text.growth import (
    MAX_ARGUMENTS,
    MAX_CHARS,
    bound,
    check_filter,
    check_made,
    check_method,
    check_operator,
    check_test,
    size,
    weight,
)

MAX_STEPS = 300_000
MAX_SECONDS = 5.0
MAX_MADE = 512 << 20  # bytes made in one rendering, see `growth.weight`

_active: ContextVar["Limits | None"] = ContextVar("limits", default=None)


class Limits:
    """What one rendering may use; active inside a `with` block, in this thread or task."""

    def __init__(self) -> None:
        self.steps_left = MAX_STEPS
        self.chars_left = MAX_CHARS
        self.made_left = MAX_MADE
        self.deadline = time.monotonic() + MAX_SECONDS
        self._outer: Token[Limits | None] | None = None

    def __enter__(self) -> "Limits":
        self._outer = _active.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self._outer is not None:
            _active.reset(self._outer)


def _step() -> bool:
    """Runs at the start of every loop body and macro, and before the condition of a loop."""
    if limits := _active.get():
        limits.steps_left -= 1
        if limits.steps_left < 0:
            raise SecurityError(f"it took more than {MAX_STEPS} steps")
    return bool(_in_time(True))


def _in_time(value: Any) -> Any:
    """The value; refused once time is up. For what takes its time but makes nothing."""
    if (limits := _active.get()) and time.monotonic() > limits.deadline:
        raise SecurityError(f"it took more than {MAX_SECONDS:g} s")
    return value


def _made(value: Any) -> Any:
    """Counts the result of an operation; a template may drop it or keep it in a list."""
    check_made(value)
    if limits := _active.get():
        limits.made_left -= weight(value)
        if limits.made_left < 0:
            raise SecurityError(f"its values have more than {MAX_MADE} bytes in all")
    return _in_time(value)


def _printed(value: Any) -> Any:
    """Counts a piece of text or the value of a {{ ... }}, wherever it is printed to."""
    if limits := _active.get():
        limits.chars_left -= size(value)
        if limits.chars_left < 0:
            raise SecurityError(f"it made more than {MAX_CHARS} characters")
    return value


def _joined(*values: Any) -> str:
    """The operator ~."""
    bound(sum(map(size, values)))
    return _made("".join(map(str, values)))


_OWN = (_step, _printed, _made, _joined, _in_time)  # calls that `_Counting` puts in


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox; render its templates inside `with Limits()`."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])
    step = staticmethod(_step)
    printed = staticmethod(_printed)
    made = staticmethod(_made)
    in_time = staticmethod(_in_time)
    joined = staticmethod(_joined)

    def __init__(self, **options: Any) -> None:
        # folding constants would run filters while a template is compiled, outside of all limits
        super().__init__(optimized=False, **options)
        for name, function in list(self.filters.items()):
            self.add_filter(name, function)
        for name, function in list(self.tests.items()):
            self.tests[name] = _guarded_test(name, function)

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        self.filters[name] = _guarded(name, function)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """The template's tree, with calls to `step`, `printed` and `joined` where they belong."""
        template = super()._parse(source, name, filename)
        return _Counting().visit(template).set_environment(self)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if function in _OWN:
            return function(*args)
        if len(args) + len(kwargs) > MAX_ARGUMENTS:
            raise SecurityError(f"a call has more than {MAX_ARGUMENTS} arguments")
        args = tuple(check_method(function, args, kwargs))
        return _made(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        check_operator(operator, left, right)
        return _made(super().call_binop(context, operator, left, right))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """obj[argument], also each time that a filter looks up an attribute."""
        if isinstance(argument, (list, tuple)):  # an error prints what was not found
            raise SecurityError("a list is no key")
        return _in_time(super().getitem(obj, argument))


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    # filters that want the context or the environment get it before the value
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        value = check_filter(name, args[first], [*args[first + 1 :], *kwargs.values()])
        result = function(*args[:first], value, *args[first + 1 :], **kwargs)
        if isinstance(result, str):
            bound(len(result))
        return _made(result)

    return guarded


def _guarded_test(name: str, function: Any) -> Callable[..., Any]:
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        check_test(name, args[first])
        return _in_time(function(*args, **kwargs))

    return guarded


class _Counting(NodeTransformer):
    def visit_For(self, node: nodes.For) -> nodes.Node:
        self._with_step(node)
        if node.test is not None:
            node.test = nodes.And(_call("step", [], node), node.test, lineno=node.lineno)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        return _call("in_time", [node], node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._with_step(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._with_step(node)

    def _with_step(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("step", [], node), lineno=node.lineno))
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        # a literal becomes a constant expression, so that it is counted each time it is printed
        values = [
            nodes.Const(n.data) if isinstance(n, nodes.TemplateData) else n for n in node.nodes
        ]
        node.nodes = [_call("printed", [value], node) for value in values]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("joined", node.nodes, node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _call("made", [node], node) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _call("made", [node], node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _call("made", [node], node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _call("made", [node], node) if node.ctx == "load" else node


def _call(method: str, args: list[nodes.Expr], near: nodes.Node) -> nodes.Call:
    function = nodes.EnvironmentAttribute(method, lineno=near.lineno)
    return nodes.Call(function, args, [], None, None, lineno=near.lineno)
