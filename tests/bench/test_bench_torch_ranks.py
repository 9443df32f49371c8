"""The baseline of several GPUs, its processes on a CPU and its sums by gloo: it is the same model, and its errors."""

import numpy as np
import pytest
import torch

from kog_triton.bench.engines import EngineUnderTest
from kog_triton.bench.kl_limit import PEER
from kog_triton.bench.peers import Setting, find_peer, torch_ranks
from kog_triton.bench.peers.torch_shards import RankDecoder, RankWeights
from kog_triton.checkpoint.folder import Checkpoint
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.demo import checkpoint_path
from kog_triton.errors import RunError
from kog_triton.model.families import read_spec
from tests.lib.bench_models import MODELS, PROMPT, SMALL, judge_of
from tests.lib.slow import some_always

pytestmark = pytest.mark.usefixtures("one_thread")
EVEN = SMALL | {"vocab_size": 98}
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def opened(weights, ranks=2) -> EngineUnderTest:
    return find_peer("torch-ranks")(Setting(weights, CPU, len(PROMPT) + 16, num_gpus=ranks))


@pytest.mark.parametrize("model", some_always(MODELS, "llama", "qwen3"))
def test_two_processes_are_the_same_model(model):
    weights = RandomWeights(read_spec(EVEN | MODELS[model]))
    engine = opened(weights)
    try:
        check = judge_of(weights).examine(engine, PEER)
        assert check.passed and check.top1 == 1 and check.kl_max < 1e-9
        assert check.largest_gap < 1e-4
        runs = [engine.generate(PROMPT, 16) for _ in range(2)]
        assert runs[0].tokens == runs[1].tokens and len(runs[0].tokens) == 16
        assert runs[0].submitted < runs[0].arrivals[0] and len(runs[0].arrivals) == 16
        assert runs[0].arrivals == sorted(runs[0].arrivals)
        assert runs[0].arrivals[-1] < runs[1].submitted
        alone = find_peer("torch-graph")(Setting(weights, CPU, len(PROMPT) + 16))
        assert runs[0].tokens == alone.generate(PROMPT, 16).tokens
        whole = alone.memory_bytes()["weights"]
        assert whole < engine.memory_bytes()["weights"] < 2 * whole
        assert engine.memory_bytes()["kv_cache"] == alone.memory_bytes()["kv_cache"]
    finally:
        engine.close()


def test_shares_put_together_are_the_weights():
    weights = RandomWeights(read_spec(EVEN | MODELS["qwen2"]))
    each = [RankWeights(weights, rank, 2) for rank in range(2)]
    for name, axis in (("q_proj", 1), ("gate_proj", 1), ("k_bias", 1), ("o_proj", 2), ("down_proj", 2)):
        parts = [one.load(f"layers.0.{name}") for one in each]
        assert torch.equal(torch.cat(parts, axis), weights.load(f"layers.0.{name}")), name
    assert torch.equal(each[1].load("embed"), weights.load("embed"))


class TwoAlike:
    def each(self, mine):
        return torch.cat([mine - 1, mine])


def test_the_best_id_is_found_without_the_host():
    """A tensor without values has nothing that the host could read, as a step has nothing while it is captured."""
    decoder = RankDecoder.__new__(RankDecoder)
    decoder.rank, decoder.sums = 1, TwoAlike()
    assert decoder.best(torch.tensor([[0.5, 3.0, 2.0]])).tolist() == [4]
    found = decoder.best(torch.empty(1, 3, device="meta"))
    assert (found.shape, found.dtype) == ((1,), torch.int64)


def test_a_process_that_fails_is_told_and_the_others_end():
    weights = RandomWeights(read_spec(EVEN | MODELS["qwen2"]))
    engine = opened(weights)
    processes = [process for process, _ in engine._ranks]
    with pytest.raises(RunError, match=r"rank \d: IndexError"):
        engine.generate([10**9], 4)
    engine.close()
    assert not any(process.is_alive() for process in processes)


def test_a_process_that_was_killed_is_told(monkeypatch):
    engine = opened(RandomWeights(read_spec(EVEN | MODELS["qwen2"])))
    try:
        process, _ = engine._ranks[1]
        process.kill()
        process.join()
        with pytest.raises(RunError, match="rank"):
            engine.generate(PROMPT, 4)
    finally:
        monkeypatch.setattr(torch_ranks, "CLOSE_S", 1)
        engine.close()


def test_a_way_that_fails_is_told_and_the_next_one_runs(monkeypatch, caplog):
    """Symmetric memory is a GPU's: on a CPU it fails as a capture might on GPUs."""
    weights = RandomWeights(read_spec(EVEN | MODELS["qwen2"]))
    monkeypatch.setattr(torch_ranks, "WAYS", torch_ranks.WAYS[1:])
    engine = opened(weights)
    try:
        alone = find_peer("torch-graph")(Setting(weights, CPU, len(PROMPT) + 16))
        assert engine.generate(PROMPT, 8).tokens == alone.generate(PROMPT, 8).tokens
        says = "no CUDA graph, sums by NCCL; not with CUDA graph a GPU, sums by symmetric memory in one shot: rank "
        assert says in engine.version
        assert "torch-ranks: not with CUDA graph a GPU, sums by symmetric" in caplog.text
    finally:
        engine.close()
    monkeypatch.setattr(torch_ranks, "WAYS", torch_ranks.WAYS[:1])
    with pytest.raises(RunError, match="rank"):
        opened(weights)


def test_a_checkpoint_is_opened_again_by_each_process():
    checkpoint = Checkpoint.open(checkpoint_path())
    make, arguments = checkpoint.__reduce__()
    again = make(*arguments)
    assert again.spec == checkpoint.spec and again is not checkpoint
    assert np.array_equal(again.load("norm").float(), checkpoint.load("norm").float())


@pytest.mark.parametrize(
    ("ranks", "changes", "device", "reason"),
    [
        (1, {}, GPU, "torch-graph on one"),
        (2, {}, CPU, "captured on a GPU only"),
        (3, {}, GPU, "do not divide over 3 GPUs"),
        (2, {}, GPU, ""),
    ],
)
def test_where_it_cannot_run_it_says_why(ranks, changes, device, reason):
    weights = RandomWeights(read_spec(EVEN | MODELS["qwen2"] | changes))
    why = find_peer("torch-ranks").absent(Setting(weights, device, 64, num_gpus=ranks))
    assert why.endswith(reason) and bool(why) == bool(reason)
