"""Fields that every endpoint shares, and how they become SamplingParams.

Ranges are SamplingParams' to check; here are types, and the bounds that a server needs: what one request may cost.
"""

import json
from collections.abc import Collection
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kog_triton.errors import wrong
from kog_triton.sampling.structured import StructuredOutputsParams
from kog_triton.server.pacing import MAX_INTERVAL_S, MAX_TOKENS, Interval
from kog_triton.server.problems import Problem

MAX_SAMPLES = 128
MAX_STOPS = 16
MAX_LOGPROBS = 20
# Known, and without effect on an answer here: who asks, how it is billed or stored, hints.
WITHOUT_EFFECT = frozenset(
    {
        *("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "prediction", "verbosity", "betas"),
        *("container", "context_management", "inference_geo"),
    }
)
# Other servers' fields that would change an answer here, if they were there: refused by name.
SHAPES = frozenset(
    {
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        *("grammar", "json_schema", "response_format", "structured_outputs"),
    }
)
REFUSED = SHAPES | frozenset(
    {
        *("use_beam_search", "length_penalty", "prompt_embeds", "structural_tag"),
        *("truncate_prompt_tokens", "logits_processors", "bad_words_ids", "typical_p", "mirostat"),
        *("dry_multiplier", "xtc_probability", "top_a", "tfs_z", "documents", "prompt_logprobs"),
    }
)
DIRECT = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "stop", "stop_token_ids"),
    *("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "bad_words"),
)
# Fields of a chat request that other conversations have by the same name.
SHAPED = ("temperature", "top_p", "cache_salt", "stream_interval", "stream_interval_ms")

T = TypeVar("T")
# A list that a client fills ends at its first wrong element: errors of 50,000 took 1.8 s and 192 MiB.
Many = Annotated[list[T], Field(fail_fast=True)]


class Body(BaseModel):
    """A request; fields that are not known are named in the answer's header x-kog-ignored."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, protected_namespaces=())

    @property
    def ignored(self) -> list[str]:
        return sorted(self._unknown())[:20]

    def _unknown(self) -> list[str]:
        """Names of fields that nobody reads, of objects inside by way of theirs."""
        found = [name[:40] for name in self.model_extra or {} if name not in WITHOUT_EFFECT]
        for name in type(self).model_fields:
            if isinstance(inside := getattr(self, name), Body):
                found += [f"{name}.{unknown}" for unknown in inside._unknown()]
        return found

    def refuse(self, names: Collection[str], shape: str) -> None:
        """Problem 400 if one of the fields that are not known has such a name: it would change the answer. `shape`: the
        endpoint's own field for the shape of an answer."""
        for name in sorted(set(names) & set(self.model_extra or ())):
            if (self.model_extra or {})[name] is not None:
                instead = f"use {shape}" if name in SHAPES else "leave it out"
                raise Problem(400, f"{name} is not supported: {instead}", param=name)


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


def as_text(schema: str | dict[str, Any] | None) -> str | None:
    """A JSON schema as text: its numbers may be of any size, those of a message to the engine may not."""
    return json.dumps(schema) if isinstance(schema, dict) else schema


class StructuredOutputsBody(BaseModel):
    """One of vLLM's constraints on an answer."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: Many[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def constraint(self) -> StructuredOutputsParams:
        return StructuredOutputsParams(
            as_text(self.json_), self.regex, self.choice, self.grammar, self.json_object or None
        )


class JsonSchema(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def constraint(self) -> StructuredOutputsParams | None:
        if self.type == "json_object":
            return StructuredOutputsParams(json_object=True)
        if self.type == "json_schema":
            given = self.json_schema
            if given is None or given.schema_ is None:
                lacking = "json_schema" if given is None else "json_schema.schema"
                raise Problem(400, f"response_format.{lacking} is missing", param="response_format")
            return StructuredOutputsParams(json=as_text(given.schema_))
        return None


class StreamBody(Body):
    """How any answer is told, and whose prefixes it may begin with."""

    cache_salt: str | None = Field(None, max_length=256)
    stream: bool | None = None
    stream_interval: int | None = Field(None, ge=0, le=MAX_TOKENS)
    stream_interval_ms: float | None = Field(None, ge=0, le=1000 * MAX_INTERVAL_S)


class SamplingBody(StreamBody):
    """Fields by which a request is sampled and streamed."""

    model: str = ""
    n: int | None = Field(None, ge=1, le=MAX_SAMPLES)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    max_tokens: int | None = Field(None, ge=0, lt=1 << 31)
    min_tokens: int | None = Field(None, ge=0, lt=1 << 31)
    stop: str | Many[str] | None = None
    stop_token_ids: Many[int] | None = Field(None, max_length=1024)
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    repetition_penalty: float | None = Field(None, gt=0, le=1e6)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = Field(None, max_length=4096)
    allowed_token_ids: Many[int] | None = None
    bad_words: Many[str] | None = Field(None, max_length=1024)
    structured_outputs: StructuredOutputsBody | None = None
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _check_known(self) -> "SamplingBody":
        self.refuse(REFUSED, "structured_outputs")
        return self

    def given(self) -> dict[str, Any]:
        """Fields of SamplingParams that were given."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > MAX_STOPS:
            raise wrong("stop", f"{len(stops)} texts", f"at most {MAX_STOPS}")
        found = {name: value for name in DIRECT if (value := getattr(self, name)) is not None}
        if not stops:
            found.pop("stop", None)
        if self.structured_outputs is not None:
            found["structured_outputs"] = self.structured_outputs.constraint()
        if self.response_format is not None and (shape := self.response_format.constraint()):
            if "structured_outputs" in found:
                raise Problem(
                    400,
                    "structured_outputs and response_format both shape the answer: leave out one",
                    param="response_format",
                )
            found["structured_outputs"] = shape
        return found

    def interval(self, default: Interval) -> Interval:
        """How often the stream speaks."""
        tokens = default.tokens if self.stream_interval is None else self.stream_interval
        seconds = default.seconds if self.stream_interval_ms is None else self.stream_interval_ms / 1e3
        if self.stream_interval is None and self.stream_interval_ms is not None:
            tokens = 0
        return Interval(seconds, tokens)


# Fields that shape an answer: bodies of endpoints that do not read them refuse them.
SHAPING = REFUSED | (set(SamplingBody.model_fields) - {"model", "n", "max_tokens", "stream_options"})
