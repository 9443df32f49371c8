"""Canonical weights to shards: what each group of blocks multiplies with.

Works on anything with numpy's or torch's reshape, so that packing may run on the GPU.
"""

from typing import Any

from kog_triton.schedule.schedule import Axis, Op, Schedule, Stage


def shard_matrix(schedule: Schedule, stage: Stage, tensor: Any) -> Any:
    """A canonical matrix [lanes, rows, cols] (lm_head and embed: [rows, cols]) as [shards, rows, cols].

    A Laneformer's lanes are its shards; a plain model's tensor is cut along `stage.cut`, a KV head given to all
    shards that share it, and the last shard padded with zeros. The head is not cut here: `Schedule.head_rows`
    says which rows a rank scores.
    """
    if tensor.ndim == 2:
        return tensor[None]
    lanes, rows, cols = tensor.shape
    shards = schedule.num_shards
    if lanes == shards:
        return tensor
    if stage.cut is Axis.ROWS:
        tensor = _spread(schedule, stage, tensor)
        return tensor.reshape(shards, tensor.shape[1] // shards, cols)
    tensor = _spread(schedule, stage, tensor.swapaxes(1, 2)).swapaxes(1, 2)
    return tensor.reshape(rows, shards, tensor.shape[2] // shards).swapaxes(0, 1)


def shard_bias(schedule: Schedule, stage: Stage, tensor: Any) -> Any:
    """A canonical bias [lanes, rows] as [shards, rows].

    Where a plain model's matrix is cut along K the partial outputs are added, so one shard alone
    carries the bias.
    """
    lanes, rows = tensor.shape
    shards = schedule.num_shards
    if lanes == shards:
        return tensor
    if stage.cut is Axis.ROWS:
        tensor = _spread(schedule, stage, tensor)
        return tensor.reshape(shards, tensor.shape[1] // shards)
    out = tensor.reshape(1, rows).repeat(shards, 0) if _is_numpy(tensor) else tensor.repeat(shards, 1)
    out[1:] = 0
    return out


def shard_row_scales(schedule: Schedule, stage: Stage, tensor: Any) -> Any:
    """What multiplies rows' sums, [lanes, rows], as [shards, rows]: of a matrix that is cut along K each shard's."""
    if len(tensor) == schedule.num_shards or stage.cut is Axis.ROWS:
        return shard_bias(schedule, stage, tensor)
    return tensor.repeat(schedule.num_shards, 1)


def _spread(schedule: Schedule, stage: Stage, tensor: Any) -> Any:
    """[1, n, ...] with as much of the second axis for each shard: KV heads as often as they are held, zeros behind an
    FFN's outputs. A view where nothing is to be added."""
    spec, count = schedule.spec, tensor.shape[1]
    if stage.name == "qkv_proj" and count < schedule.shard_heads * schedule.num_shards * spec.head_dim:
        if schedule.kv_copies == 1:
            return tensor
        heads = [head for head in range(spec.num_kv_heads) for _ in range(schedule.kv_copies)]
        return tensor[:, [head * spec.head_dim + i for head in heads for i in range(spec.head_dim)]]
    wanted = schedule.shard_ffn * schedule.num_shards
    if stage.name not in ("gate_up_proj", "down_proj") or count == wanted:
        return tensor
    out = tensor[:, [min(i, count - 1) for i in range(wanted)]]
    out[:, count:] = 0
    return out


def canonical(stage: Stage, name: str, layer: int) -> str:
    """The canonical name of a stage's operand; those of layers carry the layer's number."""
    outside = stage.op is Op.EMBED or name in ("norm", "embed", "lm_head")
    return name if outside else f"layers.{layer}.{name}"


def _is_numpy(tensor: Any) -> bool:
    return type(tensor).__module__ == "numpy"
