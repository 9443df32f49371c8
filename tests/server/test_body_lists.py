"""Lists that a client fills: a wrong element is told, and not each of many."""

import pytest
from pydantic import ValidationError

from kog_triton.server.schemas.chat import ChatBody, Message
from kog_triton.server.schemas.completions import CompletionBody
from kog_triton.server.schemas.messages import MessagesBody
from kog_triton.server.schemas.responses import ResponsesBody
from kog_triton.server.schemas.sampling import StructuredOutputsBody
from kog_triton.server.schemas.tokens import DetokenizeBody, TokenizeBody

LISTS = {  # of which a client may send any number of wrong elements
    ChatBody: ("messages", "tools", "stop", "bad_words", "allowed_token_ids"),
    CompletionBody: ("prompt", "stop", "stop_token_ids"),
    DetokenizeBody: ("tokens",),
    MessagesBody: ("messages", "system", "tools", "stop_sequences"),
    Message: ("content", "tool_calls"),
    ResponsesBody: ("input", "tools", "include"),
    StructuredOutputsBody: ("choice",),
    TokenizeBody: ("messages", "tools"),
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in LISTS.items() for name in names])
def test_a_list_ends_at_its_first_wrong_element(kind, name):
    """An error of each of 50,000 took 1.8 s of every stream and 192 MiB."""
    with pytest.raises(ValidationError) as found:
        kind.model_validate({name: [3.5] * 1000})
    assert 1 <= found.value.error_count() < 10


def test_every_list_that_a_client_fills_is_looked_at():
    named = {(kind, name) for kind, names in LISTS.items() for name in names}
    held = {(ChatBody, "modalities"), (ChatBody, "functions")}  # refused whatever they hold
    for kind in LISTS:
        for name, field in kind.model_fields.items():
            if "list[" in str(field.annotation) and (kind, name) not in named | held:
                assert name in ("stop_token_ids", "allowed_token_ids", "bad_words", "stop"), name
