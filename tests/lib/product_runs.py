"""prompt.cu's products of a model's matrices on a CPU, by the kernels that leave parts (short_pass.py)."""

import torch

from kog_triton.backends.cuda.layout.header import bias_places
from kog_triton.backends.cuda.layout.prompt import ARRANGE_THREADS, ArrangeCall, ProductCall, ring_slot_steps
from kog_triton.backends.cuda.layout.short_pass import Cut
from kog_triton.backends.cuda.products import group_tables
from tests.lib.cuda_walk import INCLUDE
from tests.lib.short_pass import product, run

BLOCKS = 3


def multiplied(lowering, memory, kernel, stage, layer, x, include=INCLUDE, seed=0):
    """Sums [shards, tokens, rows] of float32: x [shards, tokens, cols] of the model's type, at most a tile's tokens,
    times a stage's matrices."""
    parts, weights = lowering.tilings[stage.name].k_parts, lowering.weights[stage.name]
    slab_shift, pack_shift = parts.bit_length() - 1, weights.pack.bit_length() - 1
    table, at = group_tables(lowering, {stage.name: stage})
    places, rows_of_layer = bias_places(lowering)
    k_steps = lowering.padded_k(stage) // (32 * kernel.stage_blocks)
    cut = Cut(-(-stage.rows // kernel.rows), k_steps, BLOCKS)
    dtype, sums = lowering.schedule.spec.dtype, []
    for shard, of_shard in enumerate(x.contiguous()):
        count, padded = len(of_shard), kernel.tokens
        arranged = torch.zeros(padded * lowering.padded_k(stage) * 2, dtype=torch.uint8)
        steps = lowering.steps(stage)
        arrange = ArrangeCall(
            of_shard.data_ptr(), arranged.data_ptr(), count, padded, stage.cols, slab_shift, steps, pack_shift
        )
        blocks = -(-padded * parts * steps // ARRANGE_THREADS)
        run(product(kernel, dtype, "kog_arrange"), arrange, blocks)
        out = torch.full((cut.parts, kernel.tokens, kernel.rows), torch.nan)
        row_scales = layer * rows_of_layer + places[stage.name][1] + shard * stage.rows
        call = ProductCall(
            memory.weights.data_ptr(),
            table[at[stage.name, layer][shard] :].ctypes.data,
            arranged.data_ptr(),
            None,
            out.data_ptr(),
            None,
            memory.biases.data_ptr() + 4 * row_scales,
            count,
            padded,
            stage.rows,
            cut.tiles,
            1,
            cut.steps,
            0,
            slab_shift,
            *ring_slot_steps(lowering),
        )
        run(product(kernel, dtype, include=include), call, BLOCKS, seed)
        tiles = [out[first : first + n].sum(0)[:count] for first, n in cut.table()]
        sums.append(torch.cat(tiles, 1)[:, : stage.rows])
    return torch.stack(sums)
