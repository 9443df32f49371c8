"""How long a token takes on several GPUs, predicted from bytes and from what an exchange costs.

Two things run side by side: the stream of weights, and the chain of stages, in which each multiplies what the ring
holds and waits for the one before. The longer one sets the pace, and the other costs something as blocks drift:

    token  = (stream^BLEND + chain^BLEND)^(1 / BLEND)
    stream = bytes of a GPU / (SHARE x datasheet bandwidth)
    chain  = bytes / CONSUME + exchanges x LOCAL + those over GPUs x HOP x (GPUs - 1) + matrix stages x BARRIER

SHARE, CONSUME, LOCAL and BARRIER were measured alone; BLEND and HOP fit the prototypes best. Only prototypes on
H200s have been fitted, no kernel of this engine on more than one GPU: docs/SCALING.md has them, with what is left over.
"""

from kog_triton.model.spec import Head, Reduce
from kog_triton.schedule.schedule import Op, Schedule

SHARE = 0.954  # of the datasheet's bandwidth that bulk copies reach: 4.58 of 4.8 TB/s
CONSUME = 10.3e12  # bytes a second that the tensor cores take from the ring
LOCAL = 0.7e-6  # seconds of an exchange among the blocks of a GPU
BARRIER = 0.3e-6  # seconds of a block's barrier behind a matrix stage
BLEND, HOP = 2.2, 1.0e-6  # fitted; HOP: seconds more of a sum over GPUs for each further one
PROTOTYPE_GPU, MOST_FITTED, WORST_MISS = "h200", 4, 0.11
# Tokens a second of prototypes that stream and exchange as the engine does, by shape and GPUs (docs/SCALING.md).
PROTOTYPES = (
    ("llama-3.2-1b", 1, 1699),
    ("llama-3.2-1b", 2, 2869),
    ("llama-3.2-1b", 4, 3836),
    ("laneformer-2b", 1, 998),
    ("laneformer-2b", 2, 1829),
    ("laneformer-2b", 4, 3054),
)


def exchanges(schedule: Schedule) -> tuple[int, int]:
    """Of a token: all exchanges that a block waits for, and those among them that wait for other GPUs. Delayed sums
    wait for nobody."""
    spec = schedule.spec
    modules = spec.reduce_attention + spec.reduce_mlp
    tail = 1 + (
        spec.num_lanes > 1 and spec.head is not Head.VOCAB_PARALLEL
    )  # candidates; the lanes' mix
    over_gpus = sum(how is Reduce.NOW for how in modules) + tail
    # A layer's: queries, keys and values; attention; the FFN's inner vector; both modules' outputs.
    return 5 * spec.num_layers + tail, over_gpus if schedule.num_ranks > 1 else 0


def predict(
    schedule: Schedule,
    bytes_per_gpu: float,
    bandwidth: float,
    blend: float = BLEND,
    hop: float = HOP,
) -> float:
    """Seconds of a token at a short context. `bandwidth`: the GPU's by its datasheet, bytes a second."""
    count, over_gpus = exchanges(schedule)
    matrices = sum(g.repeat for g, stage in schedule.walk() if stage.op is Op.MATVEC)
    stream = bytes_per_gpu / (SHARE * bandwidth)
    waits = count * LOCAL + over_gpus * hop * (schedule.num_ranks - 1) + matrices * BARRIER
    chain = bytes_per_gpu / CONSUME + waits
    return float((stream**blend + chain**blend) ** (1 / blend))
