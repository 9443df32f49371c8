"""langchain-openai on scripted answers: what it makes of them, as JSON. Input: {url, prompts}."""

import json
import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

given = json.load(sys.stdin)
prompts = given["prompts"]


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"{prompts['after_call']} of {city}"


class City(BaseModel):
    name: str


model = ChatOpenAI(
    model="kog", base_url=f"{given['url']}/v1", api_key="none", max_retries=0, stream_usage=True, temperature=0
)
plain = model.invoke(prompts["plain"])
pieces = list(model.stream(prompts["fast"]))
whole = pieces[0]
for piece in pieces[1:]:
    whole += piece
with_tools = model.bind_tools([weather])
history = [HumanMessage(prompts["call"])]
answer = with_tools.invoke(history)
history.append(answer)
for call in answer.tool_calls:
    history.append(ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]))
after = with_tools.invoke(history)
forced = model.bind_tools([weather], tool_choice="weather").invoke(prompts["call"])
made = model.with_structured_output(City, method="json_schema").invoke(prompts["json"])
told = {
    "plain": [plain.content, plain.usage_metadata["output_tokens"]],
    "fast": [whole.content, whole.usage_metadata["output_tokens"]],
    "called": [[call["name"], call["args"]] for call in answer.tool_calls],
    "after": after.content,
    "forced": [[call["name"], call["args"]] for call in forced.tool_calls],
    "json": made.model_dump(),
}
print(json.dumps(told))
