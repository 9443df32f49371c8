"""Several prompts, each with parameters of its own, at most two at a time; outputs come in the order of the prompts.

python examples/several_requests.py [MODEL]
"""

import sys

from kog_triton import LLM, SamplingParams

PROMPTS = ("def add(a, b):", "class Stack:", "import os\n\n")


def main() -> None:
    params = [SamplingParams(temperature=0.7, seed=i, max_tokens=24) for i, _ in enumerate(PROMPTS)]
    with LLM(sys.argv[1] if len(sys.argv) > 1 else None, num_slots=2) as llm:
        for output in llm.generate(PROMPTS, params, use_tqdm=False):
            print(f"--- {output.prompt!r}\n{output.outputs[0].text}")


if __name__ == "__main__":
    main()
