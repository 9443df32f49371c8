"""Grammars: masks hold exactly what may come next, and answers of a real model keep to them."""

import ast
import itertools
import json
import re
import sys

import jsonschema
import numpy as np
import pytest

from kog_triton import LLM, SamplingParams, StructuredOutputsParams
from kog_triton.demo import checkpoint_path
from kog_triton.errors import RequestError, RunError
from kog_triton.text import Tokenizer
from kog_triton.text.grammar import Grammars, try_constraint
from tests.lib.fake_backend import FakeBackend
from tests.lib.fake_checkpoint import END, VOCAB_SIZE, byte_tokenizer, make_checkpoint

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(checkpoint_path())


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer, tokenizer.vocab_size + 37, {tokenizer.eos_token_id})


@pytest.fixture(scope="module")
def bytewise():
    """Ids are bytes; 256 and 259 end the text, 257 and 258 are special and do not."""
    return Grammars(Tokenizer(byte_tokenizer()), VOCAB_SIZE, {END, END + 3, 9999})


@pytest.fixture(scope="module")
def demo():
    with LLM(num_slots=2) as llm:
        yield llm


def allowed(words):
    assert words.dtype == np.uint32
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def answers(llm, constraint, seeds=range(4), prompt="data = ", **params):
    given = {"temperature": 1.0, "max_tokens": 300} | params
    each = [SamplingParams(seed=s, structured_outputs=constraint, **given) for s in seeds]
    outputs = llm.generate([prompt] * len(each), each)
    return [completion for output in outputs for completion in output.outputs]


# ---- masks ----


def test_masks_hold_exactly_the_tokens_that_brute_force_finds(grammars, tokenizer):
    """A finite language, written out: a token fits if it leads to the beginning of a sentence."""
    regex = r"(x|ret|return)( [01]{1,2})?[.:]?"
    heads = ("x", "ret", "return", "re", "y")
    tails = ["", *(f" {''.join(d)}" for n in (1, 2, 3) for d in itertools.product("012", repeat=n))]
    texts = (a + b + c for a in heads for b in tails for c in ("", ".", ":", ".:"))
    sentences = {text.encode() for text in texts if re.fullmatch(regex, text)}
    assert len(sentences) == 3 * 7 * 3
    beginnings = {s[:i] for s in sentences for i in range(len(s) + 1)}
    pieces = {i: tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    del pieces[tokenizer.eos_token_id]
    grammar, rng = grammars.compile("regex", regex), np.random.default_rng(0)
    for _ in range(40):
        mask, ids, text = grammar.mask(), [], b""
        while True:
            fits = {i for i, piece in pieces.items() if piece and text + piece in beginnings}
            fits |= {tokenizer.eos_token_id} if text in sentences else set()
            assert allowed(mask(ids)) == fits
            ids.append(int(rng.choice(sorted(fits))))
            if ids[-1] == tokenizer.eos_token_id:
                break
            text += pieces[ids[-1]]


def test_special_tokens_are_no_text_and_every_end_token_ends(bytewise):
    mask = bytewise.compile("regex", r"(?s:.)*").mask()
    assert allowed(mask([])) >= {END, END + 3, *range(128)}
    assert not allowed(mask([*b"<end>"])) & {END + 1, END + 2}
    mask = bytewise.compile("regex", "<a>|<end>x").mask()
    assert allowed(mask([])) == {ord("<")}
    assert allowed(mask([*b"<a>"])) == {END, END + 3}


def test_a_character_may_be_written_byte_by_byte(bytewise):
    mask, ids = bytewise.compile("choice", ["漢"]).mask(), list("漢".encode())
    for i, byte in enumerate(ids):
        assert allowed(mask(ids[:i])) == {byte}
    assert allowed(mask(ids)) == {END, END + 3}


@pytest.mark.parametrize("text", ['say "hi"\n', "a\\b", "/x/", "|", "é🙂", "\x00\x07", "</end>"])
def test_choices_are_taken_literally(bytewise, text):
    mask, ids = bytewise.compile("choice", [text, "z" * 50]).mask(), list(text.encode())
    assert allowed(mask([])) == {ids[0], ord("z")}
    assert allowed(mask(ids)) == {END, END + 3}


def test_white_space_in_json_is_bounded(bytewise):
    mask = bytewise.compile("json", {"enum": [[1]]}).mask()
    assert allowed(mask([*b"[", *b" " * 31])) == {*b" \n\r\t1"}
    assert allowed(mask([*b"[", *b" " * 32])) == {*b"1"}


def test_each_token_is_fed_once(bytewise):
    mask, fed = bytewise.compile("regex", "[a-z]*").mask(), []

    class Counting:
        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def try_consume_tokens(self, tokens):
            fed.extend(tokens)
            return self.inner.try_consume_tokens(tokens)

    mask._matcher, ids = Counting(mask._matcher), list(b"abcdefgh")
    for i in (0, 1, 2, 2, 5, 8):
        mask(ids[:i])
    assert fed == ids


def test_samples_have_states_of_their_own(bytewise):
    grammar = bytewise.compile("regex", "ab|ba")
    one, two = grammar.mask(), grammar.mask()
    assert allowed(one([*b"a"])) == {ord("b")}
    assert allowed(two([*b"b"])) == {ord("a")}


def test_a_backend_that_ignores_the_mask_is_found_out(bytewise):
    with pytest.raises(RunError, match="the grammar refused token 98"):
        bytewise.compile("regex", "a+").mask()([*b"ab"])


def test_a_grammar_beyond_llguidances_limits_is_the_requests_error(bytewise):
    mask = bytewise.compile("regex", "((a{1,1000}){1,1000}){1,1000}").mask()
    with pytest.raises(RequestError, match=r"too complex after [0-9]+ tokens, simplify it: .*too many"):
        for count in range(60):
            mask([*b"a"] * count)


# ---- what a stranger sends ----

DEEP = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(20_000)}


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("json", {"$ref": "#/$defs/a0", "$defs": DEEP}, "ended its process with status -"),
        ("choice", [f"v{i}" for i in range(100_000)], "took more than 3 s|MiB of memory"),
        ("regex", "(ab", "unclosed group"),
        ("json", {"$ref": "#"}, "structured_outputs.json .* is invalid"),
    ],
)
def test_what_would_end_the_engine_ends_another_process(name, value, says):
    with pytest.raises(RequestError) as error:
        try_constraint(name, value)
    assert re.search(says, str(error.value)) and "\n" not in str(error.value)
    try_constraint("regex", "[0-9]+")


# ---- what is refused ----


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("regex", "(ab", r"structured_outputs.regex '\(ab' is invalid: .*unclosed group"),
        ("regex", r"(a)\1", "backreferences are not supported"),
        ("json", "{", "structured_outputs.json '{' is invalid: not JSON"),
        ("json", "[1]", "a JSON schema is an object"),
        ("json", "[" * 100_000, "not JSON"),
        pytest.param("json", {"minimum": 10**5000}, "a huge number' is invalid", id="huge"),
        ("json", {"type": "nope"}, "structured_outputs.json .* is invalid: .*nope"),
        ("json", {"type": "string", "minLength": 3, "maxLength": 1}, "Unsatisfiable schema"),
        ("json", {"contains": 3}, "contains"),
        ("json", {"$ref": "http://example.com/x"}, "does not fetch"),
        ("json", {"$ref": "#"}, "it admits no answer"),
        ("regex", "\ud800", "it holds a lone surrogate"),
        ("choice", ["a", "\ud800"], "structured_outputs.choice"),
        ("json", {"a": {1, 2}}, "not JSON serializable"),
        ("grammar", "start: foo", "structured_outputs.grammar 'start: foo' is .*unknown name"),
        ("grammar", "", "Empty grammar"),
    ],
)
def test_what_cannot_be_compiled_is_named_in_one_line(bytewise, name, value, says):
    with pytest.raises(RequestError) as error:
        bytewise.compile(name, value)
    message = str(error.value)
    assert re.search(says, message) and "\n" not in message and len(message) < 400


def test_without_the_package_the_error_says_what_to_install(demo, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"pip install 'kog-triton\[grammar\]'"):
        answers(demo, StructuredOutputsParams(regex="a"))


def test_a_model_that_cannot_end_is_refused(tokenizer):
    with pytest.raises(RequestError, match="needs a model with an end token"):
        Grammars(tokenizer, 4096, ()).compile("regex", "a")


def test_a_mask_and_a_grammar_are_one_too_many(demo):
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    with pytest.raises(RequestError, match="leave out one"):
        demo.engine.prepare([1], params, mask=lambda ids: None)


# ---- answers ----

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,9}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["new", "old", None]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("written", [SCHEMA, json.dumps(SCHEMA)], ids=["object", "text"])
def test_json_fits_its_schema(demo, written):
    for out in answers(demo, StructuredOutputsParams(json=written), top_p=0.9):
        assert out.finish_reason == "stop" and out.stop_reason is None
        jsonschema.validate(json.loads(out.text), SCHEMA)


def test_any_json_object(demo):
    constraint = StructuredOutputsParams(json_object=True)
    for out in answers(demo, constraint, range(2), temperature=0.5, max_tokens=60):
        if out.finish_reason == "stop":  # nothing bounds how long an object gets
            assert isinstance(json.loads(out.text), dict)
        assert out.text.startswith("{")


def test_every_sample_matches_the_regex_whole(demo):
    regex = r"[a-z_]{2,12}\((self|[a-z]), \d{1,3}\)"
    outs = answers(demo, StructuredOutputsParams(regex=regex), range(2), n=3)
    assert [out.index for out in outs] == [0, 1, 2] * 2
    assert all(re.fullmatch(regex, out.text) for out in outs)
    assert all(out.finish_reason == "stop" for out in outs)
    assert len({out.text for out in outs}) > 3


def test_a_choice(demo):
    outs = answers(demo, StructuredOutputsParams(choice=["yes", "no", "it depends"]), range(12))
    assert {out.text for out in outs} <= {"yes", "no", "it depends"}
    assert len({out.text for out in outs}) > 1


def test_a_grammar(demo):
    grammar = 'start: term ("+" term)~1..3\nterm: /[1-9][0-9]?/ | "(" start ")"'
    for out in answers(demo, StructuredOutputsParams(grammar=grammar), prompt="x = ", temperature=0.7):
        if out.finish_reason == "stop":
            tree = ast.parse(out.text, mode="eval")
            names = {type(node).__name__ for node in ast.walk(tree)}
            assert names <= {"Expression", "BinOp", "Add", "Constant"} and "BinOp" in names


GBNF = """root ::= (word " ")? "end" # as llama.cpp and vLLM have it
word ::= [a-c]{2,3} | "say-" number
number ::= [0-9]+
"""


def test_a_grammar_in_gbnf(demo):
    outs = answers(demo, StructuredOutputsParams(grammar=GBNF), max_tokens=40)
    ended = [out.text for out in outs if out.finish_reason == "stop"]
    assert ended and all(re.fullmatch(r"(([a-c]{2,3}|say-[0-9]+) )?end", text) for text in ended)


@pytest.fixture
def usual_depth():
    """Python's own limit of nested calls, which a library that another test imports may have raised."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


def test_what_gbnf_takes_is_told_from_lark_and_bounded(bytewise, usual_depth):
    bytewise.compile("grammar", '?start: "a" | "b"')
    long = "\n".join(f'r{i} ::= "a"' for i in range(2000)) + "\nroot ::= r0"
    nested = "root ::= " + "(" * 3000 + '"a"' + ")" * 3000
    for text, says in (("root ::= (", "Expected"), (long, "the most of GBNF"), (nested, "recursion")):
        with pytest.raises(RequestError, match=rf"structured_outputs.grammar .* is invalid: .*{says}"):
            bytewise.compile("grammar", text)


def test_greedy_within_a_grammar_is_repeatable_and_free_text_is_not_held_to_it(demo):
    constraint = StructuredOutputsParams(regex="[0-9]{4}")
    one, two = answers(demo, constraint, range(2), temperature=0)
    assert one.token_ids == two.token_ids and re.fullmatch("[0-9]{4}", one.text)
    free = demo.generate("data = ", SamplingParams(temperature=0, max_tokens=8))[0].outputs[0]
    assert not re.fullmatch("[0-9]{4}", free.text)


def test_a_grammar_begins_behind_a_marker_of_any_tokens(bytewise):
    """Until then anything goes, but the end; what looks like the marker's begin begins it anew."""
    mask = bytewise.compile("regex", "[ab]{2}", "<>").mask()
    anything = set(range(VOCAB_SIZE)) - {END, END + 3}
    said = list(b"x<<")
    assert allowed(mask([])) == allowed(mask(said)) == anything
    said += b">"
    assert allowed(mask(said)) == set(b"ab")
    assert allowed(mask([*said, *b"ab"])) == {END, END + 3}
    again = bytewise.compile("regex", "[ab]{2}", "<>").mask()  # of another sample
    assert allowed(again(list(b"<"))) == anything


def test_no_token_ends_a_marker_and_says_more(grammars, tokenizer):
    """It would be no part of the shape. Where it ends none it may be said."""
    (x,), (sign,), (more,) = (tokenizer.encode(t, add_special_tokens=False) for t in ("x", "=", "={"))
    first = grammars.compile("regex", "[0-9]{4}", "=").mask()
    assert allowed(first([])) & {x, sign, more} == {x, sign}
    second = grammars.compile("regex", "[0-9]{4}", "x=").mask()
    assert allowed(second([])) & {x, sign, more} == {x, sign, more}
    assert allowed(second([x])) & {x, sign, more} == {x, sign}


def test_what_comes_ahead_of_a_marker_is_no_part_of_the_shape(demo):
    (out,) = answers(demo, StructuredOutputsParams(regex="[0-9]{4}", behind="="), [3], prompt="x ")
    ahead, _, shaped = out.text.partition("=")
    assert ahead and re.fullmatch("[0-9]{4}", shaped) and out.finish_reason == "stop"


@pytest.mark.parametrize("behind", ["", 3, "<\ud800>"])
def test_a_marker_is_a_text(behind):
    with pytest.raises(RequestError, match=r"^structured_outputs.behind is .*: it must be a text"):
        StructuredOutputsParams(regex="a", behind=behind)


def test_a_stream_keeps_to_its_grammar(tmp_path):
    with LLM(make_checkpoint(tmp_path), backend=FakeBackend) as llm:
        params = SamplingParams(seed=1, structured_outputs=StructuredOutputsParams(choice=["héé", "oh"]))
        deltas = list(llm.stream("slow a", params))
    assert "".join(d.text for d in deltas) == deltas[-1].output.outputs[0].text in ("héé", "oh")
