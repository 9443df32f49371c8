"""Text as it is made: one prompt, one stream.

python examples/stream.py [MODEL]        a folder or a Hugging Face id; the demo that ships if none
"""

import sys

from kog_triton import LLM, SamplingParams


def main() -> None:
    params = SamplingParams(temperature=0, max_tokens=48)
    with LLM(sys.argv[1] if len(sys.argv) > 1 else None) as llm:
        stream = llm.stream("def add(a, b):", params)
        for delta in stream:
            print(delta.text, end="", flush=True)
        answer = stream.output().outputs[0]
        print(f"\n[{len(answer.token_ids)} tokens, ended by {answer.finish_reason}]", file=sys.stderr)


if __name__ == "__main__":
    main()
