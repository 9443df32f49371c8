"""The command that times the socket beside the engine: it runs to its end on a CPU, its figures are a GPU's; and the
judge of an agent's answers, which a wrong token must not pass.
"""

import json
from dataclasses import replace

import numpy as np
import pytest

from kog_triton.backends import BackendOptions
from kog_triton.bench.check import MAX_GAP, open_oracle
from kog_triton.checkpoint.folder import Checkpoint
from tests.server.judged_answers import judge
from tests.server.ten_questions import ANSWER_TOKENS, PRINTABLE, Question
from tests.server.through_socket import CLIENTS, SMALL, make_checkpoint, measure, missing, small

CONTEXT = 1024


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("judged") / "model"
    make_checkpoint(folder, SMALL, "cpu")
    return folder


@pytest.fixture(scope="module")
def reference(model):
    return open_oracle(Checkpoint.open(model), BackendOptions(max_context=CONTEXT, device="cpu"))


def best_ids(reference, prompt):
    """The reference's own greedy answer, by whole passes, and the logits of its tokens."""
    ids = list(prompt.encode())
    for _ in range(ANSWER_TOKENS):
        row = reference.forward_logits(ids)[-1]
        ids.append(max(PRINTABLE, key=lambda i: row[i]))
    return bytes(ids[-ANSWER_TOKENS:]).decode(), reference.forward_logits(ids)


@pytest.fixture(scope="module")
def questions(reference):
    """Two, of which the second one's prompt goes on from the first one's."""
    found, prompt = [], "x" * 300
    for number in range(2):
        said, _ = best_ids(reference, prompt)
        found.append(Question(prompt, said, said, 299 * number, len(prompt), 1.0, 10.0))
        prompt += said + "and then"
    return found


def test_the_references_own_answers_pass(model, questions):
    found = judge(model, questions, "cpu", CONTEXT)["answers"]
    assert found["held"] and found["largest_gap"] == 0 and found["questions_that_differ"] == []
    assert found["the_references_own"] == 1 and found["tokens_judged"] == 2 * ANSWER_TOKENS


@pytest.mark.parametrize("field", ["warm", "cold"])
@pytest.mark.parametrize("near", [True, False])
def test_another_token_passes_where_its_logit_is_as_large_but_for_rounding(model, reference, questions, field, near):
    """An answer that ends with another token than the reference's own, at the place where one is nearest."""
    question = questions[1]
    start = len(question.prompt)
    ids = list(question.prompt.encode()) + list(question.warm.encode())
    rows = reference.forward_logits(ids)[start - 1 : -1].astype(np.float64)
    below = {
        (place, other): (row[ids[start + place]] - row[other]) / row.std()
        for place, row in enumerate(rows)
        for other in PRINTABLE
        if other != ids[start + place]
    }
    place, other = min(below, key=lambda at: abs(below[at] - (0 if near else 2)))
    assert (below[place, other] <= MAX_GAP) == near
    said = question.warm[:place] + chr(other)
    found = judge(model, [questions[0], replace(question, **{field: said})], "cpu", CONTEXT)["answers"]
    assert found["questions_that_differ"] == [1]
    assert found["largest_gap"] == pytest.approx(below[place, other], abs=1e-4)
    assert found["held"] == near


def test_what_a_machine_lacks_is_said_before_anything_starts(monkeypatch):
    assert missing("reference", 1) == ""
    assert "no backend named 'none'" in missing("none", 1)
    assert "set TMPDIR" in missing("reference", 10**18)
    monkeypatch.setattr("tests.server.through_socket.NEEDED", ("no_such_package",))
    assert "install the server's packages" in missing("reference", 1)


@pytest.mark.slow
def test_the_whole_command_but_for_a_gpu(figure):
    found = dict(measure(small()))
    for count in (1, CLIENTS):
        one = found[f"{count} clients"]
        assert one["through_the_socket"] > 0 and min(one["engine_tokens_per_s"]) > 0
        figure("through the socket", f"{count} clients, reference on a CPU: {one['share']:.1%}")
    schema = found["schema"]
    figure("A22", f"held by a schema, reference on a CPU: {json.dumps(schema)}")
    assert schema["first_token_later_ms"]["new"] < 1000 and schema["share"] > 0.3
    agent = found["agent"]
    assert agent["percent_cached"]["held"]
    assert agent["answers"]["held"] and agent["answers"]["questions_that_differ"] == []
