"""The demo's corpus: which licenses are permissive, what is left out, how it is split, its tokenizer."""

import json
from email.message import Message
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from kog_triton.demo.corpus import Document, Source, build, clean, content_hash, held_out_prefixes
from kog_triton.demo.functions import functions
from kog_triton.demo.licenses import decide
from kog_triton.demo.model import Shape
from kog_triton.demo.tokenizer import save_tokenizer, train_tokenizer
from kog_triton.errors import RunError
from tests.lib.text_samples import SNIPPET


@pytest.mark.parametrize(
    ("headers", "permissive"),
    [
        ([("License-Expression", "MIT")], True),
        ([("License-Expression", "BSD-3-Clause AND (0BSD OR GPL-3.0-only) AND Zlib")], True),
        ([("License-Expression", "MIT OR GPL-2.0-or-later")], True),
        ([("License-Expression", "MPL-2.0 AND MIT")], False),
        ([("License-Expression", "GPL-3.0-or-later WITH GCC-exception-3.1")], False),
        ([("License-Expression", "Apache-2.0 WITH LLVM-exception")], True),
        ([("License-Expression", "MIT AND")], False),
        ([("License-Expression", "(MIT")], False),
        ([("License-Expression", "MIT BSD-3-Clause")], False),
        ([("License-Expression", "LicenseRef-Proprietary")], False),
        ([("License-Expression", "GPL-3.0-only"), ("License", "MIT")], False),
        ([("Classifier", "License :: OSI Approved :: MIT License")], True),
        ([("Classifier", "License :: OSI Approved"), ("Classifier", "License :: OSI Approved :: BSD License")], True),
        (
            [
                ("Classifier", "License :: OSI Approved :: MIT License"),
                ("Classifier", "License :: Other/Proprietary License"),
            ],
            False,
        ),
        ([("Classifier", "License :: OSI Approved :: BSD License"), ("License", "LGPLv3")], False),
        ([("Classifier", "License :: OSI Approved :: BSD License"), ("License", "BSD")], True),
        ([("License", "Apache License,  Version 2.0")], True),
        ([("License", "see LICENSE.txt")], False),
        ([("License", "UNKNOWN")], False),
        ([("Classifier", "Programming Language :: Python")], False),
        ([], False),
    ],
)
def test_license_decisions(headers: list[tuple[str, str]], permissive: bool) -> None:
    metadata = Message()
    for name, value in headers:
        metadata[name] = value
    decision = decide(metadata)
    assert decision.permissive == permissive
    assert bool(decision.reason) != permissive


def test_files_that_are_left_out(tmp_path: Path) -> None:
    body = "def add(first, second):\n    return first + second\n" * 6
    cases = {
        "vendored": ("pkg/_vendor/a.py", body.encode()),
        "generated": ("pkg/b.py", b"# This file is auto-generated, DO NOT EDIT\n" + body.encode()),
        "too large": ("pkg/c.py", b"x = 1\n" * 40_000),
        "not UTF-8": ("pkg/d.py", body.encode() + b"# caf\xe9\n"),
        "near empty": ("pkg/e.py", b"x = 1\n"),
        "does not parse": ("pkg/f.py", body.encode() + b"def (\n"),
        "data": ("pkg/g.py", b"TABLE = [" + b"[0, 1, 2, 3],\n" * 40 + b"]\n"),
        "unreadable": ("pkg/absent.py", None),
        "": ("pkg/third_partyish.py", b"#!/bin/python\n# Copyright\n\n" + body.encode()),
    }
    for reason, (name, content) in cases.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is not None:
            path.write_bytes(content)
        found, text, _ = clean(path)
        assert found == reason
        assert text == ("" if reason else body)


def test_corpus_is_split_by_content_and_without_duplicates(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # A folder of its own: tmp_path has the name of this test, so its files would count as tests.
    folder = tmp_path_factory.mktemp("files")
    paths = []
    for i in range(150):
        path = folder / f"m{i:03d}.py"
        lines = "".join(f"    value_{i} += {j} * scale\n" for j in range(9))
        path.write_text(f"def compute_{i}(scale):\n    value_{i} = 0\n{lines}    return value_{i}\n")
        paths.append(path)
    twice = folder / "twice.py"
    twice.write_text(paths[0].read_text().replace("\n", "  \n"))
    source = Source("made-up", "1", "MIT", (*paths, twice))
    manifest = build(tmp_path / "out", Shape(), [source], [])
    splits = manifest["splits"]
    heldout = [p.read_text() for p in paths if int(content_hash(p.read_text())[:8], 16) < 2**32 / 50]
    assert heldout, "the made-up files must reach both splits"
    assert manifest["skipped_files"] == {"duplicate": 1}
    assert splits["heldout"]["documents"] == len(heldout)
    assert manifest["train_files"] == 150 - len(heldout)
    ids = np.fromfile(tmp_path / "out" / "heldout.bin", dtype=np.uint16)
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    documents = np.split(ids, np.flatnonzero(ids == 0))[1:]
    assert sorted(tokenizer.decode(d[1:]) for d in documents) == sorted(heldout)
    prefixes = json.loads((tmp_path / "out" / "prefixes.json").read_text())
    assert {p["prefix"] for p in prefixes} == {"\n".join(t.split("\n")[:3]) for t in heldout}


def test_prefixes_are_of_unknown_functions_of_held_out_files() -> None:
    body = "    a = 1\n    b = 2\n    c = 3\n    d = 4\n    return a\n"
    found = functions("".join(f"def f{i}():\n{body}\n\n" for i in range(6)))
    documents = {digest: Document("p", "", tuple(found)) for digest in ("00000001", "ffffffff")}
    known = {content_hash(found[0].text), content_hash(found[2].text)}
    chosen = held_out_prefixes(documents, known, limit=9)
    names = sorted(entry["prefix"].split("(")[0] for entry in chosen)
    assert names == ["def f1", "def f3", "def f4"]
    assert len(held_out_prefixes(documents, known, limit=2)) == 2
    del documents["00000001"]
    assert held_out_prefixes(documents, set(), limit=9) == []


def test_corpus_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no usable Python source"):
        build(tmp_path, Shape(), [], [])


def test_tokenizer_pieces_and_round_trip(tmp_path: Path) -> None:
    text = "def f(a_b):\n    if a_b:\n        return self.x_1 + 2026  # é 漢 🙂\n\n\n\tend\r\n"
    tokenizer = train_tokenizer([SNIPPET, text] * 3, 400)
    save_tokenizer(tokenizer, tmp_path, 1024)
    loaded = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    entry = loaded.encode(text)
    assert entry.ids[0] == 0 and loaded.id_to_token(0) == "<|endoftext|>"
    assert loaded.decode(entry.ids) == text
    pieces = [loaded.decode([i]) for i in entry.ids]
    assert "        " in pieces and not any("\n" in p and p.strip("\n") for p in pieces)
    assert [p for p in pieces if p.strip().isdigit()] == ["1", "2", "0", "2", "6"]
