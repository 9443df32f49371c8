"""vLLM's names mean vLLM's arguments: each is honoured, refused by name, or ignored with a warning."""

import copy
import inspect
import json
import logging
import re
import warnings
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import kog_triton
from kog_triton import (
    LLM,
    CompletionOutput,
    Logprob,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
    TextPrompt,
    TokensPrompt,
)
from kog_triton.errors import ModelError, RequestError
from kog_triton.prompts import KEYS
from kog_triton.vllm_names import IGNORED, INSTEAD, names
from tests.lib import vllm_names
from tests.lib.fake_backend import GREEDY, FakeBackend, open_llm
from tests.lib.fake_checkpoint import END, make_checkpoint
from tests.lib.vllm_names import MIXINS

TABLE = names()
OURS = {  # what each function or class takes itself
    "LLM": LLM.__init__,
    "LLM.generate": LLM.generate,
    "LLM.chat": LLM.chat,
    "SamplingParams": SamplingParams,
    "StructuredOutputsParams": StructuredOutputsParams,
}


def own_names(where):
    parameters = inspect.signature(OURS[where]).parameters.values()
    return {p.name for p in parameters if p.kind is not p.VAR_KEYWORD} - {"self"}


def given(llm, where, name, value):
    """Give one parameter to one function of ours."""
    if where == "LLM":
        open_llm(llm.checkpoint.folder, **{name: value}).close()
    elif where == "LLM.generate":
        llm.generate("a", GREEDY, **{name: value})
    elif where == "LLM.chat":
        llm.chat([{"role": "user", "content": "a"}], GREEDY, **{name: value})
    elif where == "SamplingParams":
        SamplingParams(**{name: value})
    else:
        StructuredOutputsParams(regex="a", **{name: value})


@pytest.mark.parametrize("where", OURS)
def test_what_we_do_not_have_is_refused_or_ignored_by_name(llm, where):
    ours = own_names(where)
    assert not set(IGNORED.get(where, {})) & ours and set(TABLE[where]) - ours
    for name in sorted({*TABLE[where], *IGNORED.get(where, {})} - ours):
        if name in IGNORED.get(where, {}):
            with pytest.warns(UserWarning, match=f"{where}: {name} is ignored: ") as seen:
                given(llm, where, name, 7)
            assert len(seen) == 1
        else:
            instead = INSTEAD.get(where, {}).get(name, "leave it out")
            said = f"{where}: {name} is 7: kog_triton has no {name}: {instead}"
            with pytest.raises(RequestError, match=f"^{re.escape(said)}$"):
                given(llm, where, name, 7)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            given(llm, where, name, None)  # asks for nothing


def test_a_warning_points_at_the_line_of_its_caller(folder):
    with pytest.warns(UserWarning, match="is ignored") as seen:
        SamplingParams(skip_clone=True)
        LLM(folder, backend=FakeBackend, block_size=16).close()
    assert [one.filename for one in seen] == [__file__] * 2


@pytest.mark.parametrize("where", OURS)
def test_what_nobody_has_is_a_type_error_with_a_hint(llm, where):
    with pytest.raises(TypeError, match=f"{where} got an unexpected keyword argument 'x'$"):
        given(llm, where, "x", None)
    with pytest.raises(TypeError, match=r"'temprature': did you mean 'temperature'\?"):
        SamplingParams(temprature=1)
    with pytest.raises(TypeError, match=r"'num_slot': did you mean 'num_slots'\?"):
        open_llm(llm.checkpoint.folder, num_slot=1)


@pytest.mark.parametrize("where", OURS)
def test_what_older_releases_took_says_what_there_is_instead(llm, where):
    for name in set(INSTEAD.get(where, {})) - set(TABLE[where]):
        with pytest.raises(RequestError, match=re.escape(INSTEAD[where][name]) + "$"):
            given(llm, where, name, [7])
        given(llm, where, name, None)
    assert not set(INSTEAD.get(where, {})) & own_names(where)


def test_ids_beside_no_prompt_and_an_empty_schema_say_what_there_is_instead(llm):
    with pytest.raises(RequestError, match=r'give {"prompt_token_ids": ids} as a prompt'):
        llm.generate(prompt_token_ids=[[1, 2]], sampling_params=SamplingParams())
    with pytest.raises(RequestError, match="prompts is None: it must be a prompt"):
        llm.generate(sampling_params=SamplingParams())
    with pytest.raises(RequestError, match=r"guided_json is {}: kog_triton has no guided_json"):
        SamplingParams(guided_json={})


def test_methods_that_we_do_not_have_are_refused_by_name(llm):
    have = {name for name in TABLE["LLM methods"] if hasattr(llm, name)}
    assert have == {"generate", "chat", "get_tokenizer", "get_default_sampling_params"}
    for name in {*TABLE["LLM methods"], *INSTEAD["LLM methods"]} - have:
        said = f"kog_triton's LLM has no {name}" + "".join(
            f": {more}" for more in [INSTEAD["LLM methods"].get(name)] if more
        )
        with pytest.raises(AttributeError, match=f"^{re.escape(said)}$"):
            getattr(llm, name)
    with pytest.raises(AttributeError, match=r"^'LLM' object has no attribute 'generat'$"):
        llm.generat  # noqa: B018


def test_names_of_the_package_that_we_do_not_have_say_what_there_is_instead():
    assert set(TABLE["vllm"]) - set(kog_triton.__all__) <= set(INSTEAD["vllm"])
    assert not set(INSTEAD["vllm"]) & set(kog_triton.__all__)
    for name, instead in INSTEAD["vllm"].items():
        with pytest.raises(ImportError, match=f"^kog_triton has no {name}: {re.escape(instead)}$"):
            __import__("kog_triton", fromlist=[name])  # as `from kog_triton import NAME` does
    with pytest.raises(ImportError, match="cannot import name 'Nobodys'"):
        from kog_triton import Nobodys  # noqa: F401
    assert not hasattr(kog_triton, "Nobodys")
    assert len(dir(kog_triton)) == len(set(dir(kog_triton)))


def test_an_llm_is_not_copied(llm):
    for copied in (copy.copy, copy.deepcopy):  # as pickle does
        with pytest.raises(TypeError, match="an LLM is of one process: open another one there"):
            copied(llm)


def test_a_script_for_an_older_release_runs(folder):
    old = {"swap_space": 4, "disable_log_requests": True, "worker_use_ray": True, "task": "generate"}
    with pytest.warns(UserWarning, match=r"^LLM: \w+ is ignored: ") as seen:
        open_llm(folder, **old).close()
    assert len(seen) == 3


def test_values_that_ask_for_nothing_pass(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # vLLM's own defaults, which are what happens here
        how = {"logprobs_mode": "raw_logprobs", "scheduling_policy": "fcfs", "load_format": "auto"}
        how |= {"guided_decoding_backend": "auto", "kv_cache_dtype": "auto", "hf_overrides": {}}
        open_llm(folder, **how, pipeline_parallel_size=1, quantization=None).close()
        SamplingParams(spaces_between_special_tokens=True, flat_logprobs=False, extra_args={})
    with pytest.raises(RequestError, match="spaces_between_special_tokens is False"):
        SamplingParams(spaces_between_special_tokens=False)


def test_outputs_have_vllms_attributes(llm):
    output = llm.generate("abc", SamplingParams(temperature=0, logprobs=2))[0]
    done = output.outputs[0]
    first = next(iter(done.logprobs[0].values()))
    for where, value in (("RequestOutput", output), ("CompletionOutput", done), ("Logprob", first)):
        assert [n for n in TABLE[where] if not hasattr(value, n)] == []
    assert output.lora_request is None and done.finished() is True
    assert CompletionOutput(0, "", [], None).finished() is False
    assert {f.name for f in fields(RequestOutput)} <= {*TABLE["RequestOutput"]}
    assert {f.name for f in fields(Logprob)} == {*TABLE["Logprob"]}
    assert {"prompt", "prompt_token_ids", "cache_salt"} == set(KEYS) <= set(TABLE["prompt"])


def test_the_table_is_what_its_script_reads_out_of_a_wheel():
    files = {
        "__init__.py": "import typing\nMODULE_ATTRS = {'LLM': '.llm:LLM', 'EngineArgs': '.args:E'}\n",
        "entrypoints/llm.py": "class LLM(X):\n def __init__(self, model, *, seed=0, **kw): ...\n"
        " def generate(self, prompts, /, a=1): ...\n def chat(self, messages, b): ...\n",
        "engine/arg_utils.py": "class EngineArgs:\n model: str = ''\n max_num_seqs: int = 1\n",
        "sampling_params.py": "class SamplingParams(Y):\n n: int = 1\n _hidden: int = 2\n"
        " @staticmethod\n def from_optional(n=1): ...\n"
        "class StructuredOutputsParams:\n json: str\n",
        "outputs.py": "class RequestOutput:\n def __init__(self, request_id, **kwargs): ...\n"
        "class CompletionOutput:\n index: int\n",
        "inputs/llm.py": "class _PromptOptions: cache_salt: str\nclass TextPrompt: prompt: str\n"
        "class TokensPrompt:\n prompt: str\n prompt_token_ids: list\n",
        "logprobs.py": "class Logprob: rank: int\n",
    }
    files |= {file: f"class {name}:\n def {name}_(self): ...\n" for file, name in MIXINS.items()}
    read = vllm_names.names_of(files.__getitem__)
    assert read == {
        "vllm": ["LLM", "EngineArgs"],
        "LLM methods": ["generate", "chat", *(f"{name}_" for name in MIXINS.values())],
        "LLM": ["model", "seed", "max_num_seqs"],
        "LLM.generate": ["prompts", "a"],
        "LLM.chat": ["messages", "b"],
        "prompt": ["cache_salt", "prompt", "prompt_token_ids"],
        "SamplingParams": ["n"],
        "SamplingParams.from_optional": ["n"],
        "StructuredOutputsParams": ["json"],
        "RequestOutput": ["request_id"],
        "CompletionOutput": ["index"],
        "Logprob": ["rank"],
    }
    assert set(read) == set(TABLE) and json.loads(vllm_names.TABLE.read_text())["vllm"] == "0.33.0"


# ---- what is honoured ----


def test_vllms_commonest_calls(llm):
    params = SamplingParams(temperature=0, max_tokens=4)
    (one,) = llm.generate(prompts="abc", sampling_params=params, use_tqdm=False, lora_request=None)
    talk = [{"role": "user", "content": "say:hi"}]
    (two,) = llm.chat(talk, params, False)
    (three,) = llm.chat(messages=[talk], sampling_params=[params], use_tqdm=False)
    assert two.outputs == three.outputs and len(one.outputs[0].token_ids) == 4
    assert [o.request_id for o in (one, two, three)] == ["0", "1", "2"]
    assert three.num_cached_tokens == three.metrics.cached_tokens == len(three.prompt_token_ids) - 1
    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert text == two.prompt
    assert tokenizer.apply_chat_template(talk) == list(b"[user]say:hi\n")
    assert tokenizer.encode("a") == [97] and tokenizer.eos_token_id == END


def test_parameters_can_be_cloned_and_assigned(llm):
    params = llm.get_default_sampling_params()
    other = params.clone()
    other.max_tokens, other.temperature = 3, np.float32(0.25)
    assert (params.max_tokens, other.max_tokens, other.temperature) == (16, 3, 0.25)
    assert type(other.temperature) is float and other == other.clone() != params
    with pytest.raises(RequestError, match="top_p is 2"):
        other.top_p = 2
    assert other.top_p == 1 and len(llm.generate("abc", other)[0].outputs[0].token_ids) == 3
    stream = llm.stream("slow abc", other)
    other.max_tokens = 1  # a request that has begun keeps what it was given
    assert len([d.output for d in stream][-1].outputs[0].token_ids) == 3


def test_from_optional_leaves_out_none_and_moves_biases_into_range():
    params = SamplingParams.from_optional(temperature=None, top_p=0.5, logit_bias={"3": 500})
    assert (params.temperature, params.top_p, params.logit_bias) == (1, 0.5, {3: 100})
    assert SamplingParams.from_optional(logit_bias={3: -500}).logit_bias == {3: -100}
    assert set(TABLE["SamplingParams.from_optional"]) <= set(TABLE["SamplingParams"])


def test_numbers_and_ids_of_numpy_and_torch_are_taken(llm):
    params = SamplingParams(
        temperature=np.float32(0), max_tokens=np.int64(4), seed=torch.tensor(5), top_k=np.int32(0),
        stop_token_ids=np.array([3, 2]), logit_bias={np.int64(5): np.float64(1)}, min_p=np.float16(0),
    )  # fmt: skip
    assert type(params.max_tokens) is int and params.stop_token_ids == (2, 3)
    ids = [*b"abc"]
    shapes = [
        {"prompt_token_ids": np.array(ids)},
        {"prompt_token_ids": torch.tensor(ids)},
        {"prompt_token_ids": tuple(ids)},
        np.array(ids),
        ids,
        [ids],
        {"prompt": "abc", "prompt_token_ids": np.array(ids)},
    ]
    answers = [llm.generate(shape, params) for shape in shapes]
    assert all(len(a) == 1 and a[0].prompt_token_ids == ids for a in answers)
    assert all(type(i) is int for a in answers for i in a[0].prompt_token_ids)
    for wrong in (np.float32("nan"), np.array([1]), torch.tensor(2.5), np.bool_(True)):
        with pytest.raises(RequestError, match="max_tokens is"):
            SamplingParams(max_tokens=wrong)


def test_bytes_are_no_token_ids(llm):
    for prompt in (b"abc", bytearray(b"abc"), [b"abc"], {"prompt": b"abc"}):
        with pytest.raises(RequestError, match="prompt"):
            llm.generate(prompt, GREEDY)


def test_a_salt_keeps_keys_and_values_apart(narrow):
    def cached(**salt):
        prompt = {"prompt": "the same beginning"} | salt
        return narrow.generate(prompt, GREEDY)[0].num_cached_tokens

    assert [cached(), cached(), cached(cache_salt="b"), cached(cache_salt="b"), cached()] == [*(0, 17, 0, 17, 0)]
    chat = narrow.chat_prompt([{"role": "user", "content": "x"}]) | {"cache_salt": "c"}
    assert narrow.generate(chat, GREEDY)[0].num_cached_tokens == 0


def test_without_prefix_caching_every_prompt_is_computed(folder):
    with open_llm(folder, enable_prefix_caching=False) as llm:
        assert [llm.generate("abc", GREEDY)[0].num_cached_tokens for _ in range(3)] == [0, 0, 0]


def test_a_dtype_may_be_torchs_or_vllms(folder):
    for dtype, want in ((torch.bfloat16, "bf16"), ("float", "fp32"), ("half", "fp16")):
        with open_llm(folder, dtype=dtype) as llm:
            assert llm.engine.backend.options.dtype == want
    with pytest.raises(RequestError, match="dtype is 'int8': it must be one of auto"):
        open_llm(folder, dtype=torch.int8)


def test_prompts_may_be_vllms_objects(llm):
    ids, text = TokensPrompt(prompt_token_ids=[*b"abc"]), TextPrompt(prompt="abc", cache_salt="x")
    assert [o.prompt_token_ids for o in llm.generate([ids, text], GREEDY)] == [[*b"abc"]] * 2


def test_names_for_one_thing_agree(folder):
    with open_llm(folder, max_num_seqs=3, tensor_parallel_size=2, num_slots=3) as llm:
        assert (llm.engine.num_slots, llm.engine.backend.options.num_gpus) == (3, 2)
    with pytest.raises(RequestError, match=r"num_slots is 2 and max_num_seqs is 3: .* same thing"):
        open_llm(folder, num_slots=2, max_num_seqs=3)
    with pytest.raises(RequestError, match="devices is 4 and tensor_parallel_size is 2"):
        open_llm(folder, devices="h200:4", tensor_parallel_size=2)


def test_a_bar_of_the_callers_counts_prompts(llm):
    said = []

    class Bar:
        def __init__(self, **how):
            said.append(how["total"])

        def update(self, count):
            said.append(count)

        def set_postfix_str(self, text, refresh):
            assert "tokens/s" in text

        def close(self):
            said.append("closed")

    llm.generate(["a", "b"], GREEDY, use_tqdm=Bar)
    assert said == [2, 1, 1, "closed"]


def test_figures_of_each_request_are_logged_if_asked_for(folder, caplog):
    caplog.set_level(logging.INFO, "kog_triton.llm")
    with open_llm(folder) as llm:
        llm.generate("say:x", GREEDY)
    assert caplog.messages == []
    with open_llm(folder, disable_log_stats=False) as llm:
        llm.generate(["say:x", "say:yy"], GREEDY)
    assert [m.partition(",")[0] for m in caplog.messages] == [
        "request 0: 5 prompt tokens (0 cached)",
        "request 1: 6 prompt tokens (4 cached)",
    ]
    assert "2 made at" in caplog.messages[0] and caplog.messages[0].endswith("; stop")


def test_sampling_defaults_of_the_checkpoint_can_be_left_out_or_changed(tmp_path):
    folder = make_checkpoint(tmp_path, temperature=0.5, max_new_tokens=7)
    for how, want in (
        ({}, (0.5, 7, 0)),
        ({"generation_config": "vllm"}, (1, 16, 0)),
        ({"override_generation_config": {"top_k": 3}}, (0.5, 7, 3)),
    ):
        with open_llm(folder, **how) as llm:
            params = llm.get_default_sampling_params()
            assert (params.temperature, params.max_tokens, params.top_k) == want
    with pytest.raises(RequestError, match="generation_config is 'x': it must be auto or vllm"):
        open_llm(folder, generation_config="x")
    with pytest.raises(RequestError, match="top_k is -5"):
        open_llm(folder, override_generation_config={"top_k": -5})
    with pytest.raises(RequestError, match=r"override_generation_config\.banana is not supported"):
        open_llm(folder, override_generation_config={"banana": 1, "top_k": 3})


def test_what_a_generation_config_asks_for_in_vain_is_said(tmp_path, caplog):
    folder = make_checkpoint(tmp_path)
    said = {"num_beams": 4, "no_repeat_ngram_size": 0, "suppress_tokens": [7], "bad_words_ids": None}
    file = folder / "generation_config.json"
    file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | said))
    open_llm(folder).close()
    told = [m for m in caplog.messages if "is ignored" in m]
    assert [m.partition("generation_config.json: ")[2] for m in told] == [
        "num_beams 4 is ignored: it is not supported",
        "suppress_tokens [7] is ignored: it is not supported",
    ]


def test_token_ids_alone_without_a_tokenizer(tmp_path):
    folder = make_checkpoint(tmp_path)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="has no tokenizer"):
        open_llm(folder)
    with open_llm(folder, skip_tokenizer_init=True) as llm:
        ids = [*b"say:yes"]
        params = SamplingParams(temperature=0, logprobs=1)
        out = llm.generate({"prompt_token_ids": ids}, params)[0].outputs[0]
        assert (out.token_ids, out.text, out.finish_reason) == ([*b"yes", END], "", "stop")
        assert out.logprobs[0][ord("y")].decoded_token is None
        for prompt, changes, says in (
            ("abc", {}, "a text prompt needs a tokenizer"),
            (ids, {"stop": "x"}, "stop needs a tokenizer"),
            (ids, {"bad_words": ["x"]}, "needs a tokenizer"),
        ):
            with pytest.raises(RequestError, match=says):
                llm.generate(prompt, SamplingParams(**changes))
        with pytest.raises(RequestError, match="a conversation needs a tokenizer"):
            llm.chat([{"role": "user", "content": "x"}])


def test_another_tokenizer(folder, tmp_path):
    other = make_checkpoint(tmp_path)
    config = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": "mine"}))
    with open_llm(folder, tokenizer=other) as llm:
        assert llm.chat_prompt([{"role": "user", "content": "x"}])["prompt"] == "mine"


def test_the_hub_is_asked_for_a_revision_and_kept_where_it_should(folder, tmp_path, monkeypatch):
    asked = []

    def download(hub_id, **how):
        asked.append((hub_id, how["revision"], how["cache_dir"], "config.json" in how["allow_patterns"]))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    how = {"revision": "v1", "tokenizer": "org/words", "tokenizer_revision": "v2"}
    open_llm("org/name", download_dir=tmp_path, **how).close()
    assert asked == [("org/name", "v1", tmp_path, True), ("org/words", "v2", tmp_path, False)]


class SmallGpu:
    memory_bytes = 1_000_000
    bandwidth = 1e12
    name = "small"
    share = ""


class OnGpu(FakeBackend):
    gpu = SmallGpu

    plans_memory = True


def test_the_share_of_the_gpu_s_memory_is_the_backend_s_to_plan_with(folder):
    for share, told in ((0.6, 0.6), (None, 1.0)):
        with LLM(folder, backend=OnGpu, gpu_memory_utilization=share) as llm:
            assert llm.engine.backend.options.memory_share == told
    with pytest.raises(RequestError, match="gpu_memory_utilization is 2: it must be above 0"):
        LLM(folder, backend=OnGpu, gpu_memory_utilization=2)
    with pytest.warns(UserWarning, match="gpu_memory_utilization is ignored: the fake backend on a CPU does"):
        open_llm(folder, gpu_memory_utilization=0.5).close()


def test_ranks_are_known_beyond_the_best(llm):
    """By the reference backend, and of prompts by every backend: there the logits are at hand."""
    params = SamplingParams(temperature=2, seed=3, logprobs=0, prompt_logprobs=1, max_tokens=8)
    with LLM(backend="reference", max_model_len=64) as demo:
        output = demo.generate("def f(x):", params)[0]
        every = demo.forward_logits([*output.prompt_token_ids, *output.outputs[0].token_ids])
    shown = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    ids = [*output.prompt_token_ids[1:], *output.outputs[0].token_ids]
    ranks = [candidates[token].rank for token, candidates in zip(ids, shown, strict=True)]
    assert ranks == [1 + int((row > row[token]).sum()) for token, row in zip(ids, every, strict=False)]
    assert max(ranks) > 1
    # a backend that tells the best alone
    done = llm.generate("abc", SamplingParams(temperature=3, seed=1, logprobs=2))[0].outputs[0]
    ranked = [c[t].rank for t, c in zip(done.token_ids, done.logprobs, strict=True)]
    assert set(ranked) <= {1, 2, None} and None in ranked


# ---- the length of a prompt ----


def test_a_prompt_far_too_long_is_refused_by_its_beginning(narrow, monkeypatch):
    seen = []
    real = narrow.tokenizer._backend

    class Noting:
        def __getattr__(self, name):
            return getattr(real, name)

        def encode(self, text, add_special_tokens):
            seen.append(len(text))
            return real.encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(narrow.tokenizer, "_backend", Noting())
    text = "a" * 5_000_000
    for ask in (narrow.generate, narrow.stream):
        with pytest.raises(RequestError, match="more than 2048 tokens and the context holds 512"):
            ask(text, GREEDY)
        assert seen and max(seen) == 8 * 512
    talk = [{"role": "user", "content": text}]
    with pytest.raises(RequestError, match="more than 2048 tokens and the context holds 512"):
        narrow.chat(talk, GREEDY)
    assert max(seen) == 8 * 512


def test_a_long_text_of_few_tokens_is_encoded_whole(llm):
    """Its length in characters alone refuses nothing: its beginnings are looked at, each twice as long."""

    def encode(text, add_special_tokens):
        counted.append(len(text))
        return SimpleNamespace(ids=[0] * (len(text) // 100))

    from kog_triton.text.tokenizer import _check_length

    counted, backend = [], SimpleNamespace(encode=encode)
    _check_length(backend, "x" * 50_000, 512)
    assert counted == [4096, 8192, 16384, 32768]
    with pytest.raises(RequestError, match="more than 655 tokens"):
        _check_length(backend, "x" * 150_000, 512)
