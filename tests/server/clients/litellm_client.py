"""litellm on scripted answers: what it makes of them, as JSON. Input: {url, prompts}."""

import json
import sys

import litellm

given = json.load(sys.stdin)
prompts = given["prompts"]
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
FIXED = {"model": "openai/kog", "api_base": f"{given['url']}/v1", "api_key": "none"}


def ask(prompt, **fields):
    messages = [{"role": "user", "content": prompt}]
    return litellm.completion(messages=messages, num_retries=0, **FIXED, **fields)


plain = ask(prompts["plain"])
pieces = list(ask(prompts["fast"], stream=True, stream_options={"include_usage": True}))
called = ask(prompts["call"], tools=[TOOL])
streamed = list(ask(prompts["call"], tools=[TOOL], stream=True))
thinks = ask(prompts["thinks"])
errors = []
for fields in ({"temperature": 9}, {"max_tokens": 10**9}):
    try:
        ask(prompts["plain"], **fields)
    except litellm.BadRequestError as error:
        errors.append([error.status_code, fields.popitem()[0] in str(error)])


def calls(said):
    return [[call.function.name, json.loads(call.function.arguments)] for one in said for call in one.tool_calls or []]


told = {
    "plain": [plain.choices[0].message.content, plain.choices[0].finish_reason, plain.usage.completion_tokens],
    "fast": [
        "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices),
        [piece.usage.completion_tokens for piece in pieces if getattr(piece, "usage", None)][-1],
    ],
    "called": calls([called.choices[0].message]),
    "streamed": calls([piece.choices[0].delta for piece in streamed if piece.choices]),
    "thinks": [thinks.choices[0].message.reasoning_content, thinks.choices[0].message.content],
    "errors": errors,
}
print(json.dumps(told))
