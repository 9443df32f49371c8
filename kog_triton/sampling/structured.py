"""What an answer must look like: one constraint a request, under vLLM's names.

Only the shape is checked here. Whether a schema, a regular expression or a grammar makes sense is
known once it is compiled for a model's tokens, when the request is prepared (text/grammar.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from kog_triton.errors import RequestError, wrong
from kog_triton.vllm_names import takes_vllm_names


@takes_vllm_names
@dataclass(frozen=True)
class StructuredOutputsParams:
    """Exactly one constraint is set; RequestError names a field that is missing, extra or of a wrong type.

    json         a JSON schema, as an object or as its text
    regex        a regular expression that the whole answer matches (Rust's syntax, no look-around)
    choice       the texts of which the answer is one; kept as a tuple
    grammar      a context-free grammar in llguidance's variant of Lark, with a rule `start`, or in GBNF, with `root`
    json_object  true: any JSON object

    behind       where the constraint begins: at the token behind the one that ends this text's first place in the
                 answer, such as "</think>". Until then anything goes but the answer's end. None: at the first token
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    behind: str | None = None

    def __post_init__(self) -> None:
        names = _constraints()
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            got = " and ".join(given) or "nothing"
            raise RequestError(f"structured_outputs has {got}: give one of {', '.join(names)}")
        if not isinstance(self.json, str | Mapping | None):
            raise _wrong("json", self.json, "an object or text with a JSON schema")
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), str | None):
                raise _wrong(name, getattr(self, name), "text")
        if self.json_object not in (None, True):
            raise _wrong("json_object", self.json_object, "true or left out")
        if self.behind is not None and not _is_text(self.behind):
            raise _wrong("behind", self.behind, "a text of at least one character")
        if self.choice is not None:
            is_list = isinstance(self.choice, list | tuple)
            if not is_list or not self.choice or not all(isinstance(c, str) for c in self.choice):
                raise _wrong("choice", self.choice, "a list of at least one text")
            object.__setattr__(self, "choice", tuple(self.choice))

    @property
    def constraint(self) -> tuple[str, Any]:
        """The field that is set: its name and value."""
        pairs = ((name, getattr(self, name)) for name in _constraints())
        return next(pair for pair in pairs if pair[1] is not None)


def _constraints() -> list[str]:
    names = (field.name for field in fields(StructuredOutputsParams))
    return [name for name in names if name != "behind"]


def _is_text(value: object) -> bool:
    """Whether it is some text that answers can hold: no lone surrogates."""
    return isinstance(value, str) and value != "" and value == value.encode("utf-8", "ignore").decode()


def _wrong(name: str, value: object, allowed: str) -> RequestError:
    return wrong(f"structured_outputs.{name}", value, allowed)
