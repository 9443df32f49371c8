"""At 3,000 tokens/s a client that parses everything again at each event lives: it has few events, and each is whole."""

import pytest

from tests.server.reparsing import follow

LINE = "- *Grüße* 🙂 an `alle`, **中文** und a\u0301\n"
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "é🙂", "n": [1, 2]}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def ask(server, text, **fields):
    prompt = server.play("parsed", text, tokens_per_s=3000)
    return {"messages": [{"role": "user", "content": prompt}], "max_tokens": 480, **fields}


def test_it_has_an_event_in_eight_ms_at_most(server, figure):
    text = LINE * 8
    client, seconds = follow(server, ask(server, text))
    assert client.text == text
    assert client.html.count("<li>") == 8
    # a first one, a last one, one of [DONE]; a server or client that is late has fewer, never more
    assert client.events <= 3 + seconds / 0.008
    figure(
        "reparsing",
        f"{len(text.encode())} tokens at 3,000/s in {client.events} events, all parsed after {seconds:.2f} s",
    )


@pytest.mark.parametrize("interval", [1, 2, 3, 7])
def test_however_the_stream_is_cut_each_event_is_whole(server, interval):
    text = f"{LINE}{CALL}{CALL}"
    client, _ = follow(server, ask(server, text, tools=TOOLS, stream_interval=interval))
    assert client.text == LINE
    assert client.calls == [{"x": "é🙂", "n": [1, 2]}] * 2
