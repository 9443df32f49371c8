"""A baseline of our own: the decode step in plain torch, captured once in a CUDA graph.

What careful torch code reaches without writing a kernel: fused query-key-value and gate-up matrices,
a preallocated cache, the argmax in the graph, one graph launch and one read of the token a step.
The prompt runs in chunks through the same function, eagerly.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.functional import linear, rms_norm, silu

from kog_triton.backends import WeightSource
from kog_triton.backends.device import TORCH_DTYPES
from kog_triton.bench.engines import Run
from kog_triton.bench.peers import Setting
from kog_triton.model.spec import ModelSpec
from kog_triton.schedule.rope import rope_table

CHUNK = 512  # prompt tokens of one pass: bounds the score matrix
Tensor = torch.Tensor


class Linear(Protocol):
    """x [T, columns] to x W^T + bias [T, rows], of x's dtype."""

    nbytes: int

    def __call__(self, x: Tensor) -> Tensor: ...


class WideLinear:
    """By `torch.nn.functional.linear`: weight [rows, columns] of the model's dtype, bias [rows] or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self._weight, self._bias)


class PlainDecoder:
    """One-lane decoder over a cache of `context` positions. Shapes: T tokens, n positions,
    H query heads in groups of g on K key heads, d head_dim.

    make_linear  of the names of the matrices whose rows follow each other, and their bias; None: `WideLinear`
    """

    def __init__(
        self,
        weights: WeightSource,
        device: torch.device,
        context: int,
        make_linear: Callable[[Sequence[str], Tensor | None], Linear] | None = None,
    ) -> None:
        spec = self.spec = weights.spec
        dtype = TORCH_DTYPES[spec.dtype]

        def get(name: str) -> Tensor:
            tensor = weights.load(name).to(device, dtype)
            return tensor[0] if tensor.shape[0] == 1 else tensor

        def rows(names: Sequence[str]) -> Tensor:
            return torch.cat([get(name) for name in names])

        def matrix(layer: int, kinds: Sequence[str], biased: bool) -> Linear:
            names = [f"layers.{layer}.{kind}_proj" for kind in kinds]
            bias = rows([f"layers.{layer}.{kind}_bias" for kind in kinds]) if biased else None
            return make_linear(names, bias) if make_linear else WideLinear(rows(names), bias)

        self.embed, self.norm = get("embed"), get("norm")
        self.head = self.embed if spec.tied_embeddings else get("lm_head")
        self.layers: list[dict[str, Any]] = [
            {
                "attention_norm": get(f"layers.{i}.attention_norm"),
                "mlp_norm": get(f"layers.{i}.mlp_norm"),
                "qkv": matrix(i, "qkv", spec.qkv_bias),
                "o": matrix(i, "o", spec.o_bias),
                "gate_up": matrix(i, ("gate", "up"), spec.mlp_bias),
                "down": matrix(i, ("down",), spec.mlp_bias),
                "q_norm": get(f"layers.{i}.q_norm") if spec.qk_norm else None,
                "k_norm": get(f"layers.{i}.k_norm") if spec.qk_norm else None,
            }
            for i in range(spec.num_layers)
        ]
        shape = (spec.num_layers, 2, spec.num_kv_heads, context, spec.head_dim)
        self.kv = torch.zeros(shape, dtype=dtype, device=device)
        self.rope = torch.from_numpy(rope_table(spec.rope, spec.head_dim, context)).to(device)
        self.keys_at = torch.arange(context, device=device)

    @property
    def weight_bytes(self) -> int:
        parts = [self.embed, self.norm, *(t for la in self.layers for t in la.values())]
        parts += [] if self.spec.tied_embeddings else [self.head]
        return sum(part.nbytes for part in parts if part is not None)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Logits [T, vocab] of ids [T] at positions [T]; their keys and values go to the cache."""
        x = self.embed[ids]
        for index, w in enumerate(self.layers):
            h = self._norm(x, w["attention_norm"])
            a = self._attention(index, w, w["qkv"](h), positions)
            x = x + w["o"](a)
            gate, up = w["gate_up"](self._norm(x, w["mlp_norm"])).chunk(2, -1)
            x = x + w["down"](silu(gate) * up)
        return linear(self._norm(x, self.norm), self.head)

    def _norm(self, x: Tensor, gain: Tensor) -> Tensor:
        return rms_norm(x, gain.shape, gain, self.spec.norm_eps)

    def _attention(self, index: int, w: dict[str, Any], qkv: Tensor, at: Tensor) -> Tensor:
        spec, count = self.spec, len(at)
        kv, group, d = spec.num_kv_heads, spec.group, spec.head_dim
        q, k, v = qkv.view(count, -1, d).split([spec.num_heads, kv, kv], 1)
        if spec.qk_norm:
            q, k = self._norm(q, w["q_norm"]), self._norm(k, w["k_norm"])
        cos, sin = self.rope[at].unbind(1)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        self.kv[index, 0].index_copy_(1, at, k.transpose(0, 1))
        self.kv[index, 1].index_copy_(1, at, v.transpose(0, 1))
        keys, values = self.kv[index]
        q = q.view(count, kv, group, d).permute(1, 2, 0, 3).reshape(kv, group * count, d)
        score = torch.matmul(q, keys.mT).float().view(kv, group, count, -1) / math.sqrt(d)
        hidden = self.keys_at > at[:, None]
        if spec.windows[index]:
            hidden = hidden | (self.keys_at <= at[:, None] - spec.windows[index])
        share = score.masked_fill(hidden, -math.inf).softmax(-1).to(values.dtype)
        out = torch.matmul(share.view(kv, group * count, -1), values)
        return out.view(kv, group, count, d).permute(2, 0, 1, 3).reshape(count, -1)

    @torch.inference_mode()
    def prompt(self, ids: Sequence[int]) -> list[Tensor]:
        """Logits of a sequence from position 0 on, in chunks."""
        tokens = torch.tensor(list(ids), device=self.embed.device)
        positions = self.keys_at[: len(tokens)]
        return [self.forward(tokens[i : i + CHUNK], positions[i : i + CHUNK]) for i in range(0, len(tokens), CHUNK)]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split RoPE of x [T, heads, d] by cos, sin [T, d / 2]."""
    a, b = x.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class TorchGraph:
    name = "torch-graph"
    how = "CUDA graph of plain torch"
    checks_text = True
    ran = "this adapter has run on a CPU, its step uncaptured, and on one H200"

    @staticmethod
    def absent(setting: Setting) -> str:
        if setting.device.type == "cpu":
            return "graphs are captured on a GPU only"
        if setting.weights.spec.num_lanes > 1:
            return "it has one residual stream, not lanes"
        return ""

    def __init__(self, setting: Setting) -> None:
        self.version = f"torch {torch.__version__}, {self.how}"
        self.spec, self._decoder = self.open(setting)
        self._token = torch.zeros(1, dtype=torch.int64, device=setting.device)
        self._position = torch.zeros(1, dtype=torch.int64, device=setting.device)
        self._graph = self._capture() if setting.device.type == "cuda" else None

    def open(self, setting: Setting) -> tuple[ModelSpec, PlainDecoder]:
        """The model as it runs, and its decoder."""
        decoder = PlainDecoder(setting.weights, setting.device, setting.max_context)
        return setting.wide_spec, decoder

    @torch.inference_mode()
    def _step(self) -> None:
        logits = self._decoder.forward(self._token, self._position)
        self._token.copy_(logits.argmax(-1))
        self._position.add_(1)

    def _capture(self) -> torch.cuda.CUDAGraph | None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step()  # makes what libraries make at their first call, which no graph can hold
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog, a thread of its own, may ask for events meanwhile: no fault of this capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._step()
        return graph

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        out: np.ndarray = torch.cat(self._decoder.prompt(token_ids)).float().cpu().numpy()
        return out

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], count: int) -> Run:
        run = Run(time.perf_counter())
        self._token.copy_(self.first_token(prompt))
        self._position.fill_(len(prompt))
        run.add(int(self._token.item()))
        for _ in range(count - 1):
            if self._graph is not None:
                self._graph.replay()
            else:
                self._step()
            run.add(int(self._token.item()))
        return run

    def first_token(self, prompt: Sequence[int]) -> Tensor:
        """int64 [1]."""
        return self._decoder.prompt(prompt)[-1][-1:].argmax(-1)

    def memory_bytes(self) -> dict[str, int]:
        decoder = self._decoder
        return {"weights": decoder.weight_bytes, "kv_cache": decoder.kv.nbytes}

    def close(self) -> None:
        del self._graph, self._decoder
