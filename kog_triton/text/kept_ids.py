"""Ids of texts that begin as one before did: only what is new in them is encoded.

An agent sends its whole conversation each time, and to encode 100,000 tokens takes a tokenizer 0.2 s, longer than a GPU
takes for what is new. A tokenizer cuts a text at its special tokens first and looks at each piece alone, so that the
ids up to the end of a special token are those of any text that goes on from there. Where something looks across such
an end, every text is encoded whole: a first piece that gets a space, a token that asks what stands before it.
"""

import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import tokenizers

MOST_CHARACTERS = 8 << 20  # of all texts that are kept
MOST_TEXTS = 64
MOST_ENDS = 256  # of special tokens of one text: the last ones


@dataclass(frozen=True)
class Kept:
    """A text of somebody's and its ids. `ends[i]` characters of it, behind a special token, have `counts[i]` ids."""

    whose: str
    text: str
    ids: "array[int]"
    ends: list[int]
    counts: list[int]

    def shared(self, text: str) -> int:
        """How many of `ends` lie in what both texts begin with."""
        low, high = 0, len(self.ends)
        while low < high:
            middle = (low + high + 1) // 2
            end = self.ends[middle - 1]
            if text[:end] == self.text[:end]:
                low = middle
            else:
                high = middle - 1
        return low


class KeptIds:
    """Of one tokenizer; threads may share it. Whose texts are whose is a name, and nobody's begin with another's."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend, self._ending = backend, special_ends(backend)
        self._lock, self._numbers = threading.Lock(), count()
        self._kept: OrderedDict[int, Kept] = OrderedDict()  # the last used one last
        self._characters = 0

    def encode(self, text: str, whose: str) -> list[int]:
        """As the backend does, without what its post-processor adds."""
        if not self._ending:
            return self._backend.encode(text, add_special_tokens=False).ids
        ids, ends, counts = array("i"), list[int](), list[int]()
        found = self._longest(text, whose)
        if found is not None:
            kept, shared = found
            ends, counts = kept.ends[:shared], kept.counts[:shared]
            ids = kept.ids[: counts[-1]]
        begin = ends[-1] if ends else 0
        coded = self._backend.encode(text[begin:], add_special_tokens=False)
        for number, token in enumerate(coded.ids):
            if token in self._ending and (place := coded.token_to_chars(number)) is not None:
                first, end = begin + place[0], begin + place[1]
                # as it stands there: another spelling was brought to it later than texts are cut
                if text[first:end] == self._ending[token]:
                    ends.append(end)
                    counts.append(len(ids) + number + 1)
        ids.extend(coded.ids)
        self._keep(Kept(whose, text, ids, ends[-MOST_ENDS:], counts[-MOST_ENDS:]))
        return ids.tolist()

    def _longest(self, text: str, whose: str) -> tuple[Kept, int] | None:
        """The kept text that shares most with this one, and how many of its ends; None: none shares any."""
        with self._lock:
            mine = [(number, kept) for number, kept in self._kept.items() if kept.whose == whose]
        shares = [(kept.shared(text), number, kept) for number, kept in mine]
        shares = [one for one in shares if one[0]]
        if not shares:
            return None
        shared, number, kept = max(shares, key=lambda one: one[2].ends[one[0] - 1])
        with self._lock:
            if number in self._kept:
                self._kept.move_to_end(number)
        return kept, shared

    def _keep(self, new: Kept) -> None:
        """A text that goes on from others takes their place."""
        if not new.ends or len(new.text) > MOST_CHARACTERS:
            return
        with self._lock:
            for number, old in list(self._kept.items()):
                if old.whose == new.whose and new.text.startswith(old.text[: old.ends[-1]]):
                    self._drop(number)
            self._kept[next(self._numbers)] = new
            self._characters += len(new.text)
            while self._characters > MOST_CHARACTERS or len(self._kept) > MOST_TEXTS:
                self._drop(next(iter(self._kept)))

    def _drop(self, number: int) -> None:
        self._characters -= len(self._kept.pop(number).text)


def special_ends(backend: tokenizers.Tokenizer) -> Mapping[int, str]:
    """Special tokens, by id, behind whose ends a text is looked at anew; none, where something looks across them."""
    added = backend.get_added_tokens_decoder()
    if any(token.single_word for token in added.values()) or _asks_for_the_first(backend):
        return {}
    texts = {token.content for token in added.values()}
    return {
        i: token.content
        for i, token in added.items()
        if token.special
        and not (token.lstrip or token.rstrip or token.normalized)
        and not any(text != token.content and text.startswith(token.content) for text in texts)
    }


def _asks_for_the_first(backend: tokenizers.Tokenizer) -> bool:
    """Whether the first piece of a text is cut in another way than the others."""
    told = [part.__getstate__() for part in (backend.pre_tokenizer, backend.normalizer) if part]
    return any(_holds_first(json.loads(state)) for state in told)


def _holds_first(value: Any) -> bool:
    if isinstance(value, dict):
        first = value.get("type") == "Metaspace" and value.get("prepend_scheme") == "first"
        return first or any(map(_holds_first, value.values()))
    return isinstance(value, list) and any(map(_holds_first, value))
