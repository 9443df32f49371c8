"""How the demo's completions are made, cut and judged, and its bits per byte."""

import math

import pytest
import torch

from kog_triton.demo.completions import Stepper, complete, judge, pick
from kog_triton.demo.evaluate import bits_per_byte
from kog_triton.demo.functions import cut_completion, functions
from kog_triton.demo.model import Decoder, Shape
from kog_triton.errors import RunError
from tests.lib.demo_cases import TINY, ids_of, spread

pytestmark = pytest.mark.usefixtures("one_thread")
OUTER = '''class A:
    def method(self, n):
        """Doc.

        More."""
        total = 0

        for i in range(n):
            total += i
            total *= 2
        return total

    def short(self):
        return 1


@decorated
def free(x):
    a = 1
    b = 2
    c = 3
    d = 4
    return a
'''


def test_functions_are_dedented_and_cut_after_two_body_lines() -> None:
    free, method = functions(OUTER)
    assert free.top_level and not method.top_level
    assert free.prefix == "def free(x):\n    a = 1\n    b = 2"
    assert method.text.startswith('def method(self, n):\n    """Doc.\n\n    More')
    assert method.prefix.endswith("    total = 0\n\n    for i in range(n):")


@pytest.mark.parametrize(
    ("source", "prefix_lines"),
    [
        ("def f():\n    a = 1\n    b = 2\n    c = 3\n    return a\n", 0),
        ("def f():\n    a = 1\n    b = 2\n    c = 3\n    d = 4\n    return a\n", 3),
        ('def f():\n    """Doc\n    string\n    only."""\n', 0),
    ],
)
def test_short_functions_have_no_prefix(source: str, prefix_lines: int) -> None:
    (function,) = functions(source)
    assert function.prefix_lines == prefix_lines


@pytest.mark.parametrize(
    ("completion", "ended", "cut"),
    [
        ("\n    return x\n\ndef g():\n    pass", False, "\n    return x\n\n"),
        ("\n    return x\n", True, "\n    return x\n"),
        ("\n    return x", True, "\n    return x"),
        ("\n    y = x\n    return (", False, "\n    y = x\n"),
        ("(\n    1,\n)\n# note\nx = 1", False, "(\n    1,\n)\n# note\n"),
        ("\nx = 1\n", True, "\n"),
        ("", True, ""),
        (" + 1", False, ""),
    ],
)
def test_completion_is_cut_at_the_end_of_the_function(completion: str, ended: bool, cut: str) -> None:
    assert cut_completion(completion, ended) == cut


def test_judge_wants_a_line_that_parses() -> None:
    prefix = "def f(x):\n    y = x\n    z = y"
    assert judge(prefix, "\n    return z\n\nprint(", False)
    assert not judge(prefix, "\n\nprint(1)", False)
    assert not judge(prefix, "\n    return (z\n\nprint(1)", False)
    assert not judge(prefix, "\n  return z\n", True)


# ---- completions ----


@pytest.mark.parametrize("shape", [TINY, TINY.twin()], ids=["delayed", "twin"])
def test_stepping_with_a_cache_equals_the_whole_context(shape: Shape) -> None:
    model, ids = spread(shape), ids_of(shape)
    stepper = Stepper(model, len(ids), ids.shape[1])
    with torch.inference_mode():
        stepped = torch.stack([stepper.step(column) for column in ids.T], dim=1)
        torch.testing.assert_close(stepped, model(ids), rtol=1e-4, atol=1e-4)
    with pytest.raises(RunError, match="need 41 positions"):
        Stepper(model, 1, 41)


def test_completion_in_a_ragged_batch_equals_completion_alone() -> None:
    model = spread(TINY).eval()
    prompts = [[5, 6, 7, 8, 9, 10, 11], [12], [13, 14, 15]]
    together = complete(model, prompts, 9, 0.0)
    assert together == [complete(model, [p], 9, 0.0)[0] for p in prompts]
    assert max(len(new) for new, _ in together) > 1
    for prompt, (new, ended) in zip(prompts, together, strict=True):
        with torch.inference_mode():
            want = model(torch.tensor([prompt + new])).argmax(-1)[0, len(prompt) - 1 :].tolist()
        assert want[: len(new) + ended] == new + [0] * ended


def test_bits_per_byte_counts_every_whole_window() -> None:
    model = Decoder(TINY)
    with torch.no_grad():
        model.lm_head.weight.zero_()  # every id has probability 1 / vocab_size
    ids = torch.arange(95, dtype=torch.int32) % TINY.vocab_size
    got = bits_per_byte(model, ids, num_bytes=190, batch=1)
    assert got == pytest.approx(math.log2(TINY.vocab_size) / 2, rel=1e-5)
    with pytest.raises(RunError, match="fewer than a window of 40"):
        bits_per_byte(model, ids[:40], num_bytes=80)


def test_sampling_keeps_the_smallest_set_that_reaches_top_p() -> None:
    logits = torch.log(torch.tensor([[0.04, 0.6, 0.35, 0.01]])).repeat(2000, 1)
    drawn = pick(logits, 1.0, torch.Generator().manual_seed(0))
    share = (drawn == 1).float().mean().item()
    assert set(drawn.tolist()) == {1, 2}
    assert abs(share - 0.6 / 0.95) < 0.04
    assert pick(logits, 0.0, torch.Generator()).tolist() == [1] * 2000
