"""What a CudaBackend opens to run prompts beside its monokernel: the library, passes of short prompts, their kernels
and what goes between GPUs."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from ctypes import Structure

import torch

from kog_triton.backends import BackendOptions, WeightSource
from kog_triton.backends.compile_log import waited_for
from kog_triton.backends.cuda.driver import Kernel
from kog_triton.backends.cuda.jit import begin_cubin, compile_cubin
from kog_triton.backends.cuda.layout.layout import Layout
from kog_triton.backends.cuda.layout.prompt import ProductKernel
from kog_triton.backends.cuda.layout.short_pass import Ready
from kog_triton.backends.cuda.layout.unpack import unpacked_stages
from kog_triton.backends.cuda.memory import Memory
from kog_triton.backends.cuda.placing import Placing
from kog_triton.backends.cuda.products import ArenaProducts
from kog_triton.backends.cuda.prompt_texts import ALL, outputs_text, product_texts, prompt_texts
from kog_triton.backends.cuda.rank_kernel import RankKernel
from kog_triton.backends.cuda.rank_memory import Ranks
from kog_triton.backends.cuda.rank_outputs import PushedExchange, Queue
from kog_triton.backends.cuda.short_pass import MOST_TOKENS, Linked, PassKernels, ShortPass, links_of
from kog_triton.backends.cuda.short_prompts import ShortPrompts
from kog_triton.backends.cuda.unpacking import Unpacking
from kog_triton.backends.embedding import Embedding
from kog_triton.backends.prefill.library import LibraryPrefill, bucket_sizes, on_device, wants_library
from kog_triton.backends.prefill.ranks import RANK_BUCKETS, RankExchange, RankPrefill, RankTensors
from kog_triton.backends.prefill.weights import LayerWeights, Matrices
from kog_triton.model.spec import ModelSpec
from kog_triton.schedule.cuda import CudaLowering
from kog_triton.schedule.cuda_weights import StreamWeights
from kog_triton.schedule.embedding import embedding_row
from kog_triton.schedule.topology import Gpu


class PromptsBeside:
    """The part of CudaBackend that opens what runs prompts; the attributes named here are the backend's."""

    spec: ModelSpec
    gpu: Gpu
    options: BackendOptions
    device: torch.device
    devices: list[torch.device]
    num_devices: int
    max_context: int
    wait_ns: int
    layout: Layout
    ranks: Ranks
    short: ShortPrompts | None
    placing: Placing | None
    _kernels: list[Kernel | RankKernel]
    _products_compiled: Future[None]

    prompt_kernels = ALL  # by class: those there are to be

    @property
    def _most_blocks(self) -> int:
        """Of a launch of a pass."""
        return self.gpu.num_sms

    def _passes_short(self, lowering: CudaLowering) -> bool:
        return self.prompt_kernels.has_short(lowering)

    def _compile_products(self) -> None:
        texts = prompt_texts(self.layout.lowering, self.prompt_kernels)
        for text in texts:
            begin_cubin(*text, self.gpu.arch)
        for text in texts:
            compile_cubin(*text, self.gpu.arch)

    def _open_library(self, weights: WeightSource, lowering: CudaLowering) -> LibraryPrefill | RankPrefill | None:
        if not wants_library(self.options, self.device):
            return None
        held = [
            RankTensors(self._embedding(memory), memory.rope, self._open_matrices(lowering, memory, rank))
            for rank, memory in enumerate(self.ranks.each)
        ]
        short = self._passes_short(lowering)
        if self.num_devices > 1:
            exchange = self._open_exchange(lowering)
            sizes = () if exchange is None else RANK_BUCKETS
            ranks = RankPrefill(weights, lowering.schedule, self.max_context, held, exchange=exchange, buckets=sizes)
            if short:
                self.short = self._open_short(lowering, held, ranks.layers)
            for device in self.devices:  # memory that other GPUs write is zero before they do
                if device.type == "cuda":
                    torch.cuda.current_stream(device).synchronize()
            return ranks
        (one,) = held
        buckets = bucket_sizes(self.max_context)
        slots = self.ranks.first.cache[..., : self.spec.head_dim]
        if short:
            buckets = [size for size in buckets if size > MOST_TOKENS]
        library = LibraryPrefill(
            weights, self.spec, self.max_context, one.embed, one.rope, one.matrices, buckets, to_head=True, slots=slots
        )
        library.compile_ahead(slots[0])
        if short:
            self.short = self._open_short(lowering, held, [library.layers])
            self.placing = Placing(self.ranks.first, self._short_kernels(self.device))
        return library

    def _embedding(self, memory: Memory) -> Embedding:
        if row := embedding_row(self.spec):
            return Embedding(memory.embed.view(torch.uint8), memory.embed.dtype, row)
        return Embedding.of(memory.embed[:, : self.spec.hidden_size])

    def _moves_outputs(self, lowering: CudaLowering) -> bool:
        return self.prompt_kernels.has_outputs(lowering)

    def _open_exchange(self, lowering: CudaLowering) -> RankExchange | None:
        """Of prompts that the library runs on several GPUs; None: torch's copies."""
        if not self._moves_outputs(lowering):
            return None
        cubin = compile_cubin(*outputs_text(), self.gpu.arch)
        opened: dict[tuple[int, str], Kernel] = {}

        def ready(rank: int, name: str, blocks: int, threads: int, call: Structure) -> Queue:
            device = self.devices[rank]
            if (rank, name) not in opened:
                with on_device(device):  # whose context takes modules
                    opened[rank, name] = Kernel(cubin, name, 256, device)
                self._kernels.append(opened[rank, name])
            return opened[rank, name].queued(blocks, threads, call)

        return PushedExchange(lowering.schedule, self.devices, ready, self.wait_ns)

    def _open_short(
        self, lowering: CudaLowering, held: Sequence[RankTensors], layers: Sequence[Sequence[LayerWeights]]
    ) -> ShortPrompts:
        """`held` and `layers` by rank."""
        hidden, several = self.spec.hidden_size, self.num_devices > 1
        links = links_of(self.devices, hidden) if several else []
        passes = []
        for rank, memory in enumerate(self.ranks.each):
            tensors, device = held[rank], memory.weights.device
            own = slice(rank, rank + 1)  # of all shards' streams
            passes.append(
                ShortPass(
                    lowering,
                    memory.weights,
                    self._groups_of(tensors.matrices),
                    tensors.embed.table,
                    tensors.rope,
                    layers[rank],
                    memory.cache[..., : self.spec.head_dim],
                    memory.streams[:, own, :hidden],
                    self._short_kernels(device),
                    self._most_blocks,
                    Linked(rank, links, self.wait_ns) if several else None,
                )
            )
        return ShortPrompts(passes, self.max_context, self.spec.vocab_size)

    def _groups_of(self, matrices: Matrices) -> Callable[[str, int], int]:
        assert isinstance(matrices, ArenaProducts)
        return matrices.groups

    def _short_kernels(self, device: torch.device) -> Ready:
        return PassKernels(self.spec.dtype, self.gpu.arch, device, self._kernels.append)

    def _open_matrices(self, lowering: CudaLowering, memory: Memory, rank: int) -> Matrices:
        texts, device = product_texts(self.layout.lowering), memory.weights.device

        def load(kernel: ProductKernel | StreamWeights, entry: str, shared: int) -> Kernel:
            cubin = compile_cubin(*texts[kernel], self.gpu.arch)
            opened = Kernel(cubin, entry, shared, device)
            self._kernels.append(opened)
            return opened

        with waited_for("the kernels of products"):
            self._products_compiled.result()
        unpacking = None
        with on_device(device):  # whose context takes modules
            if stages := unpacked_stages(lowering):
                unpacking = Unpacking(
                    lowering, memory.weights, memory.biases, lambda kind: load(kind, "kog_unpack", 0), stages, rank
                )
            return ArenaProducts(lowering, memory.weights, memory.embed.dtype, load, memory.biases, unpacking, rank)
