"""An answer that a JSON schema describes: every token is masked, so that even a small model cannot break it.

python examples/json_schema.py [MODEL]   needs llguidance: pip install 'llguidance>=1', or the extra "grammar"
"""

import json
import sys

from kog_triton import LLM, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "arguments": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["name", "arguments"],
    "additionalProperties": False,
}


def main() -> None:
    rule = StructuredOutputsParams(json=SCHEMA)
    params = SamplingParams(temperature=0, max_tokens=96, structured_outputs=rule)
    with LLM(sys.argv[1] if len(sys.argv) > 1 else None) as llm:
        (output,) = llm.generate("# The function add(a, b) as JSON:\n", params)
    print(json.dumps(json.loads(output.outputs[0].text)))


if __name__ == "__main__":
    main()
