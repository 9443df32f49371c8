"""Calls that an answer must hold, as a grammar in the form of the model's own tool calls."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kog_triton.errors import RequestError
from kog_triton.sampling.structured import StructuredOutputsParams
from kog_triton.text.tool_calls import FORMATS


def forced_call(
    parser: str, tools: Sequence[Mapping[str, Any]], name: str | None
) -> StructuredOutputsParams:
    """One call of one of the tools, or of the named one; RequestError if there is none of that name.

    The arguments fit the tool's schema.
    """
    functions = [tool["function"] for tool in tools]
    chosen = [f for f in functions if name is None or f.get("name") == name]
    if not chosen:
        raise RequestError(f"tool_choice names {str(name)[:80]!r}: no tool has that name")
    if parser == "qwen3_coder":
        raise RequestError(
            "tool_choice required, or a name, has no grammar for qwen3_coder: use auto"
        )
    form = FORMATS[parser]
    calls = [_schema(function, form.argument_keys[0]) for function in chosen]
    opener = json.dumps(form.opener) if not form.bare_start else '""'
    start = [opener, r"/[ \n]?/", '"["' if form.in_list else "", "call", r"/[ \n]?/"]
    start += [json.dumps(form.closer)] if form.closer else []
    schema = json.dumps(calls[0] if len(calls) == 1 else {"anyOf": calls})
    return StructuredOutputsParams(grammar=f"start: {' '.join(start)}\ncall: %json {schema}\n")


def _schema(function: Mapping[str, Any], argument_key: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"const": function.get("name")},
            argument_key: function.get("parameters") or {"type": "object"},
        },
        "required": ["name", argument_key],
        "additionalProperties": False,
    }
