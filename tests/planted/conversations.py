"""Faults in what makes a conversation's next turn cheap: kept ids, suffixes behind a cached prefix."""

from tests.planted.fault import Fault

FAULTS = (
    Fault(
        "text/kept_ids.py",
        "if text[:end] == self.text[:end]:",
        "if text[end - 1 : end] == self.text[end - 1 : end]:",
        "host/test_kept_ids.py",
        "another text's ids are taken where one letter is the same",
        quick=True,
    ),
    Fault(
        "text/kept_ids.py",
        "if kept.whose == whose",
        "if True",
        "host/test_kept_ids.py",
        "a text begins with somebody else's",
    ),
    Fault(
        "text/kept_ids.py",
        "if text[first:end] == self._ending[token]:",
        "if first:",
        "host/test_kept_ids.py",
        "the first special token of a piece ends nothing",
    ),
    Fault(
        "text/kept_ids.py",
        "counts.append(len(ids) + number + 1)",
        "counts.append(len(ids) + number)",
        "host/test_kept_ids.py",
        "a special token is encoded twice",
    ),
    Fault(
        "text/kept_ids.py",
        "any(token.single_word for token in added.values()) or ",
        "",
        "host/test_kept_ids.py",
        "texts are cut where a token asks what stands before it",
    ),
    Fault(
        "text/kept_ids.py",
        "        and not any(text != token.content and text.startswith(token.content) for text in texts)\n",
        "",
        "host/test_kept_ids.py",
        "texts are cut behind what may be the beginning of a longer token",
    ),
    Fault(
        "text/kept_ids.py",
        "while self._characters > MOST_CHARACTERS or len(self._kept) > MOST_TEXTS:",
        "while len(self._kept) > MOST_TEXTS:",
        "host/test_kept_ids.py",
        "long texts are kept without bound",
    ),
    Fault(
        "backends/prefill/fused.py",
        "real = row < tl.load(words)",
        "real = row <= tl.load(words)",
        "triton/test_suffixes.py",
        "padding writes behind a suffix",
    ),
    Fault(
        "backends/prefill/suffixes.py",
        "return begin * (slots.stride(0) // slots.stride(5))",
        "return 0",
        "triton/test_suffixes.py",
        "every suffix goes to the first slot",
    ),
    Fault(
        "backends/prefill/suffixes.py",
        "told[KEYS], told[LAST] = count << 32, first + count, count - 1",
        "told[KEYS], told[LAST] = count << 32, first + count, count - 2",
        "triton/test_suffixes.py",
        "a suffix's answer begins at its last token but one",
    ),
    Fault(
        "backends/prefill/suffixes.py",
        "self._words.zero_()",
        "pass",
        "triton/test_suffixes.py",
        "to capture a graph writes where the last suffix stood",
    ),
    Fault(
        "backends/prefill/graphs.py",
        "                empty()\n",
        "",
        "host/test_library_prefill.py",
        "a bucket is captured on what ran before",
    ),
)
