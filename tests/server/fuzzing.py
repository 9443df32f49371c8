"""Requests made from the server's own description, and beside it: no answer is a fault of the server."""

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation.modes import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.lib.served import Served

WITH_BODY = (
    "chat_completions",
    "completions",
    "responses",
    "messages",
    "count_tokens",
    "tokenize",
    "detokenize",
)


CHECKS = [
    not_a_server_error,
    response_schema_conformance,
    content_type_conformance,
    status_code_conformance,
]


def fuzz(server: Served, cases: int) -> dict[int, int]:
    """Statuses of at least so many cases; an AssertionError for a fault of the server."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert {o.definition.raw["operationId"] for o in operations} >= set(WITH_BODY)
    statuses: dict[int, int] = {}
    for operation in operations:
        rich = operation.definition.raw["operationId"] in WITH_BODY
        modes = (
            list(GenerationMode) if rich else [GenerationMode.POSITIVE]
        )  # without a body all are as good
        for mode in modes:
            share = cases // (2 * len(WITH_BODY)) + 1 if rich else 1

            @settings(
                max_examples=share,
                deadline=None,
                database=None,
                derandomize=True,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def one(case):
                response = case.call(base_url=server.url, timeout=30)
                statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
                case.validate_response(response, checks=CHECKS)
                if response.status_code >= 400:
                    error = response.json()["error"]
                    assert "\n" not in error["message"]
                    assert len(response.content) < 4096

            one()
    total = sum(statuses.values())
    assert total >= cases
    assert server.chat("x")["choices"][0]["message"]["content"] == "ok"
    return dict(sorted(statuses.items()))
