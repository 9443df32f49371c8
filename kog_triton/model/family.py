"""What a model family is: which checkpoints it answers to, how it reads them, where weights lie.

A family is data and one reading function; loading code needs no knowledge of any of them. Canonical
names are the keys of `ModelSpec.shapes`; `{}` stands for the layer in both spellings.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kog_triton.model.config import Config
from kog_triton.model.spec import ModelSpec

# What a checkpoint may hold besides its weights: tables that are computed again from the
# configuration.
HARMLESS_SUFFIXES = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "freqs_cis")


@dataclass(frozen=True)
class Source:
    """Where a checkpoint keeps one canonical tensor: the first of `names` that it has.

    The stored shape is the canonical one, or the canonical one without a leading axis of 1.
    `interleaved_rope` rows turn in pairs (2k, 2k + 1) and are reordered to the half-split layout
    when they are loaded.
    """

    names: tuple[str, ...]
    interleaved_rope: bool = False


@dataclass(frozen=True)
class Family:
    """`spec` refuses what cannot run (ModelError); `sources` covers all names of `spec.shapes`.

    A family that lists no `architectures` takes any: the class comes with the checkpoint.
    """

    name: str
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    spec: Callable[[Config], ModelSpec]
    sources: Callable[[ModelSpec], dict[str, Source]]
