"""The fuzzers run, see what they must see, and every fault they found stays fixed.

A few thousand seeded cases of all targets; the long run is in fuzz/RECORD.md.
"""

import json
import os
import subprocess
import sys
from random import Random

import pytest

from kog_triton.errors import KogError, ModelError, RequestError
from kog_triton.model.families import read_spec
from kog_triton.text import Tokenizer, chat
from tests import ROOT
from tests.fuzz import worker
from tests.fuzz.table import TARGETS
from tests.fuzz.targets import Target
from tests.lib import tiny
from tests.lib.fake_checkpoint import byte_tokenizer

CASES = {"header": 400, "index": 400, "config": 500, "generation": 400}
CASES |= {"tokenizer": 400, "tokenizer_config": 500, "gguf": 1000, "narrow": 400}
MANY = 100_000  # of each surface that a stranger's checkpoint has; the record is of such runs


@pytest.mark.parametrize("name", TARGETS)
def test_seeded_cases(name):
    record = worker.fuzz(name, CASES[name], seed=20)
    assert record.faults == {}
    assert record.loaded + record.refused == record.cases
    assert min(record.loaded, record.refused) > 0  # neither all good nor all noise
    assert record.grown_memory_mib < 600


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gguf", "header", "index", "config", "tokenizer"])
def test_many_cases(name, tmp_path):
    """R14, and the file format that the table does not name. In a process of its own, whose memory is the cases'."""
    command = [sys.executable, "-m", "tests.fuzz", "--target", name, "--seed", "25"]
    said = tmp_path / "record.json"
    subprocess.run([*command, "--cases", str(MANY), "--json", str(said)], cwd=ROOT)
    (record,) = json.loads(said.read_text())
    assert record["faults"] == {} and record["cases"] == MANY
    assert min(record["loaded"], record["refused"]) > MANY / 100
    assert record["grown_memory_mib"] < 600 and record["peak_memory_mib"] <= 512


def test_a_case_is_its_seed(tmp_path):
    targets = [TARGETS["config"](tmp_path) for _ in range(2)]
    cases = [[worker.make_case(t, 3, i) for i in range(50)] for t in targets]
    assert cases[0] == cases[1] and len(set(cases[0])) > 40


class Faulty(Target):
    """Case 1 raises, 3 ends the process, 5 never ends, 7 floods memory, 9 says too much."""

    limit = 0.3

    def case(self, draw: Random) -> bytes:
        return b""

    def run(self, data: bytes) -> bool:
        self.number += 1
        if self.number == 1:
            raise ZeroDivisionError("one")
        if self.number == 3:
            os._exit(3)
        while self.number == 5:
            pass
        if self.number == 7:
            bytearray(8 << 30)
        if self.number == 9:
            return super().run(data)
        return True

    def load(self, data: bytes) -> None:
        raise ModelError("two\nlines")


def test_the_harness_sees_every_kind_of_fault(monkeypatch):
    def make_case(target: Faulty, seed: int, number: int) -> bytes:
        target.number = number - 1
        return b""

    monkeypatch.setitem(TARGETS, "faulty", Faulty)
    monkeypatch.setattr(worker, "make_case", make_case)
    record = worker.fuzz("faulty", 12, seed=0)
    first = {found["first_case"]: name for name, found in record.faults.items()}
    assert sorted(first) == [1, 3, 5, 7, 9]
    kinds = ("ZeroDivisionError", "crash", "hang", "MemoryError", "AssertionError")
    for case, kind in zip((1, 3, 5, 7, 9), kinds, strict=True):
        assert first[case].startswith(kind)
    assert record.loaded >= 5


# ---- faults that were found: config.json ----


def test_the_name_of_an_option_is_not_repeated_at_any_length():
    name = "rope_" + "x" * 5000
    for change in ({name: 3}, {"rope_scaling": {name: {}}}):
        with pytest.raises(ModelError, match="RoPE") as error:
            read_spec(tiny.LLAMA | change)
        assert len(str(error.value)) < 300


# ---- faults that were found: templates ----


def test_a_template_that_python_does_not_take_is_the_models_fault():
    with pytest.raises(ModelError, match="chat template, line"):
        chat.render("{% macro f() %}{% continue %}{% endmacro %}{{ f() }}", {}, True)


@pytest.mark.parametrize("messages", [1.5, 3, True, {"role": "user"}, "user", [], None])
def test_messages_that_are_no_list(messages):
    with pytest.raises(RequestError, match="messages must be a non-empty list"):
        chat.prepare(messages, None, None, {})


# ---- faults that were found: tokenizer files ----


def load(folder, config, data=None):
    """A tokenizer with these in tokenizer_config.json, or ModelError of one line."""
    if data is None:
        byte_tokenizer().save(str(folder / "tokenizer.json"))
    else:
        (folder / "tokenizer.json").write_text(json.dumps(data))
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "tokenizer_config.json").write_text(text)
    try:
        return Tokenizer.load(folder)
    except KogError as error:
        assert len(str(error).splitlines()) == 1 and len(str(error)) < 600
        raise


@pytest.mark.parametrize(
    "config",
    [
        '{"a":' * 100_000,
        {"eos_token": "\ud800"},
        {"extra_special_tokens": ["\ud800"]},
        {"added_tokens_decoder": {"260": {"content": "\ud800"}}},
        {"added_tokens_decoder": {"260": {"content": 3}}},
        {"chat_template": [{"name": "a\nb", "template": "x"}]},
        {"chat_template": "x" * 300_000},
        {"chat_template": [{"name": "x" * 300, "template": "x"}]},
    ],
)
def test_a_broken_tokenizer_config_is_refused(tmp_path, config):
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        load(tmp_path, config)


def test_a_template_file_that_is_too_long_is_refused(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("x" * 300_000)
    with pytest.raises(ModelError, match=r"chat_template\.jinja.*longer than"):
        load(tmp_path, {})


@pytest.mark.parametrize("extra", [1e308, 7, True, {"a": "b"}])
def test_extra_tokens_that_are_no_list_are_not_read(tmp_path, extra):
    assert load(tmp_path, {"extra_special_tokens": extra}).encode("a") == [97]


def test_unknown_fields_of_a_token_print_nothing(tmp_path, capfd):
    token = {"content": "<y>", "special": True, "shade": "red", "": 1}
    tokenizer = load(tmp_path, {"added_tokens_decoder": {"260": token}})
    assert tokenizer.encode("<y>") == [260]
    assert capfd.readouterr() == ("", "")


def test_a_panic_of_the_library_is_the_models_fault(tmp_path):
    """A post-processor that names a token without an id."""
    data = json.loads(byte_tokenizer().to_str())
    parts = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    data["post_processor"] = {"type": "TemplateProcessing", "single": parts, "pair": parts}
    data["post_processor"]["special_tokens"] = {}
    with pytest.raises(ModelError, match=r"cannot encode|not a readable tokenizer"):
        load(tmp_path, {}, data).encode("a")
