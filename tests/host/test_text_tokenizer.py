"""The tokenizer equals transformers on saved folders; missing and broken files are named."""

import json
import os
import subprocess
import sys

import pytest
from transformers import PreTrainedTokenizerFast

from kog_triton.errors import ModelError, RequestError
from kog_triton.text import Tokenizer
from tests.lib.text_samples import KINDS, make_tokenizer

TEXTS = [
    "",
    "Hello there",
    "  x = 1\n\n\ty ",
    "<s>a</s> <|im_start|>user<|im_end|>  [INST] b",
    "<think>x</think> 世界 😀 e\u0301",
]


@pytest.mark.parametrize("kind", KINDS)
def test_encode_and_decode_equal_transformers(kind, tmp_path):
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(kind), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    theirs.save_pretrained(tmp_path)
    ours = Tokenizer.load(tmp_path)
    assert ours.vocab_size == len(theirs)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs(text, add_special_tokens=special).input_ids
            for skip in (True, False):
                expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
                assert ours.decode(ids, skip_special_tokens=skip) == expected


def test_tokenizer_json_says_what_goes_around_a_text(tmp_path):
    make_tokenizer("byte_level").save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False, "add_eos_token": True}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert Tokenizer.load(tmp_path).encode("a b") == theirs("a b").input_ids


def test_tokens_that_only_the_configuration_has(tmp_path):
    backend = make_tokenizer("byte_level")
    backend.save(str(tmp_path / "tokenizer.json"))
    size = backend.get_vocab_size()
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": {"content": "<|stop|>", "__type": "AddedToken"},
        "added_tokens_decoder": {
            str(size): {"content": "<|stop|>", "special": True, "normalized": False},
            str(size + 1): {"content": "<note>", "special": False, "normalized": False},
        },
        "additional_special_tokens": ["<|more|>"],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = Tokenizer.load(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    text = "a<note>b<|more|>c<|stop|>"
    ids = ours.encode(text)
    assert ids == theirs(text).input_ids
    assert ours.eos_token_id == size
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "a<note>bc"


def test_special_tokens_map_of_older_checkpoints(tmp_path):
    make_tokenizer("byte_level").save(str(tmp_path / "tokenizer.json"))
    content = {"bos_token": {"content": "<s>"}, "eos_token": "<|im_end|>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(content))
    ours = Tokenizer.load(tmp_path)
    assert ours.named_tokens == {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    assert ours.eos_token_id == make_tokenizer("byte_level").token_to_id("<|im_end|>")


def test_a_whole_tokenizer_config_is_not_overruled(tmp_path):
    """As in transformers: a map beside a list of added tokens is of an older release of the same model."""
    make_tokenizer("byte_level").save(str(tmp_path / "tokenizer.json"))
    config = {"added_tokens_decoder": {}, "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<s>"}))
    assert Tokenizer.load(tmp_path).named_tokens == {"eos_token": "<|im_end|>"}


def test_truncation_and_padding_are_not_for_prompts(tmp_path):
    backend = make_tokenizer("byte_level")
    backend.enable_truncation(3)
    backend.enable_padding(length=3)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.load(tmp_path).encode("one two three four five")) > 5
    assert len(Tokenizer.load(tmp_path).encode("a")) == 2


@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json"])
def test_other_formats_are_refused_with_advice(tmp_path, name):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ModelError, match=rf"tokenizer.json does not exist and {name} is not read.*save"):
        Tokenizer.load(tmp_path)


PREFIXED = """
import json, sys
from pathlib import Path
from kog_triton.errors import ModelError
from kog_triton.text import Tokenizer
try:
    print(Tokenizer.load(Path(sys.argv[1])).encode("ab"))
except ModelError as error:
    print(error)
"""


@pytest.mark.parametrize("as_text", [True, False])
@pytest.mark.parametrize(("second", "said"), [("##b", "[2]"), ("b", "merge 0 continues a piece with 'b'")])
def test_a_merge_without_the_models_prefix_is_refused(second, said, as_text, tmp_path):
    """In a process of its own: the library ends it."""
    vocab = {"a": 0, second: 1, "ab": 2}
    merge = f"a {second}" if as_text else ["a", second]
    model = {"type": "BPE", "vocab": vocab, "merges": [merge], "continuing_subword_prefix": "##"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model}))
    run = [sys.executable, "-c", PREFIXED, str(tmp_path)]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    assert said in done.stdout


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer\.json does not exist: the checkpoint has no"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a readable tokenizer") as error:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(error.value)
    make_tokenizer("byte_level").save(str(tmp_path / "tokenizer.json"))
    for content, word in [("{", "valid JSON"), ("[1]", r"found \[1\]"), ("\xff", "JSON")]:
        (tmp_path / "tokenizer_config.json").write_text(content, encoding="latin-1")
        with pytest.raises(ModelError, match=f"tokenizer_config.json: .*{word}"):
            Tokenizer.load(tmp_path)
    for bad in [{"added_tokens_decoder": {"x": {"content": "a"}}}, {"added_tokens_decoder": [1]}]:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(bad))
        with pytest.raises(ModelError, match=r"tokenizer_config\.json: added_tokens_decoder"):
            Tokenizer.load(tmp_path)


def test_a_folder_whose_name_is_no_utf_8_is_read(tmp_path):
    """As any name beyond ASCII is to Python where the locale is POSIX's."""
    folder = tmp_path / os.fsdecode(b"m\xf6del")
    folder.mkdir()
    (folder / "tokenizer.json").write_text(make_tokenizer("byte_level").to_str())
    assert Tokenizer.load(folder).encode("a")


def test_a_lone_surrogate_is_the_requests_fault():
    tokenizer = Tokenizer(make_tokenizer("byte_level"))
    with pytest.raises(RequestError, match="surrogate"):
        tokenizer.encode("a\ud800b")
