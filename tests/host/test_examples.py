"""Every file of examples/ runs on the demo, and its output is what its first line promises."""

import json
import re
import runpy
import sys

import pytest

from kog_triton.demo import checkpoint_path
from tests import DATA, ROOT

EXAMPLES = ROOT / "examples"
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def example(monkeypatch, capsys):
    """Runs one as a program does, in this process; what it wrote to stdout and stderr."""

    def run(name, *argv):
        monkeypatch.setattr(sys, "argv", [name, *map(str, argv)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr()

    return run


def test_every_example_is_tested():
    text = (ROOT / "tests" / "host" / "test_examples.py").read_text()
    names = {path.name for path in EXAMPLES.iterdir() if path.name != "__pycache__"}
    assert names == set(re.findall(r'example\("(\w+\.py)"', text))


def test_streams_are_one_text_however_they_are_read(example):
    """Greedy, so the text that an event loop reads is the beginning of the one that a thread reads."""
    out, err = example("stream.py")
    assert out.startswith("\n    ") and "[48 tokens, ended by length]" in err
    first, second = example("async_streams.py").out.split("\n---\n")
    assert first.startswith("def add(a, b):\n") and first.endswith("\n[length]")
    made = first.removeprefix("def add(a, b):").removesuffix("\n[length]")
    assert len(made) > 60 and out.startswith(made)
    assert second.startswith("class Stack:\n") and second.endswith("\n[abort]\n")


def test_an_answer_follows_its_schema(example):
    answer = json.loads(example("json_schema.py").out)
    assert set(answer) == {"name", "arguments"}
    assert len(answer["name"]) <= 12 and 0 <= answer["arguments"] <= 9


def test_outputs_come_in_the_order_of_the_prompts(example):
    out = example("several_requests.py").out
    parts = re.split(r"^--- (.*)$", out, flags=re.MULTILINE)[1:]
    assert parts[::2] == ["'def add(a, b):'", "'class Stack:'", r"'import os\n\n'"]
    assert all(text.strip() for text in parts[1::2])


def test_a_conversation_finds_its_beginning_in_the_cache(example, tmp_path):
    """The demo's weights, beside a chat template that it does not have."""
    for file in checkpoint_path().iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").symlink_to(DATA / "chat_templates" / "chatml.jinja")
    out, err = example("chat.py", tmp_path)
    assert re.findall("^> .*$", out, re.MULTILINE) == ["> Name a sorting algorithm.", "> Write it in Python."]
    cached = re.findall(r"\[(\d+) of (\d+) prompt tokens", err)
    assert cached[0][0] == "0" and 40 < int(cached[1][0]) < int(cached[1][1])
