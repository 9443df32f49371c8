"""The host's side of one stage alone: logical tensors into the words that a stage reads, and back.

Tensors are those of STAGE_READS and STAGE_WRITES. A token at a time: the kernel knows no other way.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch

from kog_triton.backends.stage_tokens import Tensors, run_by_token
from kog_triton.backends.triton.host.memory import new_cache
from kog_triton.backends.triton.kernel.pointers import Pointers
from kog_triton.errors import RequestError
from kog_triton.model.spec import DType, Head, Reduce
from kog_triton.schedule import wire
from kog_triton.schedule.schedule import Op, Schedule
from kog_triton.schedule.triton import Tiles

Array = np.ndarray
Arrays = dict[str, Array]
# (pointers, x, out, layer, position, token, stage): one launch, to its end
Launch = Callable[[Pointers, torch.Tensor, torch.Tensor, int, int, int, str], None]


class StageRun:
    """One stage of one layer; `run` takes it through all tokens of a state."""

    def __init__(
        self, schedule: Schedule, tiles: Tiles, pointers: Pointers, stage: str, layer: int, launch: Launch
    ) -> None:
        known = [s.name for _, s in schedule.walk() if s.op is not Op.SAMPLE]
        if stage not in known:
            raise RequestError(f"the triton backend has no stage named {stage!r} in this model")
        self._schedule, self._tiles, self._pointers = schedule, tiles, pointers
        self._stage, self._layer, self._launch = stage, layer, launch
        self._dtype = DType.F16 if tiles.f16 else DType.BF16
        self._phase = (layer + 1) & 1
        self._device = pointers.words.device
        self._streams = torch.zeros(2, tiles.lanes, tiles.hidden_size, device=self._device)

    def run(self, state: Mapping[str, torch.Tensor]) -> Tensors:
        if self._stage == "attention":
            arrays = {name: t.detach().float().cpu().numpy() for name, t in state.items()}
            return _tensors(self._attention(arrays))
        runs: dict[str, Callable[[Arrays], Arrays]] = {
            "embed": self._embed,
            "qkv_proj": self._qkv_proj,
            "o_proj": partial(self._residual, "attention", "attention_out"),
            "gate_up_proj": self._gate_up_proj,
            "down_proj": partial(self._residual, "mlp", "mlp_out"),
            "mix": self._mix,
            "lm_head": self._lm_head,
        }
        run = runs[self._stage]
        return run_by_token(self._stage, state, lambda given: _tensors(run({n: t.numpy() for n, t in given.items()})))

    # ---- stages: arrays of one token ----

    def _embed(self, given: Arrays) -> Arrays:
        self._start()
        self._go(token=int(given["token_ids"]))
        return {"x": self._stream()}

    def _qkv_proj(self, given: Arrays) -> Arrays:
        t = self._tiles
        self._start(given["x"])
        self._go()
        y = self._pairs("qkv").reshape(t.lanes, -1, t.head_dim)
        return dict(zip("qkv", np.split(y, (t.heads, t.heads + t.kv_heads), 1), strict=True))

    def _residual(self, source: str, target: str, given: Arrays) -> Arrays:
        self._start(given["x"])
        self._give_pairs(source, given[source])
        if "delayed" in given:
            self._give_delayed(given["delayed"])
        self._go()
        return {target: self._sent(target), "x": self._stream()}

    def _gate_up_proj(self, given: Arrays) -> Arrays:
        self._start(given["x"])
        self._go()
        return {"mlp": self._pairs("mlp")}

    def _mix(self, given: Arrays) -> Arrays:
        t = self._tiles
        self._start(given["x"])
        self._go()
        if t.head_mode == Head.CONCAT:
            return {"y": self._planes(t.region("part")).reshape(1, -1)}
        return {"y": self._stream()[:1]}

    def _lm_head(self, given: Arrays) -> Arrays:
        t = self._tiles
        x = given["y"] if "y" in given else given["x"]
        if t.lanes > 1 and t.head_mode == Head.CONCAT:
            self._start()
            self._give_planes(t.region("part"), x.reshape(t.lanes, -1), 1)
        else:
            self._start(np.broadcast_to(x, (t.lanes, t.hidden_size)))
        self._go()
        return {"logits": self._pointers.logits[0].cpu().numpy()}

    # ---- attention: arrays of all tokens ----

    def _attention(self, state: Arrays) -> Arrays:
        t, rows = self._tiles, []
        qkv = np.concatenate([state[name].reshape(*state[name].shape[:2], -1) for name in "qkv"], 2)
        cached, count = state["keys"].shape[2], qkv.shape[1]
        if cached + count > t.max_context:
            raise RequestError(f"{cached + count} positions do not fit {t.max_context}")
        kv = new_cache(t, 1, self._device)
        home = kv[0, self._layer]  # [lanes, kv_heads, 2, positions, head_dim]
        for which, name in enumerate(("keys", "values")):
            home[:, :, which, :cached] = torch.from_numpy(state[name]).to(home)
        for i in range(count):
            self._start()
            self._give_pairs("qkv", qkv[:, i])
            self._go(position=cached + i, kv=kv)
            rows.append(self._pairs("attention"))
        held = home[:, :, :, : cached + count].float().cpu().numpy()
        return {"attention": np.stack(rows, 1), "keys": held[:, :, 0], "values": held[:, :, 1]}

    # ---- words ----

    def _start(self, x: Array | None = None) -> None:
        """An arena in which no word has come yet, and the stream x [lanes, hidden]."""
        t, words = self._tiles, self._pointers.words
        words.fill_(1 - self._phase)
        _, phase = self._buffer(self._layer)
        for name, stale in (("delayed", 1 - phase), ("part", 0), ("y", 0)):
            first, size = t.regions[name]
            words[first : first + size] = stale
        if x is not None:
            self._streams[0] = torch.from_numpy(_woven(x)).to(self._device)

    def _go(self, position: int = 0, token: int = 0, kv: torch.Tensor | None = None) -> None:
        p = self._pointers if kv is None else self._pointers._replace(kv=kv)
        x, out = self._streams
        self._launch(p, x, out, self._layer, position, token, self._stage)

    def _stream(self) -> Array:
        return _unwoven(self._streams[1].cpu().numpy())

    def _give(self, first: int, words: Array) -> None:
        flat = torch.from_numpy(words.reshape(-1).view(np.int32).copy())
        self._pointers.words[first : first + len(flat)] = flat.to(self._device)

    def _give_pairs(self, region: str, rows: Array) -> None:
        """[lanes, n] as pair words."""
        if self._fine(region):
            words = np.stack([wire.pack_fine(row, self._phase) for row in rows])
        else:
            words = np.stack([wire.pack_pair(row, self._phase, self._dtype) for row in rows])
        self._give(self._tiles.region(region), words)

    def _give_planes(self, first: int, rows: Array, phase: int) -> None:
        """[lanes, hidden] as float32 words in planes."""
        self._give(first, np.stack([wire.pack_f32(row, phase) for row in _woven(rows)]))

    def _give_delayed(self, rows: Array) -> None:
        """[lanes, hidden] as the outputs of `delay` layers ago."""
        first, phase = self._buffer(self._layer - self._tiles.delay)
        self._give_planes(first, rows, phase)

    def _buffer(self, run: int) -> tuple[int, int]:
        """Where the ring of late outputs holds this stage's of a layer run, and their phase."""
        t = self._tiles
        if not t.delayed_buffers:
            return t.region("delayed"), 0
        which = 1 if self._stage == "down_proj" else 0
        at = (which * t.delayed_buffers + run % t.delayed_buffers) * t.lanes * t.hidden_size
        return t.region("delayed") + at, (run // t.delayed_buffers + 1) & 1

    def _read(self, first: int, count: int) -> Array:
        return self._pointers.words[first : first + count].cpu().numpy().view(np.uint32)

    def _pairs(self, region: str) -> Array:
        words = self._read(*self._tiles.regions[region])
        fine = self._fine(region)
        values = wire.unpack_fine(words) if fine else wire.unpack_pair(words, self._dtype)
        return values.reshape(self._tiles.lanes, -1)

    def _fine(self, region: str) -> bool:
        return self._tiles.fine_pairs({"qkv": 0, "attention": 1, "mlp": 3}[region])

    def _planes(self, first: int) -> Array:
        t = self._tiles
        words = self._read(first, t.lanes * t.hidden_size)
        return _unwoven(wire.unpack_f32(words).reshape(t.lanes, -1))

    def _sent(self, region: str) -> Array:
        """What the lanes owe each other of a module's output: [lanes, hidden], as it left the matrix."""
        t = self._tiles
        if t.delay:
            return self._planes(self._buffer(self._layer)[0])
        if t.outputs_in_pairs:
            return wire.unpack_fine(self._read(*t.regions[region])).reshape(1, -1)
        out = self._planes(t.region(region))
        alone = t.lanes > 1 and self._schedule.reduce(self._stage, self._layer) is Reduce.OWN
        return out / np.float32(math.sqrt(t.lanes)) if alone else out


def _tensors(arrays: Arrays) -> Tensors:
    return {name: torch.tensor(array) for name, array in arrays.items()}


def _woven(rows: Array) -> Array:
    """[lanes, n]: even elements, then odd ones."""
    return np.ascontiguousarray(np.concatenate([rows[:, 0::2], rows[:, 1::2]], 1))


def _unwoven(rows: Array) -> Array:
    half = rows.shape[1] // 2
    return np.stack([rows[:, :half], rows[:, half:]], 2).reshape(rows.shape)
