"""Names in the code are the glossary's: no identifier holds a word that docs/GLOSSARY.md has retired."""

import io
import re
import tokenize
from itertools import pairwise
from pathlib import Path

import pytest

from tests import ROOT

FOREIGN = r"\b(math|np|torch|tl|std)(\.|::)floor\b|\bpast_key_values\b|\bV_FLOOR_F(32|64)\b"  # others' names
CPLUSPLUS = {".h", ".cu", ".cpp"}
FILES = [
    path
    for folder in ("kog_triton", "backends", "tests", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in {".py", *CPLUSPLUS}
]


def retired_words(glossary: str) -> set[str]:
    """The words in the first column of the glossary's second table."""
    rows = [r for r in glossary.split("## Retired words")[1].splitlines() if r.startswith("|")]
    return {word.strip() for row in rows[2:] for word in row.split("|")[1].split(",")}


def identifiers(path: Path, text: str) -> set[str]:
    """Names in the text of a file, without those of tests, which are sentences."""
    text = re.sub(FOREIGN, "foreign", text)
    if path.suffix in CPLUSPLUS:
        text = re.sub(r'/\*.*?\*/|//[^\n]*|"(\\.|[^"\\\n])*"', " ", text, flags=re.S)
        return set(re.findall(r"[A-Za-z_]\w*", text))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    names = {t.string for t in tokens if t.type == tokenize.NAME}
    return {n for n in names if not n.startswith("test_")}


def words_of(name: str) -> set[str]:
    """Its words in lower case and pairs of neighbors (kPutAway has put_away), also without a plural's s."""
    words = [w.lower() for w in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    words += ["_".join(pair) for pair in pairwise(words)]
    return {*words, *(w.removesuffix("s") for w in words)}


RETIRED = retired_words((ROOT / "docs" / "GLOSSARY.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_name_holds_a_retired_word(path):
    text = path.read_text(encoding="utf-8")
    found = sorted(n for n in identifiers(path, text) | {path.stem} if words_of(n) & RETIRED)
    found = [n for n in found if not n.startswith("test_")]
    assert not found, f"{path.relative_to(ROOT)}: docs/GLOSSARY.md says what to call {found}"


@pytest.mark.parametrize(
    "text, suffix",
    [
        ("next_turn", ".py"),
        ("votes", ".py"),
        ("x.floor", ".py"),
        ("kMostSeats", ".h"),
        ("put_away", ".h"),
        ("PAST", ".cu"),
        ("kRingChunks", ".h"),
        ("chunk_bytes", ".py"),
        ("kKvTasksKept", ".h"),
    ],
)
def test_a_retired_word_is_found(text, suffix):
    names = identifiers(Path("x" + suffix), f"{text} = 1\n")
    assert any(words_of(name) & RETIRED for name in names)


@pytest.mark.parametrize(
    "text", ["math.floor(x)", "y.past_key_values", "# a turn", '"a vote"', "returns", "overturned"]
)
def test_what_is_no_name_of_ours_is_left_alone(text):
    names = identifiers(Path("x.py"), f"{text}\n")
    assert not any(words_of(name) & RETIRED for name in names)
