"""Streams on an event loop: two requests share the model, and one of them is stopped early.

python examples/async_streams.py [MODEL]
"""

import asyncio
import sys

from kog_triton import LLM, SamplingParams


async def follow(llm: LLM, prompt: str, max_tokens: int, most: int) -> str:
    """The text behind a prompt and why it ended; with the piece `most` the request is cancelled."""
    stream = llm.stream(prompt, SamplingParams(temperature=0, max_tokens=max_tokens))
    text, pieces = prompt, 0
    async for delta in stream:
        text, pieces = text + delta.text, pieces + 1
        if pieces == most:
            stream.cancel()
    return f"{text}\n[{stream.finish_reason}]"


async def answers(llm: LLM) -> None:
    both = await asyncio.gather(
        follow(llm, "def add(a, b):", max_tokens=32, most=64), follow(llm, "class Stack:", max_tokens=512, most=8)
    )
    print("\n---\n".join(both))


def main() -> None:
    with LLM(sys.argv[1] if len(sys.argv) > 1 else None, num_slots=2) as llm:
        asyncio.run(answers(llm))


if __name__ == "__main__":
    main()
