"""The model as the server's process knows it: names, tokenizer, defaults, parsers, and no weights."""

from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from random import Random, SystemRandom
from typing import Any

from kog_triton.generation import Generation
from kog_triton.metrics import measure
from kog_triton.sampling.params import SamplingParams
from kog_triton.server.remote_claim import RemoteClaim
from kog_triton.server.wire import Opened
from kog_triton.text import Tokenizer
from kog_triton.text.answer import find_tool_parser, thinks
from kog_triton.text.chat import knows_tools
from kog_triton.text.reasoning import CLOSE


@dataclass
class ServedModel:
    """
    names  the first one is told, all are accepted
    seeds  of the requests that name none
    """

    opened: Opened
    tokenizer: Tokenizer
    names: tuple[str, ...]
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    seeds: Random = field(default_factory=SystemRandom)

    @property
    def name(self) -> str:
        return self.names[0]

    @cached_property
    def tool_parser(self) -> str | None:
        if self.tool_call_parser != "auto":
            return None if self.tool_call_parser == "none" else self.tool_call_parser
        return find_tool_parser(self._templates)

    @property
    def knows_tools(self) -> bool:
        """Whether tools reach the prompt, or the operator says that they are called."""
        return self.tool_parser is not None or knows_tools(self.tokenizer.chat_templates.values())

    @cached_property
    def reasons(self) -> bool:
        """Whether reasoning is told apart from answers."""
        if self.reasoning_parser != "auto":
            return self.reasoning_parser != "none"
        return thinks(self._templates)

    @property
    def _templates(self) -> str:
        return "\n".join(self.tokenizer.chat_templates.values())

    def default_params(self, **explicit: Any) -> SamplingParams:
        """The checkpoint's own sampling defaults, up to the end of the context unless told."""
        given = {"max_tokens": None} | explicit
        return SamplingParams.from_generation_config(self.opened.generation, **given)

    def with_seed(self, params: SamplingParams, seed: int) -> SamplingParams:
        return params if params.seed is not None else replace(params, seed=seed)

    def generation(self, claim: RemoteClaim, prompt: str | None) -> Generation:
        opened = self.opened
        figures = partial(measure, spec=opened.spec, backend=opened.backend, peak=opened.peak)
        return Generation(claim, prompt, self.tokenizer, frozenset(opened.eos_token_ids), figures)

    def piece(self, token: int) -> str:
        """A token's own text, as log-probabilities name it."""
        return self.tokenizer.decode([token], skip_special_tokens=False)

    def reasoning_tokens(self, token_ids: list[int]) -> int:
        """How many tokens of an answer that reasons are reasoning: up to those that end it."""
        end = self._end_of_reasoning
        for at in range(len(token_ids) - len(end) + 1):
            if token_ids[at : at + len(end)] == end:
                return at + len(end)
        return len(token_ids)

    @cached_property
    def _end_of_reasoning(self) -> list[int]:
        return self.tokenizer.encode(CLOSE, add_special_tokens=False)
