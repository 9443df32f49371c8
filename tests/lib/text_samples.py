"""Small tokenizers of each kind, trained on the spot, and conversations, for the tests of text."""

import json
from functools import cache

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog, again and again.",
    "def add(a, b):\n    return a + b  # a sum\n\n\nprint(add(1, 2))",
    "Grüße aus Köln! Ça va? Où est la gare? Ναι, φυσικά.",
    "今日は良い天気ですね。 你好,世界! 안녕하세요",
    "emoji 😀😃 👩‍👩‍👧 🇩🇪 and é vs e\u0301, नमस्ते",
    'system user assistant tool [{"name": "weather", "arguments": {"city": "Oslo"}}]',
    "<|im_start|>user\nHello there<|im_end|>\n",
] * 3

SPECIAL_TOKENS = [
    "<unk>",
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "[INST]",
    "[/INST]",
    "[TOOL_CALLS]",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|end|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜end▁of▁sentence｜>",
    "<|START_OF_TURN_TOKEN|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|USER_TOKEN|>",
    "<|CHATBOT_TOKEN|>",
]
PLAIN_TOKENS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]  # added, but not special
BYTES = [f"<0x{b:02X}>" for b in range(256)]

KINDS = ["byte_level", "llama_bpe", "unigram", "metaspace", "wordpiece", "suffix", "no_decoder"]


def _byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _llama_bpe() -> tokenizers.Tokenizer:
    """Sentencepiece's BPE as converted for Llama 2: byte fallback, a space before the text."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    first = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=first + BYTES, limit_alphabet=60, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _without_added(tokenizer, BYTES)


def _unigram() -> tokenizers.Tokenizer:
    return _train_unigram(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        normalizers.Replace(" ", "▁"),
        None,
    )


def _metaspace() -> tokenizers.Tokenizer:
    return _train_unigram(decoders.Metaspace(), None, pre_tokenizers.Metaspace())


def _train_unigram(decoder, normalizer, pre_tokenizer) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    trainer = trainers.UnigramTrainer(
        vocab_size=180, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator([text[:40] for text in CORPUS], trainer)
    tokenizer.decoder = decoder
    if pre_tokenizer is None:
        data = json.loads(tokenizer.to_str())
        data["model"]["vocab"] += [[piece, -30.0] for piece in BYTES]
        data["model"]["byte_fallback"] = True
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(data))
    return tokenizer


def _wordpiece() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _suffix() -> tokenizers.Tokenizer:
    """BPE whose pieces say where a word ends; "</w>" alone has no text but parts its neighbors."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>", "<s>", "</s>"], end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["</w>"])
    return tokenizer


def _no_decoder() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _without_added(tokenizer: tokenizers.Tokenizer, texts: list[str]) -> tokenizers.Tokenizer:
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = [t for t in data["added_tokens"] if t["content"] not in texts]
    return tokenizers.Tokenizer.from_str(json.dumps(data))


@cache
def _serialized(kind: str) -> str:
    tokenizer = globals()[f"_{kind}"]()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    tokenizer.add_tokens(PLAIN_TOKENS)
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", bos)]
    )
    return tokenizer.to_str()


def make_tokenizer(kind: str) -> tokenizers.Tokenizer:
    """A fresh tokenizer of one of KINDS, all tokens added; <s> goes before a text."""
    return tokenizers.Tokenizer.from_str(_serialized(kind))


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather in a city.\nMay be <b>wrong</b> & late.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Où?"},
                    "days": {"type": ["integer", "null"]},
                    "tags": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["city"],
            },
        },
    }
]
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}


def _say(*contents: str) -> list[dict]:
    roles = ["user", "assistant"]
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


SYSTEM = {"role": "system", "content": "Be brief.  "}
TOOL_ROUND = [
    *_say("Weather in Oslo?"),
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"t": -3}', "tool_call_id": "c1"},
]

# (messages, arguments of the template)
CONVERSATIONS: list[tuple[list[dict], dict]] = [
    (_say("Hello"), {}),
    (_say("Hello"), {"add_generation_prompt": False}),
    ([SYSTEM, *_say("Hi", "Hello!", "How are you?")], {}),
    ([SYSTEM], {}),
    (_say(""), {}),
    (_say("  spaces  around \n\n", "  and here\t", "  "), {}),
    (_say("😀 日本語 नमस्ते e\u0301 \u200d", "é 🇩🇪"), {"add_generation_prompt": False}),
    (_say("a < b > c & \"quoted\" 'x' \\ / {{ braces }} {% tag %}"), {}),
    (_say("1 <", "> 2", "[", "] |"), {}),
    (_say("Why?", "<think>\nBecause.\n</think>\n\nSo."), {"add_generation_prompt": False}),
    (_say("Why?", "<think>a</think>b", "And?"), {}),
    (
        [*_say("Why?"), {"role": "assistant", "content": "So.", "reasoning_content": "Hm."}],
        {"add_generation_prompt": False},
    ),
    ([*_say("Why?"), {"role": "assistant", "content": "So.", "reasoning": "Hm."}], {}),
    (_say("Think?"), {"enable_thinking": False}),
    (_say("Weather in Oslo?"), {"tools": TOOLS}),
    ([SYSTEM, *TOOL_ROUND], {"tools": TOOLS}),
    ([*TOOL_ROUND, {"role": "assistant", "content": "Cold."}, *_say("Thanks")], {"tools": TOOLS}),
    ([*_say("Hi"), {"role": "assistant", "content": None, "tool_calls": [CALL]}], {"tools": TOOLS}),
    (_say("What do they say?"), {"documents": [{"title": "One", "text": "long words " * 12}]}),
    (_say(*["line one\nline two\n\n    indented"] * 5), {"custom": 1}),
    ([{"role": "user", "content": [{"type": "text", "text": " in parts "}]}], {}),
]

# A function as the demo's corpus has them.
SNIPPET = '''import os


def read_lines(path):
    """Return the lines of a file without their line ends."""
    if not os.path.exists(path):
        raise FileNotFoundError(path)
    with open(path, "r") as f:
        lines = f.readlines()
    result = []
    for line in lines:
        result.append(line.rstrip("\\n"))
    return result
'''
