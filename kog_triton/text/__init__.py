"""Text to token ids and back: tokenizer, chat templates, detokenization, stop strings."""

from kog_triton.text.detokenize import Detokenizer
from kog_triton.text.stop import StopMatcher
from kog_triton.text.tokenizer import Tokenizer

__all__ = ["Detokenizer", "StopMatcher", "Tokenizer"]
