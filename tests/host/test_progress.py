"""The progress bar of a list of prompts."""

from contextlib import suppress

import pytest

from kog_triton import progress
from kog_triton.progress import Progress


def test_it_counts_samples_and_tokens_a_second(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    with Progress(3, use_tqdm=True) as bar:
        (task,) = bar._bar.tasks
        now[0] = 102.0
        bar.add_tokens(10)
        bar.add_tokens(30)
        bar.add_sample()
        assert (task.completed, task.total, task.description) == (1, 3, "20 tokens/s")
    assert capsys.readouterr().out == ""


def test_it_draws_nothing_unless_it_is_to_show(capsys):
    with Progress(3, use_tqdm=False) as bar:
        bar.add_tokens(10)
        bar.add_sample()
    assert capsys.readouterr() == ("", "")


class Bar:
    """What a caller makes bars by, as tqdm is called."""

    def __init__(self, total, desc):
        self.said = [total]

    def update(self, count):
        self.said.append(count)

    def set_postfix_str(self, text, refresh):
        self.said.append(text.rpartition(" ")[2])

    def close(self):
        self.said.append("closed")


@pytest.mark.parametrize("failing", [False, True])
def test_a_callers_bar_is_told_and_closed_however_it_ends(failing):
    with suppress(KeyError), Progress(2, Bar) as progress:
        progress.add_tokens(3)
        progress.add_sample()
        if failing:
            raise KeyError
        progress.add_sample()
    counted = [1] if failing else [1, 1]
    assert progress._tqdm.said == [2, "tokens/s", *counted, "closed"]
