"""Trains the demo's tokenizer: a byte-level BPE whose pieces suit Python source.

Runs of spaces, runs of newlines, single digits, names with one leading space or dot, and runs of
punctuation are never merged with each other. A newline and the indent after it stay two tokens, so
that a prompt may end before, between or after them and still look like training text.
Byte-level: any text can be encoded, and decoding all ids of a text gives the text back.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
PIECES = r"\n+| {2,}|\t+|[ .]?[\p{L}_]+|\p{N}| ?[^\s\p{L}\p{N}_]+|\s"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A BPE of vocab_size ids (fewer if the texts are too short); END_OF_TEXT has id 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # Every training document starts after END_OF_TEXT, so every prompt does too.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A",
        pair=f"{END_OF_TEXT} $A {END_OF_TEXT} $B",
        special_tokens=[(END_OF_TEXT, END_OF_TEXT_ID)],
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_positions: int) -> None:
    """Write tokenizer.json and tokenizer_config.json as transformers reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
