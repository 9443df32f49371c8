"""Measures what a checkpoint writes: the share of held-out functions whose completion parses.

    python -m kog_triton.demo.completions --prefixes FILE --checkpoint DIR --out FILE

A held-out function is cut after its signature, docstring and two body lines (functions.py). The
model continues, the continuation is cut where the function ends, and prefix and continuation
together must pass ast.parse. A continuation without a non-blank line counts as a failure.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from kog_triton.demo.evaluate import load_model
from kog_triton.demo.export import TEMPERATURE, TOP_P
from kog_triton.demo.functions import cut_completion, parses
from kog_triton.demo.model import Decoder, Layer, rms_norm
from kog_triton.demo.tokenizer import END_OF_TEXT_ID
from kog_triton.errors import RunError

COMPLETION_TOKENS = 192


class Stepper:
    """Runs a Decoder one position at a time, for a batch of texts, with a key and value cache."""

    def __init__(self, model: Decoder, batch: int, positions: int) -> None:
        if positions > model.shape.max_positions:
            raise RunError(f"prompt and limit need {positions} positions; shorten the prompt")
        shape = model.shape
        self.model = model
        self.position = 0
        size = (
            shape.num_layers,
            shape.num_lanes * batch,
            shape.num_heads // shape.num_lanes,
            positions,
            shape.head_dim,
        )
        device = model.lm_head.weight.device
        self.keys = torch.zeros(size, dtype=model.dtype, device=device)
        self.values = torch.zeros_like(self.keys)

    def step(self, ids: Tensor) -> Tensor:
        """Logits [batch, vocab_size] after one more id of each text."""
        model, eps, here = self.model, self.model.shape.norm_eps, self.position
        rope = (model.cosine[here : here + 1], model.sine[here : here + 1])
        x = F.embedding(ids[:, None], model.model.tok_embeddings.weight).to(model.dtype)
        x = x.expand(model.shape.num_lanes, *x.shape)
        outputs: list[tuple[Tensor, Tensor]] = []
        for layer_idx, layer in enumerate(model.model.layers):
            assert isinstance(layer, Layer)
            source = layer_idx - model.shape.delay
            delayed = outputs[source] if source >= 0 else (None, None)
            q, k, v = layer.attention.heads(rms_norm(x, layer.attention_norm.weight, eps), rope)
            self.keys[layer_idx, :, :, here] = k[:, :, 0]
            self.values[layer_idx, :, :, here] = v[:, :, 0]
            mixed = F.scaled_dot_product_attention(
                q, self.keys[layer_idx, :, :, : here + 1], self.values[layer_idx, :, :, : here + 1]
            )
            attended = layer.attention.merge(mixed, x.shape)
            x = x + model.reduce(attended, delayed[0])
            fed = layer.feed_forward(rms_norm(x, layer.ffn_norm.weight, eps), rope)
            x = x + model.reduce(fed, delayed[1])
            outputs.append((attended, fed))
        self.position += 1
        x = rms_norm(x, model.model.norm.weight, eps).mean(dim=0)
        return F.linear(x[:, 0], model.lm_head.weight.to(x.dtype)).float()


@torch.inference_mode()
def complete(
    model: Decoder, prompts: list[list[int]], limit: int, temperature: float, seed: int = 0
) -> list[tuple[list[int], bool]]:
    """(new ids, whether END_OF_TEXT ended them) for each prompt; temperature 0 is greedy.

    All texts start at position 0 together; each reads its own prompt, then what it wrote.
    """
    device = model.lm_head.weight.device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    width = int(lengths.max()) + limit
    ids = torch.zeros(len(prompts), width, dtype=torch.long, device=device)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    generator = torch.Generator(device=device).manual_seed(seed)
    stepper = Stepper(model, len(prompts), width)
    for position in range(width - 1):
        logits = stepper.step(ids[:, position])
        writing = position + 1 >= lengths
        chosen = pick(logits, temperature, generator)
        ids[:, position + 1] = torch.where(writing, chosen, ids[:, position + 1])
    results = []
    for row, prompt in zip(ids.tolist(), prompts, strict=True):
        new = row[len(prompt) : len(prompt) + limit]
        stop = new.index(END_OF_TEXT_ID) if END_OF_TEXT_ID in new else limit
        results.append((new[:stop], stop < limit))
    return results


def pick(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> torch.Tensor:
    """One id a row: the argmax, or a draw from the smallest set with probability TOP_P."""
    if temperature == 0.0:
        return logits.argmax(dim=-1)
    probabilities, order = torch.softmax(logits / temperature, dim=-1).sort(-1, descending=True)
    before = probabilities.cumsum(-1) - probabilities
    kept = probabilities.masked_fill(before >= TOP_P, 0.0)
    return order.gather(1, torch.multinomial(kept, 1, generator=generator)).squeeze(1)


def judge(prefix: str, completion: str, ended: bool) -> bool:
    """Whether the cut completion adds a non-blank line and the whole parses."""
    body = cut_completion(completion, ended)
    return bool(body.strip()) and parses(prefix + body)


def parse_share(model: Decoder, tokenizer: Tokenizer, prefixes: list[str], temperature: float) -> dict[str, object]:
    """Share of prefixes whose completion parses, and share that END_OF_TEXT ended."""
    prompts = [tokenizer.encode(prefix).ids for prefix in prefixes]
    completions = complete(model, prompts, COMPLETION_TOKENS, temperature)
    texts = [tokenizer.decode(new) for new, _ in completions]
    verdicts = [
        judge(prefix, text, ended) for prefix, text, (_, ended) in zip(prefixes, texts, completions, strict=True)
    ]
    return {
        "temperature": temperature,
        "top_p": TOP_P if temperature else None,
        "prefixes": len(prefixes),
        "parse_share": sum(verdicts) / len(verdicts),
        "ended_share": sum(ended for _, ended in completions) / len(completions),
    }


def measure(checkpoint: Path, prefixes: list[str], device: str) -> dict[str, object]:
    """Parse shares, greedy and at the suggested temperature."""
    model = load_model(checkpoint, device)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    shares = [parse_share(model, tokenizer, prefixes, t) for t in (0.0, TEMPERATURE)]
    return {"completion_tokens": COMPLETION_TOKENS, "shares": shares}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what an exported checkpoint writes")
    parser.add_argument("--prefixes", type=Path, required=True, help="prefixes.json of the corpus")
    parser.add_argument("--checkpoint", type=Path, required=True, help="exported folder")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    prefixes = [entry["prefix"] for entry in json.loads(arguments.prefixes.read_text())]
    if not prefixes:
        raise RunError(f"{arguments.prefixes}: no prefixes; collect more packages")
    result = measure(arguments.checkpoint, prefixes, arguments.device)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["shares"]))


if __name__ == "__main__":
    main()
