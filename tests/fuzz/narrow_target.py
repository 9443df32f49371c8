"""The target "narrow": the config.json of narrow checkpoints, whose quantization_config says how to read the files."""

import json
from pathlib import Path
from random import Random

import torch

from kog_triton.checkpoint.folder import Checkpoint
from tests.lib import narrow_cases

from .targets import Target

# Not GPTQ, where another checkpoint_format is another reading of the same files.
CASES = ("fp8_block", "ct_int4_g32", "ct_int8", "ct_mxfp4", "awq_g32")
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "head_dim": 16}
SIZES |= {"num_key_value_heads": 1, "num_hidden_layers": 1, "vocab_size": 24}


class Narrow(Target):
    """A case is config.json alone: what loads has the values that the model was saved with."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.want = {}
        configs = []
        for name in CASES:
            model, _ = narrow_cases.checkpoint(name, folder / name, sizes=SIZES)
            self.want[name] = _sorted(model.state_dict().values())
            configs.append(json.loads((folder / name / "config.json").read_text()) | {"_case": name})
        self.take(*configs)
        for data in self.seeds:
            assert self.run(data)

    def damage(self, draw: Random, data: bytes) -> bytes:
        """Half of the changes are to quantization_config alone."""
        whole = json.loads(data)
        if draw.random() < 0.5:
            return super().damage(draw, data)
        inner = super().damage(draw, json.dumps(whole["quantization_config"]).encode())
        text = json.dumps(whole | {"quantization_config": "@"}).encode()
        return text.replace(b'"@"', inner)

    def load(self, data: bytes) -> None:
        name = next((n for n in CASES if f'"_case": "{n}"'.encode() in data), CASES[0])
        (self.folder / name / "config.json").write_bytes(data)
        checkpoint = Checkpoint.open(self.folder / name)
        loaded = _sorted(checkpoint.load(n) for n in checkpoint.names())
        assert torch.equal(loaded, self.want[name])


def _sorted(tensors: "object") -> torch.Tensor:
    return torch.cat([t.flatten().double() for t in tensors]).sort().values  # type: ignore[attr-defined]
