"""What renders chat templates in a limited process (limited_process.py): {"source": ..., "values": {...}} to
{"text": ...} or {"error": ..., "invalid": whether the template is no template}.

It imports nothing of the package, so that the process starts soon and holds nothing of value.
"""

import json
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


class Generation(jinja2.ext.Extension):
    """{% generation %} marks what the assistant said, for training; here it is a plain scope."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: Any) -> None:
    raise jinja2.TemplateError(message)


def strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


@lru_cache(maxsize=16)
def compiled(source: str) -> jinja2.Template:
    """The template in an environment like that of transformers."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment.from_string(source)


def answer(request: dict[str, Any], max_chars: int) -> dict[str, Any]:
    """The reply to one request; MemoryError passes."""
    try:
        text = compiled(request["source"]).render(request["values"])
    except MemoryError:
        raise
    except (jinja2.TemplateSyntaxError, SyntaxError) as error:
        # SyntaxError: jinja2 wrote Python that Python does not take, as for a stray `continue`
        return {"error": f", line {error.lineno}: {said(error)}", "invalid": True}
    except RecursionError:
        return {"error": " recurses too deep", "invalid": False}
    except jinja2.TemplateError as error:
        return {"error": f" refused: {said(error)}", "invalid": False}
    except Exception as error:  # a foreign program may fail in any way that Python has
        return {"error": f" failed: {type(error).__name__}: {said(error)}", "invalid": False}
    if len(text) > max_chars:
        return {"error": f" made more than {max_chars} characters", "invalid": False}
    return {"text": text}


def said(error: Exception) -> str:
    return str(error).strip()[:1000] or type(error).__name__
