"""Typed, range-checked reading of a config.json: the only way a family touches its words.

A field that is absent or null takes its default; a field that is there must have the right type and
lie in range. Whatever would change the maths and is not supported is refused by name. Every
ModelError is one line that names the field and the value; `families.read_spec` puts the file in
front.
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kog_triton.errors import ModelError
from kog_triton.model.spec import DType

MAX_JSON_BYTES = 64 << 20  # an index of a million tensors stays below; a mistake does not
_REQUIRED: Any = object()
_DTYPES = {"float32": DType.F32, "bfloat16": DType.BF16, "float16": DType.F16}


def show(value: object) -> str:
    """A value as an error message can carry it: one line, at most 60 characters."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits has no decimal form
        text = "a huge number"
    return text if len(text) <= 60 else f"{text[:57]}..."


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; ModelError if it is missing, too large, malformed or no object."""
    try:
        if not path.is_file():
            raise ModelError(f"{path}: no such file")
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelError(f"{path}: larger than {MAX_JSON_BYTES >> 20} MiB, not a model's JSON")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or 'I/O error'}") from error
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else "malformed"
        raise ModelError(f"{path}: not valid JSON: {reason[:120]}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, found {show(value)}")
    return value


class Config:
    """One JSON object, read field by field. Of several names, the first one present counts."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self.values = values
        self._prefix = prefix

    def get(self, *names: str) -> Any:
        """The raw value of the first of `names` that is present and not null, else None."""
        return next((self.values[n] for n in names if self.values.get(n) is not None), None)

    def label(self, *names: str) -> str:
        """The field's name for an error message, as the file spells it."""
        found = next((n for n in names if self.values.get(n) is not None), names[0])
        return self._prefix + found

    def error(self, names: Iterable[str], wanted: str) -> ModelError:
        names = tuple(names)
        value = self.get(*names)
        if value is None:
            return ModelError(f"{self.label(*names)} is missing: it must be {wanted}")
        return ModelError(f"{self.label(*names)} is {show(value)}: it must be {wanted}")

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

    def integers(
        self, *names: str, low: int, high: int, default: tuple[int, ...]
    ) -> tuple[int, ...]:
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
        raise ModelError(f"{self.label(name)} is {show(value)}: not supported, it must be {wanted}")
