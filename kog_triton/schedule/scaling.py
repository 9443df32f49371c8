"""How long a token takes on several GPUs, predicted from bytes and from what stages and exchanges cost.

Two things run side by side: the stream of weights, and the chain of stages, in which each multiplies what the ring
holds and waits for the one before. The longer one sets the pace, and the other costs something as blocks drift:

    token  = (stream^BLEND + chain^BLEND)^(1 / BLEND)
    stream = bytes of a GPU / (KEPT x bandwidth), which is SHARE x the datasheet's
    chain  = bytes / CONSUME + exchanges x LOCAL + those over GPUs x HOP x (GPUs - 1) + matrix stages x BARRIER
             + layers x ATTENTION

All but BLEND and KEPT were measured alone (benchmarks/cuda-log.md#exposed, #numbers). These two fit the kernel on up
to FITTED_GPUS H200s, the shapes in FITTED, in all runs that are kept; the other rows of MEASURED test the formula:
docs/SCALING.md has what is left over.
"""

from typing import NamedTuple

from kog_triton.model.spec import Head, ModelSpec, Reduce
from kog_triton.schedule.schedule import Op, Schedule

SHARE = 0.954  # of the datasheet's bandwidth that bulk copies reach: 4.58 of 4.8 TB/s
CONSUME = 10.3e12  # bytes a second that the tensor cores take from the ring
LOCAL = 0.7e-6  # seconds of an exchange among the blocks of a GPU
BARRIER = 0.3e-6  # seconds of a block's barrier behind a matrix stage
ATTENTION = 2.4e-6  # seconds of a layer at a short context: from queries to merged results
HOP = 1.0e-6  # seconds that a block waits longer for a sum over GPUs, for each further one
# Fitted. KEPT: of the read bandwidth, for the L2 keeps some of a token's weights for the next.
BLEND, KEPT = 5.5, 1.02
FITTED, FITTED_GPUS = ("llama-3.2-1b", "qwen3-8b", "laneformer-2b"), 2
PROMPT, TOKENS = 32, 256
MEASURED_GPU, MOST_MEASURED, WORST_MISS = "h200", 4, 0.131


class Row(NamedTuple):
    """Tokens/s of a shape, PROMPT + TOKENS, and a GPU's read bandwidth of the run, TB/s: of several the lowest."""

    shape: str
    gpus: int
    rate: float
    bandwidth: float


# benchmarks/results/h200/figures.txt.xz, and of Qwen3-14B 2026-11-24-two-gpus-records.jsonl.xz.
MEASURED = (
    Row("llama-3.2-1b", 1, 1754.7, 4.362),
    Row("llama-3.2-1b", 2, 3181.4, 4.352),
    Row("qwen3-8b", 1, 294.4, 4.433),
    Row("qwen3-8b", 2, 579.5, 4.272),
    Row("laneformer-2b", 1, 1019.4, 4.371),
    Row("laneformer-2b", 2, 1926.0, 4.371),
    Row("qwen3-0.6b", 1, 2889.5, 4.368),
    Row("qwen3-0.6b", 2, 3096.1, 4.358),
    Row("llama-2-7b", 1, 333.4, 4.278),
    Row("llama-2-7b", 2, 639.8, 4.278),
    Row("qwen3-14b", 2, 300.7, 4.556),
    Row("qwen3-32b", 1, 68.7, 4.471),
    Row("qwen3-32b", 2, 132.1, 4.460),
    Row("llama-3.3-70b", 1, 31.9, 4.409),
    Row("llama-3.3-70b", 2, 63.1, 4.294),
    Row("mistral-large-123b", 2, 33.4, 4.331),
    Row("llama-3.2-1b", 4, 3834.4, 4.255),
    Row("laneformer-2b", 4, 3220.9, 4.255),
    Row("qwen3-8b", 4, 978.7, 4.255),
    Row("llama-3.3-70b", 4, 120.7, 4.255),
)


def exchanges(schedule: Schedule) -> tuple[int, int]:
    """Of a token: all exchanges that a block waits for, and those among them that wait for other GPUs. Delayed sums
    wait for nobody."""
    spec = schedule.spec
    modules = spec.reduce_attention + spec.reduce_mlp
    tail = 1 + (spec.num_lanes > 1 and spec.head is not Head.VOCAB_PARALLEL)  # candidates; the lanes' mix
    over_gpus = sum(how is Reduce.NOW for how in modules) + tail
    # A layer's: queries, keys and values; attention; the FFN's inner vector; both modules' outputs.
    return 5 * spec.num_layers + tail, over_gpus if schedule.num_ranks > 1 else 0


def predict(
    schedule: Schedule, bytes_per_gpu: float, bandwidth: float, blend: float = BLEND, kept: float = KEPT
) -> float:
    """Seconds of a token at a short context. `bandwidth`: the GPU's by its datasheet, bytes a second."""
    count, over_gpus = exchanges(schedule)
    matrices = sum(g.repeat for g, stage in schedule.walk() if stage.op is Op.MATVEC)
    stream = bytes_per_gpu / (kept * SHARE * bandwidth)
    waits = count * LOCAL + over_gpus * HOP * (schedule.num_ranks - 1) + matrices * BARRIER
    chain = bytes_per_gpu / CONSUME + waits + schedule.spec.num_layers * ATTENTION
    return float((stream**blend + chain**blend) ** (1 / blend))


def predicted_rate(schedule: Schedule, bandwidth: float) -> float:
    """Tokens/s at a short context, of GPUs with this bandwidth by their datasheet."""
    return 1 / predict(schedule, schedule.spec.bytes_per_token / schedule.num_ranks, bandwidth)


def said_of(row: Row, schedule: Schedule) -> float:
    """Tokens/s by the formula, of what a row measured."""
    size = schedule.spec.decode_bytes(PROMPT, TOKENS) / row.gpus
    return 1 / predict(schedule, size, row.bandwidth * 1e12 / SHARE)


def digits(rate: float) -> int:
    """How many digits a rate shows behind the point: measured, or by the formula beside it."""
    return 0 if rate > 100 else 1


def measured_like(spec: ModelSpec, gpus: int) -> Row | None:
    """What was measured of the same shape on as many GPUs, in whatever 16-bit type."""
    from kog_triton.model.shapes import named_shape

    for row in MEASURED:
        if row.gpus == gpus and named_shape(row.shape).replace(dtype=spec.dtype) == spec:
            return row
    return None
