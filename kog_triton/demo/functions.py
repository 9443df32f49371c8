"""Functions as documents: taken out of a file, cut to a prefix, and a completion cut at its end.

Beside whole files the model is trained on single functions, so that a prompt such as `def f(n):`
looks like the start of a document and the end of the function like the end of one.
"""

import ast
import re
import textwrap
from dataclasses import dataclass

PREFIX_LINES = 2  # body lines that a prefix keeps after the signature and the docstring
MIN_REST_LINES = 3  # non-blank lines that a function has beyond its prefix


@dataclass(frozen=True)
class Function:
    text: str  # dedented source without decorators, ends with a newline
    top_level: bool
    prefix_lines: int  # lines up to and including PREFIX_LINES body lines; 0: too short to cut

    @property
    def prefix(self) -> str:
        """The first prefix_lines lines, without the last newline."""
        return "\n".join(self.text.split("\n")[: self.prefix_lines])


def functions(source: str, min_lines: int = 3, max_lines: int = 80) -> list[Function]:
    """Functions and methods of a module, except tests; SyntaxError if the module does not parse."""
    tree = ast.parse(source)
    lines = source.split("\n")
    top_level = {id(node) for node in tree.body}
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name.lower().startswith("test"):
            continue
        first, last = node.lineno - 1, node.end_lineno or node.lineno
        if not min_lines <= last - first <= max_lines:
            continue
        text = textwrap.dedent("\n".join(lines[first:last])) + "\n"
        # A string whose lines start left of the function keeps dedent from working.
        if not text.startswith("def ") or not parses(text):
            continue
        found.append(Function(text, id(node) in top_level, _prefix_lines(text)))
    return found


def _prefix_lines(text: str) -> int:
    """Lines of signature, docstring and PREFIX_LINES non-blank ones; 0 if little is left."""
    function = ast.parse(text).body[0]
    assert isinstance(function, ast.FunctionDef)
    body, has_docstring = function.body, ast.get_docstring(function) is not None
    if has_docstring and len(body) == 1:
        return 0
    last = body[1].lineno - 1 if has_docstring else body[0].lineno - 1
    lines = text.rstrip("\n").split("\n")
    kept = 0
    while last < len(lines) and kept < PREFIX_LINES:
        kept += bool(lines[last].strip())
        last += 1
    rest = sum(bool(line.strip()) for line in lines[last:])
    return last if rest >= MIN_REST_LINES else 0


def cut_completion(completion: str, ended: bool) -> str:
    """The part of a completion that belongs to the function whose prefix ended in mid-body.

    It ends before the first line after the first that has a character in column 0 other than a
    closing bracket or a comment sign. Without such a line, all of it counts if the model `ended`
    it; if the token budget ran out instead, the last line, unfinished, is dropped.
    """
    end = re.search(r"\n(?=[^\s)\]}#])", completion)
    if end is not None:
        return completion[: end.start() + 1]
    return completion if ended else completion[: completion.rfind("\n") + 1]


def parses(text: str) -> bool:
    """Whether Python's own parser accepts the text."""
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return True
