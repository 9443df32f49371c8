"""Get JSON that fits a schema."""

import json

from kog_triton import LLM, SamplingParams, StructuredOutputsParams

schema = {
    "type": "object",
    "properties": {"name": {"enum": ["add", "sub"]}, "count": {"type": "integer", "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
with LLM() as llm:
    params = SamplingParams(temperature=0, max_tokens=200, structured_outputs=StructuredOutputsParams(json=schema))
    value = json.loads(llm.generate("x = ", params)[0].outputs[0].text)
assert set(value) == {"name", "count"} and value["name"] in ("add", "sub"), value
assert isinstance(value["count"], int) and value["count"] <= 99
