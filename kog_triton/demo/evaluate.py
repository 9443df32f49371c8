"""Measures an exported checkpoint on held-out text: bits per byte.

    python -m kog_triton.demo.evaluate --data DIR --checkpoint DIR --out FILE

Held-out files are read in windows of the model's whole context, each window starting without
memory; every token but the first of all is scored, END_OF_TEXT included, and the sum divided by
the bytes of the text.
"""

import argparse
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from kog_triton.demo.export import load_checkpoint
from kog_triton.demo.model import Decoder
from kog_triton.demo.train import read_ids
from kog_triton.errors import RunError


def load_model(folder: Path, device: str) -> Decoder:
    """The training model with the exported weights; computes in float16, on a CPU in float32."""
    shape, tensors = load_checkpoint(folder)
    model = Decoder(shape, torch.float16 if device == "cuda" else torch.float32)
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return model.to(device).eval()


@torch.inference_mode()
def bits_per_byte(model: Decoder, ids: Tensor, num_bytes: int, batch: int = 64) -> float:
    """Cross-entropy of `ids` in bits, over `num_bytes` bytes of text."""
    device = model.lm_head.weight.device
    window = model.shape.max_positions
    total = 0.0
    usable = (len(ids) - 1) // window * window
    if usable == 0:
        raise RunError(f"held-out text has {len(ids)} tokens, fewer than a window of {window}")
    inputs = ids[:usable].long().view(-1, window)
    targets = ids[1 : usable + 1].long().view(-1, window)
    for first in range(0, len(inputs), batch):
        logits = model(inputs[first : first + batch].to(device)).float()
        target = targets[first : first + batch].to(device).flatten()
        total += float(F.cross_entropy(logits.flatten(0, 1), target, reduction="sum"))
    return total / math.log(2) / (num_bytes * usable / len(ids))


def evaluate(data: Path, checkpoint: Path, device: str) -> dict[str, object]:
    """Bits per byte of one exported checkpoint, with what it was measured on."""
    model = load_model(checkpoint, device)
    ids = read_ids(data / "heldout.bin")
    num_bytes = json.loads((data / "manifest.json").read_text())["splits"]["heldout"]["bytes"]
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "heldout_bytes": num_bytes,
        "heldout_tokens": len(ids),
        "bits_per_byte": bits_per_byte(model, ids, num_bytes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluate an exported checkpoint")
    parser.add_argument("--data", type=Path, required=True, help="folder that corpus.py wrote")
    parser.add_argument("--checkpoint", type=Path, required=True, help="exported folder")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    result = evaluate(arguments.data, arguments.checkpoint, arguments.device)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
