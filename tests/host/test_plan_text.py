"""`kog plan`, word by word, of shapes of every kind: tests/data/plans/shown.txt.xz. What the figures must be is for
test_plan.py to ask; whoever means to change them writes that file anew (unxz, xz -9e). A rule under a heading is one
sign there."""

import lzma
import re

import pytest

from kog_triton import plan
from tests import ROOT

SHOWN = lzma.decompress((ROOT / "tests/data/plans/shown.txt.xz").read_bytes()).decode()
PLANS = dict(re.findall(r"^\$ kog plan (.*)\n((?:(?!\$ ).*\n)*)", SHOWN, re.M))


@pytest.mark.parametrize("words", PLANS)
def test_a_plan_is_shown_word_by_word(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert plan.main(words.split()) == 0
    shown = re.sub("─+", "─", capsys.readouterr().out)
    assert shown.rstrip() == PLANS[words].rstrip()


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
    shown = capsys.readouterr().err.replace("(choose from 'bf16', 'fp16')", "(choose from bf16, fp16)")
    shown = shown.replace("'cuda', 'hip', 'triton')", "cuda, hip, triton)")
    assert exit.value.code == 2 and shown == f"error: {said} (see kog plan --help)\n"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("--shape llama-3.2-1b --backend hip", 4,
         "error: the hip backend is for AMD GPUs, and h200 is not: --device mi300x"),
        ("--shape llama-3.2-1b --backend cuda --device mi300x", 4,
         "error: the cuda backend is for NVIDIA GPUs, and mi300x is not: --backend hip, or triton"),
    ],
)  # fmt: skip
def test_what_has_no_hip_plan(words, code, said, capsys):
    assert plan.main(words.split()) == code
    assert capsys.readouterr().err.strip() == said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--shape llama-3.3-70b", None),  # 131 GiB of 141
        ("--shape mistral-large-123b", "228.4 GiB of weights and has 141: choose --gpus 2 at least, or a"),
        ("--shape mistral-large-123b --gpus 2", None),
        ("--shape llama-3.3-70b --device h100-pcie", "GiB of weights and has 80: choose --gpus 2 at least, or a"),
        ("--shape llama-3.3-70b --device h100-pcie --format int4-g128", None),
        ("--shape mistral-large-123b --backend triton --device rtx-5090", "and has 32: choose a narrower"),
        ("--shape mistral-large-123b --device mi300x", "and has 192: choose --gpus 2 at least"),
    ],
)
def test_a_model_that_no_gpu_holds_is_told_with_how_many_would(words, says, capsys):
    assert plan.main(words.split()) == 0
    out = capsys.readouterr().out
    assert (says in out) if says else ("does not fit" not in out)
