"""How long the page's frames take while text streams in, and the page's pictures.

    python -m tests.server.page_record [--tokens 8000] [--keep]
    python -m tests.server.page_record --pictures

A scripted engine plays Markdown at 2,000 tokens/s to the page in headless Chromium, which notes the times between its
frames and its tasks of 50 ms and more. `--keep` writes page-record.json beside this file; timings want a quiet machine.
`--pictures` takes those of docs/PLAYGROUND.md, in two themes.
"""

import argparse
import io
import json
import os
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kog_triton.json_file import in_lines
from kog_triton.metrics import percentile
from tests import ROOT
from tests.lib.chromium import chromium, page_of
from tests.lib.fake_checkpoint import make_checkpoint
from tests.lib.served import Served, served

RATE = 2000  # tokens/s of the scripted engine
RECORD = Path(__file__).with_name("page-record.json")
PICTURES = ROOT / "docs" / "playground"
WIDTH, HEIGHT = 1440, 900
ENDED = "article.answer:not([aria-busy]):last-child"
ANSWER = Path(__file__).with_name("answer.md")  # a byte is a token
QUESTION = "Write a Python function that merges two sorted lists, and a test for it."
WATCH = """() => {
  window.frames_ms = []; window.long_ms = [];
  let before = performance.now();
  const look = (now) => { window.frames_ms.push(now - before); before = now; requestAnimationFrame(look); };
  requestAnimationFrame(look);
  new PerformanceObserver((list) => window.long_ms.push(...list.getEntries().map((e) => e.duration)))
    .observe({ type: "longtask" });
}"""

KEPT = """() => JSON.parse(localStorage.getItem(Object.keys(localStorage)
  .find((name) => name.includes("conversation")))).messages.at(-1).content.length"""


@contextmanager
def scripted(folder: Path) -> Iterator[Served]:
    checkpoint = make_checkpoint(folder / "model", max_context=1 << 15)
    with served(folder / "server", checkpoint, "--served-model-name", "demo") as running:
        yield running


def ask(page: Any, words: str, prompt: str) -> None:
    """Play `words`, which go as the system message, so that the prompt is one of people's."""
    page.click("#settings-open")
    page.fill("[name=system]", words)
    page.keyboard.press("Escape")
    page.fill("#prompt", prompt)
    page.press("#prompt", "Enter")
    page.wait_for_selector(ENDED, timeout=120_000)


def frames(server: Served, browser: Any, tokens: int) -> dict[str, Any]:
    """ms between the page's frames while an answer of so many tokens comes."""
    text = ANSWER.read_text(encoding="utf-8")
    text = (text * (tokens // len(text) + 1))[:tokens]
    words = server.play("frames", text, tokens_per_s=RATE)
    with page_of(browser, server.url + "/", viewport={"width": 1440, "height": 900}) as page:
        page.wait_for_selector("#state[data-state=ok]")
        page.evaluate(WATCH)
        ask(page, words, QUESTION)
        gaps = page.evaluate("window.frames_ms")[1:]
        return {
            "tokens": tokens,
            "letters": page.evaluate(KEPT),
            "said": page.said,
            "tokens_per_s_shown": page.inner_text("#rate-value"),
            "frames": len(gaps),
            "frame_ms": {f"p{q}": round(percentile(gaps, q), 1) for q in (50, 95, 99)} | {"max": round(max(gaps), 1)},
            "frames_over_33_ms": sum(gap > 33.4 for gap in gaps),
            "tasks_of_50_ms": [round(ms) for ms in page.evaluate("window.long_ms")],
        }


def take_pictures(server: Served, browser: Any) -> None:
    from PIL import Image

    PICTURES.mkdir(exist_ok=True)
    words = server.play("picture", ANSWER.read_text(encoding="utf-8"), tokens_per_s=RATE, wait_s=0.02)
    for theme in ("light", "dark"):
        view = {"viewport": {"width": WIDTH, "height": HEIGHT}, "color_scheme": theme}
        with page_of(browser, server.url + "/", **view) as page:
            page.wait_for_selector("#state[data-state=ok]")
            ask(page, words, QUESTION)
            page.click("#settings-open")
            page.click("#settings-reset")
            page.keyboard.press("Escape")
            page.evaluate("document.activeElement.blur()")
            page.evaluate("document.getElementById('scroll').scrollTop = 0")
            page.wait_for_timeout(200)
            shown = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
            # As few colors as look the same: half of the bytes.
            few = shown.quantize(14, Image.Quantize.MAXCOVERAGE, kmeans=3, dither=Image.Dither.NONE)
            picture = few.convert("RGB")
            file = PICTURES / f"wide-{theme}.webp"
            picture.save(file, lossless=True, quality=100, method=6)
            print(f"{file.relative_to(ROOT)}: {file.stat().st_size >> 10} KB")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.server.page_record")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--keep", action="store_true", help=f"write {RECORD.name}")
    parser.add_argument("--pictures", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place, scripted(Path(place)) as server, chromium() as browser:
        if args.pictures:
            take_pictures(server, browser)
            return
        record = {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "platform": f"{platform.system()} {platform.machine()}",
            "browser": f"Chromium {browser.version}, headless",
            "cores": os.cpu_count(),
            "load_before": round(os.getloadavg()[0], 1),
            "tokens_per_s": RATE,
            "figures": frames(server, browser, args.tokens),
        }
    print(json.dumps(record, indent=2))
    if args.keep:
        RECORD.write_text(in_lines(record, 1) + "\n")


if __name__ == "__main__":
    main()
