"""Typed, range-checked reading of a config.json: the only way a family touches its words.

A field that is absent or null takes its default; a field that is there must have the right type and
lie in range. Whatever would change the maths and is not supported is refused by name. Every
ModelError is one line that names the field and the value; `families.read_spec` puts the file in
front.
"""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from kog_triton.errors import ModelError, printable, shown
from kog_triton.model.spec import DType

_REQUIRED: Any = object()
MAX_LABEL = 80  # characters of a name, which a file may choose
_DTYPES = {"float32": DType.F32, "bfloat16": DType.BF16, "float16": DType.F16}


class Config:
    """One JSON object, read field by field; `read` has the names asked for. Of several names, the first one present
    counts."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self.values = values
        self.read: set[str] = set()
        self._prefix = prefix

    def get(self, *names: str) -> Any:
        """The raw value of the first of `names` that is present and not null, else None."""
        self.read.update(names)
        return next((self.values[n] for n in names if self.values.get(n) is not None), None)

    def label(self, *names: str) -> str:
        """The field's name for an error message, as the file spells it."""
        found = next((n for n in names if self.values.get(n) is not None), names[0])
        return self._prefix + printable(found)[:MAX_LABEL]

    def error(self, names: Iterable[str], wanted: str) -> ModelError:
        names = tuple(names)
        value = self.get(*names)
        if value is None:
            return ModelError(f"{self.label(*names)} is missing: it must be {wanted}")
        return ModelError(f"{self.label(*names)} is {shown(value)}: it must be {wanted}")

    def integer(self, *names: str, low: int = 1, high: int, default: Any = _REQUIRED) -> int:
        value = self.get(*names)
        if value is None and default is not _REQUIRED:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.error(names, f"an integer from {low} to {high}")
        return value

    def number(self, *names: str, low: float, high: float, default: Any = _REQUIRED) -> float:
        """A finite number in low..high, both included."""
        value = self.get(*names)
        if value is None and default is not _REQUIRED:
            return default
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not low <= value <= high
            or not math.isfinite(value)
        ):
            raise self.error(names, f"a number from {low:g} to {high:g}")
        return float(value)

    def boolean(self, *names: str, default: Any) -> Any:
        value = self.get(*names)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(names, "true or false")
        return value

    def choice(self, *names: str, of: Iterable[str], default: str) -> str:
        value = self.get(*names)
        if value is None:
            return default
        allowed = list(of)
        if not isinstance(value, str) or value not in allowed:
            raise self.error(names, " or ".join(repr(x) for x in allowed))
        return value

    def integers(self, *names: str, low: int, high: int, default: tuple[int, ...]) -> tuple[int, ...]:
        """A list of integers in low..high."""
        value = self.get(*names)
        if value is None:
            return default
        if not isinstance(value, list) or not all(
            isinstance(x, int) and not isinstance(x, bool) and low <= x <= high for x in value
        ):
            raise self.error(names, f"a list of integers from {low} to {high}")
        return tuple(value)

    def mapping(self, *names: str) -> "Config | None":
        """A nested object, whose own errors name this field too; None if absent or empty."""
        value = self.get(*names)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self.error(names, "an object")
        return Config(value, self.label(*names) + ".")

    def dtype(self) -> DType | None:
        """What `dtype` (or `torch_dtype`, its older name) asks for; None if it does not say."""
        name = self.choice("dtype", "torch_dtype", of=_DTYPES, default="")
        return _DTYPES[name] if name else None

    def only(self, name: str, *allowed: object) -> None:
        """Refuse a field with any other value: running on would compute another function."""
        value = self.get(name)
        if value is None or any(type(value) is type(a) and value == a for a in allowed):
            return
        wanted = " or ".join(["absent", *(json.dumps(a) for a in allowed)])
        raise ModelError(f"{self.label(name)} is {shown(value)}: not supported, it must be {wanted}")
