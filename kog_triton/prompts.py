"""What a caller may give as a prompt, in the forms that vLLM takes: text, token ids, or an object with either."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypeAlias, TypedDict

from kog_triton.engine import Engine
from kog_triton.errors import RequestError, shown
from kog_triton.vllm_names import check_others, names

# text, token ids, or {"prompt": text, "prompt_token_ids": ids, "cache_salt": text}
Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
KEYS = ("prompt", "prompt_token_ids", "cache_salt")


class TextPrompt(TypedDict):
    """A prompt as an object: its text."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as an object: its token ids."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


class ChatPrompt(dict[str, Any]):
    """A rendered conversation: text and ids belong together, although encoding the text need not give the ids."""


@dataclass(frozen=True)
class ReadPrompt:
    """`text` is None if the caller gave ids alone; only prompts of the same `cache_salt` share keys and values."""

    text: str | None
    token_ids: list[Any]
    cache_salt: str = ""


def list_of_prompts(prompts: Prompt | Sequence[Prompt] | None) -> list[Prompt]:
    """One prompt or several as a list; a list that begins with a number is the ids of one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | bytearray):
        raise RequestError(f"prompts is {shown(prompts)}: it must be a prompt or a list of them")
    many: list[Any] = list(prompts)
    if many and hasattr(many[0], "__index__"):
        return [many]
    return many


def read_prompt(prompt: Prompt, engine: Engine) -> ReadPrompt:
    """RequestError for anything but a prompt, a key that is not known, or text and ids that disagree."""
    if isinstance(prompt, str):
        return ReadPrompt(prompt, _encode(prompt, engine))
    if not isinstance(prompt, Mapping):
        return ReadPrompt(None, _ids(prompt))
    _check_keys(prompt)
    text, given = prompt.get("prompt"), prompt.get("prompt_token_ids")
    salt = prompt.get("cache_salt")
    if not isinstance(salt, str | None) or salt == "":
        raise RequestError(f"cache_salt is {shown(salt)}: it must be text of at least a character")
    if not isinstance(text, str | None):
        raise RequestError(f"prompt is {shown(text)}: it must be text")
    if given is not None:
        ids = _ids(given)
        if text is not None and not isinstance(prompt, ChatPrompt):
            _check_same(text, engine.check_ids(ids), engine)
    elif text is not None:
        ids = _encode(text, engine)
    else:
        raise RequestError('a prompt is text, token ids, or {"prompt": ...}: this one has neither')
    return ReadPrompt(text, ids, salt or "")


def _check_keys(prompt: Mapping[str, Any]) -> None:
    """RequestError for a key that would be dropped."""
    others = {key: value for key, value in prompt.items() if key not in KEYS}
    unknown = next((key for key in others if key not in names()["prompt"]), None)
    if unknown is not None:
        raise RequestError(f"a prompt has no key {shown(unknown)}: it has {', '.join(KEYS)}")
    check_others("prompt", others, ReadPrompt)


def _ids(given: Any) -> list[Any]:
    """Token ids as a list; the engine checks each. Arrays of numpy and torch give theirs by `tolist`."""
    if hasattr(given, "tolist"):
        given = given.tolist()
    if isinstance(given, Sequence) and not isinstance(given, str | bytes):
        return list(given)
    raise RequestError(f'a prompt is text, token ids or {{"prompt_token_ids": [...]}}, not {type(given).__name__}')


def _encode(text: str, engine: Engine) -> list[int]:
    return engine.tokenizer.encode(text, most=engine.max_context)


def _check_same(text: str, ids: Sequence[int], engine: Engine) -> None:
    """RequestError if the ids do not read as the text does, with or without special tokens around it, spaces aside."""

    def read(some: Sequence[int]) -> str:
        return engine.tokenizer.decode(some, skip_special_tokens=False)

    def squeezed(some: Sequence[int]) -> str:
        return "".join(read(some).split())

    same = [_encode(text, engine), engine.tokenizer.encode(text, add_special_tokens=False)]
    if list(ids) not in same and squeezed(ids) not in map(squeezed, same):
        raise RequestError(f"prompt and prompt_token_ids disagree: leave out one (the ids read {shown(read(ids))})")
