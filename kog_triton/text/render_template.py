"""The program that renders chat templates, in a process of its own: `python render_template.py ...`.

    arguments    seconds a rendering may take, bytes of address space, characters a rendering may
                 have, then the folders that jinja2 is looked for in
    standard input, one line of JSON a rendering     {"source": ..., "values": {...}}
    standard output, one line of JSON for each       {"text": ...} or {"error": ..., "invalid": ...}

It ends with its input; beyond a limit of time by SIGALRM, of memory with the status ENOMEM. It runs
by its path and imports nothing of the package, so that it starts soon and holds nothing of value.
"""

import errno
import json
import os
import resource
import signal
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any

if __name__ == "__main__":
    sys.path += sys.argv[4:]

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
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


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


def answer(source: str, values: dict[str, Any], max_chars: int) -> dict[str, Any]:
    """The reply to one request; MemoryError passes."""
    try:
        text = compiled(source).render(values)
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


def main() -> None:
    seconds, memory, max_chars = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    memory = memory if most == resource.RLIM_INFINITY else min(memory, most)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # whatever the parent did with the signal: the kernel ends this process when time is up
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        request = json.loads(line)
        reply = json.dumps(answer(request["source"], request["values"], max_chars))
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.write(reply + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    try:
        main()
    except MemoryError:
        os._exit(errno.ENOMEM)
