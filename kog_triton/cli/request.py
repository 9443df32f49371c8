"""What `kog generate` asks of a model: read from flags, files and stdin, and checked before the weights load."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from kog_triton.checkpoint.hub import gguf_file, model_folder
from kog_triton.cli.panics import panics_unsaid
from kog_triton.demo import checkpoint_path
from kog_triton.errors import ModelError, RequestError, shown
from kog_triton.json_file import read_json
from kog_triton.llm_arguments import template_text
from kog_triton.model.families import read_spec
from kog_triton.sampling.params import SamplingParams
from kog_triton.sampling.structured import StructuredOutputsParams
from kog_triton.text import Tokenizer
from kog_triton.text.chat import knows_tools
from kog_triton.text.gguf_tokenizer import tokenizer_of_gguf
from kog_triton.text.grammar import check_constraint

MAX_PROMPT_BYTES = 64 << 20  # of stdin or a file; a context of a million tokens has a tenth of it


def read_prompt(said: str) -> str:
    """The text behind -p."""
    if said.startswith("@@"):
        return said[1:]
    if said.startswith("@"):
        return read_file("--prompt", said, Path(said[1:]))
    if said != "-":
        return _text("--prompt", said.encode(errors="surrogateescape"))
    if sys.stdin is None:
        raise RequestError("--prompt -: standard input is closed")
    # as bytes, since in some locales Python's own reading hides which of them are no text
    raw = getattr(sys.stdin, "buffer", None)
    if raw is None:
        return sys.stdin.read(MAX_PROMPT_BYTES)
    return _text("--prompt -", raw.read(MAX_PROMPT_BYTES + 1))


def read_file(flag: str, said: str, path: Path) -> str:
    try:
        with path.open("rb") as file:
            return _text(f"{flag} {said}", file.read(MAX_PROMPT_BYTES + 1))
    except OSError as error:
        raise RequestError(f"{flag} {said}: {error.strerror}") from error


def _text(what: str, raw: bytes) -> str:
    if len(raw) > MAX_PROMPT_BYTES:
        raise RequestError(f"{what}: longer than {MAX_PROMPT_BYTES >> 20} MiB")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{what}: not UTF-8 at byte {error.start}") from error


def read_json_flag(flag: str, said: str, kind: type) -> Any:
    """JSON given as its text or as a file's name; RequestError if it is not of this kind."""
    text = said if said.lstrip().startswith(("{", "[")) else read_file(flag, said, Path(said))
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{flag}: not JSON: {error}") from error
    if not isinstance(value, kind):
        raise RequestError(f"{flag}: {shown(value)} is no JSON {'object' if kind is dict else 'list'}")
    return value


def structured_outputs(args: argparse.Namespace) -> StructuredOutputsParams | None:
    """What --json-schema, --regex, --choice or --grammar asks for."""
    if (schema := args.json_schema) is not None:
        if not schema.lstrip().startswith("{"):
            schema = read_file("--json-schema", schema, Path(schema))
        return StructuredOutputsParams(json=schema)
    if args.regex is not None:
        return StructuredOutputsParams(regex=args.regex)
    if args.choice is not None:
        return StructuredOutputsParams(choice=args.choice)
    if args.grammar is not None:
        text = read_file("--grammar", args.grammar, Path(args.grammar))
        return StructuredOutputsParams(grammar=text)
    return None


def sampling_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of SamplingParams that were given, checked before a model is opened for them.

    A flag that is not given leaves the checkpoint's default; max_tokens is then the rest of the context.
    """
    fields = SamplingParams.__dataclass_fields__
    explicit = {name: value for name, value in vars(args).items() if name in fields}
    explicit["structured_outputs"] = structured_outputs(args)
    if args.logit_bias is not None:
        explicit["logit_bias"] = dict(args.logit_bias)
    explicit = {name: value for name, value in explicit.items() if value is not None}
    constraint = SamplingParams(**explicit).structured_outputs
    if constraint is not None:
        check_constraint(*constraint.constraint)
    return {"max_tokens": None} | explicit


def conversation(args: argparse.Namespace) -> dict[str, Any]:
    """How --tools and --chat-template-kwargs have a conversation rendered."""
    how: dict[str, Any] = {}
    if args.tools is not None:
        how["tools"] = read_json_flag("--tools", args.tools, list)
        for i, tool in enumerate(how["tools"]):
            if not isinstance(tool, dict):
                raise RequestError(f"--tools: entry {i} is {shown(tool)}: it must be an object")
    if args.chat_template_kwargs is not None:
        how["chat_template_kwargs"] = read_json_flag("--chat-template-kwargs", args.chat_template_kwargs, dict)
    return how


def messages_of(args: argparse.Namespace, text: str) -> list[dict[str, Any]]:
    """System message and question of --chat."""
    system = [{"role": "system", "content": args.system}] if args.system is not None else []
    return [*system, {"role": "user", "content": text}]


def check_request(args: argparse.Namespace, text: str | None, how: dict[str, Any]) -> Tokenizer | None:
    """Template, prompt and its length; the tokenizer, or None where the checkpoint's own error says what is missing."""
    template = template_text(args.chat_template)
    found = _tokenizer_and_context(args)
    if found is None:
        return None
    tokenizer, context = found
    templates = tokenizer.chat_templates.values() if template is None else [template]
    if how.get("tools") and templates and not knows_tools(templates):
        raise RequestError("the chat template knows no tools: leave out --tools, or give --chat-template one that does")
    if args.interactive:
        has_template = tokenizer.has_chat_template or template is not None
        if not has_template and (args.system is not None or how):
            flag = "--system" if args.system is not None else f"--{next(iter(how)).replace('_', '-')}"
            raise RequestError(f"{flag} needs a chat template, and this model has none")
        return tokenizer
    assert text is not None, "a prompt was given"
    most = args.max_model_len or context
    with panics_unsaid():
        if args.chat:
            arguments = how.get("chat_template_kwargs", {})
            given = arguments | {"tools": how.get("tools"), "chat_template": template}
            ids = tokenizer.encode_chat(messages_of(args, text), most, **given)
        else:
            ids = tokenizer.encode(text, most=most)
    if not ids:
        raise RequestError("the prompt is empty: give at least one token")
    if most is not None and len(ids) >= most:
        raise RequestError(
            f"the prompt has {len(ids)} tokens and the context holds {most}: "
            "shorten the prompt to leave room for an answer"
        )
    return tokenizer


def _tokenizer_and_context(args: argparse.Namespace) -> tuple[Tokenizer, int | None] | None:
    """Of a folder without a look at its weights, of a GGUF file by its header."""
    gguf = gguf_file(args.model)
    if gguf is not None:
        from kog_triton.checkpoint.folder import Checkpoint  # and torch, which takes seconds

        checkpoint = Checkpoint.open(gguf)
        assert checkpoint.metadata is not None, "a GGUF file has them"
        return tokenizer_of_gguf(checkpoint.metadata, gguf), checkpoint.spec.max_context
    if args.model is not None and Path(args.model).is_file():
        return None
    folder = model_folder(args.model or checkpoint_path(), args.revision)
    if not (folder / "config.json").is_file():
        return None
    return Tokenizer.load(folder), _context(folder)


def _context(folder: Path) -> int | None:
    """Positions that the model allows; None where config.json is not understood, which opening it tells."""
    try:
        return read_spec(read_json(folder / "config.json"), str(folder)).max_context
    except ModelError:
        return None
