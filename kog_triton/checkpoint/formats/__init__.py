"""Narrow weight formats of safetensors checkpoints: what `quantization_config` in config.json says. A file a format.

A format is read into one internal form (checkpoint/narrow.py). Which modules are narrow is told by the files: a module
that they hold as BF16, F16 or F32 is read as it is, whether or not the configuration excludes it.
"""

from collections.abc import Mapping
from typing import Any

from kog_triton.checkpoint.formats.awq import Awq
from kog_triton.checkpoint.formats.compressed_tensors import METHOD, CompressedTensors
from kog_triton.checkpoint.formats.fp8 import Fp8
from kog_triton.checkpoint.formats.gptq import Gptq
from kog_triton.checkpoint.formats.module import Files, Found, Module, Scheme
from kog_triton.checkpoint.formats.mxfp4 import Mxfp4
from kog_triton.errors import ModelError
from kog_triton.model.config import Config

FIELD = "quantization_config"
OLD_FIELD = "compression_config"  # of early compressed-tensors; refused where both are given
_SCHEMES: Mapping[str, Any] = {"fp8": Fp8, METHOD: CompressedTensors, "awq": Awq, "gptq": Gptq, "mxfp4": Mxfp4}

__all__ = ["FIELD", "Files", "Found", "Module", "Scheme", "read_scheme", "without_scheme"]


def read_scheme(config: Mapping[str, Any], file: str) -> Scheme | None:
    """How the checkpoint with this config.json stores narrow weights; None if it has none.

    ModelError, which names `file` and the field, for a method or an option that is not read.
    """
    try:
        found = Config(config).mapping(FIELD, OLD_FIELD)
        if found is None:
            return None
        method = found.choice("quant_method", of=_SCHEMES, default="")
        if not method:
            raise found.error(["quant_method"], " or ".join(map(repr, _SCHEMES)))
        scheme: Scheme = _SCHEMES[method].of(found)
        return scheme
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from None


def without_scheme(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json without what `read_scheme` has read, so that whoever reads the rest refuses none of it."""
    used = next((f for f in (FIELD, OLD_FIELD) if Config(config).get(f) is not None), FIELD)
    return {k: v for k, v in config.items() if k != used}
