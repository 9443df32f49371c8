"""Every target by its name on the command line."""

from .gguf_target import Gguf
from .narrow_target import Narrow
from .targets import Config, Generation, Header, Index, Target, TokenizerConfig, TokenizerFile

TARGETS: dict[str, type[Target]] = {
    "header": Header,
    "index": Index,
    "config": Config,
    "generation": Generation,
    "tokenizer": TokenizerFile,
    "tokenizer_config": TokenizerConfig,
    "gguf": Gguf,
    "narrow": Narrow,
}
