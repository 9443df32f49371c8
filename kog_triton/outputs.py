"""What a request gives back, field for field in vLLM's shape: plain data, no torch, no engine.

A stream yields `Delta`s whose texts and token ids concatenate to those of the final output, which
the last delta carries.
"""

from dataclasses import dataclass
from typing import ClassVar

from kog_triton.metrics import RequestMetrics
from kog_triton.text.tool_calls import ToolCall

FINISH_REASONS = {"stop": "stop", "length": "length", "cancel": "abort"}  # a step's word -> vLLM's


@dataclass(frozen=True)
class Logprob:
    """Natural-log probability of one candidate.

    Rank 1 is the likeliest of the whole vocabulary. `decoded_token` is None without detokenize.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True)
class CompletionOutput:
    """One sample. `token_ids` keep the token that ended it; `text` does not, unless asked for."""

    # of features that kog_triton does not have: None, as in vLLM without them
    routed_experts: ClassVar[None] = None
    lora_request: ClassVar[None] = None
    sampling_mask: ClassVar[None] = None
    spec_decode_metrics: ClassVar[None] = None
    weight_versions: ClassVar[None] = None

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None  # "stop", "length", "abort" or "tool_calls"; None while it runs
    stop_reason: int | str | None = None  # the stop string or stop token id; None for end of text
    logprobs: list[dict[int, Logprob]] | None = None  # one a token: the chosen id, then the likeliest
    cumulative_logprob: float | None = None
    tool_calls: list[ToolCall] | None = None  # None if no parser was asked for

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestOutput:
    """One prompt and its samples. With n > 1, `metrics` are those of the first sample."""

    # of features that kog_triton does not have: None, as in vLLM without them
    lora_request: ClassVar[None] = None
    encoder_prompt: ClassVar[None] = None
    encoder_prompt_token_ids: ClassVar[None] = None
    num_cache_creation_tokens: ClassVar[None] = None
    prompt_token_id_logprobs: ClassVar[None] = None
    kv_transfer_params: ClassVar[None] = None
    ec_transfer_params: ClassVar[None] = None

    request_id: str
    prompt: str | None  # None if the caller gave token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    finished: bool = True
    # one a prompt token, its own id first; the first token has none, as nothing comes before it
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def num_cached_tokens(self) -> int:
        """Leading prompt tokens whose keys and values were there already."""
        return self.metrics.cached_tokens


@dataclass(frozen=True)
class Delta:
    """What is new since the last delta; `output` is set on the last one only."""

    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    output: RequestOutput | None = None
