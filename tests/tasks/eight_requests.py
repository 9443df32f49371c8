"""Send eight requests at once from threads and from tasks: all are served, each as alone."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from kog_triton import LLM, SamplingParams

params = SamplingParams(temperature=0, max_tokens=8)
prompts = [f"def f{i}(" for i in range(8)]
with LLM(num_slots=2) as llm:
    alone = [out.outputs[0].text for out in llm.generate(prompts, params)]

    def ask(prompt):
        return "".join(delta.text for delta in llm.stream(prompt, params))

    async def wait(prompt):
        return "".join([delta.text async for delta in llm.stream(prompt, params)])

    async def all_at_once():
        return await asyncio.gather(*map(wait, prompts))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, prompts)) == alone
    assert asyncio.run(all_at_once()) == alone
