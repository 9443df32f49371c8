"""The families this engine runs. A new one is a small file and a line in FAMILIES.

config.json --find_family--> Family --spec--> ModelSpec --sources--> where each weight lies
"""

from collections.abc import Mapping
from typing import Any

from kog_triton.errors import ModelError, shown
from kog_triton.model.config import Config
from kog_triton.model.families.laneformer import LANEFORMER
from kog_triton.model.families.llama import LLAMA, MISTRAL
from kog_triton.model.families.qwen2 import QWEN2
from kog_triton.model.families.qwen3 import QWEN3
from kog_triton.model.family import Family, Source
from kog_triton.model.spec import ModelSpec

FAMILIES: tuple[Family, ...] = (LLAMA, MISTRAL, QWEN2, QWEN3, LANEFORMER)

__all__ = ["FAMILIES", "find_family", "read_spec", "sources"]


def find_family(config: Mapping[str, Any]) -> Family:
    """The family that answers to `model_type`, or to `architectures` where the type is absent.

    ModelError if there is none, or if the architecture is not the family's language model.
    """
    model_type, classes = config.get("model_type"), config.get("architectures")
    if model_type is not None:
        found = [f for f in FAMILIES if model_type in f.model_types]
    else:
        found = [f for f in FAMILIES if _has_class(f, classes)]
    if not found:
        known = ", ".join(t for f in FAMILIES for t in f.model_types)
        what = f"model_type is {shown(model_type)}" if model_type is not None else "no model_type"
        raise ModelError(f"{what}: this model is not supported, it must be one of {known}")
    family = found[0]
    if classes is not None and family.architectures and not _has_class(family, classes):
        raise ModelError(f"architectures is {shown(classes)}: it must contain {family.architectures[0]!r}")
    return family


def _has_class(family: Family, classes: Any) -> bool:
    return isinstance(classes, list) and any(c in family.architectures for c in classes)


def read_spec(config: Mapping[str, Any], file: str = "config.json") -> ModelSpec:
    """The spec that a config.json describes. Every ModelError starts with `file`."""
    try:
        return find_family(config).spec(Config(config))
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from None


def sources(spec: ModelSpec) -> dict[str, Source]:
    """Where a checkpoint of the spec's family keeps each canonical tensor of `spec.shapes`."""
    family = next((f for f in FAMILIES if f.name == spec.family), None)
    if family is None:
        raise ModelError(f"family {spec.family!r} is not known")
    return family.sources(spec)
