"""The demo: its model and training, how completions are cut and judged, and what ships."""

import json
import math
from email.message import Message
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from text_samples import SNIPPET
from tokenizers import Tokenizer

from kog_triton.demo import checkpoint_path
from kog_triton.demo.completions import Stepper, complete, judge, pick
from kog_triton.demo.evaluate import bits_per_byte, load_model
from kog_triton.demo.export import export, from_llama_tensors, llama_tensors, save_sharded
from kog_triton.demo.functions import cut_completion, functions
from kog_triton.demo.licenses import decide
from kog_triton.demo.model import Decoder, Shape
from kog_triton.demo.record import record
from kog_triton.demo.tokenizer import save_tokenizer, train_tokenizer
from kog_triton.demo.train import Settings, Training, Windows, newest, run
from kog_triton.errors import ModelError, RunError

TWIN = Path(__file__).parent / "data" / "twin"
TINY = Shape(
    vocab_size=61,
    hidden_size=24,
    num_layers=5,
    num_heads=6,
    intermediate_size=30,
    num_lanes=3,
    delay=2,
    max_positions=40,
)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def spread(shape: Shape, seed: int = 0) -> Decoder:
    """A random model whose logits are wide, so that an error shows."""
    model = Decoder(shape)
    model.initialize(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3.0) if weight.dim() > 1 else weight.add_(
                0.3 * torch.randn(weight.shape, generator=generator)
            )
    return model


def ids_of(shape: Shape, batch: int = 2, length: int = 17) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(shape.vocab_size, (batch, length), generator=generator)


# ---- functions and completions

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
def test_completion_is_cut_at_the_end_of_the_function(
    completion: str, ended: bool, cut: str
) -> None:
    assert cut_completion(completion, ended) == cut


def test_judge_wants_a_line_that_parses() -> None:
    prefix = "def f(x):\n    y = x\n    z = y"
    assert judge(prefix, "\n    return z\n\nprint(", False)
    assert not judge(prefix, "\n\nprint(1)", False)
    assert not judge(prefix, "\n    return (z\n\nprint(1)", False)
    assert not judge(prefix, "\n  return z\n", True)


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


# ---- model


def plain_forward(model: Decoder, ids: list[int]) -> torch.Tensor:
    """The delayed model for one text, lane by lane and head by head, in float64."""
    shape = model.shape
    weights = {name: w.detach().double() for name, w in model.state_dict().items()}
    width, eps = shape.head_dim, shape.norm_eps

    def norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * gain

    def turn(x: torch.Tensor) -> torch.Tensor:
        turned = x.clone()
        for t in range(len(x)):
            for k in range(width // 2):
                angle = t * shape.rope_theta ** (-2 * k / width)
                a, b = x[t, 2 * k].item(), x[t, 2 * k + 1].item()
                turned[t, 2 * k] = a * math.cos(angle) - b * math.sin(angle)
                turned[t, 2 * k + 1] = a * math.sin(angle) + b * math.cos(angle)
        return turned

    def attention(x: torch.Tensor, prefix: str, lane: int) -> torch.Tensor:
        q, k, v = (
            x @ weights[f"{prefix}.attention.{n}.weight"][lane].T for n in ("wq", "wk", "wv")
        )
        heads = []
        for first in range(0, q.shape[1], width):
            part = slice(first, first + width)
            scores = turn(q[:, part]) @ turn(k[:, part]).T / math.sqrt(width)
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
                    past = raw[name, layer - shape.delay]
                    streams[i] = streams[i] + own + sum(past[j] for j in lanes if j != i)
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


# ---- training

SETTINGS = Settings(tokens=9 * 2 * 16, batch=2, window=16, warmup=3, seed=5)


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


# ---- export and what ships


def laneformer_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    lanes, hidden = shape.num_lanes, shape.hidden_size
    heads, width = hidden // lanes, shape.intermediate_size // lanes
    want: dict[str, tuple[int, ...]] = {
        "model.tok_embeddings.weight": (shape.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (shape.vocab_size, hidden),
    }
    for i in range(shape.num_layers):
        layer = f"model.layers.{i}"
        want |= {f"{layer}.attention.w{n}.weight": (lanes, heads, hidden) for n in "qkv"}
        want |= {f"{layer}.feed_forward.w{n}.weight": (lanes, width, hidden) for n in "13"}
        want[f"{layer}.attention.wo.weight"] = (lanes, hidden, heads)
        want[f"{layer}.feed_forward.w2.weight"] = (lanes, hidden, width)
        want |= {f"{layer}.{n}.weight": (hidden,) for n in ("attention_norm", "ffn_norm")}
    return want


def read_shards(folder: Path) -> dict[str, torch.Tensor]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors: dict[str, torch.Tensor] = {}
    for file in set(index["weight_map"].values()):
        shard = load_file(folder / file)
        assert all(index["weight_map"][name] == file for name in shard)
        tensors |= shard
    assert set(tensors) == set(index["weight_map"])
    return tensors


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
        there["model.layers.0.self_attn.q_proj.weight"],
        tensors["model.layers.0.attention.wq.weight"][0],
    )
    back = from_llama_tensors(there, TINY.num_heads)
    assert list(back) == list(tensors)
    assert all(torch.equal(back[n], t) for n, t in tensors.items())


@pytest.mark.parametrize("folder", [checkpoint_path(), TWIN], ids=["demo", "twin"])
def test_shipped_files_are_small_and_finite(folder: Path) -> None:
    shards = list(folder.glob("*.safetensors"))
    assert all(file.stat().st_size < 15_000_000 for file in shards)
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 20_000_000
    tensors = read_shards(folder)
    assert len(shards) == len({file.name for file in shards})
    assert 8_000_000 <= sum(t.numel() for t in tensors.values()) <= 10_000_000
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


def test_twin_is_what_transformers_computes() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TWIN)
    theirs = AutoModelForCausalLM.from_pretrained(TWIN, dtype=torch.float32).eval()
    ids = torch.tensor([tokenizer(SNIPPET).input_ids])
    own = Tokenizer.from_file(str(checkpoint_path() / "tokenizer.json"))
    assert ids[0].tolist() == own.encode(SNIPPET).ids
    with torch.inference_mode():
        want, got = theirs(ids).logits, load_model(TWIN, "cpu")(ids)
    assert want.std() > 4
    assert snippet_loss(want, ids) < 1.5
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


# ---- the record


def test_record_joins_two_finished_runs_and_refuses_others(tmp_path: Path) -> None:
    state = {
        "step": 9,
        "seconds": 1.25,
        "shape": {},
        "settings": SETTINGS.__dict__,
        "curve": [[9, 2.5]],
    }
    files = {
        "state": state,
        "short": {**state, "step": 8},
        "other": {**state, "settings": {**SETTINGS.__dict__, "seed": 1}},
        "figures": {"bits_per_byte": 1.5},
    }
    paths = {name: tmp_path / f"{name}.json" for name in files}
    for name, content in files.items():
        paths[name].write_text(json.dumps(content))
    figures = paths["figures"]

    def joined(twin: str) -> dict[str, object]:
        runs = [(paths[name], figures, figures) for name in ("state", twin)]
        return record(figures, figures, *runs)

    assert joined("state")["twin"]["tokens"] == 9 * 2 * 16
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
    training = json.loads((folder / "training.json").read_text())
    rows = {
        "held-out bits per byte": lambda r: f"{r['evaluation']['bits_per_byte']:.4f}",
        "completions that parse, greedy": lambda r: (
            f"{100 * r['completions']['shares'][0]['parse_share']:.1f} %"
        ),
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
    corpus = json.loads((checkpoint_path().parent / "training.json").read_text())["corpus"]
    assert len(corpus["packages"]) > 100
    for package in corpus["packages"]:
        words = package["license"]
        as_expression, as_classifiers, as_field = Message(), Message(), Message()
        as_expression["License-Expression"] = words
        as_field["License"] = words
        for name in words.split("; "):
            as_classifiers["Classifier"] = f"License :: OSI Approved :: {name}"
        assert any(decide(m).permissive for m in (as_expression, as_classifiers, as_field)), package
    assert all(package["reason"] for package in corpus["left_out"])
