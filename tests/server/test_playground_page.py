"""The page at / in the system's Chromium: its figures are the server's, and it says what is wrong."""

import json
import re

import pytest

from tests.lib.chromium import chromium, page_of, until
from tests.lib.fake_checkpoint import make_checkpoint
from tests.lib.served import served, wait_for

RATE = 1000  # tokens/s of the scripted engine
WAIT_MS = 30_000
WIDTHS = {"wide": (1440, 900), "tablet": (820, 1100), "phone": (390, 844)}
ANSWER = """One sentence, then code:

```python
def add(a, b):
    return a + b  # "quoted"
```

1. first

2. second

| a | b |
| --- | --- |
| 1 | <b>2</b> |

<script>alert(1)</script> [link](javascript:alert(1)) ![image](http://127.0.0.1:9/x.png)

The end, unfinished: **bold"""
SERIOUS = {"serious", "critical"}


@pytest.fixture(scope="module")
def roomy(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("roomy") / "model", max_context=1 << 14)


@pytest.fixture(scope="module")
def shown(tmp_path_factory, roomy):
    flags = ("--max-num-seqs", "2", "--reasoning-parser", "think", "--served-model-name", "demo")
    with served(tmp_path_factory.mktemp("shown"), roomy, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def browser():
    with chromium() as running:
        yield running


@pytest.fixture
def opened(browser, shown):
    """The page, ready; what it said on its console and whom it asked is looked at in the end."""
    width, height = WIDTHS["wide"]
    with page_of(browser, shown.url + "/", viewport={"width": width, "height": height}) as page:
        page.wait_for_selector("#state[data-state=ok]")
        yield page
        assert not page.said and not page.outside


def ask(page, prompt, ends=True):
    """Send a prompt; the bodies of the answers that come, once they are complete."""
    before = page.locator("article.answer").count()
    page.fill("#prompt", prompt)
    page.press("#prompt", "Enter")
    page.locator("article.answer").nth(before).wait_for(timeout=WAIT_MS)
    if ends:
        page.wait_for_selector("article.answer:not([aria-busy]):last-child", timeout=WAIT_MS)


def shown_number(page, selector):
    return float(re.match(r"[\d,.]+", page.inner_text(selector))[0].replace(",", ""))


def violations(page):
    """What axe finds that is serious."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [(v["id"], [node["target"] for node in v["nodes"]]) for v in found if v["impact"] in SERIOUS]


def test_its_figures_are_the_server_s(opened, shown, figure):
    prompt = shown.play("page_rate", "word " * 400, tokens_per_s=RATE, wait_s=0.2, stamps="page_rate_stamps")
    with opened.expect_response("**/v1/chat/completions") as asked:
        ask(opened, prompt)
    events = [json.loads(line[6:]) for line in asked.value.text().splitlines() if line.startswith("data: {")]
    (timings,) = [event["timings"] for event in events if "timings" in event]
    stamps = json.loads((shown.scripts / "page_rate_stamps").read_text())
    by_stamps = (len(stamps) - 1) / (stamps[-1] - stamps[0]) * 1e9
    measured = float(opened.get_attribute("#figures", "data-measured"))
    assert measured == pytest.approx(by_stamps, rel=0.05)  # what it showed until the end
    assert shown_number(opened, "#rate-value") == pytest.approx(by_stamps, rel=0.05)
    assert timings["predicted_per_second"] == pytest.approx(by_stamps, rel=0.05)
    assert shown_number(opened, "#tokens") == len(stamps) == timings["predicted_n"]
    assert shown_number(opened, "#kv") == timings["kv_depth"]
    first_token_ms = timings["queue_ms"] + timings["prompt_ms"]
    shown_in_s = opened.inner_text("#ttft").endswith(" s")
    unit, rounding = (1000, 0.01) if shown_in_s else (1, 1)
    assert shown_number(opened, "#ttft") == pytest.approx(first_token_ms / unit, abs=rounding)
    assert timings["prompt_ms"] > 150
    assert opened.inner_text("#mbu") == "–"  # nobody knows a peak here
    assert "scripted backend · CPU" in opened.inner_text("#where")
    assert opened.locator("#curve .line").get_attribute("d").count("L") > 5
    off = 100 * abs(measured / by_stamps - 1)
    figure("A15", f"the page's rate is {off:.1f} % off the engine's stamps")


def test_stop_ends_the_request(opened, shown):
    ask(opened, shown.play("page_endless", "word " * 2000, tokens_per_s=200), ends=False)
    until(opened, "document.getElementById('tokens').textContent !== '–'")
    wait_for(lambda: shown.metric("kog:num_requests_running") == 1)
    opened.keyboard.press("Escape")
    opened.wait_for_selector("article.answer:not([aria-busy])")
    wait_for(lambda: shown.metric("kog:num_requests_running") == 0)
    assert "stopped" in opened.inner_text("article.answer footer")
    assert opened.is_visible("#send") and not opened.is_visible("#stop")
    assert 0 < shown_number(opened, "#tokens") < 9000
    ask(opened, shown.play("page_after", "on we go"))
    assert opened.locator("article.answer .body").last.inner_text() == "on we go"


def test_markdown_is_shown_and_what_is_dangerous_is_text(opened, shown):
    ask(opened, shown.play("page_markdown", ANSWER, tokens_per_s=RATE))
    body = opened.locator("article.answer .body")
    assert opened.locator(".code .hljs-keyword").all_inner_texts() == ["def", "return"]
    assert opened.locator(".code code").inner_text().startswith("def add(a, b):\n    return a + b")
    assert opened.locator(".body ol").count() == 1 and opened.locator(".body ol li").count() == 2
    assert opened.locator(".body td").all_inner_texts() == ["1", "<b>2</b>"]
    assert opened.locator(".body script, .body img, .body [href^=javascript]").count() == 0
    assert "<script>alert(1)</script>" in body.inner_text()
    assert body.inner_text().endswith("The end, unfinished: **bold")
    assert opened.locator("article.answer .body .open").count() == 0


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser, shown, theme):
    width, height = WIDTHS["wide"]
    view = {"viewport": {"width": width, "height": height}, "color_scheme": theme}
    with page_of(browser, shown.url + "/", **view) as page:
        page.wait_for_selector("#state[data-state=ok]")
        assert not violations(page)
        ask(page, shown.play("page_axe", "<think>hm</think>" + ANSWER))
        assert page.inner_text(".thinking") and not violations(page)
        page.click("#settings-open")
        assert not violations(page)
        page.keyboard.press("Escape")
        page.evaluate("document.getElementById('prompt').labels[0].remove()")
        page.evaluate("document.getElementById('prompt').placeholder = ''")
        assert "label" in dict(violations(page))


CUT = """async (text) => {
  const { Blocks } = await import("./playground/blocks.js");
  const cut = (pieces) => {
    const blocks = new Blocks();
    return [...pieces.flatMap((piece) => blocks.add(piece)), ...blocks.end()];
  };
  return { whole: cut([text]), letters: cut([...text]) };
}"""


def test_blocks_are_cut_alike_however_the_text_comes(opened):
    """And each is closed as soon as nothing behind it can change it."""
    found = opened.evaluate(CUT, ANSWER)
    assert found["whole"] == found["letters"]
    starts = [block.strip().splitlines()[0] for block in found["whole"]]
    assert starts == [
        "One sentence, then code:",
        "```python",
        "1. first",
        "| a | b |",
        ANSWER.splitlines()[15],
        "The end, unfinished: **bold",
    ]
    lines = "".join(found["whole"]).splitlines()
    assert list(filter(None, lines)) == list(filter(None, ANSWER.splitlines()))
    fenced = "a\n```py\n\n# x\n\n~~~\n```\nb\n# c\nd"
    cut = opened.evaluate(CUT, fenced)
    assert cut["whole"] == cut["letters"] == ["a\n", "```py\n\n# x\n\n~~~\n```\n", "b\n", "# c\n", "d\n"]
