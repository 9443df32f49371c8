"""The demo: its model against a plain forward, what ships, and the record of how it came about.

The small trained Llama beside it is held to transformers.
"""

import json
import math
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from kog_triton.demo import checkpoint_path
from kog_triton.demo.evaluate import load_model
from kog_triton.demo.licenses import decide
from kog_triton.demo.model import Decoder, Shape
from kog_triton.demo.record import record
from kog_triton.errors import ModelError, RunError
from tests.lib.demo_cases import LLAMA, SETTINGS, TINY, ids_of, laneformer_shapes, read_shards, spread
from tests.lib.text_samples import SNIPPET

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- model ----


def plain_forward(model: Decoder, ids: list[int]) -> torch.Tensor:
    """The delayed model for one text, lane by lane and head by head, in float64."""
    shape = model.shape
    weights = {name: w.detach().double() for name, w in model.state_dict().items()}
    width, eps = shape.head_dim, shape.norm_eps

    def norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * gain

    def rotate(x: torch.Tensor) -> torch.Tensor:
        rotated = x.clone()
        for t in range(len(x)):
            for k in range(width // 2):
                angle = t * shape.rope_theta ** (-2 * k / width)
                a, b = x[t, 2 * k].item(), x[t, 2 * k + 1].item()
                rotated[t, 2 * k] = a * math.cos(angle) - b * math.sin(angle)
                rotated[t, 2 * k + 1] = a * math.sin(angle) + b * math.cos(angle)
        return rotated

    def attention(x: torch.Tensor, prefix: str, lane: int) -> torch.Tensor:
        q, k, v = (x @ weights[f"{prefix}.attention.{n}.weight"][lane].T for n in ("wq", "wk", "wv"))
        heads = []
        for first in range(0, q.shape[1], width):
            part = slice(first, first + width)
            scores = rotate(q[:, part]) @ rotate(k[:, part]).T / math.sqrt(width)
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
            heads.append(scores.softmax(-1) @ v[:, part])
        return torch.cat(heads, 1) @ weights[f"{prefix}.attention.wo.weight"][lane].T

    def feed_forward(x: torch.Tensor, prefix: str, lane: int) -> torch.Tensor:
        w1, w2, w3 = (weights[f"{prefix}.feed_forward.w{n}.weight"][lane] for n in (1, 2, 3))
        gate = x @ w1.T
        return (gate / (1 + torch.exp(-gate)) * (x @ w3.T)) @ w2.T

    lanes = range(shape.num_lanes)
    streams = [weights["model.tok_embeddings.weight"][ids] for _ in lanes]
    raw = {}
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        for name, gain, module in (
            ("attention", "attention_norm", attention),
            ("feed_forward", "ffn_norm", feed_forward),
        ):
            gains = weights[f"{prefix}.{gain}.weight"]
            raw[name, layer] = [module(norm(streams[i], gains), prefix, i) for i in lanes]
            for i in lanes:
                own = raw[name, layer][i]
                if layer < shape.delay:
                    streams[i] = streams[i] + math.sqrt(shape.num_lanes) * own
                else:
                    delayed = raw[name, layer - shape.delay]
                    streams[i] = streams[i] + own + sum(delayed[j] for j in lanes if j != i)
    final = [norm(stream, weights["model.norm.weight"]) for stream in streams]
    return sum(final) / shape.num_lanes @ weights["lm_head.weight"].T


def test_delayed_model_equals_a_plain_forward() -> None:
    model = spread(TINY)
    ids = ids_of(TINY, batch=1)
    want = plain_forward(model, ids[0].tolist())
    got = model(ids)[0].detach().double()
    assert want.std() > 1
    assert (got - want).abs().max() < 1e-4 * want.abs().max()


def test_one_delayed_lane_is_an_ordinary_decoder() -> None:
    shape = Shape(**{**TINY.__dict__, "num_lanes": 1})
    ids = ids_of(TINY)
    torch.testing.assert_close(spread(shape)(ids), spread(TINY.twin())(ids), rtol=0, atol=0)


def test_blocking_lanes_equal_the_twin_from_the_same_seed() -> None:
    lanes = spread(Shape(**{**TINY.__dict__, "reduce": "blocking"}))
    ids = ids_of(TINY)
    torch.testing.assert_close(lanes(ids), spread(TINY.twin())(ids), rtol=1e-4, atol=1e-4)


def test_permuting_lanes_leaves_the_logits_and_permuting_one_matrix_does_not() -> None:
    model, ids = spread(TINY), ids_of(TINY)
    before = model(ids)
    order = torch.tensor([2, 0, 1])
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 3:
                weight.copy_(weight[order])
        torch.testing.assert_close(model(ids), before, rtol=1e-4, atol=1e-4)
        wrong = model.model.layers[3].attention.wo.weight
        wrong.copy_(wrong[order])
    assert (model(ids) - before).abs().max() > 0.1


@pytest.mark.parametrize("change", [{"reduce": "late"}, {"num_heads": 7}, {"num_lanes": 4}])
def test_impossible_shapes_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ModelError):
        Shape(**{**TINY.__dict__, **change})


# ---- what ships ----


DEMO_RECORD = json.loads((checkpoint_path().parent / "training.json").read_text())
LLAMA_RECORD = json.loads((LLAMA / "training.json").read_text())


@pytest.mark.parametrize(
    ("folder", "run", "most_bytes"),
    [
        pytest.param(checkpoint_path(), DEMO_RECORD["demo"], 20_000_000, id="demo"),
        pytest.param(LLAMA, LLAMA_RECORD, 1_000_000, id="llama"),
    ],
)
def test_trained_files_are_small_finite_and_of_the_size_recorded(
    folder: Path, run: dict[str, Any], most_bytes: int
) -> None:
    shards = list(folder.glob("*.safetensors"))
    assert len(shards) == 2 and all(file.stat().st_size < 15_000_000 for file in shards)
    assert sum(file.stat().st_size for file in folder.iterdir()) <= most_bytes
    tensors = read_shards(folder)
    assert sum(t.numel() for t in tensors.values()) == run["evaluation"]["parameters"]
    assert all(t.dtype == torch.float16 and t.isfinite().all() for t in tensors.values())
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 0


def snippet_loss(logits: torch.Tensor, ids: torch.Tensor) -> float:
    """Mean cross-entropy in nats a token of one text."""
    return float(torch.nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:]))


def test_shipped_demo_has_the_stated_shapes_and_predicts_python() -> None:
    folder = checkpoint_path()
    shapes = {n: tuple(t.shape) for n, t in read_shards(folder).items()}
    assert shapes == laneformer_shapes(Shape())
    model = load_model(folder, "cpu")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = torch.tensor([tokenizer.encode(SNIPPET).ids])
    with torch.inference_mode():
        logits = model(ids)
    # A model that knows nothing has log(4096) = 8.3 nats.
    assert snippet_loss(logits, ids) < 1.5


def test_the_trained_llama_is_what_transformers_computes_and_each_tensor_counts() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = torch.tensor([AutoTokenizer.from_pretrained(LLAMA)(SNIPPET).input_ids])
    assert ids[0].tolist() == Tokenizer.from_file(str(LLAMA / "tokenizer.json")).encode(SNIPPET).ids
    theirs = AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32).eval()
    own = load_model(LLAMA, "cpu")
    with torch.inference_mode():
        want = theirs(ids).logits
        assert want.std() > 4
        # A model that knows nothing has log(512) = 6.2 nats.
        assert snippet_loss(want, ids) < 2
        torch.testing.assert_close(own(ids), want, rtol=1e-3, atol=1e-3)
        for name, weight in own.named_parameters():
            kept = weight.clone()
            weight *= 1.05
            assert not torch.allclose(own(ids), want, rtol=1e-3, atol=1e-3), name
            weight.copy_(kept)


# ---- the record ----


def test_record_joins_two_finished_runs_and_refuses_others(tmp_path: Path) -> None:
    state = {"step": 9, "seconds": 1.25, "shape": {}, "settings": SETTINGS.__dict__, "curve": [[9, 2.5]]}
    files = {
        "state": state,
        "short": {**state, "step": 8},
        "other": {**state, "settings": {**SETTINGS.__dict__, "seed": 1}},
        "figures": {"left_out": [], "packages": [{"package": "a", "files": 2}]},
    }
    paths = {name: tmp_path / f"{name}.json" for name in files}
    for name, content in files.items():
        paths[name].write_text(json.dumps(content))
    figures = paths["figures"]

    def joined(twin: str) -> dict[str, Any]:
        runs = [(paths[name], figures, figures) for name in ("state", twin)]
        return record(figures, figures, *runs)

    told = joined("state")
    assert told["twin"]["tokens"] == 9 * 2 * 16
    assert told["corpus"]["packages"] == {"columns": ["package", "files"], "rows": [["a", 2]]}
    with pytest.raises(RunError, match="stopped at step 8"):
        joined("short")
    with pytest.raises(RunError, match="other settings"):
        joined("other")
    paths["state"].write_text("{")
    with pytest.raises(RunError, match=r"state\.json"):
        joined("state")


def test_model_card_quotes_the_record() -> None:
    folder = checkpoint_path().parent
    card = " ".join((folder / "README.md").read_text().split())
    training = DEMO_RECORD
    rows = {
        "held-out bits per byte": lambda r: f"{r['evaluation']['bits_per_byte']:.4f}",
        "completions that parse, greedy": lambda r: f"{100 * r['completions']['shares'][0]['parse_share']:.1f} %",
        "completions that parse, temperature 0.7": lambda r: (
            f"{100 * r['completions']['shares'][1]['parse_share']:.1f} %"
        ),
        "training loss at the end, nats a token": lambda r: f"{r['loss_curve'][-2][1]:.3f}",
    }
    for title, figure in rows.items():
        assert f"| {title} | {figure(training['demo'])} | {figure(training['twin'])} |" in card
    for words in (training["environment"]["gpu"], f"torch {training['environment']['torch']}"):
        assert words in card
    generation = json.loads((checkpoint_path() / "generation_config.json").read_text())
    suggested = training["demo"]["completions"]["shares"][1]
    assert suggested["temperature"] == generation["temperature"]
    assert suggested["top_p"] == generation["top_p"]


def test_every_package_of_the_record_is_permissive_by_todays_rule() -> None:
    corpus = DEMO_RECORD["corpus"]
    packages, license = corpus["packages"]["rows"], corpus["packages"]["columns"].index("license")
    assert len(packages) > 100
    for package in packages:
        words = package[license]
        as_expression, as_classifiers, as_field = Message(), Message(), Message()
        as_expression["License-Expression"] = words
        as_field["License"] = words
        for name in words.split("; "):
            as_classifiers["Classifier"] = f"License :: OSI Approved :: {name}"
        assert any(decide(m).permissive for m in (as_expression, as_classifiers, as_field)), package
    left_out = corpus["left_out"]
    assert left_out["columns"][-1] == "reason" and all(row[-1] for row in left_out["rows"])
