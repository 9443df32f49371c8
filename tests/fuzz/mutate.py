"""Damage, from a seed: to JSON values by their structure, to texts and bytes by their positions.

Every function takes a `random.Random` and depends on nothing else, so that a case is its seed.
"""

import copy
import json
from random import Random
from typing import Any

EDGES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    3,
    0.5,
    -0.0,
    1e-300,
    1e308,
    float("nan"),
    float("inf"),
    2**31 - 1,
    2**31,
    2**32,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**64,
    -(2**63) - 1,
    10**400,
    "",
    "x",
    "\n",
    "a\nb",
    "\u0000",
    "\ud800",
    "\ufdd0",
    "é😀",
    "../../etc/passwd",
    "{{",
    "{",
    "%s",
    "x" * 300,
    [],
    {},
    [[]],
    [{}],
    {"": None},
]
DEPTHS = (3, 90, 130, 1200, 100_000)
TOKENS = [b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\", b"\\u", b"\\ud800", b"NaN", b"1e999"]
TOKENS += [b"-", b"null", b"\xff", b"\xef\xbb\xbf", b"\x00", b"\n", b"9" * 5000, b"[" * 2000]


def damage_json(draw: Random, value: Any, donors: list[Any]) -> Any:
    """A copy with one to four changes: to leaves, keys, lists, or with parts of `donors`."""
    box = [copy.deepcopy(value)]
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        parent, key = draw.choice(_places(box))
        _change(draw, parent, key, donors)
    return box[0]


def dump(draw: Random, value: Any) -> bytes:
    """A value as JSON: now and then deep, with a doubled key, or with bytes damaged."""
    text = json.dumps(value, ensure_ascii=draw.random() < 0.9).encode("utf-8", "surrogatepass")
    kind = draw.random()
    if kind < 0.02:
        depth = draw.choice(DEPTHS)
        text = b'{"a":' * depth + text + b"}" * depth
    elif kind < 0.04 and text.startswith(b"{"):
        text = text[:-1] + b"," + text[1:]
    elif kind < 0.15:
        text = damage_bytes(draw, text)
    return text


def damage_bytes(draw: Random, data: bytes, reach: int | None = None) -> bytes:
    """One to five edits within the first `reach` bytes: flips, cuts, copies, tokens of JSON."""
    out = bytearray(data)
    for _ in range(draw.randint(1, 5)):
        end = min(len(out), reach or len(out))
        at, count = draw.randint(0, end), draw.choice((1, 1, 2, 4, 8, 64))
        edit = draw.randrange(6)
        if edit == 0 and at < len(out):
            out[at] ^= 1 << draw.randrange(8)
        elif edit == 1 and at < len(out):
            out[at] = draw.choice((0, 1, 9, 32, 48, 57, 127, 128, 255, draw.randrange(256)))
        elif edit == 2:
            del out[at : at + count]
        elif edit == 3:
            out[at:at] = draw.choice(TOKENS)
        elif edit == 4:
            out[at:at] = out[draw.randint(0, end) :][:count]
        elif draw.random() < 0.2:
            del out[at:]
    return bytes(out)


def damage_text(draw: Random, text: str, pieces: list[str]) -> str:
    """One to six edits of a text: pieces put in, parts cut, doubled, moved or overwritten."""
    for _ in range(draw.choice((1, 1, 2, 3, 6))):
        a, b = sorted((draw.randint(0, len(text)), draw.randint(0, len(text))))
        b = min(b, a + draw.choice((1, 3, 10, 80)))
        edit = draw.randrange(6)
        if edit <= 2:
            text = text[:a] + draw.choice(pieces) + text[a:]
        elif edit == 3:
            text = text[:a] + text[b:]
        elif edit == 4:
            text = text[:b] + text[a:b] * draw.choice((1, 1, 2, 50)) + text[b:]
        else:
            text = text[:a] + draw.choice(pieces) + text[b:]
    return text


def _places(box: list[Any]) -> list[tuple[Any, Any]]:
    """Every (container, key) of the value in `box`, the box itself included."""
    out, stack = [], [box]
    while stack:
        part = stack.pop()
        keys = list(part) if isinstance(part, dict) else range(len(part))
        for key in keys:
            out.append((part, key))
            if isinstance(part[key], (dict, list)):
                stack.append(part[key])
    return out


def _change(draw: Random, parent: Any, key: Any, donors: list[Any]) -> None:
    old, edit = parent[key], draw.randrange(9)
    if edit <= 2:
        parent[key] = copy.deepcopy(draw.choice(EDGES))
    elif edit == 3 and isinstance(old, int) and not isinstance(old, bool):
        near = (old + 1, old - 1, -old, old * 2, old // 2, float(old % 2**53), str(old))
        parent[key] = draw.choice(near)
    elif edit == 3 and isinstance(old, str):
        parent[key] = damage_text(draw, old, [e for e in EDGES if isinstance(e, str)])
    elif edit == 4 and isinstance(parent, (dict, list)) and len(parent) > 1:
        del parent[key]
    elif edit == 5:
        donor = [copy.deepcopy(draw.choice(donors))]
        source, at = draw.choice(_places(donor))
        parent[key] = source[at]
    elif edit == 6 and isinstance(parent, dict):
        name = draw.choice((f"{key}_", str(key).upper(), "", "_x", "\ud800", "x" * 300))
        parent[name] = parent.pop(key) if draw.random() < 0.5 else copy.deepcopy(old)
    elif edit == 7:
        parent[key] = [old] * draw.choice((0, 1, 2, 40))
    else:
        donor = [copy.deepcopy(draw.choice(donors))]
        source, at = draw.choice(_places(donor))
        new = source[at]
        if isinstance(old, dict) and isinstance(new, dict):
            old.update(new)
        elif isinstance(old, list):
            old.insert(draw.randint(0, len(old)), new)
        else:
            parent[key] = new
