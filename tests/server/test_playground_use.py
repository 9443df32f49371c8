"""The page at / as people use it, in the system's Chromium: what is wrong is said, what was said is kept."""

import json
import os
import signal

import pytest

from tests.lib.chromium import chromium, page_of, until
from tests.lib.fake_checkpoint import make_checkpoint
from tests.lib.served import served, wait_for

pytestmark = pytest.mark.slow
WAIT_MS = 60_000
READY = "#state[data-state=ok]"
ENDED = "article.answer:not([aria-busy]):last-child"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("roomy") / "model"
    return make_checkpoint(folder, max_context=1 << 14, temperature=0.6)


@pytest.fixture(scope="module")
def server(tmp_path_factory, checkpoint):
    with served(tmp_path_factory.mktemp("server"), checkpoint) as running:
        yield running


@pytest.fixture(scope="module")
def browser():
    with chromium() as running:
        yield running


def opened(browser, server, width=1280, height=860, **context):
    return page_of(browser, server.url + "/", viewport={"width": width, "height": height}, **context)


def ask(page, prompt, ends=True):
    before = page.locator("article.answer").count()
    page.fill("#prompt", prompt)
    page.press("#prompt", "Enter")
    page.locator("article.answer").nth(before).wait_for(timeout=WAIT_MS)
    if ends:
        page.wait_for_selector(ENDED, timeout=WAIT_MS)


def test_a_broken_engine_is_said_and_the_next_one_is_used(browser, tmp_path, checkpoint):
    with served(tmp_path, checkpoint) as server, opened(browser, server) as page:
        page.wait_for_selector(READY)
        ask(page, server.play("dies", "It began and", tokens_per_s=100, faults={"8": "exit"}))
        assert page.inner_text("article.answer .body").startswith("It began")
        assert "engine ended" in page.inner_text("article.answer .wrong")
        assert "engine ended" in page.text_content("#said")
        page.wait_for_selector("#state[data-state=restarting]", timeout=WAIT_MS)
        assert "engine starts again" in page.inner_text("#banner")
        page.wait_for_selector(READY, timeout=WAIT_MS)
        assert page.is_hidden("#banner")
        ask(page, server.play("lives", "whole"))
        assert page.locator("article.answer .body").last.inner_text() == "whole"


def test_a_server_that_is_gone_is_said(browser, tmp_path, checkpoint):
    with served(tmp_path, checkpoint) as server, opened(browser, server) as page:
        page.wait_for_selector(READY)
        ask(page, server.play("long", "word " * 400, tokens_per_s=100), ends=False)
        until(page, "document.getElementById('tokens').textContent !== '–'")
        engine = server.engine_pid()
        os.kill(server.process.pid, signal.SIGKILL)
        page.wait_for_selector(ENDED, timeout=WAIT_MS)
        assert "complete" in page.inner_text("article.answer .wrong")
        page.wait_for_selector("#state[data-state=lost]", timeout=WAIT_MS)
        assert "does not answer" in page.inner_text("#banner")
        wait_for(lambda: not os.path.exists(f"/proc/{engine}"))


def test_a_key_is_asked_for_and_sent(browser, tmp_path, checkpoint):
    with served(tmp_path, checkpoint, "--api-key", "secret") as server, opened(browser, server) as page:
        page.wait_for_selector("#key[open]")
        page.fill("#key [name=key]", "wrong")
        page.keyboard.press("Enter")
        until(page, "document.getElementById('key-error').textContent")
        assert "no valid API key" in page.inner_text("#key-error")
        page.fill("#key [name=key]", "secret")
        page.keyboard.press("Enter")
        page.wait_for_selector("#key:not([open])", state="attached")
        page.wait_for_selector(READY)
        ask(page, server.play("guarded", "you are in"))
        assert page.inner_text("article.answer .body") == "you are in"


def test_settings_go_with_the_request_and_bad_ones_do_not(browser, server):
    with opened(browser, server) as page:
        page.wait_for_selector(READY)
        page.click("#settings-open")
        assert page.get_attribute("[name=temperature]", "placeholder") == "0.6"
        page.fill("[name=temperature]", "0.25")
        page.fill("[name=stop]", "END\nSTOP")
        page.fill("[name=schema]", "{")
        assert page.inner_text("#schema-error")
        page.keyboard.press("Escape")
        page.fill("#prompt", "x")
        page.press("#prompt", "Enter")
        assert "JSON schema" in page.inner_text("#changed")
        assert page.is_visible("#settings") and page.locator("article").count() == 0
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        page.fill("[name=schema]", json.dumps(schema))
        page.keyboard.press("Escape")
        with page.expect_request("**/v1/chat/completions") as sent:
            ask(page, server.play("schema", '{"a": 12}'))
        body = json.loads(sent.value.post_data)
        assert body["temperature"] == 0.25 and body["stop"] == ["END", "STOP"]
        assert body["structured_outputs"] == {"json": schema}
        assert page.locator("article.answer .hljs-number").inner_text() == "12"
        assert not page.said


def test_conversations_are_kept_continued_exported_and_deleted(browser, server):
    with opened(browser, server) as page:
        page.wait_for_selector(READY)
        ask(page, server.play("first", "**one**", tokens_per_s=500))
        with page.expect_request("**/v1/chat/completions") as sent:
            ask(page, server.play("second", "two"))
        said = json.loads(sent.value.post_data)["messages"]
        assert [m["role"] for m in said] == ["user", "assistant", "user"]
        assert said[1]["content"] == "**one**"
        page.click("#new")
        assert page.is_visible("#empty") and page.inner_text("#rate-value") == "–"
        page.reload()
        page.wait_for_selector(READY)
        page.click("#conversations button")
        assert page.locator("article.question").count() == 2
        assert page.locator("article.answer strong").inner_text() == "one"
        assert page.inner_text("#tokens") == "4"  # the second answer's: three letters and the end
        page.click("[popovertarget=export]")
        with page.expect_download() as saved:
            page.click("[data-export=markdown]")
        text = saved.value.path().read_text(encoding="utf-8")
        assert "**one**" in text and "play:second" in text
        page.click("[popovertarget=export]")
        with page.expect_download() as saved:
            page.click("[data-export=json]")
        assert len(json.loads(saved.value.path().read_text())["messages"]) == 4
        page.hover("#conversations li")
        page.click("#conversations .icon")
        assert page.locator("#conversations li").count() == 0 and page.is_visible("#empty")
        assert page.evaluate("Object.keys(localStorage).some((k) => k.includes('conversation'))") is False
        assert not page.said


def test_an_answer_is_asked_for_again_and_copied(browser, server):
    with opened(browser, server, permissions=["clipboard-read", "clipboard-write"]) as page:
        page.wait_for_selector(READY)
        ask(page, server.play("again", "`first`"))
        page.click("article.answer footer .copy")
        until(page, "document.querySelector('footer .copy').textContent === 'Copied'")
        assert page.evaluate("navigator.clipboard.readText()") == "`first`"
        server.play("again", "`second`")
        page.click("article.answer footer >> text=Ask again")
        until(page, "document.querySelector('article.answer code')?.textContent === 'second'")
        assert page.locator("article").count() == 2
        assert not page.said


def test_the_demo_continues_texts(browser, tmp_path):
    with served(tmp_path, None, "--backend", "reference") as server, opened(browser, server) as page:
        page.wait_for_selector(READY)
        assert page.is_disabled("[value=chat]") and page.is_checked("[value=text]")
        page.click("#examples li:first-child button")
        page.click("#settings-open")
        page.fill("[name=max_tokens]", "24")
        page.fill("[name=temperature]", "0")
        page.keyboard.press("Escape")
        ask(page, page.input_value("#prompt"))
        text = page.locator("pre.continued").inner_text()
        assert text.startswith("def read_lines(path):\n    ")
        assert page.inner_text(".given") == "def read_lines(path):"
        assert "24 tokens" in page.inner_text("article.answer footer")
        assert page.locator("pre.continued .hljs-keyword").count()
        assert not page.said


def test_everything_is_reached_by_keyboard(browser, server):
    with opened(browser, server) as page:
        page.wait_for_selector(READY)
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Go to the prompt"
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "prompt"
        page.keyboard.type("line")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type(server.play("keys", "answered"))
        page.keyboard.press("Enter")
        page.wait_for_selector(ENDED)
        assert page.inner_text("article.question p").startswith("line\n")
        assert "The answer is complete" in page.text_content("#said")
        page.evaluate("document.activeElement.blur()")
        page.keyboard.press("/")
        assert page.evaluate("document.activeElement.id") == "prompt"
        assert page.input_value("#prompt") == ""
        reached = set()
        for _ in range(30):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
        assert {"new", "theme", "settings-open", "Copy", "Ask again", "send"} <= reached
        assert not page.said


@pytest.mark.parametrize("width", [320, 390, 820, 1440])
def test_nothing_is_wider_than_the_screen(browser, server, width):
    text = "Long: " + "x" * 300 + "\n\n```\n" + "y" * 300 + "\n```\n\n|" + "a|" * 30 + "\n|" + "-|" * 30 + "\n"
    with opened(browser, server, width, 844) as page:
        page.wait_for_selector(READY)
        ask(page, server.play("wide", text))
        for wide in ("html", "#page", "#scroll", "#figures"):
            over = f"(e => e.scrollWidth - e.clientWidth)(document.querySelector('{wide}'))"
            assert page.evaluate(over) <= 0, wide
        if width < 900:
            assert page.is_hidden("#history")
            page.click("[popovertarget=history]")
            page.wait_for_selector("#history")
            page.click("#conversations button")
            assert page.is_hidden("#history")


def test_a_print_has_the_whole_conversation_and_no_controls(browser, server):
    with opened(browser, server) as page:
        page.wait_for_selector(READY)
        ask(page, server.play("print", "line\n\n" * 200))
        page.emulate_media(media="print")
        assert page.is_hidden("#composer") and page.is_hidden("#history")
        assert page.locator("button:visible").count() == 0
        tall = page.evaluate("document.documentElement.scrollHeight")
        assert tall > 4000 and page.evaluate("document.getElementById('scroll').clientHeight") > 3800
        assert page.pdf().startswith(b"%PDF")


def test_a_gpu_and_its_share_of_bandwidth_are_shown(browser, server):
    """By the server's words, which no server without a GPU says."""

    def props(route):
        told = route.fetch().json() | {"gpu": "h200"}
        route.fulfill(json=told)

    def answer(route):
        timings = {"predicted_per_second": 1792.4, "predicted_n": 257, "mbu": 0.957, "kv_depth": 289}
        timings |= {"queue_ms": 0.5, "prompt_ms": 2.3, "itl_p50_us": 586.2, "itl_p99_us": 12345, "cache_n": 3}
        choice = {"index": 0, "delta": {"content": "yes"}, "finish_reason": "stop"}
        data = json.dumps({"choices": [choice], "timings": timings})
        route.fulfill(body=f"data: {data}\n\ndata: [DONE]\n\n", content_type="text/event-stream")

    with opened(browser, server) as page:
        page.route("**/props", props)
        page.route("**/v1/chat/completions", answer)
        page.reload()
        page.wait_for_selector(READY)
        assert "H200" in page.inner_text("#where")
        ask(page, "are you fast?")
        shown = {name: page.inner_text(f"#{name}") for name in ("rate-value", "mbu", "itl", "ttft")}
        assert shown == {"rate-value": "1,792", "mbu": "96 %", "itl": "586 µs / 12 ms", "ttft": "2.8 ms"}
        assert page.evaluate("document.getElementById('mbu-share').value") == pytest.approx(0.957)
        assert "MBU 96 %" in page.inner_text("article.answer footer")
        assert not page.said


def test_2000_tokens_a_second_are_shown_whole(browser, server, figure):
    """How long frames took is told; page_record.py keeps it."""
    from tests.server.page_record import frames

    found = frames(server, browser, 4000)
    assert found["frames"] > 20 and found["said"] == []
    assert found["letters"] == 4000
    ms = found["frame_ms"]
    figure("A15", f"at 2,000 tokens/s frames took {ms['p50']} ms, p99 {ms['p99']}, max {ms['max']}")
