"""One sample's answer as the APIs tell it: its parser, what came of it, and why it ended."""

from dataclasses import dataclass, field

from kog_triton.outputs import Logprob, RequestOutput
from kog_triton.server.samples import News
from kog_triton.text.answer import AnswerDelta, AnswerParser
from kog_triton.text.tool_calls import ToolCall


@dataclass
class Told:
    """`take` news; the lists and texts are what was told until now."""

    parser: AnswerParser
    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    output: RequestOutput | None = None

    def take(self, news: News) -> AnswerDelta:
        """What this news made certain."""
        delta = self.parser.feed(news.delta.text)
        if news.delta.output is not None:
            self.output = news.delta.output
            rest = self.parser.finish()
            delta = AnswerDelta(
                delta.reasoning + rest.reasoning, delta.content + rest.content, delta.calls + rest.calls
            )
        if delta.reasoning:  # a long answer has 3,000 pieces a second
            self.reasoning.append(delta.reasoning)
        if delta.content:
            self.content.append(delta.content)
        self.calls += delta.calls
        self.logprobs += news.delta.logprobs or []
        return delta

    @property
    def finish_reason(self) -> str | None:
        """OpenAI's word: an answer that ended with calls asks for them."""
        if self.output is None:
            return None
        reason = self.output.outputs[0].finish_reason
        return "tool_calls" if self.calls and reason == "stop" else reason


def call_id(answer_id: str, sample: int, number: int) -> str:
    """The name of a call, by which its result comes back."""
    return f"call_{answer_id[-20:]}_{sample}_{number}"
