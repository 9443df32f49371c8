"""A tokenizer out of GGUF metadata gives the ids of the tokenizer.json that it was made from."""

import itertools
import json

import pytest
import tokenizers
from tokenizers import normalizers, pre_tokenizers, processors

from kog_triton.checkpoint.gguf.file import Directory
from kog_triton.errors import ModelError
from kog_triton.llm import LLM
from kog_triton.sampling.params import SamplingParams
from kog_triton.text.gguf_tokenizer import tokenizer_of_gguf
from tests.lib import gguf_cases, text_samples

TEXTS = [
    *text_samples.CORPUS,
    text_samples.SNIPPET,
    "  two  spaces, 12345 digits;\r\n\r\n\tIT'S we'LL don't\n\n   x ",
    "e\u0301 é Ω \ud7ff 😀😀 <|im_start|>user\n<think>hm</think><|im_end|> <s>",
    "",
    " ",
]


def splits_of(pre):
    """How the family's tokenizer.json splits texts; expressions from transformers where it has them."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in ("gpt-2", "smollm"))
    if pre == "gpt-2":
        return byte_level
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    expression = tokenizers.Regex(GGUF_PRE_TOKENIZER_SPLITS[pre])
    return pre_tokenizers.Sequence([pre_tokenizers.Split(expression, "isolated"), byte_level])


def byte_level(pre):
    tokenizer = text_samples.make_tokenizer("byte_level")
    tokenizer.pre_tokenizer = splits_of(pre)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    if pre == "llama-bpe":
        data = json.loads(tokenizer.to_str())
        data["model"]["ignore_merges"] = True
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(data))
    return tokenizer


def written(path, text):
    gguf_cases.write(path, text=text)
    return tokenizer_of_gguf(Directory(path).metadata, path)


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
@pytest.mark.parametrize("begins", [True, False])
def test_byte_level_ids(pre, begins, tmp_path):
    origin = byte_level(pre)
    bos = origin.token_to_id("<s>")
    first = [("<s>", bos)]
    origin.post_processor = (
        processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=first) if begins else None
    )

    def text(writer):
        gguf_cases.byte_level_text(origin, pre)(writer)
        writer.add_bos_token_id(bos)
        if begins is not (pre == "llama-bpe"):
            writer.add_add_bos_token(begins)  # else by default

    ours = written(tmp_path / "model.gguf", text)
    for said in TEXTS:
        want = origin.encode(said).ids
        assert ours.encode(said) == want
        assert ours.decode(want, skip_special_tokens=False) == origin.decode(want, False)
    assert ours.special_ids == {i for i, t in origin.get_added_tokens_decoder().items() if t.special}


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2"])
def test_byte_level_ids_are_those_that_transformers_reads(pre, tmp_path):
    """It has no rule for smollm and none for the words that llama-bpe takes whole."""
    from transformers import AutoTokenizer

    path = tmp_path / "model.gguf"
    ours = written(path, gguf_cases.byte_level_text(byte_level("gpt-2"), pre))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    for said in TEXTS[:12]:
        if said.isascii():
            assert ours.encode(said) == theirs.encode(said, add_special_tokens=False)


def sentencepiece_ids(text, scores, ids):
    """SentencePiece's BPE by its definition: neighbors that make the best-scored piece are joined, leftmost first."""
    parts = list(text)
    while True:
        joined = [a + b for a, b in itertools.pairwise(parts)]
        best = max((scores[j] for j in joined if j in scores), default=None)
        if best is None:
            break
        at = next(i for i, j in enumerate(joined) if scores.get(j) == best)
        parts[at : at + 2] = [joined[at]]
    pieces = ([p] if p in ids else [f"<0x{b:02X}>" for b in p.encode()] for p in parts)
    return [ids[piece] for some in pieces for piece in some]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_ids(prefix, tmp_path):
    origin = text_samples.make_tokenizer("llama_bpe")
    ids = origin.get_vocab(with_added_tokens=True)
    tokens = sorted(ids, key=ids.get)
    added = {t.content: t.special for t in origin.get_added_tokens_decoder().values()}
    raw = {f"<0x{b:02X}>" for b in range(256)}
    kinds = [2 if t == "<unk>" else 3 if added.get(t) else 4 if t in added else 6 if t in raw else 1 for t in tokens]
    scores = [-float(i) for i in range(len(tokens))]  # joined in training's order
    assert tokens[:3] == ["<unk>", "<s>", "</s>"]
    write = gguf_cases.sentencepiece_text(tokens, scores, kinds, add_space_prefix=prefix)
    ours = written(tmp_path / "model.gguf", write)
    plain = {t: score for t, score, kind in zip(tokens, scores, kinds, strict=True) if kind == 1}
    for said in (text for text in TEXTS if "<" not in text):
        spaced = ("\u2581" if prefix and said else "") + said.replace(" ", "\u2581")
        want = [1, *sentencepiece_ids(spaced, plain, ids)]
        assert ours.encode(said) == want
        assert ours.decode(want) == said
    assert ours.bos_token_id == 1 and ours.eos_token_id == 2
    marked = ours.encode("a</s>")
    assert marked[-1] == 2 and len(marked) == len(ours.encode("a")) + 1


def test_a_file_answers_like_a_folder(tmp_path):
    """Chat by the file's own template, up to the file's own end of turn."""
    path = tmp_path / "model.gguf"
    origin = text_samples.make_tokenizer("byte_level")
    size = len(origin.get_vocab())
    gguf_cases.write(path, vocab_size=size, text=gguf_cases.byte_level_text(origin, "gpt-2"))
    with LLM(path, backend="reference") as llm:
        end = origin.token_to_id("<|im_end|>")
        assert llm.checkpoint.eos_token_ids == (end,) and llm.tokenizer.has_chat_template
        said = [{"role": "user", "content": "Hello <|im_end|>"}]
        prompt = llm.chat_prompt(said)
        assert prompt["prompt"] == "<|im_start|>Hello <|im_end|><|im_end|>"
        assert prompt["prompt_token_ids"].count(end) == 1  # the user's is text
        (answer,) = llm.chat(said, SamplingParams(temperature=0, max_tokens=5))
        assert len(answer.outputs[0].token_ids) <= 5 and answer.outputs[0].finish_reason


def test_templates_by_name(tmp_path):
    def text(writer):
        gguf_cases.byte_level_text(text_samples.make_tokenizer("byte_level"), "gpt-2")(writer)
        named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
        writer.kv_data[0].pop("tokenizer.chat_template")
        writer.add_chat_template(named)

    ours = written(tmp_path / "model.gguf", text)
    assert ours.chat_templates == {"default": "plain", "tool_use": "tools"}


GOOD = {
    "model": "gpt2",
    "pre": "gpt-2",
    "tokens": ["a", "b", "ab", "<e>"],
    "token_type": [1, 1, 1, 3],
    "merges": ["a b"],
    "eos_token_id": 3,
}


def build(tmp_path, change, template=None):
    fields = {f"tokenizer.ggml.{k}": v for k, v in (GOOD | change).items() if v is not None}
    if template is not None:
        fields["tokenizer.chat_template"] = template
    return tokenizer_of_gguf(fields, tmp_path / "x.gguf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "bert"}, "model is 'bert'"),
        ({"model": 3}, "model is 3: it must be a str"),
        ({"pre": "deepseek-llm"}, "pre is 'deepseek-llm'"),
        ({"pre": None}, "pre is ''"),
        ({"tokens": []}, "0 tokens"),
        ({"tokens": ["a", "a"]}, "they must differ"),
        ({"tokens": ["a", 1]}, "tokens must be a list"),
        ({"tokens": ["a" * 5000]}, "more than 1024 characters"),
        ({"token_type": [1]}, "token_type must be a list of 4"),
        ({"merges": ["a  b"]}, "merges must be a list of pairs"),
        ({"merges": ["a x"]}, "not a readable tokenizer"),
        ({"eos_token_id": 4}, "eos_token_id is 4"),
        ({"eos_token_id": -1}, "eos_token_id is -1"),
        ({"add_bos_token": True}, "add_bos_token"),
        ({"add_bos_token": 1}, "add_bos_token is 1"),
        ({"model": "llama"}, "scores must be a list of 4"),
    ],
)
def test_what_is_not_known_is_refused_by_name(change, message, tmp_path):
    assert build(tmp_path, {}).encode("ab") == [2]
    with pytest.raises(ModelError, match=message) as error:
        build(tmp_path, change)
    assert str(error.value).startswith(str(tmp_path / "x.gguf: ")) and "\n" not in str(error.value)


def test_a_template_is_limited_as_in_a_folder(tmp_path):
    with pytest.raises(ModelError, match="longer than"):
        build(tmp_path, {}, "x" * 300_000)
    with pytest.raises(ModelError, match="no text"):
        build(tmp_path, {}, 3)
