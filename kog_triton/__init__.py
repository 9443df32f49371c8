"""kog_triton: decode one request as fast as memory allows.

The names below are loaded on first use, so that `import kog_triton` and `kog --help` need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kog_triton.llm import LLM
    from kog_triton.outputs import CompletionOutput, Delta, Logprob, RequestOutput
    from kog_triton.prompts import TextPrompt, TokensPrompt
    from kog_triton.sampling.params import SamplingParams
    from kog_triton.sampling.structured import StructuredOutputsParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CompletionOutput",
    "Delta",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]

_HOMES = {
    "LLM": "kog_triton.llm",
    "CompletionOutput": "kog_triton.outputs",
    "Delta": "kog_triton.outputs",
    "Logprob": "kog_triton.outputs",
    "RequestOutput": "kog_triton.outputs",
    "SamplingParams": "kog_triton.sampling.params",
    "StructuredOutputsParams": "kog_triton.sampling.structured",
    "TextPrompt": "kog_triton.prompts",
    "TokensPrompt": "kog_triton.prompts",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise import_module("kog_triton.vllm_names").no_name(name)
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
