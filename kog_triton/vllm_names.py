"""Parameters that vLLM has and kog_triton has not: refused by name, or ignored with a warning.

vllm_names.json lists every name that one release of vLLM takes (tests/lib/vllm_names.py reads them out of its wheel).
A parameter that is not among kog_triton's own is ignored if it would not change a result here (`IGNORED`); it is also
let pass with a value that asks for nothing, such as None or False; otherwise it is refused, with what there is
`INSTEAD`. Both tables also have names that older releases of vLLM took, which many scripts still give.
"""

import difflib
import json
import warnings
from collections.abc import Callable, Mapping
from functools import cache, wraps
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

from kog_triton.errors import RequestError, shown

# function or class -> parameter -> why it makes no difference here
IGNORED: dict[str, dict[str, str]] = {
    "LLM": {
        "async_scheduling": "scheduling is the kernel's",
        "attention_backend": "the backend has one attention",
        "block_size": "keys and values are not paged",
        "compilation_config": "nothing is compiled by torch",
        "cudagraph_capture_sizes": "no CUDA graph is captured",
        "disable_custom_all_reduce": "there is one all-reduce",
        "disable_log_requests": "requests are not logged",
        "distributed_executor_backend": "one process drives every GPU",
        "enable_chunked_prefill": "prompts always run in chunks",
        "enforce_eager": "no CUDA graph is captured",
        "limit_mm_per_prompt": "models read text alone",
        "max_cudagraph_capture_size": "no CUDA graph is captured",
        "max_logprobs": "logprobs has a limit of its own",
        "max_num_batched_tokens": "prompts run in chunks of a fixed size",
        "max_parallel_loading_workers": "one process loads the weights",
        "max_seq_len_to_capture": "no CUDA graph is captured",
        "optimization_level": "nothing is compiled by torch",
        "performance_mode": "one request as fast as possible is the only mode",
        "served_model_name": "an LLM serves no network",
        "skip_mm_profiling": "models read text alone",
        "stream_interval": "every token is delivered as it is made",
        "swap_space": "nothing is swapped",
        "trust_remote_code": "code of a checkpoint is never run",
        "use_tqdm_on_load": "loading shows no bar",
        "use_v2_block_manager": "keys and values are not paged",
        "worker_use_ray": "one process drives every GPU",
    },
    "SamplingParams": {
        "output_kind": "generate gives whole outputs, stream gives deltas",
        "skip_clone": "parameters are always copied",
        "stream_interval": "every token is delivered as it is made",
    },
}
_CONSTRAINT = "give structured_outputs=StructuredOutputsParams(json=, regex=, choice= or grammar=)"
_NO_BEAMS = "there is no beam search: sample with n"
_LORA = "merge the adapter into the checkpoint"
_TEXT = "models generate text alone"
_CLOSED = "close() frees the memory"
_ASYNC = "`async for` over LLM.stream(prompt, sampling_params) is asynchronous, and `kog serve` is a server"
_ARGUMENTS = "give LLM the arguments themselves"
# function, class, "LLM methods" or "vllm", the package -> name -> what to do instead; of others: leave it out
INSTEAD: dict[str, dict[str, str]] = {
    "vllm": {
        "AsyncEngineArgs": _ARGUMENTS,
        "AsyncLLM": _ASYNC,
        "AsyncLLMEngine": _ASYNC,
        "BeamSearchParams": _NO_BEAMS,
        "ClassificationOutput": _TEXT,
        "ClassificationRequestOutput": _TEXT,
        "EmbeddingOutput": _TEXT,
        "EmbeddingRequestOutput": _TEXT,
        "EngineArgs": _ARGUMENTS,
        "GuidedDecodingParams": "take StructuredOutputsParams",
        "LLMEngine": "LLM.stream(prompt, sampling_params) starts a request, and its `poll` reads it",
        "LoRARequest": _LORA,
        "ModelRegistry": "a family of models is a file in kog_triton/model/families",
        "PoolingOutput": _TEXT,
        "PoolingParams": _TEXT,
        "PoolingRequestOutput": _TEXT,
        "PromptType": "a prompt is text, token ids, a TextPrompt or a TokensPrompt",
        "ScoringOutput": _TEXT,
        "ScoringRequestOutput": _TEXT,
        "initialize_ray_cluster": "one process drives every GPU",
    },
    "LLM": {
        "data_parallel_size": "open an LLM on each GPU",
        "device": "give devices: 'cpu', 'nvidia', 'amd' or a GPU",
        "enable_lora": _LORA,
        "guided_decoding_backend": "leave it out: llguidance is the only one",
        "hf_overrides": "edit config.json in a copy of the folder",
        "hf_token": "set the environment variable HF_TOKEN",
        "kv_cache_memory_bytes": "num_slots and max_model_len decide it",
        "load_format": "give a folder of safetensors or a .gguf file as model",
        "pipeline_parallel_size": "tensor_parallel_size is the number of GPUs",
        "quantization": "leave it out: a checkpoint says how it is quantized, and `kog quantize` makes one",
        "task": "leave it out: an LLM generates",
    },
    "LLM.generate": {
        "guided_options_request": f"in SamplingParams {_CONSTRAINT}",
        "lora_request": _LORA,
        "prompt_token_ids": 'give {"prompt_token_ids": ids} as a prompt',
        "tokenization_kwargs": "give token ids",
    },
    "LLM.chat": {"guided_options_request": f"in SamplingParams {_CONSTRAINT}", "lora_request": _LORA},
    "LLM methods": {
        "beam_search": _NO_BEAMS,
        "classify": _TEXT,
        "embed": _TEXT,
        "encode": _TEXT,
        "get_metrics": "every output has its metrics",
        "llm_engine": "the engine is `engine`",
        "reward": _TEXT,
        "score": _TEXT,
        "sleep": _CLOSED,
        "start_profile": "`kog profile` shows where the time of a step goes",
        "wake_up": _CLOSED,
    },
    "SamplingParams": {
        "best_of": "generate n samples and pick",
        "early_stopping": _NO_BEAMS,
        "guided_choice": _CONSTRAINT,
        "guided_decoding": _CONSTRAINT,
        "guided_grammar": _CONSTRAINT,
        "guided_json": _CONSTRAINT,
        "guided_regex": _CONSTRAINT,
        "length_penalty": _NO_BEAMS,
        "logits_processors": "use logit_bias, allowed_token_ids, bad_words or structured_outputs",
        "truncate_prompt_tokens": "give token ids, cut",
        "use_beam_search": _NO_BEAMS,
    },
}
# values that ask for nothing, beside None, False, 0, "", "auto" and what is empty
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "data_parallel_size": (1,),
    "guided_json": (),  # an empty schema is any JSON
    "load_format": ("auto", "safetensors"),
    "logprobs_mode": ("raw_logprobs",),
    "pipeline_parallel_size": (1,),
    "runner": ("auto", "generate"),
    "scheduling_policy": ("fcfs",),
    "spaces_between_special_tokens": (True,),  # False does ask for something
    "task": ("auto", "generate"),
    "tokenizer_mode": ("auto", "hf"),
}


@cache
def names() -> dict[str, list[str]]:
    """Function or class -> the parameters that vLLM gives it."""
    text = Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
    table: dict[str, list[str]] = json.loads(text)["names"]
    return table


def check_others(where: str, given: Mapping[str, Any], own: Callable[..., Any], level: int = 3) -> None:
    """What a caller gave `where`, whose own parameters are those of `own`, beside them.

    RequestError for what vLLM has and kog_triton does not offer, TypeError for what neither has; UserWarning for
    what is ignored, at the caller `level` calls up.
    """
    for name, value in given.items():
        instead, why = (table.get(where, {}).get(name) for table in (INSTEAD, IGNORED))
        if name not in names()[where] and instead is None and why is None:
            close = difflib.get_close_matches(name, list(signature(own).parameters), 1)
            hint = f": did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"{where} got an unexpected keyword argument {name!r}{hint}")
        if _asks_for_nothing(name, value):
            continue
        if why is not None:
            warnings.warn(f"{where}: {name} is ignored: {why}", stacklevel=level)
        else:
            raise RequestError(
                f"{where}: {name} is {shown(value)}: kog_triton has no {name}: {instead or 'leave it out'}"
            )


def no_attribute(name: str) -> AttributeError:
    """What to say of an attribute that LLM has not: with what there is instead, where vLLM's has it."""
    instead = INSTEAD["LLM methods"].get(name)
    if instead is None and name not in names()["LLM methods"]:
        return AttributeError(f"'LLM' object has no attribute {name!r}", name=name)
    more = "" if instead is None else f": {instead}"
    return AttributeError(f"kog_triton's LLM has no {name}{more}", name=name)


def no_name(name: str) -> Exception:
    """What to say of a name that the package has not. An ImportError for vLLM's, with what there is instead: of an
    AttributeError `from kog_triton import NAME` would drop the words."""
    instead = INSTEAD["vllm"].get(name)
    if instead is None:
        return AttributeError(f"module 'kog_triton' has no attribute {name!r}")
    return ImportError(f"kog_triton has no {name}: {instead}", name="kog_triton")


def _asks_for_nothing(name: str, value: Any) -> bool:
    if name in NEUTRAL:
        return value is None or value in NEUTRAL[name]
    if isinstance(value, str | Mapping | list | tuple | set | frozenset):
        return len(value) == 0 or value == "auto"
    return value is None or (isinstance(value, bool | int | float) and value == 0)


_Class = TypeVar("_Class")


def takes_vllm_names(cls: type[_Class]) -> type[_Class]:
    """A dataclass whose constructor judges the names that only vLLM has as `check_others` does."""
    initialize: Callable[..., None] = cls.__init__
    own = signature(initialize)

    @wraps(initialize)
    def init(self: _Class, *args: Any, **given: Any) -> None:
        unknown = [name for name in given if name not in own.parameters]
        others = {name: given.pop(name) for name in unknown}
        if others:
            check_others(cls.__name__, others, initialize)
        initialize(self, *args, **given)

    cls.__init__ = init  # type: ignore[assignment, method-assign]
    return cls
