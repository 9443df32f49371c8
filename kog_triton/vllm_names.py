"""Parameters that vLLM has and kog_triton has not: refused by name, or ignored with a warning.

vllm_names.json lists every name that one release of vLLM takes (tests/lib/vllm_names.py reads them out of its wheel).
A parameter that is not among kog_triton's own is ignored if it would not change a result here (`IGNORED`); it is also
let pass with a value that asks for nothing, such as None or False; otherwise it is refused.
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
        "distributed_executor_backend": "one process drives every GPU",
        "enable_chunked_prefill": "prompts always run in chunks",
        "enforce_eager": "no CUDA graph is captured",
        "limit_mm_per_prompt": "models read text alone",
        "max_cudagraph_capture_size": "no CUDA graph is captured",
        "max_logprobs": "logprobs has a limit of its own",
        "max_num_batched_tokens": "prompts run in chunks of a fixed size",
        "max_parallel_loading_workers": "one process loads the weights",
        "optimization_level": "nothing is compiled by torch",
        "performance_mode": "one request as fast as possible is the only mode",
        "served_model_name": "an LLM serves no network",
        "skip_mm_profiling": "models read text alone",
        "stream_interval": "every token is delivered as it is made",
        "trust_remote_code": "code of a checkpoint is never run",
        "use_tqdm_on_load": "loading shows no bar",
    },
    "SamplingParams": {
        "output_kind": "generate gives whole outputs, stream gives deltas",
        "skip_clone": "parameters are always copied",
        "stream_interval": "every token is delivered as it is made",
    },
}
# values that ask for nothing, beside None, False, 0, "", "auto" and what is empty
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "data_parallel_size": (1,),
    "load_format": ("auto", "safetensors"),
    "pipeline_parallel_size": (1,),
    "runner": ("auto", "generate"),
    "spaces_between_special_tokens": (True,),  # False does ask for something
    "tokenizer_mode": ("auto", "hf"),
}


@cache
def names() -> dict[str, list[str]]:
    """Function or class -> the parameters that vLLM gives it."""
    text = Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
    table: dict[str, list[str]] = json.loads(text)["names"]
    return table


def check_others(
    where: str, given: Mapping[str, Any], own: Callable[..., Any], level: int = 3
) -> None:
    """What a caller gave `where`, whose own parameters are those of `own`, beside them.

    RequestError for what vLLM has and kog_triton does not offer, TypeError for what neither has; UserWarning for
    what is ignored, at the caller `level` calls up.
    """
    for name, value in given.items():
        if name not in names()[where]:
            close = difflib.get_close_matches(name, list(signature(own).parameters), 1)
            hint = f": did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"{where} got an unexpected keyword argument {name!r}{hint}")
        if why := IGNORED.get(where, {}).get(name):
            if not _asks_for_nothing(name, value):
                warnings.warn(f"{where}: {name} is ignored: {why}", stacklevel=level)
        elif not _asks_for_nothing(name, value):
            raise RequestError(
                f"{where}: {name} is {shown(value)}: kog_triton has no {name}: leave it out"
            )


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
        others = {name: value for name, value in given.items() if name not in own.parameters}
        check_others(cls.__name__, others, initialize)
        initialize(self, *args, **{n: v for n, v in given.items() if n not in others})

    cls.__init__ = init  # type: ignore[assignment, method-assign]
    return cls
