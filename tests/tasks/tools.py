"""Let a model call a tool: the template lists it, the call comes back as data."""

import json

from kog_triton import LLM, SamplingParams, StructuredOutputsParams

TEMPLATE = "{% for t in tools %}{{ t.function.name }} {% endfor %}{{ messages[-1].content }}"
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
CALL = r'<tool_call>\n\{"name": "add", "arguments": \{"a": [0-9]\}\}\n</tool_call>'
with LLM(chat_template=TEMPLATE) as llm:
    params = SamplingParams(temperature=0, max_tokens=200, structured_outputs=StructuredOutputsParams(regex=CALL))
    talk = [{"role": "user", "content": "add one"}]
    (out,) = llm.chat(talk, params, tools=[ADD], tool_call_parser="hermes")
assert out.prompt == "add add one", out.prompt
(call,) = out.outputs[0].tool_calls
assert call.name == "add" and set(json.loads(call.arguments)) == {"a"}, call
assert out.outputs[0].finish_reason == "tool_calls"
