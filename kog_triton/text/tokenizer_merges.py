"""The merges of a tokenizer.json, looked at before the library sees them.

Of a BPE model whose continued pieces have a prefix, the library cuts the prefix off each merge's second part without
looking whether it is there, and ends the process where the part is shorter.
"""

import json
import re
from pathlib import Path

from kog_triton.errors import ModelError

# To read a large file twice takes a start half a second: only one that may have a prefix is.
HAS_PREFIX = re.compile(rb'"continuing_subword_prefix"\s*:\s*"[^"]')


def check_merges(data: bytes, path: Path) -> None:
    """ModelError for a merge in the tokenizer.json `data` of `path` whose second part lacks the prefix.

    What is no JSON object of a BPE model is the library's to refuse.
    """
    if not HAS_PREFIX.search(data):
        return
    try:
        whole = json.loads(data)
    except (ValueError, RecursionError):
        return
    model = whole.get("model") if isinstance(whole, dict) else None
    if not isinstance(model, dict):
        return
    prefix, merges = model.get("continuing_subword_prefix"), model.get("merges")
    if not prefix or not isinstance(prefix, str) or not isinstance(merges, list):
        return
    for number, merge in enumerate(merges):
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(parts, list) or len(parts) != 2 or not isinstance(parts[1], str):
            continue
        if not parts[1].startswith(prefix):
            raise ModelError(
                f"{path}: merge {number} continues a piece with {parts[1][:40]!r}, which does not begin with "
                f"{prefix[:40]!r}, the model's continuing_subword_prefix"
            )
