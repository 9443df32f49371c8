"""An agent of openai-agents that calls a tool ten times and then answers, as JSON. Input: {url, first, calls}.

Each result of the tool names what the scripted engine plays next.
"""

import asyncio
import json
import sys

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

given = json.load(sys.stdin)
asked = []


@function_tool
def read_file(number: int) -> str:
    """Read a file by its number."""
    asked.append(number)
    return f"{'a line of a file that was read ' * 20}play:step{number + 1}"


async def run(streamed):
    bound = {"max_turns": given["calls"] + 2}
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{given['url']}/v1", api_key="none", max_retries=0)
    agent = Agent(
        name="reader",
        instructions="You read files. " * 40,
        tools=[read_file],
        model=OpenAIChatCompletionsModel(model="kog", openai_client=client),
        model_settings=ModelSettings(temperature=0, include_usage=True),
    )
    if streamed:
        result = Runner.run_streamed(agent, given["first"], **bound)
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, given["first"], **bound)
    usage = [response.usage for response in result.raw_responses]
    return {
        "answer": result.final_output,
        "asked": list(asked),
        "prompt_tokens": [one.input_tokens for one in usage],
        "cached_tokens": [one.input_tokens_details.cached_tokens for one in usage],
    }


told = asyncio.run(run(False))
asked.clear()
print(json.dumps({"whole": told, "streamed": asyncio.run(run(True))}))
