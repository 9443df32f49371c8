"""What a conversation asks for: from a request's fields to token ids, parameters and the answer's parsers."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from kog_triton.errors import RequestError, shown
from kog_triton.server.model import ServedModel
from kog_triton.server.pacing import Interval
from kog_triton.server.problems import Problem
from kog_triton.server.samples import Job
from kog_triton.server.schemas.chat import ChatBody, Message, Tool, parts_of
from kog_triton.server.service import Service
from kog_triton.server.tool_grammar import forced_call
from kog_triton.text import Tokenizer
from kog_triton.text.answer import AnswerParser
from kog_triton.text.reasoning import CLOSE, OPEN

# What a request may tell the template beside its messages: names of vLLM's and of templates in use.
TEMPLATE_KWARGS = frozenset(["enable_thinking", "thinking", "reasoning_effort", "thinking_budget", "preserve_thinking"])
UNSUPPORTED = ("audio", "functions", "function_call")
ROLES = ("developer", "system", "user", "assistant", "tool", "function")
TAIL_IDS = 64  # of a prompt's end, in which a block of reasoning may open


@dataclass(frozen=True)
class Asked:
    """`job` is what runs; `parser` opens the answer's parser, one for each sample."""

    job: Job
    interval: Interval
    tools: tuple[dict[str, Any], ...]
    tool_parser: str | None
    reasons: bool
    inside: bool
    one_call: bool

    def parser(self) -> AnswerParser:
        return AnswerParser(self.tool_parser, self.tools, self.reasons, self.inside, one_call=self.one_call)


async def read_chat(
    service: Service, body: ChatBody, namespace: str, *, cut_to_room: bool = False, bounded: bool = True
) -> Asked:
    """What is asked; RequestError or Problem for what cannot be.

    `cut_to_room`: no more tokens than the context has. `bounded`: as of `render`.
    """
    model = service.model
    _check(body)
    tools = usable_tools(body.tools)
    name, forced = _choice(body, tools)
    if body.tool_choice == "none":
        tools = ()
    if tools and model.tokenizer.chat_templates and not model.knows_tools:
        raise Problem(
            400,
            "the model's chat template knows no tools: leave tools out, or start the server with --chat-template",
            param="tools",
        )
    tool_parser = model.tool_parser if tools else None
    if forced and tool_parser is None:
        raise Problem(400, "tool_choice needs tool calls, and none are known of this model: give --tool-call-parser")
    kwargs = template_kwargs(model, body.chat_template_kwargs, body.reasoning_effort)
    whose = namespace + (body.cache_salt or "")
    ends = body.add_generation_prompt
    token_ids = await render(service, body.messages, tools, ends, kwargs, whose, bounded)
    given = body.given()
    if body.max_completion_tokens is not None:
        given["max_tokens"] = body.max_completion_tokens
    elif body.max_tokens is not None:
        given["max_tokens"] = body.max_tokens
    if cut_to_room and "max_tokens" in given:
        given["max_tokens"] = min(given["max_tokens"], max(1, model.opened.max_context - len(token_ids)))
    if body.logprobs:
        given["logprobs"] = body.top_logprobs or 0
    if forced:
        if "structured_outputs" in given:
            raise Problem(400, "tool_choice and response_format both shape the answer: leave out one")
        assert tool_parser is not None
        given["structured_outputs"] = forced_call(tool_parser, tools, name)
    inside = model.reasons and await _opens_reasoning(model, body, tools, kwargs, token_ids)
    if inside and (shape := given.get("structured_outputs")) is not None:
        # reasoning that the prompt has opened is no part of the shape; else there is no room for any
        given["structured_outputs"] = replace(shape, behind=shape.behind or CLOSE)
    if tool_parser is not None or model.reasons:
        given["skip_special_tokens"] = False  # they mark calls and reasoning
    return Asked(
        Job(None, tuple(token_ids), model.default_params(**given), whose, calls_a_tool=forced),
        body.interval(service.interval),
        tools,
        tool_parser,
        model.reasons,
        inside,
        body.parallel_tool_calls is False,
    )


async def render(
    service: Service,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool,
    kwargs: Mapping[str, Any],
    whose: str | None = None,
    bounded: bool = True,
) -> list[int]:
    """A conversation's token ids, made in a thread: a long one takes a second. `whose`: see Tokenizer.encode_chat.

    `bounded`: TooLong for far more tokens than the context has, without a look at all of them.
    """
    tokenizer = service.model.tokenizer
    if not tokenizer.chat_templates:
        raise RequestError(
            "the model has no chat template: ask /v1/completions, or start the server with --chat-template"
        )

    def encode() -> list[int]:
        plain, how = _told(tokenizer, messages, tools, kwargs)
        service.check_length(sum(_characters(message["content"]) for message in plain))
        return tokenizer.encode_chat(
            plain,
            most=service.model.opened.max_context if bounded else None,
            add_generation_prompt=add_generation_prompt,
            whose=whose,
            **how,
        )

    return await asyncio.to_thread(encode)


def _told(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A conversation and how it is written, as the tokenizer takes them."""

    @cache
    def named(role: str) -> bool:
        return any(repr(role) in t or f'"{role}"' in t for t in tokenizer.chat_templates.values())

    plain = [_plain(message, i, named) for i, message in enumerate(messages)]
    # a template that loops over a user's parts may take the system's as text
    return plain, {**kwargs, "content_format": "string", "tools": list(tools) or None}


def template_kwargs(
    model: ServedModel, asked: Mapping[str, Any] | None, reasoning_effort: str | None = None
) -> dict[str, Any]:
    """What the template gets beside the conversation; Problem 400 for a name that is not allowed."""
    asked = asked or {}
    for name in asked:
        if name not in TEMPLATE_KWARGS:
            have = ", ".join(sorted(TEMPLATE_KWARGS))
            raise Problem(
                400, f"chat_template_kwargs.{name[:40]} is not allowed: have {have}", param="chat_template_kwargs"
            )
    effort = {} if reasoning_effort is None else {"reasoning_effort": reasoning_effort}
    return {**model.template_kwargs, **effort, **asked}


def usable_tools(tools: Sequence[Tool] | None) -> tuple[dict[str, Any], ...]:
    """The functions among the tools, in OpenAI's form; other kinds are left out."""
    found = []
    for tool in tools or ():
        if tool.type != "function":
            continue
        function = tool.function
        if not function or not isinstance(function.get("name"), str) or not function["name"]:
            raise Problem(400, "a tool of type function needs a function with a name", param="tools")
        if not isinstance(function.get("parameters"), dict | None):
            raise Problem(400, f"the parameters of tool {function['name'][:40]} are no object", param="tools")
        found.append({"type": "function", "function": function})
    return tuple(found)


def _check(body: ChatBody) -> None:
    if body.chat_template is not None:
        raise Problem(400, "chat_template in a request is refused: the server's own is used", param="chat_template")
    for name in UNSUPPORTED:
        if getattr(body, name) is not None:
            raise Problem(400, f"{name} is not supported: leave it out", param=name)
    if body.top_logprobs and not body.logprobs:
        raise Problem(400, "top_logprobs needs logprobs true", param="top_logprobs")
    if body.modalities is not None and body.modalities != ["text"]:
        raise Problem(400, "modalities must be text alone", param="modalities")
    if body.continue_final_message:
        raise Problem(400, "continue_final_message is not supported: leave it out", param="continue_final_message")


def _choice(body: ChatBody, tools: Sequence[Mapping[str, Any]]) -> tuple[str | None, bool]:
    """(the tool that is named, whether a call is forced)."""
    choice = body.tool_choice
    if choice in (None, "none", "auto"):
        return None, False
    if not tools:
        raise Problem(400, "tool_choice needs tools", param="tool_choice")
    if choice == "required":
        return None, True
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise Problem(
            400, 'tool_choice must be none, auto, required or {"type": "function", "function": {"name": ...}}'
        )
    return name, True


def _characters(content: Any) -> int:
    return len(content) if isinstance(content, str) else sum(len(part["text"]) for part in content)


def _plain(message: Message, index: int, named: Callable[[str], bool]) -> dict[str, Any]:
    """A message as a template takes it: calls with their arguments as objects, which templates write themselves.
    `named`: whether the template has a role's name; it may have roles of its own."""
    plain = message.model_dump(exclude_none=True)
    if message.role == "developer" and not named("developer"):
        plain["role"] = "system"  # OpenAI's newer name, which few templates know
    elif message.role not in ROLES and not named(message.role):
        raise Problem(
            400,
            f"messages[{index}].role is {shown(message.role)}: it must be one of {', '.join(ROLES)}",
            param="messages",
        )
    if "content" in plain:
        plain["content"] = parts_of(plain["content"], f"messages[{index}].content")
    elif message.role != "assistant":
        raise Problem(400, f"messages[{index}] has no content", param="messages")
    else:
        plain["content"] = ""
    if message.tool_calls:
        plain["tool_calls"] = [_call(call, index) for call in message.tool_calls]
    return plain


def _call(call: dict[str, Any], index: int) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Problem(400, f"messages[{index}].tool_calls needs a function with a name", param="messages")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = {"arguments": arguments}  # a model's broken call, which its history repeats
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


async def _opens_reasoning(
    model: ServedModel,
    body: ChatBody,
    tools: Sequence[Mapping[str, Any]],
    kwargs: Mapping[str, Any],
    token_ids: Sequence[int],
) -> bool:
    """Whether the prompt ends inside a block that the template has opened: further ahead it may be somebody's words."""
    tokenizer = model.tokenizer
    tail = tokenizer.decode(token_ids[-TAIL_IDS:], skip_special_tokens=False)
    _, tag, words = tail.rpartition(OPEN)
    if not tag or CLOSE in words:
        return False
    if not words.strip():
        return True

    def is_templates() -> bool:
        plain, how = _told(tokenizer, body.messages, tools, kwargs)
        ends = (body.add_generation_prompt, False)
        texts = (tokenizer.render_chat(plain, add_generation_prompt=end, **how) for end in ends)
        asked, said = (text.count(OPEN) for text in texts)
        return asked > said

    return await asyncio.to_thread(is_templates)
