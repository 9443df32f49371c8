"""A pass of short prompts, several at once, from the weight arena to the streams of their last tokens (prompt.cu,
short_pass.cu): nine launches a layer, nothing between them on the host. On several GPUs each runs a pass of its own
shards, eleven launches a layer: what crosses GPUs is stored and waited for by the kernels themselves."""

import math
from collections.abc import Callable, Mapping, Sequence
from ctypes import Structure
from typing import NamedTuple

import numpy as np
import torch

from kog_triton.backends.cuda.driver import Kernel
from kog_triton.backends.cuda.jit import compile_cubin
from kog_triton.backends.cuda.layout.prompt import ProductCall, ProductKernel, ring_slot_steps
from kog_triton.backends.cuda.layout.short_pass import (
    ATTEND_THREADS,
    GATE_THREADS,
    HEAD_THREADS,
    JOIN_THREADS,
    PLACE_THREADS,
    QUERIES,
    ROWS,
    SHORT_KERNELS,
    AttendCall,
    Cache,
    Exchange,
    GateCall,
    HeadsCall,
    JoinCall,
    MeetCall,
    Order,
    Parts,
    Queue,
    Ready,
    SendCall,
    cut_of,
)
from kog_triton.backends.cuda.prompt_texts import functions
from kog_triton.backends.cuda.staging import Staging
from kog_triton.backends.prefill.library import on_device
from kog_triton.backends.prefill.upload import upload
from kog_triton.backends.prefill.weights import LayerWeights
from kog_triton.model.spec import DType
from kog_triton.schedule.cuda import CudaLowering
from kog_triton.schedule.lowering import layer_matrices

Tensor = torch.Tensor
MOST_TOKENS = SHORT_KERNELS[-1].tokens
LOG2_E = 1.0 / math.log(2.0)


class ShortPrompt(NamedTuple):
    """A fresh prompt's tokens, and the slot that takes its keys, values and last streams."""

    tokens: Sequence[int]
    slot: int


class Link(NamedTuple):
    """One rank's memory that all ranks write into (`send` in short_pass.h).

    sums     float32 [2, ranks, MOST_TOKENS, hidden]
    arrived  int64 [ranks, MOST_TOKENS]: the number of the last exchange whose sums are there
    gave_up  int64 [2]: see Meet in short_pass.h
    """

    sums: Tensor
    arrived: Tensor
    gave_up: Tensor


def link_shapes(ranks: int, hidden: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
    shapes: list[tuple[tuple[int, ...], torch.dtype]] = [
        ((2, ranks, MOST_TOKENS, hidden), torch.float32),
        ((ranks, MOST_TOKENS), torch.int64),
        ((2,), torch.int64),
    ]
    return shapes


def links_of(devices: Sequence[torch.device], hidden: int) -> list[Link]:
    """A rank's on each device."""
    shapes = link_shapes(len(devices), hidden)
    return [Link(*(torch.zeros(shape, dtype=dtype, device=d) for shape, dtype in shapes)) for d in devices]


class Linked(NamedTuple):
    """Whose pass it is: which rank's, all ranks' memory, nanoseconds of a wait."""

    rank: int
    links: Sequence[Link]
    limit_ns: int


class PassKernels:
    """`Ready` on one GPU; `keep` gets every kernel that is opened."""

    def __init__(self, dtype: DType, arch: str, device: torch.device, keep: Callable[[Kernel], object]) -> None:
        self._functions, self._arch, self._device, self._keep = functions(dtype), arch, device, keep
        self._opened: dict[tuple[ProductKernel, str], Kernel] = {}

    def __call__(self, kernel: ProductKernel, name: str, blocks: int, threads: int, call: Structure) -> Queue:
        if (kernel, name) not in self._opened:
            header, source, shared = self._functions[kernel, name]
            cubin = compile_cubin(header, source, self._arch)
            with on_device(self._device):  # whose context takes modules
                opened = Kernel(cubin, name, shared, self._device)
            self._keep(opened)
            self._opened[kernel, name] = opened
        return self._opened[kernel, name].queued(blocks, threads, call)


def workspace(lowering: CudaLowering, slots: int, most: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and types of what a pass holds beside the model; `in_...` is a stage's x. Arguments: see ShortPass."""
    schedule, spec = lowering.schedule, lowering.schedule.spread
    half = {DType.BF16: torch.bfloat16, DType.F16: torch.float16}[lowering.schedule.spec.dtype]
    stages = layer_matrices(lowering.schedule)
    cuts = [cut_of(s.rows, lowering.padded_k(s), most) for s in stages]
    tiles = MOST_TOKENS // QUERIES + most_prompts(slots)
    return {
        "words": ((MOST_TOKENS + tiles + 1, 4), torch.int32),  # the last: the pass's number
        "x": ((MOST_TOKENS, spec.hidden_size), torch.float32),
        "q": ((MOST_TOKENS, schedule.shard_heads * spec.head_dim), half),
        # Zeros where K is padded: nobody writes there.
        **{f"in_{s.name}": ((MOST_TOKENS * lowering.padded_k(s),), half) for s in stages},
        "parts": ((max(cut.parts for cut in cuts) * MOST_TOKENS * ROWS,), torch.float32),
    }


def workspace_bytes(lowering: CudaLowering, slots: int, most: int) -> int:
    """Of one GPU."""
    shapes, ranks = [*workspace(lowering, slots, most).values()], lowering.schedule.num_ranks
    if ranks > 1:
        shapes += link_shapes(ranks, lowering.schedule.spec.hidden_size)
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)


def most_prompts(slots: int) -> int:
    """Of one pass."""
    return min(slots, MOST_TOKENS)


class ShortPass:
    """Passes of one model on one GPU, or of a rank's shards on its own.

    groups  the address of a stage's groups in a layer (products.group_tables)
    cache   [slots, layers, 1, K, 2, positions, d]
    streams float32 [slots, 1, hidden]: get those of each prompt's last token behind all layers
    ready   makes a launch ready
    most    multiprocessors
    linked  on several GPUs
    """

    def __init__(
        self,
        lowering: CudaLowering,
        arena: Tensor,
        groups: Callable[[str, int], int],
        embed: Tensor,
        rope: Tensor,
        layers: Sequence[LayerWeights],
        cache: Tensor,
        streams: Tensor,
        ready: Ready,
        most: int,
        linked: Linked | None = None,
    ) -> None:
        self._lowering, self._spec, self._arena = lowering, lowering.schedule.spread, arena
        self._heads_here = lowering.schedule.shard_heads, lowering.schedule.shard_kv_heads
        self.device, self.linked = arena.device, linked
        self._groups, self._embed, self._rope, self._layers = groups, embed, rope, layers
        self._cache, self._streams, self._make_ready = cache, streams, ready
        self._stages = {s.name: s for s in layer_matrices(lowering.schedule)}
        self._cuts = {n: cut_of(s.rows, lowering.padded_k(s), most) for n, s in self._stages.items()}
        device = arena.device
        tables = {n: torch.from_numpy(cut.table()).to(device) for n, cut in self._cuts.items()}
        self._tables: Mapping[str, Tensor] = tables
        self._most_prompts = most_prompts(len(cache))
        shapes = workspace(lowering, len(cache), most).items()
        held = {name: torch.zeros(shape, dtype=dtype, device=device) for name, (shape, dtype) in shapes}
        self._words, self._x, self._q = held["words"], held["x"], held["q"]
        self._parts = held["parts"]
        self._in: Mapping[str, Tensor] = {n: held[f"in_{n}"] for n in self._stages}
        self._staging = Staging(ready, device)
        self._launches = {k: self._ready_launches(k) for k in SHORT_KERNELS}

    def kernel_for(self, count: int) -> ProductKernel | None:
        """Of a pass of so many tokens; None: they are too many."""
        return next((k for k in SHORT_KERNELS if k.tokens >= count), None)

    def fits(self, prompts: Sequence[ShortPrompt]) -> bool:
        """In one pass."""
        total = sum(len(p.tokens) for p in prompts)
        return total <= MOST_TOKENS and len(prompts) <= self._most_prompts

    def write(self, prompts: Sequence[ShortPrompt], number: int = 0, stream: int | None = None) -> ProductKernel:
        """Lay prompts out for a pass, in the order of the current stream; the pass that is to run them.

        number  of the pass, on several GPUs: above 0, larger than that of the pass before, the same on all
        stream  the current one, if the pass before has ended; None: if it may not have
        """
        kernel = self.kernel_for(sum(len(p.tokens) for p in prompts))
        assert kernel is not None and self.fits(prompts)
        words = np.zeros((len(self._words), 4), np.int32)
        words[:MOST_TOKENS, 0] = -1
        at, tile = 0, MOST_TOKENS
        for tokens, slot in prompts:
            end = at + len(tokens)
            words[at:end, 0], words[at:end, 1] = tokens, range(len(tokens))
            words[at:end, 2], words[end - 1, 3] = slot, 1
            for first in range(0, len(tokens), QUERIES):
                words[tile] = at + first, min(QUERIES, len(tokens) - first), first, slot
                tile += 1
            at = end
        words[-1, 0] = number
        flat, home = words.reshape(-1), self._words.data_ptr()
        pieces = [
            (home + 4 * first, flat[first : first + PLACE_THREADS]) for first in range(0, flat.size, PLACE_THREADS)
        ]
        if stream is None or not self._staging.put(pieces, stream):
            upload(torch.from_numpy(words), self._words)
        return kernel

    def queue(self, kernel: ProductKernel, stream: int) -> None:
        """Put all launches of a pass on a stream."""
        for launch in self._launches[kernel]:
            launch(stream)

    def launches(self, kernel: ProductKernel) -> Sequence[Queue]:
        """Of a pass, in order: what puts each on a stream."""
        return self._launches[kernel]

    def gave_up(self, told: int) -> tuple[int, str]:
        """The number of the last pass behind `told` that has waited in vain on this GPU, and for what; waits for the
        GPU. `told` and "" if all came."""
        if self.linked is None:
            return told, ""
        rank, links, _ = self.linked
        last, where = links[rank].gave_up.tolist()
        number, index = divmod(last - 1, self._exchanges)
        if number <= told:
            return told, ""
        stage = ("attention_out", "mlp_out")[index % 2]
        return number, (
            f"a wait of a prompt's pass expired: rank {rank}, layer {index // 2}, {stage}, token {where >> 8}: "
            f"nothing from rank {where & 0xFF}"
        )

    @property
    def nbytes(self) -> int:
        held = (self._words, self._x, self._q, self._parts, *self._in.values(), *self._tables.values())
        own = () if self.linked is None else self.linked.links[self.linked.rank]
        return sum(t.nbytes for t in (*held, *own))

    # ---- launches ----

    def _ready_launches(self, kernel: ProductKernel) -> list[Queue]:
        out = [self._join(kernel, 0, "", self._layers[0].attention_norm, "qkv_proj")]
        for index, layer in enumerate(self._layers):
            last = index == len(self._layers) - 1
            after = None if last else self._layers[index + 1].attention_norm
            out += [
                self._product(kernel, index, "qkv_proj"),
                self._heads(kernel, index),
                self._attend(kernel, index),
                self._product(kernel, index, "o_proj"),
                *self._joins(kernel, index, "o_proj", layer.mlp_norm, "gate_up_proj"),
                self._product(kernel, index, "gate_up_proj"),
                self._gate(kernel, index),
                self._product(kernel, index, "down_proj"),
                *self._joins(kernel, index, "down_proj", after, "qkv_proj"),
            ]
        return out

    @property
    def _exchanges(self) -> int:
        """Of a pass."""
        return 2 * len(self._layers)

    def _joins(self, kernel: ProductKernel, layer: int, name: str, gain: Tensor | None, to: str) -> list[Queue]:
        """Behind a module: its sums to x, those of all ranks where there are several."""
        if self.linked is None:
            return [self._join(kernel, layer, name, gain, to)]
        rank, links, limit = self.linked
        index = 2 * layer + (name == "down_proj")
        place, own = index % 2, links[rank]
        number = Exchange(self._words[-1].data_ptr(), index, self._exchanges, len(links))
        send = SendCall(
            tokens=self._words.data_ptr(),
            parts=self._parts_of(name),
            bias=self._bias_of(layer, name),
            exchange=number,
            hidden=self._spec.hidden_size,
        )
        for other, link in enumerate(links):
            send.sums[other] = link.sums[place, rank].data_ptr()
            send.arrived[other] = link.arrived[rank].data_ptr()
        meet = MeetCall(
            self._join_call(layer, name, gain, to),
            own.sums[place].data_ptr(),
            own.arrived.data_ptr(),
            own.gave_up.data_ptr(),
            limit,
            number,
        )
        return [
            self._make_ready(kernel, "kog_send", kernel.tokens, JOIN_THREADS, send),
            self._make_ready(kernel, "kog_meet", kernel.tokens, JOIN_THREADS, meet),
        ]

    def _product(self, kernel: ProductKernel, layer: int, name: str) -> Queue:
        lo, stage, cut = self._lowering, self._stages[name], self._cuts[name]
        call = ProductCall(
            self._arena.data_ptr(),
            self._groups(name, layer),
            self._in[name].data_ptr(),
            None,
            self._parts.data_ptr(),
            None,
            None,
            kernel.tokens,
            kernel.tokens,
            stage.rows,
            cut.tiles,
            1,
            cut.steps,
            0,
            lo.tilings[name].k_parts.bit_length() - 1,
            *ring_slot_steps(lo),
        )
        return self._make_ready(kernel, "kog_product", cut.blocks, kernel.threads, call)

    def _join(self, kernel: ProductKernel, layer: int, name: str, gain: Tensor | None, to: str) -> Queue:
        """Behind a product, or without a name at the first layer: residual and norm, or the last token's streams."""
        call = self._join_call(layer, name, gain, to)
        return self._make_ready(kernel, "kog_join", kernel.tokens, JOIN_THREADS, call)

    def _bias_of(self, layer: int, name: str) -> int | None:
        own = self._layers[layer]
        return address(own.o_bias if name == "o_proj" else own.down_bias)

    def _join_call(self, layer: int, name: str, gain: Tensor | None, to: str) -> JoinCall:
        call = JoinCall(tokens=self._words.data_ptr(), x=self._x.data_ptr())
        if name:
            call.parts, call.bias = self._parts_of(name), self._bias_of(layer, name)
        else:
            call.embed, call.embed_step = self._embed.data_ptr(), self._embed.stride(0)
        call.gain, call.streams, call.streams_step = (address(gain), self._streams.data_ptr(), self._streams.stride(0))
        call.out, call.order = self._in[to].data_ptr(), self._order(to)
        call.hidden, call.eps = self._spec.hidden_size, self._spec.norm_eps
        return call

    def _heads(self, kernel: ProductKernel, layer: int) -> Queue:
        spec, own = self._spec, self._layers[layer]
        heads, kv_heads = self._heads_here
        call = HeadsCall(
            self._words.data_ptr(),
            self._parts_of("qkv_proj"),
            address(own.qkv_bias),
            address(own.qk_norm),
            self._rope.data_ptr(),
            self._q.data_ptr(),
            self._cache_of(layer),
            heads,
            kv_heads,
            spec.head_dim // 2,
            spec.norm_eps,
        )
        per = -(-(heads + 2 * kv_heads) // (HEAD_THREADS // 32))
        return self._make_ready(kernel, "kog_heads", kernel.tokens * per, HEAD_THREADS, call)

    def _attend(self, kernel: ProductKernel, layer: int) -> Queue:
        spec = self._spec
        heads, kv_heads = self._heads_here
        tiles = kernel.tokens // QUERIES + self._most_prompts
        call = AttendCall(
            self._words[MOST_TOKENS:].data_ptr(),
            self._q.data_ptr(),
            self._cache_of(layer),
            self._in["o_proj"].data_ptr(),
            self._order("o_proj"),
            heads,
            kv_heads,
            spec.head_dim,
            spec.windows[layer],
            LOG2_E / math.sqrt(spec.head_dim),
        )
        return self._make_ready(kernel, "kog_attend", heads * tiles, ATTEND_THREADS, call)

    def _gate(self, kernel: ProductKernel, layer: int) -> Queue:
        width = self._stages["down_proj"].cols
        call = GateCall(
            self._words.data_ptr(),
            self._parts_of("gate_up_proj"),
            address(self._layers[layer].gate_up_bias),
            self._in["down_proj"].data_ptr(),
            self._order("down_proj"),
            width,
        )
        per = -(-(width // 2) // GATE_THREADS)
        return self._make_ready(kernel, "kog_gate", kernel.tokens * per, GATE_THREADS, call)

    def _parts_of(self, name: str) -> Parts:
        return Parts(self._parts.data_ptr(), self._tables[name].data_ptr())

    def _order(self, name: str) -> Order:
        stage = self._stages[name]
        return Order(self._lowering.tilings[name].k_parts, self._lowering.steps(stage))

    def _cache_of(self, layer: int) -> Cache:
        slot, _, _, head, kind, position, one = self._cache.stride()
        assert one == 1
        return Cache(self._cache[0, layer].data_ptr(), slot, head, kind, position)


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
