"""Weights that no training made, to plan, measure and test models without downloading them.

They behave like a trained model's where it matters: activations stay of order one through all
layers, attention picks a few keys, and the logits are spread (standard deviation 4 or more), so
that a wrong number changes the text. Norm gains differ, biases are not zero.
"""

import hashlib
import math

import torch

from kog_triton.errors import ModelError
from kog_triton.model.spec import DType, Head, ModelSpec

DTYPES = {DType.F32: torch.float32, DType.BF16: torch.bfloat16, DType.F16: torch.float16}
_SPREAD = 6.0  # aim of the logits' standard deviation: a margin above 4 for narrow models


class RandomWeights:
    """A `WeightSource` of random weights.

    Every tensor depends on its name, the seed, the dtype and the kind of device alone, so the
    order of loading does not matter. Two kinds of device draw different numbers: to compare them,
    make the weights on one and copy.
    """

    def __init__(
        self, spec: ModelSpec, seed: int = 0, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
    ) -> None:
        self.spec = spec
        self._seed = seed
        self._device = torch.device(device)
        self._dtype = dtype or DTYPES[spec.dtype]

    def load(self, name: str) -> torch.Tensor:
        """One weight, shaped as in `spec.shapes`; ModelError if the model has none of that name."""
        pattern, shape = self._find(name)
        kind = pattern.rpartition(".")[2]
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        generator = torch.Generator(self._device)
        generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        out = torch.empty(shape, dtype=self._dtype, device=self._device)
        if kind.endswith("norm"):
            # Around 1, or, over query and key heads, where scores get a deviation of about 3.
            center = 1.7 if kind in ("q_norm", "k_norm") else 1.0
            return out.uniform_(0.6 * center, 1.4 * center, generator=generator)
        if kind.endswith("bias"):
            return out.normal_(0.0, 0.3, generator=generator)
        return out.normal_(0.0, self._deviation(kind), generator=generator)

    def _find(self, name: str) -> tuple[str, tuple[int, ...]]:
        parts = name.split(".")
        if len(parts) == 3 and parts[1].isdecimal() and int(parts[1]) < self.spec.num_layers:
            parts[1] = "{}"
        pattern = ".".join(parts)
        if pattern not in self.spec.shapes or "{}" in name:
            raise ModelError(f"the model has no weight {name!r}")
        return pattern, self.spec.shapes[pattern]

    def _deviation(self, kind: str) -> float:
        """Standard deviation of a matrix that takes inputs of order one to outputs of order `gain`.

        Outputs of a module are summed over all lanes' columns and over 2 * num_layers modules.
        """
        spec = self.spec
        hidden, attention = spec.hidden_size, spec.num_heads * spec.head_dim
        # Lanes that never meet differ, and the average over them shrinks.
        head = _SPREAD * (spec.num_lanes**0.25 if spec.head is Head.MEAN else 1.0)
        columns, gain = {
            "embed": (hidden, head) if spec.tied_embeddings else (1, 1.0),
            "lm_head": (hidden * (spec.num_lanes if spec.head is Head.CONCAT else 1), head),
            "o_proj": (attention, 2.0 / math.sqrt(2 * spec.num_layers)),
            "down_proj": (spec.intermediate_size, 4.0 / math.sqrt(2 * spec.num_layers)),
            "q_proj": (hidden, 1.7),
            "k_proj": (hidden, 1.7),
        }.get(kind, (hidden, 1.0))
        return gain / math.sqrt(columns)
