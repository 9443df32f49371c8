"""The system's Chromium, headless, driven by playwright: nothing is downloaded, and who is asked is noted."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome-stable")


def find_chromium() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


@contextmanager
def chromium() -> Iterator[Any]:
    """playwright's Browser; the test is skipped where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api")
    path = find_chromium()
    if path is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def page_of(browser: Any, url: str, **context: Any) -> Iterator[Any]:
    """A page of its own profile, opened and ready, with `said`, what its console said, and `outside`, whom it asked."""
    with browser.new_context(**context) as profile:
        page = profile.new_page()
        page.said, page.outside = [], []
        page.on("console", lambda message: page.said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: page.said.append(f"error: {error}"))
        page.on("request", lambda request: _note(page, url, request.url))
        page.goto(url)
        yield page


def _note(page: Any, url: str, asked: str) -> None:
    if not asked.startswith((url, "data:", "blob:")):
        page.outside.append(asked)


def until(page: Any, expression: str, seconds: float = 30.0) -> None:
    """Wait until it is true there. playwright's own wait evaluates in the page, whose policy forbids that."""
    for _ in range(int(seconds * 50)):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(20)
    raise AssertionError(f"it never came: {expression}")
