"""run_stage: one stage of the kernel on logical tensors (STAGE_READS, STAGE_WRITES).

A token at a time: what the stage reads is laid out as the kernel's own words, cache and vectors, the kernel
`kog_stage` (include/kog/stage.h) runs it, and what it wrote is read back. Inputs that travel in words are
rounded as they would be on their way.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from kog_triton.backends.cuda.layout.layout import Layout
from kog_triton.backends.cuda.layout.protocol import StageCall, StageId
from kog_triton.backends.cuda.memory import Memory
from kog_triton.backends.request_words import encode_logits
from kog_triton.backends.stage_tokens import run_by_token
from kog_triton.errors import RequestError
from kog_triton.model.spec import Head, Reduce
from kog_triton.schedule import wire

Tensor = torch.Tensor
STAGES = tuple(stage.name.lower() for stage in StageId)
PHASE = 1  # of the words of an even iteration

Before = Callable[[], None]
Launch = Callable[[StageCall, Before], float]


class StageRunner:
    """Runs stages in `memory`, which is its own.

    launch  runs the kernel on a StageCall behind what `before` queues, waits for its end and raises
            what went wrong; its seconds
    """

    def __init__(self, layout: Layout, memory: Memory, launch: Launch, wait_ns: int) -> None:
        self.layout, self.memory, self._launch = layout, memory, launch
        self._limit = wait_ns
        self._before: Before = lambda: None
        self.seconds: list[float] = []  # of every launch of the last `run`
        self.schedule, self.spec = layout.lowering.schedule, layout.lowering.schedule.spec
        self.lanes = self.schedule.num_shards
        shape = (self.lanes, memory.gains.shape[-1])
        self.x = torch.zeros(shape, device=memory.gains.device)
        self.out = torch.zeros_like(self.x)
        self.logits = torch.zeros(1, self.spec.vocab_size, device=self.x.device)
        memory.write_request(0, encode_logits(1), [0], 0)

    def run(self, stage: str, layer: int, state: Mapping[str, Any], before: Before = lambda: None) -> dict[str, Tensor]:
        """RequestError if the model has no such stage. `before` is called before every launch."""
        self._before, self.seconds = before, []
        known = {s.name for _, s in self.schedule.walk()} & set(STAGES)
        if stage not in known:
            raise RequestError(f"the kernel has no stage named {stage!r} in this model")
        if stage == "attention":
            return self._attention(layer, {name: value.cpu().float() for name, value in state.items()})
        return run_by_token(stage, state, partial(self._column, stage, layer))

    def _column(self, stage: str, layer: int, v: dict[str, Tensor]) -> dict[str, Tensor]:
        """One token of any stage but attention: tensors without their token axis, as those it gives."""
        words = self._no_words()
        token = int(v["token_ids"]) if stage == "embed" else 0
        if "attention" in v:
            self._put_pairs(words, "attention", v["attention"])
        if "mlp" in v:
            self._put_pairs(words, "mlp", v["mlp"])
        if "delayed" in v:
            slot, phase = self._delayed_slot(stage, self.spec.delay)
            self._put_floats(words, self._module(stage) + "_delayed", slot, v["delayed"], phase)
        if "x" in v:
            self._put_x(v["x"])
        scale = 1.0
        if "y" in v and self.spec.head is Head.CONCAT:
            self._put_floats(words, "part", 0, v["y"].reshape(self.lanes, -1), PHASE)
        elif "y" in v:
            x, scale = self._head_input(v["y"])
            self._put_x(x)
        words = self._call(stage, layer, words, token=token)
        if stage == "embed":
            return {"x": self._get_x()}
        if stage == "qkv_proj":
            d = self.spec.head_dim
            qkv = self._get_pairs(words, "qkv", self.schedule.stage("qkv_proj").rows)
            counts = (self.spec.num_heads // self.lanes, *[self.spec.lane_kv_heads] * 2)
            return dict(zip("qkv", qkv.unflatten(1, (-1, d)).split(counts, 1), strict=True))
        if stage == "gate_up_proj":
            return {"mlp": self._get_pairs(words, "mlp", self.schedule.stage("gate_up_proj").outputs)}
        if stage in ("o_proj", "down_proj"):
            return {self._module(stage): self._output(words, stage, layer), "x": self._get_x()}
        if stage == "mix" and self.spec.head is Head.CONCAT:
            return {"y": self._get_floats(words, "part").reshape(1, -1)}
        if stage == "mix":
            return {"y": self._get_x()[:1]}
        return {"logits": self.logits[0].cpu() * scale}

    def _attention(self, layer: int, v: dict[str, Tensor]) -> dict[str, Tensor]:
        length, count = v["keys"].shape[2], v["q"].shape[1]
        cache = self.memory.cache[0, layer]  # [lanes, kv_heads, 2, positions, d]
        for i, name in enumerate(("keys", "values")):
            cache[:, :, i, :length, : v[name].shape[-1]] = v[name].to(cache.device, cache.dtype)
        parts = []
        for t in range(count):
            words = self._no_words()
            qkv = torch.cat([v[name][:, t].flatten(1) for name in "qkv"], 1)
            self._put_pairs(words, "qkv", qkv)
            words = self._call("attention", layer, words, position=length + t)
            width = self.schedule.stage("attention").outputs
            parts.append(self._get_pairs(words, "attention", width))
        keys, values = cache[:, :, :, : length + count, : self.spec.head_dim].float().cpu().unbind(2)
        return {"attention": torch.stack(parts, 1), "keys": keys, "values": values}

    def _call(self, stage: str, layer: int, words: np.ndarray, token: int = 0, position: int = 0) -> np.ndarray:
        """Run the kernel on the words given; the words it leaves."""
        m = self.memory
        m.words.copy_(torch.from_numpy(words.view(np.int32)))
        m.error.zero_()
        pointers = m.pointers([0], self._limit, 1, logits=self.logits)
        which = STAGES.index(stage)
        call = StageCall(pointers, self.x.data_ptr(), self.out.data_ptr(), which, layer, token, position)
        self.seconds.append(self._launch(call, self._before))
        return m.words.cpu().numpy().view(np.uint32)

    # ---- vectors ----

    def _put_x(self, x: Tensor) -> None:
        self.x[:, : self.spec.hidden_size] = x.to(self.x.device)

    def _get_x(self) -> Tensor:
        return self.out[:, : self.spec.hidden_size].cpu().clone()

    def _head_input(self, y: Tensor) -> tuple[Tensor, float]:
        """The x that the head's own norm makes y of, up to a factor; y itself where it has no norm."""
        if self.spec.head is Head.MEAN:
            return y, 1.0
        x = y / self.memory.gains[-1].view(-1)[: self.spec.hidden_size].cpu()
        return x, float((x.square().mean() + self.spec.norm_eps).sqrt())

    # ---- words ----

    def _no_words(self) -> np.ndarray:
        return np.zeros(self.layout.total_words, np.uint32)

    def _rows(self, words: np.ndarray, name: str, width: int, slot: int = 0) -> np.ndarray:
        """Words of one exchange, a row a lane."""
        region = self.layout.regions[name]
        first = region.offset + slot * self.lanes * region.stride
        rows = words[first : first + self.lanes * region.stride]
        return rows.reshape(self.lanes, region.stride)[:, :width]

    def _put_pairs(self, words: np.ndarray, name: str, values: Tensor) -> None:
        even = torch.nn.functional.pad(values, (0, values.shape[1] % 2)).numpy()
        rows = self._rows(words, name, even.shape[1] // 2)
        for row, lane in zip(rows, even, strict=True):
            row[:] = wire.pack_pair(lane, PHASE, self.spec.dtype)

    def _get_pairs(self, words: np.ndarray, name: str, width: int) -> Tensor:
        rows = self._rows(words, name, -(-width // 2))
        lanes = [wire.unpack_pair(row, self.spec.dtype)[:width] for row in rows]
        return torch.from_numpy(np.stack(lanes))

    def _put_floats(self, words: np.ndarray, name: str, slot: int, values: Tensor, phase: int) -> None:
        rows = self._rows(words, name, values.shape[1], slot)
        rows[:] = wire.pack_f32(values.numpy(), phase)

    def _get_floats(self, words: np.ndarray, name: str, slot: int = 0) -> Tensor:
        rows = self._rows(words, name, self.spec.hidden_size, slot)
        return torch.from_numpy(wire.unpack_f32(np.ascontiguousarray(rows)))

    # ---- modules ----

    def _module(self, stage: str) -> str:
        return "attention_out" if stage == "o_proj" else "mlp_out"

    def _delayed_slot(self, stage: str, iteration: int) -> tuple[int, int]:
        """Slot and phase of what a module sent in an iteration; the stage itself runs 2 * delay."""
        buffers = self.layout.regions[self._module(stage) + "_delayed"].buffers
        return iteration % buffers, (iteration // buffers + 1) & 1

    def _output(self, words: np.ndarray, stage: str, layer: int) -> Tensor:
        """A module's output as its rows made it, before it joins the streams."""
        name, how = self._module(stage), self.schedule.reduce(stage, layer)
        if self.layout.regions[name + "_delayed"].stride:
            return self._get_floats(words, name + "_delayed", self._delayed_slot(stage, 2 * self.spec.delay)[0])
        if how is Reduce.NOW and self.lanes > 1:
            return self._get_floats(words, name + "_now")
        scale = self.lanes**0.5 if how is Reduce.OWN else 1.0
        return self._get_floats(words, name) / scale
