"""Small parts of what reads and makes weights, by hand: patterns of names, random weights, slices, words."""

import math
import re

import pytest
import torch

from kog_triton.checkpoint import narrow_random, quantizing
from kog_triton.checkpoint.formats.packed import pack_words, unpack_nibbles, unpack_words
from kog_triton.checkpoint.formats.patterns import Excluded, group_and_excluded, names, regexes
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.errors import ModelError
from kog_triton.model.config import Config
from kog_triton.model.weight_format import FORMATS, Code, Offset, Scale, WeightFormat
from tests.lib.ring_walker import spec_of


@pytest.mark.parametrize(
    ("pattern", "simple"),
    [
        (r".*mlp.(gate|up)_proj$", True),
        (r"^model\.layers\.\d+\.mlp", True),
        (r"a*b*c*", True),
        (r".*(q_?|k_?|v_?|o_?|(gate|up|down)_?)proj$", True),  # ways of branches add up
        ("a*" * 4 + "a?a?", True),  # 32 ways a repetition, 2 an option: 4194304
        ("a*" * 4 + "(a|a|a|a|a)", False),
        ("(a|a)" * 22, True),
        ("(a|a)" * 23, False),
        (r"a\*b*c*d*", False),  # no escape that is read
        (r"a?b?c*?d?e?", True),
        (r"(a|b)*", False),  # behind a group
        (r"(?:a)+", False),
        (r"[a-c]+?", True),
        (r"a{3}", False),
        (r"(?=a)", False),
        ("a" * 200, True),
        ("a" * 201, False),
        ("", True),
    ],
)
def test_which_patterns_are_run(pattern, simple):
    if simple:
        assert [p.pattern for p in regexes([pattern, pattern], "f")] == [pattern]
    else:
        why = r"is not one that is run|has (5242880|8388608) ways to match, at most 4194304 are tried"
        with pytest.raises(ModelError, match=rf"^f has the pattern .*: it ({why})$"):
            regexes([pattern], "f")


def test_how_many_patterns_are_read():
    assert len(regexes(map(str, range(64)), "f")) == 64
    with pytest.raises(ModelError, match=r"^f has 65 patterns: at most 64 are read$"):
        regexes(map(str, range(65)), "f")
    with pytest.raises(ModelError, match=r"^f has the pattern '\('"):
        regexes(["("], "f")


def test_names_are_a_list_of_texts():
    assert names(None, "f") == () and names([], "f") == () and names(["a"], "f") == ("a",)
    for wrong in ("a", ["a", 1], {"a": 1}):
        with pytest.raises(ModelError, match=r"^f is .*: it must be a list of module names$"):
            names(wrong, "f")


def test_a_name_excludes_what_begins_with_it_up_to_a_dot_and_what_ends_with_it():
    without = Excluded(["lm_head", "model.layers.1", "", "a."], "f")
    found = {"lm_head", "x.lm_head", "xlm_head", "model.layers.1", "model.layers.1.q", "a.b"}
    others = {"lm_head2", "model.layers.10.q", "model.layers", "b.a", "ab", ""}
    assert {n for n in found | others if n in without} == found


@pytest.mark.parametrize(
    ("said", "group"), [({}, 128), ({"group_size": -1}, 0), ({"group_size": 1}, 1), ({"group_size": 65536}, 65536)]
)
def test_columns_of_a_group(said, group):
    config = Config(said | {"modules_to_not_convert": ["x"]})
    found, without = group_and_excluded(config)
    assert found == group and "x" in without and "y" not in without


@pytest.mark.parametrize("size", [0, -2, 65537, "a"])
def test_columns_that_are_none(size):
    with pytest.raises(ModelError, match=r"^group_size"):
        group_and_excluded(Config({"group_size": size}))


def test_codes_in_words_by_hand():
    words = torch.tensor([[0x76543210, -1]], dtype=torch.int32)
    assert unpack_words(words, 4).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, *[15] * 8]]
    assert unpack_words(words[:, :1], 8).tolist() == [[0x10, 0x32, 0x54, 0x76]]
    codes = torch.arange(1, 10, dtype=torch.uint8)[None]
    assert pack_words(codes, 4).tolist() == [[-2023406815, 9]]  # 0x87654321
    assert pack_words(codes[:, :5], 8).tolist() == [[0x04030201, 5]]
    assert unpack_nibbles(torch.tensor([0x21, 0xF0], dtype=torch.uint8)).tolist() == [1, 2, 0, 15]


def drawn(**changes):
    spec = spec_of(num_layers=2, windows=(0, 0), **changes)
    return spec, RandomWeights(spec, seed=3, dtype=torch.float32)


def test_random_weights_have_their_spread():
    spec, weights = drawn()
    for name, shape in spec.shapes.items():
        whole = name.replace("{}", "1")
        w = weights.load(whole)
        assert w.shape == shape and torch.equal(w, weights.load(whole))
        kind = name.rpartition(".")[2]
        if kind.endswith("norm"):
            center = 1.7 if kind in ("q_norm", "k_norm") else 1.0
            assert 0.6 * center <= w.min() and w.max() <= 1.4 * center
        elif w.numel() > 500:
            wanted = 0.3 if kind.endswith("bias") else weights._deviation(kind)
            assert w.std().item() == pytest.approx(wanted, rel=0.2) and abs(w.mean()) < 0.2 * wanted
    again = RandomWeights(spec, seed=4, dtype=torch.float32)
    assert not torch.equal(again.load("embed"), weights.load("embed"))
    for name in ("layers.2.q_proj", "layers.{}.q_proj", "layers.x.q_proj", "nothing", "layers.-1.q_proj"):
        with pytest.raises(ModelError, match=re.escape(f"the model has no weight {name!r}")):
            weights.load(name)


def test_the_spread_of_each_matrix_by_hand():
    spec, weights = drawn()
    hidden, attention = spec.hidden_size, spec.num_heads * spec.head_dim
    each = {
        "o_proj": 2.0 / math.sqrt(4) / math.sqrt(attention),
        "down_proj": 4.0 / math.sqrt(4) / math.sqrt(spec.intermediate_size),
        "q_proj": 1.7 / math.sqrt(hidden),
        "k_proj": 1.7 / math.sqrt(hidden),
        "v_proj": 1.0 / math.sqrt(hidden),
        "gate_proj": 1.0 / math.sqrt(hidden),
        "lm_head": 6.0 / math.sqrt(hidden),
        "embed": 1.0,
    }
    assert {kind: weights._deviation(kind) for kind in each} == pytest.approx(each)
    _, tied = drawn(tied_embeddings=True)
    assert tied._deviation("embed") == pytest.approx(6.0 / math.sqrt(hidden))


@pytest.mark.parametrize("name", ["int8-channel", "int4-g32", "fp8-channel"])
def test_slices_are_whole_rows_of_about_so_many_weights(monkeypatch, name):
    taken, real = [], quantizing._quantize
    monkeypatch.setattr(quantizing, "_SLICE", 256)
    monkeypatch.setattr(quantizing, "_quantize", lambda w, how: taken.append(tuple(w.shape)) or real(w, how))
    weight = torch.randn(10, 64)
    quantizing.quantize(weight, FORMATS[name])
    assert taken == [(4, 64), (4, 64), (2, 64)]
    taken.clear()
    quantizing.quantize(torch.randn(2, 10, 64), FORMATS[name])  # two lanes at a time
    assert taken == [(2, 2, 64)] * 5


@pytest.mark.parametrize(
    "how",
    [
        WeightFormat(Code.UINT4, 1, 32, Scale.F16, Offset.ZERO_POINT),
        FORMATS["mxfp4"],
        WeightFormat(Code.INT8, 1, 0, Scale.E8M0),
    ],
)
def test_what_quantize_does_not_make(how):
    with pytest.raises(ModelError, match=r"^weights are not made "):
        quantizing.quantize(torch.randn(8, 32), how)


def test_narrow_random_weights_by_hand():
    top = torch.tensor([[0.0, 15.0] + [7.5] * 30])
    four = narrow_random.nearest(top, WeightFormat(Code.UINT4, 1, 32, Scale.F32, Offset.MINIMUM))
    assert four.scales.tolist() == [[1.0]] and four.codes[0, :3].tolist() == [0, 15, 8]
    points = narrow_random.nearest(top - 5, WeightFormat(Code.UINT4, 1, 32, Scale.F32, Offset.ZERO_POINT))
    assert points.offsets.tolist() == [[5]] and points.codes[0, :2].tolist() == [0, 15]
    flat = narrow_random.nearest(torch.zeros(1, 32), WeightFormat(Code.UINT4, 1, 32, Scale.F32, Offset.MINIMUM))
    assert flat.scales.tolist() == [[1.0]] and flat.codes.sum() == 0
    levels = torch.tensor([[0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0] * 2 + [-6.0] * 16])
    small = narrow_random.nearest(levels, FORMATS["mxfp4"])
    assert small.scales.tolist() == [[127]]
    assert small.codes[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7] * 2 + [15] * 16
    assert torch.equal(small.unpack(), levels)
    between = narrow_random.nearest(
        torch.tensor([[0.24, 0.26, 2.4, 2.6, 4.9, 5.1, 6.0] + [0.0] * 25]), FORMATS["mxfp4"]
    )
    assert between.codes[0, :7].tolist() == [0, 1, 4, 5, 6, 7, 7]
    with pytest.raises(ModelError):
        narrow_random.nearest(torch.zeros(1, 33), FORMATS["mxfp4"])
