"""A request put into a slot: its words, its tables and its first state, in device memory, and a clean mailbox."""

import numpy as np
import torch

from kog_triton.backends.logprob_words import RECORD_WORDS
from kog_triton.backends.mailbox import Request
from kog_triton.backends.request_words import OFFSETS, Flag, decode, encode, encode_logits
from kog_triton.backends.triton.kernel.edits import END, SEEN
from kog_triton.backends.triton.kernel.pointers import Pointers
from kog_triton.backends.triton.kernel.slots import MADE, POSITION, TOKEN, mailbox_offsets
from kog_triton.schedule.triton import Tiles


def admit(pointers: Pointers, tiles: Tiles, request: Request, position: int) -> None:
    """Make the request the slot's, to be computed from `position` on. RequestError if no kernel does what it asks."""
    words, slot = encode(request, tiles.vocab_size), request.slot
    fields, lists = decode(words)
    flags = Flag(int(fields["flags"]))
    _write(pointers.requests[slot], words)
    _write(pointers.tokens[slot], np.array(request.prompt, np.uint32))
    start(pointers.states[slot], position, request.prompt[position])
    if flags & Flag.EDITED:
        marks, bias = pointers.marks[slot], pointers.bias[slot]
        marks.zero_()
        pointers.bans[slot].zero_()
        marks[_ids(np.unique(np.array(request.prompt)), marks)] = SEEN.value
        marks[_ids(lists["end_ids"], marks)] |= END.value
        if flags & Flag.ALLOWED:
            bits = np.unpackbits(lists["allowed"].view(np.uint8), bitorder="little")
            allowed = torch.from_numpy(bits[: tiles.vocab_size]).to(bias.device)
            bias.zero_().masked_fill_(allowed == 0, -torch.inf)
        else:
            bias.zero_()
        if flags & Flag.BIASED:
            values = torch.from_numpy(lists["bias_values"].view(np.float32).copy())
            bias[_ids(lists["bias_ids"], bias)] += values.to(bias.device)
    at, mail = mailbox_offsets(tiles), pointers.mailbox[slot]
    mail[: at["tokens"] + request.max_tokens] = 0
    mail[at["stamps"] : at["stamps"] + request.max_tokens] = 0
    mail[at["mask"] : at["records"]] = 0
    if flags & Flag.LOGPROBS:
        mail[at["records"] : at["records"] + request.max_tokens * RECORD_WORDS] = 0


def admit_logits(pointers: Pointers, tokens: list[int], first: int, last: int) -> None:
    """In slot 0, the request whose logits of positions [first, last) fill rows 0 .. of `pointers.logits`."""
    words = encode_logits(last).copy()
    words[OFFSETS["first"]], words[OFFSETS["most"]] = first, last - first
    _write(pointers.requests[0], words)
    _write(pointers.tokens[0], np.array(tokens[:last], np.uint32))
    start(pointers.states[0], first, tokens[first])


def _write(to: torch.Tensor, words: np.ndarray) -> None:
    to[: words.size] = torch.from_numpy(words.view(np.int32).copy()).to(to.device)


def start(states: torch.Tensor, position: int, token: int, made: int = 0) -> list[int]:
    """The state of every block before `token` runs at `position`; a copy, so that no kernel runs beside ours."""
    new = torch.zeros(states.shape, dtype=states.dtype)
    new[:, POSITION.value], new[:, TOKEN.value], new[:, MADE.value] = position, token, made
    states.copy_(new)
    return new[0].tolist()


def _ids(ids: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(ids.astype(np.int64)).to(like.device)
