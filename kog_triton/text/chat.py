"""Chat templates: where a checkpoint keeps them, and conversations rendered as transformers does.

A template is a program from whoever made the checkpoint, so it runs in a process with limits (see
sandbox.py) on data rebuilt from plain JSON types. What it refuses is a one-line RequestError.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kog_triton.errors import ModelError, RequestError, first_line, shown
from kog_triton.text.sandbox import RENDERER, Renderer

MAX_TEMPLATE_CHARS = 1 << 16  # the longest in use have a third of it
MAX_DEPTH = 100  # of lists and objects in a conversation; JSON schemas of tools have ten or so
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # one thing, three names in use


def load_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Every template of a checkpoint by name; the usual one is "default".

    chat_template.jinja and additional_chat_templates/ win over tokenizer_config.json.
    """
    given = config.get("chat_template")
    templates: dict[str, str] = {}
    try:
        if isinstance(given, str):
            templates["default"] = given
        elif given:
            templates = {entry["name"]: entry["template"] for entry in given}
        if not all(isinstance(text, str) for item in templates.items() for text in item):
            raise TypeError
    except (TypeError, KeyError) as error:
        raise ModelError(
            f"{folder / 'tokenizer_config.json'}: chat_template must be text or a list of "
            '{"name": ..., "template": ...}'
        ) from error
    for name, text in templates.items():
        check_template(folder / "tokenizer_config.json", name, text)
    files = {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    for name, path in files.items():
        try:
            with path.open(encoding="utf-8") as file:
                templates[name] = file.read(MAX_TEMPLATE_CHARS + 1)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} is not readable text: {first_line(error)}") from error
        check_template(path, name, templates[name])
    return templates


def check_template(path: Path, name: str, text: str) -> None:
    if not name.isprintable() or len(name) > 80:
        raise ModelError(f"{path}: {name[:60]!r} is no name for a chat template")
    if len(text) > MAX_TEMPLATE_CHARS:
        raise ModelError(f"{path}: the chat template {name!r} is longer than {MAX_TEMPLATE_CHARS} characters")


def caller_template(text: str) -> str:
    """A caller's own template; RequestError if it is none or too long."""
    if not isinstance(text, str) or not text:
        raise RequestError(f"chat_template is {shown(text)}: it must be a template's text")
    if len(text) > MAX_TEMPLATE_CHARS:
        raise RequestError(f"chat_template is longer than {MAX_TEMPLATE_CHARS} characters")
    return text


def knows_tools(templates: Iterable[str]) -> bool:
    """Whether one of the templates shows tools to the model."""
    return any("tools" in text for text in templates)


def choose_template(templates: Mapping[str, str], name: str | None, has_tools: bool) -> str:
    """The named template; without a name "tool_use" for tools if there is one, else "default"."""
    if not templates:
        raise RequestError("the model has no chat template: send a plain prompt instead of messages")
    if name is None:
        name = "tool_use" if has_tools and "tool_use" in templates else "default"
    if name not in templates:
        have = ", ".join(templates)[:200]
        raise RequestError(f"the model has no chat template {shown(name)}: have {have}")
    return templates[name]


def prepare(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    documents: Sequence[Mapping[str, Any]] | None,
    kwargs: Mapping[str, Any],
) -> dict[str, Any]:
    """What the template may see, as plain JSON types; RequestError naming what is not."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError("messages must be a non-empty list")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f'messages[{i}] must be an object with a "role"')
    plain = _plain([{k: v for k, v in m.items() if v is not None} for m in messages], "messages")
    return {
        **{name: _plain(value, name) for name, value in kwargs.items()},
        "messages": [_with_reasoning(message) for message in plain],
        "tools": _plain(tools, "tools"),
        "documents": _plain(documents, "documents"),
    }


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    if depth > MAX_DEPTH:
        raise RequestError(f"{_place(where)} is nested deeper than {MAX_DEPTH} levels")
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise RequestError(f"{_place(where)} has the key {shown(key)}: keys must be strings")
        return {str(k): _plain(item, f"{where}.{k[:80]}", depth + 1) for k, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    kind = type(value).__name__
    raise RequestError(f"{_place(where)} is a {kind}: only JSON types go into a template")


def _place(where: str) -> str:
    """A path into the messages as an error can carry it: its keys are the caller's."""
    return where if where.isprintable() and len(where) <= 80 else shown(where)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Reasoning under the names that templates look for, whichever one the caller used."""
    found = next((message[n] for n in REASONING_FIELDS if message.get(n) is not None), None)
    if found is None:
        return message
    return {"thinking": found, **message, "reasoning_content": found}


def render(source: str, values: Mapping[str, Any], add_generation_prompt: bool, renderer: Renderer = RENDERER) -> str:
    """The text a template makes of these values; ModelError if it is no template."""
    given = {**values, "add_generation_prompt": add_generation_prompt}
    try:
        reply = renderer.render(source, given)
    except (ValueError, OSError) as error:
        raise RequestError(f"the chat template was not rendered: {first_line(error)}") from error
    if "text" in reply:
        return reply["text"]
    raise (ModelError if reply["invalid"] else RequestError)(first_line(f"the chat template{reply['error']}"))


@dataclass(frozen=True)
class Conversation:
    """A template and what it may see.

    ends     "with_prompt": with what begins an answer; "inside": within the last message, for the model to continue it
    callers  the template is the caller's, whose request is wrong if it is none
    """

    source: str
    values: dict[str, Any]
    ends: str = "with_prompt"
    callers: bool = False

    def render(self, named_tokens: Mapping[str, str]) -> str:
        try:
            return self._rendered(named_tokens)
        except ModelError as error:
            raise (RequestError(str(error)) if self.callers else error) from None

    def _rendered(self, named_tokens: Mapping[str, str]) -> str:
        values = {**named_tokens, **self.values}
        if self.ends != "inside":
            return render(self.source, values, self.ends == "with_prompt")
        return _cut_off(render(self.source, values | {"messages": _with_cut(values["messages"])}, False))


# Stands behind the last message, so that the text can be cut off there; the space shows whether a template trims.
CUT = "\ufdd2 "


def _with_cut(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    last = dict(messages[-1])
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + CUT
    elif isinstance(content, list) and content and isinstance(content[-1], dict):
        part = content[-1]
        if not isinstance(part.get("text"), str):
            raise RequestError("continue_final_message: the last message does not end with text")
        last["content"] = [*content[:-1], part | {"text": part["text"] + CUT}]
    else:
        raise RequestError("continue_final_message: the last message has no content to continue")
    return [*messages[:-1], last]


def _cut_off(text: str) -> str:
    """What comes before the cut, as transformers has it: where the template trims, without white space at its end."""
    before, found, after = text.rpartition(CUT.strip())
    if not found:
        raise RequestError("continue_final_message: the chat template leaves the last message out")
    return before if after.startswith(" ") else before.rstrip()
