"""A conversation of two questions through the model's own chat template; the second finds the first in the cache.

python examples/chat.py MODEL            a folder or a Hugging Face id; the demo that ships has no chat template
"""

import sys

from kog_triton import LLM, SamplingParams

QUESTIONS = ("Name a sorting algorithm.", "Write it in Python.")


def main() -> None:
    params = SamplingParams(temperature=0.7, top_p=0.95, seed=1, max_tokens=64)
    talk = [{"role": "system", "content": "Answer briefly."}]
    with LLM(sys.argv[1]) as llm:
        for question in QUESTIONS:
            talk.append({"role": "user", "content": question})
            (output,) = llm.chat(talk, params)
            answer = output.outputs[0].text
            talk.append({"role": "assistant", "content": answer})
            print(f"> {question}\n{answer}\n")
            known, all_of = output.metrics.cached_tokens, len(output.prompt_token_ids)
            print(f"[{known} of {all_of} prompt tokens were in the cache]", file=sys.stderr)


if __name__ == "__main__":
    main()
