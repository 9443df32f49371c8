"""Sampling parameters: ranges, defaults from a checkpoint, and what `resolve` adds."""

import pytest

from kog_triton.errors import RequestError
from kog_triton.sampling import SamplingParams, StructuredOutputsParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 1.5),
        ("n", True),
        ("n", (1 << 14) + 1),
        pytest.param("n", -(10**5000), id="n-huge"),
        ("temperature", 10**400),
        pytest.param("max_tokens", 10**5000, id="max_tokens-huge"),
        ("top_k", 1 << 63),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", 1e-7),
        ("temperature", "1"),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 2.0),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", "x"),
        ("seed", 1 << 64),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", "12"),
        ("ignore_eos", 1),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-38),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3),
        ("logit_bias", {1: float("inf")}),
        ("logit_bias", {"x": 1.0}),
        ("logit_bias", {"9" * 5000: 1.0}),
        ("logit_bias", {1: 10**400}),
        ("logit_bias", {1: 101}),
        ("logit_bias", [1]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [1 << 20]),
        ("bad_words", "word"),
        ("bad_words", [""]),
        ("logprobs", -2),
        ("logprobs", (1 << 20) + 1),
        ("prompt_logprobs", 1.0),
        ("detokenize", None),
        ("structured_outputs", {"regex": "a"}),
    ],
)
def test_a_value_out_of_range_is_one_line_with_the_field(field, value):
    with pytest.raises(RequestError) as error:
        SamplingParams(**{field: value})
    assert str(error.value).startswith((f"{field} is ", f"{field} token id is "))
    assert "must be" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_number_too_large_is_told_the_most():
    most = rf"max_tokens is {10**25}: it must be from 1 to {2**63 - 1}"
    with pytest.raises(RequestError, match=most):
        SamplingParams(max_tokens=10**25)
    with pytest.raises(RequestError, match="max_tokens is 0: it must be at least 1"):
        SamplingParams(max_tokens=0)


def test_greedy_samples_cannot_differ():
    with pytest.raises(RequestError, match="n is 2: it must be 1 when temperature is 0"):
        SamplingParams(n=2, temperature=0)


def test_stop_strings_need_text():
    with pytest.raises(RequestError, match="detokenize is False"):
        SamplingParams(stop="x", detokenize=False)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "has nothing: give one of json, regex, choice, grammar, json_object"),
        ({"regex": "a", "json": "{}"}, "has json and regex: give one"),
        ({"json": 3}, "structured_outputs.json is 3: it must be"),
        ({"regex": b"a"}, "structured_outputs.regex is b'a': it must be text"),
        ({"grammar": ["a"]}, "structured_outputs.grammar is "),
        ({"choice": []}, "structured_outputs.choice is "),
        ({"choice": "yes"}, "structured_outputs.choice is 'yes': it must be a list"),
        ({"choice": ["a", 1]}, "structured_outputs.choice is "),
        ({"json_object": False}, "structured_outputs.json_object is False"),
    ],
)
def test_structured_outputs_have_one_field_of_the_right_type(fields, says):
    with pytest.raises(RequestError) as error:
        StructuredOutputsParams(**fields)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_structured_outputs_need_the_end_of_text():
    with pytest.raises(RequestError, match="ignore_eos is True: it must be false with structured"):
        SamplingParams(ignore_eos=True, structured_outputs=StructuredOutputsParams(regex="a"))


def test_values_are_normalized():
    params = SamplingParams(stop="end", stop_token_ids=[5, 3, 5], logit_bias={"7": 2}, allowed_token_ids={4, 1})
    assert params.stop == ("end",)
    assert params.stop_token_ids == (3, 5)
    assert params.logit_bias == {7: 2.0}
    assert params.allowed_token_ids == (1, 4)


def test_the_caller_wins_over_the_checkpoint_and_the_checkpoint_over_the_default():
    config = {"temperature": 0.6, "top_p": 0.95, "top_k": None, "max_new_tokens": 99, "bos_token_id": 1}
    params = SamplingParams.from_generation_config(config, temperature=0.2, seed=None)
    assert (params.temperature, params.top_p, params.top_k) == (0.2, 0.95, 0)
    assert params.max_tokens == 99
    assert SamplingParams.from_generation_config({"temperature": 0, "top_k": None}).greedy
    with pytest.raises(RequestError, match="topp is not a sampling parameter"):
        SamplingParams.from_generation_config({}, topp=0.5)
    with pytest.raises(RequestError, match="top_p is 7"):
        SamplingParams.from_generation_config({"top_p": 7})


@pytest.mark.parametrize(
    ("field", "low", "high"),
    [
        ("presence_penalty", -2, 2), ("frequency_penalty", -2, 2), ("repetition_penalty", 1e-6, 1e6),
        ("temperature", 1e-5, 1e5), ("top_p", 1e-9, 1), ("min_p", 0, 1), ("top_k", -1, 1 << 40),
        ("logprobs", -1, 1 << 20), ("prompt_logprobs", -1, 1 << 20), ("n", 1, 1 << 14), ("min_tokens", 0, 16),
    ],
)  # fmt: skip
def test_the_ends_of_a_range_are_in_it(field, low, high):
    assert [getattr(SamplingParams(**{field: v}), field) for v in (low, high)] == [low, high]


def test_resolve_draws_a_seed_once_and_keeps_a_given_one():
    drawn = {SamplingParams().resolve(10).seed for _ in range(20)}
    assert len(drawn) == 20
    assert SamplingParams(seed=3).resolve(10).seed == 3
    assert SamplingParams(seed=-2).resolve(10).seed == (1 << 64) - 2
    assert SamplingParams(seed=-1).seed is None  # as in vLLM
    assert SamplingParams(seed=(1 << 64) - 1).resolve(10).seed == (1 << 64) - 1


@pytest.mark.parametrize("name", ["repetition_penalty", "frequency_penalty", "presence_penalty"])
@pytest.mark.parametrize("value", [0.5, 1.0, 2.0])
def test_a_penalty_is_one_unless_it_changes_nothing(name, value):
    nothing = name == "repetition_penalty" and value == 1
    assert SamplingParams(**{name: value}).has_penalties is not nothing
    assert not SamplingParams().has_penalties


def test_resolve_collects_end_tokens_and_bad_words():
    ids = {"no": [4], " no": [5], "go on": [6, 7], " go on": [8, 7]}
    params = SamplingParams(stop_token_ids=[2], bad_words=["no", "go on"])
    resolved = params.resolve(10, eos_token_ids=[9, 2, 10], encode=ids.__getitem__)
    assert resolved.end_token_ids == (2, 9)
    assert resolved.bad_words_token_ids == ((4,), (5,), (6, 7), (8, 7))
    with pytest.raises(RequestError, match="bad_words"):
        params.resolve(10, encode=lambda _: [])
    with pytest.raises(RequestError, match="no tokenizer"):
        params.resolve(10)


def test_bad_words_are_vllms_variants_and_only_what_the_model_can_say():
    ids = {"a": [1], " a": [2], "  a": [3], "\n": [4], "b": [10], " b": [5, 10]}

    def banned(*words):
        params = SamplingParams(bad_words=words)
        return params.resolve(10, encode=ids.__getitem__).bad_words_token_ids

    assert banned(" a") == ((1,), (2,))  # as without the space
    assert banned("  a") == ((1,), (2,), (3,))
    assert banned("\n") == ((4,),)  # not the space that would stand before a word
    assert banned("b") == ()  # the tokenizer has ids that the model has not


@pytest.mark.parametrize("given", [{"logit_bias": {10: 1}}, {"stop_token_ids": [10]}, {"allowed_token_ids": [3, 10]}])
def test_resolve_refuses_ids_outside_the_vocabulary(given):
    said = rf"^{next(iter(given))}( token id)? is 10: it must be from 0 to 9"
    with pytest.raises(RequestError, match=said):
        SamplingParams(**given).resolve(10)


def test_resolve_refuses_a_vocabulary_whose_weights_could_overflow():
    with pytest.raises(RequestError, match="vocab_size"):
        SamplingParams().resolve((1 << 20) + 1)


def test_vllms_optional_biases_are_moved_into_range_at_both_ends():
    params = SamplingParams.from_optional(logit_bias={1: -200, 2: 200, 3: -7}, top_k=None)
    assert params.logit_bias == {1: -100.0, 2: 100.0, 3: -7.0}


@pytest.mark.parametrize("n", [2, 3])
def test_a_greedy_request_has_one_sample(n):
    with pytest.raises(RequestError, match="1 when temperature is 0: greedy samples"):
        SamplingParams(n=n, temperature=0)
    assert SamplingParams(n=1, temperature=0).greedy
