"""Passes over few tokens behind a cached prefix, as an agent's next turn has them.

How many tokens they are, at which position and in which slot is told by words of the device, so that one CUDA graph a
size serves every suffix: launched from the host one by one, such a pass takes it longer than the GPU
(benchmarks/cuda-log.md#agent-turns). A pass is padded at its end to the next size; what pads leaves no keys and values,
and attention leaves it out. Before its graph is there, and beside others, it is launched piece by piece: the same
kernels, the same bits.
"""

from collections.abc import Iterator

import torch

from kog_triton.backends.prefill.forward import PrefillPass, ToHead, Work, aligns_ends
from kog_triton.backends.prefill.upload import upload

Tensor = torch.Tensor
SIZES = (512, 384, 256, 128, 64, 32, 16)
# Of a suffix's words; the first three are the rotation's (fused.py). Flash attention's are pairs of 32 bits: where
# queries begin and end, where the slot's rows begin, how many keys there are. Zeros are a suffix of no tokens.
COUNT, FIRST, ROW, QUERIES, KEYS, LAST, IDS = range(7)
TILE = 128  # of queries: what a block of flash attention takes
# Attention that reads its length from memory does not cut the keys, so that few tokens leave multiprocessors idle. A
# suffix may stand as deep as this over their part: there what cut keys would save is what launches take the host
# (benchmarks/cuda-log.md#agent-turns).
DEEPEST = 8192


def reads_suffixes(slots: Tensor) -> bool:
    """Whether attention can read where it stands in caches [slots, layers, S, K, 2, n, d]: of models without lanes, and
    of slots whose rows are counted in 31 bits."""
    rows, rest = divmod(slots.stride(0), slots.stride(5))
    counted = not rest and len(slots) * rows < 1 << 31
    return counted and slots.shape[2] == 1 and aligns_ends(slots.device, slots.dtype, slots.shape[6])


class SuffixWords:
    """Where a suffix of up to `size` tokens stands, and its tokens, as the device reads it (forward.Told).

    words     int64 [IDS + size]
    most_keys of a slot
    """

    def __init__(self, words: Tensor, most_keys: int) -> None:
        self.words, self._most_keys = words, most_keys
        pairs = words[:IDS].view(torch.int32)
        self._queries = pairs[2 * QUERIES : 2 * QUERIES + 2]
        self._row, self._keys = pairs[2 * ROW : 2 * ROW + 2], pairs[2 * KEYS : 2 * KEYS + 1]

    @property
    def ids(self) -> Tensor:
        return self.words[IDS:]

    @property
    def last(self) -> Tensor:
        """The number of the last token that is no padding, [1]."""
        return self.words[LAST : LAST + 1]

    def write(self, ids: Tensor, first: int, row: int) -> None:
        """Tokens, the first one's position and the slot's first row, in the order of the current stream."""
        count = len(ids)
        told = [0] * IDS
        told[COUNT], told[FIRST], told[ROW] = count, first, row
        told[QUERIES], told[KEYS], told[LAST] = count << 32, first + count, count - 1
        padding = ids[-1:].expand(len(self.words) - IDS - count)
        upload(torch.cat([torch.tensor(told), ids, padding]), self.words)

    def attend(self, q: Tensor, cache: Tensor, window: int) -> Tensor:
        keys, values = (t[0].transpose(0, 1) for t in cache.unbind(2))
        out = attend_told(
            q[0].transpose(0, 1), keys, values, self._queries, self._row, self._keys, self._most_keys, window
        )
        return out.flatten(1)[None]


def attend_told(
    q: Tensor, keys: Tensor, values: Tensor, queries: Tensor, row: Tensor, count: Tensor, most_keys: int, window: int
) -> Tensor:
    """Causal attention of q [T, H, d] to keys and values [n, K, d], ends aligned, window 0 for none: [T, H, d].

    queries  int32 [2]: the first query and the one behind the last; what lies outside is not written
    row      int32 [2]: the first key's row, counted from that of `keys` and maybe behind its end
    count    int32 [1]: of keys, `most_keys` at most
    """
    out: Tensor = torch.ops.aten._flash_attention_forward(
        q,
        keys,
        values,
        queries,
        row,
        len(q),
        most_keys,
        0.0,
        True,
        False,
        window_size_left=window - 1 if window else None,
        seqused_k=count,
    )[0]
    return out


class Suffixes:
    """Of one model on one device.

    slots  all caches of the caller, [slots, layers, 1, K, 2, n, d], of strides that are whole rows of d
    head   gets the streams of a suffix's last token; None: nobody reads them
    """

    def __init__(self, walk: PrefillPass, slots: Tensor, streams: Tensor | None) -> None:
        self._pass, self._slots, self._streams = walk, slots, streams
        self.words = torch.zeros(IDS + SIZES[0], dtype=torch.int64, device=slots.device)
        self._heads = walk.spec.num_heads
        self._blocks = 1
        if slots.device.type == "cuda":
            self._blocks = torch.cuda.get_device_properties(slots.device).multi_processor_count

    def row_of(self, first: int, count: int, cache: Tensor) -> int | None:
        """Of a suffix's slot, the first row; None: the suffix is none of these passes', or `cache` is no slot's."""
        if not first or count > SIZES[0] or self._idle(count) * (first + count) > DEEPEST:
            return None
        slots = self._slots
        begin, rest = divmod(int(cache.storage_offset() - slots.storage_offset()), slots.stride(0))
        same = cache.untyped_storage().data_ptr() == slots.untyped_storage().data_ptr()
        if not same or rest or not 0 <= begin < len(slots) or cache.stride() != slots.stride()[1:]:
            return None
        return begin * (slots.stride(0) // slots.stride(5))

    def _idle(self, count: int) -> float:
        """The part of the multiprocessors that attention leaves idle."""
        return max(0.0, 1 - -(-count // TILE) * self._heads / self._blocks)

    def pieces(self, ids: Tensor, first: int, row: int) -> Iterator[Work]:
        """Queue a suffix product by product, as forward.PrefillPass.layers_of."""
        words = torch.empty(IDS + size_of(len(ids)), dtype=torch.int64, device=self.words.device)
        suffix = self._told(words)
        suffix.write(ids, first, row)
        return self._layers(suffix, first)

    def write(self, ids: Tensor, first: int, row: int) -> None:
        """For `run`, or a graph of it."""
        self._told(self.words[: IDS + size_of(len(ids))]).write(ids, first, row)

    def empty(self) -> None:
        """The next `run` has no tokens, and writes into no slot."""
        self.words.zero_()

    def run(self, size: int) -> None:
        """Queue what `write` told, or will have told a graph of it."""
        for _ in self._layers(self._told(self.words[: IDS + size]), 0):
            pass

    @property
    def nbytes(self) -> int:
        return self.words.nbytes

    def _layers(self, suffix: SuffixWords, first: int) -> Iterator[Work]:
        head = None if self._streams is None else ToHead(self._streams, suffix.last)
        return self._pass.layers_of(suffix.ids, first, self._slots[0], head, suffix)

    def _told(self, words: Tensor) -> SuffixWords:
        return SuffixWords(words, self._slots.shape[5])


def size_of(count: int) -> int:
    return min(size for size in SIZES if size >= count)
