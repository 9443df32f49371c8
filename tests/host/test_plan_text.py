"""`kog plan`, word by word, of shapes of every kind: tests/data/plans/shown.txt. What the figures must be is for
test_plan.py to ask; whoever means to change them writes that file anew."""

import re

import pytest

from kog_triton import plan
from tests import ROOT

SHOWN = (ROOT / "tests/data/plans/shown.txt").read_text(encoding="utf-8")
PLANS = dict(re.findall(r"^\$ kog plan (.*)\n((?:(?!\$ ).*\n)*)", SHOWN, re.M))


@pytest.mark.parametrize("words", PLANS)
def test_a_plan_is_shown_word_by_word(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert plan.main(words.split()) == 0
    assert capsys.readouterr().out.rstrip() == PLANS[words].rstrip()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--gpus 0", "argument --gpus: 0 is below 1"),
        ("--dtype fp32", "argument --dtype: invalid choice: 'fp32' (choose from bf16, fp16)"),
        ("--backend reference", "argument --backend: invalid choice: 'reference' (choose from cuda, hip, triton)"),
        ("--model a --shape b", "argument --shape: not allowed with argument --model"),
    ],
)  # fmt: skip
def test_what_plan_does_not_take(words, said, capsys):
    with pytest.raises(SystemExit) as exit:
        plan.main(words.split())
    shown = capsys.readouterr().err.replace(
        "(choose from 'bf16', 'fp16')", "(choose from bf16, fp16)"
    )
    shown = shown.replace("'cuda', 'hip', 'triton')", "cuda, hip, triton)")
    assert exit.value.code == 2 and shown == f"error: {said} (see kog plan --help)\n"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("--shape llama-3.2-1b --backend hip", 4,
         "error: the hip backend is for AMD GPUs, and h200 is not: --device mi300x"),
    ],
)  # fmt: skip
def test_what_has_no_hip_plan(words, code, said, capsys):
    assert plan.main(words.split()) == code
    assert capsys.readouterr().err.strip() == said
