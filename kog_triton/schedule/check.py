"""Refuse a schedule or a lowering that a kernel could not run: better an error here than a hung GPU.

every stage reads what an earlier one wrote, and every exchange has its writer and its readers
no buffer is rewritten while it can still be read
every row has one owner; owner() and block_units() agree
shared memory suffices and all blocks are resident
"""

from kog_triton.errors import ModelError
from kog_triton.model.spec import Reduce, ScaleGranularity
from kog_triton.schedule.cuda import CudaLowering
from kog_triton.schedule.lowering import PADDING, Partition
from kog_triton.schedule.schedule import Exchange, Op, Schedule, Stage, Timing

# What every block rebuilds the residual stream x from.
RESIDUALS = {"attention_out", "mlp_out"}


def check_schedule(schedule: Schedule) -> None:
    """ModelError naming the first stage or exchange that breaks a rule."""
    stages = [stage for _, stage in schedule.walk()]
    for kind, names in (
        ("stages", [s.name for s in stages]),
        ("exchanges", [e.name for e in schedule.exchanges]),
    ):
        if len(set(names)) < len(names):
            raise ModelError(f"two {kind} share the name {max(names, key=names.count)}")
    known = {s.name for s in stages}
    for exchange in schedule.exchanges:
        if exchange.producer not in known:
            raise ModelError(f"{exchange.name}: nothing named {exchange.producer} writes it")
        if not exchange.readers or not known.issuperset(exchange.readers):
            missing = [f" named {r}" for r in exchange.readers if r not in known] or [""]
            raise ModelError(f"{exchange.name}: nothing{missing[0]} reads it")
    for exchange in schedule.exchanges:
        if exchange.timing is Timing.DELAYED:
            _check_late_rotation(schedule, exchange)
        else:
            _check_rotation(schedule, exchange)
    _check_order(schedule, stages)


def _check_order(schedule: Schedule, stages: list[Stage]) -> None:
    """Every stage reads what an earlier one of the same token wrote, and x only once it is complete."""
    exchanges = {e.name: e for e in schedule.exchanges}
    written = {"token"}
    for stage in stages:
        if stage.op is Op.MATVEC and not stage.weights:
            raise ModelError(f"{stage.name}: a matrix stage without weights")
        if stage.scales is not ScaleGranularity.NONE or stage.experts:
            what = f"{stage.experts} experts" if stage.experts else f"scales by {stage.scales.name}"
            raise ModelError(f"{stage.name}: weights with {what} cannot be packed yet")
        if stage.source not in written:
            raise ModelError(f"{stage.name}: reads {stage.source}, which nothing has written yet")
        source = exchanges.get(stage.source)
        if source and stage.op is not Op.EMBED and stage.name not in source.readers:
            raise ModelError(
                f"{stage.name}: reads {stage.source}, which does not list it as a reader"
            )
        # x is joined from module outputs by the stages that list themselves as readers of them.
        owed = sorted(RESIDUALS & written)
        if (
            stage.source == "x"
            and owed
            and not any(stage.name in exchanges[n].readers for n in owed)
        ):
            raise ModelError(f"{stage.name}: reads x, but joins none of {', '.join(owed)} into it")
        written.add(stage.target)
        if stage.target in exchanges and exchanges[stage.target].producer != stage.name:
            raise ModelError(
                f"{stage.name}: writes {stage.target}, whose producer is another stage"
            )
    # The attention's output joins x within its layer; the MLP's may join it in the next one.
    place = {s.name: i for i, s in enumerate(stages)}
    for name in {"attention_out"} & set(exchanges):
        early = [r for r in exchanges[name].readers if place[r] < place[exchanges[name].producer]]
        if early:
            raise ModelError(
                f"{early[0]}: runs before {exchanges[name].producer} has written {name}"
            )


def _program(schedule: Schedule, layers: int) -> list[tuple[Stage, int]]:
    """What every block runs in order, with `layers` layers: (stage, iteration of that stage)."""
    out: list[tuple[Stage, int]] = []
    count: dict[str, int] = {}
    for _ in range(2):  # two tokens
        for segment in schedule.segments:
            for _ in range(segment.repeat if segment.repeat == 1 else layers):
                for stage in segment.stages:
                    n = count.get(stage.name, 0)
                    count[stage.name] = n + 1
                    out.append((stage, n))
    return out


def _reads(schedule: Schedule, stage: Stage) -> set[str]:
    return {
        e.name for e in schedule.exchanges if stage.name in e.readers and e.timing is Timing.NOW
    }


def _check_rotation(schedule: Schedule, exchange: Exchange) -> None:
    """A buffer of iteration t is rewritten at t + buffers: by then every reader must be known to be done.

    A reader is known to be done once the writer has read, whole, an exchange that the reader wrote to
    after its read. The module outputs are such exchanges: each block owns rows of them (check_partition
    refuses a block that does not) and gathers all of them into its copy of the residual stream.
    """
    program = _program(schedule, 2 * exchange.buffers + 1)
    for at, (writer, iteration) in enumerate(program):
        if writer.name != exchange.producer or iteration < exchange.buffers:
            continue
        last_write = next(
            i
            for i, (s, n) in enumerate(program)
            if s.name == exchange.producer and n == iteration - exchange.buffers
        )
        next_write = next(
            i
            for i, (s, n) in enumerate(program)
            if s.name == exchange.producer and n == iteration - exchange.buffers + 1
        )
        read_at = max(
            i
            for i in range(last_write, next_write + 1)
            if program[i][0].name in exchange.readers or i == last_write
        )
        proven = any(
            program[i][0].name == e.producer
            and any(e.name in _reads(schedule, s) for s, _ in program[i + 1 : at + 1])
            for e in schedule.exchanges
            if e.name in RESIDUALS and e.timing is Timing.NOW
            for i in range(read_at, at)
        )
        if not proven:
            raise ModelError(
                f"{exchange.name}: {exchange.buffers} buffers rotate, and {exchange.producer} could "
                f"rewrite one before {', '.join(exchange.readers)} has read it"
            )


def _check_late_rotation(schedule: Schedule, exchange: Exchange) -> None:
    """The same for outputs that other lanes read `delay` layers later, when lanes drift apart.

    Writes are numbered over tokens. Before its write n, lane A has read lane B's write n' - delay in every
    layer n' <= n that is DELAYED; B made that write after its own reads up to there. Nothing else is
    assumed to hold lanes together: prompt tokens have no head.
    """
    spec, layers = schedule.spec, schedule.spec.num_layers
    late = [schedule.reduce(exchange.producer, i) is Reduce.DELAYED for i in range(layers)]

    def last_read(n: int) -> int:
        """The latest write of another lane that a lane has read before its own write n; -1 if none."""
        return next((i - spec.delay for i in range(n, -1, -1) if late[i % layers]), -1)

    for n in range(exchange.buffers, 4 * layers):
        lost = n - exchange.buffers
        is_read = lost % layers + spec.delay < layers and late[(lost + spec.delay) % layers]
        if is_read and last_read(last_read(n)) < lost:
            raise ModelError(
                f"{exchange.name}: {exchange.buffers} buffers rotate, but {exchange.producer} of layer "
                f"{n % layers} could overwrite an output that another lane has not read"
            )


def check_partition(partition: Partition) -> None:
    """Every row has one owner, in every layer and rank; ModelError naming the stage if not."""
    schedule = partition.schedule
    for segment, stage in schedule.walk():
        if stage.op is not Op.MATVEC:
            continue
        if stage.name not in partition.tilings:
            raise ModelError(f"{stage.name}: no tiling")
        unit_rows = partition.tilings[stage.name].unit_rows
        if unit_rows % 2 and stage.outputs != stage.rows:
            raise ModelError(f"{stage.name}: a unit of {unit_rows} rows splits a (gate, up) pair")
        if stage.target in RESIDUALS and partition.num_units(stage) < partition.group_size(stage):
            raise ModelError(
                f"{stage.name}: {partition.num_units(stage)} units for {partition.group_size(stage)} blocks; "
                "a block without rows of the residual stream could be overtaken by the others"
            )
        for layer in range(segment.repeat):
            for rank in range(schedule.num_ranks):
                owned: list[int] = []
                for block in range(partition.group_size(stage)):
                    units = partition.block_units(stage, layer, block, rank)
                    if any(partition.owner(stage, layer, u, rank) != block for u in units):
                        raise ModelError(f"{stage.name}: owner and block {block} disagree")
                    rows = partition.block_rows(stage, layer, block, rank)
                    owned += [int(r) for r in rows if r != PADDING]
                if sorted(owned) != list(range(partition.num_rows(stage, rank))):
                    raise ModelError(
                        f"{stage.name}: rows without exactly one owner in layer {layer}"
                    )


def check_lowering(lowering: CudaLowering) -> None:
    """Everything that a launch needs: schedule, rows, shared memory, resident blocks."""
    gpu = lowering.gpu
    if lowering.num_blocks > gpu.num_sms:
        raise ModelError(f"{lowering.num_blocks} blocks are not resident on {gpu.num_sms} SMs")
    if lowering.num_blocks < lowering.schedule.shards_per_rank:
        raise ModelError(
            f"{lowering.num_blocks} blocks cannot hold {lowering.schedule.shards_per_rank} lanes"
        )
    check_schedule(lowering.schedule)
    check_partition(lowering)
    if lowering.ring_chunks < 2 * lowering.window_chunks:
        raise ModelError(
            f"shared memory of {gpu.name}: {lowering.fixed_shared_bytes} bytes beside the ring leave "
            f"{lowering.ring_chunks} chunks, {2 * lowering.window_chunks} are needed"
        )
