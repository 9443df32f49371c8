"""Calls that an answer must hold, as a grammar in the form of the model's own tool calls."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kog_triton.errors import RequestError
from kog_triton.sampling.structured import StructuredOutputsParams
from kog_triton.text.tool_calls import FORMATS


def forced_call(parser: str, tools: Sequence[Mapping[str, Any]], name: str | None) -> StructuredOutputsParams:
    """One call of one of the tools, or of the named one; RequestError if there is none of that name.

    The arguments fit the tool's schema.
    """
    functions = [tool["function"] for tool in tools]
    chosen = [f for f in functions if name is None or f.get("name") == name]
    if not chosen:
        raise RequestError(f"tool_choice names {str(name)[:80]!r}: no tool has that name")
    if parser == "qwen3_coder":
        return StructuredOutputsParams(grammar=_qwen3_coder(chosen))
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


def _qwen3_coder(functions: Sequence[Mapping[str, Any]]) -> str:
    """Lark of one call as text/qwen3_coder.py reads it: parameters in the schema's order."""
    names = [f"f{i}" for i in range(len(functions))]
    start = [json.dumps("<tool_call>\n"), "call", json.dumps("</function>\n</tool_call>")]
    rules = [f"start: {' '.join(start)}", f"call: {' | '.join(names)}"]
    for name, function in zip(names, functions, strict=True):
        schema = function.get("parameters") or {}
        parts = [json.dumps(f"<function={function.get('name')}>\n")]
        for i, (key, value) in enumerate((schema.get("properties") or {}).items()):
            part = f"{json.dumps(f'<parameter={key}>{chr(10)}')} {name}_{i}"
            parts.append(part if key in (schema.get("required") or ()) else f"({part})?")
            rules.append(_value(f"{name}_{i}", value, schema.get("$defs")))
        rules.append(f"{name}: {' '.join(parts)}")
    return "\n".join(rules) + "\n"


def _value(rule: str, schema: Any, definitions: Any) -> str:
    """The rule of a parameter's value up to its closing tag: a text as it is, anything else as JSON."""
    schema = schema if isinstance(schema, Mapping) else {}
    end = json.dumps("\n</parameter>\n")
    kinds = schema.get("type")
    texts = schema.get("enum")
    if isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts):
        return f"{rule}: ({' | '.join(map(json.dumps, texts))}) {end}"
    if kinds == "string" or (isinstance(kinds, list) and "string" in kinds):
        return f"{rule}[suffix={end}]: /(?s:.*)/"
    whole = {**schema, "$defs": definitions} if definitions else dict(schema)
    return f"{rule}: {rule}_json {end}\n{rule}_json: %json {json.dumps(whole)}"
