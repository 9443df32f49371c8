"""The demo's training: it resumes exactly, reads every window once, and exports what it made."""

from pathlib import Path

import numpy as np
import pytest
import torch

from kog_triton.demo.evaluate import load_model
from kog_triton.demo.export import export, from_llama_tensors, llama_tensors, save_sharded
from kog_triton.demo.tokenizer import save_tokenizer, train_tokenizer
from kog_triton.demo.train import Settings, Training, Windows, newest, run
from kog_triton.errors import ModelError, RunError
from tests.lib.demo_cases import SETTINGS, TINY, laneformer_shapes, read_shards, spread
from tests.lib.text_samples import SNIPPET

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    ids = np.random.default_rng(0).integers(0, TINY.vocab_size, 150).astype(np.uint16)
    ids.tofile(tmp_path / "train.bin")
    save_tokenizer(train_tokenizer([SNIPPET], 300), tmp_path, TINY.max_positions)
    return tmp_path


def test_training_resumes_exactly(data: Path, tmp_path: Path) -> None:
    whole = Training(TINY, SETTINGS, data, "cpu")
    run(whole, tmp_path / "whole", log_every=1, save_every=4, stop=None)
    run(Training(TINY, SETTINGS, data, "cpu"), tmp_path / "cut", 1, 100, stop=5)
    (tmp_path / "cut" / "step-0000009.tmp").mkdir()  # what an interrupted save leaves behind
    resumed = Training(TINY, SETTINGS, data, "cpu")
    resumed.restore(newest(tmp_path / "cut"))
    assert resumed.step == 5
    run(resumed, tmp_path / "cut", 1, 100, stop=None)
    assert resumed.curve == whole.curve and len(whole.curve) == 9
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name
    assert [p.name for p in (tmp_path / "whole").iterdir()] == ["step-0000009"]
    other = Training(TINY, Settings(**{**SETTINGS.__dict__, "seed": 6}), data, "cpu")
    with pytest.raises(RunError, match="other settings"):
        other.restore(newest(tmp_path / "cut"))
    with pytest.raises(RunError, match="train first"):
        newest(tmp_path / "nowhere")
    with pytest.raises(RunError, match=r"train\.bin is missing"):
        Training(TINY, SETTINGS, tmp_path / "nowhere", "cpu")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_model(tmp_path / "nowhere", "cpu")


def test_each_pass_reads_every_window_once_in_a_new_order() -> None:
    windows = Windows(torch.arange(150), SETTINGS)
    assert windows.per_pass == 4
    passes = []
    for pass_idx in range(2):
        batches = [windows.batch(pass_idx * 4 + i) for i in range(4)]
        starts = torch.cat(batches)[:, 0].tolist()
        assert sorted(starts) == list(range(min(starts), min(starts) + 8 * 16, 16))
        assert all(torch.equal(row, row[0] + torch.arange(17)) for b in batches for row in b)
        passes.append(starts)
    assert passes[0] != passes[1]
    with pytest.raises(RunError, match="one batch needs"):
        Windows(torch.arange(40), SETTINGS)


def test_a_small_text_is_learned(data: Path, tmp_path: Path) -> None:
    np.tile(np.arange(10, dtype=np.uint16), 15).tofile(data / "train.bin")
    settings = Settings(tokens=40 * 2 * 16, batch=2, window=16, warmup=5, peak_rate=1e-2)
    training = Training(TINY, settings, data, "cpu")
    run(training, tmp_path / "run", 1, 100, None)
    assert training.curve[0][1] > 3.0
    assert training.curve[-1][1] < 0.7


# ---- export ----


def test_export_writes_the_laneformer_names_and_reloads(data: Path, tmp_path: Path) -> None:
    training = Training(TINY, SETTINGS, data, "cpu")
    training.advance()
    training.save(tmp_path / "run")
    export(tmp_path / "run", data, tmp_path / "out")
    tensors = read_shards(tmp_path / "out")
    assert {n: tuple(t.shape) for n, t in tensors.items()} == laneformer_shapes(TINY)
    assert {t.dtype for t in tensors.values()} == {torch.float16}
    model = load_model(tmp_path / "out", "cpu")
    assert model.shape == TINY
    halved = {n: t.half().float() for n, t in training.model.state_dict().items()}
    assert all(torch.equal(model.state_dict()[n], t) for n, t in halved.items())


def test_export_refuses_what_float16_cannot_hold(data: Path, tmp_path: Path) -> None:
    training = Training(TINY, SETTINGS, data, "cpu")
    training.advance()
    with torch.no_grad():
        training.model.lm_head.weight[3, 4] = 1e5
    training.save(tmp_path / "run")
    with pytest.raises(ModelError, match=r"lm_head\.weight does not fit float16"):
        export(tmp_path / "run", data, tmp_path / "out")


def test_shards_stay_under_the_limit(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((5, 7), float(i)) for i in range(5)}
    save_sharded(tensors, tmp_path, limit=300)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    assert all(torch.equal(t, tensors[n]) for n, t in read_shards(tmp_path).items())
    with pytest.raises(ModelError, match="t0 has 140 bytes"):
        save_sharded(tensors, tmp_path, limit=100)


def test_llama_tensors_can_be_turned_back() -> None:
    tensors = dict(spread(TINY.twin()).state_dict())
    there = llama_tensors(tensors, TINY.num_heads)
    assert not torch.equal(
        there["model.layers.0.self_attn.q_proj.weight"], tensors["model.layers.0.attention.wq.weight"][0]
    )
    back = from_llama_tensors(there, TINY.num_heads)
    assert list(back) == list(tensors)
    assert all(torch.equal(back[n], t) for n, t in tensors.items())
