"""The progress bar of a list of prompts."""

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
