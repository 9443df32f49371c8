"""Ranks of the CUDA kernel on real GPUs: several of them, or all on one, with as many of its SMs each."""

import time

import numpy as np
import torch

from kog_triton.backends.cuda.backend import CudaBackend
from kog_triton.backends.cuda.driver import Kernel, reach
from kog_triton.backends.cuda.gpus import open_gpus
from kog_triton.backends.cuda.jit import compile_cubin
from kog_triton.backends.cuda.layout.header import render
from kog_triton.backends.cuda.prompt_texts import PromptKernels
from kog_triton.backends.cuda.rank_kernel import RankKernel, RankLaunch
from kog_triton.backends.cuda.rank_memory import allocate_ranks
from kog_triton.backends.device import gpu_of
from kog_triton.backends.request_words import encode_logits
from kog_triton.errors import DeviceError
from kog_triton.schedule.check import check_lowering
from kog_triton.schedule.cuda import lower
from kog_triton.schedule.schedule import build
from tests.lib.cuda_rank_columns import RankColumnWalk
from tests.lib.cuda_ranks import RankWalk

LIMIT_NS = 2_000_000_000  # that a wait may take
MOST_DELAY_S = 2e-3  # of a rank's launch behind another's
ENTRIES = {"decode.cu": "kog_decode", "columns.cu": "kog_columns"}


class GpuRanks(RankWalk):
    """RankWalk on `devices`, one a rank; a device that stands there twice holds two ranks, half of its SMs each."""

    limit = LIMIT_NS

    def __init__(self, spec, weights, devices, max_context=512):
        self.spec, self.devices, self.most_steps = spec, devices, {}
        gpu = gpu_of(devices[0])
        shared_by = max(devices.count(d) for d in devices)
        self.shared = shared_by > 1
        lowering = lower(build(spec, len(devices)), gpu, gpu.num_blocks // shared_by)
        check_lowering(lowering)
        self.layout = self._lay_out_ranks(lowering, max_context)
        for device in set(devices):
            for peer in set(devices) - {device}:
                reach(device.index, peer.index)
        self.ranks = allocate_ranks(self.layout, weights, self.slots, devices).each
        self.memory = self.ranks[0]
        cubin = compile_cubin(render(self.layout), self.source, gpu.arch)
        self.kernels = []
        for device in devices:
            with torch.cuda.device(device):  # whose context takes the module
                entry = ENTRIES[self.source]
                self.kernels.append(Kernel(cubin, entry, self.layout.shared_bytes, device))
        self.streams = [torch.cuda.Stream(device) for device in devices]

    def _start(self, arguments, seed, absent):
        """Nanoseconds that it took. A seed other than 0 sets an order of the ranks' launches, and delays between."""
        self.synchronize()  # no rank writes words that another has yet to empty
        dice = np.random.default_rng(seed)
        order = dice.permutation(len(self.ranks)) if seed else range(len(self.ranks))
        begun = time.perf_counter_ns()
        for rank in order:
            if rank == absent:
                continue
            kernel, lowering = self.kernels[rank], self.layout.lowering
            launch = lowering.num_blocks, self.layout.threads, arguments[rank]
            # Cooperative launches of one GPU might be put one behind the other. Blocks of all ranks fit side by side.
            if self.shared:
                kernel.queued(*launch)(self.streams[rank].cuda_stream)
            else:
                with torch.cuda.stream(self.streams[rank]):
                    kernel.launch(*launch)
            if seed:
                time.sleep(dice.uniform(0, MOST_DELAY_S))
        self.synchronize()
        return time.perf_counter_ns() - begun

    def synchronize(self):
        for device in set(self.devices):
            torch.cuda.synchronize(device)

    def forward_logits(self, tokens, seed=0, limit=None):
        """Logits [tokens, vocab]; every rank writes its own columns of one tensor."""
        out = torch.full((len(tokens), self.spec.vocab_size), torch.nan, device=self.devices[0])
        self.run(encode_logits(len(tokens)), tokens, seed, limit, logits=out)
        assert [int(m.mailbox[2]) for m in self.ranks] == [2] * len(self.ranks), self.reports()
        return out.cpu().numpy()

    def step_ns(self, slot=0):
        """Between the tokens of a slot's last request, by the GPU's own stamps."""
        words = self.memory.outbox[slot].numpy()
        return np.diff(words[: int((words[:, 0] != 0).sum()), 1])

    def close(self):
        for kernel in self.kernels:
            kernel.close()


class GpuRankColumns(GpuRanks, RankColumnWalk):
    """RankColumnWalk on `devices`: requests in columns, or one prompt in chunks."""

    def __init__(self, spec, weights, devices, columns, chunk=False, max_context=512):
        self.columns, self.chunk, self.slots = columns, chunk, 1 if chunk else columns
        GpuRanks.__init__(self, spec, weights, devices, max_context)


class SharedBackend(CudaBackend):
    """The backend with all its ranks on one GPU, as many of its SMs each: what two GPUs run, where there is one.

    But for passes whose ranks wait for each other: on one stream the first one's would wait for the second's behind it.
    """

    prompt_kernels = PromptKernels(False, False)

    def __init__(self, weights, options):
        blocks = gpu_of(torch.device("cuda")).num_blocks
        super().__init__(weights, options, blocks // options.num_gpus)

    def _open_devices(self):
        devices, gpu = open_gpus(1)
        return devices * self.num_devices, gpu

    def _load(self, source, entry, layout):
        return SharedKernel(self._compile(source, layout), entry, layout.shared_bytes, self.devices)


class SharedKernel(RankKernel):
    """Ranks side by side: cooperative launches of one GPU might be put one behind the other, and so would those of
    one stream."""

    def __init__(self, cubin, name, shared_bytes, devices):
        super().__init__(cubin, name, shared_bytes, devices)
        self._streams = [torch.cuda.Stream(device) for device in devices]

    def launch(self, blocks, threads, arguments):
        given = torch.cuda.current_stream(self._devices[0])
        ends, missing = [], {}
        for rank, stream in enumerate(self._streams):
            stream.wait_stream(given)
            try:
                self._kernels[rank].queued(blocks, threads, arguments[rank])(stream.cuda_stream)
            except DeviceError as error:
                missing[rank] = str(error)
            ends.append(stream.record_event())
        for end in ends:
            given.wait_event(end)
        return RankLaunch(ends, missing)
