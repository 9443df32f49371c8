"""Requests made from the server's own description, and beside it: no answer is a fault of the server, and each is what
the description says.

`python -m tests.server.fuzzing --keep` asks 5,000 and keeps the answers' statuses in fuzz-record.json.
"""

import argparse
import json
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation.modes import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from kog_triton.json_file import in_lines
from tests.lib.fake_checkpoint import make_checkpoint
from tests.lib.served import Served, served

RECORD = Path(__file__).with_name("fuzz-record.json")
FLAGS = ("--max-num-seqs", "4", "--tool-call-parser", "hermes", "--served-model-name", "m")
WITH_BODY = ("chat_completions", "completions", "responses", "messages", "count_tokens", "tokenize", "detokenize")


CHECKS = [not_a_server_error, response_schema_conformance, content_type_conformance, status_code_conformance]


def fuzz(server: Served, cases: int) -> dict[int, int]:
    """Statuses of at least so many cases; an AssertionError for a fault of the server."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert {o.definition.raw["operationId"] for o in operations} >= set(WITH_BODY)
    statuses: dict[int, int] = {}
    for operation in operations:
        rich = operation.definition.raw["operationId"] in WITH_BODY
        modes = list(GenerationMode) if rich else [GenerationMode.POSITIVE]  # without a body all are as good
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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.server.fuzzing")
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--keep", action="store_true", help=f"write {RECORD.name}")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        model = make_checkpoint(Path(place, "model"))
        with served(Path(place, "server"), model, *FLAGS) as server:
            statuses = fuzz(server, args.cases)
    record = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "schemathesis": version("schemathesis"),
        "checks": [check.__name__ for check in CHECKS],
        "cases": sum(statuses.values()),
        "statuses": statuses,
    }
    print(json.dumps(record, indent=2))
    if args.keep:
        RECORD.write_text(in_lines(record, 1) + "\n")


if __name__ == "__main__":
    main()
